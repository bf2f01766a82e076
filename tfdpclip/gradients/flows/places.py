"""Flows of single examples that an op takes out of a batch by their place.

Examples are taken out by `x[0]`, by `tf.unstack(x)`, or by a loop that reads element i
of a list of the batch in step i. A tensor computed from a single example belongs to
that example, regardless of the ops in between. An op that reads tensors of two
examples, or of an example and the whole batch, combines examples. An op that stacks the
tensors of all examples, in the order of the examples, makes a batch.

`Flow.example` is the place of the example: a number, or a text. `AT` + the name of the
index tensor is a place with a fixed index; `STEP` + the name is a place with an index
that changes at each step of a loop. `EARLIER` is a place of an earlier step. `EACH`
describes a list: element i belongs to example i.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfdpclip.gradients.flows.flow import DATA, SIZE, Flow
from tfdpclip.gradients.flows.slices import CUT, PLACE, read_slice
from tfdpclip.gradients.graph.known import known_value

#: The unproven claim about a static batch with a separate op for each example.
OPS_BY_PLACE = "whether the ops treat every example alike"
AT, STEP, EARLIER, EACH = "at ", "step ", "earlier", "each"
_JOINS = frozenset("Pack ConcatV2".split())
_SHAPED = frozenset("Fill BroadcastTo Tile Reshape".split())


class TakenExample(NamedTuple):
    """An example that an op takes out of a batch: its place, and the axes left."""

    place: int | tf.Tensor
    axes: tuple[int, ...]


def find_taken_example(
    op: tf.Operation, output: tf.Tensor, inputs: list[Flow], size
) -> TakenExample | None:
    """The example that an op takes out of a batch; None if the op takes none."""
    rule = _TAKES.get(op.type)
    if rule is None or output.shape.rank is None:
        return None
    flow = inputs[-1] if op.type == "Split" else inputs[0]
    if flow.kind != DATA or flow.axes is None or len(flow.axes) != 1:
        return None
    if flow.rows != 1:
        return None
    return rule(op, output, inputs, flow.axes[0], size)


def single_example_flow(
    op: tf.Operation, output: tf.Tensor, inputs: list[Flow], batch_size: int | None
) -> Flow | None:
    """The flow of an op's output if an input belongs to a single example.

    Returns:
      None if no input belongs to a single example, or if the op's own rule decides.
    """
    data = [f for f in inputs if f.kind == DATA]
    found = [f for f in data if not f.made]
    all_made, found = not found, found or data
    places = {f.example for f in found if f.example is not None}
    if not places or any(t.dtype == tf.variant for t in op.inputs):
        return None
    if op.type in _JOINS and len(places) > 1:
        return _joined(op, output, inputs, batch_size)
    if any(f.axes is None for f in found):
        return Flow(DATA, None)
    if all_made and len(places) > 1:
        return Flow(DATA, None)
    fixed = [p for p in places if isinstance(p, int) or p.startswith(AT)]
    sized = op.type in _SHAPED and any(
        f.kind == SIZE and (f.dims is None or any(f.dims)) for f in inputs
    )
    if any(f.axes for f in data) or sized:
        # An example at a fixed place enters the rows of all examples. An example of a
        # loop's step may, by a mask, enter only its own row.
        return Flow(DATA, None, coupled=op) if fixed else None
    if len(places) == 1:
        return Flow(DATA, (), example=next(iter(places)))
    return Flow(DATA, None, coupled=op if _differ(places) else None)


def _differ(places: set) -> bool:
    """Whether two of the places are certainly places of different examples."""
    numbers = [p for p in places if isinstance(p, int)]
    steps = [p for p in places if isinstance(p, str) and p.startswith(STEP)]
    return (
        len(numbers) > 1
        or EARLIER in places
        or bool(steps and len(steps) < len(places))
    )


def merge_places(first: Flow, second: Flow) -> int | str | None:
    """The place of a tensor that is either the first or the second tensor."""
    if first.kind != DATA or second.kind != DATA:
        return second.example if first.kind != DATA else first.example
    if first.example == second.example:
        return first.example
    if None in (first.example, second.example) or EACH in (
        first.example,
        second.example,
    ):
        return None
    return EARLIER


def _joined(op, output, inputs, batch_size) -> Flow:
    """The flow of an op that stacks single examples; a batch if all are in order."""
    parts = inputs if op.type == "Pack" else inputs[:-1]
    if op.type == "Pack":
        axis = op.get_attr("axis") % output.shape.rank
        single = True
    else:
        found = tf.get_static_value(op.inputs[-1])
        axis = None if found is None else int(found) % output.shape.rank
        single = axis is not None and all(t.shape[axis] == 1 for t in op.inputs[:-1])
    in_order = [f.example for f in parts] == list(range(len(parts)))
    if axis is None or not single or not in_order or len(parts) != batch_size:
        return Flow(DATA, None)
    # A different op may have computed the tensor of each example.
    return Flow(DATA, (axis,), 1, obstacle=OPS_BY_PLACE)


def _of_slice(op, output, inputs, axis, size) -> TakenExample | None:
    parts = read_slice(op)
    if parts is None or any(f.kind == DATA for f in inputs[1:]):
        return None
    part = parts[axis]
    if part.what == PLACE:
        return TakenExample(_index(op.inputs[1], part.spec), ())
    if part.what == CUT and part.one is not None:
        return TakenExample(part.one, ())
    return None


def _index(begin: tf.Tensor, spec: int) -> int | tf.Tensor:
    value = known_value(begin)
    if value is not None and value[spec] is not None:
        return int(value[spec])
    if begin.op.type == "Pack":
        return begin.op.inputs[spec]
    return begin


def _of_gather(op, output, inputs, axis, size) -> TakenExample | None:
    along, indices = tf.get_static_value(op.inputs[2]), op.inputs[1]
    if along is None or op.get_attr("batch_dims") or inputs[1].kind == DATA:
        return None
    if int(along) % op.inputs[0].shape.rank != axis or indices.shape.rank not in (0, 1):
        return None
    if indices.shape.num_elements() != 1:
        return None
    value = tf.get_static_value(indices)
    return TakenExample(indices if value is None else int(value.reshape(-1)[0]), ())


def _of_box(op, output, inputs, axis, size) -> TakenExample | None:
    begin = known_value(op.inputs[1])
    if output.shape[axis] != 1 or begin is None or begin[axis] is None:
        return None
    return TakenExample(int(begin[axis]), ())


def _of_unpack(op, output, inputs, axis, size) -> TakenExample | None:
    if op.get_attr("axis") % op.inputs[0].shape.rank != axis:
        return None
    return TakenExample(output.value_index, ())


def _of_split(op, output, inputs, axis, size) -> TakenExample | None:
    along = tf.get_static_value(op.inputs[0])
    if along is None or int(along) % output.shape.rank != axis:
        return None
    alone = size is not None and op.get_attr("num_split") == size
    return TakenExample(output.value_index, ()) if alone else None


_TAKES = {
    "StridedSlice": _of_slice,
    "GatherV2": _of_gather,
    "Slice": _of_box,
    "Unpack": _of_unpack,
    "Split": _of_split,
}
