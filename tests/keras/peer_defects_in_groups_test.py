"""Faults seen in other libraries, where groups or batches could repeat them."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD, DPRecorder, L, flat, some_data
from tfdpclip.clipping import LayerwiseClip, PublicNormClip, QuantileClip, ScaledClip

E = {"one": 3.0, "two": 0.5}


def two_scalars():
    return [tf.Variable(tf.zeros([1]), name=f"{n}/w") for n in ("one", "two")]


ADAPTIVE = {
    "layerwise": lambda base: LayerwiseClip(base),
    "public": lambda base: PublicNormClip(base, norms=E),
    "scaled": lambda base: ScaledClip(E, base),
}
adaptive = pytest.mark.parametrize("make", ADAPTIVE.values(), ids=ADAPTIVE)


def step_of(optimizer, variables):
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def step(x):
        loss = x[:, 0] * variables[0][0] + x[:, 1] * variables[1][0]
        optimizer.minimize(loss, variables)

    return step


@adaptive
@pytest.mark.parametrize("start", [0.01, 100.0])
@pytest.mark.slow
def test_no_groups_clip_norm_runs_away_from_the_median(make, start):
    """A bit of the wrong sign is positive feedback: to 0 or to infinity."""
    variables = two_scalars()
    optimizer = DPSGD(
        0.0,
        clip=make(QuantileClip(0.5, start, 0.5)),
        noise_multiplier=0,
        expected_batch_size=4,
    )
    step = step_of(optimizer, variables)
    x = np.tile(np.float32([[3.0, 0.5]]), (4, 1))
    norms = []
    for _ in range(60):
        step(x)
        norms.append(float(tf.nest.flatten(optimizer.clip_state)[0].numpy().max()))
    assert 0.5 < norms[-1] < 20
    assert max(norms[-10:]) / min(norms[-10:]) < 2


@adaptive
@pytest.mark.slow
def test_the_noise_of_a_group_is_scaled_by_the_clip_that_clipped(make):
    """A step moves every clip by exp(-5); six standard errors, 2e-9 each."""
    variables = [tf.Variable(tf.zeros([20_000]), name=f"{n}/w") for n in E]
    base = QuantileClip(0.0, 1.0, 5.0, count_stddev=100.0)
    optimizer = DPRecorder(
        clip=make(base), noise_multiplier=1.0, expected_batch_size=1e6
    )
    step = step_of(optimizer, variables)
    optimizer.build(variables)
    scales = optimizer.clip.noise_scales(optimizer.clip_state).numpy()
    multiplier = optimizer.gradient_noise_multiplier
    step(tf.zeros([2, 2]))
    assert np.all(optimizer.clip.noise_scales(optimizer.clip_state) < 0.1 * scales)
    for seen, scale in zip(optimizer.seen, scales, strict=True):
        noise = np.std(seen.numpy()[1:]) * 1e6
        assert noise == pytest.approx(multiplier * scale, rel=6 / math.sqrt(40_000))


@adaptive
def test_the_accountants_number_is_not_the_enlarged_one(make):
    variables = two_scalars()
    optimizer = DPSGD(
        clip=make(QuantileClip(count_stddev=1.1)),
        noise_multiplier=1.0,
        expected_batch_size=64,
    )
    optimizer.build(variables)
    assert optimizer.noise_multiplier == 1.0
    assert optimizer.get_config()["noise_multiplier"] == 1.0
    assert optimizer.gradient_noise_multiplier > 1.05
    count = 2 if make is ADAPTIVE["layerwise"] else 1
    assert optimizer.count_stddevs == (1.1,) * count


@adaptive
@pytest.mark.slow
def test_the_counts_are_over_the_whole_logical_batch(make):
    """Records above the clip come first, and the last physical batch is below it."""
    variables = two_scalars()
    optimizer = DPSGD(
        0.0,
        clip=make(QuantileClip(0.5, 1.0, 1.0)),
        noise_multiplier=0,
        expected_batch_size=8,
        accumulation_steps=4,
    )
    step = step_of(optimizer, variables)
    large, small = np.full([2, 2], 1e3), np.full([2, 2], 1e-3)
    for part in (large, large, large, small):
        step(part.astype("float32"))
    found = tf.nest.flatten(optimizer.clip_state)[0].numpy()
    np.testing.assert_allclose(found, math.exp(0.25), rtol=1e-5)


@adaptive
@pytest.mark.slow
def test_an_empty_batch_is_a_step_of_noise(make):
    variables = two_scalars()
    optimizer = DPSGD(
        1.0,
        clip=make(QuantileClip(0.5, 0.5, 0.2, count_stddev=2.0)),
        noise_multiplier=1.0,
        expected_batch_size=8,
    )
    step_of(optimizer, variables)(tf.zeros([0, 2]))
    found = flat(variables)
    assert np.all(np.isfinite(found)) and np.all(found != 0)
    moved = np.log(tf.nest.flatten(optimizer.clip_state)[0].numpy() / 0.5)
    assert np.all(moved != 0) and np.all(np.abs(moved) <= 0.1 + 1e-6)


@adaptive
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
@pytest.mark.slow
def test_one_example_broken_in_one_group_spoils_nothing_in_any(make, bad):
    """A broken gradient in one group changes no group's sum and no group's count."""
    found = []
    for rows in (np.arange(8), np.delete(np.arange(8), 3)):
        x = some_data(8)[0]
        x[3, 0] = bad
        variables = two_scalars()
        optimizer = DPSGD(
            1.0,
            clip=make(QuantileClip(0.5, 0.5)),
            noise_multiplier=0,
            expected_batch_size=8,
        )
        step_of(optimizer, variables)(x[rows])
        state = tf.nest.flatten(optimizer.clip_state)[0].numpy()
        found.append((flat(variables), state))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-5)


@adaptive
@pytest.mark.thinned(3)
def test_the_fraction_is_of_the_expected_number_of_records(make):
    """Three of ten came: dividing by three would tell how many there were."""
    variables = two_scalars()
    optimizer = DPSGD(
        0.0,
        clip=make(QuantileClip(0.5, 1.0, 1.0)),
        noise_multiplier=0,
        expected_batch_size=10,
    )
    step_of(optimizer, variables)(np.full([3, 2], 1e3, np.float32))
    found = tf.nest.flatten(optimizer.clip_state)[0].numpy()
    np.testing.assert_allclose(found, math.exp(0.15), rtol=1e-5)


def test_a_bias_is_not_left_out_of_its_layers_norm():
    layers = [tf.keras.Input((2,)), L.Dense(1, kernel_initializer="zeros", name="one")]
    model = tf.keras.Sequential(layers)
    optimizer = DPRecorder(
        clip=LayerwiseClip(1.0), noise_multiplier=0, expected_batch_size=1
    )
    model.compile(optimizer, "mse")
    model.train_on_batch(np.float32([[3.0, 4.0]]), np.float32([[15.0]]))
    assert np.linalg.norm(flat(optimizer.seen)) == pytest.approx(1.0, rel=1e-5)


def test_a_variable_used_twice_is_one_gradient_in_its_group():
    """Norms of the two uses must not be taken apart."""
    variables = two_scalars()
    optimizer = DPRecorder(
        clip=LayerwiseClip(1.0), noise_multiplier=0, expected_batch_size=1
    )

    @tf.function
    def step(x):
        first, second = variables
        loss = x[:, 0] * first[0] + x[:, 1] * first[0] + x[:, 0] * second[0]
        optimizer.minimize(loss, variables)

    step(tf.constant([[30.0, 40.0]]))
    np.testing.assert_allclose(flat(optimizer.seen), [1.0, 1.0], rtol=1e-5)
    step(tf.constant([[0.9, -0.5]]))
    np.testing.assert_allclose(flat(optimizer.seen), [0.4, 0.9], rtol=1e-5)


@pytest.mark.parametrize("unit", ["example", "batch"])
@pytest.mark.slow
def test_gradients_made_by_hand_are_refused_for_groups_and_batches_too(unit):
    model = tf.keras.Sequential([tf.keras.Input((2,)), L.Dense(1)])
    options = {} if unit == "batch" else {"expected_batch_size": 4}
    optimizer = DPSGD(
        clip=LayerwiseClip(1.0), noise_multiplier=1.0, unit=unit, **options
    )
    model.compile(optimizer, "mse")
    model.train_on_batch(*some_data(4))
    with pytest.raises(ValueError, match="minimize"):
        variables = model.trainable_variables
        gradients = [tf.ones_like(v) for v in variables]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))


@pytest.mark.slow
def test_other_variables_than_the_groups_were_made_of_are_refused():
    """Left out or added in silence, they would be in no group."""
    model = tf.keras.Sequential(
        [tf.keras.Input((2,)), L.Dense(3, name="one"), L.Dense(1, name="two")]
    )
    optimizer = DPSGD(
        clip=LayerwiseClip(1.0), noise_multiplier=1.0, expected_batch_size=4
    )
    model.compile(optimizer, "mse")
    model.train_on_batch(*some_data(4))
    model.layers[0].trainable = False
    model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match="groups were made"):
        model.train_on_batch(*some_data(4))
