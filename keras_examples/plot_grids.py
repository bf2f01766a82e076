r"""Draws several searches together: a panel for each network or data set.

    python -m keras_examples.plot_grids --results=runs/vit_tiny,runs/vit_base

Figure 2 of Rehn, Zhao, Heikkila and Honkela (2025): accuracy less the best by clip norm
at several epsilons, for two backbones; and the best clip norm by epsilon. Figure 1:
heat maps of three problems, the first search at its largest epsilon, the last search
there, and the last at its smallest. The results are directories that `tune_grid` has
written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from driver_kit import programs, settings
from keras_examples import grid_figures, grid_results


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the figures."""

    results: str | None = settings.words(
        None,
        "Directories of `tune_grid`, separated by commas.",
        good="runs/vit_tiny,runs/vit_base",
    )
    labels: str | None = settings.words(
        None,
        "What to call them, separated by semicolons; by default as they say.",
        good="ViT-Tiny; ViT-Base",
    )
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("plot_grids")


def run(used: Settings) -> programs.Outcome:
    """Reads and draws."""
    found = _read(used)
    parts, rows = {}, []
    for name, result in found.items():
        durations = grid_figures.of_epochs(result.clip_norms)
        for epochs, part in durations.items():
            title = f"{name}, {epochs:g} epochs" if len(durations) > 1 else name
            parts[title] = part
            rows += _best(name, epochs, part)
    tuned = "batch size and learning rate tuned at every clip norm"
    return programs.Outcome(
        title="Best clip norms of several searches",
        findings=[*_by_epsilon(rows), *_between(rows, list(found))],
        privacy="of each search as its own report says; nothing was trained here. "
        "Searches on the same records add up, which no report says.",
        caveats=[
            "not_told_apart: clip norms whose greatest repeat reaches the least repeat "
            "of the best; few repeats say little.",
        ],
        tables={"best_clip_norms": rows},
        figures={
            "clip_norm": grid_figures.curves(
                parts, "clip_norm", f"{tuned} (bands: least to greatest repeat)"
            ),
            "best_clip_norm": grid_figures.best_clip_norms(
                parts, "Best clip norm (bars: norms that repeats do not tell from it)"
            ),
            "heat_maps": grid_figures.heat_maps(
                _problems(found),
                "From the easy to the hard problem (best learning rate)",
            ),
        },
        shown=("best_clip_norms",),
    )


def _read(used: Settings) -> Mapping[str, grid_results.Results]:
    names = _parts(used.results, ",")
    if not names:
        raise settings.UsageError(
            "flag --results is missing: it must name directories of tune_grid, for "
            "example --results=runs/vit_tiny,runs/vit_base."
        )
    found = [grid_results.read(name) for name in names]
    labels = _parts(used.labels, ";") or [one.name for one in found]
    if len(labels) != len(found) or len(set(labels)) != len(found):
        raise settings.UsageError(
            f"flag --labels={used.labels}: there must be one for each of the "
            f"{len(found)} results, all different, separated by semicolons; for "
            f"example --labels={'; '.join(names)}."
        )
    return dict(zip(labels, found, strict=True))


def _problems(found: Mapping[str, grid_results.Results]):
    """The cells of Figure 1's three problems: the first search at its largest epsilon,
    the last search there, and at its smallest."""
    ends = []
    for one in (next(iter(found)), list(found)[-1]):
        epsilons = {row["epsilon"] for row in found[one].clip_norms}
        ends.append((one, min(epsilons), max(epsilons)))
    (first, _, easy), (last, tight, loose) = ends
    wanted = dict.fromkeys([(first, easy), (last, loose), (last, tight)])
    return {f"{name}, ε = {e:g}": found[name].cells(e) for name, e in wanted}


def _parts(text: str | None, separator: str) -> list[str]:
    found = (text or "").split(separator)
    return [part.strip() for part in found if part.strip()]


def _best(name, epochs, rows) -> list[dict[str, Any]]:
    """The best clip norm at every epsilon."""
    found = []
    for epsilon in sorted({row["epsilon"] for row in rows}):
        mine = [row for row in rows if row["epsilon"] == epsilon]
        best, close = grid_figures.close_to_best(mine, "clip_norm")
        scores = {row["clip_norm"]: row["mean"] for row in mine}
        found.append(
            {
                "results": name,
                "epochs": epochs,
                "epsilon": epsilon,
                "best_clip_norm": best,
                "mean": scores[best],
                "not_told_apart": " ".join(f"{c:g}" for c in close),
                "auto_s": scores.get("auto_s", math.nan),
            }
        )
    return found


def _by_epsilon(rows) -> list[str]:
    """Whether the best clip norm grows as epsilon falls."""
    texts = []
    for place in dict.fromkeys((row["results"], row["epochs"]) for row in rows):
        mine = [row for row in rows if (row["results"], row["epochs"]) == place]
        if len(mine) > 1:
            low, high = mine[0], mine[-1]
            texts.append(
                f"{place[0]}, {place[1]:g} epochs: best clip norm "
                f"{low['best_clip_norm']:g} at epsilon {low['epsilon']:g}, "
                f"{high['best_clip_norm']:g} at {high['epsilon']:g}: "
                f"{_order(low, high)} for 'the best clip norm grows as epsilon falls'."
            )
    return texts


def _between(rows, names) -> list[str]:
    """How the first two backbones differ at equal epochs and epsilon."""
    texts = []
    for row in rows:
        for other in rows:
            same = all(row[key] == other[key] for key in ("epochs", "epsilon"))
            if same and [row["results"], other["results"]] == names[:2]:
                weak, strong = sorted((row, other), key=lambda one: one["mean"])
                texts.append(
                    f"epsilon {row['epsilon']:g}, {row['epochs']:g} epochs: the "
                    f"less accurate, {weak['results']} ({weak['mean']:.3f}), "
                    f"is best at {weak['best_clip_norm']:g}, {strong['results']} "
                    f"({strong['mean']:.3f}) at {strong['best_clip_norm']:g}: "
                    f"{_order(weak, strong)} for 'the weaker network, or the harder "
                    "problem, wants the larger clip norm'."
                )
    return texts


def _order(one, other) -> str:
    """The evidence of two best clip norms, the first of which should be larger."""
    first, second = (
        [float(c) for c in row["not_told_apart"].split()] for row in (one, other)
    )
    return grid_figures.order(first, second)


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
