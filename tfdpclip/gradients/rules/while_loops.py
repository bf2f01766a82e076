"""Per-example gradients of variables that are used inside a loop.

A recurrence (`tf.while_loop`, `tf.scan`, a Keras RNN) meets its variables inside the
body of a `While` op, once a step. Here the loop is made to record, during the forward
and backward passes of the step, the inputs of these ops and the gradients at their
outputs. All steps together are then a single op on a longer batch, with the rows of
all steps next to each other, and the ordinary rules apply to that op.

Recording adds values that the loop carries, as TensorFlow itself does whenever it
differentiates a loop, and changes nothing else. So norms and sums come from the passes
of the loss, with the same random numbers in the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._devices import has_form_of_xla
from tfdpclip._object_notes import notes_of
from tfdpclip.gradients.flows.dataflow import BodyFlows, Dataflow
from tfdpclip.gradients.flows.flow import DATA, Flow
from tfdpclip.gradients.graph import op_copies, ops
from tfdpclip.gradients.graph.trips import count_trips, counts_steps
from tfdpclip.gradients.rules.rule_table import has_rule
from tfdpclip.gradients.rules.step_lists import empty_list, rows_first, stacked
from tfdpclip.gradients.rules.uses import Use, follow

_SUMS = ("AddV2", "Add", "BiasAdd")


def expand(
    uses: Sequence[list[Use]], flows: Dataflow
) -> tuple[list[list[Use]], dict[tf.Operation, tf.Tensor]]:
    """Replaces uses by a loop with the uses inside the loop.

    A variable keeps its use by the loop, which no rule covers, if a use inside the loop
    cannot be recorded.

    Args:
      uses: the uses of each variable.
      flows: the analysis of the losses.

    Returns:
      The uses, and for the op of each new use the tensor in the place of its output:
      the op's rule needs the gradient of the loss at that tensor.
    """
    loops: dict[tf.Operation, _Loop | None] = {}
    for use in (use for found in uses for use in found):
        if use.op.type in ops.LOOPS and use.op not in loops:
            loops[use.op] = _Loop.read(use.op, flows)
    insides = [_inside(found, loops) for found in uses]
    for loop in filter(None, loops.values()):
        pairs = [pair for inside in insides for pair in inside or ()]
        loop.record([use.op for use, of in pairs if of is loop])
    expanded, stand_ins = [], {}
    for found, inside in zip(uses, insides, strict=True):
        new = []
        for use, loop in inside or ():
            if loop is not None:
                use, stand_in = loop.recorded(use)
                stand_ins[use.op] = stand_in
            new.append(use)
        expanded.append(found if inside is None else new)
    return expanded, stand_ins


def _inside(found: list[Use], loops) -> list[tuple[Use, _Loop | None]] | None:
    """The uses, and the uses inside of loops; None if any use has no rule."""
    inside: list = []
    starts: dict = {}
    for use in found:
        if use.op.type not in ops.LOOPS:
            if not has_rule(use):
                return None
            inside.append((use, None))
            continue
        if use.op not in starts:
            starts[use.op] = []
            inside.append((use.op, starts[use.op]))
        starts[use.op].append(use)
    if not starts:
        return None
    result: list = []
    for first, second in inside:
        if second is None:
            result.append((first, None))
            continue
        loop = loops[first]
        uses = None if loop is None else loop.find(second)
        if uses is None:
            return None
        result.extend((use, loop) for use in uses)
    return result


@dataclasses.dataclass
class _Records:
    """The recordings of a loop, kept with the loop's op for further losses.

    Attributes:
      wholes: by the name of an op of the body, the op on all steps, and the tensor in
        the place of its output.
      lists: by the body's tensor, the number of the loop's output with its values.
      inputs: by the body's tensor, its values at all steps, `[N * T, ...]`.
      copies: by the body's tensor, its copy before the loop.
      stand_ins: by the body's tensor, the tensor with its gradients of all steps.
    """

    wholes: dict = dataclasses.field(default_factory=dict)
    lists: dict = dataclasses.field(default_factory=dict)
    inputs: dict = dataclasses.field(default_factory=dict)
    copies: dict = dataclasses.field(default_factory=dict)
    stand_ins: dict = dataclasses.field(default_factory=dict)


class _Loop:
    """A `While` op with a body that can be recorded."""

    def __init__(self, op: tf.Operation, flows: Dataflow, inner: BodyFlows):
        self.op = op
        self._flows, self._inner = flows, inner
        self._body, self._cond = (
            _tf_private.body_of_loop(op),
            _tf_private.condition_of_loop(op),
        )
        self._steps = count_trips(op, self._cond, self._body)
        records = notes_of(op.graph).records
        self._records: _Records = records.setdefault(op, _Records())
        self._lists: dict = self._records.lists
        self._starts: list[tf.Tensor] = []

    @classmethod
    def read(cls, op: tf.Operation, flows: Dataflow) -> _Loop | None:
        """The loop, or None if it cannot be recorded."""
        if not counts_steps(op):
            return None
        inner = BodyFlows.analyse(op, flows)
        if inner is None or inner.condition_kind() == DATA:
            return None  # The number of steps would depend on the examples.
        loop = cls(op, flows, inner)
        # The lists of XLA always have the length of the largest number of steps.
        return None if has_form_of_xla() and loop._steps is None else loop

    def find(self, starts: list[Use]) -> list[Use] | None:
        """The uses, in the body, of a variable that enters by `starts`; or None."""
        paths: dict = {}
        for use in starts:
            if not self._inner.passes_unchanged(use.index):
                return None
            if self._read(use.index):
                return None  # The loop's output gives the variable a gradient, too.
            paths[self._body.inputs[use.index].ref()] = use.path
        found = follow(paths, starts[0].variable_shape, self._inner)
        for number, output in enumerate(self._body.outputs):
            if output.ref() in paths and not self._harmless(number):
                return None  # A later step starts from the variable.
        return found if all(map(self._recordable, found)) else None

    def _harmless(self, number: int) -> bool:
        """Whether this output of the body, which a variable reaches, has no effect.

        The output is the variable itself, or a list that TensorFlow keeps for a
        gradient of the loop that is no part of the losses.
        """
        if self._inner.passes_unchanged(number):
            return True
        after, before = self._body.outputs[number], self._body.inputs[number]
        kept = after.op.type == "TensorListPushBack"
        return kept and before.consumers() == [after.op] and not self._read(number)

    def _read(self, number: int) -> bool:
        """Whether the losses depend on this output of the loop."""
        return any(op in self._flows for op in self.op.outputs[number].consumers())

    def _recordable(self, use: Use) -> bool:
        op, inner = use.op, self._inner
        output = op.outputs[0]
        if not has_rule(use) or not self._by_rows(output):
            return False
        if not all(map(self._fits_a_list, (output, *op.inputs))):
            return False
        for tensor in op.inputs:
            if inner[tensor].kind == DATA:
                free = op.type in ops.CONTRACTIONS
                aligned = free or tensor.shape.rank == output.shape.rank
                if not aligned or not self._by_rows(tensor):
                    return False
            elif not inner.invariant(tensor):
                return False
        return True

    def _by_rows(self, tensor: tf.Tensor) -> bool:
        """Whether axis 0 counts examples, with an example's rows next to each other."""
        flow = self._inner[tensor]
        return flow.leads and not flow.minor

    def record(self, ops: list[tf.Operation]) -> None:
        """Records the inputs of ops of the body, and the gradients at their outputs."""
        records, graph = self._records, self.op.graph
        new = [op for op in dict.fromkeys(ops) if op.name not in records.wholes]
        if not new:
            return
        inputs, stand_ins = {}, {}
        for op in new:
            inputs[op] = list(op.inputs)
            end = self._end_of_sums(op.outputs[0])
            if end.ref() not in records.stand_ins:
                records.stand_ins[end.ref()] = self._stand_in(end)
            stand_ins[op] = records.stand_ins[end.ref()]
            for tensor in inputs[op]:
                if self._inner[tensor].kind == DATA and tensor.ref() not in self._lists:
                    self._lists[tensor.ref()] = self._list_of(tensor)
        self._rewrite()
        for op in new:
            given = [
                self._at_all_steps(t)
                if self._inner[t].kind == DATA
                else self._before(t)
                for t in inputs[op]
            ]
            with graph.as_default():
                whole = op_copies.copy_op(op, given, op.name)[0].op
            records.wholes[op.name] = (whole, stand_ins[op])

    def _end_of_sums(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum that a tensor of the body enters, with the gradient of the tensor.

        Most cells add up the products with the input and with the state, and the bias,
        so that the gradients of one sum serve all of them.
        """
        while True:
            users = [op for op in tensor.consumers() if op.type != "TensorListPushBack"]
            if len(users) != 1 or users[0].type not in _SUMS:
                return tensor
            (whole,) = users[0].outputs
            if not all(self._adds_up(part, whole) for part in users[0].inputs):
                return tensor
            tensor = whole

    def _adds_up(self, part: tf.Tensor, whole: tf.Tensor) -> bool:
        """Whether a part of a sum has all rows of the sum, or is the same in each."""
        if part.shape.rank is None or whole.shape.rank is None:
            return False
        flow = self._inner[part]
        if flow.kind != DATA:
            return part.shape.rank < whole.shape.rank
        same = part.shape.as_list() == whole.shape.as_list()
        return same and flow.leads and flow.layout == self._inner[whole].layout

    def recorded(self, use: Use) -> tuple[Use, tf.Tensor]:
        """The use by the op on all steps, and the tensor in the place of its output."""
        whole, stand_in = self._records.wholes[use.op.name]
        flow = self._over_time(use.op.outputs[0])
        for tensor in (whole.outputs[0], stand_in):
            self._flows.declare(tensor, flow)
        for outer, inner in zip(whole.inputs, use.op.inputs, strict=True):
            if self._inner[inner].kind == DATA:
                self._flows.declare(outer, self._over_time(inner))
        param = whole.inputs[use.index]
        return Use(whole, use.index, param, use.path, use.variable_shape), stand_in

    def _over_time(self, tensor: tf.Tensor) -> Flow:
        flow = self._inner[tensor]
        known = flow.axes == (0,) and flow.rows and self._steps
        return Flow(
            DATA, (0,), flow.rows * self._steps if known else None, trained=flow.trained
        )

    def _before(self, tensor: tf.Tensor) -> tf.Tensor:
        """A tensor with the same value at every step, computed before the loop."""
        for number, start in enumerate(self._body.inputs):
            if start is tensor:
                return self.op.inputs[number]
        copies = self._records.copies
        if tensor.ref() not in copies:
            inputs = [self._before(t) for t in tensor.op.inputs]
            with self.op.graph.as_default(), tf.control_dependencies(None):
                made = op_copies.copy_op(tensor.op, inputs, tensor.op.name)
            for inner, outer in zip(tensor.op.outputs, made, strict=True):
                copies[inner.ref()] = outer
        return copies[tensor.ref()]

    def _list_of(self, tensor: tf.Tensor) -> int:
        """Makes the loop keep the values of a tensor of its body.

        Returns:
          The number of the list of these values among the loop's outputs.
        """
        with self.op.graph.as_default(), tf.control_dependencies(None):
            start = empty_list(tensor, self.op, self._length(tensor))
        with self._body.as_default(), tf.control_dependencies(None):
            longer = tf.raw_ops.TensorListPushBack(
                input_handle=self._body.capture(start), tensor=tensor
            )
        # The recorded list has no gradient: it is no part of the loss.
        _tf_private.set_own_gradient(longer.op, lambda op, gradient: [gradient, None])
        return self._carry(start, longer)

    def _length(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """The rows of a tensor of the body, if XLA must be told and they are known.

        While XLA compiles, the length of the data is a constant.
        """
        flow, flows = self._inner[tensor], self._flows
        if (
            not has_form_of_xla()
            or not tensor.shape.rank
            or tensor.shape[0] is not None
        ):
            return None
        sources = [s for s in flows.sources if flows[s].leads]
        if not (flow.leads and flow.rows and sources):
            return None
        return tf.shape(sources[0])[0] // flows.rows_per_example * flow.rows

    def _fits_a_list(self, tensor: tf.Tensor) -> bool:
        """Whether a list can hold the values of a tensor of the body at all steps."""
        if not has_form_of_xla() or self._inner[tensor].kind != DATA:
            return True
        known = tensor.shape.rank is not None and None not in tensor.shape[1:].as_list()
        return known and (
            tensor.shape[:1] != [None] or self._length(tensor) is not None
        )

    def _at_all_steps(self, tensor: tf.Tensor) -> tf.Tensor:
        """The values of a tensor of the body at all steps, `[N * T, ...]`."""
        inputs = self._records.inputs
        if tensor.ref() not in inputs:
            kept = self.op.outputs[self._lists[tensor.ref()]]
            with self.op.graph.as_default(), tf.control_dependencies(None):
                inputs[tensor.ref()] = rows_first(stacked(kept, tensor, self._steps))
        return inputs[tensor.ref()]

    def _stand_in(self, tensor: tf.Tensor) -> tf.Tensor:
        """A tensor with gradients equal to those at `tensor`, of all steps.

        The loop carries an empty list. In the backward pass, every step appends the
        gradient at `tensor` to the gradient at that list.
        """
        graph, count = self.op.graph, self._steps
        rank = tensor.shape.rank
        with graph.as_default(), tf.control_dependencies(None):
            nothing = tf.zeros([0] * rank, tensor.dtype)
            stand_in = tf.raw_ops.PlaceholderWithDefault(
                input=nothing, shape=[None] * rank
            )
            _, start = tf.raw_ops.IdentityN(
                input=[
                    stand_in,
                    empty_list(tensor, self.op, self._length(tensor)),
                ]
            )

        def all_steps(op, _, gradients):
            steps = stacked(gradients, tensor, count)
            return [rows_first(tf.reverse(steps, [0])), None]

        def one_step(op, gradient, gradients):
            return [
                gradient,
                tf.raw_ops.TensorListPushBack(input_handle=gradients, tensor=gradient),
            ]

        _tf_private.set_own_gradient(start.op, all_steps)
        users = list(tensor.consumers())
        with self._body.as_default(), tf.control_dependencies(None):
            same, carried = tf.raw_ops.IdentityN(
                input=[tensor, self._body.capture(start)]
            )
        _tf_private.set_own_gradient(same.op, one_step)
        for op in users:
            for number, given in enumerate(op.inputs):
                if given is tensor:
                    _tf_private.replace_input(op, number, same)
        outputs = self._body.outputs
        outputs[:] = [same if output is tensor else output for output in outputs]
        self._carry(start, carried)
        return stand_in

    def _carry(self, start: tf.Tensor, after: tf.Tensor) -> int:
        """Makes the loop carry a further value, once the loop is written again.

        Args:
          start: the value before the loop, which the body has captured.
          after: the value after a step, a tensor of the body.

        Returns:
          The number of the value after the loop among the loop's outputs.
        """
        self._body.outputs.append(after)
        with self._cond.as_default():
            self._cond.capture(start)
        self._starts.append(start)
        return len(self._body.outputs) - 1

    def _rewrite(self) -> None:
        """Writes the loop again, as TensorFlow does when it differentiates a loop."""
        _tf_private.write_loop_again(self.op, self._cond, self._body, self._starts)
        self._starts = []
