"""Gradients of one example at a time, where no proof says that examples stay apart.

Comes in: losses `[B]` of a graph with an op at which the proof ends
(`isolation_proof.py`). Goes out: the gradient of every example, from copies of the ops
of the loss that see the data of that example alone. So an example's gradient depends on
no other example, whatever the unknown op does, in every batch.

Where the number of examples is not static, the copies run on a batch of the one
example; where it is, on a batch that has the example in each place, of which the first
place is read: an example's gradient does not depend on its place in the batch. Weights,
and random numbers that no example decides about, are those of the step.

Loops and branches are written again (`control_copies.py`), with copies of the ops that
they run.

What cannot be copied is refused by name: Python, files, queues, tables that change,
variables that the loss writes, and calls that gradients pass through and that cannot be
opened.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import tensorflow as tf

from tfdpclip._devices import in_xla
from tfdpclip._docs import see
from tfdpclip.gradients.errors import ExampleIsolationError
from tfdpclip.gradients.flows import op_flows
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.flows.flow import DATA
from tfdpclip.gradients.graph import op_copies, ops
from tfdpclip.gradients.proof import control_copies
from tfdpclip.gradients.proof.control_copies import ControlCopies
from tfdpclip.gradients.proof.isolation_proof import Proof


class OneByOneWarning(UserWarning):
    """The gradients of a model are made one example at a time."""


def warn(proof: Proof, batch_size: int | None) -> None:
    """Warns once per trace: names the op, the cost and the ways out.

    Args:
      proof: what the graph proves of the losses.
      batch_size: the number of examples if it is static: none cost nothing.
    """
    if batch_size == 0:
        return
    kind = proof.op.type
    stated = (
        f"; or, if a {kind} keeps the rows of its inputs apart, say so with "
        f"dpc.gradients.op_flow({kind!r})"
        if op_flows.may_be_stated(kind)
        else ""
    )
    warnings.warn(
        f"The proof that examples stay apart ends at {proof.op.name!r} (a {kind}): it "
        f"is not known {proof.reason}. So gradients are made one example at a time, at "
        "the cost of a forward and a backward pass for each. Build the layer of other "
        f"ops{stated}." + see("one-example-at-a-time"),
        OneByOneWarning,
        stacklevel=2,
    )


class ExamplesAlone:
    """The losses and gradients of single examples, by copies of a graph's ops.

    Args:
      losses: `[B]`.
      variables: the variables.
      handles: the graph's tensors that stand for them.
      flows: the analysis of the losses.
      proof: what the graph proves of the losses.

    Raises:
      ExampleIsolationError: if an op cannot be copied, naming it.
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
        # The number of examples, if that is static: a loop may lose it in the losses.
        lengths = {s.shape[0] for s in self._sources}
        known = lengths.pop() if len(lengths) == 1 else None
        self._count = flows.batch_size
        if self._count is None and known is not None:
            self._count = known // flows.rows_per_example
        self._random: list[tf.Tensor] = []
        self._drawing: tf.Operation | None = None
        self._plan()

    def _plan(self) -> None:
        """Finds the tensors that no example decides about, which are not copied."""
        flows = self._flows
        given = {source.ref() for source in self._sources}
        handles = {handle.ref() for handle in self._handles}
        for batch in self._sparse:
            given |= {t.ref() for t in (batch.indices, batch.values, batch.shape)}
        self._kept: dict = {}
        affected = set(given)
        for op in flows.ops:
            if all(t.ref() in given for t in op.outputs) and op.outputs:
                continue
            if not any(t.ref() in affected for t in op.inputs):
                self._refuse_data(op)
                # A constant of another graph is none to ops that need to know it, and
                # gradients do not pass from one graph into another.
                known = op.type == "Const" and op.outputs[0].dtype.is_integer
                trained = any(
                    t.ref() in handles or flows[t].trained for t in op.outputs
                )
                if not known and not trained:
                    self._kept.update((t.ref(), t) for t in op.outputs)
                continue
            drawn = op.type in ops.RANDOM or op.type.startswith(ops.SEEDED_DRAWS)
            if drawn and all(flows[t].made and self._has_rows(t) for t in op.outputs):
                self._random += op.outputs
            else:
                self._refuse_uncopied(op)
                if self._drawing is None and op_copies.draws(op):
                    self._drawing = op
            affected |= {t.ref() for t in op.outputs}
        if self._losses.ref() not in affected:
            raise ExampleIsolationError(
                "No data were found behind the loss, so that gradients cannot be made "
                "one example at a time. Give the data as arguments of the function, "
                "with the batch on axis 0." + see("one-example-at-a-time")
            )

    def _has_rows(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor has known rows for each example, one after the other."""
        flow = self._flows[tensor]
        return flow.leads and bool(flow.rows) and not flow.minor

    def _refuse_data(self, op: tf.Operation) -> None:
        """Raises for data that cannot be cut into examples."""
        for tensor in op.outputs:
            if self._flows[tensor].kind == DATA and not self._flows[tensor].made:
                raise ExampleIsolationError(
                    f"{tensor.name!r} (a {op.type}) may hold data, and which part of "
                    "it belongs to which example is not known, so that gradients "
                    "cannot be made one example at a time. Give the data with the "
                    "batch on axis 0." + see("one-example-at-a-time")
                )

    def _refuse_uncopied(self, op: tf.Operation) -> None:
        """Raises for an op of which a copy would not be an op of one example."""
        if op.type in ops.FIRST_ARGUMENT and not control_copies.can_be_written(op):
            # The gradient of a copied call is made for the batch, or comes out as zero.
            trained = any(self._flows[t].trained for t in op.outputs)
            if trained or op_copies.has_own_gradient(op):
                raise ExampleIsolationError(
                    f"Gradients pass through {op.name!r} (a {op.type}), which runs "
                    "functions that cannot be copied, so that gradients cannot be "
                    "made one example at a time; and it is not known "
                    f"{self._proof.reason} at {self._proof.op.name!r} (a "
                    f"{self._proof.op.type}). Replace that op."
                    + see("one-example-at-a-time")
                )
        known = op_copies.repeatable(op) or op_copies.draws(op)
        if not known or op_copies.kept_elsewhere(op, of_examples=True) is not None:
            raise ExampleIsolationError(
                f"{op.name!r} (a {op.type}) may have an effect, or read what another "
                "step left, so that gradients cannot be made one example at a time. "
                "Build the layer of ops that give the same result twice."
                + see("one-example-at-a-time")
            )

    #: Whether a value that is no number in one example reaches the others' gradients.
    spreads = False

    def gradients(self, indices: tf.Tensor) -> list[tf.Tensor]:
        """The gradients at `indices`, `[n, *shape]` for each variable."""
        if self._count == 0:
            # A batch that is always empty has no first place to read a loss at.
            return [tf.zeros([0, *v.shape], v.dtype) for v in self._variables]
        signature = [tf.TensorSpec(v.shape, v.dtype) for v in self._variables]
        return tf.map_fn(
            self._of,
            indices,
            fn_output_signature=signature,
            parallel_iterations=1,
        )

    def sums(self, weights: tf.Tensor, places: Sequence[int]) -> None:
        """None: no pass has the gradients of several examples."""
        del weights, places

    def drawing(self) -> tf.Operation | None:
        """An op of which each copy draws other random numbers; None if none does."""
        return self._drawing

    def _loss(self, index: tf.Tensor, handles: Sequence[tf.Tensor]) -> tf.Tensor:
        """The loss of one example, from its own data, added to the current graph.

        Args:
          index: the number of the example.
          handles: the current graph's tensors that stand for the variables.
        """
        given = dict(self._kept)
        for outer, inner in zip(self._handles, handles, strict=True):
            given[outer.ref()] = inner
        static = self._count is not None
        for tensor in (*self._sources, *self._random):
            given[tensor.ref()] = self._cut(tensor, index, static)
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
                given[old.ref()] = new
        copies = ControlCopies(self._losses.graph, given, "alone", in_xla())
        losses = copies.of(self._losses)
        # The loss of the first place: an example's place depends on how many records
        # were drawn before it, so that nothing of an example may depend on its place.
        return losses[0]

    def _of(self, index: tf.Tensor) -> list[tf.Tensor]:
        """The gradients of one example, added to the current graph."""
        try:
            graph = tf.compat.v1.get_default_graph()
            handles = [graph.capture(handle) for handle in self._handles]
            return self._gradients(self._loss(index, handles), handles)
        except ExampleIsolationError:
            raise
        except (ValueError, TypeError) as error:
            raise ExampleIsolationError(
                f"The loss of one example cannot be computed from its own data alone "
                f"({error}), and what {self._proof.op.name!r} (a {self._proof.op.type})"
                " does with the examples of a batch is not known. Keep the batch on "
                "axis 0, and compute each example's loss from its own rows."
                + see("one-example-at-a-time")
            ) from error

    def _gradients(self, loss, handles) -> list[tf.Tensor]:
        found = tf.gradients(loss, handles)
        return [
            tf.zeros(v.shape, v.dtype)
            if g is None
            else tf.ensure_shape(tf.convert_to_tensor(g), v.shape)
            for g, v in zip(found, self._variables, strict=True)
        ]

    def _cut(self, tensor: tf.Tensor, index: tf.Tensor, static: bool) -> tf.Tensor:
        """The rows of one example; in each place, where the batch size is static."""
        rows = self._flows[tensor].rows
        # Of a static length, which XLA asks for.
        begin = [index * rows, *([0] * (tensor.shape.rank - 1))]
        own = tf.slice(tensor, begin, [rows, *([-1] * (tensor.shape.rank - 1))])
        if static:
            count = self._count
            own = tf.tile(own, [count, *([1] * (tensor.shape.rank - 1))])
            return tf.ensure_shape(own, tensor.shape)
        return tf.ensure_shape(own, [rows, *tensor.shape[1:]])
