"""Checks of arguments that every part of the library shares.

They need neither TensorFlow nor the accountants.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

# Booleans, complex numbers, objects, text and times: `float` takes some of them.
_NOT_REAL = "bcOSUMm"
_LONGEST = 200


def real(value: Any) -> float | None:
    """`value` as a float if it is one real number (NaN and infinity included).

    None for anything else: booleans, text, complex numbers, arrays with axes (also of
    one entry), and integers beyond the range of a float.

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
        if axes or kind in _NOT_REAL:
            return None
    elif not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return None
    try:
        return float(value)
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return None


def whole(value: Any) -> int | None:
    """`value` as an int if it is one whole number, such as 3 or 3.0; None if not.

    >>> whole(3.0), whole(2**63 + 1) - 2**63, whole(3.5), whole(float("nan"))
    (3, 1, None, None)
    """
    number = real(value)
    if number is None or not number.is_integer():
        return None
    try:
        return operator.index(value)
    except (AttributeError, TypeError):
        return int(number)


def shown(value: Any) -> str:
    """`repr(value)` for a message: always short, and never an error itself.

    >>> shown(1.5), shown("a")
    ('1.5', "'a'")
    """
    try:
        text = repr(value)
    except Exception:  # Whatever a foreign `__repr__` does; 10**5000 has none.
        text = f"something of type {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Returns `value`, or raises ValueError unless it is one of `allowed`."""
    # Arrays compare elementwise, so that `in` alone would not do.
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(
            f"{name} must be one of {', '.join(allowed)}; got {shown(value)}."
        )
    return value


def boolean(name: str, value: Any) -> bool:
    """Returns `value`, or raises ValueError unless it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}.")
    return value


def text(name: str, value: Any) -> str:
    """Returns `value`, or raises ValueError unless it is a string."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {shown(value)}.")
    return value


def function(name: str, value: Any, count: int | None = None) -> Callable[..., Any]:
    """Returns `value`, or raises ValueError unless it can be called.

    Args:
      name: the argument's name.
      value: the function.
      count: with how many positional arguments; None for not looking.
    """
    if not callable(value):
        raise ValueError(f"{name} must be a function, got {shown(value)}.")
    if count is None:
        return value
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # Written in C: it does not say.
        return value
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        raise ValueError(
            f"{name} must be a function of {count} arguments: {error}."
        ) from None
    return value


def items(name: str, value: Any) -> list[Any]:
    """The entries of a sequence or array as a list; ValueError for anything else."""
    if not isinstance(value, (str, bytes, bytearray, Mapping)):
        try:
            return list(value)
        except TypeError:
            pass
    raise ValueError(f"{name} must be a list, got {shown(value)}.")


def floats(name: str, value: Any) -> np.ndarray:
    """`value` as an array in double precision, NaN and infinity included.

    Raises ValueError for what is no rectangular array of real numbers.
    """
    try:
        array = np.asarray(value)
        if array.dtype.kind not in _NOT_REAL or array.dtype == bool:
            return array.astype(np.float64)
    except (ArithmeticError, TypeError, ValueError):
        pass
    raise ValueError(f"{name} must be an array of real numbers, got {shown(value)}.")
