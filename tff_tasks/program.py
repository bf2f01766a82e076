"""A run of a benchmark: rounds, evaluation, records, privacy."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from driver_kit import reports
from tfdpclip import files
from tff_tasks import cost, records, reporting
from tff_tasks.client_data import EvaluationData, select_clients, training_arrays
from tff_tasks.config import RunConfig
from tff_tasks.engine_local import LocalEngine
from tff_tasks.evaluation import BATCH_SIZE, Evaluator
from tff_tasks.privacy import Spending, check_ledger_is_there
from tff_tasks.registry import task_class
from tff_tasks.run_result import RunResult
from tff_tasks.sources import ClientSource
from tff_tasks.streams import stream_seed
from tff_tasks.task import SettingsError, Task


def run(
    config: RunConfig, on_cost: Callable[[cost.Cost], None] | None = None
) -> RunResult:
    """Runs a benchmark, or continues a run that was begun in the same directory.

    Args:
      config: the settings.
      on_cost: gets the run's estimated time, before its first round; by default the
        estimate is printed, unless quiet.

    Raises:
      DataFileError: if data are missing or malformed.
      RunMismatchError: if the directory holds a run with other settings.
      SettingsError: if settings do not fit the data or the installed packages.
      PrivacyMismatchError: if the ledger was kept for another run.
    """
    with _context(config):
        return _Training(config).run(on_cost)


class _Training:
    """The state of a run."""

    def __init__(self, config: RunConfig):
        self.config = config
        self.task: Task = task_class(config.task)(
            config.options, synthetic=config.synthetic
        )
        self.sources = self.task.load(config.data_dir)
        self.train = self.sources["train"]
        config.scheme(len(self.train.counts))  # Raises if there are too few clients.
        self.directory = files.prepare_directory(config.output_dir)
        settings = config.to_dict()
        free = config.free_on_resume()
        resumed = records.check_same_run(self.directory, settings, free)
        if resumed:
            check_ledger_is_there(config, self.directory)

        if config.seed is not None:
            tf.keras.utils.set_random_seed(stream_seed(config.seed, "initial"))
        initial = [v.numpy() for v in self.task.build_model().trainable_variables]
        self.engine = _engine(config)(
            self.task,
            config,
            initial,
            _batch_spec(self.task, self.train),
            config.correlated(len(self.train.counts)),
        )
        self.checkpoints = records.Checkpoints(self.directory / "checkpoints")
        rounds = self.checkpoints.rounds() if resumed else []
        self.memory = self.checkpoints.memory(rounds[-1]) if rounds else None
        self.spending = Spending(
            config,
            self.train.client_ids,
            self.directory,
            getattr(self.engine, "aggregator", None),
            None if self.memory is None else self.memory.steps,
        )
        # Made after the engine: building a network within a federated computation makes
        # existing networks unusable (Keras exchanges base classes).
        self.evaluator = Evaluator(self.task, self.task.build_model())
        self.eval_data, self.final_data, self.final_name = _evaluation_data(
            self.task, config, self.sources
        )
        self.derived = self._derive(initial)
        self.table = records.Table(self.directory / records.METRICS)
        self.start = self._resume() if resumed else 0
        if not resumed:
            self._write_config({})

    def _derive(self, initial):
        config, engine = self.config, self.engine
        return {
            "population": self.spending.population,
            "train_examples": self.train.num_examples,
            "eval_examples": self.eval_data.num_examples,
            "parameters": int(sum(w.size for w in initial)),
            "sum_noise_multiplier": engine.sum_multiplier,
            "count_stddevs": list(engine.count_stddevs),
            "clip_rule": str(config.clip_rule() or "none"),
            "delta": self.spending.delta,
            "sampling": self.spending.scheme.describe(),
            "correlation": self._correlation(),
            "metric": self.task.metric,
            "higher_is_better": self.task.higher_is_better,
        }

    def _correlation(self) -> str | None:
        run = self.spending.correlated
        if run is None:
            return None
        return (
            f"{run.matrix.describe()}; a client moves it by up to {run.sensitivity:.4g}"
        )

    def _write_config(self, result: Mapping[str, Any]) -> None:
        content = {
            "settings": self.config.to_dict(),
            "derived": self.derived,
            "result": dict(result),
            "versions": reports.versions("tensorflow-federated"),
        }
        path = self.directory / reports.CONFIG
        records.write_atomically(path, reports.to_json(content))

    def _resume(self) -> int:
        rounds = self.checkpoints.rounds()
        start = rounds[-1] if rounds else 0
        if rounds:
            self.engine.restore(self.checkpoints.load(start, self.engine.state()))
            if self.spending.goes_on:
                self.engine.restore_memory(self.memory)
            self.spending.resume(start)
            self.table.forget_after(start)
        else:
            self.table.rows = []
        self.table.write()
        return start

    def _save(self, round_num: int) -> None:
        self.checkpoints.save(round_num, self.engine.state(), self.engine.memory())

    def cost(self, rounds: int) -> cost.Cost:
        """The estimated time of the given number of rounds."""
        config, data = self.config, self.eval_data
        arrays, examples = data.first_chunk()
        rows = len(arrays[0]) / max(1, examples)
        cap = self.task.settings.get("cap", "before")
        batches = cost.mean_batches(config, self.train.counts, rows, cap)
        some, timed = cost.sample(config, data, batches)
        # A client without examples takes part, too.
        share = max(batches, 1) / max(timed, 1)
        started = time.perf_counter()
        round_seconds = self.engine.round_seconds(some, config.clients_per_round)
        # Tracing, and a round beside the one that is timed.
        preparation = max(0.0, time.perf_counter() - started - round_seconds)
        if config.engine == "tff" and config.sampling == "poisson":
            # Graphs are prepared anew for each size of a cohort.
            preparation *= cost.cohort_sizes(config.clients_per_round, rounds)
        batch = self.evaluator.batch_seconds(arrays)
        accounting = 0.0
        if config.seed is None and config.noise_multiplier > 0:
            accounting = cost.timed(lambda: self.spending.forecast(rounds))
        return cost.Cost(
            rounds,
            share * round_seconds,
            math.ceil(rounds / config.rounds_per_eval),
            batch * data.num_examples * rows / BATCH_SIZE,
            accounting,
            preparation,
        )

    def run(self, on_cost=None) -> RunResult:
        """All rounds that are left, and the report."""
        config = self.config
        last = config.rounds
        left = self.spending.rounds_left()
        if left is not None:
            last = min(last, self.start + left)
        writer = None
        if config.tensorboard:
            writer = tf.summary.create_file_writer(str(self.directory / "tensorboard"))
        for text in self.task.warnings():
            warnings.warn(text, stacklevel=2)
        if last > self.start and (on_cost is not None or not config.quiet):
            expected = self.cost(last - self.start)
            (on_cost or _print_cost)(expected)
        progress = reporting.Progress(config, self.start, last)
        if not self.table.rows:
            self._add_row({"round": 0, "epsilon": 0.0, **self._evaluate()}, writer)
        if self.start == 0 and not self.checkpoints.rounds():
            self._save(0)
        for round_num in range(self.start + 1, last + 1):
            row = self._round(round_num, last)
            self._add_row(row, writer)
            if round_num % config.rounds_per_checkpoint == 0 or round_num == last:
                self._save(round_num)
            progress.show(row, self.task.metric)
        progress.close()
        if writer is not None:
            writer.close()
        return self._finish()

    def _round(self, round_num, last):
        started = time.monotonic()
        cohort = self.spending.cohort(round_num)
        if self.config.log_cohorts:
            self._log_cohort(round_num, cohort)
        clients = [
            training_arrays(self.task, self.config, self.train, client, round_num)
            for client in cohort
        ]
        prepared = time.monotonic()
        measured = self.engine.run_round(clients, round_num)
        self.spending.done()
        row = {"round": round_num, **_flat(measured)}
        row["data_seconds"] = round(prepared - started, 4)
        row["round_seconds"] = round(time.monotonic() - prepared, 4)
        if round_num % self.config.rounds_per_eval == 0 or round_num == last:
            # With a seed nothing is spent, and accounting can take longer than rounds:
            # the cost without the seed is computed once, at the end.
            if self.config.seed is None or round_num == last:
                row["epsilon"] = self.spending.epsilon
            row.update(self._evaluate())
        return row

    def _evaluate(self):
        measured = self.evaluator(self.engine.weights, self.eval_data)
        return {f"eval_{name}": value for name, value in measured.items()}

    def _evaluate_at_the_end(self, weights):
        if not self.final_data.same_as(self.eval_data):
            return self.evaluator(weights, self.final_data)
        # Every run's last row is evaluated, on just these examples.
        prefix = "eval_"
        return {
            name.removeprefix(prefix): value
            for name, value in self.table.rows[-1].items()
            if name.startswith(prefix)
        }

    def _add_row(self, row, writer):
        self.table.add(row)
        if writer is None:
            return
        with writer.as_default():
            for name, value in row.items():
                if name != "round" and np.isfinite(value):
                    tf.summary.scalar(name, value, step=row["round"])

    def _log_cohort(self, round_num, cohort):
        path = self.directory / "cohorts.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        try:
            kept = [line for line in lines if json.loads(line)["round"] < round_num]
        except (ValueError, KeyError, TypeError) as error:
            raise records.RunFileError(f"{path} is damaged: {error}.") from error
        kept.append(json.dumps({"round": round_num, "clients": cohort}))
        records.write_atomically(path, "\n".join(kept) + "\n")

    def _finish(self):
        weights = self.engine.weights
        final = self._evaluate_at_the_end(weights)
        column = f"eval_{self.task.metric}"
        last_round = self.table.rows[-1]["round"]
        window = summary_window(last_round)
        recent = [
            row[column]
            for row in self.table.rows
            if column in row and row["round"] > last_round - window
        ]
        result = RunResult(
            config=self.config,
            derived=self.derived,
            rows=self.table.rows,
            final=final,
            summary=float(np.mean(recent)),
            epsilon=self.spending.epsilon,
            private=self.spending.private,
            statement=self.spending.statement(),
            report="",
            weights=weights,
            directory=self.directory,
        )
        text = reporting.report(
            result, self.task, self.spending, self.final_name, window
        )
        self._write_config(
            {
                "rounds": last_round,
                "summary": result.summary,
                "final": final,
                "epsilon": result.epsilon,
                "private": result.private,
            }
        )
        records.write_atomically(self.directory / reports.REPORT, text)
        return dataclasses.replace(result, report=text)


def _print_cost(expected: cost.Cost) -> None:
    print("\n".join(expected.lines()), flush=True)


def summary_window(rounds: int) -> int:
    """The last rounds that a summary is the average of: a fifth, at most 100.

    >>> summary_window(1500), summary_window(50)
    (100, 10)
    """
    return max(1, min(100, rounds // 5))


@contextlib.contextmanager
def _context(config: RunConfig) -> Iterator[None]:
    """Where the engine's computations run."""
    if config.engine == "local":
        yield
        return
    try:
        with warnings.catch_warnings():
            # The warning is from a package of the federated library, and users cannot
            # act on it.
            warnings.filterwarnings("ignore", message="pkg_resources")
            from tfdpclip import federated
    except ImportError as error:
        raise SettingsError(f"{error} Or use --engine=local.") from error
    if config.workers is None:
        context = federated.local_context(simulate_secure_sums=config.secure)
    else:
        context = federated.remote_context(
            config.worker_addresses(),
            simulate_secure_sums=config.secure,
            ready_seconds=config.worker_ready_seconds,
            round_seconds=config.worker_round_seconds,
        )
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(context)
        except ValueError as error:
            raise SettingsError(f"--{error}") from error
        yield


def _engine(config: RunConfig):
    if config.engine == "local":
        return LocalEngine
    from tff_tasks.engine_tff import TffEngine

    return TffEngine


def _batch_spec(task: Task, source: ClientSource) -> Any:
    """The type of a client's batch."""
    client_id = min(source.counts, key=source.counts.__getitem__)
    return task.dataset(task.encode(source.examples(client_id)), 1).element_spec


def _evaluation_data(task, config, sources):
    """The data for evaluation in training and at the end, and the latter's name."""
    test = sources["test"]
    if config.eval_split == "heldout":
        heldout = sources["heldout"]
        now = heldout, select_clients(heldout.client_ids, "test")
        end, name = (test, select_clients(test.client_ids, "test")), "all test clients"
    elif config.eval_split == "validation":
        if len(test.counts) < 2:
            raise SettingsError(
                "eval_split=validation needs two test clients at least; use "
                "--eval_split=test."
            )
        now = test, select_clients(test.client_ids, "validation")
        end = test, select_clients(test.client_ids, "rest")
        name = "the other half of the test clients"
    else:
        now = end = test, select_clients(test.client_ids, "test")
        name = "the same test clients"
    return (
        EvaluationData(task, *now, config.max_eval_examples),
        EvaluationData(task, *end, config.max_final_examples),
        name,
    )


def _flat(measured: Mapping[str, np.ndarray]) -> dict[str, float]:
    """A column for each number; a number of a single group needs no index."""
    row = {}
    for name, values in measured.items():
        values = np.ravel(values)
        for i, value in enumerate(values):
            row[name if len(values) == 1 else f"{name}_{i}"] = float(value)
    return row
