"""Where a model's variables live, and how its blocks are run."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.fuzz.registry import BLOCKS, with_defaults
from tests.fuzz.spec import Node


class Env:
    """The variables of one model.

    Attributes:
      plain: whether wrappers that change nothing (a nested function, a loop over the
        examples) are left out, as in the reference; in this mode variables are made.
      penalties: the tensors that blocks add to the loss, `[B]` each.
      each: rows of a record.
    """

    def __init__(self, seed: int, dtype: str = "float32", each: int = 1):
        self.seed = seed
        self.each = each
        self.dtype = dtype
        self.float = "float64" if dtype == "float64" else "float32"
        self.plain = False
        self.penalties: list[tf.Tensor] = []
        self.made: dict[str, Any] = {}
        self.variables: list[tf.Variable] = []
        self.others: list[tf.Variable] = []

    @contextlib.contextmanager
    def plainly(self):
        """Runs blocks as in the reference."""
        before, self.plain = self.plain, True
        try:
            yield
        finally:
            self.plain = before

    def numbers(self, path: str, shape: Sequence[int], scale: float = 1.0):
        """The same random numbers for the same path."""
        rng = np.random.default_rng([self.seed, zlib.crc32(path.encode())])
        return scale * rng.standard_normal(tuple(shape))

    def weight(self, path: str, shape: Sequence[int], trainable=True, scale=0.5):
        """A variable; with scale 0, of zeros."""
        if path not in self.made:
            with tf.init_scope():
                variable = tf.Variable(
                    self.numbers(path, shape, scale),
                    dtype=self.float,
                    trainable=trainable,
                    name=path.replace("/", "_") + "/w",
                )
            self.made[path] = variable
            (self.variables if trainable else self.others).append(variable)
        return self.made[path]

    def read(self, variable: tf.Variable, x: tf.Tensor) -> tf.Tensor:
        """The value in the type of `x`."""
        value = tf.convert_to_tensor(variable)
        return value if value.dtype == x.dtype else tf.cast(value, x.dtype)

    def layer(self, path: str, make: Callable, *inputs, **options) -> tf.Tensor:
        """Calls a Keras layer, which is made at the first call."""
        first = path not in self.made
        if first:
            policy = tf.keras.mixed_precision.Policy(self.dtype)
            self.made[path] = make(name=path.replace("/", "_"), dtype=policy)
        layer = self.made[path]
        found = layer(*inputs, **options)
        if first:
            for i, variable in enumerate(layer.trainable_variables):
                shift = self.numbers(f"{path}/{i}", variable.shape, 0.15)
                variable.assign_add(tf.cast(shift, variable.dtype))
            self.variables += layer.trainable_variables
            self.others += layer.non_trainable_variables
        return found

    def run(self, nodes: Sequence[Node], x: tf.Tensor, path: str) -> tf.Tensor:
        """Runs a list of blocks in order."""
        for i, node in enumerate(nodes):
            here = f"{path}{i}{node.name}"
            args = with_defaults(node.name, node.args)
            x = small(BLOCKS[node.name].run(self, here, x, args, node))
        return x

    def inner(self, node: Node, x: tf.Tensor, path: str, keep=False) -> tf.Tensor:
        """Runs the blocks inside of a node; drops their penalties, unless `keep`."""
        before = len(self.penalties)
        x = self.run(node.children, x, path + "/")
        if not keep:
            del self.penalties[before:]
        return x


def number_of(x: tf.Tensor) -> tf.Tensor:
    """The number of examples, a tensor."""
    return tf.shape(x)[0]


def flat_size(x: tf.Tensor) -> int:
    """How many entries an example has."""
    return math.prod(x.shape[1:])


def floats(env: Env, x: tf.Tensor) -> tf.Tensor:
    """Integers as small numbers."""
    if x.dtype.is_floating:
        return x
    # Far from the numbers at which `tokens_of` rounds to the next integer.
    return tf.cast(x, env.float) / 3 - 0.93


def vector(env: Env, x: tf.Tensor) -> tf.Tensor:
    """`[B, n]`."""
    x = floats(env, x)
    return x if x.shape.rank == 2 else tf.reshape(x, [-1, flat_size(x)])


def sequence(env: Env, x: tf.Tensor) -> tf.Tensor:
    """`[B, t, d]`."""
    x = floats(env, x)
    if x.shape.rank == 3:
        return x
    if x.shape.rank > 3:
        return tf.reshape(x, [-1, flat_size(x) // x.shape[-1], x.shape[-1]])
    size = x.shape[1]
    steps = next(t for t in (3, 2, 4, 5, size) if size % t == 0 or t == size)
    return tf.reshape(x, [-1, steps, size // steps])


def image(env: Env, x: tf.Tensor) -> tf.Tensor:
    """`[B, h, w, c]`."""
    x = floats(env, x)
    if x.shape.rank == 4:
        return x
    if x.shape.rank > 4:
        sizes = [x.shape[1], flat_size(x) // x.shape[1] // x.shape[-1], x.shape[-1]]
        return tf.reshape(x, [-1, *sizes])
    return sequence(env, x)[..., tf.newaxis]


def small(x: tf.Tensor) -> tf.Tensor:
    """Without most of its entries, where there are many."""
    while flat_size(x) > 240:
        axis = max(range(1, x.shape.rank), key=lambda i: x.shape[i])
        keep = [slice(None)] * axis + [slice(0, (x.shape[axis] + 1) // 2)]
        x = x[tuple(keep)]
    return x
