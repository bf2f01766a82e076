"""Phases: steps under one privacy configuration, and when two of them may add up."""

from __future__ import annotations

import dataclasses
from typing import Any

import dp_accounting

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip.sampling import events, schemes


class PrivacyMismatchError(ValueError):
    """What was about to run is not what is being accounted for."""


@dataclasses.dataclass
class Phase:
    """Steps that ran under one privacy configuration.

    Attributes:
      sampling: The scheme that drew the records.
      noise_multiplier: z.
      unit: What was clipped: `"example"`, `"client"`, `"batch"` or `"group"`.
      clip: The clip rule, in words.
      seeded: Whether noise or draws came from a fixed seed.
      observed: Whether the draws were seen, not merely declared.
      runs: Steps of each uninterrupted stretch. One entry unless the scheme's steps
        depend on each other.
    """

    sampling: Any
    noise_multiplier: float
    unit: str = "example"
    clip: str = ""
    seeded: bool = False
    observed: bool = True
    runs: list[int] = dataclasses.field(default_factory=list)

    @property
    def steps(self) -> int:
        """Number of steps."""
        return sum(self.runs)

    def __post_init__(self):
        _arguments.non_negative("noise_multiplier", self.noise_multiplier)
        _arguments.choice("unit", self.unit, events.UNITS)
        _arguments.text("clip", self.clip)
        _arguments.boolean("seeded", self.seeded)
        _arguments.boolean("observed", self.observed)
        self.runs = [
            _arguments.integer("runs", n) for n in _arguments.items("runs", self.runs)
        ]
        if not hasattr(self.sampling, "event"):
            raise ValueError(
                "sampling must be a scheme of tfdpclip.sampling, such as "
                f"Poisson(rate), got {_arguments.shown(self.sampling)}."
            )

    def settings(self) -> dict[str, Any]:
        """Returns everything but the steps, comparable and JSON-ready."""
        return {
            "sampling": self.sampling.to_dict(),
            "noise_multiplier": self.noise_multiplier,
            "unit": self.unit,
            "clip": self.clip,
            "seeded": self.seeded,
            "observed": self.observed,
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Phase:
        """The phase of which `settings()`, with its runs, are the content."""
        content = dict(content)
        return cls(
            # What decides the cost has no default.
            sampling=schemes.from_dict(content.pop("sampling")),
            noise_multiplier=content.pop("noise_multiplier"),
            unit=content.pop("unit"),
            runs=content.pop("runs"),
            **content,
        )

    def event(self, more: int = 0) -> dp_accounting.DpEvent:
        """Returns what the phase did to privacy, with `more` steps in its last run."""
        runs = [*self.runs[:-1], (self.runs[-1] if self.runs else 0) + more]
        return dp_accounting.ComposedDpEvent(
            [
                self.sampling.event(self.noise_multiplier, steps, unit=self.unit)
                for steps in runs
            ]
        )

    def check_continued(self, new: Phase, change: bool) -> None:
        """Refuses another phase after this one, unless the two may add up.

        Args:
          new: The phase that is to follow.
          change: Whether other settings than here are meant.

        Raises:
          PrivacyMismatchError: If the settings differ and `change` is False, or if the
            neighbouring relations differ.
        """
        relations = [p.sampling.neighboring_relation for p in (self, new)]
        if relations[0] is not relations[1]:
            raise PrivacyMismatchError(
                "Steps under different neighbouring relations do not add up: "
                f"{events.RELATION_NAMES[relations[0]]} before, "
                f"{events.RELATION_NAMES[relations[1]]} now."
            )
        before, now = self.settings(), new.settings()
        differing = [name for name in before if before[name] != now[name]]
        # Another physical batch size changes the capacity and nothing that was meant.
        if "sampling" in differing and _same_rate(self.sampling, new.sampling):
            differing.remove("sampling")
        if differing and not change:
            changes = "; ".join(
                f"{name} was {before[name]!r}, now {now[name]!r}" for name in differing
            )
            raise PrivacyMismatchError(
                f"The privacy configuration differs from what has run: {changes}. If "
                "that is meant, say so with change=True; both phases are then counted."
                + see("changed-settings")
            )


def _same_rate(old: Any, new: Any) -> bool:
    rates = [getattr(scheme, "rate", None) for scheme in (old, new)]
    return rates[0] is not None and rates[0] == rates[1]
