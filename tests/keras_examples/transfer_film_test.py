"""Transfer learning: sizes, checkpoints in the published format, and private runs."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from driver_kit import settings
from keras_examples import features as transfer_features
from keras_examples import (
    norms_and_weights,
    pretrained,
    transfer_data,
    transfer_film,
    transfer_models,
    tune_grid,
)
from tests.keras_examples import image_files as files
from tests.keras_examples.checkpoints import micro_checkpoint
from tests.output_files import rows_of, words_of
from tests.stack import names_of


def launch(tmp_path, *arguments):
    out = tmp_path / "out"
    transfer_film.main(["transfer_film", f"--output_dir={out}", *arguments])
    return functools.partial(rows_of, out), words_of(out), out


@pytest.mark.slow
def test_film_on_cifar100_files_with_a_checkpoint(tmp_path):
    files.cifar100_pickles(tmp_path, 200)
    micro_checkpoint(tmp_path / "ti.npz")
    read, report, out = launch(
        tmp_path,
        f"--data_dir={tmp_path}",
        f"--checkpoint={tmp_path / 'ti.npz'}",
        "--model=vit_micro",
        "--batch_size=50",
        "--physical_batch_size=40",
        "--epochs=1",
        "--write_features",
    )
    (row,) = read("run")
    assert (row["N"], row["K"], row["T"], row["B"]) == ("200", "100", "4", "50")
    # 5 norms of width 32 and a head for 100 classes.
    assert row["d"] == str(2 * 5 * 32 + 33 * 100)
    spent = dpc.accounting.epsilon(
        float(row["sigma"]), 4, dpc.sampling.Poisson(0.25), 1e-5
    )
    assert float(row["epsilon"]) == pytest.approx(spent, rel=1e-3)
    assert 7.9 < float(row["epsilon"]) <= 8
    for words in ("steps: 4", "normalize=True", "add or remove one", "not covered"):
        assert words in report, words
    with np.load(out / "features.npz") as file:
        assert file["features"].shape == (400, 32)
        assert (file["split"] == "train").sum() == 200
    assert "it is private data" in report
    # FiLM layers were trained on the images: the file has their privacy cost.
    found = transfer_features.read(str(out / "features.npz"))
    assert found.ledger(1e-5).epsilon() == pytest.approx(spent, rel=1e-3)
    head = found.statement(
        1e-5, noise_multiplier=1.0, sampling=dpc.sampling.Poisson(0.25), steps=4
    )
    assert head.epsilon > spent and head.steps == 8
    assert (out / "per_class.png").stat().st_size > 10_000


@pytest.mark.slow
def test_film_learns_new_digits(tmp_path):
    read, report, _ = launch(
        tmp_path,
        "--dataset=digits",
        "--model=vit_micro",
        "--pretraining_epochs=8",
        "--batch_size=128",
        "--physical_batch_size=256",
        "--learning_rate=0.03",
        "--seed=1",
    )
    (row,) = read("run")
    assert row["T"] == "45"
    # Guessing gets 20 % of five digits.
    assert float(row["macro"]) > 0.4
    assert "not private: " in report  # The run had a seed.


@pytest.mark.slow
def test_full_batch_head_only(tmp_path):
    read, report, out = launch(
        tmp_path,
        "--dataset=digits",
        "--model=vit_micro",
        "--pretraining_epochs=1",
        "--trainable=head",
        "--batch_size=full",
        "--physical_batch_size=1000",
        "--epochs=3",
        "--clip=auto_s",
        "--subset=0.5",
        "--write_features",
    )
    # Below the head nothing moved.
    found = transfer_features.read(str(out / "features.npz"))
    assert not found.spent and "vit_micro from public digits" in found.caveats()[0]
    (row,) = read("run")
    assert row["q"] == "1.0" and row["T"] == "3"
    assert int(row["N"]) < 400
    assert "full batch" in report
    assert "165 of" in report


@pytest.mark.slow
def test_first_step_moves_the_head_alone():
    # With a zero head nothing reaches the norms; noise would.
    model = transfer_models.build("vit_micro", 5)
    pretrained.select(model, transfer_film.Settings(model="vit_micro"))
    optimizer = dpc.keras.DPAdam(
        0.1, clip=1.0, noise_multiplier=0.0, expected_batch_size=8, epsilon=1e-10
    )
    model.compile(optimizer, transfer_film.training.LOSS)
    before = [v.numpy() for v in model.trainable_variables]
    names = names_of(model.trainable_variables)
    x = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3)).astype(np.float32)
    model.fit(x, np.arange(8) % 5, batch_size=8, verbose=0)
    after = [v.numpy() for v in model.trainable_variables]
    for name, old, new in zip(names, before, after, strict=True):
        assert np.array_equal(old, new) != name.startswith("head/"), name


def write_folder(root, size=(10, 12)):
    rng = np.random.default_rng(0)
    for part, number in (("train", 3), ("validation", 2), ("test", 1)):
        for label in ("cbb", "healthy"):
            folder = root / part / label
            folder.mkdir(parents=True)
            for k in range(number):
                image = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
                # A file whose contents are of a different kind than its name says.
                encode = tf.io.encode_png if k == 1 else tf.io.encode_jpeg
                (folder / f"{k}.jpg").write_bytes(encode(image).numpy())


def test_image_folders(tmp_path):
    write_folder(tmp_path)
    data = transfer_data.load("folder", str(tmp_path), 8)
    assert (data.size, len(data.test), data.classes) == (10, 2, 2)
    assert np.bincount(data.train.labels).tolist() == [5, 5]
    image, label = data.train[1]
    assert image.shape == (8, 8, 3) and image.dtype == np.uint8 and label == 0
    alone = transfer_data.load("folder", str(tmp_path), 8, merge_validation=False)
    assert alone.size == 6
    part = transfer_data.load("folder", str(tmp_path), 8, subset=0.4)
    assert np.bincount(part.train.labels).tolist() == [2, 2]


@pytest.mark.slow
def test_film_on_an_image_folder(tmp_path):
    write_folder(tmp_path)
    micro_checkpoint(tmp_path / "ti.npz")
    read, _, _ = launch(
        tmp_path,
        "--dataset=folder",
        f"--data_dir={tmp_path}",
        f"--checkpoint={tmp_path / 'ti.npz'}",
        "--model=vit_micro",
        "--batch_size=5",
        "--epochs=1",
        "--preprocess=timm",
    )
    assert read("run")[0]["N"] == "10"
    assert len(read("per_class")) == 2


def test_sun397_lists(tmp_path):
    base = tmp_path / "SUN397"
    for name in ("a/abbey", "a/airport/inside"):
        folder = base / name
        folder.mkdir(parents=True)
        image = np.zeros((9, 9, 3), np.uint8)
        (folder / "x.jpg").write_bytes(tf.io.encode_jpeg(image).numpy())
    (base / "ClassName.txt").write_text("/a/abbey\n/a/airport/inside\n")
    lines = "/a/abbey/x.jpg\n/a/airport/inside/x.jpg\n"
    for part in ("train", "validation", "test"):
        (base / f"{part}.txt").write_text(lines)
    data = transfer_data.load("sun397", str(tmp_path), 8)
    assert (data.size, data.classes) == (4, 2)
    assert data.train.labels.tolist() == [0, 1, 0, 1]
    assert data.train[3][0].shape == (8, 8, 3)
    (base / "test.txt").write_text("/b/unknown/x.jpg\n")
    with pytest.raises(settings.UsageError, match="of no class in ClassName"):
        transfer_data.load("sun397", str(tmp_path), 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--checkpoint is missing"),
        (("--dataset=digits", "--batch_size=5000"), "there are only 716"),
        (("--dataset=digits", "--batch_size=half"), "--batch_size=half: must be"),
        (("--dataset=folder", "--checkpoint=x"), "--data_dir is missing"),
        (("--dataset=sun397", "--checkpoint=x"), "--data_dir is missing"),
        (("--dataset=folder", "--checkpoint=x", "--data_dir=/none"), "There is no"),
    ],
)
def test_wrong_flags_are_named(tmp_path, arguments, message):
    arguments = ("--model=vit_micro", "--pretraining_epochs=0", *arguments)
    with pytest.raises(SystemExit, match=message):
        launch(tmp_path, *arguments)


_DIGITS = ("--dataset=digits", "--model=vit_micro", "--trainable=film")


@pytest.mark.parametrize(
    ("program", "flag"),
    [
        (transfer_film, "--batch_size=half"),
        (transfer_film, "--batch_size=0"),
        (transfer_film, "--batch_size=64,128"),
        (transfer_film, "--batch_size=5000"),
        (tune_grid, "--batch_sizes=64,half"),
        (tune_grid, "--batch_sizes=64,5000"),
        (tune_grid, "--clip_norms=0.1,x"),
        (tune_grid, "--clip_norms=0"),
        (tune_grid, "--learning_rates=geom:0.1"),
        (tune_grid, "--learning_rates=nan"),
        (norms_and_weights, "--batch_size=half"),
        (norms_and_weights, "--batch_size=5000"),
    ],
)
def test_a_wrong_flag_is_refused_before_a_network_is_trained(
    tmp_path, monkeypatch, program, flag
):
    """A flag that is wrong by itself is refused before the images are read, too."""

    def must_not_run(*arguments, **options):
        raise AssertionError("too late")

    monkeypatch.setattr(transfer_models, "build", must_not_run)
    if not flag.endswith("5000"):
        monkeypatch.setattr(transfer_data, "load", must_not_run)
    with pytest.raises(SystemExit, match=flag.split("=")[0]):
        program.main(["x", f"--output_dir={tmp_path}", *_DIGITS, flag])
