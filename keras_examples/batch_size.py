r"""How much noise each batch size costs, and which one to take. Needs no data.

    python -m keras_examples.batch_size
    python -m keras_examples.batch_size --num_examples=87002

The noise axes of Figures 6, 7 and A13 to A15 of Rehn, Zhao, Heikkila and Honkela
(2025), "On Optimal Hyperparameters for Differentially Private Deep Transfer Learning",
for CIFAR-100 (50,000 images, the default) and SUN397 (87,002), and the paper's rule for
choosing a batch size. Everything follows from public numbers and costs no privacy.
"""

from __future__ import annotations

import dataclasses

from driver_kit import programs, settings
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

    num_examples: int = settings.count(
        50_000, "Number of training examples N.", least=2
    )
    epochs: tuple[float, ...] = settings.numbers(
        (8,), "How often an example is used, on average.", good=8, above=0
    )
    epsilons: tuple[float, ...] = settings.numbers(
        (0.5, 1, 2, 4, 8), "Privacy budgets.", good=8, above=0
    )
    delta: float = settings.delta()
    batch_sizes: tuple[int, ...] = settings.numbers(
        tuple(2**k for k in range(8, 15)),
        "Expected batch sizes; those of N or above are left out, N is added.",
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
    steps: int = settings.count(100, "Steps for --mode=fixed_steps.")
    steps_convention: str = settings.choice(
        "ceil",
        ("ceil", "floor", "loader", "framework"),
        "How sampling rate and steps follow from the batch size.",
    )
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("batch_size")


def run(used: Settings) -> programs.Outcome:
    """Computes the noise and the recommendations."""
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
            for one in noise:
                rows.append(
                    {
                        "epochs": "" if epochs is None else epochs,
                        "epsilon": epsilon,
                        "batch_size": one.batch_size,
                        "sampling_rate": one.sampling_rate,
                        "steps": one.steps,
                        "noise_multiplier": one.noise_multiplier,
                        "per_step_noise": one.per_step_noise,
                        "cumulative_noise": one.cumulative_noise,
                        "cumulative_averaged_noise": one.cumulative_averaged_noise,
                        "effective_noise": one.effective_noise,
                        "admissible": one.steps >= used.min_steps,
                        "chosen": one.batch_size == chosen,
                    }
                )
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
    return programs.Outcome(
        title=f"Noise by batch size, {used.num_examples} examples",
        findings=findings,
        privacy=f"at each row, (epsilon, {used.delta:g})-differential privacy of one "
        "training run, add or remove one record, Poisson sampling (none for the full "
        "batch), privacy loss distributions, an upper bound. Nothing was trained here.",
        caveats=[
            f"min_steps = {used.min_steps} is the least certain input: the paper "
            "reads 20 off one figure (CIFAR-100, ViT-Tiny). Try 20, 40 and 80 on "
            "public data.",
            f"The tolerance of {used.tolerance:g} is ours: the paper gives none.",
        ],
        tables={"noise": rows, **({"recommendation": answers} if answers else {})},
        figures={
            name: _plot(used, rows, quantity, axis, title)
            for name, quantity, axis, title in FIGURES
        },
        shown=("recommendation",) if answers else ("noise",),
    )


def _plot(used, rows, quantity, axis, title):
    picture, axes = pictures.new(6.4, 4.3)
    ax = axes[0, 0]
    groups = sorted({(r["epochs"], r["epsilon"]) for r in rows}, key=str)
    epochs = sorted({g[0] for g in groups}, key=str)
    epsilons = sorted({g[1] for g in groups})
    for duration, epsilon in groups:
        mine = [r for r in rows if (r["epochs"], r["epsilon"]) == (duration, epsilon)]
        look = pictures.style(epsilons.index(epsilon))
        look["linestyle"] = pictures.STYLES[epochs.index(duration) % 4]
        label = f"ε = {epsilon:g}"
        if len(epochs) > 1:
            label += f", {duration:g} epochs"
        mine.sort(key=lambda r: r[axis])
        ax.plot(
            [r[axis] for r in mine], [r[quantity] for r in mine], label=label, **look
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
    ax.set_ylabel(quantity.replace("_", " ") + " (clip norms)")
    ax.legend(fontsize=8, ncols=2 if len(groups) > 6 else 1)
    circles = "; circles: chosen" if any(r["chosen"] for r in rows) else ""
    pictures.title(
        picture,
        f"{title}\n{used.num_examples} examples, δ = {used.delta:g}{circles}",
        fontsize=10.5,
    )
    return picture


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
