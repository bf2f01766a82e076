"""Argument checks that let nothing slip through, NaN included.

Every check states what is allowed (`isfinite(x) and x > 0`) and refuses the rest.
The opposite form (`if x <= 0: raise`) accepts NaN.
"""

import math
import numbers
from typing import Any


def finite(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises unless it is a finite real number."""
    ok = isinstance(value, numbers.Real) or hasattr(value, "__float__")
    if ok and not isinstance(value, (bool, str, bytes)):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise ValueError(f"{name} must be a finite number, got {value!r}.")


def positive(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises unless it is finite and above 0."""
    number = _number(name, value, "positive and finite")
    if not number > 0:
        raise ValueError(f"{name} must be positive and finite, got {value!r}.")
    return number


def non_negative(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises unless it is finite and at least 0."""
    number = _number(name, value, "non-negative and finite")
    if not number >= 0:
        raise ValueError(f"{name} must be non-negative and finite, got {value!r}.")
    return number


def rate(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises unless it lies in (0, 1]."""
    number = _number(name, value, "in (0, 1]")
    if not 0 < number <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value!r}.")
    return number


def delta(value: Any, name: str = "delta") -> float:
    """Returns `value` as a float, or raises unless it lies in (0, 1)."""
    number = _number(name, value, "in (0, 1)")
    if not 0 < number < 1:
        raise ValueError(f"{name} must be in (0, 1), got {value!r}.")
    return number


def target_epsilon(value: Any, name: str = "epsilon") -> float:
    """Returns `value` as a float, or raises unless it is positive (inf allowed)."""
    if isinstance(value, float) and value == math.inf:
        return value
    return positive(name, value)


def integer(name: str, value: Any, minimum: int = 0) -> int:
    """Returns `value` as an int, or raises unless it is an integer >= `minimum`."""
    number = _number(name, value, f"an integer of at least {minimum}")
    if not (number.is_integer() and number >= minimum):
        raise ValueError(
            f"{name} must be an integer of at least {minimum}, got {value!r}."
        )
    return int(value)


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Returns `value`, or raises unless it is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")
    return value


def _number(name: str, value: Any, wanted: str) -> float:
    try:
        return finite(name, value)
    except ValueError:
        raise ValueError(f"{name} must be {wanted}, got {value!r}.") from None
