"""The certificate of a step: its sums and one of its norms, against TensorFlow alone.

The gradient of the summed losses is, by linearity, the sum of the examples' gradients.
So two ordinary backward passes, which use no rule of this library, decide about the
rules: one with the seed 1 for every example, and one with the seed 1 for a random
example k and 0 for all further examples. The first gives the full sum of the gradients,
and the second the exact gradient of example k:

* the sum of a supplier under the weights 1, and 2 for example k, must be the sum of
  both passes, variable by variable;
* the norms that the supplier states for example k must not be smaller than the norms
  of the second pass.

*Formal guarantees*

* Errors above the tolerance count. An example that a sum leaves out or counts twice,
  and a variable that a sum leaves out or scales, are found whichever example is drawn;
  weights that a sum ignores, squares or gives to other examples, unless the gradient of
  example k is negligible. Norms that are too small for a share p of the examples are
  found with probability p.
* Rounding is no error. All seeds are 0 and 1, so that a pass rounds each example's
  gradient as the step's own pass does, also where it underflows, and so that gradient
  functions that are not linear in the seed are compared, too.
* The certificate is made of tensors alone, for graphs and for XLA. A batch in which a
  gradient is not finite, or example k's is nearly 0, shows nothing, and fails nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

# Against division by 0.
_TINY = 1e-30


class Tolerance(NamedTuple):
    """The errors that count as rounding.

    Attributes:
      sums: of sums, relative to the norms of a variable's gradients.
      norms: of norms, relative to themselves. Norms from inner products of terms that
        cancel are off by up to a thousandth.
      rounding: relative to all terms that the gradients are sums of. A gradient of pure
        rounding errors (the key bias of attention, for example) has no right value.
      cancelled: relative to the largest norm of the batch, for terms that cancel before
        the variables: the gradient of a saturated cross-entropy, sigmoid(z) - 1, is 0
        or 1e-10 by the order of the sum.
      examples: how many examples an ordinary pass may add up.
    """

    sums: float
    norms: float
    rounding: float
    cancelled: float
    examples: float


FINE = Tolerance(1e-3, 1e-2, 1e-4, 1e-5, math.inf)
#: For gradients made one example at a time, whose kernels may differ from the batch's.
ALONE = Tolerance(0.1, 0.1, 1e-4, 1e-5, math.inf)
#: For types below float32, in which an ordinary pass loses the sum of more examples.
COARSE = Tolerance(0.1, 0.1, 1e-2, 1e-2, 8)


@dataclasses.dataclass(frozen=True, eq=False)
class Norms:
    """The norms that a supplier of gradients states.

    Attributes:
      squares: the squared norms by variable, `[V, B]`.
      terms: the summed squares of the terms of each example's gradient, `[V, B]`.
      decisive: the norms that decide about the clip of each group, `[B, L]`.
    """

    squares: tf.Tensor
    terms: tf.Tensor
    decisive: tf.Tensor

    @functools.cached_property
    def largest(self) -> tf.Tensor:
        """The largest finite norm of the batch, over all variables."""
        squares = tf.reduce_sum(self.squares, axis=0)
        finite = tf.where(tf.math.is_finite(squares), squares, 0.0)
        # The maximum over no examples is minus infinity.
        return tf.sqrt(tf.maximum(tf.reduce_max(finite), 0.0))

    @functools.cached_property
    def _rows(self) -> tf.Tensor:
        return tf.concat([self.squares, self.terms, tf.transpose(self.decisive)], 0)

    def weighted(self, weights: tf.Tensor) -> list[tf.Tensor]:
        """Sums over the examples, weighted: of squares, terms, `[V]`, decisive, `[L]`.

        Args:
          weights: `[B]`.
        """
        # A mask, because a weight of 0 does not remove an infinite or NaN norm.
        kept = tf.where(weights > 0, weights * self._rows, 0.0)
        sizes = [part.shape[0] for part in (self.squares, self.terms)]
        return tf.split(tf.reduce_sum(kept, axis=1), [*sizes, -1])


def shuffled(tensor: tf.Tensor) -> tf.Tensor:
    """The rows of `tensor` in an order that is not known before the run.

    The seed is from the operating system, not fixed by `tf.random.set_seed`.
    """
    return tf.random.shuffle(tensor, seed=secrets.randbits(31))


def draw_seeds(
    count: tf.Tensor, present: tf.Tensor | None, tolerance: Tolerance
) -> tuple[tf.Tensor, tf.Tensor]:
    """The seeds of the two backward passes, `[B]` each: 0 or 1.

    Args:
      count: B.
      present: which rows are records, `[B]`, if that is known. A row that fills the
        batch up has no gradient, and so would show nothing.
      tolerance: says how many examples may be added up.
    """
    order = shuffled(tf.range(count))
    if present is not None:
        order = tf.where(present, order, order + count)
    if tolerance.examples == math.inf:
        many = tf.ones_like(order, tf.float32)
    else:
        places = tf.argsort(tf.argsort(order))
        many = tf.cast(places < int(tolerance.examples), tf.float32)
    # A comparison instead of an index, so that XLA compiles an empty batch.
    return many, tf.cast(tf.equal(order, tf.reduce_min(order)), tf.float32)


def sum_errors(
    sums: Sequence[tf.Tensor],
    ordinary: Sequence[tf.Tensor],
    weights: tf.Tensor,
    norms: Norms,
    tolerance: Tolerance,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The errors of a supplier's sums, `[V]`, and whether they could be told.

    Args:
      sums: by variable, vectors.
      ordinary: the sums of TensorFlow, which the supplier's must equal.
      weights: the weight of each example in the sums, `[B]`.
      norms: the norms that the supplier states.
      tolerance: the error must be at most `tolerance.sums`.
    """
    squares, terms, _ = norms.weighted(tf.square(weights))
    rounded = tf.sqrt(tf.reduce_sum(squares + terms))
    scales = tf.sqrt(squares) + _rounding(rounded, norms, tolerance) / tolerance.sums
    differences = [a - b for a, b in zip(sums, ordinary, strict=True)]
    errors = tf.sqrt(_squared_lengths(differences)) / scales
    # Sums that are no numbers are wrong, if the ordinary sums are numbers.
    errors = tf.where(tf.math.is_nan(errors), math.inf, errors)
    shows = tf.math.is_finite(rounded + tf.reduce_sum(_squared_lengths(ordinary)))
    return tf.where(shows, errors, 0.0), shows


def norm_errors(
    gradient: Sequence[tf.Tensor],
    clipped: Sequence[tf.Tensor],
    members: tf.Tensor,
    alone: tf.Tensor,
    norms: Norms,
    tolerance: Tolerance,
) -> tuple[tf.Tensor, tf.Tensor]:
    """How far stated norms are below those of an example's gradient, `[V + L]`.

    Args:
      gradient: the gradient of the example by TensorFlow, by variable, vectors.
      clipped: what is clipped of the example, if more than its gradient.
      members: the variables of each group, `[L, V]`: 1 or 0.
      alone: the seed of the example, `[B]`.
      norms: the norms that the supplier states.
      tolerance: the error must be at most `tolerance.norms`.

    Returns:
      The errors, first by variable and then by group, negative where a norm is larger
      than the gradient's; and whether the example shows something.
    """
    squares, terms, decisive = norms.weighted(alone)
    rounded = tf.sqrt(tf.reduce_sum(squares + terms))
    true = long = _squared_lengths(gradient)
    if clipped is not gradient:
        long = _squared_lengths(clipped)
    groups = tf.reduce_sum(members * long, axis=1)
    true = tf.sqrt(tf.concat([true, groups], axis=0))
    stated = tf.concat([tf.sqrt(squares), decisive], axis=0)
    scales = stated + _rounding(rounded, norms, tolerance) / tolerance.norms
    errors = (true - stated) / scales
    # A record that is dropped has an infinite norm.
    # A bound on rounding that overflows bounds nothing.
    shows = tf.reduce_all(tf.math.is_finite(tf.stack([true, stated, scales])))
    errors = tf.where(shows, errors, 0.0)
    # Where rounding may exceed the limit, a wrong norm would pass.
    least = tolerance.cancelled / tolerance.norms * norms.largest
    return errors, shows & (tf.reduce_max(true) > least)


def _rounding(rounded: tf.Tensor, norms: Norms, tolerance: Tolerance) -> tf.Tensor:
    """The largest length that counts as rounding, for terms of the length `rounded`."""
    return tolerance.rounding * rounded + tolerance.cancelled * norms.largest + _TINY


def _squared_lengths(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The squared norms of vectors, `[V]`."""
    return 2.0 * tf.stack([tf.nn.l2_loss(vector) for vector in vectors])
