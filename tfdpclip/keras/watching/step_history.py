"""Whose steps they are: what tells an optimizer's releases from all others."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._variables import whole_number
from tfdpclip.accounting.releases import COUNTERS
from tfdpclip.keras.watching.noise_plan import NoisePlan
from tfdpclip.sampling import events

# The attribute of a private optimizer that holds its history.
ATTRIBUTE = "_step_history"
# The attribute of a variable that holds the private optimizer that trains it, so that
# the next one knows whose steps are behind the values that it starts from.
_TRAINER = "_tfdpclip_trainer"


@dataclasses.dataclass(frozen=True)
class Steps:
    """Steps of one optimizer.

    Attributes:
      steps: how many releases it made.
      noise_multiplier: the least it made them with; None if unknown.
      unit: what it clipped; None if unknown.
    """

    steps: int
    noise_multiplier: float | None = None
    unit: str | None = None


class StepHistory(tf.train.experimental.PythonState):
    """The releases of one optimizer object, and of those it was restored from.

    *Formal guarantees*

    * `identity` is random, belongs to one object in one process, and is in no other:
      neither a copy nor a restored checkpoint has it.
    * The count of releases only grows: it is no variable of the optimizer, is in no
      checkpoint, and is not what `iterations` says.
    * Steps that other private optimizers took on the same variables are among what is
      known, whether the optimizer still exists or not.
    * A checkpoint carries everything known of the steps behind it. Restoring one adds
      to what is known, and forgets nothing.

    Args:
      optimizer: the optimizer, which this does not keep alive.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = weakref.ref(optimizer)
        self._begin()
        self._inherited: dict[str, Steps] = {}
        # Of other optimizers of the same variables, which may still take steps.
        self._others: list[StepHistory] = []
        # What a step of the optimizer was when it was last looked at.
        self._last: tuple[float, str] | None = None
        # Of what the step counter says beyond the releases: what is explained by
        # `_inherited`, and what nobody can explain.
        self._explained = 0
        self._unknown = 0
        #: Whether a checkpoint was restored, until somebody who has asked sets it back.
        self.restored = False
        #: Told of updates that run eagerly, while a callback watches the weights.
        self.watch: Any = None
        COUNTERS.add(self)

    def _begin(self) -> None:
        self.identity = secrets.token_hex(16)
        self._least: tuple[int, float] = (0, math.inf)
        with tf.init_scope():
            self.counter = tf.Variable(
                0,
                trainable=False,
                dtype=tf.int64,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
        # The least noise multiplier that steps had since it was taken, where it
        # follows a schedule; the steps write it.
        self._least_now: tf.Variable | None = None
        self._least_taken = math.inf

    def __deepcopy__(self, memo) -> StepHistory:
        """A copy is another optimizer, with the steps of this one behind it."""
        optimizer = memo.get(id(self._optimizer()))
        copied = type(self)(self._optimizer() if optimizer is None else optimizer)
        copied._inherited = self.known()
        copied._explained = self._counter()
        return copied

    def trains(self, variables: Iterable[tf.Variable]) -> None:
        """Notes what the optimizer trains, and who did before."""
        variables = list(variables)
        self.comes_after(variables)
        for variable in variables:
            setattr(variable, _TRAINER, self._optimizer())

    def comes_after(self, variables: Iterable[tf.Variable]) -> None:
        """Notes who trained these before, frozen ones among them."""
        own = self._optimizer()
        for variable in variables:
            before = getattr(variable, _TRAINER, own)
            if before is not own:
                history = getattr(before, ATTRIBUTE)
                if all(other is not history for other in self._others):
                    self._others.append(history)
                self._inherit(history.known())

    def _inherit(self, steps: dict[str, Steps]) -> None:
        for name, part in steps.items():
            before = self._inherited.get(name)
            # What this object did, it knows better.
            if name != self.identity and (before is None or before.steps < part.steps):
                self._inherited[name] = part

    def count(self, noise_multiplier: tf.Tensor | None = None) -> None:
        """Counts one release, in the graph at hand.

        Args:
          noise_multiplier: what it has, if that follows a schedule.
        """
        self.counter.assign_add(1)
        if noise_multiplier is not None:
            least = self._noise_variable()
            least.assign(tf.minimum(least, noise_multiplier))

    def prepare(self) -> None:
        """Makes, outside of functions, what `count` keeps noise multipliers in."""
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
        """The least noise multiplier of the steps since this was asked last.

        Infinity if there were none, or if it follows no schedule.
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
        return found if found >= 0 else 0.0  # Not a number: nothing was released.

    @property
    def releases(self) -> int:
        """How many releases this object made, ever."""
        return whole_number(self.counter)

    def known(self) -> dict[str, Steps]:
        """All steps behind the current weights, and more, by identity.

        Steps that the optimizer's counter says ran, and nobody knows of, are among
        them under an identity of their own.
        """
        releases = self.releases
        for other in self._others:
            self._inherit(other._own())
        found = dict(self._inherited) | self._own()
        more = self._counter() - releases - self._explained
        self._unknown += max(0, more)
        self._explained += more
        if self._unknown:
            found[f"unknown:{self.identity}"] = Steps(self._unknown)
        return found

    def _own(self) -> dict[str, Steps]:
        releases = self.releases
        if not releases:
            return {}
        optimizer = self._optimizer()
        if optimizer is not None:
            self._last = (self._least_noise(releases), optimizer.unit)
        # Of one that is gone, what it was when another one took over.
        return {self.identity: Steps(releases, *(self._last or ()))}

    def _counter(self) -> int:
        return whole_number(self._optimizer().iterations)

    def _least_noise(self, releases: int) -> float:
        if getattr(self._optimizer(), "noise", None) is not None:
            # Steps that share their noise mean nothing without their ledger.
            return 0.0
        plan = NoisePlan(self._optimizer())
        if not plan.scheduled:
            return plan.at(0)
        # A step counter that was set by hand may have been anywhere below.
        reached = max(releases, self._counter())
        step, least = self._least
        if reached > step:
            least = min(least, plan.least(step, reached - step))
            self._least = (reached, least)
        # Or above.
        return min(least, self._least_taken, self._read_noise())

    # What goes into checkpoints.

    def serialize(self) -> bytes:
        steps = {name: dataclasses.asdict(p) for name, p in self.known().items()}
        content = {"counter": self._counter(), "steps": steps}
        return json.dumps(content, sort_keys=True).encode()

    def deserialize(self, string_value: bytes) -> None:
        try:
            content = json.loads(string_value)
            read = {name: _steps(part) for name, part in content["steps"].items()}
            counter = int(content["counter"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "The checkpoint's list of the steps behind it is damaged "
                f"({error}). Restore another checkpoint."
            ) from error
        self._inherit(read)
        self.restored = True
        self._explained = counter - self.releases

    def to_array(self) -> np.ndarray:
        """For files that hold arrays only."""
        return np.frombuffer(self.serialize(), np.uint8)

    def from_array(self, array: Any) -> None:
        """Reads what `to_array` gave."""
        self.deserialize(np.asarray(array, np.uint8).tobytes())


def _steps(part: dict) -> Steps:
    steps, z, unit = part["steps"], part["noise_multiplier"], part["unit"]
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps is {steps!r}")
    if z is not None and not (math.isfinite(z) and z >= 0):
        raise ValueError(f"noise_multiplier is {z!r}")
    if unit is not None and unit not in events.UNITS:
        raise ValueError(f"unit is {unit!r}")
    return Steps(steps, z, unit)


class ForeignHistory:
    """The same, as far as it can be known, of an optimizer that keeps no history.

    Its step counter is all there is, and it is believed.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = weakref.ref(optimizer)
        self.identity = secrets.token_hex(16)
        self.restored = False
        self.watch: Any = None
        self.counter = None

    @property
    def releases(self) -> int:
        """What the optimizer's step counter says."""
        return int(self._optimizer().iterations.numpy())

    def take_least_noise(self) -> float:
        """Nobody knows."""
        return math.inf

    def known(self) -> dict[str, Steps]:
        """All its steps."""
        return {self.identity: Steps(self.releases)} if self.releases else {}


_FOREIGN: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def history_of(optimizer: Any) -> StepHistory | ForeignHistory:
    """The history of an optimizer, whatever optimizer it is."""
    found = getattr(optimizer, ATTRIBUTE, None)
    if isinstance(found, StepHistory):
        return found
    if optimizer not in _FOREIGN:
        _FOREIGN[optimizer] = ForeignHistory(optimizer)
    return _FOREIGN[optimizer]
