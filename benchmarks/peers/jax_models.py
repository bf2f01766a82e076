"""The benchmark models in JAX alone, of the same sizes as in `benchmarks.models`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.timing import UnsupportedError

_IMAGES = ("NHWC", "HWIO", "NHWC")


class Parameters:
    """Makes parameters by their shapes, and remembers them in a list."""

    def __init__(self):
        self.values: list[jax.Array] = []
        self._rng = np.random.default_rng(0)

    def __call__(self, *shape: int, zero: bool = False) -> int:
        """Adds a parameter; returns its place in the list."""
        inputs = int(np.prod(shape[:-1])) or 1
        value = self._rng.standard_normal(shape, np.float32) / np.sqrt(inputs)
        self.values.append(jnp.asarray(0 * value if zero else value))
        return len(self.values) - 1


def dense(new: Parameters, inputs: int, outputs: int) -> Callable:
    """A dense layer."""
    kernel, bias = new(inputs, outputs), new(outputs, zero=True)
    return lambda p, x: x @ p[kernel] + p[bias]


def convolution(new, size: int, inputs: int, outputs: int, strides=1, padding="SAME"):
    """A convolution with a bias."""
    kernel, bias = new(size, size, inputs, outputs), new(outputs, zero=True)

    def layer(p, x):
        return p[bias] + lax.conv_general_dilated(
            x, p[kernel], (strides, strides), padding, dimension_numbers=_IMAGES
        )

    return layer


def normalization(new: Parameters, width: int) -> Callable:
    """Layer normalisation."""
    scale, offset = new(width), new(width, zero=True)

    def layer(p, x):
        x = x - x.mean(-1, keepdims=True)
        deviation = jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)
        return x / deviation * p[scale] + p[offset]

    return layer


def attention(new: Parameters, width: int, heads: int) -> Callable:
    """Multi-head self-attention."""
    query, key, value, output = (dense(new, width, width) for _ in range(4))

    def layer(p, x):
        def split(y):
            return y.reshape(*y.shape[:2], heads, -1)

        q, k, v = (split(project(p, x)) for project in (query, key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width // heads)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return output(p, mixed.reshape(x.shape))

    return layer


def mnist_cnn(new: Parameters) -> Callable:
    first = convolution(new, 8, 1, 16, 2)
    second = convolution(new, 4, 16, 32, 2, "VALID")
    hidden, last = dense(new, 512, 32), dense(new, 32, 10)

    def pool(x):
        return lax.reduce_window(
            x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID"
        )

    def apply(p, x):
        x = pool(jax.nn.relu(first(p, x)))
        x = pool(jax.nn.relu(second(p, x)))
        return last(p, jax.nn.relu(hidden(p, x.reshape(len(x), -1))))

    return apply


def convnet(new: Parameters) -> Callable:
    sizes = (3, 32, 64, 64, 128)
    layers = [
        convolution(new, 3, inputs, outputs)
        for inputs, outputs in zip(sizes, sizes[1:], strict=False)
    ]
    last = dense(new, 128, 10)

    def apply(p, x):
        for i, layer in enumerate(layers):
            if i:
                shape = (1, 2, 2, 1)
                x = lax.reduce_window(x, 0.0, lax.add, shape, shape, "VALID") / 4
            x = jax.nn.relu(layer(p, x))
        return last(p, x.mean((1, 2)))

    return apply


def mlp(new: Parameters) -> Callable:
    layers = [dense(new, 784, 512), dense(new, 512, 512), dense(new, 512, 10)]

    def apply(p, x):
        for layer in layers[:-1]:
            x = jax.nn.relu(layer(p, x))
        return layers[-1](p, x)

    return apply


def embedding(new: Parameters) -> Callable:
    table = new(10_000, 16)
    hidden, last = dense(new, 16, 16), dense(new, 16, 2)

    def apply(p, x):
        return last(p, jax.nn.relu(hidden(p, p[table][x].mean(1))))

    return apply


def lstm(new: Parameters) -> Callable:
    table = new(1_000, 64)
    kernel, recurrent, bias = new(64, 512), new(128, 512), new(512, zero=True)
    last = dense(new, 128, 10)

    def apply(p, x):
        inputs = (p[table][x] @ p[kernel] + p[bias]).swapaxes(0, 1)

        def step(state, now):
            h, c = state
            i, f, g, o = jnp.split(now + h @ p[recurrent], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros((len(x), 128))
        (h, _), _ = lax.scan(step, (zeros, zeros), inputs)
        return last(p, h)

    return apply


def gru(new: Parameters) -> Callable:
    table = new(1_000, 64)
    kernel, bias = new(64, 384), new(384, zero=True)
    recurrent, inner_bias = new(128, 384), new(384, zero=True)
    last = dense(new, 128, 10)

    def apply(p, x):
        inputs = (p[table][x] @ p[kernel] + p[bias]).swapaxes(0, 1)

        def step(h, now):
            inner = jnp.split(h @ p[recurrent] + p[inner_bias], 3, -1)
            outer = jnp.split(now, 3, -1)
            z, r = (jax.nn.sigmoid(outer[i] + inner[i]) for i in range(2))
            return z * h + (1 - z) * jnp.tanh(outer[2] + r * inner[2]), None

        h, _ = lax.scan(step, jnp.zeros((len(x), 128)), inputs)
        return last(p, h)

    return apply


def transformer(new: Parameters, blocks: int = 2) -> Callable:
    table = new(1_000, 128)
    layers = [
        (
            normalization(new, 128),
            attention(new, 128, 4),
            normalization(new, 128),
            dense(new, 128, 512),
            dense(new, 512, 128),
        )
        for _ in range(blocks)
    ]
    final, last = normalization(new, 128), dense(new, 128, 10)

    def apply(p, x):
        x = p[table][x]
        for first, mix, second, up, down in layers:
            x = x + mix(p, first(p, x))
            x = x + down(p, jax.nn.gelu(up(p, second(p, x)), approximate=False))
        return last(p, final(p, x).mean(1))

    return apply


def transformer6(new: Parameters) -> Callable:
    return transformer(new, 6)


# The function that makes the model, its parameters, the shape of an example, the number
# of tokens (None for floats), classes.
MODELS = {
    "mnist_cnn": (mnist_cnn, 26_010, (28, 28, 1), None, 10),
    "convnet": (convnet, 131_466, (32, 32, 3), None, 10),
    "mlp": (mlp, 669_706, (784,), None, 10),
    "embedding": (embedding, 160_306, (256,), 10_000, 2),
    "lstm": (lstm, 164_106, (32,), 1_000, 10),
    "gru": (gru, 139_786, (32,), 1_000, 10),
    "transformer": (transformer, 526_090, (64,), 1_000, 10),
    "transformer6": (transformer6, 1_319_178, (64,), 1_000, 10),
}


def make(name: str) -> tuple[Callable, list[jax.Array]]:
    """Returns ``apply(parameters, x)`` -> logits, and the parameters.

    Raises:
      UnsupportedError: if there is no such model here.
      ValueError: if its number of parameters is wrong.
    """
    if name not in MODELS:
        raise UnsupportedError(f"there is no {name} in JAX here")
    new = Parameters()
    apply = MODELS[name][0](new)
    count = sum(value.size for value in new.values)
    if count != MODELS[name][1]:
        raise ValueError(f"name: {name} has {count} parameters, not {MODELS[name][1]}.")
    return apply, new.values


def batch(name: str, size: int) -> tuple[jax.Array, jax.Array]:
    """Random inputs and labels."""
    _, _, shape, tokens, classes = MODELS[name]
    rng = np.random.default_rng(0)
    shape = (size, *shape)
    x = (
        rng.standard_normal(shape, np.float32)
        if tokens is None
        else rng.integers(tokens, size=shape)
    )
    return jnp.asarray(x), jnp.asarray(rng.integers(classes, size=size))
