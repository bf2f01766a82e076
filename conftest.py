"""Leaves out the tests that the installed stack cannot run.

docs/stacks.md has the stacks. The header of a run names the tests left out, and why.
"""

import importlib.metadata
import importlib.util
import os
import sys

import pytest

# Files and directories whose names match, by the package that they need.
NEEDS = {
    "tensorflow_federated": [
        "tests/federated",
        "tests/testing/federated_*.py",
        "tests/tff_tasks",
        "tfdpclip/federated",
    ],
}
MISSING = [name for name in NEEDS if importlib.util.find_spec(name) is None]

# From TensorFlow 2.16 on, `tf.keras` is Keras 3 by default. (TensorFlow itself is not
# asked, because its import takes seconds.)
MAJOR, MINOR = map(int, importlib.metadata.version("tensorflow").split(".")[:2])
LEGACY = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
KERAS_3 = (MAJOR, MINOR) >= (2, 16) and not LEGACY
OTHER_KERAS = f"tfdpclip/keras/_keras{2 if KERAS_3 else 3}.py"

collect_ignore_glob = [pattern for name in MISSING for pattern in NEEDS[name]]
collect_ignore = [OTHER_KERAS]


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message) -> None:
    """Turns a test's warning into a plain warning with the same text.

    pytest-xdist imports the class of each warning, in a thread for each process: two
    threads in the same package end the run, in an error that blames neither a test nor
    a warning.
    """
    kind = warning_message.category
    if kind.__module__ != "builtins":
        text = f"{kind.__name__}: {warning_message.message}"
        warning_message.message = UserWarning(text)
        warning_message.category = UserWarning


def pytest_report_header() -> list[str]:
    return [
        f"without {name}, which is not installed: {', '.join(NEEDS[name])}"
        for name in MISSING
    ] + [f"without {OTHER_KERAS}, which is of another Keras"]


@pytest.fixture(autouse=True)
def _rules_are_as_before():
    """Removes the registrations that a docstring or a page made.

    Tests of the set of ops or clip rules may follow in the same process.
    """
    registered = sys.modules.get("tfdpclip._registered")
    tables = vars(registered.REGISTERED).values() if registered else ()
    before = [dict(table) for table in tables]
    yield
    notes = sys.modules.get("tfdpclip._notes")
    if notes is not None:
        # Drops elements that an earlier test drew and that are still referenced, and
        # the noise of aggregators that an earlier test made.
        notes.NOTES._taken.clear()
        notes.NOTES._dealt.clear()
        notes.NOTES.round_noises.clear()
    for table, rules in zip(tables, before, strict=True):
        table.clear()
        table.update(rules)
