"""Calls of Keras's fused LSTM and GRU layers, and what may be called instead.

A per-example gradient needs what the layer's loop knows at every step, which its
function does not put out. So the call is given another function: the same outputs, and
what each step kept after them, as TensorFlow itself does for a gradient. Who
differentiates the call from then on, the self-check among them, differentiates a copy
of it as it was, made in the graph that asks: the check stays one by other code, and
steps that are not checked pay nothing for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tfdpclip import _keras_marks, _tf_private
from tfdpclip.gradients.graph.calls import find_function, replaced
from tfdpclip.gradients.graph.op_copies import emitter


@dataclasses.dataclass(frozen=True)
class FusedCall:
    """A call of Keras's fused layer: its kind and its inputs by name."""

    kind: str
    inputs: dict[str, tf.Tensor]
    backwards: bool

    @property
    def results(self) -> int:
        """How many outputs are the layer's: last, sequence, states, and a number."""
        return _keras_marks.FUSED_RESULTS[self.kind]


def read_call(op: tf.Operation) -> FusedCall | None:
    """What the call is, from the called function's own definition; None if foreign."""
    if replaced(op) is not None:
        return replaced(op).call
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
    """A call that was given another function, and what it was before.

    Args:
      op: the call. It is changed.
      call: what it is.
      function: a graph whose inputs are those of the call, and whose outputs begin with
        those of the call.

    Attributes:
      call: as given.
    """

    def __init__(self, op: tf.Operation, call: FusedCall, function: tf.Graph):
        self.call = call
        self._op, self._count = op, len(op.outputs)
        self._emit = emitter(op)
        self._gradient = _tf_private.own_gradient(op)
        self._copies: dict[tf.Graph, list[tf.Tensor]] = {}
        # A tape goes past the op's own gradient function.
        _tf_private.differentiate_call_by(op, _unless_replaced)
        _tf_private.call_instead(op, function)
        _tf_private.set_own_gradient(op, self.differentiate)
        op._tfdpclip_replaced = self

    @property
    def results(self) -> list[tf.Tensor]:
        """What the call put out before."""
        return list(self._op.outputs[: self._count])

    @property
    def kept(self) -> list[tf.Tensor]:
        """What it puts out besides."""
        return list(self._op.outputs[self._count :])

    def as_it_was(self) -> list[tf.Tensor]:
        """The results of the call before: of a copy in this graph, or one around it."""
        here = graph = tf.compat.v1.get_default_graph()
        while graph is not None:
            if graph in self._copies:
                return self._copies[graph]
            graph = getattr(graph, "outer_graph", None)
        # Each its own: one may be another one, or made of it, and gradients are wanted
        # at the call's own edge.
        outputs = self._emit([tf.identity(t) for t in self._op.inputs])
        for output, result in zip(outputs, self.results, strict=True):
            output.set_shape(result.shape)
        _tf_private.set_own_gradient(outputs[0].op, self._gradient)
        self._copies[here] = outputs
        return outputs

    def differentiate(self, op: tf.Operation, *gradients) -> list:
        """The gradients at the call's inputs: of a copy of it as it was."""
        outputs = self.as_it_was()
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
    """TensorFlow's way to differentiate a call, but for one that was replaced."""

    def differentiate(op, *gradients):
        call = replaced(op)
        return (plain if call is None else call.differentiate)(op, *gradients)

    return differentiate
