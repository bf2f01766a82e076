"""Backward passes through a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._devices import in_xla
from tfdpclip.gradients.graph import calls, ops

# The attribute of ops that a gradient function of one's own has made.
_OWN = "_tfdpclip_own_gradient"


def gradients_at(
    losses: tf.Tensor | Sequence[tf.Tensor],
    tensors: Sequence[tf.Tensor],
    grad_ys: tf.Tensor | Sequence[tf.Tensor] | None = None,
) -> list[tf.Tensor | None]:
    """The gradients of the summed (or weighted) losses at `tensors`.

    What `tf.gradients` gives, fit for XLA also where a tensor is the output of a call
    before which nothing is differentiated: TensorFlow then emits the gradient of the
    call all the same, in a form that XLA does not have. If the gradient at the call's
    own inputs is asked for too, it takes the usual form, and is pruned.
    """
    tensors = list(tensors)
    if not tensors:
        return []
    calls = (
        {t.op for t in tensors if t.op.type in ops.FUNCTION_CALLS} if in_xla() else ()
    )
    inputs = [t for op in calls for t in op.inputs if t.dtype.is_floating]
    return tf.gradients(losses, tensors + inputs, grad_ys)[: len(tensors)]


@contextlib.contextmanager
def own_gradients(rules: Mapping[tf.Operation, Callable]) -> Iterator[None]:
    """Gives some ops of the graph other gradient functions for a while.

    Args:
      rules: `rule(op, *gradients at the outputs)` -> the gradients at the inputs, None
        for those that do not matter. A gradient that is not there comes as None.
    """
    before = {op: _tf_private.own_gradient(op) for op in rules}
    for op, rule in rules.items():

        def gradient(op, *at_outputs, rule=rule):
            return rule(op, *(None if _is_nothing(g) else g for g in at_outputs))

        _tf_private.set_own_gradient(op, gradient)
    try:
        yield
    finally:
        for op, function in before.items():
            _tf_private.set_own_gradient(op, function)


@contextlib.contextmanager
def own_gradients_marked(operations: Iterable[tf.Operation]) -> Iterator[None]:
    """Marks what ops with a gradient function of their own are differentiated by.

    Args:
      operations: of the graph; ops in functions that they call are left as they are.
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
        with _tf_private.attribute_of_new_ops(_OWN, "made"):
            return function(op, *at_outputs)

    return gradient


def is_of_own_gradient(op: tf.Operation) -> bool:
    """Whether a function of somebody's own made it, see `own_gradients_marked`."""
    return _tf_private.text_attribute(op, _OWN) is not None


def _is_nothing(gradient) -> bool:
    """Whether an output has no gradient: TensorFlow gives None, [], or makes zeros."""
    if isinstance(gradient, tf.IndexedSlices):
        return False
    return not tf.is_tensor(gradient) or gradient.op.type == "ZerosLike"
