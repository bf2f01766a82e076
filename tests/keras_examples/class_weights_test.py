"""Retained weight: known answers, by hand and on digits."""

import json
import pathlib

import numpy as np
import pytest

from keras_examples.class_weights import (
    class_accuracy,
    class_weights,
    retained_weight,
)
from tests.diagnostics.models import digits, regression

_FILE = pathlib.Path(__file__).parents[1] / "data" / "clipping_cases.json"
(ORACLE,) = [
    case
    for case in json.loads(_FILE.read_text())["cases"]
    if case["name"].startswith("retained/")
]
NORMS = np.array([0.5, 1, 2, 4, 5, 10, 20, 40])
LABELS = np.array(["a", "a", "a", "b", "b", "c", "c", "c"])


def test_known_answers():
    found = class_weights(NORMS, LABELS, [0.1, 1, 10, 42])
    expected = [
        [0.11666667, 0.0225, 0.00583333],
        [0.83333333, 0.225, 0.05833333],
        [1, 1, 0.58333333],
        [1, 1, 1],
    ]
    relative = [[0.14, 0.027, 0.007], [1, 0.27, 0.07], [1.2, 1.2, 0.7], [1.2] * 3]
    np.testing.assert_allclose(found.weight, expected, atol=1e-8)
    np.testing.assert_allclose(found.relative, relative, atol=1e-12)
    np.testing.assert_allclose(found.fraction_clipped[1], [1 / 3, 1, 1])
    # Sums of the clipped norms at C = 1: 2.5, 2 and 3.
    np.testing.assert_allclose(found.share[1], np.array([2.5, 2, 3]) / 7.5)
    assert found.classes.tolist() == ["a", "b", "c"]
    assert found.counts.tolist() == [3, 2, 3]
    row = found.rows()[1]
    assert (row["clip_norm"], row["class"], row["count"]) == (0.1, "b", 2)
    assert row["relative"] == pytest.approx(0.027)


def test_oracle():
    inputs, expected = ORACLE["inputs"], ORACLE["expected"]
    norms = np.concatenate(list(inputs["norms"].values()))
    labels = np.repeat(
        list(inputs["norms"]), [len(v) for v in inputs["norms"].values()]
    )
    found = class_weights(norms, labels, [inputs["C"]], baseline=inputs["baseline_C"])
    for k, name in enumerate(found.classes):
        assert found.weight[0, k] == pytest.approx(
            expected["class_weight"][name], abs=1e-12
        )
        assert found.relative[0, k] == pytest.approx(
            expected["relative"][name], abs=1e-12
        )


def test_digits():
    """After 100 steps of descent on all 1,797 records."""
    x, y = digits()
    w, residual = regression(100)
    norms = np.linalg.norm(residual, axis=1) * np.linalg.norm(x, axis=1)
    found = class_weights(norms, y, [0.1, 1, 5])
    expected = [
        [0.458929, 0.149210, 0.312114, 0.233854, 0.405200]
        + [0.296120, 0.432361, 0.339487, 0.103967, 0.135574],
        [0.967710, 0.775964, 0.886079, 0.860544, 0.912586]
        + [0.901427, 0.944107, 0.924035, 0.706698, 0.804207],
        [1.0] * 10,
    ]
    np.testing.assert_allclose(found.weight, expected, atol=1e-6)
    np.testing.assert_allclose(found.relative[0, [0, 8]], [0.474242, 0.107436], 1e-5)
    np.testing.assert_allclose(found.relative[2], 1.033367, rtol=1e-6)
    accuracy = class_accuracy(y, (x @ w).argmax(1) == y)
    expected = [0.9944, 0.9066, 0.9887, 0.9235, 0.9613]
    expected += [0.9615, 0.9669, 0.9888, 0.9023, 0.9389]
    np.testing.assert_allclose(accuracy.accuracy, expected, atol=5e-5)
    assert accuracy.order[0] == 0 and accuracy.order[-1] == 8


def test_zero_and_infinite_gradients():
    found = retained_weight([0.0, 0.5, 2.0, np.inf, np.nan], 1.0)
    assert found.tolist() == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_gradients_that_are_all_zero_have_no_shares():
    found = class_weights(np.zeros(3, np.float16), [0, 1, 1], [0.1, 1.0])
    assert not found.share.any() and (found.weight == 1).all()


def test_another_model_as_the_baseline():
    found = class_weights(
        NORMS, LABELS, [1.0], baseline_norms=[2.0, 4.0], baseline_labels=["a", "b"]
    )
    np.testing.assert_allclose(found.relative[0], found.weight[0] / 0.5)


def test_accuracy():
    labels, correct = [2, 2, 0, 0, 0, 0], [1, 0, 1, 1, 1, 0]
    one = class_accuracy(labels, correct)
    assert one.classes.tolist() == [0, 2] and one.accuracy.tolist() == [0.75, 0.5]
    assert (one.macro, one.micro) == (0.625, pytest.approx(4 / 6))
    assert class_accuracy([1, 0, 2], [1, 1, 1]).order.tolist() == [0, 1, 2]
