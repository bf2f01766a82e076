"""Settings that may follow a Keras schedule of the step.

Outside `tfdpclip.keras` only this module knows schedules, and Keras is not loaded
before a setting is given that is not a number. A schedule is a function of the step
alone, so it is as public as a number. The schedule is traced when it is given, and the
trace is used in training and in the accounting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._arguments import instance, positive
from tfdpclip._docs import see
from tfdpclip._variables import components

# Stateful ops that keep no state; the functions that they call are checked separately.
_KEEP_NOTHING = frozenset(
    """Assert Case CheckNumerics CheckNumericsV2 If PartitionedCall PrintV2
    StatefulPartitionedCall While""".split()
)


@runtime_checkable
class Schedule(Protocol):
    """A setting that follows the step, after the check by `setting`."""

    def __call__(self, step: Any) -> Any: ...

    def get_config(self) -> dict[str, Any]: ...


def setting(
    name: str, value: Any, check: Callable[[str, Any], float] = positive
) -> float | Schedule:
    """A number, or a Keras schedule of the step, or a schedule's serialised form.

    The first value of a schedule is checked here, and later values when they are used.

    Args:
      name: the argument's name.
      value: the setting.
      check: the check of a number.

    Raises:
      ValueError: if `value` is no setting, or its first value does not pass the check.
    """
    if isinstance(value, dict):
        try:
            value = tf.keras.optimizers.schedules.deserialize(value)
        except Exception as error:  # Keras raises many kinds of errors.
            raise ValueError(f"{name} is not a schedule: {error}") from error
    if isinstance(value, StepFunction):
        check(f"{name} at step 0", value.at(0))
        return value
    if not callable(value):
        return check(name, value)
    kind = tf.keras.optimizers.schedules.LearningRateSchedule
    wanted = (
        "a number or a schedule that can be saved, a "
        "tf.keras.optimizers.schedules.LearningRateSchedule"
    )
    instance(name, value, kind, wanted)
    function = StepFunction(name, value)
    check(f"{name} at step 0", function.at(0))
    return function


class StepFunction:
    """A Keras schedule as a fixed function of the step.

    *Formal guarantees*: its values depend on the step alone. Later changes to the
    schedule's attributes do not change its values, neither in a step's graph nor in
    the accounting.

    Args:
      name: the argument's name.
      given: the schedule.

    Raises:
      ValueError: if the schedule reads anything but the step.
    """

    def __init__(self, name: str, given: Any):
        self._name = name
        #: The schedule.
        self.given = given
        self._traced = traced_of_step(name, given)

    def __call__(self, step: Any) -> Any:
        return self._traced(tf.cast(step, tf.int64))

    def at(self, step: int) -> float:
        """The value at a step, outside of graphs."""
        with tf.init_scope():
            return float(self(step))

    def get_config(self) -> dict[str, Any]:
        """The config of the schedule."""
        return self.given.get_config()

    def __reduce__(self):
        # A copy is traced again, since a trace cannot be copied.
        return type(self), (self._name, self.given)


@tf.autograph.experimental.do_not_convert
def traced_of_step(
    name: str,
    schedule: Callable,
    counter: tf.Variable | None = None,
    instead: str = "tf.keras.optimizers.schedules.PiecewiseConstantDecay("
    "[1000], [8.0, 4.0])",
) -> Callable:
    """Traces a schedule as a graph of one step, a scalar int64, without further inputs.

    Args:
      name: the argument's name.
      schedule: the function of the step.
      counter: a variable that counts the steps, which the schedule may read.
      instead: an example of a valid setting, for errors.

    Raises:
      ValueError: if it reads a variable or anything that can change between two steps.
    """

    def at(step):
        return tf.cast(schedule(step), tf.float32)

    spec = tf.TensorSpec([], tf.int64)
    with tf.init_scope():
        try:
            traced = tf.function(at, autograph=False).get_concrete_function(spec)
        except Exception as error:  # The schedule may raise any error.
            raise ValueError(
                f"{name}={_named(schedule)} is not a function of the step that "
                f"TensorFlow can trace (use tf.where, not if): {error}"
            ) from error
    other = read_besides(traced, counter)
    if other is not None:
        raise ValueError(
            f"{name}={_named(schedule)} reads more than the step: {other}. Its value "
            "in training may differ from its value in the accounting, and may contain "
            f"private data. Compute it from the step alone: {name}={instead}."
            + see("schedules-that-read-more-than-the-step")
        )
    return traced


def read_besides(traced: Any, counter: tf.Variable | None = None) -> str | None:
    """What a function reads besides its arguments, in words; None for nothing."""
    own = [] if counter is None else [part.handle for part in components(counter)]
    for tensor in traced.captured_inputs:
        if any(tensor is handle for handle in own):
            continue
        constant = _tf_private.is_eager(tensor)
        if tensor.dtype in (tf.resource, tf.variant) or not constant:
            held = [v.name for v in traced.graph.variables if v.handle is tensor]
            return f"the variable {held[0]!r}" if held else f"{tensor.dtype.name} data"
    definition = traced.graph.as_graph_def()
    functions = definition.library.function
    nodes = [*definition.node, *(node for f in functions for node in f.node_def)]
    called = {function.signature.name for function in functions}
    reads = {"ReadVariableOp"} if own else set()
    for node in nodes:
        if node.op in _KEEP_NOTHING | called | reads:
            continue
        known = _tf_private.definition_of(node.op)
        if known is None or known.is_stateful or "PyFunc" in node.op:
            return f"the op {node.name!r} ({node.op})"
    return None


def _named(schedule: Any) -> str:
    return f"{getattr(schedule, '__qualname__', type(schedule).__name__)}(...)"


def value_at(setting: float | Schedule, step: Any) -> Any:
    """The number, or the schedule's value at `step` as a float32 tensor."""
    if isinstance(setting, Schedule):
        return setting(step)
    return setting


def as_config(value: Any) -> Any:
    """The JSON-able form of a setting."""
    if isinstance(value, Schedule):
        given = getattr(value, "given", value)
        return tf.keras.optimizers.schedules.serialize(given)
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value


def in_words(value: Any) -> str:
    """A setting as text that is the same in every process."""
    if isinstance(value, Schedule):
        config = value.get_config()
        given = [f"{k}={v!r}" for k, v in config.items() if k != "name"]
        kind = type(getattr(value, "given", value))
        return f"{kind.__name__}({', '.join(given)})"
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return repr(value)
