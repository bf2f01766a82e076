"""A small decoder over bytes, with LoRA, for any Keras; it needs no KerasHub."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from keras_examples import text_records

L = tf.keras.layers
#: The parts that are updates of low rank.
LOW_RANK = text_records.TRAINED[:2]
_WEIGHTS = ("embeddings", "positions", "kernel", "bias", "gamma", "beta")
_LOW_RANK = ("lora_a", "lora_b")


class Linear(L.Layer):
    """A dense layer; its kernel may be frozen, with an update of low rank beside it.

    Args:
      units: the width of the output.
      train: one of `text_records.TRAINED`, or "nothing".
      rank: the rank of the update, for `LOW_RANK`.
      activation: the activation, as for `Dense`.
    """

    def __init__(self, units, train="full", rank=4, activation=None, **options):
        super().__init__(**options)
        self.units, self.train, self.rank = units, train, rank
        self.activation = tf.keras.activations.get(activation)

    def build(self, shape):
        def weight(name, size, start, trainable):
            return self.add_weight(
                name=name, shape=size, initializer=start, trainable=trainable
            )

        full, width = self.train == "full", shape[-1]
        self.kernel = weight("kernel", [width, self.units], "glorot_uniform", full)
        some = full or self.train == "bias"
        self.bias = weight("bias", [self.units], "zeros", some)
        if self.train in LOW_RANK:
            first = self.train == "lora"
            self.lora_a = weight("lora_a", [width, self.rank], "glorot_uniform", first)
            self.lora_b = weight("lora_b", [self.rank, self.units], "zeros", True)
        self.built = True

    def call(self, x):
        y = x @ self.kernel + self.bias
        if self.train in LOW_RANK:
            y += (x @ self.lora_a) @ self.lora_b
        return self.activation(y)


class Positions(L.Layer):
    """Adds a vector for each place."""

    def build(self, shape):
        size, start = shape[1:], tf.keras.initializers.RandomNormal(stddev=0.02)
        self.positions = self.add_weight(
            name="positions", shape=size, initializer=start
        )
        self.built = True

    def call(self, x):
        return x + self.positions


class Attention(L.Layer):
    """Causal attention of several heads; it has no weights."""

    def __init__(self, heads, **options):
        super().__init__(**options)
        self.heads = heads

    def call(self, inputs):
        time, width = inputs[0].shape[1:]
        size = width // self.heads

        def split(x):
            x = tf.reshape(x, [-1, time, self.heads, size])
            return tf.transpose(x, [0, 2, 1, 3])

        query, key, value = (split(x) for x in inputs)
        scores = tf.matmul(query, key, transpose_b=True) / size**0.5
        before = np.tril(np.ones([time, time], np.float32))
        scores = tf.nn.softmax(scores - 1e9 * (1 - before))
        mixed = tf.transpose(scores @ value, [0, 2, 1, 3])
        return tf.reshape(mixed, [-1, time, width])


@dataclasses.dataclass(frozen=True)
class Shape:
    """The size of a decoder: public.

    Attributes:
      length: T, the tokens of a row.
      layers: number of blocks.
      width: the size of the vectors.
      heads: the number of attention heads; a divisor of the width.
      classes: 0 for a language model; else a classifier of whole rows.
    """

    length: int = 64
    layers: int = 2
    width: int = 64
    heads: int = 4
    classes: int = 0


def build(shape: Shape, train: str = "full", rank: int = 4) -> tf.keras.Model:
    """A decoder with the trainable weights that `train` chooses.

    Args:
      shape: the size of the decoder.
      train: one of `text_records.TRAINED`.
      rank: the rank of the updates of LoRA.
    """
    inner = train if train != "head" else "nothing"
    # A new classifier's head is always trained.
    last = "full" if train in ("full", "head") or shape.classes else inner
    frozen = {"trainable": train == "full"}

    def linear(x, units, name, activation=None):
        return Linear(units, inner, rank, activation, name=name)(x)

    tokens = tf.keras.Input([shape.length], dtype="int32")
    x = L.Embedding(text_records.BYTES, shape.width, name="tokens", **frozen)(tokens)
    x = Positions(name="places", **frozen)(x)
    for k in range(shape.layers):
        y = L.LayerNormalization(name=f"norm_a{k}", **frozen)(x)
        parts = [linear(y, shape.width, f"{n}{k}") for n in ("query", "key", "value")]
        y = Attention(shape.heads, name=f"attention{k}")(parts)
        x = L.Add()([x, linear(y, shape.width, f"mixed{k}")])
        y = L.LayerNormalization(name=f"norm_b{k}", **frozen)(x)
        y = linear(y, 2 * shape.width, f"wide{k}", "gelu")
        x = L.Add()([x, linear(y, shape.width, f"narrow{k}")])
    x = L.LayerNormalization(name="norm", **frozen)(x)
    if shape.classes:
        x = L.GlobalAveragePooling1D()(x)
    name = "classifier" if shape.classes else "head"
    units = shape.classes or text_records.BYTES
    return tf.keras.Model(tokens, Linear(units, last, rank, name=name)(x))


def weights(model: tf.keras.Model, names=_WEIGHTS) -> dict[str, np.ndarray]:
    """The weights by layer and name; LoRA's weights merged into the kernels.

    Args:
      model: a model of `build`.
      names: the names of the weights; `low_rank` has LoRA's own weights.
    """
    found = {}
    for layer in model.layers:
        for name in names:
            variable = getattr(layer, name, None)
            if variable is None:
                continue
            value = tf.convert_to_tensor(variable)
            if name == "kernel" and getattr(layer, "train", "") in LOW_RANK:
                value += tf.matmul(layer.lora_a, layer.lora_b)
            found[f"{layer.name}/{name}"] = value.numpy()
    return found


def low_rank(model: tf.keras.Model) -> dict[str, np.ndarray]:
    """The weights of LoRA alone, by layer and name."""
    return weights(model, _LOW_RANK)


def assign(model: tf.keras.Model, values: dict[str, np.ndarray]) -> None:
    """Assigns weights to a model; a classifier's head stays as it is.

    Raises:
      ValueError: if the shape of a value differs from the shape of its weight.
    """
    for layer in model.layers:
        for name in _WEIGHTS:
            value = values.get(f"{layer.name}/{name}")
            if value is not None:
                getattr(layer, name).assign(value)


def continued(
    model: tf.keras.Model, prompt: str, tokens: int, seed: int, temperature: float = 0.8
) -> str:
    """A text that goes on from `prompt`, drawn from a language model."""
    rng, length = np.random.default_rng(seed), model.inputs[0].shape[1]
    row = [text_records.START, *text_records.encode(prompt)][:length]
    while len(row) < min(length, tokens):
        padded = np.full([1, length], text_records.PAD, np.int32)
        padded[0, : len(row)] = row
        logits = np.float64(model(padded)[0, len(row) - 1]) / temperature
        logits[[text_records.PAD, text_records.START]] = -np.inf
        row.append(int(np.argmax(logits + rng.gumbel(size=len(logits)))))
        if row[-1] == text_records.END:
            break
    return text_records.decode(row)
