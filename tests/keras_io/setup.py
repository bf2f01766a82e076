"""A model of an example's author, with data: ready for compile and fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.proof_coverage import entry as entries
from tests.proof_coverage import examples as models

K, L = tf.keras, tf.keras.layers
#: How many records the data have, and how many a step draws: five steps an epoch.
RECORDS, BATCH = 40, 8
_WORDS = ["red", "blue", "round", "long", "a good film", "a bad film"]


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model before compile, and its data.

    Attributes:
      model: the model.
      data: the argument of `plan.batches`.
      compile: compiles the model with an optimizer.
      options: further arguments of `fit`.
      search: calls its argument, a private `fit`, with models of its own; None: the
        model is trained.
    """

    model: K.Model | None
    data: Any
    compile: Callable[[K.Model, Any], None]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    search: Callable[[Callable], None] | None = None


def with_loss(loss: Any) -> Callable[[K.Model, Any], None]:
    """Compiles with a loss, as most examples do."""
    return lambda model, optimizer: model.compile(optimizer, loss)


def plain(model: K.Model, optimizer: Any) -> None:
    """Compiles a model whose `train_step` computes the loss."""
    model.compile(optimizer)


def losses() -> dict[Callable, K.losses.Loss]:
    """The losses for `compile`, by the losses of the table of proofs."""
    return {
        entries.classes: K.losses.SparseCategoricalCrossentropy(from_logits=True),
        entries.squares: K.losses.MeanSquaredError(),
        models.binary: K.losses.BinaryCrossentropy(from_logits=True),
    }


def values(of: Any, largest: int = 7, smallest: int = 0, seed: int = 0) -> Any:
    """Values of records, of the shapes and types of an entry."""
    rng = np.random.default_rng(seed)

    def drawn(one: entries.Of) -> np.ndarray:
        shape = [RECORDS, *(8 if size is None else size for size in one.shape)]
        if one.dtype == "string":
            return rng.choice(_WORDS, shape).astype(object)
        if one.dtype == "int32":
            return rng.integers(smallest, largest, shape, dtype=np.int32)
        return rng.uniform(0, 1, shape).astype(np.float32)

    found = tf.nest.map_structure(drawn, of)
    return tuple(found) if isinstance(found, list) else found


def of_entry(
    entry: entries.Entry,
    loss: Any = None,
    largest: int = 7,
    classes: int = 3,
    smallest: int = 0,
    change: Callable[[K.Model], K.Model] = lambda model: model,
    labels: Callable[[Any], Any] = lambda labels: labels,
    **options: Any,
) -> Callable[[], Setup]:
    """An entry of the table of proofs as a model that is compiled with a loss.

    Args:
      entry: the entry.
      loss: a function that makes the loss for `compile`; None: the entry's own loss.
      largest: inputs that are numbers of tokens are less.
      classes: labels that are classes are less.
      smallest: labels that are classes are no less.
      change: changes the model before it is compiled.
      labels: changes the labels.
      options: further arguments of `fit`.
    """

    def build() -> Setup:
        model = change(entry.build())
        chosen = loss() if loss else losses().get(entry.loss, entry.loss)
        x = values(entry.inputs, largest)
        y = labels(values(entry.labels, classes, smallest, seed=1))
        return Setup(model, (x, y), with_loss(chosen), options)

    return build


def softmax(model: K.Model) -> K.Model:
    """The model with probabilities of classes, as many examples end."""
    return _with_head(model, L.Activation("softmax"))


def sigmoid(model: K.Model) -> K.Model:
    """The model with one probability."""
    return _with_head(model, L.Dense(1, "sigmoid"))


def _with_head(model: K.Model, head: K.layers.Layer) -> K.Model:
    single = isinstance(model, K.Sequential)
    inputs = model.inputs[0] if single else model.input
    return K.Model(inputs, head(model.outputs[0]))


def one_hot(count: int, dtype: str = "float32") -> Callable:
    """Encodes labels of `count` classes, as `to_categorical` does."""
    return lambda labels: np.eye(count, dtype=dtype)[labels]


def with_batchnorm(model: K.Model) -> K.Model:
    """The model with batch normalisation where the table of proofs has groups."""

    def copied(layer):
        if isinstance(layer, K.layers.GroupNormalization):
            return K.layers.BatchNormalization()
        return type(layer).from_config(layer.get_config())

    return K.models.clone_model(model, clone_function=copied)
