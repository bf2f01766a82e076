"""Sees what `fit` feeds to the training step, and what the step writes to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfdpclip import _progress, _tf_private
from tfdpclip._docs import see
from tfdpclip._variables import all_unwrapped, whole_number
from tfdpclip.accounting.phases import PrivacyMismatchError
from tfdpclip.gradients.graph.op_copies import calls_python
from tfdpclip.gradients.loss.state import PUBLIC_COPY
from tfdpclip.keras import _compat, replicas
from tfdpclip.keras.watching import constant_state, private_state
from tfdpclip.keras.watching.executions import runs_eagerly
from tfdpclip.keras.watching.given_data import FollowedStep, followed_step
from tfdpclip.keras.watching.released_updates import made_of_releases
from tfdpclip.keras.watching.step_history import ForeignHistory, StepHistory
from tfdpclip.keras.watching.step_search import (
    kept_of_data,
    made_of_data,
    other_data,
    other_step,
    other_updates,
    read_by_update,
)
from tfdpclip.keras.watching.weight_watch import EAGER, WeightWatch
from tfdpclip.keras.workers import cancelled_replicas_named, lost_workers_named
from tfdpclip.sampling import provenance
from tfdpclip.sampling.batches import Batches

UNSEEN_DATA = (
    "nothing altered the batches between the draw and the step: the data of a "
    "distribution strategy were not traced back"
)
UNSEEN_UPDATES = (
    "nothing but the optimizer updated the weights: the optimizer is not tfdpclip's, "
    "or the model's training function is its own"
)
UNSEEN_WRITES = (
    "nothing but the optimizer updated the weights between two steps of fit, where it "
    "took steps of its own that are counted as full batches"
)
OUTSIDE_UPDATES = (
    "what updated the weights beside the optimizer depends on released values or "
    "public data only (allow_outside_updates)"
)

FIRST_STEP = "building the private step, which checks itself"
FIRST_STEP_LINE = (
    "\ntfdpclip: building the private step and checking it. This is done once for a "
    "model; of a large one it takes minutes, and the steps after it do not."
)


def _budget_with(option: str) -> str:
    """What to write to have another budget than that of a plan."""
    return (
        f"PrivacyBudget(..., {option}), or, with a plan, in the place of "
        "plan.callbacks, [dpc.keras.PrivacyBudget(plan.epsilon, plan.delta, batches, "
        f"ledger=plan.ledger, {option})]."
    )


class FitWatch:
    """Stands around the training step of one call of `fit`.

    Keras gives callbacks neither the data nor the step. It does look up
    `model.train_function` for every execution, and calls it with the iterator: this
    puts itself in its place for one call at a time.

    *Formal guarantees*

    * No execution runs on an iterator that is not one of the drawer's batches, as
      their own methods made them.
    * A weight that anything but the optimizer wrote to, in the traced step or between
      two executions, is reported before the next execution.

    Args:
      model: the model.
      history: the optimizer's history.
      drawer: what must draw the data; None if that is not checked.
      exact: whether another drawer of the same scheme will not do.
      check_updates: whether to look for other updates of the weights.
      fed_by: told of the drawer of the data, before the first execution on them.
      several_workers: whether other processes take part in every step.
      around: what every execution runs within.
      says: whether `fit` prints, and so may this.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        history: StepHistory | ForeignHistory,
        drawer: Any,
        exact: bool,
        check_updates: bool,
        fed_by: Callable[[Any], None] = lambda drawer: None,
        several_workers: bool = False,
        around: Callable[[], AbstractContextManager] = contextlib.nullcontext,
        says: bool = False,
    ):
        self._model = model
        self._optimizer = model.optimizer
        self._history = history
        self._drawer = drawer
        self._exact = exact
        self._check_updates = check_updates
        self._fed_by = fed_by
        self._several_workers, self._around = several_workers, around
        self._line = FIRST_STEP_LINE if says else None
        self._replicas = replicas.taking_part(model)
        self._weights: WeightWatch | None = None
        self._iterator: Any = None
        self._batches: Batches | None = None
        self._step: FollowedStep | None = None
        self._traced: set[int] = set()
        # What the step writes to beside the optimizer, and makes of releases alone.
        self._of_releases: list[tf.Variable] = []
        self._read: set[int] = set()
        self._eager, self._eager_before = False, 0
        self._runs_eagerly, self._functions_eager = False, False
        # The training step that was looked at last, the `tf.function` in it, and how
        # many traces that had.
        self._seen: tuple[Any, Any, int | None] = (None, None, None)
        self._ran = 0
        self._start: int | None = None
        #: What was found after an execution, in words.
        self.problem: str | None = None
        #: What could not be checked, or what the batches ask to assume.
        self.assumptions: list[str] = []

    def arm(self, start: int | None = None) -> None:
        """Before an execution: the next call of the training step is watched.

        Args:
          start: the step counter that it is accounted for; None if that does not
            matter.
        """
        self._start = start
        self._put_back()
        self._step = followed_step(self._model)
        function = self._model.train_function
        # Not through Keras's attribute tracking, which takes its time.
        self._model.__dict__["train_function"] = _Once(self, self._model, function)

    def end(self) -> None:
        """After the last execution."""
        self._history.watch = None
        if self._weights is not None:
            self._weights.release()
        constant_state.made_of_releases(self._of_releases, False)
        self._put_back()

    def _put_back(self) -> None:
        function = self._model.train_function
        while isinstance(function, _Once):
            function = function.function
        self._model.__dict__["train_function"] = function

    def forget_values(self) -> None:
        """The optimizer itself ran between two executions.

        Or somebody says so: what else wrote to the weights since, nobody can tell.
        """
        if self._weights is not None:
            if self._check_updates and self._weights.look() is not None:
                self._assume(UNSEEN_WRITES)
            self._weights = None

    def run(self, function: Callable, iterator: Any) -> Any:
        """Runs one execution."""
        if self._model.optimizer is not self._optimizer:
            raise PrivacyMismatchError(
                "model.optimizer was replaced during training; the steps of the other "
                "one would not be counted. Compile between two calls of fit."
                + see("updates-by-something-else")
            )
        scheduled = self._start is not None
        if scheduled and self._start != (
            found := whole_number(self._optimizer.iterations)
        ):
            raise PrivacyMismatchError(
                f"The step was accounted for with the noise of step {self._start}, and "
                f"optimizer.iterations is {found} now: a callback set it in "
                "on_train_batch_begin. noise_multiplier follows a schedule of it. Set "
                "it between two epochs (on_epoch_begin), or let the schedule restart "
                "by itself: tf.where(step % 1000 < 100, ...)."
                + see("schedules-that-read-more-than-the-step")
            )
        if iterator is not self._iterator:
            self._check_data(iterator)
            self._iterator = iterator
        new = function is not self._seen[0]
        if new or self._functions_eager != tf.config.functions_run_eagerly():
            # Asked once: Keras goes through all layers for it.
            self._functions_eager = tf.config.functions_run_eagerly()
            self._runs_eagerly = runs_eagerly(self._model)
        done = self._before()
        try:
            several = self._several_workers
            with (
                self._building(function) if new else contextlib.nullcontext(),
                self._around(),
                self._step.in_place(self._batches),
                lost_workers_named(several),
                cancelled_replicas_named(1 if several else self._replicas),
            ):
                logs = function(iterator)
            traced = self._traces_since(function)
            releases = self._after(traced, done)
        except BaseException:
            self._ran += self._history.releases - done
            raise
        self._ran += releases - done
        if self._drawer is not None and not self._runs_eagerly:
            self._check_own_data(traced)
        return logs

    def _building(self, function: Callable) -> AbstractContextManager:
        """Says what takes long, if the step was not traced before."""
        traced = _tf_private.trace_count(_compat.step_function_of(function))
        line = None if traced or self._runs_eagerly else self._line
        return _progress.waiting(FIRST_STEP, line)

    @property
    def ran(self) -> int:
        """What `take` would say."""
        return max(0, self._ran)

    def take(self) -> int:
        """Releases of executions since this was asked last."""
        ran, self._ran = self.ran, 0
        return ran

    def _check_data(self, iterator: Any) -> None:
        if self._drawer is None:
            return
        ordered = not self._drawer.scheme.independent_steps
        if self._iterator is not None and ordered and self._drawer.runs_ahead:
            raise PrivacyMismatchError(
                "fit began to iterate its batches anew, and what was gathered ahead of "
                "their order is lost: the steps of a record would come closer to each "
                "other than the scheme keeps them. Train in one call of fit, with "
                "steps_per_epoch." + see("several-replicas")
            )
        data = _tf_private.data_sets_of(iterator)
        if not data and self._replicas > 1:
            raise PrivacyMismatchError(
                f"Where the data of {self._replicas} replicas come from cannot be "
                "seen: a record may be given to several of them. Give fit "
                "batches.distribute(strategy)." + see("several-replicas")
            )
        if not data:
            self._assume(UNSEEN_DATA)
        for dataset in data:
            self._check_origin(dataset)

    def _check_origin(self, dataset: tf.data.Dataset) -> None:
        source = provenance.origin(dataset)
        if source is None:
            drawers = provenance.drawers_of(dataset)
            found = "something else"
            if self._drawer in drawers:
                found = "these batches, but altered, reused or mixed with other data"
            elif drawers:
                found = ", ".join(d.scheme.describe() for d in drawers)
            raise PrivacyMismatchError(
                f"The data of fit were drawn by {found}, not just as the batches of "
                f"{self._drawer.scheme.describe()} that are accounted for. Give the "
                "batches themselves to fit; they have map() for single records, "
                "map_batches(), take() and repeat() of their own."
                + see("batches-drawn-another-way")
            )
        if source._drawer is not self._drawer and (
            self._exact or source.scheme != self._drawer.scheme
        ):
            raise PrivacyMismatchError(
                f"The data of fit were drawn by {source.scheme.describe()}, and what "
                f"is accounted for are other batches, of "
                f"{self._drawer.scheme.describe()}." + see("batches-drawn-another-way")
            )
        if source._replicas != self._replicas:
            raise PrivacyMismatchError(
                f"The data of fit are draws for {source._replicas} replicas, and "
                f"{self._replicas} take part in each step: it would be made of parts "
                "of several draws, in which a record can be more than once. Give fit "
                "batches.distribute(strategy)." + see("several-replicas")
            )
        self._batches = source
        self._fed_by(source._drawer)
        for text in source.assumptions:
            self._assume(text)

    def _check_own_data(self, traced: Iterable | None) -> None:
        for concrete in traced or ():
            if id(concrete) in self._read:
                continue
            self._read.add(id(concrete))
            other = other_data(concrete)
            if other is not None and self.problem is None:
                self.problem = (
                    "The training step takes data that fit did not give it, whose "
                    f"draws are not accounted for: {other}. Put everything into the "
                    "batches; if these data are public, say that the draws are taken "
                    "on trust: "
                    + _budget_with("check_data=False")
                    + see("batches-drawn-another-way")
                )

    def _assume(self, text: str) -> None:
        if text not in self.assumptions:
            self.assumptions.append(text)

    # The weights.

    def _before(self) -> int:
        """Looks at the weights; returns how many releases there were."""
        if not self._check_updates:
            return self._history.releases
        if self._weights is not None:
            self._report(self._weights.look(), "between two steps")
            if self.problem:
                raise PrivacyMismatchError(self.problem)
            self._weights.release()
        self._eager = self._runs_eagerly and self._model.built
        if self._eager:
            self._new_watch()
            self._weights.updates, self._eager_before = 0, EAGER.updates
            self._weights.hold()
            self._history.watch = self._weights
        return self._releases()

    def _after(self, traced: Iterable | None, done: int) -> int:
        """Looks at the weights and at new traces; returns how many releases there are.

        Args:
          traced: new traces of the training step.
          done: what `_before` returned.
        """
        if not self._check_updates:
            return self._history.releases
        self._history.watch = None
        if self._eager:
            if self._weights.updates < self._history.releases - done:
                self._assume(UNSEEN_UPDATES)
            else:
                self._report(self._weights.look(), "by the training step")
            if EAGER.updates - self._eager_before > self._weights.updates:
                self._report_step("the training step, which runs eagerly")
        else:
            self._check_traces(traced)
        self._new_watch()
        self._weights.hold()
        return self._releases()

    def _releases(self) -> int:
        """How many there were when weights were looked at, or are now."""
        if self._weights is None or self._history.counter is None:
            return self._history.releases
        return self._weights.count

    def _new_watch(self) -> None:
        if self._weights is None or self._weights.changed is not None:
            self._weights = self._watch()

    def _watch(self) -> WeightWatch:
        weights = all_unwrapped(self._model.trainable_variables)
        averages = []
        if isinstance(self._history, StepHistory):
            weights += self._optimizer.carried_between_steps()
            averages = self._optimizer.averages()
        return WeightWatch(weights, self._history.counter, averages)

    def _traces_since(self, function: Callable) -> Iterable | None:
        """All traces of the training step; nothing, if they are as many as before.

        None if they cannot be seen. A function only ever gets more of them.
        """
        before, inner, count = self._seen
        if function is not before:
            inner, count = _compat.step_function_of(function), None
        now = _tf_private.trace_count(inner)
        self._seen = function, inner, now
        if now is not None and now == count:
            return ()
        return _tf_private.traces_of(inner)

    def _check_traces(self, traced: Iterable | None) -> None:
        if traced is None or not isinstance(self._history, StepHistory):
            self._assume(UNSEEN_UPDATES)
            return
        for concrete in traced:
            if id(concrete) in self._traced:
                continue
            self._traced.add(id(concrete))
            # Layers may have been made or frozen since.
            self._weights = self._watch()
            watched = [*self._weights.variables, *self._optimizer.written_by_steps()]
            self._check_others(concrete, watched)
            private_state.warn_of(
                kept_of_data(concrete, self._kept(), self._history.identity)
            )
            step = other_step(concrete, self._history.identity)
            if step is not None:
                self._report_step(f"the training step ({step!r})")
            made = made_of_data(concrete, watched, self._history.identity)
            if made is not None and not self.problem:
                self.problem = (
                    "A function, or a branch, that has the private step in it is given "
                    f"more than data: what {made} made of them. Examples may have "
                    "been combined there, which nobody sees from within. Compute it "
                    "in the function that has the loss in it, or, record by record, "
                    "in the data pipeline." + see("mixed-examples")
                )
            read = read_by_update(
                concrete,
                watched,
                self._optimizer.declares_public,
                self._history.identity,
            )
            if read and not self.problem:
                self.problem = (
                    f"The optimizer's update reads {read!r}, which the "
                    "training step writes to, perhaps of private data, as metrics "
                    "are: it would be released with the weights, without noise. Let "
                    "update_step, constraints and the learning rate read nothing but "
                    "the gradient, the variable and what the optimizer keeps; if it "
                    "is of public data, say so: "
                    f"public_variables=[{read!r}] of the optimizer."
                    + see("updates-by-something-else")
                )
            python = next(filter(calls_python, concrete.graph.get_operations()), None)
            if python is not None and not self.problem:
                self.problem = (
                    f"Python code runs in the training step ({python.name!r}): what it "
                    "writes to, the weights perhaps, nobody sees. Use TensorFlow's "
                    "ops, or run it in the data pipeline or in a callback. If it "
                    "writes to no weights, or what depends on released weights and "
                    "public data only, say so: "
                    + _budget_with("allow_outside_updates=True")
                    + see("updates-by-something-else")
                )

    def _check_others(self, concrete: Any, watched: list[tf.Variable]) -> None:
        """Reports what a trace writes to the weights, unless it is of releases."""
        found = other_updates(concrete, watched, self._history.identity)
        released = []
        if found and self._drawer is not None:
            released = made_of_releases(
                concrete,
                [variable for variable, _ in found],
                all_unwrapped(self._model.trainable_variables),
                self._optimizer.written_by_steps(),
                self._history.identity,
            )
        # The losses of later steps read other values of them.
        constant_state.made_of_releases(released, True)
        self._of_releases += released
        known = {id(variable) for variable in released}
        others = (pair for pair in found if id(pair[0]) not in known)
        for variable, what in others:
            self._report(variable, f"by the training step ({what})")

    def _kept(self) -> list[tf.Variable]:
        """What the model has that no gradient trains, but for what is put back."""
        trained = {id(v) for v in all_unwrapped(self._model.trainable_variables)}
        return [
            v
            for v in all_unwrapped(self._model.weights)
            if isinstance(v, tf.Variable)  # Keras 2 has vocabularies among weights.
            and id(v) not in trained
            and getattr(v, PUBLIC_COPY, None) is None
        ]

    def _report(self, variable: tf.Variable | None, how: str) -> None:
        if variable is None or self.problem:
            return
        self.problem = (
            f"{variable.name} was updated {how}, and not by model.optimizer, whose "
            "steps are all that is counted. Train it with model.optimizer.minimize "
            "alone, once in every step. If the update depends on released weights or "
            "public data only, as an average of past weights does, say so: "
            + _budget_with("allow_outside_updates=True")
            + see("updates-by-something-else")
        )

    def _report_step(self, where: str) -> None:
        if self.problem:
            return
        self.problem = (
            f"Another private optimizer takes steps in {where}: this budget counts "
            "those of model.optimizer, and the others release the same data again, "
            "with whatever noise they have. Train everything with model.optimizer, or "
            "one part after the other, each by a fit with a PrivacyBudget of its own "
            "and the same ledger. If you account for the other steps yourself, say so: "
            + _budget_with("allow_outside_updates=True")
            + see("updates-by-something-else")
        )


class _Once:
    """Stands for the training step until it is called."""

    def __init__(self, watch: FitWatch, model: tf.keras.Model, function: Callable):
        self._watch = watch
        self._model = model
        self.function = function

    def __call__(self, iterator: Any) -> Any:
        self._model.__dict__["train_function"] = self.function
        return self._watch.run(self.function, iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)
