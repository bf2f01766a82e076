"""Grids and studies in which every run tunes a network."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from keras_examples import (
    norms_and_weights,
    pretrained,
    problems,
    trainers,
    transfer_data,
    tune_grid,
)
from tests.output_files import rows_of, words_of


@pytest.fixture(scope="module")
def problem():
    """A small network, whose graphs are made in a second, on digits 5 to 9."""
    layers = tf.keras.layers
    inputs = tf.keras.Input((8, 8, 3))
    x = layers.Dense(16, "relu")(layers.Flatten()(inputs / 255.0))
    x = layers.LayerNormalization(name="features")(x)
    model = tf.keras.Model(inputs, layers.Dense(5, name="head")(x))
    data = transfer_data.load("digits", None, 8, subset=0.1)
    used = problems.Settings(trainable="film", physical_batch_size=100)
    counts = pretrained.select(model, used)
    initial = tuple(values(model))
    network = pretrained.Network(model, data, counts, "a small network", initial)
    return problems.Networks(network, used)


def values(model):
    return [variable.numpy() for variable in model.trainable_variables]


@pytest.mark.slow
def test_every_run_starts_from_the_same_network(problem):
    network, before = problem.network, values(problem.network.model)
    how = trainers.Plan(1.0, 1, 0.5)
    first = problem.trainer(how, 1.0)
    first(0.05)
    trained = values(network.model)
    assert not all(map(np.array_equal, before, trained))
    # No trainer and no run starts from these weights: after a step of length near zero
    # the weights are the initial weights.
    second = problem.trainer(how, "auto_s")
    for trainer in (first, second):
        trainer(0.05)
        trainer(1e-30)
        for now, then in zip(values(network.model), before, strict=True):
            np.testing.assert_allclose(now, then, atol=1e-25)
        assert int(trainer.model.optimizer.iterations.numpy()) == 1
    # Frozen weights have not moved; scales, offsets and a head train.
    assert sum(v.size for v in before) == 2 * 16 + 17 * 5


def test_norms_are_of_the_head_and_of_all(problem):
    trainer = problem.trainer(trainers.Plan(1.0, 1, 0.5), 1.0)
    trainer(0.05)
    norms, gradients = trainer.norms(9), trainer.gradients(9)
    assert gradients.shape == (9, 2 * 16 + 17 * 5)
    np.testing.assert_allclose(
        norms.every, np.linalg.norm(gradients, axis=1), rtol=1e-4
    )
    assert np.all(norms.head < norms.every)
    model = trainer.model
    x, y = trainer.examples(9)
    head = model.get_layer("head")
    # |p - y| sqrt(|h|^2 + 1), as the paper has it.
    hidden = tf.keras.Model(model.input, model.get_layer("features").output)(x).numpy()
    logits = hidden @ head.kernel.numpy() + head.bias.numpy()
    odds = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    odds[np.arange(9), y] -= 1
    expected = np.linalg.norm(odds, axis=1) * np.sqrt((hidden**2).sum(axis=1) + 1)
    np.testing.assert_allclose(norms.head, expected, rtol=1e-4)


def search(out, *changes):
    tune_grid.main(
        [
            "tune_grid",
            "--trainable=film",
            "--pretraining_epochs=1",
            "--subset=0.1",
            "--physical_batch_size=100",
            "--epsilons=8",
            "--methods=flat",
            "--clip_norms=1",
            "--batch_sizes=full",
            "--learning_rates=0.05",
            "--seeds=1",
            "--epochs=1",
            f"--output_dir={out}",
            *changes,
        ]
    )


@pytest.mark.slow
def test_a_film_search_resumes_with_its_network_and_says_what_it_costs(tmp_path):
    out = tmp_path / "out"
    search(out)
    network = (out / "public_network.npz").read_bytes()
    # The network is trained at random: a new network would be refused.
    search(out, "--seeds=2")
    assert (out / "public_network.npz").read_bytes() == network
    assert len(rows_of(out, "grid_eps_8")) == 2
    report = words_of(out)
    how = trainers.plan(72, "full", 1, 8.0, 1e-5)
    two = dpc.accounting.epsilon(how.noise_multiplier, 2, how.scheme, 1e-5)
    assert f"is ({two:.4g}, 1e-05)-differentially private" in report
    for words in (
        "scales, offsets and the head of vit_micro from public digits",
        "320 scales and offsets in 5 normalisation layers, 165 in the head",
        "must come from public data",
    ):
        assert words in report, words
    with pytest.raises(SystemExit, match="other features, images or networks"):
        search(out, "--subset=0.2", "--seeds=2")
    with pytest.raises(SystemExit, match="public_network.npz is of another network"):
        search(out, "--pretraining_epochs=2", "--seeds=2")
    (out / "public_network.npz").write_bytes(network[:-100])
    with pytest.raises(SystemExit, match="public_network.npz is damaged"):
        search(out, "--seeds=2")
    (out / "public_network.npz").unlink()
    with pytest.raises(SystemExit, match="other features, images or networks"):
        search(out, "--seeds=2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--features=x.npz",), "--features=x.npz has no effect"),
        (("--variant=hard",), "--variant=hard has no effect"),
        (("--dataset=folder",), "--checkpoint is missing"),
        (("--dataset=mnist", "--checkpoint=x.npz"), "--data_dir"),
    ],
)
def test_flags_that_do_not_go_together_are_named(tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=message):
        search(tmp_path, *arguments)


@pytest.mark.slow
def test_norms_and_weights_of_a_tuned_network(tmp_path):
    norms_and_weights.main(
        [
            "norms_and_weights",
            "--trainable=film",
            "--pretraining_epochs=1",
            "--epsilons=8",
            "--clip_norms=0.1",
            "--learning_rates=0.05",
            "--batch_size=358",
            "--physical_batch_size=500",
            "--epochs=1",
            "--repeats=1",
            "--measured=50",
            f"--output_dir={tmp_path}",
        ]
    )
    rows = {(float(r["clip"]), r["of"]): r for r in rows_of(tmp_path, "norms")}
    assert set(rows) == {(c, of) for c in (0.1, 1) for of in ("head", "all")}
    assert all(row["count"] == "50" for row in rows.values())
    assert float(rows[1, "all"]["norm_mean"]) > float(rows[1, "head"]["norm_mean"])
    report = words_of(tmp_path)
    assert "4 models of scales, offsets and the head of vit_micro" in report
