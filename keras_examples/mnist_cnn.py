r"""Trains the geometry paper's MNIST network with DP-SGD.

    python -m keras_examples.mnist_cnn --data_dir=DIR
    python -m keras_examples.mnist_cnn --dataset=digits --epochs=15

Chen, Wu and Hong (2020): learning rate 0.15, batches of 128, clip norm 1, noise
multiplier 1.1. --model=tutorial is the network of the tutorial that these numbers come
from (there with batches of 256 for 60 epochs), --model=literal the paper's own words.
"""

from __future__ import annotations

import dataclasses

from driver_kit import programs, settings
from keras_examples import image_data, networks, training


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    dataset: str = settings.choice(
        "mnist", ("mnist", "digits", "synthetic"), "Which images; the last two offline."
    )
    data_dir: str | None = settings.words(
        None,
        f"Directory with {image_data.MNIST_LAYOUT}.",
        only_with=("dataset", "mnist"),
    )
    model: str = settings.choice(
        "tutorial", ("tutorial", "literal"), "Which reading of the network."
    )
    clip: str = settings.choice(
        "fixed", ("fixed", "quantile", "automatic"), "The clip rule."
    )
    clip_norm: float = settings.number(
        1.0,
        "The (initial) clip norm.",
        above=0,
        only_with=("clip", "fixed", "quantile"),
    )
    target_quantile: float = settings.number(
        0.5,
        "Of --clip=quantile: the share of norms below the clip norm.",
        above=0,
        below=1,
        only_with=("clip", "quantile"),
    )
    normalize: bool = settings.switch(
        False,
        "Divide what is clipped by the clip norm (fixed and quantile), so that the "
        "learning rate need not change with it.",
        only_with=("clip", "fixed", "quantile"),
    )
    perturbation: float = settings.number(
        0.0,
        "Standard deviation of noise on each gradient before it is clipped.",
        least=0,
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
    learning_rate: float = settings.number(0.15, "The learning rate.", above=0)
    batch_size: int = settings.count(128, "Expected images per step.")
    physical_batch_size: int = settings.count(
        512, "Most images at a time; larger steps are cut."
    )
    epochs: int = settings.count(60, "How often to go through the images.")
    seed: int | None = settings.seed()
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("mnist_cnn")


def run(used: Settings) -> programs.Outcome:
    """Trains and reports."""
    images = image_data.load(used.dataset, used.data_dir, (28, 28, 1))
    model = networks.mnist_network(used.model, images.train[0].shape[1:])
    rule = training.clip_rule(
        used.clip, used.clip_norm, used.target_quantile, used.normalize
    )
    batches = training.private_run(
        used, images, model, rule=rule, perturbation=used.perturbation
    )
    title = f"DP-SGD on {images.name}, {used.model} network"
    return training.simple_run(title, images, used, model, batches)


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
