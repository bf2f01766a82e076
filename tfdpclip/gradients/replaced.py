"""Runs the loss and its gradient again with other examples in the place of some.

If every example's loss depends on that example alone, then the losses of those that
stay are the same, to the last digit or so; and so is what their gradients are made of:
the gradient that comes back to every op where a variable meets the batch, what else
goes into that op, and the sum of the gradients of those that stay (`replaced_sums.py`).
Losses alone do not tell: behind `tf.stop_gradient`, a statistic of
the batch can scale a gradient and leave the loss what it was. And another gradient of
the same losses does not tell either: it does not see a statistic that is stopped, nor
one that comes by integers, ranks or comparisons.

The second run shares everything with the first that does not depend on the examples'
values: weights, and the random numbers of dropout, which depend on the batch's shape
only. Random numbers with a row for each example go where the example goes, so that its
copy must have its loss and its gradient, too: where it does not, they depend on the
place that the example has in the batch, which is a matter of who else is there.

Who comes in the place of others decides what shows: among copies of the others, no
record is the largest of all. So examples are also replaced by outliers, and by copies
of one, much smaller, or as it is.

`rerun.py` computes all that. Once a model has passed, a few examples of a batch are
tested in the place of all, where the graph allows it: what mixes examples mostly mixes
few as well, and later checks are dear for that what they cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdpclip._devices import in_xla, on_cpus
from tfdpclip._docs import see
from tfdpclip.gradients import chance, row_tables
from tfdpclip.gradients.dataflow import Dataflow
from tfdpclip.gradients.replaced_sums import Sums, another_size
from tfdpclip.gradients.rerun import Rerun, Witness
from tfdpclip.gradients.row_tables import Layout, Rows

# Relative to each row. On CPUs a row of a product comes out the same, to the bit,
# whatever is in the other rows; elsewhere sums may be added up in any order.
_TOLERANCE, _ELSEWHERE, _COARSE_ELSEWHERE = 2e-6, 1e-5, 2e-2
# Where rows are as long as the longest of the batch, others round in another way.
_OTHER_LENGTHS = 1e-4
# Outliers are as much larger than examples, and small copies as much smaller; one of
# so many examples stays among outliers.
_FAR, _STAYING = 40.0, 8
# What comes after what: each way of replacing after the batch as it was; once, before
# any of them, each number of the data a very little larger or smaller; last, where that
# can be, half of the batch alone. Below, with the weights of which way.
_AS_IT_WAS, _NUDGED, _HALF = 0, 5, 6
_ORDER = [0, _NUDGED, 1, 0, 2, 0, 3, 0, 4, 0, _HALF]
_WEIGHTS = [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
# By how much of themselves, and how much of what comes of it counts as rounding, at
# most; the same where something is computed in a type below float32.
_NUDGE, _MOST_NOISE = 2.0**-20, 1e-3
_COARSE_NUDGE, _MOST_COARSE_NOISE = 2.0**-6, 0.1
# Of how many examples a later check replaces some, or up to twice as many, so that the
# number is odd, or a multiple of 2, 4, 8 or 16, where that of the batch is.
_SOME = 16


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


def _half_of(batch_size: tf.Tensor) -> tf.Tensor:
    """Of an even number an even one: a model may take its rows two by two."""
    half = batch_size // 2
    return half + tf.where(tf.equal(batch_size % 2, 0), half % 2, 0)


class ReplacedExamples:
    """The losses, and what gradients are made of, if some examples were others.

    Args:
      per_example: the losses, `[B]`.
      flows: the analysis of the losses.
      witnesses: what else must stay as it is.
      sums: the gradients of variables, which must, too; None for none.

    Attributes:
      obstacle: why the losses cannot be computed again; None if they can.
      messages: what to say where `test` finds something, in its order.

    Raises:
      ExampleIsolationError: if the data pass through Python code, of which nothing can
        be known, or if losses can be computed again and a gradient cannot.
    """

    def __init__(
        self,
        per_example: tf.Tensor,
        flows: Dataflow,
        witnesses: Sequence[Witness] = (),
        sums: Sums | None = None,
    ):
        self._alone = flows.batch_size == 1
        self._sums = sums
        self._rerun = Rerun(per_example, flows, witnesses, sums)
        self._witnesses = self._rerun.witnesses
        self.obstacle = self._rerun.obstacle
        told = [_messages(witness.label) for witness in self._witnesses]
        self.messages = [text for texts in zip(*told, strict=True) for text in texts]
        if sums is not None:
            self.messages += [_messages(label)[0] for label in sums.labels]
            self.messages += [another_size(label) for label in sums.labels]

    def test(
        self,
        batch_size: tf.Tensor,
        sizes: tf.Tensor | None = None,
        few: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Replaces some examples, in four ways, and leaves half of them out.

        A random half by copies of the others; the other half by one example, the same
        for all, close to zero: whoever decides a maximum, or whether anybody has some
        property, is gone once. Then all but an eighth by outliers: whatever tells one
        batch from another is moved far. Then all but one by copies of that one: of
        several that are the largest, the longest or of some kind, none is left. Last,
        where that can be, half of the batch is computed without the rest.

        Args:
          batch_size: B.
          sizes: `[B]`, of what each example's gradient is the sum of; needed for sums.
          few: whether some of the examples will do, a boolean scalar.

        Returns:
          `[2 W + 2 V]`, boolean, in the order of `messages`: whether what stays is as
          it was, whether copies have what the examples have, whether the gradients of
          those that stay have the sums that they had, and whether those of a half have
          them without the other half; and a boolean scalar, whether the test could
          tell.
        """
        wide, summed, rerun = len(self._witnesses), self._sums, self._rerun
        number = 0 if summed is None else len(summed.labels)
        if self._alone:  # There are no others.
            return tf.fill([2 * (wide + number)], True), tf.constant(False)
        whole = rerun.whole(batch_size)
        size, part = batch_size, tf.range(batch_size)
        # XLA has all sizes when it compiles; there, the half is not in the loop.
        varies = rerun.resizes and not in_xla()
        if varies and few is not None:
            some = tf.minimum(_SOME + batch_size % _SOME, batch_size)
            size = tf.where(few & whole, some, batch_size)
            # In order: a model may take its rows two by two.
            part = tf.sort(chance.shuffled(part)[:size])
        rows, factors = self._replacements(size)
        # Where a row is not an example, or random numbers or labels stay where they
        # are, copies are not what they are copies of.
        moves = whole & (not rerun.fixed)
        seed = chance.run_seed()
        weights = self._weights(rows, factors, size)
        halves = rerun.resizes and summed is not None and not summed.counted
        last = _ORDER.index(_HALF)
        count = tf.constant(last - (not halves))
        half, any_half = _half_of(size), whole & (_half_of(size) > 0)
        if halves and varies:
            count += tf.cast(any_half, tf.int32)
        sizes = None if summed is None else tf.gather(sizes, part)

        def body(i, noise, kept, placed, alike, halved, telling, before, before_sums):
            kind, weighted = tf.gather(_ORDER, i), tf.gather(_WEIGHTS, i)
            row = tf.where(tf.equal(kind, _HALF), _AS_IT_WAS, kind)
            there = (part, rows[row], factors[row], weights[weighted])
            if halves and varies:
                length = tf.where(i < last, size, half)
                there = tuple(vector[:length] for vector in there)
            place, source, factor, weight = there
            nudged = tf.equal(kind, _NUDGED)
            nudge = tf.where(nudged, _COARSE_NUDGE if rerun.coarse else _NUDGE, 0.0)
            tensors, sums = rerun.tensors(
                place, source, factor, nudge, weight, batch_size
            )
            pairs = self._each(tensors)
            parts = row_tables.tables(pairs, seed)
            after = Rows(parts, [layout for _, layout in pairs], tf.size(source))
            # First as it was, by the very code that computes the others: compiled
            # another way, the same sums are rounded another way.
            before = row_tables.once(i, before, after.joined)

            def found():
                return self._compare(before, after, source, factor, noise)

            def skipped():
                return tf.fill([wide], True), tf.fill([wide], True), tf.constant(False)

            def moved():
                return after.largest(self._difference(before, after))

            # Rows of another size are rounded another way.
            noise = tf.cond(nudged, moved, lambda: noise)
            same = tf.cond(nudged | (i >= last), skipped, found)
            kept &= same[0]
            placed &= same[1] | ~moves
            telling |= same[2]
            if summed is not None:
                sums = summed.tables(sums, seed)
                first = tf.equal(kind, _AS_IT_WAS)
                before_sums = tf.where(first, sums, before_sums)
                weighed = tf.abs(weight) * sizes[: tf.size(weight)]
                resized = i >= last
                found_alike = summed.alike(
                    before_sums, sums, rerun.coarse, weighed, resized | rerun.padded
                )
                alike &= found_alike | resized | nudged
                halved &= found_alike | ~resized
            done = (kept, placed, alike, halved, telling, before, before_sums)
            return i + 1, noise, *done

        nothing = row_tables.nothing_yet(
            self._each([w.tensor for w in self._witnesses])
        )
        no_sums = tf.zeros([0])
        if summed is not None:
            no_sums = tf.zeros([summed.rows, row_tables.WIDTH])
        every, vector = tf.fill([wide], True), tf.TensorShape([wide])
        well, sums_vector = tf.fill([number], True), tf.TensorShape([number])
        scalar, steady = tf.TensorShape([]), tf.zeros([self._tables])
        _, _, kept, placed, alike, halved, telling, _, before_sums = tf.while_loop(
            lambda i, *_: i < count,
            body,
            (
                *(tf.constant(0), steady, every, every, well, well),
                *(tf.constant(False), nothing, no_sums),
            ),
            shape_invariants=(
                *(scalar, steady.shape, vector, vector, sums_vector, sums_vector),
                *(scalar, row_tables.any_length(nothing), no_sums.shape),
            ),
            maximum_iterations=count,
            parallel_iterations=1,
        )
        if halves and not varies:

            def alone():
                vectors = (part, rows[_AS_IT_WAS], factors[_AS_IT_WAS], weights[-1])
                *there, weight = (vector[:half] for vector in vectors)
                found = rerun.tensors(*there, tf.constant(0.0), weight, batch_size)
                sums, weighed = summed.tables(found[1], seed), tf.abs(weight)
                weighed *= sizes[:half]
                return summed.alike(before_sums, sums, rerun.coarse, weighed, True)

            halved &= tf.cond(any_half, alone, lambda: well)
        found = tf.concat([kept, placed, alike, halved], axis=0)
        return found, telling & (batch_size > 1)

    def _weights(self, rows, factors, size) -> tf.Tensor:
        """`[5, N]`: of random sign and size, for those that stay, or the first half."""
        drawn = chance.uniform([_NUDGED, size])
        drawn = tf.where(drawn < 0.5, 1 + 2 * drawn, -2 * drawn)
        stay = tf.equal(rows, rows[:1]) & tf.equal(factors, 1.0)
        first = tf.range(size) < _half_of(size)
        stay = tf.concat([stay[1:_NUDGED], first[tf.newaxis]], axis=0)
        return tf.where(stay, drawn, 0.0)

    def _each(self, tensors) -> list[tuple[tf.Tensor, Layout]]:
        return [
            (tensor, layout)
            for tensor, witness in zip(tensors, self._witnesses, strict=True)
            for layout in witness.layouts
        ]

    @property
    def _tables(self) -> int:
        return sum(len(witness.layouts) for witness in self._witnesses)

    def _compare(self, before, after: Rows, sources, factors, noise):
        """Compares what was computed with some examples and with others.

        Args:
          before: tables, joined.
          after: the same with other examples.
          sources: `[B]`, which example is at each place.
          factors: `[B]`, how many times as large.
          noise: `[T]`, how far the rows of each table move by rounding, if that is
            more than usual.

        Returns:
          `[W]`, boolean: whether the rows of those that stay are what they were, and
          those of copies what they are copies of; and whether any loss changed.
        """
        coarse = self._rerun.coarse
        limit = _COARSE_ELSEWHERE if coarse else _ELSEWHERE
        limit = max(limit, _OTHER_LENGTHS) if self._rerun.padded else limit
        most = _MOST_COARSE_NOISE if coarse else _MOST_NOISE
        limits = tf.maximum(tf.minimum(noise, most), limit)
        limits = tf.gather(limits, after.table)
        stays = tf.equal(sources, tf.range(tf.size(sources))) & tf.equal(factors, 1.0)
        stays = tf.gather(stays, after.example)
        if on_cpus() and not self._rerun.padded:
            stayed = self._difference(before, after, own=True) <= _TOLERANCE
        else:
            stayed = self._difference(before, after) <= limits
        moved = tf.gather(before, after.origins(sources))
        alike = self._difference(moved, after, of=before) <= limits
        kept = after.every(stayed | ~stays) | ~after.whole
        copied = tf.gather(tf.equal(factors, 1.0), after.example)
        placed = after.every(alike | stays | ~copied) | ~after.whole
        # The losses are the first `[B]` rows.
        changed = tf.reduce_any((~stayed & ~stays)[: tf.size(sources)])
        witnesses, place = [], 0
        for witness in self._witnesses:
            end = place + len(witness.layouts)
            if end - place == 1:
                witnesses.append((kept[place], placed[place]))
            else:
                # Where examples are is not known: somewhere they must stay.
                whole = after.whole[place:end]
                some = tf.reduce_any(kept[place:end] & whole) | ~tf.reduce_any(whole)
                witnesses.append((some, tf.constant(True)))
            place = end
        by_witness = [tf.stack(found) for found in zip(*witnesses, strict=True)]
        return (*by_witness, changed)

    def _difference(
        self, before, after: Rows, own: bool = False, of: tf.Tensor | None = None
    ) -> tf.Tensor:
        """`[M]`: how far rows are off, relative to their size, or their table's mean.

        Args:
          before: tables, joined.
          after: the same with other examples.
          own: relative to their own size alone.
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
        if not own:
            usual = size if of is None else of[:, -1]
            usual = tf.where(tf.math.is_finite(usual), usual, 0.0)
            size = tf.maximum(size, after.mean(usual))
        # Not by a division where both are 0, or both below what divides.
        infinite = tf.fill(tf.shape(error), float("inf"))
        relative = tf.where(error > 0, error / tf.maximum(size, 1e-37), 0.0)
        return tf.where(agree, relative, infinite)

    def _replacements(self, size) -> tuple[tf.Tensor, tf.Tensor]:
        """Which example is in each row, `[6, N]`, and how many times as large."""
        order = chance.shuffled(tf.range(size))
        own = tf.range(size)
        half = size // 2
        rest = size - half  # the larger one of an odd number
        most = tf.maximum(size - tf.maximum(size // _STAYING, 1), 0)
        rows, factors = [own], [tf.ones_like(own, tf.float32)]
        for gone, donors, factor in (
            (order[:half], order[half : 2 * half], 1.0),
            (order[half:], tf.repeat(order[:1], rest), 1 / _FAR),
            (order[:most], tf.roll(order, 1, axis=0)[:most], _FAR),
            (order[1:], tf.repeat(order[:1], tf.maximum(size - 1, 0)), 1.0),
        ):
            places, times = gone[:, tf.newaxis], tf.fill(tf.shape(gone), factor)
            rows.append(tf.tensor_scatter_nd_update(own, places, donors))
            factors.append(tf.tensor_scatter_nd_update(factors[0], places, times))
        rows.append(own)
        factors.append(factors[0])
        return tf.stack(rows), tf.stack(factors)
