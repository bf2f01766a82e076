"""Runs the loss again with other examples in the place of some.

If every example's loss depends on that example alone, then the losses of those that
stay are the same, to the last digit or so. Gradients cannot tell as much: they do not
see a statistic of the batch behind `tf.stop_gradient`, nor one that reaches the loss
through integers, ranks or comparisons.

The second run shares everything with the first that does not depend on the examples'
values: weights, and the random numbers of dropout, which depend on the batch's shape
only. Random numbers with a row for each example go where the example goes, so that its
copy must have its loss, too: where it does not, the loss depends on the place that the
example has in the batch, which is a matter of who else is there.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdpclip._devices import on_cpus
from tfdpclip._docs import see
from tfdpclip.gradients import _copies, chance, ops, sparse
from tfdpclip.gradients.dataflow import Dataflow, ancestors
from tfdpclip.gradients.errors import ExampleIsolationError

_CONSTANTS = ("Const", "Placeholder")
# Relative to each loss. On CPUs a row of a product comes out the same, to the bit,
# whatever is in the other rows; elsewhere sums may be added up in any order.
_TOLERANCE, _ELSEWHERE, _COARSE_ELSEWHERE = 2e-6, 1e-5, 2e-2

MESSAGE = (
    "ExampleIsolationError: with other examples in the place of some, the losses of "
    "those that stayed have changed: an example's loss depends on other examples. "
    "Clipping would protect nobody. "
)


PLACES = (
    "ExampleIsolationError: a copy of an example has another loss in another place of "
    "the batch. Who is there before an example would decide about its gradient. Do not "
    "compute with tf.range(batch size), nor with random numbers that belong to places "
    "of the batch: let numbers come with the data, or draw random ones with the batch "
    "on axis 0. "
)


class ReplacedExamples:
    """The losses as they would be if some examples were others.

    Args:
      per_example: the losses, `[B]`.
      flows: the analysis of the losses.
      gradients: of the losses, at tensors of `[B, ...]`: where a model has gradients of
        its own (`tf.custom_gradient`), examples may meet on the way back only.

    Attributes:
      obstacle: why the losses cannot be computed again; None if they can.

    Raises:
      ExampleIsolationError: if the data pass through Python code, of which nothing can
        be known.
    """

    def __init__(
        self,
        per_example: tf.Tensor,
        flows: Dataflow,
        gradients: Sequence[tf.Tensor] = (),
    ):
        self._losses = per_example
        self._flows = flows
        self._compared = [per_example, *gradients]
        self._sources = [s for s in flows.sources if s.shape.rank]
        self._sparse = flows.sparse_batches
        self._coarse = any(
            t.dtype.is_floating and t.dtype.size < 4
            for op in flows.ops
            for t in op.outputs
        )
        self.obstacle = self._plan()

    def _plan(self) -> str | None:
        """Finds what depends on the examples' values."""
        if not self._sources and not self._sparse:
            return "no data were found behind the loss"
        affected = {source.ref() for source in self._sources}
        for batch in self._sparse:
            affected |= {t.ref() for t in (batch.indices, batch.values)}
        # Random numbers, by example; and whether there are others.
        self._random: list[tf.Tensor] = []
        self._fixed = False
        # How many rows tensors have that the loss closes over: they may be labels.
        self._closed_over: set[int] = set()
        # Tensors of as many entries as the data say.
        varying: set = set()
        for batch in self._sparse:
            varying |= {t.ref() for t in (batch.indices, batch.values)}
        self._steps = []
        for op in ancestors(self._compared):
            if not any(t.ref() in affected for t in op.inputs):
                self._note_constant(op, affected)
                continue
            varies = any(t.ref() in varying for t in op.inputs)
            if op.type in ops.SIZES and not varies:
                continue
            other = op.type.startswith(("Sparse", "Ragged"))
            other &= op.type not in sparse.REPEATABLE
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
            self._fixed = self._fixed or _copies.draws(op)
            self._steps.append(op)
            fresh = [t for t in op.outputs if t.ref() not in affected]
            affected |= {t.ref() for t in fresh}
            if varies or op.type in ops.DATA_SHAPED:
                varying |= {t.ref() for t in fresh}
        if self._losses.ref() not in affected:
            return "the losses do not depend on the data"
        self._compared = [t for t in self._compared if t.ref() in affected]
        return None

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

    def test(self, batch_size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Replaces a random half of the examples by copies of the others, and back.

        First one half, then the other: whoever decides a maximum, or whether anybody
        has some property, is gone once.

        Returns:
          Boolean scalars: whether the others' losses stayed what they were, whether
          those of copies are those of the examples, and whether the test could tell.
        """
        if self._flows.batch_size == 1:
            return tuple(map(tf.constant, (True, True, False)))  # There are no others.
        half = batch_size // 2
        order = chance.shuffled(tf.range(batch_size))
        own = tf.range(batch_size)
        # Of an odd number the second half is the larger one, and uses one copy twice.
        copies = tf.range(batch_size - half) % tf.maximum(half, 1)
        rows = tf.stack(
            [own]
            + [
                tf.tensor_scatter_nd_update(own, gone[:, tf.newaxis], donors)
                for gone, donors in (
                    (order[:half], order[half : 2 * half]),
                    (order[half:], tf.gather(order, copies)),
                )
            ]
        )

        # Where a row is not an example, or random numbers or labels stay where they
        # are, copies are not what they are copies of.
        whole = [tf.equal(tf.shape(s)[0], batch_size) for s in self._sources]
        whole += [tf.not_equal(batch_size, rows) for rows in self._closed_over]
        moves = tf.reduce_all(tf.stack(whole)) & (not self._fixed)

        def body(i, good, placed, telling, *base):
            again = self._with_rows(rows[i], batch_size)
            # First as it was, by the very code that computes the others: compiled
            # another way, the same sums are rounded another way.
            base = [
                tf.where(tf.equal(i, 0), new, old)
                for new, old in zip(again, base, strict=True)
            ]
            stays = tf.equal(rows[i], own)
            for number, (before, after) in enumerate(zip(base, again, strict=True)):
                same = self._same_rows(before, after, stays)
                good &= tf.reduce_all(same | ~stays)
                if number == 0:
                    telling |= tf.reduce_any(~same & ~stays)
                    theirs = tf.gather(before, rows[i])
                    same = self._same_rows(theirs, after, stays, strict=False)
                    placed &= tf.reduce_all(same | ~moves)
            return i + 1, good, placed, telling, *base

        start = (tf.constant(0), *map(tf.constant, (True, True, False)))
        _, good, placed, telling, *_ = tf.while_loop(
            lambda i, *_: i < 3,
            body,
            (*start, *map(tf.zeros_like, self._compared)),
            maximum_iterations=3,
            parallel_iterations=1,
        )
        return good, placed, telling

    def _same_rows(self, before, after, stays, strict: bool = True) -> tf.Tensor:
        """Whether each example's entries are what they were, `[B]`.

        Args:
          before: `[B, ...]`.
          after: the same again.
          stays: `[B]`.
          strict: whether each row is computed at the place where it was before.
        """
        count = tf.size(stays)
        before, after = (
            tf.reshape(tf.cast(t, tf.float32), [count, -1]) for t in (before, after)
        )
        # Of what is not finite, nothing but that can be compared. Where everybody is
        # like that because of one example, they are not once it is gone.
        finite = tf.math.is_finite(before)
        agree = tf.equal(finite, tf.math.is_finite(after))
        error = tf.where(finite & agree, tf.abs(after - before), 0.0)
        size = tf.where(finite, tf.abs(before), 0.0)
        size = tf.reduce_max(size, axis=1, keepdims=True)
        if on_cpus() and strict:
            tolerance = _TOLERANCE
        else:
            tolerance = _COARSE_ELSEWHERE if self._coarse else _ELSEWHERE
            size = tf.maximum(size, tf.reduce_mean(size))
        return tf.reduce_all(agree & (error <= tolerance * size), axis=1)

    def _with_rows(self, rows: tf.Tensor, batch_size: tf.Tensor) -> list[tf.Tensor]:
        """What is compared, with row `rows[i]` of the data in row i."""
        known: dict = {}
        for source in (*self._sources, *self._random):
            length = tf.shape(source)[0]
            # What has other than one row for each example stays as it is.
            own = tf.range(length)
            padded = tf.concat([rows, own], axis=0)[:length]
            own = tf.where(tf.equal(length, batch_size), padded, own)
            moved = tf.gather(source, own)
            moved.set_shape(source.shape)
            known[source.ref()] = moved
        for batch in self._sparse:
            parts = batch.with_rows(rows, batch_size)
            for part, moved in zip(
                (batch.indices, batch.values, batch.shape), parts, strict=True
            ):
                moved.set_shape(part.shape)
                known[part.ref()] = moved
        for op in self._steps:
            inputs = [known.get(t.ref(), t) for t in op.inputs]
            outputs = _copies.emit_again(op, inputs)
            for old, new in zip(op.outputs, outputs, strict=True):
                known.setdefault(old.ref(), new)
        found = [tf.stop_gradient(known[t.ref()]) for t in self._compared]
        return [
            tf.ensure_shape(again, t.shape)
            for again, t in zip(found, self._compared, strict=True)
        ]
