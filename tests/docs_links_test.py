"""The targets of links in pages and error messages exist."""

import ast
import importlib.metadata
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.stand_in_aggregator import Aggregator
from tfdpclip._docs import see

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("tutorials/*.md")])


def anchors(page: pathlib.Path) -> list[str]:
    """The anchors of a page's headings, as they are made for Markdown on the web."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return [heading.replace(" ", "-") for heading in plain]


def references():
    """Every call of `see`, with its file and its argument."""
    found = []
    for path in sorted((ROOT / "tfdpclip").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "see":
                found.append((path.name, node.args[0]))
    return found


def test_every_error_that_points_to_a_pitfall_finds_it():
    known = anchors(DOCS / "pitfalls.md")
    assert len(set(known)) == len(known)
    used = references()
    assert len(used) >= 20
    for name, argument in used:
        assert isinstance(argument, ast.Constant), name
        assert argument.value in known, (name, argument.value)


def test_links_to_headings_lead_somewhere():
    for page in (ROOT / "README.md", *PAGES):
        for target, anchor in re.findall(r"\]\(([\w./]*)#([\w-]+)\)", page.read_text()):
            other = (page.parent / target).resolve() if target else page
            assert anchor in anchors(other), (page.name, target, anchor)


@pytest.mark.parametrize("name", ["pitfalls.md", "guarantees.md"])
def test_the_tests_that_are_quoted_exist(name):
    tests = "\n".join(
        p.read_text() for p in sorted((ROOT / "tests").rglob("*_test.py"))
    )
    quoted = set(re.findall(r"`(test_\w+)`", (DOCS / name).read_text()))
    assert len(quoted) > 20
    missing = [q for q in sorted(quoted) if not re.search(rf"def {q}\(", tests)]
    assert not missing


def test_the_extra_for_gpus_exists():
    """The page on devices installs it, which no test can."""
    extra = re.search(r"tensorflow\[([\w-]+)\]", (DOCS / "devices.md").read_text())[1]
    of_tensorflow = importlib.metadata.metadata("tensorflow")
    assert extra in of_tensorflow.get_all("Provides-Extra")


def test_every_pitfall_has_a_severity_and_says_what_is_done():
    text = (DOCS / "pitfalls.md").read_text()
    parts = re.split(r"^### ", text, flags=re.M)[1:]
    assert len(parts) >= 24
    for part in parts:
        title = part.splitlines()[0]
        assert re.search(r"\*\*(critical|serious|minor)\.\*\*", part), title
        assert "*Here:*" in part and re.search(r"\*What\s+remains:\*", part), title


def _fit(optimizer, *layers, **options):
    model = tf.keras.Sequential(
        [tf.keras.Input((3,)), *layers, tf.keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse", **options)
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)


def _optimizer(**options):
    options = {"expected_batch_size": 4, **options}
    return dpc.keras.DPSGD(0.1, clip=1.0, noise_multiplier=1.0, **options)


def _by_hand():
    optimizer, v = _optimizer(), tf.Variable(1.0)
    optimizer.apply_gradients([(tf.constant(1.0), v)])


def _spent():
    cohorts = dpc.sampling.Poisson(0.5).cohorts([1, 2])
    with dpc.accounting.RoundBudget(0.1, 1e-5, cohorts, Aggregator(0.5)).round():
        pass


def _changed():
    ledger = dpc.accounting.Ledger(1e-5)
    for z in (1.0, 2.0):
        ledger.begin(noise_multiplier=z, sampling=dpc.sampling.Poisson(0.1))


def _arrays():
    scheme = dpc.sampling.Poisson(0.0123)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(_optimizer(), "mse")
    callback = dpc.keras.PrivacyBudget(1.0, 1e-5, scheme)
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0, callbacks=[callback])


def _batch_unit():
    optimizer = dpc.keras.DPSGD(0.1, clip=1.0, noise_multiplier=1.0, unit="batch")
    _fit(optimizer, tf.keras.layers.BatchNormalization())


def _compared():
    x = np.arange(8.0).reshape(4, 2)
    model = tf.keras.Sequential([tf.keras.layers.BatchNormalization()])
    dpc.keras.check_isolation(model, x, x, loss=tf.keras.losses.mse)


@pytest.mark.parametrize(
    "fails, anchor",
    [
        (
            lambda: _fit(_optimizer(), tf.keras.layers.BatchNormalization()),
            "mixed-examples",
        ),
        (_compared, "mixed-examples"),
        (_by_hand, "gradients-made-elsewhere"),
        (_batch_unit, "batch-statistics"),
        (_arrays, "batches-drawn-another-way"),
        (_changed, "changed-settings"),
        (_spent, "a-spent-budget"),
        (
            lambda: dpc.keras.DPSGD(
                0.1,
                clip=dpc.QuantileClip(count_stddev=0.1),
                noise_multiplier=1.0,
                expected_batch_size=4,
            ),
            "counts-that-cost-privacy",
        ),
    ],
)
def test_errors_end_with_their_pitfall(fails, anchor):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        fails()
    assert see(anchor).strip() in str(caught.value)
