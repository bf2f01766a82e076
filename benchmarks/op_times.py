"""The operations that make a private step slower than a plain step.

    python -m benchmarks.op_times --output_dir=runs/benchmarks

TensorFlow's profiler records every kernel of some steps of a plain and of a private
step, in a separate process for each model and batch size. Times are summed by the kind
of operation: op_times.csv has all of them, op_times.md the largest differences. Kernels
of a step run side by side on several cores, and the profiler itself costs time, so the
sums say where time goes, not how long a step takes; `benchmarks.step_time` measures
that.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.cells import ROOT
from benchmarks.timing import Spec
from driver_kit import command_line

CELLS = ("mlp:64", "mnist_cnn:256", "embedding:256", "gru:256")
# The self-check runs among the steps that are timed.
MODE = "quantile_unchecked"
COLUMNS = ("model", "batch_size", "op", "plain_ms", "private_ms", "difference_ms")
# The function that XLA makes of the noise is called, not inlined.
_NOISE = "noise, compiled"
_NAMES = {"PartitionedCall": _NOISE}
# TensorFlow 2.21's event for compiled kernels, which lacks the op's name.
_COMPILED = "CpuExecutable::ExecuteAsyncOnStream"
_PREFIXES = ("_MklNative", "_Mkl", "_Fused")
_LINES = 8
_WARM_UP, _STEPS = 5, 20
_TIMEOUT_SECONDS = 300.0


def kind(event: str) -> str | None:
    """The kind of operation of a profiler's event; None if it is no kernel.

    >>> kind("model/dense/Relu:_MklNativeFusedMatMul"), kind("ExecutorState::Process")
    ('MatMul', None)
    """
    if "::" in event or ":" not in event or " " in event:
        return None
    name = event.rsplit(":", 1)[1]
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    name = name.removeprefix("Fused").removesuffix("V2")
    return _NAMES.get(name, name)


def times_of_kernels(directory: pathlib.Path) -> dict[str, float]:
    """Milliseconds by kind of operation, from the profiler's files."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    total: dict[str, float] = collections.defaultdict(float)
    compiled = 0.0
    for path in directory.rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        for plane in space.planes:
            names = {key: value.name for key, value in plane.event_metadata.items()}
            for line in plane.lines:
                for event in line.events:
                    if names[event.metadata_id] == _COMPILED:
                        compiled += event.duration_ps / 1e9
                    found = kind(names[event.metadata_id])
                    if found is not None:
                        total[found] += event.duration_ps / 1e9
    # The op contains the compiled kernel, where both are known.
    if compiled and _NOISE not in total:
        total[_NOISE] = compiled
    return dict(total)


def measure(model: str, batch_size: int, variant: str) -> dict[str, float]:
    """Milliseconds of a step by kind of operation, in this process."""
    import tensorflow as tf

    from benchmarks import variants

    makers, _ = variants.makers(Spec(model, batch_size, (variant,)))
    step = makers[variant]()
    for _ in range(_WARM_UP):
        step()
    with tempfile.TemporaryDirectory() as directory:
        with tf.profiler.experimental.Profile(directory):
            for _ in range(_STEPS):
                step()
        found = times_of_kernels(pathlib.Path(directory))
    return {name: value / _STEPS for name, value in found.items()}


def _in_a_process(model: str, batch_size: int, variant: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.op_times", "--worker"]
    found = subprocess.run(
        [*command, f"{model}:{batch_size}", "--mode", variant],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )
    if found.returncode:
        why = (found.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"{model}, B={batch_size}, {variant} failed: {why}")
    return json.loads(found.stdout.splitlines()[-1])


def compared(model: str, batch_size: int, mode: str) -> list[dict]:
    """A row for each kind of operation, the largest difference first."""
    plain, private = (
        _in_a_process(model, batch_size, variant) for variant in ("plain", mode)
    )
    rows = []
    for op in {*plain, *private}:
        before, after = plain.get(op, 0.0), private.get(op, 0.0)
        values = (model, batch_size, op, before, after, after - before)
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return sorted(rows, key=lambda row: -abs(row["difference_ms"]))


def page(rows: Sequence[dict]) -> str:
    """Markdown: for every model the kinds of operations that differ most."""
    lines = [
        "# Kernel times of a private and a plain step",
        "",
        "Milliseconds per step, summed over the kernels of a kind, by TensorFlow's",
        "profiler (`python -m benchmarks.op_times`). Kernels run side by side, so the",
        "sums are longer than the step.",
    ]
    cells = dict.fromkeys((row["model"], row["batch_size"]) for row in rows)
    for model, batch_size in cells:
        mine = [r for r in rows if (r["model"], r["batch_size"]) == (model, batch_size)]
        lines += ["", f"## {model}, B = {batch_size}", ""]
        lines += [
            "| operation | plain | private | difference |",
            "| --- |" + " ---: |" * 3,
        ]
        shown, rest = mine[:_LINES], mine[_LINES:]
        for label, part in [*((r["op"], [r]) for r in shown), ("all others", rest)]:
            sums = [sum(r[c] for r in part) for c in COLUMNS[3:]]
            lines.append(f"| {label} | " + " | ".join(f"{s:.2f}" for s in sums) + " |")
        sums = [sum(r[c] for r in mine) for c in COLUMNS[3:]]
        lines.append("| **sum** | " + " | ".join(f"**{s:.2f}**" for s in sums) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = command_line.argument_parser(__doc__)
    add = parser.add_argument
    add("--cells", default=",".join(CELLS), help="model:batch_size, by commas.")
    add(
        "--mode",
        default=MODE,
        help="Which private step, of `benchmarks.variants.OURS`.",
    )
    add(
        "--output_dir",
        type=command_line.named_path,
        default=pathlib.Path("runs/benchmarks"),
    )
    add("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        model, batch_size = options.worker.split(":")
        print(json.dumps(measure(model, int(batch_size), options.mode)))
        return
    rows = []
    for cell in options.cells.split(","):
        model, _, batch_size = cell.partition(":")
        if not batch_size.isdigit():
            parser.error(f"--cells: {cell!r} must be model:batch_size, as in mlp:64")
        rows += compared(model, int(batch_size), options.mode)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    with (options.output_dir / "op_times.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        for row in rows:
            short = {c: round(row[c], 4) for c in COLUMNS[3:]}
            writer.writerow({**row, **short})
    (options.output_dir / "op_times.md").write_text(page(rows))


if __name__ == "__main__":
    main()
