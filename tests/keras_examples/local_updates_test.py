"""General batch clipping: the update of local steps is clipped and noised."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from driver_kit import settings
from keras_examples import (
    batch_networks,
    batch_settings,
    batch_training,
    local_updates,
)
from tfdpclip.gradients import ExampleIsolationError, LossStructureError

_L = tf.keras.layers
_LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RATE = 0.3


def images(count, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(count, 32, 32, 1)).astype(np.float32),
        rng.integers(0, 10, count).astype(np.int32),
    )


@pytest.mark.parametrize("network", ["bn_lenet5", "convnet"])
@pytest.mark.parametrize(("norm", "bias"), [("batch", True), ("none", False)])
def test_forward_is_the_networks_in_training_mode(network, norm, bias):
    tf.keras.utils.set_random_seed(1)
    model = batch_networks.NETWORKS[network](1, norm, bias)
    for variable in model.trainable_variables:
        variable.assign_add(0.1 * tf.random.normal(variable.shape))
    x = tf.constant(images(6)[0])
    weights = [tf.convert_to_tensor(v) for v in model.trainable_variables]
    found = local_updates.forward(model.layers, weights, x)
    np.testing.assert_allclose(found, model(x, training=True), atol=2e-4, rtol=2e-4)


def small(normalised=False):
    tf.keras.utils.set_random_seed(2)
    layers = [_L.Flatten(), _L.Dense(7, activation="tanh")]
    layers += [_L.BatchNormalization()] if normalised else []
    return tf.keras.Sequential([_L.Input((32, 32, 1)), *layers, _L.Dense(10)])


INNER = {
    "sgd": lambda: tf.keras.optimizers.SGD(RATE),
    "momentum": lambda: tf.keras.optimizers.SGD(RATE, momentum=0.9),
    "adam": lambda: tf.keras.optimizers.Adam(RATE),
}


def by_hand(model, x, y, steps, method="sgd"):
    """The change of the weights by Keras's local steps, over the rate."""
    copy = tf.keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    copy.compile(INNER[method](), _LOSS)
    start = [v.numpy() for v in copy.trainable_variables]
    for _ in range(steps):
        copy.train_on_batch(x, y)
    ends = [v.numpy() for v in copy.trainable_variables]
    return [(a - b) / RATE for a, b in zip(start, ends, strict=True)]


def private(model, steps, clip, noise=0.0, accumulation_steps=1, **options):
    found = local_updates.LocalUpdates(model, steps, RATE, **options)
    optimizer = dpc.keras.DPSGD(
        1.0,
        clip=clip,
        noise_multiplier=noise,
        unit="batch",
        accumulation_steps=accumulation_steps,
    )
    found.compile(optimizer, _LOSS)
    return found


def norm_of(parts):
    return np.sqrt(sum(np.sum(np.square(part)) for part in parts))


@pytest.mark.slow
@pytest.mark.parametrize("method", batch_settings.METHODS)
@pytest.mark.parametrize("steps", [1, 3])
def test_without_a_bound_the_step_is_the_update_of_the_inner_method(steps, method):
    x, y = images(12)
    model = small()
    expected = by_hand(model, x, y, steps, method)
    trained = private(model, steps, 1e6, method=method)
    before = [v.numpy() for v in trained.trainable_variables]
    trained.fit(x, y, batch_size=12, verbose=0)
    moved = [
        b - v.numpy() for b, v in zip(before, trained.trainable_variables, strict=True)
    ]
    for found, wanted in zip(moved, expected, strict=True):
        close = np.isclose(found, wanted, atol=2e-5, rtol=1e-4)
        # Adam gives the sign of a gradient that is nearly 0 to rounding.
        assert np.mean(close) > (0.9 if method == "adam" else 1 - 1e-9)


@pytest.mark.slow
def test_each_groups_update_is_clipped_by_itself_and_starts_from_the_same_weights():
    x, y = images(12)
    x[6:] *= 5
    model = small()
    updates = [by_hand(model, x[part], y[part], 4) for part in (np.s_[:6], np.s_[6:])]
    assert min(map(norm_of, updates)) > 0.5
    trained = private(model, 4, 0.5, accumulation_steps=2)
    before = [v.numpy() for v in trained.trainable_variables]
    trained.fit(x, y, batch_size=6, shuffle=False, verbose=0)
    for i, variable in enumerate(trained.trainable_variables):
        wanted = np.mean([0.5 * u[i] / norm_of(u) for u in updates], axis=0)
        moved = before[i] - variable.numpy()
        np.testing.assert_allclose(moved, wanted, atol=2e-5, rtol=1e-3)


def test_an_update_that_is_not_finite_is_left_out():
    x, y = images(4)
    model = small()
    trained = private(model, 3, 0.5)
    before = [v.numpy() for v in trained.trainable_variables]
    x[0, 0, 0] = np.inf
    trained.fit(x, y, batch_size=4, verbose=0)
    for old, variable in zip(before, trained.trainable_variables, strict=True):
        np.testing.assert_array_equal(old, variable.numpy())


class Remembering(local_updates.LocalUpdates):
    """Starts from the end of the group before, so it depends on earlier records."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.kept = tf.Variable(0.0, trainable=False)

    def compute_loss(self, x=None, y=None, *rest, **options):
        found = super().compute_loss(x, y, *rest, **options)
        found += self.kept * tf.reduce_sum(self.trainable_variables[0])
        self.kept.assign_add(tf.reduce_mean(x))
        return found


def test_state_of_other_groups_in_an_update_is_refused():
    x, y = images(8)
    trained = Remembering(small(), 2, RATE)
    optimizer = dpc.keras.DPSGD(1.0, clip=0.5, noise_multiplier=1.0, unit="batch")
    trained.compile(optimizer, _LOSS)
    with pytest.raises((ExampleIsolationError, tf.errors.InvalidArgumentError)):
        trained.fit(x, y, batch_size=4, verbose=0)


def test_an_update_has_nothing_of_single_examples():
    x, y = images(8)
    trained = local_updates.LocalUpdates(small(), 2, RATE)
    optimizer = dpc.keras.DPSGD(
        1.0, clip=0.5, noise_multiplier=1.0, expected_batch_size=4
    )
    trained.compile(optimizer, _LOSS)
    with pytest.raises(LossStructureError):
        trained.fit(x, y, batch_size=4, verbose=0)


def test_layers_without_a_rule_are_refused():
    model = tf.keras.Sequential([_L.Input((4, 2)), _L.LSTM(3, name="memory")])
    with pytest.raises(ValueError, match="layer memory of LSTM"):
        local_updates.LocalUpdates(model, 2, 0.1)


@pytest.mark.slow
def test_outside_of_steps_the_loss_is_the_networks():
    x, y = images(12)
    trained = private(small(), 3, 0.5)
    wanted = float(_LOSS(y, trained(x)))
    assert trained.evaluate(x, y, verbose=0) == pytest.approx(wanted, rel=1e-5)
    shown = trained.fit(x, y, batch_size=12, verbose=0).history["loss"][0]
    assert shown < wanted  # The mean over steps that descend.


@pytest.mark.slow
def test_groups_with_batch_normalisation_train_and_are_accounted():
    used = batch_settings.OneRun(
        network="bn_lenet5",
        dataset="synthetic",
        unit="group",
        groups=2,
        local_steps=3,
        clip="adaptive",
        sigma=2.0,
        epochs=1,
    )
    data = batch_training.load(used)
    found = batch_training.train(used, data).trained
    plain = batch_training.train(dataclasses.replace(used, local_steps=1), data).trained
    # Local steps are free: the same mechanism releases as often.
    assert found.statement.epsilon == plain.statement.epsilon
    assert "group" in found.statement.unit
    assert np.isfinite(found.rows[-1]["loss"])


@pytest.mark.slow
def test_a_random_layer_moves_alone_and_every_layer_has_its_turn():
    """Of 2 layers, 30 draws are all of one with probability 2e-9."""
    x, y = images(6)
    trained = private(small(), 1, 1e6, random_layer=True)
    moved_layers = []
    for _ in range(30):
        before = [v.numpy() for v in trained.trainable_variables]
        trained.fit(x, y, batch_size=6, verbose=0)
        after = [v.numpy() for v in trained.trainable_variables]
        moved = [np.any(a != b) for a, b in zip(before, after, strict=True)]
        assert moved in ([True, True, False, False], [False, False, True, True])
        moved_layers.append(moved[0])
    assert len(set(moved_layers)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_method": "adam", "unit": "individual", "norm": "none"}, "local_m"),
        ({"local_method": "adam", "network": "resnet18"}, "sequential"),
        ({"random_layer": True, "clip": "adaptive"}, "--clip=adaptive adds noise"),
        ({"random_layer": True, "clip": "layerwise"}, "--clip=layerwise adds noise"),
        ({"random_layer": True, "clip": "scaled", "unit": "individual",
          "norm": "none"}, "random_layer"),
    ],
)  # fmt: skip
def test_inner_methods_that_do_not_go_together_are_refused(options, message):
    used = batch_settings.OneRun(
        **{"network": "bn_lenet5", "dataset": "synthetic", **options}
    )
    with pytest.raises(settings.UsageError, match=message):
        batch_settings.check(used)


@pytest.mark.parametrize("text", ["groups", "groups:", "groups:0", "four", "layer"])
def test_a_wrong_number_of_groups_is_refused(text):
    known = settings.of(batch_settings.OneRun)
    with pytest.raises(settings.UsageError, match="--layers=.*for example"):
        settings.read(known, ["x", f"--layers={text}"])


@pytest.mark.slow
def test_groups_of_layers_have_similar_public_norms_and_pay_for_their_number():
    """The noise of each of k groups is that of sqrt(k) layers, not of all modules."""
    used = batch_settings.OneRun(
        network="bn_lenet5", dataset="synthetic", layers="groups:3", sigma=2.0
    )
    data = batch_training.load(used)
    model = batch_training.build(used, data.channels)
    layers, sigma = batch_training.layers_and_sigma(used, model, data.public)
    assert len(layers) == 3
    assert sum(map(len, layers.values())) == len(model.trainable_variables)
    batches = batch_training.draw(used, data.private)
    optimizer = batch_training.private_optimizer(used, layers, sigma, batches)
    assert optimizer.noise_multiplier == pytest.approx(2 * 2.0 / 3**0.5)
