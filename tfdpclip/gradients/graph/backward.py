"""Backward passes through a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._object_notes import note_on_new_ops, notes_of_op
from tfdpclip.gradients.graph import calls, ops


@contextlib.contextmanager
def own_gradients(rules: Mapping[tf.Operation, Callable]) -> Iterator[None]:
    """Replaces the gradient functions of some ops inside the `with` block.

    Args:
      rules: `rule(op, *gradients at the outputs)` -> the gradients at the inputs, None
        for an input without a gradient. An output without a gradient passes None.
    """
    before = {op: _tf_private.own_gradient(op) for op in rules}
    for op, rule in rules.items():

        def gradient(op, *at_outputs, rule=rule):
            return rule(op, *(None if _is_absent(g) else g for g in at_outputs))

        _tf_private.set_own_gradient(op, gradient)
    try:
        yield
    finally:
        for op, function in before.items():
            _tf_private.set_own_gradient(op, function)


@contextlib.contextmanager
def own_gradients_marked(operations: Iterable[tf.Operation]) -> Iterator[None]:
    """Marks the ops that the ops' own gradient functions create in the `with` block.

    `is_of_own_gradient` reads the mark. An own gradient function is a function of
    `tf.custom_gradient`, not the gradient that TensorFlow registered for the op type.

    Args:
      operations: ops of the graph. Ops inside the functions that they call stay
        unmarked.
    """
    before = {}
    for op in operations:
        if op.type in ops.FUNCTION_CALLS | ops.CONTROL_FLOW:
            continue
        function = calls.gradient_function(op)
        if function is not None:
            before[op] = _tf_private.own_gradient(op)
            _tf_private.set_own_gradient(op, _marked(function))
    try:
        yield
    finally:
        for op, function in before.items():
            _tf_private.set_own_gradient(op, function)


def _marked(function: Callable) -> Callable:
    def gradient(op, *at_outputs):
        with note_on_new_ops(own_gradient=True):
            return function(op, *at_outputs)

    return gradient


def is_of_own_gradient(op: tf.Operation) -> bool:
    """Whether an own gradient function made the op; see `own_gradients_marked`."""
    return notes_of_op(op).own_gradient


def _is_absent(gradient) -> bool:
    """Whether an output has no gradient: TensorFlow passes None, [] or `ZerosLike`."""
    if isinstance(gradient, tf.IndexedSlices):
        return False
    return not tf.is_tensor(gradient) or gradient.op.type == "ZerosLike"
