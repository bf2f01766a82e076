"""Follows the batch through a graph: which axis of which tensor counts examples.

The analysis is static and reads only op types, attributes and static shapes. It answers
three questions about every tensor the loss depends on:

* does its value depend on the data, only on the batch's size, or on neither;
* which axes count examples, and how many rows one example has on axis 0;
* has a reduction over examples made it a statistic of the batch?

It never guesses in the unsafe direction: what it does not know it calls unknown, and
what it says about rows is checked again at run time (`isolation.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import tensorflow as tf

from tfdpclip.gradients.sizes import size_flow
from tfdpclip.gradients.transfers import DATA, PUBLIC, SIZE, Flow, transfer

_ITERATORS = frozenset("IteratorGetNext IteratorGetNextSync OptionalGetValue".split())
_NO_GRADIENT = frozenset("StopGradient PreventGradient".split())
_SIZES = frozenset("Shape ShapeN Size Rank".split())
_SHAPERS = frozenset(
    """Fill BroadcastTo Tile RandomUniform RandomUniformInt RandomStandardNormal
    TruncatedNormal StatelessRandomUniform StatelessRandomUniformV2
    StatelessRandomNormal StatelessRandomNormalV2 StatelessTruncatedNormalV2
    StatefulUniform StatefulStandardNormalV2 Range LinSpace Empty EmptyTensorList
    TensorListReserve""".split()
)


class Dataflow:
    """The analysis of everything that `outputs` depend on.

    Args:
      outputs: tensors of one graph.
      handles: the graph's tensors that stand for the variables of interest.
      batch_size: the static batch size, if it is known better than from `outputs`.
    """

    def __init__(
        self,
        outputs: Iterable[tf.Tensor],
        handles: Iterable[tf.Tensor],
        batch_size: int | None = None,
    ):
        outputs = list(outputs)
        self.graph = outputs[0].graph
        self.ops = _ancestors(outputs)
        self._inside = set(self.ops)
        self._handles = {handle.ref() for handle in handles}
        self._flows: dict = {}
        self.batch_size = batch_size or _static_batch(outputs[0], self.ops)
        self._leaf_kinds = _classify_leaves(self.graph, self.ops, self.batch_size)
        self.sources: list[tf.Tensor] = []
        # Floating tensors through which no gradient reaches the sources.
        self.converted: list[tf.Tensor] = []
        for op in self.ops:
            self._visit(op)

    def __getitem__(self, tensor: tf.Tensor) -> Flow:
        flow = self._flows.get(tensor.ref())
        if flow is not None:
            return flow
        # A tensor built after the analysis: analyse what it adds.
        for op in _ancestors([tensor], stop=self._inside):
            self._inside.add(op)
            self._visit(op)
        return self._flows[tensor.ref()]

    def __contains__(self, op: tf.Operation) -> bool:
        return op in self._inside

    def _visit(self, op: tf.Operation) -> None:
        inputs = [self._flows.get(t.ref(), Flow()) for t in op.inputs]
        trained = any(f.trained for f in inputs)
        coupled = next((f.coupled for f in inputs if f.coupled is not None), None)
        leaf = self._leaf_kinds.get(op)
        for output in op.outputs:
            if leaf is not None:
                flow = self._leaf(output, leaf)
            elif op.type in _SIZES:
                flow = size_flow(op, output, inputs)
            elif all(f.kind == PUBLIC for f in inputs):
                batched = trained and self._repeats_for_batch(op, output)
                batched = batched or self._fills_a_batch(op, output)
                flow = Flow(DATA, (0,), 1) if batched else Flow()
            elif all(f.kind != DATA for f in inputs):
                flow = self._shaped(op, output, inputs)
            else:
                flow = transfer(op, output, inputs, self.batch_size)
            if op.type not in _SIZES:
                passes = op.type not in _NO_GRADIENT and (
                    output.dtype.is_floating
                    or output.dtype.is_complex
                    or output.dtype in (tf.resource, tf.variant)
                )
                # A single example has no other to be combined with.
                mixed = None if self.batch_size == 1 else flow.coupled or coupled
                flow = dataclasses.replace(
                    flow,
                    coupled=mixed,
                    trained=(trained and passes) or output.ref() in self._handles,
                )
            self._flows[output.ref()] = flow
            if flow.leads and output.dtype.is_floating and not flow.trained:
                if leaf is None and _starts_gradients(op):
                    self.converted.append(output)

    def _leaf(self, output: tf.Tensor, is_data: bool) -> Flow:
        if not is_data or output.dtype in (tf.resource, tf.variant):
            return Flow(DATA if is_data and output.dtype == tf.variant else PUBLIC)
        if output.shape.rank is None:
            return Flow(DATA, None)
        self.sources.append(output)
        return Flow(DATA, (0,), 1) if output.shape.rank else Flow(DATA, ())

    def _repeats_for_batch(self, op: tf.Operation, output: tf.Tensor) -> bool:
        """Whether a parameter is repeated once for each of a static batch's examples.

        A guess from the shapes; whether it is right is tested when the step runs.
        """
        if op.type not in ("Tile", "BroadcastTo") or (self.batch_size or 0) < 2:
            return False
        before, after = op.inputs[0].shape, output.shape
        if before.rank is None or not after.rank or after[0] != self.batch_size:
            return False
        return before.rank < after.rank or before[0] == 1

    def _fills_a_batch(self, op: tf.Operation, output: tf.Tensor) -> bool:
        """Whether one value is repeated, as in an initial state, for a static batch."""
        shape = output.shape
        return bool(op.type == "Fill" and shape.rank and shape.rank > 1) and (
            self.batch_size is not None and shape[0] == self.batch_size
        )

    def _shaped(self, op: tf.Operation, output: tf.Tensor, inputs: list[Flow]) -> Flow:
        """A tensor that depends on the batch's size only: a number, or a new batch."""
        if op.type not in _SHAPERS or output.shape.rank is None:
            flow = size_flow(op, output, inputs)
            return flow if output.shape.rank is not None else Flow(SIZE, None)
        if output.shape.rank and output.shape[0] in (None, self.batch_size):
            return Flow(DATA, (0,), 1)
        return Flow(SIZE)


def _starts_gradients(op: tf.Operation) -> bool:
    """Whether gradients at the op's output do not pass on to floating inputs."""
    if op.type in ("Sign", "Floor", "Ceil", "Rint", "Round", "StopGradient"):
        return True
    return bool(op.inputs) and not any(
        t.dtype.is_floating for t in op.inputs if t.op.type != "Const"
    )


def _ancestors(outputs, stop=frozenset()) -> list[tf.Operation]:
    """Ops that `outputs` depend on, in an order in which inputs come first."""
    order, seen = [], set(stop)
    stack = [(t.op, False) for t in outputs]
    while stack:
        op, done = stack.pop()
        if done:
            order.append(op)
            continue
        if op in seen:
            continue
        seen.add(op)
        stack.append((op, True))
        stack.extend((t.op, False) for t in op.inputs if t.op not in seen)
    return order


def _static_batch(output: tf.Tensor, ops: list[tf.Operation]) -> int | None:
    """The static batch size, or None.

    Of a loss with a batch axis, it is that axis's size; of a scalar, the leading size
    of the data that was passed in, or, without any, of what was reduced first.
    """
    if output.shape.rank:
        return output.shape[0]
    for op in ops:
        shape = op.outputs[0].shape if op.outputs else tf.TensorShape(None)
        passed = op.type in _ITERATORS or (
            op.type == "Placeholder" and op.outputs[0].dtype != tf.resource
        )
        if passed and shape.rank:
            return shape[0]
    for op in reversed(ops):
        if op.type in ("Sum", "Mean") and op.inputs[0].shape.rank:
            return op.inputs[0].shape[0]
    return None


def _classify_leaves(graph, ops, batch_size) -> dict[tf.Operation, bool]:
    """Which ops without inputs bring data. Values: True for data, False for constants.

    A tensor that was captured from eager code, and a constant, have one value for good.
    They are the data all the same where somebody closes over a whole batch; that is
    told by their leading dimension.
    """
    eager = {
        internal.op
        for external, internal in getattr(graph, "captures", ())
        if isinstance(external, tf.__internal__.EagerTensor)
    }

    def batch_shaped(op):
        shape = op.outputs[0].shape
        return bool(shape.rank) and batch_size is not None and shape[0] == batch_size

    leaves, constants, any_data = {}, [], False
    for op in ops:
        if op.type == "Placeholder":
            resource = op.outputs[0].dtype == tf.resource
            is_data = not resource and (op not in eager or batch_shaped(op))
            leaves[op] = is_data
            any_data = any_data or is_data
        elif op.type in _ITERATORS:
            leaves[op] = any_data = True
        elif op.type == "Const":
            constants.append(op)
        elif not op.inputs and op.outputs:
            leaves[op] = op.type in ("ReadVariableOp", "PyFunc", "EagerPyFunc")
    for op in constants:
        uniform = batch_shaped(op) and op.outputs[0].shape.rank > 1 and _is_uniform(op)
        leaves[op] = batch_shaped(op) and (not any_data or uniform)
    return leaves


def _is_uniform(op: tf.Operation) -> bool:
    """Whether a constant repeats one value, as initial states do."""
    value = tf.get_static_value(op.outputs[0])
    return value is not None and value.size > 0 and bool((value == value.flat[0]).all())
