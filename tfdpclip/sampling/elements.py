"""The data set of what a drawer hands out, one physical batch after the other."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import tensorflow as tf

from tfdpclip.sampling.drawer import Drawer, Taker

# With this policy, TensorFlow itself cannot divide batches between machines: its own
# ways would split a draw, or pair parts of different ones. (There are no files.)
REFUSED = tf.data.experimental.AutoShardPolicy.FILE


def drawn_elements(
    drawer: Drawer, steps: int | None, lengths: Sequence[int] | None = None
) -> tf.data.Dataset:
    """The elements of `steps` logical steps in each iteration, (x, y, weight).

    Args:
      drawer: what draws them.
      steps: how many; None for no end.
      lengths: that elements may have; none if they have as many rows as were drawn,
        None if all have the same.
    """
    count = None if steps is None else steps * drawer.pieces
    size = tf.data.INFINITE_CARDINALITY if count is None else count
    dataset = tf.data.Dataset.from_generator(
        Passes(drawer, count, lengths), output_signature=drawer.signature(lengths)
    ).apply(tf.data.experimental.assert_cardinality(size))
    # Otherwise tf.data gathers ahead on its own, and an element gathered but not
    # used shifts what follows.
    dataset = dataset.with_options(_options())
    if drawer.views > 1:
        dataset = dataset.map(_repeated(drawer.views))
    if not drawer.has_labels:
        dataset = dataset.map(lambda x, weight: (x, None, weight))
    return dataset


def _repeated(views: int):
    """Each row several times, one after the other."""

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
    # There is nothing to tune, and whoever lets go of an iterator may wait for the
    # thread that does: `fit` for half a second, garbage collection for up to 20.
    options.autotune.enabled = False
    return options


class Passes:
    """A callable, since `from_generator` calls it once per iterator.

    It must not keep the drawer alive: TensorFlow never lets go of a generator, and the
    drawer holds the data. The data set, which every iterator keeps, does.
    """

    def __init__(
        self, drawer: Drawer, length: int | None, lengths: Sequence[int] | None
    ):
        self._drawer = weakref.ref(drawer)
        self._length = length  # None for no end.
        self._lengths = lengths

    def __call__(self) -> Iterator:
        taker = Taker()

        def element(_: Any) -> tuple:
            drawer = cast(Drawer, self._drawer())
            return drawer.next_element(taker, self._lengths)

        if self._length is None:
            # What raised raises again: who goes on does not get the end.
            return map(element, itertools.repeat(None))
        return (element(i) for i in range(self._length))
