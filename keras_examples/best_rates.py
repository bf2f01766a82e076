r"""How the best learning rate of DP-Adam grows with the batch size.

    python -m keras_examples.best_rates
    python -m keras_examples.best_rates --features=features.npz --epsilons=1

Rehn, Zhao, Heikkilä and Honkela (2025) write that the best rate under DP-Adam often
grew like the square root of the batch size, at a fixed number of epochs. A linear head
is trained at every rate of a geometric grid; the best rate of a batch size is the top
of a parabola through the best point and its neighbours, and the exponent is the slope
of its logarithm. Intervals are from resampled repeats.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from driver_kit import programs, progress, settings
from keras_examples import features, grids, trainers
from tfdpclip import pictures

_RESAMPLES = 1000


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    features: str | None = settings.words(
        None, "A .npz file with features, labels and split; digits by default."
    )
    epsilons: tuple[float, ...] = settings.numbers(
        (1, 8), "Privacy budgets.", good=8, above=0
    )
    batch_sizes: tuple[int, ...] = settings.numbers(
        (32, 64, 128, 256, 512), "Expected sizes.", integer=True, good=64, least=1
    )
    learning_rates: str = settings.words(
        "geom:0.0025:0.64:9",
        "The rates to try.",
        form="numbers above 0, separated by commas, or geom:LEAST:GREATEST:HOW_MANY",
        reads=grids.read_numbers,
    )
    clip_norm: float = settings.number(1.0, "The clip norm.", above=0)
    epochs: float = settings.number(8, "How often an example is used.", above=0)
    repeats: int = settings.count(5, "Runs at every rate.", least=2)
    delta: float = settings.delta()
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("best_rates")


def best_rate(rates: np.ndarray, scores: np.ndarray) -> float:
    """The top of the parabola through the best score and its neighbours, by log rate.

    Args:
      rates: `[r]`, rising geometrically.
      scores: `[r]`.

    Returns:
      The rate; at an end of the grid, the end.

    >>> rates = np.geomspace(0.01, 1, 5)
    >>> scores = -((np.log(rates) - np.log(0.13)) ** 2)
    >>> round(best_rate(rates, scores), 6)
    0.13
    """
    top = int(np.argmax(scores))
    if top in (0, len(rates) - 1):
        return float(rates[top])
    low, middle, high = scores[top - 1 : top + 2]
    bend = low - 2 * middle + high
    shift = 0.0 if bend == 0 else (low - high) / (2 * bend)
    return float(rates[top] * (rates[top + 1] / rates[top]) ** shift)


def exponent(sizes: np.ndarray, best: np.ndarray) -> float:
    """The slope of the logarithm of the best rate: 1/2 for a square root.

    >>> round(exponent(np.array([64, 256, 1024]), np.array([0.1, 0.2, 0.4])), 6)
    0.5
    """
    return float(np.polyfit(np.log(sizes), np.log(best), 1)[0])


def run(used: Settings) -> programs.Outcome:
    """Trains at every rate, and fits."""
    data = (
        features.digits("plain")
        if used.features is None
        else features.read(used.features)
    )
    size, rates = len(data.train[1]), np.array(grids.read_numbers(used.learning_rates))
    if max(used.batch_sizes) > size:
        raise settings.UsageError(
            f"flag --batch_sizes: there are only {size} training examples, for example "
            f"--batch_sizes={size // 8},{size // 2}."
        )
    cells = len(used.epsilons) * len(used.batch_sizes)
    bar, rows, best_rows, fits = progress.Progress("training", cells), [], [], []
    rng = np.random.default_rng(0)
    for epsilon in used.epsilons:
        scores = []
        for batch in used.batch_sizes:
            how = trainers.plan(size, batch, used.epochs, epsilon, used.delta)
            train = trainers.HeadTrainer(data, how, used.clip_norm)
            # [rates, repeats]
            found = [[train(r).macro for _ in range(used.repeats)] for r in rates]
            scores.append(np.array(found))
            rows += [
                {
                    "epsilon": epsilon,
                    "batch_size": batch,
                    "learning_rate": float(rate),
                    "macro_accuracy": float(np.mean(line)),
                }
                for rate, line in zip(rates, found, strict=True)
            ]
            bar.advance(len(scores))
        best = [best_rate(rates, s.mean(axis=1)) for s in scores]
        best_rows += [
            {"epsilon": epsilon, "batch_size": b, "best_rate": r}
            for b, r in zip(used.batch_sizes, best, strict=True)
        ]
        fits.append(_fit(epsilon, np.array(used.batch_sizes), rates, scores, rng))
    bar.close()
    return programs.Outcome(
        title=f"The best rate of DP-Adam by batch size, {data.name}",
        findings=_findings(fits),
        privacy="the runs choose rates by test accuracy and are not counted: read the "
        "epsilons as settings. Do not use private data.",
        tables={"rates": rows, "best": best_rows, "exponents": fits},
        figures={"best_rates": _plot(best_rows, fits)},
        shown=("best", "exponents"),
    )


def _fit(epsilon, sizes, rates, scores, rng) -> dict[str, float]:
    """The exponent, with a 95 % interval over resampled repeats."""
    repeats = scores[0].shape[1]
    drawn = []
    for _ in range(_RESAMPLES):
        chosen = rng.integers(0, repeats, repeats)
        best = [best_rate(rates, s[:, chosen].mean(axis=1)) for s in scores]
        drawn.append(exponent(sizes, np.array(best)))
    low, high = np.quantile(drawn, [0.025, 0.975])
    whole = [best_rate(rates, s.mean(axis=1)) for s in scores]
    return {
        "epsilon": epsilon,
        "exponent": exponent(sizes, np.array(whole)),
        "low": float(low),
        "high": float(high),
    }


def _findings(fits) -> list[str]:
    return [
        f"epsilon {fit['epsilon']:g}: the best rate grew like B^{fit['exponent']:.2f} "
        f"(95 % interval {fit['low']:.2f} to {fit['high']:.2f}); the claim of B^0.5 "
        + ("is inside." if fit["low"] <= 0.5 <= fit["high"] else "is OUTSIDE.")
        for fit in fits
    ]


def _plot(best_rows, fits):
    picture, axes = pictures.new(5.5, 3.8)
    ax = axes[0, 0]
    for k, fit in enumerate(fits):
        mine = [row for row in best_rows if row["epsilon"] == fit["epsilon"]]
        ax.loglog(
            [row["batch_size"] for row in mine],
            [row["best_rate"] for row in mine],
            label=f"ε = {fit['epsilon']:g}: B^{fit['exponent']:.2f}",
            **pictures.style(k),
        )
    ax.set(xlabel="expected batch size B", ylabel="best learning rate")
    ax.legend(fontsize=9)
    pictures.title(picture, "The best rate of DP-Adam by batch size", fontsize=11)
    return picture


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
