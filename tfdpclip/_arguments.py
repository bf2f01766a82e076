"""Checks of arguments, for every part of the library.

Each check states the allowed values (`isfinite(x) and x > 0`), names the argument, and
refuses all further values. The opposite form (`if x <= 0: raise`) accepts NaN. The
module needs neither TensorFlow nor the accountants.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, KeysView, Mapping, Set
from typing import Any, TypeVar

import numpy as np

from tfdpclip.kernel.checks import (
    NOT_REAL,
    real,
    shown,
)
from tfdpclip.kernel.checks import foreign as foreign
from tfdpclip.kernel.checks import non_negative as non_negative
from tfdpclip.kernel.checks import positive as positive

Checked = TypeVar("Checked")
# Above this, floats skip integers, and no data set is this large.
_MOST_RECORDS = 2**53


def whole(value: Any) -> int | None:
    """`value` as an int if `value` is a whole number, like 3 or 3.0; else None.

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


def optional(
    check: Callable[..., Checked], name: str, value: Any, *limits: Any
) -> Checked | None:
    """Returns None for None, and the result of `check` for any further value.

    >>> optional(integer, "epochs", None), optional(integer, "epochs", 3, 1)
    (None, 3)
    """
    return None if value is None else check(name, value, *limits)


def set_field(
    instance: Any, name: str, check: Callable[..., Any], *limits: Any
) -> None:
    """Sets a field of a frozen dataclass to the result of `check`; None stays.

    Args:
      instance: the dataclass.
      name: the field, which may be None only by default.
      check: a function like `integer` of this module.
      *limits: further arguments of `check`.
    """
    value = getattr(instance, name)
    if value is not None or getattr(type(instance), name, 0) is not None:
        value = check(name, value, *limits)
    object.__setattr__(instance, name, value)


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Returns `value`, or raises ValueError for a value outside of `allowed`."""
    # `in` alone would compare arrays elementwise.
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(
            f"{name} must be one of {', '.join(allowed)}; got {shown(value)}."
        )
    return value


def boolean(name: str, value: Any) -> bool:
    """Returns `value`, or raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}.")
    return value


def text(name: str, value: Any) -> str:
    """Returns `value`, or raises ValueError unless `value` is a string."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {shown(value)}.")
    return value


def instance(name: str, value: Any, kinds: Any, wanted: str) -> Any:
    """Returns `value`, or raises ValueError unless `value` is of the classes.

    >>> instance("epochs", 3, int, "an integer")
    3
    """
    if not isinstance(value, kinds):
        raise ValueError(f"{name} must be {wanted}, got {shown(value)}.")
    return value


def function(name: str, value: Any, count: int | None = None) -> Callable[..., Any]:
    """Returns `value`, or raises ValueError unless `value` can be called.

    Args:
      name: the argument's name.
      value: the function.
      count: the number of positional arguments; None for no check.
    """
    if not callable(value):
        raise ValueError(f"{name} must be a function, got {shown(value)}.")
    if count is None:
        return value
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # Functions written in C have no signature.
        return value
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        raise ValueError(
            f"{name} must be a function of {count} arguments: {error}."
        ) from None
    return value


def kinds_of(base: type[Any]) -> dict[str, type[Any]]:
    """The library's classes under `base` that have objects, by name."""
    found, kinds = {}, [base]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind.__module__.startswith("tfdpclip.") and not inspect.isabstract(kind):
            found[kind.__name__] = kind
    return found


def items(name: str, value: Any) -> list[Any]:
    """The entries of a sequence or array as a list; ValueError for anything else."""
    if not isinstance(value, (str, bytes, bytearray, Mapping)):
        try:
            return list(value)
        except TypeError:
            pass
    raise ValueError(f"{name} must be a list, got {shown(value)}.")


def ordered(name: str, value: Any) -> list[Any]:
    """As `items`, but ValueError for a set, whose order differs by process."""
    if isinstance(value, Set) and not isinstance(value, KeysView):
        raise ValueError(
            f"{name} must be a list, got a set, which has a different order in every "
            f"process: sorted({name})."
        )
    return items(name, value)


def floats(name: str, value: Any) -> np.ndarray:
    """`value` as an array in double precision, NaN and infinity included.

    Raises ValueError unless `value` is a rectangular array of real numbers.
    """
    try:
        array = np.asarray(value)
        if array.dtype.kind not in NOT_REAL or array.dtype == bool:
            return array.astype(np.float64)
    except (ArithmeticError, TypeError, ValueError):
        pass
    raise ValueError(f"{name} must be an array of real numbers, got {shown(value)}.")


def number(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises ValueError for all but real numbers.

    NaN and infinity are numbers here; the checks of ranges refuse them.
    """
    found = real(value)
    if found is None:
        raise ValueError(f"{name} must be a number, got {shown(value)}.")
    return found


def finite(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises ValueError unless `value` is finite."""
    return _in_range(name, value, "a finite number", math.isfinite)


def fraction(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises ValueError outside of [0, 1]."""
    return _in_range(name, value, "in [0, 1]", lambda x: 0 <= x <= 1)


def rate(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises ValueError outside of (0, 1]."""
    return _in_range(name, value, "in (0, 1]", lambda x: 0 < x <= 1)


def delta(value: Any, name: str = "delta") -> float:
    """Returns `value` as a float, or raises ValueError outside of (0, 1)."""
    return _in_range(name, value, "in (0, 1)", lambda x: 0 < x < 1)


def target_epsilon(value: Any, name: str = "epsilon") -> float:
    """As `positive`, and infinity is allowed: no target."""
    if real(value) == math.inf:
        return math.inf
    return positive(name, value)


def clip_norm(name: str, value: Any) -> float:
    """As `positive`, for clip norms, which must be normal numbers in float32."""
    found = positive(name, value)
    limits = np.finfo(np.float32)
    if not float(limits.tiny) <= found <= float(limits.max):
        raise ValueError(
            f"{name} must be between {limits.tiny:.3g} and {limits.max:.3g}, the range "
            f"of float32, got {found!r}."
        )
    return found


def integer(name: str, value: Any, minimum: int = 0, maximum: int | None = None) -> int:
    """Returns `value` as an int, or raises ValueError outside of the range."""
    found = whole(value)
    if found is None or found < minimum:
        raise ValueError(
            f"{name} must be an integer of at least {minimum}, got {shown(value)}."
        )
    if maximum is not None and found > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {shown(value)}.")
    return found


def count_of(name: str, value: Any, minimum: int = 1) -> int:
    """Returns `value` as an int: a number of records, up to 2^53."""
    return integer(name, value, minimum, _MOST_RECORDS)


def _in_range(
    name: str, value: Any, wanted: str, allowed: Callable[[float], bool]
) -> float:
    found = real(value)
    if found is None or not allowed(found):
        raise ValueError(f"{name} must be {wanted}, got {shown(value)}.")
    return found
