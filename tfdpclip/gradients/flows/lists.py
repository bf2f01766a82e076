"""Flows of lists of tensors: the flow of a list is the common flow of its elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdpclip.gradients.flows import places
from tfdpclip.gradients.flows.flow import DATA, SIZE, Flow
from tfdpclip.gradients.graph import ops


def list_flow(
    op: tf.Operation, inputs: list[Flow], place_of: Callable[[tf.Tensor], Any]
) -> Flow | None:
    """The flow of the output of an op on lists; None for any other op.

    Args:
      op: the op.
      inputs: the flows of its inputs.
      place_of: the function from an index tensor to the name of a place in the batch.
    """
    if op.type in ops.NEW_LISTS:
        sized = any(f.kind == SIZE for f in inputs)
        return Flow(SIZE, power=None) if sized else Flow()
    rule = _RULES.get(op.type)
    return None if rule is None else rule(op, inputs, place_of)


def merge_flows(first: Flow, second: Flow) -> Flow:
    """The flow of a tensor that is either the first or the second tensor."""
    coupled = first.coupled if first.coupled is not None else second.coupled
    trained = first.trained or second.trained
    each = [places.EACH == flow.example for flow in (first, second)]
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
    elif first.axes != second.axes or each[0] != each[1]:
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
        example=places.merge_places(first, second) if base.axes is not None else None,
        made=base.made and all(f.made for f in (first, second) if f.kind == DATA),
    )


def _from_tensor(op, inputs, place_of):
    """The flow of the list of all `tensor[i]`."""
    flow = inputs[0]
    if flow.kind != DATA or flow.axes is None:
        return flow
    alone = flow.axes == (0,) and flow.rows == 1 and not flow.minor
    if 0 in flow.axes and not alone:
        return Flow(DATA, None)
    axes = tuple(axis - 1 for axis in flow.axes if axis > 0)
    return Flow(
        DATA,
        axes,
        flow.rows,
        flow.repeats,
        example=places.EACH if alone else flow.example,
        made=flow.made,
        even=flow.even,
    )


def _get_item(op, inputs, place_of):
    found = inputs[0]
    if inputs[1].kind == DATA and found.kind == DATA:
        return Flow(DATA, None)
    if found.example == places.EACH:
        return dataclasses.replace(found, example=place_of(op.inputs[1]))
    return found


def _set_item(op, inputs, place_of):
    item = inputs[2]
    if inputs[1].kind == DATA and item.kind == DATA:
        return Flow(DATA, None)
    if item.kind == DATA and item.example is not None:
        if item.example == place_of(op.inputs[1]):
            item = dataclasses.replace(item, example=places.EACH)
    return merge_flows(inputs[0], item)


def _push_back(op, inputs, place_of):
    return merge_flows(inputs[0], inputs[1])


def _pop_back(op, inputs, place_of):
    return Flow(DATA, None) if inputs[0].example == places.EACH else inputs[0]


def _stack(op, inputs, place_of):
    """The flow of the elements stacked along a new axis 0."""
    flow = inputs[0]
    if flow.kind != DATA or flow.axes is None or flow.example == places.EARLIER:
        return Flow(DATA, None) if flow.kind == DATA else flow
    axes = tuple(axis + 1 for axis in flow.axes)
    if flow.example == places.EACH:
        return Flow(DATA, (0, *axes), 1, made=flow.made)
    if flow.example is not None:
        return Flow(DATA, axes, example=flow.example, made=flow.made)
    return dataclasses.replace(flow.on(axes), axes=axes or None, made=flow.made)


_RULES: dict[str, Callable] = {
    "TensorListFromTensor": _from_tensor,
    "TensorListGetItem": _get_item,
    "TensorListSetItem": _set_item,
    "TensorListPushBack": _push_back,
    "TensorListPopBack": _pop_back,
    "TensorListStack": _stack,
}
