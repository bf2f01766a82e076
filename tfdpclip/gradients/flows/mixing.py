"""Flows of ops that combine all entries along some axes of their inputs.

For each op type, a rule gives the combined axes of each input, and the axes that keep
their number in the output. If a combined axis counts examples, the op combines the
examples, for all values. If a kept axis counts examples, it still does in the output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tfdpclip.gradients.flows.flow import DATA, PUBLIC, Flow, common_layout
from tfdpclip.gradients.graph.known import CONSTANT_BY_PLACE, rows_alike


def transfer(op, output, inputs: list[Flow], batch_size) -> Flow:
    """The flow of an output of an op with a rule in `RULES`."""
    rule = RULES[op.type]
    if any(t.shape.rank is None for t in op.inputs):
        return Flow(DATA, None)
    batches: list[Flow] = []
    for index, flow in enumerate(inputs):
        if flow.kind != DATA:
            continue
        if flow.axes is None:
            return Flow(DATA, None)
        combined, stays = rule(op, index, op.inputs[index].shape.rank)
        if combined & set(flow.axes):
            return Flow(DATA, None, coupled=op)
        if not set(flow.axes) <= stays:
            return Flow(DATA, None)
        if flow.axes:
            batches.append(flow)
    if not batches:
        return Flow(DATA, ())
    layout = common_layout(batches)
    if layout is None or any(flow.axes != batches[0].axes for flow in batches):
        return Flow(DATA, None)
    believed = (
        "" if _public_rows_alike(op, inputs, batches[0].axes) else CONSTANT_BY_PLACE
    )
    return dataclasses.replace(batches[0].laid_out(layout), obstacle=believed)


def combines(op, inputs: list[Flow]) -> bool:
    """Whether an op with a rule in `RULES` combines an axis that counts examples."""
    rule = RULES.get(op.type)
    return rule is not None and any(
        flow.kind == DATA
        and flow.axes
        and not flow.made
        and tensor.shape.rank is not None
        and not rule(op, index, tensor.shape.rank)[0].isdisjoint(flow.axes)
        for index, (tensor, flow) in enumerate(zip(op.inputs, inputs, strict=True))
    )


def _public_rows_alike(op, inputs: list[Flow], axes) -> bool:
    """Whether public inputs, such as labels, are the same for all examples."""
    if op.type not in _SIDE_BY_SIDE:
        return True
    pairs = list(zip(op.inputs, inputs, strict=True))
    # A batch of any size may have a single example, repeated for each public row.
    any_size = any(None in [t.shape[a] for a in f.axes] for t, f in pairs if f.axes)
    for index, (tensor, flow) in enumerate(pairs):
        rank = tensor.shape.rank
        _, stays = RULES[op.type](op, index, rank)
        for axis in stays.intersection(axes, range(rank)):
            several = any_size and tensor.shape[axis] not in (None, 1)
            if flow.kind == PUBLIC:
                if several or not rows_alike(tensor, axis - rank):
                    return False
    return True


def _last(*counts: int) -> Callable:
    """A rule that combines the last `counts[i]` axes of input i.

    The last count holds for all further inputs.
    """

    def rule(op, index, rank):
        first = max(0, rank - counts[min(index, len(counts) - 1)])
        return set(range(first, rank)), set(range(first))

    return rule


def _all(op, index, rank):
    return set(range(rank)), set()


def _solve(op, index, rank):
    """The rule of `MatrixSolve`, for equally many axes: each column is solved apart."""
    if len({t.shape.rank for t in op.inputs}) > 1:
        return set(), set()
    if index == 0:
        return {rank - 2, rank - 1}, set(range(rank - 2))
    return {rank - 2}, set(range(rank - 2)) | {rank - 1}


def _contrast(op, index, rank):
    """The rule of `AdjustContrastv2`: the mean of an image, `[..., H, W, C]`."""
    return (
        ({rank - 3, rank - 2}, {*range(rank - 3), rank - 1})
        if index == 0
        else (set(), set())
    )


def _windows(op, index, rank):
    """The rule of convolutions and pools, `[N, ..., C]` or `[N, C, ...]`."""
    if index != 0:
        return set(), set()
    layout = op.node_def.attr["data_format"].s
    channel = 1 if layout.startswith(b"NC") else rank - 1
    spatial = [axis for axis in range(1, rank) if axis != channel]
    lengths = _window(op, spatial)
    combined = {a for a, n in zip(spatial, lengths, strict=True) if n and n > 1}
    if op.type in ("Conv2D", "Conv3D"):
        combined.add(channel)
    return combined, {0}


def _window(op, spatial) -> list:
    """The length of an op's window along each spatial axis; None if unknown."""
    count = len(spatial)
    names = [name for name in ("ksize", "ksizes") if name in op.node_def.attr]
    if names:
        sizes = op.get_attr(names[0])
    else:
        sizes = op.inputs[1].shape.as_list()
        return sizes[:count]
    return [None] * count if sizes is None else [sizes[axis] for axis in spatial]


def _resized(op, index, rank):
    """The rule of resizing `[N, H, W, C]`: axes that change their length."""
    if index != 0:
        return set(), set()
    before, after = op.inputs[0].shape, op.outputs[0].shape
    combined = {a for a in (1, 2) if after[a] is not None and after[a] != before[a]}
    return combined, {0, 3}


# Ops whose inputs all have the axes that count examples.
_SIDE_BY_SIDE = frozenset(
    """SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits
    MatrixSolve""".split()
)

RULES: dict[str, Callable] = {
    "TopKV2": _last(1, 0),
    "MatrixSolve": _solve,
    **dict.fromkeys("FFT RFFT RGBToHSV HSVToRGB".split(), _last(1, 0)),
    "FFT2D": _last(2, 0),
    "SoftmaxCrossEntropyWithLogits": _last(1),
    "SparseSoftmaxCrossEntropyWithLogits": _last(1, 0),
    "L2Loss": _all,
    "AdjustContrastv2": _contrast,
    **dict.fromkeys(
        """Conv2D Conv3D DepthwiseConv2dNative AvgPool AvgPool3D MaxPool MaxPool3D
        ExtractImagePatches""".split(),
        _windows,
    ),
    "ResizeBilinear": _resized,
}
