"""EfficientNet-Lite0: its logits against an independent pass, weights and training."""

from __future__ import annotations

import functools
import os
import pathlib

import matplotlib
import numpy as np
import pytest
import sklearn.datasets
import tensorflow as tf
from PIL import Image

import tfdpclip as dpc
from driver_kit import settings
from keras_examples import (
    checkpoints,
    network_sizes,
    pretrained,
    transfer_film,
    transfer_models,
)

NAME = "efficientnet_lite0"
# Repeats, kernel, stride, expansion, width in, width out; by hand, from the paper.
BLOCKS = [
    (1, 3, 1, 1, 32, 16),
    (2, 3, 2, 6, 16, 24),
    (2, 5, 2, 6, 24, 40),
    (3, 3, 2, 6, 40, 80),
    (3, 5, 1, 6, 80, 112),
    (4, 5, 2, 6, 112, 192),
    (1, 3, 1, 6, 192, 320),
]


def each_block():
    """Prefix, kernel, stride, whether the block widens, its widths."""
    number = 0
    for repeats, kernel, stride, expansion, first, out in BLOCKS:
        for k in range(repeats):
            into = first if k == 0 else out
            prefix = f"_blocks.{number}."
            yield prefix, kernel, stride if k == 0 else 1, expansion, into, out
            number += 1


@functools.cache
def weights():
    """Arrays of the published names and shapes, with random values of their scale."""
    rng = np.random.default_rng(0)
    arrays = {}

    def conv(name, *shape):
        scale = np.prod(shape[1:]) ** -0.5
        arrays[f"{name}.weight"] = rng.normal(0, scale, shape).astype(np.float16)

    def norm(name, width):
        for part, low, high in (
            ("weight", 0.5, 1.5),
            ("bias", -0.5, 0.5),
            ("running_mean", -0.2, 0.2),
            ("running_var", 0.2, 1.0),
        ):
            arrays[f"{name}.{part}"] = rng.uniform(low, high, width).astype(np.float32)

    conv("_conv_stem", 32, 3, 3, 3)
    norm("_bn0", 32)
    for prefix, kernel, _, expansion, into, out in each_block():
        wide = into * expansion
        if expansion > 1:
            conv(f"{prefix}_expand_conv", wide, into, 1, 1)
            norm(f"{prefix}_bn0", wide)
        conv(f"{prefix}_depthwise_conv", wide, 1, kernel, kernel)
        norm(f"{prefix}_bn1", wide)
        conv(f"{prefix}_project_conv", out, wide, 1, 1)
        norm(f"{prefix}_bn2", out)
    conv("_conv_head", 1280, 320, 1, 1)
    norm("_bn1", 1280)
    arrays["_fc.weight"] = rng.normal(0, 0.03, (1000, 1280)).astype(np.float32)
    arrays["_fc.bias"] = rng.normal(0, 0.1, 1000).astype(np.float32)
    return arrays


def file_of(path, **changes):
    """A file of weights; a value of None takes an array out."""
    arrays = {**weights(), **changes}
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return str(path)


def numpy_logits(arrays, images, symmetric=False):
    """The forward pass, in numpy alone: images `[n, h, w, 3]` in 0 to 255."""

    def conv(x, name, stride=1, depthwise=False):
        kernel = arrays[f"{name}.weight"].astype(np.float64)
        side = kernel.shape[2]
        out = [-(-n // stride) for n in x.shape[1:3]]
        pads = []
        for n, m in zip(x.shape[1:3], out, strict=True):
            total = max((m - 1) * stride + side - n, 0)
            pads.append((total // 2, total - total // 2))
        if symmetric:
            pads = [(side // 2, side // 2)] * 2
        x = np.pad(x, [(0, 0), *pads, (0, 0)])
        total = 0.0
        for i in range(side):
            for j in range(side):
                rows = slice(i, i + stride * (out[0] - 1) + 1, stride)
                columns = slice(j, j + stride * (out[1] - 1) + 1, stride)
                seen, k = x[:, rows, columns], kernel[:, :, i, j]
                total = total + (seen * k[:, 0] if depthwise else seen @ k.T)
        return total

    def norm(x, name):
        scale, offset, mean, variance = (
            arrays[f"{name}.{part}"].astype(np.float64)
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        return (x - mean) / np.sqrt(variance + 1e-3) * scale + offset

    def relu6(x):
        return np.clip(x, 0, 6)

    x = (images.astype(np.float64) - 127) / 128
    x = relu6(norm(conv(x, "_conv_stem", 2), "_bn0"))
    for prefix, _, stride, expansion, into, out in each_block():
        y = x
        if expansion > 1:
            y = relu6(norm(conv(y, f"{prefix}_expand_conv"), f"{prefix}_bn0"))
        y = conv(y, f"{prefix}_depthwise_conv", stride, depthwise=True)
        y = relu6(norm(y, f"{prefix}_bn1"))
        y = norm(conv(y, f"{prefix}_project_conv"), f"{prefix}_bn2")
        x = x + y if stride == 1 and into == out else y
    x = relu6(norm(conv(x, "_conv_head"), "_bn1"))
    return x.mean((1, 2)) @ arrays["_fc.weight"].T + arrays["_fc.bias"]


# Even and odd sizes at every stride: "SAME" pads them differently.
@pytest.mark.slow
@pytest.mark.parametrize("size", [32, pytest.param(45, marks=pytest.mark.slow)])
def test_logits_are_those_of_an_independent_pass(tmp_path, size):
    images = np.random.default_rng(1).integers(0, 256, (2, size, size, 3), np.uint8)
    expected = numpy_logits(weights(), images)
    model = transfer_models.build(NAME, 1000, image=size)
    path = file_of(tmp_path / "weights.npz")
    checkpoints.load(model, NAME, path, head=True)
    # To 1e-4 of their spread, which is many times that.
    spread = expected.std()
    assert 0.1 < spread < 100
    found = model(images).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4 * max(spread, 1))
    # `training` makes no difference: no statistics of the batch.
    np.testing.assert_array_equal(model(images, training=True), found)
    if size == 32:
        other = numpy_logits(weights(), images, symmetric=True)
        assert np.abs(other - expected).max() > 0.1 * spread


@pytest.mark.slow
def test_small_images_are_enlarged_and_normalised(ten):
    preprocess = ten.get_layer("preprocess")
    assert preprocess.size == 96
    assert ten(np.zeros((2, 28, 28, 3), np.uint8)).shape == (2, 10)
    white = preprocess(np.full((1, 28, 28, 1), 255, np.uint8)).numpy()
    np.testing.assert_allclose(white, np.ones((1, 96, 96, 3)), rtol=1e-5)
    again = type(preprocess).from_config(preprocess.get_config())
    np.testing.assert_array_equal(again(np.full((1, 28, 28, 1), 255, np.uint8)), white)


@pytest.mark.slow
def test_parameters_are_those_published():
    model = transfer_models.build(NAME, 1000)
    counts = pretrained.select(model, transfer_film.Settings(model=NAME))
    # 4,652,008 as published, and a moving mean and variance for every channel.
    channels = 21_008
    assert counts.total == 4_652_008 + 2 * channels
    assert counts.normalization == 2 * channels
    assert counts.trainable == 2 * channels + 1000 * 1281


@pytest.fixture(scope="module")
def ten():
    """A network with ten classes."""
    return transfer_models.build(NAME, 10)


def test_without_a_head_it_stays_zero(ten, tmp_path):
    model = ten
    checkpoints.load(model, NAME, file_of(tmp_path / "weights.npz"))
    np.testing.assert_array_equal(model.get_layer("head").kernel, 0)
    found = model.get_layer("block00_depthwise_norm").moving_mean
    np.testing.assert_array_equal(found, weights()["_blocks.0._bn1.running_mean"])
    with pytest.raises(settings.UsageError, match=r"_fc.weight must be \(10, 1280\)"):
        checkpoints.load(model, NAME, file_of(tmp_path / "weights.npz"), head=True)


DEPTHWISE = "_blocks.3._depthwise_conv.weight"


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({DEPTHWISE: None}, f"missing {DEPTHWISE}"),
        ({"_blocks.16._bn0.bias": np.zeros(3)}, "unknown _blocks.16._bn0.bias"),
        # The layout of a different framework.
        (
            {DEPTHWISE: np.zeros((5, 5, 144, 1))},
            rf"{DEPTHWISE} must be \(144, 1, 5, 5\) and finite, got \(5, 5, 144, 1\)",
        ),
        ({DEPTHWISE: np.zeros(3)}, rf"{DEPTHWISE} must be \(144, 1, 5, 5\)"),
        ({"_bn0.bias": np.full(32, np.inf)}, "_bn0.bias must be"),
        ({"_bn0.bias": np.full(32, "a")}, "_bn0.bias must be .* of <U1"),
        ({"_bn0.running_var": np.full(32, -1.0)}, "_bn0.running_var has a variance"),
    ],
)
def test_wrong_weights_are_named_and_change_nothing(ten, tmp_path, changes, message):
    path, model = file_of(tmp_path / "weights.npz", **changes), ten
    before = model.get_weights()
    with pytest.raises(settings.UsageError, match=message):
        checkpoints.load(model, NAME, path)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_only_efficientnet_has_a_head_to_load(tmp_path):
    model = transfer_models.build("vit_micro", 5)
    with pytest.raises(ValueError, match="head: the files of vit_micro have none"):
        checkpoints.load(
            model, "vit_micro", file_of(tmp_path / "weights.npz"), head=True
        )


# Few blocks of every kind: all 49 norms take minutes to trace.
TINY = network_sizes.EfficientNetLite(
    32,
    (network_sizes.Stage(1, 3, 1, 1, 8), network_sizes.Stage(2, 5, 2, 2, 16)),
    stem=8,
    top=24,
)


@pytest.mark.slow
@pytest.mark.parametrize("batchnorm", ["frozen", "group"])
def test_gradients_of_film_are_per_example(monkeypatch, batchnorm):
    monkeypatch.setitem(transfer_models.MODELS, NAME, TINY)
    tf.keras.utils.set_random_seed(1)
    model = transfer_models.build(NAME, 3)
    kind = dpc.keras.FrozenBatchNormalization
    if batchnorm == "group":
        model = dpc.keras.convert_batchnorm(model)
        kind = tf.keras.layers.GroupNormalization
    used = transfer_film.Settings(model=NAME, zero_head=False)
    counts = pretrained.select(model, used)
    assert len(counts.layers) == 1 + 2 + 2 * 3 + 1
    assert all(type(model.get_layer(name)) is kind for name in counts.layers)
    head = model.get_layer("head").kernel
    head.assign(np.random.default_rng(2).normal(0, 0.3, head.shape))
    optimizer = dpc.keras.DPSGD(
        0.1, clip=0.1, noise_multiplier=0.0, expected_batch_size=3
    )
    model.compile(optimizer, transfer_film.training.LOSS)
    x = np.random.default_rng(3).integers(0, 256, (3, 32, 32, 3)).astype(np.float32)
    dpc.testing.assert_exact(model, (x, np.arange(3)))
    # Kernels and statistics are as they were.
    trained = {id(v) for v in model.trainable_variables}
    kept = [v for v in model.weights if id(v) not in trained]
    before = [v.numpy() for v in (*kept, *model.trainable_variables)]
    model.fit(x, np.arange(3), batch_size=3, verbose=0)
    after = [v.numpy() for v in (*kept, *model.trainable_variables)]
    still = [np.array_equal(old, new) for old, new in zip(before, after, strict=True)]
    assert kept and all(still[: len(kept)]) and not any(still[len(kept) :])


def photographs():
    """Crops of photographs that installed packages contain, and their classes."""
    pictures = {
        # A man in uniform; a daisy-like dahlia; roofs of the Summer Palace.
        "grace_hopper": Image.open(
            pathlib.Path(matplotlib.get_data_path()) / "sample_data/grace_hopper.jpg"
        ),
        "flower": Image.fromarray(sklearn.datasets.load_sample_image("flower.jpg")),
        "china": Image.fromarray(sklearn.datasets.load_sample_image("china.jpg")),
    }
    for name, picture in pictures.items():
        side = min(picture.size)
        left, top = ((n - side) // 2 for n in picture.size)
        middle = picture.convert("RGB").crop((left, top, left + side, top + side))
        yield name, np.asarray(middle.resize((224, 224), Image.Resampling.BICUBIC))


# The published weights are not part of the project: this says where they are.
FILE = os.environ.get("EFFICIENTNET_LITE0")


@pytest.mark.slow
@pytest.mark.skipif(
    not FILE, reason="EFFICIENTNET_LITE0 does not name the published weights' .npz"
)
def test_published_weights_know_photographs():
    names, images = zip(*photographs(), strict=True)
    model = transfer_models.build(NAME, 1000, image=224)
    checkpoints.load(model, NAME, FILE, head=True)
    found = model(np.stack(images)).numpy()
    with np.load(FILE) as arrays:
        expected = numpy_logits(arrays, np.stack(images))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    # ImageNet's classes: military uniform, daisy, palace.
    classes = dict(zip(names, found.argmax(1).tolist(), strict=True))
    assert classes == {"grace_hopper": 652, "flower": 985, "china": 698}
