"""Follows the batch through gradient functions that users supply.

TensorFlow's registered gradients are in a table (`ops.GRADIENTS_APART`). An op's own
gradient function (`tf.custom_gradient`) is called again in a scratch graph, with a
placeholder for the gradient at each output, and the new ops are analysed like the ops
of a loss. The gradient at an input keeps the examples apart if the gradient has the
examples on the same axis as the input, with the same number of rows.

The gradient of an op on variables alone is taken for each example separately. So the
function is called once for the gradient of a single example, and must read no data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.flows.flow import DATA, PUBLIC, Flow
from tfdpclip.gradients.graph import calls, op_copies

UNKNOWN = "whether its own gradient function keeps the examples apart"


class GradientFlows(Dataflow):
    """The analysis of the ops that an op's own gradient function creates.

    Args:
      graph: the graph that the function added its ops to.
      outputs: the gradients at the op's inputs.
      placeholders: the gradients at the op's outputs, with their flows.
      flows: the analysis of the graph that holds the op.
    """

    def __init__(
        self,
        graph: tf.Graph,
        outputs: Sequence[tf.Tensor],
        placeholders: Sequence[tuple[tf.Tensor, Flow]],
        flows: Dataflow,
    ):
        self._start(list(outputs), (), flows.batch_size, (), flows.rows_per_example)
        self._any_data = True
        begin = [
            (inner, flows[outer] if _is_of(outer, flows) else Flow(DATA, None))
            for outer, inner in graph.captures
            if not _tf_private.is_eager(outer) and inner.dtype != tf.resource
        ]
        for tensor, flow in (*begin, *placeholders):
            self.declare(tensor, flow)
        for op in self.ops:
            if not op.outputs or any(t.ref() not in self._flows for t in op.outputs):
                self._visit(op)


def _is_of(tensor, flows: Dataflow) -> bool:
    """Whether a captured tensor belongs to the graph that `flows` analysed."""
    return tf.is_tensor(tensor) and getattr(tensor, "graph", None) is flows.graph


def gaps_of(
    op: tf.Operation, flows: Dataflow, gaps: Callable[[Dataflow], Iterator]
) -> Iterator[tuple[tf.Operation, str]]:
    """Yields the op if its own gradient function is not known to keep examples apart.

    Args:
      op: an op with its own gradient function.
      flows: the analysis of the graph that holds the op.
      gaps: the function from an analysis to the ops that the table does not know.
    """
    function = calls.gradient_function(op)
    with flows.graph.as_default(), op_copies.scratch_graph() as graph:
        at_outputs = [
            tf.compat.v1.placeholder(t.dtype, t.shape) if t.dtype.is_floating else None
            for t in op.outputs
        ]
        # At an output without a gradient, TensorFlow passes zeros.
        output_gradients = [
            tf.zeros_like(t) if g is None else g
            for g, t in zip(at_outputs, op.outputs, strict=True)
        ]
        results = function(op, *output_gradients)
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        gradients = [None if g is None else tf.convert_to_tensor(g) for g in results]
    # A gradient at an input that depends on no variable, such as a constant, is unused.
    wanted = [
        (gradient, tensor)
        for gradient, tensor in zip(gradients, op.inputs, strict=False)
        if gradient is not None and flows[tensor].trained
    ]
    if not wanted:
        return
    of_variables = all(flows[t].kind != DATA for t in op.outputs)
    declared = [
        (g, Flow() if of_variables else _of_gradient(flows[t]))
        for g, t in zip(at_outputs, op.outputs, strict=True)
        if g is not None
    ]
    inner = GradientFlows(graph, [g for g, _ in wanted], declared, flows)
    for gradient, tensor in wanted:
        if not _apart(inner[gradient], flows[tensor]):
            yield op, UNKNOWN
            return
    if next(gaps(inner), None) is not None:
        yield op, UNKNOWN


def _of_gradient(flow: Flow) -> Flow:
    """The flow of the gradient at a tensor."""
    return flow.on(flow.axes) if flow.kind == DATA else Flow(DATA, None)


def _apart(gradient: Flow, tensor: Flow) -> bool:
    """Whether the gradient at a tensor has the examples on the axes of the tensor."""
    if gradient.coupled is not None or gradient.kind not in (PUBLIC, DATA):
        return False
    if gradient.kind == PUBLIC:
        return True
    if tensor.kind != DATA:
        return False
    same = gradient.axes == tensor.axes and gradient.layout == tensor.layout
    aligned = gradient.axes == () or gradient.rows is not None or gradient.even
    return same and gradient.axes is not None and aligned
