"""Tests that an op keeps the rows of its inputs apart, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._arguments import positive


def assert_op_flow(
    function: Callable[..., Any], *inputs: Any, tolerance: float = 1e-5
) -> None:
    """Checks that row i of an op's outputs, and gradients, depends on row i only.

    The row's place, and the number of rows, must not matter either: without an earlier
    example, the later examples have other places.

    The test tries the claim of `tfdpclip.gradients.op_flow` about an op on your data:
    each row of the inputs is replaced in turn, by the row before, by zeros and by a
    hundred times the row, and no further row of the outputs may change, nor any further
    row of the gradient at an input. Then the rows come in the opposite order, and
    without the first row.

    Args:
      function: applies the op to tensors.
      *inputs: arrays with the examples on axis 0, `[B, ...]` with one B of 2 or more;
        rows of floating-point arrays and of integer arrays are replaced alike.
      tolerance: the largest change, relative to the largest entry, that counts as
        rounding.

    Raises:
      AssertionError: names the row that changed, and the row that was replaced; or
        says that rows depend on their places or on their number.
      ValueError: if there are no inputs, or they have no rows in common.

    >>> import numpy as np
    >>> rows = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    >>> assert_op_flow(lambda x: tf.cumsum(x, axis=1), rows)
    >>> assert_op_flow(lambda x: tf.cumsum(x, axis=0), rows)
    Traceback (most recent call last):
    ...
    AssertionError: Replacing row 0 (by the row before) changed row 1 of output 0.
    """
    tolerance = positive("tolerance", tolerance)
    arrays = [np.asarray(value) for value in inputs]
    lengths = {array.shape[0] if array.ndim else 0 for array in arrays}
    if len(lengths) != 1 or min(lengths) < 2:
        raise ValueError(
            "inputs must be arrays with the same number of rows, 2 or more, on axis 0, "
            f"got shapes {[array.shape for array in arrays]}."
        )
    rows = np.arange(min(lengths))
    before = dict(_results(function, arrays, rows))
    for words, changed, order, replaced in _neighbours(arrays):
        for label, after in _results(function, changed, order):
            for place, row in enumerate(order):
                alike = _alike(before[label][row], after[place], tolerance)
                if row != replaced and not alike:
                    raise AssertionError(words.format(row, label))


def _neighbours(
    arrays: list[np.ndarray],
) -> Iterator[tuple[str, list[np.ndarray], np.ndarray, int | None]]:
    """Yields an error, other arrays, their rows' numbers, and the row replaced."""
    rows = np.arange(len(arrays[0]))
    changes = {
        "by the row before": lambda rows, i: rows[i - 1],
        "by zeros": lambda rows, i: np.zeros_like(rows[i]),
        "by a hundred times the row": lambda rows, i: rows[i] * 100,
    }
    for how, change in changes.items():
        for i in rows:
            changed = [array.copy() for array in arrays]
            for array in changed:
                if array.dtype.kind in "iu" and "hundred" in how:
                    continue  # Indices into a table must stay in range.
                array[i] = change(array, i)
            yield (
                f"Replacing row {i} ({how}) changed row {{}} of {{}}.",
                changed,
                rows,
                i,
            )
    places = {"the opposite order": rows[::-1], "the first row left out": rows[1:]}
    for how, order in places.items():
        words = (
            f"With {how}, row {{}} of {{}} changed: the row depends on its place, or "
            "on the number of rows."
        )
        yield words, [array[order] for array in arrays], order, None


def _results(function, arrays, rows) -> list[tuple[str, np.ndarray]]:
    """The outputs, and the gradients of their weighted squares, with their names.

    Args:
      function: applies the op to tensors.
      arrays: the inputs.
      rows: the number of each of their rows, which decides about its weights.
    """
    tensors = [tf.constant(array) for array in arrays]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        outputs = tf.nest.flatten(function(*tensors))
        total = tf.constant(0.0)
        for output in outputs:
            if output.dtype.is_floating:
                entries = math.prod(output.shape[1:])
                weights = np.arange(entries) + np.reshape(rows, [-1, 1]) * entries
                weights = np.cos(weights + 0.3).reshape(output.shape)
                weights = tf.constant(weights, output.dtype)
                squares = tf.reduce_sum(weights * tf.square(output))
                total += tf.cast(squares, tf.float32)
    results = [(f"output {k}", t.numpy()) for k, t in enumerate(outputs)]
    for k, gradient in enumerate(tape.gradient(total, tensors)):
        if gradient is not None:
            gradient = tf.convert_to_tensor(gradient).numpy()
            results.append((f"the gradient at input {k}", gradient))
    return results


def _alike(old: np.ndarray, new: np.ndarray, tolerance: float) -> bool:
    """Whether two rows are equal up to rounding; NaN must stay NaN."""
    if old.dtype.kind not in "fc":
        return np.array_equal(old, new)
    before, after = (
        np.stack([np.real(rows), np.imag(rows)]).astype(np.float64)
        for rows in (old, new)
    )
    size = np.max(np.abs(before), initial=0.0, where=np.isfinite(before))
    return np.allclose(before, after, rtol=0, atol=tolerance * size, equal_nan=True)
