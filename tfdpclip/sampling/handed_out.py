"""Remembers the drawn elements that eager code took, and which rows are records.

A custom training loop takes elements in turn and hands their tensors, or tensors
computed from them, to a step. The step's loss may ignore the weights, so that the step
alone cannot tell records from the rows that fill an element up. The draw can.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._notes import NOTES, TakenElement, Use
from tfdpclip.sampling.drawer import Drawer
from tfdpclip.sampling.poisson import FullBatch


class DrawnElement(TakenElement):
    """An element that eager code took.

    Args:
      drawer: the drawer of the element.
      element: (x, y, weights), eager tensors, held by weak references.

    Attributes:
      records: whether each place for a record was drawn, `[capacity]`, boolean.
      rows_each: consecutive rows of a record.
      use: the use by a private step, for a ledger.
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
        super().__init__(drawer, tensors, _once(drawer))
        self.use = _use_of(drawer)
        self.specs = [tf.TensorSpec.from_tensor(tensor) for tensor in tensors]
        self.weights = len(weights)


def _once(drawer: Drawer) -> bool:
    """Whether a second step on a draw costs more than the accounting covers."""
    return not isinstance(drawer.scheme, FullBatch)


def _use_of(drawer: Drawer) -> Use:
    """The use of the element that the drawer has just handed out."""
    scheme, order = drawer.scheme, weakref.ref(drawer)
    if scheme.independent_steps or drawer.runs_ahead:
        return Use(scheme, order, None, 0)
    step = (drawer.position - 1) // drawer.pieces
    return Use(scheme, order, step, drawer.place_in_epoch(step))


def remember_elements(iterator: Iterator, drawer: Drawer) -> Iterator:
    """Wraps the iterator, and remembers the elements that eager code takes."""
    # The data set that the iterator goes through keeps the drawer alive.
    known = weakref.ref(drawer)
    drawer.draws.iterators.add(iterator)

    def note(element):
        found = known()
        if found is None or not all(map(_tf_private.is_eager, _tensors_of(element))):
            return
        NOTES.note_taken(DrawnElement(found, element), found.draws)

    return _tf_private.show_elements(iterator, note)


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
            NOTES.note_taken(DrawnElement(drawer, whole), drawer.draws)
            return
        NOTES.note_dealt(TakenElement(drawer, tensors, _once(drawer)))

    return _tf_private.show_dealt_elements(dataset, note)


def _tensors_of(element: tuple) -> list[tf.Tensor]:
    found = tf.nest.flatten(element, expand_composites=True)
    return [tensor for tensor in found if tensor is not None]


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
    tensors = {id(tensor) for e in elements for tensor in e.tensors()}
    others = {
        f"{tf.as_dtype(part.dtype).name} of shape {_row_shape(part)}"
        for part in arguments
        if isinstance(part, (np.ndarray, np.generic)) or _tf_private.is_eager(part)
        if id(part) not in tensors and getattr(part, "dtype", None) != tf.resource
    }
    if others:
        NOTES.note_assumption(
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


def unused_first(elements: Sequence[DrawnElement]) -> list[DrawnElement]:
    """The unused elements; if every element is used, all elements."""
    return [e for e in elements if not e.released] or list(elements)
