"""Transformers that are compiled and not run: of 100 million and a billion weights.

Text classifiers: tokens and positions, pre-norm blocks, an average, a head. Trained in
full, or with LoRA (Hu et al. 2021): beside each projection of the attention a product
of two narrow matrices, which train with the head, and nothing else does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks import models
from benchmarks.step_files import Cell

L = tf.keras.layers
RANK = 8
# The models are never run.
_ZEROS: dict[str, Any] = {"kernel_initializer": "zeros"}


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a transformer.

    Attributes:
      width: of its vectors.
      blocks: of the whole model; the compiled part may have fewer.
      heads: of its attention.
      vocabulary: the number of tokens.
      length: tokens of an example.
      batch_size: examples of a step.
    """

    width: int
    blocks: int
    heads: int
    vocabulary: int = 32_000
    length: int = 512
    batch_size: int = 8

    def parameters(self, blocks: int | None = None) -> int:
        """Weights of the model without LoRA, a head of ten classes included."""
        blocks = self.blocks if blocks is None else blocks
        width = self.width
        # Four projections and two layers four times as wide, biases, two norms.
        block = 12 * width**2 + 13 * width
        tables = (self.vocabulary + self.length) * width
        return tables + blocks * block + 2 * width + 10 * width + 10


SIZES = {
    "100M": Size(768, 12, 12),
    "1B": Size(2048, 19, 16),
}


class LowRank(L.Layer):
    """A frozen dense layer, and a product of two narrow matrices that trains."""

    def __init__(self, units: int, rank: int = RANK):
        super().__init__()
        self._units, self._rank = units, rank

    def build(self, input_shape):
        width = input_shape[-1]

        def weight(name, shape, trainable):
            return self.add_weight(
                name=name, shape=shape, initializer="zeros", trainable=trainable
            )

        self.kernel = weight("kernel", (width, self._units), False)
        self.bias = weight("bias", (self._units,), False)
        self.down = weight("down", (width, self._rank), True)
        self.up = weight("up", (self._rank, self._units), True)

    def call(self, x):
        frozen = tf.matmul(x, self.kernel) + self.bias
        return frozen + tf.matmul(tf.matmul(x, self.down), self.up)


class Attention(L.Layer):
    """Softmax attention of three tensors, by heads; no weights."""

    def __init__(self, heads: int):
        super().__init__()
        self._heads = heads

    def call(self, queries, keys, values):
        length, width = queries.shape[1:]
        size = width // self._heads
        parts = [
            tf.reshape(part, (-1, length, self._heads, size))
            for part in (queries, keys, values)
        ]
        scores = tf.einsum("bqhd,bkhd->bhqk", *parts[:2]) * size**-0.5
        mixed = tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(scores), parts[2])
        return tf.reshape(mixed, (-1, length, width))


class Positions(L.Layer):
    """Adds a learned vector to every position."""

    def build(self, input_shape):
        self.table = self.add_weight(
            name="table", shape=input_shape[1:], initializer="zeros"
        )

    def call(self, inputs):
        return inputs + self.table


def transformer(size: Size, blocks: int, lora: bool) -> tf.keras.Model:
    """The model, with so many blocks."""
    frozen = not lora

    def dense(units, **options):
        return L.Dense(units, trainable=frozen, **_ZEROS, **options)

    def projection():
        return LowRank(size.width) if lora else dense(size.width)

    def norm():
        return L.LayerNormalization(trainable=frozen)

    tokens = L.Input((size.length,), dtype="int32")
    table = L.Embedding(
        size.vocabulary,
        size.width,
        embeddings_initializer="zeros",
        trainable=frozen,
    )
    x = Positions(trainable=frozen)(table(tokens))
    for _ in range(blocks):
        y = norm()(x)
        parts = [projection()(y) for _ in range(3)]
        x = L.Add()([x, projection()(Attention(size.heads)(*parts))])
        y = norm()(x)
        y = dense(size.width)(dense(4 * size.width, activation="gelu")(y))
        x = L.Add()([x, y])
    x = L.GlobalAveragePooling1D()(norm()(x))
    return tf.keras.Model(tokens, L.Dense(10, **_ZEROS)(x))


def embedding(vocabulary: int, width: int, length: int) -> tf.keras.Model:
    """A table of all tokens, averaged, and a head: full fine-tuning of a table."""
    tokens = L.Input((length,), dtype="int32")
    table = L.Embedding(vocabulary, width, embeddings_initializer="zeros")
    x = L.GlobalAveragePooling1D()(table(tokens))
    return tf.keras.Model(tokens, L.Dense(10, **_ZEROS)(x))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to compile, and shapes to look for in its programs.

    Attributes:
      name: of the model, and how it is trained.
      blocks: how many of its blocks are compiled.
      of: the number of blocks of the whole model.
      cell: the settings of its steps.
      task: makes the model and its batches.
      variants: of the step.
      shapes: to look for in the programs, as "8,250000,64".
      devices: over how many the step is split.
    """

    name: str
    blocks: int
    of: int
    cell: Cell
    task: Callable[[], models.Task | None]
    variants: tuple[str, ...] = ("plain", "fixed_unchecked")
    shapes: tuple[str, ...] = ()
    devices: int = 1

    def key(self) -> dict[str, Any]:
        """The columns of the table that identify the case."""
        return {"name": self.name, "blocks": self.blocks, "devices": self.devices}

    def counts(self) -> dict[str, int]:
        """The weights of the compiled model, and how many of them train."""
        task = self.task() or models.make(self.cell.model)
        model = task.build()
        trained = sum(math.prod(v.shape) for v in model.trainable_variables)
        return {"parameters": model.count_params(), "trained": trained}


def _large(name: str, blocks: int, lora: bool) -> Case:
    size = SIZES[name]
    batches = models.tokens(size.length, size.vocabulary, 10)
    return Case(
        f"{name} {'LoRA' if lora else 'full'} {blocks}",
        blocks,
        size.blocks,
        Cell("", size.batch_size),
        lambda: models.Task(lambda: transformer(size, blocks, lora), batches),
    )


def _table(vocabulary: int = 250_000, width: int = 768, length: int = 512) -> Case:
    batches, size = models.tokens(length, vocabulary, 10), 8
    return Case(
        f"table {vocabulary} x {width}",
        0,
        0,
        Cell("", size),
        lambda: models.Task(lambda: embedding(vocabulary, width, length), batches),
        shapes=(f"{size},{vocabulary},{width}", f"{size},{vocabulary}"),
    )


def _deep(blocks: int) -> Case:
    return Case(
        f"transformer {blocks}",
        blocks,
        blocks,
        Cell("transformer", 64),
        lambda: models.make("transformer", blocks=blocks),
        ("plain", "quantile_unchecked", "quantile"),
    )


def _split(name: str) -> Case:
    cell = Cell(name, 64)
    return Case(f"{name} split", 0, 0, cell, lambda: None, devices=8)


CASES = (
    *(_large(n, b, lora) for n in SIZES for lora in (False, True) for b in (2, 4)),
    _table(),
    *(_deep(blocks) for blocks in (2, 4, 8)),
    *(_split(name) for name in ("mlp", "transformer")),
)
