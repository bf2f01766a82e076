"""Follows the batch through the functions that an op runs: branches, calls and loops.

The analysis of `dataflow.py` runs on the function's graph and starts from the flows of
the op's inputs. For a loop, it repeats the body until a further step changes no flow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._docs import see
from tfdpclip.gradients.errors import ExampleIsolationError
from tfdpclip.gradients.flows import places
from tfdpclip.gradients.flows.dataflow import INSIDE, Dataflow, same_number
from tfdpclip.gradients.flows.flow import DATA, SIZE, Flow
from tfdpclip.gradients.flows.lists import merge_flows
from tfdpclip.gradients.flows.sizes import rows_of_length
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.graph.fused import read_call
from tfdpclip.gradients.graph.known import before_casts, counts_up, static_number
from tfdpclip.gradients.graph.walks import ancestors, before_identities, find_function

_ROUNDS = 12
_STEPS = "how many steps the loop has for each example"


class InnerFlows(Dataflow):
    """The analysis of the graph of a function that an op runs.

    Args:
      graph: the function's graph.
      given: the tensor outside for each input of `graph`.
      flows: the analysis of the graph that holds the op.
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

    def _flow_by_inputs(
        self, op: tf.Operation, output: tf.Tensor, inputs: list[Flow]
    ) -> Flow:
        if _picks_examples(op, inputs) and op.inputs[1].shape.rank != 0:
            if self.changes(op.inputs[1]):
                # Rows that change at each step may, after all steps, be all rows.
                return Flow(DATA, None)
        flow = super()._flow_by_inputs(op, output, inputs)
        stepped = any(map(_of_a_step, inputs)) and not op.type.startswith("TensorList")
        if stepped and _of_a_step(flow):
            if any(
                f.kind != DATA and t.dtype != tf.resource and self.changes(t)
                for t, f in zip(op.inputs, inputs, strict=op.type != "IdentityN")
            ):
                return dataclasses.replace(flow, obstacle=places.OPS_BY_PLACE)
        return flow

    def place_of(self, index: int | tf.Tensor) -> int | str:
        """The name of a place in the batch, by the index tensor outside if possible."""
        if isinstance(index, int):
            return super().place_of(index)
        index = self._counted(index)
        outer = self._given.get(index.ref())
        if outer is None:
            return super().place_of(index)
        value = tf.get_static_value(outer)
        return self._around.place_of(outer if value is None else int(value))

    def _counted(self, number: tf.Tensor) -> tf.Tensor:
        """The index i for a number that is element i of the list 0, 1, 2, ..."""
        number = same_number(number)
        while _reads_list(number.op) and self.lists_numbers(number.op.inputs[0]):
            number = same_number(number.op.inputs[1])
        return number

    def lists_numbers(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is the list 0, 1, 2, ... from outside at every step."""
        outer = self._given.get(tensor.ref())
        if outer is None or self.changes(tensor):
            return False
        return _lists_numbers(outer) or (
            isinstance(self._around, InnerFlows) and self._around.lists_numbers(outer)
        )

    def changes(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor may change from step to step of a surrounding loop."""
        outer = self._given.get(tensor.ref())
        if outer is not None:
            return isinstance(self._around, InnerFlows) and self._around.changes(outer)
        return any(map(self.changes, tensor.op.inputs))


def _picks_examples(op: tf.Operation, inputs: list[Flow]) -> bool:
    """Whether a `GatherV2` reads an axis that may count examples, by public numbers."""
    if op.type != "GatherV2" or not inputs[0].axes or inputs[1].kind == DATA:
        return False
    axis, rank = static_number(op.inputs[2]), op.inputs[0].shape.rank
    if axis is None or (axis < 0 and rank is None):
        return True
    return (axis if axis >= 0 else axis + rank) in inputs[0].axes


def _reads_list(op: tf.Operation) -> bool:
    return op.type == "TensorListGetItem"


def _lists_numbers(tensor: tf.Tensor) -> bool:
    """Whether a list has the elements 0, 1, 2, ..., as `tf.map_fn` makes of a range."""
    if tensor.op.type != "TensorListFromTensor":
        return False
    return counts_up(before_casts(tensor.op.inputs[0]))


def _read_number(op: tf.Operation, flows: Dataflow) -> list[Flow] | None:
    """The flow of element i of the list 0, 1, 2, ...: the flow of the number i."""
    listed = isinstance(flows, InnerFlows) and flows.lists_numbers(op.inputs[0])
    return [flows[op.inputs[1]]] if listed else None


INSIDE["TensorListGetItem"] = _read_number


def _of_a_step(flow: Flow) -> bool:
    """Whether a tensor belongs to the example of a loop's current step."""
    return isinstance(flow.example, str) and flow.example.startswith(places.STEP)


def branch_graphs(op: tf.Operation) -> list[tf.Graph] | None:
    """The graphs of the functions of a branch or a call; None if a graph is unknown."""
    names = _FUNCTIONS[op.type](op)
    found = []
    for name in names:
        function = find_function(op.graph, name)
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
    """The flows of the outputs of a branch or a call; None if unknown."""
    if op.type in ops.FUNCTION_CALLS and read_call(op) is not None:
        return None
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
        found = [inner[t] for t in graph.outputs[: len(op.outputs)]]
        pairs = zip(results or found, found, strict=True)
        results = [merge_flows(a, b) for a, b in pairs]
    choices = [flows[t] for t in op.inputs[:first]]
    # The remaining places are named by tensors inside the functions.
    named = {None, places.EACH, *(flows[t].example for t in op.inputs)}
    results = [_chosen(op, flow, choices) for flow in results]
    believed = _believed(op, flows, choices)
    if believed:
        results = [
            dataclasses.replace(flow, obstacle=believed) if flow.kind == DATA else flow
            for flow in results
        ]
    return [
        flow
        if isinstance(flow.example, int) or flow.example in named
        else dataclasses.replace(flow, axes=None, example=None)
        for flow in results
    ]


def _believed(op: tf.Operation, flows: Dataflow, choices: list[Flow]) -> str:
    """The unproven claim about the choice of a branch; "" if there is none.

    The choice may depend on the number of examples, or on the step of a loop over the
    examples.
    """
    first = ops.FIRST_ARGUMENT[op.type]
    if flows.batch_size is None and any(f.kind == SIZE for f in choices):
        return "how the number of examples decides about a branch"
    if isinstance(flows, InnerFlows) and any(map(flows.changes, op.inputs[:first])):
        given = any(_of_a_step(flows[t]) for t in op.inputs[first:])
        # A branch may also take the example of the step out of the batch by itself.
        if given or any(map(_takes_of_a_step, flows.inner[op])):
            return places.OPS_BY_PLACE
    return ""


def _takes_of_a_step(flows: Dataflow) -> bool:
    """Whether a function has a tensor of the example of a surrounding loop's step."""
    if any(_of_a_step(flows[t]) for op in flows.ops for t in op.outputs):
        return True
    return any(_takes_of_a_step(i) for found in flows.inner.values() for i in found)


def _chosen(op: tf.Operation, flow: Flow, choices: list[Flow]) -> Flow:
    """The flow of a branch's output, given the flows of the inputs that choose."""
    for choice in choices:
        if choice.kind > flow.kind:
            flow = dataclasses.replace(flow, kind=choice.kind, power=None, dims=None)
        if choice.coupled is not None:
            return dataclasses.replace(flow, axes=None, coupled=choice.coupled)
        if choice.kind != DATA or (choice.axes == () and choice.example is None):
            continue
        if choice.example is None or choice.example != flow.example:
            # A single example chooses the branch for the rows of all examples.
            decides = isinstance(choice.example, int) and bool(flow.axes)
            coupled = flow.coupled or (op if decides else None)
            flow = dataclasses.replace(flow, axes=None, example=None, coupled=coupled)
    return flow


INSIDE.update(dict.fromkeys(_FUNCTIONS, _read))


class BodyFlows(InnerFlows):
    """The analysis of a loop's body, valid at every step; see `analyse`."""

    def __init__(self, op: tf.Operation, flows: Dataflow):
        self.op = op
        self._body = _tf_private.body_of_loop(op)
        super().__init__(self._body, list(op.inputs), flows)
        self._invariant: dict = {}
        # Names of the places that change at the next step of this loop.
        self._passing: set[str] = set()

    @classmethod
    def analyse(cls, op: tf.Operation, flows: Dataflow) -> BodyFlows | None:
        """The analysis of a loop; None if the flows still change after `_ROUNDS`."""
        self = cls(op, flows)
        for _ in range(_ROUNDS):
            self.follow()
            after = [
                merge_flows(flow, self._a_step_later(output))
                for flow, output in zip(self._begin, self._body.outputs, strict=True)
            ]
            if after == self._begin:
                return self
            self._begin = after
        return None

    def _a_step_later(self, tensor: tf.Tensor) -> Flow:
        """The flow of a tensor as the next step reads the tensor."""
        flow = self[tensor]
        if flow.example not in self._passing:
            return flow
        return dataclasses.replace(flow, example=places.EARLIER)

    def results(self) -> list[Flow]:
        """The flows of the loop's outputs."""
        kind = self.condition_kind()
        counted = kind == SIZE and self.batch_size is None
        by_place = self._steps_change() and (
            any(map(_of_a_step, self._begin)) or _takes_of_a_step(self)
        )
        # The remaining places are named by tensors inside the body.
        named = {None, places.EACH, *(self._around[t].example for t in self.op.inputs)}
        found = []
        for number, flow in enumerate(self._begin[: len(self.op.outputs)]):
            known = isinstance(flow.example, int) or flow.example in named
            if not self.passes_unchanged(number):
                # Data of several examples may decide about the number of steps.
                known = known and kind != DATA
                if kind > flow.kind:
                    flow = dataclasses.replace(flow, kind=kind, power=None, dims=None)
                if counted and flow.kind == DATA and flow.example != places.EACH:
                    flow = dataclasses.replace(flow, obstacle=_STEPS)
                if by_place and flow.kind == DATA:
                    flow = dataclasses.replace(flow, obstacle=places.OPS_BY_PLACE)
            if flow.kind == DATA and not known:
                flow = dataclasses.replace(flow, axes=None, example=None)
            elif flow.example == places.EACH and not self._runs_for_each():
                flow = dataclasses.replace(flow, obstacle=_STEPS)
            found.append(flow)
        return found

    def _steps_change(self) -> bool:
        """Whether the number of steps may change at each step of an outer loop."""
        around = self._around
        if not isinstance(around, InnerFlows):
            return False
        cond = _tf_private.condition_of_loop(self.op)
        outputs, inputs, read = list(cond.outputs), cond.inputs, set()
        while True:
            used = {t.ref() for op in ancestors(outputs) for t in op.outputs}
            found = {i for i, t in enumerate(inputs) if t.ref() in used} - read
            if not found:
                break
            read |= found
            outputs = [self._body.outputs[i] for i in read]
            inputs = self._body.inputs
        deciding = [self.op.inputs[i] for i in read]
        return any(around[t].kind != DATA and around.changes(t) for t in deciding)

    def _runs_for_each(self) -> bool:
        """Whether the loop's steps are `i = 0, 1, ..., B - 1`, by `i < B`."""
        cond = _tf_private.condition_of_loop(self.op)
        pending, found = [cond.outputs[0]], False
        while pending:
            op = pending.pop().op
            if op.type in ("Identity", "LogicalAnd"):
                pending += op.inputs
            elif op.type == "Less":
                found = found or self._counts(cond, *op.inputs)
                if not self._counts(cond, *op.inputs):
                    return False
            else:
                return False
        return found

    def _counts(self, cond: tf.Graph, place: tf.Tensor, count: tf.Tensor) -> bool:
        """Whether `place` counts from 0 by 1, and `count` is the number of examples."""
        inputs = {t.ref(): number for number, t in enumerate(cond.inputs)}
        number, limit = (inputs.get(same_number(t).ref()) for t in (place, count))
        if number is None:
            return False
        start = static_number(self.op.inputs[number])
        after = same_number(self._body.outputs[number]).op
        if start != 0 or after.type not in ("AddV2", "Add"):
            return False
        if same_number(after.inputs[0]) is not self._body.inputs[number]:
            return False
        if static_number(after.inputs[1]) != 1:
            return False
        if limit is not None:
            if not self.passes_unchanged(limit):
                return False
            count = self.op.inputs[limit]
        value = static_number(count)
        if value is not None:
            return value == self.batch_size
        like = rows_of_length(count, self._around.__getitem__)
        return like is not None and like.rows == 1

    def place_of(self, index: int | tf.Tensor) -> int | str:
        """The name of a place in the batch; see `places.py`."""
        if isinstance(index, int) or self.invariant(self._counted(index)):
            return super().place_of(index)
        place = places.STEP + self._counted(index).name
        self._passing.add(place)
        return place

    def changes(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor may change from step to step of this or an outer loop."""
        return not self.invariant(tensor) or super().changes(tensor)

    def condition_kind(self) -> int:
        """The kind of the loop's condition: PUBLIC, SIZE or DATA."""
        cond = _tf_private.condition_of_loop(self.op)
        ops = ancestors(cond.outputs)
        for tensor, flow in zip(cond.inputs, self._begin, strict=True):
            self.declare(tensor, flow)
        for op in ops:
            self._visit(op)
        return max(self[output].kind for output in cond.outputs)

    def refuse_mixing(self, flows: Dataflow) -> None:
        """Raises an error if a loop output behind the loss combines the examples."""
        for flow, output in zip(self._begin, self.op.outputs, strict=False):
            mixed = flow.coupled
            if mixed is None:
                continue
            if any(op in flows for op in output.consumers()):
                raise ExampleIsolationError(
                    f"In the loop {self.op.name!r}, {mixed.name!r} (a {mixed.type}) "
                    "combines the examples of a batch, so each example changes the "
                    "gradients of all examples. Do not reduce over the batch axis; "
                    "normalise by example (LayerNormalization), not by batch."
                    + see("mixed-examples")
                )

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


INSIDE.update(dict.fromkeys(ops.LOOPS, _read_loop))
