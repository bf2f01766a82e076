"""Losses over sampled classes: exact where the classes are nobody's, refused if not."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import integers, randoms, variable
from tfdpclip.gradients import ExampleIsolationError, PerExampleGradients

pytestmark = pytest.mark.every_check

CLASSES, WIDTH, BATCH = 20, 4, 6
KERNEL, TABLE, BIAS = variable(3, WIDTH), variable(CLASSES, WIDTH), variable(CLASSES)
VARIABLES = [KERNEL, TABLE, BIAS]
X = randoms(BATCH, 3)
SOFTMAX, NCE = tf.nn.sampled_softmax_loss, tf.nn.nce_loss


def drawn(sampler, **options):
    def sampled(labels, count):
        given = (labels, labels.shape[1], count, True, CLASSES)
        return sampler(*given, seed=5, **options)

    return sampled


def of_all(labels, count):
    return tf.random.all_candidate_sampler(labels, labels.shape[1], count, True, seed=5)


def of_the_batch(labels, count):
    number = tf.shape(labels)[0]
    return labels[:, 0], tf.ones([number, 1]), tf.ones([number])


SAMPLERS = {
    "the_default": lambda labels, count: None,
    "uniform": drawn(tf.random.uniform_candidate_sampler),
    "log_uniform": drawn(tf.random.log_uniform_candidate_sampler),
    "fixed": drawn(
        tf.random.fixed_unigram_candidate_sampler, unigrams=list(range(1, CLASSES + 1))
    ),
    "all": of_all,
}
LEARNED = drawn(tf.random.learned_unigram_candidate_sampler)


def step_of(loss, sampler, *, labels, count, dynamic, remove_hits, when="always"):
    lead = None if dynamic else len(labels)
    signature = [
        tf.TensorSpec([lead, 3]),
        tf.TensorSpec([lead, labels.shape[1]], labels.dtype),
    ]

    @tf.function(input_signature=signature, autograph=False)
    def step(x, y):
        losses = loss(
            TABLE,
            BIAS,
            y,
            tf.tanh(x @ KERNEL),
            count,
            CLASSES,
            num_true=y.shape[1],
            sampled_values=sampler(tf.cast(y, tf.int64), count),
            remove_accidental_hits=remove_hits,
        )
        made = PerExampleGradients(losses, VARIABLES, check_gradients=when)
        alone = [tf.gradients(losses[i], VARIABLES) for i in range(len(labels))]
        alone = [[tf.convert_to_tensor(g) for g in found] for found in alone]
        return made.norms, made.materialized(), list(zip(*alone, strict=True))

    return step


# (loss, sampler, labels of an example, sampled classes, dynamic, remove hits).
CASES = {
    "softmax": (SOFTMAX, "the_default", 1, 8, True, True),
    "softmax_static": (SOFTMAX, "log_uniform", 1, 8, False, True),
    "softmax_as_many_as_examples": (SOFTMAX, "uniform", 1, BATCH, False, True),
    "softmax_with_hits": (SOFTMAX, "uniform", 1, 8, True, False),
    "softmax_two_labels": (SOFTMAX, "fixed", 2, 8, True, True),
    "softmax_all": (SOFTMAX, "all", 1, CLASSES, True, True),
    "nce": (NCE, "the_default", 1, 8, True, False),
    "nce_static": (NCE, "uniform", 2, 8, False, True),
    "nce_without_hits": (NCE, "fixed", 1, 8, True, True),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_classes_that_are_nobodys_give_exact_gradients(name):
    loss, sampler, width, count, dynamic, remove_hits = CASES[name]
    # There are so few classes that the sampled classes include some of the labels.
    labels = integers(BATCH, width, below=CLASSES)
    step = step_of(
        loss,
        SAMPLERS[sampler],
        labels=tf.cast(labels, tf.int64),
        count=count,
        dynamic=dynamic,
        remove_hits=remove_hits,
    )
    norms, found, alone = step(X, tf.cast(labels, tf.int64))
    squares = 0
    for one, expected in zip(found, alone, strict=True):
        expected = tf.stack(expected).numpy()
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-7)
        squares += np.sum(np.square(expected), axis=tuple(range(1, expected.ndim)))
    np.testing.assert_allclose(norms, np.sqrt(squares), rtol=1e-5)


@pytest.mark.parametrize("remove_hits", [True, False], ids=["removed", "kept"])
@pytest.mark.parametrize("sampler", [LEARNED, of_the_batch], ids=["learned", "batch"])
@pytest.mark.parametrize("loss", [SOFTMAX, NCE], ids=["softmax", "nce"])
@pytest.mark.thinned(3)
def test_classes_that_were_labels_are_refused(loss, sampler, remove_hits):
    labels = tf.cast(integers(BATCH, 1, below=CLASSES), tf.int64)
    step = step_of(
        loss,
        sampler,
        labels=labels,
        count=BATCH,
        dynamic=True,
        remove_hits=remove_hits,
    )
    errors = ExampleIsolationError, tf.errors.InvalidArgumentError
    with pytest.raises(errors, match="Isolation|examples") as caught:
        step(X, labels)
    if sampler is LEARNED:
        assert isinstance(caught.value, ExampleIsolationError)
        assert "tf.random.log_uniform_candidate_sampler" in str(caught.value)


def test_hits_of_other_examples_are_refused():
    """Each example's logits lose the accidental hits of the previous example."""
    labels = tf.cast(integers(BATCH, 1, below=CLASSES), tf.int64)
    signature = [tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1], tf.int64)]

    @tf.function(input_signature=signature, autograph=False)
    def step(x, y):
        sampled, _, _ = SAMPLERS["uniform"](y, 8)
        rows, places, weights = tf.nn.compute_accidental_hits(y, sampled, 1)
        number = tf.shape(x, tf.int64)[0]
        rows = (tf.cast(rows, tf.int64) + 1) % number
        hits = tf.scatter_nd(
            tf.stack([rows, places], 1), weights, tf.stack([number, 8])
        )
        logits = tf.tanh(x @ KERNEL) @ tf.transpose(tf.gather(TABLE, sampled)) + hits
        losses = tf.reduce_logsumexp(logits, axis=1)
        return PerExampleGradients(losses, [KERNEL, TABLE]).norms

    with pytest.raises(ExampleIsolationError, match="combines the examples"):
        step(X, labels)
