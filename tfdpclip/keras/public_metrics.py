"""What a private optimizer does that may be seen: clip norms, noise, noised counts."""

from __future__ import annotations

import math
from typing import Any

from tfdpclip._schedules import Schedule
from tfdpclip.clipping import QuantileClip
from tfdpclip.keras.private_optimizer import PrivateOptimizer


class PublicMetrics:
    """Metrics of an epoch, for `logs`.

    *Formal guarantees*: all are functions of what the steps released and of public
    settings. The fraction of unclipped records is the mean of the *noised* fractions,
    worked out from how far they moved the clip norm.

    Args:
      optimizer: the optimizer that trains.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self._start: tuple[float, int] | None = None

    def begin(self) -> None:
        """Begins an epoch."""
        self._start = self._position()

    def end(self) -> dict[str, float]:
        """The metrics at the end of an epoch."""
        made = self._optimizer
        if not isinstance(made, PrivateOptimizer):
            return {}
        found: dict[str, float] = {}
        if made.clip.threshold is not None:
            norms = made.clip_norms
            found = {f"clip_norm/{name}": norm for name, norm in norms.items()}
            if set(norms) == {"all"}:
                found = {"clip_norm": norms["all"]}
        fraction = self._unclipped()
        if fraction is not None:
            found["unclipped_fraction"] = fraction
        stddevs = made.noise_stddevs
        for name, stddev in stddevs.items():
            key = "noise_stddev" if set(stddevs) == {"all"} else f"noise_stddev/{name}"
            found[key] = stddev
        return found

    def _position(self) -> tuple[float, int] | None:
        """The clip norm, where one number follows a quantile, and the step."""
        made = self._optimizer
        if not isinstance(made, PrivateOptimizer):
            return None
        rule = made.clip
        if not isinstance(rule, QuantileClip) or rule.has_groups:
            return None
        if isinstance(rule.target_quantile, Schedule):
            return None
        return float(made.clip_norm), int(made.iterations)

    def _unclipped(self) -> float | None:
        now = self._position()
        if now is None or self._start is None or now[1] <= self._start[1]:
            return None
        rule, steps = self._optimizer.clip, now[1] - self._start[1]
        if rule.update == "geometric":
            moved = math.log(self._start[0] / now[0])
        else:
            moved = self._start[0] - now[0]
        return rule.target_quantile + moved / (rule.learning_rate * steps)
