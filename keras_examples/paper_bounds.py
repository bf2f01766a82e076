r"""The papers' bounds on clipped descent, beside brute force.

    python -m keras_examples.paper_bounds

Chen, Wu and Hong (2020): Theorems 1 and 5 on the two problems of a single number,
Theorem 3 on random mixtures, and skewed noise (section 2.2). Rehn, Zhao, Heikkilä and
Honkela (2025), equations (4) to (7), from Koloskova, Hendrikx and Stich (2023): the
clip norm with the least bound, beside the printed formula. No data are used.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from driver_kit import programs, settings
from keras_examples import convergence_bounds as bounds
from tfdpclip import pictures

_POINTS = {1: (-3.0, -3.0, 9.0), 2: (-3.0, 3.0)}
_DRAWS = 20_000


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    start: float = settings.number(5.0, "Where descent starts.", good=5)
    steps: int = settings.count(2000, "Its steps, T.")
    learning_rate: float = settings.number(0.01, "Its learning rate.", above=0)
    clip_norm: float = settings.number(1.0, "The clip norm c.", above=0)
    noise_stddevs: tuple[float, ...] = settings.numbers(
        (0, 1), "Noise on the mean gradient; 0 is Theorem 1.", good=1, least=0
    )
    mixtures: int = settings.count(20, "How many random mixtures to try.")
    sigmas: tuple[float, ...] = settings.numbers(
        (0.5, 1, 2, 4, 8), "Noise multipliers of equations (4) to (7).", above=0
    )
    seed: int = settings.count(0, "For noise and mixtures.", least=0)
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("paper_bounds")


def descend(used: Settings, problem: int, noise_stddev: float) -> float:
    """The mean progress of clipped descent over its steps, by brute force."""
    points = np.asarray(_POINTS[problem])[:, None]
    rng, x, total = np.random.default_rng(used.seed), used.start, 0.0
    for _ in range(used.steps):
        step = bounds.clipped(x - points, used.clip_norm).mean()
        total += (x - points.mean()) * step
        x -= used.learning_rate * (step + noise_stddev * rng.standard_normal())
    return total / used.steps


def random_mixture(used: Settings, rng: np.random.Generator) -> dict[str, float]:
    """The progress under a random mixture of Gaussians, and the bound of Theorem 3."""
    dimension, count, c = 3, 4, used.clip_norm
    mean = rng.standard_normal(dimension) * c
    centers = rng.standard_normal((count, dimension)) * c
    # Turned where needed, so that the theorem has a bound.
    turned = (mean + centers) @ mean < 0
    centers[turned] = -centers[turned]
    weights, spreads = rng.dirichlet(np.ones(count)), rng.uniform(0.05, 0.3, count) * c
    noise = rng.standard_normal((count, _DRAWS, dimension)) * spreads[:, None, None]
    small = (np.linalg.norm(noise, axis=2) < c / 4).mean(axis=1)
    each = bounds.clipped(mean + centers[:, None] + noise, c) @ mean
    return {
        "progress": float(weights @ each.mean(axis=1)),
        "bound": bounds.mixture_progress_bound(mean, centers, weights, small, c),
    }


def skewed(used: Settings, rng: np.random.Generator) -> dict[str, float]:
    """The bias of noise that is skewed along a gradient, and of the same against it."""
    mean = rng.standard_normal(3)
    noise = 3 * rng.standard_normal((1000, 3)) * used.clip_norm
    noise *= np.sign(noise @ mean)[:, None]
    both = np.concatenate([noise, -noise])
    more = rng.uniform(0.5, 1, 1000)
    along = np.concatenate([more, 1 - more]) / 1000
    against = np.concatenate([1 - more, more]) / 1000
    return {
        "along": bounds.skewness_bias(mean, both, along, used.clip_norm),
        "against": bounds.skewness_bias(mean, both, against, used.clip_norm),
    }


def best_clip_norm(sigma: float, used: Settings) -> float:
    """The clip norm with the least bound (4), on a fine grid."""
    grid = np.geomspace(1e-4, 1e3, 2000)
    rate, steps = used.learning_rate, used.steps
    found = [bounds.koloskova_bound(c, sigma, rate, steps) for c in grid]
    return float(grid[np.argmin(found)])


def run(used: Settings) -> programs.Outcome:
    """Evaluates the bounds."""
    rng = np.random.default_rng(used.seed)
    descents = []
    for problem, points in _POINTS.items():
        gap = (used.start - np.mean(points)) ** 2 / 2
        for stddev in used.noise_stddevs:
            bound = bounds.progress_bound(
                gap, 1.0, used.clip_norm, used.learning_rate, used.steps, stddev
            )
            found = descend(used, problem, stddev)
            row = {"problem": problem, "noise_stddev": stddev, "mean_progress": found}
            descents.append({**row, "bound": bound})
    mixtures = [random_mixture(used, rng) for _ in range(used.mixtures)]
    skews = [skewed(used, rng) for _ in range(used.mixtures)]
    clips = [
        {
            "sigma": sigma,
            "least_bound_at": best_clip_norm(sigma, used),
            "printed": bounds.koloskova_clip_norm(sigma, used.learning_rate),
        }
        for sigma in used.sigmas
    ]
    return programs.Outcome(
        title="Bounds on clipped descent, and brute force",
        findings=_findings(descents, mixtures, skews, clips),
        privacy="nothing here is data: points, gradients and noise are made up.",
        tables={
            "descents": descents,
            "mixtures": mixtures,
            "skewness": skews,
            "clip_norms": clips,
        },
        figures={"clip_norms": _plot(clips)},
        shown=("descents", "clip_norms"),
    )


def _findings(descents, mixtures, skews, clips) -> list[str]:
    above = sum(row["mean_progress"] > row["bound"] for row in descents)
    below = sum(row["progress"] < row["bound"] for row in mixtures)
    right = sum(row["along"] >= 0 >= row["against"] for row in skews)
    low, high = clips[0], clips[-1]
    return [
        f"Theorems 1 and 5: {above} of {len(descents)} descents made more progress "
        "than the bound. With noise the bound is one on the expectation.",
        f"Theorem 3: {below} of {len(mixtures)} mixtures made less progress than the "
        "bound.",
        f"Skewed noise (section 2.2): in {right} of {len(skews)} cases the bias was at "
        "least 0 along the gradient and at most 0 against it.",
        f"Equations (4) to (7): from sigma {low['sigma']:g} to {high['sigma']:g} the "
        f"bound is least at {low['least_bound_at']:.3g} to "
        f"{high['least_bound_at']:.3g}, and the printed formula says "
        f"{low['printed']:.3g} to {high['printed']:.3g}. "
        "Equation (6) as printed has no zero: both of its terms are above 0.",
    ]


def _plot(clips):
    picture, axes = pictures.new(5.5, 3.6)
    ax = axes[0, 0]
    for k, (name, label) in enumerate(
        (("least_bound_at", "least bound (4)"), ("printed", "printed (7)"))
    ):
        ax.loglog(
            [row["sigma"] for row in clips],
            [row[name] for row in clips],
            label=label,
            **pictures.style(k),
        )
    ax.set(xlabel="sigma", ylabel="clip norm")
    ax.legend(fontsize=9)
    pictures.title(picture, "The clip norm by the bound, and as printed", fontsize=11)
    return picture


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
