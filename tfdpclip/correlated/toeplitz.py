"""Lower-triangular Toeplitz matrices by their first columns.

A matrix of n steps is the sequence c_0, c_1, ..., c_(n-1) of its first column, possibly
without trailing zeros. Products are convolutions; the inverse is the reciprocal of the
generating function.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import linalg, signal

from tfdpclip import _arguments

#: Matrices are written out, and bounded by their entries, up to this many steps.
MOST_DENSE_STEPS = 4096


def column(name: str, value: Any) -> np.ndarray:
    """Checks a first column: finite numbers, the first above 0; else ValueError."""
    found = _arguments.floats(name, value)
    if found.ndim != 1 or not found.size:
        raise ValueError(f"{name} must be a list of numbers, such as [1.0, 0.5].")
    if not (np.all(np.isfinite(found)) and found[0] > 0):
        raise ValueError(
            f"{name} must be finite, and the first above 0 so that there is an "
            f"inverse; got {_arguments.shown(value)}."
        )
    return found


def padded(coefficients: np.ndarray, steps: int) -> np.ndarray:
    """The first `steps` entries of a column, filled up with zeros.

    >>> padded(np.array([1.0, 0.5]), 4)
    array([1. , 0.5, 0. , 0. ])
    """
    result = np.zeros(steps)
    kept = coefficients[:steps]
    result[: len(kept)] = kept
    return result


def inverse(coefficients: np.ndarray, steps: int) -> np.ndarray:
    """The first column of the inverse.

    By the recursion of the noise stream: `steps` times `len(coefficients)`
    operations.

    >>> inverse(np.array([1.0, 0.5]), 4)
    array([ 1.   , -0.5  ,  0.25 , -0.125])
    """
    impulse = padded(np.ones(1), steps)
    return signal.lfilter([1.0], coefficients[:steps], impulse)


def dense(coefficients: np.ndarray, steps: int) -> np.ndarray:
    """The matrix itself.

    >>> dense(np.array([2.0, 1.0]), 3)
    array([[2., 0., 0.],
           [1., 2., 0.],
           [0., 1., 2.]])
    """
    check_dense(steps)
    return linalg.toeplitz(padded(coefficients, steps), np.zeros(steps))


def check_dense(steps: int) -> None:
    """Refuses to write out matrices that would fill the memory."""
    if steps > MOST_DENSE_STEPS:
        raise ValueError(
            f"steps must be at most {MOST_DENSE_STEPS} if the matrix has to be written "
            f"out, got {steps}. A Toeplitz matrix with non-negative, non-increasing "
            "coefficients and a workload without learning_rates allow more steps."
        )


def never_rises(coefficients: np.ndarray) -> bool:
    """Whether a column is non-negative and non-increasing.

    >>> never_rises(np.array([1.0, 0.5, 0.5])), never_rises(np.array([1.0, 2.0]))
    (True, False)
    """
    return bool(np.all(coefficients >= 0) and np.all(np.diff(coefficients) <= 0))


def upward(value: float, operations: int) -> float:
    """A sum of `operations` non-negative products, raised above its own rounding.

    Each operation on non-negative numbers has a relative error of 2^-53 at most, and
    all operations (1 + 2^-53)^operations; `value` is raised by four times that.

    >>> 1.0 < upward(1.0, 1000) < 1.000000001
    True
    """
    return float(value) * math.exp(4 * (operations + 8) * 2.0**-53)
