"""keras.io's examples train, or are refused, as docs/keras_examples.md says."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import tensorflow as tf

from tests import stack
from tests.keras_io import check, page, steps
from tests.keras_io.examples import GROUPS, Example

EXAMPLES = {name: e for examples in GROUPS.values() for name, e in examples.items()}
ROWS = page.rows_of(page.PAGE.read_text())


def assert_as_the_page_says(name, steps):
    needs = EXAMPLES[name].needs
    if needs and not (stack.KERAS_3 and importlib.util.find_spec(needs)):
        pytest.skip(f"{needs} is not installed, or not for this Keras")
    said = ROWS[name][page.COLUMN]
    assert check.outcome(EXAMPLES[name], steps) == said


# Three steps of some; all of them for a hundred.
_FAST = (
    "Knowledge Distillation",
    "Metric learning for image similarity search",
    "Customizing `fit`: a loss of your own",
)


@pytest.mark.parametrize("name", _FAST)
def test_a_few_steps_are_taken_or_refused_as_the_page_says(name):
    assert_as_the_page_says(name, 3)


@pytest.mark.slow
@pytest.mark.every_check
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_hundred_steps_are_taken_or_refused_as_the_page_says(name):
    assert_as_the_page_says(name, 100)


def test_every_example_has_a_line_and_no_refusal_is_without_a_word():
    assert list(ROWS) == list(EXAMPLES)
    for name, (*cells, change) in ROWS.items():
        assert change == EXAMPLES[name].change
        assert change or set(cells) <= {"works", page.NOT_RUN}, name


def test_what_is_found_is_written_into_the_column_of_this_stack(tmp_path, monkeypatch):
    path = tmp_path / "page.md"
    path.write_text(f"ahead\n{page.BEGIN}\n{page.END}\nbehind\n")
    monkeypatch.setattr(page, "PAGE", path)
    page.update({"WGAN-GP": "refused"})
    page.update({"Speaker Recognition": "works"})
    rows = page.rows_of(path.read_text())
    assert rows["WGAN-GP"][page.COLUMN] == "refused"
    assert rows["Speaker Recognition"][page.COLUMN] == "works"
    assert rows["WGAN-GP"][1 - page.COLUMN] == page.NOT_RUN
    assert path.read_text().startswith("ahead\n")
    assert path.read_text().endswith("\nbehind\n")


@pytest.mark.slow
def test_the_ctc_of_the_page_trains_as_a_batch():
    example = Example(steps.captcha(steps.ctc_of_probabilities))
    assert check.outcome(example, 3) == "works"


def test_the_ctc_of_the_page_is_tensorflows():
    labels = np.array([[2, 2, 2], [0, 1, 0], [4, 3, 4]], np.int32)
    logits = tf.random.stateless_normal([3, 9, 6], [1, 2])
    lengths = [3, 3, 3], [9, 9, 9]
    theirs = tf.nn.ctc_loss(labels, logits, *lengths, False, blank_index=5)
    np.testing.assert_allclose(steps.ctc(labels, logits, 5), theirs, rtol=1e-5)
