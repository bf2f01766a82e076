"""The quantile estimate, driven by real Keras optimizers.

The model has a single weight and the loss x * w, so a record's gradient norm is |x|.
"""

import json
import math
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD, OPTIMIZERS, DPAdam, mostly_slow
from tfdpclip.clipping import QuantileClip

pytestmark = pytest.mark.unchecked

_FILE = pathlib.Path(__file__).parents[1] / "data" / "clipping_cases.json"
CASES = {
    case["name"]: case
    for case in json.loads(_FILE.read_text())["cases"]
    if case["name"].startswith("fig2/")
}
# The three distributions, and quantiles on either side of the median.
QUICK = [
    "fig2/N(0,1)/gamma=0.3",
    "fig2/N(0,0.1) std=0.1/gamma=0.1",
    "fig2/N(0,0.1) var=0.1/gamma=0.9",
    "fig2/N(log10,1)/gamma=0.1",
    "fig2/N(log10,1)/gamma=0.5",
]


class Datum(tf.keras.Model):
    """A single weight w; the prediction is x * w."""

    def __init__(self):
        super().__init__()
        self.w = self.add_weight(name="w", shape=[])

    def call(self, x):
        return x * self.w


def prediction(y, p):
    return p[:, 0]


def fit(rule, data, *, batch, kind=DPSGD, noise_multiplier=1.0, k=1, **options):
    """Trains on `data`, in order; returns the clip norm after every epoch of it."""
    optimizer = kind(
        1e-3,
        clip=rule,
        noise_multiplier=noise_multiplier,
        expected_batch_size=batch * k,
        accumulation_steps=k,
    )
    model = Datum()
    model.compile(optimizer, prediction, **options)
    data = np.asarray(data, np.float32)[:, np.newaxis]
    model.fit(data, data, batch_size=batch, shuffle=False, verbose=0)
    return float(optimizer.clip_norm)


@pytest.mark.parametrize("name", mostly_slow(QUICK, CASES))
@pytest.mark.slow
def test_the_estimate_tracks_a_log_normal_quantile(name):
    """False-alarm rate 1e-9 each: the bound is that quantile of the exact error."""
    inputs, expected = CASES[name]["inputs"], CASES[name]["expected"]
    rng = np.random.default_rng()
    count = inputs["m"] * inputs["rounds"]
    data = np.exp(inputs["mu"] + inputs["s"] * rng.standard_normal(count))
    rule = QuantileClip(
        inputs["gamma"], inputs["C0"], inputs["eta"], count_stddev=inputs["sigma_b"]
    )
    found = fit(rule, data, batch=inputs["m"], steps_per_execution=20)
    error = math.log(found / expected["true_quantile"])
    assert abs(error) < expected["abs_bound_1e9"]


# With noise of stddev 5 in 100 on the counts, the stationary error of ln C has a
# standard deviation below 0.05, and the test allows 8 of these: a false alarm in 1e-15.


@pytest.mark.parametrize("initial", [0.01, 100.0])
@pytest.mark.parametrize("target", mostly_slow([0.1, 0.9], [0.1, 0.5, 0.9]))
@pytest.mark.slow
def test_the_sign_of_the_update_is_right_from_below_and_from_above(initial, target):
    """A bit that means "clipped" in place of "within" would run away from 1."""
    data = np.random.default_rng(1).lognormal(0, 0.1, 100 * 200)
    rule = QuantileClip(target, initial, 0.5)
    found = fit(rule, data, batch=100, steps_per_execution=20)
    true = math.exp(0.1 * {0.1: -1.2816, 0.5: 0, 0.9: 1.2816}[target])
    assert abs(math.log(found / true)) < 0.4


@pytest.mark.parametrize("name", mostly_slow(["adam", "nadam"], OPTIMIZERS))
def test_every_optimizer_adapts_alike(name):
    """Noise off: the clip norms are a function of the data alone."""
    data = np.random.default_rng(2).lognormal(0, 1, 10 * 20)
    rule = QuantileClip(0.5, 0.1, 0.5)
    found = fit(rule, data, batch=20, kind=OPTIMIZERS[name], noise_multiplier=0)
    assert found == pytest.approx(by_hand(rule, data.reshape(10, 20), 20), rel=1e-4)


def by_hand(rule, batches, expected):
    clip_norm = rule.initial_norm
    for batch in batches:
        bits = np.where(np.abs(batch) <= clip_norm, 0.5, -0.5)
        error = np.clip(bits.sum() / expected + 0.5, 0, 1) - rule.target_quantile
        if rule.update == "geometric":
            clip_norm *= math.exp(-rule.learning_rate * error)
        else:
            clip_norm = max(clip_norm - rule.learning_rate * error, 1e-12)
    return clip_norm


@pytest.mark.parametrize("update", ["geometric", "linear"])
@pytest.mark.parametrize("jit", mostly_slow([False], [False, True]))
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.thinned(3)
def test_the_fraction_is_of_the_whole_logical_batch(update, jit, k):
    data = np.random.default_rng(3).lognormal(0, 1, 6 * 20)
    rule = QuantileClip(0.3, 0.5, 0.2, update=update)
    found = fit(rule, data, batch=20 // k, k=k, noise_multiplier=0, jit_compile=jit)
    assert found == pytest.approx(by_hand(rule, data.reshape(6, 20), 20), rel=1e-4)


def test_the_fraction_is_divided_by_the_public_number_of_records():
    """Three records came and ten were expected."""
    data = np.array([0.01, 0.02, 9.0])
    rule = QuantileClip(0.5, 0.1, 1.0)
    optimizer = DPSGD(1.0, clip=rule, noise_multiplier=0, expected_batch_size=10)
    model = Datum()
    model.compile(optimizer, prediction)
    data = np.asarray(data, np.float32)[:, np.newaxis]
    model.train_on_batch(data, data)
    fraction = (0.5 + 0.5 - 0.5) / 10 + 0.5
    assert float(optimizer.clip_norm) == pytest.approx(
        0.1 * math.exp(-(fraction - 0.5)), rel=1e-5
    )


def test_padding_counts_as_neither_and_a_zero_gradient_as_within():
    rule = QuantileClip(0.5, 0.1, 1.0)
    optimizer = DPSGD(1.0, clip=rule, noise_multiplier=0, expected_batch_size=10)
    model = Datum()

    def shifted(y, p):
        return p[:, 0] + 1.0  # not zero where the gradient is

    model.compile(optimizer, shifted)
    x = np.array([[0.0], [5.0], [0.0], [7.0]], np.float32)
    weight = np.array([1.0, 1.0, 0.0, 0.0], np.float32)
    model.train_on_batch(x, x, sample_weight=weight)
    assert float(optimizer.clip_norm) == pytest.approx(0.1, rel=1e-5)
    model.train_on_batch(x, x, sample_weight=weight[::-1].copy() * 0)
    assert float(optimizer.clip_norm) == pytest.approx(0.1, rel=1e-5)
    model.train_on_batch(x, x, sample_weight=np.array([1, 0, 1, 0], np.float32))
    assert float(optimizer.clip_norm) == pytest.approx(0.1 * math.exp(-0.1), rel=1e-5)


@pytest.mark.slow
def test_the_count_gets_its_own_noise():
    """q = 0.5 and no records: ln C moves by lr * N(0, s) / B.

    1000 steps of stddev 0.2 * 5 / 100: a standard deviation to 6 / sqrt(2000), 2e-9.
    """
    rule = QuantileClip(0.5, 1.0, 0.2, count_stddev=5.0)
    optimizer = DPSGD(0.0, clip=rule, noise_multiplier=1.0, expected_batch_size=100)
    w = tf.Variable(0.0)

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(x):
        optimizer.minimize(x * w, [w])
        return optimizer.clip_norm

    logs = [0.0] + [math.log(float(step(tf.zeros([0])))) for _ in range(1000)]
    moves = np.diff(logs) / (0.2 * 5 / 100)
    assert np.std(moves) == pytest.approx(1.0, rel=6 / math.sqrt(2000))
    assert abs(np.corrcoef(moves[1:], moves[:-1])[0, 1]) < 6 / math.sqrt(1000)


def test_the_default_clip_follows_a_quantile_and_can_be_watched():
    optimizer = DPAdam(noise_multiplier=1.0, expected_batch_size=64)
    assert optimizer.clip == QuantileClip(
        0.65, initial_norm=1.0, normalize=True, minimum_norm=0.1
    )
    assert float(optimizer.clip_norm) == pytest.approx(1.0)
    assert optimizer.count_stddevs == (64 / 20,)


@pytest.mark.slow
def test_batches_of_eight_train_with_the_default_and_both_noises_are_of_the_split():
    """Andrew et al.'s B / 20 would reveal more than z = 1 allows below B = 10.

    1000 steps without records. Fractions are 1/2 plus noise; a mean and two standard
    deviations to six of their own, 2e-9 each.
    """
    optimizer = DPSGD(1.0, noise_multiplier=1.0, expected_batch_size=8)
    [stddev], z_g = optimizer.count_stddevs, optimizer.gradient_noise_multiplier
    assert z_g**-2 + (2 * stddev) ** -2 == pytest.approx(1.0, rel=1e-12)
    assert z_g == pytest.approx(math.sqrt(2), rel=1e-12)
    w = tf.Variable(0.0)

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(x):
        before = tf.identity(w)
        optimizer.minimize(x * w, [w])
        return w - before, optimizer.clip_norm

    steps = [step(tf.zeros([0])) for _ in range(1000)]
    moves, clips = np.float64(steps).T
    assert np.std(moves) == pytest.approx(z_g / 8, rel=6 / math.sqrt(2000))
    # Half of none is below 0.65, so that the clip norm rises, from 1.
    fractions = 0.65 - np.diff(np.log([1.0, *clips])) / 0.2
    assert np.mean(fractions) == pytest.approx(0.5, abs=6 * stddev / 8 / 1000**0.5)
    assert np.std(fractions) == pytest.approx(stddev / 8, rel=6 / math.sqrt(2000))
