"""Remembers the drawn elements that eager code took, and which rows are records.

A custom training loop takes elements in turn and hands their tensors, or tensors
computed from them, to a step. The step's loss may ignore the weights, so that the step
alone cannot tell records from the rows that fill an element up. The draw can.
"""

from __future__ import annotations

import collections
import inspect
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.sampling import uses
from tfdpclip.sampling.drawer import Drawer
from tfdpclip.sampling.poisson import FullBatch

# How many elements to remember: the steps of earlier elements are long done, unless the
# program holds the elements.
_KEPT, _HELD = 64, 4096


class DealtElement:
    """An element that eager code took for all replicas, a part for each.

    Args:
      drawer: the drawer of the element.
      tensors: the element's eager tensors, of all parts, held by weak references.

    Attributes:
      released: whether a private step used the element.
      once: whether a second private step would cost more than the accounting covers.
    """

    def __init__(self, drawer: Drawer, tensors: list[tf.Tensor]):
        self.released = False
        self.once = not isinstance(drawer.scheme, FullBatch)
        self._tensors = [weakref.ref(tensor) for tensor in tensors]

    @property
    def held(self) -> bool:
        """Whether any of the element's tensors is still alive."""
        return any(tensor() is not None for tensor in self._tensors)


class DrawnElement(DealtElement):
    """An element that eager code took.

    Args:
      drawer: the drawer of the element.
      element: (x, y, weights), eager tensors, held by weak references.

    Attributes:
      records: whether each place for a record was drawn, `[capacity]`, boolean.
      rows_each: consecutive rows of a record.
      released: whether a private step used the element.
      guessed: whether that step may have used another element at hand.
      use: the use by a private step, for a ledger.
      once: whether a second private step would cost more than the accounting covers.
      specs: the specs of the element's tensors, flat.
      weights: the number of weight tensors; they are the last tensors.
    """

    def __init__(self, drawer: Drawer, element: tuple):
        self.rows_each = drawer.rows_per_record
        weights = [np.asarray(w) for w in tf.nest.flatten(element[-1])]
        self.records = np.any(
            [w.reshape([len(w) // self.rows_each, -1]).any(axis=1) for w in weights],
            axis=0,
        )
        tensors = _tensors_of(element)
        super().__init__(drawer, tensors)
        self.guessed = False
        self.use = _use_of(drawer)
        self.specs = [tf.TensorSpec.from_tensor(tensor) for tensor in tensors]
        self.weights = len(weights)
        self._drawer = weakref.ref(drawer)

    @property
    def waits(self) -> bool:
        """Whether the element has not been used in a private step yet.

        False for elements of batches that no longer exist.
        """
        return not self.released and self._drawer() is not None

    def has_any(self, tensors: set[int]) -> bool:
        """Whether a tensor of the element is among objects, given by their `id`."""
        return any(
            id(t) in tensors for t in map(_referent, self._tensors) if t is not None
        )


def _referent(reference: weakref.ref) -> Any:
    return reference()


def _use_of(drawer: Drawer) -> uses.Use:
    """The use of the element that the drawer has just handed out."""
    scheme, order = drawer.scheme, weakref.ref(drawer)
    if scheme.independent_steps or drawer.runs_ahead:
        return uses.Use(scheme, order, None, 0)
    step = (drawer.position - 1) // drawer.pieces
    return uses.Use(scheme, order, step, drawer.place_in_epoch(step))


_LOCK = threading.Lock()
_TAKEN: collections.deque[DrawnElement] = collections.deque(maxlen=_HELD)
_DEALT: collections.deque[DealtElement] = collections.deque(maxlen=_KEPT)


def remember_elements(iterator: Iterator, drawer: Drawer) -> Iterator:
    """Wraps the iterator, and remembers the elements that eager code takes."""
    # The data set that the iterator goes through keeps the drawer alive.
    known = weakref.ref(drawer)
    drawer.draws.iterators.add(iterator)

    def note(element):
        found = known()
        if found is None or not all(map(_tf_private.is_eager, _tensors_of(element))):
            return
        _note_taken(DrawnElement(found, element), found)

    return _tf_private.show_elements(iterator, note)


def _note_taken(taken: DrawnElement, drawer: Drawer) -> None:
    drawer.draws.note_taken(taken)
    with _LOCK:
        loose = [e for e in _TAKEN if not e.held]
        waiting = [e for e in loose if e.waits]
        kept = {id(e) for e in waiting[-_KEPT:]}
        for old in [e for e in loose if id(e) not in kept]:
            _TAKEN.remove(old)
        _TAKEN.append(taken)


def remember_dealt(
    dataset: Any, strategy: tf.distribute.Strategy, drawers: Sequence[weakref.ref]
) -> Any:
    """Wraps a strategy's data set, and remembers the elements that eager code takes.

    Args:
      dataset: the data set.
      strategy: its strategy.
      drawers: the drawers of this machine.
    """

    def note(element):
        parts = tf.nest.map_structure(strategy.experimental_local_results, element)
        tensors = _tensors_of((parts,))
        drawer = next(filter(None, (known() for known in drawers)), None)
        if drawer is None or not all(map(_tf_private.is_eager, tensors)):
            return
        if strategy.num_replicas_in_sync == 1:
            # As if no strategy were there.
            whole = tf.nest.map_structure(
                lambda part: strategy.experimental_local_results(part)[0], element
            )
            _note_taken(DrawnElement(drawer, whole), drawer)
            return
        with _LOCK:
            _DEALT.append(DealtElement(drawer, tensors))

    return _tf_private.show_dealt_elements(dataset, note)


def release_dealt() -> bool:
    """Marks the element at hand as used by a private step of all replicas.

    Returns:
      False if all elements at hand were used before, and a second private step costs
      more than the accounting covers.
    """
    with _LOCK:
        held = [element for element in _DEALT if element.held]
        unused = [element for element in held if not element.released]
        if len(unused) == 1:
            unused[0].released = True
        return bool(unused) or not any(element.once for element in held)


def _tensors_of(element: tuple) -> list[tf.Tensor]:
    found = tf.nest.flatten(element, expand_composites=True)
    return [tensor for tensor in found if tensor is not None]


def mark_released(element: DrawnElement) -> None:
    """Notes that a private step uses the element."""
    with _LOCK:
        element.released, element.guessed = True, False
    uses.note_use(element.use)


def mark_one_released(elements: Sequence[DrawnElement]) -> None:
    """Notes that a private step uses one of several elements, not known which."""
    with _LOCK:
        for element in elements:
            if not element.released:
                element.released = element.guessed = True
                return


def mark_other_released(element: DrawnElement) -> bool:
    """Takes back a guess: the step used another element at hand.

    Returns:
      False if the element itself was used, or no other element can have been.
    """
    with _LOCK:
        found = [e for e in _TAKEN if e.held and not e.released]
        if not element.guessed or not found:
            return False
        found[0].released = found[0].guessed = True
        element.released = element.guessed = False
        return True


def arguments_of_call() -> list[Any]:
    """All objects, flat, that TensorFlow's function was called with.

    For code that runs while TensorFlow prepares the call of a function.
    """
    frame: types.FrameType | None = inspect.currentframe()
    while frame is not None and not _is_of_tensorflow(frame):
        frame = frame.f_back
    found: list[Any] = []
    while frame is not None and _is_of_tensorflow(frame):
        given = [frame.f_locals.get(name) for name in _GIVEN]
        found += tf.nest.flatten(given, expand_composites=True)
        frame = frame.f_back
    return found


def note_other_arguments(elements: Sequence[DrawnElement]) -> None:
    """Notes arrays in a step's call that are no drawn element's own tensors.

    Eager code may have made such arrays of a whole batch: the step's proof takes them
    for data.
    """
    arguments = arguments_of_call()
    tensors = {id(t) for e in elements for t in map(_referent, e._tensors)}
    others = {
        f"{tf.as_dtype(part.dtype).name} of shape {_row_shape(part)}"
        for part in arguments
        if isinstance(part, (np.ndarray, np.generic)) or _tf_private.is_eager(part)
        if id(part) not in tensors and getattr(part, "dtype", None) != tf.resource
    }
    if others:
        uses.note_assumption(
            "the arrays that a step was given beside, or in the place of, its drawn "
            f"element's own tensors ({', '.join(sorted(others))}) are public, or each "
            "row was made of its own record: what eager code does to a batch between "
            "draw and step is not seen"
        )


def _row_shape(array: Any) -> str:
    rest = [str(size) for size in array.shape[1:]]
    return f"[{', '.join(['rows', *rest])}]" if len(array.shape) else "[]"


# Names of the arguments of a call in TensorFlow's code.
_GIVEN = ("args", "kwargs", "kwds")


def _is_of_tensorflow(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("tensorflow.")


def candidate_elements() -> list[DrawnElement]:
    """The elements that the next step may use, used or not.

    Elements with live tensors come first; if there are none (a step may get tensors
    computed from an element), all unused elements.
    """
    with _LOCK:
        return [e for e in _TAKEN if e.held] or [e for e in _TAKEN if e.waits]


def unused_first(elements: Sequence[DrawnElement]) -> list[DrawnElement]:
    """The unused elements; if every element is used, all elements."""
    return [e for e in elements if not e.released] or list(elements)
