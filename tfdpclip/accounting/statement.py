"""The cost of steps, and the privacy statement with all facts of the claim."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
from typing import Any

import dp_accounting

from tfdpclip import _arguments, kernel
from tfdpclip._notebook import ShownAsText
from tfdpclip._version import __version__
from tfdpclip.accounting import accountants, search
from tfdpclip.accounting.attacks import AttackBounds, attack_bounds, attack_bounds_of
from tfdpclip.accounting.phases import Phase
from tfdpclip.sampling import events
from tfdpclip.sampling.poisson import CappedPoisson

#: The formats of a statement.
FORMATS = ("text", "markdown", "json")
#: An assumption of the statement of a run, but not of a search.
CHOICE = "a choice among several runs, or of settings, is not counted"
_MECHANISM = "clipped sums of the records of a step with Gaussian noise, composed"
_SETTING = (
    "everyone who sees the model and everything released while it trained (central "
    "differential privacy: the trainer sees the data)"
)
_NOT_COVERED = (
    "metrics and validation scores, unless they were computed on public data",
    "any other use of the same data, outside of the steps that are counted here",
)
_ACCOUNTANTS = {
    "pld": "privacy loss distributions (pld), an upper bound",
    "rdp": "Renyi differential privacy (rdp), an upper bound",
    "gdp": "Gaussian differential privacy (gdp)",
}


@dataclasses.dataclass(frozen=True)
class PrivacyStatement(ShownAsText):
    """An epsilon, with all facts that a privacy claim needs.

    `str()` gives the text to print or publish; `render` a section of a model card,
    as reporting guidelines ask for (Ponomareva et al. 2023, "How to DP-fy ML").

    Attributes:
      epsilon: The privacy spent; infinity if a step had no noise.
      delta: The delta of the claim.
      relation: The neighbouring relation, in words.
      unit: The unit of privacy, in words.
      steps: Number of steps of training, each with its noise.
      noise_multipliers: z of each phase.
      sampling: The schemes, in words.
      accountant: `"pld"`, `"rdp"` or `"gdp"`.
      clips: The clip rules, in words.
      releases: The releases beside the steps (statistics, for example), in words: an
        entry for each.
      assumptions: The conditions of the claim.
      not_private: The reasons if the run is not private at all.
      matrices: The matrices of correlated noise, in words.
      attacks: Bounds of attacks on one record; None if the run is not private.
    """

    epsilon: float
    delta: float
    relation: str
    unit: str
    steps: int
    noise_multipliers: tuple[float, ...]
    sampling: tuple[str, ...]
    accountant: str
    clips: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    not_private: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    attacks: AttackBounds | None = None
    releases: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = self._claim()
        rows = [
            ("neighbours", self.relation),
            ("unit", self.unit),
            ("sampling", "; then ".join(self.sampling)),
            ("releases", _counted(self.releases)),
            ("steps", str(self.steps)),
            ("noise", _noise_in_words(self.noise_multipliers)),
            ("correlation", "; then ".join(self.matrices)),
            ("clip", "; then ".join(self.clips)),
            ("accountant", _ACCOUNTANTS.get(self.accountant, self.accountant)),
            ("attacks", "" if self.attacks is None else str(self.attacks)),
        ]
        lines += [f"  {name + ':':<12} {text}" for name, text in rows if text]
        lines += [f"  assuming     {text}" for text in self.assumptions]
        return "\n".join(lines)

    def _claim(self) -> list[str]:
        if self.epsilon == math.inf:
            claim = "epsilon is infinite"
        else:
            claim = f"({self.epsilon:.4g}, {self.delta:.4g})-differential privacy"
        if not self.not_private:
            return [f"{claim}."]
        lines = [f"not private: {'; '.join(self.not_private)}."]
        if self.epsilon != math.inf:
            lines.append(f"With that mended, the same run would have {claim}.")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The statement as JSON-ready values; an infinite epsilon is None."""
        content = {
            "private": not self.not_private and self.epsilon != math.inf,
            **dataclasses.asdict(self),
            "mechanism": _MECHANISM,
            "setting": _SETTING,
            "not_covered": _NOT_COVERED,
            "computed_by": f"tfdpclip {__version__}",
            "kernel": kernel.digest(),
        }
        if self.epsilon == math.inf:
            content["epsilon"] = None
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in content.items()
        }

    def render(self, format: str = "text") -> str:
        """The statement as text.

        Args:
          format: `"text"`; `"markdown"`, a section of a model card; or `"json"`.

        Raises:
          ValueError: If the format is unknown.

        >>> from tfdpclip import accounting, sampling
        >>> ledger = accounting.Ledger(delta=1e-5)
        >>> ledger.begin(noise_multiplier=5.0, sampling=sampling.FullBatch())
        >>> ledger.record(1)
        >>> print(ledger.statement().render("markdown").splitlines()[2])
        (0.726, 1e-05)-differential privacy.
        """
        _arguments.choice("format", format, FORMATS)
        if format == "json":
            return json.dumps(self.to_dict(), indent=2)
        return str(self) if format == "text" else self._markdown()

    def _attacks_beside(self) -> str:
        """Bounds of attacks, next to the bounds by epsilon and delta alone."""
        if self.attacks is None:
            return ""
        alone = attack_bounds_of(self.epsilon, self.delta)
        if self.attacks == alone:
            return f"{self.attacks}, by epsilon and delta alone"
        return f"{self.attacks} (by epsilon and delta alone, {alone.numbers()})"

    def _markdown(self) -> str:
        rows = [
            ("Guarantee holds against", _SETTING),
            ("Neighbouring data sets", self.relation),
            ("Unit of privacy", self.unit),
            ("Mechanism", _MECHANISM),
            ("Clip", "; then ".join(self.clips)),
            ("Noise multiplier", _noise_in_words(self.noise_multipliers)),
            ("Sampling", "; then ".join(self.sampling)),
            ("Releases beside the steps", _counted(self.releases)),
            ("Steps", str(self.steps)),
            ("Accountant", _ACCOUNTANTS.get(self.accountant, self.accountant)),
            ("Attacks", self._attacks_beside()),
            ("Computed by", f"tfdpclip {__version__}"),
        ]
        lines = [
            "## Privacy",
            "",
            " ".join(self._claim()),
            "",
            "| | |",
            "| --- | --- |",
        ]
        lines += [f"| {name} | {_cell(text)} |" for name, text in rows if text]
        for title, texts in (
            ("Assumes", self.assumptions),
            ("Not covered", _NOT_COVERED),
        ):
            if texts:
                lines += ["", f"{title}:", "", *(f"* {text}" for text in texts)]
        return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _counted(releases: tuple[str, ...]) -> str:
    """The number of releases, and each of them, equal ones in one place."""
    if not releases:
        return ""
    counts = collections.Counter(releases)
    each = (what if n == 1 else f"{n} times {what}" for what, n in counts.items())
    return f"{len(releases)}: {'; '.join(each)}"


def _noise_in_words(multipliers: tuple[float, ...]) -> str:
    if len(multipliers) <= 4:
        return "; then ".join(f"{z:.6g}" for z in multipliers)
    return (
        f"{multipliers[0]:.6g} first, {multipliers[-1]:.6g} last, least "
        f"{min(multipliers):.6g}, in {len(multipliers)} phases"
    )


class Spending:
    """Phases, and the cost of all phases together.

    Args:
      delta: In (0, 1).
      accountant: `"pld"`, `"rdp"` or `"gdp"`.
    """

    def __init__(self, delta: float, accountant: str = "pld"):
        self.delta = _arguments.delta(delta)
        self.accountant = _arguments.choice(
            "accountant", accountant, accountants.ACCOUNTANTS
        )
        self.phases: list[Phase] = []
        self.notes: list[str] = []
        self.reserved = 0

    @property
    def steps(self) -> int:
        """Steps recorded so far."""
        return sum(phase.steps for phase in self.phases)

    def event(self, more: int = 0) -> dp_accounting.DpEvent:
        """Returns everything that ran or is reserved, and `more` steps."""
        more = _arguments.integer("more", more)
        parts = [phase.event() for phase in self.phases[:-1]]
        if self.phases:
            parts.append(self.phases[-1].event(self.reserved + more))
        return dp_accounting.ComposedDpEvent(parts)

    def epsilon(
        self, delta: float | None = None, *, more: int = 0, quick: bool = False
    ) -> float:
        """Returns the epsilon spent, or the epsilon after `more` further steps.

        Args:
          delta: A delta to use in place of the ledger's.
          more: Further steps under the current settings.
          quick: Whether to return an upper bound, larger by about a thousandth, in
            hundredths of a second, not tenths.
        """
        delta = _arguments.delta(self.delta if delta is None else delta)
        event, coarseness = self.event(more), 1.0
        if quick:
            coarseness = accountants.quick_coarseness(event, self.accountant)
        return accountants.epsilon(event, delta, self.accountant, coarseness)

    def steps_left(self, epsilon: float) -> int:
        """Returns how many further steps a budget allows under current settings."""
        epsilon = _arguments.target_epsilon(epsilon)
        if epsilon == math.inf:
            return search.MAX_STEPS

        def total(more: int, coarseness: float = 1.0) -> float:
            return accountants.epsilon(
                self.event(more), self.delta, self.accountant, coarseness
            )

        return search.most_steps(total, epsilon)

    def statement(self) -> PrivacyStatement:
        """Returns the privacy statement of the recorded steps.

        Raises:
          ValueError: If no phase was begun.
        """
        if not self.phases:
            raise ValueError("Nothing to state: no phase was begun.")
        not_private, assumptions = [], []
        if any(phase.noise_multiplier == 0 for phase in self.phases):
            not_private.append("noise_multiplier is 0")
        if any(phase.seeded for phase in self.phases):
            not_private.append("a seed was fixed, so noise or draws can be repeated")
        if self.accountant == "gdp" and any(p.sampling.amplified for p in self.phases):
            assumptions.append(
                "a central limit approximation of sampling, which is not a bound"
            )
        for phase in self.phases:
            assumptions += phase.sampling.assumptions()
            assumptions += [
                f"{type(one).__name__}, which is not of this library, does what it "
                "says of itself"
                for one in phase.foreign()
            ]
            if phase.noise is not None:
                found = phase.sampling.participation(phase.horizon)
                assumptions.append(found.describe())
        if not all(phase.observed for phase in self.phases):
            assumptions.append(
                "records were drawn as declared; the draws were not observed"
            )
        if any(phase.unit == "group" and not phase.observed for phase in self.phases):
            assumptions.append(
                "other records keep their groups when one record comes or goes"
            )
        units = {phase.unit for phase in self.phases}
        if "client" in units and len(units) > 1:
            assumptions.append(
                "a client is one example in the phases that clip examples: a client "
                "with several examples there is not covered as a whole"
            )
        assumptions += self.notes
        if self.reserved:
            assumptions.append(
                f"{self.reserved} steps that were begun but not finished are counted"
            )
        assumptions.append(CHOICE)
        first, epsilon = self.phases[0], self.epsilon()
        ran = [phase.steps for phase in self.phases]
        ran[-1] += self.reserved
        counts = list(zip(self.phases, ran, strict=True))
        attacks = None
        if not not_private and epsilon < math.inf:
            attacks = self._attacks(epsilon)
        return PrivacyStatement(
            epsilon=epsilon,
            delta=self.delta,
            relation=events.RELATION_NAMES[first.sampling.neighboring_relation],
            unit=" then ".join(_unique(unit_in_words(p) for p in self.phases)),
            steps=sum(count for phase, count in counts if not phase.release),
            releases=tuple(
                phase.release
                for phase, count in counts
                if phase.release
                for _ in range(count)
            ),
            noise_multipliers=_unique(p.noise_multiplier for p in self.phases),
            sampling=_unique(p.sampling.describe() for p in self.phases),
            accountant=self.accountant,
            clips=_unique(p.clip for p in self.phases if p.clip),
            matrices=_unique(
                f"{p.noise.describe()}, anew every {p.horizon} steps"
                for p in self.phases
                if p.noise is not None
            ),
            assumptions=_unique(assumptions),
            not_private=tuple(not_private),
            attacks=attacks,
        )

    def _attacks(self, epsilon: float) -> AttackBounds:
        """Bounds from the whole privacy loss, if known; else from one epsilon."""
        if self.accountant == "pld":
            with contextlib.suppress(dp_accounting.UnsupportedEventError):
                return attack_bounds(self.event())
        return attack_bounds_of(epsilon, self.delta)


def unit_in_words(phase: Any) -> str:
    """The unit of privacy of steps with a `sampling` and a `unit`."""
    if isinstance(phase.sampling, CappedPoisson):
        return "one person, whose examples are drawn and clipped one by one"
    return {
        "example": "one example, clipped on its own",
        "person": "one person, whose examples are clipped together",
        "client": "one client, its update clipped as a whole",
        "batch": "one example, clipped in the mean of its batch",
        "group": "one example, clipped together with its group",
    }[phase.unit]


def _unique(values) -> tuple:
    return tuple(dict.fromkeys(values))
