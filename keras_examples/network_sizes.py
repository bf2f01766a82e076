"""Sizes and names of networks, which flags need without TensorFlow."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ViT:
    """A vision transformer's sizes."""

    image: int
    patch: int
    width: int
    depth: int
    heads: int
    mlp: int

    @property
    def grid(self) -> int:
        """Patches per side."""
        return self.image // self.patch


@dataclasses.dataclass(frozen=True)
class BiT:
    """A BiT ResNet's sizes."""

    image: int
    stages: tuple[int, ...]
    width: int
    groups: int


@dataclasses.dataclass(frozen=True)
class Stage:
    """Blocks of the same width; the first block has the stride."""

    blocks: int
    kernel: int
    stride: int
    expansion: int
    width: int


@dataclasses.dataclass(frozen=True)
class EfficientNetLite:
    """An EfficientNet-Lite's sizes.

    Attributes:
      image: images are resized to this many pixels each way.
      stages: its blocks.
      stem: width of the first convolution.
      top: width of the last convolution, and number of features.
    """

    image: int
    stages: tuple[Stage, ...]
    stem: int = 32
    top: int = 1280


#: The network's own size is 224; 96 costs a fifth of that.
LITE0 = EfficientNetLite(
    96,
    (
        Stage(1, 3, 1, 1, 16),
        Stage(2, 3, 2, 6, 24),
        Stage(2, 5, 2, 6, 40),
        Stage(3, 3, 2, 6, 80),
        Stage(3, 5, 1, 6, 112),
        Stage(4, 5, 2, 6, 192),
        Stage(1, 3, 1, 6, 320),
    ),
)

MODELS = {
    "vit_tiny": ViT(224, 16, 192, 12, 3, 768),
    "vit_base": ViT(224, 16, 768, 12, 12, 3072),
    "vit_micro": ViT(8, 2, 32, 2, 4, 64),
    "resnet50_bit": BiT(224, (3, 4, 6, 3), 64, 32),
    "efficientnet_lite0": LITE0,
}

#: Which normalisation layers of a BiT ResNet FiLM trains, by source.
BIT_FILM = {
    "dp_film": lambda name: name.endswith("_c_norm") or name == "final_norm",
    "framework": lambda name: name != "final_norm",
    "all": lambda name: True,
}

#: After how many epochs Chen et al. (2020) divide the learning rate of CIFAR-10 by 10.
CIFAR10_DECAY_EPOCHS = 20
