"""Fine-tuning text models privately: networks, training, scores.

A network makes rows of records, builds the model whose chosen weights train, and
continues texts. `Tiny` is the built-in network; `Hub` is any preset of KerasHub.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tfdpclip as dpc
from driver_kit import npz_files
from driver_kit.settings import UsageError
from keras_examples import text_records, tiny_language
from keras_examples.text_records import Record, Rows

# Not the mean: with a mask, Keras 3 would divide by the batch's number of tokens.
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
_ROWS = 64


class Tiny:
    """The built-in decoder over bytes.

    Args:
      shape: its size.
      values: weights from public training, by name.
    """

    name = "the built-in decoder over bytes"

    def __init__(self, shape: tiny_language.Shape, values: dict[str, np.ndarray]):
        self.shape, self.values = shape, values

    def rows(self, records: Sequence[Record], labels: Sequence[str] = ()) -> Rows:
        """A row for each record; with labels, classes to predict."""
        rows = text_records.byte_rows(records, self.shape.length)
        if not labels:
            return rows
        return Rows(rows.x, text_records.classes(records, labels), None)

    def model(self, train: str, rank: int) -> tf.keras.Model:
        """The public model; only the weights chosen by `train` are trainable."""
        model = tiny_language.build(self.shape, train, rank)
        tiny_language.assign(model, self.values)
        return model

    def continued(self, model, prompt: str, seed: int) -> str:
        """A text that goes on from a prompt."""
        return tiny_language.continued(model, prompt, self.shape.length, seed)

    def save(self, model, directory: pathlib.Path) -> list[str]:
        """Writes the weights of LoRA, and all weights with them merged."""
        parts = {"lora": tiny_language.low_rank(model)}
        parts["merged"] = tiny_language.weights(model)
        written = []
        for name, values in parts.items():
            if values:
                np.savez(directory / f"{name}.npz", **values)
                written.append(f"{name}.npz")
        return written


class Hub:
    """A preset of KerasHub: one of its names, or a directory.

    Args:
      preset: the preset.
      length: T, the tokens of a row.
      classes: 0 for a language model; else a classifier.

    Raises:
      UsageError: if KerasHub is not installed, or has no such preset.
    """

    def __init__(self, preset: str, length: int, classes: int = 0):
        if importlib.util.find_spec("keras_hub") is None:
            raise UsageError(
                f"flag --preset={preset}: needs KerasHub, and so Keras 3: pip install "
                "'tfdpclip[hub]'. Without --preset there is a small model of our own."
            )
        import keras_hub

        kind = keras_hub.models.TextClassifier if classes else keras_hub.models.CausalLM
        options = {"num_classes": classes} if classes else {}
        try:
            self.task = kind.from_preset(preset, **options)
        except (ValueError, OSError) as error:
            raise UsageError(f"flag --preset={preset}: {error}") from error
        self.name = f"the preset {preset}"
        self.classes, self._preset = classes, (kind, preset, options)
        self.task.preprocessor.sequence_length = length

    def rows(self, records: Sequence[Record], labels: Sequence[str] = ()) -> Rows:
        """A row for each record: KerasHub's preprocessor pads and cuts, row by row."""
        texts = [record.text for record in records]
        found = self.task.preprocessor(texts)
        if labels:
            x, y, weights = found, text_records.classes(records, labels), None
        else:
            x, y, weights = found
            weights = np.asarray(weights, np.float32)
        x = tf.nest.map_structure(np.asarray, x)
        return Rows(x, np.asarray(y), weights)

    def model(self, train: str, rank: int) -> tf.keras.Model:
        """The preset's model; only the weights chosen by `train` are trainable."""
        kind, preset, options = self._preset
        self.task = kind.from_preset(
            preset, preprocessor=self.task.preprocessor, **options
        )
        backbone = self.task.backbone
        if train in tiny_language.LOW_RANK:
            backbone.enable_lora(rank)
            # KerasHub lets the biases beside train, and leaves them out of the file.
            factors = "lora" if train == "lora" else "lora_kernel_b"
            for variable in backbone.trainable_variables:
                variable.trainable = factors in variable.name
        elif train == "bias":
            for variable in self.task.trainable_variables:
                variable.trainable = variable.name == "bias"
        elif train == "head":
            backbone.trainable = False
        # `fit` of KerasHub's own would map over the batches, which are rows already.
        model = tf.keras.Model(self.task.inputs, self.task.outputs)
        if not model.trainable_variables:
            raise UsageError(
                f"flag --train={train}: nothing of {self.name} would train; take "
                "--train=full."
            )
        return model

    def continued(self, model, prompt: str, seed: int) -> str:
        """A text that goes on from a prompt."""
        del model, seed  # The task has the same weights.
        return self.task.generate(prompt)

    def save(self, model, directory: pathlib.Path) -> list[str]:
        """Writes the weights of LoRA, and a preset with them merged."""
        del model
        written = []
        if any("lora" in v.name for v in self.task.trainable_variables):
            self.task.backbone.save_lora_weights(str(directory / "model.lora.h5"))
            written.append("model.lora.h5")
        self.task.save_to_preset(str(directory / "merged"))
        return [*written, "merged"]


def pretrain(
    shape: tiny_language.Shape, records: Sequence[Record], epochs: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """Weights of the built-in decoder after training on public text."""
    tf.keras.utils.set_random_seed(seed)
    model = tiny_language.build(dataclasses.replace(shape, classes=0))
    rows = text_records.byte_rows(records, shape.length)
    model.compile(
        tf.keras.optimizers.Adam(2e-3),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    x, y, weights = rows.data
    model.fit(x, y, _ROWS, epochs, sample_weight=weights, verbose=0)
    return tiny_language.weights(model)


def pretrained(
    path: pathlib.Path, shape: tiny_language.Shape, public: str, epochs: int
) -> dict[str, np.ndarray]:
    """The weights that `pretrain` learns from public texts, kept in a file."""
    if path.exists():
        return npz_files.read_npz(path, list(np.load(path).files))
    values = pretrain(shape, text_records.read(public), epochs)
    np.savez(path, **values)
    return values


def begun(
    model: tf.keras.Model,
    rows: Rows,
    plan: dpc.keras.PrivacyPlan,
    learning_rate: float,
    clip: dpc.ClipRule | None = None,
    seed: int | None = None,
    **options: Any,
) -> dpc.sampling.Batches:
    """Compiles a model for the plan, and gives the batches for `fit`.

    Args:
      model: the model, with its trainable weights chosen.
      rows: of the private records.
      plan: the budget, and all that follows.
      learning_rate: of Adam.
      clip: the clip rule; None: the default.
      seed: for experiments: not private.
      **options: of the optimizer.
    """
    options |= {} if clip is None else {"clip": clip}
    optimizer = plan.optimizer(dpc.keras.DPAdam, learning_rate, seed=seed, **options)
    model.compile(optimizer, LOSS)
    return plan.batches(rows.data, seed=seed)


def tune(
    model: tf.keras.Model,
    rows: Rows,
    plan: dpc.keras.PrivacyPlan,
    learning_rate: float,
    clip: dpc.ClipRule | None = None,
    seed: int | None = None,
    **options: Any,
) -> None:
    """Trains a model with the plan; for the arguments see `begun`."""
    batches = begun(model, rows, plan, learning_rate, clip, seed, **options)
    callbacks = [*plan.callbacks]
    model.fit(
        batches, epochs=plan.epochs, callbacks=callbacks, shuffle=False, verbose=0
    )


@dataclasses.dataclass(frozen=True)
class Score:
    """The results of a model on test records.

    Attributes:
      losses: of each record, summed over its tokens, in nats.
      tokens: how many it has.
      right: how many of them were the most probable.
    """

    losses: np.ndarray
    tokens: np.ndarray
    right: np.ndarray

    @property
    def loss(self) -> float:
        """Nats per token."""
        return float(self.losses.sum() / self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """How many equally likely tokens would surprise as much."""
        return float(np.exp(self.loss))

    @property
    def accuracy(self) -> float:
        """The share of tokens, or records, that were predicted."""
        return float(self.right.sum() / self.tokens.sum())

    def gain(self, before: Score) -> tuple[float, float]:
        """Nats per token less than before, and half a 95 % interval over records."""
        saved = before.losses - self.losses
        gain = saved.sum() / self.tokens.sum()
        rest = saved - gain * self.tokens
        error = np.sqrt(np.sum(rest**2)) / self.tokens.sum()
        return float(gain), float(1.96 * error)


def score(model: tf.keras.Model, rows: Rows) -> Score:
    """How well a model predicts rows."""

    @tf.function(autograph=False)
    def parts(x, y, weights):
        logits = tf.cast(model(x, training=False), tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        right = tf.cast(tf.argmax(logits, -1, tf.int32) == y, tf.float32)
        sums = [
            tf.reshape(t, [tf.shape(y)[0], -1])
            for t in (losses * weights, weights, right * weights)
        ]
        return [tf.reduce_sum(t, 1) for t in sums]

    weights = (
        np.ones(rows.y.shape, np.float32) if rows.weights is None else rows.weights
    )
    data = tf.data.Dataset.from_tensor_slices((rows.x, np.int32(rows.y), weights))
    found = [parts(*batch) for batch in data.batch(_ROWS)]
    return Score(*(np.concatenate(part) for part in zip(*found, strict=True)))
