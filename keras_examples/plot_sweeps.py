r"""Draws several sweeps of batch clipping together: a panel for each.

    python -m keras_examples.plot_sweeps --labels="constant; C falls; rate falls" \
        --results=runs/constant,runs/clip_falls,runs/rate_falls

Figures 13 to 17 of Nguyen, Nguyen, Nguyen and van Dijk (2023): test accuracy by epoch
at several batch sizes, with a constant or a falling learning rate and clip norm. The
results are directories that `batch_clipping_sweep` has written, such as those with
--learning_rate_decay=1 and --clip_decay=0.9; the lines are means over the repeats.
"""

from __future__ import annotations

import csv
import dataclasses
import pathlib
from collections.abc import Mapping

import numpy as np
from matplotlib import ticker

from driver_kit import plotting, programs, settings
from tfdpclip import pictures

_TABLE = "curves.csv"
#: What tells the lines of a panel apart.
_SETTING = ("method", "batch_size", "sigma", "clip_norm", "equal_privacy")
Curves = dict[tuple[str, ...], dict[int, list[float]]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the figure."""

    results: str | None = settings.words(
        None,
        "Directories of `batch_clipping_sweep`, separated by commas.",
        good="runs/constant,runs/falling",
    )
    labels: str | None = settings.words(
        None,
        "What to call them, separated by semicolons; by default their names.",
        good="constant; falling",
    )
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("plot_sweeps")


def read(directory: str) -> Curves:
    """Accuracies of the repeats in percent, by epoch, for each setting of a sweep.

    Raises:
      UsageError: if the table is missing or damaged.
    """
    path, curves = pathlib.Path(directory) / _TABLE, {}
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                line = curves.setdefault(tuple(row[name] for name in _SETTING), {})
                value = 100 * float(row["test_accuracy"])
                if not np.isfinite(value):
                    raise ValueError(f"an accuracy is {value}")
                line.setdefault(int(row["epoch"]), []).append(value)
        if not curves:
            raise ValueError("it has no rows")
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise settings.UsageError(
            f"flag --results={directory}: {path} cannot be read ({error}). It must be "
            "in the --output_dir of a batch_clipping_sweep that has ended."
        ) from error
    return curves


def run(used: Settings) -> programs.Outcome:
    """Reads and draws."""
    names = [part.strip() for part in (used.results or "").split(",") if part.strip()]
    if not names:
        raise settings.UsageError(
            "flag --results is missing: it must name directories of "
            "batch_clipping_sweep, for example --results=runs/constant,runs/falling."
        )
    labels = [part.strip() for part in (used.labels or "").split(";") if part.strip()]
    labels = labels or [pathlib.Path(name).name for name in names]
    if len(labels) != len(names) or len(set(labels)) != len(names):
        raise settings.UsageError(
            f"flag --labels={used.labels}: there must be one for each of the "
            f"{len(names)} results, all different, separated by semicolons."
        )
    sweeps = {label: read(name) for label, name in zip(labels, names, strict=True)}
    rows = [
        {"results": label, **dict(zip(_SETTING, key, strict=True)), **_last(line)}
        for label, lines in sweeps.items()
        for key, line in lines.items()
    ]
    return programs.Outcome(
        title="Sweeps of batch clipping, side by side",
        findings=[
            f"The last epoch's mean accuracy of each of {len(rows)} settings is in "
            "last.csv."
        ],
        privacy="of each sweep as its own report says; nothing was trained here.",
        tables={"last": rows},
        figures={"sweeps": plot(sweeps)},
        shown=("last",),
    )


def _last(line: Mapping[int, list[float]]) -> dict[str, float]:
    epoch = max(line)
    return {"epoch": epoch, "accuracy": float(np.mean(line[epoch]))}


def _words(place: int, value: str) -> str:
    """A value in the legend; nothing for one that the method does not use.

    >>> _words(1, "64"), _words(3, "0.20000000298"), _words(4, "False"), _words(2, "")
    ('m 64', 'C 0.2', '', '')
    """
    if place == 0:
        return value
    if place == len(_SETTING) - 1:
        return "sigma / sqrt(L)" if value == "True" else ""
    return f"{('m', 'sigma', 'C')[place - 1]} {float(value):.4g}" if value else ""


def plot(sweeps: Mapping[str, Curves]):
    """A panel for each sweep; a setting has the same style in all."""
    columns = min(2, len(sweeps))
    rows = -(-len(sweeps) // columns)
    picture, axes = pictures.new(
        2.6 + 4.2 * columns, 0.8 + 3.3 * rows, rows, columns, sharex=True, sharey=True
    )
    settings_of = dict.fromkeys(key for lines in sweeps.values() for key in lines)
    varied = [
        i for i in range(len(_SETTING)) if len({key[i] for key in settings_of}) > 1
    ]
    seen: list[float] = []
    for ax, (title, lines) in zip(axes.flat, sweeps.items(), strict=False):
        for k, key in enumerate(settings_of):
            if key not in lines:
                continue
            epochs = sorted(lines[key])
            means = [float(np.mean(lines[key][epoch])) for epoch in epochs]
            words = [_words(i, key[i]) for i in varied] or [key[0]]
            look = pictures.style(k, marked=len(epochs) < 15)
            ax.plot(epochs, means, label=", ".join(filter(None, words)), **look)
            seen += means
        ax.set_title(title, fontsize=10.5)
        ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    for ax in axes.flat[len(sweeps) :]:
        ax.set_visible(False)
    plotting.accuracy_axis(axes[0, 0], seen, most=100)
    for ax in axes[:, 0]:
        ax.set_ylabel("test accuracy (%)")
    for ax in axes[-1]:
        ax.set_xlabel("epoch")
    entries: dict[str, object] = {}
    for ax in axes.flat:
        entries |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    picture.legend(
        entries.values(), entries.keys(), loc="outside right center", fontsize=8.5
    )
    pictures.title(picture, "Test accuracy by epoch, mean over repeats")
    return picture


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
