"""Settings: the paper's where nothing is said, and errors that name the flag."""

import dataclasses
import math

import numpy as np
import pytest

import tfdpclip as dpc
from tff_tasks import command, privacy, registry
from tff_tasks.config import RunConfig

# (task, rounds, batch, client rate, server rate, z*, Table 1: z, m)
TABLE = [
    ("cifar100_image", 4000, 20, 0.1, 0.32, 0.03, 0.669, 2231),
    ("emnist_character", 1500, 20, 0.032, 1.0, 0.1, 0.513, 513),
    ("emnist_autoencoder", 3000, 20, 3.2, 1.78, 0.03, 0.659, 2197),
    ("shakespeare_character", 1200, 4, 1.0, 0.32, 0.1, 0.510, 510),
    ("stackoverflow_word", 1500, 16, 0.18, 1.78, 0.01, 1.396, 13958),
    ("stackoverflow_tag", 1500, 100, 320, 1.78, 0.01, 1.396, 13958),
]
PAPER_TASKS = [row[0] for row in TABLE]


@pytest.mark.parametrize("row", TABLE, ids=PAPER_TASKS)
def test_data_dir_alone_is_the_paper(row):
    task, rounds, batch, client, server, z, table_z, table_m = row
    config = command.config_from(task, ["--data_dir=data"])
    assert config.rounds == rounds and config.client_batch_size == batch
    assert config.clients_per_round == 100 and config.client_epochs == 1
    assert config.client_learning_rate == pytest.approx(client, rel=0.02)
    assert config.server_learning_rate == pytest.approx(server, rel=0.02)
    assert (config.server_momentum, config.momentum_damping) == (0.9, False)
    assert config.clip_rule() == dpc.QuantileClip(0.5, 0.1, 0.2)
    assert config.noise_multiplier == z
    assert config.max_elements == (1000 if task.startswith("stack") else None)
    assert config.sampling == "fixed" and config.seed is None
    paper = registry.TASKS[task].paper
    assert paper.private_clients == table_m
    assert z * table_m / 100 == pytest.approx(table_z, abs=0.0011)


@pytest.mark.parametrize(
    "task, clips",
    [
        ("cifar100_image", [0.75, 0.98, 1.28, 1.68, 2.2]),
        ("emnist_character", [0.28, 0.37, 0.49, 0.64, 0.85]),
        ("emnist_autoencoder", [0.22, 0.32, 0.46, 0.66, 0.95]),
        ("shakespeare_character", [0.25, 0.49, 0.95, 1.85, 3.6]),
        ("stackoverflow_word", [0.30, 0.46, 0.69, 1.05, 1.60]),
        ("stackoverflow_tag", [16.0, 27.3, 46.5, 79.2, 135.0]),
    ],
)
def test_fixed_clips_of_figure_6(task, clips):
    paper = registry.TASKS[task].paper
    assert paper.fixed_clips() == pytest.approx(clips, rel=0.01)
    fixed = RunConfig(task, clipping="fixed")
    assert any(fixed.clip == pytest.approx(clip, rel=0.01) for clip in clips)


def test_later_variant_changes_the_details_that_changed():
    later = {name: RunConfig(name, variant="later") for name in registry.TASKS}
    assert later["cifar100_image"].options["norm"] == "2_groups"
    assert later["cifar100_image"].options["distort_train_images"] is False
    assert later["stackoverflow_tag"].options["bag_divisor"] == "in_vocabulary"
    assert later["stackoverflow_word"].options["cap"] == "after"
    autoencoder = later["emnist_autoencoder"]
    assert autoencoder.options["loss_reduction"] == "mean"
    # Table 1's rate is for the sum over 20 examples.
    assert autoencoder.client_learning_rate == pytest.approx(63.2, rel=0.01)
    given = RunConfig("emnist_autoencoder", variant="later", client_learning_rate=2.0)
    assert given.client_learning_rate == 2.0
    mixed = command.config_from(
        "emnist_autoencoder", ["--variant=later", "--loss_reduction=sum"]
    )
    assert mixed.client_learning_rate == pytest.approx(3.16, rel=0.01)


def test_unclipped_means_no_noise():
    config = RunConfig("digits", clipping="none")
    assert config.noise_multiplier == 0 and config.clip_rule() is None


@pytest.mark.parametrize(
    "arguments, named, good",
    [
        (["--rounds=0"], "rounds", "rounds=1500"),
        (["--rounds=2.5"], "rounds", "rounds=1500"),
        (["--rounds=many"], "rounds", "rounds=1500"),
        (["--clients_per_round=-1"], "clients_per_round", "=100"),
        (["--sampling=all"], "sampling", "fixed, poisson"),
        (["--clipping=median"], "clipping", "none, fixed, adaptive"),
        (["--clip=0"], "--clip=0: must", "clip=0.1"),
        (["--clip=nan"], "--clip=nan: must", "clip=0.1"),
        (["--target_quantile=1.1"], "target_quantile", "=0.5"),
        (["--clip_learning_rate=-1"], "clip_learning_rate", "=0.2"),
        (["--noise_multiplier=nan"], "noise_multiplier", "=0.1"),
        (["--noise_multiplier=inf"], "noise_multiplier", "=0.1"),
        (["--server_momentum=1"], "server_momentum", "=0.9"),
        (["--server_learning_rate=0"], "server_learning_rate", "=1.0"),
        (["--delta=1"], "delta", "=1e-06"),
        (["--seed=-1"], "seed", "=1"),
        (["--seed=1.5"], "seed", "=1"),
        (["--count_stddev=0"], "count_stddev", "=5.0"),
        (["--eval_split=training"], "eval_split", "validation"),
        (["--eval_split=heldout"], "eval_split=heldout", "validation"),
        (["--only_digits=2"], "only_digits", "boolean"),
        (["--model_id=vit"], "model_id", "cnn_dropout"),
        (["--noise=distributed"], "noise=distributed", "--secure"),
        (["--noise=distributed", "--secure"], "minimum_clients", "=80"),
        (["--minimum_clients=3"], "minimum_clients", "distributed"),
        (["--engine=local", "--secure"], "engine=local", "--engine=tff"),
        (["--engine=local", "--workers=a:1"], "engine=local", "--engine=tff"),
        (["--clipping=none", "--noise_multiplier=1"], "noise_multiplier=1", "adaptive"),
        (["--clipping=none", "--secure"], "clipping=none", "adaptive"),
        (["--log_cohorts"], "log_cohorts", "--seed"),
        # Infeasible: z < 2 sigma_b = m / 10 is needed.
        (["--clients_per_round=2", "--noise_multiplier=2"], "noise_multiplier", "3"),
        (["--cap=after"], "cap", ""),
        (["--no_such_flag=1"], "no_such_flag", ""),
        (["extra"], "Unknown argument 'extra'", "--output_dir=runs/mine"),
    ],
)
def test_bad_flag_is_named_with_what_works(arguments, named, good):
    with pytest.raises(ValueError, match=named) as caught:
        command.config_from("emnist_character", arguments)
    assert good in str(caught.value)


def test_unknown_task_and_option_are_named():
    with pytest.raises(ValueError, match="task must be one of cifar100_image"):
        RunConfig("mnist")
    with pytest.raises(ValueError, match="norm is no option of digits"):
        RunConfig("digits", options={"norm": "2_groups"})
    with pytest.raises(ValueError, match="hidden_units must be a whole number"):
        RunConfig("digits", options={"hidden_units": 0})


def test_every_setting_is_a_flag_with_help():
    text = command.help_text("stackoverflow_tag")
    for field in dataclasses.fields(RunConfig):
        if "setting" in field.metadata:
            assert f"--{field.name}" in text or f"--[no]{field.name}" in text
    assert "--bag_divisor" in text and "--norm" not in text
    assert "logistic regression" in text


def test_too_few_clients_are_named():
    config = RunConfig("digits", clients_per_round=50)
    with pytest.raises(ValueError, match="clients_per_round=50, but .* only 30"):
        config.scheme(30)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("row", TABLE, ids=PAPER_TASKS)
def test_table_1_reads_as_published(row):
    task, rounds, _, _, _, z, table_z, table_m = row
    reading = privacy.imagine(
        z, 100, rounds, 10**6, scaled_clients=table_m, accountant="rdp"
    )
    assert reading.noise_multiplier == pytest.approx(table_z, abs=0.0011)
    assert reading.paper_epsilon == pytest.approx(5.0, abs=0.05)
    assert reading.epsilon < reading.paper_epsilon


@pytest.mark.slow
def test_scaling_finds_table_1():
    reading = privacy.imagine(0.1, 100, 1500, 10**6, accountant="rdp")
    assert abs(reading.clients_per_round - 513) <= 2
    assert reading.paper_epsilon <= 5


def test_nothing_is_imagined_without_noise_or_rounds():
    assert privacy.imagine(0.0, 100, 10, 10**6) is None
    assert privacy.imagine(0.1, 100, 0, 10**6) is None


@pytest.mark.slow
def test_spending_without_seed_counts_what_was_begun(tmp_path):
    config = RunConfig("digits", clients_per_round=20)
    ids = [str(i) for i in range(100)]
    first = privacy.Spending(config, ids, tmp_path)
    cohorts = [first.cohort(i) for i in (1, 2)]
    first.done()
    assert first.delta == pytest.approx(100**-1.1)
    # The process ends in the second round, and begins it again: that makes three.
    second = privacy.Spending(config, ids, tmp_path)
    assert second.rounds == 2
    cohorts.append(second.cohort(2))
    second.done()
    assert second.rounds == 3
    assert cohorts[2] != cohorts[1]
    expected = dpc.accounting.epsilon(
        0.1, 3, dpc.sampling.FixedSize(20, 100), second.delta
    )
    assert second.epsilon == pytest.approx(expected, rel=1e-6)
    assert "differential privacy" in second.statement()


@pytest.mark.slow
def test_spending_with_seed_repeats_rounds_and_is_not_private(tmp_path):
    config = RunConfig("digits", clients_per_round=3, seed=1, noise_multiplier=0.1)
    spending = privacy.Spending(config, list("0123456789"), tmp_path)
    # The cohorts that TensorFlow Federated's simulations draw.
    assert spending.cohort(1) == ["7", "0", "6"]
    assert spending.cohort(2) == ["8", "2", "7"]
    again = privacy.Spending(config, list("0123456789"), tmp_path)
    again.resume(2)
    assert again.rounds == 2 and again.cohort(3) == ["4", "8", "7"]
    assert "not private" in again.statement() and not again.private
    assert not list(tmp_path.iterdir())


def test_budget_allows_what_it_can_pay(tmp_path):
    config = RunConfig(
        "digits", noise_multiplier=2.0, epsilon_budget=20.0, clients_per_round=40
    )
    spending = privacy.Spending(config, [str(i) for i in range(200)], tmp_path)
    left = spending.rounds_left()
    cost = [
        dpc.accounting.epsilon(2.0, n, spending.scheme, spending.delta)
        for n in (left, left + 1)
    ]
    assert cost[0] <= 20 < cost[1]


def test_no_noise_costs_everything(tmp_path):
    config = RunConfig("digits", noise_multiplier=0.0, clients_per_round=4)
    spending = privacy.Spending(config, list("0123456789"), tmp_path)
    spending.cohort(1)
    spending.done()
    assert math.isinf(spending.epsilon) and not spending.private
    assert np.isfinite(spending.delta)
