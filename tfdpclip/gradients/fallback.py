"""Per-example gradients by a vectorised Jacobian, where no rule applies.

Correct for any op that TensorFlow can differentiate, and slow: the cost of one backward
pass for every example, each over the whole batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import tensorflow as tf

from tfdpclip.gradients.forms import Budget, in_chunks, sum_squares


class JacobianFallbackWarning(UserWarning):
    """Some variables take the slow path."""


def warn(variables: Sequence[tf.Variable], reasons: Sequence[str]) -> None:
    """Warns once per trace, naming the variables and the cost."""
    named = "; ".join(
        f"{variable.name} ({reason})"
        for variable, reason in zip(variables, reasons, strict=True)
    )
    warnings.warn(
        "No per-example rule covers how these variables are used, so their gradients "
        "come from a vectorised Jacobian, which costs about one backward pass per "
        f"example: {named}.",
        JacobianFallbackWarning,
        stacklevel=2,
    )


def jacobian(
    per_example: tf.Tensor,
    variables: Sequence[tf.Variable],
    handles: Sequence[tf.Tensor],
    indices: tf.Tensor,
) -> list[tf.Tensor]:
    """The gradients of the losses at `indices`: one `[len(indices), *shape]` each.

    Differentiates by the variables' handles in the graph of the loss, so that it works
    inside loops and branches too.
    """

    def one(index):
        seed = tf.one_hot(index, tf.shape(per_example)[0], dtype=per_example.dtype)
        gradients = tf.gradients(per_example, list(handles), grad_ys=seed)
        return [
            tf.zeros(v.shape, v.dtype) if g is None else tf.convert_to_tensor(g)
            for g, v in zip(gradients, variables, strict=True)
        ]

    return tf.vectorized_map(one, indices, fallback_to_while_loop=True)


def _bytes_per_example(variables) -> int:
    return 4 * sum(math.prod(v.shape) for v in variables)


def squared_norms(
    per_example: tf.Tensor,
    variables: Sequence[tf.Variable],
    handles: Sequence[tf.Tensor],
    batch_size: tf.Tensor,
    budget: Budget,
) -> tf.Tensor:
    """`[B, V]`: one column for each of the V `variables`.

    A value that is not a number in one example's backward pass reaches every other's
    here, because each differentiates the whole batch. Nothing can then be said about
    anybody's norm, so the step fails. (XLA drops the assertion; every example is then
    dropped for its norm.)
    """

    def compute(start, size):
        gradients = jacobian(per_example, variables, handles, start + tf.range(size))
        squares = [tf.cast(sum_squares(g), tf.float32) for g in gradients]
        return tf.stack(squares, axis=1)

    memory = _bytes_per_example(variables)
    if budget.fits(memory):
        squares = compute(tf.constant(0), batch_size)
    else:
        chunk, width = budget.chunk(memory), len(variables)
        squares = in_chunks(compute, batch_size, chunk, width)
    numbers = tf.reduce_all(tf.logical_not(tf.math.is_nan(squares)))
    assertion = tf.debugging.Assert(numbers, [not_a_number(variables)])
    with tf.control_dependencies([] if assertion is None else [assertion]):
        return tf.identity(squares)


def not_a_number(variables: Sequence[tf.Variable]) -> str:
    """The error for an example that cannot be kept apart from the others."""
    return (
        "An example's loss or gradient is not a number, and these variables take the "
        "Jacobian path, on which it cannot be kept apart from the other examples: "
        f"{', '.join(v.name for v in variables)}. Remove examples that are not finite "
        "before training."
    )


def masked_sums(
    per_example: tf.Tensor,
    variables: Sequence[tf.Variable],
    handles: Sequence[tf.Tensor],
    weights: tf.Tensor,
    kept: tf.Tensor,
) -> list[tf.Tensor]:
    """Weighted sums over the examples in `kept`, whatever the others contain.

    Examples are taken one at a time, because multiplying a gradient that is not finite
    by 0 does not remove it.
    """
    count = tf.shape(weights)[0]

    def body(i, sums):
        gradients = jacobian(per_example, variables, handles, i[tf.newaxis])
        added = [
            total + tf.where(kept[i], tf.cast(weights[i], g.dtype) * g[0], 0)
            for total, g in zip(sums, gradients, strict=True)
        ]
        return i + 1, added

    start = [tf.zeros(v.shape, v.dtype) for v in variables]
    _, sums = tf.while_loop(
        lambda i, sums: i < count,
        body,
        (tf.constant(0), start),
        parallel_iterations=1,
    )
    return sums
