"""The public facts of a private optimizer: clip norms, noise and noised counts."""

from __future__ import annotations

import math
import warnings
from typing import Any

from tfdpclip._docs import see
from tfdpclip.keras.private_optimizer import PrivateOptimizer
from tfdpclip.keras.random_walk import RandomWalk

# Fewer steps tell nothing of a run. The largest deviation of six variables in 40 epochs
# of noise is 1.4 to 3.3; digits that are read at 70 % have 2.5 to 4.8.
_FEW_STEPS, _DEVIATIONS = 20, 3.5


class PublicMetrics:
    """Metrics of an epoch, for `logs`.

    *Formal guarantees*: all metrics are functions of released values and public
    settings. The fraction of unclipped records is the mean of the *noised* fractions,
    computed from the movement of the clip norm; it is NaN where the movement does not
    determine it, and so is the signal of an optimizer that had trained before `fit`:
    all epochs have the same metrics.

    Args:
      optimizer: the optimizer that trains.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self._start: tuple[Any, int] | None = None
        self._walk: RandomWalk | None = None
        self._evidence = math.nan

    def begin(self, model: Any) -> None:
        """Begins an epoch, after all callbacks have begun the training."""
        self._start = self._position()
        if math.isnan(self._evidence):
            # Weights that a callback restored by now may have learned before.
            self._evidence = math.inf if self._optimizer.iterations.numpy() else 0.0
        self.follow(model)

    def follow(self, model: Any) -> None:
        """Follows the weights from the time that there are weights."""
        if self._walk is None and model.built:
            self._walk = RandomWalk(self._optimizer, model.trainable_variables)
            if self._walk.follows and self._evidence < math.inf:
                self._walk.begin()

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
        if self._walk is not None and self._walk.follows:
            found["signal"], evidence = math.nan, math.inf
            if self._evidence < math.inf:
                found["signal"], evidence = self._walk.measure()
            self._evidence = max(self._evidence, evidence)
        return found

    def warn(self) -> None:
        """Warns at the end of `fit`: of no signal, and of a clip norm at its bound."""
        now, made = self._position(), self._optimizer
        if now is None:
            return
        follows = self._walk is not None and self._walk.follows
        if follows and now[1] >= _FEW_STEPS and self._evidence < _DEVIATIONS:
            warnings.warn(
                f"The released gradients of {now[1]} steps cannot be told from noise: "
                "the weights moved as noise alone moves them, and the model may have "
                "learned nothing: score it on other examples. Larger batches, fewer "
                "weights, more examples or a larger epsilon give more signal."
                + see("training-that-is-noise"),
                stacklevel=2,
            )
        norms = list(made.clip_norms.values())
        for name in ("minimum_norm", "maximum_norm"):
            bound = getattr(made.clip, name, None)
            if bound and any(0.9999 <= norm / bound <= 1.0001 for norm in norms):
                warnings.warn(
                    f"The clip norm ended at its bound, {name}={bound:g}, and the rule "
                    "would move on: give another bound, or clip=dpc.FixedClip(...)."
                    + see("a-clip-norm-that-stands-still"),
                    stacklevel=2,
                )

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
