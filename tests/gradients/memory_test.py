"""The memory option changes when gradients are built, never the results."""

import math
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import (
    BATCH,
    IDS,
    IMAGE,
    SEQUENCE,
    X,
    assert_matches,
    integers,
    one_at_a_time,
    opaque,
    randoms,
    squash,
    traced,
    variable,
)
from tfdpclip.clipping import FixedClip
from tfdpclip.gradients import PerExampleGradients
from tfdpclip.gradients.graph.walks import ancestors

pytestmark = pytest.mark.filterwarnings(
    "ignore::tfdpclip.gradients.JacobianFallbackWarning"
)


def loop(x, v):
    return squash(opaque(x, v))


def convolve(x, k, strides=1, padding="SAME", **options):
    return squash(tf.nn.conv2d(x, k, strides, padding, **options))


# name: (function of the data and the variables, shapes of the variables, data).
FORMS = {
    "dense_by_gram": (lambda x, v: squash(x @ v), [(3, 200)], SEQUENCE),
    "dense_by_products": (
        lambda x, v: squash(x @ v),
        [(3, 4)],
        randoms(BATCH, 60, 3),
    ),
    "grouped_einsum": (
        lambda x, v: squash(tf.einsum("btd,tdf->btf", x, v)),
        [(6, 3, 4)],
        SEQUENCE,
    ),
    "convolution": (convolve, [(3, 2, 2, 5)], IMAGE),
    "convolution_by_gram": (convolve, [(3, 3, 24, 64)], randoms(BATCH, 3, 3, 24)),
    "wide_convolution": (convolve, [(3, 3, 16, 8)], randoms(BATCH, 7, 6, 16)),
    "strided": (
        lambda x, k: convolve(x, k, 2, "VALID"),
        [(3, 2, 2, 5)],
        IMAGE,
    ),
    "dilated": (lambda x, k: convolve(x, k, dilations=2), [(3, 2, 2, 5)], IMAGE),
    "batch_to_space": (
        lambda x, k: squash(
            tf.nn.with_space_to_batch(
                x,
                [2, 2],
                "SAME",
                lambda x, *_: tf.nn.conv2d(x, k, 1, "VALID"),
                filter_shape=[3, 2],
                spatial_dims=[1, 2],
            )
        ),
        [(3, 2, 2, 5)],
        IMAGE,
    ),
    "transposed": (
        lambda x, k: squash(
            tf.nn.conv2d_transpose(x, k, [tf.shape(x)[0], 10, 12, 5], 2)
        ),
        [(3, 2, 5, 2)],
        IMAGE,
    ),
    "of_three_dimensions": (
        lambda x, k: squash(tf.nn.conv3d(x, k, [1] * 5, "SAME")),
        [(2, 2, 2, 2, 3)],
        randoms(BATCH, 3, 4, 3, 2),
    ),
    "by_depth": (
        lambda x, k: squash(tf.nn.depthwise_conv2d(x, k, [1] * 4, "SAME")),
        [(3, 2, 2, 2)],
        IMAGE,
    ),
    "lookup": (lambda i, v: squash(tf.gather(v, i)), [(10, 3)], IDS),
    "long_lookup": (
        lambda i, v: squash(tf.gather(v, i)),
        [(10, 3)],
        integers(BATCH, 40),
    ),
    "tied": (
        lambda i, v: squash(tf.matmul(tf.gather(v, i), v, transpose_b=True)),
        [(10, 3)],
        IDS,
    ),
    "sum_with_transposition": (
        lambda x, v: squash(x @ (v + tf.transpose(v))),
        [(3, 3)],
        SEQUENCE,
    ),
    "of_every_rank": (
        lambda x, v: squash(x @ v) + squash(x * v[0]) + squash(x @ (v @ v)),
        [(3, 3)],
        SEQUENCE,
    ),
    "one_filter_twice": (
        lambda x, k: convolve(x, k) + convolve(x, k, 2),
        [(3, 2, 2, 5)],
        IMAGE,
    ),
    "fallback": (loop, [(3, 3)], X),
    "half_fallback": (lambda x, v, w: loop(x @ w, v), [(3, 3), (3, 3)], X),
}


@pytest.fixture(scope="module")
def references():
    """Variables and per-example gradients, computed once for each form."""
    done = {}

    def get(name):
        if name not in done:
            function, shapes, data = FORMS[name]
            variables = [variable(*shape, seed=i) for i, shape in enumerate(shapes)]
            per_example = lambda x: function(x, *variables)  # noqa: E731
            expected = one_at_a_time(per_example, variables, data)
            done[name] = per_example, variables, data, expected
        return done[name]

    return get


@pytest.mark.parametrize("examples", [0, 2])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.thinned(21)
def test_chunks_of_any_size_give_the_same(references, name, examples):
    """Chunks of one example; of two, the last chunk partial; larger than the batch."""
    per_example, variables, data, expected = references(name)
    each = 4 * sum(math.prod(v.shape) for v in variables)
    memory = max(1, 2 * each * examples)
    step = traced(per_example, variables, [data], memory=memory)
    for count in (BATCH, 2, 1):
        assert_matches(step, variables, expected, [data[:count]])


@pytest.mark.parametrize(
    "name",
    [
        "dense_by_gram",
        "dense_by_products",
        "convolution",
        "convolution_by_gram",
        "transposed",
        "by_depth",
        "long_lookup",
        "tied",
        "of_every_rank",
    ],
)
@pytest.mark.slow
def test_chunks_compile(references, name):
    per_example, variables, data, expected = references(name)
    step = traced(per_example, variables, [data], dynamic=False, jit=True, memory=1)
    assert_matches(step, variables, expected, [data])


@pytest.mark.parametrize("memory", [None, 1], ids=["default", "chunks"])
@pytest.mark.slow
def test_grouped_convolutions(memory):
    """Their gradient exists under XLA only, on CPUs."""
    k = variable(3, 3, 2, 6)
    data = randoms(BATCH, 4, 5, 4)
    options = {} if memory is None else {"memory": memory}
    step = traced(
        lambda x: convolve(x, k), [k], [data], dynamic=False, jit=True, **options
    )
    one = tf.function(lambda x: tf.gradients(convolve(x, k), [k]), jit_compile=True)
    expected = np.stack([one(data[i : i + 1])[0].numpy().ravel() for i in range(BATCH)])
    assert_matches(step, [k], expected.astype(np.float64), [data])


def test_an_empty_batch_in_chunks():
    v, k = variable(3, 4), variable(2, 2, 2, 3)
    for per_example, variables, data in (
        (lambda x: squash(x @ v), [v], SEQUENCE),
        (lambda x: convolve(x, k), [k], IMAGE),
    ):
        for memory in (1, 2**20):
            step = traced(per_example, variables, [data], memory=memory)
            norms, sums = step(tf.zeros([0]), data[:0])
            assert norms.shape == [0]
            np.testing.assert_array_equal(sums[0], tf.zeros_like(variables[0]))


# Gradients of a whole batch are never built.

LARGE = {
    "convolution": (convolve, [(3, 3, 256, 256)], (4, 4, 256)),
    "wide_dense": (lambda x, v: squash(x @ v), [(512, 4096)], (4, 512)),
    "dense": (lambda x, v: squash(x @ v), [(1024, 4096)], (1024,)),
    "table": (lambda i, v: squash(tf.gather(v, i)), [(100000, 64)], (30,)),
    "tied": (
        lambda i, v: squash(
            tf.matmul(tf.gather(v, i)[:, :1], v, transpose_b=True)[..., :3]
        ),
        [(20000, 128)],
        (30,),
    ),
}


def needed_ops(graph):
    """The ops that a graph's outputs need, including ops of loops and branches."""
    seen, stack = set(), [t.op for t in graph.outputs] + list(graph.control_outputs)
    while stack:
        op = stack.pop()
        if op in seen:
            continue
        seen.add(op)
        stack += [t.op for t in op.inputs] + list(op.control_inputs)
        for key in ("then_branch", "else_branch", "cond", "body", "f"):
            if key in op.node_def.attr:
                name = op.node_def.attr[key].func.name
                inner = getattr(op.graph._get_function(name), "graph", None)
                if inner is not None:
                    stack += [t.op for t in inner.outputs]
                    stack += list(inner.control_outputs)
    return seen


def largest_built(name, count, **options):
    """The size of the largest tensor with the whole batch in it."""
    function, shapes, shape = LARGE[name]
    variables = [tf.Variable(tf.zeros(s)) for s in shapes]
    looked_up = name in ("table", "tied")
    spec = tf.TensorSpec([count, *shape], tf.int32 if looked_up else tf.float32)

    @tf.function(input_signature=[spec])
    def step(x):
        gradients = PerExampleGradients(function(x, *variables), variables, **options)
        return gradients.weighted_sum(tf.ones_like(gradients.norms))

    sizes = []
    for op in needed_ops(step.get_concrete_function().graph):
        for output in op.outputs:
            full = output.shape.rank and output.shape.is_fully_defined()
            if full and output.shape[0] % count == 0:
                sizes.append(output.shape.num_elements())
    return max(sizes), count * sum(math.prod(s) for s in shapes)


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.thinned(3)
def test_gradients_of_a_whole_batch_are_never_built_by_default(name):
    """The check of a step, left out here, takes the memory of an ordinary step.

    For `x @ v` with a third axis, TensorFlow's own gradient does build them.
    """
    built, whole = largest_built(name, 64, check_gradients="never")
    assert built < whole / 4


def test_small_gradients_are_built_only_within_the_memory_given():
    """Shows that the walk over the graph sees gradients that are built."""
    LARGE["small"] = (convolve, [(3, 3, 16, 16)], (12, 12, 16))
    try:
        for memory in (2**30, 2**16):
            built, whole = largest_built("small", 64, memory=memory)
            # Activations and patches are larger; look for the products' own size.
            assert built >= whole or memory < 2**30
    finally:
        del LARGE["small"]


PEAK = """
    import resource
    import tensorflow as tf
    from tfdpclip.gradients import PerExampleGradients

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    conv = tf.Variable(tf.zeros([3, 3, 256, 256]))
    dense = tf.Variable(tf.zeros([512, 2048]))
    table = tf.Variable(tf.zeros([20000, 64]))
    cases = [
        (lambda x: tf.nn.conv2d(x, conv, 1, "SAME"), conv, tf.ones([128, 4, 4, 256])),
        (lambda x: x @ dense, dense, tf.ones([128, 4, 512])),
        (
            lambda i: tf.gather(table, i) @ tf.transpose(table)[:, :5],
            table,
            tf.ones([128, 20], tf.int32),
        ),
    ]

    def losses(function, x):
        out = tf.tanh(function(x))
        return tf.reduce_sum(out, axis=list(range(1, out.shape.rank)))

    @tf.function(reduce_retracing=False)
    def plain(i, x):
        function, variable, _ = cases[i]
        return tf.convert_to_tensor(tf.gradients(losses(function, x), variable)[0])

    @tf.function(reduce_retracing=False)
    def private(i, x, check):
        function, variable, _ = cases[i]
        found = PerExampleGradients(
            losses(function, x), [variable], check_gradients=check
        )
        return found.weighted_sum(tf.ones_like(found.norms))

    for i, (_, _, x) in enumerate(cases):
        plain(i, x)
    before = peak()
    for check in ("never", "first"):
        for i, (_, variable, x) in enumerate(cases):
            # For x @ v with a third axis, TensorFlow's own gradient builds them, and
            # so does the check's ordinary pass.
            if i != 1 or check == "never":
                private(i, x, check)
                whole = 4 * 128 * tf.size(variable).numpy() / 2**20
                print(check, int(peak() - before), int(whole))
"""


@pytest.mark.slow
def test_the_peak_of_a_step_stays_far_below_the_batchs_gradients():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEAK)],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split() for line in done.stdout.strip().splitlines()]
    assert [line[0] for line in lines] == ["never"] * 3 + ["first"] * 2
    for check, grown, whole in lines:
        assert int(whole) > 280  # megabytes
        assert int(grown) < (230 if check == "never" else 400), lines


def _comparison_of(gradients):
    """The op that compares a step with ordinary gradients."""
    op = gradients.checks_passed.op
    while op.type == "Identity":
        op = op.inputs[0].op
    assert op.type in ("If", "StatelessIf")
    return op


WIDE = {
    "kept": (64, 8),  # the examples' gradients exist already
    "parts": (8, 300),  # sums are computed from inputs and gradients of outputs
}


@pytest.mark.slow
@pytest.mark.every_check
@pytest.mark.parametrize("name", WIDE)
def test_a_comparison_holds_no_gradients_that_the_step_does_not_have(name):
    """The comparison takes the inputs of the sums, and an ordinary backward pass."""
    steps, width = WIDE[name]
    w, u = variable(width, width), variable(width, width)
    found = {}

    @tf.function(input_signature=[tf.TensorSpec([None, steps, width])])
    def step(x):
        losses = squash(tf.tanh(x @ w) @ u)
        gradients = PerExampleGradients(losses, [w, u], nominal_batch_size=4096)
        found["comparison"] = _comparison_of(gradients)
        return gradients.clipped_sum(FixedClip(0.1), ())

    sums = step(randoms(6, steps, width))
    shapes = [t.shape for t in found["comparison"].inputs if t.dtype != tf.resource]
    by_example = [s for s in shapes if s.rank and s[0] is None and s[1:].rank]
    entries = {math.prod(s[1:]) for s in by_example if None not in s[1:]}
    activations, gradients = steps * width, width * width
    assert entries == ({gradients, activations} if name == "kept" else {activations})
    # The comparison begins when the sums are made.
    gate = found["comparison"].inputs[0].op
    assert gate.type == "Identity" and len(gate.control_inputs) == 2
    assert all(np.any(total) for total in sums)


@pytest.mark.every_check
def test_the_backward_pass_waits_for_the_passes_of_the_comparison():
    """Two backward passes at a time would need the memory of both."""
    w = variable(3, 5)
    branches = []

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        losses = squash(x @ w)
        gradients = PerExampleGradients(losses, [w])
        backward = set(ancestors([gradients.norms])) - set(ancestors([losses]))
        waits = [before for op in backward for before in op.control_inputs]
        branches.extend(t.op.type for before in waits for t in before.inputs)
        return gradients.norms

    step(randoms(6, 3))
    assert {"If", "StatelessIf"} & set(branches)


@pytest.mark.every_check
def test_a_step_keeps_no_tensor_that_the_comparison_does_not_use():
    """The gradient of a product with a constant names the other factor."""
    w, scales = variable(3, 5), randoms(5)
    inputs = []

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        gradients = PerExampleGradients(squash((x @ w) * scales), [w])
        sums = gradients.weighted_sum(tf.ones([tf.shape(x)[0]]))
        for op in sums[0].graph.get_operations():
            if "PlaceholderWithDefault" in [t.op.type for t in op.inputs]:
                inputs.extend(t.op.type for t in op.inputs)
        return gradients.checks_passed, sums

    x = randoms(6, 3)
    passed, sums = step(x)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(squash((x @ w) * scales))
    np.testing.assert_allclose(sums[0], tape.gradient(loss, w), rtol=1e-4, atol=1e-6)
    # The loss, which the gradient of a sum names, is replaced; its factor is needed.
    assert passed and "Tanh" in inputs


@pytest.mark.slow
@pytest.mark.every_check
def test_sums_of_weights_that_ask_whether_examples_are_isolated():
    """Which cannot be made before the check."""
    w = variable(3, 5)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        gradients = PerExampleGradients(squash(x @ w), [w])
        ones = tf.ones_like(gradients.norms)
        weights = tf.where(gradients.checks_passed, ones, 0.0)
        own = gradients.weighted_sum(weights)[0]
        again = gradients.weighted_sum(ones + 0 * own[0, 0])[0]
        return own, again, gradients.weighted_sum(ones)[0]

    found = step(randoms(6, 3))
    assert np.any(found[0])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
