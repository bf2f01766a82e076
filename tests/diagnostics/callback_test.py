"""The callback measures, writes and draws, and changes nothing about training."""

import csv

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import tfdpclip as dpc
from tests.diagnostics.models import images, network
from tests.keras.helpers import DPSGD
from tfdpclip.accounting import PrivacyMismatchError
from tfdpclip.clipping import AutomaticClip, FixedClip, LayerwiseClip, QuantileClip
from tfdpclip.diagnostics import GradientDiagnostics, gradient_norms

LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def trained(callbacks, clip=None, epochs=2, optimizer=None, seed=3):
    tf.keras.utils.set_random_seed(0)
    model, (x, y) = network(), images(64)
    if optimizer is None:
        optimizer = DPSGD(
            0.1, clip=clip, noise_multiplier=1.0, expected_batch_size=16, seed=seed
        )
    model.compile(optimizer, LOSS)
    model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=callbacks)
    return model


@pytest.mark.slow
def test_rows_files_and_pictures(tmp_path):
    data = images(64)
    watch = GradientDiagnostics(
        data,
        csv_path=tmp_path / "a" / "rows.csv",
        picture_dir=tmp_path / "pictures",
        log_dir=tmp_path / "logs",
        geometry=True,
    )
    model = trained([watch], QuantileClip(0.5, 1.0))
    assert [(r["epoch"], r["step"]) for r in watch.rows] == [(0, 0), (1, 4), (2, 8)]
    last = watch.rows[-1]
    now = gradient_norms(model, data)
    assert last["norm_50%"] == pytest.approx(np.median(now.norms), rel=1e-4)
    clip_norm = float(model.optimizer.clip_norm)
    assert last["clip_norm"] == pytest.approx(clip_norm)
    assert last["fraction_clipped"] == pytest.approx(np.mean(now.norms > clip_norm))
    assert last["norm_at_target"] == last["norm_50%"]
    assert last["accuracy"] == pytest.approx(now.correct.mean())
    assert last["median/head"] == pytest.approx(np.median(now.by_group[:, 1]), rel=1e-4)
    assert 0 < last["snr/conv"] < 100 and 0 <= last["geometry/p_value_median"] <= 1
    assert abs(last["geometry/bias"]) <= last["geometry/wasserstein"] + 1e-9
    with open(tmp_path / "a" / "rows.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 and {row["data"] for row in rows} == {"private"}
    assert float(rows[-1]["norm_50%"]) == last["norm_50%"]
    names = {"norms", "classes", "layers", "clip", "signal", "geometry"}
    assert {p.stem for p in (tmp_path / "pictures").iterdir()} == names
    for path in (tmp_path / "pictures").iterdir():
        pixels = np.asarray(Image.open(path).convert("L"))
        assert pixels.std() > 5 and min(pixels.shape) > 300
    (log,) = (tmp_path / "logs").glob("events.*")
    tags = set()
    for event in tf.compat.v1.train.summary_iterator(str(log)):
        tags |= {value.tag for value in event.summary.value}
    assert {
        "gradients/norms",
        "gradients/clip_norm",
        "gradients/snr/conv",
        "gradients/not_to_be_released",
    } <= tags


@pytest.mark.slow
def test_training_is_the_same_with_and_without():
    """Also the dropout masks: measuring draws no random numbers."""
    plain = trained([], 1.0)
    watched = trained([GradientDiagnostics(images(64), every=1)], 1.0)
    for a, b in zip(plain.get_weights(), watched.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_every_few_steps_and_training_on():
    watch = GradientDiagnostics(images(32), every=3, public=True)
    model = trained([watch], 1.0)
    assert [r["step"] for r in watch.rows] == [0, 3, 6]
    x, y = images(64)
    model.fit(x, y, batch_size=16, verbose=0, callbacks=[watch])
    assert [r["step"] for r in watch.rows] == [0, 3, 6, 9, 12]


@pytest.mark.slow
def test_public_data_are_not_marked(tmp_path):
    watch = GradientDiagnostics(
        images(32), public=True, csv_path=tmp_path / "r.csv", log_dir=tmp_path
    )
    trained([watch], 1.0, epochs=1)
    assert "public" in (tmp_path / "r.csv").read_text()
    (log,) = tmp_path.glob("events.*")
    tags = {
        value.tag
        for event in tf.compat.v1.train.summary_iterator(str(log))
        for value in event.summary.value
    }
    assert "gradients/not_to_be_released" not in tags and len(tags) > 5


@pytest.mark.parametrize(
    ("clip", "flat"),
    [(FixedClip(0.5), 0.5), (AutomaticClip(), None), (LayerwiseClip(0.3), None)],
    ids=["fixed", "automatic", "layerwise"],
)
@pytest.mark.slow
def test_clip_rules(clip, flat, tmp_path):
    watch = GradientDiagnostics(images(32), picture_dir=tmp_path)
    trained([watch], clip, epochs=1)
    last = watch.rows[-1]
    assert last["clip_norm"] == flat if flat else np.isnan(last["clip_norm"])
    assert last["snr/head"] > 0
    if isinstance(clip, LayerwiseClip):
        assert last["clip/head"] == pytest.approx(0.3)
        assert 0 <= last["fraction_clipped/head"] <= 1
    assert (tmp_path / "clip.png").exists()


@pytest.mark.parametrize("part", [slice(None), slice(3, 20)])
def test_private_batches_are_not_called_public(part):
    x = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    y = np.zeros((64, 1), np.float32)
    model = tf.keras.Sequential([tf.keras.Input((5,)), tf.keras.layers.Dense(1)])
    plan = dpc.keras.PrivacyPlan(3, 1e-3, examples=64, batch_size=16, epochs=4)
    model.compile(plan.optimizer(dpc.keras.DPSGD, learning_rate=0.1, clip=1.0), "mse")

    def fit(**options):
        watch = GradientDiagnostics((x[part], y[part]), **options)
        batches = plan.batches((x, y))
        callbacks = [*plan.callbacks, watch]
        model.fit(batches, epochs=1, verbose=0, callbacks=callbacks)
        return watch

    with pytest.raises(PrivacyMismatchError, match="Leave public=True out"):
        fit(public=True)
    assert plan.ledger.steps == 0
    assert len(fit().rows) == 2


def test_an_ordinary_optimizer(tmp_path):
    watch = GradientDiagnostics(images(32), picture_dir=tmp_path, target_quantile=0.9)
    trained([watch], optimizer="sgd", epochs=1)
    last = watch.rows[-1]
    assert np.isnan(last["clip_norm"]) and last["norm_at_target"] > last["norm_50%"]
    assert not [key for key in last if key.startswith("snr/")]
    assert (tmp_path / "norms.png").exists()
    assert not (tmp_path / "signal.png").exists()


@pytest.mark.slow
def test_data_sets():
    x, y = images(40)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(7)
    by_set = GradientDiagnostics(data)
    by_array = GradientDiagnostics((x, y))
    trained([by_set, by_array], 1.0, epochs=1)
    for a, b in zip(by_set.rows, by_array.rows, strict=True):
        assert a == pytest.approx(b, rel=1e-4, nan_ok=True)


def test_bad_arguments():
    for name, bad in (
        ("data", None),
        ("every", 0),
        ("every", "step"),
        ("geometry", 1),
        ("public", "yes"),
        ("max_examples", 1),
        ("batch_size", 0),
    ):
        given = {"data": images(4), name: bad}
        with pytest.raises(ValueError, match=name):
            GradientDiagnostics(**given)
    with pytest.raises(ValueError, match="nothing to draw"):
        GradientDiagnostics(images(4)).draw("nowhere")


def test_every_counts_batches_and_not_executions():
    watch = GradientDiagnostics(images(16), every=4)
    model, (x, y) = network(), images(48)
    model.compile(
        DPSGD(0.1, clip=1.0, noise_multiplier=1.0, expected_batch_size=8),
        LOSS,
        steps_per_execution=3,
    )
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[watch])
    # Four batches are reached at 6, eight at 9 and twelve at 12.
    assert [row["step"] for row in watch.rows] == [0, 6, 9, 12]


def test_correlated_noise_has_no_single_ratio():
    scheme = dpc.sampling.MinSeparation(64, 16)
    optimizer = DPSGD(
        0.1,
        clip=1.0,
        noise_multiplier=1.0,
        expected_batch_size=16,
        noise=dpc.CorrelatedNoise(dpc.correlated.Tree(), 8, scheme),
    )
    watch = GradientDiagnostics(images(16))
    trained([watch], epochs=1, optimizer=optimizer)
    assert not any(name.startswith("snr/") for row in watch.rows for name in row)


@pytest.mark.parametrize("clip", [1.0, LayerwiseClip(1.0)], ids=["record", "layers"])
def test_clipped_batches_clip_no_example(clip):
    optimizer = DPSGD(
        0.1, clip=clip, noise_multiplier=1.0, expected_batch_size=16, unit="batch"
    )
    watch = GradientDiagnostics(images(16))
    trained([watch], epochs=1, optimizer=optimizer)
    for row in watch.rows:
        assert np.isnan(row["clip_norm"]) and np.isnan(row["fraction_clipped"])
        assert not any(name.startswith(("clip/", "fraction_clipped/")) for name in row)
