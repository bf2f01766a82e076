"""Who drew the batches of a call of `fit`: what is accounted for, or something else."""

from __future__ import annotations

import gc
import inspect
import math
import types
import warnings
from typing import Any

from tfdpclip._docs import see
from tfdpclip.accounting.ledger import Ledger
from tfdpclip.accounting.phases import PrivacyMismatchError
from tfdpclip.keras import _compat
from tfdpclip.keras.loss_shapes import refuse_misfit
from tfdpclip.keras.watching.executions import runs_eagerly
from tfdpclip.keras.watching.step_history import history_of
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.batches import Batches
from tfdpclip.sampling.drawer import DRAWERS, DrawObserver

# Where a step is expected to have fewer, one of a thousand has nobody.
_FEW = 7

# Of correlated noise.
_MORE_DRAWN = (
    "{} steps were drawn from the batches and not trained on, so that the steps of a "
    "record came closer to each other than its correlated noise is made for. Draw what "
    "else you need (evaluation, a look at the data) from batches of their own."
)


def _calling_fit() -> types.FrameType | None:
    """The call of `fit` that is running."""
    frame: types.FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "fit":
        frame = frame.f_back
    return frame


class DrawCheck:
    """Finds the drawer that feeds one call of `fit`, and counts what it draws.

    *Formal guarantees*: a drawer whose steps are not the optimizer's (other
    accumulation, another expected batch size, groups that a record moves) is refused
    before the first execution; a batch that it did not draw, after the execution that
    was trained on it.

    Args:
      sampling: the scheme that is accounted for.
      batches: the batches that are accounted for, if they are known.
      optimizer: the private optimizer.
      observed: whether to insist on seeing the draws.

    Raises:
      PrivacyMismatchError: if no drawer fits, or it does not fit the optimizer.
    """

    def __init__(
        self,
        sampling: SamplingScheme,
        batches: Batches | None,
        optimizer: Any,
        observed: bool,
    ):
        self._sampling = sampling
        self._batches = batches
        self._wanted = None if batches is None else batches._drawer.last
        self._optimizer = optimizer
        self._pieces = int(optimizer.accumulation_steps)
        self._observer = DrawObserver() if observed else None
        # Of the ledger's run, what ran before this call of `fit`.
        self._before = 0
        #: What will feed the run, as far as can be known beforehand.
        self.drawer = self._expected()
        self.scheme = sampling if self.drawer is None else self.drawer.scheme
        if self.drawer is not None:
            self._refuse_misfit(self.drawer)

    @property
    def known(self) -> bool:
        """Whether it was said which batches feed the run, and not only their scheme."""
        return self._batches is not None

    def begin(self, model: Any) -> int:
        """Begins the draws; returns the batches of the first step drawn before.

        What the optimizer has of a step, and the rest of its draw, go together: if they
        do not (an error cut a step short), both are dropped.

        Args:
          model: what is trained; metrics of it that count filled rows are warned of.

        Raises:
          ValueError: if weights of the batches fit no losses of the model.
        """
        if self.drawer is None:
            return 0
        refuse_misfit(model, self.drawer.specs)
        # XLA compiles steps anew for every number of rows, so there are few of them.
        # Training functions of one's own do too, perhaps; to eager code it is any
        # number. What is static is taken to be public. Where batches are clipped as
        # one, rows of weight 0 are part of what is averaged.
        during = _calling_fit()
        as_drawn = (
            self.drawer.varies
            and during is not None
            and getattr(self._optimizer, "unit", "example") not in ("batch", "group")
            and not runs_eagerly(model)
            and not _compat.has_own_function(model)
        )
        few = as_drawn and _compat.compiles_by_xla(model)
        self.drawer.take_as_drawn(as_drawn, during, few)
        self._warn_of_filled_rows(model, as_drawn and not few)
        begun = self.drawer.begin(self._optimizer)
        pending = getattr(self._optimizer, "pending_batches", begun)
        # What was summed was of other weights than a checkpoint has put back.
        history = history_of(self._optimizer)
        restored, history.restored = history.restored, False
        if begun == pending and not (restored and pending):
            return begun
        self._optimizer.drop_pending_batches()
        self.drawer.align()
        return 0

    def _warn_of_filled_rows(self, model: Any, as_drawn: bool) -> None:
        """Warns of metrics that count rows that are no examples."""
        found = [m for m in _compat.unweighted_metrics(model) if m is not None]
        rows = self.drawer.rows * self.drawer.pieces
        # With unit="batch" there is none.
        expected = self._optimizer.expected_batch_size
        if not found or expected is None:
            return
        if self.drawer.source.leaves_over:
            what = "fill up what people with few examples have"
        elif as_drawn and expected < _FEW:
            empty = math.exp(-expected)
            what = f"stand for draws of nobody, about {empty:.1%} of all steps"
        elif not as_drawn and rows > expected:
            what = f"fill up every step: of {rows} rows, {expected:g} are examples on "
            what += "average"
        else:
            return
        names = ", ".join(str(getattr(m, "name", m)) for m in found)
        warnings.warn(
            f"metrics of compile ({names}) count the rows of weight 0 that {what}. "
            "Write model.compile(..., weighted_metrics=[...])."
            + see("metrics-and-validation"),
            stacklevel=2,
        )

    def end(self) -> None:
        """After the last execution: whoever iterates now may be compiled by XLA."""
        if self.drawer is not None:
            self.drawer.take_as_drawn(False)
            self.drawer.end_run()

    def described(self) -> list[Any]:
        """What all processes of a run must have been told of the draws.

        Raises:
          ValueError: if the drawer of this process is not known for sure.
        """
        if self._wanted is None and self._observer is not None:
            raise ValueError(
                "On several machines PrivacyBudget needs the batches themselves, so "
                "that it sees what each machine draws: PrivacyBudget(epsilon, delta, "
                "batches)." + see("several-replicas")
            )
        drawer = self.drawer
        if drawer is None:
            return [repr(self.scheme)]
        assumptions = () if self._batches is None else self._batches.assumptions
        return [
            repr(drawer.scheme),
            drawer.population,
            drawer.pieces,
            drawer.seed,
            assumptions,
        ]

    def records(self) -> float:
        """A number that says which records there are, and in which order."""
        source = getattr(self.drawer, "source", None)
        return float(getattr(source, "fingerprint", lambda: 0)())

    @property
    def in_an_epoch(self) -> bool:
        """Whether a shuffled epoch was begun before, whose rest comes now."""
        if self.scheme.independent_steps or self.drawer is None:
            return False
        drawer = self.drawer
        epoch = self.scheme.steps_per_epoch(drawer.population)
        return bool((drawer.position // drawer.pieces - drawer._first_step) % epoch)

    def check(self, fed: int) -> None:
        """Raises if the drawer did not draw what was trained on.

        Args:
          fed: physical batches that this call of `fit` trained on.
        """
        if self._observer is None:
            return
        ours, rest = self._ours()
        if sum(count for _, count in ours) < fed:
            others = [d.scheme.describe() for d in rest]
            origin = f"by {', '.join(others)}" if others else "by something else"
            raise PrivacyMismatchError(
                f"{fed} batches were trained on, but not as many were drawn "
                f"by the batches accounted for ({self.scheme.describe()}): the data "
                f"of fit were drawn {origin}, or batches were reused. That step's "
                "privacy is unknown. Give fit the drawn batches, not arrays: "
                "model.fit(batches, ...), or model.fit(plan.batches((x, y)), ...)."
                + see("batches-drawn-another-way")
            )
        for drawer, _ in ours:
            self._refuse_misfit(drawer)

    @property
    def seed(self) -> int | None:
        """The first of the optimizer's seed and that of the draws."""
        seeds = [getattr(one, "seed", None) for one in (self._optimizer, self.drawer)]
        return next((seed for seed in seeds if seed is not None), None)

    def refuse_other_noise(self, noise: Any) -> None:
        """Raises if correlated noise is made for another way to draw.

        Args:
          noise: a `CorrelatedNoise`.
        """
        if not noise.sampling.accounts_for(self.scheme):
            raise PrivacyMismatchError(
                f"The noise is made for {noise.sampling.describe()}, and the batches "
                f"are drawn by {self.scheme.describe()}. How often a record takes part "
                "decides how much noise it needs: make both of one scheme."
            )
        if self._observer is None:
            raise PrivacyMismatchError(
                "check_data=False: with correlated noise the draws must be seen, as "
                "nothing bounds a record that comes more often than it should."
            )

    def went_on(self, steps: int) -> None:
        """Notes that a run goes on of which so many steps were counted before."""
        self._before = steps

    def move_on(self, ledger: Ledger) -> None:
        """Counts how far the run came in its order, whatever it was drawn for.

        Args:
          ledger: what counts the steps, after those of an execution.

        Raises:
          PrivacyMismatchError: if steps were drawn for something else, and noise is
            correlated.
        """
        if self._observer is None or self.scheme.independent_steps:
            return
        current = ledger.phases[-1]
        for drawer, count in self._ours()[0]:
            if drawer.runs_ahead:
                continue  # In a row: `Drawer` sees to it.
            more = self._before + count // self._pieces - current.runs[-1]
            current.add_idle_steps(max(0, more))
            if more > 0 and current.noise is not None:
                ledger.save()
                raise PrivacyMismatchError(_MORE_DRAWN.format(more))

    def _expected(self) -> Any:
        if self._wanted is not None:
            return self._wanted
        if self._observer is None:
            return None
        candidates = self._candidates()
        if len({drawer.scheme for drawer in candidates}) > 1:
            gc.collect()  # Batches of earlier runs may be waiting for this.
            candidates = self._candidates()
        if not candidates:
            raise PrivacyMismatchError(
                f"No batches drawn by {self._sampling.describe()} exist, so the data "
                "given to fit are something else. Pass "
                f"sampling.{self._sampling!r}.batches(data) to fit, and account for "
                "the same scheme (or pass those batches as `sampling`); or let a "
                "PrivacyPlan do both: model.fit(plan.batches((x, y)), "
                "epochs=plan.epochs, callbacks=plan.callbacks)."
                + see("batches-drawn-another-way")
            )
        if len({drawer.scheme for drawer in candidates}) > 1:
            raise PrivacyMismatchError(
                "Several batches of this rate exist, of different capacity or "
                "population. Pass the ones given to fit as `sampling`."
            )
        # Which of them delivers shows later; a seed is then noted.
        return min(candidates, key=lambda drawer: drawer.seed is not None)

    def _candidates(self) -> list:
        return [
            drawer for drawer in DRAWERS if self._sampling.accounts_for(drawer.scheme)
        ]

    def _ours(self) -> tuple[list, list]:
        """What the accounted batches drew, and what others did."""
        drawn = self._observer.drawn()
        ours = [
            (d, count)
            for d, count in drawn
            if d.scheme == self.scheme and (self._wanted is None or d is self._wanted)
        ]
        return ours, [d for d, count in drawn if (d, count) not in ours]

    def _refuse_misfit(self, drawer: Any) -> None:
        unit = getattr(self._optimizer, "unit", "example")
        if unit == "group" and not drawer.independent_groups:
            raise PrivacyMismatchError(
                "One record more would move the others to other groups, and so change "
                "every clipped group of its step. Draw with scheme.batches(data, "
                f"accumulation_steps={drawer.pieces}, independent_groups=True)."
                + see("clipped-batches-and-groups")
            )
        if drawer.by_group and unit != "group":
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
        each = int(getattr(self._optimizer, "rows_per_record", 1))
        if drawer.rows_per_record != each:
            raise PrivacyMismatchError(
                f"The batches have {drawer.rows_per_record} rows for each record "
                "(views of an example, examples of a person), the optimizer "
                f"rows_per_record={each}: rows would be clipped with those of "
                "others, or apart from their own record's. "
                f"Write rows_per_record={drawer.rows_per_record} to the optimizer; a "
                "PrivacyPlan does, plan.optimizer(...)."
                + see("records-of-several-rows")
            )
        if drawer.draws_people != (unit == "person"):
            raise PrivacyMismatchError(
                "The batches are of "
                + ("people" if drawer.draws_people else "examples")
                + f", and the optimizer clips unit={unit!r}: what it states would not "
                "be about what was drawn. "
                + (
                    'Write unit="person" to the optimizer; of people who are drawn, '
                    "a PrivacyPlan with per_person does."
                    if drawer.draws_people
                    else "Write scheme.batches(data, people=ids, per_person=8)."
                )
                + see("records-of-several-rows")
            )
        expected = drawer.scheme.expected_batch_size(drawer.population)
        stated = self._optimizer.expected_batch_size
        if stated is None:
            return
        if not abs(float(stated) - expected) <= 0.5 + 0.01 * expected:
            raise PrivacyMismatchError(
                f"The optimizer's expected_batch_size is {stated}, but "
                f"{drawer.scheme.describe()} of {drawer.population} records expects "
                f"{expected:.6g} per step." + see("the-actual-batch-size")
            )
