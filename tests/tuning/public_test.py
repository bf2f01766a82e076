"""Clip norms to start from, measured on public data."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpclip.tuning import clip_from_public, three_step_recipe

L = tf.keras.layers


def model_and_data(count=50):
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(1, use_bias=False)])
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, 3)).astype("float32")
    y = rng.standard_normal((count, 1)).astype("float32")
    residual = x @ model.get_weights()[0] - y
    norms = np.abs(2 * residual[:, 0]) * np.linalg.norm(x, axis=1)
    return model, (x, y), norms


def test_quantiles_and_grid():
    model, data, norms = model_and_data()
    found = clip_from_public(model, data, batch_size=16)
    for level, value in found.quantiles.items():
        assert value == pytest.approx(np.quantile(norms, level), rel=1e-5)
    assert found.count == 50 and found.median == found.quantiles[0.5]
    assert list(found.grid) == sorted(found.grid)
    assert found.grid[0] == pytest.approx(found.median / 100, rel=1e-2)
    assert found.grid[-1] == pytest.approx(found.quantiles[0.95], rel=1e-2)
    assert list(found.by_layer.values()) == pytest.approx([found.median], rel=1e-5)
    assert "50 public examples" in str(found)
    recipe = three_step_recipe(
        1437,
        8,
        2.0,
        1e-5,
        learning_rate=0.1,
        at_batch_size=64,
        clip_norms=found,
        candidates=[64, 128],
    )
    assert recipe.grid.clip_norms == found.grid


def test_data_sets():
    model, (x, y), norms = model_and_data()
    data = tf.data.Dataset.from_tensor_slices((x, y)).take(20).batch(7)
    found = clip_from_public(model, data)
    assert found.count == 20
    assert found.median == pytest.approx(np.median(norms[:20]), rel=1e-5)


def test_bad_public_data():
    model, (x, y), _ = model_and_data()
    with pytest.raises(ValueError, match="public_data: some gradient norms"):
        clip_from_public(model, (np.full_like(x, np.nan), y))
    with pytest.raises(ValueError, match="public_data: nearly all"):
        clip_from_public(model, (np.zeros_like(x), np.zeros_like(y)))
    with pytest.raises(ValueError, match="data must be"):
        clip_from_public(model, None)
    with pytest.raises(ValueError, match="call model.compile first"):
        clip_from_public(tf.keras.Sequential([L.Dense(1)]), (x, y))
