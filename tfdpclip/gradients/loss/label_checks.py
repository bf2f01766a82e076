"""Losses that look at the labels of the whole batch, changed to look at each label.

**Hinge losses.** Keras turns labels 0 and 1 into -1 and 1 if the batch has no further
label: a record with a label of 5 would change the gradients of all records. Here every
label is converted alone: 0 becomes -1, and every further label stays. The result is the
same for every batch of labels 0 and 1, and for every batch without a 0.

**Sampled classes.** `tf.nn.sampled_softmax_loss` and `tf.nn.nce_loss` give the labels
of the batch to the op that samples classes, look up the rows of labels and of sampled
classes as one list, and cut the result in two. The sampled classes do not depend on the
labels; the op only returns how likely each label was to be sampled. So here the sampler
is asked for every class, and every label takes its entry; and the two lists are looked
up separately. The numbers are the same, to the bit. A sampler that learns from the
labels is not changed: its classes are a statistic of the batches (`op_flows.py`).
"""

from __future__ import annotations

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.gradients.errors import LossStructureError
from tfdpclip.gradients.graph import op_copies, ops
from tfdpclip.gradients.graph.known import static_value
from tfdpclip.gradients.graph.origins import definition_of
from tfdpclip.gradients.graph.walks import ancestors

_LENGTH = "length"


def convert_each_label(loss: tf.Tensor) -> None:
    """Changes the graph where a loss looks at the labels of the whole batch.

    Raises:
      LossStructureError: if the loss makes numbers of texts, which fails in a step.
    """
    _keep_candidates_apart(loss)
    for op in ancestors([loss]):
        if op.type == "Cast" and op.inputs[0].dtype == tf.string:
            raise LossStructureError(
                f"The loss reads texts as numbers: {op.name!r} casts texts to "
                f"{op.outputs[0].dtype.name}, and TensorFlow cannot. Give the number "
                "of each label's class: classes, y = np.unique(y, "
                "return_inverse=True); or make numbers of texts by a "
                "tf.keras.layers.StringLookup."
            )
        labels = _converted(op)
        if labels is None:
            continue
        with loss.graph.as_default(), tf.control_dependencies(None):
            own = tf.where(tf.equal(labels, 0), -tf.ones_like(labels), labels)
        _replace(op.outputs[0], own)


def _converted(op: tf.Operation) -> tf.Tensor | None:
    """The labels, if `op` is Keras's conversion of labels; else None."""
    if op.type not in ("If", "StatelessIf") or len(op.inputs) != 2:
        return None
    predicate, labels = op.inputs
    if len(op.outputs) != 1 or op.outputs[0].dtype != labels.dtype:
        return None
    if predicate.op.type != "All" or predicate.op.inputs[0].op.type != "LogicalOr":
        return None
    either = predicate.op.inputs[0].op.inputs
    if any(not _compares(t.op, labels, value) for value, t in enumerate(either)):
        return None
    then, otherwise = (
        definition_of(op.graph, op.get_attr(branch).name)
        for branch in ("then_branch", "else_branch")
    )
    if then is None or otherwise is None:
        return None
    if [node.op for node in otherwise.node_def] != ["Identity"]:
        return None
    kinds = ["Const", "Mul", "Const", "Sub", "Identity"]
    if [node.op for node in then.node_def] != kinds:
        return None
    numbers = [
        tf.make_ndarray(node.attr["value"].tensor).tolist()
        for node in then.node_def
        if node.op == "Const"
    ]
    return labels if numbers == [2.0, 1.0] else None


def _compares(op: tf.Operation, labels: tf.Tensor, value: int) -> bool:
    if op.type != "Equal" or op.inputs[0] is not labels:
        return False
    found = tf.get_static_value(op.inputs[1])
    return found is not None and found.size == 1 and float(found) == value


def _keep_candidates_apart(loss: tf.Tensor) -> None:
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
                    _replace(old, new)


def _replace(old: tf.Tensor, new: tf.Tensor) -> None:
    new.set_shape(old.shape)
    for consumer in old.consumers():
        for index, tensor in enumerate(consumer.inputs):
            if tensor is old:
                _tf_private.replace_input(consumer, index, new)


def _sampled_for_all(op: tf.Operation) -> list[tf.Tensor]:
    """The outputs of a sampler that is given every class in the place of the labels."""
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
    """A slice of a lookup of two joined lists of ids, as a lookup of a single list."""
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
    (new,) = op_copies.copy_op(lookup, [lookup.inputs[0], ids, *lookup.inputs[2:]])
    for step in reversed(passed):
        (new,) = op_copies.copy_op(step, [new])
    return new


def _bounds(tensor: tf.Tensor, first: tf.Tensor, rank: int) -> list | None:
    """The `begin` or `size` entries of a slice; `_LENGTH` where that is `first`'s."""
    value = static_value(tensor)
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
