"""Tensors of random graphs, with the lengths that they have for every batch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import tensorflow as tf


class SkipStep(Exception):
    """A step does not apply to a tensor."""


@dataclasses.dataclass(frozen=True)
class Length:
    """The length of an axis: `per_row` times the rows of the batch, and `more`."""

    per_row: int
    more: int

    def __add__(self, other: Length) -> Length:
        return Length(self.per_row + other.per_row, self.more + other.more)

    def __mul__(self, times: int) -> Length:
        return Length(self.per_row * times, self.more * times)

    @property
    def fixed(self) -> bool:
        return self.per_row == 0


def fixed(number: int) -> Length:
    """A length that is the same for every batch."""
    return Length(0, number)


ROWS = Length(1, 0)


@dataclasses.dataclass(frozen=True)
class Value:
    """A float32 tensor and the lengths of its axes."""

    tensor: tf.Tensor
    dims: tuple[Length, ...]

    @property
    def rank(self) -> int:
        return len(self.dims)

    def with_tensor(self, tensor: tf.Tensor) -> Value:
        return Value(tensor, self.dims)


class Drawer:
    """Draws the steps of a random graph while the graph is traced.

    Args:
      seed: the same seed draws the same graph.
      rows: the number of rows of the batch, if that is static.
      weights: a trained variable, a vector.
    """

    def __init__(self, seed: str, rows: int | None, weights: tf.Variable):
        self.random = random.Random(seed)
        self.rows = rows
        self.weights = weights
        self._used = 0
        #: The probability of an axis that counts no rows, where the tensor has such
        #: axes.
        self.within = 0.9
        self.pool: list[Value] = []
        #: The names of the steps that were drawn.
        self.names: list[str] = []

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, options):
        options = list(options)
        if not options:
            raise SkipStep
        return self.random.choice(options)

    def parameters(self, *shape: int) -> tf.Tensor:
        """Some entries of the trained variable, in a shape."""
        count = 1
        for size in shape:
            count *= size
        if count > 60:
            raise SkipStep
        start = self._used % (self.weights.shape[0] - count)
        self._used += 7
        return tf.reshape(self.weights[start : start + count], shape)

    def constant(self, *shape: int) -> tf.Tensor:
        count = 1
        for size in shape:
            count *= size
        if count > 400:
            raise SkipStep
        numbers = [self.random.uniform(-1, 1) for _ in range(count)]
        return tf.constant(numbers, tf.float32, shape=shape)

    def axis(self, value: Value, where: Callable[[Length], bool] = lambda _: True):
        """Draws an axis of a tensor, mostly an axis that counts no rows."""
        axes = [i for i, length in enumerate(value.dims) if where(length)]
        within = [i for i in axes if value.dims[i].fixed]
        return self.pick(within if within and self.chance(self.within) else axes)

    def size(self, value: Value | None = None) -> tf.Tensor:
        """A number that depends on how many rows there are, an int32 scalar."""
        value = value or self.pick(self.pool)
        axis = self.pick(i for i, d in enumerate(value.dims) if not d.fixed)
        found = tf.shape(value.tensor)[axis]
        how = self.pick(["plain", "size", "third", "less", "rest"])
        if how == "size":
            return tf.size(value.tensor)
        if how == "third":
            return found // 3
        if how == "less":
            return found - 1
        return found % 3 if how == "rest" else found
