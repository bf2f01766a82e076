"""The check that no example leaks into another's gradient.

Scale each example's loss by its own power of two and differentiate again: if the rows
of a tensor that belong to example i feed only example i's loss, its gradient is scaled
by exactly that power, and nothing is lost to rounding. Mixing of any kind shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.gradients.backward import gradients_at
from tfdpclip.gradients.dataflow import Dataflow

UNCHECKED, PASSED, FAILED = 0, 1, 2
# A batch in which fewer than two examples reach a tensor (an empty draw, a layer below
# a head that is still zero) proves nothing about it, and the next step checks again; a
# tensor that no two examples reach in this many steps is let go.
ATTEMPTS = 50

# Relative to the largest entry of the gradient. Isolated examples give 0 or, where the
# two gradients are computed in different orders, about 1e-7.
_TOLERANCE = 2e-5


@dataclasses.dataclass
class Probe:
    """One tensor whose gradient must separate by example.

    Attributes:
      tensor: the tensor.
      label: how errors name it.
    """

    tensor: tf.Tensor
    label: str


def check(
    per_example: tf.Tensor,
    probes: list[Probe],
    flows: Dataflow,
    batch_size: tf.Tensor,
    claims: Sequence[tuple[Callable[[], tf.Tensor], str]] = (),
) -> tuple[tf.Tensor, tf.Tensor, list[tf.Operation]]:
    """Builds the check in the current graph.

    Args:
      per_example: the losses, `[B]`.
      probes: the tensors to test.
      flows: the analysis of the losses.
      batch_size: B.
      claims: what rules took for granted: functions that build a boolean scalar, and
        the error if it is False.

    Returns:
      Two boolean scalars, whether all is well and whether the batch could show it, and
      the assertions, which XLA drops.
    """
    powers = tf.random.shuffle(tf.range(batch_size)) % 8
    scales = tf.cast(tf.bitwise.left_shift(tf.ones_like(powers), powers), tf.float32)
    # A loss that is not finite has no gradient worth comparing.
    usable = tf.math.is_finite(per_example)
    ok, conclusive, assertions = tf.constant(True), tf.constant(True), []

    def require(condition, *message):
        nonlocal ok
        ok = tf.logical_and(ok, condition)
        assertions.append(tf.debugging.Assert(condition, list(message)))

    leading = [source for source in flows.sources if flows[source].leads]
    if leading:
        sizes = tf.stack([tf.shape(source)[0] for source in leading])
        require(
            tf.reduce_any(tf.equal(sizes, batch_size)),
            "ExampleIsolationError: the loss has as many entries as given first, but "
            "the data have these numbers of examples. An entry of the loss must be an "
            "example: reshape the loss to [batch, entries per example].",
            batch_size,
            sizes,
        )
    for claim, message in claims:
        require(claim(), message)
    floats = [s for s in leading if s.dtype.is_floating] + flows.converted
    probes = [*probes, *(Probe(s, f"the data at {s.name!r}") for s in floats)]
    tensors = [probe.tensor for probe in probes]
    # Both gradients are built here, so that they add up in the same order: in coarse
    # types another order is another result.
    plain = gradients_at(per_example, tensors)
    again = gradients_at(per_example, tensors, tf.cast(scales, per_example.dtype))
    for probe, first, scaled in zip(probes, plain, again, strict=True):
        if first is None or scaled is None:
            continue
        good, telling = _separates(
            probe.tensor, first, scaled, scales, usable, flows, batch_size
        )
        conclusive = tf.logical_and(conclusive, telling)
        require(
            good,
            f"ExampleIsolationError: an example's gradient depends on other examples "
            f"at {probe.label}. Clipping would protect nobody. Batch normalisation in "
            "training mode, an in-batch comparison, or a batch axis that is not the "
            "first does this. Use GroupNormalization or LayerNormalization, and keep "
            "the batch on axis 0." + see("mixed-examples"),
        )
    return ok, conclusive, assertions


def _separates(tensor, first, scaled, scales, usable, flows, batch_size):
    """Whether the gradient separates by example, and whether two examples have one."""
    flow = flows[tensor]
    first = tf.convert_to_tensor(first)
    scaled = tf.convert_to_tensor(scaled)
    if first.shape.rank == 0:
        return tf.constant(False), tf.constant(True)
    axis = flow.axes[0] if flow.axes and len(flow.axes) == 1 else 0
    rank = first.shape.rank
    length = tf.shape(first)[axis]
    rows = length // tf.maximum(batch_size, 1)
    whole = tf.equal(rows * batch_size, length)
    # Which example each row belongs to; anything in range where rows are left over.
    row = tf.range(length)
    minor = flow.leads and flow.minor
    example = row % tf.maximum(batch_size, 1) if minor else row // tf.maximum(rows, 1)
    example = tf.minimum(example, batch_size - 1)
    shape = [1] * axis + [-1] + [1] * (rank - axis - 1)
    expected = tf.reshape(tf.gather(scales, example), shape)
    kept = tf.reshape(tf.gather(usable, example), shape)
    a = tf.cast(first, tf.float32) * expected
    b = tf.cast(scaled, tf.float32)
    finite = tf.math.is_finite(a) & tf.math.is_finite(b) & kept
    error = tf.reduce_max(tf.where(finite, tf.abs(a - b), 0.0))
    size = tf.reduce_max(tf.where(finite, tf.abs(a), 0.0))
    others = [i for i in range(rank) if i != axis]
    by_row = tf.reduce_any(finite & (a != 0), axis=others)
    reached = tf.math.unsorted_segment_max(
        tf.cast(by_row, tf.int32), example, batch_size
    )
    telling = tf.math.count_nonzero(reached > 0) >= 2
    good = tf.logical_and(whole, error <= _TOLERANCE * size)
    return good, tf.logical_or(telling, tf.logical_not(whole))
