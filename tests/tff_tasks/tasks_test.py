"""Every benchmark runs, from small files in the published form and without."""

import numpy as np
import pytest

from tests.tff_tasks import fixtures
from tff_tasks import program, registry
from tff_tasks.config import RunConfig


@pytest.mark.parametrize("name", ["emnist_character", "stackoverflow_tag"])
@pytest.mark.slow
def test_tasks_run_from_files_with_federated_processes(data_dir, tmp_path, name):
    config = RunConfig(
        name,
        str(tmp_path),
        data_dir=str(data_dir),
        options=fixtures.FITTING[name],
        rounds=2,
        clients_per_round=2,
        noise_multiplier=0.1,
        seed=1,
        quiet=True,
    )
    result = program.run(config)
    assert [row["round"] for row in result.rows] == [0, 1, 2]
    assert np.isfinite(result.rows[-1]["eval_loss"])
    # Every update is clipped, so that C grows by e^(0.2 / 2), within six standard
    # deviations of the noise on the fraction, 1 / 20 each.
    assert result.rows[1]["clip_norm"] == pytest.approx(0.1)
    assert result.rows[1]["next_clip_norm"] == pytest.approx(0.1105171, rel=0.06)
    assert result.rows[2]["next_clip_norm"] == pytest.approx(0.1221403, rel=0.085)


@pytest.mark.parametrize("name", fixtures.FITTING)
@pytest.mark.thinned(6)
def test_tasks_run_from_files(data_dir, tmp_path, name):
    if name == "cifar100_image":
        pytest.skip("takes half a minute: see the slow tests")
    assert_trained(run_locally(data_dir, tmp_path, name), name)


@pytest.mark.slow
def test_cifar_runs_from_files(data_dir, tmp_path):
    result = run_locally(data_dir, tmp_path, "cifar100_image")
    assert_trained(result, "cifar100_image")


def run_locally(data_dir, tmp_path, name):
    config = RunConfig(
        name,
        str(tmp_path),
        data_dir=str(data_dir),
        options=fixtures.FITTING[name],
        rounds=2,
        clients_per_round=2,
        engine="local",
        max_elements=3,
        sampling="poisson",
        accountant="rdp",
        quiet=True,
        tensorboard=False,
    )
    return program.run(config)


def assert_trained(result, name):
    column = f"eval_{registry.TASKS[name].metric}"
    assert np.isfinite(result.rows[-1][column])
    assert result.private and np.isfinite(result.epsilon)


@pytest.mark.slow
@pytest.mark.parametrize("name", fixtures.FITTING)
def test_every_task_runs_without_files(tmp_path, name):
    config = RunConfig(name, str(tmp_path), synthetic=True, quiet=True, rounds=2)
    result = program.run(config)
    assert "made up" in result.report
    assert np.isfinite(result.rows[-1]["eval_loss"])


LANGUAGE = ("shakespeare_character", "stackoverflow_word")


@pytest.mark.parametrize("variant", ["paper", "later"])
@pytest.mark.parametrize("name", LANGUAGE)
def test_padding_is_left_out_of_the_loss_by_default(name, variant):
    config = RunConfig(name, synthetic=True, variant=variant)
    assert config.options["mask_loss"] is True
    task = registry.TASKS[name](config.options)
    assert task.loss().mask_padding and task.warnings() == []
    flag = task.options["mask_loss"].setting().text
    assert "Default: True (in the paper's code False)" in flag


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE)
def test_a_loss_that_averages_padding_is_warned_of(tmp_path, name):
    options = {**fixtures.FITTING[name], "mask_loss": False}
    config = RunConfig(
        name,
        str(tmp_path),
        synthetic=True,
        options=options,
        rounds=1,
        clients_per_round=2,
        engine="local",
        sampling="poisson",
        accountant="rdp",
        quiet=True,
    )
    with pytest.warns(UserWarning, match="--nomask_loss: the loss is a mean over all"):
        result = program.run(config)
    assert "--nomask_loss" in (result.directory / "report.txt").read_text()
