"""Checks of numbers that users give, and settings that may follow a schedule."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._arguments import boolean, real, shown

Schedule = tf.keras.optimizers.schedules.LearningRateSchedule


def check_positive(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises if it is not finite and above 0."""
    number = as_float(name, value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a finite number above 0, got {shown(value)}.")
    return number


def check_norm(name: str, value: Any) -> float:
    """As `check_positive`, for clip norms: they must be normal numbers in float32."""
    number = check_positive(name, value)
    limits = np.finfo(np.float32)
    if not float(limits.tiny) <= number <= float(limits.max):
        raise ValueError(
            f"{name} must be between {limits.tiny:.3g} and {limits.max:.3g}, the range "
            f"of float32, got {number!r}."
        )
    return number


def check_non_negative(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises if it is not finite and at least 0."""
    number = as_float(name, value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(
            f"{name} must be a finite number, 0 or above, got {shown(value)}."
        )
    return number


def check_fraction(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises if it is not in [0, 1]."""
    number = as_float(name, value)
    if not 0 <= number <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {shown(value)}.")
    return number


def check_bool(name: str, value: Any) -> bool:
    """Returns `value`, or raises if it is not a bool."""
    return boolean(name, value)


def as_float(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises if it is not a number."""
    number = real(value)
    if number is None:
        raise ValueError(f"{name} must be a number, got {shown(value)}.")
    return number


def check_setting(name: str, value: Any, check=check_positive) -> float | Schedule:
    """A number, or a Keras schedule of the step, or a schedule's serialised form.

    A schedule is a function of the step alone, so it is public. Its first value is
    checked here, and the others when they are used.
    """
    if isinstance(value, dict):
        given = value
        try:
            value = tf.keras.optimizers.schedules.deserialize(given)
        except Exception as error:  # Whatever Keras makes of it.
            raise ValueError(f"{name} is not a schedule: {error}") from error
    if not isinstance(value, Schedule):
        if callable(value):
            raise ValueError(
                f"{name} must be a number or a schedule that can be saved, a "
                "tf.keras.optimizers.schedules.LearningRateSchedule; got "
                f"{shown(value)}."
            )
        return check(name, value)
    with tf.init_scope():
        check(f"{name} at step 0", float(value(0)))
    return value


def value_at(setting: float | Schedule, step: Any) -> Any:
    """The number, or the schedule's value at `step` as a float32 tensor."""
    if isinstance(setting, Schedule):
        return tf.cast(setting(step), tf.float32)
    return setting


def as_config(value: Any) -> Any:
    """The JSON-able form of a setting."""
    if isinstance(value, Schedule):
        return tf.keras.optimizers.schedules.serialize(value)
    return value


def in_words(value: Any) -> str:
    """A setting as text that is the same in every process."""
    if isinstance(value, Schedule):
        config = value.get_config()
        given = [f"{k}={v!r}" for k, v in config.items() if k != "name"]
        return f"{type(value).__name__}({', '.join(given)})"
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return repr(value)
