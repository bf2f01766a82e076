"""Losses over a few sampled classes, written so that the graph shows what is whose.

`tf.nn.sampled_softmax_loss` and `tf.nn.nce_loss` give the labels of the batch to the op
that samples classes, look up the rows of labels and of sampled classes as one list, and
cut what they find in two. The sampled classes do not depend on the labels: those only
ask how likely each of them was to be sampled. So every class is asked for, and every
label finds its own answer; and what is cut in two is looked up in two. The numbers are
the same, to the bit.

A sampler that learns from the labels is left as it is: what it draws is a statistic of
the batches (`op_flows.py`).
"""

from __future__ import annotations

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.gradients import _copies, ops
from tfdpclip.gradients.dataflow import ancestors
from tfdpclip.gradients.known import known_value


def keep_candidates_apart(loss: tf.Tensor) -> None:
    """Changes the graph where sampled classes and the labels of a batch meet."""
    for op in ancestors([loss]):
        with loss.graph.as_default(), tf.control_dependencies(None):
            if op.type in ops.CANDIDATE_SAMPLERS and op.inputs[0].op.type != "Const":
                found = _sampled_for_all(op)
            elif op.type == "Slice":
                found = [_looked_up_apart(op)]
            else:
                continue
            for old, new in zip(op.outputs, found, strict=True):
                if new is not None:
                    new.set_shape(old.shape)
                    _replace(old, new)


def _replace(old: tf.Tensor, new: tf.Tensor) -> None:
    for consumer in old.consumers():
        for index, tensor in enumerate(consumer.inputs):
            if tensor is old:
                _tf_private.replace_input(consumer, index, new)


def _sampled_for_all(op: tf.Operation) -> list[tf.Tensor]:
    """The outputs of a sampler, made by one that is told of every class."""
    labels = op.inputs[0]
    every = "num_sampled" if op.type == "AllCandidateSampler" else "range_max"
    attributes = dict(op.node_def.attr)
    attributes.pop("_class", None)  # colocations, by name
    attributes.pop("_output_shapes", None)
    attributes["num_true"] = type(attributes["num_true"])(i=1)
    classes = tf.range(tf.constant(op.get_attr(every), labels.dtype))
    sampler = _tf_private.make_op(
        op.graph,
        op.type,
        [classes[:, tf.newaxis]],
        [t.dtype for t in op.outputs],
        name=f"{op.name}_of_all",
        attrs=attributes,
        op_def=op.op_def,
    )
    sampled, expected, of_sampled = sampler.outputs
    return [sampled, tf.gather(expected[:, 0], labels), of_sampled]


def _looked_up_apart(op: tf.Operation) -> tf.Tensor | None:
    """A piece of what was looked up for two lists of ids, looked up for one of them."""
    found, passed = op.inputs[0], []
    while found.op.type in ("Identity", "Cast"):
        passed.append(found.op)
        found = found.op.inputs[0]
    lookup = found.op
    if lookup.type not in ops.LOOKUPS or lookup.get_attr("batch_dims"):
        return None
    if lookup.type == "GatherV2" and tf.get_static_value(lookup.inputs[2]) != 0:
        return None
    joined = lookup.inputs[1].op
    if joined.type != "ConcatV2" or len(joined.inputs) != 3:
        return None
    first, second, _ = joined.inputs
    if first.shape.rank != 1 or second.shape.rank != 1 or not found.shape.rank:
        return None
    begin, size = (_bounds(t, first, found.shape.rank) for t in op.inputs[1:])
    if (
        begin is None
        or size is None
        or any(begin[1:])
        or any(n != -1 for n in size[1:])
    ):
        return None
    if (begin[0], size[0]) == (0, _LENGTH):
        ids = first
    elif (begin[0], size[0]) == (_LENGTH, -1):
        ids = second
    else:
        return None
    (new,) = _copies.emit_again(lookup, [lookup.inputs[0], ids, *lookup.inputs[2:]])
    for step in reversed(passed):
        (new,) = _copies.emit_again(step, [new])
    return new


_LENGTH = "length"


def _bounds(tensor: tf.Tensor, first: tf.Tensor, rank: int) -> list | None:
    """The entries of where a slice begins, or of its size; `_LENGTH` for `first`'s."""
    value = known_value(tensor)
    if value is None or len(value) != rank:
        return None
    parts = [None if part is None else int(part) for part in value]
    if parts[0] is None:
        number = tensor.op.inputs[0] if tensor.op.type == "Pack" else tensor
        parts[0] = _LENGTH if _is_length(number, first) else None
    elif parts[0] and parts[0] == first.shape[0]:
        parts[0] = _LENGTH
    return None if None in parts else parts


def _is_length(tensor: tf.Tensor, first: tf.Tensor) -> bool:
    """Whether a tensor is the shape of a vector, or the entry of that."""
    op = tensor.op
    if op.type == "StridedSlice" and op.get_attr("shrink_axis_mask") == 1:
        op = op.inputs[0].op
    return op.type == "Shape" and op.inputs[0] is first
