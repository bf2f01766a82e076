"""Per-example gradients of contractions: sums of outer products."""

from __future__ import annotations

import math

import tensorflow as tf

from tfdpclip.gradients.forms import floors
from tfdpclip.gradients.forms.base_form import (
    Form,
    cut_rows,
    in_chunks,
    keep_gradients,
    sum_squares,
)

# The cost of a write and two reads of a product, in multiply-adds of a number.
_KEPT = 12


def _squares_of_outer(x, z):
    """|x|^2 |z|^2 of `[B, (G,) K]` and `[B, (G,) U]`, summed over groups.

    In float64 a square neither overflows nor, worse, underflows: an example with a
    small gradient and a huge input must not be taken for zero.
    """
    own = [sum_squares(tf.cast(part, tf.float64), 1) for part in (x, z)]
    squares = own[0] * own[1]
    if squares.shape.rank == 2:
        squares = tf.reduce_sum(squares, axis=1)
    return tf.cast(squares, z.dtype)


class Outer(Form):
    """Sums of outer products: g_i = sum_t x_it (outer) z_it, for each of G groups.

    Args:
      x: `[B, G, T, K]`, or `[B, T, K]` without groups.
      z: `[B, G, T, U]`, or `[B, T, U]`.
      arrange: `arrange(tensor, lead)` turns `[*lead, G, K, U]` (or `[*lead, K, U]`)
        into `[*lead, *shape]`; `lead` is [] or [-1].
      shape: the static shape of a gradient.
      steps: T if it is known, to choose the cheapest way.
      layout: the order of the gradient's entries; forms of equal layouts can be joined
        along T.
      axes: the axis of `shape` that K is, and the axis that U is; None if K or U is
        not a single axis.
    """

    def __init__(self, x, z, arrange, shape, steps, layout, axes=None):
        self.x, self.z = x, z
        self._arrange = arrange
        self.shape = list(shape)
        self.steps = steps
        self.layout = layout
        self.axes = axes

    @property
    def batch_size(self):
        return tf.shape(self.x)[0]

    @property
    def dtype(self):
        return self.z.dtype

    def _products(self) -> tf.Tensor:
        return tf.matmul(self.x, self.z, transpose_a=True)

    def _costs(self) -> tuple[int, int, int]:
        """Multiply-adds per example of keeping products, of Gram matrices, of building.

        Moving numbers through memory is included. Kept products save a second
        computation for the weighted sum.
        """
        size, steps = math.prod(self.shape), self.steps or 32
        products = steps * size
        gram = self._groups * steps * steps * self._wide + products
        return products + _KEPT * size, gram, 2 * products + _KEPT // 2 * size

    @property
    def _groups(self) -> int:
        return self.x.shape[1] if self.x.shape.rank == 4 else 1

    @property
    def _wide(self) -> int:
        return (self.x.shape[-1] or 1) + (self.z.shape[-1] or 1)

    def measured(self, budget):
        keeping, gram, building = self._costs()
        if self.steps == 1 or keeping > min(gram, building):
            return super().measured(budget)
        # Kept products take the place of the op's input and gradient in memory.
        size, steps = math.prod(self.shape), self.steps or 32
        in_place = size <= 2 * self._groups * steps * self._wide
        if not in_place and not budget.reserve(4 * size):
            return super().measured(budget)
        return keep_gradients(
            [self._products()], lambda sums: self._arrange(sums[0], [])
        )

    def squared_norms(self, budget):
        if self.steps == 1:
            return self._norms_of_one()
        _, gram, building = self._costs()
        if gram <= building:
            memory = 8 * self._groups * (self.steps or 32) ** 2
            compute = Outer._gram_norms
        else:
            memory = 4 * math.prod(self.shape)
            compute = Outer._product_norms
        if budget.fits(memory):
            return compute(self)
        return in_chunks(
            lambda start, count: compute(self.part(start, count)),
            self.batch_size,
            budget.chunk(memory),
        )

    def _norms_of_one(self):
        """Squared norms of single outer products: |x|^2 |z|^2, summed over groups."""
        return _squares_of_outer(*self._squeezed())

    def _squeezed(self):
        return [tf.squeeze(part, axis=-2) for part in (self.x, self.z)]

    def _gram_norms(self):
        return floors.gram_norms(self.x, self.z)

    def _product_norms(self):
        # The sum over the batch is made of the terms of these products.
        return floors.floored(
            sum_squares(self._products()), self.part_squares(), tf.shape(self.x)[-2]
        )

    @property
    def has_several_terms(self):
        return self.steps != 1

    def part_squares(self):
        return floors.outer_parts(self.x, self.z)

    def weighted_sum(self, weights):
        rank = self.z.shape.rank
        z = self.z * tf.reshape(weights, [-1] + [1] * (rank - 1))
        if rank == 3:
            total = tf.matmul(
                tf.reshape(self.x, [-1, self.x.shape[-1]]),
                tf.reshape(z, [-1, z.shape[-1]]),
                transpose_a=True,
            )
        else:
            total = tf.einsum("bgtk,bgtu->gku", self.x, z)
        return self._arrange(total, [])

    def part(self, start, size):
        return Outer(
            cut_rows(self.x, start, size),
            cut_rows(self.z, start, size),
            self._arrange,
            self.shape,
            self.steps,
            self.layout,
            self.axes,
        )

    def gradients(self):
        return self._arrange(self._products(), [-1])

    def saved(self):
        return [self.x, self.z]

    def replaced(self, saved):
        return Outer(
            *saved, self._arrange, self.shape, self.steps, self.layout, self.axes
        )

    def joined(self, others: list[Outer]) -> Outer:
        """The sum of this form and `others`, as a longer sequence."""
        forms = [self, *others]
        known = all(form.steps is not None for form in forms)
        return Outer(
            tf.concat([form.x for form in forms], axis=-2),
            tf.concat([form.z for form in forms], axis=-2),
            self._arrange,
            self.shape,
            sum(form.steps for form in forms) if known else None,
            self.layout,
            self.axes,
        )
