"""The results of private training of a model: norms, two steps of a plan, warnings."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import tensorflow as tf

import tfdpclip as dpc
from tests.zoo.entries import RECORDS
from tfdpclip._variables import all_unwrapped

#: Records whose norms are compared with separate backward passes.
COMPARED = 4
#: The errors that refuse a model; a graph's errors have their names in the text.
REFUSALS = ("ExampleIsolationError", "GradientMismatchError", "LossStructureError")
SLOW = (dpc.gradients.JacobianFallbackWarning, dpc.gradients.OneByOneWarning)


@dataclasses.dataclass(frozen=True)
class Found:
    """The results of a model.

    Attributes:
      trained: how many parameters train.
      error: the largest relative error of a norm.
      slow: the warnings of a Jacobian, or of gradients made one example at a time.
      moved: whether two steps of `fit` moved the weights, all to finite values.
      epsilon: the epsilon of the plan's statement.
      refused: the error of the step, where it was refused.
    """

    trained: int
    error: float
    slow: tuple[str, ...]
    moved: bool
    epsilon: float
    refused: str = ""

    @property
    def outcome(self) -> str:
        """In the words of an entry."""
        if self.refused:
            return "refused"
        return "works slowly" if self.slow else "works"


def loss_function(**options):
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def norms_error(model, x, y) -> float:
    """The largest relative error of the norms, against each record by itself.

    Dropout is off, because a record alone would have a different mask.
    """
    drops = any(
        isinstance(layer, tf.keras.layers.Dropout) and layer.rate > 0
        for layer in model._flatten_layers()
    )
    x, y = tf.nest.map_structure(lambda t: tf.constant(t[:COMPARED]), (x, y))
    loss = loss_function(reduction="none")
    variables = all_unwrapped(model.trainable_variables)

    def losses(x, y):
        found = loss(y, tf.cast(model(x, training=not drops), tf.float32))
        return tf.reduce_mean(tf.reshape(found, [tf.shape(found)[0], -1]), 1)

    # Batches of any size, as `fit` traces them.
    norms = tf.function(
        lambda x, y: dpc.gradients.per_example_norms(losses(x, y), variables),
        tf.nest.map_structure(
            lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), (x, y)
        ),
        autograph=False,
    )(x, y).numpy()
    for i in range(COMPARED):
        one = tf.nest.map_structure(lambda t, i=i: t[i : i + 1], (x, y))
        with tf.GradientTape() as tape:
            value = losses(*one)[0]
        parts = tape.gradient(value, variables)
        squares = [
            np.sum(np.square(np.float64(tf.convert_to_tensor(p))))
            for p in parts
            if p is not None
        ]
        norms[i] = abs(norms[i] / np.sqrt(np.sum(squares)) - 1)
    return float(norms.max())


def plan_for():
    return dpc.keras.PrivacyPlan(
        8.0, 1e-3, examples=RECORDS, batch_size=RECORDS // 2, epochs=1
    )


def two_steps(model, x, y, **options):
    """Two steps as users take them; every step checks itself."""
    plan = plan_for()
    loss = loss_function()
    loss = loss if y.ndim == 1 else dpc.keras.PerExampleLoss(loss)
    model.compile(plan.optimizer(dpc.keras.DPAdam, 1e-2, **options), loss)
    model.fit(plan.batches((x, y)), epochs=1, verbose=0, callbacks=plan.callbacks)
    return plan


def examine(entry, lora: int | None = None) -> Found:
    """Builds the model and tries it.

    Args:
      entry: the model and its data.
      lora: the rank of LoRA; None trains all weights.
    """
    tf.keras.utils.set_random_seed(1)
    model = entry.build()
    if lora:
        model.backbone.enable_lora(lora, entry.targets)
        if not any("lora" in v.name for v in model.trainable_variables):
            raise ValueError(
                "enable_lora found no layer: entry.targets must name some."
            )
    x, y = entry.data()
    trained = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    before, error = model.get_weights(), 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            error = norms_error(model, x, y)
            plan = two_steps(model, x, y)
        except (ValueError, tf.errors.InvalidArgumentError) as refusal:
            text = f"{type(refusal).__name__}: {refusal}"
            if not any(kind in text for kind in REFUSALS):
                raise
            return Found(trained, error, (), False, 0.0, text)
    slow = tuple(str(w.message) for w in caught if issubclass(w.category, SLOW))
    after = model.get_weights()
    moved = all(np.isfinite(np.float32(w)).all() for w in after)
    moved &= any((a != b).any() for a, b in zip(before, after, strict=True))
    return Found(trained, error, slow, moved, plan.statement().epsilon)
