"""Symmetry of gradients: all figures and numbers from small real files."""

from __future__ import annotations

import pytest

from keras_examples import gradient_symmetry
from tests.keras_examples import image_files as files
from tests.output_files import rows_of, words_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("symmetry")
    files.mnist_npz(path, 64)
    gradient_symmetry.main(
        [
            "gradient_symmetry",
            f"--data_dir={path}",
            "--epochs=2",
            "--scatter_epochs=0,2",
            "--planes_epoch=1",
            "--cosine_epochs=1,2",
            "--planes=3",
            "--samples=40",
            "--permutations=19",
            "--batch_size=16",
            f"--output_dir={path / 'out'}",
        ]
    )
    return path / "out"


@pytest.mark.slow
def test_summary_has_a_row_per_epoch(directory):
    rows = rows_of(directory, "summary")
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    for row in rows:
        assert row["count"] == "40"
        assert 0 <= float(row["cosine_negative"]) <= 1
        assert 0 < float(row["p_value_median"]) <= 1
        assert abs(float(row["bias"])) <= float(row["wasserstein"]) + 1e-9


def test_tables_for_every_figure(directory):
    cosines = rows_of(directory, "cosines")
    assert len(cosines) == 2 * 40
    assert all(-1 <= float(row["cosine"]) <= 1 for row in cosines)
    assert len(rows_of(directory, "projections")) == 3 * 2 * 40
    for name in ("fig1_epochs", "fig2_planes", "fig3_cosines"):
        assert (directory / f"{name}.png").stat().st_size > 10_000


def test_report_tells_private_from_not(directory):
    report = words_of(directory)
    for words in (
        "WITHOUT noise",
        "-differential privacy",
        "Poisson, rate 0.25",
        "Claim: gradients are clearly asymmetric",
        "40 examples",
    ):
        assert words in report, words


def test_epochs_beyond_the_end_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="--epochs=2: figures are wanted at epoch 60"):
        gradient_symmetry.main(
            ["x", "--dataset=synthetic", "--epochs=2", f"--output_dir={tmp_path}"]
        )


def test_all_figures_count_epochs_alike():
    """One set of epochs; the last is that after the last epoch of training."""
    used = gradient_symmetry.Settings()
    assert set(used.cosine_epochs) < set(used.scatter_epochs)
    assert used.planes_epoch in used.scatter_epochs
    assert max(used.scatter_epochs) == max(used.score_epochs) == used.epochs
