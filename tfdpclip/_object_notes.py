"""Notes of the library on objects of TensorFlow: all attributes of its own.

A graph, a variable and an op have one attribute each. A table of graphs would keep the
graphs alive, and variables have no hash. An op's attribute is a part of its definition,
so that copies of the op, and functions that hold the op, have the attribute, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import tensorflow as tf

from tfdpclip import _tf_private

_GRAPH, _VARIABLE, _OP = "_tfdpclip_graph", "_tfdpclip_variable", "_tfdpclip_op"


@dataclasses.dataclass
class GraphNotes:
    """The notes of a graph.

    Attributes:
      constants: the tensors of `once`, by key.
      aliases: for the id of each replaced tensor, the tensor and its replacement.
      statuses: the `CheckStatus` of each loss, which the graph keeps alive.
      known_rows: conditions of compiled code, each with the error that False means.
      released: the weights of the elements that private steps were made of, each with
        the identity of an optimizer.
      records: for each loop, the values that the loop records.
      copies: for each call that was opened, the outputs of the copies of its ops.
    """

    constants: dict = dataclasses.field(default_factory=dict)
    aliases: dict[int, tuple] = dataclasses.field(default_factory=dict)
    statuses: list = dataclasses.field(default_factory=list)
    known_rows: list[tuple] = dataclasses.field(default_factory=list)
    released: set[tuple] = dataclasses.field(default_factory=set)
    records: dict = dataclasses.field(default_factory=dict)
    copies: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class VariableNotes:
    """The notes of a variable; its components on devices have their own.

    Attributes:
      path: Keras 3's path of the variable, with all layers. The name of the inner
        `tf.Variable` may lack layers, so that variables of two layers may share a name.
      public_copy: the public copy to which each step sets the variable back.
      releases: the count of releases of the private optimizer that trains the variable.
        The values of the variable therefore carry noise.
      trainer: the private optimizer. A later optimizer of the variable inherits the
        steps of the trainer.
      named: whether a warning said that the variable holds private values.
    """

    path: str | None = None
    public_copy: tf.Variable | None = None
    releases: tf.Variable | None = None
    trainer: Any = None
    named: bool = False


class OpNotes(NamedTuple):
    """The notes of an op.

    Attributes:
      updates: the identities of the private optimizers that made the op after the sums
        of their gradients.
      applies: the optimizers among them with a private gradient when the op was made.
      released: whether the op writes values that are released with noise.
      made_of_a_loss: whether a private optimizer made the op of a loss. In the graph,
        the op may come before the loss of a further replica.
      by_count: whether the op multiplies the losses of a sum by the number of examples.
      own_gradient: whether an op's own gradient function made the op.
    """

    updates: frozenset[str]
    applies: frozenset[str]
    released: bool = False
    made_of_a_loss: bool = False
    by_count: bool = False
    own_gradient: bool = False


def notes_of(graph: Any) -> GraphNotes:
    """The notes of a graph."""
    if not hasattr(graph, _GRAPH):
        setattr(graph, _GRAPH, GraphNotes())
    return getattr(graph, _GRAPH)


def notes_of_variable(variable: Any) -> VariableNotes:
    """The notes of a variable, without Keras 3's wrapper; no notes for None."""
    if variable is None:
        return VariableNotes()
    # Not `getattr`, which looks at the components of a mirrored variable, too.
    return vars(variable).setdefault(_VARIABLE, VariableNotes())


def note_on_new_ops(**notes: bool | str) -> contextlib.AbstractContextManager[None]:
    """Adds notes to every op that is made within, in this graph.

    Args:
      **notes: the attributes of `OpNotes`; a single identity of an optimizer.
    """
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    words = {n if text is True else f"{n}:{text}" for n, text in notes.items()}
    return _tf_private.words_of_new_ops(_OP, words)


def notes_of_op(op: tf.Operation) -> OpNotes:
    """The notes of an op."""
    return _op_notes(_tf_private.text_attribute(op, _OP))


def notes_of_node(node: _tf_private.NodeDef) -> OpNotes:
    """The notes of an op, by its definition."""
    # Reading a missing attribute with [] would create the attribute.
    return _op_notes(node.attr[_OP].s if _OP in node.attr else None)


@functools.lru_cache
def _op_notes(text: bytes | None) -> OpNotes:
    words = (text or b"").decode().split()
    updates, applies = (
        frozenset(word.removeprefix(kind) for word in words if word.startswith(kind))
        for kind in ("updates:", "applies:")
    )
    flags = {word: True for word in words if ":" not in word}
    return OpNotes(updates, applies, **flags)
