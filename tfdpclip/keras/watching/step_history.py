"""The number of steps behind a model's weights, and the optimizers that took them."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._docs import TracedError, see
from tfdpclip._keras_marks import variable_of_call
from tfdpclip._notes import NOTES, ReleaseSettings
from tfdpclip._object_notes import notes_of_variable
from tfdpclip._variables import whole_number
from tfdpclip.keras.watching.noise_plan import NoisePlan
from tfdpclip.sampling import events

# The attribute of a private optimizer that holds its history.
ATTRIBUTE = "_step_history"


@dataclasses.dataclass(frozen=True)
class OptimizerSteps:
    """The steps of an optimizer.

    Attributes:
      steps: the number of releases.
      noise_multiplier: the least noise multiplier of these releases; None if unknown.
      unit: the clipped unit; None if unknown.
    """

    steps: int
    noise_multiplier: float | None = None
    unit: str | None = None


class StepHistory(tf.train.experimental.PythonState):
    """The releases of an optimizer object, and all earlier releases behind its weights.

    *Formal guarantees*

    * `identity` is random and belongs to one object in one process: neither a copy of
      the optimizer nor a restored checkpoint has the same identity.
    * The count of releases only grows: it is no variable of the optimizer, is in no
      checkpoint, and does not follow `iterations`.
    * `known_steps` includes the steps of all private optimizers that trained the same
      variables, even if those optimizers no longer exist.
    * A checkpoint carries all known steps behind its weights. Restoring a checkpoint
      adds its steps to the known steps, and forgets nothing.

    Args:
      optimizer: the optimizer; the history holds a weak reference to it.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = weakref.ref(optimizer)
        self._begin()
        self._inherited: dict[str, OptimizerSteps] = {}
        # Histories of optimizers of the same variables, which may take further steps.
        self._others: list[StepHistory] = []
        # The noise multiplier and the unit of the last steps that were looked at.
        self._last: tuple[float, str] | None = None
        # The step counter minus the releases: the part that `_inherited` explains, and
        # the part that no known step explains.
        self._explained = 0
        self._unknown = 0
        #: Whether a checkpoint was restored; the reader sets this back to False.
        self.restored = False
        #: Whether a plan made the optimizer.
        self.planned = False
        # The callbacks of the last call of `fit` that `count_fit` noted.
        self._budgeted: Callable[[], Any] = lambda: None
        #: A `WeightWatch` that is told of eager updates; None without one.
        self.watch: Any = None
        NOTES.counters.add(self)

    def _begin(self) -> None:
        self.identity = secrets.token_hex(16)
        #: For each graph of a traced step, its `StepLabels`.
        self.labels: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._least: tuple[int, float] = (0, math.inf)
        with tf.init_scope():
            self.counter = tf.Variable(
                0,
                trainable=False,
                dtype=tf.int64,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
        # The least noise multiplier of the steps since the last `take_least_noise`, if
        # the noise follows a schedule. The steps write this variable.
        self._least_now: tf.Variable | None = None
        self._least_taken = math.inf

    def __deepcopy__(self, memo) -> StepHistory:
        """Copies for a new optimizer: its history begins after these steps."""
        optimizer = memo.get(id(self._optimizer()))
        copied = type(self)(self._optimizer() if optimizer is None else optimizer)
        copied._inherited = self.known_steps()
        copied._explained = self._counter()
        return copied

    def trains(self, variables: Iterable[tf.Variable]) -> None:
        """Marks variables as trained by the optimizer, after any earlier optimizer."""
        variables = list(variables)
        self.comes_after(variables)
        for variable in variables:
            notes_of_variable(variable).trainer = self._optimizer()

    def comes_after(self, variables: Iterable[tf.Variable]) -> None:
        """Adds the steps of the optimizers that trained these variables before.

        Frozen variables belong in the list, too.
        """
        own = self._optimizer()
        for variable in variables:
            before = notes_of_variable(variable).trainer
            if before is not None and before is not own:
                history = getattr(before, ATTRIBUTE)
                if all(other is not history for other in self._others):
                    self._others.append(history)
                self._inherit(history.known_steps())

    def _inherit(self, steps: dict[str, OptimizerSteps]) -> None:
        for name, part in steps.items():
            before = self._inherited.get(name)
            # This object knows its own steps best.
            if name != self.identity and (before is None or before.steps < part.steps):
                self._inherited[name] = part

    def count(self, noise_multiplier: tf.Tensor | None = None) -> None:
        """Counts one release, in the current graph.

        Args:
          noise_multiplier: the noise multiplier of the release, if it follows a
            schedule.
        """
        self.counter.assign_add(1)
        if noise_multiplier is not None:
            least = self._noise_variable()
            least.assign(tf.minimum(least, noise_multiplier))

    def prepare(self) -> None:
        """Makes the variable for noise multipliers, outside of functions."""
        self._noise_variable()

    def _noise_variable(self) -> tf.Variable:
        if self._least_now is None:
            with tf.init_scope():
                self._least_now = tf.Variable(
                    math.inf,
                    trainable=False,
                    dtype=tf.float32,
                    aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                )
        return self._least_now

    def take_least_noise(self) -> float:
        """The least noise multiplier of the steps since the last call.

        Infinity if there were no steps, or if the noise follows no schedule.
        """
        found = self._read_noise()
        if self._least_now is not None:
            self._least_now.assign(math.inf)
        self._least_taken = min(self._least_taken, found)
        return found

    def _read_noise(self) -> float:
        if self._least_now is None:
            return math.inf
        with tf.init_scope():
            found = float(self._least_now.numpy())
        return found if found >= 0 else 0.0  # NaN counts as no noise.

    @property
    def releases(self) -> int:
        """The number of releases that this object ever made."""
        return whole_number(self.counter)

    def take_settings(self) -> ReleaseSettings | None:
        """The settings of the releases since the last call or `take_least_noise`.

        None if the optimizer no longer exists.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return None
        plan = NoisePlan(optimizer)
        return ReleaseSettings(
            self.take_least_noise() if plan.scheduled else plan.at(0),
            optimizer.unit,
            getattr(optimizer, "noise", None) is not None,
            getattr(optimizer, "seed", None) is not None,
        )

    def count_fit(self) -> None:
        """Notes that a budget counts the running call of `fit`, or that it is an audit.

        The note is of this call alone, since an interrupted call does not end it.
        """
        running = variable_of_call("fit", "callbacks")
        if running is not None:
            self._budgeted = weakref.ref(running)

    def refuse_uncounted(self) -> None:
        """Raises where `fit` takes steps of a plan that no `PrivacyBudget` counts."""
        running = variable_of_call("fit", "callbacks")
        if self.planned and running is not None and running is not self._budgeted():
            raise TracedError(
                "model.fit trains with an optimizer of a plan, but without the plan's "
                "callbacks: its steps are not counted, and plain arrays are not drawn "
                "as the plan accounts for. Write\n"
                "    plan.fit(model, (x, y))\n"
                "or model.fit(plan.batches((x, y)), epochs=plan.epochs, "
                "callbacks=plan.callbacks)." + see("steps-that-are-not-counted")
            )

    def raise_failures(self) -> None:
        """Raises an error that a compiled step found and could not raise."""
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.may_have_failed:
            optimizer.raise_failures()

    def known_steps(self) -> dict[str, OptimizerSteps]:
        """All steps behind the current weights, and further steps, by identity.

        If the optimizer's counter is above the number of known steps, the difference is
        listed under the identity "unknown:...".
        """
        releases = self.releases
        for other in self._others:
            self._inherit(other._own())
        found = dict(self._inherited) | self._own()
        more = self._counter() - releases - self._explained
        self._unknown += max(0, more)
        self._explained += more
        if self._unknown:
            found[f"unknown:{self.identity}"] = OptimizerSteps(self._unknown)
        return found

    def _own(self) -> dict[str, OptimizerSteps]:
        releases = self.releases
        if not releases:
            return {}
        optimizer = self._optimizer()
        if optimizer is not None:
            self._last = (self._least_noise(releases), optimizer.unit)
        # For an optimizer that no longer exists, the values at the last look.
        return {self.identity: OptimizerSteps(releases, *(self._last or ()))}

    def _counter(self) -> int:
        return whole_number(self._optimizer().iterations)

    def _least_noise(self, releases: int) -> float:
        if getattr(self._optimizer(), "noise", None) is not None:
            # Correlated noise protects only within the matrix that the ledger counts.
            return 0.0
        plan = NoisePlan(self._optimizer())
        if not plan.scheduled:
            return plan.at(0)
        # The step counter may have been set back by hand, to any earlier step,
        reached = max(releases, self._counter())
        step, least = self._least
        if reached > step:
            least = min(least, plan.least(step, reached - step))
            self._least = (reached, least)
        # or forward, where the steps noted their own noise.
        return min(least, self._least_taken, self._read_noise())

    # The state in checkpoints.

    def serialize(self) -> bytes:
        steps = {name: dataclasses.asdict(p) for name, p in self.known_steps().items()}
        content = {"counter": self._counter(), "steps": steps, "planned": self.planned}
        return json.dumps(content, sort_keys=True).encode()

    def deserialize(self, string_value: bytes) -> None:
        try:
            content = json.loads(string_value)
            read = {name: _steps(part) for name, part in content["steps"].items()}
            counter = int(content["counter"])
            planned = bool(content.get("planned"))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "The checkpoint's list of earlier steps is damaged "
                f"({error}). Restore another checkpoint."
            ) from error
        self._inherit(read)
        self.restored = True
        self.planned |= planned
        self._explained = counter - self.releases

    def to_array(self) -> np.ndarray:
        """The serialized history, uint8 `[n]`, for files that hold arrays only."""
        return np.frombuffer(self.serialize(), np.uint8)

    def from_array(self, array: Any) -> None:
        """Restores the history from the result of `to_array`."""
        self.deserialize(np.asarray(array, np.uint8).tobytes())


def _steps(part: dict) -> OptimizerSteps:
    steps, z, unit = part["steps"], part["noise_multiplier"], part["unit"]
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps is {steps!r}")
    if z is not None and not (math.isfinite(z) and z >= 0):
        raise ValueError(f"noise_multiplier is {z!r}")
    if unit is not None and unit not in events.UNITS:
        raise ValueError(f"unit is {unit!r}")
    return OptimizerSteps(steps, z, unit)


class ForeignHistory:
    """The history of an optimizer of another library.

    The optimizer's step counter is the only source, and is taken to be correct.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = weakref.ref(optimizer)
        self.identity = secrets.token_hex(16)
        self.labels: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.restored = self.planned = False
        self.watch: Any = None
        self.counter = None

    @property
    def releases(self) -> int:
        """The optimizer's step counter."""
        return int(self._optimizer().iterations.numpy())

    def take_least_noise(self) -> float:
        """Infinity, since the noise of the steps is unknown."""
        return math.inf

    def known_steps(self) -> dict[str, OptimizerSteps]:
        """All steps of the optimizer, by identity."""
        return {self.identity: OptimizerSteps(self.releases)} if self.releases else {}


def history_of(optimizer: Any) -> StepHistory | ForeignHistory:
    """The history of any optimizer."""
    found = getattr(optimizer, ATTRIBUTE, None)
    if isinstance(found, StepHistory):
        return found
    if optimizer not in NOTES.foreign_histories:
        NOTES.foreign_histories[optimizer] = ForeignHistory(optimizer)
    return NOTES.foreign_histories[optimizer]
