"""The settings of runs that clip batches, and the allowed combinations.

Nguyen, Nguyen, Nguyen and van Dijk (2023), "Batch Clipping and Adaptive Layerwise
Clipping for Differential Private Stochastic Gradient Descent".
"""

from __future__ import annotations

import dataclasses

from driver_kit import settings
from keras_examples import batch_networks, image_data

UNITS = ("individual", "batch", "group")
NETWORKS = tuple(batch_networks.NETWORKS)
DATASETS = ("cifar10", "mnist", "fashion_mnist", "digits", "synthetic")
METHODS = ("sgd", "momentum", "adam")
SAMPLINGS = ("fixed", "with_replacement", "poisson")
CLIPS = ("full", "layerwise", "adaptive", "adaptive_zhang", "scaled")


def read_layers(text: str) -> int | None:
    """The number of groups of layers in a value of --layers, if it has one.

    Raises:
      ValueError: for a text that is no value of --layers.

    >>> read_layers("groups:4"), read_layers("module")
    (4, None)
    """
    if text in ("paper", "module", "tensor"):
        return None
    name, _, count = text.partition(":")
    if name != "groups" or not count.isdecimal() or int(count) < 1:
        raise ValueError(f"{text!r} is no value of --layers.")
    return int(count)


@dataclasses.dataclass(frozen=True)
class Common:
    """The common settings of compared runs."""

    network: str = settings.choice("resnet18", NETWORKS, "Which network.")
    norm: str = settings.choice("batch", ("batch", "none"), "Its normalisation.")
    conv_bias: bool = settings.switch(
        True, "Whether convolutions of convnet and bn_lenet5 have a bias."
    )
    dataset: str = settings.choice(
        "cifar10", DATASETS, "Which images; the last two offline."
    )
    data_dir: str | None = settings.words(
        None,
        f"Directory with {image_data.CIFAR10_LAYOUT}; for MNIST and Fashion-MNIST, "
        f"{image_data.MNIST_LAYOUT}.",
    )
    examples: int | None = settings.count(
        None, "Take no more than so many training images.", least=2, good=20_000
    )
    groups: int = settings.count(8, "Groups per batch for unit group.", least=2)
    local_steps: int = settings.count(
        1, "Local steps on a group (or batch), whose update is clipped."
    )
    local_rate: float = settings.number(
        0.025, "The learning rate of local steps.", above=0
    )
    local_method: str = settings.choice(
        "sgd", METHODS, "Of local steps, with a fresh state for every group."
    )
    random_layer: bool = settings.switch(
        False, "Whether a group updates one layer alone, drawn at random."
    )
    layers: str = settings.words(
        "paper",
        "What counts as a layer; paper: a tensor for ResNet-18, otherwise a module; "
        "groups:4: four groups of modules of similar gradient norm on public images.",
        form="paper, module, tensor or groups:HOW_MANY",
        reads=read_layers,
    )
    physical_batch_size: int = settings.count(
        256, "Most images at a time for unit individual."
    )
    sampling: str = settings.choice(
        "fixed",
        SAMPLINGS,
        "How batches are drawn: of fixed size without replacement, as the paper's "
        "analysis has them, or with replacement, as its text says; or Poisson samples.",
    )
    learning_rate: float = settings.number(0.025, "The learning rate.", above=0)
    learning_rate_decay: float = settings.number(
        0.9, "Its factor after each epoch.", above=0, most=1
    )
    clip_decay: float = settings.number(
        1.0, "The clip norm's factor after each epoch.", above=0, most=1
    )
    epochs: int = settings.count(50, "Epochs.")
    public_share: float = settings.number(
        0.1, "Share of the training images to take as public.", above=0, below=1
    )
    augment: bool = settings.switch(True, "Whether to crop and mirror at random.")
    delta: float = settings.delta()
    seed: int | None = settings.seed()


@dataclasses.dataclass(frozen=True)
class OneRun(Common):
    """The settings of a single run."""

    unit: str = settings.choice(
        "batch",
        UNITS,
        "Whose gradient is clipped: each example's, the batch's, or each group's.",
    )
    clip: str = settings.choice(
        "adaptive",
        CLIPS,
        "One clip norm for all (full), for each layer (layerwise), in proportion to "
        "public gradient norms (adaptive; adaptive_zhang without the master clip "
        "norm), or one clip after scaling layers alike (scaled).",
    )
    clip_norm: float = settings.number(0.095, "The (master) clip norm C.", above=0)
    sigma: float = settings.number(
        0.01875, "The paper's sigma: noise stddev over 2 C_h.", above=0
    )
    sparsify: float | None = settings.number(
        None,
        "Freeze weights that moved in an epoch by at most so many stddevs of what the "
        "noise alone moves them (the paper's section 3.4).",
        above=0,
        good=1,
    )
    equal_privacy: bool = settings.switch(
        False,
        "Whether full and scaled clipping get sigma / sqrt(L), as private as layerwise "
        "clipping with sigma.",
    )
    batch_size: int = settings.count(64, "Images per step, m.")


def check(used: OneRun) -> None:
    """Raises unless unit, normalisation and batch size go together."""
    if used.unit == "individual" and used.norm == "batch":
        raise settings.UsageError(
            "flag --unit=individual: batch normalisation combines examples, so that no "
            "example has a gradient of its own; use --norm=none, or --unit=batch or "
            "--unit=group."
        )
    if local_flag(used) and used.unit == "individual":
        raise settings.UsageError(
            f"flag --{local_flag(used)}: a group takes local steps, and not each "
            "example; use --unit=group or --unit=batch."
        )
    if local_flag(used) and used.network == "resnet18":
        raise settings.UsageError(
            f"flag --{local_flag(used)} needs a sequential network, for example "
            "--network=bn_lenet5."
        )
    if used.random_layer and by_layer(used.clip):
        raise settings.UsageError(
            f"flag --random_layer: --clip={used.clip} adds noise for all layers, of "
            "which one moves; use --clip=scaled or --clip=full."
        )
    if used.unit == "group" and used.batch_size % used.groups:
        raise settings.UsageError(
            f"flag --groups={used.groups} must divide --batch_size={used.batch_size}."
        )


def local_flag(used: Common) -> str:
    """The flag by which the clipped vector is an update of local steps; or ""."""
    if used.local_steps > 1:
        return f"local_steps={used.local_steps}"
    if used.local_method != "sgd":
        return f"local_method={used.local_method}"
    return "random_layer" if used.random_layer else ""


def by_layer(clip: str) -> bool:
    """Whether a way to clip has a clip norm for each layer, and pays sqrt(L)."""
    return clip not in ("full", "scaled")


def layer_kind(used: Common) -> str:
    """What counts as a layer: "tensor", "module" or "groups:4"."""
    if used.layers != "paper":
        return used.layers
    return "tensor" if used.network == "resnet18" else "module"


def group_spec(used: Common) -> str:
    """The name that clip rules have for the unit counted as a layer."""
    return "variable" if layer_kind(used) == "tensor" else "layer"
