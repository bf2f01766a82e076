"""Follows the batch through the body of a loop.

The same analysis as outside (`dataflow.py`), with what is known of the loop's inputs to
begin with, and repeated until a further step changes nothing.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._docs import see
from tfdpclip.gradients import ops, places
from tfdpclip.gradients.dataflow import INSIDE, Dataflow, ancestors, same_number
from tfdpclip.gradients.errors import ExampleIsolationError
from tfdpclip.gradients.flow import DATA, Flow
from tfdpclip.gradients.inner_flows import InnerFlows
from tfdpclip.gradients.lists import either

_ROUNDS = 12


class BodyFlows(InnerFlows):
    """The analysis of one step of a loop, true of every step. Make it with `of`."""

    def __init__(self, op: tf.Operation, flows: Dataflow):
        self.op = op
        self._body = _tf_private.body_of_loop(op)
        super().__init__(self._body, list(op.inputs), flows)
        self._invariant: dict = {}
        # Places that are others at the next step of this loop.
        self._passing: set[str] = set()

    @classmethod
    def of(cls, op: tf.Operation, flows: Dataflow) -> BodyFlows | None:
        """The analysis, or None if it does not settle."""
        self = cls(op, flows)
        for _ in range(_ROUNDS):
            self.follow()
            after = [
                either(flow, self._a_step_later(output))
                for flow, output in zip(self._begin, self._body.outputs, strict=True)
            ]
            if after == self._begin:
                return self
            self._begin = after
        return None

    def _a_step_later(self, tensor: tf.Tensor) -> Flow:
        """What a tensor is for the next step."""
        flow = self[tensor]
        if flow.example not in self._passing:
            return flow
        return dataclasses.replace(flow, example=places.EARLIER)

    def results(self) -> list[Flow]:
        """The flows of what the loop gives."""
        kind = self.condition_kind()
        # Other places have a name inside only.
        named = {None, places.EACH, *(self._around[t].example for t in self.op.inputs)}
        found = []
        for number, flow in enumerate(self._begin[: len(self.op.outputs)]):
            known = isinstance(flow.example, int) or flow.example in named
            if not self.passes_unchanged(number):
                # How many steps there are may be for others to decide.
                known = known and kind != DATA
                if kind > flow.kind:
                    flow = dataclasses.replace(flow, kind=kind, power=None, dims=None)
            if flow.kind == DATA and not known:
                flow = dataclasses.replace(flow, axes=None, example=None)
            found.append(flow)
        return found

    def place_of(self, index: int | tf.Tensor) -> int | str:
        """The name of a place in the batch; see `places.py`."""
        if isinstance(index, int) or self.invariant(same_number(index)):
            return super().place_of(index)
        place = places.STEP + same_number(index).name
        self._passing.add(place)
        return place

    def changes(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor may be another at each step of this loop, or one around."""
        return not self.invariant(tensor) or super().changes(tensor)

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
            if mixed is None:
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


def _read(op: tf.Operation, flows: Dataflow) -> list[Flow] | None:
    inner = BodyFlows.of(op, flows) if op.inputs else None
    return None if inner is None else inner.results()


INSIDE.update(dict.fromkeys(ops.LOOPS, _read))
