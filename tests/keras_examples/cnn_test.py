"""The geometry paper's networks: their sizes, and that both programs train them."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tfdpclip as dpc
from keras_examples import cifar10_cnn, mnist_cnn, networks
from tests.keras_examples import image_files as files
from tests.output_files import rows_of, words_of


@pytest.mark.parametrize(("kind", "count"), [("tutorial", 26_010), ("literal", 12_938)])
def test_mnist_parameters(kind, count):
    assert networks.mnist_network(kind).count_params() == count


@pytest.mark.parametrize(
    ("padding", "count"), [("same", 6_179_902), ("valid", 3_491_902)]
)
def test_cifar10_parameters(padding, count):
    assert networks.cifar10_network(padding).count_params() == count


def test_the_small_residual_network_normalises_examples_on_their_own():
    model = networks.small_resnet()
    assert model.count_params() == 77_562
    x = np.random.default_rng(0).random((4, 28, 28, 1), np.float32)
    together, alone = model(x, training=True), model(x[:1], training=True)
    np.testing.assert_allclose(together[:1], alone, rtol=1e-4, atol=1e-5)


def test_defaults_are_the_papers():
    mnist, cifar = mnist_cnn.Settings(), cifar10_cnn.Settings()
    for used in (mnist, cifar):
        assert (used.clip, used.clip_norm, used.noise_multiplier) == ("fixed", 1.0, 1.1)
        assert (used.batch_size, used.epochs, used.delta) == (128, 60, 1e-5)
    assert mnist.learning_rate == 0.15
    assert (cifar.learning_rate, cifar.decay_epochs, cifar.dense) == (0.001, 20, 1500)


def read(directory):
    found = rows_of(directory, "history")
    rows = [{k: float(v) for k, v in row.items()} for row in found]
    return (
        rows,
        words_of(directory),
        json.loads((directory / "config.json").read_text()),
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tutorial", "literal"])
def test_mnist_from_small_files(tmp_path, model):
    files.mnist_idx(tmp_path, 64)
    out = tmp_path / "out"
    mnist_cnn.main(
        [
            "mnist_cnn",
            f"--data_dir={tmp_path}",
            f"--model={model}",
            "--batch_size=16",
            "--epochs=2",
            f"--output_dir={out}",
        ]
    )
    rows, report, config = read(out)
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    assert [row["step"] for row in rows] == [0, 4, 8]
    expected = dpc.accounting.epsilon(1.1, 8, dpc.sampling.Poisson(0.25), 1e-5)
    assert rows[-1]["epsilon"] == pytest.approx(expected, rel=1e-4)
    assert config["results"]["epsilon"] == pytest.approx(expected, rel=1e-4)
    for words in (
        "differential privacy",
        "Poisson, rate 0.25",
        "64 images (images in MNIST's format",
        "outside the guarantee",
        "add or remove one record",
    ):
        assert words in report, words
    assert (out / "history.png").stat().st_size > 10_000


@pytest.mark.slow
def test_cifar10_from_small_files_in_pieces(tmp_path):
    files.cifar10_pickles(tmp_path, 20, 2)
    out = tmp_path / "out"
    cifar10_cnn.main(
        [
            "cifar10_cnn",
            f"--data_dir={tmp_path}",
            "--dense=16",
            "--batch_size=20",
            "--physical_batch_size=25",
            "--epochs=1",
            "--epsilon=5",
            "--optimizer=adam",
            f"--output_dir={out}",
        ]
    )
    rows, report, _ = read(out)
    assert rows[-1]["step"] == 2
    assert 4.9 < rows[-1]["epsilon"] <= 5
    assert "delta = 1e-05 is not small" not in report


@pytest.mark.slow
def test_mnist_network_learns_in_private(tmp_path):
    out = tmp_path / "out"
    mnist_cnn.main(
        [
            "mnist_cnn",
            "--dataset=synthetic",
            "--epochs=6",
            "--batch_size=64",
            "--noise_multiplier=0.5",
            "--seed=1",
            f"--output_dir={out}",
        ]
    )
    rows, _, _ = read(out)
    # Guessing gets 10 %.
    assert rows[-1]["test_accuracy"] > 0.3


def test_too_large_a_batch_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="--batch_size=9999: there are only 512"):
        mnist_cnn.main(
            [
                "x",
                "--dataset=synthetic",
                "--batch_size=9999",
                f"--output_dir={tmp_path}",
            ]
        )


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(SystemExit, match="--data_dir is missing"):
        cifar10_cnn.main(["x", f"--output_dir={tmp_path}"])


@pytest.mark.slow
def test_the_median_has_its_flags_and_its_clip_norm_in_the_history(tmp_path):
    mnist_cnn.main(
        [
            "mnist_cnn",
            "--dataset=synthetic",
            "--clip=quantile",
            "--target_quantile=0.7",
            "--normalize",
            "--perturbation=0.01",
            "--epochs=2",
            "--batch_size=128",
            f"--output_dir={tmp_path}",
        ]
    )
    report = words_of(tmp_path)
    assert "target_quantile=0.7" in report and "normalize=True" in report
    rows = rows_of(tmp_path, "history")
    norms = [float(row["clip_norm"]) for row in rows]
    assert norms[0] == 1 and len(set(norms)) == 3
