r"""How symmetric per-example gradients are while a network trains in private.

    python -m keras_examples.gradient_symmetry --data_dir=DIR
    python -m keras_examples.gradient_symmetry --dataset=digits --epochs=10 \
        --scatter_epochs=0,3,10 --planes_epoch=10 --cosine_epochs=3,10

Figures 1 to 3 of Chen, Wu and Hong (2020): gradients of single examples under a random
projection to the plane, at several epochs and under several projections, and their
cosines with the mean gradient. Beside the pictures there are numbers: symmetry scores
with permutation p-values, and the effect of clipping on progress.

Epochs count those that ended, and 0 is before training. The paper prints 0, 5, 10 and
59 in Figure 1, the end of 9 in Figure 2 and 4, 10 and 59 in Figure 3: here 0, 5, 10 and
60 in all of them. It leaves open the number of examples (here 1000), and dropout (here
off).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from driver_kit import plotting, programs, settings
from driver_kit.lazy import tf
from keras_examples import image_data, network_sizes, networks, tracking, training
from tfdpclip import pictures


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    dataset: str = settings.choice(
        "mnist",
        ("mnist", "cifar10", "digits", "synthetic"),
        "Which images, and with them which network; the last two offline.",
    )
    data_dir: str | None = settings.words(
        None,
        f"Directory with {image_data.MNIST_LAYOUT}; or {image_data.CIFAR10_LAYOUT}.",
        only_with=("dataset", "mnist", "cifar10"),
    )
    scatter_epochs: tuple[int, ...] = settings.numbers(
        (0, 5, 10, 60), "When to show gradients (Fig. 1).", integer=True, least=0
    )
    planes_epoch: int = settings.number(
        10, "When to show many projections (Fig. 2).", integer=True, least=0
    )
    cosine_epochs: tuple[int, ...] = settings.numbers(
        (5, 10, 60), "When to show cosines (Fig. 3).", integer=True, least=0
    )
    score_epochs: tuple[int, ...] = settings.numbers(
        (0, 1, 2, 5, 10, 20, 40, 60),
        "When to score symmetry, beside those of the figures.",
        integer=True,
        least=0,
    )
    planes: int = settings.count(8, "How many projections.")
    samples: int = settings.count(
        1000, "How many training examples to look at.", least=2
    )
    permutations: int = settings.count(499, "For the p-values.")
    chunk: int = settings.count(16, "Examples at a time for whole gradients.")
    model: str = settings.choice(
        "tutorial",
        ("tutorial", "literal"),
        "Which reading of the MNIST network.",
        only_with=("dataset", "mnist", "digits", "synthetic"),
    )
    clip: str = settings.choice(
        "fixed", ("fixed", "quantile", "automatic"), "The clip rule of training."
    )
    clip_norm: float = settings.number(
        1.0, "The clip norm, also of the bias figures.", above=0
    )
    noise_multiplier: float = settings.number(1.1, "The noise multiplier.", least=0)
    epsilon: float | None = settings.number(
        None,
        "Calibrate the noise to this instead.",
        good=3,
        above=0,
        instead_of=("noise_multiplier",),
    )
    delta: float = settings.delta()
    learning_rate: float | None = settings.number(
        None, "0.15 for MNIST, 0.001 for CIFAR-10 by default.", good=0.15, above=0
    )
    batch_size: int = settings.count(128, "Expected images per step.")
    physical_batch_size: int = settings.count(512, "Most images at a time.")
    epochs: int = settings.count(60, "Epochs.")
    seed: int | None = settings.seed()
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("gradient_symmetry")


def run(used: Settings) -> programs.Outcome:
    """Trains, measures and draws."""
    late = [
        e
        for e in (*used.scatter_epochs, *used.cosine_epochs, used.planes_epoch)
        if e > used.epochs
    ]
    if late:
        raise settings.UsageError(
            f"flag --epochs={used.epochs}: figures are wanted at epoch {max(late)}; "
            "give --scatter_epochs, --planes_epoch and --cosine_epochs up to "
            f"{used.epochs}."
        )
    color = used.dataset == "cifar10"
    shape = (32, 32, 3) if color else (28, 28, 1)
    images = image_data.load(used.dataset, used.data_dir, shape)
    if color:
        model = networks.cifar10_network()
        rate = 0.001
    else:
        model = networks.mnist_network(used.model, images.train[0].shape[1:])
        rate = 0.15
    used = dataclasses.replace(used, learning_rate=used.learning_rate or rate)
    decay = None
    if color:

        def decay(steps):
            return tf.keras.optimizers.schedules.ExponentialDecay(
                used.learning_rate,
                network_sizes.CIFAR10_DECAY_EPOCHS * steps,
                0.1,
                staircase=True,
            )

    batches = training.private_run(used, images, model, rate=decay)
    x, y = images.train
    looked_at = (training.scaled(x[: used.samples]), y[: used.samples])
    drawn = {*used.scatter_epochs, *used.cosine_epochs, used.planes_epoch}
    place = training.unfinished(used, images)
    snapshots = tracking.Geometry(
        looked_at, drawn | {*used.score_epochs}, used.planes, used.chunk, place.path
    )
    trained = training.fit(
        model,
        batches,
        used.epochs,
        (training.scaled(images.test[0]), images.test[1]),
        delta=used.delta,
        callbacks=[snapshots],
        unfinished=place,
    )
    found = snapshots.found
    rows = [
        {"epoch": epoch, **one.summary(used.clip_norm, used.permutations)}
        for epoch, one in sorted(found.items())
    ]
    return programs.Outcome(
        title=f"Symmetry of gradients, {images.name}",
        findings=_findings(rows),
        privacy=trained.statement,
        caveats=[
            "Gradients, projections, cosines and scores are measured WITHOUT noise and "
            "are outside the guarantee: release them for public data only.",
            *training.caveats(images, used),
            f"{len(looked_at[0])} examples, model in inference mode. asymmetry: energy "
            "distance between projected residuals (gradients less their mean) and "
            "their negatives, relative to their spread (0: symmetric); directions: "
            "the same of residuals of length 1; about zero: of the gradients "
            "themselves, as a picture around zero shows them. bias: progress lost "
            "(below 0) or won by asymmetry under clipping; bias_share: relative to "
            "that of symmetric gradients.",
        ],
        tables={
            "summary": rows,
            "projections": _projections(found),
            "cosines": [
                {"epoch": e, "example": i, "cosine": float(c)}
                for e in sorted(set(used.cosine_epochs))
                for i, c in enumerate(found[e].cosines)
            ],
            "history": trained.rows,
        },
        figures={
            "fig1_epochs": _scatter(
                {f"epoch {e}": (found[e], 0) for e in sorted(set(used.scatter_epochs))},
                f"{images.name}: gradients of single examples, one random projection",
            ),
            "fig2_planes": _scatter(
                {
                    f"projection {k + 1}": (found[used.planes_epoch], k)
                    for k in range(used.planes)
                },
                f"{images.name}: gradients at epoch {used.planes_epoch}, "
                "several random projections",
            ),
            "fig3_cosines": _cosines(
                {e: found[e] for e in sorted(set(used.cosine_epochs))}, images.name
            ),
            "symmetry": _by_epoch(rows, images.name),
        },
        shown=("summary",),
        numbers=training.report_accuracy(trained),
        written=place.remove,
    )


def _projections(found):
    return [
        {
            "epoch": epoch,
            "projection": k + 1,
            "example": i,
            "x": float(point[0]),
            "y": float(point[1]),
        }
        for epoch, one in sorted(found.items())
        for k in range(min(2, len(one.projections)))
        for i, point in enumerate(one.projections[k])
    ]


#: The kinds of symmetry score, and their names.
_MEASURES = {
    "asymmetry": "residuals",
    "asymmetry_directions": "directions of residuals",
    "asymmetry_about_zero": "gradients about zero",
}


def _findings(rows):
    first, last = rows[0], rows[-1]
    texts = []
    if first["epoch"] == 0 and len(rows) > 1:
        verdicts = []
        for column, name in _MEASURES.items():
            fell = last[column] < first[column]
            verdicts.append(
                f"{name} {first[column]:.3g} to {last[column]:.3g} "
                f"({'it held' if fell else 'it did NOT hold'})"
            )
        texts.append(
            "Claim: gradients are clearly asymmetric at the start and grow more "
            f"symmetric. Asymmetry from epoch 0 to {last['epoch']}: "
            f"{'; '.join(verdicts)}. Median p-value of the residuals "
            f"{first['p_value_median']:.3g} and {last['p_value_median']:.3g}."
        )
    shares = ", ".join(f"{r['bias_share']:+.0%} (epoch {r['epoch']})" for r in rows)
    texts.append(f"What asymmetry does to progress under clipping: {shares}.")
    negative = ", ".join(
        f"{r['cosine_negative']:.0%} (epoch {r['epoch']})" for r in rows
    )
    small = ", ".join(f"{r['small_residuals']:.2g} (epoch {r['epoch']})" for r in rows)
    texts.append(
        f"Negative cosines with the mean gradient: {negative}. Share of residuals "
        f"below c/4, which the paper's bound needs: {small}."
    )
    return texts


def _by_epoch(rows, name):
    picture, axes = pictures.new(8.6, 4.4, 1, 2)
    epochs = [row["epoch"] for row in rows]
    for k, (column, label) in enumerate(_MEASURES.items()):
        axes[0, 0].plot(
            epochs, [row[column] for row in rows], label=label, **pictures.style(k)
        )
    axes[0, 0].set(xlabel="epoch", ylabel="asymmetry (0: symmetric)")
    # Scores of symmetric points are on either side of 0.
    axes[0, 0].set_yscale("symlog", linthresh=1e-3)
    for k, (column, label) in enumerate(
        {
            "symmetric_progress": "if gradients were symmetric",
            "progress": "as gradients are",
            "mean_gradient_norm": "mean gradient (norm)",
        }.items()
    ):
        axes[0, 1].plot(
            epochs, [row[column] for row in rows], label=label, **pictures.style(k)
        )
    axes[0, 1].set(xlabel="epoch", ylabel="progress of one clipped gradient")
    for ax in axes[0]:
        ax.legend(fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    pictures.title(picture, f"{name}: symmetry, and what it is worth", fontsize=11)
    return picture


def _scatter(panels, title):
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    picture, axes = pictures.new(0.6 + 3.0 * columns, 0.9 + 2.9 * rows, rows, columns)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    # All panels have the same kind of scale, so that they can be compared.
    logarithmic = plotting.heavy_tailed(
        [one.projections[k] for one, k in panels.values()]
    )
    for ax, (name, (one, k)) in zip(axes.flat, panels.items(), strict=False):
        points, mean = one.projections[k], one.means[k]
        place = plotting.plane(ax, points, logarithmic)
        ax.scatter(*place(points).T, s=5, alpha=0.45, color=pictures.COLORS[0], lw=0)
        # Open and thin: there may be points below.
        ax.scatter(
            *place(mean),
            s=70,
            facecolors="none",
            edgecolors=pictures.COLORS[1],
            linewidths=1.8,
            label="mean gradient",
        )
        ax.scatter(0, 0, marker="+", s=50, color="black", lw=1, label="zero")
        ax.set_title(name, fontsize=10.5)
    axes.flat[0].legend(fontsize=8)
    picture.supxlabel(
        "projected gradient (loss per unit of weight), all examples"
        + ("; circles: distances from zero, on a logarithmic scale" * logarithmic),
        fontsize=8.5,
    )
    pictures.title(picture, title, fontsize=11)
    return picture


def _cosines(found, name):
    picture, axes = pictures.new(
        0.8 + 3.3 * len(found), 3.3, 1, len(found), sharex=True, sharey=True
    )
    for ax, (epoch, one) in zip(axes[0], found.items(), strict=True):
        ax.hist(one.cosines, bins=np.linspace(-1, 1, 41), color=pictures.COLORS[0])
        ax.axvline(0, color="black", lw=0.9)
        share = float(np.mean(one.cosines < 0))
        ax.set_title(f"epoch {epoch}: {share:.0%} negative", fontsize=10.5)
        ax.set_xlabel("cosine with the mean gradient")
    axes[0, 0].set_ylabel("examples")
    pictures.title(picture, f"{name}: single gradients against their mean", fontsize=11)
    return picture


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
