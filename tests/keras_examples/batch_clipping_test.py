"""Batch clipping: the paper's networks and accounts, and every way to clip trains."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from keras_examples import (
    batch_accounts,
    batch_clipping,
    batch_networks,
    batch_settings,
    batch_training,
    image_data,
)
from tests.keras_examples import image_files as files
from tests.output_files import rows_of, words_of
from tests.stack import names_of
from tfdpclip.clipping import make_groups


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("network", "channels", "norm", "bias", "count", "tensors", "modules"),
    [
        ("convnet", 3, "batch", True, 132_042, 18, 9),
        ("convnet", 3, "batch", False, 131_754, 14, 9),
        ("convnet", 3, "none", True, 131_466, 10, 5),
        ("bn_lenet5", 1, "batch", True, 61_990, 16, 8),
        ("bn_lenet5", 1, "none", True, 61_706, 10, 5),
        ("resnet18", 3, "batch", False, 11_173_962, 62, 41),
        ("resnet18", 3, "none", False, 11_164_362, 22, 21),
    ],
)
def test_networks_are_the_papers(
    network, channels, norm, bias, count, tensors, modules
):
    model = batch_networks.NETWORKS[network](channels, norm, bias)
    trainable = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert trainable == count
    assert len(model.trainable_variables) == tensors
    assert len(make_groups("layer", names_of(model.trainable_variables))) == modules


def accounts(*arguments, **options):
    rows = batch_accounts.account(*arguments, **options)
    return {(r["account"].split(":")[1].split()[0], r["relation"]): r for r in rows}


STEPS = 50 * 54_000 // 64  # 42,187
FIXED, POISSON = "replace one, fixed-size batches", "add or remove one, Poisson"


def test_account_of_lenet_is_the_papers_and_ours():
    # Spec 4.5: quoted mu 0.52, and PLD, RDP by this library's accountants.
    found = accounts(2.5, 8, 64, 54_000, STEPS, 1e-5)
    assert found["central", FIXED]["mu"] == pytest.approx(0.52128, rel=1e-4)
    assert found["central", FIXED]["epsilon"] == pytest.approx(2.08, abs=0.01)
    assert found["rdp", FIXED]["epsilon"] > found["pld", FIXED]["epsilon"]


@pytest.mark.parametrize(
    ("sigma", "layers", "mu"), [(1.5, 8, 1.99091), (2.5, 1, 0.1162), (2.5, 16, 1.166)]
)
def test_quoted_limits(sigma, layers, mu):
    rate = 64 / 54_000
    found = dpc.accounting.subsampled_gdp_mu(
        sigma / math.sqrt(layers), rate, STEPS, "fixed_size"
    )
    assert found == pytest.approx(mu, rel=1e-3)


def test_account_of_resnet_does_not_overflow():
    # Spec 4.5: mu is about 10^38294.7, beyond doubles.
    found = accounts(0.01875, 62, 64, 45_000, 50 * 45_000 // 64, 1e-5)
    assert str(found["central", FIXED]["mu"]).startswith("10^38294")
    assert found["central", FIXED]["epsilon"] == math.inf
    assert found["rdp", POISSON]["epsilon"] > 1e6


def test_batches_with_replacement_are_drawn():
    """As the paper's text draws them; its analysis draws without replacement."""
    x, y = np.arange(20, dtype=np.uint8).reshape(20, 1, 1, 1), np.arange(20)
    used = batch_settings.OneRun(sampling="with_replacement", batch_size=20, seed=0)
    drawn = [batch[1].numpy() for batch in batch_training.draw(used, (x, y))]
    # 20 of 20 all different: 20! / 20^20, or 2.3e-8.
    assert len(drawn[0]) == 20 and len(set(drawn[0])) < 20


@pytest.mark.slow
def test_batches_with_replacement_are_accounted_for():
    found = accounts(1.5, 8, 20, 2000, 100, 1e-5, "batch", "with_replacement")
    scheme = dpc.sampling.FixedSize(20, 2000, replacement=True)
    z = 2 * 1.5 / math.sqrt(8)
    expected = dpc.accounting.epsilon(z, 100, scheme, 1e-5, "pld", unit="batch")
    row = found["pld", "replace one, batches with replacement"]
    assert row["epsilon"] == pytest.approx(expected)
    assert row["epsilon"] > found["pld", FIXED]["epsilon"]


def test_augmentation_crops_each_image_by_itself():
    tf.keras.utils.set_random_seed(3)
    ramp = tf.reshape(tf.range(28 * 28, dtype=tf.float32), [1, 28, 28, 1]) / 784
    found = batch_networks.augment(tf.repeat(ramp, 50, axis=0)).numpy()
    assert found.shape == (50, 32, 32, 1)
    # 5 x 5 places and mirror images: that all 50 agree, say, cannot be.
    assert len({image.tobytes() for image in found}) > 10
    # Every crop of 32 rows out of 36 contains the middle of the image.
    middle = (float(ramp[0, 14, 14, 0]) - 0.1307) / 0.3081
    assert np.all(np.isclose(found, middle, atol=1e-5).any(axis=(1, 2, 3)))


def test_test_images_are_padded_around_the_middle():
    image = np.zeros((1, 28, 28, 1), np.uint8)
    image[0, 0, 0] = 255
    found = batch_networks.normalized(image)
    assert found.shape == (1, 32, 32, 1)
    assert found[0, 2, 2, 0] == pytest.approx((1 - 0.1307) / 0.3081, rel=1e-5)
    assert found.max() == found[0, 2, 2, 0]


def launch(tmp_path, *arguments):
    out = tmp_path / "out"
    batch_clipping.main(
        [
            "batch_clipping",
            f"--output_dir={out}",
            "--epochs=1",
            "--baseline_epochs=0",
            *arguments,
        ]
    )
    return rows_of(out, "history"), words_of(out), out


@pytest.mark.slow
def test_batch_clipping_from_mnist_files(tmp_path):
    files.mnist_idx(tmp_path, 100)
    rows, report, out = launch(
        tmp_path,
        f"--data_dir={tmp_path}",
        "--dataset=mnist",
        "--network=bn_lenet5",
        "--sigma=2.5",
        "--clip_norm=0.2",
        "--batch_size=30",
        "--baseline_epochs=1",
        "--clip_decay=0.9",
    )
    assert {row["run"] for row in rows} == {"batch, adaptive", "SGD"}
    # 90 private images; 3 steps; z = 2 sigma / sqrt(8), which for a batch counts half.
    z = 2 * 2.5 / math.sqrt(8)
    expected = dpc.accounting.epsilon(
        z, 3, dpc.sampling.FixedSize(30, 90), 1e-5, unit="batch"
    )
    spent = [float(r["epsilon"]) for r in rows if r["run"] != "SGD"][-1]
    assert spent == pytest.approx(expected, rel=1e-4)
    for words in (
        "61,990 parameters in 8 layers (counted by module)",
        "central limit of f-DP",
        "replace one",
        "add or remove one, Poisson",
        "SGD without privacy:",
        "taken as public",
    ):
        assert words in report, words
    assert (out / "history.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "arguments",
    [
        ("--unit=individual", "--norm=none", "--clip=layerwise"),
        ("--unit=group", "--groups=2", "--clip=scaled", "--sampling=poisson"),
        pytest.param(
            ("--clip=adaptive_zhang", "--layers=tensor", "--noaugment"),
            marks=pytest.mark.slow,
        ),
        ("--clip=full", "--equal_privacy"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
@pytest.mark.slow
def test_every_way_to_clip(tmp_path, arguments):
    rows, report, _ = launch(
        tmp_path,
        "--dataset=synthetic",
        "--network=bn_lenet5",
        "--sigma=1.5",
        "--batch_size=128",
        *arguments,
    )
    assert len(rows) == 2
    assert 0 < float(rows[-1]["epsilon"]) < math.inf
    assert "this library: pld" in report


@pytest.mark.parametrize(("network", "layers"), [("bn_lenet5", 8), ("resnet18", 62)])
def test_layers_are_counted_as_the_paper_counts_them(network, layers):
    used = batch_clipping.Settings(network=network)
    model = batch_training.build(used, 3)
    assert len(batch_training.layers_and_sigma(used, model)[0]) == layers


def test_equal_privacy_is_equal(tmp_path):
    model = batch_networks.bn_lenet5(1)
    multipliers = []
    for clip in ("layerwise", "full"):
        used = batch_clipping.Settings(
            network="bn_lenet5", clip=clip, equal_privacy=True, sigma=2.0
        )
        layers, sigma = batch_training.layers_and_sigma(used, model)
        batches = dpc.sampling.FixedSize(64, 640).batches((np.zeros((640, 1)),) * 2)
        optimizer = batch_training.private_optimizer(used, layers, sigma, batches)
        optimizer.build(model.trainable_variables)
        multipliers.append(optimizer.noise_multiplier)
    assert multipliers[0] == pytest.approx(multipliers[1])
    assert multipliers[0] == pytest.approx(4 / math.sqrt(8))


def test_layerwise_noise_is_the_papers():
    # Noise of stddev 2 C_h sigma on layer h.
    model = batch_networks.bn_lenet5(1)
    used = batch_clipping.Settings(
        network="bn_lenet5", clip="layerwise", sigma=2.0, clip_norm=0.3
    )
    layers, sigma = batch_training.layers_and_sigma(used, model)
    batches = dpc.sampling.FixedSize(64, 640).batches((np.zeros((640, 1)),) * 2)
    optimizer = batch_training.private_optimizer(used, layers, sigma, batches)
    optimizer.build(model.trainable_variables)
    scales = optimizer.clip.noise_scales(optimizer.clip_state).numpy()
    stddevs = optimizer.gradient_noise_multiplier * scales
    np.testing.assert_allclose(stddevs, 2 * 0.3 * 2.0, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--unit=individual",), "--unit=individual: batch norm.*--norm=none"),
        (("--unit=group", "--groups=3"), "--groups=3 must divide --batch_size=64"),
        (("--batch_size=5000",), "--batch_size=5000: there are only"),
        (("--public_share=0.9999",), "--public_share"),
    ],
)
def test_wrong_combinations_are_refused(tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=message):
        launch(tmp_path, "--dataset=synthetic", "--network=bn_lenet5", *arguments)


def test_files_of_mnist_are_not_taken_for_fashion_mnist(tmp_path, monkeypatch):
    files.mnist_idx(tmp_path, 20)
    assert image_data.load("fashion_mnist", str(tmp_path), (32, 32, 1)).classes == 10
    monkeypatch.setattr(image_data, "_name_of", lambda *arguments: "MNIST")
    with pytest.raises(image_data.UsageError, match="holds MNIST, not Fashion-MNIST"):
        image_data.load("fashion_mnist", str(tmp_path), (32, 32, 1))


def test_fewer_examples_are_of_all_classes_and_split_alike():
    used = batch_clipping.Settings(dataset="digits", examples=300, network="bn_lenet5")
    one, other = batch_training.load(used), batch_training.load(used)
    assert len(one.private[1]) == 270 and len(one.public[1]) == 30
    assert set(one.private[1]) == set(range(10))
    np.testing.assert_array_equal(one.private[0], other.private[0])
