"""A pre-trained network on private images, and its trained weights.

`transfer_film` trains it once, `tune_grid` and `norms_and_weights` many times.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import math
import os
import pathlib
from collections.abc import Callable

import numpy as np

import tfdpclip as dpc
from driver_kit import npz_files, settings
from driver_kit.lazy import tf
from keras_examples import (
    checkpoints,
    network_sizes,
    tracking,
    training,
    transfer_data,
    transfer_models,
)
from tfdpclip import files


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags of all programs that train a pre-trained network."""

    dataset: str = settings.choice(
        "cifar100",
        ("cifar100", "mnist", "sun397", "folder", "digits"),
        "Which images; mnist: also Fashion-MNIST, as --data_dir has it.",
    )
    data_dir: str | None = settings.words(None, "Where they are.")
    subset: float = settings.number(
        1.0, "Stratified share of the training images.", above=0, most=1
    )
    split_seed: int = settings.count(42, "For the choice of --subset.", least=0)
    merge_validation: bool = settings.switch(
        True, "Whether the validation split trains as well."
    )
    model: str = settings.choice(
        "vit_tiny", tuple(network_sizes.MODELS), "Which network."
    )
    checkpoint: str | None = settings.words(
        None,
        "Its .npz or .safetensors file.",
        good="model.safetensors",
    )
    image_size: int | None = settings.count(
        None, "Images are resized to this; by default the network's.", good=96, least=8
    )
    batchnorm: str = settings.choice(
        "frozen",
        ("frozen", "group"),
        "Batch normalisation by its statistics, or group normalisation for it.",
    )
    fine_tuned: bool = settings.switch(
        False, "Whether to accept a file that was fine-tuned on ImageNet-1k."
    )
    pretraining_epochs: int = settings.count(
        30, "On digits 0 to 4, without privacy.", least=0
    )
    trainable: str = settings.choice("film", ("film", "head", "all"), "What trains.")
    bit_film: str = settings.choice(
        "dp_film",
        tuple(network_sizes.BIT_FILM),
        "Which norms of resnet50_bit train, after which source.",
    )
    zero_head: bool = settings.switch(True, "Whether the head starts at zero.")
    physical_batch_size: int = settings.count(64, "Most images at a time.")
    preprocess: str = settings.choice(
        "resize", ("resize", "timm"), "Resize, or resize to 248 and take the middle."
    )


@dataclasses.dataclass(frozen=True)
class Network:
    """A network before its private training, and the images for that.

    Attributes:
      model: with `trainable` as chosen; not compiled.
      data: the private images, and the test images.
      counts: the trained weights: a sentence, when turned into text.
      origin: the network and its public training, in words.
      initial: the initial values of the trained variables.
    """

    model: tf.keras.Model
    data: transfer_data.TransferData
    counts: object
    origin: str
    initial: tuple[np.ndarray, ...]

    @functools.cached_property
    def predict(self) -> Callable[[np.ndarray], tf.Tensor]:
        """The class of each image."""
        return tf.function(
            lambda x: tf.argmax(self.model(x, training=False), axis=1),
            reduce_retracing=True,
        )

    def reset(self) -> None:
        """Undoes all private training."""
        for variable, value in zip(
            self.model.trainable_variables, self.initial, strict=True
        ):
            variable.assign(value)

    @property
    def digest(self) -> str:
        """A SHA-256 of images and weights, by which to know them again.

        For image files, names, folders, labels and size count, not the contents.
        """
        self.reset()
        found = hashlib.sha256()
        for part in (self.data.train, self.data.test):
            if isinstance(part, transfer_data.ImageFiles):
                names = "\0".join("/".join(path.parts[-2:]) for path in part.paths)
                found.update(f"{part.size}\0{names}".encode())
                arrays: tuple = (part.labels,)
            else:
                arrays = part
            for array in arrays:
                _update(found, np.asarray(array))
        for variable in self.model.weights:
            _update(found, variable.numpy())
        return found.hexdigest()


def _update(digest, array: np.ndarray) -> None:
    digest.update(f"{array.dtype.str} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).tobytes())


def prepare(
    used: Settings,
    check_size: Callable[[int], None],
    kept: str | os.PathLike[str] | None = None,
) -> Network:
    """Reads the images, makes the network and chooses its trained weights.

    Args:
      used: the settings.
      check_size: raises for settings that do not go with so many training images.
      kept: a .npz file for a network that is trained here, on public digits: read if it
        is there, written if not, so that a search goes on with the same network.

    Raises:
      UsageError: if settings or files do not go together.
    """
    if used.checkpoint is None and used.dataset != "digits":
        raise settings.UsageError(
            "flag --checkpoint is missing: it must name a .npz or .safetensors file of "
            f"the pre-trained {used.model}. --dataset=digits --model=vit_micro needs "
            "none."
        )
    normalised = isinstance(
        network_sizes.MODELS[used.model], network_sizes.EfficientNetLite
    )
    if used.batchnorm == "group" and not normalised:
        raise settings.UsageError(
            f"flag --batchnorm=group: {used.model} has no batch normalisation; "
            "efficientnet_lite0 has."
        )
    size = transfer_models.image_size(used.model, used.image_size)
    crop = used.preprocess == "timm"
    data = transfer_data.load(
        used.dataset,
        used.data_dir,
        math.ceil(size / 0.9) if crop else size,
        subset=used.subset,
        split_seed=used.split_seed,
        merge_validation=used.merge_validation,
    )
    check_size(data.size)
    model = transfer_models.build(used.model, data.classes, crop, size)
    if used.checkpoint is not None:
        checkpoints.load(model, used.model, used.checkpoint, used.fine_tuned)
    else:
        _pretrained(model, data.public, used.pretraining_epochs, kept)
    if used.batchnorm == "group":
        model = dpc.keras.convert_batchnorm(model)
    counts = select(model, used)
    origin = "pre-trained weights"
    if used.checkpoint is None:
        origin = "public digits" if used.pretraining_epochs else "random weights"
    initial = tuple(variable.numpy() for variable in model.trainable_variables)
    return Network(model, data, counts, f"{used.model} from {origin}", initial)


def select(model: tf.keras.Model, used: Settings) -> object:
    """Chooses the trained weights; returns an object whose text describes them."""
    config = network_sizes.MODELS[used.model]
    if used.trainable == "film":
        chosen = None
        if isinstance(config, network_sizes.BiT):
            by_name = network_sizes.BIT_FILM[used.bit_film]

            def chosen(layer):
                norm = isinstance(layer, tf.keras.layers.GroupNormalization)
                return norm and by_name(layer.name)

        return dpc.keras.film(
            model, head="head", zero_head=used.zero_head, normalization=chosen
        )
    if used.trainable == "head":
        for layer in model.layers:
            layer.trainable = layer.name == "head"
    head = model.get_layer("head")
    if used.zero_head:
        for variable in head.weights:
            variable.assign(tf.zeros_like(variable))
    trainable = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    return f"{trainable:,} of {model.count_params():,} parameters train"


def _pretrained(model, public, epochs: int, kept) -> None:
    """Trains on public data without privacy, or reads an earlier result."""
    path = None if kept is None else pathlib.Path(kept)
    if path is not None and path.exists():
        _restore(model, epochs, path)
        return
    if epochs:
        _pretrain(model, public, epochs)
    if path is not None:
        content = io.BytesIO()
        weights = [variable.numpy() for variable in model.weights]
        np.savez(content, np.array(epochs), *weights)
        files.write_atomically(path, content.getvalue())


def _restore(model, epochs: int, path: pathlib.Path) -> None:
    try:
        found = npz_files.read_npz(path)
        kept, *values = (found[f"arr_{k}"] for k in range(len(found)))
    except (OSError, KeyError, ValueError) as error:
        raise settings.UsageError(f"{path} is damaged: {error}") from error
    shapes = [value.shape for value in values]
    if kept != epochs or shapes != [tuple(v.shape) for v in model.weights]:
        raise settings.UsageError(
            f"{path} is of another network, or was trained for other "
            "--pretraining_epochs: give another --output_dir, for example "
            "--output_dir=runs/mine."
        )
    for variable, value in zip(model.weights, values, strict=True):
        variable.assign(value)


def _pretrain(model, public, epochs: int) -> None:
    if public is None:
        raise settings.UsageError(
            "flag --pretraining_epochs: only --dataset=digits has data for it; give "
            "--checkpoint."
        )
    model.compile(tf.keras.optimizers.Adam(3e-3), training.LOSS)
    steps = epochs * -(-len(public[0]) // 64)
    model.fit(
        *public,
        batch_size=64,
        epochs=epochs,
        verbose=0,
        callbacks=[tracking.Progress("pre-training on public digits", steps)],
    )
