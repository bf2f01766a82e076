"""The outputs of the digits program: a text, a picture, settings, a table."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from matplotlib import figure, ticker

from driver_kit import plotting, reports
from tfdpclip import pictures
from tfdpclip.accounting import PrivacyStatement

_BLUE, _ORANGE, _GREEN, *_ = pictures.COLORS
_GREY = pictures.GREY


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
      flags: All settings, by flag.
      derived: Numbers that follow from them before training.
      rows: The tracker's rows.
      statement: The privacy statement.
      classes: Number of classes, for the accuracy of guessing.
      baseline: Test accuracy of the same network without privacy; None if not trained.
      baseline_text: How the baseline was trained, in words.
      seconds: How long each part took.
    """

    flags: dict[str, Any]
    derived: dict[str, Any]
    rows: list[dict[str, float]]
    statement: PrivacyStatement
    classes: int
    baseline: float | None
    baseline_text: str
    seconds: dict[str, float]

    @property
    def unprotected(self) -> bool:
        """Whether the rows contain measurements of private data without noise."""
        return "unprotected_norm_quantile" in self.rows[0]

    @property
    def last(self) -> dict[str, float]:
        """The last row."""
        return self.rows[-1]

    @property
    def tables(self) -> dict[str, list[dict[str, float]]]:
        """history.csv."""
        return {"history": self.rows}

    @property
    def figures(self) -> dict[str, figure.Figure]:
        """digits.png."""
        return {"digits": plot(self)}

    def config(self, used: Any) -> dict[str, Any]:
        """The run's settings and results."""
        del used  # in `flags`
        return {
            "flags": self.flags,
            "derived": self.derived,
            "result": {
                "test_accuracy": self.last["test_accuracy"],
                "non_private_test_accuracy": self.baseline,
                "epsilon": self.statement.epsilon,
                "delta": self.statement.delta,
                "private": not self.statement.not_private,
                "final_clip_norm": self.last["clip_norm"],
                "steps": self.statement.steps,
                "seconds": self.seconds,
            },
            "versions": reports.versions(),
        }

    def report(self) -> str:
        """The report in plain words."""
        derived = self.derived
        right = round(self.last["test_accuracy"] * derived["test_size"])
        title = "Digits, trained with differential privacy"
        if self.statement.not_private:
            title = "Digits, trained WITHOUT differential privacy"
        lines = [
            *reports.heading(title),
            f"test accuracy   {self.last['test_accuracy']:.1%} ({right} of "
            f"{derived['test_size']} test images; guessing: {1 / self.classes:.0%})",
        ]
        if self.baseline is not None:
            lines.append(
                f"without privacy {self.baseline:.1%} (same network; "
                f"{self.baseline_text})"
            )
        lines += [
            f"clip norm       {_clip_text(self)}",
            f"noise           multiplier {derived['noise_multiplier']:.6g} in all: "
            f"{derived['gradient_noise_multiplier']:.6g} on the gradients, and counts "
            "for the clip",
            f"steps           {self.statement.steps}, each with "
            f"{derived['expected_batch_size']:.6g} of {derived['train_size']} images "
            "on average",
            f"optimizer       {self.flags['optimizer']}, learning rate "
            f"{derived['learning_rate']:g}; {derived['parameters']} parameters",
            "time            "
            + ", ".join(f"{k} {v:.0f} s" for k, v in self.seconds.items()),
            "",
            f"Privacy: {self.statement}",
            "",
            "What this covers:",
            *reports.bullets(_coverage(self)),
        ]
        return "\n".join(lines) + "\n"


def _clip_text(run: Run) -> str:
    first, last = run.rows[0]["clip_norm"], run.last["clip_norm"]
    rule = run.flags["clip"]
    if rule == "automatic":
        return "none: the automatic rule scales every gradient to a norm just below 1"
    if rule == "fixed":
        return f"{last:.4g}, fixed"
    target = run.flags["target_quantile"]
    text = (
        f"{last:.4g} at the end, {first:.4g} at the start; follows quantile {target:g}"
    )
    if run.unprotected:
        text += f" (true value at the end: {run.last['unprotected_norm_quantile']:.4g})"
    return text


def _coverage(run: Run) -> list[str]:
    derived = run.derived
    size = derived["train_size"]
    private = not run.statement.not_private
    if private:
        covered = "The guarantee is for each of the training images, and covers the "
        covered += "model after every step"
        covered += " and the clip norm." if run.flags["clip"] == "quantile" else "."
    else:
        covered = "This run guarantees nothing: see above."
    texts = [
        covered,
        f"The number of training images, {size}, is treated as public: rate and noise "
        "were chosen from it.",
        "Test images are not protected; the accuracies are measured on them.",
    ]
    if run.unprotected:
        texts.append(
            "The true quantile of the gradient norms, here, in the plot and in the "
            "table, is measured on the training images WITHOUT noise and is outside "
            "the guarantee. It is shown only because this data set is public. With "
            "private data use --noshow_true_norms."
        )
    if run.baseline is not None:
        texts.append(
            "The comparison without privacy is outside the guarantee as well "
            "(--baseline_epochs=0 leaves it out)."
        )
    texts.append(
        "The defaults of this program were chosen by trying settings on this data set, "
        "which the guarantee does not count."
    )
    if run.statement.delta >= 1 / size:
        texts.append(
            f"delta = {run.statement.delta:g} is not small against 1/{size}: that much "
            "would allow publishing an image outright. Use --delta=1e-5."
        )
    return texts


def plot(run: Run) -> figure.Figure:
    """Draws accuracy, epsilon and clip norm over the steps."""
    picture = pictures.empty(12, 5.6)
    grid = picture.add_gridspec(2, 2, width_ratios=[1, 1.15])
    accuracy = picture.add_subplot(grid[0, 0])
    epsilon = picture.add_subplot(grid[1, 0], sharex=accuracy)
    norms = picture.add_subplot(grid[:, 1])
    steps = [row["step"] for row in run.rows]
    _plot_accuracy(accuracy, steps, run)
    _plot_epsilon(epsilon, steps, run)
    _plot_norms(norms, steps, run)
    for axes in (accuracy, epsilon, norms):
        pictures.dress(axes)
        axes.set_xlim(0, steps[-1])
    for axes in (epsilon, norms):
        axes.set_xlabel("training step (one noise draw each)")
    accuracy.tick_params(labelbottom=False)
    pictures.title(picture, _title(run), fontsize=12)
    return picture


def _title(run: Run) -> str:
    statement = run.statement
    if statement.epsilon == math.inf:
        claim = "NOT PRIVATE: no noise"
    elif statement.not_private:
        claim = (
            f"NOT PRIVATE: fixed seed (would be epsilon = {statement.epsilon:.3g}, "
            f"delta = {statement.delta:g})"
        )
    else:
        claim = (
            f"({statement.epsilon:.3g}, {statement.delta:g})-differentially private "
            f"for each training image ({statement.relation})"
        )
    title = f"Handwritten digits, {run.derived['train_size']} images. {claim}"
    if statement.not_private:
        return title
    released = "the model"
    if run.flags["clip"] == "quantile":
        released += " and the clip norm"
    second = f"Private: {released}."
    if run.unprotected:
        second += " NOT private: the true gradient norms (right, dashed and shaded)."
    return f"{title}\n{second}"


def _plot_accuracy(axes, steps, run):
    values = [row["test_accuracy"] for row in run.rows]
    axes.plot(steps, values, color=_BLUE, label="this run")
    axes.annotate(
        f"{values[-1]:.1%}",
        (steps[-1], values[-1]),
        (0, -14),
        textcoords="offset points",
        ha="right",
        color=_BLUE,
    )
    if run.baseline is not None:
        label = f"same network without privacy: {run.baseline:.1%}"
        axes.axhline(run.baseline, color=_GREY, linestyle=":", label=label)
    axes.set_ylabel("test accuracy")
    seen = values[1:] or values
    plotting.accuracy_axis(
        axes, seen if run.baseline is None else [*seen, run.baseline]
    )
    plotting.guessing(axes, 1 / run.classes)
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.12), fontsize=9)


def _plot_epsilon(axes, steps, run):
    statement = run.statement
    axes.set_ylabel(f"epsilon spent\n(at delta = {statement.delta:g})")
    if statement.epsilon == math.inf:
        axes.set_yticks([])
        text = "infinite: without noise nothing is private"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center")
        return
    values = [row["epsilon"] for row in run.rows]
    label = f"spent: {values[-1]:.3g}"
    axes.plot(steps, values, color=_ORANGE, label=label)
    budget = run.flags["epsilon"]
    axes.axhline(budget, color=_GREY, linestyle=":", label=f"budget: {budget:g}")
    axes.set_ylim(0, 1.12 * max(budget, values[-1]))
    axes.legend(loc="lower right", fontsize=9)


def _plot_norms(axes, steps, run):
    rule = run.flags["clip"]
    axes.set_title("Clip norm and gradient norms", fontsize=11)
    axes.set_ylabel("L2 norm of one image's gradient (log scale)")
    drawn = []
    if run.unprotected:
        low, middle, high = (
            [row[f"unprotected_norm_{name}"] for row in run.rows]
            for name in ("p10", "quantile", "p90")
        )
        axes.fill_between(
            steps,
            low,
            high,
            color=_GREEN,
            alpha=0.15,
            linewidth=0,
            label="true 10 % to 90 % range (no noise: not private)",
        )
        quantile = run.flags["target_quantile"]
        axes.plot(
            steps,
            middle,
            color=_GREEN,
            linestyle="--",
            label=f"true quantile {quantile:g} (no noise: not private)",
        )
        drawn += middle + high
    if rule != "automatic":
        values = [row["clip_norm"] for row in run.rows]
        label = "clip norm (fixed)"
        if rule == "quantile":
            private = not run.statement.not_private
            label = "clip norm (private)" if private else "clip norm"
        axes.plot(steps, values, color=_BLUE, linewidth=2, label=label)
        drawn += values
    positive = [value for value in drawn if value > 0 and math.isfinite(value)]
    if not positive:
        text = "The automatic rule has no clip norm,\nand true norms were left out."
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center")
        return
    axes.set_yscale("log")
    # The shade may go far below the lines, towards 0. Above them goes the legend.
    axes.set_ylim(min(positive) / 10, 50 * max(positive))
    axes.legend(loc="upper right", fontsize=9)
