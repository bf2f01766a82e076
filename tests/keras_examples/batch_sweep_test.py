"""The sweep of ways to clip batches: every run once, and each with its privacy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from keras_examples import (
    batch_clipping,
    batch_clipping_sweep,
    batch_settings,
    batch_signal,
    batch_training,
    training,
)
from tests.output_files import rows_of, words_of

SHORT = (
    "--dataset=digits",
    "--examples=200",
    "--epochs=1",
    "--repeats=1",
    "--norm=none",
    "--noaugment",
)


def sweep(directory, *arguments):
    batch_clipping_sweep.main(
        ["sweep", *SHORT, f"--output_dir={directory}", *arguments]
    )


def test_every_run_is_made_once():
    used = batch_clipping_sweep.Settings(
        methods=("sgd", "batch:adaptive", "batch:full", "batch:adaptive_zhang"),
        batch_sizes=(32, 64),
        sigmas=(0.5, 2.5),
        clip_norms=(0.1, 0.2, 0.4),
        repeats=2,
    )
    found = list(batch_clipping_sweep.runs(used))
    assert len(found) == len(set(found))
    count = {m: sum(r.method == m for r in found) for m in used.methods}
    # SGD by m; layerwise once for both comparisons; without a master norm, without C.
    assert count == {
        "sgd": 2 * 2,
        "batch:adaptive": 2 * 12,
        "batch:full": 2 * 24,
        "batch:adaptive_zhang": 2 * 4,
    }
    for run in found:
        one = batch_clipping_sweep.one_run(used, run)
        assert one.batch_size == run.batch_size
        assert one.equal_privacy == (run.equal_privacy and run.method == "batch:full")


@pytest.mark.slow
def test_a_sweep_goes_on_and_says_what_each_run_spends(tmp_path, monkeypatch):
    sweep(tmp_path, "--methods=sgd,batch:layerwise,batch:full")
    monkeypatch.setattr(batch_clipping_sweep, "_measure", None)  # Nothing is left.
    sweep(tmp_path, "--methods=batch:layerwise,batch:full,sgd")
    rows = {(r["method"], r["equal_privacy"]): r for r in rows_of(tmp_path, "results")}
    assert len(rows) == 4 and len((tmp_path / "runs.jsonl").open().readlines()) == 4
    scheme = dpc.sampling.FixedSize(64, 180)
    for (method, lower), row in rows.items():
        if method == "sgd":
            assert row["epsilon"] == ""
            continue
        flat = method == "batch:full" and lower == "False"
        # sigma 0.5, over sqrt(5) but for the flat clip at equal sigma; 3 steps.
        z = 2 * 0.5 / (1 if flat else math.sqrt(5))
        wanted = dpc.accounting.epsilon(z, 3, scheme, 1e-5, unit="batch")
        assert float(row["epsilon"]) == pytest.approx(wanted, rel=1e-4)
        assert row["relation"] == "replace one record"
    assert len(rows_of(tmp_path, "curves")) == 4 * 2
    words = words_of(tmp_path)
    assert "batch:full (sigma / sqrt(L)), m 64, sigma 0.5, C 0.2: (" in words
    assert "NO meaningful privacy" in words
    with pytest.raises(SystemExit, match=r"other settings \(epochs\)"):
        sweep(tmp_path, "--epochs=2")
    with pytest.raises(SystemExit, match=r"other settings \(images, public_share\)"):
        sweep(tmp_path, "--public_share=0.2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--norm=batch", "--methods=sgd,individual:full"), "--unit=individual: batch"),
        (
            ("--methods=group:full", "--batch_sizes=64,68"),
            "must divide --batch_size=68",
        ),
        (("--batch_sizes=32,5000",), "--batch_size=5000: there are only 180"),
        (("--methods=batch:zhang",), "--methods.*must be one of sgd"),
        (
            ("--methods=batch:full", "--local_steps=2", "--network=resnet18"),
            "sequential",
        ),
        (("--methods=individual:full", "--local_steps=2"), "--local_steps=2: a group"),
    ],
)
def test_wrong_combinations_are_refused_before_the_first_run(
    tmp_path, monkeypatch, arguments, message
):
    monkeypatch.setattr(batch_clipping_sweep, "_measure", None)
    with pytest.raises(SystemExit, match=message):
        sweep(tmp_path, *arguments)


def tiny(clip, **options):
    used = batch_settings.OneRun(
        network="bn_lenet5",
        dataset="digits",
        examples=200,
        epochs=1,
        clip=clip,
        batch_size=10,
        **options,
    )
    return used, batch_training.load(used)


def measured(used, data):
    """A `Signal` of the first weights, as `fit` would have it."""
    tf.keras.utils.set_random_seed(3)
    model = batch_training.build(used, 1)
    layers, sigma = batch_training.layers_and_sigma(used, model)
    batches = batch_training.draw(used, data.private)
    optimizer = batch_training.private_optimizer(used, layers, sigma, batches)
    model.compile(optimizer, training.LOSS)
    found = batch_signal.Signal(used, data, batches=1)
    found.set_model(model)
    before = [v.numpy() for v in model.variables]
    found.on_train_begin()
    for old, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, variable.numpy())
    return model, {row["layer"]: row for row in found.rows}


def gradient(model, x, y):
    with tf.GradientTape() as tape:
        loss = training.LOSS(y, model(x, training=True))
    return [g.numpy().ravel() for g in tape.gradient(loss, model.trainable_variables)]


@pytest.mark.parametrize("clip", ["full", "layerwise"])
def test_signal_and_noise_are_those_of_a_step(clip):
    used, data = tiny(clip, norm="none", clip_norm=0.3, sigma=2.0)
    model, rows = measured(used, data)
    found = gradient(model, data.public[0][:10], data.public[1][:10])
    assert len(rows) == 6 and rows["all"]["parameters"] == 61_706
    whole = np.concatenate(found)
    total = np.linalg.norm(whole)
    released = 0.0
    for i, row in enumerate(list(rows.values())[:5]):
        part = np.concatenate(found[2 * i : 2 * i + 2])
        norm = np.linalg.norm(part)
        # The paper's noise: 2 C sigma on each coordinate, flat or of each layer.
        noise = 2 * 0.3 * 2.0 * math.sqrt(len(part))
        clipped = min(1, 0.3 / (total if clip == "full" else norm)) * norm
        released += clipped * norm
        assert row["gradient"] == pytest.approx(norm, rel=1e-4)
        assert row["signal"] == pytest.approx(clipped, rel=1e-4)
        assert row["noise"] == pytest.approx(noise, rel=1e-4)
        assert row["ratio"] == pytest.approx(clipped / noise, rel=1e-4)
    last = rows["all"]
    length = math.hypot(last["signal"], last["noise"])
    assert last["cosine"] == pytest.approx(released / total / length, rel=1e-4)


def test_a_groups_signal_is_the_sum_of_what_was_clipped():
    used, data = tiny("full", norm="batch", unit="group", groups=2, clip_norm=0.3)
    model, rows = measured(used, data)
    x, y = data.public
    found = [np.concatenate(gradient(model, x[k:][:5], y[k:][:5])) for k in (0, 5)]
    wanted = sum(min(1, 0.3 / np.linalg.norm(g)) * g for g in found)
    assert rows["all"]["signal"] == pytest.approx(np.linalg.norm(wanted), rel=1e-3)


@pytest.mark.slow
def test_layer_norms_are_means_over_single_examples():
    used, data = tiny("full", norm="batch")
    data = batch_training.Data(
        data.images, (data.public[0][:4], data.public[1][:4]), data.test
    )
    model = batch_training.build(used, 1)
    model.compile("sgd", training.LOSS)
    found = batch_signal.LayerNorms(used, data)
    found.set_model(model)
    found.on_train_begin()
    norms = []
    for k in range(4):
        with tf.GradientTape() as tape:
            predicted = model(data.public[0][k : k + 1], training=False)
            loss = training.LOSS(data.public[1][k : k + 1], predicted)
        parts = tape.gradient(loss, model.trainable_variables)
        norms.append(
            np.linalg.norm(np.concatenate([p.numpy().ravel() for p in parts[:2]]))
        )
    assert [row["epoch"] for row in found.rows] == [0] * 8
    assert found.rows[0]["mean_norm"] == pytest.approx(np.mean(norms), rel=1e-3)


@pytest.mark.slow
def test_norms_by_layer_are_recorded(tmp_path):
    batch_clipping.main(
        [
            "batch_clipping",
            "--dataset=digits",
            "--network=bn_lenet5",
            "--examples=200",
            "--epochs=1",
            "--baseline_epochs=2",
            "--record_layer_norms",
            f"--output_dir={tmp_path}",
        ]
    )
    rows = rows_of(tmp_path, "layer_norms")
    assert len(rows) == 8 * 2 + 8 * 3
    assert len({row["layer"] for row in rows}) == 8  # The same in both runs.
    assert {row["run"] for row in rows} == {"batch, adaptive", "SGD"}
    assert all(float(row["mean_norm"]) > 0 for row in rows)
    assert (tmp_path / "layer_norms.png").stat().st_size > 10_000
    assert "the largest mean gradient norm of a layer is" in words_of(tmp_path)
