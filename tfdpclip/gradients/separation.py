"""The check that no example leaks into another's gradient.

Scale each example's loss by its own power of two and differentiate again: if the rows
of a tensor that belong to example i feed only example i's loss, its gradient is scaled
by exactly that power, and nothing is lost to rounding. Mixing of any kind shows.

What is compared are four numbers for each row, its products with random weights that
are drawn anew in every check: whole gradients at all places would have to be kept from
one backward pass to the next. Weights are of random sign and size: with signs alone,
(a, -a), the gradient of two logits, would give 0 half of the time. If a row is off by
d, all four are below |d| / 10 in fewer than one check of a thousand. Rows of four
entries or fewer are compared as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import tensorflow as tf

from tfdpclip import _streams
from tfdpclip._devices import in_xla
from tfdpclip._docs import see
from tfdpclip.gradients import chance
from tfdpclip.gradients.dataflow import Dataflow

# Relative to the longest row of the gradient. Isolated examples give 0 or, where the
# two gradients are computed in different orders, about 1e-7.
_TOLERANCE = 2e-5
# Products of each row with random weights.
_COLUMNS = 4


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


def nothing_yet(probes: list[Probe], flows: Dataflow) -> list[tf.Tensor]:
    """What a loop starts with in the place of `products`."""
    zeros = []
    for probe in probes:
        # Not the output itself: oneDNN's convolutions give one that somebody takes
        # a wrong shape where the batch is empty.
        like = probe.tensor if probe.like is None else probe.like
        for axis in _axes(probe, flows):
            columns = min(_COLUMNS, _width(probe, axis) or _COLUMNS)
            zeros.append(tf.zeros([tf.shape(like)[axis], columns]))
    return zeros


def _width(probe: Probe, axis: int) -> int | None:
    """How many entries a row has, if that is known; an empty row has one, 0."""
    sizes = probe.tensor.shape.as_list()
    others = sizes[:axis] + sizes[axis + 1 :]
    return None if None in others else max(1, math.prod(others))


def products(
    probes: list[Probe],
    gradients: list[tf.Tensor | None],
    flows: Dataflow,
    seed: tf.Tensor,
) -> list[Rows | None]:
    """The rows of the gradients, along every axis that the examples may be on.

    Args:
      probes: the tensors.
      gradients: the gradients of some losses there; None for none.
      flows: the analysis of the losses.
      seed: int64 `[2]`, of the random weights.
    """
    of_rows = _products_in_xla if in_xla() else _products
    found: list[Rows | None] = []
    for probe, gradient in zip(probes, gradients, strict=True):
        if gradient is None:
            found += [None] * len(_axes(probe, flows))
            continue
        gradient = tf.convert_to_tensor(gradient)
        for axis in _axes(probe, flows):
            others = [i for i in range(gradient.shape.rank) if i != axis]
            first = tf.transpose(gradient, [axis, *others]) if axis else gradient
            rows = _as_matrix(first)
            made, sizes = of_rows(rows, seed)
            if (_width(probe, axis) or _COLUMNS + 1) <= _COLUMNS:
                made = rows
            found.append(Rows(made, sizes))
    return found


@dataclasses.dataclass
class Rows:
    """The rows of a gradient.

    Attributes:
      products: with random weights, or the rows themselves, `[N, columns]`.
      sizes: their norms, `[N]`.
    """

    products: tf.Tensor
    sizes: tf.Tensor


def _axes(probe: Probe, flows: Dataflow) -> list[int]:
    rank = probe.tensor.shape.rank
    if probe.anywhere or not rank:
        return list(range(rank))
    axes = flows[probe.tensor].axes
    return [axes[0] if axes and len(axes) == 1 else 0]


def separate(
    probes: list[Probe],
    plain: list[tf.Tensor],
    scaled: list[Rows | None],
    flows: Dataflow,
    seeds: tf.Tensor,
    usable: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compares gradients of plain losses with those of losses that were scaled.

    Args:
      probes: the tensors.
      plain: the `products` of the gradients of the summed losses.
      scaled: the rows of those of the losses weighted by `seeds`.
      flows: the analysis of the losses.
      seeds: `[B]`.
      usable: `[B]`, which examples' losses are finite: no other gradient is worth
        comparing.

    Returns:
      `[P]`, boolean: whether the gradient at each probe separates by example, and
      whether two examples have one, so that mixing could show.
    """
    good, telling = [], []
    pairs = zip(plain, scaled, strict=True)
    for probe in probes:
        own = [next(pairs) for _ in _axes(probe, flows)]
        if not own:
            separates, two = tf.constant(False), tf.constant(True)
        elif any(again is None for _, again in own):
            separates, two = tf.constant(True), tf.constant(True)
        else:
            flow = flows[probe.tensor]
            compare = _compare_minor if flow.leads and flow.minor else _compare_major
            found = [
                compare(first, again.products, again.sizes, seeds, usable)
                for first, again in own
            ]
            separates, two = found[0]
            if probe.anywhere:
                separates, two = _somewhere(own, found, seeds)
        good.append(separates)
        telling.append(two)
    if not probes:
        return tf.constant([], tf.bool), tf.constant([], tf.bool)
    return tf.stack(good), tf.stack(telling)


def _somewhere(own, found, scales):
    """Whether the gradient separates along one of the axes, and whether that tells."""
    several = tf.math.count_nonzero(scales) > 1
    sure = perhaps = mixed = tf.constant(False)
    for (first, _), (good, two) in zip(own, found, strict=True):
        whole = tf.equal(tf.shape(first)[0] % tf.maximum(tf.size(scales), 1), 0)
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


def _of_rows(rows, seed, *, xla):
    """The products of each row with random weights, `[N, 4]`, and its norm, `[N]`."""
    width = tf.shape(rows)[1]
    drawn = _streams.uniform(tf.stack([width, _COLUMNS]), seed)
    # Of either sign, from 1 to 2.
    weights = tf.where(drawn < 0.5, 1 + 2 * drawn, -2 * drawn)
    # No array of the gradient's own size, and no number that is squared alone: those
    # below 1e-19 would be lost, and those above 1e19 infinite.
    largest = tf.maximum(tf.reduce_max(rows, 1), -tf.reduce_min(rows, 1))
    if xla:  # Which fuses the two, and has no op for the norm.
        norms = tf.sqrt(tf.reduce_sum(tf.square(rows), 1))
    else:
        norms = tf.math.reduce_euclidean_norm(rows, 1)
    most = largest * tf.sqrt(tf.cast(width, tf.float32))
    norms = tf.where(tf.math.is_finite(norms), tf.maximum(norms, largest), most)
    return tf.matmul(rows, weights), norms


def _compare(first, product, size, scales, usable, *, minor):
    """Compares the products of two gradients, `[N, columns]`; see `separate`."""
    batch_size, length = tf.size(scales), tf.shape(first)[0]
    rows = length // tf.maximum(batch_size, 1)
    whole = tf.equal(rows * batch_size, length)
    # Which example each row belongs to; anything in range where rows are left over.
    row = tf.range(length)
    example = row % tf.maximum(batch_size, 1) if minor else row // tf.maximum(rows, 1)
    example = tf.minimum(example, batch_size - 1)
    error = first * tf.gather(scales, example)[:, tf.newaxis] - product
    error = tf.reduce_max(tf.abs(error), axis=1)
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
_VECTOR = tf.TensorSpec([None], tf.float32)
_MATRIX = tf.TensorSpec([None, None], tf.float32)
_products, _products_in_xla = (
    tf.function(
        functools.partial(_of_rows, xla=xla),
        input_signature=[_MATRIX, tf.TensorSpec([2], tf.int64)],
        autograph=False,
    )
    for xla in (False, True)
)
_compare_major, _compare_minor = (
    tf.function(
        functools.partial(_compare, minor=minor),
        input_signature=[
            *(_MATRIX, _MATRIX, _VECTOR, _VECTOR),
            tf.TensorSpec([None], tf.bool),
        ],
        autograph=False,
    )
    for minor in (False, True)
)
