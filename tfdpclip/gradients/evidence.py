"""What the self-check asks of the engine, besides its norms and sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdpclip.gradients.backward import gradients_at, own_gradients
from tfdpclip.gradients.flow import DATA
from tfdpclip.gradients.forms import first_rows
from tfdpclip.gradients.meetings import FoundGradients
from tfdpclip.gradients.rerun import Witness
from tfdpclip.gradients.row_tables import Layout, layout_of
from tfdpclip.gradients.rule_table import Context
from tfdpclip.gradients.separation import Probe
from tfdpclip.gradients.uses import first_known

# A parameter's gradient at these is what comes back, whatever it is added to: which may
# be rounding alone, as the means that a second normalisation takes off.
_ADDED = frozenset("Add AddV2 Sub BiasAdd".split())


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

    def parts_by_variable(self, count: tf.Tensor | None = None) -> list[tf.Tensor]:
        """What each variable's gradient is the sum of, squared and added up, `[B]`.

        Args:
          count: of how many examples, the first; all by default.
        """
        squares = [first_rows(s, count) for s in self.squares_by_variable()]
        for i, gradient in self.found.by_form.items():
            if gradient.has_several_terms:
                squares[i] = gradient.part_squares(count)
        return squares

    def witnesses(self) -> list[Witness]:
        """What an example's gradients are made of, besides weights.

        At every op where variables meet the batch: the gradient that comes back to it,
        and what else goes into it, unless it is added. Of the fallback's variables,
        whose gradients come from the losses at once: what comes back to the first
        tensors of a known layout, what goes into the ops that use them, and the norms.
        """
        flows = self.context.flows
        found: dict = {}
        for op, meeting in self.found.meetings.items():
            if not meeting.reached:
                continue
            pairs = zip(meeting.outputs, meeting.gradients, strict=True)
            for output, gradient in pairs:
                if gradient is not None:
                    label = f"the gradient at op {op.name!r} (a {op.type})"
                    gradient = tf.convert_to_tensor(gradient)
                    found[gradient.ref()] = self._witness(gradient, output, label)
            self._add_inputs(op, found)
        slow = first_known(self.found.slow_uses, flows)
        with own_gradients(flows.without_gradient()):
            gradients = gradients_at(self.loss, slow)
        for tensor, gradient in zip(slow, gradients, strict=True):
            if gradient is not None and tensor is not self.loss:
                label = f"the gradient at op {tensor.op.name!r} (a {tensor.op.type})"
                gradient = tf.convert_to_tensor(gradient)
                found[gradient.ref()] = self._witness(gradient, tensor, label)
        for use in self.found.slow_uses:
            self._add_inputs(use.op, found)
        ruled = len(self.found.by_form)
        for i, square in zip(
            self.found.slow_variables, self.squares[ruled:], strict=True
        ):
            label = f"the norm of the gradient of {self.variables[i].name!r}"
            found[square.ref()] = Witness(square, label=label)
        return list(found.values())

    def _witness(self, tensor: tf.Tensor, at: tf.Tensor, label: str) -> Witness:
        """A witness whose examples are where another tensor has them."""
        flow = self.context.flows[at]
        layouts = [layout_of(flow)]
        if flow.axes is None:
            axes = range(tensor.shape.rank or 0)
            layouts = [Layout(axis, minor) for axis in axes for minor in (False, True)]
        return Witness(tensor, layouts, label, flow.leads and flow.rows is not None)

    def _add_inputs(self, op: tf.Operation, found: dict) -> None:
        if op in self.found.meetings and op.type in _ADDED:
            return
        flows = self.context.flows
        sources = {source.ref() for source in flows.sources}
        for tensor in op.inputs:
            flow = flows[tensor]
            numbers = tensor.dtype.is_floating or tensor.dtype.is_integer
            if (
                flow.kind == DATA
                and flow.entry is None
                and tensor.shape.rank
                and numbers
                and tensor.ref() not in sources
            ):
                label = f"what goes into op {op.name!r} (a {op.type})"
                found.setdefault(tensor.ref(), self._witness(tensor, tensor, label))

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
