"""Pretrained networks: parameters, and features as an independent pass has them."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import tensorflow as tf
from scipy import special

import tfdpclip as dpc
from driver_kit import settings
from keras_examples import (
    checkpoints,
    preprocessing,
    pretrained,
    transfer_film,
    transfer_models,
)
from tests.keras_examples.checkpoints import micro_checkpoint


def count(variables) -> int:
    return sum(int(np.prod(v.shape)) for v in variables)


def numpy_features(arrays, images):
    """The forward pass of vit_micro, in numpy alone."""

    def norm(x, name):
        mean = x.mean(-1, keepdims=True)
        variance = x.var(-1, keepdims=True)
        scaled = (x - mean) / np.sqrt(variance + 1e-6)
        return scaled * arrays[f"{name}/scale"] + arrays[f"{name}/bias"]

    x = images / 127.5 - 1
    n = len(x)
    patches = x.reshape(n, 4, 2, 4, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(n, 16, 12)
    x = patches @ arrays["embedding/kernel"].reshape(12, 32) + arrays["embedding/bias"]
    x = np.concatenate([np.repeat(arrays["cls"], n, axis=0), x], axis=1)
    x = x + arrays["Transformer/posembed_input/pos_embedding"]
    for k in range(2):
        block = f"Transformer/encoderblock_{k}"
        a = f"{block}/MultiHeadDotProductAttention_1"
        y = norm(x, f"{block}/LayerNorm_0")
        q, key, v = (
            np.einsum("ntd,dhe->nhte", y, arrays[f"{a}/{p}/kernel"])
            + arrays[f"{a}/{p}/bias"][None, :, None]
            for p in ("query", "key", "value")
        )
        scores = special.softmax(q @ key.transpose(0, 1, 3, 2) / np.sqrt(8), axis=-1)
        mixed = np.einsum("nhte,hed->ntd", scores @ v, arrays[f"{a}/out/kernel"])
        x = x + mixed + arrays[f"{a}/out/bias"]
        y = norm(x, f"{block}/LayerNorm_2")
        m = f"{block}/MlpBlock_3"
        y = y @ arrays[f"{m}/Dense_0/kernel"] + arrays[f"{m}/Dense_0/bias"]
        y = y * special.ndtr(y)
        x = x + y @ arrays[f"{m}/Dense_1/kernel"] + arrays[f"{m}/Dense_1/bias"]
    return norm(x, "Transformer/encoder_norm")[:, 0]


def features_of(model):
    return tf.keras.Model(model.input, model.get_layer("features").output)


@pytest.mark.parametrize("newer", [False, True])
def test_checkpoint_gives_the_features_of_an_independent_forward_pass(tmp_path, newer):
    images = np.random.default_rng(1).integers(0, 256, (3, 8, 8, 3)).astype(np.float32)
    arrays = micro_checkpoint(tmp_path / "old.npz")
    expected = numpy_features({k: v.astype(float) for k, v in arrays.items()}, images)
    model = transfer_models.build("vit_micro", 5)
    path = tmp_path / "file.npz"
    micro_checkpoint(path, newer)
    checkpoints.load(model, "vit_micro", str(path))
    np.testing.assert_allclose(features_of(model)(images), expected, atol=1e-4)
    np.testing.assert_array_equal(model.get_layer("head").kernel, 0)


def test_checkpoint_of_another_image_size_is_resized(tmp_path):
    path = tmp_path / "file.npz"
    grid = np.arange(4, dtype=np.float32).reshape(1, 4, 1) * np.ones(32, np.float32)
    value = np.concatenate([np.full((1, 1, 32), 9, np.float32), grid], axis=1)
    micro_checkpoint(path, Transformer__posembed_input__pos_embedding=value)
    model = transfer_models.build("vit_micro", 5)
    checkpoints.load(model, "vit_micro", str(path))
    positions = model.get_layer("tokens").positions.numpy()[0, :, 0]
    assert positions[0] == 9
    square = positions[1:].reshape(4, 4)
    assert square[0, 0] == 0 and square[3, 3] == 3
    assert np.all(np.diff(square, axis=0) >= 0) and np.all(np.diff(square, axis=1) >= 0)
    assert square.mean() == pytest.approx(1.5)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cls": None}, "missing cls"),
        ({"other": np.zeros(1)}, "unknown other"),
        ({"embedding__bias": np.zeros(3)}, r"embedding/bias must be \(32,\)"),
        ({"embedding__bias": np.full(32, np.nan)}, "embedding/bias must be"),
        ({"pre_logits__kernel": np.zeros(1)}, "older ImageNet-21k"),
        (
            {"Transformer__posembed_input__pos_embedding": np.zeros((1, 7, 32))},
            "pos_embedding must be",
        ),
    ],
)
def test_wrong_checkpoints_are_named_and_change_nothing(tmp_path, changes, message):
    path = tmp_path / "file.npz"
    micro_checkpoint(path, **changes)
    model = transfer_models.build("vit_micro", 5)
    before = [v.numpy() for v in model.weights]
    with pytest.raises(settings.UsageError, match=message):
        checkpoints.load(model, "vit_micro", str(path))
    for variable, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_fine_tuned_pickled_and_missing_files_are_refused(tmp_path):
    model = transfer_models.build("vit_micro", 5)
    path = tmp_path / "Ti_16--imagenet2012-steps_20k.npz"
    micro_checkpoint(path)
    with pytest.raises(settings.UsageError, match="--fine_tuned accepts it"):
        checkpoints.load(model, "vit_micro", str(path))
    checkpoints.load(model, "vit_micro", str(path), fine_tuned=True)
    np.savez(tmp_path / "objects.npz", cls=np.array([{}], object))
    for name in ("objects.npz", "missing.npz"):
        with pytest.raises(settings.UsageError, match="--checkpoint=.*cannot be read"):
            checkpoints.load(model, "vit_micro", str(tmp_path / name))


# Spec 2.4: model, classes, which norms: FiLM scalars, trainable, total.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "classes", "which", "film", "trainable", "total"),
    [
        pytest.param(
            *("vit_tiny", 5, "dp_film", 9_600, 10_565, 5_525_381),
            marks=pytest.mark.slow,
        ),
        ("vit_tiny", 100, "dp_film", 9_600, 28_900, 5_543_716),
        pytest.param(
            *("vit_tiny", 397, "dp_film", 9_600, 86_221, 5_601_037),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("resnet50_bit", 5, "dp_film", 11_648, 21_893, 23_510_597),
            marks=pytest.mark.slow,
        ),
        ("resnet50_bit", 100, "dp_film", 11_648, 216_548, 23_705_252),
        pytest.param(
            *("resnet50_bit", 100, "framework", 41_344, 246_244, 23_705_252),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("resnet50_bit", 100, "all", 45_440, 250_340, 23_705_252),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_parameters_are_those_of_the_table(
    name, classes, which, film, trainable, total
):
    model = transfer_models.build(name, classes)
    used = transfer_film.Settings(model=name, bit_film=which)
    counts = pretrained.select(model, used)
    assert counts.normalization == film
    assert counts.trainable == count(model.trainable_variables) == trainable
    assert counts.total == total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "trainable", "total"),
    [(5, 42_245, 85_802_501), (100, 115_300, 85_875_556), (397, 343_693, 86_103_949)],
)
def test_parameters_of_vit_base(classes, trainable, total):
    model = transfer_models.build("vit_base", classes)
    counts = pretrained.select(model, transfer_film.Settings(model="vit_base"))
    assert (counts.trainable, counts.total) == (trainable, total)


@pytest.mark.slow
def test_vit_tiny_has_200_keys_of_the_published_shapes():
    model = transfer_models.build("vit_tiny", 3)
    keys = checkpoints.vit_keys(model, transfer_models.MODELS["vit_tiny"])
    # 4 + 12 * 16 + 2; the head's two are not loaded.
    assert len(keys) == 198
    block = "Transformer/encoderblock_11"
    attention = f"{block}/MultiHeadDotProductAttention_1"
    assert keys[f"{attention}/query/kernel"].shape == (192, 3, 64)
    assert keys[f"{attention}/out/kernel"].shape == (3, 64, 192)
    assert keys[f"{block}/MlpBlock_3/Dense_1/kernel"].shape == (768, 192)
    assert keys["Transformer/posembed_input/pos_embedding"].shape == (1, 197, 192)


TINY_BIT = transfer_models.BiT(16, (1, 2), 8, 4)


def bit_checkpoint(path):
    """A BiT file for TINY_BIT; gammas are 4-d, as in some published files."""
    rng = np.random.default_rng(0)
    arrays = {"resnet/root_block/standardized_conv2d/kernel": (7, 7, 3, 8)}
    cin = 8
    for stage, units in enumerate((1, 2), 1):
        mid = 8 * 2 ** (stage - 1)
        for unit in range(1, units + 1):
            prefix = f"resnet/block{stage}/unit{unit:02d}"
            conv = "standardized_conv2d/kernel"
            arrays[f"{prefix}/a/{conv}"] = (1, 1, cin, mid)
            arrays[f"{prefix}/b/{conv}"] = (3, 3, mid, mid)
            arrays[f"{prefix}/c/{conv}"] = (1, 1, mid, 4 * mid)
            if unit == 1:
                arrays[f"{prefix}/a/proj/{conv}"] = (1, 1, cin, 4 * mid)
            for part, width in (("a", cin), ("b", mid), ("c", mid)):
                for kind in ("gamma", "beta"):
                    arrays[f"{prefix}/{part}/group_norm/{kind}"] = (1, 1, 1, width)
            cin = 4 * mid
    for kind in ("gamma", "beta"):
        arrays[f"resnet/group_norm/{kind}"] = (1, 1, 1, cin)
    arrays["resnet/head/conv2d/kernel"] = (1, 1, cin, 21)
    arrays["resnet/head/conv2d/bias"] = (21,)
    made = {k: rng.normal(size=s).astype(np.float32) for k, s in arrays.items()}
    np.savez(path, **made)
    return made


def test_bit_checkpoint_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(transfer_models.MODELS, "resnet50_bit", TINY_BIT)
    arrays = bit_checkpoint(tmp_path / "bit.npz")
    model = transfer_models.build("resnet50_bit", 3)
    checkpoints.load(model, "resnet50_bit", str(tmp_path / "bit.npz"))
    np.testing.assert_array_equal(
        model.get_layer("block2_unit02_c_norm").gamma,
        arrays["resnet/block2/unit02/c/group_norm/gamma"].ravel(),
    )
    np.testing.assert_array_equal(
        model.get_layer("block2_unit01_a_proj").kernel,
        arrays["resnet/block2/unit01/a/proj/standardized_conv2d/kernel"],
    )
    # 16 -> 8 (root) -> 4 (pool) -> 4 -> 2, 64 channels.
    assert model.get_layer("final_norm").output.shape == (None, 2, 2, 64)
    found = features_of(model)(np.zeros((2, 16, 16, 3), np.float32))
    assert found.shape == (2, 64) and np.all(np.isfinite(found))


def test_weight_standardisation():
    layer = transfer_models.StdConv2D(2, 1, use_bias=False)
    layer.build((None, 1, 1, 3))
    layer.kernel.assign(
        tf.reshape([1.0, 10.0, 2.0, 10.0, 3.0, 40.0], layer.kernel.shape)
    )
    x = np.eye(3, dtype=np.float32).reshape(3, 1, 1, 3)
    found = layer(x).numpy().reshape(3, 2)
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(found.std(axis=0), 1, atol=1e-5)
    assert found[2, 0] == pytest.approx(math.sqrt(1.5), rel=1e-5)


def resized_model(preprocess):
    """A layer that enlarges images, and a dense layer that is trained."""
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 3)),
            preprocess,
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(2),
        ]
    )


@pytest.mark.parametrize("crop", [False, True])
def test_enlarged_images_train_as_a_batch_and_stay_apart(crop):
    """Without the statement about the op, each example trained by itself."""
    images = np.random.default_rng(0).uniform(0, 255, (4, 8, 8, 3)).astype(np.float32)
    layer = preprocessing.Preprocess(16, crop)
    model = resized_model(layer)
    optimizer = dpc.keras.DPSGD(0.1, noise_multiplier=1.0, expected_batch_size=4)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    dpc.testing.assert_isolated(model, images, np.zeros(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error", dpc.gradients.OneByOneWarning)
        model.fit(images, np.zeros(4), batch_size=4, verbose=0)
