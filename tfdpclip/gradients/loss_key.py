"""Tells whether two graphs compute the same losses from data of any source."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.graph.ops import ITERATORS
from tfdpclip.gradients.graph.origins import definitions
from tfdpclip.gradients.graph.walks import ancestors, functions_in_attributes

# Ops whose results come from outside of the graph.
_LEAVES = {"Placeholder", *ITERATORS}
# Attributes that have a new value in every trace of the same code.
_OF_THE_TRACE = {"seed", "seed2", "config_proto", "shared_name", "container"}


def structure_of(flows: Dataflow, handles: Sequence[tf.Tensor]) -> bytes:
    """Equal for losses of the same ops, joined in the same way.

    The attributes of the ops, constants, and the functions that branches and loops run
    are parts of it. Names are not, and the ops that make the data are not.

    Args:
      flows: the analysis of the losses.
      handles: the handles of the trained variables.
    """
    digest = hashlib.sha256()
    for part in _parts(flows, handles):
        digest.update(repr(part).encode())
    return digest.digest()


def _parts(flows: Dataflow, handles: Sequence[tf.Tensor]) -> Iterator[Any]:
    leaves = {source.op for source in flows.sources}
    leaves |= {op for op in flows.ops if op.type in _LEAVES}
    # Variables first; further tensors in the order of their first use.
    given = {handle.ref(): place for place, handle in enumerate(handles)}
    numbers: dict[tf.Operation, int] = {}

    def place(tensor: tf.Tensor) -> tuple:
        if tensor.op in leaves:
            return "given", given.setdefault(tensor.ref(), len(given))
        return numbers[tensor.op], tensor.value_index

    for op in ancestors(flows.outputs, stop=leaves):
        yield [place(tensor) for tensor in op.inputs]
        numbers[op] = len(numbers)
        yield from _node_parts(op.node_def)
        for name in functions_in_attributes(op.node_def):
            for definition in definitions(op.graph, name):
                yield from _definition_parts(definition)
    yield [place(tensor) for tensor in flows.outputs]


def _definition_parts(definition: Any) -> Iterator[Any]:
    """The parts of a function, with numbers in the place of names."""
    if definition is None:
        yield secrets.token_bytes(16)  # It is equal to no function.
        return
    names = [argument.name for argument in definition.signature.input_arg]
    names += [node.name for node in definition.node_def]
    numbers = {name: number for number, name in enumerate(names)}

    def place(tensor: str) -> tuple:
        name, *output = tensor.split(":")
        return numbers[name], *output

    for node in definition.node_def:
        yield [place(name) for name in node.input if not name.startswith("^")]
        yield from _node_parts(node)
    yield [place(definition.ret[a.name]) for a in definition.signature.output_arg]


def _node_parts(node: _tf_private.NodeDef) -> Iterator[Any]:
    yield node.op
    for name, value in sorted(node.attr.items()):
        function = value.HasField("func") or value.list.func
        if not (function or name.startswith("_") or name in _OF_THE_TRACE):
            yield name, value.SerializeToString(deterministic=True)
