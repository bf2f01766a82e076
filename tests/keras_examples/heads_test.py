"""Heads on features: norms, retained weights and grids on small files."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from driver_kit import settings
from keras_examples import (
    features,
    grids,
    norms_and_weights,
    optimal_clip,
    trainers,
    tune_grid,
)
from keras_examples.class_weights import class_weights
from tests.keras_examples.feature_files import film_ledger, together, write_features
from tests.output_files import rows_of, words_of


def test_digits_are_split_as_specified():
    data = features.digits()
    assert len(data.train[0]) == 1437 and len(data.test[0]) == 360
    assert data.train[0].min() == 0 and data.train[0].max() == 1


def test_plan_is_the_papers():
    # Spec 8.3: full batch, 8 epochs: mu = sqrt(8) / z in closed form.
    full = trainers.plan(1437, "full", 8, 0.5, 1e-5)
    assert full.steps == 8
    assert np.sqrt(8) / full.noise_multiplier == pytest.approx(0.142211, rel=1e-4)
    assert trainers.plan(1437, 256, 8, 0.5, 1e-5).steps == 45
    with pytest.raises(settings.UsageError, match="larger than the 1437"):
        trainers.plan(1437, 2000, 8, 0.5, 1e-5)


def test_retained_weights_are_the_references():
    # Spec 10.2, after 100 steps of plain descent on the digits.
    model = optimal_clip.SoftmaxRegression()
    for _ in range(100):
        model.step(1.0)
    norms = np.linalg.norm(model.gradients(1797), axis=1)
    found = class_weights(norms, model.labels, [0.1, 1, 5], baseline=1.0)
    expected = [
        0.458929, 0.149210, 0.312114, 0.233854, 0.405200,
        0.296120, 0.432361, 0.339487, 0.103967, 0.135574,
    ]  # fmt: skip
    np.testing.assert_allclose(found.weight[0], expected, atol=1e-6)
    np.testing.assert_allclose(found.weight[2], 1)
    assert found.relative[0].max() == pytest.approx(0.474242, abs=1e-6)
    assert found.relative[0].min() == pytest.approx(0.107436, abs=1e-6)
    np.testing.assert_allclose(found.relative[2], 1.033367, atol=1e-6)


@pytest.mark.slow
def test_trainer_starts_afresh_and_learns():
    tf.keras.utils.set_random_seed(0)
    data = features.digits()
    how = trainers.Plan(0.2, 40, 0.5)
    trainer = trainers.HeadTrainer(data, how, 1.0)
    first, second = trainer(0.1).macro, trainer(0.1).macro
    # Far above guessing (0.1) with noise of stddev 0.5 / 287 per step.
    assert first > 0.7 and second > 0.7
    assert int(trainer.model.optimizer.iterations) == 40
    trainer.plan = trainers.Plan(0.2, 41, 0.5)
    with pytest.raises(RuntimeError, match="made 40 steps, not the 41"):
        trainer(0.1)
    norms = trainer.norms()
    # A head is all that trains.
    assert norms.every.shape == (1437,)
    np.testing.assert_allclose(norms.every, norms.head, rtol=1e-5)
    gradients = trainer.gradients(20)
    assert gradients.shape == (20, 65 * 10)
    lengths = np.linalg.norm(gradients, axis=1)
    np.testing.assert_allclose(lengths, norms.every[:20], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_norms_and_weights_from_a_file(tmp_path):
    out = tmp_path / "out"
    norms_and_weights.main(
        [
            "norms_and_weights",
            f"--features={write_features(tmp_path / 'f.npz')}",
            "--epsilons=1,8",
            "--clip_norms=0.1",
            "--learning_rates=0.1",
            "--batch_size=30",
            "--epochs=2",
            "--repeats=1",
            "--write_gradients=16",
            f"--output_dir={out}",
        ]
    )
    found = optimal_clip.read_gradients(str(out / "gradients_eps_8.npz"))
    assert found.shape == (16, 3 * 5)
    assert "gradients_eps_1.npz holds gradients of 16" in words_of(out)
    rows = rows_of(out, "norms")
    assert [(float(r["epsilon"]), float(r["clip"]), r["of"]) for r in rows] == [
        (epsilon, clip, of)
        for epsilon in (1, 8)
        for clip in (0.1, 1)
        for of in ("head", "all")
    ]
    weights = rows_of(out, "retained_weight")
    assert len(weights) == 2 * 2 * 3
    baseline = [
        float(r["relative"])
        for r in weights
        if (float(r["epsilon"]), float(r["clip_norm"])) == (8, 1)
    ]
    assert max(baseline) == pytest.approx(1)
    report = words_of(out)
    for words in ("norms rise as epsilon falls", "WITHOUT noise", "add or remove one"):
        assert words in report, words
    for name in ("norms", "retained_weight_eps_1", "retained_weight_eps_8"):
        assert (out / f"{name}.png").stat().st_size > 10_000


# Spec 4.1: runs per epsilon and seed.
@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("cifar100_vit_tiny", 448),
        ("cifar100_vit_base", 448),
        ("sun397_vit_tiny", 640),
        ("sun397_vit_base", 400),
        ("cassava_vit_tiny", 240),
    ],
)
def test_grids_are_those_of_table_a1(tmp_path, name, runs):
    used = tune_grid.Settings(grid=name, methods=("flat",), seeds=1)
    assert len(grids.make(used)) == runs


def test_learning_rates_of_table_a1():
    rates = grids.make(tune_grid.Settings(grid="sun397_vit_tiny"))
    assert rates.learning_rates[1] == pytest.approx(0.001534127, rel=1e-6)
    assert rates.learning_rates[-1] == pytest.approx(0.02)
    rates = grids.make(tune_grid.Settings(grid="sun397_resnet50"))
    assert rates.learning_rates[2] == pytest.approx(0.0009729439, rel=1e-6)


def test_dry_run_counts(tmp_path):
    tune_grid.main(
        [
            "tune_grid",
            "--grid=sun397_vit_tiny",
            "--dry_run",
            "--methods=flat",
            "--seeds=5",
            f"--output_dir={tmp_path}",
        ]
    )
    report = words_of(tmp_path)
    assert "3200 runs for each of 2 epsilons" in report
    assert len(rows_of(tmp_path, "grid")) == 3200


@pytest.mark.slow
def test_grid_runs_resumes_and_states_the_cost_of_the_search(tmp_path):
    arguments = [
        "tune_grid",
        f"--features={write_features(tmp_path / 'f.npz')}",
        "--epsilons=8",
        "--clip_norms=0.1,1",
        "--batch_sizes=30",
        "--learning_rates=0.1",
        "--epochs=2",
        "--seeds=1",
        f"--output_dir={tmp_path / 'out'}",
    ]
    tune_grid.main([*arguments, "--max_runs=1"])
    assert len(rows_of(tmp_path / "out", "grid_eps_8")) == 1
    tune_grid.main(arguments)
    rows = rows_of(tmp_path / "out", "grid_eps_8")
    assert [r["clip_norm"] for r in rows] == ["0.1", "1.0", "auto_s"]
    report = words_of(tmp_path / "out")
    how = trainers.plan(90, 30, 2, 8.0, 1e-5)
    one = dpc.accounting.epsilon(how.noise_multiplier, how.steps, how.scheme, 1e-5)
    assert one <= 8
    for words in ("epsilon 8 per run; the search:", "AUTO-S", "best clip norm"):
        assert words in report, words
    assert (tmp_path / "out" / "heatmap_eps_8.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "clip_norm.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_search_on_trained_features_counts_their_training_once(tmp_path):
    arguments = [
        "tune_grid",
        f"--features={write_features(tmp_path / 'f.npz', ledger=film_ledger())}",
        "--epsilons=8",
        "--clip_norms=0.1",
        "--methods=flat",
        "--batch_sizes=30",
        "--learning_rates=0.1",
        "--epochs=2",
        "--seeds=2",
        f"--output_dir={tmp_path / 'out'}",
    ]
    tune_grid.main(arguments)
    how = trainers.plan(90, 30, 2, 8.0, 1e-5)
    both = together(how.scheme, how.noise_multiplier, 2 * how.steps)
    report = words_of(tmp_path / "out")
    assert f"is ({both:.4g}, 1e-05)-differentially private" in report
    for words in ("(the head's training alone)", "after what was spent on the same"):
        assert words in report, words
    # Features whose history cannot be composed are refused before any training.
    ledger = film_ledger(scheme=dpc.sampling.FixedSize(10, 90))
    other = write_features(tmp_path / "other.npz", ledger=ledger)
    arguments[-1] = f"--output_dir={tmp_path / 'none'}"
    with pytest.raises(SystemExit, match="--features=other.*neighbouring"):
        tune_grid.main([*arguments, f"--features={other}"])
    assert not list((tmp_path / "none").glob("*.csv"))
    arguments[-1] = f"--output_dir={tmp_path / 'out'}"
    # Runs on different features are not mixed in.
    write_features(tmp_path / "f.npz", count=240)
    with pytest.raises(SystemExit, match="--output_dir=.*other features"):
        tune_grid.main(arguments)


@pytest.mark.slow
def test_runs_that_a_statement_would_leave_out_are_refused(tmp_path):
    def search(*changes):
        tune_grid.main(
            [
                "tune_grid",
                f"--features={write_features(tmp_path / 'f.npz')}",
                "--epsilons=8",
                "--methods=flat",
                "--batch_sizes=30",
                "--learning_rates=0.1",
                "--seeds=1",
                f"--output_dir={tmp_path / 'out'}",
                *changes,
            ]
        )

    search("--clip_norms=0.1,1", "--epochs=2")
    for changes in (
        ("--clip_norms=1", "--epochs=2"),
        ("--clip_norms=0.1,1", "--epochs=4"),
    ):
        with pytest.raises(SystemExit, match="runs at settings.*would be left out"):
            search(*changes)
    assert "composition of 2 runs" in words_of(tmp_path / "out")
    # A larger grid has all of them.
    search("--clip_norms=0.1,1", "--epochs=1,2")
    report = words_of(tmp_path / "out")
    assert "composition of 4 runs" in report
    assert {float(r["epochs"]) for r in rows_of(tmp_path / "out", "best")} == {1, 2}
    assert (tmp_path / "out" / "epochs.png").stat().st_size > 10_000


def test_batches_of_a_named_grid_fit_the_data():
    used = tune_grid.Settings(grid="cifar100_vit_tiny")
    assert grids.make(used, 5000).batch_sizes == (256, 512, 1024, 2048, 4096, "full")
    assert grids.make(used).batch_sizes[-2] == 16384


@pytest.mark.slow
def test_norms_and_weights_state_what_the_features_had_spent(tmp_path):
    path = write_features(tmp_path / "f.npz", ledger=film_ledger())
    outcome = norms_and_weights.run(
        norms_and_weights.Settings(
            features=path,
            epsilons=(1.0,),
            clip_norms=(0.1, 10.0),
            learning_rates=(0.1,),
            batch_size=30,
            epochs=2,
            repeats=1,
        )
    )
    how = trainers.plan(90, 30, 2, 1.0, 1e-5)
    both = together(how.scheme, how.noise_multiplier, how.steps)
    report = outcome.report()
    assert f"({both:.4g}, 1e-05)-differential privacy" in report
    assert "trained on these very records" in report
    assert "not looked at, with one epsilon" in " ".join(report.split())
    # A clip norm has the same colour in both panels.
    weights, accuracies = (
        {line.get_label(): line.get_color() for line in ax.get_legend().get_lines()}
        for ax in outcome.figures["retained_weight_eps_1"].axes
    )
    assert set(weights) == {"clip norm 0.1", "clip norm 1", "clip norm 10"}
    assert set(accuracies) == {"clip norm 0.1", "clip norm 10"}
    assert all(weights[label] == accuracies[label] for label in accuracies)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--clip_norms=0", "--clip_norms=0: must be numbers above 0"),
        ("--clip_norms=nan", "--clip_norms=nan"),
        ("--batch_sizes=12.5", "--batch_sizes=12.5: must be whole numbers"),
        ("--learning_rates=geom:1", "--learning_rates=geom:1"),
        ("--grid=cassava_vit_tiny", "--features is missing"),
        ("--model=vit_tiny", "--model=vit_tiny has no effect: a head trains on"),
        ("--checkpoint=x.npz", "--checkpoint=x.npz has no effect"),
        ("--batch_sizes=5000", "there are only 1437"),
    ],
)
def test_wrong_flags_are_named(tmp_path, argument, message):
    with pytest.raises(SystemExit, match=message):
        tune_grid.main(["x", argument, f"--output_dir={tmp_path}"])
