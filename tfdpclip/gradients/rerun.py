"""Computes losses, and what gradients are made of, again with other examples.

All that depends on the examples' values is computed by copies of the ops of the graph;
weights, and random numbers that do not depend on the examples, are those of the step.
Where the number of examples is not static, what is computed from it is copied as well:
the same copies then run on a part of the batch.

It is long because what is computed again, and of what, is decided in one walk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.gradients import _copies, chance, ops, sparse, state
from tfdpclip.gradients.dataflow import Dataflow, ancestors, same_number
from tfdpclip.gradients.errors import ExampleIsolationError
from tfdpclip.gradients.replaced_sums import Sums
from tfdpclip.gradients.row_tables import Layout

_CONSTANTS = ("Const", "Placeholder")
_SATURATING = ("Erf", "Sigmoid", "Softmax", "Tanh")
_SHAKEN = 4
_SAME_NUMBERS = ("Cast", "ExpandDims", "Identity", "Reshape", "Transpose")


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


def obstacle(losses: tf.Tensor, flows: Dataflow) -> str | None:
    """Why losses, `[B]`, cannot be computed again with other examples, or None.

    Raises:
      ExampleIsolationError: if the data pass through Python code.
    """
    return Rerun(losses, flows, [], None).obstacle


@dataclasses.dataclass(frozen=True)
class Again:
    """What a batch gives that is computed once more.

    Attributes:
      witnesses: what else depends on the examples.
      sums: the gradients of variables, under the weights that were given.
      others: those at other tensors that are there anyway, by number.
      rest: adds the rest of those to the graph that is current then.
    """

    witnesses: list[tf.Tensor]
    sums: list[tf.Tensor]
    others: dict[int, tf.Tensor]
    rest: Callable[[], dict[int, tf.Tensor]]


class Rerun:
    """The tensors of a loss, for batches made of rows of the step's own.

    Args:
      losses: `[B]`.
      flows: the analysis of the losses.
      witnesses: what else is to be computed.
      sums: the gradients of variables, which are, too, and at other tensors; None for
        none.

    Attributes:
      obstacle: why the losses cannot be computed again; None if they can.
      witnesses: the losses, and those of the others that depend on the examples.
      coarse: whether something is computed in a type below float32.
      fixed: whether random numbers are drawn that are no example's own.
      padded: whether something is as long as the longest example.
      resizes: whether a part of the batch will do.

    Raises:
      ExampleIsolationError: if the data pass through Python code, of which nothing can
        be known, or if losses can be computed again and a gradient cannot.
    """

    def __init__(
        self,
        losses: tf.Tensor,
        flows: Dataflow,
        witnesses: Sequence[Witness],
        sums: Sums | None,
    ):
        self._losses = losses
        self._flows = flows
        self.witnesses = [Witness(losses), *witnesses]
        self._sums = sums
        self._sources = [s for s in flows.sources if s.shape.rank]
        self._sparse = flows.sparse_batches
        # Of the data; and of random numbers that go with them.
        self._each = flows.rows_per_example
        self.coarse = any(
            t.dtype.is_floating and t.dtype.size < 4
            for op in flows.ops
            for t in op.outputs
        )
        self.resizes = False
        self.obstacle = self._plan()

    def _plan(self) -> str | None:
        """Finds what depends on the examples' values."""
        if not self._sources and not self._sparse:
            return "no data were found behind the loss"
        affected = {source.ref() for source in self._sources}
        sums, others = self._of_sums()
        if self._sums is not None:
            affected.add(self._sums.seed.ref())
        for batch in self._sparse:
            affected |= {t.ref() for t in (batch.indices, batch.values)}
        # Random numbers, by example; and whether there are others.
        self._random: list[tf.Tensor] = []
        self.fixed = False
        # Whether something is as long as the longest example.
        self.padded = False
        # How many rows tensors have that the loss closes over: they may be labels.
        self._closed_over: set[int] = set()
        # Tensors of as many entries as the data say.
        varying: set = set()
        for batch in self._sparse:
            varying |= {t.ref() for t in (batch.indices, batch.values)}
        # What cannot be computed again, by why not.
        lost: dict = {}
        self._steps = []
        losses_own = set(self._flows.ops)
        # What every step runs; the rest of what makes the sums only a check should.
        run = set(ancestors([w.tensor for w in self.witnesses]))
        for op in ancestors([*(w.tensor for w in self.witnesses), *sums, *others]):
            if not any(t.ref() in affected for t in op.inputs):
                # Of the loss's own, the engine knows: this is of a gradient's.
                if op.type not in _CONSTANTS and op not in losses_own:
                    state.refuse_what_others_left([op])
                self._note_constant(op, affected)
                continue
            varies = any(t.ref() in varying for t in op.inputs)
            if op.type in ops.SIZES and not varies and op in run:
                continue
            why = next((lost[t.ref()] for t in op.inputs if t.ref() in lost), None)
            why = self._obstacle_at(op) if why is None else why
            if why is not None:
                lost.update((t.ref(), why) for t in op.outputs)
            self.fixed = self.fixed or _copies.draws(op)
            self._steps.append(op)
            fresh = [t for t in op.outputs if t.ref() not in affected]
            affected |= {t.ref() for t in fresh}
            padded = op.type in ops.PADDED
            self.padded = self.padded or padded
            if varies or padded or op.type in ops.DATA_SHAPED:
                varying |= {t.ref() for t in fresh}
        if self._losses.ref() not in affected:
            return "the losses do not depend on the data"
        if self._losses.ref() in lost:
            return lost[self._losses.ref()]
        labelled = [(w.tensor, w.label) for w in self.witnesses]
        if self._sums is not None:
            labelled += zip(sums, self._sums.labels, strict=True)
        labelled += [(t, f"the gradient {t.op.name!r}") for t in others]
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
        self.witnesses = [
            w
            for w in self.witnesses
            if w.tensor.ref() in affected
            and (w.steady or w.tensor.ref() not in varying)
        ]
        needed = set(ancestors(self._wanted()))
        self._steps = [op for op in self._steps if op in needed]
        self._scaled = self._may_be_scaled()
        resized = self._resized_steps()
        if resized is not None:
            self.resizes, self._steps = True, resized
        return None

    def _resized_steps(self) -> list[tf.Operation] | None:
        """The ops that compute all of it from a part of the batch.

        Those that depend on the examples' values, or on how many there are. None where
        that cannot be: the size is static, and public; or random numbers of other
        shapes would have to be drawn anew.
        """
        if self._flows.batch_size is not None or self._sparse:
            return None
        if any(self._flows[t].minor for t in self._random):
            return None
        given, wanted = [*self._sources, *self._random], self._wanted()
        if all(t.shape[0] is not None for t in self._sources):
            return None  # the losses' own length was lost on the way, in a loop, say
        if self._sums is not None:
            given.append(self._sums.seed)
        affected, steps = {t.ref() for t in given}, []
        for op in ancestors(wanted, stop={t.op for t in given}):
            if not any(t.ref() in affected for t in op.inputs):
                continue
            if op.type not in ops.SIZES and not _copies.repeatable(op):
                return None
            steps.append(op)
            affected |= {t.ref() for t in op.outputs}
        return steps

    def _wanted(self) -> list[tf.Tensor]:
        sums, others = self._of_sums()
        return [*(w.tensor for w in self.witnesses), *sums, *others]

    def _of_sums(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The gradients of variables, and those at other tensors that have one."""
        if self._sums is None:
            return [], []
        return self._sums.tensors, [t for t in self._sums.others if t is not None]

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
            state.refuse_python(op)
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
            rank, size = drawn.shape.rank, self._flows.length
            by_example = bool(rank) and self._flows[drawn].leads
            if rank and size:
                # Which axis counts examples is not known where two are as long.
                by_example = drawn.shape[0] == size and size not in drawn.shape[1:]
            if by_example:
                self._random.append(drawn)
                affected.add(drawn.ref())
            elif rank != 0 and drawn.shape.num_elements() != 1:
                self.fixed = True

    def whole(self, batch_size: tf.Tensor) -> tf.Tensor:
        """Whether all data have a row for each example, a boolean scalar.

        And none are closed over, which would stay where they are.
        """
        length = batch_size * self._each
        found = [tf.equal(tf.shape(s)[0], length) for s in self._sources]
        found += [tf.not_equal(length, rows) for rows in self._closed_over]
        return tf.reduce_all(tf.stack(found))

    def tensors(
        self,
        part: tf.Tensor,
        rows: tf.Tensor,
        factors: tf.Tensor,
        nudge: tf.Tensor,
        weights: tf.Tensor,
        batch_size: tf.Tensor,
        shake: tf.Tensor | None = None,
    ) -> Again:
        """Adds it all to the current graph, of a batch made of rows of the step's.

        Args:
          part: `[N]`, the places of the step's batch that are there at all; all of
            them, in order, where it does not divide.
          rows: `[N]`, whose data are at each place, by number in the step's batch:
            perhaps not one of `part`.
          factors: `[N]`, times how much.
          nudge: by how much of itself each number is made larger or smaller, at random.
          weights: `[N]`, of the losses in the sums.
          batch_size: B.
          shake: by how much of itself what ends at 1 is made smaller, and, where the
            data cannot be nudged, the model's first weights larger.

        Returns:
          What was computed again.
        """
        known: dict = {}
        if self._sums is not None:
            seed = self._sums.seed
            shape = [None] if self.resizes else seed.shape
            known[seed.ref()] = tf.ensure_shape(tf.cast(weights, seed.dtype), shape)
        scaled = {source.ref() for source in self._scaled}
        drawn = {tensor.ref() for tensor in self._random}
        moved_rows = self._places(rows)
        for source in (*self._sources, *self._random):
            length = tf.shape(source)[0]
            whole = tf.equal(length, batch_size * self._each)
            if self.resizes and source.ref() in drawn:
                each = length // batch_size
                moved = tf.gather(source, self._own(part, rows, each))
            elif self.resizes:
                own = tf.range(tf.where(whole, 0, length))
                moved = moved_rows[: tf.where(whole, tf.size(moved_rows), 0)]
                moved = tf.gather(source, tf.concat([moved, own], axis=0))
            else:
                # What has not the rows of the examples stays as it is.
                own = tf.range(length)
                padded = tf.concat([moved_rows, own], axis=0)[:length]
                moved = tf.gather(source, tf.where(whole, padded, own))
            if source.ref() in scaled:
                count = tf.shape(moved)[0]
                times = factors if self._each == 1 else tf.repeat(factors, self._each)
                times = tf.concat([times, tf.ones([count])], axis=0)[:count]
                times = tf.where(whole, times, 1.0)
                shape = [-1, *([1] * (source.shape.rank - 1))]
                moved *= tf.cast(tf.reshape(times, shape), source.dtype)
                moved = _nudged(moved, nudge)
            moved.set_shape(source.shape)
            known[source.ref()] = moved
        for batch in self._sparse:
            parts = batch.with_rows(rows, batch_size)
            for old, moved in zip(
                (batch.indices, batch.values, batch.shape), parts, strict=True
            ):
                moved.set_shape(old.shape)
                known[old.ref()] = moved
        if shake is not None:
            known.update(self._shaken(shake))
        sums, _ = self._of_sums()
        witnesses = [w.tensor for w in self.witnesses]
        first = set(ancestors([*witnesses, *sums]))

        def add(steps, wanted) -> list[tf.Tensor]:
            for op in steps:
                inputs = [known.get(t.ref(), t) for t in op.inputs]
                outputs = _copies.emit_again(op, inputs)
                if shake is not None and op.type in _SATURATING:
                    # Of which a gradient is 1 less that, near 1.
                    outputs = [t * tf.cast(1 - shake, t.dtype) for t in outputs]
                for old, new in zip(op.outputs, outputs, strict=True):
                    known.setdefault(old.ref(), new)
            return [_of_shape(known.get(t.ref(), t), t.shape) for t in wanted]

        late = dict.fromkeys(op for op in self._steps if op not in first)
        on_the_way, later = {}, {}
        for number, t in enumerate([] if self._sums is None else self._sums.others):
            if t is not None:
                (later if t.op in late else on_the_way)[number] = t
        wanted = [*witnesses, *sums, *on_the_way.values()]
        found = iter(add([op for op in self._steps if op in first], wanted))
        return Again(
            [next(found) for _ in witnesses],
            [next(found) for _ in sums],
            dict(zip(on_the_way, found, strict=True)),
            lambda: dict(zip(later, add(late, later.values()), strict=True)),
        )

    def _shaken(self, shake: tf.Tensor) -> dict:
        """The first weights, by reference, a little larger where `shake` is not 0.

        For data that are no numbers, and cannot be nudged: all that follows is.
        """
        if self._scaled:
            return {}
        copied = set(self._steps)
        given = {t.ref(): t for op in self._steps for t in op.inputs}
        weights = [t for t in given.values() if t.op not in copied and _is_weight(t)]
        weights = weights[:_SHAKEN]
        if not weights:
            return {}

        def changed():
            return [t * tf.cast(1 + shake, t.dtype) for t in weights]

        found = tf.cond(shake > 0, changed, lambda: list(weights))
        for tensor, new in zip(weights, found, strict=True):
            new.set_shape(tensor.shape)
        return {t.ref(): new for t, new in zip(weights, found, strict=True)}

    def _places(self, examples: tf.Tensor) -> tf.Tensor:
        """The rows of the data that some examples have."""
        return _rows_of(examples, self._each)

    def _own(self, part: tf.Tensor, rows: tf.Tensor, each: tf.Tensor) -> tf.Tensor:
        """Where random numbers are that go with the data, if these have as many rows.

        With other rows for each example, they stay with the place.
        """
        moved = tf.where(tf.equal(each, self._each), rows, part)
        return _rows_of(moved, each)


def _is_weight(tensor: tf.Tensor) -> bool:
    """Whether a tensor is what a variable has, in another type or shape perhaps."""
    while tensor.op.type in _SAME_NUMBERS:
        tensor = tensor.op.inputs[0]
    return tensor.dtype.is_floating and tensor.op.type == "ReadVariableOp"


def _rows_of(examples: tf.Tensor, each: tf.Tensor | int) -> tf.Tensor:
    if isinstance(each, int) and each == 1:
        return examples
    return tf.reshape(examples[:, tf.newaxis] * each + tf.range(each), [-1])


def _of_shape(tensor: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """With a static shape, which copies of ops mostly have of themselves."""
    known = tensor.shape.rank is not None and shape.rank is not None
    if known and tensor.shape.as_list() == shape.as_list():
        return tensor
    return tf.ensure_shape(tensor, shape)


def _nudged(data: tf.Tensor, nudge: tf.Tensor) -> tf.Tensor:
    """Each number a little larger or smaller, where `nudge` is not 0."""

    def changed():
        sign = tf.where(chance.uniform(tf.shape(data)) < 0.5, nudge, -nudge)
        return data * tf.cast(1 + sign, data.dtype)

    return tf.cond(nudge > 0, changed, lambda: data)
