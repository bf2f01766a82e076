"""Several sweeps of batch clipping in one figure, from their saved tables."""

from __future__ import annotations

import pytest

from driver_kit import settings
from keras_examples import plot_sweeps

HEADER = "method,batch_size,sigma,clip_norm,equal_privacy,repeat,epoch,test_accuracy\n"


def sweep(directory, last):
    """A directory of a sweep: two batch sizes, two repeats, two epochs."""
    directory.mkdir()
    rows = [
        f"batch:adaptive,{m},0.5,0.2,False,{repeat},{epoch},"
        f"{0.1 if epoch == 0 else last - m / 1000 + 0.02 * repeat}\n"
        for m in (64, 128)
        for repeat in (0, 1)
        for epoch in (0, 1)
    ]
    (directory / "curves.csv").write_text(HEADER + "".join(rows))
    return str(directory)


def test_four_sweeps_are_four_panels_with_the_means_of_repeats(tmp_path):
    names = [sweep(tmp_path / f"s{i}", 0.5 + i / 10) for i in range(4)]
    outcome = plot_sweeps.run(plot_sweeps.Settings(results=",".join(names)))
    axes = outcome.figures["sweeps"].axes
    assert [ax.get_title() for ax in axes] == ["s0", "s1", "s2", "s3"]
    for i, ax in enumerate(axes):
        small, large = ax.get_lines()
        expected = 100 * (0.5 + i / 10 + 0.01)
        assert list(small.get_ydata()) == pytest.approx([10, expected - 6.4])
        assert list(large.get_ydata()) == pytest.approx([10, expected - 12.8])
        assert (small.get_label(), large.get_label()) == ("m 64", "m 128")
    rows = outcome.tables["last"]
    assert len(rows) == 8 and rows[0]["accuracy"] == pytest.approx(44.6)


def test_missing_and_damaged_sweeps_and_labels_are_refused(tmp_path):
    name = sweep(tmp_path / "a", 0.5)
    for wrong in ({"results": None}, {"results": name, "labels": "x; y"}):
        with pytest.raises(settings.UsageError, match="flag --"):
            plot_sweeps.run(plot_sweeps.Settings(**wrong))
    table = tmp_path / "a" / "curves.csv"
    for damaged in ("", HEADER, "a,b\n1,2\n", table.read_text().replace("0.1", "nan")):
        table.write_text(damaged)
        with pytest.raises(settings.UsageError, match="--results=.*cannot be read"):
            plot_sweeps.read(name)
