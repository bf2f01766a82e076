"""Arguments for every type of op that the analysis claims to know; see `lemmas_test`.

A case is an op with the examples on axis 0 of some inputs, in the form in which its
entry in the table says that they stay apart.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.gradients.graph import ops

B = 4


@dataclasses.dataclass(frozen=True)
class Rows:
    """An input with the examples on one of its axes, by default axis 0.

    Attributes:
      shape: of one example.
      kind: of numbers: real, positive, unit, integers (below 3), bool, complex,
        strings of digits, matrices that are symmetric and positive, or places
        (integers below 3, after the number of the row).
      axis: the axis of the examples.
    """

    shape: tuple[int, ...] = (3,)
    kind: str = "real"
    axis: int = 0


@dataclasses.dataclass(frozen=True)
class Case:
    """An op, its inputs (lists for inputs of many tensors) and its attributes.

    Attributes:
      op: the type.
      inputs: tensors, and `Rows` for inputs with examples.
      attributes: of the op.
      outputs: for each output the axis of the examples; None where nothing is claimed.
      rounding: how far a row may be off, relative to its largest entry: 0 for kernels
        that go row by row.
      dtypes: of the `Rows` of floating kinds.
      regular: whether all matrices must be random, as the kernel may not end.
    """

    op: str
    inputs: tuple
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: tuple = (0,)
    rounding: float = 0.0
    dtypes: tuple = (tf.float32, tf.float64)
    regular: bool = False

    def call(self, given: list) -> list[tf.Tensor]:
        """The outputs of which something is claimed."""
        function = getattr(tf.raw_ops, self.op)
        definition = _tf_private.definition_of(self.op)
        named = list(inspect.signature(function).parameters)
        listed = [a.name for a in definition.input_arg]
        attributes = {a.name for a in definition.attr}
        # Names of inputs that Python spells differently from the op's definition.
        others = iter(n for n in named if n not in listed and n not in attributes)
        keys = [n if n in named else next(others) for n in listed]
        found = function(**dict(zip(keys, given, strict=True)), **self.attributes)
        return tf.nest.flatten(found)


@dataclasses.dataclass(frozen=True)
class Listed(Case):
    """A case whose first input `[B, T, ...]` is listed in `[B T, ...]`."""

    def call(self, given: list) -> list[tf.Tensor]:
        first, *rest = given
        return super().call([tf.reshape(first, [-1, *first.shape[2:]]), *rest])


def _case(op, *inputs, outputs=(0,), rounding=0.0, dtypes=None, **attributes) -> Case:
    more = {} if dtypes is None else {"dtypes": dtypes}
    return Case(op, inputs, attributes, outputs, rounding, **more)


REAL = (tf.float32, tf.float64)
HALF = (*REAL, tf.half, tf.bfloat16)
ONE = (tf.float32,)
WIDE = ("Complex", "Angle", "ComplexAbs", "Imag", "Real")

_POSITIVE = frozenset("FloorDiv FloorMod Log Log1p Pow Rsqrt Sqrt".split())
_BOOLS = frozenset("LogicalAnd LogicalNot LogicalOr".split())
_INTEGERS = frozenset("BitwiseOr LeftShift RightShift".split())
_COMPLEX = frozenset("ComplexAbs Imag Real".split())


def _kind(name: str) -> str:
    for kind, names in (
        ("positive", _POSITIVE),
        ("bool", _BOOLS),
        ("integers", _INTEGERS),
        ("complex", _COMPLEX),
    ):
        if name in names:
            return kind
    return "real"


def _entry_by_entry() -> list[Case]:
    found = [
        _case("AddN", [Rows(), Rows()]),
        _case("Bucketize", Rows(), boundaries=[-0.2, 0.4], dtypes=REAL),
        _case("Cast", Rows(), DstT=tf.int32),
        _case("Cast", Rows(), DstT=tf.bfloat16, dtypes=ONE),
        _case("EnsureShape", Rows(), shape=[None, 3]),
        _case("Select", Rows((), "bool"), Rows(), Rows()),
        _case("Select", Rows((3,), "bool"), Rows(), Rows()),
        _case("SelectV2", Rows((1,), "bool"), Rows(), Rows((1,))),
        _case("Complex", Rows(), Rows(), dtypes=ONE),
        _case("BiasAdd", Rows((2, 3)), np.float32([1, 2, 3]), dtypes=ONE),
        _case("AsString", Rows(), dtypes=REAL),
        *_of_strings(),
    ]
    done = {case.op for case in found}
    for name in sorted(ops.ELEMENTWISE - done):
        definition = _tf_private.definition_of(name)
        kind = _kind(name)
        inputs = [Rows((2, 3), kind) for _ in definition.input_arg]
        types = ONE if name.endswith("Grad") else REAL
        found.append(_case(name, *inputs, dtypes=types))
        if len(inputs) == 2 and not name.endswith("Grad"):
            found.append(_case(name, Rows((3,), kind), Rows((1,), kind), dtypes=types))
        if name in ("Mul", "Tanh", "Relu", "Exp", "Sub", "Maximum", "Sigmoid"):
            found.append(_case(name, *inputs, dtypes=(tf.half, tf.bfloat16)))
        if name in ("AddV2", "Mul", "Square", "Exp", "Neg", "Sub", "Tanh", "RealDiv"):
            found.append(
                _case(name, *[Rows((3,), "complex")] * len(inputs), dtypes=ONE)
            )
    return found


def _of_strings() -> list[Case]:
    words = Rows((3,), "strings")
    found = [
        _case("StaticRegexReplace", words, pattern="1", rewrite="one", dtypes=ONE),
        _case("StringToHashBucketStrong", words, num_buckets=7, key=[1, 2], dtypes=ONE),
    ]
    found.append(_case("StringToHashBucketFast", words, num_buckets=7, dtypes=ONE))
    return [*found, _case("StringLower", words, dtypes=ONE)]


def _aligned() -> list[Case]:
    """Losses of sequences, with time ahead of the examples."""
    labels = np.int64([[i, 0] for i in range(B)])
    values, lengths = np.int32([0, 1, 0, 1]), np.full(B, 5, "int32")
    return [
        _case(
            "CTCLoss",
            Rows((5, 3), axis=1),
            labels,
            values,
            lengths,
            outputs=(0, 1),
            dtypes=ONE,
            rounding=1e-6,
        )
    ]


def _within_rows() -> list[Case]:
    image, volume = Rows((4, 4, 3)), Rows((2, 2, 2, 3))
    ints = lambda *v: np.int32(v)  # noqa: E731
    found = []
    for name in sorted(ops.REDUCTIONS):
        index = name in ("ArgMax", "ArgMin")
        kind = "bool" if name in ("All", "Any") else "real"
        for axis in (1, 2, -1) if index else ([1], [1, 2], [-1]):
            found.append(_case(name, Rows((2, 3), kind), np.int32(axis)))
        if not index:
            found.append(_case(name, Rows((2, 3), kind), np.int32([2]), keep_dims=True))
            found.append(
                _case(name, Rows((3,), kind, axis=1), np.int32([0]), dtypes=ONE)
            )
    for name in sorted(ops.LAST_AXIS):
        found.append(_case(name, Rows(), dtypes=HALF))
    for name in sorted(ops.SCANS):
        for axis in (1, -1):
            found.append(
                _case(name, Rows((2, 3)), np.int32(axis), exclusive=True, reverse=True)
            )
    found += [
        _case("ResizeNearestNeighbor", image, ints(5, 3), dtypes=ONE),
        _case("ResizeBilinear", image, ints(5, 3), dtypes=ONE),
        _case(
            "ImageProjectiveTransformV3",
            image,
            Rows((8,), "unit"),
            ints(4, 4),
            np.float32(0),
            interpolation="NEAREST",
            dtypes=ONE,
        ),
        _case("DepthToSpace", Rows((2, 2, 4)), block_size=2, dtypes=ONE),
        # The draws for a row, too, by the seed and the place of the row alone.
    ]
    layout = [
        _case("Reshape", Rows((2, 3)), ints(-1, 6)),
        _case("Transpose", Rows((2, 3)), ints(0, 2, 1)),
        _case("Transpose", Rows((2, 3)), ints(1, 0, 2), outputs=(1,)),
        _case("ExpandDims", Rows(), np.int32(1)),
        _case("ExpandDims", Rows(), np.int32(0), outputs=(1,)),
        _case("Squeeze", Rows((1, 3)), axis=[1]),
        _case("Pack", [Rows(), Rows()], axis=1),
        _case("Pack", [Rows(), Rows()], axis=0, outputs=(1,)),
        _case("Unpack", Rows((2, 3)), num=2, axis=1, outputs=(0, 0)),
        _case("Split", np.int32(1), Rows((4,)), num_split=2, outputs=(0, 0)),
        _case(
            "SplitV", Rows((4,)), ints(1, 3), np.int32(1), num_split=2, outputs=(0, 0)
        ),
        _case("ConcatV2", [Rows(), Rows((2,))], np.int32(1)),
        _case(
            "StridedSlice",
            Rows((4,)),
            ints(0, 1),
            ints(0, 3),
            ints(1, 1),
            begin_mask=1,
            end_mask=1,
        ),
        _case(
            "StridedSlice",
            Rows((4,)),
            ints(0, 3),
            ints(0, 0),
            ints(1, -2),
            begin_mask=1,
            end_mask=1,
        ),
        _case(
            "StridedSlice",
            Rows((4,)),
            ints(0, 3),
            ints(0, 4),
            ints(1, 1),
            begin_mask=1,
            end_mask=1,
            shrink_axis_mask=2,
        ),
        _case("Slice", Rows((4,)), ints(0, 1), ints(-1, 2)),
        _case("BroadcastTo", Rows((1,)), ints(B, 3)),
        _case("BroadcastTo", Rows(()), ints(2, B), outputs=(1,)),
        _case("Tile", Rows((2,)), ints(1, 2)),
        _case("Tile", Rows((2,)), ints(2, 1), outputs=("minor 2",)),
        _case("ConcatV2", [Rows(), Rows()], np.int32(0), outputs=("minor 2",)),
        _case("Reshape", Rows((2, 3), axis=1), ints(-1, 3), outputs=("minor 2",)),
        _case("Roll", Rows(), np.int32(1), np.int32(1)),
        _case("ReverseV2", Rows(), ints(1)),
        _case("Pad", Rows(), np.int32([[0, 0], [1, 2]])),
        _case("PadV2", Rows(), np.int32([[0, 0], [1, 2]]), np.float32(2), dtypes=ONE),
        _case("MirrorPad", Rows(), np.int32([[0, 0], [1, 1]]), mode="REFLECT"),
        _case("MirrorPad", Rows(), np.int32([[0, 0], [1, 1]]), mode="SYMMETRIC"),
        _case(
            "OneHot",
            Rows((2,), "integers"),
            np.int32(3),
            np.float32(1),
            np.float32(0),
            axis=-1,
        ),
        _case(
            "GatherV2",
            np.float32(np.eye(3, 2)),
            Rows((2,), "integers"),
            np.int32(0),
            dtypes=ONE,
        ),
        _case(
            "GatherV2", Rows((3,)), Rows((2,), "integers"), np.int32(1), batch_dims=1
        ),
        _case(
            "GatherNd",
            np.float32(np.eye(3, 2)),
            Rows((1,), "integers"),
            dtypes=ONE,
        ),
        _case(
            "GatherNd",
            np.float32(np.eye(3, 3)),
            Rows((4, 2), "integers"),
            dtypes=ONE,
        ),
        _case(
            "GatherV2",
            Rows((2, 3), axis=1),
            Rows((2, 2), "integers", axis=1),
            np.int32(2),
            batch_dims=2,
            outputs=(1,),
        ),
        _case(
            "GatherV2",
            Rows((2, 3), axis=2),
            ints([0, 1], [2, 0]),
            np.int32(1),
            batch_dims=1,
            outputs=(2,),
        ),
        _case(
            "GatherV2",
            np.float32(np.eye(2, 3)),
            Rows((2,), "integers", axis=1),
            np.int32(1),
            batch_dims=1,
            outputs=(1,),
            dtypes=ONE,
        ),
        _case("GatherV2", Rows((3,)), ints(2, 0), np.int32(1)),
        _case("GatherV2", Rows((3,)), ints(0, 1, 2, 3), np.int32(0)),
        _case("IdentityN", [Rows(), Rows((2,))], outputs=(0, 0)),
    ]
    contractions = [
        _case(
            "MatMul", Rows(), np.float32(np.eye(3, 2) + 1), rounding=1e-6, dtypes=ONE
        ),
        _case(
            "MatMul",
            Rows((3,), axis=1),
            np.float32(np.eye(3, 2) + 1),
            transpose_a=True,
            rounding=1e-6,
            dtypes=ONE,
        ),
        _case(
            "SparseMatMul",
            Rows(),
            np.float32(np.eye(3, 2) + 1),
            rounding=1e-6,
            dtypes=ONE,
        ),
        _case(
            "Einsum", [Rows((2, 3)), Rows((3,))], equation="bij,bj->bi", rounding=1e-6
        ),
        _case(
            "Einsum",
            [Rows((2, 3)), Rows((3,))],
            equation="bij,bj->ib",
            outputs=(1,),
            rounding=1e-6,
        ),
    ]
    for name in ("BatchMatMulV2",):
        contractions.append(_case(name, Rows((2, 3)), Rows((3, 2)), rounding=1e-6))
        contractions.append(
            _case(
                name, Rows((3, 2)), Rows((2, 3)), adj_x=True, adj_y=True, rounding=1e-6
            )
        )
    contractions.append(
        _case(
            "BatchMatMulV3",
            Rows((2, 3)),
            Rows((3, 2)),
            Tout=tf.float32,
            dtypes=ONE,
            rounding=1e-6,
        )
    )
    found += layout + contractions + _aligned()
    return found + _windows(image, volume) + _numbers()


def _windows(image, volume) -> list[Case]:
    flat = {"strides": [1, 1, 1, 1], "padding": "SAME", "dtypes": ONE}
    deep = {"strides": [1, 1, 1, 1, 1], "padding": "SAME", "dtypes": ONE}
    pool = {**flat, "ksize": [1, 2, 2, 1]}
    pools = {**deep, "ksize": [1, 2, 2, 2, 1]}
    kernel = lambda *s: np.float32(np.cos(np.arange(np.prod(s))).reshape(s))  # noqa: E731
    ones = np.ones(3, "float32")
    ints = lambda *v: np.int32(v)  # noqa: E731
    return [
        _case("Conv2D", image, kernel(2, 2, 3, 2), rounding=1e-6, **flat),
        _case("Conv3D", volume, kernel(2, 2, 2, 3, 2), rounding=1e-6, **deep),
        _case(
            "DepthwiseConv2dNative", image, kernel(2, 2, 3, 2), rounding=1e-6, **flat
        ),
        _case(
            "Conv2DBackpropInput",
            ints(B, 4, 4, 2),
            kernel(2, 2, 2, 3),
            image,
            rounding=1e-6,
            **flat,
        ),
        _case(
            "Conv3DBackpropInputV2",
            ints(B, 2, 2, 2, 2),
            kernel(2, 2, 2, 2, 3),
            volume,
            rounding=1e-6,
            **deep,
        ),
        _case("AvgPool", image, **pool),
        _case("MaxPool", image, **pool),
        _case("AvgPool3D", volume, **pools),
        _case("MaxPool3D", volume, **pools),
        _case(
            "ExtractImagePatches",
            image,
            ksizes=[1, 2, 2, 1],
            rates=[1, 1, 1, 1],
            **flat,
        ),
        _case(
            "FusedBatchNormV3",
            image,
            ones,
            ones,
            ones,
            ones,
            is_training=False,
            outputs=(0, None, None, None, None, None),
            dtypes=ONE,
        ),
        # Each example a channel, as in layer normalisation.
        _case(
            "FusedBatchNormV3",
            Rows((1, 3, 1), axis=1),
            np.ones(B, "float32"),
            np.ones(B, "float32"),
            np.float32([]),
            np.float32([]),
            is_training=True,
            data_format="NCHW",
            outputs=(1, None, None, None, None, None),
            dtypes=ONE,
            rounding=1e-6,
        ),
        _case("RGBToHSV", Rows((2, 3), "unit"), dtypes=ONE),
        _case("HSVToRGB", Rows((2, 3), "unit"), dtypes=ONE),
        _case("AdjustContrastv2", image, np.float32(0.5), dtypes=ONE),
        _case(
            "SpaceToBatchND", Rows((4, 2)), ints(2), ints([0, 0]), outputs=("minor 2",)
        ),
        _case("BatchToSpaceND", Rows((2, 2)), ints(1), ints([0, 0])),
    ]


def _numbers() -> list[Case]:
    signal = {"dtypes": ONE, "rounding": 1e-6}
    plane = Rows((4, 4), "complex")
    ints = lambda *v: np.int32(v)  # noqa: E731
    found = [
        _case("TopKV2", Rows(), np.int32(2), outputs=(0, 0)),
        _case(
            "SoftmaxCrossEntropyWithLogits", Rows(), Rows((3,), "unit"), outputs=(0, 0)
        ),
        _case(
            "SparseSoftmaxCrossEntropyWithLogits",
            Rows(),
            Rows((), "integers"),
            outputs=(0, 0),
        ),
        _case("FFT", Rows((4,), "complex"), **signal),
        _case("FFT2D", plane, **signal),
        _case("RFFT", Rows((4,)), ints(4), **signal),
    ]
    found.append(
        _case("MatrixSolve", Rows((3, 3), "matrices"), Rows((3, 2)), rounding=1e-6)
    )
    found.append(
        _case(
            "UnsortedSegmentSum",
            Rows((3,), axis=1),
            ints(0, 0, 1),
            np.int32(2),
            outputs=(1,),
        )
    )
    found.append(
        _case(
            "DenseBincount",
            Rows((3,), "integers"),
            np.int32(3),
            np.float32([]).reshape([0]),
            dtypes=ONE,
        )
    )
    return found


def cases() -> dict[str, list[Case]]:
    """The cases of each type."""
    found: dict[str, list[Case]] = {}
    for case in _entry_by_entry() + _within_rows():
        found.setdefault(case.op, []).append(case)
    return found
