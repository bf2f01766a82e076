r"""Private transfer learning: scales and offsets of a pre-trained network, and a head.

    python -m keras_examples.transfer_film --data_dir=DIR --checkpoint=FILE.npz
    python -m keras_examples.transfer_film --dataset=digits --model=vit_micro

The experiments of Rehn, Zhao, Heikkila and Honkela (2025), "On Optimal Hyperparameters
for Differentially Private Deep Transfer Learning": DP-FiLM, normalised clipping and
DP-Adam, on CIFAR-100 (also 10 % of it: --subset=0.1), SUN397 and Cassava
(--dataset=folder, --epochs=32), with ViT-Tiny/16, ViT-Base/16 and ResNet-50 (BiT).
Checkpoints are the published AugReg and BiT .npz files, for example
Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz, or timm's, for example
model.safetensors of vit_tiny_patch16_224.augreg_in21k; nothing is downloaded. Beyond
the paper: MNIST and Fashion-MNIST, and EfficientNet-Lite0, whose batch normalisation
keeps its statistics or becomes group normalisation (--batchnorm); for its checkpoint
see `efficientnet_lite`. To train many heads, write the features once with
`frozen_features`. On digits, vit_micro is first trained without privacy on digits 0 to
4, which stand for public data, and then in private on digits 5 to 9.

The paper leaves open which ResNet-50 (here BiT-M R50x1), cropping (here none) and how
sampling rate and steps follow from the batch size (--steps_convention).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

import tfdpclip as dpc
from driver_kit import plotting, programs, settings
from driver_kit.lazy import tf
from keras_examples import (
    features,
    grids,
    network_features,
    pretrained,
    resuming,
    training,
    transfer_data,
)
from tfdpclip import pictures
from tfdpclip.tuning import batch_size_noise

# How often the weights of a run are saved, about.
_SAVES = 20


@dataclasses.dataclass(frozen=True)
class Settings(pretrained.Settings):
    """The settings of a run."""

    epsilon: float = settings.number(
        8.0, "Privacy budget; inf: no noise, not private.", above=0, infinite=True
    )
    delta: float = settings.delta()
    epochs: float = settings.number(8, "How often an image is used.", above=0)
    batch_size: str = settings.words(
        "16384",
        "Expected images per step, or full.",
        form="a whole number above 0, or full",
        reads=grids.read_size,
    )
    steps_convention: str = settings.choice(
        "ceil",
        ("ceil", "floor", "loader", "framework"),
        "How sampling rate and steps follow from the batch size.",
    )
    clip: str = settings.choice(
        "normalized", ("normalized", "standard", "auto_s"), "The clip rule."
    )
    clip_norm: float = settings.number(
        1.0,
        "The clip norm.",
        above=0,
        only_with=("clip", "normalized", "standard"),
    )
    auto_s_gamma: float = settings.number(
        0.01,
        "For --clip=auto_s.",
        above=0,
        only_with=("clip", "auto_s"),
    )
    optimizer: str = settings.choice("adam", ("adam", "sgd"), "The optimizer.")
    learning_rate: float = settings.number(0.0055, "The learning rate.", above=0)
    adam_epsilon: float = settings.number(
        1e-10,
        "Keras adds it before the bias correction: 1e-8 elsewhere is less here.",
        above=0,
        only_with=("optimizer", "adam"),
    )
    write_features: bool = settings.switch(
        False,
        "Also write features.npz for norms_and_weights and tune_grid, with what they "
        "have cost. Of the frozen network: --trainable=head. PRIVATE.",
    )
    seed: int | None = settings.seed()
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("transfer_film")


def run(used: Settings) -> programs.Outcome:
    """Trains and reports."""
    if used.seed is not None:
        tf.keras.utils.set_random_seed(used.seed)
    network = pretrained.prepare(used, lambda size: _plan(used, size))
    model, data, counts = network.model, network.data, network.counts
    print(counts, flush=True)
    plan = _plan(used, data.size)
    scheme = (
        dpc.sampling.FullBatch()
        if plan.sampling_rate == 1
        else dpc.sampling.Poisson(plan.sampling_rate)
    )
    parts = _parts(plan.steps)
    batches = training.draw(
        scheme,
        data.train,
        used.physical_batch_size,
        used.seed,
        steps=plan.steps // parts,
    )
    model.compile(_optimizer(used, plan, batches), training.LOSS)
    test = _test_arrays(data.test)
    before = network_features.body(model).get_weights()
    place = resuming.Unfinished(used, images=data.name, examples=data.size)
    trained = training.fit(
        model,
        batches,
        parts,
        test,
        delta=used.delta,
        unfinished=place,
        measured=(0, parts),
    )
    result = _outcome(used, data, counts, plan, trained)
    result.written = place.remove
    if used.write_features:
        after = network_features.body(model).get_weights()
        history = _history(used, network, before, after, trained.ledger)
        directory = programs.make_directory(used.output_dir)
        arrays = network_features.compute(model, data)
        features.write(directory / "features.npz", arrays, history)
        result.caveats.append(
            "features.npz holds features of the training images: it is private data. "
            "It says that its network has "
            + (
                "seen none of them."
                if history.ledger is None
                else "been trained on them, and what that has cost: whatever trains on "
                "it composes with that."
            )
        )
    return result


def _parts(steps: int) -> int:
    """The parts of equal size into which a run is cut, after each of which it is saved.

    A prime number of steps is saved after each of them.

    >>> _parts(98), _parts(25), _parts(1563), _parts(449)
    (14, 25, 3, 449)
    """
    parts = [n for n in range(2, steps + 1) if steps % n == 0] or [1]
    return min(parts, key=lambda n: abs(math.log(n / _SAVES)))


def _plan(used: Settings, size: int):
    batch = grids.read_size(used.batch_size)
    if batch != "full" and batch > size:
        raise settings.UsageError(
            f"flag --batch_size={batch}: there are only {size} training images, for "
            "example --batch_size=full."
        )
    private = math.isfinite(used.epsilon)
    (plan,) = batch_size_noise(
        size,
        used.epsilon if private else 1.0,
        used.delta,
        [batch],
        epochs=used.epochs,
        convention=used.steps_convention,
    )
    return plan if private else dataclasses.replace(plan, noise_multiplier=0.0)


def _optimizer(used, plan, batches):
    rule = {
        "normalized": lambda: dpc.FixedClip(used.clip_norm, normalize=True),
        "standard": lambda: dpc.FixedClip(used.clip_norm),
        "auto_s": lambda: dpc.AutomaticClip(used.auto_s_gamma),
    }[used.clip]()
    options = {} if used.optimizer == "sgd" else {"epsilon": used.adam_epsilon}
    make = dpc.keras.DPSGD if used.optimizer == "sgd" else dpc.keras.DPAdam
    return make(
        used.learning_rate,
        clip=rule,
        noise_multiplier=plan.noise_multiplier,
        expected_batch_size=batches.expected_batch_size,
        accumulation_steps=batches.accumulation_steps,
        seed=used.seed,
        **options,
    )


def _test_arrays(data):
    if isinstance(data, transfer_data.ImageFiles):
        return data.images(0, len(data)), data.labels
    return data


def _history(used, network, before, after, ledger):
    """The training history of the network whose features are written."""
    still = all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    if used.trainable == "head" and still:
        return features.History(network.origin)
    return features.History(
        f"{network.origin}, {used.trainable} trained in private on {network.data.name}",
        ledger,
    )


def _outcome(used, data, counts, plan, trained):
    accuracy = trained.accuracy
    seconds = trained.rows[-1]["seconds"]
    row = {
        "dataset": data.name,
        "model": used.model,
        "N": data.size,
        "K": data.classes,
        "d": getattr(counts, "trainable", ""),
        "B": plan.batch_size,
        "q": plan.sampling_rate,
        "T": plan.steps,
        "C": used.clip_norm if used.clip != "auto_s" else "",
        "learning_rate": used.learning_rate,
        "sigma": plan.noise_multiplier,
        "S": plan.cumulative_noise,
        "epsilon": trained.statement.epsilon,
        "delta": used.delta,
        "seed": used.seed,
        "macro": accuracy.macro,
        "micro": accuracy.micro,
        "seconds": seconds,
    }
    return programs.Outcome(
        title=f"DP-FiLM: {used.model} on {data.name}",
        findings=[
            f"Macro accuracy {accuracy.macro:.2%}, accuracy {accuracy.micro:.2%} "
            f"(guessing: {1 / data.classes:.1%}) after {plan.steps} steps of "
            f"{plan.batch_size} images on average.",
            f"{counts}.",
        ],
        privacy=trained.statement,
        caveats=[
            f"The number of training images, {data.size}, is treated as public. Test "
            "images are not protected.",
            "The checkpoint must come from public data: it is not covered.",
            "One run: choosing settings by such runs is not counted.",
            "Macro accuracy is the mean over the classes that occur in the test data.",
        ],
        tables={
            "run": [row],
            "per_class": [
                {"class": int(c), "count": int(n), "accuracy": float(a)}
                for c, n, a in zip(
                    accuracy.classes, accuracy.counts, accuracy.accuracy, strict=True
                )
            ],
        },
        figures={"per_class": _plot(accuracy, data.name)},
        numbers=row,
    )


def _plot(accuracy, name):
    picture, axes = pictures.new(6.5, 3.8)
    ax = axes[0, 0]
    ordered = np.sort(accuracy.accuracy)[::-1]
    # Points, not bars: the axis need not begin at 0.
    ax.plot(range(len(ordered)), 100 * ordered, "o", color=pictures.COLORS[0])
    ax.axhline(
        100 * accuracy.macro,
        color=pictures.COLORS[1],
        ls="--",
        label=f"macro accuracy {accuracy.macro:.1%}",
    )
    ax.set(xlabel="class, the easiest on the left", ylabel="test accuracy (%)")
    plotting.accuracy_axis(ax, 100 * ordered, most=100)
    if len(ordered) <= 12:
        ax.set_xticks(range(len(ordered)), [str(c) for c in accuracy.order])
    ax.legend(fontsize=9)
    pictures.title(picture, f"Accuracy by class, {name}", fontsize=11)
    return picture


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
