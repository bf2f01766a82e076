"""What must stay when other examples come: rows of witnesses, and gradients.

Rows are compared by products with random weights (`row_tables.py`), gradients by those
of their own rows (`replaced_sums.py`).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from tfdpclip._devices import on_cpus
from tfdpclip._docs import see
from tfdpclip.gradients import row_tables
from tfdpclip.gradients.replaced_sums import Sums, another_size
from tfdpclip.gradients.rerun import Rerun
from tfdpclip.gradients.row_tables import Rows, Tables, Weights, any_of

# Relative to each row. On CPUs a row of a product comes out the same, to the bit,
# whatever is in the other rows; elsewhere sums may be added up in any order.
_TOLERANCE, _ELSEWHERE, _COARSE_ELSEWHERE = 2e-6, 1e-5, 2e-2
# Where rows are as long as the longest of the batch, others round in another way.
_OTHER_LENGTHS = 1e-4
# How many times what comes of a nudge counts as rounding, and how much at most. In deep
# networks every layer rounds, where the data alone are nudged.
_NUDGES = 4.0
_MOST_NOISE, _MOST_COARSE_NOISE = 1e-3, 0.1
#: In which way examples are replaced: not at all, not but for rounding, half of them
#: alone; numbers between are ways of their own.
AS_IT_WAS, NUDGED, HALF = 0, 5, 6


def _messages(label: str | None) -> tuple[str, str]:
    """What to say where something changed, and where it depends on its place."""
    if label is None:
        what, other = "the losses", "another loss"
        why = "the loss of one example depends on other examples"
    else:
        what = label.replace("'", "`")
        other = f"another row of {what}"
        why = (
            "the gradient of one example depends on other examples, even where its "
            "loss does not, as behind tf.stop_gradient"
        )
    mixed = (
        "ExampleIsolationError: with other examples in the place of some, what stayed "
        f"has changed in {what}: {why}. Clipping would protect nobody. Batch "
        "normalisation in training mode, a statistic of the batch behind "
        "tf.stop_gradient, ranks within the batch, or an in-batch comparison does "
        "this. Use GroupNormalization or LayerNormalization, and compute the loss of "
        "every example, and its weight, from that example alone."
    )
    misplaced = (
        f"ExampleIsolationError: a copy of an example has {other} in another place of "
        "the batch. Who is there before an example would decide about its gradient. Do "
        "not compute with tf.range(batch size), nor with random numbers that belong to "
        "places of the batch: let numbers come with the data, or draw random ones with "
        "the batch on axis 0."
    )
    return mixed + see("mixed-examples"), misplaced + see("mixed-examples")


@dataclasses.dataclass(frozen=True)
class State:
    """What is known: `[T]`, four of `[W]` or `[V]`, a scalar, more, joined tables.

    Attributes:
      noise: how far the rows of each table move by rounding.
      kept: whether each witness of those that stay is as it was.
      placed: whether that of a copy is what it is a copy of.
      alike: whether each variable's gradient is as it was.
      halved: whether it is without the other half.
      telling: whether any loss changed.
      moved: `[V]`, how far rounding moves gradients, relative to given sizes.
      rows: of the witnesses, of the batch as it was.
      sums: of the gradients, too.
    """

    noise: tf.Tensor
    kept: tf.Tensor
    placed: tf.Tensor
    alike: tf.Tensor
    halved: tf.Tensor
    telling: tf.Tensor
    moved: tf.Tensor
    rows: tf.Tensor
    sums: tf.Tensor


@dataclasses.dataclass(frozen=True)
class There:
    """What a batch is made of: which way, a scalar, and `[N]` each.

    Attributes:
      kind: in which way examples were replaced.
      source: which example is at each place.
      factor: how many times as large.
      weight: of its loss in the sums.
      sizes: of what each example's gradient is the sum of.
      plain: whether all weights are 1.
      moves: whether copies can be compared with what they are copies of.
      scales: `[V]`, what it is relative to how far a nudge moves gradients; infinite
        where nobody asks.
    """

    kind: tf.Tensor
    source: tf.Tensor
    factor: tf.Tensor
    weight: tf.Tensor
    sizes: tf.Tensor
    plain: tf.Tensor
    moves: tf.Tensor
    scales: tf.Tensor


class Kept:
    """Compares the batch as it was with the same after some examples were replaced.

    Args:
      rerun: what is computed again.
      sums: the gradients of variables.

    Attributes:
      messages: what to say where something changed.
    """

    def __init__(self, rerun: Rerun, sums: Sums):
        self._sums, self._witnesses = sums, rerun.witnesses
        self._coarse, self._padded = rerun.coarse, rerun.padded
        told = [_messages(witness.label) for witness in self._witnesses]
        self.messages = [text for texts in zip(*told, strict=True) for text in texts]
        self.messages += [_messages(label)[0] for label in sums.labels]
        self.messages += [another_size(label) for label in sums.labels]

    def start(self) -> tuple[list[tf.Tensor], list[tf.TensorShape]]:
        """What a loop starts with, in the place of a `State`, and its shapes."""
        nothing = row_tables.nothing_yet(
            [(w.tensor, layout) for w in self._witnesses for layout in w.layouts]
        )
        every = tf.fill([len(self._witnesses)], True)
        well = tf.fill([len(self._sums.labels)], True)
        sums = tf.zeros([self._sums.rows, row_tables.WIDTH])
        steady = tf.zeros([sum(len(w.layouts) for w in self._witnesses)])
        moved = tf.zeros([self._sums.variables])
        start = [steady, every, every, well, well, tf.constant(False), moved]
        start += [nothing, sums]
        shapes = [tensor.shape for tensor in start]
        shapes[-2] = row_tables.any_length(nothing)
        return start, shapes

    def tables(self, number: int, tensor: tf.Tensor, drawn: Weights) -> list:
        """What is kept of a witness, in each of its layouts: see `row_tables.join`."""
        layouts = self._witnesses[number].layouts
        return row_tables.tables([(tensor, layout) for layout in layouts], drawn)

    def next(
        self, before: State, there: There, tables: Tables, sums, drawn: Weights
    ) -> State:
        """What is known after the batch was computed once more.

        Args:
          before: what was known.
          there: what it was made of.
          tables: of all witnesses.
          sums: the gradients of variables.
          drawn: the random weights of tables.
        """
        layouts = [layout for witness in self._witnesses for layout in witness.layouts]
        after = Rows(tables, layouts, tf.size(there.source))
        sums = self._sums.tables(sums, drawn)
        # By the very code that computes the others: compiled another way, the same
        # sums are rounded another way.
        as_it_was = tf.equal(there.kind, AS_IT_WAS)
        rows = row_tables.noted(as_it_was, before.rows, after.joined)
        known_sums = tf.where(as_it_was, sums, before.sums)
        nudged, resized = (tf.equal(there.kind, kind) for kind in (NUDGED, HALF))

        def moved():
            return after.largest(self._difference(rows, after, tf.constant(1.0)))

        def compared():
            return self._compare(rows, after, there, before.noise)

        def skipped():
            every = tf.ones_like(before.kept)
            return every, every, tf.constant(False)

        # Rows of another size are rounded another way.
        noise = tf.cond(nudged, moved, lambda: before.noise)
        kept, placed, changed = tf.cond(nudged | resized, skipped, compared)
        weighed, unequal = tf.abs(there.weight) * there.sizes, resized
        unequal |= self._padded
        moved_sums = self._sums.moved(known_sums, sums) / there.scales
        alike = self._sums.alike(known_sums, sums, self._coarse, weighed, unequal)
        return State(
            noise,
            before.kept & kept,
            before.placed & (placed | ~(there.moves & there.plain)),
            before.alike & (alike | resized | there.plain),
            before.halved & (alike | ~resized),
            before.telling | changed,
            tf.where(nudged, tf.maximum(before.moved, moved_sums), before.moved),
            rows,
            known_sums,
        )

    def _compare(self, before, after: Rows, there: There, noise):
        """Compares what was computed with some examples and with others.

        Args:
          before: tables, joined.
          after: the same with other examples.
          there: what the batch is made of.
          noise: `[T]`, how far the rows of each table move by rounding, if that is
            more than usual.

        Returns:
          `[W]`, boolean: whether the rows of those that stay are what they were, and
          those of copies what they are copies of; and whether any loss changed.
        """
        coarse, sources, factors = self._coarse, there.source, there.factor
        limit = _COARSE_ELSEWHERE if coarse else _ELSEWHERE
        limit = max(limit, _OTHER_LENGTHS) if self._padded else limit
        most = _MOST_COARSE_NOISE if coarse else _MOST_NOISE
        limits = tf.maximum(tf.minimum(_NUDGES * noise, most), limit)
        limits = tf.gather(limits, after.table)
        share = tf.math.count_nonzero(there.weight, dtype=tf.int32)
        share = tf.maximum(share, 1) / tf.maximum(tf.size(sources), 1)
        stays = tf.equal(sources, tf.range(tf.size(sources))) & tf.equal(factors, 1.0)
        stays = tf.gather(stays, after.example)
        if on_cpus() and not self._padded:
            stayed = self._difference(before, after) <= _TOLERANCE
        else:
            stayed = self._difference(before, after, share) <= limits
        moved = tf.gather(before, after.origins(sources))
        alike = self._difference(moved, after, share, of=before) <= limits
        kept = after.every(stayed | ~stays) | ~after.whole
        copied = tf.gather(tf.equal(factors, 1.0), after.example)
        placed = after.every(alike | stays | ~copied) | ~after.whole
        # The losses are the first `[B]` rows.
        changed = tf.reduce_any((~stayed & ~stays)[: tf.size(sources)])
        # Where it is not known where examples are, somewhere they must stay.
        counts = [len(witness.layouts) for witness in self._witnesses]
        owners = np.repeat(np.arange(len(counts)), counts)
        stay = any_of(kept & after.whole, owners, len(counts))
        stay |= ~any_of(after.whole, owners, len(counts))
        placed = any_of(placed, owners, len(counts)) | (np.array(counts) != 1)
        return stay, placed, changed

    def _difference(
        self,
        before,
        after: Rows,
        share: tf.Tensor | None = None,
        of: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """`[M]`: how far rows are off, relative to their size, or their table's mean.

        Args:
          before: tables, joined.
          after: the same with other examples.
          share: of the examples that have a weight, whose mean it is; None where rows
            are looked at relative to their own size alone.
          of: the tables whose mean it is, if not `before`: those of the batch as it
            was, where all examples may be copies of a small one.
        """
        # Of what is not finite, nothing but that can be compared. Where everybody is
        # like that because of one example, they are not once it is gone.
        finite = tf.reduce_all(tf.math.is_finite(before), axis=1)
        agree = tf.reduce_all(tf.math.is_finite(after.joined), axis=1)
        agree = tf.equal(finite, agree)
        error = tf.reduce_max(tf.abs(after.joined - before)[:, :-1], axis=1)
        error = tf.where(finite & agree, error, 0.0)
        size = tf.where(finite, before[:, -1], 0.0)
        if share is not None:
            usual = size if of is None else of[:, -1]
            usual = tf.where(tf.math.is_finite(usual), usual, 0.0)
            size = tf.maximum(size, after.mean(usual) / tf.cast(share, size.dtype))
        # Not by a division where both are 0, or both below what divides.
        infinite = tf.fill(tf.shape(error), float("inf"))
        error = tf.maximum(error - row_tables.LOST, 0.0)
        relative = tf.where(error > 0, error / tf.maximum(size, 1e-37), 0.0)
        return tf.where(agree, relative, infinite)
