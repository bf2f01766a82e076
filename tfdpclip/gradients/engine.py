"""Per-example gradient norms and clipped sums from the loss and the variables alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._arguments import choice, fraction, items, positive, shown
from tfdpclip._devices import in_xla
from tfdpclip._docs import see
from tfdpclip.clipping import ClipRule
from tfdpclip.clipping.bounds import proven
from tfdpclip.gradients import _copies, calls, fallback, separation, state, while_loops
from tfdpclip.gradients.backward import gradients_at, own_gradients
from tfdpclip.gradients.combine import VariableGradient
from tfdpclip.gradients.dataflow import Dataflow
from tfdpclip.gradients.errors import LossStructureError
from tfdpclip.gradients.forms import Budget, rows_per_example, rows_where
from tfdpclip.gradients.inlining import inline_calls
from tfdpclip.gradients.label_checks import convert_each_label
from tfdpclip.gradients.loss import LossParts, take_apart
from tfdpclip.gradients.perturbation import Perturbation
from tfdpclip.gradients.records import RecordGradients, column_of
from tfdpclip.gradients.rule_table import (
    Context,
    build_form,
    has_rule,
    outputs_of,
    pull_back_of,
)
from tfdpclip.gradients.state import PublicVariables
from tfdpclip.gradients.status import DEFAULT_RATE, CheckStatus
from tfdpclip.gradients.uses import Use, find_uses, first_known
from tfdpclip.gradients.verify import SelfCheck

# How many bytes of materialised per-example gradients may be alive for one variable.
DEFAULT_MEMORY = 64 * 2**20
_ASSUMED_BATCH = 256


@dataclasses.dataclass
class _Slow:
    """The variables that take the fallback, why, and where they meet the batch.

    Attributes:
      coarse: whether one of them is used in a type below float32.
    """

    variables: list[tf.Variable]
    handles: list[tf.Tensor]
    reasons: list[str]
    uses: list[Use]
    coarse: bool = False


@dataclasses.dataclass
class _Meeting:
    """An op at which variables meet the batch.

    Attributes:
      outputs: the outputs that its rule needs gradients at.
      pull_back: takes gradients from the outputs to the op's inputs, if a rule does.
      gradients: those of the summed loss, None where an output does not matter.
    """

    outputs: list[tf.Tensor]
    pull_back: Callable | None
    gradients: list[tf.Tensor | None] = dataclasses.field(default_factory=list)

    @property
    def reached(self) -> bool:
        return any(gradient is not None for gradient in self.gradients)

    def pulled(self, context: Context) -> Callable:
        """The gradient function of the op, which notes what comes in on the way."""

        def gradient(op, *at_outputs):
            by_output = dict(
                zip((t.ref() for t in op.outputs), at_outputs, strict=True)
            )
            self.gradients = [by_output[t.ref()] for t in self.outputs]
            return self.pull_back(self.gradients, context)

        return gradient


class PerExampleGradients(RecordGradients):
    """The per-example gradients of a loss that was computed in a graph.

    Nothing is run here; tensors are added to the current graph. One backward pass gives
    the gradient at every op where a variable meets the batch; norms and weighted sums
    follow from those and the ops' inputs.

    *Formal guarantees*

    * The norms and the sums come from the same forward pass and the same backward pass.
    * `clipped_sum` multiplies each example's gradient by a weight that depends on that
      example's norm and on the rule's state only; examples whose norm is not finite
      and padding contribute exactly zero.
    * The guarantee per example holds if the examples are isolated and the norms and
      sums are those of the loss. `check_isolation` tests both on the batch itself,
      against ordinary backward passes and another forward pass with other examples in
      the place of some. If the test fails, the step raises, or, where XLA drops
      assertions, gives every example weight 0.

    Args:
      loss: a scalar or `[B]` or `[B, ...]` tensor of a graph.
      variables: trainable variables.
      nominal_batch_size: the public number of examples in a physical batch.
      memory: bytes of materialised gradients to allow at once.
      check_isolation: "first" (the first time the graph runs, then on the steps 2, 4,
        8, ... and at random), "always" or "never".
      recheck_rate: the probability with which a later step checks itself.
      groups: the group of each variable, if the clip rule has groups: the check
        looks at the norms of groups then.
      perturbation: k, and a seed `[2]` for this step: k * N(0, I) is added to every
        example's gradient before clipping. None for none.
      public_variables: other variables whose values are public, or their names.

    Raises:
      LossStructureError: if the loss cannot be taken apart.
      ExampleIsolationError: if the graph shows that examples are combined, or where it
        could not be tested that they are not.
    """

    def __init__(
        self,
        loss: tf.Tensor,
        variables: Sequence[tf.Variable],
        *,
        nominal_batch_size: float | None = None,
        memory: int = DEFAULT_MEMORY,
        check_isolation: str = "first",
        recheck_rate: float = DEFAULT_RATE,
        groups: Sequence[int] | None = None,
        perturbation: tuple[float, tf.Tensor] | None = None,
        public_variables: Sequence[tf.Variable | str] | PublicVariables = (),
    ):
        choice("check_isolation", check_isolation, ("first", "always", "never"))
        recheck_rate = fraction("recheck_rate", recheck_rate)
        memory = int(positive("memory", memory))
        if nominal_batch_size is not None:
            nominal_batch_size = positive("nominal_batch_size", nominal_batch_size)
        loss = inline_calls(_in_graph(loss))
        self.variables = items("variables", variables)
        if not self.variables:
            raise ValueError("variables is empty: there is nothing to differentiate.")
        for variable in self.variables:
            if not hasattr(variable, "handle"):
                raise ValueError(
                    f"variables must be trainable variables, got {shown(variable)}."
                )
        refuse_repeated("variables", self.variables)
        graph = loss.graph
        handles = [graph.capture(v.handle) for v in self.variables]
        convert_each_label(loss)
        if not isinstance(public_variables, PublicVariables):
            public_variables = PublicVariables(public_variables)
        public = state.public_handles(graph, handles, public_variables)
        flows = Dataflow([loss], handles, public=public)
        if not flows[loss].trained:
            raise LossStructureError(
                f"The loss {loss.name!r} does not depend on any of the variables: "
                f"{', '.join(v.name for v in self.variables[:5])}."
            )
        self.parts: LossParts = take_apart(loss, flows, nominal_batch_size)
        self._loss = self.parts.per_example
        self._flows = Dataflow([self._loss], handles, flows.batch_size, public)
        self.state_reads = state.reads(loss, flows)
        self._refuse_float16()
        self._context = Context(self._flows, self.parts.batch_size)
        planned = self._flows.batch_size or nominal_batch_size or _ASSUMED_BATCH
        self._budget = Budget(memory, int(planned))
        self.handles = handles
        self._find(handles, self._context)
        self._per_variable = self._plain_squares()
        self.norms = self._plain_norms()
        if perturbation is not None:
            shapes = [
                v.shape if connected else None
                for v, connected in zip(self.variables, self._connected, strict=True)
            ]
            self.perturbation = Perturbation(*perturbation, shapes, self._budget)
            squares = self.perturbation.squared_norms(
                self.materialized, self.parts.batch_size
            )
            self._perturbed = tf.unstack(squares, num=len(shapes), axis=1)
        self._finite_parts: list[tf.Tensor] | None = None
        if perturbation is None:
            # Outside of the check, which takes them, too.
            finite = tf.math.is_finite(self.norms)
            self._finite_parts = self._saved(finite, tf.reduce_all(finite))
        self.status = CheckStatus(check_isolation, recheck_rate)
        # What one trace checks, the graph keeps alive.
        graph.add_to_collection("tfdpclip_checks", self.status)
        self.isolated = self._checked(check_isolation, groups)

    def _refuse_float16(self):
        for op in self._flows.ops:
            for output in op.outputs:
                if output.dtype == tf.float16 and self._flows[output].trained:
                    raise ValueError(
                        "The model computes in float16 (mixed_float16), whose "
                        "gradients need loss scaling: whether a step is skipped and "
                        "how the scale moves are decided on un-noised data. Use "
                        "tf.keras.mixed_precision.set_global_policy('mixed_bfloat16') "
                        "or 'float32'." + see("float16")
                    )

    def _find(self, handles, context):
        uses = [
            find_uses(handle, v.shape, self._flows)
            for handle, v in zip(handles, self.variables, strict=True)
        ]
        in_graph = uses
        uses, stand_ins = while_loops.expand(uses, self._flows)
        covered = [all(has_rule(use) for use in found) for found in uses]
        self._meetings: dict[tf.Operation, _Meeting] = {}
        for found, is_covered in zip(uses, covered, strict=True):
            for use in found if is_covered else ():
                if use.op not in self._meetings:
                    outputs = stand_ins.get(use.op)
                    outputs = outputs or [use.op.outputs[k] for k in outputs_of(use)]
                    self._meetings[use.op] = _Meeting(outputs, pull_back_of(use))
        self._differentiate(context)
        forms: dict = {}
        self._place = {id(v): i for i, v in enumerate(self.variables)}
        self._gradients: dict[int, VariableGradient] = {}
        self._connected = [bool(found) for found in uses]
        self._slow = _Slow([], [], [], [])
        for i, (variable, found) in enumerate(zip(self.variables, uses, strict=True)):
            if covered[i]:
                found = [use for use in found if self._meetings[use.op].reached]
            if not found:
                self._connected[i] = False
                continue
            built = None
            if covered[i]:
                for use in found:
                    key = (use.op, use.index)
                    if key not in forms:
                        dz = self._meetings[use.op].gradients
                        forms[key] = build_form(use, dz, context)
                built = [forms[use.op, use.index] for use in found]
            if built is None or any(form is None for form in built):
                self._slow.variables.append(variable)
                self._slow.handles.append(handles[i])
                self._slow.reasons.append(_reason(found, built))
                self._slow.uses += in_graph[i]
                self._slow.coarse = self._slow.coarse or any(
                    t.dtype.is_floating and t.dtype.size < 4
                    for use in found
                    for t in (*use.op.inputs, *use.op.outputs)
                )
                continue
            self._gradients[i] = VariableGradient(variable, handles[i], found, built)
        self._slow_gradients: fallback.SlowGradients | None = None
        if self._slow.variables:
            fallback.warn(self._slow.variables, self._slow.reasons)
            self._slow_gradients = fallback.SlowGradients(
                self._loss,
                self._slow.variables,
                self._slow.handles,
                context.batch_size,
                self._budget,
                coarse=self._slow.coarse,
            )

    def _differentiate(self, context):
        """Finds the gradients at all meetings, in one backward pass."""
        others = [m for m in self._meetings.values() if m.pull_back is None]
        tensors = [t for m in others for t in m.outputs]
        rules = {}
        for op, meeting in self._meetings.items():
            if meeting.pull_back is not None:
                meeting.gradients = [None] * len(meeting.outputs)
                rules[op] = meeting.pulled(context)
                # So that the pass reaches the call.
                tensors += [t for t in op.inputs if t.dtype.is_floating]
        with own_gradients(rules):
            gradients = iter(gradients_at(self._loss, tensors))
        for meeting in others:
            meeting.gradients = [next(gradients) for _ in meeting.outputs]

    @property
    def connected(self) -> list[bool]:
        """Whether each variable can receive a gradient at all."""
        return list(self._connected)

    def _batch_size(self) -> tf.Tensor:
        return self.parts.batch_size

    def _plain_squares(self) -> list[tf.Tensor]:
        # Small ones first, so that who is kept does not hang on the variables' order.
        sizes = {i: math.prod(self.variables[i].shape) for i in self._gradients}
        found = {
            i: self._gradients[i].measured(self._budget)
            for i in sorted(sizes, key=sizes.__getitem__)
        }
        self._measured = {i: found[i] for i in self._gradients}
        squares = [measured.squared_norms for measured in self._measured.values()]
        if self._slow_gradients is not None:
            found = self._slow_gradients.squared_norms()
            squares += tf.unstack(found, num=len(self._slow.variables), axis=1)
        return [tf.cast(square, tf.float32) for square in squares]

    def _plain_norms(self) -> tf.Tensor:
        if not self._per_variable:
            return tf.zeros([self.parts.batch_size], tf.float32)
        return tf.sqrt(tf.add_n(self._per_variable))

    def _squares(self) -> list[tf.Tensor]:
        return self._per_variable if self.perturbation is None else self._perturbed

    def _columns(self, assignment: Sequence[int]) -> list[int]:
        if self.perturbation is not None:
            return list(assignment)
        slow = [self._place[id(v)] for v in self._slow.variables]
        return [assignment[i] for i in (*self._gradients, *slow)]

    def materialized(
        self, start: tf.Tensor | int = 0, size: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """Some examples' gradients, `[size, *shape]` for each variable.

        Args:
          start: the first example.
          size: how many; the whole batch by default.
        """
        size = self.parts.batch_size if size is None else size
        found: list = [None] * len(self.variables)
        for i, gradient in self._gradients.items():
            found[i] = gradient.gradients(start, size)
        if self._slow_gradients is not None:
            parts = self._slow_gradients.part(start, size)
            for variable, part in zip(self._slow.variables, parts, strict=True):
                found[self._place[id(variable)]] = part
        return [
            tf.zeros([size, *v.shape], v.dtype) if part is None else part
            for v, part in zip(self.variables, found, strict=True)
        ]

    @property
    def present(self) -> tf.Tensor:
        """Which examples are real, `[B]`: the others are padding.

        Padding has weight 0 in the loss. Where no weights were found, an example with
        loss 0 and gradient 0 counts as padding.
        """
        return _real_examples(self.parts, self.norms)

    def weighted_sum(
        self, weights: tf.Tensor, assignment: Sequence[int] | None = None
    ) -> list[tf.Tensor]:
        """sum_i weights_i g_i for each variable.

        Examples whose norm is not finite contribute zeros, whatever their weight.

        Args:
          weights: `[B]`, or `[B, L]` with a column for each group.
          assignment: the column of each variable.
        """
        norms = self.norms if self.perturbation is None else self.record_norms()
        finite = tf.math.is_finite(norms)
        kept = finite if assignment is None else finite[:, tf.newaxis]
        weights = tf.where(kept, weights, tf.zeros_like(weights))
        columns = [
            column_of(weights, assignment, i) for i in range(len(self.variables))
        ]
        sums = self._sums(columns, finite)
        if self.perturbation is None:
            return sums
        added = self.perturbation.weighted_sum(columns)
        return [
            total + tf.cast(part, total.dtype) if connected else total
            for total, part, connected in zip(sums, added, self._connected, strict=True)
        ]

    def _sums(self, columns, finite):
        everything = tf.reduce_all(finite)
        parts = self._finite_parts
        saved = iter(self._saved(finite, everything) if parts is None else parts)
        sums: list = [None] * len(self.variables)
        for i, measured in self._measured.items():
            own = [next(saved) for _ in measured.saved]
            sums[i] = measured.weighted_sum(columns[i], own)
        if self._slow_gradients is not None:
            places = [self._place[id(v)] for v in self._slow.variables]
            slow = [columns[place] for place in places]
            found = tf.cond(
                everything,
                lambda: self._slow_gradients.weighted_sums(slow, None),
                lambda: self._slow_gradients.weighted_sums(slow, finite),
            )
            for place, total in zip(places, found, strict=True):
                sums[place] = total
        return [
            tf.zeros(v.shape, v.dtype) if total is None else total
            for v, total in zip(self.variables, sums, strict=True)
        ]

    def _saved(self, finite, everything) -> list[tf.Tensor]:
        """What the sums are made of, with zeros for examples that are not finite."""
        saved = [
            part
            for measured in self._measured.values()
            for part in zip(measured.saved, measured.rows, strict=True)
        ]
        if not saved:
            return []
        tensors = [tensor for tensor, _ in saved]

        def without():
            masks = {1: finite}
            kept = []
            for tensor, rows in saved:
                if rows not in masks:
                    count = rows or rows_per_example(tensor, self.parts.batch_size)
                    masks[rows] = tf.repeat(finite, count)
                kept.append(rows_where(masks[rows], tensor))
            return kept

        if in_xla():
            # Which would copy what goes through a branch as it is.
            return without()
        return tf.cond(everything, lambda: tensors, without)

    def mask(self, values: tf.Tensor) -> tf.Tensor:
        """`values` with 0 for padding, and 0 for all if isolation failed.

        Args:
          values: `[B]` or `[B, L]`.
        """
        kept = self.isolated
        present = self.parts.present
        if self.perturbation is not None:
            # Padding that has no gradient would be clipped noise, of norm C.
            present = self.present
        if present is not None:
            kept = tf.logical_and(kept, present)
            kept = kept if values.shape.rank == 1 else kept[:, tf.newaxis]
        return tf.where(kept, values, tf.zeros_like(values))

    def shared_gradients(self) -> list[tf.Tensor | None]:
        """The gradients of the terms that depend on no example."""
        if self.parts.shared is None:
            return [None] * len(self.variables)
        return tf.gradients(self.parts.shared, self.variables)

    def _checked(self, when: str, groups) -> tf.Tensor:
        """Whether all checks so far were passed, this step's included; see `verify`."""
        if when == "never":
            return tf.constant(True)
        check = SelfCheck(self, groups)

        def run():
            ok, conclusive, message = check.run()
            passed = self.status.settle(ok, conclusive)
            if message is None:
                return passed
            # Noted first: a step that failed once is not to be trusted again.
            with tf.control_dependencies([passed]):
                assertion = tf.debugging.Assert(passed, [message])
            with tf.control_dependencies([assertion]):
                return tf.identity(passed)

        due = self.status.due(self.parts.batch_size)
        if not in_xla():
            run = _copies.called(run)
        return tf.cond(due, run, self.status.passed_before)

    # What the check of a step needs to know.

    @property
    def loss(self) -> tf.Tensor:
        """The losses, `[B]`."""
        return self._loss

    @property
    def flows(self) -> Dataflow:
        """The analysis of the losses."""
        return self._flows

    @property
    def claims(self) -> list[tuple[Callable[[], tf.Tensor], str]]:
        """What rules took for granted; see `rules.Context`."""
        return self._context.claims

    @property
    def coarse(self) -> bool:
        """Whether the model computes in a type below float32 anywhere."""
        return any(
            t.dtype.is_floating and t.dtype.size < 4
            for op in self._flows.ops
            for t in op.outputs
        )

    def where(self, index: int) -> str:
        """The ops at which a variable meets the batch, for messages."""
        if index in self._gradients:
            ops = [use.op for use, _ in self._gradients[index].parts]
        else:
            ops = [use.op for use in self._slow.uses]
        named = [f"op {op.name!r}, a {op.type}" for op in dict.fromkeys(ops)]
        return "; ".join(named[:3]) or "not used"

    def unperturbed_sums(self, weights: tf.Tensor) -> list[tf.Tensor]:
        """sum_i weights_i g_i for each variable, as a step makes it of finite examples.

        Args:
          weights: `[B]`.
        """
        finite = tf.math.is_finite(self.norms)
        return self._sums([weights] * len(self.variables), finite)

    def squares_by_variable(self) -> list[tf.Tensor]:
        """The squared norms, `[B]`, for each of the variables."""
        found: list = [None] * len(self.variables)
        slow = [self._place[id(v)] for v in self._slow.variables]
        places = [*self._gradients, *slow]
        for place, square in zip(places, self._per_variable, strict=True):
            found[place] = square
        nothing = tf.zeros([self.parts.batch_size], tf.float32)
        return [nothing if square is None else square for square in found]

    def parts_by_variable(self) -> list[tf.Tensor]:
        """What each variable's gradient is the sum of, squared and added up, `[B]`."""
        found = self.squares_by_variable()
        for place, gradient in self._gradients.items():
            if gradient.has_several_terms:
                found[place] = gradient.part_squares()
        return found

    def gradients_on_their_own_way(self) -> list[tf.Tensor]:
        """The gradients of the losses at what has a row for each example.

        None where the model has no gradients of its own: then they depend on the
        examples that the losses depend on.
        """
        if not any(calls.gradient_function(op) is not None for op in self._flows.ops):
            return []
        return [
            gradient
            for meeting in self._meetings.values()
            for output, gradient in zip(meeting.outputs, meeting.gradients, strict=True)
            if isinstance(gradient, tf.Tensor)
            and self._flows[output].leads
            and self._flows[output].rows == 1
        ]

    def probes(self) -> list[separation.Probe]:
        """The tensors at which the gradient must separate by example."""
        names: dict = {}
        for i, gradient in self._gradients.items():
            for use, _ in gradient.parts:
                names.setdefault(use.op, self.variables[i].name)
        found = [
            separation.Probe(
                output,
                f"variable {names.get(op, 'of the model')!r}, op {op.name!r} (a "
                f"{op.type})",
                tf.convert_to_tensor(gradient),
                # No rule goes by where its examples are.
                anywhere=op not in names and self._flows[output].axes is None,
            )
            for op, meeting in self._meetings.items()
            for output, gradient in zip(meeting.outputs, meeting.gradients, strict=True)
            if gradient is not None
        ]
        known = {probe.tensor.ref() for probe in found}
        for tensor in first_known(self._slow.uses, self._flows):
            if tensor.ref() not in known and tensor is not self._loss:
                known.add(tensor.ref())
                label = f"op {tensor.op.name!r} (a {tensor.op.type})"
                found.append(separation.Probe(tensor, label))
        return found


def _real_examples(parts: LossParts, norms: tf.Tensor) -> tf.Tensor:
    """Which examples are not padding, `[B]`."""
    present = tf.logical_or(norms != 0, parts.per_example != 0)
    return present if parts.present is None else tf.logical_and(present, parts.present)


def refuse_repeated(name: str, variables: Sequence[tf.Variable]) -> None:
    """Raises ValueError if a variable is listed twice.

    Its gradient would be counted twice in the norm, and applied twice.
    """
    seen: set = set()
    for variable in variables:
        if id(variable) in seen:
            raise ValueError(
                f"{name} lists {variable.name!r} more than once; list every variable "
                "once."
            )
        seen.add(id(variable))


def _reason(uses: Sequence[Use], forms) -> str:
    for i, use in enumerate(uses):
        if not has_rule(use) or (forms is not None and forms[i] is None):
            return f"used by {use.op.name!r}, a {use.op.type}"
    return "used by an op without a rule"


@tf.autograph.experimental.do_not_convert
def per_example_norms(
    loss: tf.Tensor, variables: Sequence[tf.Variable], **options: Any
) -> tf.Tensor:
    """The L2 norm of each example's gradient over all `variables` together, `[B]`.

    Call it inside a `tf.function`, after computing the loss. The norms are of private
    data and carry no noise.

    Args:
      loss: one loss per example, `[B]` or `[B, ...]` (averaged over trailing axes), or
        a scalar that is a sum or mean over the batch; then example i's loss is B times
        its share.
      variables: trainable variables.
      **options: see `PerExampleGradients`.

    Raises:
      LossStructureError: if a scalar loss cannot be taken apart with certainty.
      ExampleIsolationError: if the graph shows that examples are combined; if that
        shows only when it runs, `tf.errors.InvalidArgumentError`.

    >>> w = tf.Variable([1.0, 1.0])
    >>> @tf.function
    ... def norms(x):
    ...     return per_example_norms(tf.linalg.matvec(x, w), [w])
    >>> norms(tf.constant([[3.0, 4.0], [0.0, 1.0]])).numpy().tolist()
    [5.0, 1.0]
    """
    return PerExampleGradients(_in_graph(loss), variables, **options).norms


@tf.autograph.experimental.do_not_convert
def clipped_sum(
    loss: tf.Tensor,
    variables: Sequence[tf.Variable],
    rule: ClipRule,
    state: Any = (),
    **options: Any,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """The sum over examples of the clipped gradients, and the norms before clipping.

    No noise is added. One backward pass: ghost norms and book-keeping (Li et al. 2022;
    Bu et al. 2023) at the level of TensorFlow ops.

    *Formal guarantees*: adding or removing one example changes the sums, taken as one
    vector, by at most ``rule.sensitivity(state)`` in L2 norm, if examples are isolated.

    Args:
      loss: as for `per_example_norms`.
      variables: trainable variables.
      rule: a clip rule.
      state: the rule's state.
      **options: see `PerExampleGradients`.

    Returns:
      The sums, one dense tensor per variable of its shape (zeros for a variable that
      the loss does not depend on), and the norms, `[B]`. A rule with groups is bound to
      the variables here if it is not bound yet.

    >>> from tfdpclip.clipping import FixedClip
    >>> w = tf.Variable([1.0, 1.0])
    >>> @tf.function
    ... def step(x):
    ...     return clipped_sum(tf.linalg.matvec(x, w), [w], FixedClip(1.0))
    >>> sums, norms = step(tf.constant([[3.0, 4.0], [0.0, 0.5]]))
    >>> sums[0].numpy().round(3).tolist()
    [0.6, 1.3]
    """
    if not isinstance(rule, ClipRule):
        raise ValueError(
            f"rule must be a clip rule, such as FixedClip(1.0), got {shown(rule)}."
        )
    proven(rule, "rule")
    options.setdefault("groups", rule.assignment)
    gradients = PerExampleGradients(loss, variables, **options)
    return gradients.clipped_sum(rule, state), gradients.norms


def _in_graph(loss: Any) -> tf.Tensor:
    eager = _tf_private.is_eager(loss)
    if tf.is_tensor(loss) and not eager and hasattr(loss, "graph"):
        if loss.dtype.is_floating:
            return loss
        raise LossStructureError(
            f"The loss must be of a floating-point type, got {loss.dtype.name}."
        )
    raise LossStructureError(
        "The engine reads the graph of the loss, which must be a tensor: call it "
        "inside a tf.function, where the loss is computed. In eager code there is no "
        "graph."
    )
