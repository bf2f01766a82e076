"""The check that no example leaks into another's gradient.

Scale each example's loss by its own power of two and differentiate again: if the rows
of a tensor that belong to example i feed only example i's loss, its gradient is scaled
by exactly that power, and nothing is lost to rounding. Mixing of any kind shows.
`row_tables.py` says what is compared of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.gradients import calls, chance, ops, row_tables
from tfdpclip.gradients.dataflow import Dataflow
from tfdpclip.gradients.row_tables import (
    Layout,
    Rows,
    Tables,
    Weights,
    any_of,
    layout_of,
)

# Relative to the longest row of the gradient. Isolated examples give 0 or, where the
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

    def layouts(self, flows: Dataflow) -> list[Layout]:
        """Where its examples are, or may be."""
        rank = self.tensor.shape.rank
        if self.anywhere or not rank:
            return [Layout(axis) for axis in range(rank)]
        return [layout_of(flows[self.tensor])]


def all_probes(given: list[Probe], flows: Dataflow) -> list[Probe]:
    """What to test: the probes given, and the floating-point data themselves."""
    probes = [Probe(s, f"the data at {s.name!r}") for s in data_of(flows)]
    probes = [*given, *probes]
    own = _own_gradients_after(flows)
    for probe in probes:
        op = own.get(probe.tensor.ref())
        if op is not None:
            probe.label += f"{_BEFORE}{op.name!r} (a {op.type})"
    return probes


def data_of(flows: Dataflow) -> list[tf.Tensor]:
    """The floating-point data, by example, and what integers are made on the way."""
    return [s for s in _leading(flows) if s.dtype.is_floating] + flows.converted


def _own_gradients_after(flows: Dataflow) -> dict:
    """The first op behind each tensor whose gradient is a function of its own."""
    found: dict = {}
    calls_of = ops.FUNCTION_CALLS | ops.CONTROL_FLOW
    for op in reversed(flows.ops):
        own = None
        if op.type not in calls_of and calls.gradient_function(op) is not None:
            own = op
        for output in op.outputs:
            own = own or found.get(output.ref())
        if own is not None:
            found.update((t.ref(), own) for t in op.inputs)
    return found


def _leading(flows: Dataflow) -> list[tf.Tensor]:
    return [source for source in flows.sources if flows[source].leads]


def counts_agree(flows: Dataflow, batch_size: tf.Tensor) -> tf.Tensor:
    """Whether the loss has as many entries as some data have rows, a scalar."""
    leading = _leading(flows)
    if not leading:
        return tf.constant(True)
    sizes = tf.stack([tf.shape(source)[0] for source in leading])
    return tf.reduce_any(tf.equal(sizes, batch_size * flows.rows_per_example))


COUNTS = (
    "ExampleIsolationError: the loss has not as many entries as the data have "
    "examples. An entry of the loss must be an example: reshape the loss to "
    "[batch, entries per example]."
)


# In the label of a tensor whose gradient comes through a `tf.custom_gradient`.
_BEFORE = ", before "


def mixed_at(label: str) -> str:
    """The error for a tensor whose gradient does not separate by example.

    Without quotation marks, which TensorFlow would write with backslashes.
    """
    place, _, own = label.replace("'", "`").partition(_BEFORE)
    found, reason = f"at {place}. ", ""
    if own:
        found = f"or does not scale with its loss, {found}"
        reason = (
            f"It comes through a gradient function of its own (tf.custom_gradient), "
            f"that of {own}. If that function clips, normalizes or rounds what it is "
            "given, gradients are not proportional to losses, and cannot be checked: "
            "return dy times something that does not depend on dy, or leave it out, as "
            "every gradient is clipped anyway. If it does not, examples are mixed. "
        )
    return (
        "ExampleIsolationError: the gradient of one example depends on other examples "
        f"{found}{reason}Clipping would protect nobody. Batch normalisation in "
        "training mode, an in-batch comparison, or a batch axis that is not the "
        "first does this. Use GroupNormalization or LayerNormalization, and keep "
        "the batch on axis 0." + see("mixed-examples")
    )


def random_powers(batch_size: tf.Tensor) -> tf.Tensor:
    """A power of two from 1 to 128 for each example, `[B]`: scaling by it is exact."""
    powers = chance.shuffled(tf.range(batch_size)) % 8
    return tf.cast(tf.bitwise.left_shift(tf.ones_like(powers), powers), tf.float32)


class Separation:
    """The probes of a loss, of which each may have several layouts.

    Args:
      probes: what to test.
      flows: the analysis of the losses.
    """

    def __init__(self, probes: Sequence[Probe], flows: Dataflow):
        self.probes = list(probes)
        self.layouts = [probe.layouts(flows) for probe in self.probes]

    def nothing_yet(self) -> tf.Tensor:
        """What a loop starts with in the place of `tables`, joined."""
        # Not the output itself: oneDNN's convolutions give one that somebody takes
        # a wrong shape where the batch is empty.
        return row_tables.nothing_yet(
            [
                (probe.tensor if probe.like is None else probe.like, layout)
                for probe, layouts in zip(self.probes, self.layouts, strict=True)
                for layout in layouts
            ]
        )

    def tables(
        self, number: int, gradient: tf.Tensor | None, weights: Weights
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """What is kept of the gradient of some losses at a probe, in each layout.

        Args:
          number: that of the probe.
          gradient: None if the losses do not depend on it.
          weights: the random weights.
        """
        probe = self.probes[number]
        if gradient is None:
            given = tf.zeros_like(probe.tensor if probe.like is None else probe.like)
        else:
            given = tf.ensure_shape(gradient, probe.tensor.shape)
        pairs = [(given, layout) for layout in self.layouts[number]]
        return row_tables.tables(pairs, weights)

    def rows(self, tables: Tables, order: Sequence[int], batch_size: tf.Tensor) -> Rows:
        """The rows of the tables of all probes, of a batch of so many examples."""
        every = [layout for number in order for layout in self.layouts[number]]
        return Rows(tables, every, batch_size)

    def separate(
        self,
        plain: tf.Tensor,
        rows: Rows,
        order: Sequence[int],
        there: Sequence[bool],
        scales: tf.Tensor,
        usable: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Compares gradients of plain losses with those of losses that were scaled.

        Args:
          plain: the tables of the gradients of the summed losses, joined.
          rows: those of the losses that were scaled.
          order: of which probe after which they are.
          there: whether there is a gradient at each probe.
          scales: `[B]`.
          usable: `[B]`, which examples' losses are finite: no other gradient is worth
            comparing.

        Returns:
          `[P]`, boolean: whether the gradient at each probe separates by example, and
          whether two examples have one, so that mixing could show.
        """
        if not self.probes:
            return tf.constant([], tf.bool), tf.constant([], tf.bool)
        scale = tf.gather(scales, rows.example)[:, tf.newaxis]
        error = tf.abs(plain * scale - rows.joined)[:, :-1]
        error, size = tf.reduce_max(error, axis=1), rows.joined[:, -1]
        # Rows with an entry that is not finite show nothing.
        shows = tf.math.is_finite(error) & tf.math.is_finite(size)
        shows &= tf.gather(usable, rows.example)
        error, size = (tf.where(shows, part, 0.0) for part in (error, size))
        count = tf.math.count_nonzero(rows.by_example(size) > 0, axis=1)
        largest = rows.largest(size)
        limit = _TOLERANCE * largest + row_tables.LOST
        good = rows.whole & (rows.largest(error) <= limit)
        # Of nothing but what rounds to 0, nothing is learnt.
        shown = (count >= 2) & (_TOLERANCE * largest > row_tables.LOST)
        telling = shown | ~rows.whole
        several = tf.math.count_nonzero(scales) > 1
        # Of several layouts, the gradient must separate along one, and tell.
        owners = np.repeat(order, [len(self.layouts[number]) for number in order])
        count = len(self.probes)
        sure = any_of(good & telling, owners, count)
        mixed = any_of(~good & rows.whole, owners, count)
        # Where one example alone has a gradient, any axis may seem to do.
        separates = sure | (any_of(good, owners, count) & ~(several & mixed))
        nothing = ~np.array(there, bool)
        return separates | nothing, sure | ~separates | nothing
