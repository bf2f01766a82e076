"""Lower bounds on epsilon: never above the truth, and close to it where possible."""

import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tfdpclip as dpc
from tests.diagnostics.plots import check_picture
from tests.properties import nasty
from tests.testing.many_runs import many_runs_lower_bound
from tfdpclip import testing
from tfdpclip.accounting import PrivacyMismatchError
from tfdpclip.testing import one_run_lower_bound
from tfdpclip.testing.lower_bounds import _densest


def randomised_response(epsilon, canaries, rng):
    """Scores of a mechanism that is exactly epsilon-private."""
    keep = rng.random(canaries) < 1 / (1 + math.exp(-epsilon))

    def train(included):
        return np.where(keep, included, ~included) + 0.1 * rng.random(canaries)

    return train


@pytest.mark.thinned(3)
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_a_true_claim_is_refuted_no_more_often_than_stated(epsilon):
    rng = np.random.default_rng(1)
    refuted = 0
    for _ in range(300):
        train = randomised_response(epsilon, 200, rng)
        report = testing.audit(train, 200, delta=0.0, claimed=epsilon, confidence=0.95)
        refuted += report.refuted
    # Binomial(300, 0.05) exceeds 40 with probability 1e-8.
    assert refuted <= 40


def test_bound_is_close_for_a_mechanism_as_bad_as_claimed():
    train = randomised_response(3.0, 4000, np.random.default_rng(2))
    report = testing.audit(train, 4000, delta=0.0, claimed=3.0)
    assert 2.5 < report.lower_bound <= 3.2
    assert str(report.canaries) in str(report) and "claimed: 3" in str(report)


def test_a_report_draws_whose_scores_are_whose(tmp_path):
    train = randomised_response(3.0, 2000, np.random.default_rng(4))
    report = testing.audit(train, 2000, delta=0.0, claimed=1.0, seed=5)
    figure = report.plot(tmp_path / "scores.png")
    check_picture(figure, tmp_path / "scores.png", labels=1)
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    inside = int(report.included.sum())
    assert legend == [f"not in the data: {2000 - inside}", f"in the data: {inside}"]
    # Included examples score higher, as the attack scores them.
    assert (
        report.scores[report.included].mean() > report.scores[~report.included].mean()
    )
    assert "array" not in repr(report)
    with pytest.raises(ValueError, match=r"dpc\.testing\.audit"):
        dataclasses.replace(report, scores=None).plot()


def test_too_small_a_claim_is_refuted():
    train = randomised_response(3.0, 2000, np.random.default_rng(3))
    assert testing.audit(train, 2000, delta=1e-5, claimed=1.0).refuted


def test_an_audit_that_cannot_fail_is_refused():
    def train(included):
        raise AssertionError("trained")

    with pytest.raises(ValueError, match="40 canaries cannot refute") as raised:
        testing.audit(train, 40, delta=1e-5, claimed=4.0)
    # The advice is followed: canaries whose inclusion is released refute the claim.
    assert "Give 640 canaries" in str(raised.value)
    report = testing.audit(lambda i: i * 1.0, 640, delta=1e-5, claimed=4.0)
    assert report.refuted
    with pytest.raises(ValueError, match="many more canaries"):
        testing.audit(train, 40, delta=1e-5, claimed=30.0)
    assert not testing.audit(lambda i: i * 1.0, 40, delta=0.1, claimed=math.inf).refuted
    assert testing.audit(lambda i: i * 1.0, 40, delta=1e-5).lower_bound > 0.5


@pytest.mark.parametrize("kind", ["float32", "object"])
def test_a_canary_is_there_once(kind):
    model = small_model(inputs=30)
    rng = np.random.default_rng(8)
    x, y = rng.normal(size=(40, 30)).astype(kind), rng.normal(size=(40, 1)).astype(kind)

    def audit(data, canaries):
        testing.audit_keras(model, data, canaries, fit=lambda d, w: None, delta=1e-5)

    with pytest.raises(ValueError, match="20 of 20 canaries are among the data"):
        audit((x, y), (x[:20], y[:20]))
    with pytest.raises(ValueError, match="1 of 21 canaries repeat"):
        audit((x[30:], y[30:]), (x[[*range(20), 3]], y[[*range(20), 3]]))
    # Records with an equal input and a different label are different.
    with pytest.raises(ValueError, match="second argument"):
        audit((x, y + 1), (x[:20], y[:20]))


def small_model(noise_multiplier=1.0, inputs=60, optimizer=None):
    model = tf.keras.Sequential([tf.keras.Input((inputs,)), tf.keras.layers.Dense(1)])
    optimizer = optimizer or dpc.keras.DPSGD(
        0.1, clip=1.0, noise_multiplier=noise_multiplier, expected_batch_size=20
    )
    model.compile(optimizer, "mse")
    return model


def test_a_model_of_a_plan_is_audited_and_its_steps_are_not_forgotten():
    plan = dpc.keras.PrivacyPlan(3, 1e-4, examples=70, batch_size=35, epochs=1)
    model = small_model(optimizer=plan.optimizer(dpc.keras.DPSGD, 0.1))
    assert audit_small(model).guesses > 0
    with pytest.raises(PrivacyMismatchError, match="steps of this plan's optimizers"):
        plan.statement()


def audit_small(model, trained=None, canaries=60):
    rng = np.random.default_rng(9)
    x = rng.normal(size=(canaries + 10, model.input_shape[1])).astype(np.float32)
    y = rng.choice([-50.0, 50.0], (canaries + 10, 1)).astype(np.float32)

    def fit(data, watch):
        (trained or model).fit(*data, batch_size=200, verbose=0, callbacks=[watch])

    return testing.audit_keras(
        model,
        (x[canaries:], y[canaries:]),
        (x[:canaries], y[:canaries]),
        fit=fit,
        delta=1e-5,
        claimed=1.0,
    )


def test_canaries_that_cannot_be_told_apart_are_refused():
    with pytest.raises(ValueError, match="at most the trainable parameters .*, 6, got"):
        audit_small(small_model(inputs=5))


def test_the_audited_model_is_trained():
    with pytest.raises(ValueError, match="a different model"):
        audit_small(small_model(), small_model())


def test_a_claim_that_is_not_refuted_may_be_a_weak_attack():
    assert "hundredth of the noise" in str(audit_small(small_model(100.0)))
    refuted = audit_small(small_model(0.001, inputs=600))
    assert refuted.refuted and "hundredth" not in str(refuted)


@pytest.mark.slow
def test_one_run_bound_solves_its_equation():
    bound = one_run_lower_bound(180, 200, 1000, 1e-6, confidence=0.99)
    right = 1 / (1 + math.exp(-bound))
    tail = stats.binom.sf(179, 200, right)
    extra = max(
        sum(stats.binom.pmf(180 - j, 200, right) for j in range(1, i + 1)) / i
        for i in range(1, 181)
    )
    assert tail + 2 * 1000 * 1e-6 * extra == pytest.approx(0.01, rel=1e-5)
    assert one_run_lower_bound(180, 200, 1000, 1e-3, 0.99) < bound
    assert one_run_lower_bound(0, 0, 10, 0.0) == 0.0


@pytest.mark.parametrize("guesses, right", [(1, 0.5), (60, 0.5), (60, 0.9), (60, 1.0)])
def test_densest_window_is_that_of_a_search_of_all(guesses, right):
    for correct in range(1, guesses + 1):
        windows = range(1, correct + 1)
        below = [stats.binom.pmf(correct - i, guesses, right) for i in windows]
        densest = max(sum(below[:i]) / i for i in windows)
        assert _densest(correct, guesses, right) == pytest.approx(densest, abs=1e-12)


def test_audit_of_millions_of_canaries_ends():
    with nasty.deadline(20):
        report = testing.audit(lambda i: i * 1.0, 6_556_005, delta=1e-5)
    assert 4 < report.lower_bound < 10


def test_many_runs_bound_for_gaussians():
    rng = np.random.default_rng(4)
    inside, outside = rng.normal(3.0, 1.0, 4000), rng.normal(0.0, 1.0, 4000)
    bound = many_runs_lower_bound(inside, outside, 1e-5)
    true = dpc.accounting.event_epsilon(dpc.sampling.FullBatch().event(1 / 3, 1), 1e-5)
    assert 2.0 < bound < true


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: one_run_lower_bound(3, 2, 10, 0.0), "correct"),
        (lambda: one_run_lower_bound(1, 20, 10, 0.0), "canaries"),
        (lambda: one_run_lower_bound(1, 2, 10, math.nan), "delta"),
        (lambda: one_run_lower_bound(1, 2, 10, 0.0, 1.0), "confidence"),
        (lambda: testing.audit(lambda i: i, 3, delta=0.0), "canaries"),
        (lambda: testing.audit(lambda i: i[:-1], 20, delta=0.0), "train"),
        (lambda: testing.audit(lambda i: i * np.nan, 20, delta=0.0), "NaN"),
    ],
)
def test_bad_input_is_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()


def keras_audit(noise_multiplier, canaries=1000, epochs=1, **options):
    rng = np.random.default_rng(5)
    size = 2 * canaries
    model = tf.keras.Sequential(
        [tf.keras.Input((size,)), tf.keras.layers.Dense(1, use_bias=False)]
    )
    model.compile(
        dpc.keras.DPSGD(
            1e-3,
            clip=1.0,
            noise_multiplier=noise_multiplier,
            expected_batch_size=100,
            **options,
        ),
        "mse",
    )

    def fit(data, watch):
        batches = dpc.sampling.FullBatch().batches(data)
        model.optimizer._expected_batch_size = None  # known only now; for the check
        model.fit(batches, epochs=epochs, verbose=0, callbacks=[watch])

    inputs = (np.eye(size)[:canaries] * 5).astype(np.float32)
    labels = rng.choice([-50.0, 50.0], (canaries, 1)).astype(np.float32)
    empty = np.zeros((0, size), np.float32), np.zeros((0, 1), np.float32)
    return testing.audit_keras(
        model, empty, (inputs, labels), fit=fit, delta=1e-10, confidence=0.999999
    )


@pytest.mark.slow
def test_keras_audit_stays_below_the_claim_and_finds_missing_noise():
    # False alarm: 1e-6.
    def claim(z):
        sampling = dpc.sampling.FullBatch()
        return dpc.accounting.epsilon(z, steps=1, sampling=sampling, delta=1e-10)

    assert 0.3 < keras_audit(1.0).lower_bound <= claim(1.0)
    # A thirtieth of the noise that z = 3 stands for: that claim is refuted.
    assert keras_audit(0.1).lower_bound > claim(3.0)
