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

The module is long because what may be computed again, who comes in whose place, and
what is compared are one argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdpclip._devices import on_cpus
from tfdpclip._docs import see
from tfdpclip.gradients import _copies, chance, ops, row_tables, sparse
from tfdpclip.gradients.dataflow import Dataflow, ancestors, same_number
from tfdpclip.gradients.errors import ExampleIsolationError
from tfdpclip.gradients.replaced_sums import Sums
from tfdpclip.gradients.row_tables import Layout, Rows

_CONSTANTS = ("Const", "Placeholder")
# Relative to each row. On CPUs a row of a product comes out the same, to the bit,
# whatever is in the other rows; elsewhere sums may be added up in any order.
_TOLERANCE, _ELSEWHERE, _COARSE_ELSEWHERE = 2e-6, 1e-5, 2e-2
# Where rows are as long as the longest of the batch, others round in another way.
_OTHER_LENGTHS = 1e-4
# Outliers are as much larger than examples, and small copies as much smaller; one of
# so many examples stays among outliers.
_FAR, _STAYING = 40.0, 8


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


def _sized(label: str) -> str:
    """What to say where something is another in a smaller batch."""
    what = label.replace("'", "`")
    return (
        "ExampleIsolationError: of the first half of the batch alone, "
        f"{what} is another than of the same examples in the whole "
        "batch: an example's loss, or its gradient, is computed with the number of "
        "examples in the batch, so that one more or less would change the gradients of "
        "all others. Use the public expected_batch_size in place of tf.shape(x)[0], or "
        "batches of a static size."
    ) + see("mixed-examples")


def _half_of(batch_size: tf.Tensor) -> tf.Tensor:
    """Of an even number an even one: a model may take its rows two by two."""
    half = batch_size // 2
    return half + tf.where(tf.equal(batch_size % 2, 0), half % 2, 0)


@dataclasses.dataclass
class Witness:
    """A tensor whose rows are an example's own, if it is kept apart from others.

    Attributes:
      tensor: the tensor.
      layouts: where the examples are; several where it is not known.
      label: how errors name it; None for the losses.
      steady: whether it has as many rows whatever the examples are.
    """

    tensor: tf.Tensor
    layouts: Sequence[Layout] = (Layout(),)
    label: str | None = None
    steady: bool = True


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
        self._losses = per_example
        self._flows = flows
        self._witnesses = [Witness(per_example), *witnesses]
        self._sums = sums
        self._sources = [s for s in flows.sources if s.shape.rank]
        self._sparse = flows.sparse_batches
        self._coarse = any(
            t.dtype.is_floating and t.dtype.size < 4
            for op in flows.ops
            for t in op.outputs
        )
        self.obstacle = self._plan()
        told = [_messages(witness.label) for witness in self._witnesses]
        self.messages = [text for texts in zip(*told, strict=True) for text in texts]
        if sums is not None:
            self.messages += [_messages(label)[0] for label in sums.labels]
            self.messages += [_sized(label) for label in sums.labels]

    def _plan(self) -> str | None:
        """Finds what depends on the examples' values."""
        if not self._sources and not self._sparse:
            return "no data were found behind the loss"
        affected = {source.ref() for source in self._sources}
        sums = [] if self._sums is None else self._sums.tensors
        if self._sums is not None:
            affected.add(self._sums.seed.ref())
        for batch in self._sparse:
            affected |= {t.ref() for t in (batch.indices, batch.values)}
        # Random numbers, by example; and whether there are others.
        self._random: list[tf.Tensor] = []
        self._fixed = False
        # Whether something is as long as the longest example.
        self._padded = False
        # How many rows tensors have that the loss closes over: they may be labels.
        self._closed_over: set[int] = set()
        # Tensors of as many entries as the data say.
        varying: set = set()
        for batch in self._sparse:
            varying |= {t.ref() for t in (batch.indices, batch.values)}
        # What cannot be computed again, by why not.
        lost: dict = {}
        self._steps = []
        # What every step runs; the rest of what makes the sums only a check should.
        run = set(ancestors([w.tensor for w in self._witnesses]))
        for op in ancestors([*(w.tensor for w in self._witnesses), *sums]):
            if not any(t.ref() in affected for t in op.inputs):
                self._note_constant(op, affected)
                continue
            varies = any(t.ref() in varying for t in op.inputs)
            if op.type in ops.SIZES and not varies and op in run:
                continue
            why = next((lost[t.ref()] for t in op.inputs if t.ref() in lost), None)
            why = self._obstacle_at(op) if why is None else why
            if why is not None:
                lost.update((t.ref(), why) for t in op.outputs)
            self._fixed = self._fixed or _copies.draws(op)
            self._steps.append(op)
            fresh = [t for t in op.outputs if t.ref() not in affected]
            affected |= {t.ref() for t in fresh}
            padded = op.type in ops.PADDED
            self._padded = self._padded or padded
            if varies or padded or op.type in ops.DATA_SHAPED:
                varying |= {t.ref() for t in fresh}
        if self._losses.ref() not in affected:
            return "the losses do not depend on the data"
        if self._losses.ref() in lost:
            return lost[self._losses.ref()]
        labelled = [(w.tensor, w.label) for w in self._witnesses]
        if self._sums is not None:
            labelled += zip(sums, self._sums.labels, strict=True)
        for tensor, label in labelled:
            if tensor.ref() in lost:
                raise ExampleIsolationError(
                    "Whether examples stay apart in "
                    f"{label} cannot be tested: it cannot be computed again "
                    f"with other examples, as {lost[tensor.ref()]}. Compute "
                    "gradients with ops that give the same result twice."
                    + see("mixed-examples")
                )
        # What differs in length from batch to batch was refused, if it mattered.
        self._witnesses = [
            w
            for w in self._witnesses
            if w.tensor.ref() in affected
            and (w.steady or w.tensor.ref() not in varying)
        ]
        needed = set(ancestors([*(w.tensor for w in self._witnesses), *sums]))
        self._steps = [op for op in self._steps if op in needed]
        self._scaled = self._may_be_scaled()
        self._shorter = self._plan_shorter()
        return None

    def _plan_shorter(self) -> list[tf.Operation] | None:
        """The ops that compute the sums from a part of the batch.

        Those that depend on the examples' values, or on how many there are. None where
        that cannot be: the size is static, and public; whoever asked for clipped sums
        gave none, and a sum over the batch; or random numbers of other shapes would
        have to be drawn anew.
        """
        if self._sums is None or self._sums.counted or self._sparse:
            return None
        if self._flows.batch_size is not None:
            return None
        given = [*self._sources, *self._random, self._sums.seed]
        if any(self._flows[t].minor for t in self._random):
            return None
        affected, steps = {t.ref() for t in given}, []
        for op in ancestors(self._sums.tensors, stop={t.op for t in given}):
            if not any(t.ref() in affected for t in op.inputs):
                continue
            if op.type not in ops.SIZES and not _copies.repeatable(op):
                return None
            steps.append(op)
            affected |= {t.ref() for t in op.outputs}
        return steps

    def _obstacle_at(self, op: tf.Operation) -> str | None:
        """Why an op that depends on the examples cannot be run again, or None."""
        other = op.type.startswith(("Sparse", "Ragged"))
        other &= op.type not in sparse.REPEATABLE
        # Made from dense data on the way, a ragged tensor is like any other.
        given = {source.ref() for source in self._sources}
        made = not any(same_number(t).ref() in given for t in op.inputs)
        other &= not (op.type in ops.PADDED and made and not self._sparse)
        if other and op.type != "SparseSoftmaxCrossEntropyWithLogits":
            return f"{op.name!r} (a {op.type}) takes sparse data"
        if _copies.calls_python(op):
            raise ExampleIsolationError(
                "The loss of the examples passes through Python code, in "
                f"{op.name!r} (a {op.type}), which nothing can look into: whether "
                "examples stay apart cannot be tested. Use TensorFlow's ops, or "
                "run the code in the data pipeline, before batches are drawn."
                + see("mixed-examples")
            )
        if not _copies.repeatable(op):
            return f"{op.name!r} (a {op.type}) may not give the same result twice"
        return None

    def _may_be_scaled(self) -> list[tf.Tensor]:
        """The data of which other magnitudes are other examples, and no errors.

        Numbers that are made integers may be ids, which end somewhere; and some ops
        fail for numbers that others take.
        """
        if any(map(_copies.may_fail, self._steps)):
            return []
        fixed = {
            source
            for op in self._steps
            if op.type == "Cast" and op.outputs[0].dtype.is_integer
            for source in ancestors(op.inputs)
            if op.inputs[0].dtype.is_floating
        }
        return [
            source
            for source in self._sources
            if source.dtype.is_floating and source.op not in fixed
        ]

    def _note_constant(self, op: tf.Operation, affected: set) -> None:
        if op.type in _CONSTANTS and op.outputs[0].ref() not in affected:
            shape = op.outputs[0].shape
            self._closed_over.add((shape[0] or 0) if shape.rank else 0)
        if not _copies.draws(op) or op.type in ("RngReadAndSkip", "RngSkip"):
            return
        for drawn in op.outputs:
            rank, size = drawn.shape.rank, self._flows.batch_size
            by_example = bool(rank) and self._flows[drawn].leads
            if rank and size:
                # Which axis counts examples is not known where two are as long.
                by_example = drawn.shape[0] == size and size not in drawn.shape[1:]
            if by_example:
                self._random.append(drawn)
                affected.add(drawn.ref())
            elif rank != 0 and drawn.shape.num_elements() != 1:
                self._fixed = True

    def test(self, batch_size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Replaces some examples, in four ways.

        A random half by copies of the others; the other half by one example, the same
        for all, close to zero: whoever decides a maximum, or whether anybody has some
        property, is gone once. Then all but an eighth by outliers: whatever tells one
        batch from another is moved far. Last, all but one by copies of that one: of
        several that are the largest, the longest or of some kind, none is left.

        Returns:
          `[2 W + 2 V]`, boolean, in the order of `messages`: whether what stays is as
          it was, whether copies have what the examples have, whether the gradients of
          those that stay have the sums that they had, and whether those of a half have
          them without the other half; and a boolean scalar, whether the test could
          tell.
        """
        wide, summed = len(self._witnesses), self._sums
        number = 0 if summed is None else len(summed.labels)
        if self._flows.batch_size == 1:  # There are no others.
            return tf.fill([2 * (wide + number)], True), tf.constant(False)
        rows, factors = self._replacements(batch_size)
        # Where a row is not an example, or random numbers or labels stay where they
        # are, copies are not what they are copies of.
        whole = [tf.equal(tf.shape(s)[0], batch_size) for s in self._sources]
        whole += [tf.not_equal(batch_size, rows) for rows in self._closed_over]
        moves = tf.reduce_all(tf.stack(whole)) & (not self._fixed)
        seed = chance.run_seed()
        weights = self._weights(rows, factors, batch_size)
        ways = rows.shape[0] - 1

        def body(i, kept, placed, alike, telling, before, before_sums):
            # Each way comes after the batch as it was, with the same weights.
            way = tf.where(tf.equal(i % 2, 0), 0, i // 2 + 1)
            source, factor = rows[way], factors[way]
            tensors, sums = self._with_rows(source, factor, weights[i // 2], batch_size)
            pairs = self._each(tensors)
            parts = row_tables.tables(pairs, seed)
            after = Rows(parts, [layout for _, layout in pairs], batch_size)
            # First as it was, by the very code that computes the others: compiled
            # another way, the same sums are rounded another way.
            before = row_tables.once(i, before, after.joined)
            found = self._compare(before, after, source, factor)
            kept &= found[0]
            placed &= found[1] | ~moves
            if summed is not None:
                sums = summed.tables(sums, seed)
                before_sums = tf.where(tf.equal(way, 0), sums, before_sums)
                weighed = weights[i // 2] if self._padded else None
                alike &= summed.alike(before_sums, sums, self._coarse, weighed)
            telling |= found[2]
            return i + 1, kept, placed, alike, telling, before, before_sums

        nothing = row_tables.nothing_yet(
            self._each([w.tensor for w in self._witnesses])
        )
        no_sums = tf.zeros([0])
        if summed is not None:
            no_sums = tf.zeros([summed.rows, row_tables.WIDTH])
        every, vector = tf.fill([wide], True), tf.TensorShape([wide])
        # Last, the batch as it was once more, with the weights of a half.
        count, scalar = 2 * ways + (summed is not None), tf.TensorShape([])
        _, kept, placed, alike, telling, _, before_sums = tf.while_loop(
            lambda i, *_: i < count,
            body,
            (
                *(tf.constant(0), every, every, tf.fill([number], True)),
                *(tf.constant(False), nothing, no_sums),
            ),
            shape_invariants=(
                *(scalar, vector, vector, tf.TensorShape([number]), scalar),
                *(row_tables.any_length(nothing), no_sums.shape),
            ),
            maximum_iterations=count,
            parallel_iterations=1,
        )
        parts = [kept, placed, alike]
        if summed is not None:
            half = self._half(weights[-1], tf.reduce_all(tf.stack(whole)), seed)
            parts.append(half(before_sums))
        return tf.concat(parts, axis=0), telling & (batch_size > 1)

    def _weights(self, rows, factors, batch_size) -> tf.Tensor:
        """`[5, B]`: of random sign and size, for those that stay, or the first half."""
        drawn = chance.uniform(tf.shape(factors))
        drawn = tf.where(drawn < 0.5, 1 + 2 * drawn, -2 * drawn)
        stay = tf.equal(rows, rows[:1]) & tf.equal(factors, 1.0)
        first = tf.range(batch_size) < _half_of(batch_size)
        stay = tf.concat([stay[1:], first[tf.newaxis]], axis=0)
        return tf.where(stay, drawn, 0.0)

    def _half(self, weights, whole, seed):
        """Compares the sums of the first half with those of a batch without the rest.

        Args:
          weights: `[B]`.
          whole: whether all data have a row for each example.
          seed: of the tables.

        Returns:
          A function of the tables before that gives booleans, `[V]`.
        """
        summed = self._sums
        well = tf.fill([len(summed.labels)], True)
        if self._shorter is None:
            return lambda before: well
        batch_size = tf.size(weights)
        half = _half_of(batch_size)

        def run(before):
            known = {summed.seed.ref(): tf.cast(weights[:half], summed.seed.dtype)}
            for source in (*self._sources, *self._random):
                each = tf.shape(source)[0] // batch_size
                part = source[: half * each]
                part.set_shape([None, *source.shape[1:]])
                known[source.ref()] = part
            self._emit(self._shorter, known)
            sums = [
                tf.ensure_shape(known.get(t.ref(), t), t.shape) for t in summed.tensors
            ]
            after = summed.tables(sums, seed)
            return summed.alike(before, after, self._coarse, weights[:half])

        return lambda before: tf.cond(
            whole & (half > 0), lambda: run(before), lambda: well
        )

    def _each(self, tensors) -> list[tuple[tf.Tensor, Layout]]:
        return [
            (tensor, layout)
            for tensor, witness in zip(tensors, self._witnesses, strict=True)
            for layout in witness.layouts
        ]

    def _compare(self, before, after: Rows, sources, factors):
        """Compares what was computed with some examples and with others.

        Args:
          before: tables, joined.
          after: the same with other examples.
          sources: `[B]`, which example is at each place.
          factors: `[B]`, how many times as large.

        Returns:
          `[W]`, boolean: whether the rows of those that stay are what they were, and
          those of copies what they are copies of; and whether any loss changed.
        """
        stays = tf.equal(sources, tf.range(tf.size(sources))) & tf.equal(factors, 1.0)
        stays = tf.gather(stays, after.example)
        stayed, _ = self._alike(before, after)
        _, alike = self._alike(tf.gather(before, after.origins(sources)), after)
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

    def _alike(self, before, after: Rows) -> tuple[tf.Tensor, tf.Tensor]:
        """`[M]`: whether rows are the same, and whether they are but for rounding."""
        # Of what is not finite, nothing but that can be compared. Where everybody is
        # like that because of one example, they are not once it is gone.
        finite = tf.reduce_all(tf.math.is_finite(before), axis=1)
        agree = tf.reduce_all(tf.math.is_finite(after.joined), axis=1)
        agree = tf.equal(finite, agree)
        error = tf.reduce_max(tf.abs(after.joined - before)[:, :-1], axis=1)
        error = tf.where(finite & agree, error, 0.0)
        size = tf.where(finite, before[:, -1], 0.0)
        limit = _COARSE_ELSEWHERE if self._coarse else _ELSEWHERE
        limit = max(limit, _OTHER_LENGTHS) if self._padded else limit
        near = agree & (error <= limit * tf.maximum(size, after.mean(size)))
        exact = on_cpus() and not self._padded
        return agree & (error <= _TOLERANCE * size) if exact else near, near

    def _replacements(self, batch_size) -> tuple[tf.Tensor, tf.Tensor]:
        """Which example is in each row, `[5, B]`, and how many times as large."""
        order = chance.shuffled(tf.range(batch_size))
        own = tf.range(batch_size)
        half = batch_size // 2
        rest = batch_size - half  # the larger one of an odd number
        most = tf.maximum(batch_size - tf.maximum(batch_size // _STAYING, 1), 0)
        rows, factors = [own], [tf.ones_like(own, tf.float32)]
        for gone, donors, factor in (
            (order[:half], order[half : 2 * half], 1.0),
            (order[half:], tf.repeat(order[:1], rest), 1 / _FAR),
            (order[:most], tf.roll(order, 1, axis=0)[:most], _FAR),
            (order[1:], tf.repeat(order[:1], tf.maximum(batch_size - 1, 0)), 1.0),
        ):
            places, times = gone[:, tf.newaxis], tf.fill(tf.shape(gone), factor)
            rows.append(tf.tensor_scatter_nd_update(own, places, donors))
            factors.append(tf.tensor_scatter_nd_update(factors[0], places, times))
        return tf.stack(rows), tf.stack(factors)

    def _with_rows(self, rows, factors, weights, batch_size):
        """What is compared, with row `rows[i]` of the data in row i, times a factor.

        Returns:
          The witnesses, and the gradients under some weights.
        """
        known: dict = {}
        if self._sums is not None:
            seed = self._sums.seed
            known[seed.ref()] = tf.ensure_shape(
                tf.cast(weights, seed.dtype), seed.shape
            )
        scaled = {source.ref() for source in self._scaled}
        for source in (*self._sources, *self._random):
            length = tf.shape(source)[0]
            # What has other than one row for each example stays as it is.
            own = tf.range(length)
            padded = tf.concat([rows, own], axis=0)[:length]
            own = tf.where(tf.equal(length, batch_size), padded, own)
            moved = tf.gather(source, own)
            if source.ref() in scaled:
                times = tf.concat([factors, tf.ones([length])], axis=0)[:length]
                times = tf.where(tf.equal(length, batch_size), times, 1.0)
                shape = [-1, *([1] * (source.shape.rank - 1))]
                moved *= tf.cast(tf.reshape(times, shape), source.dtype)
            moved.set_shape(source.shape)
            known[source.ref()] = moved
        for batch in self._sparse:
            parts = batch.with_rows(rows, batch_size)
            for part, moved in zip(
                (batch.indices, batch.values, batch.shape), parts, strict=True
            ):
                moved.set_shape(part.shape)
                known[part.ref()] = moved
        self._emit(self._steps, known)
        wanted = [w.tensor for w in self._witnesses]
        sums = [] if self._sums is None else self._sums.tensors
        found = [
            tf.ensure_shape(known.get(t.ref(), t), t.shape) for t in [*wanted, *sums]
        ]
        return found[: len(wanted)], found[len(wanted) :]

    def _emit(self, steps: Sequence[tf.Operation], known: dict) -> None:
        """Adds ops again, on other inputs, and notes what they give."""
        for op in steps:
            inputs = [known.get(t.ref(), t) for t in op.inputs]
            outputs = _copies.emit_again(op, inputs)
            for old, new in zip(op.outputs, outputs, strict=True):
                known.setdefault(old.ref(), new)
