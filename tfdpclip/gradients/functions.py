"""Norms and clipped sums as functions of a loss and its variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdpclip._arguments import instance
from tfdpclip._docs import see
from tfdpclip.clipping import ClipRule
from tfdpclip.gradients.engine import PerExampleGradients
from tfdpclip.gradients.loss import drawn_rows
from tfdpclip.sampling.provenance import rows_per_record_of


@tf.autograph.experimental.do_not_convert
def per_example_norms(
    loss: tf.Tensor, variables: Sequence[tf.Variable], **options: Any
) -> tf.Tensor:
    """The L2 norm of each example's gradient over all `variables` together, `[B]`.

    Call this function inside a `tf.function`, after computing the loss. The norms are
    private data without noise. The parts of an example's gradient (positions, looked-up
    tokens) may cancel. Let R be the root of the sum of their squares: where the norm is
    at most R / 4, the result may be up to R / 4 instead, which is safe for clipping
    (docs/guarantees.md).

    Args:
      loss: a loss for each example, `[B]` or `[B, ...]` (averaged over trailing axes),
        or a scalar that is a sum or mean over the batch; then example i's loss is B
        times its share. With ``nominal_batch_size=``, example i's loss in a sum is this
        public number times its share.
      variables: trainable variables.
      **options: see `PerExampleGradients`. Batches of people, or of views, need
        ``rows_per_record=batches.rows_per_record``.

    Raises:
      ValueError: if a known drawn batch has several rows for each record, and
        `rows_per_record` is not given.
      LossStructureError: if a scalar loss cannot be taken apart with certainty.
      ExampleIsolationError: if the graph shows that examples are combined; if only the
        running step shows that, `tf.errors.InvalidArgumentError`.

    >>> w = tf.Variable([1.0, 1.0])
    >>> @tf.function
    ... def norms(x):
    ...     return per_example_norms(tf.linalg.matvec(x, w), [w])
    >>> norms(tf.constant([[3.0, 4.0], [0.0, 1.0]])).numpy().tolist()
    [5.0, 1.0]
    """
    with drawn_rows.kept_apart():
        return _of_records(loss, variables, options).norms


@tf.autograph.experimental.do_not_convert
def clipped_sum(
    loss: tf.Tensor,
    variables: Sequence[tf.Variable],
    rule: ClipRule,
    state: Any = (),
    **options: Any,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """The sum over examples of the clipped gradients, and the norms before clipping.

    No noise is added. The method is ghost norms and book-keeping (Li et al. 2022; Bu et
    al. 2023), with one backward pass, at the level of TensorFlow ops.

    *Formal guarantees*: adding or removing an example changes the sums, joined to a
    single vector, by at most ``rule.sensitivity(state)`` in L2 norm, if examples are
    isolated. Give whole elements of drawn batches: a part of the rows (``x[:8]``) is
    refused, as the draw decides which records come first. A sum of two calls on one
    element changes by twice as much.

    Args:
      loss: as for `per_example_norms`; a scalar sum needs ``nominal_batch_size=``,
        because B is no public number.
      variables: trainable variables.
      rule: a clip rule.
      state: the rule's state.
      **options: as for `per_example_norms`.

    Returns:
      The sums, a dense tensor of each variable's shape (zeros for a variable that the
      loss does not depend on), and the norms, `[B]`. A rule with groups that is not yet
      bound to variables is bound to `variables`.

    Raises:
      LossStructureError: also if the loss is a sum without ``nominal_batch_size``.

    >>> from tfdpclip.clipping import FixedClip
    >>> w = tf.Variable([1.0, 1.0])
    >>> @tf.function
    ... def step(x):
    ...     return clipped_sum(tf.linalg.matvec(x, w), [w], FixedClip(1.0))
    >>> sums, norms = step(tf.constant([[3.0, 4.0], [0.0, 0.5]]))
    >>> sums[0].numpy().round(3).tolist()
    [0.6, 1.3]
    """
    instance("rule", rule, ClipRule, "a clip rule, such as FixedClip(1.0)")
    options.setdefault("groups", rule.assignment)
    gradients = _of_records(loss, variables, options)
    return gradients.clipped_sum(rule, state), gradients.norms


def _of_records(loss, variables, options) -> PerExampleGradients:
    """The gradients, refused if the rows of a record would be clipped separately."""
    gradients = PerExampleGradients(loss, variables, **options)
    each = rows_per_record_of(gradients.flows.sources)
    if "rows_per_record" not in options and each and 1 not in each:
        raise ValueError(
            f"The loss seems to be of batches with {max(each)} rows for each record "
            "(people, or views), and the rows would be clipped separately. Write "
            f"rows_per_record=batches.rows_per_record ({max(each)}); or "
            "rows_per_record=1, if each row is a record."
            + see("records-of-several-rows")
        )
    return gradients
