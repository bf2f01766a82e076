"""Follows the batch through a graph and the functions that its ops run.

Functions are those of branches, calls and loops. The analysis of `graph_flows.py` runs
on the function's graph and starts from the flows of the op's inputs. For a loop, it
repeats the body until a further step changes no flow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.gradients.flows.flow import DATA, SIZE, Flow
from tfdpclip.gradients.flows.graph_flows import GraphFlows
from tfdpclip.gradients.flows.lists import merge_flows
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.graph.walks import ancestors, before_identities, find_function

_ROUNDS = 12
_STEPS = "how many steps the loop has for each example"


class Dataflow(GraphFlows):
    """The analysis of a graph, and of the functions that its ops run."""

    def analyse_further(self, outputs: list[tf.Tensor]) -> Dataflow:
        """The analysis of further tensors of the graph, with the same batch size."""
        flows = Dataflow.__new__(Dataflow)
        flows._start(outputs, (), self.batch_size, (), self.rows_per_example)
        flows._any_data = self._any_data
        flows._find_sparse_batches()
        for op in flows.ops:
            flows._visit(op)
        return flows

    def _inside_of(self, op: tf.Operation, inputs: list[Flow]) -> list[Flow] | None:
        if all(f.kind != DATA for f in inputs):
            return None
        if op.type in ops.LOOPS:
            return _read_loop(op, self)
        return _read(op, self) if op.type in _FUNCTIONS else None


class InnerFlows(Dataflow):
    """The analysis of the graph of a function that an op runs.

    Args:
      graph: the function's graph.
      inputs: the tensor outside for each input of `graph`.
      flows: the analysis of the graph that holds the op.
    """

    def __init__(self, graph: tf.Graph, inputs: Sequence[tf.Tensor], flows: Dataflow):
        self._start(
            list(graph.outputs), (), flows.batch_size, (), flows.rows_per_example
        )
        self._any_data = True
        self._begin = [flows[tensor] for tensor in inputs]

    def follow(self) -> None:
        """Computes the flows of all tensors of the function, in a single pass."""
        self._flows = {
            tensor.ref(): flow
            for tensor, flow in zip(self.graph.inputs, self._begin, strict=True)
        }
        for op in self.ops:
            self._visit(op)

    def _visit(self, op: tf.Operation) -> None:
        if not op.outputs or any(t.ref() not in self._flows for t in op.outputs):
            super()._visit(op)


def branch_graphs(op: tf.Operation) -> list[tf.Graph] | None:
    """The graphs of the functions of a branch or a call; None if a graph is unknown."""
    names = _FUNCTIONS[op.type](op)
    graphs = []
    for name in names:
        function = find_function(op.graph, name)
        graph = getattr(function, "graph", None)
        if graph is None or not _tf_private.is_function_graph(graph):
            return None
        arguments = len(op.inputs) - ops.FIRST_ARGUMENT[op.type]
        if len(graph.inputs) != arguments or len(graph.outputs) < len(op.outputs):
            return None
        graphs.append(graph)
    return graphs


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
    """The flows of the outputs of a branch or a call; None if unknown."""
    graphs = branch_graphs(op)
    if not graphs or not op.outputs:
        return None
    first = ops.FIRST_ARGUMENT[op.type]
    results: list[Flow] = []
    flows.inner[op] = []
    for graph in graphs:
        graph.outer_graph = op.graph
        inner = InnerFlows(graph, op.inputs[first:], flows)
        inner.follow()
        flows.inner[op].append(inner)
        output_flows = [inner[t] for t in graph.outputs[: len(op.outputs)]]
        pairs = zip(results or output_flows, output_flows, strict=True)
        results = [merge_flows(a, b) for a, b in pairs]
    choices = [flows[t] for t in op.inputs[:first]]
    results = [_chosen(op, flow, choices) for flow in results]
    if flows.batch_size is None and any(f.kind == SIZE for f in choices):
        believed = "how the number of examples decides about a branch"
        results = [
            dataclasses.replace(flow, obstacle=believed) if flow.kind == DATA else flow
            for flow in results
        ]
    return results


def _chosen(op: tf.Operation, flow: Flow, choices: list[Flow]) -> Flow:
    """The flow of a branch's output, given the flows of the inputs that choose."""
    for choice in choices:
        if choice.kind > flow.kind:
            flow = dataclasses.replace(flow, kind=choice.kind, power=None, dims=None)
        if choice.coupled is not None:
            return dataclasses.replace(flow, axes=None, coupled=choice.coupled)
        if choice.kind == DATA and choice.axes != ():
            # The examples choose the branch for the rows of all examples.
            flow = dataclasses.replace(flow, axes=None)
    return flow


class BodyFlows(InnerFlows):
    """The analysis of a loop's body, valid at every step; see `analyse`."""

    def __init__(self, op: tf.Operation, flows: Dataflow):
        self.op = op
        self._body = _tf_private.body_of_loop(op)
        super().__init__(self._body, list(op.inputs), flows)
        self._invariant: dict = {}

    @classmethod
    def analyse(cls, op: tf.Operation, flows: Dataflow) -> BodyFlows | None:
        """The analysis of a loop; None if the flows still change after `_ROUNDS`."""
        self = cls(op, flows)
        for _ in range(_ROUNDS):
            self.follow()
            after = [
                merge_flows(flow, self[output])
                for flow, output in zip(self._begin, self._body.outputs, strict=True)
            ]
            if after == self._begin:
                return self
            self._begin = after
        return None

    def results(self) -> list[Flow]:
        """The flows of the loop's outputs."""
        kind = self.condition_kind()
        counted = kind == SIZE and self.batch_size is None
        flows = []
        for number, flow in enumerate(self._begin[: len(self.op.outputs)]):
            if not self.passes_unchanged(number):
                if kind > flow.kind:
                    flow = dataclasses.replace(flow, kind=kind, power=None, dims=None)
                if kind == DATA:
                    # Data of several examples may decide about the number of steps.
                    flow = dataclasses.replace(flow, axes=None)
                if counted and flow.kind == DATA:
                    flow = dataclasses.replace(flow, obstacle=_STEPS)
            flows.append(flow)
        return flows

    def condition_kind(self) -> int:
        """The kind of the loop's condition: PUBLIC, SIZE or DATA."""
        cond = _tf_private.condition_of_loop(self.op)
        ops = ancestors(cond.outputs)
        for tensor, flow in zip(cond.inputs, self._begin, strict=True):
            self.declare(tensor, flow)
        for op in ops:
            self._visit(op)
        return max(self[output].kind for output in cond.outputs)

    def passes_unchanged(self, number: int) -> bool:
        """Whether the loop variable `number` keeps its value at every step."""
        after = before_identities(self._body.outputs[number])
        return after is self._body.inputs[number]

    def invariant(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor of the body has the same value at every step."""
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


def _read_loop(op: tf.Operation, flows: Dataflow) -> list[Flow] | None:
    inner = BodyFlows.analyse(op, flows) if op.inputs else None
    if inner is None:
        return None
    flows.inner[op] = [inner]
    return inner.results()
