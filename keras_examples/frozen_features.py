r"""Writes the features that a pre-trained network computes, without training it.

    python -m keras_examples.frozen_features --data_dir=DIR \
        --checkpoint=efficientnet_lite0_imagenet.npz
    python -m keras_examples.tune_grid --grid=mnist_efficientnet_lite0 \
        --features=runs/frozen_features/features.npz

A head on frozen features trains in seconds, because the network runs once for every
image. MNIST and Fashion-MNIST are read from their published files; where a network's
checkpoint comes from, see `transfer_models` and `efficientnet_lite`. The file says that
the network has seen none of the images: use one that has not.
"""

from __future__ import annotations

import dataclasses
import time

from driver_kit import programs, settings
from keras_examples import (
    checkpoints,
    features,
    network_features,
    network_sizes,
    transfer_data,
    transfer_models,
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The data and the network."""

    dataset: str = settings.choice(
        "mnist",
        ("mnist", "cifar100", "sun397", "folder"),
        "Which images; mnist: also Fashion-MNIST, as --data_dir has it.",
    )
    data_dir: str | None = settings.words(None, "Where they are.")
    subset: float = settings.number(
        1.0, "Stratified share of the training images.", above=0, most=1
    )
    split_seed: int = settings.count(42, "For the choice of --subset.", least=0)
    model: str = settings.choice(
        "efficientnet_lite0", tuple(network_sizes.MODELS), "Which network."
    )
    checkpoint: str | None = settings.words(None, "Its .npz file.")
    fine_tuned: bool = settings.switch(
        False, "Whether to accept a file that was fine-tuned on ImageNet-1k."
    )
    image_size: int | None = settings.count(
        None, "Images are resized to this; by default the network's.", good=96, least=8
    )
    batch_size: int = settings.count(64, "Images at a time.")
    output_dir: str = settings.output_dir("frozen_features")


def run(used: Settings) -> str:
    """Writes the file; returns the text to print."""
    if used.checkpoint is None:
        raise settings.UsageError(
            "flag --checkpoint is missing: it must name a .npz file of the pre-trained "
            f"{used.model}."
        )
    size = transfer_models.image_size(used.model, used.image_size)
    data = transfer_data.load(
        used.dataset,
        used.data_dir,
        size,
        subset=used.subset,
        split_seed=used.split_seed,
    )
    model = transfer_models.build(used.model, data.classes, image=size)
    checkpoints.load(model, used.model, used.checkpoint, used.fine_tuned)
    started = time.monotonic()
    arrays = network_features.compute(model, data, used.batch_size)
    seconds = time.monotonic() - started
    path = programs.make_directory(used.output_dir) / "features.npz"
    network = f"{used.model} from pre-trained weights, images of {size} by {size}"
    features.write(path, arrays, features.History(network))
    count, width = arrays["features"].shape
    return (
        f"{count} images of {data.name}, {width} features each, in {seconds:.0f} s "
        f"({count / seconds:.0f} images a second). Written to {path}: PRIVATE, as the "
        "images are."
    )


if __name__ == "__main__":
    programs.run_program(__doc__, Settings, run)
