"""What eager code has taken of drawn batches: which rows of each element are records.

A loop of one's own takes elements one after the other and hands their tensors, or what
it makes of them, to a step. The step's loss may leave the weights out, so that nothing
in the step tells records from the rows that fill an element up. The draw does.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.sampling.drawer import Drawer
from tfdpclip.sampling.poisson import FullBatch

# Elements that are kept in mind: of those before, a step was made long ago.
_KEPT = 64


class DrawnElement:
    """An element that eager code took.

    Args:
      drawer: the drawer of the element.
      element: (x, y, weights), eager tensors, which this does not keep alive.

    Attributes:
      records: of each record that there is room for, whether it was drawn.
      rows_each: rows of a record, one after the other.
      released: whether a private step was made of the element.
      once: whether a second private step would cost more than is accounted for.
      specs: of the element's tensors, one after the other.
      weights: how many of those are weights, the last.
    """

    def __init__(self, drawer: Drawer, element: tuple):
        self.rows_each = drawer.rows_per_record
        weights = [np.asarray(w) for w in tf.nest.flatten(element[-1])]
        self.records = np.any(
            [w.reshape([len(w) // self.rows_each, -1]).any(axis=1) for w in weights],
            axis=0,
        )
        self.released = False
        self.once = not isinstance(drawer.scheme, FullBatch)
        tensors = _tensors_of(element)
        self.specs = [tf.TensorSpec.from_tensor(tensor) for tensor in tensors]
        self.weights = len(weights)
        self._drawer = weakref.ref(drawer)
        self._tensors = [weakref.ref(tensor) for tensor in tensors]

    @property
    def held(self) -> bool:
        """Whether one of the element's tensors is still held."""
        return any(tensor() is not None for tensor in self._tensors)

    @property
    def waits(self) -> bool:
        """Whether no private step was made of the element so far.

        Of batches that are gone, no element waits.
        """
        return not self.released and self._drawer() is not None


_LOCK = threading.Lock()
_TAKEN: collections.deque[DrawnElement] = collections.deque(maxlen=_KEPT)


def noted(iterator: Iterator, drawer: Drawer) -> Iterator:
    """The iterator, of which the elements that eager code takes are kept in mind."""
    # The data set that the iterator goes through keeps the drawer alive.
    known = weakref.ref(drawer)

    def note(element):
        found = known()
        if found is None or not all(map(_tf_private.is_eager, _tensors_of(element))):
            return
        taken = DrawnElement(found, element)
        with _LOCK:
            for old in [e for e in _TAKEN if not (e.held or e.waits)]:
                _TAKEN.remove(old)
            _TAKEN.append(taken)

    return _tf_private.show_elements(iterator, note)


def _tensors_of(element: tuple) -> list[tf.Tensor]:
    found = tf.nest.flatten(element, expand_composites=True)
    return [tensor for tensor in found if tensor is not None]


def at_hand() -> list[DrawnElement]:
    """The elements of which the next step may be.

    Those with tensors that are still held, or, if there are none (a step may be given
    what was made of them), any. Of these, those of which no step was made; if there are
    none, the others.
    """
    with _LOCK:
        found = [e for e in _TAKEN if e.held] or [e for e in _TAKEN if e.waits]
        return [e for e in found if not e.released] or found
