"""Follows the batch through a graph: which axes of each tensor count examples.

The analysis is static and reads only op types, attributes and static shapes. It answers
three questions about every tensor that the loss depends on:

* does the value depend on the data, only on the batch size, or on neither;
* which axes count examples, and how many rows an example has on axis 0;
* has a reduction over examples made the tensor a statistic of the batch?

The analysis never guesses in the unsafe direction: it marks a tensor as unknown unless
the ops before the tensor are known, and `isolation_proof.py` proves nothing about ops
after an unknown tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._docs import see
from tfdpclip.gradients.errors import LossStructureError
from tfdpclip.gradients.flows import layouts, lists, repeats, sparse
from tfdpclip.gradients.flows.flow import DATA, PUBLIC, SIZE, Flow
from tfdpclip.gradients.flows.op_flows import transfer
from tfdpclip.gradients.flows.sizes import counted_rows, rows_of_length, size_flow
from tfdpclip.gradients.graph import ops, origins
from tfdpclip.gradients.graph.known import (
    draws_the_same,
    is_pinned,
    pinned_to,
    rows_alike,
    takes_every_row,
)
from tfdpclip.gradients.graph.walks import ancestors


class GraphFlows:
    """The analysis of all tensors that `outputs` depend on.

    Args:
      outputs: tensors of the same graph.
      handles: the graph's handles of the variables of interest.
      batch_size: the static batch size; by default found from `outputs`.
      public: the graph's handles of further variables with public values.
      rows_per_example: the number of rows of the data that belong to each example.

    Attributes:
      batch_size: the static number of examples, or None.
      rows_per_example: as given.
      outputs: as given.
      sources: the tensors that hold the dense data of the batch.
      sparse_batches: the sparse tensors that hold data of the batch.
      inner: the analyses of the functions that branches, calls and loops run.
    """

    def __init__(
        self,
        outputs: Iterable[tf.Tensor],
        handles: Iterable[tf.Tensor],
        batch_size: int | None = None,
        public: Iterable[tf.Tensor] = (),
        rows_per_example: int = 1,
    ):
        self._start(list(outputs), handles, batch_size, public, rows_per_example)
        if self.batch_size is None:
            length = _static_length(self.outputs[0], self.ops, rows_per_example)
            self.batch_size = None if length is None else length // rows_per_example
        self._any_data = any(map(self.passed_in, self.ops))
        self._find_sparse_batches()
        for op in self.ops:
            self._visit(op)

    def _find_sparse_batches(self) -> None:
        for batch in sparse.find_batches(self.graph, self.ops):
            if batch.indices.op in self._inside or batch.values.op in self._inside:
                self.sparse_batches.append(batch)
                self._sparse.update(sparse.flows_of(batch, self.rows_per_example))

    def _start(self, outputs, handles, batch_size, public, rows_per_example):
        self.rows_per_example = rows_per_example
        self.outputs = outputs
        self.graph = outputs[0].graph
        self.ops = ancestors(outputs)
        self._inside = set(self.ops)
        self._handles = {handle.ref() for handle in handles}
        self._public = {handle.ref() for handle in public}
        self._flows: dict = {}
        self.batch_size = batch_size or None
        self.sources: list[tf.Tensor] = []
        self.sparse_batches: list[sparse.SparseBatch] = []
        self._sparse: dict = {}
        self.inner: dict[tf.Operation, list[Any]] = {}

    def __getitem__(self, tensor: tf.Tensor) -> Flow:
        flow = self._flows.get(tensor.ref())
        if flow is not None:
            return flow
        if tensor.op in self._inside:
            # TensorFlow added this output to a loop when it differentiated the loop.
            return Flow(DATA, None)
        # The tensor was built after the analysis: analyse its new ancestors.
        for op in ancestors([tensor], stop=self._inside):
            self._inside.add(op)
            self._visit(op)
        return self._flows[tensor.ref()]

    def declare(self, tensor: tf.Tensor, flow: Flow) -> None:
        """States the flow of a tensor that was built after the analysis."""
        self._flows[tensor.ref()] = flow

    def __contains__(self, op: tf.Operation) -> bool:
        return op in self._inside

    @property
    def length(self) -> int | None:
        """The static number of rows of the data; None if it is not static."""
        if self.batch_size is None:
            return None
        return self.batch_size * self.rows_per_example

    def without_gradient(self) -> dict[tf.Operation, Callable]:
        """Gradient functions for ops without a registered gradient.

        Only ops that depend on no variable of interest are listed. Their gradient
        functions return None for every input, so no gradient passes through.
        """
        return {
            op: lambda op, *at_outputs: [None] * len(op.inputs)
            for op in self.ops
            if not any(self[t].trained for t in op.outputs) and not _has_gradient(op)
        }

    def is_trained(self, handle: tf.Tensor) -> bool:
        """Whether a handle stands for a variable of interest."""
        return handle.ref() in self._handles

    def is_public(self, handle: tf.Tensor) -> bool:
        """Whether a handle stands for a variable of interest or a public variable."""
        return handle.ref() in self._handles or handle.ref() in self._public

    def _visit(self, op: tf.Operation) -> None:
        input_flows = [self._flows.get(t.ref(), Flow(DATA, None)) for t in op.inputs]
        pinned = pinned_to(op)
        if pinned is not None:
            input_flows = [self[pinned]]
        leaf = _public if is_pinned(op) else self._classify(op)
        inside = self._inside_of(op, input_flows) if leaf is None else None
        for output in op.outputs:
            inputs = input_flows
            if op.type == "IdentityN":
                inputs = [input_flows[output.value_index]]
            if output.ref() in self._sparse:
                flow = self._sparse[output.ref()]
            elif leaf is not None:
                flow = leaf(output)
            elif inside is not None:
                flow = inside[output.value_index]
            elif pinned is not None:
                (flow,) = input_flows
            else:
                flow = self._flow_by_inputs(op, output, inputs)
            if op.type not in ops.SIZES:
                flow = self._with_history(op, output, flow, inputs, leaf or inside)
            if self._varies(op, output, inputs, flow):
                flow = dataclasses.replace(flow, varying=True)
            self._flows[output.ref()] = flow

    def _inside_of(self, op: tf.Operation, inputs: list[Flow]) -> list[Flow] | None:
        """The flows of an op's outputs from the functions that the op runs.

        Returns:
          None if the op runs no function, or if no input holds data.
        """
        raise NotImplementedError

    def _flow_by_inputs(
        self, op: tf.Operation, output: tf.Tensor, inputs: list[Flow]
    ) -> Flow:
        if op.type in ops.SIZES and any(f.varying for f in inputs):
            # The number of entries left by a mask is a statistic of the batch.
            return Flow(DATA, (), coupled=op)
        if op.type in ops.SIZES:
            return size_flow(op, output, inputs, self.__getitem__)
        if op.type in ("Identity", "IdentityN"):
            return inputs[0]
        of_list = lists.list_flow(op, inputs)
        if of_list is not None:
            return of_list
        if all(f.kind != DATA for f in inputs) and origins.brings_data(op):
            return Flow(DATA, None)
        if op.type == "RngReadAndSkip" and all(f.kind != DATA for f in inputs):
            return Flow()  # The op returns the public state before the skip.
        trained = any(f.trained for f in inputs)
        if output.dtype.is_floating and all(f.kind != DATA for f in inputs):
            behind = repeats.repeated_flow(
                op,
                output,
                self.length,
                self.rows_per_example,
                self.__getitem__,
                trained,
            )
            if behind is not None:
                return behind
        if all(f.kind == PUBLIC for f in inputs):
            batched = trained and self._repeats_for_batch(op, output)
            batched = batched or self._fills_a_batch(op, output)
            rows = self.rows_per_example
            return Flow(DATA, (0,), rows, made=True) if batched else Flow()
        if all(f.kind != DATA for f in inputs):
            return self._shaped(op, output, inputs)
        flow = self._transfer(op, output, inputs)
        made = all(f.made or f.kind != DATA for f in inputs)
        made = made and not origins.brings_data(op)
        return dataclasses.replace(flow, made=made or op.type in ops.VALUELESS)

    def _transfer(self, op, output, inputs) -> Flow:
        flow = None
        if op.type == "Reshape" and inputs[1].kind != DATA:
            if not layouts.keeps_shape(op, output):
                flow = layouts.regrouped(
                    op, output, inputs[0], self.batch_size, self._rows_on(op)
                )
        if flow is not None:
            return flow
        return transfer(op, output, inputs, self.batch_size, self.__getitem__)

    def _rows_on(self, op: tf.Operation) -> Callable[[int], int | None]:
        """The function from an axis of a `Reshape` to the rows of each example."""

        def rows(axis: int) -> int | None:
            like = rows_of_length(op.inputs[1], self.__getitem__, axis)
            return None if like is None else like.rows

        return rows

    def _with_history(self, op, output, flow, inputs, source) -> Flow:
        """Adds the facts that pass from inputs to outputs: coupled, placed, trained."""
        trained = any(f.trained for f in inputs)
        placed = flow.placed or (source is None and any(f.placed for f in inputs))
        if op.type in ops.VALUELESS:
            placed = False
        elif placed and op.type == "GatherV2" and takes_every_row(op):
            placed = inputs[0].placed
        coupled = next((f.coupled for f in inputs if f.coupled is not None), None)
        constant = op.type in ops.VALUELESS and not any(f.varying for f in inputs)
        if source is _public or isinstance(source, list) or constant:
            coupled = None
        passes = op.type not in ops.NO_GRADIENT and (
            output.dtype.is_floating
            or output.dtype.is_complex
            or output.dtype in (tf.resource, tf.variant)
        )
        # In a batch of a single example, no examples can be combined.
        mixed = None if self.batch_size == 1 else flow.coupled or coupled
        return dataclasses.replace(
            flow,
            coupled=mixed,
            placed=placed,
            trained=(trained and passes) or output.ref() in self._handles,
        )

    def _varies(
        self, op: tf.Operation, output: tf.Tensor, inputs: list[Flow], flow: Flow
    ) -> bool:
        """Whether the values of the data determine the shape of an output."""
        if output.shape.is_fully_defined() or op.type in ops.SIZES:
            return False
        if op.type in ops.CTC:
            inputs = inputs[:1]  # No loss is left out with the labels.
        if flow.axes:
            # Entries in rows again have the shape of the rows.
            inputs = [f for f in inputs if f.entry is None]
        if any(f.varying for f in inputs):
            return True
        if any(f.entry is not None for f in inputs):
            return False  # The list has all entries of the batch: no value selects.
        made = op.type in ops.DATA_SHAPED or op.type in ops.SHAPERS - {
            "BroadcastTo",
            "Tile",
        }
        return made and any(f.kind == DATA for f in inputs)

    def _classify(self, op: tf.Operation) -> Callable[[tf.Tensor], Flow] | None:
        """How to make the flow of data, a constant, or an op without inputs.

        Returns:
          A function from an output of the op to the output's flow; None if the flow
          follows from the op's inputs.

        A constant, or a tensor captured from eager code, keeps the same value in every
        step. It is still data if the function closes over a whole batch. The analysis
        recognises such a batch by the size of axis 0.
        """
        if self.passed_in(op):
            return self._batch
        if op.type == "Placeholder":
            (output,) = op.outputs
            if output.dtype == tf.resource:
                return _public
            return _public if output.dtype != tf.variant else _unknown
        if op.type == "Const":
            batched = self._batch_shaped(op)
            # An initial state has equal entries.
            uniform = batched and op.outputs[0].shape.rank > 1
            uniform = uniform and origins.is_uniform(tf.get_static_value(op.outputs[0]))
            uniform = uniform and bool(self._handles)
            is_batch = batched and (not self._any_data or uniform)
            return self._batch if is_batch else _public
        if not op.inputs and op.outputs:
            return _unknown if origins.brings_data(op) else _public
        return None

    def passed_in(self, op: tf.Operation) -> bool:
        """Whether the op is an argument of the function, or reads from an iterator."""
        if op.type in ops.ITERATORS:
            return True
        if op.type != "Placeholder" or op.outputs[0].dtype in (tf.resource, tf.variant):
            return False
        return not _is_captured_value(op) or self._batch_shaped(op)

    def _batch_shaped(self, op: tf.Operation) -> bool:
        shape, size = op.outputs[0].shape, self.length
        return bool(shape.rank) and size is not None and shape[0] == size

    def _batch(self, output: tf.Tensor) -> Flow:
        if output.dtype in (tf.resource, tf.variant):
            return Flow(DATA, None)
        if output.shape.rank is None:
            raise LossStructureError(
                f"The data {output.name!r} have no known number of axes, so the axis "
                "that counts examples is not known. tf.py_function and from_generator "
                "lose the shapes. State the shape in the pipeline, before batching: "
                "dataset.map(lambda x, y: (tf.ensure_shape(x, [28, 28]), y))."
                + see("mixed-examples")
            )
        if _is_ragged(output):
            raise LossStructureError(
                f"The data {output.name!r} are the values of a ragged tensor, with a "
                "row for each entry, not for each example: every entry would be "
                "clipped alone. Pad in the pipeline, before the step, and give the "
                "padding a weight of 0: dataset.map(lambda x, y: "
                "(x.to_tensor(shape=[None, 40]), y))." + see("mixed-examples")
            )
        self.sources.append(output)
        rows = self.rows_per_example
        return Flow(DATA, (0,), rows) if output.shape.rank else Flow(DATA, ())

    def _repeats_for_batch(self, op: tf.Operation, output: tf.Tensor) -> bool:
        """Whether a parameter is repeated for each row of a static batch.

        A wrong guess is safe: the rows are copies of a parameter, and may belong to any
        example.
        """
        if op.type not in ("Tile", "BroadcastTo") or (self.length or 0) < 2:
            return False
        before, after = op.inputs[0].shape, output.shape
        if before.rank is None or not after.rank or after[0] != self.length:
            return False
        return before.rank < after.rank or before[0] == 1

    def _fills_a_batch(self, op: tf.Operation, output: tf.Tensor) -> bool:
        """Whether a `Fill` makes a row for each row of a static batch.

        Layers make initial states so.
        """
        shape = output.shape
        return bool(op.type == "Fill" and shape.rank and shape.rank > 1) and (
            self.length is not None and shape[0] == self.length
        )

    def _counted_behind(self, op: tf.Operation, output: tf.Tensor) -> Flow | None:
        """The flow of a tensor made for the batch, with the examples not on axis 0."""
        if op.type in ("Tile", "Range", "LinSpace") or counted_rows(
            op, self.__getitem__
        ):
            return None
        for axis in range(1, output.shape.rank):
            like = counted_rows(op, self.__getitem__, axis)
            if like is not None:
                return dataclasses.replace(like.on((axis,)), made=True)
        return None

    def _shaped(self, op: tf.Operation, output: tf.Tensor, inputs: list[Flow]) -> Flow:
        """The flow of a number or a new batch that depends on the batch size only."""
        if op.type not in ops.SHAPERS or output.shape.rank is None:
            flow = size_flow(op, output, inputs, self.__getitem__)
            return flow if output.shape.rank is not None else Flow(SIZE, None)
        behind = self._counted_behind(op, output)
        if behind is not None:
            return behind
        if output.shape.rank and output.shape[0] in (None, self.length):
            placed = op.type in ("Range", "LinSpace") or draws_the_same(op)
            if op.type in ("BroadcastTo", "Tile"):
                placed = not rows_alike(output, -output.shape.rank)
            like = counted_rows(op, self.__getitem__)
            if like is not None:
                return dataclasses.replace(like, made=True, placed=placed)
            # The rows hold no data: in a static batch, row i may belong to example i.
            static = output.shape[0] is not None
            rows = self.rows_per_example if static else None
            return Flow(DATA, (0,), rows, made=True, placed=placed)
        return Flow(SIZE, power=None)


def _is_ragged(tensor: tf.Tensor) -> bool:
    """Whether a tensor is the values component of a ragged argument of the function."""
    graph = tensor.graph
    signature = getattr(graph, "structured_input_signature", None)
    if signature is None:
        return False
    places, place = set(), 0
    for spec in tf.nest.flatten(signature):
        if not isinstance(spec, tf.TypeSpec):
            continue
        length = len(tf.nest.flatten(spec, expand_composites=True))
        if isinstance(spec, tf.RaggedTensorSpec):
            places.add(place)
        place += length
    inputs = graph.inputs
    return any(tensor is inputs[i] for i in places if i < len(inputs))


def _has_gradient(op: tf.Operation) -> bool:
    """Whether TensorFlow can differentiate the op, or knows that its gradient is 0."""
    try:
        _tf_private.registered_gradient(op)
    except LookupError:
        return op.type in ops.FIRST_ARGUMENT or _tf_private.own_gradient(op) is not None
    return True


def _static_length(
    output: tf.Tensor, above: list[tf.Operation], rows: int
) -> int | None:
    """The static number of rows of the data, or None.

    Of a loss with a batch axis, the number of rows is the size of that axis, times
    `rows` if the data have as many rows for each entry. Of a scalar loss, it is the
    size of axis 0 of all data passed in; if these sizes differ, or no data were passed
    in, the size of axis 0 before the last `Sum` or `Mean`.
    """
    passed = [
        op
        for op in above
        if op.type in ops.ITERATORS
        or (
            op.type == "Placeholder"
            and op.outputs[0].dtype not in (tf.resource, tf.variant)
        )
    ]
    closed_over = [op for op in passed if _is_captured_value(op)]
    # Captured tensors are the data only if no data are passed in.
    for group in ([op for op in passed if op not in closed_over], closed_over):
        sizes = {t.shape[0] for op in group for t in op.outputs if t.shape.rank}
        if output.shape.rank:
            # A loss with a single entry need not have a single example.
            entries = output.shape[0]
            if None in sizes or entries is None:
                return None
            return entries * rows if sizes == {entries * rows} else entries
        if len(sizes) == 1:
            return sizes.pop()
        if None in sizes:
            # A tensor of a known size may be a mask or a table that all examples share.
            return None
        if sizes:
            break
    for op in reversed(above):
        if op.type in ("Sum", "Mean") and op.inputs[0].shape.rank:
            return op.inputs[0].shape[0]
    return None


def _is_captured_value(op: tf.Operation) -> bool:
    """Whether a placeholder stands for a captured eager tensor."""
    value = origins.captured_from(op.outputs[0])
    return _tf_private.is_eager(value)


def _public(output: tf.Tensor) -> Flow:
    return Flow()


def _unknown(output: tf.Tensor) -> Flow:
    return Flow(DATA, None)
