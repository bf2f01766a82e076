"""The output of a run: progress while it runs, and a report at the end."""

from __future__ import annotations

import math
import sys
import textwrap
import time
from typing import Any, TextIO

import driver_kit
from driver_kit import progress, reports
from tff_tasks.config import RunConfig
from tff_tasks.privacy import Reading, Spending, imagine, text_of
from tff_tasks.run_result import RunResult
from tff_tasks.task import Task


class Progress:
    """Shows a run's progress and newest numbers; nothing if quiet.

    Args:
      config: the settings.
      start: rounds done before.
      last: the last round.
      stream: where to show it; standard error if it is a terminal.
    """

    def __init__(
        self, config: RunConfig, start: int, last: int, stream: TextIO | None = None
    ):
        if stream is None:
            stream = sys.stderr if sys.stderr.isatty() else sys.stdout
        self._known: dict[str, Any] = {}
        self._progress = None
        if not config.quiet:
            self._progress = progress.Progress(
                config.task, last, start, "round", stream
            )

    def show(self, row: dict[str, Any], metric: str) -> None:
        """Shows a round."""
        if self._progress is None:
            return
        self._known.update(row)
        parts = []
        for name, label in (
            (f"eval_{metric}", metric.replace("_", " ")),
            ("clip_norm", "clip"),
            ("unclipped_fraction", "unclipped"),
            ("epsilon", "epsilon"),
        ):
            value = self._known.get(name)
            if value is not None and math.isfinite(value):
                parts.append(f"{label} {value:.3g}")
        self._progress.show(row["round"], parts)

    def close(self) -> None:
        """Ends the bar."""
        if self._progress is not None:
            self._progress.close()


def report(
    result: RunResult, task: Task, spending: Spending, final_name: str, window: int
) -> str:
    """The report in plain words.

    Args:
      result: all but the report.
      task: the benchmark.
      spending: the privacy cost.
      final_name: the clients of the last evaluation, in words.
      window: the number of rounds in the summary's average.
    """
    config, derived = result.config, result.derived
    rounds = result.rows[-1]["round"]
    title = f"{task.title}: {rounds} federated rounds"
    if not result.private:
        title += ", NOT private"
    lines = reports.heading(title)
    if config.synthetic and config.task != "digits":
        lines += ["The data were made up: the numbers mean nothing.", ""]
    last = next(row for row in reversed(result.rows) if f"eval_{task.metric}" in row)
    better = "" if task.higher_is_better else " (less is better)"
    lines += [
        _row(
            task.metric.replace("_", " "),
            f"{last[f'eval_{task.metric}']:.4g} after the last round{better}; "
            f"{result.summary:.4g} on average over the last {window} rounds",
        ),
        _row(
            "evaluated on",
            f"{derived['eval_examples']} examples, --eval_split={config.eval_split}",
        ),
        _row(
            "at the end",
            ", ".join(f"{name} {value:.4g}" for name, value in result.final.items())
            + f", on {final_name}",
        ),
        _row("clipping", _clip_text(result)),
        _row(
            "noise",
            f"multiplier {config.noise_multiplier:g}, of which the sum gets "
            f"{derived['sum_noise_multiplier']:.6g}"
            + _count_text(derived["count_stddevs"]),
        ),
        *_correlation_rows(derived),
        _row(
            "clients",
            f"{config.clients_per_round} of {derived['population']} in a round "
            f"({derived['sampling']}), batches of {config.client_batch_size}",
        ),
        _row(
            "rates",
            f"clients {config.client_learning_rate:.4g}, server "
            f"{config.server_learning_rate:.4g}, momentum {config.server_momentum:g}"
            f" ({'damped' if config.momentum_damping else 'undamped'})",
        ),
        _row("network", f"{derived['parameters']} parameters"),
        *_workers_rows(config),
        _row("time", _time_text(result.rows)),
        "",
        f"Privacy, with the {derived['population']} clients that there are: "
        f"{result.statement}",
        "",
    ]
    if config.sampling != "fixed_order":
        reading = imagine(
            config.noise_multiplier,
            config.clients_per_round,
            rounds,
            config.imagined_population,
            accountant=config.accountant,
        )
        lines += reports.paragraph(_imagined_text(config, reading))
    lines += ["", "What this covers:", *reports.bullets(_coverage(result, spending))]
    if task.warnings():
        lines += ["", "What to know besides:", *reports.bullets(task.warnings())]
    return "\n".join(lines) + "\n"


def _row(name: str, text: str) -> str:
    return textwrap.fill(f"{name:<16} {text}", 88, subsequent_indent=" " * 17)


def _correlation_rows(derived: dict[str, Any]) -> list[str]:
    correlation = derived["correlation"]
    return [] if correlation is None else [_row("correlation", correlation)]


def _workers_rows(config: RunConfig) -> list[str]:
    addresses = config.worker_addresses()
    return [_row("workers", ", ".join(addresses))] if addresses else []


def _clip_text(result: RunResult) -> str:
    config, last = result.config, result.rows[-1]
    if config.clipping == "none":
        return "none"
    if config.layerwise:
        return "each layer by itself; the norms are in the table"
    if config.clipping == "fixed":
        return f"fixed norm {config.clip:g}"
    return (
        f"follows quantile {config.target_quantile:g}; norm {config.clip:g} at the "
        f"start, {last.get('next_clip_norm', config.clip):.4g} at the end"
    )


def _count_text(stddevs) -> str:
    if not stddevs:
        return ""
    return f"; the count of unclipped updates has noise of deviation {stddevs[0]:g}"


def _time_text(rows) -> str:
    # The first round includes building the computation.
    timed = [row for row in rows if "round_seconds" in row]
    timed = timed[1:] or timed
    if not timed:
        return "no rounds"
    means = [
        sum(row[name] for row in timed) / len(timed)
        for name in ("round_seconds", "data_seconds")
    ]
    return f"{means[0]:.3g} s a round, after {means[1]:.3g} s for its data"


def _imagined_text(config: RunConfig, reading: Reading | None) -> str:
    n = config.imagined_population
    if config.noise_multiplier == 0:
        return f"If there were {n} clients: still not private, without noise."
    if reading is None:
        return (
            f"If there were {n} clients: no cohort among them brings this noise to "
            "epsilon 5."
        )
    return (
        f"If there were {n} clients, with {reading.scale:.4g} times the clients per "
        f"round and as many times the noise multiplier (so that the average has the "
        f"same noise): {reading.clients_per_round} clients, noise multiplier "
        f"{reading.noise_multiplier:.4g}, {reading.rounds} rounds. Epsilon would be "
        f"{text_of(reading.paper_epsilon)} at delta {reading.delta:.4g} as Table 1 of "
        "Andrew et al. (2021) has it (fixed-size cohorts, replace one, sensitivity of "
        "add or remove, Renyi accounting), and "
        f"{text_of(reading.epsilon)} with Poisson cohorts, add or remove one client, "
        f"accountant {config.accountant}. This is no claim about this run."
    )


def _coverage(result: RunResult, spending: Spending) -> list[str]:
    config = result.config
    texts = []
    if result.private:
        texts.append(
            "The guarantee is for each client with all its examples, and covers the "
            "model after every round and the columns of the table from clip_norm to "
            "sum_noise_stddev."
        )
    else:
        texts.append("This run guarantees nothing: see above.")
    texts.append(f"The number of clients, {spending.population}, is treated as public.")
    texts.append("Test clients are not protected; metrics are measured on them.")
    if config.train_metrics:
        texts.append(
            "Columns that begin with unprotected_train are measured on training "
            "clients WITHOUT noise and are outside the guarantee."
        )
    if config.secure:
        texts.append(
            "Secure aggregation is simulated: TensorFlow Federated sums in the clear."
        )
    if config.workers is not None:
        texts.append(
            "Workers are trusted: they are sent clients' data, without encryption."
        )
    seconds = time.monotonic() - driver_kit.STARTED
    texts.append(f"Written {seconds:.0f} s after this process began.")
    return texts
