"""Every rule for an op against one backward pass for each example.

The cases must match the table of rules: an op with a rule and without a case here
fails.
"""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.keras.helpers import expected_sum
from tfdpclip._registered import REGISTERED
from tfdpclip.gradients import (
    JacobianFallbackWarning,
    OneByOneWarning,
    OpUse,
    clipped_sum,
    op_rule,
)
from tfdpclip.gradients.rules import rule_table

B, T, D, N = 4, 3, 4, 2
RAW = tf.raw_ops


def numbers(seed, *shape, low=-1.0, high=1.0):
    rng = np.random.default_rng(seed)
    return rng.uniform(low, high, shape).astype(np.float32)


def weight(*shape, low=-1.0, high=1.0):
    return tf.Variable(numbers(sum(shape), *shape, low=low, high=high))


def data(*shape, low=-1.0, high=1.0):
    return numbers(17 + sum(shape), B, *shape, low=low, high=high)


def read(v):
    return tf.identity(v)


# By type of op: data of the batch, the variable, the op on both.
CASES = {
    "MatMul": (data(D), weight(D, N), lambda x, v: RAW.MatMul(a=x, b=read(v))),
    "BatchMatMulV2": (
        data(T, D),
        weight(D, N),
        lambda x, v: RAW.BatchMatMulV2(x=x, y=read(v)),
    ),
    "BatchMatMulV3": (
        data(T, D),
        weight(N, D),
        lambda x, v: RAW.BatchMatMulV3(x=x, y=read(v), Tout=tf.float32, adj_y=True),
    ),
    "Einsum": (
        data(T, D),
        weight(T, N, D),
        lambda x, v: RAW.Einsum(inputs=[x, read(v)], equation="btd,tnd->bn"),
    ),
    "BiasAdd": (data(T, D), weight(D), lambda x, v: RAW.BiasAdd(value=x, bias=read(v))),
    "Add": (data(T, D), weight(T, 1), lambda x, v: RAW.Add(x=x, y=read(v))),
    "AddV2": (data(T, D), weight(1, T, D), lambda x, v: RAW.AddV2(x=read(v), y=x)),
    "Sub": (data(T, D), weight(D), lambda x, v: RAW.Sub(x=read(v), y=x)),
    "Mul": (data(T, D), weight(T, D), lambda x, v: RAW.Mul(x=x, y=read(v))),
    "BroadcastTo": (
        data(D),
        weight(1, D),
        lambda x, v: RAW.BroadcastTo(input=read(v), shape=[_rows(x), D]) * x,
    ),
    "Tile": (
        data(D),
        weight(1, D),
        lambda x, v: RAW.Tile(input=read(v), multiples=[_rows(x), 1]) * x,
    ),
    "FusedBatchNormV3": (
        data(2, 2, D),
        weight(D),
        lambda x, v: (
            RAW.FusedBatchNormV3(
                x=x,
                scale=read(v),
                offset=tf.ones([D]),
                mean=tf.zeros([D]),
                variance=tf.ones([D]),
                is_training=False,
            ).y
        ),
    ),
    "ResourceGather": (
        np.array([[0, 2, 2], [1, 1, 1], [3, 0, 2], [4, 4, 0]]),
        weight(5, D),
        lambda x, v: v.sparse_read(x),
    ),
    "GatherV2": (
        np.array([[0, 2, 2], [1, 1, 1], [3, 0, 2], [4, 4, 0]]),
        weight(5, D),
        lambda x, v: RAW.GatherV2(params=read(v), indices=x, axis=0),
    ),
    "Conv2D": (
        data(5, 5, 2),
        weight(3, 2, 2, 3),
        lambda x, v: RAW.Conv2D(
            input=x, filter=read(v), strides=[1, 2, 1, 1], padding="SAME"
        ),
    ),
    "Conv3D": (
        data(3, 4, 3, 2),
        weight(2, 2, 2, 2, 2),
        lambda x, v: RAW.Conv3D(
            input=x, filter=read(v), strides=[1] * 5, padding="VALID"
        ),
    ),
    "DepthwiseConv2dNative": (
        data(4, 4, 2),
        weight(2, 2, 2, 2),
        lambda x, v: RAW.DepthwiseConv2dNative(
            input=x, filter=read(v), strides=[1] * 4, padding="SAME"
        ),
    ),
    "Conv2DBackpropInput": (
        data(3, 3, 2),
        weight(2, 2, 3, 2),
        lambda x, v: RAW.Conv2DBackpropInput(
            input_sizes=tf.stack([_rows(x), 6, 6, 3]),
            filter=read(v),
            out_backprop=x,
            strides=[1, 2, 2, 1],
            padding="SAME",
        ),
    ),
    "Conv3DBackpropInputV2": (
        data(2, 2, 2, 2),
        weight(2, 2, 2, 1, 2),
        lambda x, v: RAW.Conv3DBackpropInputV2(
            input_sizes=tf.stack([_rows(x), 4, 4, 4, 1]),
            filter=read(v),
            out_backprop=x,
            strides=[1, 2, 2, 2, 1],
            padding="SAME",
        ),
    ),
    "RealDiv": (
        data(T, D),
        weight(D, low=1.0, high=2.0),
        lambda x, v: RAW.RealDiv(x=x, y=read(v)),
    ),
    "Div": (
        data(T, D),
        weight(D, low=1.0, high=2.0),
        lambda x, v: RAW.Div(x=x, y=read(v)),
    ),
    "DivNoNan": (
        data(T, D, low=1.0, high=2.0),
        weight(T, D),
        lambda x, v: RAW.DivNoNan(x=read(v), y=x),
    ),
    "Maximum": (data(T, D), weight(D), lambda x, v: RAW.Maximum(x=x, y=read(v))),
    "Minimum": (data(T, D), weight(D), lambda x, v: RAW.Minimum(x=read(v), y=x)),
    "Pow": (
        data(T, D, low=0.5, high=2.0),
        weight(D),
        lambda x, v: RAW.Pow(x=x, y=read(v)),
    ),
    "SquaredDifference": (
        data(T, D),
        weight(T, 1),
        lambda x, v: RAW.SquaredDifference(x=x, y=read(v)),
    ),
    "SelectV2": (
        data(T, D),
        weight(D),
        lambda x, v: RAW.SelectV2(condition=x > 0, t=x, e=read(v)),
    ),
    "Atan2": (data(T, D), weight(D), lambda x, v: RAW.Atan2(y=x, x=read(v))),
    "Xlogy": (
        data(T, D),
        weight(D, low=0.5, high=2.0),
        lambda x, v: RAW.Xlogy(x=x, y=read(v)),
    ),
    "Xlog1py": (
        data(T, D),
        weight(D, low=0.5, high=2.0),
        lambda x, v: RAW.Xlog1py(x=x, y=read(v)),
    ),
    "Xdivy": (
        data(T, D),
        weight(D, low=0.5, high=2.0),
        lambda x, v: RAW.Xdivy(x=x, y=read(v)),
    ),
    "FloorMod": (
        data(T, D, low=1.0, high=3.0),
        weight(D, low=0.4, high=0.9),
        lambda x, v: RAW.FloorMod(x=x, y=read(v)),
    ),
}
# Types without a flow in the table: a rule serves users who state the flow.
STATED = frozenset("Add Div Atan2 Xlogy Xlog1py Xdivy".split())
# Sums of looked up rows need sparse batches: sparse_test.py compares each of them.
SPARSE = {
    "SegmentSum",
    "SparseSegmentSum",
    "SparseSegmentMean",
    "SparseSegmentSqrtN",
    "SparseTensorDenseMatMul",
}


def _rows(x):
    return tf.shape(x)[0]


def losses(function, x, v):
    out = tf.reshape(function(x, v), [tf.shape(x)[0], -1])
    return tf.reduce_mean(tf.square(out), axis=1)


def check_op(name, x, v, function, dynamic, jit, rtol=2e-5):
    """The engine, by a rule, against one eager pass for each example."""
    gradients = []
    for row in x:
        with tf.GradientTape() as tape:
            loss = losses(function, tf.constant(row[np.newaxis]), v)
        found = tf.convert_to_tensor(tape.gradient(loss, v))
        gradients.append(np.ravel(found).astype(np.float64))
    gradients = np.stack(gradients)
    norms = np.linalg.norm(gradients, axis=1)
    assert norms.max() > 0
    rule = dpc.FixedClip(float(np.median(norms)))
    shape = [None if dynamic else B, *x.shape[1:]]

    def run(x):
        return clipped_sum(losses(function, x, v), [v], rule)

    step = tf.function(
        run,
        input_signature=[tf.TensorSpec(shape, x.dtype)],
        jit_compile=jit,
        autograph=False,
    )

    with warnings.catch_warnings():
        warnings.simplefilter("error", JacobianFallbackWarning)
        warnings.simplefilter("error", OneByOneWarning)
        (total,), found = step(x)
    types = {op.type for op in step.get_concrete_function().graph.get_operations()}
    assert name in types
    np.testing.assert_allclose(found, norms, rtol=rtol)
    expected = expected_sum(rule, gradients)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.ravel(total), expected, rtol=1e-4, atol=1e-5 * scale)


def test_every_rule_has_an_entry():
    missing = set(rule_table.RULES) - set(CASES) - SPARSE
    assert not missing, f"add {sorted(missing)} to CASES of {__file__}"
    assert set(CASES) | SPARSE <= set(rule_table.RULES)


def modes():
    """Every op in a dynamic batch; static and compiled batches are slow."""
    for name in CASES:
        yield pytest.param(name, True, None, id=f"{name}-dynamic")
        yield pytest.param(
            name, False, None, id=f"{name}-static", marks=pytest.mark.slow
        )
        yield pytest.param(name, False, True, id=f"{name}-XLA", marks=pytest.mark.slow)


@pytest.mark.parametrize("name, dynamic, jit", modes())
@pytest.mark.thinned(8)
def test_a_rule_gives_the_gradient_of_each_example(name, dynamic, jit, monkeypatch):
    if name in STATED:
        monkeypatch.setitem(REGISTERED.op_flows, name, "elements")
    check_op(name, *CASES[name], dynamic, jit)


# As DeBERTa has its relative positions: an axis of size 1 where the batch is.
RELATIVE = {
    "right": (
        data(N, T, D),
        weight(1, N, D, 5),
        lambda x, v: RAW.BatchMatMulV2(x=x, y=read(v)),
    ),
    "left": (
        data(N, D, T),
        weight(1, N, 5, D),
        lambda x, v: RAW.BatchMatMulV2(x=read(v), y=x),
    ),
    "one for all heads": (
        data(N, T, D),
        weight(1, 1, D, 5),
        lambda x, v: RAW.BatchMatMulV2(x=x, y=read(v)),
    ),
}


@pytest.mark.parametrize("side", RELATIVE)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.thinned(4)
def test_a_parameter_may_have_an_axis_of_size_1_for_the_batch(side, dynamic):
    check_op("BatchMatMulV2", *RELATIVE[side], dynamic, None)


# Rules of anybody's making.


@pytest.fixture
def table(monkeypatch):
    """The table of users' rules, which is as before afterwards."""
    monkeypatch.setattr(REGISTERED, "op_rules", {})


def mul_no_nan(use):
    return use.summed(use.gradient * use.input(1 - use.index))


NEW = {
    "MulNoNan": (
        mul_no_nan,
        data(T, D),
        weight(T, 1),
        lambda x, v: RAW.MulNoNan(x=x, y=read(v)),
    ),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", NEW)
@pytest.mark.slow
def test_a_new_rule_takes_the_place_of_the_jacobian(name, dynamic, table):
    rule, *case = NEW[name]
    with pytest.raises(JacobianFallbackWarning):
        check_op(name, *case, dynamic, None)
    op_rule(name)(rule)
    check_op(name, *case, dynamic, None)


@pytest.mark.slow
@pytest.mark.every_check
def test_a_rule_is_not_asked_about_a_row_for_each_example(table):
    """Gradients are made one by one, and the step finds that places matter."""
    op_rule("MulNoNan")(mul_no_nan)
    v = weight(B, D)

    @tf.function(input_signature=[tf.TensorSpec([B, D])], autograph=False)
    def step(x):
        out = tf.reduce_sum(tf.square(RAW.MulNoNan(x=x, y=read(v))), axis=1)
        return clipped_sum(out, [v], dpc.FixedClip(1e6))

    refused = pytest.raises(
        tf.errors.InvalidArgumentError, match="IsolationError: the op"
    )
    with pytest.warns(OneByOneWarning), refused:
        step(data(D))


@pytest.mark.slow
@pytest.mark.every_check
def test_a_wrong_new_rule_is_found_by_the_step(table):
    _, *case = NEW["MulNoNan"]
    op_rule("MulNoNan")(lambda use: use.summed(use.gradient))
    with pytest.raises(tf.errors.InvalidArgumentError, match="GradientMismatchError"):
        check_op("MulNoNan", *case, True, None)


def test_a_new_rule_of_the_wrong_shape_is_refused(table):
    _, *case = NEW["MulNoNan"]
    op_rule("MulNoNan")(lambda use: use.gradient)
    with pytest.raises(ValueError, match="must return"):
        check_op("MulNoNan", *case, True, None)


@pytest.mark.parametrize("kinds", [(), ("NoSuchOp",), ("Igamma", "igamma")])
def test_rules_are_for_types_of_ops_that_there_are(kinds, table):
    with pytest.raises(ValueError, match="types of TensorFlow's ops"):
        op_rule(*kinds)


def test_an_op_has_one_rule(table):
    with pytest.raises(ValueError, match="has a rule already"):
        op_rule("MatMul")(lambda use: None)


def test_the_public_names_are_those_of_the_package():
    assert dpc.gradients.op_rule is op_rule
    assert dpc.gradients.OpUse is OpUse
