"""Losses in which examples have no share of their own are refused by name."""

import pytest
import tensorflow as tf

from tests.gradients.cases import SEQUENCE, X, squash, variable
from tests.gradients.losses import (
    NOMINAL,
    REFUSALS,
    W,
    batch_of,
    entries,
    norms_of,
    vector,
)
from tfdpclip.gradients import (
    ExampleIsolationError,
    LossStructureError,
    per_example_norms,
)

HIDDEN = pytest.mark.xfail(strict=True, reason="constants hide a static batch size")


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
    with pytest.raises(LossStructureError, match="reduction='none'|axis=-1 in both"):
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


def test_a_histogram_of_the_batch_is_refused_by_name():
    """The histogram of Keras 3's layer Equalization."""

    def per_example(x):
        counts = tf.math.bincount(tf.reshape(tf.cast(tf.abs(x), tf.int32), [-1]))
        return vector(x * tf.cast(counts[0], tf.float32))

    with pytest.raises(ExampleIsolationError, match="counts the values of all"):
        norms_of(per_example, X)
