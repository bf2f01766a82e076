r"""Clipping moves where gradient descent ends; noise before clipping moves it back.

    python -m keras_examples.clipping_bias

The three synthetic problems of Chen, Wu and Hong (2020), "Understanding Gradient
Clipping in Private SGD: A Geometric Perspective" (Figures 4 and 5): private gradient
descent where k times standard Gaussian noise is added to each gradient before it is
clipped. k = 0 is plain DP-SGD. Every descent is a `fit` with
`dpc.keras.DPSGD(perturbation=k)`.

The paper leaves open the starting points, the number of iterations of the first two
problems, and batch size, clip norm and weights of the third. The defaults are 5
(outside the interval on which problem 2 has no gradient), 50,000 (with k = 10, 10,000
are far from the end), 64, 1 and equal weights.

The centres of problem 3 have covariances 36 I, 4 I and I in the text: descent starts
some 6 from the minimum. The printed panel starts near 25 and stays above 10, as with
centres of stddevs 36, 4 and 1: --component_stddevs=36,4,1.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import optimize, special

import tfdpclip as dpc
from driver_kit import programs, progress, settings
from keras_examples import descent
from tfdpclip import pictures

POINTS = {1: (-3.0, -3.0, 9.0), 2: (-3.0, 3.0)}
# A run has settled that moved by less than this part of its start over the last tenth.
_STILL = 0.05
_DIMENSION, _SIZE = 10, 10_000


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    problems: tuple[int, ...] = settings.numbers(
        (1, 2, 3), "Which of the three problems.", integer=True, least=1, most=3
    )
    perturbations: tuple[float, ...] = settings.numbers(
        (0, 1, 5, 10), "k: stddev of the noise before clipping.", good=5, least=0
    )
    iterations: int = settings.count(50_000, "Gradient steps of problems 1 and 2.")
    iterations_3: int = settings.count(10_000, "Gradient steps of problem 3.")
    clip_norm: float = settings.number(1.0, "The clip norm c.", above=0)
    noise_stddev: float = settings.number(
        1.0, "sigma: stddev of the noise on the mean gradient.", least=0
    )
    learning_rate: float = settings.number(
        0.001, "Learning rate of problems 1 and 2.", above=0
    )
    learning_rate_3: float = settings.number(
        0.015, "Learning rate of problem 3.", above=0
    )
    start: float = settings.number(5.0, "Where problems 1 and 2 start.", good=5)
    start_3: float = settings.number(
        0.0, "Where problem 3 starts, in every coordinate.", good=0
    )
    component_stddevs: tuple[float, ...] = settings.numbers(
        (6, 2, 1),
        "Problem 3: stddevs of the centres of its three components, as the text has "
        "them; 36,4,1 has axes like the printed ones.",
        above=0,
    )
    batch_size: int = settings.count(64, "Points per step of problem 3.", most=_SIZE)
    repeats: int = settings.count(
        5,
        "Runs with different noise (and points, in problem 3).",
    )
    delta: float = settings.delta()
    seed: int = settings.count(0, "For points, draws and noise.", least=0)
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("clipping_bias")

    def __post_init__(self):
        if len(self.component_stddevs) != 3:
            raise ValueError(
                "flag --component_stddevs: there are three components; for example "
                "--component_stddevs=36,4,1."
            )


def expected_clipped(u, perturbation: float, clip_norm: float = 1.0):
    """E clip(u + k zeta, c) for a number u and standard normal zeta.

    Args:
      u: the gradient, an array of any shape.
      perturbation: k, 0 or above.
      clip_norm: c.

    Returns:
      The expectation, of the shape of `u`.

    >>> round(float(expected_clipped(0.3, 5.0)), 8)
    0.04752769
    """
    u, k = np.asarray(u, np.float64) / clip_norm, perturbation / clip_norm
    if k == 0:
        return clip_norm * np.clip(u, -1, 1)
    a, b = (-1 - u) / k, (1 - u) / k
    inside = special.ndtr(b) - special.ndtr(a)
    density = (np.exp(-(a**2) / 2) - np.exp(-(b**2) / 2)) / math.sqrt(2 * math.pi)
    tails = special.ndtr(-b) - special.ndtr(a)
    return clip_norm * (tails + u * inside + k * density)


def drift(x: float, points, perturbation: float, clip_norm: float = 1.0) -> float:
    """The expected clipped gradient of the mean of (x - a)^2 / 2 over the points."""
    return float(
        np.mean(expected_clipped(x - np.asarray(points), perturbation, clip_norm))
    )


def fixed_point(points, perturbation: float, clip_norm: float = 1.0) -> float:
    """Where the expected clipped gradient is zero; the middle, if on an interval.

    >>> round(fixed_point(POINTS[1], 5.0), 4)
    0.0963
    """
    low, high = min(points), max(points)

    def first(sign):
        # The drift never falls. Half a rounding error tells zero from above zero.
        found = optimize.brentq(
            lambda x: sign * drift(x, points, perturbation, clip_norm) + 1e-12,
            low - 1.0,
            high + 1.0,
            xtol=1e-13,
        )
        return found

    return (first(1.0) + first(-1.0)) / 2


def run(used: Settings) -> programs.Outcome:
    """Runs the problems."""
    curves, rows = [], []
    for problem in used.problems:
        steps, distances = descend(problem, used)
        for j, k in enumerate(used.perturbations):
            tenth = max(1, len(steps) // 10)
            ends = distances[-tenth:, j].mean(axis=0)
            moved = distances[-2 * tenth : -tenth, j].mean() - ends.mean()
            row = {
                "problem": problem,
                "k": k,
                "start": float(distances[0, j].mean()),
                "end_mean": float(ends.mean()),
                "end_min": float(ends.min()),
                "end_max": float(ends.max()),
                "settled": int(abs(moved) <= _STILL * distances[0, j].mean()),
            }
            if problem in POINTS:
                optimum = float(np.mean(POINTS[problem]))
                at = fixed_point(POINTS[problem], k, used.clip_norm)
                row["drift_at_optimum"] = round(
                    drift(optimum, POINTS[problem], k, used.clip_norm), 9
                )
                # Further digits would be those of the root search.
                row["distance_of_fixed_point"] = round(abs(at - optimum), 9)
            rows.append(row)
            curves += [
                {
                    "problem": problem,
                    "k": k,
                    "step": int(step),
                    "distance_mean": float(d.mean()),
                    "distance_min": float(d.min()),
                    "distance_max": float(d.max()),
                }
                for step, d in zip(steps, distances[:, j], strict=True)
            ]
    return programs.Outcome(
        title="Clipping bias, and noise before clipping",
        findings=_findings(used, rows),
        privacy=_privacy(used),
        caveats=[
            "The points are made up, and the noise has a seed: nothing is released.",
            "end_* is the distance to the minimum over the last tenth of the steps: "
            f"mean, least and greatest of {used.repeats} runs; settled: it moved by "
            f"less than {_STILL:.0%} of the start since the tenth before.",
            "Noise before clipping gives no privacy by itself and is not counted.",
            "The time to settle is 1 / (learning rate times slope), in problem 1 some "
            "15,000 steps for k = 10: shorter runs do not show where descent ends. "
            "distance_of_fixed_point does.",
        ],
        tables={"summary": rows, "curves": curves},
        figures={"distance": _plot(used, curves, rows)},
        shown=("summary",),
    )


def _points(problem: int, used: Settings) -> np.ndarray:
    """The points of each run, `[repeats, count, dimension]`."""
    if problem in POINTS:
        points = np.asarray(POINTS[problem])[None, :, None]
        return np.repeat(points, used.repeats, axis=0)
    rng = np.random.default_rng([used.seed, 3])
    means = rng.standard_normal((used.repeats, 3, _DIMENSION))
    means *= np.asarray(used.component_stddevs)[:, None]
    which = rng.integers(0, 3, (used.repeats, _SIZE))
    points = np.take_along_axis(means, which[..., None], axis=1)
    return points + rng.standard_normal(points.shape)


def descend(problem: int, used: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Steps, `[n]`, and the distances to the minimum then, `[n, k, repeats]`."""
    scalar = problem in POINTS
    points = _points(problem, used)
    steps = used.iterations if scalar else used.iterations_3
    rows = points.shape[1] if scalar else used.batch_size
    total = steps * len(used.perturbations) * used.repeats
    bar = progress.Progress(f"problem {problem}", total)
    distances = []
    for j, k in enumerate(used.perturbations):
        follower = descent.Descent(
            rows,
            points.shape[2],
            used.learning_rate if scalar else used.learning_rate_3,
            used.clip_norm,
            used.noise_stddev,
            k,
            seed=(used.seed * 1000 + 100 * problem + j) % 2**31,
        )
        found = []
        for repeat, cloud in enumerate(points):
            draws = None
            if not scalar:
                # The same batch for every k: differences between curves are due to k.
                rng = np.random.default_rng([used.seed, problem, repeat])
                draws = rng.integers(0, _SIZE, (steps, rows))
            before = (j * used.repeats + repeat) * steps
            at, positions = follower.follow(
                cloud,
                draws,
                used.start if scalar else used.start_3,
                steps,
                lambda done, before=before: bar.show(before + done),
            )
            found.append(np.linalg.norm(positions - cloud.mean(axis=0), axis=1))
        distances.append(np.stack(found, axis=1))
    bar.close()
    return at, np.stack(distances, axis=1)


def _findings(used, rows):
    texts = []
    for problem in used.problems:
        ends = {r["k"]: r["end_mean"] for r in rows if r["problem"] == problem}
        if 0 not in ends or len(ends) < 2:
            continue
        best = min(ends, key=ends.get)
        held = f"{'held' if best != 0 else 'did NOT hold'} here."
        moving = [
            f"{r['k']:g}" for r in rows if r["problem"] == problem and not r["settled"]
        ]
        if moving:
            held = f"is open: k = {', '.join(moving)} still moved. Raise " + (
                "--iterations." if problem in POINTS else "--iterations_3."
            )
        smallest = min(k for k in ends if k > 0)
        texts.append(
            f"Problem {problem}: plain clipping ends {ends[0]:.3g} from the minimum, "
            f"k = {best:g} ends {ends[best]:.3g} from it (k = {smallest:g}: "
            f"{ends[smallest]:.3g}). The paper's claim that noise before clipping "
            f"brings the end nearer {held}"
        )
    texts.append(
        "The perturbation reduces the bias and never removes it: see "
        "distance_of_fixed_point, which is exact."
    )
    return texts


def _privacy(used):
    if used.noise_stddev == 0:
        return "none: without noise epsilon is infinite."
    lines = [
        "nothing here is private data: the records are made up or public, and no "
        "epsilon is claimed. With private points, one run would have:"
    ]
    for problem in used.problems:
        size = len(POINTS[problem]) if problem in POINTS else used.batch_size
        scheme = (
            dpc.sampling.FullBatch()
            if problem in POINTS
            else dpc.sampling.FixedSize(size, _SIZE, replacement=True)
        )
        z = used.noise_stddev * size / used.clip_norm
        steps = used.iterations if problem in POINTS else used.iterations_3
        spent = dpc.accounting.epsilon(z, steps, scheme, used.delta)
        relation = scheme.neighboring_relation.name.lower().replace("_", " ")
        lines.append(
            f"  problem {problem}: epsilon {spent:.4g} at delta {used.delta:g} "
            f"({relation}; {scheme.describe()}; {steps} steps, noise "
            f"multiplier {z:g}; pld)"
        )
    return "\n".join(lines)


def _plot(used, curves, rows):
    count = len(used.problems)
    picture, axes = pictures.new(max(6.5, 4.3 * count), 3.9, 1, count)
    for ax, problem in zip(axes[0], used.problems, strict=True):
        for j, k in enumerate(used.perturbations):
            mine = [c for c in curves if c["problem"] == problem and c["k"] == k]
            steps = [c["step"] for c in mine]
            look = pictures.style(j, marked=False)
            label = "DP-SGD (k = 0)" if k == 0 else f"k = {k:g}"
            ax.plot(steps, [c["distance_mean"] for c in mine], label=label, **look)
            low = [c["distance_min"] for c in mine]
            high = [c["distance_max"] for c in mine]
            ax.fill_between(steps, low, high, color=look["color"], alpha=0.12, lw=0)
            at = [r for r in rows if r["problem"] == problem and r["k"] == k][0]
            if "distance_of_fixed_point" in at:
                ax.plot(
                    [steps[-1] * 1.02],
                    [at["distance_of_fixed_point"]],
                    marker="<",
                    color=look["color"],
                    clip_on=False,
                )
        ax.set_ylim(bottom=0)
        ax.set_xlim(0, steps[-1])
        ax.set_xlabel("iteration")
        ax.set_title(f"Problem {problem}", fontsize=11)
    axes[0, 0].set_ylabel("distance to the minimum")
    axes[0, -1].legend(fontsize=9)
    pictures.title(
        picture,
        f"Clipped descent with noise k before clipping (mean and range of "
        f"{used.repeats} runs;\ntriangles: where the expected clipped gradient is 0)",
        fontsize=10.5,
    )
    return picture


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
