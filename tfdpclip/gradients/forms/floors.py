"""Norms that rounding cannot make too small.

An example's gradient is often a sum of parts (positions of a sequence, places of an
image, looked-up tokens) that nearly cancel. Then two things go wrong in float32.

*The norm.* A norm made of inner products of the parts has a rounding error that is
relative to the parts, and not to the small rest after they cancel.

*The sum over the batch.* A sum made of the parts of all examples at once has a rounding
error relative to the parts. An example of tiny norm keeps a weight of 1 (or gets a
larger weight, where rules scale up), so its huge parts enter the sum together with the
parts of all remaining examples, and no clip norm bounds the rest that does not cancel.

So no norm that decides a weight is below a share f of R_i, the root of the sum of the
squares of the example's T parts, and f grows with T:

    n_i >= f R_i,    R_i^2 = sum_t |p_it|^2,    f = min(sqrt(T) / 32, 1 / 4).

Unrelated parts have n = R for any T; only parts that cancel are below. As
w_i n_i <= C, the parts of a batch then have sqrt(sum_t |w_i p_it|^2) <= C / f for every
example, and sum_t |w_i p_it| <= sqrt(T) C / f: the rounding error of the sum over B
examples is at most gamma max(32, 4 sqrt(T)) B C, which is max(32, 4 sqrt(T)) times the
error for examples of a single part, with gamma the relative error of a float32 sum
(2^-24 times a small factor where rounding errors are independent).

In training the floor hardly ever decides: in networks for images and text, from the
first step to the last, parts cancelled below a quarter only in queries and keys of
attention, as in the keys' biases, which have zero gradients. The floor changed no
example's norm of all variables by 1e-3 (`tests/gradients/floors_in_training_test.py`).

Where each example's own gradient is built and the sum is made of these gradients, no
floor is needed: the norm is measured on the rounded gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

from tfdpclip._devices import in_xla

# The square of a quarter, and the number of parts from which on it holds.
FLOOR, _MANY = 1 / 16, 64
# Matrix products add up terms one after the other along runs of at most this length
# here; all rounding errors of a run may have the same sign.
_RUN = 512
# Between the first two, sums of squares in float32 are sure, and so are products of
# two. Squared norms above the third have lost nothing in these products: 1e-38 a term.
_SMALL, _LARGE, _SURE = 1e-28, 1e15, 1e-24
# The relative share of a norm that may be missing.
_NOTHING = 1e-7
# A number that divides without an overflow, in types that do not reach 1.2e-38.
_LEAST = {tf.float16: 6.2e-5}


def _unit(tensor: tf.Tensor) -> float:
    """The largest relative rounding error of a number of the tensor's type."""
    return 2.0**-53 if tensor.dtype == tf.float64 else 2.0**-24


def floored(
    squares: tf.Tensor, parts: tf.Tensor, terms: tf.Tensor | int, units: float = 16.0
) -> tf.Tensor:
    """Squared norms, `[B]`, never below the floor of their parts.

    Args:
      squares: the squares of sums that were computed in float32; the error of a sum is
        at most a unit of rounding, times (units + terms / 2) sum_t |p_t|.
      parts: the sum of the squares of the parts, `[B]`.
      terms: the number of parts at most.
      units: see `squares`.
    """
    terms = tf.cast(terms, squares.dtype)
    error = _unit(squares) * (units + terms / 2) * tf.sqrt(terms)
    upper = tf.square(tf.sqrt(squares) + error * tf.sqrt(parts))
    return _guarded(squares, upper, parts, terms)


def floored_sum(squares, parts, terms, width: int) -> tf.Tensor:
    """Squared norms, `[B]`, of sums a + b, never below the floor of their parts.

    Args:
      squares: |a|^2 + |b|^2 + 2 <a, b>.
      parts: the sum of the squares of all parts of a and b.
      terms: the number of these parts.
      width: the length of the inner products.
    """
    terms = tf.cast(terms, squares.dtype)
    units = 2 * _RUN + width / 2 + terms / 4
    upper = squares + _unit(squares) * units * terms * parts
    return _guarded(squares, upper, parts, terms)


def _guarded(squares, upper, parts, terms):
    """`squares` where little cancels, else an upper bound; NaN stays NaN."""
    least = FLOOR * tf.minimum(terms / _MANY, 1.0) * parts
    return tf.where(squares < parts / 2, tf.maximum(upper, least), squares)


def gram_norms(x: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    """`[B]` squared norms of sum_t x_t (outer) z_t, from two Gram matrices.

    Args:
      x: `[B, (G,) T, K]`.
      z: `[B, (G,) T, U]`.
    """
    if in_xla() or x.dtype != tf.float32 or z.dtype != tf.float32:
        return _scaled_gram_norms(x, z)
    # Without scaling first: few examples need the passes that scaling takes.
    (x_gram, x_units), (z_gram, z_units) = gram(x), gram(z)
    squares = from_grams(x_gram, z_gram, x_units + z_units)
    sure = _nothing_lost(
        tf.linalg.diag_part(x_gram), tf.linalg.diag_part(z_gram), squares
    )
    return mended(squares, sure, _scaled_gram_norms, x, z)


def mended(
    values: tf.Tensor,
    sure: tf.Tensor,
    exact: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    x: tf.Tensor,
    z: tf.Tensor,
) -> tf.Tensor:
    """`values`, `[B]`, with `exact(x, z)` of the examples that are not `sure`."""

    def mend():
        rows = tf.where(~sure)
        few = [tf.gather(part, rows[:, 0]) for part in (x, z)]
        return tf.tensor_scatter_nd_update(values, rows, exact(*few))

    return tf.cond(tf.reduce_all(sure), lambda: values, mend)


def _nothing_lost(x_squares, z_squares, squares) -> tf.Tensor:
    """Whether float32 held all of a norm: nothing overflowed, and little vanished.

    In a sum of squares of at least `_SMALL`, the vanished terms below 1e-38 are worth
    less than 1e-6. A smaller sum counts as `_SMALL`: the largest possible contribution
    of its steps to the norm must be negligible.

    Args:
      x_squares: |x_t|^2, `[B, (G,) T]`.
      z_squares: |z_t|^2, `[B, (G,) T]`.
      squares: the squares of the norms, `[B]`.
    """
    axes = list(range(1, x_squares.shape.rank))
    fits = (x_squares <= _LARGE) & (z_squares <= _LARGE)
    unseen = (x_squares < _SMALL) | (z_squares < _SMALL)
    most = tf.sqrt(tf.maximum(x_squares, _SMALL)) * tf.sqrt(
        tf.maximum(z_squares, _SMALL)
    )
    lost = tf.reduce_sum(tf.where(unseen, most, tf.zeros_like(most)), axis=axes)
    return (
        tf.reduce_all(fits, axis=axes)
        & (squares >= _SURE)
        & tf.math.is_finite(squares)
        & (lost <= _NOTHING * tf.sqrt(squares))
    )


def _scaled_gram_norms(x, z):
    x, z, weights, size = _by_steps(x, z)
    (x_gram, x_units), (z_gram, z_units) = gram(x), gram(z)
    z_gram *= weights[..., tf.newaxis] * weights[..., tf.newaxis, :]
    squares = from_grams(x_gram, z_gram, x_units + z_units)
    return squares * tf.square(size)


def outer_parts(x: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    """`[B]`: sum_t |x_t|^2 |z_t|^2, for `x` and `z` as for `gram_norms`."""
    return _outer_parts[x.shape.rank](x, z)


def _squares_of_parts(x, z):
    x, z, weights, size = _by_steps(x, z)
    parts = tf.reduce_sum(tf.square(x), -1) * tf.reduce_sum(tf.square(z), -1)
    parts *= tf.square(weights)
    parts = tf.reduce_sum(parts, axis=list(range(1, parts.shape.rank)))
    return parts * tf.square(size)


# Traced once or twice for all layers: the comparison calls this for every layer. A
# single function that had seen two ranks would keep no static rank.
_outer_parts = {
    rank: tf.function(_squares_of_parts, autograph=False, reduce_retracing=True)
    for rank in (3, 4)
}


def _by_steps(x, z):
    """Each x_t and z_t scaled to 1; scales over the largest scale; the largest scale.

    Nothing overflows or, worse, underflows early: a small x_t may be multiplied with a
    huge z_t.
    """
    x, x_sizes = scaled(x, 1)
    z, z_sizes = scaled(z, 1)
    sizes = x_sizes * z_sizes
    size = tf.reduce_max(sizes, axis=list(range(1, sizes.shape.rank)))
    size = tf.where(size > 0, size, tf.ones_like(size))
    shape = [-1] + [1] * (sizes.shape.rank - 1)
    return x, z, sizes / tf.reshape(size, shape), size


def gram(x: tf.Tensor) -> tuple[tf.Tensor, float]:
    """x x^T, `[..., T, T]`, and the largest error of an entry in units of |x_s| |x_t|.

    A run of k terms that all round the same way has an error of k / 2 units. No run is
    longer than `_RUN`.
    """
    width = x.shape[-1]
    if width is None or width <= _RUN:
        return tf.matmul(x, x, transpose_b=True), (width or _RUN) / 2
    count = math.ceil(width / _RUN)
    run = math.ceil(width / count)
    rank = x.shape.rank
    if run * count != width:
        x = tf.pad(x, [[0, 0]] * (rank - 1) + [[0, run * count - width]])
    x = tf.reshape(x, tf.concat([tf.shape(x)[:-1], [count, run]], 0))
    x = tf.transpose(x, [*range(rank - 2), rank - 1, rank - 2, rank])
    return tf.reduce_sum(tf.matmul(x, x, transpose_b=True), axis=-3), (run + count) / 2


def from_grams(x: tf.Tensor, z: tf.Tensor, units: float) -> tf.Tensor:
    """`[B]` squared norms from two Gram matrices, `[B, (G,) T, T]`; never too small.

    The error of an entry of the product is at most `units` + 8 units of
    |x_s||x_t||z_s||z_t|, and adding up T^2 entries brings about T / 4 more: together,
    these units times S^2, with S = sum_t |x_t| |z_t|. The error is added to the norms
    of terms that cancel.
    """
    axes = list(range(1, x.shape.rank))
    squares = tf.reduce_sum(x * z, axis=axes)
    own = tf.linalg.diag_part(x) * tf.linalg.diag_part(z)
    sizes = tf.square(tf.reduce_sum(tf.sqrt(own), axis=-1))
    parts = tf.reduce_sum(own, axis=-1)
    if len(axes) == 3:
        sizes, parts = tf.reduce_sum(sizes, -1), tf.reduce_sum(parts, -1)
    steps = tf.cast(tf.shape(x)[-1], x.dtype)
    upper = squares + _unit(squares) * (units + 8 + steps / 4) * sizes
    return _guarded(squares, upper, parts, steps)


def scaled(tensor: tf.Tensor, axes: int | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """The tensor divided by its largest entries, and these entries (1 if not finite).

    Args:
      tensor: `[B, ...]`.
      axes: how many last axes to search for the largest entry; all but the first if
        None.
    """
    rank = tensor.shape.rank
    last = list(range(1 if axes is None else rank - axes, rank))
    size = tf.reduce_max(tf.abs(tensor), axis=last, keepdims=True)
    size = tf.where(tf.math.is_finite(size), size, tf.ones([], size.dtype))
    # A size of 0 stays 0 in the result, so that products with it are 0.
    least = tf.constant(_LEAST.get(size.dtype, 1.2e-38), size.dtype)
    return tensor / tf.maximum(size, least), tf.squeeze(size, axis=last)
