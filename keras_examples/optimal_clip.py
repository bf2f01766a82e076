r"""The clip norm with the least error, exactly, on gradients of a model in training.

    python -m keras_examples.optimal_clip
    python -m keras_examples.optimal_clip --gradients=FILE.npz

Theorem 5.1 of Rehn, Zhao, Heikkila and Honkela (2025) for one batch: the clip norm that
minimises noise plus clipping error. The paper's fixed-point equation can have no
solution, several, or a wrong one; here the minimum is found exactly, and the equation's
answer is shown next to it. Without a file the gradients are those of a softmax
regression on scikit-learn's digits, after some steps of plain gradient descent.
"""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from driver_kit import npz_files, programs, settings
from keras_examples.least_error import clip_errors, fixed_point_clip, optimal_clip
from tfdpclip import pictures


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    gradients: str | None = settings.words(
        None, "A .npz file with an array `gradients`, [n, d]; digits by default."
    )
    noise_multipliers: tuple[float, ...] = settings.numbers(
        (0.05, 0.1, 0.25, 0.5, 1, 2, 4), "Noise multipliers.", good=1, least=0
    )
    batch: int = settings.count(256, "How many gradients, the first ones.")
    train_steps: tuple[int, ...] = settings.numbers(
        (0, 100, 300), "After how many steps of training.", integer=True, least=0
    )
    learning_rate: float = settings.number(1.0, "Of gradient descent.", above=0)
    dimension: int | None = settings.count(
        None, "Where the noise lives, if not d.", good=650
    )
    sampling_rate: float = settings.number(
        1.0,
        "Below 1: count the error of Poisson sampling at this rate as well.",
        above=0,
        most=1,
    )
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("optimal_clip")


class SoftmaxRegression:
    """Softmax regression in float64 on the digits, with a constant input."""

    def __init__(self):
        from sklearn import datasets

        images, self.labels = datasets.load_digits(return_X_y=True)
        self.inputs = np.hstack([images / 16, np.ones((len(images), 1))])
        self.weights = np.zeros((self.inputs.shape[1], 10))

    def _errors(self) -> np.ndarray:
        logits = self.inputs @ self.weights
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        odds /= odds.sum(axis=1, keepdims=True)
        odds[np.arange(len(odds)), self.labels] -= 1
        return odds

    def step(self, learning_rate: float) -> None:
        """A step of gradient descent on the mean loss of all examples."""
        gradient = self.inputs.T @ self._errors() / len(self.inputs)
        self.weights -= learning_rate * gradient

    def gradients(self, count: int) -> np.ndarray:
        """`[count, 650]`, the gradients of the first examples."""
        errors = self._errors()[:count]
        return np.einsum("ni,nj->nij", self.inputs[:count], errors).reshape(count, -1)

    def accuracy(self) -> float:
        """On all examples."""
        return float(
            np.mean(np.argmax(self.inputs @ self.weights, axis=1) == self.labels)
        )


def read_gradients(name: str) -> np.ndarray:
    """`[n, d]` from a file."""
    path = pathlib.Path(name)
    try:
        found = npz_files.read_npz(path, ["gradients"])["gradients"].astype(np.float64)
    except (OSError, ValueError, TypeError) as error:
        raise settings.UsageError(
            f"flag --gradients={name}: {error}. It must be a .npz file with an array "
            "`gradients` of shape [n, d]."
        ) from error
    if found.ndim != 2 or not np.all(np.isfinite(found)):
        raise settings.UsageError(
            f"flag --gradients={name}: `gradients` must be [n, d] and finite, got "
            f"shape {found.shape}."
        )
    return found


def run(used: Settings) -> programs.Outcome:
    """Finds the clip norms."""
    rows, curves = [], []
    for step, gradients in _snapshots(used):
        gradients = gradients[: used.batch]
        norms = np.linalg.norm(gradients, axis=1)
        d = used.dimension or gradients.shape[1]
        for sigma in used.noise_multipliers:
            best = optimal_clip(gradients, sigma, d, sampling_rate=used.sampling_rate)
            point = fixed_point_clip(gradients, sigma, d)
            rows.append(
                {
                    "step": step,
                    "sigma": sigma,
                    "d": d,
                    "n": len(gradients),
                    "clip_norm": best.clip_norm,
                    "mse": best.mse,
                    "kind": best.kind,
                    "n_stationary": len(best.stationary_points),
                    "quantile": best.quantile,
                    "norm_min": float(norms.min()),
                    "norm_median": float(np.median(norms)),
                    "norm_max": float(norms.max()),
                    "fixed_point": point.clip_norm,
                    "fixed_point_converged": point.converged,
                    "fixed_point_mse": point.mse,
                }
            )
            places = norms.max() * np.geomspace(1e-3, 1.5, 120)
            errors = clip_errors(
                gradients, sigma, places, d, sampling_rate=used.sampling_rate
            )
            curves += [
                {
                    "step": step,
                    "sigma": sigma,
                    "clip_norm": float(c),
                    "noise": float(errors.noise[k]),
                    "clipping_error": float(errors.clipping_error[k]),
                    "mse": float(errors.mse[k]),
                }
                for k, c in enumerate(places)
            ]
    missed = [
        r
        for r in rows
        if not r["fixed_point_converged"]
        or abs(r["fixed_point"] - r["clip_norm"]) > 1e-6 * max(r["clip_norm"], 1e-12)
    ]
    kinks = sum(r["kind"] == "kink" for r in missed)
    return programs.Outcome(
        title="The clip norm with the least error",
        findings=[
            *_falls(rows),
            f"The paper's equation, iterated, missed the minimum in {len(missed)} of "
            f"{len(rows)} cases: {kinks} at kinks, where it has no solution; otherwise "
            "the iteration cycled or ended elsewhere.",
        ],
        privacy="none: the best clip norm is a function of raw gradients, hence as "
        "private as they are. Nothing here may set the clip norm of a private run that "
        "reports an epsilon, unless the gradients are of public data. "
        + ("The digits are public." if used.gradients is None else ""),
        caveats=[
            "quantile: the share of gradient norms at or below the clip norm.",
            "The error of one sum; sampling noise is "
            + ("included." if used.sampling_rate < 1 else "left out, as in the paper."),
        ],
        tables={"optimal_clip": rows, "mse_curve": curves},
        figures={"mse": _plot(rows, curves, used.gradients)},
        shown=("optimal_clip",),
    )


def _falls(rows):
    """Whether the best clip norm fell with the noise, and with training."""
    texts = []
    for what, other, words, meaning in (
        (
            "sigma",
            "step",
            "Claim (Theorem 5.1): for fixed gradients the best clip norm falls, or "
            "stays, as the noise grows",
            " 'More noise wants a larger clip norm' can then only come from what noise "
            "does to the norms.",
        ),
        ("step", "sigma", "At fixed noise the best clip norm falls with training", ""),
    ):
        pairs = [
            (a["clip_norm"], b["clip_norm"])
            for fixed in sorted({row[other] for row in rows})
            for ordered in [
                sorted((r for r in rows if r[other] == fixed), key=lambda r: r[what])
            ]
            for a, b in zip(ordered, ordered[1:], strict=False)
            if a[what] < b[what]
        ]
        if not pairs:
            texts.append(f"{words}: not looked at, with one value of {what}.")
            continue
        # Both are minima of numbers of a finite precision.
        rose = sum(b > a * (1 + 1e-9) for a, b in pairs)
        texts.append(
            f"{words}: it held in all {len(pairs)} comparisons.{meaning}"
            if not rose
            else f"{words}: it did NOT hold; the clip norm rose in {rose} of "
            f"{len(pairs)} comparisons."
        )
    return texts


def _snapshots(used):
    if used.gradients is not None:
        yield 0, read_gradients(used.gradients)
        return
    model = SoftmaxRegression()
    at = 0
    for step in sorted(set(used.train_steps)):
        while at < step:
            model.step(used.learning_rate)
            at += 1
        yield step, model.gradients(used.batch)


def _plot(rows, curves, file):
    steps = sorted({r["step"] for r in rows})
    picture, axes = pictures.new(
        1.2 + 3.9 * len(steps), 4.2, 1, len(steps), sharey=True
    )
    sigmas = sorted({r["sigma"] for r in rows})
    shown = sigmas[:: max(1, len(sigmas) // 3)][:4]
    for ax, step in zip(axes[0], steps, strict=True):
        for k, sigma in enumerate(shown):
            mine = [c for c in curves if (c["step"], c["sigma"]) == (step, sigma)]
            x = [c["clip_norm"] for c in mine]
            look = pictures.style(k, marked=False)
            ax.plot(x, [c["mse"] for c in mine], label=f"noise {sigma:g}", **look)
            ax.plot(
                x, [c["noise"] for c in mine], color=look["color"], lw=0.7, alpha=0.7
            )
            best = [r for r in rows if (r["step"], r["sigma"]) == (step, sigma)][0]
            if best["clip_norm"] > 0:
                ax.scatter(
                    best["clip_norm"], best["mse"], color=look["color"], zorder=3
                )
        error = [c for c in curves if (c["step"], c["sigma"]) == (step, shown[0])]
        ax.plot(
            [c["clip_norm"] for c in error],
            [max(c["clipping_error"], 1e-12) for c in error],
            color="black",
            lw=1.2,
            ls=":",
            label="clipping error alone",
        )
        low = min(r["mse"] for r in rows)
        ax.set(xscale="log", yscale="log", xlabel="clip norm")
        ax.set_ylim(bottom=max(low, 1e-9) / 10)
        where = f"after {step} steps" if file is None else pathlib.Path(file).stem
        ax.set_title(where, fontsize=10.5)
    axes[0, 0].set_ylabel("mean squared error of the sum")
    axes[0, 0].legend(fontsize=8)
    pictures.title(
        picture,
        "Error of one noised, clipped sum (thin: its noise; dots: exact minimum)",
        fontsize=11,
    )
    return picture


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
