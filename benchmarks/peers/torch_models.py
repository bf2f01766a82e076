"""The benchmark models in PyTorch, of the same sizes as in `benchmarks.models`.

Differences: PyTorch's LSTM has two bias vectors where Keras has one (512 parameters
more here).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.timing import UnsupportedError


class Mean(nn.Module):
    """The mean over some dimensions."""

    def __init__(self, *dimensions: int):
        super().__init__()
        self.dimensions = dimensions

    def forward(self, x):
        return x.mean(self.dimensions)


class LastOutput(nn.Module):
    """A recurrent layer's output at the last position."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0][:, -1]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, hidden: int, attention: type):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = attention(width, heads, batch_first=True)
        self.dense = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
        )

    def forward(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.dense(self.norms[1](x))


class Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, filters: int, strides: int):
        super().__init__()
        self.inner = nn.Sequential(
            *convolution(inputs, filters, 3, strides),
            nn.ReLU(),
            *convolution(filters, filters, 3),
        )
        self.outer = nn.Sequential(
            *(convolution(inputs, filters, 1, strides) if strides != 1 else [])
        )

    def forward(self, x):
        return functional.relu(self.inner(x) + self.outer(x))


class Patches(nn.Module):
    """Images to a sequence of embedded patches with positions."""

    def __init__(self, size: int, width: int, patch: int):
        super().__init__()
        self.project = nn.Conv2d(3, width, patch, patch)
        self.table = nn.Parameter(0.05 * torch.randn((size // patch) ** 2, width))

    def forward(self, x):
        return self.project(x).flatten(2).transpose(1, 2) + self.table


def convolution(inputs: int, filters: int, size: int, strides: int = 1):
    """A convolution with group normalisation."""
    return [
        nn.Conv2d(inputs, filters, size, strides, padding=size // 2, bias=False),
        nn.GroupNorm(16, filters),
    ]


def mnist_cnn(layers) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def convnet(layers) -> nn.Module:
    made: list[nn.Module] = []
    inputs = 3
    for filters in (32, 64, 64, 128):
        made += [nn.Conv2d(inputs, filters, 3, padding=1), nn.ReLU()]
        made.append(nn.AvgPool2d(2) if filters != 128 else Mean(2, 3))
        inputs = filters
    return nn.Sequential(*made, nn.Linear(128, 10))


def resnet18(layers) -> nn.Module:
    made = [*convolution(3, 64, 3), nn.ReLU()]
    inputs = 64
    for filters in (64, 128, 256, 512):
        made.append(Residual(inputs, filters, 1 if filters == 64 else 2))
        made.append(Residual(filters, filters, 1))
        inputs = filters
    return nn.Sequential(*made, Mean(2, 3), nn.Linear(512, 10))


def mlp(layers) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def embedding(layers) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(10_000, 16),
        Mean(1),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 2),
    )


def lstm(layers) -> nn.Module:
    recurrent = layers["lstm"](64, 128, batch_first=True)
    return nn.Sequential(
        nn.Embedding(1_000, 64), LastOutput(recurrent), nn.Linear(128, 10)
    )


def gru(layers) -> nn.Module:
    recurrent = layers["gru"](64, 128, batch_first=True)
    return nn.Sequential(
        nn.Embedding(1_000, 64), LastOutput(recurrent), nn.Linear(128, 10)
    )


def _transformer(layers, blocks: int) -> nn.Module:
    made = [Block(128, 4, 512, layers["attention"]) for _ in range(blocks)]
    return nn.Sequential(
        nn.Embedding(1_000, 128),
        *made,
        nn.LayerNorm(128),
        Mean(1),
        nn.Linear(128, 10),
    )


def vit_tiny_film(layers) -> nn.Module:
    blocks = [Block(192, 3, 768, layers["attention"]) for _ in range(12)]
    model = nn.Sequential(
        Patches(224, 192, 16), *blocks, nn.LayerNorm(192), Mean(1), nn.Linear(192, 10)
    )
    model.requires_grad_(False)
    for part in model.modules():
        if isinstance(part, nn.LayerNorm) or part is model[-1]:
            part.requires_grad_(True)
    return model


# The function that makes the model, all its parameters, the shape of an example, the
# number of tokens or None for floats; classes.
MODELS = {
    "mnist_cnn": (mnist_cnn, 26_010, (1, 28, 28), None, 10),
    "convnet": (convnet, 131_466, (3, 32, 32), None, 10),
    "resnet18": (resnet18, 11_173_962, (3, 32, 32), None, 10),
    "mlp": (mlp, 669_706, (784,), None, 10),
    "embedding": (embedding, 160_306, (256,), 10_000, 2),
    "lstm": (lstm, 164_618, (32,), 1_000, 10),
    "gru": (gru, 139_786, (32,), 1_000, 10),
    "transformer": (lambda made: _transformer(made, 2), 526_090, (64,), 1_000, 10),
    "transformer6": (lambda made: _transformer(made, 6), 1_319_178, (64,), 1_000, 10),
    "vit_tiny_film": (vit_tiny_film, 5_525_962, (3, 224, 224), None, 10),
}


def make(name: str, layers: dict[str, type]) -> nn.Module:
    """Returns a model.

    Args:
      name: of `MODELS`.
      layers: the classes for "lstm", "gru" and "attention", which a library for
        private training may have to replace.

    Raises:
      UnsupportedError: if there is no such model here.
      ValueError: if its number of parameters is wrong.
    """
    if name not in MODELS:
        raise UnsupportedError(f"there is no {name} in PyTorch")
    build, parameters = MODELS[name][:2]
    model = build(layers)
    count = sum(part.numel() for part in model.parameters())
    if count != parameters:
        raise ValueError(f"name: {name} has {count} parameters, not {parameters}.")
    return model


def batch(name: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and labels."""
    _, _, shape, tokens, classes = MODELS[name]
    torch.manual_seed(0)
    x = (
        torch.randn(size, *shape)
        if tokens is None
        else torch.randint(tokens, (size, *shape))
    )
    return x, torch.randint(classes, (size,))
