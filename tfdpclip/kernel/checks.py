"""Checks of numbers: each states what is allowed, so that NaN is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

# Kinds of dtypes that are not real numbers, although `float` accepts some of them.
NOT_REAL = "bcOSUMm"
_LONGEST = 200


def real(value: Any) -> float | None:
    """`value` as a float if it is one real number (NaN and infinity included).

    None for anything else: booleans, text, complex numbers, arrays with axes (even of
    length 1), and integers beyond the range of a float.

    >>> real(2), real(np.float32(0.5)), real([2]), real("2"), real(10**400)
    (2.0, 0.5, None, None, None)
    """
    if isinstance(value, (bool, str, bytes, bytearray)):
        return None
    dtype = getattr(value, "dtype", None)
    if dtype is not None:
        try:
            kind = np.dtype(getattr(dtype, "as_numpy_dtype", dtype)).kind
            axes = len(value.shape)
        except (AttributeError, TypeError, ValueError):
            return None
        if axes or kind in NOT_REAL:
            return None
    elif not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return None
    try:
        return float(value)
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return None


def shown(value: Any) -> str:
    """`repr(value)` for a message: always short, and never an error.

    >>> shown(1.5), shown("a")
    ('1.5', "'a'")
    """
    try:
        text = repr(value)
    except Exception:  # Whatever a foreign `__repr__` does; 10**5000 has none.
        text = f"something of type {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def foreign(value: Any, kind: type) -> list[Any]:
    """Returns a value, and the values of a kind inside it, if foreign to the library.

    Args:
      value: a clip rule, a scheme, a matrix.
      kind: the class of parts that are checked as well, at any depth.

    >>> foreign(1.5, float)
    [1.5]
    """
    module = type(value).__module__
    foreigners = [] if module.split(".")[0] == "tfdpclip" else [value]
    parts = list(getattr(value, "__dict__", {}).values())
    while parts:
        part = parts.pop()
        if isinstance(part, kind):
            foreigners += foreign(part, kind)
        elif isinstance(part, Mapping):
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            parts += part
    return foreigners


def positive(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises ValueError unless finite and above 0."""
    number = real(value)
    if number is None or not 0 < number < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {shown(value)}.")
    return number


def non_negative(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises ValueError unless finite and at least 0."""
    number = real(value)
    if number is None or not 0 <= number < math.inf:
        raise ValueError(
            f"{name} must be a finite number, 0 or above, got {shown(value)}."
        )
    return number
