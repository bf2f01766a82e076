"""Taking a loss apart: each example's share, and refusal of what has none."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import (
    BATCH,
    SEQUENCE,
    X,
    flat,
    one_at_a_time,
    randoms,
    squash,
    variable,
)
from tests.keras.helpers import mostly_slow
from tests.stack import MEAN
from tfdpclip.gradients import (
    ExampleIsolationError,
    JacobianFallbackWarning,
    LossStructureError,
    PerExampleGradients,
    per_example_norms,
)

L = tf.keras.layers
LOSSES = tf.keras.losses
NOMINAL = 7.0
W = variable(3, 4)
REFUSALS = (LossStructureError, ExampleIsolationError)


def vector(x):
    """One loss per example."""
    return squash(x @ W)


def entries(x):
    """`[B, T]`."""
    return tf.reduce_sum(tf.tanh(x @ W), axis=2)


def cube(x):
    """`[B, T, U]`."""
    return tf.tanh(x @ W)


def batch_of(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


def steps_of(x):
    return tf.cast(tf.shape(x)[1], tf.float32)


def reference_norms(per_example, *data):
    return np.linalg.norm(one_at_a_time(per_example, [W], *data), axis=1)


def norms_of(loss, *data, dynamic=True, **options):
    lead = None if dynamic else len(data[0])
    specs = [tf.TensorSpec([lead, *t.shape[1:]], t.dtype) for t in data]

    @tf.function(input_signature=specs, autograph=False)
    def step(*tensors):
        return per_example_norms(loss(*tensors), [W], **options)

    return step(*data).numpy()


def assert_scaled(loss, per_example, data, scale=1.0):
    """Norms are `scale` times those of `per_example`; a callable knows B."""
    expected = reference_norms(per_example, data)
    for dynamic in (True, False):
        for nominal in (None, NOMINAL):
            found = norms_of(loss, data, dynamic=dynamic, nominal_batch_size=nominal)
            factor = scale(nominal or BATCH) if callable(scale) else scale
            np.testing.assert_allclose(found, factor * expected, rtol=1e-5)


# Vectors.

VECTORS = {
    "vector": (vector, vector, X),
    "steps": (entries, lambda x: tf.reduce_mean(entries(x), 1), SEQUENCE),
    "cube": (cube, lambda x: tf.reduce_mean(cube(x), [1, 2]), SEQUENCE),
    "column": (lambda x: vector(x)[:, tf.newaxis], vector, X),
    "with_a_regulariser": (lambda x: vector(x) + tf.nn.l2_loss(W), vector, X),
    "with_a_constant": (lambda x: vector(x) + 3.0, vector, X),
    "negated": (lambda x: -vector(x), vector, X),
    "in_float64": (lambda x: tf.cast(vector(x), tf.float64), vector, X),
}


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.thinned(4)
def test_a_loss_for_each_example_works_as_it_is(name):
    loss, per_example, data = VECTORS[name]
    assert_scaled(loss, per_example, data)


# Scalars: means, however they are spelled.

MEANS = {
    "mean": lambda x: tf.reduce_mean(vector(x)),
    "mean_of_a_column": lambda x: tf.reduce_mean(vector(x)[:, tf.newaxis]),
    "kept_axes": lambda x: tf.squeeze(tf.reduce_mean(vector(x), keepdims=True)),
    "over_shape": lambda x: tf.reduce_sum(vector(x)) / batch_of(x),
    "over_size": lambda x: (
        tf.reduce_sum(vector(x)) / tf.cast(tf.size(vector(x)), tf.float32)
    ),
    "over_length_of_the_data": lambda x: (
        tf.reduce_sum(vector(x)) / tf.cast(tf.size(x[:, 0]), tf.float32)
    ),
    "no_nan": lambda x: tf.math.divide_no_nan(tf.reduce_sum(vector(x)), batch_of(x)),
    "times_reciprocal": lambda x: tf.reduce_sum(vector(x)) * (1 / batch_of(x)),
    "divided_inside": lambda x: tf.reduce_sum(vector(x) / batch_of(x)),
    "scaled_inside": lambda x: tf.reduce_sum(vector(x) * (1 / batch_of(x))),
    "summed_twice": lambda x: tf.reduce_sum(tf.reduce_sum(vector(x))) / batch_of(x),
    "of_several_terms": lambda x: tf.add_n(
        [tf.reduce_mean(vector(x)) * c for c in (0.25, 0.5, 0.25)]
    ),
    "of_stacked_terms": lambda x: tf.reduce_sum(
        tf.stack([tf.reduce_mean(vector(x)) / 4, 3 * tf.reduce_mean(vector(x)) / 4])
    ),
    "difference": lambda x: (
        3 * tf.reduce_mean(vector(x)) - 2 * tf.reduce_sum(vector(x)) / batch_of(x)
    ),
    "negated": lambda x: 0.0 - tf.negative(tf.reduce_mean(vector(x))),
    "with_constants": lambda x: tf.reduce_mean(vector(x)) * 2.0 / 2.0 + 3.0,
    "with_a_stopped_term": lambda x: (
        tf.reduce_mean(vector(x)) + tf.stop_gradient(tf.reduce_max(vector(x)))
    ),
    "with_a_term_of_the_data": lambda x: tf.reduce_mean(vector(x)) + tf.reduce_max(x),
    "cast": lambda x: tf.cast(tf.reduce_mean(vector(x)), tf.float64),
}


HIDDEN = pytest.mark.xfail(strict=True, reason="constants hide a static batch size")


@pytest.mark.parametrize("name", list(MEANS))
@pytest.mark.slow
def test_a_mean_gives_each_example_its_own_loss(name):
    assert_scaled(MEANS[name], vector, X)


STEP_MEANS = {
    "mean": lambda x: tf.reduce_mean(entries(x)),
    "mean_of_means": lambda x: tf.reduce_mean(tf.reduce_mean(entries(x), 1)),
    "batch_first": lambda x: tf.reduce_mean(tf.reduce_mean(entries(x), 0)),
    "flattened": lambda x: tf.reduce_mean(tf.reshape(entries(x), [-1])),
    "mean_over_steps": lambda x: tf.reduce_mean(
        tf.reduce_sum(entries(x), 1) / steps_of(x)
    ),
    "sum_over_both": lambda x: tf.reduce_sum(entries(x)) / batch_of(x) / steps_of(x),
    "sum_over_their_product": lambda x: (
        tf.reduce_sum(entries(x)) / (batch_of(x) * steps_of(x))
    ),
    "of_a_cube": lambda x: 4 * tf.reduce_mean(cube(x)),
}


@pytest.mark.parametrize("name", STEP_MEANS)
@pytest.mark.thinned(4)
def test_a_mean_over_steps_gives_each_example_the_mean_of_its_own(name):
    mean = lambda x: tf.reduce_mean(entries(x), 1)  # noqa: E731
    assert_scaled(STEP_MEANS[name], mean, SEQUENCE)


# Sums: scaled by the public batch size, where there is one, never by the batch's own.

SUMS = {
    "sum": (lambda x: tf.reduce_sum(vector(x)), 1.0),
    "global_batch": (
        lambda x: tf.nn.compute_average_loss(vector(x), global_batch_size=7),
        1 / NOMINAL,
    ),
    "mean_times_batch": (lambda x: tf.reduce_mean(vector(x)) * batch_of(x), 1.0),
    "constant": (lambda x: tf.reduce_sum(vector(x)) / 7.0, 1 / NOMINAL),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.thinned(2)
def test_a_sum_is_scaled_by_the_public_batch_size(name):
    loss, factor = SUMS[name]
    assert_scaled(loss, vector, X, lambda batch: batch * factor)


def test_a_sum_over_steps_is_no_mean_over_the_batch():
    def loss(x):
        return tf.reduce_sum(entries(x)) / steps_of(x)

    mean = lambda x: tf.reduce_mean(entries(x), 1)  # noqa: E731
    assert_scaled(loss, mean, SEQUENCE, lambda batch: batch)


@pytest.mark.parametrize("name", [*MEANS, *SUMS])
@pytest.mark.thinned(12)
def test_the_scale_does_not_depend_on_how_many_examples_there_are(name):
    """Otherwise one more example would change everybody's gradient before the clip."""
    loss = MEANS[name] if name in MEANS else SUMS[name][0]

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        return per_example_norms(loss(x), [W], nominal_batch_size=NOMINAL)

    every = step(X)
    for count in (1, BATCH - 1):
        np.testing.assert_allclose(step(X[:count]), every[:count], rtol=1e-5)


# Refusals.


def masked_mean(x):
    mask = tf.cast(x[..., 0] > 0, tf.float32)
    return tf.reduce_sum(mask * entries(x)) / tf.reduce_sum(mask)


def normalised_weights(x):
    weights = tf.nn.softmax(x[:, 0], axis=0)
    return tf.reduce_sum(weights * vector(x))


REFUSED = {
    "masked_mean": (masked_mean, SEQUENCE, "truediv"),
    "boolean_mask": (
        lambda x: tf.reduce_mean(tf.boolean_mask(entries(x), x[..., 0] > 0)),
        SEQUENCE,
        "Where",
    ),
    "scale_by_the_data": (
        lambda x: tf.reduce_mean(vector(x)) * tf.reduce_max(x),
        X,
        "mul",
    ),
    "maximum": (lambda x: tf.reduce_max(vector(x)), X, "Max"),
    "soft_maximum": (lambda x: tf.reduce_logsumexp(vector(x)), X, ""),
    "root": (lambda x: tf.sqrt(tf.reduce_mean(tf.square(vector(x)))), X, "Sqrt"),
    "square": (lambda x: tf.square(tf.reduce_mean(vector(x))), X, "Square"),
    "product_of_means": (
        lambda x: tf.reduce_mean(vector(x)) * tf.reduce_mean(vector(2 * x)),
        X,
        "mul",
    ),
    "quotient_of_means": (
        lambda x: tf.reduce_mean(vector(x)) / tf.reduce_mean(vector(2 * x)),
        X,
        "truediv",
    ),
    "exponential": (lambda x: tf.exp(tf.reduce_mean(vector(x))), X, "Exp"),
    "clipped": (lambda x: tf.minimum(tf.reduce_mean(vector(x)), 1.0), X, "Minimum"),
    "branch": (
        lambda x: tf.cond(
            tf.reduce_sum(x) > 0, lambda: tf.reduce_mean(vector(x)), lambda: 0.0
        ),
        X,
        "cond",
    ),
    "variance": (lambda x: tf.math.reduce_variance(vector(x)), X, ""),
    "norm": (lambda x: tf.norm(vector(x)), X, ""),
    "divided_twice": (lambda x: tf.reduce_mean(vector(x)) / batch_of(x), X, "power"),
    "divided_twice_by_hand": (
        lambda x: tf.reduce_sum(vector(x)) / batch_of(x) / batch_of(x),
        X,
        "power",
    ),
    "divided_by_a_root": (
        lambda x: tf.reduce_sum(vector(x)) / tf.sqrt(batch_of(x)),
        X,
        "truediv",
    ),
    "divided_by_one_more": (
        lambda x: tf.reduce_sum(vector(x)) / (1 + batch_of(x)),
        X,
        "truediv",
    ),
    "vector_over_batch": (lambda x: vector(x) / batch_of(x), X, "truediv"),
    "labels_against_a_column": (
        lambda x: tf.square(x[:, 0] - (x @ W)[:, :1]),
        X,
        "same shape",
    ),
    "mean_against_a_column": (
        lambda x: tf.reduce_mean(tf.square(x[:, 0] - (x @ W)[:, :1])),
        X,
        "",
    ),
    "row_of_the_batch": (lambda x: vector(x)[0], X, ""),
    "mean_for_everybody": (
        lambda x: tf.fill([tf.shape(x)[0]], tf.reduce_mean(vector(x))),
        X,
        "Mean",
    ),
    "less_the_mean": (lambda x: vector(x) - tf.reduce_mean(vector(x)), X, "Mean"),
    "over_the_sum": (
        lambda x: tf.reduce_mean(vector(x) / tf.reduce_sum(vector(x))),
        X,
        "Sum",
    ),
    "softmax_weights": (normalised_weights, X, ""),
    "mean_over_the_batch": (
        lambda x: tf.reduce_mean(entries(x), 0),
        SEQUENCE,
        "Mean",
    ),
    "tokens_as_examples": (
        lambda x: tf.reshape(entries(x), [-1]),
        SEQUENCE,
        "entries",
    ),
    "unknown_rank": (
        lambda x: tf.reduce_mean(
            tf.square(x[:, 0] - tf.squeeze((x @ W)[:, :1])), axis=0
        ),
        X,
        "",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_example_owns_is_refused_by_name(name):
    loss, data, named = REFUSED[name]
    with pytest.raises(REFUSALS) as caught:
        norms_of(loss, data)
    assert named in str(caught.value)


STATIC_REFUSED = [
    "maximum",
    "boolean_mask",
    "product_of_means",
    "less_the_mean",
    "labels_against_a_column",
    "divided_twice_by_hand",
    pytest.param("divided_by_a_root", marks=HIDDEN),
    "tokens_as_examples",
]


@pytest.mark.parametrize("name", STATIC_REFUSED)
def test_a_static_batch_size_is_no_way_round_it(name):
    loss, data, _ = REFUSED[name]
    with pytest.raises(REFUSALS):
        norms_of(loss, data, dynamic=False, nominal_batch_size=NOMINAL)


@pytest.mark.parametrize("name", ["maximum", "masked_mean", "root"])
def test_the_message_shows_the_corrected_line(name):
    loss, data, _ = REFUSED[name]
    with pytest.raises(LossStructureError, match="reduction='none'"):
        norms_of(loss, data)


def test_a_loss_of_nothing_trained_or_of_no_example_is_refused():
    other = variable(2)
    refusal = pytest.raises(LossStructureError, match="does not depend on any")
    with refusal:
        norms_of(lambda x: squash(x * other[0]), X)
    with pytest.raises(LossStructureError, match="no example"):
        norms_of(lambda x: tf.nn.l2_loss(W), X)
    with pytest.raises(LossStructureError, match="graph"):
        per_example_norms(vector(X), [W])
    with pytest.raises(ValueError, match="variables"):
        tf.function(lambda x: per_example_norms(vector(x), []))(X)


# Keras's losses.


def labels(kind, count):
    if kind in ("binary", "labels"):
        return tf.constant(np.arange(count) % 2, tf.float32)[:, tf.newaxis]
    if kind == "classes":
        return tf.constant(np.arange(count) % 4, tf.int32)
    if kind == "one_hot":
        return tf.one_hot(np.arange(count) % 4, 4)
    return tf.abs(randoms(count, 4, seed=8)) + 0.1


KERAS = {
    "MeanSquaredError": ("values", {}),
    "MeanAbsoluteError": ("values", {}),
    "MeanAbsolutePercentageError": ("values", {}),
    "MeanSquaredLogarithmicError": ("values", {}),
    "CosineSimilarity": ("values", {}),
    "Huber": ("values", {}),
    "KLDivergence": ("values", {}),
    "LogCosh": ("values", {}),
    "Poisson": ("values", {}),
    "Hinge": ("values", {}),
    "SquaredHinge": ("values", {}),
    "BinaryCrossentropy": ("one_hot", {"from_logits": True, "label_smoothing": 0.1}),
    "BinaryFocalCrossentropy": ("one_hot", {"from_logits": True}),
    "CategoricalCrossentropy": ("one_hot", {"from_logits": True}),
    "CategoricalFocalCrossentropy": ("one_hot", {"from_logits": True}),
    "CategoricalHinge": ("one_hot", {}),
    "SparseCategoricalCrossentropy": ("classes", {"from_logits": True}),
}
REDUCTIONS = sorted({"none", "sum", "sum_over_batch_size", MEAN})


QUICK = (
    "BinaryCrossentropy",
    "Hinge",
    "MeanSquaredError",
    "SparseCategoricalCrossentropy",
)


@pytest.mark.parametrize("name", mostly_slow(QUICK, KERAS))
@pytest.mark.slow
def test_a_keras_loss_with_any_reduction(name):
    kind, options = KERAS[name]
    make = getattr(LOSSES, name)
    y, weight = labels(kind, BATCH), tf.constant([1.0, 0.5, 0.0, 2.0, 1.0])

    def predict(x):
        return tf.nn.softplus(x @ W) + 0.1

    @tf.function
    def step():
        found = []
        for reduction in REDUCTIONS:
            loss = make(reduction=reduction, **options)
            for weights in (None, weight, weight[:, tf.newaxis]):
                if reduction == "none" and weights is not None:
                    continue
                gradients = PerExampleGradients(
                    loss(y, predict(X), weights), [W], nominal_batch_size=1
                )
                found.append((gradients.norms, weights is not None))
        return found

    each = make(reduction="none", **options)
    plain = np.linalg.norm(
        one_at_a_time(lambda x, y: each(y, predict(x)), [W], X, y), axis=1
    )
    for norms, weighted in step():
        expected = plain * weight if bool(weighted) else plain
        np.testing.assert_allclose(norms, expected, rtol=2e-5, atol=1e-7)


def test_weights_for_every_step():
    weight = tf.constant([[1.0, 2, 0, 0, 1, 1], [0] * 6, [1] * 6, [3] * 6, [0.5] * 6])

    def each(x, weights):
        return tf.reduce_mean(tf.abs(cube(x) - 0.3), 2) * weights

    def loss(x, weights):
        target = tf.fill(tf.shape(cube(x)), 0.3)
        return LOSSES.MeanAbsoluteError()(target, cube(x), sample_weight=weights)

    expected = reference_norms(
        lambda *xw: tf.reduce_mean(each(*xw), 1), SEQUENCE, weight
    )
    for dynamic in (True, False):
        found = norms_of(loss, SEQUENCE, weight, dynamic=dynamic)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


# What is set aside.


def shared_of(loss, variables, *data):
    @tf.function
    def step(*tensors):
        gradients = PerExampleGradients(loss(*tensors), variables)
        return gradients.norms, gradients.shared_gradients()

    norms, shared = step(*data)
    return norms.numpy(), flat(shared, variables)


PENALTIES = {
    "l2": lambda: 0.1 * tf.nn.l2_loss(W),
    "keras": lambda: tf.keras.regularizers.L1L2(0.1, 0.2)(W),
    "orthogonal": lambda: tf.keras.regularizers.OrthogonalRegularizer(0.1)(W),
    "scaled_for_replicas": lambda: tf.nn.scale_regularization_loss(tf.nn.l2_loss(W)),
    "two": lambda: tf.add_n([tf.nn.l2_loss(W), tf.reduce_sum(tf.abs(W))]),
}


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("per_example", [False, True], ids=["scalar", "vector"])
@pytest.mark.thinned(6)
def test_a_regulariser_is_nobodys_and_comes_back_exactly_once(name, per_example):
    penalty = PENALTIES[name]

    def loss(x):
        losses = vector(x)
        return (losses if per_example else tf.reduce_mean(losses)) + penalty()

    norms, shared = shared_of(loss, [W], X)
    np.testing.assert_allclose(norms, reference_norms(vector, X), rtol=1e-5)
    with tf.GradientTape() as tape:
        value = penalty()
    wanted = flat([tape.gradient(value, W)], [W])
    np.testing.assert_allclose(shared, wanted, rtol=1e-6, atol=1e-7)


def test_a_regulariser_inside_the_mean_is_nobodys_either():
    norms, shared = shared_of(
        lambda x: tf.reduce_mean(vector(x) + tf.nn.l2_loss(W)), [W], X
    )
    np.testing.assert_allclose(norms, reference_norms(vector, X), rtol=1e-5)
    np.testing.assert_allclose(shared, W.numpy().ravel(), rtol=1e-5)


@pytest.mark.slow
def test_a_learned_scale_of_the_loss_belongs_to_the_examples():
    """Uncertainty weighting: exp(-s) * loss + s, for two outputs."""
    s, t = tf.Variable(0.3), tf.Variable(-0.2)
    variables = [W, s, t]

    def weighted(first, second, penalty):
        return tf.exp(-s) * first + tf.exp(-t) * second + penalty

    def loss(x):
        first, second = tf.reduce_mean(vector(x)), tf.reduce_mean(vector(2 * x))
        return weighted(first, second, s + t)

    expected = one_at_a_time(
        lambda x: weighted(vector(x), vector(2 * x), 0.0), variables, X
    )
    norms, shared = shared_of(loss, variables, X)
    np.testing.assert_allclose(norms, np.linalg.norm(expected, axis=1), rtol=1e-5)
    np.testing.assert_array_equal(shared, [0.0] * 12 + [1.0, 1.0])


STOPPED = {
    "a learned scale": lambda x, s: tf.reduce_mean(stop(vector(x))) * s,
    "a stopped mean": lambda x, s: stop(tf.reduce_mean(vector(x))) * s,
    "a quotient": lambda x, s: stop(tf.reduce_mean(vector(x)) * s) / s,
    "a penalty": lambda x, s: stop(tf.reduce_mean(vector(x))) * tf.nn.l2_loss(s + W),
    "within": lambda x, s: stop(-tf.reduce_sum(vector(x) + s**2)) * s / tf_size(x),
}


def stop(tensor):
    return tf.stop_gradient(tensor)


def tf_size(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", STOPPED)
def test_what_is_stopped_has_a_gradient_for_what_multiplies_it(name):
    scale = tf.Variable(1.5)

    @tf.function(input_signature=[tf.TensorSpec([None, *X.shape[1:]])])
    def step(x):
        loss = tf.reduce_mean(vector(x)) + STOPPED[name](x, scale)
        found = PerExampleGradients(loss, [W, scale], nominal_batch_size=len(X))
        ours = found.weighted_sum(tf.ones(len(X)))
        return ours, found.shared_gradients(), tf.gradients(loss, [W, scale])

    sums, shared, expected = step(X)
    for ours, public, plain in zip(sums, shared, expected, strict=True):
        ours = ours / len(X) + (0 if public is None else public)
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_half_the_sum_of_squares_of_an_activation_is_per_example():
    """As tf.keras.regularizers.L2 gives for an activity regulariser."""

    def loss(x):
        return tf.reduce_mean(vector(x)) + tf.nn.l2_loss(x @ W) / batch_of(x)

    per_example = lambda x: vector(x) + tf.reduce_sum(tf.square(x @ W), 1) / 2  # noqa: E731
    assert_scaled(loss, per_example, X)


# Padding.


def present_of(loss, *data):
    @tf.function
    def step(*tensors):
        gradients = PerExampleGradients(loss(*tensors), [W])
        mask = gradients.mask(tf.ones_like(gradients.norms))
        return gradients.present, mask

    present, mask = step(*data)
    return present.numpy().tolist(), mask.numpy().tolist()


WEIGHT = tf.constant([1.0, 0.0, 2.0, 0.0, 0.5])
REAL = [True, False, True, False, True]


@pytest.mark.parametrize("reduction", ["none", "sum", "sum_over_batch_size"])
@pytest.mark.thinned(3)
def test_weight_zero_is_padding(reduction):
    loss = LOSSES.MeanSquaredError(reduction=reduction)
    present, mask = present_of(
        lambda x, w: loss(tf.zeros_like(x @ W), x @ W, sample_weight=w), X, WEIGHT
    )
    assert present == REAL
    assert mask == [float(real) for real in REAL]


def test_padding_by_weights_for_every_step():
    loss = LOSSES.MeanSquaredError()
    weights = WEIGHT[:, tf.newaxis] * tf.constant([0.0, 1, 0, 1, 1, 1])
    present, _ = present_of(
        lambda x, w: loss(tf.zeros_like(x @ W), x @ W, sample_weight=w),
        SEQUENCE,
        weights,
    )
    assert present == REAL


def test_an_example_of_weight_zero_in_one_term_only_is_real():
    present, mask = present_of(
        lambda x, w: (
            tf.reduce_mean(w * vector(x)) + tf.reduce_mean((2 - w) * vector(x))
        ),
        X,
        WEIGHT,
    )
    assert present == [True] * BATCH and mask == [1.0] * BATCH


def test_labels_that_multiply_a_term_are_no_padding_of_another():
    present, mask = present_of(
        lambda x, y: tf.reduce_mean(y * vector(x)) + tf.reduce_mean(vector(2 * x)),
        X,
        WEIGHT,
    )
    assert present == [True] * BATCH and mask == [1.0] * BATCH


def test_padding_may_hold_anything():
    """A padded example of weight 0 with NaN data changes nothing."""
    x = tf.tensor_scatter_nd_update(X, [[1]], [[np.nan] * 3])

    @tf.function
    def step(x, w):
        loss = tf.reduce_mean(w * vector(x))
        gradients = PerExampleGradients(loss, [W])
        ones = tf.ones_like(gradients.norms)
        return gradients.present, gradients.weighted_sum(gradients.mask(ones))

    present, (clean,) = step(X, WEIGHT)
    also, (total,) = step(x, WEIGHT)
    assert present.numpy().tolist() == also.numpy().tolist() == REAL
    np.testing.assert_array_equal(total, clean)


# Where the data come from.


def test_data_may_be_closed_over():
    expected = reference_norms(vector, X)

    def step_of(data, loss):
        return tf.function(lambda: per_example_norms(loss(tf.constant(data)), [W]))

    for data in (X.numpy(), X, X.numpy().tolist()):
        for loss in (vector, lambda x: tf.reduce_mean(vector(x))):
            np.testing.assert_allclose(step_of(data, loss)(), expected, rtol=1e-5)


@pytest.mark.slow
def test_labels_may_be_closed_over_and_inputs_passed():
    targets = tf.constant(randoms(BATCH, 4))

    def each(x, y):
        return tf.reduce_sum(tf.square(x @ W - y), 1)

    expected = reference_norms(each, X, targets)
    for y in (targets, targets.numpy()):
        found = norms_of(
            lambda x, y=y: tf.reduce_mean(each(x, tf.constant(y))), X, dynamic=False
        )
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_mixed_batch_that_is_closed_over_is_still_refused():
    with pytest.raises((*REFUSALS, tf.errors.InvalidArgumentError)):
        tf.function(
            lambda: (
                per_example_norms(
                    squash(tf.constant(X.numpy()) @ W - tf.reduce_mean(X @ W, 0)), [W]
                )
                + per_example_norms(
                    squash((h := tf.constant(X.numpy()) @ W) - tf.reduce_mean(h, 0)),
                    [W],
                )
            )
        )()


@pytest.mark.slow
def test_inside_loops_branches_and_functions():
    expected = reference_norms(vector, X)

    def norms(x):
        return per_example_norms(tf.reduce_mean(vector(x)), [W])

    @tf.function
    def in_a_loop(x):
        start = tf.zeros([tf.shape(x)[0]])
        body = lambda i, found: (i + 1, tf.ensure_shape(norms(x), found.shape))  # noqa: E731
        return tf.while_loop(lambda i, _: i < 2, body, (0, start))[1]

    @tf.function
    def in_a_branch(x):
        return tf.cond(tf.size(x) > 2, lambda: norms(x), lambda: x[:, 0])

    nested = tf.function(lambda x: tf.function(norms)(x))
    for step in (in_a_loop, in_a_branch, nested):
        np.testing.assert_allclose(step(X), expected, rtol=1e-5)
        np.testing.assert_allclose(step(X[:2]), expected[:2], rtol=1e-5)


@pytest.mark.slow
def test_batches_from_an_iterator_inside_the_function():
    dataset = tf.data.Dataset.from_tensor_slices((X, X[:, 0])).batch(2)

    @tf.function
    def steps(iterator):
        found = tf.TensorArray(tf.float32, 0, True, infer_shape=False)
        for i in tf.range(3):
            x, y = next(iterator)
            loss = tf.reduce_mean(vector(x) * tf.exp(y))
            found = found.write(i, per_example_norms(loss, [W]))
        return found.concat()

    expected = reference_norms(lambda x: vector(x) * tf.exp(x[:, 0]), X)
    np.testing.assert_allclose(steps(iter(dataset)), expected, rtol=1e-5)


def test_a_vector_from_a_function_falls_back():
    """Its graph cannot be read, but its Jacobian can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JacobianFallbackWarning)
        found = norms_of(lambda x: tf.function(vector)(x), X)
    np.testing.assert_allclose(found, reference_norms(vector, X), rtol=1e-5)


SELECTED = {
    "largest": lambda x: tf.reduce_sum(tf.math.top_k(vector(x), 2)[0]),
    "mean_of_the_largest": lambda x: tf.reduce_mean(tf.math.top_k(vector(x), 2)[0]),
    "largest_alone": lambda x: tf.math.top_k(vector(x), 2)[0],
    "half": lambda x: tf.reduce_sum(tf.math.top_k(vector(x), tf.shape(x)[0] // 2)[0]),
    "sorted": lambda x: tf.reduce_sum(tf.sort(vector(x))[-2:]),
}


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", SELECTED)
def test_the_largest_losses_of_a_batch_are_refused_by_name(name, dynamic):
    with pytest.raises(ExampleIsolationError, match="TopKV2.*which of them are chosen"):
        norms_of(SELECTED[name], X, dynamic=dynamic)


def test_the_largest_entries_of_an_example_are_its_own():
    def per_example(x):
        return tf.reduce_sum(tf.math.top_k(entries(x), 2)[0], axis=1)

    norms = norms_of(per_example, SEQUENCE)
    np.testing.assert_allclose(norms, reference_norms(per_example, SEQUENCE), rtol=1e-5)


def test_a_histogram_of_the_batch_is_refused_by_name():
    """As Keras 3 makes one in its layer Equalization."""

    def per_example(x):
        counts = tf.math.bincount(tf.reshape(tf.cast(tf.abs(x), tf.int32), [-1]))
        return vector(x * tf.cast(counts[0], tf.float32))

    with pytest.raises(ExampleIsolationError, match="incount.*RandAugment"):
        norms_of(per_example, X)
