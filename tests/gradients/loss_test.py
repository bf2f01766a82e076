"""Taking a loss apart: each example's share, however the loss is written."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import BATCH, SEQUENCE, X, one_at_a_time, randoms, squash
from tests.gradients.losses import (
    LOSSES,
    NOMINAL,
    REFUSALS,
    W,
    assert_scaled,
    batch_of,
    cube,
    entries,
    norms_of,
    reference_norms,
    steps_of,
    vector,
)
from tests.keras.helpers import mostly_slow
from tests.stack import MEAN
from tfdpclip.clipping import FixedClip
from tfdpclip.gradients import (
    JacobianFallbackWarning,
    LossStructureError,
    OneByOneWarning,
    PerExampleGradients,
    clipped_sum,
    per_example_norms,
)

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


# Sums: scaled by the public batch size if there is one, never by the actual size.

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
    """Otherwise adding an example would scale every gradient before the clip."""
    loss = MEANS[name] if name in MEANS else SUMS[name][0]

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        return per_example_norms(loss(x), [W], nominal_batch_size=NOMINAL)

    every = step(X)
    for count in (1, BATCH - 1):
        np.testing.assert_allclose(step(X[:count]), every[:count], rtol=1e-5)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_clipped_with_a_public_batch_size_only(name, dynamic):
    """B times its share, an example's gradient would grow with every other example."""
    loss, _ = SUMS[name]
    spec = tf.TensorSpec([None if dynamic else BATCH, 3])

    def clipped(**options):
        @tf.function(input_signature=[spec], autograph=False)
        def step(x):
            return clipped_sum(loss(x), [W], FixedClip(1.0), **options)

        return step(X)

    with pytest.raises(LossStructureError, match="nominal_batch_size"):
        clipped()
    sums, _ = clipped(nominal_batch_size=NOMINAL)
    assert sums[0].shape == W.shape


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


# Where the data come from.


def test_data_may_be_closed_over():
    expected = reference_norms(vector, X)

    def step_of(data, loss):
        return tf.function(lambda: per_example_norms(loss(tf.constant(data)), [W]))

    for data in (X.numpy(), X, X.numpy().tolist()):
        for loss in (vector, lambda x: tf.reduce_mean(vector(x))):
            np.testing.assert_allclose(step_of(data, loss)(), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.every_check
def test_labels_that_are_closed_over_beside_passed_inputs_are_refused():
    """A constant may hold a number for each place, which is no data of an example."""
    targets = tf.constant(randoms(BATCH, 4))

    def each(x, y):
        return tf.reduce_sum(tf.square(x @ W - y), 1)

    for y in (targets, targets.numpy()):
        with (
            pytest.warns(OneByOneWarning, match="each entry of a constant"),
            pytest.raises(tf.errors.InvalidArgumentError, match="Make labels"),
        ):
            norms_of(
                lambda x, y=y: tf.reduce_mean(each(x, tf.constant(y))),
                X,
                dynamic=False,
            )
    expected = reference_norms(each, X, targets)
    passed = norms_of(
        lambda x, y: tf.reduce_mean(each(x, y)), X, targets, dynamic=False
    )
    np.testing.assert_allclose(passed, expected, rtol=1e-5)


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


def test_the_largest_entries_of_an_example_are_its_own():
    def per_example(x):
        return tf.reduce_sum(tf.math.top_k(entries(x), 2)[0], axis=1)

    norms = norms_of(per_example, SEQUENCE)
    np.testing.assert_allclose(norms, reference_norms(per_example, SEQUENCE), rtol=1e-5)
