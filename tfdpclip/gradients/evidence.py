"""What the self-check asks of the engine, besides its norms and sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdpclip.gradients import calls
from tfdpclip.gradients.meetings import FoundGradients
from tfdpclip.gradients.rule_table import Context
from tfdpclip.gradients.separation import Probe
from tfdpclip.gradients.uses import first_known


@dataclasses.dataclass(frozen=True)
class Evidence:
    """How norms and sums came about; see `verify.py`.

    Attributes:
      loss: the losses, `[B]`.
      variables: the variables.
      found: their gradients.
      context: the analysis of the losses, B, and what rules took for granted.
      squares: the squared norms, `[B]`, of each variable of `found.order`.
    """

    loss: tf.Tensor
    variables: Sequence[tf.Variable]
    found: FoundGradients
    context: Context
    squares: Sequence[tf.Tensor]

    @property
    def claims(self) -> list[tuple[Callable[[], tf.Tensor], str]]:
        """What rules took for granted; see `rule_table.Context`."""
        return self.context.claims

    @property
    def coarse(self) -> bool:
        """Whether the model computes in a type below float32 anywhere."""
        return any(
            t.dtype.is_floating and t.dtype.size < 4
            for op in self.context.flows.ops
            for t in op.outputs
        )

    def where(self, index: int) -> str:
        """The ops at which a variable meets the batch, for messages."""
        if index in self.found.by_form:
            ops = [use.op for use, _ in self.found.by_form[index].parts]
        else:
            ops = [use.op for use in self.found.slow_uses]
        named = [f"op {op.name!r}, a {op.type}" for op in dict.fromkeys(ops)]
        return "; ".join(named[:3]) or "not used"

    def squares_by_variable(self) -> list[tf.Tensor]:
        """The squared norms, `[B]`, for each of the variables."""
        squares: list = [None] * len(self.variables)
        for i, square in zip(self.found.order, self.squares, strict=True):
            squares[i] = square
        nothing = tf.zeros([self.context.batch_size], tf.float32)
        return [nothing if square is None else square for square in squares]

    def parts_by_variable(self) -> list[tf.Tensor]:
        """What each variable's gradient is the sum of, squared and added up, `[B]`."""
        squares = self.squares_by_variable()
        for i, gradient in self.found.by_form.items():
            if gradient.has_several_terms:
                squares[i] = gradient.part_squares()
        return squares

    def gradients_on_their_own_way(self) -> list[tf.Tensor]:
        """The gradients of the losses at what has a row for each example.

        None where the model has no gradients of its own: then they depend on the
        examples that the losses depend on.
        """
        flows = self.context.flows
        if not any(calls.gradient_function(op) is not None for op in flows.ops):
            return []
        return [
            gradient
            for meeting in self.found.meetings.values()
            for output, gradient in zip(meeting.outputs, meeting.gradients, strict=True)
            if isinstance(gradient, tf.Tensor)
            and flows[output].leads
            and flows[output].rows == 1
        ]

    def probes(self) -> list[Probe]:
        """The tensors at which the gradient must separate by example."""
        flows, names = self.context.flows, {}
        for i, gradient in self.found.by_form.items():
            for use, _ in gradient.parts:
                names.setdefault(use.op, self.variables[i].name)
        probes = [
            Probe(
                output,
                f"variable {names.get(op, 'of the model')!r}, op {op.name!r} (a "
                f"{op.type})",
                tf.convert_to_tensor(gradient),
                # No rule goes by where its examples are.
                anywhere=op not in names and flows[output].axes is None,
            )
            for op, meeting in self.found.meetings.items()
            for output, gradient in zip(meeting.outputs, meeting.gradients, strict=True)
            if gradient is not None
        ]
        known = {probe.tensor.ref() for probe in probes}
        for tensor in first_known(self.found.slow_uses, flows):
            if tensor.ref() not in known and tensor is not self.loss:
                known.add(tensor.ref())
                label = f"op {tensor.op.name!r} (a {tensor.op.type})"
                probes.append(Probe(tensor, label))
        return probes
