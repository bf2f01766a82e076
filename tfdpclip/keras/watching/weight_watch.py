"""Finds writes by other code to the weights that a private optimizer trains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._object_notes import note_on_new_ops
from tfdpclip._variables import components, unwrapped
from tfdpclip.keras import _compat

# How often weights and their averages may be swapped between two steps: the end of an
# epoch, its tests and the beginning of the next epoch swap four times.
_MOST_SWAPS = 8


@contextlib.contextmanager
def marked_updates(history: Any) -> Iterator[None]:
    """Marks ops that are built in this context as updates by an optimizer.

    Args:
      history: the optimizer's `StepHistory`.
    """
    if tf.executing_eagerly():
        watch = history.watch
        if watch is not None:
            watch.before_update()
        yield
        if watch is not None:
            watch.hold()
        return
    own = history.identity
    with note_on_new_ops(updates=own, applies=own, released=True):
        yield


class _Values:
    """Reads the current values of variables in eager code, without copies.

    One op reads all variables of a device: an op for each takes several times as long.

    Args:
      variables: any number of variables; a variable of a distribution strategy is read
        on every device.

    Attributes:
      owners: the variable of each value.
      handles: the handle of each value.
    """

    def __init__(self, variables: Iterable[tf.Variable]):
        parts = [(v, part) for v in variables for part in components(unwrapped(v))]
        self.owners = [variable for variable, _ in parts]
        self.handles = [part.handle for _, part in parts]
        self._groups: dict[str, tuple[list, list, list]] = {}
        for place, (_, part) in enumerate(parts):
            group = self._groups.setdefault(part.handle.device, ([], [], []))
            for known, new in zip(group, (part.handle, part.dtype, place), strict=True):
                known.append(new)

    def read(self) -> list[tf.Tensor]:
        """The values, in the order of `owners`."""
        found: list = [None] * len(self.owners)
        for handles, types, places in self._groups.values():
            values = _tf_private.values_of(handles, types)
            for place, value in zip(places, values, strict=True):
                found[place] = value
        return found


class WeightWatch:
    """Finds out whether variables were written to since the last look.

    A write goes to new memory while the watch holds the old memory. The check therefore
    costs no more than a comparison of addresses. A lookup of rows makes all later reads
    of a table copies of it; `hold` ends this, so that no table is copied or compared
    byte by byte from the second step on.

    A swap of weights with their averages (and back) does not count as a change: the
    result of a swap is compared with the current values, bit by bit.

    Args:
      variables: the variables.
      counter: an integer variable that is read together with the variables.
      averages: pairs of variables, a weight and the average of its past values.

    Attributes:
      variables: the variables.
      updates: the number of updates that announced themselves.
      changed: the first variable that was found changed, or None.
      count: the counter's value at the last look.
    """

    def __init__(
        self,
        variables: Sequence[tf.Variable],
        counter: tf.Variable | None = None,
        averages: Sequence[tuple[tf.Variable, tf.Variable]] = (),
    ):
        self.variables = list(variables)
        self.updates = 0
        self.changed: tf.Variable | None = None
        self.count = 0
        counters = [] if counter is None else [counter]
        self._values = _Values([*self.variables, *counters])
        self._owners = [v for v in self._values.owners if v is not counter]
        self._held: list[np.ndarray] | None = None
        self._copied: set[int] = set()
        places: dict[int, list[int]] = {}
        for place, owner in enumerate(self._owners):
            places.setdefault(id(owner), []).append(place)
        # The places of a weight and its average in `_owners`, on every device.
        self._swaps = [
            both
            for pair in averages
            for both in zip(*(places.get(id(v), ()) for v in pair), strict=False)
        ]

    def hold(self) -> None:
        """Holds the values; `release` must come before the next update."""
        for place in self._copied:
            _tf_private.read_without_a_copy(self._values.handles[place])
        self._held = self._read()

    def release(self) -> None:
        """Forgets the values, so that an update need not copy them."""
        self._held = None

    def look(self) -> tf.Variable | None:
        """Returns a variable with a changed value, or None."""
        now, held = self._read(), self._held
        if held is not None and self.changed is None:
            found = self._different(held, now)
            if found is not None and not self._swapped(held, now):
                self.changed = found
        return self.changed

    def _different(self, held: list[np.ndarray], now: list[np.ndarray]) -> Any:
        """The first variable whose values differ, or None."""
        for place, both in enumerate(zip(held, now, strict=True)):
            if _place_of(both[0]) == _place_of(both[1]):
                continue
            if _differ(*both):
                return self._owners[place]
            # A table that rows are looked up in is copied by each read, until told.
            if "CPU" in self._values.handles[place].device:
                self._copied.add(place)
        return None

    def _swapped(self, before: list[np.ndarray], now: list[np.ndarray]) -> bool:
        """Whether swaps of weights and averages alone explain the current values."""
        values = list(before)
        for _ in range(_MOST_SWAPS if self._swaps else 0):
            for weight, average in self._swaps:
                pair = _compat.swapped(values[weight], values[average])
                values[weight], values[average] = pair
            if not any(map(_differ, values, now)):
                return True
        return False

    def _read(self) -> list[np.ndarray]:
        # numpy() would copy.
        values = [np.asarray(value) for value in self._values.read()]
        watched = len(self._owners)
        if len(values) > watched:
            self.count = int(values[watched])
        return values[:watched]

    def before_update(self) -> None:
        """Looks for changes, then releases the values."""
        self.updates += 1
        self.look()
        self.release()


def _differ(before: np.ndarray, after: np.ndarray) -> bool:
    # Overlapping memory is no proof: two parts of a tensor overlap, too.
    if _place_of(before) == _place_of(after):
        return False
    # A swap back and forth leaves equal values in new memory.
    return before.shape != after.shape or before.tobytes() != after.tobytes()


def _place_of(array: np.ndarray) -> tuple:
    return array.__array_interface__["data"][0], array.shape
