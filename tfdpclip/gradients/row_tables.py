"""What is kept of tensors to compare their rows: products with random weights.

Whole tensors at all places would have to be kept from one pass to the next. A table has
four numbers for each row, its products with random weights that are drawn anew in every
check, and the row's norm. Weights are of random sign and size: with signs alone,
(a, -a), the gradient of two logits, would give 0 half of the time. If a row is off by
d, all four are below |d| / 10 in fewer than one check of a thousand.

The tables of all tensors are one matrix, and are compared at once: ops are what the
first step of a model waits for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import tensorflow as tf

from tfdpclip._devices import in_xla
from tfdpclip.gradients.flow import Flow
from tfdpclip.noise import philox

_PRODUCTS = 4
#: What a product may lack where numbers are too small for float32.
LOST = 1e-33
#: The columns of a table: products, then the row's norm.
WIDTH = _PRODUCTS + 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the examples of a tensor are.

    Attributes:
      axis: the axis that counts them.
      minor: whether it runs through the examples fastest (row r belongs to example r
        mod B) instead of slowest.
    """

    axis: int = 0
    minor: bool = False


def layout_of(flow: Flow) -> Layout:
    """The layout of a tensor of which so much is known."""
    axis = flow.axes[0] if flow.axes and len(flow.axes) == 1 else 0
    return Layout(axis, flow.leads and flow.minor)


class Weights:
    """The random weights of all tables of a check: the same for rows as long.

    Those of a known length are drawn once, in the graph that this is made in, and not
    in each pass of a loop: of wide rows of few examples, they are most of a table.

    Args:
      seed: int64 `[2]`.
    """

    def __init__(self, seed: tf.Tensor):
        self._seed, self._drawn = seed, {}
        self._graph = tf.compat.v1.get_default_graph()

    def of(self, rows: tf.Tensor) -> tf.Tensor:
        """`[width, 4]`, for rows `[N, ...]`."""
        width = rows.shape[1:].num_elements()
        if width is None:
            count = tf.maximum(tf.shape(rows)[0], 1)
            return _weights(tf.size(rows) // count, self._seed)
        if width not in self._drawn:
            with self._graph.as_default(), tf.control_dependencies(None):
                self._drawn[width] = _weights(width, self._seed)
        return self._drawn[width]


def _weights(width: int | tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    drawn = philox.uniform(tf.stack([width, _PRODUCTS]), seed)
    # Of either sign, from 1 to 2.
    return tf.where(drawn < 0.5, 1 + 2 * drawn, -2 * drawn)


def tables(
    pairs: Sequence[tuple[tf.Tensor, Layout]], weights: Weights
) -> list[tf.Tensor]:
    """The table of each tensor in its layout, `[N, WIDTH]`.

    Args:
      pairs: tensors, of any numbers, and layouts.
      weights: the random weights.
    """
    make = _table_in_xla if in_xla() else _table
    found = []
    for tensor, layout in pairs:
        axis = layout.axis
        if axis:
            others = [i for i in range(tensor.shape.rank) if i != axis]
            tensor = tf.transpose(tensor, [axis, *others])
        table = make(tf.cast(tensor, tf.float32), weights.of(tensor))
        table.set_shape([None, WIDTH])
        found.append(table)
    return found


def nothing_yet(pairs: Sequence[tuple[tf.Tensor, Layout]]) -> tf.Tensor:
    """What a loop starts with in the place of joined tables; see `noted`.

    Args:
      pairs: tensors of the shapes that will be tabulated, and layouts.
    """
    length = 0
    if in_xla():  # Which knows all lengths, and needs them.
        lengths = [tf.shape(tensor)[layout.axis] for tensor, layout in pairs]
        length = tf.add_n(lengths) if lengths else 0
    return tf.zeros([length, WIDTH])


def any_length(table: tf.Tensor) -> tf.TensorShape:
    """The shape invariant of what a loop starts with."""
    return table.shape if in_xla() else tf.TensorShape([None, WIDTH])


def noted(when: tf.Tensor, old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
    """`new` where a boolean scalar is true, and else what was noted before."""
    if in_xla():
        return tf.where(when, new, old)
    taken = tf.where(when, tf.shape(new)[0], 0)
    kept = tf.where(when, 0, tf.shape(old)[0])
    return tf.concat([old[:kept], new[:taken]], axis=0)


class Rows:
    """To which table, and to which example, each row of joined tables belongs.

    Args:
      parts: the tables.
      layouts: of what they are made of.
      batch_size: B.

    Attributes:
      joined: the tables, one after the other, `[M, WIDTH]`.
      whole: `[T]`, whether every example has as many rows of the table.
      example: `[M]`; anything in range where rows are left over.
    """

    def __init__(
        self,
        parts: Sequence[tf.Tensor],
        layouts: Sequence[Layout],
        batch_size: tf.Tensor,
    ):
        self._count = len(parts)
        self._batch_size = batch_size
        self.joined = tf.concat(parts, axis=0)
        lengths = tf.stack(tf.shape_n(parts))[:, 0]
        starts = tf.cumsum(lengths, exclusive=True)
        each = lengths // tf.maximum(batch_size, 1)
        self.whole = tf.equal(each * batch_size, lengths)
        place = tf.range(tf.shape(self.joined)[0])
        # A table of no rows ends where it begins.
        ends = tf.math.unsorted_segment_sum(
            tf.ones_like(lengths), starts + lengths, tf.size(place) + 1
        )
        self.table = tf.cumsum(ends)[: tf.size(place)]
        self._minor = tf.gather([layout.minor for layout in layouts], self.table)
        self._each = tf.maximum(tf.gather(each, self.table), 1)
        self._start = tf.gather(starts, self.table)
        place -= self._start
        example = tf.where(
            self._minor, place % tf.maximum(batch_size, 1), place // self._each
        )
        self.example = tf.minimum(example, batch_size - 1)
        self._place = place

    def origins(self, sources: tf.Tensor) -> tf.Tensor:
        """`[M]`: which row has what is here, if example `sources[i]` came to place i.

        Args:
          sources: `[B]`.
        """
        moved = tf.gather(sources, self.example) - self.example
        moved = tf.where(self._minor, moved, moved * self._each)
        ends = tf.shape(self.joined)[0] - 1
        return tf.clip_by_value(self._start + self._place + moved, 0, ends)

    def largest(self, values: tf.Tensor) -> tf.Tensor:
        """The largest of the rows' values (at least 0), for each table, `[T]`."""
        found = tf.math.unsorted_segment_max(values, self.table, self._count)
        return tf.maximum(found, 0)

    def by_example(self, values: tf.Tensor) -> tf.Tensor:
        """The largest of the rows' values (at least 0), `[T, B]`."""
        cells = self.table * self._batch_size + self.example
        total = self._count * self._batch_size
        found = tf.math.unsorted_segment_max(values, cells, total)
        found = tf.reshape(found, tf.stack([self._count, self._batch_size]))
        return tf.maximum(found, 0)

    def every(self, values: tf.Tensor) -> tf.Tensor:
        """Whether a property holds of all rows of each table, `[T]`."""
        return tf.equal(self.largest(tf.cast(~values, tf.int32)), 0)

    def mean(self, values: tf.Tensor) -> tf.Tensor:
        """The mean of the rows' values of the table that a row is of, `[M]`."""
        means = tf.math.unsorted_segment_mean(values, self.table, self._count)
        return tf.gather(means, self.table)


def _table_of(tensor, weights, *, xla):
    """The table of a tensor along axis 0."""
    width = tf.shape(weights)[0]
    rows = tf.reshape(tensor, tf.stack([tf.shape(tensor)[0], width]))
    # No array of the tensor's own size, and no number that is squared alone: those
    # below 1e-19 would be lost, and those above 1e19 infinite.
    largest = tf.maximum(tf.reduce_max(rows, 1), -tf.reduce_min(rows, 1))
    largest = tf.maximum(largest, 0)  # of an empty row
    if xla:  # Which fuses the two, and has no op for the norm.
        norms = tf.sqrt(tf.reduce_sum(tf.square(rows), 1))
    else:
        norms = tf.math.reduce_euclidean_norm(rows, 1)
    most = largest * tf.sqrt(tf.cast(width, tf.float32))
    norms = tf.where(tf.math.is_finite(norms), tf.maximum(norms, largest), most)
    return tf.concat([tf.matmul(rows, weights), norms[:, tf.newaxis]], axis=1)


# Functions of their own: a model with a hundred tensors calls them a hundred times, and
# traces them once.
_table, _table_in_xla = (
    tf.function(
        functools.partial(_table_of, xla=xla),
        input_signature=[tf.TensorSpec(None), tf.TensorSpec([None, _PRODUCTS])],
        autograph=False,
    )
    for xla in (False, True)
)
