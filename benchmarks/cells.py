"""Runs measurements in separate processes, and keeps the table of results.

A block is one model, one batch size and some variants of one framework, timed in turn
in the same process as that framework's plain step. Each block's results are appended to
a CSV file at once, and results in the file are not measured again.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psutil

from benchmarks.peers import installed
from benchmarks.timing import Spec, quantiles

ROOT = pathlib.Path(__file__).resolve().parents[1]

# The variants, by the process that measures them. A peer has a separate process, next
# to a plain step, so that its crash or hang loses no other variant.
OURS = (
    "fixed",
    "quantile",
    "layerwise",
    "layerwise_quantile",
    "automatic",
    "normalized",
    "batch",
    "perturbation",
    "quantile_no_noise",
)
PEERS = {
    "tfp_vectorized": "tensorflow",
    "tfp_dpmodel": "tensorflow",
    "tfp_fast": "tensorflow",
    "opacus_hooks": "opacus",
    "opacus_ghost": "opacus",
    "jax_vmap": "jax",
    "jax_microbatch1": "jax",
}
_WORKERS = {
    "tensorflow": "benchmarks.worker",
    "opacus": "benchmarks.peers.opacus_step",
    "jax": "benchmarks.peers.jax_step",
    "federated": "benchmarks.federated_worker",
    "federated_tasks": "benchmarks.federated_tasks_worker",
}
# Starting Python and importing a framework, and tracing or compiling, on a slow day.
_START_SECONDS = 60.0
_FIRST_STEP_SECONDS = 90.0
# Rarely enough to disturb no measurement.
_POLL_SECONDS = 0.2

KEY = ("framework", "variant", "model", "options", "batch_size", "adam", "jit")
TIME_COLUMNS = (
    *KEY,
    "status",
    "parameters",
    "repeats",
    "median_ms",
    "q25_ms",
    "q75_ms",
    "plain_ms",
    "ratio",
    "ratio_q25",
    "ratio_q75",
    "first_step_s",
    "note",
)


def framework_of(variant: str) -> str:
    """The framework that runs a variant; plain steps belong to each framework."""
    return PEERS.get(variant.removesuffix("_xla"), "tensorflow")


def run(
    framework: str,
    spec: Spec,
    *,
    timeout: float,
    memory_limit_mib: float | None = None,
) -> dict[str, dict[str, Any]] | None:
    """Measures a block in a fresh process.

    Args:
      framework: "tensorflow", "federated", "federated_tasks", "opacus" or "jax".
      spec: the measurement.
      timeout: seconds after which the process is stopped.
      memory_limit_mib: resident memory at which it is stopped; None: 90% of the memory
        available now, so that the machine never runs out.

    Returns:
      The worker's results by variant: `status`, `note`, `parameters`, `watched_mib`
      (the largest memory seen of the process and its children) and either times or
      memory. A process that was stopped or died gives each variant the status
      "timeout", "memory" or "error". None if the framework is not installed.
    """
    python = installed.python_of(framework)
    if python is None:
        return None
    if memory_limit_mib is None:
        memory_limit_mib = 0.9 * psutil.virtual_memory().available / 2**20
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
        "PYTHONPATH": str(ROOT),
    }
    with tempfile.TemporaryDirectory() as folder:
        spec_file, result = (pathlib.Path(folder, name) for name in ("spec", "result"))
        spec_file.write_text(json.dumps(dataclasses.asdict(spec)))
        log = pathlib.Path(folder, "log")
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [python, "-m", _WORKERS[framework], str(spec_file), str(result)],
                cwd=ROOT,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status, why, peak = _watch(process, timeout, memory_limit_mib)
            finally:
                _stop(process)
        if result.exists():
            found = json.loads(result.read_text())
            return {
                name: {
                    **cell,
                    "parameters": found["parameters"],
                    "watched_mib": peak,
                }
                for name, cell in found["variants"].items()
            }
        lines = log.read_text(errors="replace").strip().splitlines()
    note = why or (lines[-1][:300] if lines else "no output")
    if status == "error":
        print("\n".join(lines[-20:]), file=sys.stderr)
    return {
        name: {"status": status, "note": note, "parameters": None, "times": []}
        for name in spec.variants
    }


def _watch(process, timeout: float, limit_mib: float) -> tuple[str, str, float]:
    """Waits for the process, or for a reason to stop it.

    Returns the status for the case that there are no results, a note, and the largest
    memory seen, children included.
    """
    deadline = time.monotonic() + timeout
    watched = psutil.Process(process.pid)
    peak = 0.0
    while True:
        try:
            process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        else:
            if process.returncode == -signal.SIGKILL:
                return "memory", "killed, probably for lack of memory", peak
            return "error", "", peak
        used = 0
        for part in (watched, *_children(watched)):
            try:
                used += part.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        peak = max(peak, used / 2**20)
        if peak > limit_mib:
            return "memory", f"stopped at {peak:.0f} MiB", peak
        if time.monotonic() > deadline:
            return "timeout", f"stopped after {timeout:.0f} s", peak


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _stop(process) -> None:
    """Ends the process and its children, which form a process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def block_timeout(spec: Spec) -> float:
    """Seconds that a block may take in all."""
    first = max(_FIRST_STEP_SECONDS, 3 * spec.seconds)
    return _START_SECONDS + len(spec.variants) * (first + 3 * spec.seconds)


def time_rows(
    framework: str, spec: Spec, found: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Rows of the table of times: medians, quartiles and ratios to the plain step."""
    plain = found.get("plain", {}).get("times", [])
    rows = []
    for name, cell in found.items():
        times = cell.get("times", [])
        low, median, high = quantiles([1e3 * value for value in times])
        # The same rounds of both, so that a slow moment of the machine cancels.
        paired = [a / b for a, b in zip(times, plain, strict=False)]
        ratio_low, ratio, ratio_high = quantiles(paired)
        rows.append(
            {
                **key_of(framework, spec, name),
                "status": cell["status"],
                "parameters": cell.get("parameters"),
                "repeats": len(times),
                "median_ms": median,
                "q25_ms": low,
                "q75_ms": high,
                "plain_ms": 1e3 * statistics.median(plain) if plain else None,
                "ratio": ratio,
                "ratio_q25": ratio_low,
                "ratio_q75": ratio_high,
                "first_step_s": cell.get("first"),
                "note": cell.get("note", ""),
            }
        )
    return rows


def key_of(framework: str, spec: Spec, variant: str) -> dict[str, Any]:
    """The columns that identify a measurement."""
    options = ";".join(f"{name}={value}" for name, value in spec.options.items())
    return {
        "framework": framework,
        "variant": variant,
        "model": spec.model,
        "options": options,
        "batch_size": spec.batch_size,
        "adam": spec.adam,
        "jit": spec.jit,
    }


class Table:
    """A CSV file of results that grows by rows and is read again at the next start.

    Args:
      path: the file; it need not exist.
      columns: its columns.
      key: the columns that identify a row.
    """

    def __init__(
        self, path: pathlib.Path, columns: Sequence[str], key: Sequence[str] = KEY
    ):
        self.path = path
        self.columns = tuple(columns)
        self._key = tuple(key)
        self.rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="") as stream:
                reader = csv.DictReader(stream)
                if tuple(reader.fieldnames or ()) != self.columns:
                    raise ValueError(
                        f"output_dir: {path.name} has other columns than this version "
                        "writes. Use another --output_dir."
                    )
                self.rows = list(reader)

    def find(self, key: Mapping[str, Any]) -> dict[str, str] | None:
        """The row with this key, or None."""
        wanted = [_text(key[name]) for name in self._key]
        for row in self.rows:
            if [row[name] for name in self._key] == wanted:
                return row
        return None

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends the rows whose key the table does not have yet."""
        new = []
        for row in rows:
            if self.find(row) is None:
                new.append({name: _text(row.get(name)) for name in self.columns})
                self.rows.append(new[-1])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        first = not self.path.exists()
        with self.path.open("a", newline="") as stream:
            writer = csv.DictWriter(stream, self.columns)
            if first:
                writer.writeheader()
            writer.writerows(new)


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and value != value):
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
