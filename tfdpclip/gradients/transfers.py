"""How each TensorFlow op carries the batch from its inputs to its outputs."""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdpclip.gradients.known import known_shape

# How much a tensor's value depends on the data.
PUBLIC, SIZE, DATA = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Flow:
    """What is known of one tensor.

    Attributes:
      kind: PUBLIC, SIZE (depends on the batch's size alone) or DATA.
      axes: the axes that count examples; None if unknown.
      rows: rows of one example on axis 0, when axis 0 counts examples; None if unknown.
      minor: whether axis 0 runs through the examples fastest (row r belongs to example
        r mod B) instead of slowest.
      coupled: the op at which the examples of a batch were combined, or None.
      trained: whether the value depends on a variable of interest.
      power: of a number of kind SIZE, its power of the batch size; None if it depends
        on that size in another way. 0 for what does not depend on it.
      dims: of a vector of sizes, the powers of its entries.
      entries: how many numbers of the tensor belong to one example, where they follow
        each other though axis 0 does not count examples; None if unknown.
    """

    kind: int = PUBLIC
    axes: tuple[int, ...] | None = ()
    rows: int | None = None
    minor: bool = False
    coupled: tf.Operation | None = None
    trained: bool = False
    power: int | None = 0
    dims: tuple | None = None
    entries: int | None = None

    @property
    def leads(self) -> bool:
        """Whether axis 0, and no other, counts examples."""
        return self.kind == DATA and self.axes == (0,)


_UNARY_OR_ELEMENTWISE = frozenset(
    """Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BiasAdd BiasAddGrad
    Bitcast Cast Ceil CheckNumerics ClipByValue Conj Cos Cosh DebugIdentityV2
    DebugNumericSummaryV2 Digamma Div DivNoNan Elu EluGrad Equal Erf Erfc Exp Expm1
    FakeQuantWithMinMaxArgs Floor FloorDiv FloorMod Greater GreaterEqual Identity
    IdentityN Inv InvGrad IsFinite IsInf IsNan LeakyRelu LeakyReluGrad Less LessEqual
    Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan
    Ndtri Neg NextAfter NotEqual OnesLike Pow PreventGradient RealDiv Reciprocal
    ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Rint Round Rsqrt RsqrtGrad Select
    SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad
    Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference StopGradient Sub Tan
    Tanh TanhGrad TruncateDiv TruncateMod Xdivy Xlog1py Xlogy ZerosLike
    PlaceholderWithDefault EnsureShape Copy CopyHost Snapshot""".split()
)
_KEEPS_ROWS = frozenset(
    """AvgPool AvgPool3D MaxPool MaxPoolV2 MaxPool3D LRN ResizeBilinear ResizeBicubic
    ResizeNearestNeighbor ResizeArea DepthToSpace SpaceToDepth
    SoftmaxCrossEntropyWithLogits
    SparseSoftmaxCrossEntropyWithLogits TopK TopKV2 InTopKV2 Conv2D Conv3D
    DepthwiseConv2dNative Dilation2D MatrixDiag MatrixDiagV3 MatrixDiagPartV3
    MatrixSetDiagV3 MatrixBandPart MirrorPad Pad PadV2 FFT IFFT RFFT IRFFT FFT2D
    IFFT2D""".split()
)
_REDUCTIONS = frozenset(
    "Sum Mean Max Min Prod All Any ArgMax ArgMin EuclideanNorm".split()
)
# What has as many entries as the data of the whole batch say: a mask's, for one.
_DATA_SHAPED = frozenset(
    """Where Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2 DynamicPartition
    ListDiff""".split()
)
_LAST_AXIS = frozenset("Softmax LogSoftmax".split())
_SCANS = frozenset("Cumsum Cumprod CumulativeLogsumexp".split())


def transfer(op, output, inputs, batch_size) -> Flow:
    """The flow of an output of an op with at least one DATA input."""
    rank = output.shape.rank
    if op.type in _DATA_SHAPED:
        return Flow(DATA, None, coupled=op)
    if any(f.kind == DATA and f.axes is None for f in inputs) or rank is None:
        return Flow(DATA, None)
    rule = _TRANSFERS.get(op.type)
    if rule is not None:
        return rule(op, output, inputs, batch_size)
    if op.type in _UNARY_OR_ELEMENTWISE:
        return _elementwise(op, output, inputs)
    if op.type in _KEEPS_ROWS:
        return _first_rows(inputs)
    if op.type in _REDUCTIONS:
        return _reduction(op, output, inputs)
    if op.type in _LAST_AXIS:
        return _over_axes(op, inputs[0], [rank - 1])
    if op.type in _SCANS:
        axis = _constant(op.inputs[1])
        return (
            Flow(DATA, None)
            if axis is None
            else _over_axes(op, inputs[0], [int(axis) % rank])
        )
    return Flow(DATA, None)


def _constant(tensor):
    return tf.get_static_value(tensor)


def _over_axes(op, flow: Flow, axes) -> Flow:
    """An op that mixes the entries along `axes` and keeps the shape."""
    if set(axes) & set(flow.axes):
        return Flow(DATA, flow.axes, flow.rows, flow.minor, coupled=op)
    return flow


def _first_rows(inputs) -> Flow:
    flow = next(f for f in inputs if f.kind == DATA)
    return flow if flow.axes in ((), (0,)) else Flow(DATA, None)


def _elementwise(op, output, inputs) -> Flow:
    rank = output.shape.rank
    axes, rows, minor, known = set(), None, False, True
    for tensor, flow in zip(op.inputs, inputs, strict=True):
        if flow.kind != DATA:
            continue
        shift = rank - tensor.shape.rank
        if op.type == "Select" and tensor.shape.rank == 1:
            shift = 0
        axes |= {a + shift for a in flow.axes}
        if 0 in flow.axes and shift == 0:
            if rows is not None and (rows, minor) != (flow.rows, flow.minor):
                known = False
            rows, minor = flow.rows, flow.minor
    if not known:
        return Flow(DATA, None)
    return Flow(DATA, tuple(sorted(axes)), rows, minor)


def _reduction(op, output, inputs) -> Flow:
    flow = inputs[0]
    axes = _constant(op.inputs[1])
    if flow.kind != DATA:
        return Flow(DATA, None)
    if axes is None:
        return Flow(DATA, None)
    rank = op.inputs[0].shape.rank
    axes = {int(a) % rank for a in axes.reshape(-1)} if rank else set()
    keep = output.shape.rank == rank
    coupled = op if axes & set(flow.axes) else None
    left = [a for a in flow.axes if a not in axes]
    if not keep:
        left = [a - sum(1 for r in axes if r < a) for a in left]
    rows = flow.rows if 0 in flow.axes and 0 not in axes else None
    return Flow(DATA, tuple(left), rows, flow.minor, coupled=coupled)


def _reshape(op, output, inputs, batch_size) -> Flow:
    flow, source = inputs[0], op.inputs[0]
    if not flow.axes:
        return Flow(DATA, () if flow.kind == DATA and flow.axes == () else None)
    if flow.axes != (0,):
        return _reshape_inner(op, output, flow)
    shape = known_shape(output) if output.shape.rank else None
    before = _tail(source.shape.as_list() if source.shape.rank else None)
    after = _tail(shape)
    rank = output.shape.rank
    if rank and flow.rows is not None and batch_size:
        lead = output.shape[0]
        whole = lead is not None and lead % batch_size == 0 and lead > 0
        if whole and (not flow.minor or lead == flow.rows * batch_size):
            return Flow(DATA, (0,), lead // batch_size, flow.minor)
    if before is not None and after and flow.rows is not None:
        if (flow.rows * before) % after == 0:
            rows = flow.rows * before // after
            if not flow.minor or rows == flow.rows:
                return Flow(DATA, (0,), rows, flow.minor)
    if rank and output.shape[0] == 1 and rank > 1:
        # [N, ...] -> [1, N', ...], as layer normalisation does.
        inner = _tail(shape[1:])
        if before is not None and inner and flow.rows is not None:
            if (flow.rows * before) % inner == 0:
                return Flow(DATA, (1,), entries=_entries(flow, before))
        return Flow(DATA, None)
    if rank and output.shape[0] is None and not flow.minor:
        return Flow(DATA, (0,), None)
    return Flow(DATA, None)


def _reshape_inner(op, output, flow) -> Flow:
    """[1, N, D, 1] -> [N, ...]: back from layer normalisation's detour."""
    source = op.inputs[0]
    if flow.axes != (1,) or source.shape[0] != 1 or not output.shape.rank:
        return Flow(DATA, None)
    after = _tail(known_shape(output))
    if flow.entries is None or not after or flow.entries % after:
        return Flow(DATA, (0,), None)
    return Flow(DATA, (0,), flow.entries // after)


def _entries(flow: Flow, tail: int | None) -> int | None:
    """How many numbers an example has, if they follow each other."""
    if flow.rows is None or tail is None or flow.minor:
        return None
    return flow.rows * tail


def _tail(shape: list | None) -> int | None:
    """How many entries follow the leading axis, if that is known."""
    if not shape or None in shape[1:]:
        return None
    return math.prod(shape[1:])


def _transpose(op, output, inputs, batch_size) -> Flow:
    flow, perm = inputs[0], _constant(op.inputs[1])
    if perm is None:
        return Flow(DATA, None)
    perm = [int(p) for p in perm]
    axes = tuple(sorted(perm.index(a) for a in flow.axes))
    return Flow(DATA, axes, flow.rows, flow.minor)


def _expand_dims(op, output, inputs, batch_size) -> Flow:
    flow, axis = inputs[0], _constant(op.inputs[1])
    if axis is None:
        return Flow(DATA, None)
    axis = int(axis.reshape(-1)[0]) % output.shape.rank
    axes = tuple(a + 1 if a >= axis else a for a in flow.axes)
    return Flow(DATA, axes, flow.rows, flow.minor)


def _squeeze(op, output, inputs, batch_size) -> Flow:
    flow, rank = inputs[0], op.inputs[0].shape.rank
    dims = [d % rank for d in op.get_attr("squeeze_dims")]
    if not dims:
        shape = op.inputs[0].shape.as_list()
        if None in shape[1:]:
            return Flow(DATA, None)
        dims = [i for i, d in enumerate(shape) if d == 1]
    if set(dims) & set(flow.axes):
        return Flow(DATA, None)
    axes = tuple(a - sum(1 for d in dims if d < a) for a in flow.axes)
    return Flow(DATA, axes, flow.rows, flow.minor)


def _pack(op, output, inputs, batch_size) -> Flow:
    axis = op.get_attr("axis") % output.shape.rank
    flows = [f for f in inputs if f.kind == DATA]
    if any(
        (f.axes, f.rows, f.minor) != (flows[0].axes, flows[0].rows, flows[0].minor)
        for f in flows
    ):
        return Flow(DATA, None)
    axes = tuple(a + 1 if a >= axis else a for a in flows[0].axes)
    return Flow(DATA, axes, flows[0].rows, flows[0].minor)


def _unpack(op, output, inputs, batch_size) -> Flow:
    flow = inputs[0]
    axis = op.get_attr("axis") % op.inputs[0].shape.rank
    if axis in flow.axes:
        return Flow(DATA, None)
    axes = tuple(a - 1 if a > axis else a for a in flow.axes)
    return Flow(DATA, axes, flow.rows, flow.minor)


def _along(axis_input: int, data_inputs: Callable) -> Callable:
    """Ops that cut or join along one constant axis."""

    def transfer(op, output, inputs, batch_size):
        axis = _constant(op.inputs[axis_input])
        if axis is None:
            return Flow(DATA, None)
        axis = int(axis.reshape(-1)[0]) % output.shape.rank
        flows = [f for f in data_inputs(inputs) if f.kind == DATA]
        if not flows:
            return Flow(DATA, None)
        same = all(
            (f.axes, f.rows, f.minor) == (flows[0].axes, flows[0].rows, flows[0].minor)
            for f in flows
        )
        if not same or axis in flows[0].axes:
            return Flow(DATA, None)
        return Flow(DATA, flows[0].axes, flows[0].rows, flows[0].minor)

    return transfer


def _strided_slice(op, output, inputs, batch_size) -> Flow:
    flow = inputs[0]
    if flow.kind != DATA or flow.axes not in ((0,), ()):
        return Flow(DATA, None)
    if flow.axes == ():
        return flow
    begin = _constant(op.inputs[1])
    if op.get_attr("new_axis_mask") & 1 or op.get_attr("shrink_axis_mask") & 1:
        return Flow(DATA, None)
    whole = op.get_attr("begin_mask") & op.get_attr("end_mask") & 1
    if op.get_attr("ellipsis_mask") & 1:
        specs = op.inputs[1].shape[0]
        new = bin(op.get_attr("new_axis_mask")).count("1")
        whole = specs is not None and specs - 1 - new < op.inputs[0].shape.rank
    strides = _constant(op.inputs[3])
    if not whole or begin is None or strides is None or strides[0] != 1:
        return Flow(DATA, None)
    return flow


def _slice(op, output, inputs, batch_size) -> Flow:
    flow, begin, size = inputs[0], _constant(op.inputs[1]), _constant(op.inputs[2])
    if flow.axes != (0,) or begin is None or size is None:
        return Flow(DATA, None)
    return flow if begin[0] == 0 and size[0] == -1 else Flow(DATA, None)


def _gather(op, output, inputs, batch_size) -> Flow:
    params, indices = inputs[0], inputs[1]
    if op.type == "ResourceGather":
        axis, batch_dims = 0, op.get_attr("batch_dims")
    else:
        axis, batch_dims = _constant(op.inputs[2]), op.get_attr("batch_dims")
        if axis is None:
            return Flow(DATA, None)
    axis = int(axis)
    if params.kind != DATA and indices.kind == DATA and batch_dims == 0:
        axes = tuple(a + axis for a in indices.axes)
        return Flow(DATA, axes, indices.rows if axis == 0 else None, indices.minor)
    if params.kind == DATA and params.axes == (0,):
        if axis == 0 and indices.kind != DATA:
            # Picks or permutes examples.
            return Flow(DATA, None, coupled=op)
        if batch_dims >= 1 or (axis != 0 and indices.kind != DATA):
            return params
    return Flow(DATA, None)


def _one_hot(op, output, inputs, batch_size) -> Flow:
    flow = inputs[0]
    return flow if flow.axes == (0,) and op.get_attr("axis") == -1 else Flow(DATA, None)


def _matmul(op, output, inputs, batch_size) -> Flow:
    a, b = inputs
    ta, tb = op.get_attr("transpose_a"), op.get_attr("transpose_b")
    letters_a, letters_b = ("ka" if ta else "ak"), ("bk" if tb else "kb")
    return _labelled(op, [letters_a, letters_b], "ab", inputs)


def _batch_matmul(op, output, inputs, batch_size) -> Flow:
    ta, tb = op.get_attr("adj_x"), op.get_attr("adj_y")
    ranks = [t.shape.rank for t in op.inputs]
    if None in ranks:
        return Flow(DATA, None)
    lead = [chr(ord("l") + i) for i in range(max(ranks) - 2)]
    labels = []
    for rank, flipped, pair in ((ranks[0], ta, "ak"), (ranks[1], tb, "kb")):
        pair = pair[::-1] if flipped else pair
        labels.append("".join(lead[len(lead) - (rank - 2) :]) + pair)
    return _labelled(op, labels, "".join(lead) + "ab", inputs)


def _einsum(op, output, inputs, batch_size) -> Flow:
    equation = explicit_equation(op)
    return Flow(DATA, None) if equation is None else _labelled(op, *equation, inputs)


def explicit_equation(op: tf.Operation) -> tuple[list[str], str] | None:
    """An Einsum's labels for each input and the output, without ellipses.

    None where they cannot be told from the static ranks.
    """
    equation = op.get_attr("equation").decode().replace(" ", "")
    if "->" not in equation:
        return None
    left, right = equation.split("->")
    labels, wide = [], 0
    for names, tensor in zip(left.split(","), op.inputs, strict=True):
        if "..." in names:
            if tensor.shape.rank is None:
                return None
            wide = max(wide, tensor.shape.rank - len(names.replace("...", "")))
        labels.append(names)
    free = [c for c in string.ascii_letters if c not in equation][:wide]

    def expand(names, count):
        return names.replace("...", "".join(free[len(free) - count :]))

    expanded = [
        expand(names, (tensor.shape.rank or 0) - len(names.replace("...", "")))
        if "..." in names
        else names
        for names, tensor in zip(labels, op.inputs, strict=True)
    ]
    return expanded, expand(right, wide)


def _labelled(op, labels, out_labels, inputs) -> Flow:
    """Contractions: an axis that counts examples must survive, and only once."""
    marked: dict[str, Flow] = {}
    coupled = None
    for names, flow in zip(labels, inputs, strict=True):
        for axis in flow.axes if flow.kind == DATA else ():
            if names[axis] not in out_labels:
                coupled = op
            marked.setdefault(names[axis], flow)
    axes = tuple(i for i, name in enumerate(out_labels) if name in marked)
    lead = marked.get(out_labels[0]) if out_labels else None
    rows, minor = (lead.rows, lead.minor) if lead is not None else (None, False)
    return Flow(DATA, axes, rows, minor, coupled=coupled)


def _conv_transpose(op, output, inputs, batch_size) -> Flow:
    return _first_rows([inputs[2]])


def _fused_batch_norm(op, output, inputs, batch_size) -> Flow:
    flow = inputs[0]
    if output is not op.outputs[0] and output.shape.rank != 4:
        axes: tuple | None = ()
        if flow.axes == (1,) and op.get_attr("data_format") == b"NCHW":
            axes = None
        return Flow(DATA, axes)
    if not op.get_attr("is_training"):
        return flow
    rank = op.inputs[0].shape.rank
    channel = 1 if op.get_attr("data_format") in (b"NCHW", b"NCDHW") else rank - 1
    return _over_axes(op, flow, [a for a in range(rank) if a != channel])


def _space_to_batch(op, output, inputs, batch_size) -> Flow:
    flow, block = inputs[0], _constant(op.inputs[1])
    if flow.axes != (0,) or block is None or flow.rows != 1:
        return Flow(DATA, None)
    cells = math.prod(int(b) for b in block)
    return Flow(DATA, (0,), cells, minor=cells > 1)


def _batch_to_space(op, output, inputs, batch_size) -> Flow:
    flow, block = inputs[0], _constant(op.inputs[1])
    if flow.axes != (0,) or block is None:
        return Flow(DATA, None)
    cells = math.prod(int(b) for b in block)
    if flow.rows != cells or (cells > 1 and not flow.minor):
        return Flow(DATA, None)
    return Flow(DATA, (0,), 1)


def _broadcast(op, output, inputs, batch_size) -> Flow:
    flow = inputs[0]
    if flow.kind != DATA:
        return Flow(DATA, (0,), 1)
    shift = output.shape.rank - op.inputs[0].shape.rank
    rows = flow.rows if shift == 0 and op.type == "BroadcastTo" else None
    return Flow(DATA, tuple(a + shift for a in flow.axes), rows, flow.minor)


def _reverse(op, output, inputs, batch_size) -> Flow:
    axes = _constant(op.inputs[1])
    if axes is None:
        return Flow(DATA, None)
    return _over_axes(op, inputs[0], [int(a) % output.shape.rank for a in axes])


def _roll(op, output, inputs, batch_size) -> Flow:
    axes = _constant(op.inputs[2])
    if axes is None:
        return Flow(DATA, None)
    axes = [int(a) % output.shape.rank for a in np.reshape(axes, -1)]
    return _over_axes(op, inputs[0], axes)


def _shuffle(op, output, inputs, batch_size) -> Flow:
    return _over_axes(op, inputs[0], [0])


_TRANSFERS: dict[str, Callable] = {
    "Roll": _roll,
    "RandomShuffle": _shuffle,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "ExpandDims": _expand_dims,
    "Squeeze": _squeeze,
    "Pack": _pack,
    "Unpack": _unpack,
    "Split": _along(0, lambda inputs: inputs[1:]),
    "SplitV": _along(2, lambda inputs: inputs[:1]),
    "ReverseV2": _reverse,
    "StridedSlice": _strided_slice,
    "Slice": _slice,
    "GatherV2": _gather,
    "ResourceGather": _gather,
    "OneHot": _one_hot,
    "MatMul": _matmul,
    "BatchMatMulV2": _batch_matmul,
    "BatchMatMul": _batch_matmul,
    "BatchMatMulV3": _batch_matmul,
    "Einsum": _einsum,
    "Conv2DBackpropInput": _conv_transpose,
    "Conv3DBackpropInputV2": _conv_transpose,
    "FusedBatchNormV3": _fused_batch_norm,
    "SpaceToBatchND": _space_to_batch,
    "BatchToSpaceND": _batch_to_space,
    "BroadcastTo": _broadcast,
    "Tile": _broadcast,
}


def _concat(op, output, inputs, batch_size) -> Flow:
    return _along(-1, lambda flows: flows[:-1])(op, output, inputs, batch_size)


_TRANSFERS["ConcatV2"] = _concat
