"""Advice on the batch size, before any data are seen."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdpclip import _arguments, _progress, pictures
from tfdpclip._notebook import ShownAsText, aligned
from tfdpclip.accounting.calibration import noise_multiplier
from tfdpclip.sampling import FullBatch, Poisson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONVENTIONS = ("ceil", "floor", "loader", "framework")
# For each note on a candidate: the label, color, marker and size in pictures.
_LOOKS = {
    "": ("more noise", 5, "o", 36),
    "too few steps": ("too few steps", 1, "X", 44),
    "good": ("nearly the least noise", 0, "D", 36),
    "<- recommended": ("recommended", 2, "*", 190),
}
_COLUMNS = (
    ("batch_size", "batch", "d"),
    ("sampling_rate", "rate", ".4g"),
    ("steps", "steps", "d"),
    ("noise_multiplier", "noise", ".5g"),
    ("cumulative_noise", "noise*sqrt(steps)", ".5g"),
    ("effective_noise", "noise/rate", ".5g"),
)


@dataclasses.dataclass(frozen=True)
class BatchSizeNoise:
    """The noise that a batch size requires.

    Attributes:
      batch_size: expected batch size B.
      sampling_rate: q, the probability with which a record enters a batch.
      steps: T.
      noise_multiplier: z, calibrated to the budget; the noise's stddev at clip norm 1.
      cumulative_noise: z sqrt(T): the stddev of all noise that is added to the sums.
    """

    batch_size: int
    sampling_rate: float
    steps: int
    noise_multiplier: float

    @property
    def cumulative_noise(self) -> float:
        """z sqrt(T): the stddev of the noise of all steps, in clip norms."""
        return self.noise_multiplier * math.sqrt(self.steps)

    @property
    def effective_noise(self) -> float:
        """z / q."""
        return self.noise_multiplier / self.sampling_rate

    @property
    def sampling(self) -> Poisson | FullBatch:
        """The scheme to draw batches with, and to account for."""
        if self.sampling_rate == 1:
            return FullBatch()
        return Poisson(self.sampling_rate)


@dataclasses.dataclass(frozen=True)
class BatchSizeAdvice(ShownAsText):
    """A recommended batch size, with the reason. `str()` gives text with the table.

    Attributes:
      batch_size: the recommended expected batch size.
      reason: the reason, in a sentence.
      candidates: all candidates, by batch size.
      good: the batch sizes with enough steps and cumulative noise within the tolerance
        of the best; the least of them is recommended. Empty if no candidate has enough
        steps.

    The arguments are kept: `population`, `epochs`, `epsilon`, `delta` and
    `minimum_steps`.
    """

    batch_size: int
    reason: str
    candidates: tuple[BatchSizeNoise, ...]
    good: tuple[int, ...]
    population: int
    epochs: float
    epsilon: float
    delta: float
    minimum_steps: int

    @property
    def chosen(self) -> BatchSizeNoise:
        """The recommended candidate: its steps, noise multiplier and sampling."""
        return next(c for c in self.candidates if c.batch_size == self.batch_size)

    def table(self) -> str:
        """The table as text."""
        lines = [[title for _, title, _ in _COLUMNS] + [""]]
        for c in self.candidates:
            cells = [format(getattr(c, key), form) for key, _, form in _COLUMNS]
            lines.append([*cells, self._note(c)])
        return aligned(lines, left=(len(_COLUMNS),))

    def __str__(self) -> str:
        return (
            f"Expected batch size {self.batch_size}: {self.reason}\n\n"
            f"{self.table()}\n\n"
            f"{self.population} records, {self.epochs:g} epochs, epsilon "
            f"{self.epsilon:g}, delta {self.delta:g}, Poisson sampling, add or remove "
            "one record. The least certain input is minimum_steps "
            f"({self.minimum_steps}): try 20, 40 and 80 on public data. No data were "
            "used, so this advice costs no privacy."
        )

    def plot(self, path: Any = None) -> Figure:
        """Draws the cumulative noise against batch size and steps.

        As Figure 7 of Rehn et al. (2025). Needs matplotlib (the extra "plots").

        Args:
          path: the file for the picture; None for not saving it.

        Returns:
          The figure.
        """
        figure, axes = pictures.new(9.0, 4.0, 1, 2, sharey=True)
        left, right = axes[0]
        sizes = [c.batch_size for c in self.candidates]
        steps = [c.steps for c in self.candidates]
        noise = np.array([c.cumulative_noise for c in self.candidates])
        notes = np.array([self._note(c) for c in self.candidates])
        for ax, values in ((left, sizes), (right, steps)):
            x = np.array(values)
            ax.plot(x, noise, color=pictures.GREY, linewidth=1, zorder=1)
            for note, (label, color, marker, size) in _LOOKS.items():
                own = notes == note
                look = {"color": pictures.COLORS[color], "marker": marker, "s": size}
                if own.any():
                    ax.scatter(x[own], noise[own], label=label, zorder=3, **look)
            ax.set_xscale("log", base=2 if ax is left else 10)
            ax.set_yscale("log")
            pictures.round_ticks(ax.yaxis, min(noise), max(noise))
        left.xaxis.set_major_formatter("{x:g}")
        pictures.round_ticks(right.xaxis, min(steps), max(steps))
        left.set_xlabel("expected batch size (records)")
        left.set_ylabel("cumulative noise  z √T  (clip norms)")
        left.legend(fontsize=8, frameon=False)
        right.set_xlabel("steps T")
        right.axvline(self.minimum_steps, color=pictures.GREY, linestyle="--")
        right.annotate(
            f" {self.minimum_steps} steps",
            (self.minimum_steps, 0.98),
            xycoords=("data", "axes fraction"),
            va="top",
            fontsize=8,
            color=pictures.GREY,
        )
        pictures.title(
            figure,
            f"Noise by batch size: {self.population} records, {self.epochs:g} epochs, "
            f"ε = {self.epsilon:g}, δ = {self.delta:g}",
        )
        return pictures.finish(figure, path)

    def _note(self, candidate: BatchSizeNoise) -> str:
        if candidate.batch_size == self.batch_size:
            return "<- recommended"
        if candidate.steps < self.minimum_steps:
            return "too few steps"
        return "good" if candidate.batch_size in self.good else ""


def batch_size_noise(
    population: int,
    epsilon: float,
    delta: float,
    candidates: Iterable[int | str],
    *,
    epochs: float | None = None,
    steps: int | None = None,
    convention: str = "ceil",
) -> tuple[BatchSizeNoise, ...]:
    """The noise that each batch size needs, at fixed epochs or at fixed steps.

    With fixed epochs the noise of a step grows with the batch, and the number of steps
    falls. With fixed steps z / q falls towards a limit (Räisä et al. 2024). Clipped
    sums of Poisson batches, add or remove one record, privacy loss distributions.

    Args:
      population: number of records N.
      epsilon: the budget.
      delta: in (0, 1).
      candidates: batch sizes from 1 to N; "full" is N.
      epochs: how often a record is used on average; or
      steps: the number of steps, for every batch size. Give exactly one of both.
      convention: how q and T follow from N, B and the epochs E. "ceil": q = B/N,
        T = ceil(E N / B). "floor": T rounded down. "loader": q = 1 / ceil(N/B),
        T = E ceil(N/B), as common data loaders do. "framework": q = B/N and
        T = E ceil(N/B), which trains longer than E epochs.

    Returns:
      One entry for each batch size, ascending.

    Raises:
      ValueError: if an argument is out of range.

    >>> small, full = batch_size_noise(1000, 1.0, 1e-5, [10, "full"], epochs=8)
    >>> small.steps, full.steps, round(full.cumulative_noise, 2)
    (800, 8, 29.85)
    """
    population = _arguments.integer("population", population, 1)
    epsilon = _arguments.positive("epsilon", epsilon)
    delta = _arguments.delta(delta)
    _arguments.choice("convention", convention, CONVENTIONS)
    if (epochs is None) == (steps is None):
        raise ValueError("Give either epochs or steps, for example epochs=8.")
    epochs = _arguments.optional(_arguments.positive, "epochs", epochs)
    steps = _arguments.optional(_arguments.integer, "steps", steps, 1)
    found = []
    sizes = _sizes(candidates, population)
    for batch_size in _progress.bar(sizes, title="batch sizes", unit="size"):
        if steps is not None:
            rate, count = batch_size / population, steps
        else:
            rate, count = _schedule(population, batch_size, epochs, convention)
        z = _calibrated(epsilon, delta, count, rate)
        found.append(BatchSizeNoise(batch_size, rate, count, z))
    return tuple(found)


def batch_size_advice(
    population: int,
    epochs: float,
    epsilon: float,
    delta: float,
    minimum_steps: int = 20,
    candidates: Iterable[int | str] | None = None,
    *,
    tolerance: float = 0.1,
    convention: str = "ceil",
) -> BatchSizeAdvice:
    """Recommends an expected batch size for a number of epochs and a budget.

    The rule of Rehn et al. (2025, section 6): among the batch sizes with enough steps,
    the smallest with (nearly) the least cumulative noise z sqrt(T): as many steps
    as possible without adding noise in total. The noise of one step, or of averaged
    gradients, always favours the full batch, which has too few steps.

    *Formal guarantees*: the advice depends on the arguments alone. It costs no privacy
    if the arguments are public; a minimum number of steps learnt on the private data
    is not public.

    Args:
      population: number of records N; public.
      epochs: how often a record is used on average.
      epsilon: the budget.
      delta: in (0, 1).
      minimum_steps: the least number of steps that trains the model well. 20 was read
        off one figure (CIFAR-100, FiLM, Adam); other tasks differ.
      candidates: batch sizes from 1 to N; "full" is N. Default: the powers of two from
        256 (from 16 if N is below 2000) up to N, and N.
      tolerance: the fraction above the least cumulative noise that still counts as the
        least. Below 0.03 the rounding of the steps decides.
      convention: see `batch_size_noise`.

    Returns:
      The advice, with the table of all candidates. If no candidate has enough steps,
      the candidate with the most steps is recommended and the reason says so.

    Raises:
      ValueError: if an argument is out of range, or there are no candidates.

    >>> batch_size_advice(50_000, epochs=8, epsilon=8.0, delta=1e-5).batch_size
    16384
    """
    population = _arguments.integer("population", population, 1)
    minimum_steps = _arguments.integer("minimum_steps", minimum_steps, 1)
    tolerance = _arguments.non_negative("tolerance", tolerance)
    if candidates is None:
        least = 256 if population >= 2000 else 16
        powers = [2**k for k in range(40) if least <= 2**k < population]
        candidates = [*powers, population]
    table = batch_size_noise(
        population, epsilon, delta, candidates, epochs=epochs, convention=convention
    )
    chosen, good, reason = _choose_size(table, minimum_steps, tolerance)
    return BatchSizeAdvice(
        batch_size=chosen.batch_size,
        reason=reason,
        candidates=table,
        good=tuple(c.batch_size for c in good),
        population=population,
        epochs=float(epochs),
        epsilon=float(epsilon),
        delta=float(delta),
        minimum_steps=minimum_steps,
    )


def _choose_size(
    table: tuple[BatchSizeNoise, ...], minimum_steps: int, tolerance: float
) -> tuple[BatchSizeNoise, list[BatchSizeNoise], str]:
    """The recommended candidate, all good candidates, and the reason."""
    enough = [c for c in table if c.steps >= minimum_steps]
    if not enough:
        chosen = max(table, key=lambda c: (c.steps, -c.batch_size))
        reason = (
            f"too few epochs: no candidate has {minimum_steps} steps, and this one has "
            f"the most ({chosen.steps}). Train for more epochs, or give smaller "
            "candidates."
        )
        return chosen, [], reason
    best = min(enough, key=lambda c: c.cumulative_noise)
    limit = (1 + tolerance) * best.cumulative_noise
    good = [c for c in enough if c.cumulative_noise <= limit]
    chosen = good[0]
    reason = (
        f"the smallest with cumulative noise ({chosen.cumulative_noise:.4g}) "
        f"within {100 * tolerance:g} % of the least ({best.cumulative_noise:.4g}, "
        f"at {best.batch_size}) among those with {minimum_steps} steps or more"
    )
    if len(good) > 1:
        reason += f"; so are {len(good) - 1} larger ones, up to {good[-1].batch_size}"
    return chosen, good, reason + "."


@functools.lru_cache(maxsize=4096)
def _calibrated(epsilon, delta, steps, rate) -> float:
    sampling = FullBatch() if rate == 1 else Poisson(rate)
    return noise_multiplier(epsilon, delta, steps, sampling)


def _sizes(candidates, population) -> list[int]:
    if isinstance(candidates, str) or _arguments.real(candidates) is not None:
        candidates = [candidates]
    sizes = set()
    for size in _arguments.items("candidates", candidates):
        if isinstance(size, str) and size == "full":
            size = population
        sizes.add(_arguments.integer("candidates", size, 1, population))
    if not sizes:
        raise ValueError("candidates must not be empty: give batch sizes or 'full'.")
    return sorted(sizes)


def _schedule(population, batch_size, epochs, convention) -> tuple[float, int]:
    """The sampling rate and the number of steps."""
    if batch_size == population:
        return 1.0, max(1, math.ceil(epochs))
    exact = epochs * population / batch_size
    per_epoch = math.ceil(population / batch_size)
    whole = max(1, math.ceil(epochs * per_epoch - 1e-9))
    if convention == "ceil":
        return batch_size / population, max(1, math.ceil(exact - 1e-9))
    if convention == "floor":
        return batch_size / population, max(1, math.floor(exact + 1e-9))
    if convention == "loader":
        return 1 / per_epoch, whole
    return batch_size / population, whole
