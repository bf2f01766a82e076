"""Where to start: clip norms from public data, learning rates, and a recipe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdpclip import _arguments
from tfdpclip.accounting.batch_size import BatchSizeAdvice, batch_size_advice
from tfdpclip.tuning.grid import Grid, geometric
from tfdpclip.tuning.grid_result import GridResult

if TYPE_CHECKING:
    import tensorflow as tf

_QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
# The sweep that Rehn et al. (2025) suggest where nothing is known about the norms.
_SWEEP = (0.1, 1.0, 10.0, 26.0, 42.0)


@dataclasses.dataclass(frozen=True)
class PublicClip:
    """Gradient norms of public examples, and clip norms to try.

    Attributes:
      quantiles: the norms' quantiles, by level.
      grid: clip norms to try, ascending: from a hundredth of the median, where clipping
        leaves only directions, to the 95 % quantile, where clipping is rare.
      by_layer: the median norm of each layer.
      count: number of examples.
    """

    quantiles: dict[float, float]
    grid: tuple[float, ...]
    by_layer: dict[str, float]
    count: int

    @property
    def median(self) -> float:
        """The median norm: a clip norm to start with."""
        return self.quantiles[0.5]

    def __str__(self) -> str:
        levels = ", ".join(f"{100 * q:g} %: {v:.4g}" for q, v in self.quantiles.items())
        grid = ", ".join(f"{c:.3g}" for c in self.grid)
        return (
            f"gradient norms of {self.count} public examples: {levels}. Clip norms to "
            f"try: {grid}. Norms change while training and grow with the noise, so the "
            "best clip norm may be larger for a smaller epsilon. The numbers are "
            "public as long as the data are, and the model."
        )


def clip_from_public(
    model: tf.keras.Model,
    public_data: Any,
    *,
    batch_size: int = 64,
    **options: Any,
) -> PublicClip:
    """Clip norms to start a search from, from gradients on public data.

    *Formal guarantees*: no private data are used, so the result costs no privacy, if
    `public_data` are public and the model's weights are public or private already.

    Args:
      model: a compiled Keras model, with the weights that training starts from.
      public_data: (x, y), or a `tf.data.Dataset` of batches.
      batch_size: for arrays.
      **options: as for `tfdpclip.diagnostics.GradientMeter`: `variables`, `groups`.

    Returns:
      Quantiles of the norms, and a grid of clip norms.

    Raises:
      ValueError: if there are no data, a norm is not finite, or all are zero.
    """
    from tfdpclip._data import check_data
    from tfdpclip.keras.gradient_meter import GradientMeter

    check_data("public_data", public_data, "(x, y)")
    meter = GradientMeter(model, **options)
    found = meter.norms(public_data, batch_size=batch_size)
    norms = found.norms.astype(np.float64)
    if not np.all(np.isfinite(norms)):
        raise ValueError(
            "public_data: some gradient norms are not finite. Look for NaN or infinite "
            "values in the data, or for weights that have diverged."
        )
    values = {q: float(np.quantile(norms, q)) for q in _QUANTILES}
    middle = values[0.5]
    wanted = [middle / 100, middle / 10, values[0.25], middle, values[0.75]]
    grid = sorted({_rounded(c) for c in [*wanted, values[0.95]] if c > 0})
    if not grid:
        raise ValueError(
            "public_data: nearly all gradients are zero, so they say nothing about a "
            "clip norm."
        )
    medians = np.median(found.by_group.astype(np.float64), axis=0)
    by_layer = dict(zip(found.groups, map(float, medians), strict=True))
    return PublicClip(values, tuple(grid), by_layer, len(norms))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Three steps to a batch size, a clip norm and a learning rate.

    Attributes:
      advice: step 1: the batch size, from public numbers alone.
      grid: step 2: clip norms at that batch size, few learning rates.
    """

    advice: BatchSizeAdvice
    grid: Grid

    def refine(self, result: GridResult) -> Grid:
        """Step 3: five learning rates for each of the best two clip norms.

        Args:
          result: the result of running `grid`.

        Returns:
          The grid to run next, of the best two clip norms, each with learning rates
          from a third of the lower best rate to three times the higher.

        Raises:
          ValueError: if the grid has not been run.
        """
        rows = result.best_at(("clip_norm",))
        rows = [row for row in rows if not math.isnan(row["mean"])]
        if not rows:
            raise ValueError("result: run the grid first; no run has a score.")
        rows.sort(key=lambda row: row["mean"], reverse=result.maximize)
        rates = [row["learning_rate"] for row in rows[:2]]
        return dataclasses.replace(
            self.grid,
            clip_norms=tuple(row["clip_norm"] for row in rows[:2]),
            learning_rates=geometric(min(rates) / 3, max(rates) * 3, 5),
        )

    def __str__(self) -> str:
        clips = ", ".join(f"{c:g}" for c in self.grid.clip_norms)
        rates = ", ".join(f"{r:.3g}" for r in self.grid.learning_rates)
        return (
            f"1. {self.advice}\n\n"
            f"2. Run recipe.grid with the noise above: clip norms {clips} at learning "
            f"rates {rates}.\n"
            "3. Run recipe.refine(result): more learning rates for the best two.\n\n"
            "Run steps 2 and 3 on public data that resemble the private data, as many "
            "of them, with the same noise. On private data each run costs privacy, "
            "which the epsilon above does not cover: see search_privacy."
        )


def three_step_recipe(
    population: int,
    epochs: float,
    epsilon: float,
    delta: float,
    *,
    learning_rate: float,
    at_batch_size: float,
    clip_norms: Sequence[float] | PublicClip = _SWEEP,
    seeds: Sequence[int] = (0, 1, 2),
    **options: Any,
) -> Recipe:
    """Batch size first, then the clip norm, then the learning rate.

    After the advice of Rehn et al. (2025): the batch size by its noise, and clip norm
    and learning rate together, at the noise of the private run: a clip norm tuned
    without noise is right only where noise does not change the norms.

    Args:
      population: number of records.
      epochs: how often a record is used on average.
      epsilon: the budget of the run.
      delta: in (0, 1).
      learning_rate: a learning rate that works at `at_batch_size`, for normalised
        clipping (or Adam), where it does not depend on the clip norm.
      at_batch_size: the batch size of that learning rate.
      clip_norms: clip norms to sweep, or the result of `clip_from_public`.
      seeds: repeats of each run.
      **options: as for `batch_size_advice`.

    Returns:
      The recipe; `str()` of it gives the steps.

    Raises:
      ValueError: if an argument is out of range.

    >>> recipe = three_step_recipe(50_000, 8, 4.0, 1e-5, learning_rate=1e-3,
    ...                            at_batch_size=256)
    >>> recipe.advice.batch_size, len(recipe.grid)
    (8192, 45)
    """
    advice = batch_size_advice(population, epochs, epsilon, delta, **options)
    at_batch_size = _arguments.positive("at_batch_size", at_batch_size)
    rate = _arguments.positive("learning_rate", learning_rate)
    # The best rate of private Adam often grows like the root of the batch size.
    rate *= math.sqrt(advice.batch_size / at_batch_size)
    rate = _arguments.positive("learning_rate for at_batch_size", rate)
    if isinstance(clip_norms, PublicClip):
        clip_norms = clip_norms.grid
    rates = (rate / 3, rate, rate * 3)
    return Recipe(advice, Grid(clip_norms, (advice.batch_size,), rates, seeds))
