r"""Searches clip norm, batch size and learning rate over a grid, and can be resumed.

    python -m keras_examples.tune_grid
    python -m keras_examples.tune_grid --grid=sun397_vit_tiny --dry_run
    python -m keras_examples.tune_grid --trainable=film --learning_rates=0.01,0.03
    python -m keras_examples.tune_grid --trainable=film --grid=cassava_vit_tiny \
        --dataset=folder --data_dir=DIR --model=vit_tiny --checkpoint=model.safetensors
    python -m keras_examples.tune_grid --grid=cassava_vit_tiny --features=FILE.npz

The grids of Rehn, Zhao, Heikkila and Honkela (2025, Table A1) and figures like their 1,
2, 5 and A10; `plot_grids` draws several searches together, and `batch_size --results`
their batch sizes. With --trainable=film every run trains FiLM and a head, as in the
paper and as `transfer_film` does: each starts from the same network. By default every
run trains a head alone, in seconds, on features which `frozen_features` writes; the
statement includes the privacy cost of their network on the same images. The default
grid is for scikit-learn's digits and needs no files. With --trainable=film these are
digits 5 to 9, and the network is first trained on digits 0 to 4.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from driver_kit import programs, progress, settings
from keras_examples import grid_figures, grid_results, grids, problems, trainers
from keras_examples.heat_map import draw_heat_map
from tfdpclip.tuning import TrainingPlan, run_grid


@dataclasses.dataclass(frozen=True)
class Settings(problems.Settings):
    """The settings of a search."""

    grid: str = settings.choice("digits", tuple(grids.GRIDS), "Which grid.")
    epsilons: tuple[float, ...] = settings.numbers(
        (0.5, 8), "Privacy budgets, one search each.", good=8, above=0
    )
    delta: float = settings.delta()
    clip_norms: str | None = grids.numbers_flag(
        "Clip norms instead of the grid's: 0.1,1."
    )
    batch_sizes: str | None = settings.words(
        None,
        "Batch sizes instead of the grid's: 64,256,full.",
        good="256,full",
        form="whole numbers above 0, or full, separated by commas",
        reads=grids.read_sizes,
    )
    learning_rates: str | None = grids.numbers_flag(
        "Learning rates instead of the grid's: 0.01,0.1 or geom:0.001:0.02:8."
    )
    methods: tuple[str, ...] = settings.choices(
        ("flat", "auto_s"), ("flat", "auto_s"), "Clip norms, and AUTO-S beside them."
    )
    epochs: tuple[float, ...] | None = settings.numbers(
        None, "Instead of the grid's: 2,4,8,16,32.", good=8, above=0
    )
    seeds: int = settings.count(
        5, "Repeats of each setting; the paper's Figure 5 and Table A3 have 3."
    )
    max_runs: int | None = settings.count(
        None, "Stop each search after this many.", good=100, least=0
    )
    dry_run: bool = settings.switch(False, "Only say how many runs there would be.")
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("tune_grid")


def run(used: Settings) -> programs.Outcome:
    """Runs the searches, or counts them."""
    if used.dry_run:
        return _counted(used)
    problems.check(used)
    if used.trainable == "head" and used.features is None and used.grid != "digits":
        raise settings.UsageError(
            f"flag --features is missing: --grid={used.grid} needs a .npz file with "
            "features, labels and split, or --trainable=film and a network. "
            "--grid=digits needs none, and --dry_run counts runs."
        )
    directory = programs.make_directory(used.output_dir)
    problem = problems.make(
        used,
        lambda size: _check_sizes(used, size),
        directory / "public_network.npz",
    )
    grid = grids.make(used, problem.size)
    full = trainers.Plan(1.0, 1, 1.0)
    problem.statement(used.delta, noise_multiplier=1.0, sampling=full.scheme, steps=1)
    grid_results.begin(directory, problem, used.delta, grid, used.epsilons)
    alone = " (the head's training alone)" if problem.spent else ""
    statements, clip_rows, size_rows, figures = [], [], [], {}
    for epsilon in used.epsilons:
        result = _search(used, problem, grid, epsilon, directory)
        statements.append(
            f"epsilon {epsilon:g} per run{alone}; the search: {result.statement()}"
        )
        for rows, name in ((clip_rows, "clip_norm"), (size_rows, "batch_size")):
            rows += [
                {"epsilon": epsilon, **row}
                for row in result.best_at(("epochs", name), "macro_accuracy")
            ]
        for epochs in grid.others["epochs"]:
            part = tuple(row for row in result.rows if row["epochs"] == epochs)
            if part:
                name = f"heatmap_eps_{epsilon:g}"
                if len(grid.others["epochs"]) > 1:
                    name += f"_epochs_{epochs:g}"
                figures[name] = draw_heat_map(
                    dataclasses.replace(result, rows=part),
                    label="macro accuracy",
                    title=f"{problem.name}, ε = {epsilon:g}, {epochs:g} epochs (best "
                    "learning rate)",
                )
    if clip_rows:
        figures |= _figures(clip_rows, size_rows, problem)
    durations = ", ".join(f"{epochs:g}" for epochs in grid.others["epochs"])
    return programs.Outcome(
        title=f"Clip norm, batch size and learning rate, {problem.name}",
        findings=_findings(clip_rows) + _size_findings(size_rows, problem.size),
        privacy="\n".join(statements),
        caveats=[
            "Scores are macro accuracies on the test data; settings are chosen on "
            "them. Seeds number repeats; the noise is fresh in each.",
            f"{durations} epochs of normalised DP-Adam on {problem.trained}. Run again "
            "with the same --output_dir to go on where it stopped.",
            *problem.caveats(),
        ],
        tables={
            grid_results.CLIP_NORMS: clip_rows,
            grid_results.BATCH_SIZES: size_rows,
        },
        figures=figures,
        shown=(grid_results.CLIP_NORMS,),
    )


def _check_sizes(used: Settings, size: int) -> None:
    """Refuses impossible grids before the search.

    Raises:
      UsageError: if a batch is larger than the data.
    """
    sizes = grids.make(used, size).batch_sizes
    if max(size if b == "full" else int(b) for b in sizes) > size:
        raise settings.UsageError(
            f"flag --batch_sizes={used.batch_sizes}: there are only {size} training "
            "examples, for example --batch_sizes=full."
        )


def _search(used, problem, grid, epsilon: float, directory: pathlib.Path):
    """All runs at a budget."""
    made: dict[tuple, trainers.Trainer] = {}

    def how(point):
        epochs = point.others["epochs"]
        return trainers.plan(
            problem.size, point.batch_size, epochs, epsilon, used.delta
        )

    def planned(point):
        found = how(point)
        return TrainingPlan(found.scheme, found.noise_multiplier, found.steps)

    def train(point):
        key = (point.clip_norm, point.batch_size, point.others["epochs"])
        if key not in made:
            made[key] = problem.trainer(how(point), point.clip_norm)
        found = made[key](point.learning_rate)
        return {"macro_accuracy": found.macro, "micro_accuracy": found.micro}

    path = grid_results.grid_path(directory, epsilon)
    return run_grid(
        grid,
        train,
        path=path,
        progress=_reporter(f"epsilon {epsilon:g}", path, len(grid)),
        metric="macro_accuracy",
        plan=planned,
        delta=used.delta,
        max_runs=used.max_runs,
        spent=problem.ledger(used.delta),
    )


def _reporter(title: str, path: pathlib.Path, runs: int) -> Callable[[str], None]:
    """A progress display that takes `run_grid`'s line after every run."""
    done = len(path.read_text().splitlines()) - 1 if path.exists() else 0
    shown = progress.Progress(title, runs, min(done, runs), "run")

    def report(line: str) -> None:
        number, rest = line.split(": ", 1)
        shown.show(int(number.split()[0]), [rest])

    return report


def _counted(used: Settings) -> programs.Outcome:
    grid, named = grids.make(used), grids.GRIDS[used.grid]
    runs, epochs = len(grid), grid.others["epochs"]
    return programs.Outcome(
        title=f"Grid {used.grid}",
        findings=[
            f"{runs} runs for each of {len(used.epsilons)} epsilons: "
            f"{len(grid.clip_norms)} clip norms, {len(grid.batch_sizes)} batch sizes "
            f"({', '.join(map(str, grid.batch_sizes))}), {len(grid.learning_rates)} "
            f"learning rates, {used.seeds} repeats; "
            f"{', '.join(f'{e:g}' for e in epochs)} epochs of {named.size} examples "
            "each."
        ],
        privacy="nothing was trained.",
        numbers={"runs": runs},
        tables={"grid": [point.settings() for point in grid]},
    )


def _figures(clip_rows, size_rows, problem) -> dict[str, Any]:
    rest = "learning rate tuned at every {}\n(bands: least to greatest repeat)"
    whole = [
        row | {"batch_size": problem.size if b == "full" else b}
        for row in size_rows
        for b in [row["batch_size"]]
    ]
    figures = {}
    for rows, x, name, other in (
        (clip_rows, "clip_norm", "clip norm", "batch size"),
        (whole, "batch_size", "batch size", "clip norm"),
    ):
        if len({row[x] for row in rows}) > 1:
            figures[x] = grid_figures.curves(
                grid_figures.panels(rows),
                x,
                f"{problem.name}: {other} and {rest.format(name)}",
            )
    if len(grid_figures.of_epochs(whole)) > 1:
        figures["epochs"] = grid_figures.by_epochs(
            whole, f"{problem.name}: clip norm, batch size and learning rate tuned"
        )
    return figures


def _findings(rows) -> list[str]:
    texts = []
    for epochs, part in grid_figures.of_epochs(rows).items():
        chosen, told = [], []
        for epsilon in sorted({row["epsilon"] for row in part}):
            mine = [row for row in part if row["epsilon"] == epsilon]
            flat = [row for row in mine if row["clip_norm"] != "auto_s"]
            auto = [row for row in mine if row["clip_norm"] == "auto_s"]
            if not flat:
                continue
            best = max(flat, key=lambda row: row["mean"])
            chosen.append(float(best["clip_norm"]))
            text = (
                f"epsilon {epsilon:g}, {epochs:g} epochs: best clip norm "
                f"{best['clip_norm']}, batch {best['batch_size']}, learning rate "
                f"{best['learning_rate']:.3g}: {best['mean']:.3f} "
                f"[{best['min']:.3f}, {best['max']:.3f}]"
            )
            if auto:
                gap = best["mean"] - auto[0]["mean"]
                text += (
                    f"; AUTO-S {auto[0]['mean']:.3f}, tuned flat clip ahead by "
                    f"{gap:.3f}"
                )
            _, close = grid_figures.close_to_best(flat, "clip_norm")
            told.append(close)
            close = [f"{c:g}" for c in close if c != best["clip_norm"]]
            if close:
                text += (
                    f"; repeats overlap with those of clip norm {', '.join(close)}, so "
                    "that this best is not certain"
                )
            texts.append(text + ".")
        if len(chosen) > 1:
            words = grid_figures.order(told[0], told[-1])
            texts.append(
                "By ascending epsilon the best clip norms are "
                f"{', '.join(f'{c:g}' for c in chosen)}. Least against greatest: "
                f"{words} for 'the best clip norm grows as epsilon falls'. The tuned "
                "flat clip is a maximum over more settings than AUTO-S, and wins a "
                "little by that alone."
            )
    return texts


def _size_findings(rows, size: int) -> list[str]:
    """The best batch sizes, by epochs and epsilon."""
    texts = []
    for epochs, part in grid_figures.of_epochs(rows).items():
        found = []
        for epsilon in sorted({row["epsilon"] for row in part}):
            mine = [
                row | {"batch_size": size if b == "full" else b}
                for row in part
                if row["epsilon"] == epsilon
                for b in [row["batch_size"]]
            ]
            best, close = grid_figures.close_to_best(mine, "batch_size")
            found.append(
                f"{best}"
                + (f" (not told from {_listed(close, best)})" if len(close) > 1 else "")
            )
        if len({row["batch_size"] for row in part}) > 1:
            texts.append(
                f"Best batch size at {epochs:g} epochs, by ascending epsilon: "
                f"{'; '.join(found)}."
            )
    return texts


def _listed(values, but) -> str:
    return ", ".join(str(v) for v in values if v != but)


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
