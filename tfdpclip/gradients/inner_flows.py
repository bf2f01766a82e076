"""Follows the batch through the functions that an op runs: branches, and calls.

The same analysis as outside (`dataflow.py`), with what is known of the op's inputs to
begin with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.gradients import calls, ops, places
from tfdpclip.gradients.dataflow import INSIDE, Dataflow, same_number
from tfdpclip.gradients.flow import DATA, Flow
from tfdpclip.gradients.fused import read_call
from tfdpclip.gradients.lists import either


class InnerFlows(Dataflow):
    """The analysis of the graph of a function that an op runs.

    Args:
      graph: the function's graph.
      given: what the op gives for each of the graph's inputs.
      flows: the analysis around the op.
    """

    def __init__(self, graph: tf.Graph, given: Sequence[tf.Tensor], flows: Dataflow):
        self._start(
            list(graph.outputs), (), flows.batch_size, (), flows.rows_per_example
        )
        self._any_data = True
        self._around = flows
        self._given = {
            inner.ref(): outer for inner, outer in zip(graph.inputs, given, strict=True)
        }
        self._begin = [flows[tensor] for tensor in given]

    def follow(self) -> None:
        """Goes through the function once."""
        self._flows = {
            tensor.ref(): flow
            for tensor, flow in zip(self.graph.inputs, self._begin, strict=True)
        }
        for op in self.ops:
            self._visit(op)

    def _visit(self, op: tf.Operation) -> None:
        if not op.outputs or any(t.ref() not in self._flows for t in op.outputs):
            super()._visit(op)

    def _flow_by_inputs(
        self, op: tf.Operation, output: tf.Tensor, inputs: list[Flow]
    ) -> Flow:
        if op.type == "GatherV2" and inputs[0].axes and inputs[1].kind != DATA:
            if op.inputs[1].shape.rank != 0 and self.changes(op.inputs[1]):
                # Other rows at each step may be all of them, one after the other.
                return Flow(DATA, None)
        return super()._flow_by_inputs(op, output, inputs)

    def place_of(self, index: int | tf.Tensor) -> int | str:
        """The name of a place in the batch; around, if it is given from there."""
        if isinstance(index, int):
            return super().place_of(index)
        outer = self._given.get(same_number(index).ref())
        if outer is None:
            return super().place_of(index)
        value = tf.get_static_value(outer)
        return self._around.place_of(outer if value is None else int(value))

    def changes(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor may be another at each step of a loop around."""
        outer = self._given.get(tensor.ref())
        if outer is not None:
            return isinstance(self._around, InnerFlows) and self._around.changes(outer)
        return any(map(self.changes, tensor.op.inputs))


def _graphs(op: tf.Operation) -> list[tf.Graph] | None:
    """The graphs of the functions that an op chooses from; None if one is unknown."""
    names = _FUNCTIONS[op.type](op)
    found = []
    for name in names:
        function = calls.find_function(op.graph, name)
        graph = getattr(function, "graph", None)
        if graph is None or not _tf_private.is_function_graph(graph):
            return None
        given = len(op.inputs) - ops.FIRST_ARGUMENT[op.type]
        if len(graph.inputs) != given or len(graph.outputs) < len(op.outputs):
            return None
        found.append(graph)
    return found


_FUNCTIONS = {
    **dict.fromkeys(
        ("If", "StatelessIf"),
        lambda op: [op.get_attr(n).name for n in ("then_branch", "else_branch")],
    ),
    **dict.fromkeys(
        ("Case", "StatelessCase"), lambda op: [f.name for f in op.get_attr("branches")]
    ),
    **dict.fromkeys(ops.FUNCTION_CALLS, lambda op: [op.get_attr("f").name]),
}


def _read(op: tf.Operation, flows: Dataflow) -> list[Flow] | None:
    """The flows of what a branch or a call gives."""
    if op.type in ops.FUNCTION_CALLS and read_call(op) is not None:
        return None
    graphs = _graphs(op)
    if not graphs or not op.outputs:
        return None
    first = ops.FIRST_ARGUMENT[op.type]
    results: list[Flow] = []
    for graph in graphs:
        graph.outer_graph = op.graph
        inner = InnerFlows(graph, op.inputs[first:], flows)
        inner.follow()
        found = [inner[t] for t in graph.outputs[: len(op.outputs)]]
        pairs = zip(results or found, found, strict=True)
        results = [either(a, b) for a, b in pairs]
    choices = [flows[t] for t in op.inputs[:first]]
    # Other places have a name inside only.
    named = {None, places.EACH, *(flows[t].example for t in op.inputs)}
    return [
        _chosen(op, flow, choices)
        if isinstance(flow.example, int) or flow.example in named
        else dataclasses.replace(flow, axes=None, example=None)
        for flow in results
    ]


def _chosen(op: tf.Operation, flow: Flow, choices: list[Flow]) -> Flow:
    """The flow of what was chosen by something."""
    for choice in choices:
        if choice.kind > flow.kind:
            flow = dataclasses.replace(flow, kind=choice.kind, power=None, dims=None)
        if choice.coupled is not None:
            return dataclasses.replace(flow, axes=None, coupled=choice.coupled)
        if choice.kind != DATA or (choice.axes == () and choice.example is None):
            continue
        if choice.example is None or choice.example != flow.example:
            # An example that decides for all.
            decides = isinstance(choice.example, int) and bool(flow.axes)
            coupled = flow.coupled or (op if decides else None)
            flow = dataclasses.replace(flow, axes=None, example=None, coupled=coupled)
    return flow


INSIDE.update(dict.fromkeys(_FUNCTIONS, _read))
