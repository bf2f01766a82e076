"""`dpc.keras.Scattering` is the defined transform, and keeps examples apart."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc

_L = tf.keras.layers


def _convolved(image, kernel, step):
    """A correlation with zeros outside of the image, pixel by pixel."""
    radius = kernel.shape[0] // 2
    padded = np.pad(image, radius)
    return np.array(
        [
            [
                np.sum(kernel * padded[i : i + len(kernel), j : j + len(kernel)])
                for j in range(0, image.shape[1], step)
            ]
            for i in range(0, image.shape[0], step)
        ]
    )


def _morlet(scale, turn, slant):
    sigma, wave = 0.8 * 2**scale, 0.75 * math.pi / 2**scale
    radius = math.ceil(3 * sigma / min(slant, 1))
    values, window = {}, {}
    for y in range(-radius, radius + 1):
        for x in range(-radius, radius + 1):
            u = x * math.cos(turn) + y * math.sin(turn)
            v = y * math.cos(turn) - x * math.sin(turn)
            size = math.exp(-(u * u + slant**2 * v * v) / 2 / sigma**2)
            window[y, x] = size * slant / 2 / math.pi / sigma**2
            values[y, x] = window[y, x] * complex(
                math.cos(wave * u), math.sin(wave * u)
            )
    mean = sum(values.values()) / sum(window.values())
    flat = [values[place] - mean * window[place] for place in values]
    return np.array(flat).reshape(2 * radius + 1, 2 * radius + 1)


def _gaussian(scale):
    sigma = 0.4 * 2**scale
    radius = math.ceil(3 * sigma)
    places = range(-radius, radius + 1)
    kernel = [
        [math.exp(-(i * i + j * j) / 2 / sigma**2) for i in places] for j in places
    ]
    return np.array(kernel) / np.sum(kernel)


def _scattered(image, scales, angles):
    """The features of an image of one channel, by convolutions in NumPy."""

    def average(u, scale):
        return _convolved(u, _gaussian(scale), 2**scale)

    def moduli(u, scale):
        turns = [math.pi * k / angles for k in range(angles)]
        waves = [_morlet(scale, turn, 4 / angles) for turn in turns]
        return [abs(_convolved(u, wave, 2**scale)) for wave in waves]

    first, second = [average(image, scales)], []
    for j in range(scales):
        for u in moduli(image, j):
            first.append(average(u, scales - j))
    for j in range(scales):
        for more in range(1, scales - j):
            for u in moduli(image, j):
                for v in moduli(u, more):
                    second.append(average(v, scales - j - more))
    return np.stack(first + second, -1)


@pytest.mark.parametrize(
    "scales, angles, shape",
    [(2, 4, (10, 7, 1)), (1, 3, (6, 6, 2)), (3, 2, (9, 12, 1))],
)
def test_equals_convolutions_in_numpy(scales, angles, shape):
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    layer = dpc.keras.Scattering(scales, angles)
    got = layer(x).numpy()
    want = [
        np.concatenate(
            [_scattered(image[..., c], scales, angles) for c in range(shape[2])], -1
        )
        for image in x
    ]
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert got.shape == layer.compute_output_shape(x.shape)


def test_constant_images_have_no_waves_inside():
    got = dpc.keras.Scattering()(np.full([1, 64, 64, 1], 3.0, "float32")).numpy()
    np.testing.assert_allclose(got[0, 8, 8, 0], 3, atol=1e-5)
    np.testing.assert_allclose(got[0, 8, 8, 1:], 0, atol=1e-4)


def test_an_image_does_not_change_the_features_of_the_rest():
    x = np.random.default_rng(1).normal(size=(3, 12, 12, 2)).astype("float32")
    layer = dpc.keras.Scattering(2, 3)
    changed = x.copy()
    changed[1] = np.nan
    before, after = layer(x).numpy(), layer(changed).numpy()
    assert np.array_equal(before[[0, 2]], after[[0, 2]])


def test_a_model_with_it_trains_and_is_proven_apart_and_loads(tmp_path):
    x = np.random.default_rng(2).normal(size=(200, 8, 8, 2)).astype("float32")
    y = np.arange(200) % 3
    layers = [
        tf.keras.Input((8, 8, 2)),
        _L.Conv2D(2, 3, padding="same"),
        dpc.keras.Scattering(2, 2),
        _L.Flatten(),
        _L.Dense(3),
    ]
    model = tf.keras.Sequential(layers)
    plan = dpc.keras.PrivacyPlan(8, 1e-5, examples=200, batch_size=50, epochs=1)
    optimizer = plan.optimizer(dpc.keras.DPSGD, learning_rate=0.1)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    model.fit(plan.batches((x, y)), epochs=1, callbacks=plan.callbacks, verbose=0)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_allclose(loaded(x[:3]), model(x[:3]), atol=1e-6)


@pytest.mark.parametrize("name", ["scales", "angles"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_bad_sizes_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        dpc.keras.Scattering(**{name: value})


@pytest.mark.parametrize("shape", [(2, 8, 8), (2, 64), (2, 8, 8, 1, 1)])
def test_other_shapes_are_refused_with_the_line_to_write(shape):
    with pytest.raises(ValueError, match="Reshape"):
        dpc.keras.Scattering()(np.zeros(shape, "float32"))
