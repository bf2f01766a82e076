"""Every finding is refused, and the page says truly by what."""

import contextlib

import pytest

from tests.testing.defences import (
    DEFENCES,
    FINDINGS,
    PAGE,
    LoudError,
    is_refused,
    page,
)

pytestmark = pytest.mark.every_check

EVERY = frozenset(DEFENCES)


@contextlib.contextmanager
def unless_loud():
    """Skips where TensorFlow's own kernel says what defences are to find."""
    try:
        yield
    except LoudError as error:
        pytest.skip(f"TensorFlow finds it itself here: {error}")


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda f: f.name.replace(" ", "_"))
@pytest.mark.thinned(15)
def test_nothing_but_the_defences_finds_it(finding):
    with unless_loud():
        assert not is_refused(finding, frozenset())
    assert is_refused(finding, EVERY)


@pytest.mark.parametrize("name", DEFENCES)
@pytest.mark.parametrize("finding", FINDINGS, ids=lambda f: f.name.replace(" ", "_"))
@pytest.mark.thinned(72)
def test_a_defence_alone_finds_what_the_page_says(finding, name):
    with unless_loud():
        assert is_refused(finding, frozenset({name})) == (name in finding.found)


@pytest.mark.parametrize(
    "finding", [f for f in FINDINGS if f.guards], ids=lambda f: f.name.replace(" ", "_")
)
@pytest.mark.slow
def test_with_its_own_guard_there_is_nothing_to_find(finding):
    assert not is_refused(finding, EVERY, guarded=True)


def test_the_page_is_the_table():
    assert PAGE.read_text() == page()
