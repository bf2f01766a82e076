"""The check that no example leaks into another's gradient.

Scale each example's loss by its own power of two and differentiate again: if the rows
of a tensor that belong to example i feed only example i's loss, its gradient is scaled
by exactly that power, and nothing is lost to rounding. Mixing of any kind shows.
"""

from __future__ import annotations

import dataclasses
import functools

import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.gradients import chance
from tfdpclip.gradients.dataflow import Dataflow

# Relative to the largest entry of the gradient. Isolated examples give 0 or, where the
# two gradients are computed in different orders, about 1e-7.
_TOLERANCE = 2e-5


@dataclasses.dataclass
class Probe:
    """One tensor whose gradient must separate by example.

    Attributes:
      tensor: the tensor.
      label: how errors name it.
      like: something of its shape that a step has at hand anyway.
      anywhere: whether examples may be on any axis, because nobody needs to know.
    """

    tensor: tf.Tensor
    label: str
    like: tf.Tensor | None = None
    anywhere: bool = False


def all_probes(given: list[Probe], flows: Dataflow) -> list[Probe]:
    """What to test: the probes given, and the floating-point data themselves."""
    floats = [s for s in _leading(flows) if s.dtype.is_floating] + flows.converted
    return [*given, *(Probe(s, f"the data at {s.name!r}") for s in floats)]


def _leading(flows: Dataflow) -> list[tf.Tensor]:
    return [source for source in flows.sources if flows[source].leads]


def counts_agree(flows: Dataflow, batch_size: tf.Tensor) -> tf.Tensor:
    """Whether the loss has as many entries as some data have rows, a scalar."""
    leading = _leading(flows)
    if not leading:
        return tf.constant(True)
    sizes = tf.stack([tf.shape(source)[0] for source in leading])
    return tf.reduce_any(tf.equal(sizes, batch_size))


COUNTS = (
    "ExampleIsolationError: the loss has not as many entries as the data have "
    "examples. An entry of the loss must be an example: reshape the loss to "
    "[batch, entries per example]."
)


def mixed_at(label: str) -> str:
    """The error for a tensor whose gradient does not separate by example."""
    return (
        f"ExampleIsolationError: an example's gradient depends on other examples "
        f"at {label}. Clipping would protect nobody. Batch normalisation in "
        "training mode, an in-batch comparison, or a batch axis that is not the "
        "first does this. Use GroupNormalization or LayerNormalization, and keep "
        "the batch on axis 0." + see("mixed-examples")
    )


def random_powers(batch_size: tf.Tensor) -> tf.Tensor:
    """A power of two from 1 to 128 for each example, `[B]`: scaling by it is exact."""
    powers = chance.shuffled(tf.range(batch_size)) % 8
    return tf.cast(tf.bitwise.left_shift(tf.ones_like(powers), powers), tf.float32)


def separate(
    probes: list[Probe],
    plain: list[tf.Tensor],
    scaled: list[tf.Tensor | None],
    flows: Dataflow,
    seeds: tf.Tensor,
    usable: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compares gradients of plain losses with those of losses that were scaled.

    Args:
      probes: the tensors.
      plain: the gradients of the summed losses at the tensors.
      scaled: those of the losses weighted by `seeds`; None for none.
      flows: the analysis of the losses.
      seeds: `[B]`.
      usable: `[B]`, which examples' losses are finite: no other gradient is worth
        comparing.

    Returns:
      `[P]`, boolean: whether the gradient at each probe separates by example, and
      whether two examples have one, so that mixing could show.
    """
    good, telling = [], []
    for probe, first, again in zip(probes, plain, scaled, strict=True):
        if again is None:
            separates, two = tf.constant(True), tf.constant(True)
        else:
            flow = flows[probe.tensor]
            compare = _separates_somewhere if probe.anywhere else _separates
            separates, two = compare(flow, first, again, seeds, usable)
        good.append(separates)
        telling.append(two)
    if not probes:
        return tf.constant([], tf.bool), tf.constant([], tf.bool)
    return tf.stack(good), tf.stack(telling)


def _separates(flow, first, scaled, scales, usable, axis=None):
    """Whether the gradient separates by example, and whether two examples have one."""
    rank = first.shape.rank
    if rank == 0:
        return tf.constant(False), tf.constant(True)
    if axis is None:
        axis = flow.axes[0] if flow.axes and len(flow.axes) == 1 else 0
    if axis != 0:
        perm = [axis, *(i for i in range(rank) if i != axis)]
        first, scaled = tf.transpose(first, perm), tf.transpose(scaled, perm)
    compare = _compare_minor if flow.leads and flow.minor else _compare_major
    return compare(_as_matrix(first), _as_matrix(scaled), scales, usable)


def _separates_somewhere(flow, first, scaled, scales, usable):
    """The same, along whichever axis it does."""
    several = tf.math.count_nonzero(scales) > 1
    sure = perhaps = mixed = tf.constant(False)
    for axis in range(first.shape.rank):
        good, two = _separates(flow, first, scaled, scales, usable, axis)
        whole = tf.equal(tf.shape(first)[axis] % tf.maximum(tf.size(scales), 1), 0)
        sure, perhaps, mixed = sure | good & two, perhaps | good, mixed | ~good & whole
    # Where one example alone has a gradient, any axis may seem to do.
    separates = sure | perhaps & ~(several & mixed)
    return separates, sure | ~separates


def _as_matrix(tensor: tf.Tensor) -> tf.Tensor:
    """`[N, ...]` as `[N, entries]` in float32."""
    entries = tensor.shape[1:].num_elements()
    if entries is None:
        rows = tf.shape(tensor)[0]
        entries = tf.reduce_prod(tf.shape(tensor)[1:])
        tensor = tf.reshape(tensor, tf.stack([rows, entries]))
    elif tensor.shape.rank != 2:
        # An empty row has nothing to compare.
        tensor = tf.reshape(tensor, [-1, entries]) if entries else tf.zeros([0, 1])
    return tf.cast(tensor, tf.float32)


def _compare(first, scaled, scales, usable, *, minor):
    """Compares two gradients, `[N, entries]`, row by row; see `_separates`."""
    batch_size, length = tf.size(scales), tf.shape(first)[0]
    rows = length // tf.maximum(batch_size, 1)
    whole = tf.equal(rows * batch_size, length)
    # Which example each row belongs to; anything in range where rows are left over.
    row = tf.range(length)
    example = row % tf.maximum(batch_size, 1) if minor else row // tf.maximum(rows, 1)
    example = tf.minimum(example, batch_size - 1)
    # As few arrays of the gradients' own size as possible, each overwritten.
    error = first * tf.gather(scales, example)[:, tf.newaxis]
    error = tf.reduce_max(tf.abs(error - scaled), axis=1)
    size = tf.reduce_max(tf.abs(scaled), axis=1)
    # Rows with an entry that is not finite show nothing.
    shows = tf.math.is_finite(error) & tf.math.is_finite(size)
    shows &= tf.gather(usable, example)
    error, size = (tf.where(shows, part, 0.0) for part in (error, size))
    reached = tf.math.unsorted_segment_max(size, example, batch_size)
    telling = tf.math.count_nonzero(reached > 0) >= 2
    good = whole & (tf.reduce_max(error) <= _TOLERANCE * tf.reduce_max(size))
    return good, telling | ~whole


# Functions of their own: a model with a hundred tensors calls them a hundred times, and
# traces them once.
_SIGNATURE = [
    tf.TensorSpec([None, None], tf.float32),
    tf.TensorSpec([None, None], tf.float32),
    tf.TensorSpec([None], tf.float32),
    tf.TensorSpec([None], tf.bool),
]
_compare_major, _compare_minor = (
    tf.function(
        functools.partial(_compare, minor=minor),
        input_signature=_SIGNATURE,
        autograph=False,
    )
    for minor in (False, True)
)
