"""Proven models stay proven, as docs/results/proof.md says."""

from __future__ import annotations

import inspect

import pytest
import tensorflow as tf

from tests.proof_coverage import check, networks, page
from tests.proof_coverage.entries import GROUPS, KERAS, NEEDS_HUB, here

GOAL = 0.97
ROWS = page.rows_of(page.PAGE.read_text())

# Base classes, cells of layers with a line, layers for backends beside TensorFlow, and
# AugMix, which draws the layers that it calls while it is traced.
_NO_LINE = """AbstractRNNCell InputLayer InputSpec Layer GRUCell LSTMCell SimpleRNNCell
FlaxLayer JaxLayer TFSMLayer TorchModuleWrapper MaxNumBoundingBoxes
AugMix""".split()


def cases():
    """Every entry that this stack has; large networks are slow."""
    for group, entries in GROUPS.items():
        for name, entry in entries.items():
            marks = []
            if group in networks.GROUPS:
                marks.append(pytest.mark.slow)
            if group == NEEDS_HUB and not networks.HUB:
                continue
            if here(entry):
                yield pytest.param(group, name, id=f"{group}-{name}", marks=marks)


@pytest.mark.thinned(25)
@pytest.mark.parametrize("group, name", cases())
def test_no_verdict_is_worse_than_the_page_says(group, name):
    entry = GROUPS[group][name]
    found, ops = page.examined(entry)
    recorded = ROWS[group, name][KERAS - 2]
    if recorded != page.NOT_RUN:
        assert not page.is_worse(found, recorded, entry.apart), (found, ops)
    if not entry.apart:
        assert check.PROVEN not in page.verdicts_of(found)


def test_every_entry_has_a_line():
    assert set(ROWS) == {(g, name) for g, entries in GROUPS.items() for name in entries}


@pytest.mark.parametrize("stack", (2, 3))
def test_nearly_all_models_that_keep_examples_apart_are_proven(stack):
    found = page.counts(ROWS, stack)
    apart = {v: 0 for v in (check.PROVEN, "all")}
    for (_, stays_apart, verdict), count in found.items():
        assert stays_apart or verdict != check.PROVEN
        if stays_apart:
            apart["all"] += count
            apart[check.PROVEN] += count * (verdict == check.PROVEN)
    assert apart[check.PROVEN] >= GOAL * apart["all"], apart


def test_every_layer_and_loss_of_keras_has_a_line():
    lines = [name for entries in GROUPS.values() for name in entries]
    missing = []
    for module in (tf.keras.layers, tf.keras.losses):
        for name in dir(module):
            found = getattr(module, name)
            if not inspect.isclass(found) or name in (*_NO_LINE, "Loss", "Reduction"):
                continue
            if name != found.__name__:
                continue  # An alias of a class with a line.
            if not any(name in line for line in lines):
                missing.append(name)
    assert not missing


def test_a_page_says_what_was_found_and_keeps_the_rest(tmp_path, monkeypatch):
    path = tmp_path / "page.md"
    path.write_text(f"ahead\n{page.BEGIN}\n{page.END}\nbehind\n")
    monkeypatch.setattr(page, "PAGE", path)
    of_dense = ["core", "Dense"]
    page.update({tuple(of_dense): ["proven", "not run", ""]})
    page.update({("core", "Embedding"): ["not run", "unknown", "Where"]})
    rows = page.rows_of(path.read_text())
    assert rows["core", "Dense"] == ["proven", "not run", ""]
    assert rows["core", "Embedding"] == ["not run", "unknown", "Where"]
    assert rows["core", "Lambda"][:2] == ["not run", "not run"]
    assert path.read_text().startswith("ahead\n")
    assert path.read_text().endswith("\nbehind\n")


@pytest.mark.parametrize(
    "found, recorded, apart, worse",
    [
        ("proven", "proven", True, False),
        ("unknown", "proven", True, True),
        ("refused", "unknown", True, True),
        ("proven; unknown if static", "proven", True, True),
        ("proven", "proven; unknown if static", True, False),
        ("proven", "mixed", False, True),
        ("unknown", "mixed", False, True),
        ("refused", "mixed", False, False),
    ],
)
def test_what_is_worse(found, recorded, apart, worse):
    assert page.is_worse(found, recorded, apart) == worse
