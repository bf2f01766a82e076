"""Tests that one record moves a step by no more than its noise hides."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _progress, accounting
from tfdpclip._arguments import items, whole
from tfdpclip.testing.probe import (
    DialledNoise,
    Probe,
    Release,
    as_batches,
    check_model,
    refuse_correlated,
    unpack,
)

# Rounding of a float32 step, and of the linearised clip update.
_TOLERANCE = 0.02
# If no record comes this near to the limit, the records may be too short to be clipped.
_NEAR_THE_LIMIT, _HEAVY = 0.9, 1000
# The levels of the noise. The clip rule's update is not linear in its noise, so it
# is measured on both sides, close to 0.
_NEAR = 0.01
_LEVELS = (0.0, 1.0, _NEAR, -_NEAR)


@dataclasses.dataclass(frozen=True)
class SensitivityReport:
    """The worst neighbour.

    Attributes:
      distance: how far it moved the release, in standard deviations of the noise.
      limit: the largest distance that the claimed noise multiplier allows.
      record: its index in the batch, and its modification.
      tried: the number of neighbours.
    """

    distance: float
    limit: float
    record: str
    tried: int

    @property
    def ratio(self) -> float:
        """The distance over its limit: above 1, the claim is wrong."""
        return self.distance / self.limit

    def after(self, distance: float, record: str) -> SensitivityReport:
        """The worst neighbour, once a further neighbour was tried."""
        tried = self.tried + 1
        # In this form a NaN is the worst.
        if not distance <= self.distance:
            return SensitivityReport(distance, self.limit, record, tried)
        return dataclasses.replace(self, tried=tried)

    def __str__(self) -> str:
        return (
            f"{self.record} moves the release by {self.distance:.4g} standard "
            f"deviations of its noise; noise_multiplier allows {self.limit:.4g} "
            f"({self.tried} neighbours tried)"
        )


def assert_sensitivity(
    model: tf.keras.Model,
    batch: Any,
    *,
    records: Iterable[int] | None = None,
) -> SensitivityReport:
    """Checks a whole training step on neighbouring batches, with the noise frozen.

    The model's own training step runs on a batch, and on the same batch without one
    record: with weight 0, and also replaced by a different record of weight 0. The test
    compares the gradients for the optimizer's update and the clip rule's next state,
    in units of the noise in them, which is measured by raising the level of the frozen
    noise. A step is one Gaussian mechanism of noise multiplier z if, and only if, no
    record moves these by more than 1 / z.

    The test finds: sums that are not clipped, or clipped to a norm that differs from
    the scale of the noise; noise that is missing, too small, or added after the update;
    division by the actual number of records; padding that counts; counts without noise;
    a NaN in the release; a number of steps that depends on a record; examples that
    scale other examples' gradients, if clipping does not hide it.

    The test cannot find: noise that is not random (`assert_noise`), and records that
    are drawn differently than accounted for.

    Args:
      model: a built model compiled with a private optimizer; not changed.
      batch: (x, y) or (x, y, sample_weight), arrays, of one logical step.
      records: the indices of records to remove; by default up to 8, evenly spread.
        Each is also tried scaled by 1000, and as NaN (floating-point inputs only); and,
        if no record comes near to the limit, with 1000 times its weight, so that a
        forgotten clip shows on short records, too.

    Returns:
      The worst neighbour.

    Raises:
      AssertionError: if a record moves the release by more than 1 / z (2 / z if
        batches or groups are clipped), or changes the noise.
      ValueError: if an argument is out of range or the step is not private.

    >>> import tfdpclip as dpc
    >>> model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
    >>> model.compile(dpc.keras.DPSGD(0.1, clip=1.0, noise_multiplier=2.0,
    ...                               expected_batch_size=8), "mse")
    >>> x, y = np.ones((8, 4), np.float32), np.arange(8.0, dtype=np.float32)
    >>> round(assert_sensitivity(model, (x, y)).limit, 6)
    0.5
    """
    optimizer = check_model(model)
    refuse_correlated(optimizer)
    z = float(optimizer.noise_multiplier)
    if not z > 0:
        raise ValueError(
            "noise_multiplier is 0, so there is no guarantee to test. Use a copy of "
            "the model with the noise of the real run."
        )
    factor = accounting.sensitivity_factor(unit=optimizer.unit)
    pieces = optimizer.accumulation_steps
    base_x, base_y, base_weight = unpack(batch)
    rows = len(tf.nest.flatten(base_x)[0])
    each = optimizer.rows_per_record
    if rows % each:
        raise ValueError(
            f"batch has {rows} rows, and a record has rows_per_record={each}: give "
            "whole records."
        )
    size = rows // each
    if records is None:
        records = np.unique(np.linspace(0, size - 1, min(8, size)).astype(int))
    chosen: list[Any] = [whole(index) for index in items("records", records)]
    if any(index is None or not 0 <= index < size for index in chosen):
        raise ValueError(f"records must be indices from 0 to {size - 1}.")
    noise = DialledNoise()
    probe = Probe(model, noise)

    def release(data, level) -> Release:
        noise.level.assign(level)
        return probe(as_batches(data, pieces))

    worst = SensitivityReport(0.0, factor / z, "no record", 0)
    if base_weight is None:
        base_weight = np.ones(rows, np.float32)

    def tried(variants) -> None:
        nonlocal worst
        for index in _progress.bar(chosen, title="sensitivity", unit="record"):
            own = slice(int(index) * each, (int(index) + 1) * each)
            for change, x, times in variants(base_x, own):
                without = np.array(base_weight, np.float32)
                without[own] = 0.0
                left = np.array(base_weight, np.float32)
                if not left[own].any():
                    left[own] = 1.0
                left[own] *= times
                name = f"record {index}{change}"
                other = _gone(x, own), _gone(base_y, own), without
                with_it, without_it, gone = (
                    [release(batch, level) for level in _LEVELS]
                    for batch in ((x, base_y, left), (x, base_y, without), other)
                )
                distance = max(
                    _distance(with_it, without_it, name), _distance(with_it, gone, name)
                )
                worst = worst.after(distance, name)

    tried(_changed)
    if worst.distance < _NEAR_THE_LIMIT * worst.limit:
        tried(_heavy)
    if not worst.distance <= worst.limit * (1 + _TOLERANCE):
        raise AssertionError(f"{worst}. The step does not have the privacy it claims.")
    return worst


def _gone(nest: Any, own: slice) -> Any:
    """Arrays without a record: the next record, with weight 0, is in its place."""

    def other(array):
        array = np.array(array)
        array[own] = np.roll(array, own.start - own.stop, axis=0)[own]
        return array

    return tf.nest.map_structure(other, nest)


def _changed(x: Any, own: slice):
    """A record as it is and, if it is of floating-point numbers, out of range.

    Yields words, the inputs, and the factor of its weight.
    """
    yield "", x, 1
    if not all(np.issubdtype(np.asarray(a).dtype, np.floating) for a in _flat(x)):
        return
    for words, change in (
        (" (times 1000)", lambda row: row * 1000),
        (" (not a number)", lambda row: np.full_like(row, np.nan)),
    ):
        changed = tf.nest.map_structure(np.array, x)
        for array in _flat(changed):
            array[own] = change(array[own])
        yield words, changed, 1


def _heavy(x: Any, own: slice):
    """A record of any type, with a gradient that is long for every model."""
    del own
    yield f" (weight times {_HEAVY})", x, _HEAVY


def _flat(x: Any) -> list:
    return tf.nest.flatten(x)


def _distance(first: list[Release], second: list[Release], name: str) -> float:
    """The distance of two steps, each at all `_LEVELS`, in stddevs of the noise."""
    steps = {release.iterations for release in (*first, *second)}
    if len(steps) != 1:
        raise AssertionError(f"{name} changes the number of steps taken: {steps}.")
    gradients = [[release.flat() for release in runs] for runs in (first, second)]
    states = [[release.clip_state for release in runs] for runs in (first, second)]
    stddevs = [np.abs(noisy - plain) for plain, noisy, *_ in gradients]
    size = np.maximum(np.abs(gradients[0][0]), stddevs[0])
    settled = np.abs(stddevs[0] - stddevs[1]) <= 1e-3 * stddevs[0] + 1e-5 * size
    if np.isfinite(size).all() and not settled.all():
        raise AssertionError(
            f"{name} changes the noise: its stddev is {stddevs[0][~settled][0]:.4g} "
            f"with the record and {stddevs[1][~settled][0]:.4g} without."
        )
    moves = [
        np.maximum(np.abs(above - plain), np.abs(below - plain)) / _NEAR
        for plain, _, above, below in states
    ]
    return math.hypot(
        _in_stddevs("gradient", gradients, np.minimum(*stddevs), name),
        _in_stddevs("clip state", states, np.minimum(*moves), name),
    )


def _in_stddevs(kind: str, runs, stddev: np.ndarray, name: str) -> float:
    plain, other = runs[0][0], runs[1][0]
    if not (np.isfinite(plain).all() and np.isfinite(other).all()):
        raise AssertionError(f"{name} makes the {kind} not finite.")
    moved = np.abs(plain - other)
    moved[moved <= 1e-6 * np.abs(plain)] = 0.0
    bare = (stddev == 0) & (moved > 0)
    if bare.any():
        raise AssertionError(
            f"{name} changes the {kind} where no noise is added at all (by "
            f"{moved[bare].max():.4g})."
        )
    hidden = stddev > 0
    return float(np.linalg.norm(moved[hidden] / stddev[hidden]))
