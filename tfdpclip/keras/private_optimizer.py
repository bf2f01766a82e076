"""The step of a private optimizer.

The file follows the order of a step: the records' gradients, their clipped sums, the
mechanism's release, the update. The settings of the step are in
`optimizer_settings.py`; its variables, and the saved part of them, in
`optimizer_variables.py` and `step_sums.py`.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._devices import in_xla
from tfdpclip._docs import TracedError, see
from tfdpclip._object_notes import note_on_new_ops
from tfdpclip._outside import outside_of_functions
from tfdpclip._variables import all_unwrapped, unwrapped
from tfdpclip.accounting.phases import PrivacyMismatchError
from tfdpclip.gradients import PerExampleGradients
from tfdpclip.gradients.eager import EagerGradients
from tfdpclip.gradients.engine import refuse_complex, refuse_repeated
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.forms.whole import WholeGradient
from tfdpclip.gradients.loss import drawn_rows
from tfdpclip.gradients.loss.state import find_state_reads, public_handles
from tfdpclip.keras import _compat, replicas
from tfdpclip.keras.optimizer_variables import OptimizerVariables
from tfdpclip.keras.watching import private_state
from tfdpclip.keras.watching.step_labels import StepLabels
from tfdpclip.keras.watching.step_search import ALTERED_DATA, find_altered_data
from tfdpclip.keras.watching.weight_watch import marked_updates
from tfdpclip.sampling.provenance import rows_per_record_of


class PrivateOptimizer(OptimizerVariables, _compat.TrainerEntry):
    """The base class that `privatize` adds to a Keras optimizer class."""

    @tf.autograph.experimental.do_not_convert
    def minimize(self, loss, var_list, tape=None):
        """Clips and sums a physical batch; a full logical step is noised and applied.

        Args:
          loss: the loss tensor (one loss per example, or a scalar that the engine can
            take apart), or a callable that computes the loss.
          var_list: the variables to train.
          tape: the tape that recorded `loss`; needed in eager code only.
        """
        gradients = self._records(loss, var_list, tape)
        with note_on_new_ops(updates=self._step_history.identity):
            self._take_in(gradients)

    @tf.autograph.experimental.do_not_convert
    def compute_gradients(self, loss, var_list, tape=None):
        """The private gradients of one logical step, for `apply_gradients`.

        The clip norm moves here. With `accumulation_steps` above 1, use `minimize`.
        """
        if self._accumulation_steps != 1:
            raise TracedError(
                "compute_gradients cannot accumulate. Instead, call "
                "optimizer.minimize(loss, variables, tape=tape) for each physical "
                "batch."
            )
        gradients = self._records(loss, var_list, tape)
        with note_on_new_ops(updates=self._step_history.identity):
            state = self.clip_state
            return self._release(gradients, state, *self._clipped(gradients, state))

    def _records(self, loss, var_list, tape):
        """The gradients of the records, for the norms and sums of a clip rule."""
        self._step_history.refuse_uncounted()
        replicas.refuse_others(self, self._scope.strategy)
        _compat.refuse_distribution()
        if callable(loss):
            tape = tf.GradientTape(persistent=True) if tape is None else tape
            with tape:
                loss = loss()
        if callable(var_list):
            var_list = var_list()
        var_list = tf.nest.flatten(var_list)
        if not var_list:
            raise TracedError(
                "There is nothing to train: the model has no trainable variables."
            )
        refuse_repeated("var_list", var_list)
        refuse_complex("var_list", var_list)
        given, var_list = var_list, all_unwrapped(var_list)
        self.refuse_unknown(given)
        if not self._unsaved.built:
            outside_of_functions(lambda: self.build(given), var_list)
        else:
            self.build(given)
        here = self._unsaved.here
        if self._accumulation_steps > 1 and here.sums is None:
            self._make_sums(here, var_list)
        self._check_public_norms()
        self._check_rate(_tf_private.is_eager(loss))
        perturbation = None
        if self._perturbation > 0:
            perturbation = (self._perturbation, self._noise_here().seed_pair())
        replicas.refuse_unsupported_graph(loss, in_xla())
        if _tf_private.is_eager(loss):
            if self._unit == "batch":
                raise TracedError(
                    'unit="batch" needs a graph, to see the writes of layers that keep '
                    "statistics of private batches: compile without run_eagerly=True, "
                    "or put the step into a tf.function."
                )
            if self._rows_per_record > 1:
                raise TracedError(
                    "rows_per_record above 1 needs a graph, to see the record of each "
                    "row: compile without run_eagerly=True, or put the step into a "
                    "tf.function." + see("records-of-several-rows")
                )
            with drawn_rows.released():
                return EagerGradients(loss, var_list, tape, perturbation)
        loss = tf.convert_to_tensor(loss)
        drawn_rows.refuse_second_in_fit(loss.graph, self._step_history.identity)
        with note_on_new_ops(made_of_a_loss=True):
            return self._records_in_graph(loss, var_list, perturbation)

    def _records_in_graph(self, loss, var_list, perturbation):
        here = self._unsaved.here
        if self._unit == "batch":
            private_state.restore_public_statistics(loss)
            handles = [loss.graph.capture(v.handle) for v in var_list]
            public = public_handles(loss.graph, handles, self._public())
            reads = find_state_reads(loss, Dataflow([loss], handles, public=public))
            records = WholeGradient(loss, var_list, perturbation)
            records.checks_passed = here.constant.check(reads)
            return records
        with drawn_rows.released():
            records = PerExampleGradients(
                loss,
                var_list,
                nominal_batch_size=self._divisor / self._accumulation_steps,
                memory=self._gradient_memory,
                check_gradients=self._check_gradients,
                groups=self._mechanism.rule.assignment,
                perturbation=perturbation,
                public_variables=self._public(),
                replicas=replicas.count(),
                rows_per_record=self._rows_per_record,
            )
        self._refuse_other_rows(records.flows.sources)
        self._refuse_altered_data(loss.graph, var_list)
        self._unsaved.data.claim(loss.graph, records.flows.sources)
        records.checks_passed = tf.logical_and(
            records.checks_passed, here.constant.check(records.state_reads)
        )
        if in_xla():
            # Under XLA the step cannot raise; `raise_failures` does.
            here.statuses.append(records.status)
            for known, error in drawn_rows.known_in_compiled_code(loss.graph):
                here.note_rows(known, error)
        private_state.restore_public_statistics(loss)
        return records

    def _refuse_altered_data(self, graph, var_list) -> None:
        """Makes a loop's call raise if functions around the step's altered the data."""
        called = drawn_rows.function_of_loop(graph)
        if called is None:
            return
        variables = [*var_list, *self.written_by_steps()]

        def refuse():
            # The functions around the step are complete when a loop calls them.
            step = StepLabels(called, self._step_history.identity)
            altered = find_altered_data(step, variables)
            if altered is not None:
                raise PrivacyMismatchError(ALTERED_DATA.format(altered))
            return tf.constant(True)

        with tf.init_scope():
            saved = tf.constant(True)
        refuse = functools.cache(refuse)
        _tf_private.value_at_call(called, refuse, tf.TensorSpec([], tf.bool), saved)

    def _refuse_other_rows(self, sources) -> None:
        """Raises if the batches have another number of rows per record.

        `PrivacyBudget` checks the batches of `fit`; without a budget, the batches that
        exist in this process are compared.
        """
        each = rows_per_record_of(sources)
        if each and self._rows_per_record not in each:
            raise PrivacyMismatchError(
                f"The batches have {max(each)} rows for each record, the optimizer "
                f"rows_per_record={self._rows_per_record}: rows of different records "
                "would be clipped together, or rows of a record apart. Write "
                f"rows_per_record=batches.rows_per_record ({max(each)}) to the "
                "optimizer; plan.optimizer(...) does." + see("records-of-several-rows")
            )

    def _take_in(self, gradients):
        """Clips and sums a physical batch; the last batch of a logical step ends it."""
        state, kept = self.clip_state, self._unsaved.here.sums
        if self._accumulation_steps > 1:
            state = kept.state_for(state)
        sums, counts, shared = self._clipped(gradients, state)
        if self._accumulation_steps == 1:
            self._finish(gradients, state, sums, counts, shared)
            return
        variables = gradients.variables
        filled = self._unsaved.here.sums.add(variables, sums, counts)
        places = [i for i, extra in enumerate(shared) if extra is not None]

        def finish(*extras):
            kept = self._unsaved.here.sums
            terms: list = [None] * len(variables)
            for i, extra in zip(places, extras, strict=True):
                terms[i] = extra
            self._finish(gradients, kept.state, *kept.totals(variables), terms)
            kept.clear()

        replicas.run_when(
            self._step_history,
            filled >= self._accumulation_steps,
            finish,
            [tf.convert_to_tensor(shared[i]) for i in places],
            # On some replicas, an error cut the step short.
            astray=lambda: self._unsaved.here.sums.clear(),
        )

    def _clipped(self, records, state):
        """The clipped sums over the divisor, the counts, and the shared gradients."""
        mechanism, rule = self._mechanism, self._mechanism.rule
        norms = records.record_norms(rule.assignment)
        weights, bits = mechanism.clip(norms, state, records.present)
        # Scale the weights, shape `[B, groups]`, and not the larger sums.
        weights = records.mask(weights / mechanism.records)
        sums = records.weighted_sum(weights, rule.assignment)
        for part, variable in zip(sums, records.variables, strict=True):
            part.set_shape(variable.shape)
        bits = tf.where(records.checks_passed, bits, 0.0)
        return sums, tf.reduce_sum(bits, axis=0), records.shared_gradients()

    def _finish(self, gradients, state, sums, counts, shared):
        released = self._release(gradients, state, sums, counts, shared)
        self._apply_released(released)

    def _release(self, gradients, state, sums, counts, shared):
        """The mechanism's release, and the terms that depend on no record.

        The noise fits `state`, in which the batches were clipped. The clip norm moves
        from the optimizer's own state, which a checkpoint or public norms may have set
        since the logical step began.
        """
        history, mechanism, here = (
            self._step_history,
            self._mechanism,
            self._unsaved.here,
        )
        replicas.run_once(history, lambda _: self._count_step())
        step = unwrapped(self.iterations)
        connected = zip(sums, gradients.connected, strict=True)
        parts, counts = mechanism.add_noise(
            state,
            [part if known else None for part, known in connected],
            counts,
            self._noise_here(),
            step,
            divided=True,
            shares=replicas.count(),
        )
        parts = [_plus(*both) for both in zip(parts, shared, strict=True)]
        places = [i for i, part in enumerate(parts) if part is not None]
        # Only these tensors leave a replica, each with its share of the noise.
        *totals, counts = replicas.summed([*(parts[i] for i in places), counts])
        for i, total in zip(places, totals, strict=True):
            parts[i] = tf.cast(total, gradients.variables[i].dtype)
        clip_state = self.clip_state
        release = mechanism.finish(clip_state, parts, counts, step=step, divided=True)
        replicas.run_once(
            history, self._assign_clip_state, tf.nest.flatten(release.next_state)
        )
        released = list(zip(release.means, gradients.variables, strict=True))
        here.issued = [g for g, _ in released if g is not None]
        return released

    @contextlib.contextmanager
    def _private_update(self, gradients):
        """A context to apply private gradients of this optimizer; refuses any other."""
        issued = {id(gradient) for gradient in self._unsaved.here.issued}
        if any(g is not None and id(g) not in issued for g in gradients):
            raise TracedError(
                f"{type(self).__name__}.apply_gradients got gradients that it did not "
                "make private: they would be applied without clipping and noise. "
                "Instead of tape.gradient and apply_gradients, call "
                "optimizer.minimize(loss, variables, tape=tape). (A LossScaleOptimizer "
                "around this optimizer also causes this: use mixed_bfloat16, which "
                "needs no loss scale.)" + see("gradients-made-elsewhere")
            )
        self._unsaved.here.issued = []
        with marked_updates(self._step_history):
            yield

    def finalize_variable_values(self, var_list):
        """Ends `fit`; raises if a compiled step found an error."""
        self._refuse_unapplied()
        if not tf.executing_eagerly():
            return super().finalize_variable_values(var_list)
        # Where the steps were traced by an earlier call of `fit`, or by replicas.
        self._step_history.refuse_uncounted()
        if replicas.gathers_ahead(self._scope.strategy):
            # The next fit begins a new draw: see `Batches.distribute`.
            self.drop_pending_batches()
        self.raise_failures()
        for local in self._unsaved.all:
            local.constant.reset()
        return super().finalize_variable_values(var_list)


def _plus(private: Any, public: Any) -> Any:
    """A noised part with a term that depends on no record; either may be None."""
    if private is None or public is None:
        return private if public is None else tf.convert_to_tensor(public)
    return private + tf.cast(public, private.dtype)
