"""Peak memory of a private step against a plain step, one fresh process a cell."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import numpy as np
import tensorflow as tf
from absl import app, flags

from benchmarks.models import TASKS
from benchmarks.step_time import plain_step, private_step

_MODELS = flags.DEFINE_list("memory_models", list(TASKS), "Which models to measure.")
_BATCH_SIZES = flags.DEFINE_list("memory_batch_sizes", ["64", "256"], "Batch sizes.")
_STEPS = flags.DEFINE_integer("memory_steps", 5, "Steps to run before looking.")
_CELL = flags.DEFINE_string("cell", None, "Measure model:size:variant, here and now.")


def peak_mebibytes() -> float:
    """The process's peak resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(cell: str) -> float:
    """Runs one variant in this process; its peak memory in MiB."""
    name, size, variant = cell.split(":")
    task, size = TASKS[name], int(size)
    rng = np.random.default_rng(0)
    x, y = (tf.constant(part) for part in task.batch(rng, size))
    if variant == "plain":
        step = plain_step(task, size, False, False)
    else:
        step = private_step(task, size, False, False, "quantile")
    if variant != "start":
        for _ in range(_STEPS.value):
            step(x, y)
    return peak_mebibytes()


def _in_fresh_process(cell: str) -> float:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", f"--cell={cell}"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    return float(done.stdout.split()[-1])


def main(argv):
    """Prints the table, as Markdown."""
    del argv
    if _CELL.value:
        print(measure(_CELL.value))
        return
    print("| model | B | start MiB | plain | private | private / plain | of the step |")
    print("| --- " * 7 + "|", flush=True)
    for name in _MODELS.value:
        for size in _BATCH_SIZES.value:
            start, plain, private = (
                _in_fresh_process(f"{name}:{size}:{variant}")
                for variant in ("start", "plain", "private")
            )
            step = (private - start) / max(plain - start, 1e-9)
            print(
                f"| {name} | {size} | {start:.0f} | {plain:.0f} | {private:.0f} | "
                f"{private / plain:.2f} | {step:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
