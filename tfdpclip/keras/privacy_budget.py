"""The callback that reports epsilon and stops before a budget is exceeded."""

from __future__ import annotations

import math
import os
from typing import Any

import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip._keras_marks import variable_of_call
from tfdpclip._variables import all_unwrapped
from tfdpclip.accounting import accountants
from tfdpclip.accounting.ledger import Ledger
from tfdpclip.accounting.phases import PrivacyMismatchError, refuse_other_use
from tfdpclip.accounting.statement import PrivacyStatement
from tfdpclip.keras import _compat
from tfdpclip.keras.matrix_run import MatrixRun
from tfdpclip.keras.optimizer_variables import OptimizerVariables
from tfdpclip.keras.public_metrics import PublicMetrics
from tfdpclip.keras.saved_totals import keep_out_of_files
from tfdpclip.keras.watching import (
    adapted_layers,
    choosing_callbacks,
    public_claims,
    seeded_layers,
)
from tfdpclip.keras.watching.agreement import Agreement
from tfdpclip.keras.watching.draw_check import DrawCheck
from tfdpclip.keras.watching.executions import Executions, refuse_overrun
from tfdpclip.keras.watching.fit_watch import OUTSIDE_UPDATES, FitWatch
from tfdpclip.keras.watching.noise_plan import NoisePlan, private_optimizer
from tfdpclip.keras.watching.remaining_steps import RemainingSteps, count_unseen
from tfdpclip.keras.watching.step_history import StepHistory, history_of
from tfdpclip.keras.workers import Workers, is_chief
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.batches import Batches


class PrivacyBudget(tf.keras.callbacks.Callback):
    """Puts `epsilon` into the logs and stops before a privacy budget is exceeded.

    For the progress bar, `History` and TensorBoard, the logs also get `clip_norm` (by
    group, if there are several), `noise_stddev` of each coordinate of the mean gradient
    and, where the rule follows a single quantile, `unclipped_fraction`, the epoch's
    mean of the noised fractions. All these numbers are released already. Put callbacks
    that write logs after this callback.

    *Formal guarantees*

    * Training stops before the step that would take the run above (epsilon, delta),
      also with `steps_per_execution` above 1 and with accumulation. If no execution
      fits, nothing runs and `fit` raises.
    * Logical steps (noise draws) are counted by a counter that belongs to the optimizer
      object, only grows, and cannot be restored or set. Steps that the ledger has not
      seen (without or before the callback, between two calls of `fit`, before a
      checkpoint) count as full batches, without amplification. So the steps of two
      optimizers in a ledger add up, and going back to an earlier step uncounts
      nothing.
    * The data of `fit` must be batches of the accounted scheme, made by their own
      methods. Anything else (arrays, generators, a different scheme or rate, altered,
      mixed or cached batches, different accumulation) is refused before its first
      execution. Batches of `map_batches` add an assumption to the statement.
    * Only `model.optimizer` may write to the model's trainable variables, in the
      training step and between steps. Anything else (a second optimizer, an assignment,
      a callback that sets weights) raises after that execution.
    * If the noise multiplier follows a schedule, every step is counted with its own
      noise (an execution of several steps with their least), as phases of the ledger.
    * From its first `fit` on, the model saves its metrics as 0 (`model.save` and
      `save_weights`, hence `ModelCheckpoint`; `get_state_tree` of Keras 3): these
      files hold no exact totals over private batches, whenever they are written. At
      the end of an epoch and of `fit`, the metrics are back at 0.
    * Steps enter the ledger before they run. After a crash, steps that may or may not
      have run are counted.

    Args:
      epsilon: The budget. With infinity, epsilon is only reported.
      delta: In (0, 1).
      sampling: The scheme that draws the data or, better, the batches.
      accountant: `"pld"` or `"rdp"`. `"gdp"` is allowed if exact (no sampling) or
        there is no budget to keep.
      ledger: A `Ledger`, or the path of its file (continued if the file exists).
        In memory by default: then only the checkpointed step count tells of earlier
        processes.
      check_data: Whether to insist on seeing the draws. With False, `sampling` is
        taken on trust, and the statement says so.
      allow_change: Whether the noise multiplier, clip rule or scheme may differ from
        the ledger's last phase.
      allow_outside_updates: Whether something besides `model.optimizer` may write
        to the weights, for example a callback that averages weights. The writes must
        depend on released weights or public data only; the statement says so.
      secret: For correlated noise, the file from which the noise continues in the next
        call of `fit` or the next process; needs a ledger in a file. Guard the file as
        the data: the file removes all noise. Without a file, every call of `fit` begins
        a new matrix.

    Raises:
      ValueError: If an argument is out of range.

    >>> from tfdpclip import sampling
    >>> budget = PrivacyBudget(3.0, 1e-5, sampling.Poisson(0.01))
    >>> budget.ledger.steps
    0
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        sampling: SamplingScheme | Batches,
        accountant: str = "pld",
        *,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        check_data: bool = True,
        allow_change: bool = False,
        allow_outside_updates: bool = False,
        secret: str | os.PathLike[str] | None = None,
    ):
        super().__init__()
        _compat.spare_logs(self)
        self.epsilon = _arguments.target_epsilon(epsilon)
        self.delta = _arguments.delta(delta)
        _arguments.choice("accountant", accountant, accountants.ACCOUNTANTS)
        self._batches = sampling if isinstance(sampling, Batches) else None
        self.sampling = getattr(sampling, "scheme", sampling)
        wanted = "a scheme of tfdpclip.sampling, such as Poisson(rate), or its batches"
        _arguments.instance("sampling", self.sampling, SamplingScheme, wanted)
        if accountant == "gdp" and self.sampling.amplified and epsilon != math.inf:
            raise ValueError(
                'accountant="gdp" approximates sampling and cannot keep a budget; use '
                'accountant="pld".'
            )
        self._keeps_books = is_chief()
        self._ledger = Ledger.open(
            ledger if self._keeps_books else None, self.delta, accountant
        )
        self._secret = secret
        self._check_data = _arguments.boolean("check_data", check_data)
        self._allow_change = _arguments.boolean("allow_change", allow_change)
        self._allow_outside_updates = _arguments.boolean(
            "allow_outside_updates", allow_outside_updates
        )
        self._running_optimizer = None
        self._watch: FitWatch | None = None
        self._look_for_unseen, self._last_epoch = True, False
        self._planned: int | None = None
        self._unseen = self._done = 0

    def __deepcopy__(self, memo: Any) -> PrivacyBudget:
        raise TypeError(
            "A privacy budget cannot be copied: every trial of a search is a run that "
            "costs epsilon. Make a plan for each trial in HyperModel.fit, with its "
            "batches and callbacks, and state the cost of all trials: "
            "dpc.tuning.search_privacy(ledgers, delta). See "
            "docs/search_cost.md#kerastuner."
        )

    @property
    def ledger(self) -> Ledger:
        """The ledger of spent steps.

        Raises:
          ValueError: in a process that is not the chief of several machines.
        """
        if not self._keeps_books:
            raise ValueError(
                "This process is not the chief of the run on several machines, and "
                "only the chief keeps the ledger: read ledger and statement there."
                + see("several-replicas")
            )
        return self._ledger

    def statement(self) -> PrivacyStatement:
        """Returns the spent budget, with every assumption that the numbers depend on.

        Raises:
          ValueError: in a process that is not the chief of several machines, or if
            nothing ran yet.
        """
        return self.ledger.statement()

    def _unrecorded(self) -> int:
        """Steps that ran and are still reserved, after an interrupted execution."""
        return min(self._watch.ran, self._ledger.reserved) if self._watch else 0

    def on_train_begin(self, logs=None):
        del logs
        self._workers = Workers(self.model)
        keep_out_of_files(self.model)
        with self._workers.all_or_none():
            self._begin()
        self._agreement = Agreement(self._workers, self.model)
        told = [self.epsilon, self.delta, self._check_data, self._allow_outside_updates]
        self._agreement.check_settings(told, self._draws, self.params)
        (self._allowed,) = self._workers.broadcast(self._allowed)
        seeded_layers.begin_anew(self.model)

    def _begin(self) -> None:
        """Checks the whole run before the first step, and opens the books."""
        self._begin_optimizer()
        self._begin_draws()
        self._begin_phase()
        self._begin_watch()
        self._begin_budget()
        if self._draws.drawer is not None:
            # A stream is read here: an error costs no step of the budget.
            self._draws.drawer.prepare()

    def _begin_optimizer(self) -> None:
        """Checks and builds the optimizer."""
        optimizer = private_optimizer(self.model.optimizer)
        if _compat.tunes_steps_per_execution(self.model):
            raise ValueError(
                'steps_per_execution="auto" changes the number of steps per execution '
                "during training; give a number, so that the budget can be kept."
            )
        if getattr(self.model, "unrolled_steps_per_execution", 1) != 1:
            raise ValueError(
                "unrolled_steps_per_execution puts several private steps side by side, "
                "and each is checked alone: set it to 1. steps_per_execution="
                "plan.steps_per_execution makes executions of several steps."
            )
        self._settle(optimizer)
        if self.model.built:
            _refuse_weights_without_values(self.model)
            if isinstance(optimizer, OptimizerVariables):
                # A train_step of the user may train a part of the model.
                own = type(self.model).train_step is not tf.keras.Model.train_step
                optimizer.refuse_unknown(self.model.trainable_variables, any_known=own)
            optimizer.build(self.model.trainable_variables)
        self._optimizer = optimizer
        self._metrics = PublicMetrics(optimizer)
        self._noise = NoisePlan(optimizer)
        if self._noise.scheduled and self.sampling.begins_epochs:
            raise ValueError(
                "noise_multiplier follows a schedule, but the steps of an epoch of "
                f"{type(self.sampling).__name__} are accounted for together, with one "
                "noise multiplier: give a number, or draw by Poisson(rate)."
            )

    def _begin_draws(self) -> None:
        """Finds the drawer of the data, and begins its draws."""
        self._draws = DrawCheck(
            self.sampling, self._batches, self._optimizer, self._check_data
        )
        drawer = self._draws.drawer
        if drawer is not None:
            public_claims.refuse_private_data(drawer.source.given)
            refuse_overrun(self.model, self.params, variable_of_call("fit", "x"))
        pieces = int(self._optimizer.accumulation_steps)
        self._executions = Executions(
            self.model, self.params, pieces, self._draws.begin(self.model)
        )

    def _begin_phase(self) -> None:
        """Begins a phase of the ledger, with the noise of its first step."""
        optimizer = self._optimizer
        self._history = history_of(optimizer)
        if isinstance(self._history, StepHistory):
            self._history.count_fit()
            # A frozen part of the model may have been trained privately before.
            self._history.comes_after(_weights_so_far(self.model))
        self._phase = {
            "sampling": self._draws.scheme,
            "unit": getattr(optimizer, "unit", "example"),
            "clip": optimizer.clip,
            "seed": self._draws.seed,
            "observed": self._check_data,
            "holder": self._history.identity,
        }
        self._run = MatrixRun(optimizer, self._ledger, self._draws, self._secret)
        self._phase |= self._run.begin()
        iterations = int(optimizer.iterations.numpy())
        self._noise.refuse_changed(iterations)
        self._z = self._noise.least(iterations, 1)
        if self._noise.scheduled and self._ledger.phases:
            self._z = self._ledger.phases[-1].noise_multiplier
        self._ledger.begin(
            noise_multiplier=self._z, change=self._allow_change, **self._phase
        )
        self._run.note_phase()
        drawer = self._draws.drawer
        given = []
        if drawer is not None:
            given = drawer.source.given
            self._ledger.note_people(getattr(drawer.source, "ids", None))
        for text in (
            *adapted_layers.assumptions_about(self.model),
            *seeded_layers.assumptions_about(self.model),
            *choosing_callbacks.assumptions_about(given),
            *public_claims.assumptions_about(self.model),
        ):
            self._ledger.assume(text)
        if self._allow_outside_updates:
            self._ledger.assume(OUTSIDE_UPDATES)

    def _begin_watch(self) -> None:
        """Makes the watch of the training step."""
        self._watch = FitWatch(
            self.model,
            self._history,
            self._draws.drawer if self._check_data else None,
            self._batches is not None,
            not self._allow_outside_updates,
            self._fed_by,
            self._workers.several,
            self._run.drawing,
            bool(self.params.get("verbose")),
        )

    def _begin_budget(self) -> None:
        """Counts unseen steps, and plans the steps that this call of fit may run."""
        # A shuffled epoch may have been begun before this run, which draws its rest.
        # Correlated noise fits a run that begins anywhere.
        within = self._draws.in_an_epoch and "noise" not in self._phase
        if within:
            self._ledger.phases[-1].begin_partial_epoch()
        self._remaining = RemainingSteps(
            self._ledger,
            self._noise,
            self._draws.scheme,
            self._phase["unit"],
            self.epsilon,
        )
        try:
            self._count_unseen()
            self._plan()
        except BaseException:
            if within:
                self._ledger.phases[-1].undo_partial_epoch()
            raise
        self._place = self._ledger.place
        self._decisions = choosing_callbacks.OwnDecisions(self.model)

    def on_train_batch_begin(self, batch, logs=None):
        del logs
        for text in self._decisions.assumptions():
            self._ledger.assume(text)
        refuse_other_use(
            self._ledger,
            self._place,
            "Another call of fit counted steps in this ledger during this call (in a "
            "callback, perhaps)",
            "Call fit after this call has returned.",
        )
        counted = self._ledger.counted.get(self._history.identity, 0)
        if self._look_for_unseen or self._history.releases != counted:
            # A callback may have restored a checkpoint, or trained.
            at_an_epoch, self._look_for_unseen = self._look_for_unseen, False
            if self._count_unseen():
                if self._workers.several and not at_an_epoch:
                    raise PrivacyMismatchError(
                        "In the middle of an epoch, the optimizer took steps that this "
                        "callback did not see. On several machines, the workers cannot "
                        "be told then. Train with the callback only."
                        + see("steps-that-are-not-counted")
                    )
                self._plan(self._done)
                self._watch.forget_values()
            if at_an_epoch:
                self._agreement.check_values()
                (self._allowed,) = self._workers.broadcast(self._allowed)
        z = float(self._optimizer.noise_multiplier)
        if not self._noise.scheduled and z != self._z:
            raise PrivacyMismatchError(
                f"noise_multiplier changed from {self._z} to {z} during training; "
                "change it between two calls of fit, with allow_change=True."
            )
        needed = self._executions.begin(batch, self._allowed - self._done)
        start = None
        if needed and self._noise.scheduled:
            start = int(self._optimizer.iterations.numpy())
            self._noise.refuse_changed(start)
            self._follow(self._noise.least(start, needed))
            self._history.take_least_noise()
        self._reserve(needed)
        self._place = self._ledger.place
        if self._executions.ends_epoch and self._workers.chief:
            self._remaining.compute_ahead()
        self._watch.arm(start)

    def on_train_batch_end(self, batch, logs=None):
        del logs
        self._executions.end()
        self._metrics.follow(self.model)
        ran = self._watch.take()
        self._done += ran
        self._record(ran)
        for text in self._watch.assumptions:
            self._ledger.assume(text)
        self._place = self._ledger.place
        optimizer = self._optimizer
        problem = self._watch.problem or self._executions.wrong_pending(optimizer)
        if problem:
            self._ledger.assume(f"something ran that is not counted: {problem}")
            self._ledger.save()
            raise PrivacyMismatchError(problem)
        if isinstance(optimizer, OptimizerVariables) and optimizer.may_have_failed:
            # Later steps would spend the budget on noise alone.
            optimizer.raise_failures()
        if not self._run.kept:
            self._run.keep()
        last = self._last_epoch and self._executions.ends_epoch
        if last or (self._planned is not None and self._done >= self._planned):
            return  # Keras stops: the planned steps are done.
        if self._done + max(1, self._executions.steps_from(batch + 1)) > self._allowed:
            self.model.stop_training = self._decisions.budget_stops = True
            print(
                f"\nPrivacyBudget: stopping after {self._ledger.steps} steps; one more "
                f"would exceed epsilon = {self.epsilon:g}."
            )

    def on_epoch_begin(self, epoch, logs=None):
        del logs
        # Keras does not tell callbacks in which epoch a call of fit begins.
        self._last_epoch = epoch + 1 == self.params.get("epochs")
        self._look_for_unseen = True
        self._metrics.begin(self.model)

    def on_epoch_end(self, epoch, logs=None):
        self._agreement.check_values()
        seeded_layers.begin_anew(self.model)
        self._run.keep()
        ends = self.model.stop_training or epoch + 1 == self.params.get("epochs")
        own = self._remaining.spent(exactly=ends) if self._workers.chief else 0.0
        (spent,) = self._workers.broadcast(own)
        if isinstance(self._optimizer, OptimizerVariables):
            seeded = any(phase.seeded for phase in self._ledger.phases)
            self._optimizer._state_spent(math.inf if seeded else spent, self.delta)
        if logs is not None:
            logs["epsilon"] = spent
            logs.update(self._metrics.end())
        self._forget_totals()

    def on_train_end(self, logs=None):
        del logs
        for text in self._decisions.assumptions(ends=True):
            self._ledger.assume(text)
        self._watch.end()
        seeded_layers.begin_anew(self.model)
        self._draws.end()
        self._settle(self._optimizer)
        self._count_unseen()
        self._run.keep(last=True)
        self._forget_totals()
        self._metrics.warn()

    def _forget_totals(self) -> None:
        """Sets Keras's metrics back to 0, once their numbers are in the logs.

        They hold exact totals over the private batches, and files of the model hold
        the metrics.
        """
        self.model.reset_metrics()

    def _fed_by(self, drawer: Any) -> None:
        """Notes in the statement that the delivering drawer has a seed."""
        if drawer.seed is not None:
            self._ledger.note_seed()

    def _record(self, ran: int) -> None:
        """Counts an execution; as unknown draws, if the execution was not sound."""
        try:
            self._draws.check(self._executions.fed)
            self._executions.check(self._done)
        except PrivacyMismatchError:
            self._ledger.add_unseen(ran, holder=self._history.identity)
            raise
        self._noise.refuse_less(self._history, self._ledger, ran, self._z)
        self._ledger.record(ran, save=False)
        self._draws.count_unused_draws(self._ledger)

    def _plan(self, done: int = 0) -> None:
        """Computes the number of steps that this call of fit may run in all."""
        self._done = done
        self._planned = self._executions.planned
        planned = None if self._planned is None else self._planned - done
        first = max(1, self._executions.steps_from(0))
        left = math.inf
        if self._workers.chief:
            start = int(self._optimizer.iterations.numpy())
            left = self._remaining.steps(
                planned, start, max(1, self._executions.widest)
            )
            if left < first:
                told = self._unseen, self._z, self._history.planned
                raise ValueError(self._remaining.refusal(left, first, *told))
        self._allowed = done + left

    def _follow(self, z: float) -> None:
        """Begins a new phase if the noise schedule has moved."""
        if z != self._z:
            self._z = z
            self._ledger.begin(noise_multiplier=z, change=True, **self._phase)

    def _reserve(self, needed: int) -> None:
        missing = needed - self._ledger.reserved
        if missing <= 0:
            return
        # A hundredth of the run at a time: few writes, and a crash loses little.
        ahead = missing
        if not self._noise.scheduled and self._run.kept:
            ahead = max(missing, (self._planned or 0) // 100)
        room = self._allowed - self._done - self._ledger.reserved
        self._ledger.reserve(int(max(missing, min(ahead, room))))

    def _count_unseen(self) -> int:
        """Counts the steps behind the optimizer that the ledger does not know."""
        total = count_unseen(self._ledger, self._history, self._optimizer, self._noise)
        self._unseen += total
        return total

    def _settle(self, optimizer) -> None:
        """Closes the books of a call of fit, even if an error ended the call."""
        running, self._running_optimizer = self._running_optimizer, optimizer
        if (
            running is optimizer
            and self._watch is not None
            and self._ledger.holder == history_of(optimizer).identity
        ):
            # An error ended this execution after its steps ran.
            self._ledger.record(self._watch.take(), save=False)
            self._ledger.release()
        self._watch = None


def _weights_so_far(model: tf.keras.Model) -> list[tf.Variable]:
    """The weights of a built model, or of the built layers of a model."""
    layers = [model] if model.built else [part for part in model.layers if part.built]
    return all_unwrapped(weight for layer in layers for weight in layer.weights)


def _refuse_weights_without_values(model: tf.keras.Model) -> None:
    """Raises ValueError if weights were made in a trace that raised.

    On Keras 3, the weights of a model without `Input` are made while the first step is
    traced; if that raises, they never get values, and have the size 0.
    """
    for weight in all_unwrapped(model.trainable_variables):
        if not weight.is_initialized():
            raise ValueError(
                f"The weight {weight.name!r} has no value, because a first step or a "
                "call of the model raised while its weights were made. Make the model "
                "anew; with a tf.keras.Input, or after model.build(...), weights are "
                "made before the first step." + see("a-first-step-that-raised")
            )
