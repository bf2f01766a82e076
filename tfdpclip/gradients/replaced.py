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

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdpclip._devices import in_xla
from tfdpclip.gradients import chance, row_tables
from tfdpclip.gradients.comparison import fields
from tfdpclip.gradients.dataflow import Dataflow
from tfdpclip.gradients.replaced_rows import AS_IT_WAS, HALF, NUDGED, Kept, State, There
from tfdpclip.gradients.replaced_sums import Sums
from tfdpclip.gradients.rerun import Again, Rerun, Witness
from tfdpclip.gradients.row_tables import Weights
from tfdpclip.gradients.separation import Separation

# Outliers are as much larger than examples, and small copies as much smaller; one of
# so many examples stays among outliers.
_FAR, _STAYING = 40.0, 8
# What comes after what, and under which weights: the batch as it was, once with each
# number of the data a very little larger or smaller; two of the ways of replacing with
# weights of 1, so that a copy's gradient can be compared with that of its example; and
# each with weights of 0 for those that go, after the batch as it was with the same
# weights; last, where that can be, half of the batch alone.
_COPIES = (1, 4)
_PLAIN, _OF_HALF = 0, 5
_ORDER = [(AS_IT_WAS, _PLAIN), (NUDGED, _PLAIN), *((k, _PLAIN) for k in _COPIES)]
_ORDER += [pair for k in range(1, NUDGED) for pair in ((AS_IT_WAS, k), (k, k))]
_ORDER += [(AS_IT_WAS, _OF_HALF), (HALF, _OF_HALF)]
# By how much of itself each number is nudged; the same where something is computed in a
# type below float32.
_NUDGE, _COARSE_NUDGE = 2.0**-20, 2.0**-6
# Of how many examples a later check replaces some, or up to twice as many, so that the
# number is odd, or a multiple of 2, 4, 8 or 16, where that of the batch is.
_SOME = 16


def _half_of(batch_size: tf.Tensor) -> tf.Tensor:
    """Of an even number an even one: a model may take its rows two by two."""
    half = batch_size // 2
    return half + tf.where(tf.equal(batch_size % 2, 0), half % 2, 0)


def _numbers(finite: tf.Tensor) -> tf.Tensor:
    """`[N]`: each example itself, or a finite one in the place of one that is not.

    Where none is, all stay: it may be one of them that makes all so.
    """
    own = tf.range(tf.size(finite))
    # One more, for a batch of nobody.
    first = tf.argmax(tf.concat([tf.cast(finite, tf.int32), [0]], axis=0))
    stays = finite | ~tf.reduce_any(finite)
    return tf.where(stays, own, tf.cast(first, own.dtype))


@dataclasses.dataclass(frozen=True)
class Weightings:
    """What is found on the way, of the whole batch as it is under some weights.

    Attributes:
      weights: `[N, B]`.
      start: tensors, before the first.
      shapes: theirs, as far as they stay.
      take: makes those after the next, of its number, the weights, the tables of the
        gradients at other tensors, in which order, whether there are such gradients,
        those of the variables, and those before.
      doubted: whether they may be what rounding makes, a boolean scalar, of those.
      scales: what gradients under given weights are looked at relative to, `[V]`.
      separation: of those other tensors.
      drawn: the random weights of all tables.
    """

    weights: tf.Tensor
    start: Sequence[tf.Tensor]
    shapes: Sequence[tf.TensorShape]
    take: Callable[..., Sequence[tf.Tensor]]
    doubted: Callable[[Sequence[tf.Tensor]], tf.Tensor]
    scales: Callable[[tf.Tensor], tf.Tensor]
    separation: Separation
    drawn: Weights


class ReplacedExamples:
    """The losses, and what gradients are made of, if some examples were others.

    Args:
      per_example: the losses, `[B]`.
      flows: the analysis of the losses.
      witnesses: what else must stay as it is.
      sums: the gradients of variables, which must, too, and at other tensors.

    Attributes:
      messages: what to say where `test` finds something, in its order.

    Raises:
      ExampleIsolationError: if the data pass through Python code, of which nothing can
        be known, or if losses can be computed again and a gradient cannot.
    """

    def __init__(
        self,
        per_example: tf.Tensor,
        flows: Dataflow,
        witnesses: Sequence[Witness],
        sums: Sums,
    ):
        self._sums = sums
        self._rerun = Rerun(per_example, flows, witnesses, sums)
        self._kept = Kept(self._rerun, sums)
        self.messages = self._kept.messages

    def test(
        self,
        batch_size: tf.Tensor,
        sizes: tf.Tensor,
        finite: tf.Tensor,
        few: tf.Tensor | None,
        weightings: Weightings,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Replaces some examples, in four ways, and leaves half of them out.

        A random half by copies of the others; the other half by one example, the same
        for all, close to zero: whoever decides a maximum, or whether anybody has some
        property, is gone once. Then all but an eighth by outliers: whatever tells one
        batch from another is moved far. Then all but one by copies of that one: of
        several that are the largest, the longest or of some kind, none is left. Last,
        where that can be, half of the batch is computed without the rest.

        First, by the same copies of ops, the batch as it is under given weights: a
        graph has them once. Where what is found there is doubted, all of it once more,
        and with the data and the weights of the model nudged: a forward pass of the
        step's own, which TensorFlow fuses in another way, differs from its copy by
        rounding, and where an activation is saturated, a gradient is little else.

        Args:
          batch_size: B.
          sizes: `[B]`, of what each example's gradient is the sum of.
          finite: `[B]`, whose loss and gradient are numbers: others would hide what all
            add up to, and copies of one of these stand in their places.
          few: whether some of the examples will do, a boolean scalar.
          weightings: what to find under given weights.

        Returns:
          `[2 W + 2 V]`, boolean, in the order of `messages`: whether what stays is as
          it was, whether copies have what the examples have, whether the gradients of
          those that stay have the sums that they had, and whether those of a half have
          them without the other half; a boolean scalar, whether the test could tell;
          `[V]`, how far rounding moves gradients relative to `weightings.scales`,
          where that was doubted; and what `weightings` found.
        """
        summed, rerun = self._sums, self._rerun
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
        whole_base = _numbers(finite)
        rows = tf.gather(_numbers(tf.gather(finite, part)), rows)
        # By number in the batch, as whose data they are may not be in the half.
        origins = tf.gather(part, rows)
        # Where a row is not an example, or random numbers or labels stay where they
        # are, copies are not what they are copies of.
        moves = whole & (not rerun.fixed)
        drawn = weightings.drawn
        there = [gradient is not None for gradient in summed.others]
        weights = self._weights(rows, factors, size)
        halves = rerun.resizes and not summed.counted
        last = len(_ORDER) - 1
        count = tf.constant(last if halves else last - 1)
        half, any_half = _half_of(size), whole & (_half_of(size) > 0)
        if halves and varies:
            count += tf.cast(any_half, tf.int32)
        kinds, weighted = (tf.constant(column) for column in zip(*_ORDER, strict=True))
        before_them = tf.shape(weightings.weights)[0]

        def given(number):
            every = tf.range(batch_size)
            weight = weightings.weights[tf.minimum(number, before_them - 1)]
            return every, whole_base, whole_base, tf.ones_like(weight), weight

        def replaced(step, kind):
            row = tf.where(tf.equal(kind, HALF), AS_IT_WAS, kind)
            weight = weights[weighted[step]]
            there = (part, origins[row], rows[row], factors[row], weight)
            if halves and varies:
                length = tf.where(tf.equal(kind, HALF), half, size)
                there = tuple(vector[:length] for vector in there)
            return there

        def once_more(theirs):
            """How often a batch under given weights is computed once more."""
            return tf.where(weightings.doubted(theirs), 2 * before_them, 0)

        def body(i, *state):
            theirs, own = state[:number], state[number:]
            weighing, first = i < before_them, before_them + once_more(theirs)
            doubting, step = ~weighing & (i < first), tf.maximum(i - first, 0)
            odd = tf.equal((i - before_them) % 2, 1)
            kind = tf.where(odd, NUDGED, AS_IT_WAS)
            kind = tf.where(doubting, kind, kinds[step])
            place, origin, source, factor, weight = tf.cond(
                i < first,
                lambda: given(tf.where(weighing, i, (i - before_them) // 2)),
                lambda: replaced(step, kind),
            )
            nudged = tf.equal(kind, NUDGED) & ~weighing
            nudge = tf.where(nudged, _COARSE_NUDGE if rerun.coarse else _NUDGE, 0.0)
            again = rerun.tensors(
                *(place, origin, factor, nudge, weight, batch_size),
                shake=tf.where(doubting, nudge, 0.0),
            )
            # Not in a branch, for which all of what they are made of would be kept.
            parts = [
                self._kept.tables(number, tensor, drawn)
                for number, tensor in enumerate(again.witnesses)
            ]
            kept = row_tables.join([part for made in parts for part in made])
            probed = self._probed(again, parts, weightings)
            early = row_tables.join([part for made in probed.values() for part in made])
            late = [n for n in range(len(summed.others)) if n not in probed]

            def take():
                by_variable, rest = summed.by_variable(again.sums), again.rest()
                made = [
                    part
                    for number in late
                    for part in weightings.separation.tables(
                        number, rest.get(number), drawn
                    )
                ]
                tables = (
                    row_tables.both(early, row_tables.join(made)) if made else early
                )
                order = [*probed, *late]
                found = weightings.take(
                    *(i, weight, tables, order, there, by_variable, theirs)
                )
                return [*found, *own]

            def compare():
                lengths = tf.gather(sizes, place)
                plain = tf.equal(weighted[step], _PLAIN) | doubting
                scales = tf.cond(
                    doubting, lambda: weightings.scales(weight), lambda: nobodys
                )
                made = There(
                    *(kind, source, factor, weight, lengths, plain, moves, scales)
                )
                new = self._kept.next(State(*own), made, kept, again.sums, drawn)
                return [*theirs, *fields(new)]

            return i + 1, *tf.cond(weighing, take, compare)

        number = len(weightings.start)
        start, shapes = self._kept.start()
        nobodys = tf.fill([summed.variables], float("inf"))
        _, *found = tf.while_loop(
            lambda i, *state: i < before_them + once_more(state[:number]) + count,
            body,
            (tf.constant(0), *weightings.start, *start),
            shape_invariants=(tf.TensorShape([]), *weightings.shapes, *shapes),
            maximum_iterations=3 * before_them + count,
            parallel_iterations=1,
        )
        theirs, own = found[:number], State(*found[number:])
        halved = own.halved
        if halves and not varies:

            def alone():
                data = (origins[AS_IT_WAS], factors[AS_IT_WAS])
                vectors = (part, *data, weights[-1])
                *given, weight = (vector[:half] for vector in vectors)
                again = rerun.tensors(*given, tf.constant(0.0), weight, batch_size)
                sums = summed.tables(again.sums, drawn)
                weighed = tf.abs(weight) * tf.gather(sizes, given[0])
                return summed.alike(own.sums, sums, rerun.coarse, weighed, True)

            halved &= tf.cond(any_half, alone, lambda: tf.ones_like(halved))
        found = tf.concat([own.kept, own.placed, own.alike, halved], axis=0)
        return found, own.telling & (batch_size > 1), own.moved, theirs

    def _probed(
        self, again: Again, parts: Sequence[list], weightings: Weightings
    ) -> dict[int, list]:
        """What tables are made of, of each probe whose gradient is there."""
        made = {}
        for witness, its in zip(self._rerun.witnesses, parts, strict=True):
            made[(witness.tensor.ref(), tuple(witness.layouts))] = its
        found, separation = {}, weightings.separation
        for number, tensor in again.others.items():
            gradient = self._sums.others[number]
            key = (gradient.ref(), tuple(separation.layouts[number]))
            if key not in made:
                made[key] = separation.tables(number, tensor, weightings.drawn)
            found[number] = made[key]
        return found

    def _weights(self, rows, factors, size) -> tf.Tensor:
        """`[6, N]`: 1, or of random sign and size for those that stay, or a half."""
        drawn = chance.uniform([_OF_HALF, size])
        drawn = tf.where(drawn < 0.5, 1 + 2 * drawn, -2 * drawn)
        stay = tf.equal(rows, rows[:1]) & tf.equal(factors, 1.0)
        first = tf.range(size) < _half_of(size)
        stay = tf.concat([stay[1:_OF_HALF], first[tf.newaxis]], axis=0)
        drawn = tf.where(stay, drawn, 0.0)
        return tf.concat([tf.ones_like(drawn[:1]), drawn], axis=0)

    def _replacements(self, size) -> tuple[tf.Tensor, tf.Tensor]:
        """Which example is in each row, `[6, N]`, and how many times as large."""
        order = chance.shuffled(tf.range(size))
        own = tf.range(size)
        # Of nobody, there is no first one, and none is asked for.
        first = tf.reduce_sum(order[:1])
        half = size // 2
        rest = size - half  # the larger one of an odd number
        most = tf.maximum(size - tf.maximum(size // _STAYING, 1), 0)
        rows, factors = [own], [tf.ones_like(own, tf.float32)]
        for gone, donors, factor in (
            (order[:half], order[half : 2 * half], 1.0),
            (order[half:], tf.fill([rest], first), 1 / _FAR),
            (order[:most], tf.roll(order, 1, axis=0)[:most], _FAR),
            (order[1:], tf.fill([tf.maximum(size - 1, 0)], first), 1.0),
        ):
            places, times = gone[:, tf.newaxis], tf.fill(tf.shape(gone), factor)
            rows.append(tf.tensor_scatter_nd_update(own, places, donors))
            factors.append(tf.tensor_scatter_nd_update(factors[0], places, times))
        rows.append(own)
        factors.append(factors[0])
        return tf.stack(rows), tf.stack(factors)
