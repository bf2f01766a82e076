"""Benchmarks on remote workers: the same results, and runs outlive a lost worker."""

import numpy as np
import pytest

pytest.importorskip("tensorflow_federated")

from tests.federated.remote_workers import running  # noqa: E402
from tests.tff_tasks.program_test import digits  # noqa: E402
from tff_tasks import command, program  # noqa: E402


def seeded(directory, **settings):
    return digits(directory, engine="tff", seed=7, noise_multiplier=0.5, **settings)


def assert_same(one, other):
    for a, b in zip(one.weights, other.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)
    # With a seed, epsilon is told in the last row of each call of a run.
    assert one.rows[-1]["epsilon"] == other.rows[-1]["epsilon"]
    for a, b in zip(one.rows, other.rows, strict=True):
        a, b = ({k: v for k, v in row.items() if k != "epsilon"} for row in (a, b))
        assert set(a) == set(b)
        for name in a:
            if "seconds" not in name:
                assert a[name] == pytest.approx(b[name], rel=1e-4, nan_ok=True), name


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True])
def test_results_do_not_depend_on_the_workers(tmp_path, secure):
    here = program.run(seeded(tmp_path / "here", secure=secure))
    assert "workers" not in here.report
    with running(2) as workers:
        for count in (1, 2):
            addresses = ",".join(worker.address for worker in workers[:count])
            config = seeded(tmp_path / str(count), secure=secure, workers=addresses)
            there = program.run(config)
            assert_same(there, here)
            assert addresses.replace(",", ", ") in there.report
            assert "sent clients' data" in there.report
            written = (there.directory / "config.json").read_text()
            assert f'"workers": "{addresses}"' in written


@pytest.mark.slow
def test_a_run_goes_on_with_other_workers(tmp_path):
    often = {"rounds_per_eval": 1, "rounds_per_checkpoint": 1}
    whole = program.run(seeded(tmp_path / "whole", **often))
    with running(2) as workers:
        one, two = (worker.address for worker in workers)
        parts = tmp_path / "parts"
        program.run(seeded(parts, rounds=2, workers=f"{one},{two}", **often))
        workers[0].kill()
        program.run(seeded(parts, rounds=3, workers=two, **often))
        resumed = program.run(seeded(parts, **often))
    assert_same(resumed, whole)


def test_waiting_for_workers_has_the_end_that_a_flag_sets(tmp_path):
    nobody = "localhost:1"
    settings = {"worker_ready_seconds": 2.0, "worker_round_seconds": 40.0}
    with pytest.raises(TimeoutError, match=r"localhost:1.* ready_seconds=2\b"):
        program.run(seeded(tmp_path, workers=nobody, **settings))


@pytest.mark.parametrize(
    "workers, message",
    [
        ("localhost", "--workers must be addresses of the form host:port"),
        ("a:1,a:1", "--workers must be different"),
        ("", "flag --workers=: must be a text that is not empty"),
    ],
)
@pytest.mark.thinned(3)
def test_wrong_workers_are_a_sentence(tmp_path, workers, message):
    with pytest.raises(SystemExit, match=message):
        command.main("digits", [f"--output_dir={tmp_path}", f"--workers={workers}"])
