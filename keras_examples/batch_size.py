r"""The noise of each batch size, and the best batch size. Needs no data.

    python -m keras_examples.batch_size
    python -m keras_examples.batch_size --num_examples=87002
    python -m keras_examples.batch_size --results=runs/tune_grid

The noise axes of Figures 6, 7 and A13 to A15 of Rehn, Zhao, Heikkila and Honkela
(2025), "On Optimal Hyperparameters for Differentially Private Deep Transfer Learning",
for CIFAR-100 (50,000 images, the default) and SUN397 (87,002), and the paper's rule for
choosing a batch size. Everything follows from public numbers and costs no privacy. With
--results, a directory of `tune_grid`, its examples, epochs, epsilons and batch sizes
are taken, every point of the figures has the colour of its accuracy, and the rule's
choice is compared with the grid's best.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from driver_kit import programs, settings
from keras_examples import grid_figures, grid_results
from tfdpclip import pictures
from tfdpclip.tuning import batch_size_advice, batch_size_noise

#: File, quantity, axis, title: after the paper's figures.
FIGURES = (
    (
        "per_step_noise",
        "per_step_noise",
        "batch_size",
        "noise on one averaged gradient: z / B (Fig. 6, left)",
    ),
    (
        "cumulative_averaged_noise",
        "cumulative_averaged_noise",
        "batch_size",
        "noise on the sum of averaged gradients: z √T / B (Fig. 6, right)",
    ),
    (
        "cumulative_noise",
        "cumulative_noise",
        "batch_size",
        "cumulative noise: z √T (Fig. 7, A14, left)",
    ),
    (
        "cumulative_noise_by_steps",
        "cumulative_noise",
        "steps",
        "cumulative noise: z √T (Fig. 7, A14, right)",
    ),
    (
        "effective_noise",
        "effective_noise",
        "batch_size",
        "effective noise: z / q (Fig. A13, A15)",
    ),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    results: str | None = settings.words(
        None, "A directory of tune_grid, to colour by.", good="runs/tune_grid"
    )
    num_examples: int | None = settings.count(
        None, "Number of training examples N; by default 50,000.", good=50_000, least=2
    )
    epochs: tuple[float, ...] | None = settings.numbers(
        None,
        "How often an example is used, on average; by default 8.",
        good=8,
        above=0,
    )
    epsilons: tuple[float, ...] | None = settings.numbers(
        None, "Privacy budgets; by default 0.5,1,2,4,8.", good=8, above=0
    )
    delta: float = settings.delta()
    batch_sizes: tuple[int, ...] | None = settings.numbers(
        None,
        "Expected batch sizes, by default powers of two from 256 to 16384; those of N "
        "or above are left out, N is added.",
        good=256,
        integer=True,
        least=1,
    )
    min_steps: int = settings.count(20, "Least number of steps that training needs.")
    tolerance: float = settings.number(
        0.1, "Excess over the least noise that counts as nearly least.", least=0
    )
    mode: str = settings.choice(
        "fixed_epochs",
        ("fixed_epochs", "fixed_steps"),
        "What stays the same over batch sizes.",
    )
    steps: int = settings.count(
        100,
        "Steps for --mode=fixed_steps.",
        only_with=("mode", "fixed_steps"),
    )
    steps_convention: str = settings.choice(
        "ceil",
        ("ceil", "floor", "loader", "framework"),
        "How sampling rate and steps follow from the batch size.",
    )
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("batch_size")


def run(used: Settings) -> programs.Outcome:
    """Computes the noise and the recommendations."""
    results = None if used.results is None else grid_results.read(used.results)
    used = _completed(used, results)
    sizes = [b for b in used.batch_sizes if b < used.num_examples] + ["full"]
    rows, answers = [], []
    fixed_steps = used.mode == "fixed_steps"
    for epochs in (None,) if fixed_steps else used.epochs:
        for epsilon in used.epsilons:
            noise = batch_size_noise(
                used.num_examples,
                epsilon,
                used.delta,
                sizes,
                epochs=epochs,
                steps=used.steps if fixed_steps else None,
                convention=used.steps_convention,
            )
            good, chosen = (), None
            if not fixed_steps:
                advice = batch_size_advice(
                    used.num_examples,
                    epochs,
                    epsilon,
                    used.delta,
                    used.min_steps,
                    sizes,
                    tolerance=used.tolerance,
                    convention=used.steps_convention,
                )
                good, chosen = advice.good, advice.batch_size
                answers.append(
                    {
                        "epochs": epochs,
                        "epsilon": epsilon,
                        "batch_size": chosen,
                        "steps": advice.chosen.steps,
                        "noise_multiplier": advice.chosen.noise_multiplier,
                        "also_good": " ".join(map(str, good)),
                    }
                )
            scores = _scores(results, epochs, epsilon)
            for one in noise:
                score = scores.get(one.batch_size)
                rows.append(
                    {
                        "epochs": "" if epochs is None else epochs,
                        "epsilon": epsilon,
                        "batch_size": one.batch_size,
                        "sampling_rate": one.sampling_rate,
                        "steps": one.steps,
                        "noise_multiplier": one.noise_multiplier,
                        "per_step_noise": one.noise_multiplier / one.batch_size,
                        "cumulative_noise": one.cumulative_noise,
                        "cumulative_averaged_noise": one.cumulative_noise
                        / one.batch_size,
                        "effective_noise": one.effective_noise,
                        "admissible": one.steps >= used.min_steps,
                        "chosen": one.batch_size == chosen,
                        **({} if results is None else _coloured(score, scores)),
                    }
                )
            if scores:
                answers[-1] |= _against(scores, chosen)
    findings = [
        "The noise of one step, of averaged gradients and the effective noise fall "
        "with the batch size up to the full batch: they have no knee and always say "
        "'full batch'. The cumulative noise on the sums has a plateau, and the "
        "smallest batch on it with enough steps is the paper's choice."
    ]
    if fixed_steps:
        findings = [
            f"At {used.steps} steps whatever the batch size, the effective noise falls "
            "towards a limit; look for the knee."
        ]
    if results is not None:
        findings += _compared(answers, results.name)
    name = "" if results is None else f": {results.name}"
    return programs.Outcome(
        title=f"Noise by batch size, {used.num_examples} examples{name}",
        findings=findings,
        privacy=f"at each row, (epsilon, {used.delta:g})-differential privacy of one "
        "training run, add or remove one record, Poisson sampling (none for the full "
        "batch), privacy loss distributions, an upper bound. Nothing was trained here.",
        caveats=[
            f"min_steps = {used.min_steps} is the least certain input: the paper "
            "reads 20 off one figure (CIFAR-100, ViT-Tiny). Try 20, 40 and 80 on "
            "public data.",
            f"The tolerance of {used.tolerance:g} is ours: the paper gives none.",
            *(["Accuracies are of the search's report."] if results else []),
        ],
        tables={"noise": rows, **({"recommendation": answers} if answers else {})},
        figures={
            name: _plot(used, rows, quantity, axis, title)
            for name, quantity, axis, title in FIGURES
        },
        shown=("recommendation",) if answers else ("noise",),
    )


def _completed(used: Settings, results: grid_results.Results | None) -> Settings:
    """The settings, completed from the results or from the paper.

    Raises:
      UsageError: if settings and results do not go together.
    """
    found: dict = {
        "num_examples": 50_000,
        "epochs": (8.0,),
        "epsilons": (0.5, 1.0, 2.0, 4.0, 8.0),
        "batch_sizes": tuple(2**k for k in range(8, 15)),
    }
    if results is not None:
        fixed = {
            "num_examples": used.num_examples or results.size,
            "delta": used.delta,
            "mode": used.mode,
            "steps_convention": used.steps_convention,
        }
        theirs = {
            "num_examples": results.size,
            "delta": results.delta,
            "mode": "fixed_epochs",
            "steps_convention": "ceil",
        }
        for name, value in fixed.items():
            if value != theirs[name]:
                raise settings.UsageError(
                    f"flag --{name}={value}: the runs of --results={used.results} are "
                    f"of --{name}={theirs[name]}."
                )
        rows = results.batch_sizes
        found = {
            "num_examples": results.size,
            "epochs": tuple(sorted({row["epochs"] for row in rows})),
            "epsilons": tuple(sorted({row["epsilon"] for row in rows})),
            "batch_sizes": tuple(sorted({row["batch_size"] for row in rows})),
        }
    missing = {k: v for k, v in found.items() if getattr(used, k) is None}
    return dataclasses.replace(used, **missing)


def _scores(results, epochs, epsilon) -> dict[int, Mapping[str, Any]]:
    """The grid's rows by batch size, where there are."""
    return {
        row["batch_size"]: row
        for row in ([] if results is None else results.batch_sizes)
        if (row["epochs"], row["epsilon"]) == (epochs, epsilon)
    }


def _coloured(score, scores) -> dict[str, Any]:
    """Columns of the noise table: the accuracy, and its distance from the best."""
    if score is None:
        return {"accuracy": math.nan, "less_than_best": math.nan}
    best = max(row["mean"] for row in scores.values())
    return {"accuracy": score["mean"], "less_than_best": best - score["mean"]}


def _against(scores, chosen) -> dict[str, Any]:
    """Columns of the recommendations: the grid's best."""
    best, close = grid_figures.close_to_best(list(scores.values()), "batch_size")
    score = scores.get(chosen)
    return {
        "accuracy": math.nan if score is None else score["mean"],
        "grid_best": best,
        "grid_accuracy": scores[best]["mean"],
        "not_told_apart": " ".join(map(str, close)),
    }


def _compared(answers, name: str) -> list[str]:
    """Whether the rule chose the grid's best batch size, or an equally good size."""
    texts = []
    for row in answers:
        if "grid_best" not in row:
            continue
        loss = row["grid_accuracy"] - row["accuracy"]
        close = str(row["batch_size"]) in row["not_told_apart"].split()
        texts.append(
            f"epsilon {row['epsilon']:g}, {row['epochs']:g} epochs: the rule says "
            f"{row['batch_size']}, the grid's best is {row['grid_best']}"
            + (
                ", which repeats do not tell from it."
                if close and loss
                else ", the same."
                if not loss
                else f", better by {loss:.3f}."
                if not math.isnan(loss)
                else "; the grid has no run at the rule's."
            )
        )
    return [f"The rule's batch size against the search ({name}):", *texts]


def _plot(used, rows, quantity, axis, title):
    durations = sorted({row["epochs"] for row in rows}, key=lambda e: e or 0)
    count = len(durations)
    picture, axes = pictures.new(
        2.5 + 3.9 * count, 4.3, 1, count, sharey=True, sharex=True
    )
    coloured = None
    worst = max((r.get("less_than_best", 0.0) for r in rows), default=0.0, key=_number)
    for ax, duration in zip(axes[0], durations, strict=True):
        mine = [row for row in rows if row["epochs"] == duration]
        found = _panel(ax, used, mine, quantity, axis, worst)
        coloured = found or coloured
        if count > 1:
            ax.set_title(f"{duration:g} epochs", fontsize=10)
    axes[0, 0].set_ylabel(quantity.replace("_", " ") + " (clip norms)")
    axes[0, -1].legend(fontsize=8)
    if coloured is not None:
        picture.colorbar(
            coloured, ax=axes[0, -1], label="macro accuracy less the best (points)"
        )
    circles = "; circles: chosen" if any(r["chosen"] for r in rows) else ""
    pictures.title(
        picture,
        f"{title}\n{used.num_examples} examples, δ = {used.delta:g}{circles}",
        fontsize=10.5,
    )
    return picture


def _panel(ax, used, rows, quantity, axis, worst):
    """Lines by epsilon; returns the points that have colours, if there are."""
    coloured = None
    for k, epsilon in enumerate(sorted({row["epsilon"] for row in rows})):
        mine = [row for row in rows if row["epsilon"] == epsilon]
        mine.sort(key=lambda row: row[axis])
        look = pictures.style(k, marked=used.results is None)
        x, y = [row[axis] for row in mine], [row[quantity] for row in mine]
        ax.plot(x, y, label=f"ε = {epsilon:g}", **look)
        if used.results is not None:
            coloured = ax.scatter(
                x,
                y,
                c=[-100 * row["less_than_best"] for row in mine],
                cmap=pictures.SEQUENTIAL,
                vmin=-100 * max(worst, 1e-3),
                vmax=0.0,
                s=42,
                zorder=3,
                edgecolors="black",
                linewidths=0.4,
            )
        for row in mine:
            if row["chosen"]:
                ax.scatter(
                    row[axis],
                    row[quantity],
                    s=190,
                    marker="o",
                    facecolors="none",
                    edgecolors=look["color"],
                    linewidths=1.8,
                    zorder=3,
                )
    ax.set_xscale("log", base=2 if axis == "batch_size" else 10)
    ax.set_yscale("log")
    if axis == "steps":
        ax.axvline(used.min_steps, color=pictures.GREY, linestyle="--", linewidth=1)
        ax.set_xlabel("steps T (dashed: the least number)")
    else:
        ax.set_xlabel("expected batch size B (examples; last: full batch)")
    return coloured


def _number(value: float) -> float:
    """NaN as the least, for `max`."""
    return -math.inf if math.isnan(value) else value


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
