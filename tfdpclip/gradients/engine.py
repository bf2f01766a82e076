"""Per-example gradient norms and clipped sums from the loss and the variables alone.

`PerExampleGradients` takes a loss through the packages of `gradients` once. Its
`__init__` lists the seven stages of docs/architecture.md, and the methods follow in the
same order; behind them are the results that a clip rule asks for (`RecordGradients` of
`forms/records.py`), and the quantities that the comparison reads.

Objects of further files that are read here:

* `LossParts` (`loss/loss_parts.py`): the losses `[B]`, B, which rows are records
  (`present`), and the sum of all terms without examples (`shared`).
* `FoundGradients` (`meetings.py`): `by_form` has the variables with rules, by number;
  `slow` has the remaining variables, and makes their gradients by a Jacobian or, where
  the proof ends, one example at a time (`alone`).
* `Measured` (`forms/base_form.py`): the squared norms of one variable, and the tensors
  that its weighted sum is made of (`saved`): with zeros in an example's rows, the
  example adds zeros to the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._arguments import choice, integer, items, optional, positive, shown
from tfdpclip._devices import TRACING, has_form_of_xla, in_xla
from tfdpclip._docs import TracedError
from tfdpclip._variables import all_unwrapped
from tfdpclip.clipping import ClipRule
from tfdpclip.gradients.comparison import Comparison, error_of
from tfdpclip.gradients.errors import LossStructureError
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.flows.inlining import inline_calls
from tfdpclip.gradients.forms.base_form import Budget, rows_per_example, rows_where
from tfdpclip.gradients.forms.perturbation import Perturbation
from tfdpclip.gradients.forms.records import RecordGradients, column_of
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.graph.backward import is_of_own_gradient, own_gradients_marked
from tfdpclip.gradients.graph.walks import ancestors, descendants
from tfdpclip.gradients.loss import loss_checks, state
from tfdpclip.gradients.loss.drawn_rows import ExpectedRecords, present_in_graph
from tfdpclip.gradients.loss.label_checks import convert_each_label
from tfdpclip.gradients.loss.loss_parts import LossParts, refuse_counted, take_apart
from tfdpclip.gradients.loss.public_terms import check_public_gradients
from tfdpclip.gradients.loss.state import PublicVariables
from tfdpclip.gradients.loss_key import structure_of
from tfdpclip.gradients.meetings import FoundGradients, find_gradients, one_by_one
from tfdpclip.gradients.proof import single_examples
from tfdpclip.gradients.proof.isolation_proof import Verdict, prove
from tfdpclip.gradients.rules.context import Context
from tfdpclip.gradients.status import CheckStatus
from tfdpclip.gradients.uninlined import cond_uninlined

# Bytes of materialised per-example gradients that may be alive for a variable.
DEFAULT_MEMORY = 64 * 2**20
# The batch size for estimates of cost where no batch size is known.
_ASSUMED_BATCH = 256


class PerExampleGradients(RecordGradients):
    """The per-example gradients of a loss that was computed in a graph.

    Nothing runs here; tensors are added to the current graph. One backward pass gives
    the gradient at every op where a variable meets the batch; norms and weighted sums
    follow from these gradients and the inputs of the ops.

    *Formal guarantees*

    * The norms and the sums come from the same forward pass and the same backward pass.
    * `clipped_sum` multiplies each example's gradient by a weight that depends on that
      example's norm and on the rule's state only. Padding and examples of a norm that
      is not finite contribute exactly zero.
    * The examples are isolated in every possible batch: the graph of the loss proves
      the isolation (`isolation_proof.py`); or each example's gradient is made from the
      data of that example alone (`single_examples.py`), with a warning; or the loss is
      refused.
    * The norms and sums are those of the loss if the rules are right.
      `check_gradients` compares them with ordinary gradients. If the comparison fails,
      the step raises, and all sums are 0; where XLA drops assertions, the weights that
      `mask` returns are 0.

    Args:
      loss: a scalar or `[B]` or `[B, ...]` tensor of a graph.
      variables: trainable variables.
      nominal_batch_size: the public number of examples in a physical batch.
      memory: bytes of materialised gradients to allow at once.
      check_gradients: when norms and sums are compared with ordinary gradients: "first"
        (the first time the graph runs on a batch that shows something), "always" or
        "never".
      groups: the group of each variable, if the clip rule has groups: the comparison
        then covers the norm of each group.
      perturbation: k, and a seed `[2]` for this step: k * N(0, I) is added to every
        example's gradient before clipping. None for none.
      public_variables: untrained variables of public values, or their names.
      replicas: over how many replicas the gradients are added up; see `take_apart`.
      rows_per_record: how many consecutive rows of the batch are one record (views of
        an example, examples of a person). The loss of a record is the mean of the
        losses of its rows, and the rows of a record may mix. "Example" then means
        record everywhere.

    Attributes:
      loss: the losses, `[B]`.
      flows: the analysis of the losses.
      proof: the isolation of the examples, as the graph of the losses proves it.
      norms: `[B]`, before any perturbation.
      parts: the losses, padding and public terms that the given loss consists of.
      handles: the handles of the variables in the graph of the loss.
      state_reads: further variables that the loss or its gradients read.
      status: says which step compares, and stores the outcome.

    Raises:
      LossStructureError: if the loss cannot be taken apart.
      ExampleIsolationError: if the graph shows that examples are combined, or if the
        graph neither proves isolation nor can be copied for single examples.
    """

    def __init__(
        self,
        loss: tf.Tensor,
        variables: Sequence[tf.Variable],
        *,
        nominal_batch_size: float | None = None,
        memory: int = DEFAULT_MEMORY,
        check_gradients: str = "first",
        groups: Sequence[int] | None = None,
        perturbation: tuple[float, tf.Tensor] | None = None,
        public_variables: Sequence[tf.Variable | str] | PublicVariables = (),
        replicas: int = 1,
        rows_per_record: int = 1,
    ):
        choice("check_gradients", check_gradients, ("first", "always", "never"))
        memory = int(positive("memory", memory))
        rows_per_record = integer("rows_per_record", rows_per_record, 1)
        nominal_batch_size = optional(
            positive, "nominal_batch_size", nominal_batch_size
        )
        # Stage 1, the losses of the examples, which needs the dataflow (2) of the loss.
        loss = inline_calls(_in_graph(loss))
        self.variables = _trainable(variables)
        self.handles = [loss.graph.capture(v.handle) for v in self.variables]
        # A loss that looks at the labels of the batch is changed to look at each label.
        convert_each_label(loss)
        if not isinstance(public_variables, PublicVariables):
            public_variables = PublicVariables(public_variables)
        public = state.public_handles(loss.graph, self.handles, public_variables)

        scalar_flows = self._trace_flows(loss, public, rows_per_record)
        self._take_apart(loss, scalar_flows, nominal_batch_size, replicas)
        # Stage 2 for the losses, `[B]`, and the proof.
        self._prove_isolation(loss, scalar_flows, public)
        # Stages 3 and 4: uses, and rules, which give forms.
        planned = (nominal_batch_size or 0) / replicas or _ASSUMED_BATCH
        self._budget = Budget(memory, int(self.flows.batch_size or planned))
        self._find_gradients(loss, scalar_flows)
        # Stages 5 and 6: the norms. Sums are made later, from the weights of a rule.
        self._measure_norms()
        self._add_perturbation(perturbation)
        self._keep_finite_parts()
        # Stage 7: the comparison.
        self._compare_gradients(loss.graph, check_gradients, groups)

    def clipped_sum(
        self, rule: ClipRule, state: Any, norms: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """The clipped gradients of all records, summed, for each variable.

        Raises:
          LossStructureError: if the loss is a sum, and no `nominal_batch_size` was
            given.
        """
        refuse_counted(self.parts)
        return super().clipped_sum(rule, state, norms)

    def _trace_flows(
        self, loss: tf.Tensor, public: Sequence[tf.Tensor], rows_per_record: int
    ) -> Dataflow:
        """The analysis of the given loss, usually a scalar.

        Raises:
          LossStructureError: if the loss depends on none of the variables.
        """
        flows = Dataflow(
            [loss], self.handles, public=public, rows_per_example=rows_per_record
        )
        if not flows[loss].trained:
            raise LossStructureError(
                f"The loss {loss.name!r} does not depend on any of the variables: "
                f"{', '.join(v.name for v in self.variables[:5])}."
            )
        return flows

    def _take_apart(
        self,
        loss: tf.Tensor,
        flows: Dataflow,
        nominal_batch_size: float | None,
        replicas: int,
    ) -> None:
        """Sets `parts` (losses and public terms) and `loss`, the losses `[B]`."""
        self.parts: LossParts = take_apart(loss, flows, nominal_batch_size, replicas)
        expected = ExpectedRecords(
            self.parts.batch_size, flows.batch_size, flows.rows_per_example
        )
        # Which rows are records: as the draw says, if the batch was drawn.
        drawn = present_in_graph(loss.graph, flows.sources, expected)
        self.parts.note_present(drawn)
        self.loss = self.parts.per_example

    def _prove_isolation(
        self, loss: tf.Tensor, scalar_flows: Dataflow, public: Sequence[tf.Tensor]
    ) -> None:
        """Sets `flows` and `proof`; refuses losses that mix examples or read state.

        Raises:
          ExampleIsolationError: if the graph shows that examples are combined.
        """
        self.flows = Dataflow(
            [self.loss],
            self.handles,
            scalar_flows.batch_size,
            public,
            scalar_flows.rows_per_example,
        )
        # Called for its refusals; `_find_gradients` keeps the reads, with later ops.
        state.find_state_reads(loss, scalar_flows)
        # The gradients of a loop change the loop.
        told = any(TRACING.get())
        self._structure = structure_of(self.flows, self.handles) if told else None
        self.proof = prove(self.loss, self.flows)
        loss_checks.check_uncoupled(self.loss, self.flows[self.loss])
        loss_checks.refuse_float16(self.flows)
        loss_checks.refuse_collectives(self.flows)
        state.refuse_foreign_state(ancestors([self.loss]))

    def _find_gradients(self, loss: tf.Tensor, scalar_flows: Dataflow) -> None:
        """Sets `_found`: every variable's gradients, by rules or example by example.

        The ops of the backward pass are then checked like the ops of the loss; they may
        read further variables (`state_reads`).
        """
        context = Context(self.flows, self.parts.batch_size)
        arguments = (self.loss, self.variables, self.handles, context, self._budget)
        if self.proof.verdict is Verdict.UNKNOWN:
            single_examples.warn(self.proof, self.flows.batch_size)
            self._found: FoundGradients = one_by_one(*arguments, self.proof)
        else:
            with own_gradients_marked(self.flows.ops):
                self._found = find_gradients(*arguments)
        behind = self._found.ancestor_ops(self.loss)
        loss_checks.check_sizes_in(filter(is_of_own_gradient, behind), self.flows)
        self.state_reads = state.find_state_reads(loss, scalar_flows, behind)
        state.refuse_foreign_state(behind)

    def _measure_norms(self) -> None:
        """Sets the squared norms of each variable, and `norms` of all, `[B]` each."""
        self._per_variable = self._plain_squares()
        self.norms = self._plain_norms()

    def _add_perturbation(self, perturbation: tuple[float, tf.Tensor] | None) -> None:
        """Sets `perturbation` and the squared norms of perturbed gradients."""
        if perturbation is None:
            return
        shapes = [
            v.shape if connected else None
            for v, connected in zip(self.variables, self.connected, strict=True)
        ]
        self.perturbation = Perturbation(*perturbation, shapes, self._budget)
        squares = self.perturbation.squared_norms(
            self.materialized, self.parts.batch_size
        )
        self._perturbed = tf.unstack(squares, num=len(shapes), axis=1)

    def _keep_finite_parts(self) -> None:
        """Sets `_finite_parts`: the tensors that the sums and the comparison share.

        They are made outside of the branch of the comparison, so that the step's own
        sums can read them.
        """
        self._finite_parts: list[tf.Tensor] | None = None
        if self.perturbation is None:
            finite = tf.math.is_finite(self.norms)
            self._finite_parts = self._saved(finite, tf.reduce_all(finite))

    def _compare_gradients(
        self, graph: tf.Graph, when: str, groups: Sequence[int] | None
    ) -> None:
        """Sets `status`, and `checks_passed`, of this step and all steps before."""
        # The comparison begins at this op, which waits for the sums of the step.
        self._gate: tf.Tensor | None = None
        alone = self._found.alone
        if alone is not None and alone.drawing() is not None:
            # Each example has random numbers that no ordinary pass can draw again.
            when = "never"
        self.status = CheckStatus(when, error_of(self.proof), self._key(), graph)
        self.checks_passed = self._compare_if_due(groups)

    def _key(self) -> tuple:
        """Equal for losses of the same ops and variables, of data from any source."""
        return self.flows.batch_size, tuple(map(id, self.variables)), self._structure

    @property
    def connected(self) -> list[bool]:
        """Whether each variable can receive a gradient at all."""
        return list(self._found.connected)

    def _batch_size(self) -> tf.Tensor:
        return self.parts.batch_size

    def _plain_squares(self) -> list[tf.Tensor]:
        # Small variables are measured first, so that the gradients that are kept in
        # memory do not depend on the order of the variables.
        gradients, slow = self._found.by_form, self._found.slow
        sizes = {i: math.prod(self.variables[i].shape) for i in gradients}
        measured = {
            i: gradients[i].measured(self._budget)
            for i in sorted(sizes, key=sizes.__getitem__)
        }
        self._measured = {i: measured[i] for i in gradients}
        squares = [measured.squared_norms for measured in self._measured.values()]
        if slow is not None:
            found = slow.squared_norms()
            squares += tf.unstack(found, num=len(self._found.slow_variables), axis=1)
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
        return [assignment[i] for i in self._found.order]

    def materialized(
        self, start: tf.Tensor | int = 0, size: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """The gradients of consecutive examples, `[size, *shape]` for each variable.

        Args:
          start: the first example.
          size: how many; the whole batch by default.
        """
        size = self.parts.batch_size if size is None else size
        found: list = [None] * len(self.variables)
        for i, gradient in self._found.by_form.items():
            found[i] = gradient.gradients(start, size)
        if self._found.slow is not None:
            parts = self._found.slow.part(start, size)
            for i, part in zip(self._found.slow_variables, parts, strict=True):
                found[i] = part
        return [
            tf.zeros([size, *v.shape], v.dtype) if part is None else part
            for v, part in zip(self.variables, found, strict=True)
        ]

    @property
    def present(self) -> tf.Tensor:
        """Which examples are real and not padding, `[B]`.

        In a drawn batch the draw says which rows are records (`drawn_rows.py`). In
        undrawn data padding has weight 0 in the loss. Where the loss has no weights, an
        example with loss 0 and gradient 0 counts as padding.
        """
        parts = self.parts
        seen = tf.logical_or(self.norms != 0, parts.per_example != 0)
        return seen if parts.present is None else tf.logical_and(seen, parts.present)

    def weighted_sum(
        self, weights: tf.Tensor, assignment: Sequence[int] | None = None
    ) -> list[tf.Tensor]:
        """sum_i weights_i g_i for each variable.

        Examples of no finite norm contribute zeros under any weight. If
        the comparison with ordinary gradients failed, the sums are 0 (under XLA, if the
        weights went through `mask`).

        The comparison runs after the sums, when the tensors behind the sums, by far
        the largest part of a step's memory, are freed.

        Args:
          weights: `[B]`, or `[B, L]` with a column for each group.
          assignment: the column of each variable.
        """
        sums = self.perturbed_sums(weights, assignment)
        if self._gate is None:
            return sums
        here = all(part.graph is self._gate.graph for part in sums)
        # Sums that are made of `checks_passed` cannot come before it.
        if here and self._gate.op not in ancestors(sums):
            _tf_private.run_after(self._gate.op, [part.op for part in sums])

        def zeros():
            return [tf.zeros_like(part) for part in sums]

        return tf.cond(self.checks_passed, lambda: sums, zeros)

    def perturbed_sums(
        self, weights: tf.Tensor, assignment: Sequence[int] | None = None
    ) -> list[tf.Tensor]:
        """`weighted_sum` without the comparison, which calls this method.

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
            for total, part, connected in zip(sums, added, self.connected, strict=True)
        ]

    def _sums(self, columns: Sequence[tf.Tensor], finite: tf.Tensor) -> list:
        all_finite = tf.reduce_all(finite)
        parts = self._finite_parts
        saved = iter(self._saved(finite, all_finite) if parts is None else parts)
        sums: list = [None] * len(self.variables)
        for i, measured in self._measured.items():
            kept = [next(saved) for _ in measured.saved]
            sums[i] = measured.weighted_sum(columns[i], kept)
        slow = self._found.slow
        if slow is not None:
            own = [columns[i] for i in self._found.slow_variables]
            found = tf.cond(
                all_finite,
                lambda: slow.weighted_sums(own, None),
                lambda: slow.weighted_sums(own, finite),
            )
            for i, total in zip(self._found.slow_variables, found, strict=True):
                sums[i] = total
        return [
            tf.zeros(v.shape, v.dtype) if total is None else total
            for v, total in zip(self.variables, sums, strict=True)
        ]

    def _saved(self, finite, all_finite) -> list[tf.Tensor]:
        """The tensors behind the sums, with zeros for examples of no finite norm."""
        saved = [
            part
            for measured in self._measured.values()
            for part in zip(measured.saved, measured.rows, strict=True)
        ]
        if not saved:
            return []
        tensors = [tensor for tensor, _ in saved]

        def with_zeros():
            masks = {1: finite}
            kept = []
            for tensor, rows in saved:
                if rows not in masks:
                    count = rows or rows_per_example(tensor, self.parts.batch_size)
                    masks[rows] = tf.repeat(finite, count)
                kept.append(rows_where(masks[rows], tensor))
            return kept

        if has_form_of_xla():
            # XLA would copy a tensor that passes through a branch unchanged.
            return with_zeros()
        return tf.cond(all_finite, lambda: tensors, with_zeros)

    def unperturbed_sums(self, weights: tf.Tensor) -> list[tf.Tensor]:
        """sum_i weights_i g_i for each variable, as a step adds up finite examples.

        The comparison holds these sums against ordinary backward passes.

        Args:
          weights: `[B]`.
        """
        finite = tf.math.is_finite(self.norms)
        return self._sums([weights] * len(self.variables), finite)

    def squares_by_variable(self) -> list[tf.Tensor]:
        """The squared norms, `[B]`, for each of the variables."""
        squares: list = [None] * len(self.variables)
        for i, square in zip(self._found.order, self._per_variable, strict=True):
            squares[i] = square
        unused = tf.zeros([self.parts.batch_size], tf.float32)
        return [unused if square is None else square for square in squares]

    def terms_by_variable(self) -> list[tf.Tensor]:
        """The summed squares of the terms of each variable's gradient, `[B]` each.

        Where the terms of an example's gradient cancel, the rounding error may be
        larger than the sum of the terms.
        """
        squares = self.squares_by_variable()
        for i, gradient in self._found.by_form.items():
            if gradient.has_several_terms:
                squares[i] = gradient.part_squares(None)
        return squares

    def describe_uses(self, index: int) -> str:
        """The ops at which variable `index` meets the batch, for messages."""
        if index in self._found.by_form:
            ops = [use.op for use, _ in self._found.by_form[index].parts]
        else:
            ops = [use.op for use in self._found.slow_uses]
        named = [f"op {op.name!r}, a {op.type}" for op in dict.fromkeys(ops)]
        return "; ".join(named[:3]) or "not used"

    def mask(self, values: tf.Tensor) -> tf.Tensor:
        """`values` with 0 for padding; under XLA, 0 for all if a comparison failed.

        Args:
          values: `[B]` or `[B, L]`.
        """
        kept = self.checks_passed if self._gate is None else tf.constant(True)
        present = self.parts.present
        if self.perturbation is not None:
            # Padding without a gradient would become clipped noise of norm C.
            present = self.present
        if present is not None:
            kept = tf.logical_and(kept, present)
            kept = kept if values.shape.rank == 1 else kept[:, tf.newaxis]
        return tf.where(kept, values, tf.zeros_like(values))

    def shared_gradients(self) -> list[tf.Tensor | None]:
        """The gradients of the terms that depend on no example."""
        if self.parts.shared is None:
            return [None] * len(self.variables)
        found = tf.gradients(self.parts.shared, self.variables)
        present = [tf.convert_to_tensor(g) for g in found if g is not None]
        check_public_gradients(self.parts.shared, present, self.flows)
        return found

    def _compare_if_due(self, groups) -> tf.Tensor:
        """Whether all comparisons so far, including this step's, were passed."""
        if not self.status.compares:
            return tf.constant(True)
        check = Comparison(self, groups)
        compiled = in_xla()
        cond = tf.cond if compiled else cond_uninlined
        due = self.status.due(self.parts.batch_size)
        ordinary = cond(due, check.ordinary, check.empty_results)
        if not compiled:
            self._gate = due = tf.identity(due)
            seed, passes = self._found.seed, [part.op for part in ordinary]
            same = seed is not None and seed.graph is due.graph
            if same and not any(op.type in ops.CHAINED for op in descendants(seed.op)):
                # Two backward passes at a time need the memory of both.
                _tf_private.run_after(seed.op, passes)

        def compare():
            agree, shows, message = check.compare(ordinary)
            passed = self.status.record(agree, shows)
            if message is None:
                return passed
            # The status is noted first: after one failure, no later step is trusted.
            with tf.control_dependencies([passed]):
                assertion = tf.debugging.Assert(passed, [message])
            with tf.control_dependencies([assertion]):
                return tf.identity(passed)

        return cond(due, compare, self.status.passed_before)


def refuse_repeated(name: str, variables: Sequence[tf.Variable]) -> None:
    """Raises ValueError if a variable is listed twice.

    The norm would count the gradient of the variable twice, and the step would apply
    the gradient twice.
    """
    seen: set = set()
    for variable in variables:
        if id(variable) in seen:
            raise TracedError(
                f"{name} lists {variable.name!r} more than once; list every variable "
                "once."
            )
        seen.add(id(variable))


def refuse_complex(name: str, variables: Sequence[tf.Variable]) -> None:
    """Raises ValueError if a variable has complex numbers.

    No norm counts the imaginary part of a gradient, and no noise has one.
    """
    for variable in variables:
        if tf.as_dtype(getattr(variable, "dtype", "float32")).is_complex:
            raise TracedError(
                f"{name} has complex numbers in {variable.name!r}. Train the real and "
                "the imaginary part as two variables: weight = tf.complex(real, imag)."
            )


def _trainable(variables: Sequence[tf.Variable]) -> list[tf.Variable]:
    """The variables as `tf.Variable`: not empty, and each variable once."""
    unwrapped = all_unwrapped(items("variables", variables))
    if not unwrapped:
        raise TracedError("variables is empty: there is nothing to differentiate.")
    for variable in unwrapped:
        if not hasattr(variable, "handle"):
            raise TracedError(
                f"variables must be trainable variables, got {shown(variable)}."
            )
    refuse_repeated("variables", unwrapped)
    refuse_complex("variables", unwrapped)
    return unwrapped


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
