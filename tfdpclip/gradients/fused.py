"""Calls of Keras's fused LSTM and GRU layers."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdpclip import _keras_marks
from tfdpclip.gradients.calls import find_function


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
