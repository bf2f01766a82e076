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
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdpclip._constants import vector
from tfdpclip._devices import in_xla
from tfdpclip.gradients.flow import Flow
from tfdpclip.noise import philox

_PRODUCTS = 4
#: What a product may lack where numbers are too small for float32.
LOST = 1e-33
# Above which a norm is sure to have lost nothing.
_SURE = 1e-15
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
        """`[width, 4]`, for rows `[N, width]`."""
        width = rows.shape[1]
        if width is None:
            return _weights(tf.shape(rows)[1], self._seed)
        if width not in self._drawn:
            with self._graph.as_default(), tf.control_dependencies(None):
                self._drawn[width] = _weights(width, self._seed)
        return self._drawn[width]


def _weights(width: int | tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    drawn = philox.uniform(tf.stack([width, _PRODUCTS]), seed)
    # Of either sign, from 1 to 2.
    return tf.where(drawn < 0.5, 1 + 2 * drawn, -2 * drawn)


@dataclasses.dataclass(frozen=True)
class Tables:
    """The tables of several tensors, one after the other.

    Attributes:
      joined: `[M, WIDTH]`.
      lengths: `[T]`, int32, how many rows are of each.
    """

    joined: tf.Tensor
    lengths: tf.Tensor


def tables(
    pairs: Sequence[tuple[tf.Tensor, Layout]], weights: Weights
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """What `join` makes a table of, for each tensor in its layout.

    Args:
      pairs: tensors, of any numbers, and layouts.
      weights: the random weights.

    Returns:
      Of each, the products, `[N, 4]`, and the norms, `[N, 1]`.
    """
    found = []
    for tensor, layout in pairs:
        axis = layout.axis
        if axis:
            others = [i for i in range(tensor.shape.rank) if i != axis]
            tensor = tf.transpose(tensor, [axis, *others])
        rows = _as_rows(tf.cast(tensor, tf.float32))
        if in_xla():  # Which fuses the two, and has no op for the norm.
            norms = tf.sqrt(tf.reduce_sum(tf.square(rows), 1, keepdims=True))
        else:
            norms = tf.math.reduce_euclidean_norm(rows, vector(1), keepdims=True)
        found.append((tf.matmul(rows, weights.of(rows)), norms))
    return found


def _as_rows(tensor: tf.Tensor) -> tf.Tensor:
    """`[N, width]`, for a tensor `[N, ...]`."""
    width = tensor.shape[1:].num_elements()
    if width:
        return (
            tensor if tensor.shape.rank == 2 else tf.reshape(tensor, vector(-1, width))
        )
    shape = tf.shape(tensor)
    return tf.reshape(tensor, tf.stack([shape[0], tf.reduce_prod(shape[1:])]))


def join(parts: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> Tables:
    """The tables of what `tables` made."""
    if not parts:
        return Tables(tf.zeros([0, WIDTH]), tf.zeros([0], tf.int32))
    products, norms = (tf.concat(column, axis=0) for column in zip(*parts, strict=True))
    # Squares of numbers below 1e-19 are lost, and those above 1e19 are infinite;
    # products are then as good a size.
    largest = tf.reduce_max(tf.abs(products), axis=1, keepdims=True)
    sure = tf.math.is_finite(norms) & (norms > _SURE)
    joined = tf.concat([products, tf.where(sure, norms, largest)], axis=1)
    joined.set_shape([None, WIDTH])
    lengths = tf.stack(tf.shape_n([products for products, _ in parts]))[:, 0]
    return Tables(joined, lengths)


def both(first: Tables, second: Tables) -> Tables:
    """Some tables, and others after them."""
    return Tables(
        tf.concat([first.joined, second.joined], axis=0),
        tf.concat([first.lengths, second.lengths], axis=0),
    )


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
    return tf.cond(when, lambda: new, lambda: old)


class Rows:
    """To which table, and to which example, each row of joined tables belongs.

    Args:
      tables: the tables.
      layouts: of what they are made of.
      batch_size: B.

    Attributes:
      joined: the tables, one after the other, `[M, WIDTH]`.
      whole: `[T]`, whether every example has as many rows of the table.
      example: `[M]`; anything in range where rows are left over.
    """

    def __init__(
        self,
        tables: Tables,
        layouts: Sequence[Layout],
        batch_size: tf.Tensor,
    ):
        self._count = len(layouts)
        self._batch_size = batch_size
        self.joined = tables.joined
        self._lengths = lengths = tables.lengths
        starts = tf.cumsum(lengths, exclusive=True)
        each = lengths // tf.maximum(batch_size, 1)
        self.whole = tf.equal(each * batch_size, lengths)
        place = tf.range(tf.shape(self.joined)[0])
        # A table of no rows ends where it begins.
        ends = tf.math.unsorted_segment_sum(
            tf.ones_like(lengths), starts + lengths, tf.size(place) + 1
        )
        self.table = tf.cumsum(ends)[: tf.size(place)]
        minor = tf.constant([layout.minor for layout in layouts], tf.bool)
        self._minor = tf.gather(minor, self.table)
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
        sums = tf.math.unsorted_segment_sum(values, self.table, self._count)
        means = sums / tf.cast(tf.maximum(self._lengths, 1), sums.dtype)
        return tf.gather(means, self.table)


def any_of(values: tf.Tensor, owners: np.ndarray, count: int) -> tf.Tensor:
    """Whether any of the values of each owner is true, `[count]`.

    Args:
      values: boolean, `[T]`.
      owners: `[T]`, whose each is.
      count: of how many owners.
    """
    if np.array_equal(owners, np.arange(count)):
        return values
    found = tf.math.unsorted_segment_max(tf.cast(values, tf.int32), owners, count)
    return found > 0
