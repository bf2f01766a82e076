"""Calls of Keras's fused LSTM and GRU layers, and the functions that replace them.

The rule for a recurrent layer needs the gates and states of every time step, which the
function of the fused layer does not return. So the call gets a new function, with the
same outputs followed by the tensors of each step; TensorFlow does the same when it
differentiates a call.

A later backward pass through a replaced call (the ordinary pass of the comparison)
differentiates a copy of the original call, made in the graph of that pass. So the
comparison does not run the code that it checks, and a step without a comparison has no
copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tfdpclip import _keras_marks, _tf_private
from tfdpclip._graph_notes import notes_of
from tfdpclip.gradients.graph.calls import find_replacement
from tfdpclip.gradients.graph.op_copies import emitter
from tfdpclip.gradients.graph.walks import find_function


@dataclasses.dataclass(frozen=True)
class FusedCall:
    """A call of a fused Keras layer: kind, inputs by name, and direction in time."""

    kind: str
    inputs: dict[str, tf.Tensor]
    backwards: bool

    @property
    def results(self) -> int:
        """The number of the layer's outputs: last, sequence, states and a number."""
        return _keras_marks.FUSED_RESULTS[self.kind]


def read_call(op: tf.Operation) -> FusedCall | None:
    """Reads a fused call from the function's definition; None if it is not fused."""
    if find_replacement(op) is not None:
        return find_replacement(op).call
    try:
        function = find_function(op.graph, op.get_attr("f").name)
        definition = function.cached_definition
    except (AttributeError, KeyError, ValueError, TypeError):
        return None
    implements = definition.attr.get(_keras_marks.FUSED)
    kind = implements.s.decode().split("_")[0] if implements is not None else ""
    names = [arg.name for arg in definition.signature.input_arg]
    needed = _keras_marks.FUSED_INPUTS.get(kind)
    if needed is None or tuple(names) not in (needed, (*needed, "mask")):
        return None
    nodes = definition.node_def
    if not any(n.op == "Transpose" and n.input[0] == "inputs" for n in nodes):
        return None  # time-major
    backwards = any(n.op == "ReverseV2" for n in nodes)
    return FusedCall(kind, dict(zip(names, op.inputs, strict=True)), backwards)


class ReplacedCall:
    """A fused call with a replaced function, and its original function.

    Args:
      op: the call op. The constructor replaces the op's function.
      call: the layer's kind and inputs.
      function: a graph with the inputs of the call. The graph's first outputs are the
        outputs of the call.

    Attributes:
      call: as given.
    """

    def __init__(self, op: tf.Operation, call: FusedCall, function: tf.Graph):
        self.call = call
        self._op, self._count = op, len(op.outputs)
        self._emit = emitter(op)
        self._gradient = _tf_private.own_gradient(op)
        self._copies: dict[tf.Graph, list[tf.Tensor]] = {}
        # A gradient tape does not use the op's own gradient function.
        _tf_private.differentiate_call_by(op, _unless_replaced)
        _tf_private.call_instead(op, function)
        _tf_private.set_own_gradient(op, self.differentiate)
        notes_of(op.graph).replaced[op] = self

    @property
    def results(self) -> list[tf.Tensor]:
        """The outputs that the call had before its function was replaced."""
        return list(self._op.outputs[: self._count])

    @property
    def kept(self) -> list[tf.Tensor]:
        """The outputs that the replacement adds: the tensors of each time step."""
        return list(self._op.outputs[self._count :])

    def original_results(self) -> list[tf.Tensor]:
        """The results of a copy of the original call.

        The copy is in the current graph or in a graph around the current graph.
        """
        here = graph = tf.compat.v1.get_default_graph()
        while graph is not None:
            if graph in self._copies:
                return self._copies[graph]
            graph = getattr(graph, "outer_graph", None)
        # An input of the call may equal, or depend on, a second input. An identity for
        # each input gives every input a gradient at the edge of the call.
        outputs = self._emit([tf.identity(t) for t in self._op.inputs])
        for output, result in zip(outputs, self.results, strict=True):
            output.set_shape(result.shape)
        _tf_private.set_own_gradient(outputs[0].op, self._gradient)
        self._copies[here] = outputs
        return outputs

    def differentiate(self, op: tf.Operation, *gradients) -> list:
        """The gradients at the call's inputs, from a copy of the original call."""
        outputs = self.original_results()
        given = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients[: self._count], strict=True)
            if gradient is not None
        ]
        return tf.gradients(
            [output for output, _ in given],
            list(outputs[0].op.inputs),
            [gradient for _, gradient in given],
        )


def _unless_replaced(plain: Callable) -> Callable:
    """Wraps TensorFlow's gradient of a call; a replaced call differentiates a copy."""

    def differentiate(op, *gradients):
        call = find_replacement(op)
        return (plain if call is None else call.differentiate)(op, *gradients)

    return differentiate
