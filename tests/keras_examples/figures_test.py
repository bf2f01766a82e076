"""Figures and findings show all results, each under its own name."""

from __future__ import annotations

import io

import numpy as np
import pytest
import tensorflow as tf

from driver_kit import plotting, programs, settings
from keras_examples import image_data, norm_figures, optimal_clip, training
from keras_examples.class_weights import class_weights
from keras_examples.heat_map import draw_heat_map
from tests.keras_examples import image_files
from tfdpclip import pictures
from tfdpclip.tuning import Grid, run_grid


def assert_nothing_is_cropped(figure):
    figure.canvas.draw()
    texts = [figure._suptitle, *(ax.title for ax in figure.axes)]
    for text in texts:
        if text is not None and text.get_text():
            box = text.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= figure.bbox.x1, text.get_text()


def test_long_titles_fit():
    rows, curves = [], []
    for sigma in (0.1, 1.0):
        rows.append({"step": 0, "sigma": sigma, "clip_norm": 1.0, "mse": 1.0})
        row = {"step": 0, "sigma": sigma, "noise": 1.0, "clipping_error": 1.0}
        curves += [{**row, "clip_norm": c, "mse": 2.0} for c in (0.5, 1.0)]
    assert_nothing_is_cropped(optimal_clip._plot(rows, curves, "gradients.npz"))
    name = "a network that has a long name, and data whose name is longer still"
    title = f"Gradient norms, {name}"
    figure = norm_figures.draw_norms({"ε = 1": np.ones(5)}, 1.0, "", title, True)
    assert_nothing_is_cropped(figure)
    figure, _ = pictures.new(3, 3)
    figure.suptitle(name)
    with pytest.raises(AssertionError):
        assert_nothing_is_cropped(figure)


def test_the_line_of_guessing_is_where_it_is_seen():
    _, axes = pictures.new(3, 3)
    axes[0, 0].set_ylim(50, 100)
    plotting.guessing(axes[0, 0], 0.1, most=100)
    assert not axes[0, 0].lines
    plotting.guessing(axes[0, 0], 0.6, most=100)
    (line,) = axes[0, 0].lines
    assert line.get_label() == "guessing: 60%" and line.get_ydata()[0] == 60


@pytest.mark.parametrize("low, high", [(12, 15), (1, 1.2), (3, 50), (1e-3, 10)])
def test_narrow_logarithmic_axes_have_ticks(low, high):
    _, axes = pictures.new(3, 3)
    axes[0, 0].set(yscale="log", ylim=(low, high))
    pictures.round_ticks(axes[0, 0].yaxis, low, high)
    ticks = axes[0, 0].yaxis.get_majorticklocs()
    assert 3 <= sum((low <= ticks) & (ticks <= high)) <= 14


def test_claims_are_those_of_the_numbers():
    def rows(*clips, step=0):
        return [
            {"step": step, "sigma": float(k), "clip_norm": c}
            for k, c in enumerate(clips)
        ]

    noise, steps = optimal_clip._falls(rows(3.0, 2.0, 2.0, 0.0))
    assert "it held in all 3 comparisons" in noise and "not looked at" in steps
    noise, steps = optimal_clip._falls(
        rows(3.0, 2.0, 2.5) + rows(4.0, 1.0, 0.5, step=9)
    )
    assert "did NOT hold; the clip norm rose in 1 of 4" in noise
    assert "did NOT hold; the clip norm rose in 1 of 3" in steps
    noise, _ = optimal_clip._falls(rows(3.0))
    assert "not looked at" in noise


def test_runs_without_privacy_have_no_epsilon():
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(2)])
    model.compile("sgd", training.LOSS)
    x, y = np.ones((8, 2), np.float32), np.arange(8) % 2
    said = io.StringIO()
    trained = training.fit(
        model,
        tf.data.Dataset.from_tensor_slices((x, y)).batch(4),
        2,
        (x, y),
        delta=None,
        stream=said,
    )
    shown = said.getvalue()
    assert "without privacy" in shown and "accuracy" in shown
    assert "nan" not in shown and "epsilon" not in shown
    assert all("epsilon" not in row for row in trained.rows)


def test_the_epsilon_panel_has_private_runs_only():
    def run(*accuracies, **spent):
        return [
            {"epoch": k, "test_accuracy": a, **spent} for k, a in enumerate(accuracies)
        ]

    runs = {"DP-SGD": run(0.1, 0.91, 0.95, epsilon=1.0), "SGD": run(0.1, 0.98, 0.99)}
    accuracy, epsilon = training.curves(runs, "A title", 0.1).axes
    assert [line.get_label() for line in epsilon.lines] == ["DP-SGD"]
    # Values above 90 % have most of the axis.
    low, high = accuracy.get_ylim()
    assert 89 < low < 91 and 99 < high < 101
    assert len(training.curves({"SGD": runs["SGD"]}, "A title", 0.1).axes) == 1


@pytest.mark.parametrize("spread", [1.0, 1e4, 1e9])
def test_no_point_is_outside_of_the_plane(spread):
    rng = np.random.default_rng(0)
    points = rng.normal(size=(200, 2)) * np.exp(
        rng.uniform(-np.log(spread), 0, (200, 1))
    )
    points[0] = 0.0
    logarithmic = plotting.heavy_tailed([points])
    assert logarithmic == (spread > 1)
    _, axes = pictures.new(3, 3)
    place = plotting.plane(axes[0, 0], points, logarithmic)
    drawn = place(points)
    assert np.abs(drawn).max() < axes[0, 0].get_xlim()[1]
    np.testing.assert_allclose(place(-points), -drawn)
    # Directions, and the order of distances from zero, stay.
    angles, shown = (np.arctan2(*p[1:].T) for p in (points, drawn))
    np.testing.assert_allclose(shown, angles, atol=1e-9)
    orders = [np.argsort(np.linalg.norm(p, axis=1)) for p in (points, drawn)]
    np.testing.assert_array_equal(*orders)


def test_only_mnist_is_called_mnist(tmp_path, monkeypatch):
    folder = tmp_path / "some_other_digits"
    folder.mkdir()
    image_files.mnist_idx(folder)
    found = image_data.load_mnist(folder)
    assert found.name == "images in MNIST's format (some_other_digits)"
    digests = []

    class Known(dict):
        def get(self, key, default):
            digests.append(key)
            return default

    monkeypatch.setattr(image_data, "_KNOWN", Known())
    image_data.load_mnist(folder)
    monkeypatch.setattr(image_data, "_KNOWN", {digests[0]: "Fashion-MNIST"})
    assert image_data.load_mnist(folder).name == "Fashion-MNIST"


def test_figures_in_each_format(tmp_path):
    outcome = programs.Outcome("Title", ["found"], "none")
    outcome.figures["some_eps_0.5"] = pictures.new(2, 2)[0]
    used = optimal_clip.Settings(figure_format=("png", "pdf", "svg"))
    names = programs.write(outcome, used, tmp_path)
    starts = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
    for kind, start in starts.items():
        assert f"some_eps_0.5.{kind}" in names
        assert (tmp_path / f"some_eps_0.5.{kind}").read_bytes().startswith(start)
    with pytest.raises(settings.UsageError, match="--figure_format=.*png, pdf, svg"):
        settings.parse(optimal_clip.Settings, ["x", "--figure_format=gif"])


def test_weights_and_differences_stand_at_their_class():
    found = class_weights([0.5, 1.0, 4.0, 20.0], ["b", "b", "a", "c"], [0.1, 1, 10])
    figure = norm_figures.draw_class_weights(
        found, ["c", "a", "b"], {"less C = 1": [0.1, -0.1, 0.0]}, "A title", False
    )
    assert_nothing_is_cropped(figure)
    top, low = figure.axes
    expected = found.relative[0][[2, 0, 1]]
    np.testing.assert_allclose(top.get_lines()[0].get_ydata(), expected)
    np.testing.assert_allclose(low.get_lines()[0].get_ydata(), [0.0, 0.1, -0.1])
    assert [t.get_text() for t in low.get_xticklabels()] == ["c", "a", "b"]
    assert "not to be released" in figure.get_supxlabel()


def test_violins_of_zeros_equal_norms_and_none():
    rng = np.random.default_rng(0)
    norms = {str(k): np.exp(rng.normal(size=200) - k) for k in range(3)}
    norms["2"][:5] = 0.0
    norms |= {"equal": np.full(9, 2.0), "empty": np.zeros(0)}
    figure = norm_figures.draw_norms(norms, 1.0, "epoch", "A title", False)
    assert_nothing_is_cropped(figure)
    ax = figure.axes[0]
    assert [t.get_text() for t in ax.get_xticklabels()] == list(norms)
    note = figure.get_supxlabel()
    assert "not to be released" in note and "5 norms that are 0" in note
    labels = [t.get_text() for t in ax.get_legend().get_texts()]
    assert labels == ["median", "middle half", "clip norm"]


def test_a_heat_map_has_the_best_score_of_each_setting():
    def score(point):
        value = {0.1: 0.5, 1.0: 0.7, "automatic": 0.6}[point.clip_norm]
        value -= 0.1 * (point.batch_size == "full")
        return value - 0.2 * (point.learning_rate == 0.01) + 0.01 * point.seed

    grid = Grid([0.1, 1.0, "automatic"], [64, "full"], [0.01, 0.1], seeds=(0, 1))
    result = run_grid(grid, score)
    ax = draw_heat_map(result, "macro accuracy", "A title").axes[0]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["0.1", "1", "automatic"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["64", "full"]
    assert "0.705" in {t.get_text() for t in ax.texts} and len(ax.texts) == 6
