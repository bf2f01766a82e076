"""The three synthetic problems: exact fixed points, and that descent finds them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from keras_examples import clipping_bias

# g, k and E clip(g + k zeta, 1), from 50-digit arithmetic.
from tests import output_files

ORACLE = [
    (0.3, 5, 0.04752768558417839),
    (-2, 1, -0.9170666837293614),
    (4, 1, 0.9996178991446076),
    (4, 5, 0.5732136917296541),
]

# Spec 3.4: k, fixed point of problem 1, drift at its optimum, slope, slope at 0 in 2.
KNOWN = [
    (0, -2.5, 0.3333, 0.667, 0.0),
    (1, -2.2135, 0.3331, 0.365, 0.0227),
    (2, -1.5948, 0.2970, 0.203, 0.136),
    (5, 0.0963, 0.0861, 0.0985, 0.133),
    (10, 0.7797, 0.0151, 0.0684, 0.0762),
    (20, 0.9462, 0.0021, 0.0383, 0.0394),
]


@pytest.mark.parametrize(("g", "k", "value"), ORACLE)
def test_expected_clipped_gradient_is_the_oracles(g, k, value):
    assert clipping_bias.expected_clipped(g, k) == pytest.approx(value, abs=1e-12)
    # Everything scales with the clip norm.
    assert clipping_bias.expected_clipped(3 * g, 3 * k, 3.0) == pytest.approx(
        3 * value, abs=1e-11
    )


@pytest.mark.parametrize(("k", "point", "at_optimum", "slope", "slope_2"), KNOWN)
def test_fixed_points_are_those_of_the_table(k, point, at_optimum, slope, slope_2):
    first, second = clipping_bias.POINTS[1], clipping_bias.POINTS[2]
    assert clipping_bias.fixed_point(first, k) == pytest.approx(point, abs=6e-5)
    assert clipping_bias.fixed_point(second, k) == pytest.approx(0, abs=1e-6)
    assert clipping_bias.drift(1.0, first, k) == pytest.approx(at_optimum, abs=6e-5)

    def slope_at(x, points):
        left, right = (clipping_bias.drift(x + h, points, k) for h in (-1e-4, 1e-4))
        return (right - left) / 2e-4

    assert slope_at(point, first) == pytest.approx(slope, rel=0.01)
    assert slope_at(0.0, second) == pytest.approx(slope_2, rel=0.01, abs=1e-9)


def test_the_library_perturbs_as_the_formula_says():
    # 4000 records of gradient 0.3 with k = 5: the mean of the clipped gradients has
    # stddev at most 1 / sqrt(4000) = 0.0158; 5.3 of these: false alarms 1e-7.
    count = 4000
    optimizer = dpc.keras.DPSGD(
        1.0,
        clip=1.0,
        noise_multiplier=0.0,
        expected_batch_size=count,
        perturbation=5.0,
        seed=1,
    )
    x = tf.Variable([0.0])

    @tf.function
    def step(targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(0.5 * tf.square(x - targets), axis=1)
        optimizer.minimize(loss, [x], tape=tape)

    step(tf.fill([count, 1], -0.3))
    expected = clipping_bias.expected_clipped(0.3, 5.0)
    assert -float(x[0]) == pytest.approx(expected, abs=5.3 / np.sqrt(count))
    assert expected < 0.05  # 0.3 without perturbation.


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A run with a rate at which 1500 steps arrive."""
    path = tmp_path_factory.mktemp("bias")
    clipping_bias.main(
        [
            "clipping_bias",
            f"--output_dir={path}",
            "--iterations=1500",
            "--iterations_3=1500",
            "--perturbations=0,1,5,10",
            "--learning_rate=0.04",
            "--noise_stddev=0.5",
            "--learning_rate_3=0.05",
            "--repeats=2",
        ]
    )
    return path


def numbers_of(directory, name):
    rows = output_files.rows_of(directory, name)
    return [{k: float(v or "nan") for k, v in row.items()} for row in rows]


@pytest.mark.slow
def test_descent_ends_where_the_expectation_is_zero(directory):
    for row in numbers_of(directory, "summary"):
        if row["problem"] == 1:
            # The iterates wander by sqrt(rate sigma^2 / (2 slope)) < 0.3 or so, and
            # the mean of 2 tails of 150 steps by less. Seeded: no false alarms.
            assert row["end_mean"] == pytest.approx(
                row["distance_of_fixed_point"], abs=0.4
            )


@pytest.mark.slow
def test_larger_perturbations_end_nearer(directory):
    ends = {
        (r["problem"], r["k"]): r["end_mean"] for r in numbers_of(directory, "summary")
    }
    assert ends[1, 0] > ends[1, 1] > ends[1, 5] > ends[1, 10]
    # In problem 2, plain clipping stays at the edge of the flat interval.
    assert ends[2, 0] > 1.2 > 0.6 > ends[2, 5]
    assert ends[3, 0] > ends[3, 5]
    assert ends[3, 0] > ends[3, 10]


@pytest.mark.slow
def test_report_and_files(directory):
    names = {path.name for path in directory.iterdir()}
    assert names == {
        "report.txt",
        "config.json",
        "summary.csv",
        "curves.csv",
        "distance.png",
    }
    report = output_files.words_of(directory)
    for words in (
        "Problem 1: plain clipping ends",
        "nearer held here",
        "gives no privacy by itself",
        "problem 3: epsilon",
        "made up",
    ):
        assert words in report, words


def test_two_stddevs_for_three_components_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="--component_stddevs: there are three"):
        clipping_bias.main(
            ["x", "--component_stddevs=36,4", f"--output_dir={tmp_path}"]
        )


@pytest.mark.slow
def test_problem_3_has_the_printed_axes_with_stddevs_36_4_1(tmp_path):
    """It starts at 25 or above, ends above 10, and the larger k ends nearer."""
    clipping_bias.main(
        [
            "x",
            "--problems=3",
            "--component_stddevs=36,4,1",
            "--perturbations=0,10",
            "--batch_size=16",
            "--repeats=1",
            f"--output_dir={tmp_path}",
        ]
    )
    plain, perturbed = numbers_of(tmp_path, "summary")
    assert plain["start"] == perturbed["start"] > 25
    assert plain["start"] > plain["end_mean"] > perturbed["end_mean"] > 10


def test_a_wrong_problem_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="--problems=4"):
        clipping_bias.main(["x", "--problems=4", f"--output_dir={tmp_path}"])


@pytest.mark.slow
def test_a_claim_of_runs_that_still_move_is_open(tmp_path):
    """Plain clipping moves by a hundredth a step, and has 5 and more to go."""
    clipping_bias.main(
        [
            "clipping_bias",
            f"--output_dir={tmp_path}",
            "--problems=1",
            "--iterations=300",
            "--learning_rate=0.03",
            "--noise_stddev=0",
            "--perturbations=0,5",
            "--repeats=1",
        ]
    )
    (first, _) = output_files.rows_of(tmp_path, "summary")
    assert first["settled"] == "0"
    report = output_files.words_of(tmp_path)
    assert "is open: k = 0" in report and "Raise --iterations." in report
    assert "held here" not in report
