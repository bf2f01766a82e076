"""Several replicas in a process: a separate process for every number of replicas."""

import os
import subprocess
import sys

import pytest

from tests import source_tree

CASES = "tests/replicas/mirrored_cases.py"
# A case of each kind: a minute and a half.
QUICK = (
    "quantile-accumulation or noise_of_a_step and 1-None or streams or failure_on or "
    "one_batch or later_replica or draws_are or draw_for_each or another_scope or "
    "moving-clip or in_a_row or plan_alone or different_steps or whole_draws or "
    "were_dealt"
)


def run(replicas, *options):
    environment = dict(os.environ, REPLICAS=str(replicas))
    command = [sys.executable, "-m", "pytest", CASES, "-q", "--tb=short", *options]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=source_tree.ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    return done.stdout


def test_two_replicas_train_on_either_keras():
    assert "1 passed" in run(2, "-k", "counts_are_noised_once")


@pytest.mark.slow
def test_two_replicas_do_what_one_device_does():
    # The mark lets `conftest.py` save the same work as in `make test`.
    assert " passed" in run(2, "-k", QUICK, "-m", "not slow")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_any_number_of_replicas(replicas):
    said = run(replicas)
    assert " passed" in said and ("skipped" in said) == (replicas == 1)
