"""Flows of lists of tensors: the flow of a list is the common flow of its elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tfdpclip.gradients.flows.flow import DATA, SIZE, Flow
from tfdpclip.gradients.graph import ops


def list_flow(op: tf.Operation, inputs: list[Flow]) -> Flow | None:
    """The flow of the output of an op on lists; None for any other op.

    Args:
      op: the op.
      inputs: the flows of its inputs.
    """
    if op.type in ops.NEW_LISTS:
        sized = any(f.kind == SIZE for f in inputs)
        return Flow(SIZE, power=None) if sized else Flow()
    rule = _RULES.get(op.type)
    return None if rule is None else rule(inputs)


def merge_flows(first: Flow, second: Flow) -> Flow:
    """The flow of a tensor that is either the first or the second tensor."""
    coupled = first.coupled if first.coupled is not None else second.coupled
    trained = first.trained or second.trained
    if DATA not in (first.kind, second.kind):
        # Sizes with different exponents make a size with an unknown exponent.
        base = first if first.kind >= second.kind else second
        if first.kind == second.kind and (first.power, first.dims) != (
            second.power,
            second.dims,
        ):
            base = dataclasses.replace(base, power=None, dims=None)
    elif first.kind != second.kind:
        base = first if first.kind == DATA else second
    elif first.axes != second.axes:
        base = Flow(DATA, None)
    elif first.layout != second.layout:
        base = Flow(DATA, first.axes, even=first.regular and second.regular)
    else:
        base = first
    return dataclasses.replace(
        base,
        coupled=coupled,
        trained=trained,
        varying=first.varying or second.varying,
        placed=first.placed or second.placed,
        obstacle=first.obstacle or second.obstacle,
        made=base.made and all(f.made for f in (first, second) if f.kind == DATA),
    )


def _from_tensor(inputs: list[Flow]) -> Flow:
    """The flow of the list of all `tensor[i]`."""
    flow = inputs[0]
    if flow.kind != DATA or flow.axes is None:
        return flow
    if 0 in flow.axes:
        return Flow(DATA, None, made=flow.made)
    axes = tuple(axis - 1 for axis in flow.axes)
    return dataclasses.replace(flow.on(axes), made=flow.made)


def _get_item(inputs: list[Flow]) -> Flow:
    if inputs[1].kind == DATA and inputs[0].kind == DATA:
        return Flow(DATA, None)
    return inputs[0]


def _set_item(inputs: list[Flow]) -> Flow:
    if inputs[1].kind == DATA and inputs[2].kind == DATA:
        return Flow(DATA, None)
    return merge_flows(inputs[0], inputs[2])


def _push_back(inputs: list[Flow]) -> Flow:
    return merge_flows(inputs[0], inputs[1])


def _pop_back(inputs: list[Flow]) -> Flow:
    return inputs[0]


def _stack(inputs: list[Flow]) -> Flow:
    """The flow of the elements stacked along a new axis 0."""
    flow = inputs[0]
    if flow.kind != DATA or flow.axes is None:
        return Flow(DATA, None, made=flow.made) if flow.kind == DATA else flow
    axes = tuple(axis + 1 for axis in flow.axes)
    return dataclasses.replace(flow.on(axes), axes=axes or None, made=flow.made)


_RULES: dict[str, Callable] = {
    "TensorListFromTensor": _from_tensor,
    "TensorListGetItem": _get_item,
    "TensorListSetItem": _set_item,
    "TensorListPushBack": _push_back,
    "TensorListPopBack": _pop_back,
    "TensorListStack": _stack,
}
