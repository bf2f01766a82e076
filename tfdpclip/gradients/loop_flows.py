"""Follows the batch through the body of a loop.

The same analysis as outside (`dataflow.py`), with what is known of the loop's inputs to
begin with, and repeated until a further step changes nothing. A list of tensors has the
flow of its elements.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._docs import see
from tfdpclip.gradients import ops
from tfdpclip.gradients.dataflow import Dataflow, ancestors
from tfdpclip.gradients.errors import ExampleIsolationError
from tfdpclip.gradients.flow import DATA, Flow

_ROUNDS = 12


class BodyFlows(Dataflow):
    """The analysis of one step of a loop, true of every step. Make it with `of`."""

    def __init__(self, op: tf.Operation, flows: Dataflow):
        body = _tf_private.body_of_loop(op)
        self.graph = body
        self.op = op
        self._body = body
        self.batch_size = flows.batch_size
        self.ops = ancestors(body.outputs)
        self._inside = set(self.ops)
        self._handles: set = set()
        self._public: set = set()
        self._any_data = True
        self._invariant: dict = {}
        self.sources: list = []
        self._sparse: dict = {}
        self.converted: list = []
        self._flows: dict = {}
        self._begin = [_at_start(tensor, flows) for tensor in op.inputs]

    @classmethod
    def of(cls, op: tf.Operation, flows: Dataflow) -> BodyFlows | None:
        """The analysis, or None if it does not settle."""
        self = cls(op, flows)
        for _ in range(_ROUNDS):
            self._flows = {
                tensor.ref(): flow
                for tensor, flow in zip(self._body.inputs, self._begin, strict=True)
            }
            for inner in self.ops:
                self._visit(inner)
            after = [
                _either(flow, self[output])
                for flow, output in zip(self._begin, self._body.outputs, strict=True)
            ]
            if after == self._begin:
                return self
            self._begin = after
        return None

    def _visit(self, op: tf.Operation) -> None:
        if op.outputs and all(output.ref() in self._flows for output in op.outputs):
            return
        super()._visit(op)
        inputs = [self._flows.get(t.ref(), Flow()) for t in op.inputs]
        transfer = _TRANSFERS.get(op.type)
        if transfer is None or all(flow.kind != DATA for flow in inputs):
            return
        found = transfer(op, inputs)
        coupled = next((f.coupled for f in inputs if f.coupled is not None), None)
        for output in op.outputs if found is not None else ():
            before = self._flows[output.ref()]
            self._flows[output.ref()] = dataclasses.replace(
                found, coupled=coupled, trained=before.trained
            )

    def condition_kind(self) -> int:
        """What decides when the loop ends: PUBLIC, SIZE or DATA."""
        cond = _tf_private.condition_of_loop(self.op)
        ops = ancestors(cond.outputs)
        for tensor, flow in zip(cond.inputs, self._begin, strict=True):
            self.declare(tensor, flow)
        for op in ops:
            self._visit(op)
        return max(self[output].kind for output in cond.outputs)

    def refuse_mixing(self, flows: Dataflow) -> None:
        """Raises if what the loss reads of the loop combines the examples."""
        for flow, output in zip(self._begin, self.op.outputs, strict=False):
            mixed = flow.coupled
            if mixed is None or mixed.type in ("GatherV2", "Gather"):
                continue
            if any(op in flows for op in output.consumers()):
                raise ExampleIsolationError(
                    f"In the loop {self.op.name!r}, {mixed.name!r} (a {mixed.type}) "
                    "combines the examples of a batch, so every example reaches every "
                    "other's gradient. Reduce over the other axes only; normalise by "
                    "example (LayerNormalization), not by batch."
                    + see("mixed-examples")
                )

    def passes_unchanged(self, number: int) -> bool:
        """Whether the loop's variable of this number is the same at every step."""
        tensor = self._body.outputs[number]
        while tensor.op.type == "Identity":
            tensor = tensor.op.inputs[0]
        return tensor is self._body.inputs[number]

    def invariant(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor of the body is the same at every step."""
        key = tensor.ref()
        if key not in self._invariant:
            self._invariant[key] = self._is_invariant(tensor)
        return self._invariant[key]

    def _is_invariant(self, tensor):
        for number, start in enumerate(self._body.inputs):
            if start is tensor:
                return self.passes_unchanged(number)
        op = tensor.op
        if op.type == "Placeholder" or (
            _tf_private.is_stateful(op) and op.type != "ReadVariableOp"
        ):
            return False
        return all(map(self.invariant, op.inputs))


def _either(first: Flow, second: Flow) -> Flow:
    """What is true of a tensor that is one or the other."""
    coupled = first.coupled if first.coupled is not None else second.coupled
    trained = first.trained or second.trained
    if DATA not in (first.kind, second.kind):
        # A size that is counted on, too, is some size.
        base = first if first.kind >= second.kind else second
        if first.kind == second.kind and (first.power, first.dims) != (
            second.power,
            second.dims,
        ):
            base = dataclasses.replace(base, power=None, dims=None)
    elif first.kind != second.kind:
        base = first if first.kind == DATA else second
    elif first.axes != second.axes:
        base = Flow(DATA, None)
    elif (first.rows, first.minor) != (second.rows, second.minor):
        base = Flow(DATA, first.axes)
    else:
        base = first
    varying = first.varying or second.varying
    return dataclasses.replace(base, coupled=coupled, trained=trained, varying=varying)


def _at_start(tensor: tf.Tensor, flows: Dataflow) -> Flow:
    """The flow of a loop's input, or of its elements if that is a list."""
    flow = flows[tensor]
    if tensor.dtype != tf.variant:
        return flow
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    if tensor.op.type in ops.NEW_LISTS:
        return Flow()
    if tensor.op.type != "TensorListFromTensor":
        return dataclasses.replace(flow, axes=None) if flow.kind == DATA else flow
    return _first_removed(flows[tensor.op.inputs[0]])


def _first_removed(flow: Flow) -> Flow:
    """The flow of `tensor[i]`."""
    if flow.kind != DATA or flow.axes is None:
        return flow
    # If axis 0 counts examples, what is left has no axis that does.
    axes = tuple(axis - 1 for axis in flow.axes if axis > 0)
    return Flow(
        DATA, axes, flow.rows, flow.minor, coupled=flow.coupled, trained=flow.trained
    )


def _get_item(op, inputs):
    return inputs[0] if inputs[1].kind != DATA else Flow(DATA, None)


def _set_item(op, inputs):
    return _either(inputs[0], inputs[2])


def _push_back(op, inputs):
    return _either(inputs[0], inputs[1])


def _pop_back(op, inputs):
    return inputs[0]


def _gather(op, inputs):
    """One index along axis 0."""
    params, indices = inputs[0], inputs[1]
    axis = tf.get_static_value(op.inputs[2])
    one = op.inputs[1].shape.rank == 0 and op.get_attr("batch_dims") == 0
    if not one or axis is None or int(axis) != 0 or indices.kind == DATA:
        return None
    return _first_removed(params)


def _strided_slice(op, inputs):
    """Indices and slices of which only the places of indices matter: `x[:, t]`."""
    flow = inputs[0]
    specs, strides = op.inputs[1].shape[0], tf.get_static_value(op.inputs[3])
    if any(f.kind == DATA for f in inputs[1:]) or flow.axes is None:
        return None
    if specs is None or strides is None or op.get_attr("new_axis_mask"):
        return None
    if op.get_attr("ellipsis_mask"):
        specs -= 1  # What follows is whole: `x[t, ...]`.
        if op.get_attr("ellipsis_mask") != 1 << specs:
            return None
    removed = [i for i in range(specs) if op.get_attr("shrink_axis_mask") >> i & 1]
    if not removed:
        return None
    whole = op.get_attr("begin_mask") & op.get_attr("end_mask")
    for axis in flow.axes:
        cut = axis < specs and not (whole >> axis & 1 and strides[axis] == 1)
        if cut and axis not in removed:
            return None
    kept = [axis for axis in flow.axes if axis not in removed]
    axes = tuple(axis - sum(r < axis for r in removed) for axis in kept)
    return Flow(DATA, axes, flow.rows, flow.minor)


_TRANSFERS = {
    "TensorListGetItem": _get_item,
    "TensorListSetItem": _set_item,
    "TensorListPushBack": _push_back,
    "TensorListPopBack": _pop_back,
    "GatherV2": _gather,
    "StridedSlice": _strided_slice,
}
