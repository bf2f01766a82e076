"""The callback that reports epsilon and stops before a budget is exceeded."""

from __future__ import annotations

import gc
import math
import os
from typing import Any

import dp_accounting
import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip.accounting import accountants, search
from tfdpclip.accounting.ledger import Ledger, PrivacyMismatchError
from tfdpclip.accounting.statement import PrivacyStatement
from tfdpclip.keras import _compat, fit_watch
from tfdpclip.keras.noise_plan import NoisePlan
from tfdpclip.keras.step_history import history_of
from tfdpclip.sampling import batches as batches_lib
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.drawer import DRAWERS, DrawObserver

_OPTIMIZER_ATTRIBUTES = (
    "noise_multiplier",
    "iterations",
    "expected_batch_size",
    "accumulation_steps",
    "clip",
)


class PrivacyBudget(tf.keras.callbacks.Callback):
    """Puts `epsilon` into the logs and stops before a privacy budget is exceeded.

    *Formal guarantees*

    * Training stops before the step that would take the run above (epsilon, delta),
      also with `steps_per_execution` above 1 and with accumulation. If not even one
      execution fits, nothing runs and `fit` raises.
    * What is counted is logical steps (noise draws), by a count that belongs to the
      optimizer object, grows only, and cannot be restored or set. Steps that the
      ledger has not seen (without this callback, before it, between two calls of
      `fit`, before a checkpoint) count as full batches, without amplification. So two
      optimizers in one ledger add up, and going back to an earlier step uncounts
      nothing.
    * The data of `fit` must be batches that the accounted scheme drew, as their own
      methods made them: anything else (arrays, generators, another scheme or rate,
      altered, mixed or cached batches, other accumulation) is refused before its
      first execution. Batches of `map_batches` add an assumption to the statement.
    * The model's trainable variables must be written to by `model.optimizer` alone,
      in the training step and between steps: anything else (a second optimizer, an
      assignment, a callback that sets weights) raises after that execution.
    * Where the noise multiplier follows a schedule, every step is counted with its own
      (an execution of several steps with the least of them), as phases of the ledger.
    * Steps enter the ledger before they run. After a crash, steps that may or may not
      have run are counted.

    Args:
      epsilon: The budget. Infinity only reports.
      delta: In (0, 1).
      sampling: The scheme that draws the data, or better the batches themselves.
      accountant: `"pld"` or `"rdp"`. `"gdp"` is allowed where it is exact (no
        sampling) or where there is no budget to keep.
      ledger: A `Ledger`, or the path of its file (continued if it exists). In memory
        by default: then what an earlier process spent is known from the checkpointed
        step count only.
      check_data: Whether to insist on seeing the draws. With False, `sampling` is
        taken at its word, and the statement says so.
      allow_change: Whether the noise multiplier, clip rule or scheme may differ from
        the ledger's last phase.
      allow_outside_updates: Whether something other than `model.optimizer` may write
        to the weights, such as a callback that averages them. It must depend on
        released weights or public data only; the statement says so.

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
        sampling: SamplingScheme | batches_lib.Batches,
        accountant: str = "pld",
        *,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        check_data: bool = True,
        allow_change: bool = False,
        allow_outside_updates: bool = False,
    ):
        super().__init__()
        self.epsilon = _arguments.target_epsilon(epsilon)
        self.delta = _arguments.delta(delta)
        _arguments.choice("accountant", accountant, accountants.ACCOUNTANTS)
        self._batches = sampling if isinstance(sampling, batches_lib.Batches) else None
        self.sampling = getattr(sampling, "scheme", sampling)
        if not isinstance(self.sampling, SamplingScheme):
            raise ValueError(
                "sampling must be a scheme of tfdpclip.sampling, such as "
                "Poisson(rate), or its batches; got "
                f"{_arguments.shown(sampling)}."
            )
        if accountant == "gdp" and self.sampling.amplified and epsilon != math.inf:
            raise ValueError(
                'accountant="gdp" approximates sampling and cannot keep a budget; use '
                '"pld".'
            )
        self.ledger = Ledger.open(ledger, self.delta, accountant)
        self._check_data = _arguments.boolean("check_data", check_data)
        self._allow_change = _arguments.boolean("allow_change", allow_change)
        self._allow_outside_updates = _arguments.boolean(
            "allow_outside_updates", allow_outside_updates
        )
        self._running_optimizer = None
        self._watch: fit_watch.FitWatch | None = None
        self._look_for_unseen = True
        self._planned: int | None = None
        self._longest = 1
        self._unseen = 0
        self._done = 0

    @property
    def statement(self) -> PrivacyStatement:
        """What was spent, with everything the number means nothing without."""
        return self.ledger.statement()

    def on_train_begin(self, logs=None):
        del logs
        optimizer = _private_optimizer(self.model.optimizer)
        if _compat.tunes_steps_per_execution(self.model):
            raise ValueError(
                'steps_per_execution="auto" changes how many steps run at a time while '
                "they run; give a number, so that the budget can be kept."
            )
        self._settle(optimizer)
        if self.model.built:
            optimizer.build(self.model.trainable_variables)
        self._optimizer = optimizer
        self._noise = NoisePlan(optimizer)
        self._pieces = int(optimizer.accumulation_steps)
        self._offset = 0
        self._longest = 1
        self._observer = DrawObserver() if self._check_data else None
        drawer = self._expected_drawer()
        scheme = self.sampling if drawer is None else drawer.scheme
        if drawer is not None:
            self._check_drawer(drawer)
            self._offset = drawer.begin(optimizer)
        self._executed = self._offset
        self._history = history_of(optimizer)
        self._phase = {
            "sampling": scheme,
            "unit": getattr(optimizer, "unit", "example"),
            "clip": str(optimizer.clip),
            "seed": _first_seed(optimizer, drawer),
            "observed": self._check_data,
            "holder": self._history.identity,
        }
        iterations = int(optimizer.iterations.numpy())
        self._z = self._noise.least(iterations, 1)
        if self._noise.scheduled and self.ledger.phases:
            self._z = self.ledger.phases[-1].noise_multiplier
        self.ledger.begin(
            noise_multiplier=self._z, change=self._allow_change, **self._phase
        )
        if self._allow_outside_updates:
            self.ledger.assume(fit_watch.OUTSIDE_UPDATES)
        self._watch = fit_watch.FitWatch(
            self.model,
            self._history,
            drawer if self._check_data else None,
            self._batches is not None,
            not self._allow_outside_updates,
        )
        self._scheme = scheme
        self._count_begun_epoch(drawer)
        self._count_unseen()
        self._plan()

    def on_train_batch_begin(self, batch, logs=None):
        del logs
        counted = self.ledger.counted.get(self._history.identity, 0)
        if self._look_for_unseen or self._history.releases != counted:
            # Another callback may have restored a checkpoint, or trained.
            self._look_for_unseen = False
            if self._count_unseen():
                self._plan(self._done)
                self._watch.forget_values()
        if not self._noise.scheduled and (
            float(self._optimizer.noise_multiplier) != self._z
        ):
            raise PrivacyMismatchError(
                f"noise_multiplier changed from {self._z} to "
                f"{self._optimizer.noise_multiplier} during training; change it "
                "between two calls of fit, with allow_change=True."
            )
        needed = self._logical(self._physical(batch))
        if needed:
            iterations = int(self._optimizer.iterations.numpy())
            self._follow(self._noise.least(iterations, needed))
        self._reserve(needed)
        self._watch.arm()

    def on_train_batch_end(self, batch, logs=None):
        del logs
        physical = self._physical(self._begun)
        self._executed += physical
        ran = self._watch.take()
        self._done += ran
        self._record(ran)
        for text in self._watch.assumptions:
            self.ledger.assume(text)
        if self._watch.problem:
            self.ledger.assume(
                f"something ran that is not counted: {self._watch.problem}"
            )
            self.ledger.save()
            raise PrivacyMismatchError(self._watch.problem)
        if self._planned is not None and self._done >= self._planned:
            return  # Keras stops by itself, and everything planned was allowed.
        following = self._physical(batch + 1)
        if self._done + max(1, self._logical(following)) > self._allowed:
            self.model.stop_training = True
            print(
                f"\nPrivacyBudget: stopping after {self.ledger.steps} steps; one more "
                f"would exceed epsilon = {self.epsilon:g}."
            )

    def on_epoch_begin(self, epoch, logs=None):
        del epoch, logs
        self._look_for_unseen = True

    def on_epoch_end(self, epoch, logs=None):
        del epoch
        if logs is not None:
            logs["epsilon"] = self.ledger.epsilon()

    def on_train_end(self, logs=None):
        del logs
        self._watch.end()
        self._settle(self._optimizer)
        self._count_unseen()

    def _record(self, ran: int) -> None:
        """Counts an execution: as what it should have been, if it was that."""
        try:
            if self._observer is not None:
                self._check_draws()
            if self._done != self._executed // self._pieces:
                raise PrivacyMismatchError(
                    f"{self._executed} physical batches with accumulation_steps = "
                    f"{self._pieces} are {self._executed // self._pieces} steps, but "
                    f"the optimizer took {self._done}: it began in the middle of a "
                    "step, does not count noise draws, or is used more than once in "
                    "every step."
                )
        except PrivacyMismatchError:
            # How its records were drawn is not known.
            self.ledger.add_unseen(ran, holder=self._history.identity)
            raise
        self.ledger.record(ran, save=False)
        self._count_other_draws()

    # How many steps, when.

    def _plan(self, done: int = 0) -> None:
        """Works out how many steps this call of fit may run, with those done."""
        self._done = done
        steps, epochs = self.params.get("steps"), self.params.get("epochs", 1)
        self._planned = (
            -(-steps * epochs // self._pieces) if steps is not None else None
        )
        planned = None if self._planned is None else self._planned - done
        if self.epsilon == math.inf:
            left = math.inf
        elif planned and self._epsilon_after(planned) <= self.epsilon:
            left = planned
        elif self._noise.scheduled:
            left = search.most_steps(self._epsilon_after, self.epsilon)
        else:
            left = self.ledger.steps_left(self.epsilon)
        first = max(1, self._logical(self._physical(0)))
        if left < first:
            raise ValueError(self._nothing_fits(left, first))
        self._allowed = done + left

    def _epsilon_after(self, more: int, coarseness: float = 1.0) -> float:
        """Epsilon after `more` steps, each with the noise planned for it."""
        if not self._noise.scheduled:
            return self.ledger.epsilon(more=more)
        start = int(self._optimizer.iterations.numpy())
        # Where an execution begins is not known; its least noise is what counts.
        width = max(1, self._logical(self._steps_per_execution()))
        event = dp_accounting.ComposedDpEvent(
            [
                self.ledger.event(),
                *(
                    self._scheme.event(z, steps, unit=self._phase["unit"])
                    for z, steps in self._noise.segments(start, more, width)
                ),
            ]
        )
        return accountants.epsilon(
            event, self.delta, self.ledger.accountant, coarseness
        )

    def _follow(self, z: float) -> None:
        """Opens a phase where the noise schedule has moved."""
        if z == self._z:
            return
        self._z = z
        self.ledger.begin(noise_multiplier=z, change=True, **self._phase)

    def _nothing_fits(self, left: float, wanted: int) -> str:
        spent = self.ledger.epsilon()
        message = (
            f"The privacy budget epsilon = {self.epsilon:g} at delta = "
            f"{self.delta:g} leaves room for {left} steps, and the first "
            f"execution needs {wanted}. Spent so far: {spent:.4g} in "
            f"{self.ledger.steps} steps."
        )
        if self._unseen:
            message += (
                f" {self._unseen} of them ran where the ledger did not see them, and "
                "count as full batches: keep one ledger for all calls of fit, "
                "PrivacyBudget(..., ledger=path), and train with the callback only."
                + see("steps-that-are-not-counted")
            )
        if self._z == 0:
            return f"{message} noise_multiplier is 0, which is not private."
        if left:
            return f"{message} Lower steps_per_execution."
        return f"{message} Raise noise_multiplier ({self._z:g}) or the budget." + see(
            "a-spent-budget"
        )

    def _physical(self, batch: int) -> int:
        """Returns how many physical batches the execution from `batch` on runs."""
        self._begun = batch
        size = self._steps_per_execution()
        steps = self.params.get("steps")
        if steps is None:
            return size
        return min(size, steps - batch % steps)

    def _steps_per_execution(self) -> int:
        value = _compat.steps_per_execution(self.model)
        # Keras lowers the variable for the last, partial execution of an epoch.
        self._longest = max(value, self._longest)
        return self._longest

    def _logical(self, physical: int) -> int:
        """Returns how many logical steps end within the next physical batches."""
        return (self._executed % self._pieces + physical) // self._pieces

    def _reserve(self, needed: int) -> None:
        missing = needed - self.ledger.reserved
        if missing <= 0:
            return
        # A hundredth of the run at a time: few writes, little lost in a crash.
        ahead = missing
        if not self._noise.scheduled:
            ahead = max(missing, (self._planned or 0) // 100)
        room = self._allowed - self._done - self.ledger.reserved
        self.ledger.reserve(int(max(missing, min(ahead, room))))

    def _count_unseen(self) -> int:
        """Counts the steps behind the optimizer that the ledger does not know."""
        total, counted = 0, self.ledger.counted
        for name, part in self._history.known().items():
            unseen = part.steps - counted.get(name, 0)
            z = part.noise_multiplier
            if unseen > 0:
                if z is None:
                    iterations = int(self._optimizer.iterations.numpy())
                    z = self._noise.least(0, max(1, iterations))
                self.ledger.add_unseen(
                    unseen, noise_multiplier=z, unit=part.unit, holder=name
                )
                total += unseen
        own = self._history.identity
        if counted.get(own, 0) > self._history.releases:
            # Reserved steps that did not run after all, and were counted: if they run
            # now, where nobody looks, they count again.
            counted[own] = self._history.releases
        self._unseen += total
        return total

    def _settle(self, optimizer) -> None:
        """Closes the books on a call of fit, also on one that an error ended."""
        running, self._running_optimizer = self._running_optimizer, optimizer
        if (
            running is optimizer
            and self._watch is not None
            and self.ledger.holder == history_of(optimizer).identity
        ):
            # An execution that an error ended, after it ran.
            self.ledger.record(self._watch.take(), save=False)
            self.ledger.release()
        self._watch = None

    # Whether the data are what is accounted for.

    def _expected_drawer(self):
        """Returns what will feed the run, as far as can be known beforehand."""
        if self._batches is not None:
            return self._batches._drawer
        if not self._check_data:
            return None
        candidates = self._candidates()
        if len({drawer.scheme for drawer in candidates}) > 1:
            gc.collect()  # Batches of earlier runs may be waiting for this.
            candidates = self._candidates()
        if not candidates:
            raise PrivacyMismatchError(
                f"No batches drawn by {self.sampling.describe()} exist, so the data "
                "given to fit are something else. Pass "
                f"sampling.{self.sampling!r}.batches(data) to fit, and account for the "
                "same scheme (or pass those batches as `sampling`)."
                + see("batches-drawn-another-way")
            )
        if len({drawer.scheme for drawer in candidates}) > 1:
            raise PrivacyMismatchError(
                "Several batches of this rate exist, of different capacity or "
                "population. Pass the ones given to fit as `sampling`."
            )
        return candidates[0]

    def _candidates(self) -> list:
        return [
            drawer for drawer in DRAWERS if self.sampling.accounts_for(drawer.scheme)
        ]

    def _check_drawer(self, drawer) -> None:
        if self._phase_unit() == "group" and not drawer.independent_groups:
            raise PrivacyMismatchError(
                "One record more would move the others to other groups, and so change "
                "every clipped group of its step. Draw with scheme.batches(data, "
                f"accumulation_steps={drawer.pieces}, independent_groups=True)."
                + see("clipped-batches-and-groups")
            )
        if drawer.by_group and self._phase_unit() != "group":
            raise PrivacyMismatchError(
                "The batches were drawn with independent_groups=True, which drops "
                'records of a full group; that is accounted for with unit="batch" and '
                "accumulation_steps above 1 only."
            )
        if drawer.pieces != self._pieces:
            raise PrivacyMismatchError(
                f"The batches have accumulation_steps = {drawer.pieces}, the optimizer "
                f"{self._pieces}: a step would not be one draw."
            )
        expected = drawer.scheme.expected_batch_size(drawer.source.size)
        stated = self._optimizer.expected_batch_size
        if stated is None:
            return
        if not abs(float(stated) - expected) <= 0.5 + 0.01 * expected:
            raise PrivacyMismatchError(
                f"The optimizer's expected_batch_size is {stated}, but "
                f"{drawer.scheme.describe()} of {drawer.source.size} records expects "
                f"{expected:.6g} per step." + see("the-actual-batch-size")
            )

    def _phase_unit(self) -> str:
        return getattr(self._optimizer, "unit", "example")

    def _check_draws(self) -> None:
        ours, rest = self._ours()
        executed = self._executed - self._offset
        if sum(count for _, count in ours) < executed:
            others = [d.scheme.describe() for d in rest]
            origin = f"by {', '.join(others)}" if others else "by something else"
            raise PrivacyMismatchError(
                f"{executed} batches were trained on, but not as many were drawn "
                f"by the batches accounted for ({self._scheme.describe()}): the data "
                f"of fit were drawn {origin}, or batches were reused. That step's "
                "privacy is unknown." + see("batches-drawn-another-way")
            )
        for drawer, _ in ours:
            self._check_drawer(drawer)

    def _ours(self) -> tuple[list, list]:
        """What the accounted batches drew, and what others did."""
        drawn = self._observer.drawn()
        wanted = None if self._batches is None else self._batches._drawer
        ours = [
            (d, count)
            for d, count in drawn
            if d.scheme == self._scheme and (wanted is None or d is wanted)
        ]
        return ours, [d for d, count in drawn if (d, count) not in ours]

    def _count_other_draws(self) -> None:
        """Counts elements that were drawn for another purpose.

        They move the run along its shuffle.
        """
        if self._observer is None or self._scheme.independent_steps:
            return
        current = self.ledger.phases[-1]
        for _, count in self._ours()[0]:
            current.runs[-1] += max(0, count // self._pieces - current.runs[-1])

    def _count_begun_epoch(self, drawer) -> None:
        """Counts the rest of a shuffled epoch that something else has begun."""
        if self._scheme.independent_steps or drawer is None:
            return
        epoch = self._scheme.steps_per_epoch(drawer.source.size)
        if (drawer.position // drawer.pieces - drawer._first_step) % epoch:
            self.ledger.phases[-1].runs.insert(-1, 1)


def _private_optimizer(optimizer: Any) -> Any:
    missing = [a for a in _OPTIMIZER_ATTRIBUTES if not hasattr(optimizer, a)]
    if missing:
        raise ValueError(
            "PrivacyBudget needs a private optimizer, such as "
            "tfdpclip.keras.DPSGD(...); "
            f"{type(optimizer).__name__} has no {', '.join(missing)}."
        )
    return optimizer


def _first_seed(optimizer, drawer) -> int | None:
    seeds = (getattr(optimizer, "seed", None), getattr(drawer, "seed", None))
    return next((seed for seed in seeds if seed is not None), None)
