r"""The effect of noise on gradient norms, and of clipping on hard classes.

    python -m keras_examples.norms_and_weights
    python -m keras_examples.norms_and_weights --features=FILE.npz --clip_norms=0.1,1,42
    python -m keras_examples.norms_and_weights --trainable=film

Figures 3 and 4 of Rehn, Zhao, Heikkila and Honkela (2025): per-example gradient norms
after training at several epsilons; the weight that clipping leaves each class, relative
to the easiest class at clip norm 1; and how class accuracies differ between clip norms.
With --trainable=film the model is a pre-trained network whose scales, offsets and head
are trained by normalised DP-Adam, as in the paper; otherwise a linear head from zero,
on scikit-learn's digits or on cached features of a frozen network. --write_gradients is
for `optimal_clip --gradients`.
"""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from driver_kit import large_files, programs, progress, settings
from keras_examples import norm_figures, problems, trainers, training
from keras_examples.class_weights import class_weights
from keras_examples.norm_summary import summarize_norms


@dataclasses.dataclass(frozen=True)
class Settings(problems.Settings):
    """The settings of a run."""

    epsilons: tuple[float, ...] = settings.numbers(
        (0.25, 1, 8), "Privacy budgets; the least counts as the hardest.", above=0
    )
    delta: float = settings.delta()
    clip_norms: tuple[float, ...] = settings.numbers(
        (0.1, 1, 10), "Clip norms; 1 is the baseline and is added.", good=1, above=0
    )
    learning_rates: tuple[float, ...] = settings.numbers(
        (0.005, 0.03, 0.2), "To choose from, for each clip norm.", above=0
    )
    batch_size: int = settings.count(64, "Expected examples per step.")
    epochs: float = settings.number(8, "How often an example is used.", above=0)
    repeats: int = settings.count(5, "Runs of each setting for the accuracies.")
    measured: int | None = settings.count(
        None, "Measure gradients of the first so many training examples.", good=4000
    )
    gradients: str = settings.choice(
        "head",
        ("head", "all"),
        "Whose gradients' norms and weights are drawn: the head's, as in the paper, or "
        "those of all that trains, which is what is clipped.",
    )
    write_gradients: int | None = settings.count(
        None,
        "Also write gradients of all that trains, of so many training examples, at "
        "clip norm 1. PRIVATE.",
        good=1024,
    )
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("norms_and_weights")


def run(used: Settings) -> programs.Outcome:
    """Trains the heads and measures."""
    directory = programs.make_directory(used.output_dir)
    problem = problems.make(
        used, lambda size: training.check_batch_size(used.batch_size, size)
    )
    clips = tuple(sorted({*used.clip_norms, 1.0}))
    labels = problem.labels[: used.measured]
    norm_rows, weight_rows, class_rows = [], [], []
    violins, figures, statements, written = {}, {}, [], []
    done, models = 0, len(used.learning_rates) + used.repeats
    shown = progress.Progress(
        "training", len(used.epsilons) * len(clips) * models, unit="model"
    )
    for epsilon in sorted(used.epsilons):
        how = trainers.plan(
            problem.size, used.batch_size, used.epochs, epsilon, used.delta
        )
        statements.append(
            f"  epsilon {epsilon:g}, delta {used.delta:g}: {how.steps} steps, "
            f"{how.scheme.describe()}, noise multiplier {how.noise_multiplier:.5g}"
            + _with_what_was_spent(problem, how, used.delta)
        )
        accuracy, norms = {}, {}
        for clip in clips:
            trainer = problem.trainer(how, clip)
            best = max(used.learning_rates, key=lambda rate: trainer(rate).macro)
            runs = [trainer(best) for _ in range(used.repeats)]
            found = trainer.norms(used.measured)
            norms[clip] = found.head if used.gradients == "head" else found.every
            if used.write_gradients is not None and clip == 1:
                path = directory / f"gradients_eps_{epsilon:g}.npz"
                written.append(_write(trainer.gradients(used.write_gradients), path))
            done += models
            shown.show(done, [f"epsilon {epsilon:g}, clip norm {clip:g}"])
            accuracy[clip] = dataclasses.replace(
                runs[0], accuracy=np.mean([r.accuracy for r in runs], axis=0)
            )
            norm_rows += [
                {
                    "epsilon": epsilon,
                    "clip": clip,
                    "of": name,
                    "learning_rate": best,
                    "macro_accuracy": accuracy[clip].macro,
                    **summarize_norms(values, clip).row(),
                }
                for name, values in (("head", found.head), ("all", found.every))
            ]
        violins[f"ε = {epsilon:g}"] = norms[1.0]
        # A model for each clip norm, as in the paper; the baseline is that of C = 1.
        weights = [
            class_weights(
                norms[c],
                labels,
                [c],
                baseline=1.0,
                baseline_norms=norms[1.0],
                baseline_labels=labels,
            )
            for c in clips
        ]
        joined = dataclasses.replace(
            weights[0],
            **{
                name: np.concatenate([getattr(w, name) for w in weights])
                for name in (
                    "clip_norms",
                    "weight",
                    "relative",
                    "share",
                    "fraction_clipped",
                )
            },
        )
        weight_rows += [{"epsilon": epsilon, **row} for row in joined.rows()]
        differences = {
            f"clip norm {c:g}": accuracy[c].accuracy - accuracy[1.0].accuracy
            for c in clips
            if c != 1
        }
        for c in clips:
            one = accuracy[c]
            class_rows += [
                {
                    "epsilon": epsilon,
                    "clip_norm": c,
                    "class": int(label),
                    "accuracy": float(one.accuracy[k]),
                }
                for k, label in enumerate(one.classes)
            ]
        figures[f"retained_weight_eps_{epsilon:g}"] = norm_figures.draw_class_weights(
            joined,
            accuracy[1.0].order.tolist(),
            differences,
            f"Retained weight by class, {problem.name}, ε = {epsilon:g}",
            problem.public,
        )
    shown.close()
    figures["norms"] = norm_figures.draw_norms(
        violins,
        clip_norm=1.0,
        xlabel="privacy budget",
        title=f"Gradient norms after training, {problem.name}, clip norm 1",
        public=problem.public,
    )
    medians = [float(np.median(v)) for v in violins.values()]
    return programs.Outcome(
        title=f"Gradient norms and retained weights, {problem.name}",
        findings=[
            "Claim: norms rise as epsilon falls. Medians by ascending epsilon: "
            f"{', '.join(f'{m:.3g}' for m in medians)}: "
            f"{_verdict(medians)}.",
            *_contrasts(weight_rows, clips, used),
        ],
        privacy=(
            "each head, with its features, is as private as it says below; the first "
            "line of each is of the head's training alone "
            if problem.spent
            else "each trained model by itself is private for each training example "
        )
        + "(add or remove one record, privacy loss distributions, an upper bound):\n"
        + "\n".join(statements),
        caveats=[
            "Norms and weights are measured WITHOUT noise and are outside every "
            "guarantee: release them for public data only.",
            *written,
            f"{done} models of {problem.trained} were "
            "trained; learning rates were chosen on the test data. The statements do "
            "not count that.",
            "Relative weights exceed 1 for clip norms above 1; that is as defined.",
            *problem.caveats(),
        ],
        tables={
            "norms": norm_rows,
            "retained_weight": weight_rows,
            "per_class": class_rows,
        },
        figures=figures,
        shown=("norms",),
    )


def _write(gradients: np.ndarray, path: pathlib.Path) -> str:
    """Writes gradients; returns the report's text about the file."""
    with large_files.replacing(path) as temporary, open(temporary, "wb") as stream:
        np.savez(stream, gradients=gradients)
    return (
        f"{path.name} holds gradients of {len(gradients)} training examples, in "
        f"{gradients.shape[1]} dimensions: it is private data."
    )


def _verdict(medians):
    if len(medians) < 2:
        return "not looked at, with one epsilon"
    rises = all(a > b for a, b in zip(medians, medians[1:], strict=False))
    return "it held" if rises else "it did NOT hold"


def _with_what_was_spent(problem, how, delta):
    """The joint cost of a head and its features, as an end of a line."""
    if not problem.spent:
        return ""
    statement = problem.statement(
        delta,
        noise_multiplier=how.noise_multiplier,
        sampling=how.scheme,
        steps=how.steps,
        clip="normalised, at each of the clip norms",
    )
    return f"\n  With what its features had spent: {statement}"


def _contrasts(rows, clips, used):
    texts = []
    for epsilon in sorted(used.epsilons):
        parts = []
        for c in clips:
            mine = [
                r["relative"]
                for r in rows
                if (r["epsilon"], r["clip_norm"]) == (epsilon, c)
            ]
            parts.append(f"{c:g}: {max(mine) / max(min(mine), 1e-12):.2f}")
        texts.append(
            f"Claim: small clip norms favour easy classes. At epsilon {epsilon:g} the "
            "class that keeps most has, by clip norm, this many times the weight of "
            f"the class that keeps least: {', '.join(parts)}."
        )
    return texts


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
