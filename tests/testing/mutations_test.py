"""Planted bugs are found, and sound code passes the same checks."""

import pytest

from tests.testing import mutations
from tests.testing.mutations import MUTATIONS
from tests.testing.planting import cases, distinct_checks, found

pytestmark = pytest.mark.every_check

# Checks that test noise have false alarms with probability 1e-6 each.


@pytest.mark.parametrize("mutation", cases(MUTATIONS))
@pytest.mark.thinned(16)
def test_planted_bug_is_found(mutation):
    assert found(mutation) is not None


@pytest.mark.parametrize(("check", "options"), distinct_checks(MUTATIONS))
@pytest.mark.slow
def test_sound_code_passes(check, options):
    check(**options)


def test_there_are_enough():
    assert len(MUTATIONS) >= 25
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)


def test_batch_normalisation_is_found_to_mix_examples():
    with pytest.raises(AssertionError, match="example"):
        mutations.isolation()


@pytest.mark.slow
def test_clip_norm_survives_a_checkpoint():
    mutations.assert_clip_restored()
