"""Per-example gradients of tables whose rows are looked up."""

from __future__ import annotations

import math

import tensorflow as tf

from tfdpclip._devices import in_xla, on_cpus
from tfdpclip.gradients.forms import floors
from tfdpclip.gradients.forms.base_form import Form, cut_rows, sum_squares

# The number of parts of the batch in which equal tokens of an example are searched.
_PARTS = 4
# The greatest number of rows, for each token of an example, of a vocabulary with tables
# of first places. A table then takes the memory of embeddings of this width. For 10,000
# to 50,000 rows, XLA takes 3 to 13 times as long to sort the tokens on a CPU.
_ENTRIES = 128


class Lookup(Form):
    """Rows of a table: g_i has z_it added to row ids_it.

    Args:
      ids: `[B, T]` integers.
      z: `[B, T, D]`.
      shape: `[V, ...]` with D entries in a row.
      steps: T if it is known.
    """

    _GRAM_STEPS = 24

    def __init__(self, ids, z, shape, steps):
        self.ids, self.z = ids, z
        self.shape = list(shape)
        self.steps = steps

    @property
    def batch_size(self):
        return tf.shape(self.ids)[0]

    @property
    def dtype(self):
        return self.z.dtype

    def squared_norms(self, budget):
        if self.steps == 1:
            return sum_squares(self.z)
        if self.steps is not None and self.steps <= self._GRAM_STEPS:
            same = tf.equal(self.ids[:, :, tf.newaxis], self.ids[:, tf.newaxis, :])
            z, size = floors.scaled(self.z)
            products, units = floors.gram(z)
            norms = floors.from_grams(tf.cast(same, products.dtype), products, units)
            return norms * tf.square(size)
        squares = sum_squares(self._by_token(self.z))
        return self._if_known(
            floors.floored(squares, self.part_squares(), tf.shape(self.ids)[1])
        )

    def _by_token(self, values):
        """Values `[B, T, D]` of tokens, summed over the equal tokens of an example."""
        shape = [self.batch_size, tf.shape(self.ids)[1], values.shape[-1]]
        # Each token gets a place within its example; equal tokens get the same place.
        if not in_xla():
            places = self._by_parts(self._places_of)
        elif self.steps is not None and self.shape[0] <= _ENTRIES * self.steps:
            places = self._first_places()
        else:
            places, values = self._places_by_sorting(values)
        places += shape[1] * tf.range(shape[0])[:, tf.newaxis]
        sums = tf.math.unsorted_segment_sum(
            tf.reshape(values, [-1, shape[2]]),
            tf.reshape(places, [-1]),
            shape[0] * shape[1],
        )
        return tf.reshape(sums, shape)

    def _if_known(self, norms):
        if in_xla() or on_cpus():
            return norms
        # On devices other than CPUs a token that is not in the table raises no error.
        return tf.where(tf.reduce_all(self._known(), axis=1), norms, math.inf)

    @property
    def has_several_terms(self):
        return self.steps != 1

    def part_squares(self):
        return sum_squares(self.z)

    def _known(self):
        return (self.ids >= 0) & (self.ids < self.shape[0])

    def _by_parts(self, function):
        """The results of a function of some examples' tokens, for all examples.

        The function searches for equal tokens, which runs in a single thread. Parts of
        the batch run side by side, and the table of a part fits a nearer cache.
        """
        ids = tf.cast(self.ids, tf.int64)
        if not on_cpus():
            # An unknown token must not be taken for a token of a neighbouring example.
            ids = tf.where(self._known(), ids, 0)
        rows = (self.batch_size + _PARTS - 1) // _PARTS
        parts = [ids[i * rows : (i + 1) * rows] for i in range(_PARTS)]
        return tf.concat([function(part) for part in parts], axis=0)

    def _keys(self, ids):
        """A key for each token, `[B, T]`; no two examples have a key in common."""
        bits = tf.constant((self.shape[0] - 1).bit_length(), tf.int64)
        example = tf.range(tf.cast(tf.shape(ids)[0], tf.int64))
        return ids + tf.bitwise.left_shift(example, bits)[:, tf.newaxis]

    def _places_of(self, ids):
        # Keys are numbered in order of appearance, an example's first key first.
        keys = tf.reshape(self._keys(ids), [-1])
        numbers = tf.reshape(tf.unique(keys).idx, tf.shape(ids))
        return numbers - numbers[:, :1]

    def _first_places(self):
        """For each token the first place of an equal token in its example."""
        # A token that is not in the table belongs to no neighbour and has no gradient;
        # all such tokens of an example share an entry.
        rows = self.shape[0] + 1
        ids = tf.cast(self.ids, tf.int64)
        ids = tf.where(self._known(), ids, self.shape[0])
        size = tf.cast(self.batch_size, tf.int64)
        entries = tf.reshape(ids + rows * tf.range(size)[:, tf.newaxis], [-1])
        places = tf.tile(tf.range(self.steps), [self.batch_size])
        first = tf.math.unsorted_segment_min(places, entries, size * rows)
        return tf.reshape(tf.gather(first, entries), tf.shape(self.ids))

    def _places_by_sorting(self, values):
        order = tf.argsort(self.ids, axis=1)
        ids = tf.gather(self.ids, order, batch_dims=1)
        values = tf.gather(values, order, batch_dims=1)
        fresh = tf.concat(
            [tf.ones_like(ids[:, :1], tf.bool), ids[:, 1:] != ids[:, :-1]], axis=1
        )
        return tf.cumsum(tf.cast(fresh, tf.int32), axis=1) - 1, values

    def weighted_sum(self, weights):
        return self._sum_of(self.z * weights[:, tf.newaxis, tf.newaxis])

    def _sum_of(self, z):
        """The rows `z`, `[B, T, D]`, added at their places in the table."""
        rows = tf.reshape(z, [-1, z.shape[-1]])
        ids = tf.reshape(self.ids, [-1])
        if on_cpus() and not in_xla():
            # One pass over the tokens in their order: for tokens at random in the table
            # it takes between 0.3 and 1 of the time of a sum of unsorted segments.
            shape = tf.constant([self.shape[0], z.shape[-1]], ids.dtype)
            total = tf.scatter_nd(ids[:, tf.newaxis], rows, shape)
        else:
            total = tf.math.unsorted_segment_sum(rows, ids, self.shape[0])
        return tf.reshape(total, self.shape)

    def part(self, start, size):
        return Lookup(
            cut_rows(self.ids, start, size),
            cut_rows(self.z, start, size),
            self.shape,
            self.steps,
        )

    def gradients(self):
        count, rows = self.batch_size, self.shape[0]
        places = tf.cast(self.ids, tf.int32) + rows * tf.range(count)[:, tf.newaxis]
        flat = tf.math.unsorted_segment_sum(
            tf.reshape(self.z, [-1, self.z.shape[-1]]),
            tf.reshape(places, [-1]),
            count * rows,
        )
        return tf.reshape(flat, [-1, *self.shape])

    def joined(self, others: list[Lookup]) -> Lookup:
        """The sum of this form and `others`, as a longer list of tokens."""
        forms = [self, *others]
        known = all(form.steps is not None for form in forms)
        return Lookup(
            tf.concat([tf.cast(form.ids, tf.int64) for form in forms], axis=1),
            tf.concat([form.z for form in forms], axis=1),
            self.shape,
            sum(form.steps for form in forms) if known else None,
        )

    def saved(self):
        return [self.z]

    def replaced(self, saved):
        return Lookup(self.ids, *saved, self.shape, self.steps)


class PooledLookup(Lookup):
    """Rows of a table, summed over an example's tokens with a factor for each token.

    g_i has factors_it row_i added to row ids_it, so that no sum over equal tokens needs
    the width of a row.

    Args:
      ids: `[B, T]` integers.
      factors: `[B, T]`.
      row: `[B, D]`, the gradient at each example's sum.
      shape: `[V, ...]` with D entries in a row.
      steps: T if it is known.
      even: whether all factors are 1.
    """

    def __init__(self, ids, factors, row, shape, steps, even=False):
        self.ids, self.factors, self.row, self.even = ids, factors, row, even
        self.shape, self.steps = list(shape), steps

    @property
    def z(self):
        return self._rows_of(self.row)

    @property
    def dtype(self):
        return self.row.dtype

    def part_squares(self):
        return sum_squares(self.factors) * sum_squares(self.row)

    def _rows_of(self, row):
        """The rows of all tokens, `[B, T, D]`, from a row for each example."""
        factors, row = self.factors[:, :, tf.newaxis], row[:, tf.newaxis]
        if in_xla() or not on_cpus():
            return factors * row
        # The CPU's product takes half the time of a product that broadcasts both.
        return tf.matmul(factors, row)

    def squared_norms(self, budget):
        row, size = floors.scaled(self.row)
        if self.even and not in_xla():
            sums = tf.cast(self._by_parts(self._squared_counts), row.dtype)
        else:
            sums, factor = self._squared_sums()
            size *= factor
        return self._if_known(sums * sum_squares(row) * tf.square(size))

    def _squared_sums(self):
        """Squared sums of the factors of equal tokens, over the square of a number."""
        factors, size = floors.scaled(self.factors)
        sums = sum_squares(self._by_token(factors[:, :, tf.newaxis]))
        terms = tf.shape(self.ids)[1]
        return floors.floored(sums, sum_squares(factors), terms), size

    def _squared_counts(self, ids):
        """For each example, the squared numbers of its equal tokens, summed."""
        _, numbers, counts = tf.unique_with_counts(tf.reshape(self._keys(ids), [-1]))
        # Each of n equal tokens adds n.
        same = tf.reshape(tf.gather(counts, numbers), tf.shape(ids))
        return tf.reduce_sum(tf.cast(same, tf.float32), axis=1)

    def weighted_sum(self, weights):
        row = self.row * weights[:, tf.newaxis]
        if in_xla() or not on_cpus() or row.dtype not in (tf.float32, tf.float64):
            return self._sum_of(self._rows_of(row))
        # A product with a sparse matrix does not make the rows of all tokens, and takes
        # between a third and a half of the time.
        tokens = tf.cast(self.ids, tf.int64)
        example = tf.range(tf.cast(self.batch_size, tf.int64))[:, tf.newaxis]
        places = tf.stack([tokens, tf.broadcast_to(example, tf.shape(tokens))], axis=-1)
        total = tf.raw_ops.SparseTensorDenseMatMul(
            a_indices=tf.reshape(places, [-1, 2]),
            a_values=tf.reshape(self.factors, [-1]),
            a_shape=[self.shape[0], tf.cast(self.batch_size, tf.int64)],
            b=row,
        )
        return tf.reshape(total, self.shape)

    def part(self, start, size):
        parts = [cut_rows(x, start, size) for x in (self.ids, self.factors, self.row)]
        return PooledLookup(*parts, self.shape, self.steps, self.even)

    def saved(self):
        return [self.factors, self.row]

    def replaced(self, saved):
        return PooledLookup(self.ids, *saved, self.shape, self.steps, self.even)
