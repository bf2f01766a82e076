"""The public facts of a private optimizer: clip norms, noise and noised counts."""

from __future__ import annotations

from typing import Any

from tfdpclip.keras.private_optimizer import PrivateOptimizer


class PublicMetrics:
    """Metrics of an epoch, for `logs`.

    *Formal guarantees*: all metrics are functions of released values and public
    settings. The fraction of unclipped records is the mean of the *noised* fractions,
    computed from the movement of the clip norm; it is NaN where the movement does not
    determine it, so that all epochs have the same metrics.

    Args:
      optimizer: the optimizer that trains.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self._start: tuple[Any, int] | None = None

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
            found |= _named("clip_norm", made.clip_norms)
        fraction = self._unclipped()
        if fraction is not None:
            found["unclipped_fraction"] = fraction
        if made.noise is None:
            found |= _named("noise_stddev", made.noise_stddevs)
        return found

    def _position(self) -> tuple[Any, int] | None:
        """The clip's state and the step; None before there is a state."""
        made = self._optimizer
        if not isinstance(made, PrivateOptimizer) or not made.knows_its_groups:
            return None
        return made.clip_state, int(made.iterations.numpy())

    def _unclipped(self) -> float | None:
        now = self._position()
        if now is None or self._start is None:
            return None
        rule, steps = self._optimizer.clip, now[1] - self._start[1]
        return rule.mean_fraction(self._start[0], now[0], steps)


def _named(name: str, values: dict[str, float]) -> dict[str, float]:
    """The values by group; a single value without a group name."""
    if set(values) == {"all"}:
        return {name: values["all"]}
    return {f"{name}/{group}": value for group, value in values.items()}
