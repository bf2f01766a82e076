"""The two lemmas of the proof, tried for every type of the table.

An op that the analysis knows keeps the examples apart, and so does the gradient that
TensorFlow registered for the op: if an example is replaced, be it by huge numbers,
infinity or NaN, no other row of the outputs and of the gradients moves.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.lemma_cases import B, Case, Rows, cases
from tfdpclip import _tf_private
from tfdpclip.gradients.flows import lists, op_flows, sparse
from tfdpclip.gradients.graph import ops

CASES = cases()
#: Types of the table with no case, by the reason.
ELSEWHERE = {
    **dict.fromkeys(
        ("L2Loss", "RandomShuffle"), "combines all entries: nothing is claimed"
    ),
    **dict.fromkeys(ops.LEARNING_SAMPLERS, "combines: nothing is claimed"),
    **dict.fromkeys(lists._RULES, "moves whole tensors, as Pack and Unpack do"),
    **dict.fromkeys(
        """SparseReshape SparseFillEmptyRows SparseReorder SparseToDense SegmentSum
        SparseTensorDenseMatMul SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN
        Where Unique ComputeAccidentalHits Bincount RaggedBincount
        RaggedTensorToTensor SparseCross StringNGrams StringSplitV2 GatherNd ScatterNd
        TensorScatterAdd""".split(),
        "sparse batches: sparse_test and tests/proof_coverage",
    ),
    "LookupTableFindV2": "each key by itself, in a table",
    "CTCLossV2": "CTCLoss, for GPUs alone",
    "Fill": "one value for all",
    "ResourceGather": "GatherV2 of a variable",
}


def _claimed() -> set[str]:
    table = {*op_flows._TABLE, *lists._RULES, *sparse._RULES}
    return table | ops.GRADIENTS_APART


def test_every_type_of_the_table_has_a_case():
    missing = _claimed() - set(CASES) - set(ELSEWHERE)
    assert not missing, f"add {sorted(missing)} to tests/gradients/lemma_cases.py"


def _numbers(rng, rows: Rows, dtype) -> np.ndarray:
    shape = (B, *rows.shape)
    real = rng.normal(size=shape)
    kind = rows.kind
    if kind == "positive":
        real = rng.uniform(0.2, 1.8, shape)
    elif kind == "unit":
        real = rng.uniform(0.05, 0.95, shape)
    elif kind == "sorted":
        real = np.sort(real, axis=-1)
    elif kind == "matrices":
        real = real @ np.swapaxes(real, -1, -2) + 2 * np.eye(shape[-1])
    elif kind == "integers":
        return rng.integers(0, 3, shape).astype("int32")
    elif kind == "places":
        places = rng.integers(0, 3, shape).astype("int32")
        places[..., 0] = np.arange(B).reshape([B] + [1] * (places.ndim - 2))
        return places
    elif kind == "bool":
        return real > 0
    elif kind == "strings":  # Of four digits.
        return rng.integers(1000, 9999, shape).astype("S4").astype(object)
    elif kind == "complex":
        return (real + 1j * rng.normal(size=shape)).astype("complex64")
    elif kind == "complex matrices":
        real = real @ np.swapaxes(real, -1, -2) + 2 * np.eye(shape[-1])
        return real.astype("complex64")
    return real.astype(dtype.as_numpy_dtype)


def _flat(case: Case) -> list:
    return list(
        itertools.chain(*(i if isinstance(i, list) else [i] for i in case.inputs))
    )


def _packed(case: Case, flat: list) -> list:
    rest = iter(flat)
    return [
        [next(rest) for _ in i] if isinstance(i, list) else next(rest)
        for i in case.inputs
    ]


def _moved(array: np.ndarray, axis: int) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(array, 0, axis))


def _rows_first(array: np.ndarray, axis) -> np.ndarray:
    """With the examples on axis 0."""
    if axis == "minor 2":  # Rows r and r + B are of example r.
        return np.swapaxes(array.reshape([2, B, *array.shape[1:]]), 0, 1)
    return np.moveaxis(array, axis, 0)


def _run(case: Case, arrays: list, cotangents, differentiate: bool):
    """The outputs, and the gradients at inputs that hold examples, rows first."""
    specs = _flat(case)
    given = [
        tf.constant(_moved(a, s.axis)) if isinstance(s, Rows) else tf.constant(a)
        for a, s in zip(arrays, specs, strict=True)
    ]
    watched = [
        t
        for t, s in zip(given, specs, strict=True)
        if isinstance(s, Rows) and (t.dtype.is_floating or t.dtype.is_complex)
    ]
    axes = [s.axis for s in specs if isinstance(s, Rows)]
    with tf.GradientTape(persistent=False) as tape:
        tape.watch(watched)
        outputs = case.call(_packed(case, given))
    kept = [
        (o, a) for o, a in zip(outputs, case.outputs, strict=False) if a is not None
    ]
    found = [_rows_first(o.numpy(), axis) for o, axis in kept]
    real = [o for o, _ in kept if o.dtype.is_floating or o.dtype.is_complex]
    if not (differentiate and watched and real):
        return found, []
    weights = []
    for number, (o, axis) in enumerate(kept):
        if o.dtype.is_floating or o.dtype.is_complex:
            first = _rows_first(o.numpy(), axis)
            made = cotangents(number, first.shape)
            if axis == "minor 2":
                made = np.swapaxes(made, 0, 1).reshape(o.shape)
            else:
                made = np.moveaxis(made, 0, axis)
            weights.append(tf.cast(tf.constant(made), o.dtype))
    gradients = tape.gradient(real, watched, output_gradients=weights)
    places = [
        s.axis
        for t, s in zip(given, specs, strict=True)
        if isinstance(s, Rows) and (t.dtype.is_floating or t.dtype.is_complex)
    ]
    del axes
    return found, [
        np.moveaxis(tf.convert_to_tensor(g).numpy(), axis, 0)
        for g, axis in zip(gradients, places, strict=True)
        if g is not None
    ]


def _assert_same(before: np.ndarray, after: np.ndarray, case: Case, what: str):
    if np.array_equal(before, after, equal_nan=before.dtype.kind in "fc"):
        return
    before, after = np.asarray(before, complex), np.asarray(after, complex)
    room = case.rounding * max(np.nanmax(np.abs(before), initial=0), 1e-30)
    finite = np.isfinite(before)
    np.testing.assert_array_equal(finite, np.isfinite(after), err_msg=what)
    off = np.max(np.abs(before[finite] - after[finite]), initial=0)
    assert off <= room, f"{what}: off by {off}"


_REPLACED = ("random", "zero", "huge", "infinite", "nan", "one entry")


def _with_other(rng, array, row: int, how: str, spec: Rows, dtype):
    new = _numbers(rng, spec, dtype)
    if how == "one entry" and new[row].ndim:
        kept = array[row].copy()
        kept.flat[0] = new[row].flat[0]
        new[row] = kept
    elif array.dtype.kind in "fc" and how in ("zero", "huge", "infinite", "nan"):
        number = {"zero": 0, "huge": 1e4, "infinite": np.inf, "nan": np.nan}[how]
        new[row] = number
    array = array.copy()
    array[row] = new[row]
    return array


def _given(rng, specs: list, dtype) -> list:
    """Random numbers for the inputs with examples, beside the constant inputs."""
    return [
        _numbers(rng, s, dtype)
        if isinstance(s, Rows)
        else np.asarray(s, dtype.as_numpy_dtype)
        if np.asarray(s).dtype == np.float32 and dtype != tf.float32
        else s
        for s in specs
    ]


def _has_gradient(case: Case) -> bool:
    """Whether the table claims anything of the op's gradient.

    The gradient of PreventGradient raises.
    """
    return case.op in ops.GRADIENTS_APART and case.op != "PreventGradient"


def assert_rows_stay(case: Case, dtype) -> None:
    """Raises if replacing a row moves a different row.

    Args:
      case: an op with its arguments.
      dtype: of the inputs of floating kinds.
    """
    rng = np.random.default_rng(zlib.crc32(f"{case}".encode()))
    specs = _flat(case)
    first = _given(rng, specs, dtype)
    weights: dict = {}

    def cotangents(number, shape, row=None, value=None):
        if number not in weights:
            weights[number] = rng.normal(size=shape)
        made = weights[number].copy()
        if row is not None:
            made[row] = value
        return made

    backward = _has_gradient(case)
    outputs, gradients = _run(case, first, cotangents, backward)
    others = range(len(specs))
    for how in _REPLACED:
        if case.regular and how not in ("random", "one entry"):
            continue
        row = int(rng.integers(B))
        kept = [i for i in range(B) if i != row]
        arrays = [
            _with_other(rng, a, row, how, s, dtype) if isinstance(s, Rows) else a
            for a, s in zip(first, (specs[i] for i in others), strict=True)
        ]
        value = np.nan if how == "nan" else 0.3

        def replaced(number, shape, row=row, value=value):
            return cotangents(number, shape, row, value)

        try:
            after, back = _run(case, arrays, replaced, backward)
        except (tf.errors.InvalidArgumentError, tf.errors.OpError):
            if how in ("random", "one entry"):
                raise
            continue  # Some ops refuse these numbers.
        what = f"{case.op} of {dtype.name}, {how}"
        for a, b in zip(outputs, after, strict=True):
            assert len(a) == B, f"{what}: {a.shape}"
            _assert_same(a[kept], b[kept], case, what)
        for a, b in zip(gradients, back, strict=True):
            _assert_same(a[kept], b[kept], case, f"the gradient of {what}")


def assert_any_order(case: Case, dtype) -> None:
    """Raises if the outputs or gradients of a row depend on the row's place."""
    rng = np.random.default_rng(zlib.crc32(f"{case}".encode()))
    specs = _flat(case)
    given = _given(rng, specs, dtype)
    weights: dict = {}

    def cotangents(number, shape, moved=0):
        if number not in weights:
            weights[number] = rng.normal(size=shape)
        return np.roll(weights[number], moved, axis=0)

    def later(number, shape):
        return cotangents(number, shape, 1)

    backward = _has_gradient(case)
    found = _run(case, given, cotangents, backward)
    given = [
        np.roll(a, 1, axis=0) if isinstance(s, Rows) else a
        for a, s in zip(given, specs, strict=True)
    ]
    for places, spec in zip(given, specs, strict=True):
        if isinstance(spec, Rows) and spec.kind == "places":
            places[..., 0] = _numbers(rng, spec, dtype)[..., 0]
    after = _run(case, given, later, backward)
    # A kernel may round the rows of a block together.
    case = dataclasses.replace(case, rounding=max(case.rounding, 1e-4))
    for before, rolled in zip(found, after, strict=True):
        for a, b in zip(before, rolled, strict=True):
            what = f"{case.op} of {dtype.name}, rows in another order"
            if a.dtype.kind in "fc":
                _assert_same(np.roll(a, 1, axis=0), b, case, what)
            else:
                np.testing.assert_array_equal(np.roll(a, 1, axis=0), b, what)


NAMES = sorted(CASES)
#: Types that are not the same in any order, by the reason.
BY_PLACE = {
    "CTCLoss": "the case has constant labels",
}
# Ops of which layers are built; the tests of the remaining ops are slow.
_USUAL = frozenset(
    """MatMul Conv2D Softmax Reshape Transpose GatherV2 Mean Tanh Mul BiasAdd TopKV2
    MaxPool Einsum SoftmaxCrossEntropyWithLogits Cumsum Pad""".split()
)


def _each(names):
    marks = {name: [] if name in _USUAL else pytest.mark.slow for name in names}
    params = [pytest.param(name, marks=mark) for name, mark in marks.items()]
    return pytest.mark.parametrize("name", params)


@_each(NAMES)
def test_other_rows_move_nothing(name):
    for case in CASES[name]:
        for dtype in case.dtypes:
            assert_rows_stay(case, dtype)


@_each(name for name in NAMES if name not in BY_PLACE)
def test_the_place_of_a_row_moves_nothing(name):
    """Without an earlier example, the later examples have other places."""
    for case in CASES[name]:
        assert_any_order(case, case.dtypes[0])


def test_an_op_that_counts_places_is_found():
    """`MaxPoolWithArgmax` is not in the table: it may count places in the batch."""
    whole = {"ksize": [1, 2, 2, 1], "strides": [1, 1, 1, 1], "padding": "SAME"}
    whole["include_batch_in_index"] = True
    case = Case("MaxPoolWithArgmax", (Rows((3, 3, 1)),), whole, (0, 0))
    assert_rows_stay(case, tf.float32)
    with pytest.raises(AssertionError, match="another order"):
        assert_any_order(case, tf.float32)


@pytest.mark.parametrize(
    "case",
    [
        Case("ReverseV2", (Rows(), np.int32([0]))),
        Case("Softmax", (Rows((), axis=0),)),
        Case("Cumsum", (Rows(), np.int32(0))),
        Case("Roll", (Rows(), np.int32(1), np.int32(0))),
    ],
    ids=lambda case: case.op,
)
def test_an_op_that_mixes_is_found(case):
    with pytest.raises(AssertionError):
        assert_rows_stay(case, tf.float32)


def test_gradients_are_claimed_only_where_tensorflow_has_them():
    for name in ops.GRADIENTS_APART:
        _tf_private.definition_of(name)
        assert name in CASES or name in ELSEWHERE
