"""Checks the data that `fit` feeds to the training step, and the step's writes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfdpclip import _progress, _tf_private
from tfdpclip._docs import TracedError, see
from tfdpclip._notes import NOTES
from tfdpclip._object_notes import notes_of_variable
from tfdpclip._variables import all_unwrapped, components, whole_number
from tfdpclip.accounting.phases import PrivacyMismatchError
from tfdpclip.gradients.errors import LossStructureError
from tfdpclip.keras import _compat, replicas
from tfdpclip.keras.watching import constant_state, private_state
from tfdpclip.keras.watching.compiled_steps import CompiledSteps
from tfdpclip.keras.watching.executions import runs_eagerly
from tfdpclip.keras.watching.followed_step import FollowedStep, followed_step
from tfdpclip.keras.watching.step_history import ForeignHistory, StepHistory
from tfdpclip.keras.watching.step_labels import StepLabels
from tfdpclip.keras.watching.step_search import (
    ALTERED_DATA,
    find_altered_data,
    find_other_updates,
    find_private_read,
    find_variables_given_data,
    made_of_releases,
)
from tfdpclip.keras.watching.weight_watch import WeightWatch
from tfdpclip.keras.workers import explain_cancelled_replicas, explain_lost_workers
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
    "nothing but the optimizer updated the weights between two steps of fit; the "
    "optimizer took steps there, which are counted as full batches"
)
OUTSIDE_UPDATES = (
    "the updates of the weights by anything but the optimizer depend on released "
    "values or public data only (allow_outside_updates)"
)

# A part of TensorFlow's error for a tensor of a foreign graph.
_STAGED = "AutoGraph tried to define it automatically, but ran into a "
_OUT_OF_SCOPE = "out of scope"
FIRST_STEP = "building the private step, and comparing its gradients"
FIRST_STEP_LINE = (
    "\ntfdpclip: building the private step and checking it. This happens once for a "
    "model. It can take minutes for a large model; later steps do not wait for it."
)


def _budget_with(option: str) -> str:
    """Code that makes a `PrivacyBudget` with an option, with or without a plan."""
    return (
        f"PrivacyBudget(..., {option}), or, with a plan, in the place of "
        "plan.callbacks, [dpc.keras.PrivacyBudget(plan.epsilon, plan.delta, batches, "
        f"ledger=plan.ledger, {option})]."
    )


class FitWatch:
    """Wraps the training step of a call of `fit`, and checks each execution.

    Keras gives callbacks neither the data nor the step. But Keras looks up
    `model.train_function` before every execution, and calls the function with the
    iterator. The watch therefore replaces `model.train_function` before each
    call.

    *Formal guarantees*

    * No execution runs on an iterator but of the drawer's batches, or of batches made
      by their methods.
    * A write to a weight by anything but the optimizer, in the traced step or between
      two executions, is reported before the next execution.

    Args:
      model: the model.
      history: the optimizer's history.
      drawer: the drawer that must draw the data; None switches this check off.
      exact: whether a second drawer of the same scheme is refused.
      check_updates: whether to look for outside writes to the weights.
      fed_by: called with the drawer of the data, before the first execution.
      several_workers: whether several processes take part in every step.
      around: makes the context in which every execution runs.
      says: whether `fit` prints its progress; the watch then prints, too.
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
        self._replicas = replicas.replica_count_of(model)
        self._weights: WeightWatch | None = None
        self._iterator: Any = None
        self._batches: Batches | None = None
        self._step: FollowedStep | None = None
        compares = getattr(self._optimizer, "check_gradients", None) == "first"
        self._compiled = CompiledSteps(model, compares)
        self._traced: set[int] = set()
        # Variables that the step writes beside the optimizer, of releases alone.
        self._of_releases: list[tf.Variable] = []
        # Whether the step runs eagerly, and all optimizers' releases before the step.
        self._eager, self._all_before = False, {}
        self._runs_eagerly, self._functions_eager = False, False
        # The last training step that was checked, the `tf.function` in that step, and
        # the number of its traces.
        self._seen: tuple[Any, Any, int | None] = (None, None, None)
        self._ran = 0
        self._start: int | None = None
        #: The error message for the last execution; None if the execution was sound.
        self.problem: str | None = None
        #: Assumptions for the statement: checks that were impossible, and
        #: assumptions that the batches ask for.
        self.assumptions: list[str] = []

    def arm(self, start: int | None = None) -> None:
        """Watches the next call of the training step; called before an execution.

        Args:
          start: the step counter that the execution is accounted for; None if the
            noise follows no schedule.
        """
        self._start = start
        self._put_back()
        self._step = followed_step(self._model)
        function = self._model.train_function
        # A plain assignment would go through Keras's attribute tracking, which is slow.
        self._model.__dict__["train_function"] = _WatchedCall(
            self, self._model, function
        )

    def end(self) -> None:
        """Ends the watch after the last execution."""
        self._history.watch = None
        self._compiled.end()
        if self._weights is not None:
            self._weights.release()
        constant_state.exempt_releases(self._of_releases, False)
        self._put_back()

    def _put_back(self) -> None:
        function = self._model.train_function
        while isinstance(function, _WatchedCall):
            function = function.function
        self._model.__dict__["train_function"] = function

    def forget_values(self) -> None:
        """Forgets the weights after the optimizer took steps between two executions.

        Writes since the last execution cannot be told from the optimizer's steps, and
        become an assumption of the statement.
        """
        if self._weights is not None:
            if self._check_updates and self._weights.look() is not None:
                self._assume(UNSEEN_WRITES)
            self._weights = None

    def run(self, function: Callable, iterator: Any) -> Any:
        """Runs an execution."""
        if self._model.optimizer is not self._optimizer:
            raise PrivacyMismatchError(
                "model.optimizer was replaced during training; the steps of the new "
                "optimizer would not be counted. Call compile between two calls of fit."
                + see("updates-by-something-else")
            )
        scheduled = self._start is not None
        if scheduled and self._start != (
            found := whole_number(self._optimizer.iterations)
        ):
            raise PrivacyMismatchError(
                f"The step was accounted for with the noise of step {self._start}, but "
                f"optimizer.iterations is {found} now: a callback set it in "
                "on_train_batch_begin, and the schedule of noise_multiplier depends on "
                "it. Set it between two epochs (on_epoch_begin), or restart the "
                "schedule by its formula: tf.where(step % 1000 < 100, ...)."
                + see("schedules-that-read-more-than-the-step")
            )
        if iterator is not self._iterator:
            self._check_data(iterator)
            self._iterator = iterator
        self._compiled.begin(function, iterator, self._step)
        function = self._compiled.function
        new = function is not self._seen[0]
        if new or self._functions_eager != tf.config.functions_run_eagerly():
            # Asked once: Keras visits all layers to answer.
            self._functions_eager = tf.config.functions_run_eagerly()
            self._runs_eagerly = runs_eagerly(self._model)
        done = self._before()
        try:
            several = self._several_workers
            with (
                self._building(function) if new else contextlib.nullcontext(),
                self._around(),
                self._step.in_place(self._batches),
                _explain_added_losses(),
                _raise_as_traced(),
                _explain_kept_traces(),
                _hide_values(done),
                explain_lost_workers(several),
                explain_cancelled_replicas(1 if several else self._replicas),
            ):
                logs = self._compiled.run(iterator)
            function = self._compiled.ran
            traced = self._traces_since(function)
            releases = self._after(traced, done)
        except BaseException:
            self._ran += self._history.releases - done
            self._forget_untraced(function)
            raise
        self._ran += releases - done
        if self._drawer is not None and not self._runs_eagerly:
            self._check_own_data(traced)
        return logs

    def _forget_untraced(self, function: Callable) -> None:
        """Has Keras make the training function anew if no trace was completed.

        If the first trace of a `tf.function` made variables and raised, later calls do
        nothing, and return None.
        """
        if _tf_private.trace_count(_compat.step_function_of(function)) == 0:
            self._model.__dict__["train_function"] = None

    def _building(self, function: Callable) -> AbstractContextManager:
        """Announces the first trace of a step, which can take minutes."""
        traced = _tf_private.trace_count(_compat.step_function_of(function))
        line = None if traced or self._runs_eagerly else self._line
        return _progress.waiting(FIRST_STEP, line)

    @property
    def ran(self) -> int:
        """The number of releases that `take` would return."""
        return max(0, self._ran)

    def take(self) -> int:
        """Returns the number of releases since the last call, and begins at 0 again."""
        ran, self._ran = self.ran, 0
        return ran

    def _check_data(self, iterator: Any) -> None:
        if self._drawer is None:
            return
        ordered = not self._drawer.scheme.independent_steps
        if self._iterator is not None and ordered and self._drawer.runs_ahead:
            raise PrivacyMismatchError(
                "fit began to iterate its batches anew, and the draws that were "
                "gathered ahead are lost: two steps of a record could come closer to "
                "each other than the scheme allows. Train in one call of fit, with "
                "steps_per_epoch." + see("several-replicas")
            )
        data = _tf_private.data_sets_of(iterator)
        if not data and self._replicas > 1:
            raise PrivacyMismatchError(
                f"The source of the data of {self._replicas} replicas cannot be "
                "traced: several replicas may get the same record. Give fit "
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
            found, also = "something else", ""
            if self._drawer in drawers:
                found = "these batches, but altered, reused or mixed with other data"
                also = (
                    " In the scope of a strategy, of one device as well, give fit "
                    "batches.distribute(strategy) and steps_per_epoch."
                )
            elif drawers:
                found = ", ".join(d.scheme.describe() for d in drawers)
            raise PrivacyMismatchError(
                f"The data of fit were drawn by {found}, not just as the batches of "
                f"{self._drawer.scheme.describe()} that are accounted for. Give the "
                "batches to fit unchanged. To transform them, use their own methods "
                f"map() (single records), map_batches(), take() and repeat().{also}"
                + see("batches-drawn-another-way")
            )
        if source._drawer is not self._drawer and (
            self._exact or source.scheme != self._drawer.scheme
        ):
            found, counted = source.scheme.describe(), self._drawer.scheme.describe()
            problem = (
                f"The data of fit were drawn by {found}, but the accounted batches are "
                f"drawn by {counted}."
            )
            if found == counted:
                problem = (
                    f"The data of fit, drawn by {found}, are another object than the "
                    "batches of the budget, which would begin other draws. Make them "
                    "once: batches = plan.batches(data); then callbacks=plan.callbacks "
                    "and fit(batches, ...)."
                )
            raise PrivacyMismatchError(problem + see("batches-drawn-another-way"))
        if source._replicas != self._replicas:
            raise PrivacyMismatchError(
                f"The data of fit are draws for {source._replicas} replicas, but "
                f"{self._replicas} take part in each step: a step would mix parts of "
                "several draws, and could contain a record twice. Give fit "
                "batches.distribute(strategy)." + see("several-replicas")
            )
        self._batches = source
        self._fed_by(source._drawer)
        for text in source.assumptions:
            self._assume(text)

    def _check_own_data(self, traced: Iterable | None) -> None:
        for concrete in traced or ():
            other = self._labels_of(concrete).other_data
            if other is not None and self.problem is None:
                self.problem = (
                    "The training step reads data that fit did not give it, and the "
                    f"draws of these data are not accounted for: {other}. Put all data "
                    "into the batches. If these data are public, take the draws "
                    "on trust: "
                    + _budget_with("check_data=False")
                    + see("batches-drawn-another-way")
                )

    def _labels_of(self, concrete: Any) -> StepLabels:
        """The labels of a trace, made once for all calls of `fit`."""
        labels = self._history.labels
        if concrete.graph not in labels:
            labels[concrete.graph] = StepLabels(concrete.graph, self._history.identity)
        return labels[concrete.graph]

    def _assume(self, text: str) -> None:
        if text not in self.assumptions:
            self.assumptions.append(text)

    # The weights.

    def _before(self) -> int:
        """Checks the weights before an execution; returns the number of releases."""
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
            self._weights.updates, self._all_before = 0, NOTES.releases_so_far()
            self._weights.hold()
            self._history.watch = self._weights
        return self._releases()

    def _after(self, traced: Iterable | None, done: int) -> int:
        """Checks weights and new traces; returns the number of releases.

        Args:
          traced: new traces of the training step.
          done: the number that `_before` returned.
        """
        if not self._check_updates:
            return self._history.releases
        self._history.watch = None
        if self._eager:
            if self._weights.updates < self._history.releases - done:
                self._assume(UNSEEN_UPDATES)
            else:
                self._report(self._weights.look(), "by the training step")
            counted = {self._history.identity: self._history.releases}
            if NOTES.releases_since(self._all_before | counted):
                self._report_step("the training step, which runs eagerly")
        else:
            self._check_traces(traced)
        self._new_watch()
        self._weights.hold()
        return self._releases()

    def _releases(self) -> int:
        """The number of releases at the last look at the weights, or now."""
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
            weights += self._frozen_since()
            weights += self._optimizer.carried_between_steps()
            averages = self._optimizer.averages()
        return WeightWatch(weights, self._history.counter, averages)

    def _frozen_since(self) -> list[tf.Variable]:
        """Weights that this optimizer trained before they were frozen.

        Losses may read them, as they read trained weights.
        """
        counter = self._history.counter
        return [
            v
            for v in self._frozen()
            if notes_of_variable(components(v)[0]).releases is counter
        ]

    def _traces_since(self, function: Callable) -> Iterable | None:
        """All traces of the training step, or () if there is no new trace.

        Returns None if the traces cannot be seen. The number of traces never falls.
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
            # Layers may have been made or frozen since the last trace.
            self._weights = self._watch()
            watched = [*self._weights.variables, *self._optimizer.written_by_steps()]
            step = self._labels_of(concrete)
            self._check_others(step, watched)
            private = find_variables_given_data(step, self._frozen())
            private_state.warn_of_private_values(private)
            if step.other_step is not None:
                self._report_step(f"the training step ({step.other_step!r})")
            made = find_altered_data(step, watched)
            if made is not None and not self.problem:
                self.problem = ALTERED_DATA.format(made)
            public = self._optimizer.declares_public
            read = find_private_read(step, concrete.graph, watched, public)
            if read and not self.problem:
                self.problem = (
                    f"The optimizer's update reads {read!r}, which the training step "
                    "writes to, perhaps from private data (as metrics do): the value "
                    "would be released with the weights, without noise. Let "
                    "update_step, constraints and the learning rate read only the "
                    "gradient, the variable and the optimizer's state. If the value "
                    "comes from public data, write "
                    f"public_variables=[{read!r}] to the optimizer."
                    + see("updates-by-something-else")
                )
            if step.python is not None and not self.problem:
                self.problem = (
                    f"Python code runs in the training step ({step.python}), and its "
                    "writes, perhaps to the weights, cannot be seen. Use TensorFlow's "
                    "ops, or run the code in the data pipeline or in a callback. If "
                    "the code writes to no weights, or writes only released or public "
                    "values to them, write "
                    + _budget_with("allow_outside_updates=True")
                    + see("updates-by-something-else")
                )

    def _check_others(self, step: StepLabels, watched: list[tf.Variable]) -> None:
        """Reports a trace's writes to the weights, unless they are of releases."""
        updates = find_other_updates(step, watched)
        released = []
        if updates and self._drawer is not None:
            released = made_of_releases(
                step,
                [variable for variable, _ in updates],
                all_unwrapped(self._model.trainable_variables),
                self._optimizer.written_by_steps(),
            )
        # The losses of later steps read newer values of the variables.
        constant_state.exempt_releases(released, True)
        self._of_releases += released
        exempt = {id(variable) for variable in released}
        for variable, what in updates:
            if id(variable) not in exempt:
                self._report(variable, f"by the training step ({what})")

    def _frozen(self) -> list[tf.Variable]:
        """The model's non-trainable variables without a public copy to restore."""
        trained = {id(v) for v in all_unwrapped(self._model.trainable_variables)}
        return [
            v
            for v in all_unwrapped(self._model.weights)
            if isinstance(v, tf.Variable)  # Keras 2 has vocabularies among weights.
            and id(v) not in trained
            and notes_of_variable(v).public_copy is None
        ]

    def _report(self, variable: tf.Variable | None, how: str) -> None:
        if variable is None or self.problem:
            return
        self.problem = (
            f"{variable.name} was updated {how}, and not by model.optimizer; only the "
            "steps of model.optimizer are counted. Train the variable with "
            "model.optimizer.minimize alone, once in every step. If the update depends "
            "on released weights or public data only (an average of past weights, for "
            "instance), write "
            + _budget_with("allow_outside_updates=True")
            + see("updates-by-something-else")
        )

    def _report_step(self, where: str) -> None:
        if self.problem:
            return
        self.problem = (
            f"Another private optimizer takes steps in {where}, and this budget counts "
            "the steps of model.optimizer only. Train everything with model.optimizer, "
            "or train one part after the other, each by a fit with a PrivacyBudget of "
            "its own and the same ledger. If you account for the second optimizer "
            "yourself, write "
            + _budget_with("allow_outside_updates=True")
            + see("updates-by-something-else")
        )


@contextlib.contextmanager
def _explain_added_losses() -> Iterator[None]:
    """Explains Keras's error about the shapes of added losses, with code to write."""
    try:
        yield
    except ValueError as error:
        if _compat.ADDS_LOSSES is None or _compat.ADDS_LOSSES not in str(error):
            raise
        raise LossStructureError(
            "add_loss was given a loss for each example, and Keras 2 adds numbers "
            "only. Write self.add_loss(tf.reduce_mean(losses)): each example's part of "
            "the mean is clipped with its own loss."
            + see("losses-that-divide-by-the-batch")
        ) from error


@contextlib.contextmanager
def _raise_as_traced() -> Iterator[None]:
    """Raises an error that AutoGraph replaced by an error of its own.

    AutoGraph tries the first of several steps in an execution, and says of an error
    there that a variable of the loop is undefined.
    """
    try:
        yield
    except ValueError as error:
        name, _, text = str(error).partition(_STAGED)[2].partition(": ")
        for kind in (ValueError, TracedError, *TracedError.__subclasses__()):
            if kind.__name__ == name:
                raise kind(text.replace("\n    ", "\n").rstrip()) from None
        raise


@contextlib.contextmanager
def _explain_kept_traces() -> Iterator[None]:
    """Explains the error of the trace of a function that `train_step` calls.

    The trace reads the weights of the element of a single training function.
    """
    try:
        yield
    except TypeError as error:
        if _OUT_OF_SCOPE not in str(error):
            raise
        raise LossStructureError(
            "train_step calls a tf.function that takes the private step, and that was "
            "traced for an earlier training function of this model. Call the Python "
            "function, without tf.function (fit traces all of train_step), or make the "
            "tf.function anew after each compile()." + see("rows-that-fill-a-batch-up")
        ) from error


@contextlib.contextmanager
def _hide_values(done: int) -> Iterator[None]:
    """Keeps the values of a drawn record out of the error of a failed assertion.

    The step stays reserved, and so counted: its failure tells of a drawn record.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if "assertion failed" not in error.message or "docs/" in error.message:
            raise
        nodes = re.findall(r"{{node (.*?)}}", error.message)
        name = nodes[-1] if nodes else "an assertion"
    else:
        return
    raise ValueError(
        f"A drawn record fails {name!r} after {done} steps, and the step that failed "
        "is counted; its values are not shown, as they would tell who was drawn. Give "
        "values that a vocabulary lacks an entry: "
        "num_oov_indices=1 of the lookup, and one more row in the layer behind it. "
        "Change other values before batches are drawn." + see("numbers-out-of-range")
    )


class _WatchedCall:
    """Stands in the place of `model.train_function` until the next call begins."""

    def __init__(self, watch: FitWatch, model: tf.keras.Model, function: Callable):
        self._watch = watch
        self._model = model
        self.function = function

    def __call__(self, iterator: Any) -> Any:
        self._model.__dict__["train_function"] = self.function
        return self._watch.run(self.function, iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)
