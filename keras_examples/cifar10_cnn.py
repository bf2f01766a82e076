r"""Trains the geometry paper's CIFAR-10 network with DP-SGD.

    python -m keras_examples.cifar10_cnn --data_dir=DIR
    python -m keras_examples.cifar10_cnn --dataset=digits --dense=64 --epochs=5

Chen, Wu and Hong (2020): two 3x3 convolutions (32, 64 filters) with 2x2 pools, 1500
units, dropout 0.5; learning rate 0.001, divided by 10 every 20 epochs; clip norm 1,
noise multiplier 1.1. The paper leaves open padding, optimizer, batch size and epochs;
the defaults are same, plain SGD, 128 and 60 (its figures end at epoch 59).
"""

from __future__ import annotations

import dataclasses

import tfdpclip as dpc
from driver_kit import programs, settings
from driver_kit.lazy import tf
from keras_examples import image_data, network_sizes, networks, training

_OPTIMIZERS = {"sgd": "DPSGD", "adam": "DPAdam"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    dataset: str = settings.choice(
        "cifar10",
        ("cifar10", "digits", "synthetic"),
        "Which images; the last two offline.",
    )
    data_dir: str | None = settings.words(
        None,
        f"Directory with {image_data.CIFAR10_LAYOUT}.",
        only_with=("dataset", "cifar10"),
    )
    padding: str = settings.choice("same", ("same", "valid"), "Of the convolutions.")
    dense: int = settings.count(1500, "Units of the dense layer.")
    dropout: float = settings.number(0.5, "The dropout rate.", least=0, below=1)
    optimizer: str = settings.choice("sgd", tuple(_OPTIMIZERS), "The optimizer.")
    clip: str = settings.choice(
        "fixed", ("fixed", "quantile", "automatic"), "The clip rule."
    )
    clip_norm: float = settings.number(
        1.0,
        "The (initial) clip norm.",
        above=0,
        only_with=("clip", "fixed", "quantile"),
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
    learning_rate: float = settings.number(0.001, "The learning rate.", above=0)
    decay_epochs: int = settings.count(
        network_sizes.CIFAR10_DECAY_EPOCHS,
        "Divide the learning rate by 10 after so many.",
    )
    batch_size: int = settings.count(128, "Expected images per step.")
    physical_batch_size: int = settings.count(
        256, "Most images at a time; larger steps are cut."
    )
    epochs: int = settings.count(60, "How often to go through the images.")
    seed: int | None = settings.seed()
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("cifar10_cnn")


def run(used: Settings) -> programs.Outcome:
    """Trains and reports."""
    images = image_data.load(used.dataset, used.data_dir, (32, 32, 3))
    model = networks.cifar10_network(
        used.padding, used.dropout, images.train[0].shape[1:], used.dense
    )

    def rate(steps_per_epoch):
        return tf.keras.optimizers.schedules.ExponentialDecay(
            used.learning_rate,
            used.decay_epochs * steps_per_epoch,
            0.1,
            staircase=True,
        )

    batches = training.private_run(
        used, images, model, getattr(dpc.keras, _OPTIMIZERS[used.optimizer]), rate
    )
    title = f"DP-{used.optimizer.upper()} on {images.name}, two convolutions"
    return training.simple_run(title, images, used, model, batches)


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
