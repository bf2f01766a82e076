"""Settings that may follow a Keras schedule of the step: the door to those schedules.

Nothing else outside `tfdpclip.keras` knows them, and Keras is not loaded before a
setting is given that is no number. A schedule is a function of the step alone, so it is
as public as the number in whose place it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf

from tfdpclip._arguments import positive, shown


@runtime_checkable
class Schedule(Protocol):
    """A setting that follows the step, once `setting` has let it through."""

    def __call__(self, step: Any) -> Any: ...

    def get_config(self) -> dict[str, Any]: ...


def setting(
    name: str, value: Any, check: Callable[[str, Any], float] = positive
) -> float | Schedule:
    """A number, or a Keras schedule of the step, or a schedule's serialised form.

    The first value of a schedule is checked here, and the others when they are used.

    Args:
      name: the argument's name.
      value: the setting.
      check: what a number must pass.

    Raises:
      ValueError: if it is none of these, or its first value does not pass.
    """
    if isinstance(value, dict):
        given = value
        try:
            value = tf.keras.optimizers.schedules.deserialize(given)
        except Exception as error:  # Whatever Keras makes of it.
            raise ValueError(f"{name} is not a schedule: {error}") from error
    if not callable(value):
        return check(name, value)
    if not isinstance(value, tf.keras.optimizers.schedules.LearningRateSchedule):
        raise ValueError(
            f"{name} must be a number or a schedule that can be saved, a "
            "tf.keras.optimizers.schedules.LearningRateSchedule; got "
            f"{shown(value)}."
        )
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
