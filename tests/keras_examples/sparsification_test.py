"""Weights that wander as noise moves them are frozen, and stay where they are."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from keras_examples import batch_settings, batch_training, sparsification

pytestmark = pytest.mark.slow


def trained(monkeypatch, epochs, **options):
    """A run in which noise is nearly all that moves weights; the weights by epoch."""
    used = batch_settings.OneRun(
        **{
            "network": "bn_lenet5",
            "dataset": "synthetic",
            "sigma": 1e4,
            "norm": "none",
            "examples": 300,
            "epochs": epochs,
            "seed": 1,
            "sparsify": 1.0,
            "clip": "full",
            **options,
        }
    )
    weights, masks = [], []
    end = sparsification.Sparsifier.on_epoch_end

    def watched(self, epoch, logs=None):
        end(self, epoch, logs)
        weights.append(np.concatenate([np.ravel(f.variable) for f in self._frozen]))
        masks.append(np.concatenate([np.ravel(f.mask) for f in self._frozen]))

    monkeypatch.setattr(sparsification.Sparsifier, "on_epoch_end", watched)
    run = batch_training.train(used, batch_training.load(used))
    return run, weights, masks


@pytest.mark.parametrize(
    "options",
    [
        {"unit": "batch"},
        {"unit": "group", "groups": 8},
        {"unit": "individual"},
        {"unit": "batch", "clip": "adaptive"},
        {"unit": "batch", "clip": "scaled", "local_steps": 2},
    ],
    ids=["batch", "group", "individual", "layers", "local"],
)
def test_68_percent_of_weights_that_only_wander_are_frozen(monkeypatch, options):
    """One stddev of 61,706 walks: the share's stddev is 0.0019, and 10 are allowed."""
    run, _, _ = trained(monkeypatch, 1, **options)
    assert run.frozen == pytest.approx(0.6827, abs=0.019)


def test_frozen_weights_stay_and_others_move(monkeypatch):
    _, weights, masks = trained(monkeypatch, 2)
    first, second = weights
    np.testing.assert_array_equal(first[masks[0]], second[masks[0]])
    assert np.mean(first[~masks[0]] != second[~masks[0]]) > 0.99
    assert np.all(masks[1][masks[0]]) and masks[1].sum() > masks[0].sum()


def test_a_network_of_several_branches_can_be_frozen():
    x = inputs = tf.keras.Input((8, 8, 3))
    x = tf.keras.layers.Conv2D(4, 3, padding="same")(x)
    y = tf.keras.layers.BatchNormalization()(x)
    x = tf.keras.layers.Add()([x, y])
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(2)(x))
    copy, frozen = sparsification.freezable(model)
    shapes = [tuple(v.shape) for v in copy.trainable_variables]
    assert [tuple(f.mask.shape) for f in frozen] == shapes
    assert shapes == [tuple(v.shape) for v in model.trainable_variables]
