"""Features of networks that are not trained, and FiLM on MNIST's images."""

from __future__ import annotations

import numpy as np
import pytest

import tfdpclip as dpc
from driver_kit import settings
from keras_examples import (
    checkpoints,
    efficientnet_lite,
    features,
    frozen_features,
    network_features,
    network_sizes,
    transfer_data,
    transfer_film,
    transfer_models,
    tune_grid,
)
from tests.keras_examples import image_files
from tests.keras_examples.checkpoints import micro_checkpoint
from tests.output_files import rows_of, words_of


def launch(tmp_path, *arguments):
    """The features of MNIST's images from vit_micro, and their file."""
    micro_checkpoint(tmp_path / "ti.npz")
    used = frozen_features.Settings(
        data_dir=str(tmp_path),
        model="vit_micro",
        checkpoint=str(tmp_path / "ti.npz"),
        output_dir=str(tmp_path / "out"),
        **dict(arguments),
    )
    return frozen_features.run(used), str(tmp_path / "out" / "features.npz")


@pytest.mark.slow
def test_features_are_the_networks_and_nothing_was_spent(tmp_path, capsys):
    images, labels = image_files.mnist_idx(tmp_path)
    said, path = launch(tmp_path, ("batch_size", 50))
    assert "128 images" in said and "32 features" in said and "PRIVATE" in said
    assert "image 128 of 128" in capsys.readouterr().out
    found = features.read(path)
    np.testing.assert_array_equal(found.train[1], labels)
    np.testing.assert_array_equal(found.test[1], labels)
    model = transfer_models.build("vit_micro", 10)
    checkpoints.load(model, "vit_micro", str(tmp_path / "ti.npz"))
    expected = network_features.body(model)(np.repeat(images[..., None], 3, axis=3))
    np.testing.assert_allclose(found.train[0], expected, atol=1e-4)
    assert not found.spent
    stated = found.statement(
        1e-5, noise_multiplier=2.0, sampling=dpc.sampling.Poisson(0.5), steps=10
    )
    alone = dpc.accounting.epsilon(2.0, 10, dpc.sampling.Poisson(0.5), 1e-5)
    assert stated.epsilon == pytest.approx(alone, rel=1e-9)
    words = "vit_micro from pre-trained weights, images of 8 by 8"
    assert words in str(stated) and "has seen none of these records" in str(stated)


@pytest.mark.slow
def test_a_head_trains_on_them(tmp_path):
    image_files.mnist_idx(tmp_path)
    _, path = launch(tmp_path)
    out = tmp_path / "grid"
    tune_grid.main(
        [
            "tune_grid",
            "--grid=mnist_efficientnet_lite0",
            f"--features={path}",
            "--epsilons=1",
            "--clip_norms=1",
            "--batch_sizes=full",
            "--learning_rates=0.01",
            "--methods=flat",
            "--seeds=1",
            f"--output_dir={out}",
        ]
    )
    assert len(rows_of(out, "best")) == 1
    assert "vit_micro from pre-trained weights" in words_of(out)


def test_grey_images_are_equal_in_three_colours(tmp_path):
    images, labels = image_files.mnist_idx(tmp_path)
    data = transfer_data.load("mnist", str(tmp_path), 96)
    x, y = data.train
    assert x.shape == (64, 28, 28, 3) and x.dtype == np.uint8 and data.classes == 10
    for color in range(3):
        np.testing.assert_array_equal(x[..., color], images)
    np.testing.assert_array_equal(y, labels)
    part = transfer_data.load("mnist", str(tmp_path), 96, subset=0.5)
    assert np.bincount(part.train[1]).max() == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint": None}, "--checkpoint is missing"),
        ({"image_size": 9}, "--image_size=9: vit_micro takes multiples of 2"),
        ({"data_dir": "/none"}, "There is no /none"),
    ],
)
def test_wrong_flags_are_named(tmp_path, arguments, message):
    micro_checkpoint(tmp_path / "ti.npz")
    image_files.mnist_idx(tmp_path)
    known = {
        "data_dir": str(tmp_path),
        "model": "vit_micro",
        "checkpoint": str(tmp_path / "ti.npz"),
        "output_dir": str(tmp_path / "out"),
    }
    with pytest.raises(settings.UsageError, match=message):
        frozen_features.run(frozen_features.Settings(**{**known, **arguments}))
    assert not (tmp_path / "out").exists()


def test_group_normalisation_needs_batch_normalisation(tmp_path):
    used = transfer_film.Settings(
        dataset="digits", model="vit_micro", batchnorm="group"
    )
    with pytest.raises(settings.UsageError, match="--batchnorm=group: vit_micro has"):
        transfer_film.run(used)


# A block of each kind, for 49 normalisation layers take minutes to trace.
TINY = network_sizes.EfficientNetLite(
    32, (network_sizes.Stage(1, 3, 1, 1, 8),), stem=8, top=24
)


@pytest.mark.slow
@pytest.mark.parametrize("batchnorm", ["frozen", "group"])
def test_film_of_efficientnet_on_mnist_files(tmp_path, monkeypatch, batchnorm):
    name = "efficientnet_lite0"
    monkeypatch.setitem(transfer_models.MODELS, name, TINY)
    image_files.mnist_idx(tmp_path)
    wanted = efficientnet_lite.variables(transfer_models.build(name, 10), TINY)
    rng, arrays = np.random.default_rng(0), {}
    for key, variable in wanted.items():
        order = efficientnet_lite.axes(key)
        value = rng.uniform(0.1, 1, variable.shape)
        arrays[key] = value if order is None else value.transpose(np.argsort(order))
    np.savez(tmp_path / "lite.npz", **arrays)
    out = tmp_path / "out"
    transfer_film.main(
        [
            "transfer_film",
            "--dataset=mnist",
            f"--data_dir={tmp_path}",
            f"--model={name}",
            f"--checkpoint={tmp_path / 'lite.npz'}",
            f"--batchnorm={batchnorm}",
            "--image_size=16",
            "--batch_size=32",
            "--epochs=1",
            "--epsilon=2",
            f"--output_dir={out}",
        ]
    )
    (row,) = rows_of(out, "run")
    channels = 8 + 8 + 8 + 24
    assert row["d"] == str(2 * channels + 10 * 25)
    assert (row["N"], row["T"]) == ("64", "2")
    assert 1.9 < float(row["epsilon"]) <= 2
