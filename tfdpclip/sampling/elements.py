"""The data set of a drawer's physical batches, one element after the other."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

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
    count = None if steps is None else steps * drawer.pieces
    size = tf.data.INFINITE_CARDINALITY if count is None else count
    dataset = tf.data.Dataset.from_generator(
        ElementGenerator(drawer, count, lengths),
        output_signature=drawer.signature(lengths),
    ).apply(tf.data.experimental.assert_cardinality(size))
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


class ElementGenerator:
    """A generator function: `from_generator` calls the object once for each iterator.

    The object must not keep the drawer alive: TensorFlow never releases a generator,
    and the drawer holds the data. The data set, which every iterator keeps, holds
    the drawer.
    """

    def __init__(
        self, drawer: Drawer, length: int | None, lengths: Sequence[int] | None
    ):
        self._drawer = weakref.ref(drawer)
        self._length = length  # None for no end.
        self._lengths = lengths

    def __call__(self) -> Iterator:
        state = IteratorState()

        def element(_: Any) -> tuple:
            drawer = cast(Drawer, self._drawer())
            return drawer.next_element(state, self._lengths)

        if self._length is None:
            # With `map`, a second call after an error raises again and does not end.
            return map(element, itertools.repeat(None))
        return (element(i) for i in range(self._length))
