"""Planted federated bugs are found, and sound code passes the same checks."""

import pytest

pytest.importorskip("tensorflow_federated")

from tests.testing.federated_mutations import MUTATIONS, context  # noqa: E402
from tests.testing.planting import cases, distinct_checks, found  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _secure_context():
    with context():
        yield


# Checks that test noise have false alarms with probability 1e-6 each.


@pytest.mark.parametrize("mutation", cases(MUTATIONS))
@pytest.mark.thinned(12)
def test_planted_bug_is_found(mutation):
    assert found(mutation) is not None


@pytest.mark.parametrize(("check", "options"), distinct_checks(MUTATIONS))
@pytest.mark.thinned(6)
def test_sound_code_passes(check, options):
    check(**options)


def test_there_are_enough():
    assert len(MUTATIONS) >= 25
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)
