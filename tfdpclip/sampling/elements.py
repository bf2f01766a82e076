"""The data set of a drawer's physical batches, one element after the other."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import cast

import numpy as np
import tensorflow as tf

from tfdpclip.sampling.drawer import Drawer, IteratorState

# With this policy, TensorFlow refuses to divide batches between machines: its own
# policies would split a draw, or pair parts of different draws. (There are no files.)
REFUSED = tf.data.experimental.AutoShardPolicy.FILE


def drawn_elements(
    drawer: Drawer, steps: int | None, lengths: Sequence[int] | None = None
) -> tf.data.Dataset:
    """The elements of `steps` logical steps in each iteration, (x, y, weight).

    Args:
      drawer: the drawer of the elements.
      steps: how many steps; None for no end.
      lengths: the lengths that elements may have; empty for the number of drawn rows,
        None for one length.
    """
    reader = _ElementReader(drawer, lengths)
    count = None if steps is None else steps * drawer.pieces
    places = tf.data.Dataset.from_tensors(0).repeat(count)
    # `from_generator` has four functions to prepare for each iterator, which takes as
    # long as several steps, and calls two of them for each element.
    dataset = places.scan(tf.constant(-1, tf.int64), reader.scan)
    # Without these options, tf.data gathers ahead, and an element that is gathered but
    # not used shifts all later elements.
    dataset = dataset.with_options(_options())
    if drawer.views > 1:
        dataset = dataset.map(_repeated(drawer.views))
    if not drawer.has_labels:
        dataset = dataset.map(lambda x, weight: (x, None, weight))
    return dataset


def _repeated(views: int):
    """Repeats each row `views` times, one copy after the other."""

    def repeated(*element):
        return tf.nest.map_structure(lambda part: _each(part, views), element)

    return tf.autograph.experimental.do_not_convert(repeated)


def _each(part: tf.Tensor, views: int) -> tf.Tensor:
    found = tf.repeat(part, views, axis=0)
    rows = part.shape[0]
    found.set_shape([None if rows is None else rows * views, *part.shape[1:]])
    return found


def _options() -> tf.data.Options:
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    # A function without randomness would run on elements to come.
    options.experimental_optimization.map_parallelization = False
    options.experimental_distribute.auto_shard_policy = REFUSED
    # Autotuning has no use here, and its thread delays the end of an iterator: `fit`
    # by half a second, garbage collection by up to 20.
    options.autotune.enabled = False
    return options


class _ElementReader:
    """Reads the next element for each iterator of a data set.

    The object does not keep the drawer, with the data, alive: the data set, which every
    iterator keeps, holds the drawer.
    """

    def __init__(self, drawer: Drawer, lengths: Sequence[int] | None):
        self._drawer = weakref.ref(drawer)
        self._lengths = lengths
        self._signature = drawer.signature(lengths)
        self._numbers = itertools.count()
        # The places of the iterators, by the number that TensorFlow hands on.
        self._states: dict[int, IteratorState] = {}

    @tf.autograph.experimental.do_not_convert
    def scan(self, number: tf.Tensor, place: tf.Tensor) -> tuple:
        """The iterator's number, -1 before its first element, and the next element."""
        del place
        specs = tf.nest.flatten(self._signature)
        types = [tf.int64, *(spec.dtype for spec in specs)]
        number, *parts = tf.numpy_function(self._read, [number], types)
        number.set_shape([])
        for part, spec in zip(parts, specs, strict=True):
            part.set_shape(spec.shape)
        return number, tf.nest.pack_sequence_as(self._signature, parts)

    def _read(self, number: np.ndarray) -> list:
        iterator = int(number) if number >= 0 else next(self._numbers)
        state = self._states.setdefault(iterator, IteratorState())
        drawer = cast(Drawer, self._drawer())
        element = drawer.next_element(state, self._lengths)
        return [np.int64(iterator), *tf.nest.flatten(element)]
