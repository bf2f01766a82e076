"""What hands out the physical batches of a scheme's draws, and sees that they went."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import cast

import numpy as np
import tensorflow as tf

from tfdpclip.sampling import sources
from tfdpclip.sampling.base import NeighboringRelation
from tfdpclip.sampling.draw_key import DrawKey

# Every drawer alive, so that a callback can see which of them feeds a training run.
DRAWERS: weakref.WeakSet[Drawer] = weakref.WeakSet()


class Drawer:
    """Hands out physical batches one after the other, whoever asks."""

    def __init__(
        self,
        scheme,
        source,
        rows,
        pieces,
        initial_step,
        seed,
        by_group=False,
        *,
        population=None,
        shard=None,
    ):
        # All records, of which `source` may have a part.
        self.population = source.size if population is None else population
        self.successor: Drawer | None = None
        # Whether who iterates gathers ahead, so that where it stopped is not known.
        self.runs_ahead = False
        self.by_group = by_group
        self.scheme = scheme
        self.source = source
        self.rows = rows
        self.pieces = pieces
        self.seed = seed
        self.position = initial_step * pieces
        self.delivered = 0
        # A shuffle begun by an earlier process cannot be continued, only begun anew.
        self._first_step = initial_step if seed is None else 0
        key = DrawKey.fresh() if seed is None else DrawKey(seed)
        self._key = dataclasses.replace(key, shard=shard)
        self._consumer: weakref.ref | None = None
        self._drawn: tuple[int, list[np.ndarray]] | None = None
        self.has_labels = len(source.row_spec) > 1
        DRAWERS.add(self)

    def give_way(self, successor: Drawer) -> None:
        """Leaves all further draws to another drawer, of a part of the records."""
        self.successor = successor
        DRAWERS.discard(self)

    @property
    def last(self) -> Drawer:
        """The drawer that draws for this one: itself, or its successor."""
        return self if self.successor is None else self.successor.last

    @property
    def independent_groups(self) -> bool:
        relation = self.scheme.neighboring_relation
        replaced = relation is not NeighboringRelation.ADD_OR_REMOVE_ONE
        return self.by_group or self.pieces == 1 or replaced

    @property
    def signature(self):
        parts = [
            sources._map(
                lambda spec: tf.TensorSpec((self.rows, *spec[0]), _tf_dtype(spec[1])),
                part,
                is_leaf=sources._is_spec,
            )
            for part in self.source.row_spec
        ]
        weight = tf.TensorSpec(self._weight_shape, tf.float32)
        return (*parts[:2], weight)

    @property
    def _weight_shape(self) -> tuple[int, ...]:
        """`[rows]`, or `[rows, 1, 1]` and the like for labels of as many axes.

        Keras multiplies weights with losses for each pixel from the last axis on.
        """
        ranks = set()
        if self.has_labels:
            sources._map(
                lambda spec: ranks.add(len(spec[0])),
                self.source.row_spec[1],
                is_leaf=sources._is_spec,
            )
        rank = ranks.pop() if len(ranks) == 1 else 0
        return (self.rows, *[1] * rank) if rank >= 2 else (self.rows,)

    def begin(self, consumer) -> int:
        """Returns how much of a logical step `consumer` has had already.

        It is 0 unless the last run of the same consumer stopped within a step: then the
        rest of that draw is still to come. For anyone else, the rest is skipped, and
        for batches that are gathered ahead.
        """
        within = self.position % self.pieces
        same = self._consumer is not None and self._consumer() is consumer
        if not same or self.runs_ahead:
            self.align()
            within = 0
        self._consumer = weakref.ref(consumer)
        return within

    def align(self) -> None:
        """Skips the rest of a step that was begun."""
        self.position += -self.position % self.pieces

    def _divided(self, indices, step) -> list[np.ndarray]:
        """The records of each element of a step."""
        if not self.by_group:
            starts = range(0, self.pieces * self.rows, self.rows)
            return [indices[start : start + self.rows] for start in starts]
        rng = self._key.rng(step - self._first_step, purpose=1)
        indices = rng.permutation(indices)
        group = rng.integers(0, self.pieces, len(indices))
        return [indices[group == piece][: self.rows] for piece in range(self.pieces)]

    def next_element(self):
        if self.successor is not None:
            raise ValueError(
                "These batches were distributed over several machines, each of which "
                "draws from its part of the records: they draw no more themselves."
            )
        step, piece = divmod(self.position, self.pieces)
        if self._drawn is None or self._drawn[0] != step:
            indices = self.scheme._draw(
                self._key, self.source.size, step - self._first_step
            )
            self._drawn = (step, self._divided(indices, step))
        indices = self._drawn[1][piece]
        parts = self.source.take(indices, self.rows)
        weight = np.zeros(self.rows, np.float32)
        weight[: len(indices)] = 1.0
        if len(parts) == 3:
            weight[: len(indices)] = np.reshape(parts[2][: len(indices)], -1)
        self.position += 1
        self.delivered += 1
        return (*parts[:2], np.reshape(weight, self._weight_shape))


class Passes:
    """A callable, since `from_generator` calls it once per iterator.

    It must not keep the drawer alive: TensorFlow never lets go of a generator, and the
    drawer holds the data. The data set, which every iterator keeps, does.
    """

    def __init__(self, drawer: Drawer, length: int):
        self._drawer = weakref.ref(drawer)
        self._length = length

    def __call__(self) -> Iterator:
        drawer = cast(Drawer, self._drawer())
        if drawer.runs_ahead:
            drawer.align()
        del drawer
        for _ in range(self._length):
            yield cast(Drawer, self._drawer()).next_element()


class DrawObserver:
    """Sees which batches were drawn since it was made.

    Keras callbacks do not see the data. The draws do pass through this module, so
    counting them tells whether a run is fed by the scheme it is accounted for.
    """

    def __init__(self):
        self._before = {drawer: drawer.delivered for drawer in DRAWERS}

    def drawn(self) -> list[tuple[Drawer, int]]:
        """Returns each drawer that handed out elements, and how many."""
        counts = [(d, d.delivered - self._before.get(d, 0)) for d in DRAWERS]
        return [(drawer, count) for drawer, count in counts if count > 0]


def _tf_dtype(dtype: np.dtype) -> tf.DType:
    return tf.string if dtype.kind == "O" else tf.as_dtype(dtype)
