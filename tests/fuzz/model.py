"""From a spec to a model with variables, data and a loss, and to its true gradients."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from tests.fuzz import (  # noqa: F401  the blocks
    gradient_mixers,
    layers,
    losses,
    mixers,
    ops,
    record_mixers,
    unseen_mixers,
    wrappers,
)
from tests.fuzz.env import Env, floats
from tests.fuzz.registry import BLOCKS
from tests.fuzz.spec import Spec

_SHAPES = {"vector": (6,), "sequence": (4, 3), "image": (4, 3, 2), "tokens": (5,)}
_L = tf.keras.layers


class Model:
    """A model of a spec.

    Attributes:
      variables: the trained variables.
      data: x, y (eight numbers for each example) and sample weights.
    """

    def __init__(self, spec: Spec, dtype: str | None = None):
        self.spec = spec
        dtype = dtype or spec.mode.get("dtype", "float32")
        self.env = Env(spec.seed, dtype, spec.each)
        self.data = data_of(spec, self.env.float)
        self.forward(*self.data, plain=True)
        self.variables = self.env.variables
        self._others = [(v, v.numpy()) for v in self.env.others]

    def reset(self) -> None:
        """Resets the variables that are not trained to their first values."""
        for variable, value in self._others:
            variable.assign(value)

    def forward(self, x, y, w, plain=False):
        """The rows' losses by definition, and the loss given to the engine."""
        out, penalties = self.outputs(x, plain)
        settings = self.spec.loss
        each = losses.per_example(settings, out, y, w, penalties)
        loss = losses.reduced(settings, out, y, w, penalties, self.env.variables)
        return each, loss

    def outputs(self, x, plain=False):
        """The model's outputs, and penalties."""
        env = self.env
        env.penalties = []
        before, env.plain = env.plain, plain
        try:
            if x.dtype.is_floating and env.dtype == "mixed_bfloat16":
                x = tf.cast(x, tf.bfloat16)
            out = env.run(self.spec.body, x, "")
            head = self.spec.loss.get("head", True) or "head" in env.made
            if head or not out.dtype.is_floating or not env.variables:
                out = floats(env, out)
                out = env.layer("head", lambda **kw: _L.Dense(3, **kw), out)
        finally:
            env.plain = before
        penalties, env.penalties = env.penalties, []
        self._steps = math.prod(out.shape[1:-1])
        return out, penalties

    @property
    def scale(self) -> float:
        """The factor by which the step multiplies the losses."""
        # Keras also sums over the steps of an example.
        keras = self.spec.loss.get("reduction") == "keras_sum"
        fit = self.spec.mode.get("level") == "fit"
        return self.sum_scale * (self._steps if keras and fit else 1)

    @property
    def sum_scale(self) -> float:
        """The factor by which the engine multiplies summed losses: the batch's rows."""
        reduction = self.spec.loss.get("reduction", "none")
        return float(self.spec.rows) if reduction in losses.SUMS else 1.0

    def signature(self, dynamic: bool) -> list[tf.TensorSpec]:
        """Of a step."""
        lead = None if dynamic else self.spec.rows
        return [tf.TensorSpec([lead, *t.shape[1:]], t.dtype) for t in self.data]

    # The truth.

    def alone(self, data=None) -> np.ndarray:
        """Each record's gradient from a batch of its own: float64 `[B, V]`."""
        data = self.data if data is None else data
        each = self.spec.each
        return np.concatenate(
            [
                self.together([t[i : i + each] for t in data])
                for i in range(0, len(data[0]), each)
            ]
        )

    def together(self, data=None) -> np.ndarray:
        """`[B, V]`: the gradients of the records' mean losses, in one batch."""
        data = self.data if data is None else data
        self.reset()
        with tf.GradientTape(persistent=True) as tape:
            each, _ = self.forward(*data, plain=True)
            parts = tf.unstack(self.of_records(each))
        rows = [
            self.flat(tape.gradient(part, self.variables)) * self.scale
            for part in parts
        ]
        del tape
        self.reset()
        return np.stack(rows)

    def of_records(self, each):
        """`[B]`: the mean loss of each record's rows."""
        return tf.reduce_mean(tf.reshape(each, [-1, self.spec.each]), axis=1)

    def of_sum(self) -> np.ndarray:
        """The gradient of the sum of the losses, in a single backward pass."""
        self.reset()
        with tf.GradientTape() as tape:
            each, _ = self.forward(*self.data, plain=True)
            total = tf.reduce_sum(self.of_records(each))
        found = self.flat(tape.gradient(total, self.variables)) * self.scale
        self.reset()
        return found

    def shared(self) -> np.ndarray:
        """The gradient of the terms that depend on no example."""
        if self.spec.loss.get("reduction") != "regularised":
            return np.zeros(sum(self.sizes))
        with tf.GradientTape() as tape:
            loss = losses.regulariser(self.variables, self.env.float)
        return self.flat(tape.gradient(loss, self.variables))

    @property
    def sizes(self) -> list[int]:
        """Entries of each variable."""
        return [int(np.prod(v.shape)) for v in self.variables]

    def flat(self, tensors) -> np.ndarray:
        """Concatenates tensors into a float64 vector, with zeros for None."""
        parts = [
            np.zeros(v.shape)
            if t is None
            else tf.cast(tf.convert_to_tensor(t), tf.float64).numpy()
            for t, v in zip(tensors, self.variables, strict=True)
        ]
        return np.concatenate([part.ravel() for part in parts])


def data_of(spec: Spec, dtype: str = "float32") -> list[tf.Tensor]:
    """x, y and sample weights."""
    rng = np.random.default_rng([spec.seed, 1])
    x = _inputs(rng, spec)
    y = rng.standard_normal((spec.rows, 8))
    w = rng.choice([0.5, 1.0, 2.0], spec.rows)
    poison = spec.mode.get("poison")
    if poison == "padding" and spec.loss.get("weighted"):
        w[-1] = 0
    if poison in ("nan", "inf") and x.dtype.kind == "f":
        x[0].flat[0] = {"nan": np.nan, "inf": np.inf}[poison]
    return [_tensor(part, dtype) for part in (x, y, w)]


def _inputs(rng, spec):
    shape = (spec.rows, *_SHAPES[spec.input])
    if spec.input == "tokens":
        return rng.integers(0, 8, shape).astype(np.int32)
    return rng.standard_normal(shape)


def _tensor(part, dtype):
    return tf.constant(part, dtype if part.dtype.kind == "f" else None)


def replaced(spec: Spec, data: list, j: int, kind: str) -> list[tf.Tensor]:
    """The data with record j replaced.

    The new record is "new", "large", "small", "zero", a "copy" of the next, or the
    "same".
    """
    rng = np.random.default_rng([spec.seed, 2, j])
    own, next_one = (
        slice(i * spec.each, (i + 1) * spec.each) for i in (j, (j + 1) % spec.batch)
    )
    new = _inputs(rng, spec)[own]
    size = {"new": 1, "large": 30, "small": 0.1, "zero": 0}.get(kind)
    x, y, w = (np.array(t) for t in data)
    if kind == "copy":
        x[own], y[own] = x[next_one], y[next_one]
    if size is None:
        return [tf.constant(v, t.dtype) for v, t in zip((x, y, w), data, strict=True)]
    x[own] = new * size if kind != "large" or x.dtype.kind == "f" else new
    y[own] = rng.standard_normal((spec.each, 8)) * min(size, 3)
    return [tf.constant(part, t.dtype) for part, t in zip((x, y, w), data, strict=True)]


def is_mixed(spec: Spec) -> bool:
    """Whether something that combines examples was planted."""
    planted = any(BLOCKS[node.name].mixes for node in spec.nodes())
    return planted or spec.loss.get("reduction") in losses.MIXED


def is_random(spec: Spec) -> bool:
    """Whether the model draws random numbers."""
    return any(
        BLOCKS[node.name].random or node.args.get("how") == "shuffle"
        for node in spec.nodes()
    )
