"""Refuses losses with entries that are not the loss of an example alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import tensorflow as tf

from tfdpclip._docs import TracedError, see
from tfdpclip.gradients.errors import ExampleIsolationError, LossStructureError
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.flows.flow import DATA, SIZE, Flow
from tfdpclip.gradients.graph import ops, origins
from tfdpclip.gradients.graph.slices import axes_cut
from tfdpclip.gradients.graph.walks import ancestors
from tfdpclip.gradients.loss import advice

# The names of the inputs that are seeds, of ops that draw random numbers.
_SEEDS = ("seed", "key", "counter")
# The names of the inputs that are the range or scale of the random numbers.
_RANGES = frozenset(
    """alpha counts lam logits maxval maxvals means minval minvals probs rate stddevs
    stdevs""".split()
)
BY_BATCH = (
    "The term {name!r} of the loss is no example's own, and is scaled with the number "
    "of examples in a batch: it would reveal that number without noise. Scale it by a "
    "constant. "
)


def check_sizes(tensor: tf.Tensor, flows: Dataflow) -> None:
    """Raises if an example's loss is computed with the number of examples.

    That number is not public: an example more or less would change all gradients.
    """
    for op in ancestors([tensor]):
        _refuse_sized_draw(op, flows)
        sizes = [
            t
            for t in op.inputs
            if flows[t].kind == SIZE
            and (t.dtype.is_floating or t.dtype == tf.bool)
            # Random numbers for a batch on a later axis do not have static shapes.
            and t.shape.is_fully_defined()
        ]
        chosen = _chosen_by(op)
        sizes += [op.inputs[i] for i in chosen if _is_counted(op.inputs[i], flows)]
        _refuse_cut(op, flows)
        if sizes and any(
            flows[t].kind == DATA and (t.dtype.is_floating or chosen)
            for t in (*op.inputs, *op.outputs)
        ):
            _refuse_size(sizes[0], op)


def _refuse_cut(op: tf.Operation, flows: Dataflow) -> None:
    """Raises if the number of examples decides which entries of an example are cut."""
    flow = flows[op.inputs[0]] if op.type in ops.CUTS else None
    if flow is None or flow.kind != DATA or flow.axes is None:
        return
    for number in ops.CUTS[op.type]:
        places = op.inputs[number]
        if not _is_counted(places, flows):
            continue
        dims = flows[places].dims
        if dims is None:
            _refuse_size(places, op)
        for power, axis in zip(dims, axes_cut(op, len(dims)), strict=True):
            if power != 0 and axis not in flow.axes:
                _refuse_size(places, op)


def check_sizes_in(operations: Iterable[tf.Operation], flows: Dataflow) -> None:
    """Raises if an op of a gradient computes with the number of examples.

    A length, or the divisor of a mean, is no such number: it does not change with the
    number of examples.
    """
    for op in operations:
        chosen = _chosen_by(op)
        real = [t for t in op.inputs if t.dtype.is_floating or t.dtype == tf.bool]
        real += [op.inputs[i] for i in chosen]
        # The loss only reshapes this Transpose, and a gradient reads it unchanged.
        turned = [t.op for t in op.inputs if t.op.type == "Transpose"]
        real += [before.inputs[i] for before in turned for i in _chosen_by(before)]
        size = next((t for t in real if _is_counted(t, flows)), None)
        if size is not None and any(
            flows[t].kind == DATA for t in (*op.inputs, *op.outputs)
        ):
            _refuse_size(size, op)


def _refuse_size(size: tf.Tensor, op: tf.Operation) -> NoReturn:
    raise ExampleIsolationError(
        "An example's loss, or its gradient, is computed with the number of examples "
        f"in the batch, {size.name!r}, at {op.name!r} (a {op.type}): adding or "
        "removing an example would change the gradients of the rest. Use the public "
        "expected_batch_size, or batches of a static size." + see("mixed-examples")
    )


def _is_counted(tensor: tf.Tensor, flows: Dataflow) -> bool:
    """Whether a number depends on the number of examples, and not only on a length."""
    flow = flows[tensor]
    powers = (flow.power,) if flow.dims is None else flow.dims
    return any(power != 0 for power in powers) and _is_sized(tensor, flows)


def _chosen_by(op: tf.Operation) -> tuple[int, ...]:
    """The inputs that choose what the op does: a branch, an axis, ...; no lengths."""
    if op.type in ops.BRANCHES:
        return (0,)
    if op.type == "Transpose" and keeps_order(op):
        return ()
    return tuple(i for i in ops.CHOOSERS.get(op.type, ()) if i < len(op.inputs))


def keeps_order(op: tf.Operation) -> bool:
    """Whether both possible orders of a Transpose give the same order of entries.

    `tf.vectorized_map` of a matrix product swaps the first two axes of the factor that
    has the examples, unless an axis has length 1, and then reshapes the result to the
    swapped shape. A Reshape reads the same numbers from both orders.
    """
    choice = op.inputs[1].op
    if choice.type not in ("Select", "SelectV2"):
        return False
    asked = choice.inputs[0].op
    shortest = asked.inputs[0].op if asked.type == "Equal" else None
    if shortest is None or shortest.type != "Minimum":
        return False
    if tf.get_static_value(asked.inputs[1]) != 1:
        return False
    axes = sorted(_axis_of_length(t, op.inputs[0]) for t in shortest.inputs)
    as_it_is, swapped = map(tf.get_static_value, choice.inputs[1:])
    if as_it_is is None or swapped is None or axes[0] < 0 or axes[1] != axes[0] + 1:
        return False
    order = list(range(op.inputs[0].shape.rank))
    if as_it_is.tolist() != order:
        return False
    order[axes[0]], order[axes[1]] = axes[1], axes[0]
    turned = op.outputs[0]
    return swapped.tolist() == order and all(
        reader.type == "Reshape" and turned is reader.inputs[0]
        for reader in turned.consumers()
    )


def _axis_of_length(length: tf.Tensor, tensor: tf.Tensor) -> int:
    """The axis of a tensor that a number is the length of; -1 if there is none."""
    cut = length.op
    if cut.type != "StridedSlice" or cut.inputs[0].op.type != "Shape":
        return -1
    place = tf.get_static_value(cut.inputs[1])
    if cut.inputs[0].op.inputs[0] is not tensor or place is None or place.size != 1:
        return -1
    masks = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    if [cut.get_attr(f"{mask}_mask") for mask in masks] != [0, 0, 0, 0, 1]:
        return -1
    rank = tensor.shape.rank
    return int(place[0]) if rank is not None and 0 <= place[0] < rank else -1


def _refuse_sized_draw(op: tf.Operation, flows: Dataflow) -> None:
    """Raises if the seed or range of random numbers is made of the number of examples.

    An example more would change all random numbers.
    """
    seeded = op.type.startswith(ops.SEEDED_DRAWS)
    if not seeded and op.type not in ops.RANDOM:
        return
    for argument, tensor in zip(op.op_def.input_arg, op.inputs, strict=True):
        if seeded and argument.name in _SEEDS and _is_sized(tensor, flows):
            raise ExampleIsolationError(
                f"The seed of random numbers, {tensor.name!r} at {op.name!r} (a "
                f"{op.type}), is computed with the number of examples in the batch: "
                "adding or removing an example would change the random numbers and the "
                "gradients of the rest. Take the seed from a variable or a constant."
                + see("mixed-examples")
            )
        if argument.name in _RANGES and _is_counted(tensor, flows):
            _refuse_size(tensor, op)


def _is_sized(tensor: tf.Tensor, flows: Dataflow) -> bool:
    """Whether a number is made of the number of examples.

    The state of a generator is not, although drawing moves the state by that number.
    """
    if flows[tensor].kind != SIZE:
        return False
    states = {op for op in flows.ops if op.type in ops.GENERATORS}
    return any(op.type in ops.SIZES for op in ancestors([tensor], stop=states))


def check_not_selected(tensor: tf.Tensor, flow: Flow) -> None:
    """Refuses results of all examples, of ops that have their own entry in `advice`."""
    if flow.coupled is not None and advice.has_own(flow.coupled):
        check_uncoupled(tensor, flow)


def check_uncoupled(tensor: tf.Tensor, flow: Flow) -> None:
    """Raises if an example's loss depends on further examples."""
    listed = None if flow.entry is None else flow.entry.source or tensor.op
    op = flow.coupled or listed
    if op is not None:
        raise ExampleIsolationError(
            f"The loss of one example depends on other examples: {op.name!r} "
            f"(a {op.type}) combines the examples of a batch before {tensor.name!r}. "
            + advice.of(op, tensor)
            + see("mixed-examples")
        )


def check_static_size(loss: tf.Tensor, flows: Dataflow) -> None:
    """Raises if the static length of a loss differs from the number of examples."""
    sizes = {source.shape[0] for source in flows.sources if flows[source].leads}
    if sizes and None not in sizes and loss.shape[0] not in (None, *sizes):
        raise LossStructureError(
            f"The loss {loss.name!r} has {loss.shape[0]} entries, but the data have "
            f"{' or '.join(str(size) for size in sorted(sizes))} examples: an entry is "
            "not an example. Reshape it to [batch, entries per example]."
        )


def refuse_float16(flows: Dataflow) -> None:
    """Raises if gradients are computed in float16."""
    for op in flows.ops:
        for output in op.outputs:
            if output.dtype == tf.float16 and flows[output].trained:
                raise TracedError(
                    "The model computes in float16 (mixed_float16), whose "
                    "gradients need loss scaling: whether a step is skipped and "
                    "how the scale moves are decided on un-noised data. Use "
                    "tf.keras.mixed_precision.set_global_policy('mixed_bfloat16') "
                    "or 'float32'." + see("float16")
                )


def assert_whole_examples(
    tensor: tf.Tensor, name: str, batch_size: tf.Tensor
) -> list[tf.Operation]:
    """An assertion, dropped by XLA, of equally many entries for every example."""
    size = tf.size(tensor)
    each = size // tf.maximum(batch_size, 1)
    assertion = tf.debugging.Assert(
        tf.equal(each * batch_size, size),
        [
            f"LossStructureError: the loss is not a sum over the examples of a batch: "
            f"its term `{name}` has a number of entries that is no multiple of "
            "the number of examples. " + advice.FIX.replace("'", "`"),
        ],
    )
    return [] if assertion is None else [assertion]


def refuse_collectives(flows: Dataflow) -> None:
    """Raises if a loss depends on results of further replicas or machines."""
    for op in flows.ops:
        kinds = [op.type, *(node.op for node in origins.nodes_within(op))]
        found = next((k for k in kinds if k.startswith(ops.COLLECTIVES)), None)
        if found is not None:
            raise ExampleIsolationError(
                f"The loss depends on {op.name!r}, in which replicas exchange results "
                f"({found}): the examples of a replica would reach the gradients of "
                "examples of all replicas. Combine nothing of the replicas in the "
                "model (for synchronised batch normalisation, write "
                "dpc.keras.convert_batchnorm(model))." + see("several-replicas")
            )
