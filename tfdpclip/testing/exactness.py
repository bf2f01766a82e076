"""Tests that gradients equal ordinary backward passes, and are of one example each."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import tensorflow as tf

from tfdpclip._arguments import positive
from tfdpclip._tf_private import map_elements
from tfdpclip.gradients.comparison import Comparison
from tfdpclip.gradients.errors import ExampleIsolationError
from tfdpclip.keras import check_isolation
from tfdpclip.keras.watching.followed_step import FollowedStep
from tfdpclip.kernel import certificate
from tfdpclip.testing.probe import MARKED_ROWS, as_batches, check_model, restored


@dataclasses.dataclass(frozen=True)
class ExactnessReport:
    """The engine compared with ordinary backward passes: the worst of all examples.

    Attributes:
      sums: the error of each variable's weighted sum, by name, relative to the
        examples' norms.
      norms: how far an example's norm is below its gradient's norm, by name.
      decisive: the same for the norms that decide about the clip.
      excess: how far a norm is above the gradient's norm. This is safe: the example is
        clipped more than necessary.
      examples: how many examples were compared.
    """

    sums: dict[str, float]
    norms: dict[str, float]
    decisive: float
    excess: float
    examples: int

    @property
    def worst(self) -> float:
        """The largest error."""
        return max(*self.sums.values(), *self.norms.values(), self.decisive)

    def __str__(self) -> str:
        name = max(self.sums, key=lambda n: max(self.sums[n], self.norms[n]))
        return (
            f"{self.examples} examples: sums are off by {self.sums[name]:.2g} and "
            f"norms too small by {self.norms[name]:.2g} at most ({name}), and too "
            f"large by {self.excess:.2g}"
        )


def assert_exact(
    model: tf.keras.Model, batch: Any, *, tolerance: float = 1e-3
) -> ExactnessReport:
    """Checks the gradients of every example against ordinary backward passes.

    The model's own training step runs on the batch, up to the clipping of gradients.
    For every example alone, and for all of them under random weights, the engine's sum
    must equal one ordinary backward pass, variable by variable, and no norm may be
    smaller than the norm of its gradient. The first step of training does the same
    for one example; this function does it on demand.

    Args:
      model: a built model compiled with a private optimizer; not changed.
      batch: (x, y) or (x, y, sample_weight), arrays.
      tolerance: the largest error, relative to the norms, that counts as rounding.

    Returns:
      The errors.

    Raises:
      AssertionError: if a sum or norm has a larger error.
      ValueError: if the step does not clip examples in a graph.

    >>> import numpy as np
    >>> import tfdpclip as dpc
    >>> model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
    >>> model.compile(dpc.keras.DPSGD(0.1, clip=1.0, noise_multiplier=2.0,
    ...                               expected_batch_size=8), "mse")
    >>> x, y = np.ones((8, 4), np.float32), np.arange(8.0, dtype=np.float32)
    >>> assert_exact(model, (x, y)).worst < 1e-5
    True
    """
    optimizer = check_model(model)
    tolerance = positive("tolerance", tolerance)
    if not optimizer.clips_records:
        raise ValueError(f"unit is {optimizer.unit!r}: nothing is done per example.")
    if not model.run_eagerly:
        found = _compared(model, optimizer, batch)
    else:
        raise ValueError(
            "model runs eagerly (run_eagerly=True), where gradients are made example "
            "by example already. Compile it without."
        )
    names = [v.name for v in found.variables]
    sums, norms = found.sums.numpy(), found.short.numpy()
    # A norm is at most so much of the gradient's norm too large.
    least = min(0.0, float(found.least))
    report = ExactnessReport(
        dict(zip(names, sums.tolist(), strict=True)),
        dict(zip(names, norms[: len(names)].tolist(), strict=True)),
        float(norms[len(names) :].max()),
        -least / max(1.0 + least, 1e-30),
        found.examples,
    )
    if not bool(found.compared):
        raise AssertionError(
            "The gradients could not be compared: a gradient is not finite, or all "
            "gradients are 0. Give a batch of other examples."
        )
    if not report.worst <= tolerance:
        raise AssertionError(f"Not exact: {report}.")
    return report


def assert_isolated(
    model: tf.keras.Model, x: Any, y: Any = None, **options: Any
) -> None:
    """Checks that an example's loss and gradient do not depend on other examples.

    Some examples are replaced in turn, and the losses and gradients of the remaining
    examples are compared (`tfdpclip.keras.check_isolation`).

    Args:
      model: a compiled Keras model.
      x: a batch of inputs.
      y: the targets, as for `fit`.
      **options: see `tfdpclip.keras.check_isolation`.

    Raises:
      AssertionError: if the loss or the gradient of an example changes when a second
        example is replaced.
    """
    try:
        check_isolation(model, x, y, **options)
    except ExampleIsolationError as error:
        raise AssertionError(str(error)) from error


@dataclasses.dataclass
class _Found:
    """The worst errors over the examples, as of `certificate`.

    `least` is the least error of the norms that decide about the clip.
    """

    sums: tf.Tensor
    short: tf.Tensor
    least: tf.Tensor
    compared: tf.Tensor
    variables: list[tf.Variable]
    examples: int


def _every_error(check: Comparison, records: Any) -> list[tf.Tensor]:
    """`sums`, `short`, `least` and `compared` of `_Found`."""
    count, width = records.parts.batch_size, len(records.variables)
    many, alone = certificate.draw_seeds(count, None, check.tolerance)
    total = check.gradient(many) + check.gradient(alone)
    sums, whole = check.sums(many + alone, total)

    def of_one(alone):
        gradient = check.gradient(alone)
        own, finite = check.sums(alone, gradient)
        norms, shows = check.norms(alone, gradient)
        return [own, norms, tf.reduce_min(norms[width:]), finite, finite & shows]

    specs = [tf.TensorSpec([n], tf.float32) for n in (width, width + check.groups)]
    specs += [tf.TensorSpec([], t) for t in (tf.float32, tf.bool, tf.bool)]
    own, short, least, finite, shows = map_elements(of_one, tf.eye(count), specs)
    # A gradient of 0 shows nothing; a gradient that is not finite hides a difference.
    compared = whole & tf.reduce_all(finite) & tf.reduce_any(shows)
    sums = tf.maximum(sums, tf.reduce_max(own, axis=0))
    return [sums, tf.reduce_max(short, axis=0), tf.reduce_min(least), compared]


def _compared(model, optimizer, batch) -> _Found:
    """Runs the training step with `minimize` replaced by the comparison."""
    seen: list = []

    def minimize(loss, var_list, tape=None):
        records = optimizer._records(loss, var_list, tape)
        check = Comparison(records, optimizer.clip.assignment)
        seen.append((_every_error(check, records), records.variables))

    def step(data):
        seen.clear()
        followed(data)
        if len(seen) != 1:
            raise ValueError(
                "model.train_step must call optimizer.minimize once, but called it "
                f"{len(seen)} times."
            )
        return seen[0][0]

    (data,) = as_batches(batch, 1)
    examples = len(data[2])
    followed = FollowedStep(model)
    with (
        mock.patch.object(optimizer, "minimize", minimize),
        mock.patch.object(optimizer, "_check_gradients", "always"),
        restored(model, optimizer),
        followed.in_place(MARKED_ROWS),
    ):
        try:
            found = tf.function(step, autograph=False)(data)
        except (tf.errors.InvalidArgumentError, ExampleIsolationError) as error:
            raise AssertionError(getattr(error, "message", "") or str(error)) from error
    sums, short, least, compared = found
    count = examples // optimizer.rows_per_record
    return _Found(sums, short, least, compared, seen[0][1], count)
