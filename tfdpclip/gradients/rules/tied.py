"""A table that is looked up and multiplied by: embeddings tied to an output layer.

The gradient of a table `[V, D]` is too large to be built for every example. Its norm
follows from |a + b|^2 = |a|^2 + |b|^2 + 2 <a, b>, with a the part of the lookups and b
the part of the products; a has few rows, and <a, b> needs only these rows of b.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tfdpclip.gradients.forms import floors
from tfdpclip.gradients.forms.base_form import Budget
from tfdpclip.gradients.forms.lookup import Lookup
from tfdpclip.gradients.forms.outer import Outer, in_chunks
from tfdpclip.gradients.rules.uses import Use

_ASSUMED_STEPS = 32


class Tied:
    """Squared norms of the sum of lookups in a table and outer products on it.

    Args:
      lookup: the rows that are looked up.
      outer: the products.
      rows_in_x: whether x (else z) of the products has an entry for each row.
    """

    def __init__(self, lookup: Lookup, outer: Outer, rows_in_x: bool):
        self._lookup, self._outer = lookup, outer
        self._rows_in_x = rows_in_x

    def is_cheap(self) -> bool:
        """Whether this costs less than building all gradients and keeping them."""
        steps, tokens = self._steps()
        rows, width = self._lookup.shape
        own = steps**2 * (rows + width) + steps * tokens * (width + 2)
        return own < (steps + 24) * rows * width

    def _steps(self) -> tuple[int, int]:
        return (
            self._outer.steps or _ASSUMED_STEPS,
            self._lookup.steps or _ASSUMED_STEPS,
        )

    def squared_norms(self, squares: tf.Tensor, budget: Budget) -> tf.Tensor:
        """The squared norms of the whole gradient, `[B]`.

        Args:
          squares: the squared norms of the lookup and of the outer form, added.
          budget: the memory for tensors that are built.
        """
        lookup, outer = self._lookup, self._outer
        memory = 12 * math.prod(self._steps())
        if budget.fits(memory):
            squares += 2 * tf.cast(self._shared(), squares.dtype)
        else:
            shared = in_chunks(
                lambda start, size: self._part(start, size)._shared(),
                lookup.batch_size,
                budget.chunk(memory),
            )
            squares += 2 * tf.cast(shared, squares.dtype)
        return floors.floored_sum(
            squares,
            tf.cast(lookup.part_squares() + outer.part_squares(), squares.dtype),
            tf.shape(lookup.ids)[1] + tf.shape(outer.x)[1],
            self._lookup.shape[1],
        )

    def _shared(self) -> tf.Tensor:
        """`[B]`: <a, b> = sum_st (row entries of b_s at token t) <b_s, a_t>."""
        by_row, others = self._outer.x, self._outer.z
        if not self._rows_in_x:
            by_row, others = others, by_row
        entries = tf.gather(by_row, self._lookup.ids, axis=2, batch_dims=1)
        products = tf.matmul(others, self._lookup.z, transpose_b=True)
        return tf.reduce_sum(entries * products, axis=[1, 2])

    def _part(self, start, size) -> Tied:
        return Tied(
            self._lookup.part(start, size),
            self._outer.part(start, size),
            self._rows_in_x,
        )


def tie(parts: list[tuple[Use, object]]) -> Tied | None:
    """The lookup and the product of a table, tied; None for any further uses."""
    lookups = [form for _, form in parts if isinstance(form, Lookup)]
    outers = [(use, form) for use, form in parts if isinstance(form, Outer)]
    if len(parts) != 2 or len(lookups) != 1 or len(outers) != 1:
        return None
    (lookup,), ((use, outer),) = lookups, outers
    if len(lookup.shape) != 2 or min(lookup.shape) < 2 or not use.path.isometric:
        return None
    turned = _turned(use)
    axes = outer.axes
    if turned is None or axes is None or outer.x.shape.rank != 3:
        return None
    shape = lookup.shape[::-1] if turned else lookup.shape
    if outer.shape != shape:
        return None
    return Tied(lookup, outer, axes == ((1, 0) if turned else (0, 1)))


def _turned(use: Use) -> bool | None:
    """Whether the parameter is the transposed variable; None if it is changed more."""
    tensor, turned = use.param, False
    while tensor.dtype != tf.resource:
        op = tensor.op
        if op.type == "Transpose":
            perm = tf.get_static_value(op.inputs[1])
            if perm is None or len(perm) != 2:
                return None
            turned ^= list(perm) == [1, 0]
        elif op.type not in ("Identity", "Cast", "ReadVariableOp"):
            return None
        tensor = op.inputs[0]
    return turned
