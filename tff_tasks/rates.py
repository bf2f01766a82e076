"""Searches the client's and the server's learning rate, without clipping or noise.

    python -m tff_tasks.rates --task=digits --run_flags="--engine=local --rounds=50"

The right half of the paper's Table 1: both rates are multiplied by powers of 10^(1/4)
up to 10^(1/2) either way, in all pairs, and every later run starts from the best pair.
A search that is stopped continues where it was. All runs are seeded, so none is
private, and choosing among them would not be either: search on public data.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import shlex
from typing import Any

import numpy as np

from driver_kit import json_files, plotting, programs, progress, reports, settings
from tfdpclip import files, pictures
from tff_tasks import command, records, studies
from tff_tasks.config import RunConfig
from tff_tasks.registry import task_class

_FACTORS = "0.3162,0.5623,1,1.778,3.162"
_TABLE = "rates.csv"
_SETTINGS = "rates.json"


@dataclasses.dataclass(frozen=True)
class RatesConfig:
    """The search's settings."""

    task: str = settings.words("digits", "The benchmark.")
    output_dir: str | None = settings.words(
        None, "Where results go. Default: runs/rates_TASK."
    )
    run_flags: str = settings.words(
        "", "Flags of all runs, as in --run_flags='--data_dir=data --rounds=100'."
    )
    client_factors: str = settings.words(
        _FACTORS, "What the client's learning rate is multiplied by."
    )
    server_factors: str = settings.words(
        _FACTORS, "What the server's learning rate is multiplied by."
    )
    seeds: int = settings.count(1, "Runs of each pair.")
    first_seed: int = settings.count(1, "Seeds count from here.", least=0)
    figure_format: tuple[str, ...] = settings.figure_format()

    def __post_init__(self):
        settings.check(self)
        task_class(self.task)
        if not self.output_dir:
            object.__setattr__(self, "output_dir", f"runs/rates_{self.task}")
        for name in ("client_factors", "server_factors"):
            if min(studies.numbers(getattr(self, name), name)) <= 0:
                raise ValueError(f"{name} must be above 0, for example {name}=0.5,1,2.")
        self.base()

    def base(self) -> RunConfig:
        """The common settings of all runs.

        Raises:
          ValueError: if the flags ask for clipping or noise, which the search leaves
            out.
        """
        given = command.config_from(self.task, shlex.split(self.run_flags))
        for flag in ("clipping", "noise_multiplier"):
            if f"--{flag}" in self.run_flags:
                raise ValueError(
                    f"run_flags: the search is without clipping and noise; leave "
                    f"--{flag} out."
                )
        return dataclasses.replace(given, clipping="none", noise_multiplier=0.0)


def _run_of(
    base: RunConfig, directory: pathlib.Path, client: float, server: float, seed: int
) -> RunConfig:
    name = f"client{client:.4g}_server{server:.4g}_seed{seed}"
    return dataclasses.replace(
        base,
        client_learning_rate=base.client_learning_rate * client,
        server_learning_rate=base.server_learning_rate * server,
        seed=seed,
        output_dir=str(directory / name),
        quiet=True,
        tensorboard=False,
    )


def _measured(config: RunConfig) -> dict[str, Any]:
    """A run's result, from its files if it was run before."""
    # This import comes late, because it takes seconds.
    from tff_tasks import program

    result = studies.finished(config)
    if result is None:
        program.run(config)
        result = studies.finished(config)
    return result


def search(config: RatesConfig) -> list[dict[str, Any]]:
    """Runs all pairs, or the rest of them; a row for each."""
    task, base = task_class(config.task), config.base()
    directory = files.prepare_directory(pathlib.Path(config.output_dir))
    about = {
        "base": {**base.to_dict(), "output_dir": None, "data_dir": None},
        "first_seed": config.first_seed,
    }
    path = directory / _SETTINGS
    if path.exists() and json_files.read_json(path) != about:
        raise ValueError(
            f"output_dir: {directory} has a search with other run_flags; use another, "
            "for example --output_dir=runs/mine."
        )
    records.write_atomically(path, reports.to_json(about))
    clients = studies.numbers(config.client_factors, "client_factors")
    servers = studies.numbers(config.server_factors, "server_factors")
    pairs = list(itertools.product(clients, servers))
    bar = progress.Progress(f"rates of {task.title}", len(pairs), unit="pair")
    rows = []
    for i, (client, server) in enumerate(pairs, 1):
        scores, run = [], base
        for seed in range(config.first_seed, config.first_seed + config.seeds):
            run = _run_of(base, directory, client, server, seed)
            summary = _measured(run)["summary"]
            scores.append(studies.score(summary, task.higher_is_better))
        rows.append(
            {
                "client_factor": client,
                "server_factor": server,
                "client_learning_rate": run.client_learning_rate,
                "server_learning_rate": run.server_learning_rate,
                task.metric: float(np.mean(scores)),
                "runs": len(scores),
            }
        )
        records.write_atomically(directory / _TABLE, reports.table_text(rows))
        rates = f"client {client:g}, server {server:g}"
        bar.show(i, [f"{rates}: {task.metric} {rows[-1][task.metric]:.4g}"])
    return rows


def run(config: RatesConfig) -> str:
    """Searches, draws and reports."""
    task = task_class(config.task)
    rows = search(config)
    better = max if task.higher_is_better else min
    best = better(rows, key=lambda row: row[task.metric])
    directory = pathlib.Path(config.output_dir)
    plotting.save_as(_picture(rows, task), directory / "rates", config.figure_format)
    edges = [
        side
        for side in ("client", "server")
        if len({row[f"{side}_factor"] for row in rows}) > 1
        and best[f"{side}_factor"]
        in (
            min(row[f"{side}_factor"] for row in rows),
            max(row[f"{side}_factor"] for row in rows),
        )
    ]
    lines = [
        f"{task.title}: {len(rows)} pairs of learning rates, {config.base().rounds} "
        "rounds each, without clipping and noise.",
        f"Best {task.metric}, {best[task.metric]:.4g}: client "
        f"{best['client_learning_rate']:.4g}, server "
        f"{best['server_learning_rate']:.4g}.",
    ]
    if edges:
        lines.append(
            f"That is at the edge of the grid ({' and '.join(edges)}): search further "
            "there before taking it."
        )
    lines.append(f"Written to {directory}: {_TABLE}, rates.{config.figure_format[0]}")
    text = "\n".join(lines)
    records.write_atomically(directory / "report.txt", text + "\n")
    return text


def _picture(rows, task):
    clients, servers = (
        sorted({row[f"{side}_learning_rate"] for row in rows})
        for side in ("client", "server")
    )
    values = np.full((len(clients), len(servers)), np.nan)
    for row in rows:
        i = clients.index(row["client_learning_rate"])
        j = servers.index(row["server_learning_rate"])
        values[i, j] = row[task.metric]
    values[~np.isfinite(values)] = np.nan
    picture, axes = pictures.new(
        2.6 + 0.75 * len(servers), 1.9 + 0.5 * len(clients), 1, 1
    )
    ax = axes[0, 0]
    image = ax.imshow(values, cmap="viridis", aspect="auto", origin="lower")
    ax.grid(visible=False)
    ax.set_xticks(range(len(servers)), [f"{rate:.3g}" for rate in servers])
    ax.set_yticks(range(len(clients)), [f"{rate:.3g}" for rate in clients])
    ax.set(xlabel="server learning rate", ylabel="client learning rate")
    middle = np.nanmean(values) if np.isfinite(values).any() else 0.0
    for (i, j), value in np.ndenumerate(values):
        text = f"{value:.3g}" if np.isfinite(value) else "diverged"
        color = "black" if np.isfinite(value) and value > middle else "white"
        ax.text(j, i, text, ha="center", va="center", fontsize=8, color=color)
    picture.colorbar(image, ax=ax, label=task.metric)
    pictures.title(picture, f"{task.title}: no clipping, no noise")
    return picture


if __name__ == "__main__":
    programs.run_program(__doc__, RatesConfig, run, errors=(ValueError,))
