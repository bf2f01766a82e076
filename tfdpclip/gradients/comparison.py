"""What a comparison of the engine with ordinary backward passes has found."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdpclip._constants import vector


@dataclasses.dataclass
class Comparison:
    """The engine beside ordinary backward passes; the worst over all weightings.

    Attributes:
      sums: `[V]`, how far each variable's weighted sum is off, relative to the root of
        the summed squares of the weighted norms.
      norms: `[V]`, how far the norm of a single example's gradient is above the
        engine's, relative to the engine's.
      groups: `[1]` or `[L]`, the same for the norms that decide about the clip.
      excess: a scalar, how far the engine's norm is above the gradient's, relative to
        the gradient's.
      good: `[P]`, whether the gradient at each probe separates by example.
      telling: `[P]`, whether it could have shown otherwise.
      compared: whether anything finite was compared.
    """

    sums: tf.Tensor
    norms: tf.Tensor
    groups: tf.Tensor
    excess: tf.Tensor
    good: tf.Tensor
    telling: tf.Tensor
    compared: tf.Tensor


def fields(found: Any) -> list[tf.Tensor]:
    """The tensors of a `Comparison`, or another dataclass, in the order it takes."""
    return [getattr(found, f.name) for f in dataclasses.fields(found)]


def nothing_compared(variables: int, groups: int, probes: int) -> Comparison:
    """What a comparison of so many things begins with."""
    return Comparison(
        tf.zeros([variables]),
        tf.zeros([variables]),
        tf.zeros([groups]),
        tf.zeros([]),
        tf.fill([probes], True),
        tf.fill([probes], False),
        tf.constant(False),
    )


def worse(before: Comparison, new: Comparison, several: tf.Tensor) -> list[tf.Tensor]:
    """The worst of two comparisons; what is telling is learnt from several examples."""
    return [
        tf.maximum(before.sums, new.sums),
        tf.maximum(before.norms, new.norms),
        tf.maximum(before.groups, new.groups),
        tf.maximum(before.excess, new.excess),
        before.good & new.good,
        before.telling | (new.telling & several),
        before.compared | new.compared,
    ]


def flat(a: tf.Tensor, b: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Two gradients as vectors in float32; zeros for one that is None."""
    a = tf.cast(tf.reshape(a, vector(-1)), tf.float32)
    if b is None:
        return a, tf.zeros_like(a)
    return a, tf.cast(tf.reshape(tf.convert_to_tensor(b), vector(-1)), tf.float32)


# Traced once for all variables of all models.
@tf.function(
    input_signature=[
        tf.TensorSpec([None], tf.float32),
        tf.TensorSpec([None], tf.float32),
        tf.TensorSpec([], tf.float32),
    ],
    autograph=False,
)
def beside(a: tf.Tensor, b: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """The norms of a - b and of b, over a scale, against overflow, `[2]`."""
    return tf.sqrt(
        tf.stack(
            [
                tf.reduce_sum(tf.square((a - b) / scale)),
                tf.reduce_sum(tf.square(b / scale)),
            ]
        )
    )
