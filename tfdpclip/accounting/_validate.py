"""Argument checks that let nothing slip through, NaN included.

Every check states what is allowed (`isfinite(x) and x > 0`) and refuses the rest.
The opposite form (`if x <= 0: raise`) accepts NaN.
"""

import math
from typing import Any

# The checks that do not depend on a range are shared with the rest of the library.
from tfdpclip._arguments import (  # noqa: F401
    boolean,
    choice,
    floats,
    function,
    items,
    real,
    shown,
    text,
    whole,
)

# Beyond this, not every whole number is a float, and no data set is.
_MOST_RECORDS = 2**53


def finite(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises unless it is a finite real number."""
    number = real(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {shown(value)}.")
    return number


def positive(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises unless it is finite and above 0."""
    number = _number(name, value, "positive and finite")
    if not number > 0:
        raise ValueError(f"{name} must be positive and finite, got {shown(value)}.")
    return number


def non_negative(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises unless it is finite and at least 0."""
    number = _number(name, value, "non-negative and finite")
    if not number >= 0:
        raise ValueError(f"{name} must be non-negative and finite, got {shown(value)}.")
    return number


def rate(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises unless it lies in (0, 1]."""
    number = _number(name, value, "in (0, 1]")
    if not 0 < number <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {shown(value)}.")
    return number


def delta(value: Any, name: str = "delta") -> float:
    """Returns `value` as a float, or raises unless it lies in (0, 1)."""
    number = _number(name, value, "in (0, 1)")
    if not 0 < number < 1:
        raise ValueError(f"{name} must be in (0, 1), got {shown(value)}.")
    return number


def target_epsilon(value: Any, name: str = "epsilon") -> float:
    """Returns `value` as a float, or raises unless it is positive (inf allowed)."""
    if real(value) == math.inf:
        return math.inf
    return positive(name, value)


def integer(name: str, value: Any, minimum: int = 0, maximum: int | None = None) -> int:
    """Returns `value` as an int, or raises unless it is an integer in the range."""
    number = whole(value)
    if number is None or number < minimum:
        raise ValueError(
            f"{name} must be an integer of at least {minimum}, got {shown(value)}."
        )
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {shown(value)}.")
    return number


def count_of(name: str, value: Any, minimum: int = 1) -> int:
    """Returns `value` as an int: a number of records, up to 2^53."""
    return integer(name, value, minimum, _MOST_RECORDS)


def _number(name: str, value: Any, wanted: str) -> float:
    try:
        return finite(name, value)
    except ValueError:
        raise ValueError(f"{name} must be {wanted}, got {shown(value)}.") from None
