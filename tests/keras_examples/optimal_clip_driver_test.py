"""Optimal clip norms on the digits: the reference numbers, files, errors."""

from __future__ import annotations

import numpy as np
import pytest

from keras_examples import optimal_clip

# Spec 10.1, by step: norms min, median, max; C* by sigma .05 .1 .25 .5 1 2 4.
from tests.output_files import rows_of, words_of

NORMS = {
    0: (3.346757, 3.867457, 4.531142),
    100: (0.047816, 0.580111, 4.896591),
    300: (0.005762, 0.194569, 5.116005),
}
CLIPS = {
    0: (
        4.16655208,
        4.01355126,
        3.74849926,
        3.37330500,
        2.48263156,
        1.20752239,
        0.39533248,
    ),
    100: (
        3.27731066,
        2.72734598,
        2.14686683,
        1.55828783,
        0.93523229,
        0.38467932,
        0.09974746,
    ),
    300: (
        3.00390296,
        2.30132079,
        1.61699670,
        1.19038794,
        0.57860581,
        0.25573000,
        0.07124966,
    ),
}
MSE_AT_1 = {0: 6220.361576, 100: 1318.056554, 300: 726.175556}
KINKS = {(0, 0.05), (0, 0.1), (100, 1.0), (300, 0.05), (300, 0.25)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("optimal")
    optimal_clip.main(["optimal_clip", f"--output_dir={path}"])
    return path


@pytest.fixture(scope="module")
def rows(directory):
    return rows_of(directory, "optimal_clip")


@pytest.mark.parametrize("step", [0, 100, 300])
@pytest.mark.slow
def test_reference_numbers(rows, step):
    mine = [r for r in rows if int(r["step"]) == step]
    found = [float(r["clip_norm"]) for r in mine]
    np.testing.assert_allclose(found, CLIPS[step], rtol=1e-5)
    norms = [float(mine[0][f"norm_{n}"]) for n in ("min", "median", "max")]
    np.testing.assert_allclose(norms, NORMS[step], rtol=1e-4)
    (at_1,) = (r for r in mine if float(r["sigma"]) == 1)
    assert float(at_1["mse"]) == pytest.approx(MSE_AT_1[step], rel=1e-6)
    assert {int(r["d"]) for r in mine} == {650}


@pytest.mark.slow
def test_kinks_are_where_the_reference_has_them(rows):
    kinks = {(int(r["step"]), float(r["sigma"])) for r in rows if r["kind"] == "kink"}
    assert kinks == KINKS


def test_training_accuracy_is_the_references():
    model = optimal_clip.SoftmaxRegression()
    for _ in range(100):
        model.step(1.0)
    assert model.accuracy() == pytest.approx(0.9532554, abs=1e-7)


@pytest.mark.slow
def test_report_says_that_it_is_not_private(directory):
    report = words_of(directory)
    assert "Privacy: none" in report
    assert "as private as they are" in report
    assert "The paper's equation, iterated, missed the minimum in" in report
    assert (directory / "mse.png").stat().st_size > 10_000


def test_gradients_from_a_file(tmp_path):
    np.savez(tmp_path / "g.npz", gradients=[[3.0, 4.0]])
    optimal_clip.main(
        [
            "optimal_clip",
            f"--gradients={tmp_path / 'g.npz'}",
            "--noise_multipliers=1",
            f"--output_dir={tmp_path / 'out'}",
        ]
    )
    (row,) = rows_of(tmp_path / "out", "optimal_clip")
    assert float(row["clip_norm"]) == pytest.approx(5 / 3)
    assert float(row["mse"]) == pytest.approx(50 / 3)


@pytest.mark.parametrize("content", [None, {"other": [1.0]}, {"gradients": [1.0]}])
def test_a_wrong_file_is_named(tmp_path, content):
    path = tmp_path / "g.npz"
    if content is not None:
        np.savez(path, **content)
    with pytest.raises(SystemExit, match="--gradients="):
        optimal_clip.main(["x", f"--gradients={path}", f"--output_dir={tmp_path}"])
