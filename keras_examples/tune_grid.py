r"""Searches clip norm, batch size and learning rate over a grid, and can be resumed.

    python -m keras_examples.tune_grid
    python -m keras_examples.tune_grid --grid=sun397_vit_tiny --dry_run
    python -m keras_examples.tune_grid --grid=cassava_vit_tiny --features=FILE.npz

The grids of Rehn, Zhao, Heikkila and Honkela (2025, Table A1) and figures like their 1,
2 and 5. The paper tunes FiLM and a head in every run; here every run trains a head
alone, on cached features, which `frozen_features` writes (`transfer_film` trains
normalisation layers, too, one setting at a time). What the features' network has spent
on the same images is part of the statement. The default grid is for scikit-learn's
digits and needs no files.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

from driver_kit import programs, progress, reports, settings
from keras_examples import features, heads
from tfdpclip import files, pictures
from tfdpclip.tuning import Grid, TrainingPlan, geometric, run_grid

# What the runs in a directory have in common, beside what their tables say.
_SEARCH = "search.json"


@dataclasses.dataclass(frozen=True)
class NamedGrid:
    """A row of Table A1.

    Attributes:
      size: number of training examples N.
      largest: exponent of the largest batch size, 2^8 to 2^largest and full.
      rates: least and greatest learning rate, and how many.
      clip_norms: clip norms.
      epochs: epochs.
    """

    size: int
    largest: int
    rates: tuple[float, float, int]
    clip_norms: tuple[float, ...]
    epochs: int
    smallest: int = 8

    @property
    def batch_sizes(self) -> tuple[int | str, ...]:
        """Those below N, and full."""
        sizes = [2**k for k in range(self.smallest, self.largest + 1)]
        return (*(b for b in sizes if b < self.size), "full")


_VIT, _RESNET = (0.001, 0.02, 8), (0.0005, 0.01, 10)
_WIDE = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 10)
_SUN = (0.1, 1, 10, 12, 14, 18, 26, 42)
GRIDS = {
    "digits": NamedGrid(1437, 8, (0.005, 0.5, 4), (0.01, 0.1, 1, 3), 8, smallest=6),
    "cifar100_vit_tiny": NamedGrid(50_000, 14, _VIT, _WIDE, 8),
    "cifar100_vit_base": NamedGrid(50_000, 14, _VIT, _WIDE, 8),
    "cifar100_resnet50": NamedGrid(50_000, 14, _RESNET, _WIDE, 8),
    "cifar100_10_vit_tiny": NamedGrid(5000, 14, _VIT, (1e-4, 1e-2, 0.1, 1, 5, 10), 32),
    "cifar100_10_vit_base": NamedGrid(5000, 14, _VIT, (1e-4, 1e-2, 0.1, 1, 5, 10), 32),
    "cifar100_10_resnet50": NamedGrid(
        5000, 14, _RESNET, (1e-3, 1e-2, 0.1, 1, 10, 26, 42), 32
    ),
    "sun397_vit_tiny": NamedGrid(87_002, 16, _VIT, _SUN, 8),
    "sun397_vit_base": NamedGrid(87_002, 16, _VIT, (0.1, 1, 10, 26, 42), 8),
    "sun397_resnet50": NamedGrid(87_002, 16, _RESNET, _SUN, 8),
    # Not the paper's: MNIST or Fashion-MNIST, as the features are.
    "mnist_efficientnet_lite0": NamedGrid(60_000, 14, _VIT, (0.1, 1, 10, 42), 8),
    "cassava_vit_tiny": NamedGrid(7545, 14, _VIT, (0.1, 1, 10, 26, 42), 32),
    "cassava_vit_base": NamedGrid(7545, 14, _VIT, (0.1, 1, 10, 26, 42), 32),
    "cassava_resnet50": NamedGrid(7545, 14, _RESNET, (1e-2, 0.1, 1, 10, 50), 32),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a search."""

    grid: str = settings.choice("digits", tuple(GRIDS), "Which grid.")
    features: str | None = settings.words(
        None, "A .npz file with features, labels and split, for the paper's grids."
    )
    variant: str = settings.choice(
        "plain", ("plain", "hard", "imbalanced"), "Of the digits."
    )
    epsilons: tuple[float, ...] = settings.numbers(
        (0.5, 8), "Privacy budgets, one search each.", good=8, above=0
    )
    delta: float = settings.delta()
    clip_norms: str | None = settings.words(
        None, "Clip norms instead of the grid's: 0.1,1."
    )
    batch_sizes: str | None = settings.words(
        None, "Batch sizes instead of the grid's: 64,256,full."
    )
    learning_rates: str | None = settings.words(
        None, "Learning rates instead of the grid's: 0.01,0.1 or geom:0.001:0.02:8."
    )
    methods: tuple[str, ...] = settings.choices(
        ("flat", "auto_s"), ("flat", "auto_s"), "Clip norms, and AUTO-S beside them."
    )
    epochs: float | None = settings.number(
        None, "Instead of the grid's.", good=8, above=0
    )
    seeds: int = settings.count(3, "Repeats of each setting.")
    max_runs: int | None = settings.count(
        None, "Stop each search after this many.", good=100, least=0
    )
    dry_run: bool = settings.switch(False, "Only say how many runs there would be.")
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("tune_grid")


def make_grid(used: Settings) -> Grid:
    """The grid after flags."""
    named = GRIDS[used.grid]
    clips: list[float | str] = []
    if "flat" in used.methods:
        clips += _numbers("clip_norms", used.clip_norms) or named.clip_norms
    if "auto_s" in used.methods:
        clips.append("auto_s")
    sizes = _sizes(used.batch_sizes) or named.batch_sizes
    rates = _numbers("learning_rates", used.learning_rates) or geometric(*named.rates)
    return Grid(clips, sizes, rates, seeds=range(used.seeds))


def _numbers(flag: str, text: str | None) -> list[float]:
    if text is None:
        return []
    try:
        if text.startswith("geom:"):
            low, high, count = text[5:].split(":")
            return list(geometric(float(low), float(high), int(count)))
        found = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise settings.UsageError(
            f"flag --{flag}={text}: {error}; for example --{flag}=0.1,1."
        ) from error
    if not all(math.isfinite(v) and v > 0 for v in found):
        raise settings.UsageError(
            f"flag --{flag}={text}: numbers must be above 0, for example "
            f"--{flag}=0.1,1."
        )
    return found


def _sizes(text: str | None) -> list[int | str]:
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(p == "full" or (p.isdigit() and int(p) > 0) for p in parts):
        raise settings.UsageError(
            f"flag --batch_sizes={text}: whole numbers above 0, or full; for example "
            "--batch_sizes=256,full."
        )
    return [p if p == "full" else int(p) for p in parts]


def run(used: Settings) -> programs.Outcome:
    """Runs the searches, or counts them."""
    grid = make_grid(used)
    if used.dry_run:
        return _counted(used, grid)
    data = features.digits(used.variant)
    if used.features is not None:
        data = features.read(used.features)
    elif used.grid != "digits":
        raise settings.UsageError(
            f"flag --features is missing: --grid={used.grid} needs a .npz file with "
            "features, labels and split. --grid=digits needs none, and --dry_run "
            "counts runs."
        )
    # Refuses now, not after the search, what cannot be composed with what was spent.
    full = heads.Plan(1.0, 1, 1.0)
    data.statement(used.delta, noise_multiplier=1.0, sampling=full.scheme, steps=1)
    size = len(data.train[0])
    epochs = used.epochs or GRIDS[used.grid].epochs
    directory = programs.make_directory(used.output_dir)
    _check_resumed(directory, {"data": data.digest, "epochs": epochs})
    alone = " (the head's training alone)" if data.spent else ""
    statements, best_rows, figures, results = [], [], {}, {}
    for epsilon in used.epsilons:

        def planned(point, epsilon=epsilon):
            how = heads.plan(size, point.batch_size, epochs, epsilon, used.delta)
            return TrainingPlan(how.scheme, how.noise_multiplier, how.steps)

        trainers: dict = {}

        def train(point, epsilon=epsilon, trainers=trainers):
            key = (point.clip_norm, point.batch_size)
            if key not in trainers:
                how = heads.plan(size, point.batch_size, epochs, epsilon, used.delta)
                trainers[key] = heads.HeadTrainer(data, how, point.clip_norm)
            found = trainers[key](point.learning_rate)
            return {"macro_accuracy": found.macro, "micro_accuracy": found.micro}

        path = directory / f"grid_eps_{epsilon:g}.csv"
        result = run_grid(
            grid,
            train,
            path=path,
            progress=_reporter(f"epsilon {epsilon:g}", path, len(grid)),
            metric="macro_accuracy",
            plan=planned,
            delta=used.delta,
            max_runs=used.max_runs,
            spent=data.ledger(used.delta),
        )
        results[epsilon] = result
        statements.append(
            f"epsilon {epsilon:g} per run{alone}; the search: {result.statement}"
        )
        for row in result.best_at(("clip_norm",), "macro_accuracy"):
            best_rows.append({"epsilon": epsilon, **row})
        if result.rows:
            figures[f"heatmap_eps_{epsilon:g}"] = result.heatmap(
                label="macro accuracy",
                title=f"{data.name}, ε = {epsilon:g} (best learning rate)",
            )
    figures["clip_norm"] = _curves(best_rows, data.name)
    return programs.Outcome(
        title=f"Clip norm, batch size and learning rate, {data.name}",
        findings=_findings(best_rows, used),
        privacy="\n".join(statements),
        caveats=[
            "Scores are macro accuracies on the test data; settings are chosen on "
            "them. Seeds number repeats; the noise is fresh in each.",
            f"{epochs:g} epochs of normalised DP-Adam on a linear head that starts at "
            "zero. Run again with the same --output_dir to go on where it stopped.",
            *data.caveats(),
        ],
        tables={"best": best_rows},
        figures=figures,
        shown=("best",),
    )


def _check_resumed(directory: pathlib.Path, about: dict[str, Any]) -> None:
    """Refuses results of other features or epochs, whose statement would be another."""
    path = directory / _SEARCH
    if path.exists():
        try:
            same = files.read_json(path) == about
        except ValueError as error:
            raise settings.UsageError(str(error)) from error
    else:
        same = not any(directory.glob("grid_eps_*.csv"))
        if same:
            files.write_atomically(path, reports.to_json(about))
    if not same:
        raise settings.UsageError(
            f"flag --output_dir={directory}: it holds runs on other features, or of "
            "other epochs. What they cost is not what these would. Give another, for "
            "example --output_dir=runs/mine."
        )


def _reporter(title: str, path: pathlib.Path, runs: int) -> Callable[[str], None]:
    """What shows how far a search is, given `run_grid`'s line after every run."""
    done = len(path.read_text().splitlines()) - 1 if path.exists() else 0
    shown = progress.Progress(title, runs, min(done, runs), "run")

    def report(line: str) -> None:
        number, rest = line.split(": ", 1)
        shown.show(int(number.split()[0]), [rest])

    return report


def _counted(used, grid):
    named = GRIDS[used.grid]
    runs = len(grid)
    return programs.Outcome(
        title=f"Grid {used.grid}",
        findings=[
            f"{runs} runs for each of {len(used.epsilons)} epsilons: "
            f"{len(grid.clip_norms)} clip norms, {len(grid.batch_sizes)} batch sizes "
            f"({', '.join(map(str, grid.batch_sizes))}), {len(grid.learning_rates)} "
            f"learning rates, {used.seeds} repeats; {named.epochs} epochs of "
            f"{named.size} examples each."
        ],
        privacy="nothing was trained.",
        numbers={"runs": runs},
        tables={"grid": [dataclasses.asdict(p) | {"others": ""} for p in grid]},
    )


def _findings(rows, used):
    texts = []
    chosen = []
    for epsilon in sorted(used.epsilons):
        flat = [
            r for r in rows if r["epsilon"] == epsilon and r["clip_norm"] != "auto_s"
        ]
        auto = [
            r for r in rows if r["epsilon"] == epsilon and r["clip_norm"] == "auto_s"
        ]
        if not flat:
            continue
        best = max(flat, key=lambda r: r["mean"])
        chosen.append(float(best["clip_norm"]))
        close = [
            f"{r['clip_norm']:g}"
            for r in flat
            if r is not best and r["max"] >= best["min"]
        ]
        text = (
            f"epsilon {epsilon:g}: best clip norm {best['clip_norm']}, batch "
            f"{best['batch_size']}, learning rate {best['learning_rate']:.3g}: "
            f"{best['mean']:.3f} [{best['min']:.3f}, {best['max']:.3f}]"
        )
        if auto:
            gap = best["mean"] - auto[0]["mean"]
            text += (
                f"; AUTO-S {auto[0]['mean']:.3f}, tuned flat clip ahead by {gap:.3f}"
            )
        if close:
            text += (
                f"; repeats overlap with those of clip norm {', '.join(close)}, so "
                "that this best is not certain"
            )
        texts.append(text + ".")
    if len(chosen) > 1:
        words = (
            "as the paper says"
            if chosen[0] > chosen[-1]
            else "no change"
            if chosen[0] == chosen[-1]
            else "the reverse of the paper"
        )
        texts.append(
            "Claim: the best clip norm grows as epsilon falls. By ascending epsilon: "
            f"{', '.join(f'{c:g}' for c in chosen)}: {words}. The tuned flat clip is a "
            "maximum over more settings than AUTO-S, and wins a little by that alone."
        )
    return texts


def _curves(rows, name):
    picture, axes = pictures.new(6.2, 4.2)
    ax = axes[0, 0]
    for k, epsilon in enumerate(sorted({r["epsilon"] for r in rows})):
        mine = [r for r in rows if r["epsilon"] == epsilon]
        best = max((r["mean"] for r in mine), default=math.nan)
        flat = sorted(
            (float(r["clip_norm"]), r) for r in mine if r["clip_norm"] != "auto_s"
        )
        look = pictures.style(k)
        x = [c for c, _ in flat]
        ax.plot(
            x,
            [100 * (r["mean"] - best) for _, r in flat],
            label=f"ε = {epsilon:g}",
            **look,
        )
        ax.fill_between(
            x,
            [100 * (r["min"] - best) for _, r in flat],
            [100 * (r["max"] - best) for _, r in flat],
            color=look["color"],
            alpha=0.15,
            lw=0,
        )
        for row in mine:
            if row["clip_norm"] == "auto_s":
                ax.axhline(
                    100 * (row["mean"] - best),
                    color=look["color"],
                    lw=0.9,
                    ls=":",
                    label=f"AUTO-S, ε = {epsilon:g}",
                )
    ax.set(xlabel="clip norm", ylabel="macro accuracy less the best (points)")
    if any(r["clip_norm"] != "auto_s" for r in rows):
        ax.set_xscale("log")
    ax.legend(fontsize=8.5)
    pictures.title(
        picture,
        f"{name}: batch size and learning rate tuned at every clip norm\n"
        "(bands: least to greatest repeat)",
        fontsize=10.5,
    )
    return picture


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
