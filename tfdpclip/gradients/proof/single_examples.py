"""Gradients made one example at a time, for losses without an isolation proof.

Comes in: losses `[B]` of a graph with an op at which the proof ends
(`isolation_proof.py`). Goes out: the gradient of every example, from copies of the ops
of the loss that read the data of that example alone. So the gradient of an example is
independent of all further examples of the batch, for every behaviour of the unknown op.

If the number of examples is not static, the copies run on a batch of a single example.
If it is static, the copies run on a batch that repeats the example in each place, and
the loss at the first place is used: so the gradient of an example does not depend on
its place in the batch. Weights, and random numbers that do not depend on the data, are
shared with the step. A copy reads its example's own rows of numbers that are drawn
alike for each row of the batch.

Loops and branches are rebuilt around copies of their ops (`control_copies.py`).

An error names an op that cannot be copied: Python, files, queues, mutable tables,
writes to variables, and calls that gradients pass through and that cannot be opened.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import tensorflow as tf

from tfdpclip._devices import has_form_of_xla, in_xla
from tfdpclip._docs import see
from tfdpclip._tf_private import map_elements
from tfdpclip.gradients.errors import ExampleIsolationError
from tfdpclip.gradients.flows import op_flows
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.flows.flow import DATA
from tfdpclip.gradients.graph import op_copies, ops
from tfdpclip.gradients.graph.known import (
    BY_ARGUMENT,
    CONSTANT_BY_PLACE,
    draws_the_same,
    rows_alike,
)
from tfdpclip.gradients.proof import control_copies
from tfdpclip.gradients.proof.control_copies import ControlCopies
from tfdpclip.gradients.proof.isolation_proof import Proof

# Ops that return new memory, which a loop may then write into, and the writing ops.
_MEMORY = frozenset("Empty Fill ZerosLike InplaceAdd InplaceSub InplaceUpdate".split())


class OneByOneWarning(UserWarning):
    """The gradients of a model are made one example at a time."""


def warn(proof: Proof, batch_size: int | None) -> None:
    """Warns once per trace: names the op, the cost and the ways out.

    Args:
      proof: the proof of the losses, which ends at an op.
      batch_size: the static number of examples, or None. An empty batch costs nothing,
        so it gets no warning.
    """
    if batch_size == 0:
        return
    kind = proof.op.type
    stated = (
        f"; or, if a {kind} keeps its rows apart, state dpc.gradients.op_flow({kind!r})"
        if op_flows.may_be_stated(kind)
        else ""
    )
    remedy = f"Build the layer from known ops{stated}."
    if proof.reason == CONSTANT_BY_PLACE:
        remedy = BY_ARGUMENT
    warnings.warn(
        f"The proof that examples stay apart ends at {proof.op.name!r} (a {kind}): it "
        f"is not known {proof.reason}. So gradients are made one example at a time, "
        f"which costs a forward and a backward pass for each. {remedy}"
        + see("one-example-at-a-time"),
        OneByOneWarning,
        stacklevel=2,
    )


class ExamplesAlone:
    """The losses and gradients of single examples, by copies of a graph's ops.

    Args:
      losses: `[B]`.
      variables: the variables.
      handles: the graph's handles of `variables`.
      flows: the analysis of the losses.
      proof: the proof of the losses, which ends at an op.

    Raises:
      ExampleIsolationError: if an op cannot be copied; the message names the op.
    """

    def __init__(
        self,
        losses: tf.Tensor,
        variables: Sequence[tf.Variable],
        handles: Sequence[tf.Tensor],
        flows: Dataflow,
        proof: Proof,
    ):
        self._losses, self._flows, self._proof = losses, flows, proof
        self._variables, self._handles = list(variables), list(handles)
        self._sources = [s for s in flows.sources if s.shape.rank]
        self._sparse = flows.sparse_batches
        # A loop may lose the static number of examples; the data still have it.
        lengths = {s.shape[0] for s in self._sources}
        length = lengths.pop() if len(lengths) == 1 else None
        self._count = flows.batch_size
        if self._count is None and length is not None:
            self._count = length // flows.rows_per_example
        self._random: list[tf.Tensor] = []
        self._rows: dict = {}
        self._drawing: tf.Operation | None = None
        self._plan()

    def _plan(self) -> None:
        """Finds the tensors that depend on no data; copies read them from the step."""
        flows = self._flows
        sources = {source.ref() for source in self._sources}
        handles = {handle.ref() for handle in self._handles}
        for batch in self._sparse:
            sources |= {t.ref() for t in (batch.indices, batch.values, batch.shape)}
        self._shared: dict = {}
        affected = set(sources)
        for op in flows.ops:
            if all(t.ref() in sources for t in op.outputs) and op.outputs:
                continue
            if not any(t.ref() in affected for t in op.inputs):
                self._refuse_data(op, sources)
                # Integer constants are copied: ops in a new graph may need the value.
                # Ops on variables are copied: no gradient passes between two graphs.
                # New memory is copied: the loops of TensorFlow's CTC write into their
                # first values, which must not be those of the step or of all examples.
                copied = op.type == "Const" and op.outputs[0].dtype.is_integer
                copied = copied or op.type in _MEMORY
                trained = any(
                    t.ref() in handles or flows[t].trained for t in op.outputs
                )
                if not copied and not trained:
                    self._shared.update((t.ref(), t) for t in op.outputs)
                continue
            # A draw with a constant seed is copied: the copy has the numbers of the
            # first place for each example.
            drawn = op.type in ops.RANDOM or (
                op.type.startswith(ops.SEEDED_DRAWS) and not draws_the_same(op)
            )
            if drawn and all(flows[t].made and self._has_rows(t) for t in op.outputs):
                self._random += op.outputs
            else:
                self._refuse_uncopied(op)
                if self._drawing is None and op_copies.draws(op):
                    self._drawing = op
            affected |= {t.ref() for t in op.outputs}
        self._cut_draws(affected)
        if self._losses.ref() not in affected:
            raise ExampleIsolationError(
                "The loss depends on no data that the library knows, so gradients "
                "cannot be made one example at a time. Pass the data as arguments of "
                "the function, with the batch on axis 0." + see("one-example-at-a-time")
            )

    def _cut_draws(self, affected: set) -> None:
        """Finds the draws of a static batch's shape whose rows belong to examples.

        A copy reads the rows of its example, as from a draw of the batch's own size.
        The rows are drawn alike, so an example's place decides nothing. Numbers that
        are not drawn alike in each row are kept whole.

        Args:
          affected: the references of the tensors that depend on the data.
        """
        for ref, tensor in self._shared.items():
            if tensor.op.type == "Const" or not tensor.shape.rank:
                continue
            readers = [
                read
                for op in tensor.consumers()
                if op in self._flows
                for read in op.outputs
                if read.ref() in affected
            ]
            rows = {self._rows_beside(tensor, read) for read in readers}
            if len(rows) != 1 or None in rows:
                continue
            if rows_alike(tensor, -tensor.shape.rank):
                self._rows[ref] = rows.pop()
                self._random.append(tensor)

    def _rows_beside(self, tensor: tf.Tensor, read: tf.Tensor) -> int | None:
        """The rows of an example in a public tensor that is read by place, or None.

        Args:
          tensor: a tensor that depends on no data.
          read: the output of an op that reads `tensor`.
        """
        if read.op.type not in ops.ELEMENTWISE or not self._has_rows(read):
            return None
        same = tensor.shape.rank == read.shape.rank
        rows, count = self._flows[read].rows, self._count
        if not same or not count or tensor.shape[0] != count * rows:
            return None
        return rows

    def _has_rows(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor has a known number of consecutive rows for each example."""
        flow = self._flows[tensor]
        return flow.leads and bool(flow.rows) and not flow.minor

    def _refuse_data(self, op: tf.Operation, sources: set) -> None:
        """Raises for data that cannot be cut into examples.

        Args:
          op: an op whose inputs depend on no tensor of `sources`.
          sources: the references of the tensors that are cut. Data that only these
            tensors are made of, such as a serialised sparse batch, are not read.
        """
        for tensor in op.outputs:
            if tensor.ref() in sources:
                continue
            readers = [r for r in tensor.consumers() if r in self._flows]
            if readers and all(t.ref() in sources for r in readers for t in r.outputs):
                continue
            if self._flows[tensor].kind == DATA and not self._flows[tensor].made:
                raise ExampleIsolationError(
                    f"{tensor.name!r} (a {op.type}) may hold data, and it is not known "
                    "which rows belong to which example, so gradients cannot be made "
                    "one example at a time. Pass the data with the batch on axis 0."
                    + see("one-example-at-a-time")
                )

    def _refuse_uncopied(self, op: tf.Operation) -> None:
        """Raises for an op that cannot be copied for a single example."""
        if op.type in ops.FIRST_ARGUMENT and not control_copies.can_be_written(op):
            # The gradient of a copied call would be for the whole batch, or zero.
            trained = any(self._flows[t].trained for t in op.outputs)
            if trained or op_copies.has_own_gradient(op):
                raise ExampleIsolationError(
                    f"It is not known {self._proof.reason} at {self._proof.op.name!r} "
                    f"(a {self._proof.op.type}). Gradients cannot be made one example "
                    f"at a time either: {op.name!r} (a {op.type}) runs functions that "
                    f"cannot be copied. Replace {self._proof.op.name!r}."
                    + see("one-example-at-a-time")
                )
        valid = op_copies.repeatable(op) or op_copies.draws(op)
        if not valid or op_copies.find_external_state(op, of_examples=True) is not None:
            raise ExampleIsolationError(
                f"{op.name!r} (a {op.type}) may have an effect, or read state that an "
                "earlier step wrote, so gradients cannot be made one example at a "
                "time. Replace the op by ops without effects and state."
                + see("one-example-at-a-time")
            )

    #: Whether a NaN in the backward pass of an example reaches all examples' gradients.
    spreads_nan = False

    def gradients(self, indices: tf.Tensor) -> list[tf.Tensor]:
        """The gradients at `indices`, `[n, *shape]` for each variable."""
        if self._count == 0:
            # A batch that is always empty has no first place to read a loss at.
            return [tf.zeros([0, *v.shape], v.dtype) for v in self._variables]
        signature = [tf.TensorSpec(v.shape, v.dtype) for v in self._variables]
        has_one_each = self._has_one_loss_each()
        with tf.control_dependencies(self._refuse_other_lengths(has_one_each)):
            indices = tf.identity(indices)
        rows = map_elements(self._example_gradients, indices, signature)
        if not in_xla():
            return rows
        # XLA drops assertions: no example has weight if the numbers differ.
        return [tf.where(has_one_each, g, tf.cast(math.nan, g.dtype)) for g in rows]

    def _has_one_loss_each(self) -> tf.Tensor:
        """Whether the data have rows for as many examples as there are losses."""
        count = tf.shape(self._losses)[0]
        lengths = [
            tf.equal(tf.shape(source)[0], count * self._flows[source].rows)
            for source in self._sources
            if self._flows[source].rows
        ]
        return tf.reduce_all(lengths)

    def _refuse_other_lengths(self, has_one_each: tf.Tensor) -> list[tf.Operation]:
        """An assertion that each example has a loss; under XLA, nothing."""
        assertion = tf.debugging.Assert(
            has_one_each,
            [
                f"LossStructureError: The loss {self._losses.name!r} does not have an "
                "entry for each example of the data. Without an earlier record, other "
                "examples have their places in the loss, so one record would change "
                "the gradients of several. Compute a loss for every example; give the "
                "examples to be left out a loss of 0." + see("one-example-at-a-time"),
            ],
        )
        return [] if assertion is None else [assertion]

    def sums(self, weights: tf.Tensor, places: Sequence[int]) -> None:
        """None: each backward pass has the gradients of a single example."""
        del weights, places

    def drawing(self) -> tf.Operation | None:
        """An op that draws new random numbers in each copy; None if none does."""
        return self._drawing

    def _loss(self, index: tf.Tensor, handles: Sequence[tf.Tensor]) -> tf.Tensor:
        """Adds the loss of an example, from its data alone, to the current graph.

        Args:
          index: the number of the example.
          handles: the current graph's handles of the variables.
        """
        tensors = dict(self._shared)
        for outer, inner in zip(self._handles, handles, strict=True):
            tensors[outer.ref()] = inner
        static = self._count is not None
        for tensor in (*self._sources, *self._random):
            tensors[tensor.ref()] = self._cut(tensor, index, static)
        for batch in self._sparse:
            rows = index[tf.newaxis]
            size = tf.cast(batch.shape[0], tf.int32)
            parts = batch.with_rows(tf.repeat(rows, size) if static else rows, size)
            shape = batch.shape
            if not static:
                one = tf.ones([1], shape.dtype)
                parts = [*parts[:2], tf.concat([one, shape[1:]], axis=0)]
            for old, new in zip(
                (batch.indices, batch.values, batch.shape), parts, strict=True
            ):
                tensors[old.ref()] = new
        copies = ControlCopies(self._losses.graph, tensors, "alone", has_form_of_xla())
        losses = copies.copy_of(self._losses)
        # The loss at the first place: the place of an example in the batch depends on
        # the records drawn before it, so no gradient may depend on the place.
        return losses[0]

    def _example_gradients(self, index: tf.Tensor) -> list[tf.Tensor]:
        """Adds the gradients of an example to the current graph."""
        try:
            graph = tf.compat.v1.get_default_graph()
            handles = [graph.capture(handle) for handle in self._handles]
            return self._gradients(self._loss(index, handles), handles)
        except ExampleIsolationError:
            raise
        # TensorFlow's gradients of branches assert what they need of a graph.
        except (ValueError, TypeError, AssertionError) as error:
            raise ExampleIsolationError(
                f"It is not known {self._proof.reason} at {self._proof.op.name!r} (a "
                f"{self._proof.op.type}), and the loss of a single example cannot be "
                f"computed from its own data alone ({error or 'in its gradient'}). "
                "Keep the batch on axis 0, and compute each example's loss from its "
                "own rows." + see("one-example-at-a-time")
            ) from error

    def _gradients(self, loss, handles) -> list[tf.Tensor]:
        gradients = tf.gradients(loss, handles)
        return [
            tf.zeros(v.shape, v.dtype)
            if g is None
            else tf.ensure_shape(tf.convert_to_tensor(g), v.shape)
            for g, v in zip(gradients, self._variables, strict=True)
        ]

    def _cut(self, tensor: tf.Tensor, index: tf.Tensor, static: bool) -> tf.Tensor:
        """The rows of an example; repeated in each place if the batch is static."""
        rows = self._rows.get(tensor.ref(), self._flows[tensor].rows)
        # A slice of static length, because XLA needs static shapes.
        begin = [index * rows, *([0] * (tensor.shape.rank - 1))]
        part = tf.slice(tensor, begin, [rows, *([-1] * (tensor.shape.rank - 1))])
        if static:
            count = self._count
            part = tf.tile(part, [count, *([1] * (tensor.shape.rank - 1))])
            return tf.ensure_shape(part, tensor.shape)
        return tf.ensure_shape(part, [rows, *tensor.shape[1:]])
