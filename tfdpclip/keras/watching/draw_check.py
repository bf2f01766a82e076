"""Checks that the accounted sampling scheme drew the batches of a call of `fit`."""

from __future__ import annotations

import gc
import math
import warnings
from typing import Any

from tfdpclip._docs import see
from tfdpclip._keras_marks import calling
from tfdpclip._notes import NOTES
from tfdpclip.accounting.ledger import Ledger
from tfdpclip.accounting.phases import SKIPPED, PrivacyMismatchError
from tfdpclip.keras import _compat
from tfdpclip.keras.loss_shapes import refuse_misfit, refuse_unknown_ids
from tfdpclip.keras.watching.executions import runs_eagerly
from tfdpclip.keras.watching.step_history import history_of
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.batches import Batches
from tfdpclip.sampling.drawer import DrawObserver

# With an expected batch size below this, over one step in a thousand draws no example.
_FEW = 7


class DrawCheck:
    """Finds the drawer that feeds one call of `fit`, and counts its draws.

    *Formal guarantees*: a drawer whose steps differ from the optimizer's (in the
    accumulation, the expected batch size, or groups that a record can move) is refused
    before the first execution. A batch that the drawer did not draw is found after the
    execution that trained on the batch.

    Args:
      sampling: the accounted scheme.
      batches: the accounted batches, if they are known.
      optimizer: the private optimizer.
      observed: whether to insist on seeing the draws.

    Raises:
      PrivacyMismatchError: if there is no drawer of the scheme, or if the drawer does
        not fit the optimizer.
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
        # The steps of the ledger's run before this call of `fit`.
        self._before = 0
        #: The drawer that should feed the run; None if it is not known beforehand.
        self.drawer = self._expected()
        self.scheme = sampling if self.drawer is None else self.drawer.scheme
        if self.drawer is not None:
            self._refuse_misfit(self.drawer)

    @property
    def known(self) -> bool:
        """Whether the batches that feed the run are known, or only their scheme."""
        return self._batches is not None

    def begin(self, model: Any) -> int:
        """Begins the draws; returns the batches of the first step drawn before.

        The optimizer's sums of an unfinished step and the rest of that step's draw
        belong together. If they do not fit (an error cut a step short), both are
        dropped.

        Args:
          model: the model to train; a warning names its metrics that count padding
            rows.

        Raises:
          ValueError: if weights or one-hot labels of the batches fit no losses of the
            model, if a loss has no labels, or if a record has a text, a class or an id
            on which a step would fail.
        """
        if self.drawer is None:
            return 0
        # Only the scheme may be known, and batches of other data exist: the data of
        # this call are at fault for certain if all of them are.
        drawers = [self.drawer] if self.known else self._candidates()
        specs = [spec for drawer in drawers for spec in drawer.specs]
        refuse_misfit(model, specs)
        if len(drawers) == 1:
            refuse_unknown_ids(model, self.drawer.arrays, self.drawer.traced)
        # XLA compiles a step again for every number of rows, so batches get one of few
        # sizes there. A user's own training function may use XLA, too. Eager code sees
        # the number of rows as a static shape, which is taken to be public. Where a
        # batch is clipped as a whole, rows of weight 0 enter its mean.
        during = calling("fit")
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
        # After a checkpoint was restored, the sums belong to earlier weights.
        history = history_of(self._optimizer)
        restored, history.restored = history.restored, False
        if begun == pending and not (restored and pending):
            return begun
        self._optimizer.drop_pending_batches()
        self.drawer.align()
        return 0

    def _warn_of_filled_rows(self, model: Any, as_drawn: bool) -> None:
        """Warns of metrics that count padding rows as examples."""
        found = [m for m in _compat.unweighted_metrics(model) if m is not None]
        rows = self.drawer.rows * self.drawer.pieces
        # With unit="batch", the expected batch size is None.
        expected = self._optimizer.expected_batch_size
        if not found or expected is None:
            return
        if self.drawer.source.leaves_over:
            what = "pad people who have few examples"
        elif as_drawn and expected < _FEW:
            empty = math.exp(-expected)
            what = f"stand for empty draws, about {empty:.1%} of all steps"
        elif not as_drawn and rows > expected:
            what = f"pad every step: of {rows} rows, {expected:g} are examples on "
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
        """Ends the draws: later iterations may run under XLA again."""
        if self.drawer is not None:
            self.drawer.take_as_drawn(False)
            self.drawer.end_run()

    def described(self) -> list[Any]:
        """The facts about the draws that all processes must agree on.

        Raises:
          ValueError: if the drawer of this process is not known for sure.
        """
        if self._wanted is None and self._observer is not None:
            raise ValueError(
                "On several machines PrivacyBudget needs the batches, to see the "
                "draws of each machine: PrivacyBudget(epsilon, delta, "
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
        """A number (a fingerprint) for the records and their order."""
        source = getattr(self.drawer, "source", None)
        return float(getattr(source, "fingerprint", lambda: 0)())

    @property
    def in_an_epoch(self) -> bool:
        """Whether this run continues a shuffled epoch that was begun before."""
        if self.scheme.independent_steps or self.drawer is None:
            return False
        drawer = self.drawer
        epoch = self.scheme.steps_per_epoch(drawer.population)
        return bool((drawer.position // drawer.pieces - drawer._first_step) % epoch)

    def check(self, fed: int) -> None:
        """Raises if the model was trained on batches that the drawer did not draw.

        Args:
          fed: the number of physical batches in this call of `fit`.
        """
        if self._observer is None:
            return
        ours, rest = self._ours()
        if sum(count for _, count in ours) < fed:
            others = [d.scheme.describe() for d in rest]
            origin = f"by {', '.join(others)}" if others else "by something else"
            raise PrivacyMismatchError(
                f"fit trained on {fed} batches, but fewer were drawn by the accounted "
                f"batches ({self.scheme.describe()}): the data of fit were drawn "
                f"{origin}, or batches were reused. The privacy of that step is "
                "unknown. Give fit the drawn batches, not arrays: "
                "model.fit(batches, ...), or model.fit(plan.batches((x, y)), ...)."
                + see("batches-drawn-another-way")
            )
        for drawer, _ in ours:
            self._refuse_misfit(drawer)

    @property
    def seed(self) -> int | None:
        """The optimizer's seed or, without one, the seed of the draws."""
        seeds = [getattr(one, "seed", None) for one in (self._optimizer, self.drawer)]
        return next((seed for seed in seeds if seed is not None), None)

    def refuse_other_noise(self, noise: Any) -> None:
        """Raises if correlated noise was made for another sampling scheme.

        Args:
          noise: a `CorrelatedNoise`.
        """
        if not noise.sampling.accounts_for(self.scheme):
            raise PrivacyMismatchError(
                f"The noise is made for {noise.sampling.describe()}, but the batches "
                f"are drawn by {self.scheme.describe()}. The noise depends on how "
                "often a record takes part: make both from the same scheme."
            )
        if self._observer is None:
            raise PrivacyMismatchError(
                "check_data=False cannot be used with correlated noise: a record that "
                "comes too often would not be noticed. Leave it out."
            )

    def continue_after(self, steps: int) -> None:
        """Notes that the run continues after `steps` counted steps."""
        self._before = steps

    def count_unused_draws(self, ledger: Ledger) -> None:
        """Counts how far the run came in its order, unused draws included.

        Args:
          ledger: the ledger, after it counted the steps of an execution.

        Raises:
          PrivacyMismatchError: if draws were used outside of training while the noise
            is correlated.
        """
        if self._observer is None or self.scheme.independent_steps:
            return
        current = ledger.phases[-1]
        for drawer, count in self._ours()[0]:
            if drawer.runs_ahead:
                continue  # The drawer keeps the steps in a row.
            more = self._before + count // self._pieces - current.runs[-1]
            current.add_idle_steps(max(0, more))
            if more > 0 and current.noise is not None:
                ledger.save()
                raise PrivacyMismatchError(SKIPPED.format(more))

    def _expected(self) -> Any:
        if self._wanted is not None:
            return self._wanted
        if self._observer is None:
            return None
        candidates = self._candidates()
        if len({drawer.scheme for drawer in candidates}) > 1:
            gc.collect()  # Frees the batches of earlier runs.
            candidates = self._candidates()
        if not candidates:
            raise PrivacyMismatchError(
                f"No batches drawn by {self._sampling.describe()} exist, so fit gets "
                f"other data. Pass sampling.{self._sampling!r}.batches(data) to fit, "
                "and account for the same scheme (or pass the batches as "
                "`sampling`); or let a PrivacyPlan do both: "
                "model.fit(plan.batches((x, y)), epochs=plan.epochs, "
                "callbacks=plan.callbacks)." + see("batches-drawn-another-way")
            )
        if len({drawer.scheme for drawer in candidates}) > 1:
            raise PrivacyMismatchError(
                "Several batches of this rate exist, of different capacity or "
                "population. Pass the batches of this fit as `sampling`."
            )
        # The drawer that delivers shows only later, and its seed is noted then.
        return min(candidates, key=lambda drawer: drawer.seed is not None)

    def _candidates(self) -> list:
        return [
            drawer
            for drawer in NOTES.drawers
            if self._sampling.accounts_for(drawer.scheme)
        ]

    def _ours(self) -> tuple[list, list]:
        """The draws of the accounted batches, and the drawers of all further draws."""
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
                "One more record would move records to other groups, and so change "
                "every clipped group of its step. Draw with scheme.batches(data, "
                f"accumulation_steps={drawer.pieces}, independent_groups=True)."
                + see("clipped-batches-and-groups")
            )
        if drawer.by_group and unit != "group":
            raise PrivacyMismatchError(
                "The batches were drawn with independent_groups=True, which drops "
                "records of a full group. This needs an optimizer with "
                'unit="batch" and accumulation_steps above 1.'
            )
        if drawer.pieces != self._pieces:
            raise PrivacyMismatchError(
                f"The batches have accumulation_steps = {drawer.pieces}, the optimizer "
                f"{self._pieces}: a step would not be one draw. Use the same number."
            )
        each = int(getattr(self._optimizer, "rows_per_record", 1))
        if drawer.rows_per_record != each:
            raise PrivacyMismatchError(
                f"The batches have {drawer.rows_per_record} rows for each record "
                "(views of an example, examples of a person), the optimizer "
                f"rows_per_record={each}: rows of different records would be clipped "
                "together, or rows of a record apart. "
                f"Write rows_per_record={drawer.rows_per_record} to the optimizer; "
                "plan.optimizer(...) of a PrivacyPlan does."
                + see("records-of-several-rows")
            )
        if drawer.draws_people != (unit == "person"):
            raise PrivacyMismatchError(
                "The batches are of "
                + ("people" if drawer.draws_people else "examples")
                + f", but the optimizer clips unit={unit!r}: the guarantee would name "
                "the wrong unit. "
                + (
                    'Write unit="person" to the optimizer; plan.optimizer(...) of a '
                    "PrivacyPlan with per_person does."
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
