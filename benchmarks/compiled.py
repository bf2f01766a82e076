"""Plain and private steps compiled by XLA, on this machine or without TensorFlow.

    python -m benchmarks.compiled --output_dir=runs/compiled

Writes the steps of every model as files (`benchmarks.step_files`).
`benchmarks.run_steps` runs them in a separate process that needs only JAX and NumPy.
compiled.csv has the results, tables.md the tables; results in the CSV file are not
measured again. For a GPU on a machine without TensorFlow, run the first command here
and the second there:

    python -m benchmarks.compiled --folder=steps --only_write
    python steps/run_steps.py steps/*/ --output=results.json

`--add=results.json` adds the second command's results to the tables. With --paper, also
transformers of 100 million and a billion weights, which are compiled and not run, the
growth of the compile time with depth, and steps that are split over eight devices.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks import compiled_tables, models, paper_models, step_files
from benchmarks.cells import ROOT, Table
from benchmarks.peers import installed
from benchmarks.step_files import Cell
from driver_kit.command_line import argument_parser, named_path, words

# Not lstm and gru: of Keras 2's, XLA takes the tokens for constants.
MODELS = ("mlp", "mnist_cnn", "convnet", "embedding", "transformer")
MODES = (
    *("quantile", "quantile_unchecked", "fixed_unchecked", "automatic_unchecked"),
    *("normalized_unchecked", "quantile_no_noise_unchecked"),
)
# Of Adam and of mixed_bfloat16.
_FEW = ("quantile", "quantile_unchecked")
# Loops of an unknown number of steps have no roofline.
_LOOPS = ("lstm", "gru")
_PATIENCE_SECONDS = 1800.0


class MeasureError(RuntimeError):
    """A step could not be written or run."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argument_parser(__doc__)

    add = parser.add_argument
    add("--models", type=words, default=list(MODELS), help="Of benchmarks.models.")
    add("--batch_sizes", type=words, default=["64"])
    add("--optimizers", type=words, default=["sgd", "adam"])
    add("--policies", type=words, default=["float32", "mixed_bfloat16"])
    add("--modes", type=words, default=list(MODES), help="Ours, of SGD in float32.")
    add("--repeats", type=int, default=40, help="Timed steps of each at most.")
    add("--seconds_per_cell", type=float, default=5.0, help="Of one step's timing.")
    add("--folder", type=named_path, help="Keeps the step files there.")
    add("--only_write", action="store_true", help="Writes them and stops.")
    add("--add", type=named_path, help="Results of a run elsewhere, for the tables.")
    add("--paper", action="store_true", help="Also what is compiled and not run.")
    add("--python", default=sys.executable, help="What has JAX, to run the steps.")
    add("--device", default="cpu", help="What JAX calls the device that it has.")
    add("--output_dir", type=named_path, default=pathlib.Path("runs/compiled"))
    add("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    known = {
        "models": models.NAMES,
        "optimizers": ("sgd", "adam"),
        "policies": step_files.POLICIES,
        "modes": step_files.VARIANTS,
    }
    for flag, allowed in known.items():
        for name in getattr(options, flag):
            if name not in allowed:
                parser.error(f"--{flag}: no {name!r} among {', '.join(allowed)}")
    if not all(size.isdigit() and int(size) for size in options.batch_sizes):
        parser.error("--batch_sizes must be whole numbers above 0")
    if options.only_write and not options.folder:
        parser.error("--only_write needs --folder, which says where to")
    if options.repeats < 1 or not 0 < options.seconds_per_cell < float("inf"):
        parser.error("--repeats and --seconds_per_cell must be above 0, and finite")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measures the cells that the tables lack, and writes the tables."""
    options = arguments(argv)
    if options.worker:
        _write_here(json.loads(options.worker))
        return
    table = Table(
        options.output_dir / "compiled.csv",
        compiled_tables.COLUMNS,
        compiled_tables.KEY,
    )
    if options.add:
        for found in json.loads(options.add.read_text()):
            table.add(compiled_tables.rows_of(found))
    else:
        if not options.only_write:
            installed.record(options.output_dir, ["tensorflow"])
        with tempfile.TemporaryDirectory() as folder:
            # The writing processes have a different working directory.
            place = pathlib.Path(options.folder or folder).resolve()
            _measure_all(table, options, place)
            if options.paper and not options.only_write:
                _compile_papers(options, pathlib.Path(folder))
    if not options.only_write:
        for path in compiled_tables.write(options.output_dir):
            print(path.name)


def _cells(options) -> Iterator[tuple[Cell, list[str]]]:
    """Every cell with its private variants."""
    for model, size, optimizer, policy in itertools.product(
        options.models,
        map(int, options.batch_sizes),
        options.optimizers,
        options.policies,
    ):
        usual = (optimizer, policy) == ("sgd", "float32")
        # Only one setting differs from the usual at a time.
        if usual or "sgd" == optimizer or policy == "float32":
            modes = [m for m in options.modes if usual or m in _FEW]
            yield Cell(model, size, optimizer, policy), modes


def _measure_all(table, options, folder: pathlib.Path) -> None:
    measured, failed = {}, []
    if not options.only_write:
        measured = {"device": options.device, "jaxlib": _jaxlib(options.python)}
    for cell, modes in tqdm(list(_cells(options)), unit="cell"):
        key = {**measured, **cell.fields()}
        names = modes
        if not options.only_write:
            names = [n for n in modes if table.find({**key, "variant": n}) is None]
        if not names:
            continue
        place = folder / cell.folder
        what = {"folder": str(place), "cell": cell.fields(), "variants": names}
        flags = [
            f"--repeats={options.repeats}",
            f"--seconds={options.seconds_per_cell}",
        ]
        try:
            _write_elsewhere(what)
            if options.only_write:
                shutil.copy(place / step_files.RUNNER, folder)
                continue
            found = _run(options.python, place, *flags)
        except MeasureError as error:
            failed.append(f"{cell.folder}: {error}")
            print(failed[-1])
            continue
        table.add(compiled_tables.rows_of(found))
        if not options.folder:
            shutil.rmtree(place)
    if failed:
        print(f"{len(failed)} cells failed; run it again for those alone.")
    if options.only_write:
        return
    estimates = Table(
        options.output_dir / "roofline.csv",
        compiled_tables.ROOFLINE_COLUMNS,
        compiled_tables.ROOFLINE_COLUMNS[:2],
    )
    for model in options.models:
        for size in options.batch_sizes:
            key = {"model": model, "batch_size": size}
            if model not in _LOOPS and estimates.find(key) is None:
                estimates.add([{**key, "ratio": _roofline(model, size)}])


def _jaxlib(python: str) -> str:
    """The version of jaxlib that a Python has; MeasureError if jaxlib is missing."""
    return _output_of([python, "-c", "import jaxlib; print(jaxlib.__version__)"])[:-1]


def _roofline(model: str, size: str) -> float:
    """What `benchmarks.roofline` says of a GPU, of the graph of the step."""
    command = [sys.executable, "-m", "benchmarks.roofline"]
    told = _output_of([*command, f"--cells={model}:{size}"])
    return float(told.strip().splitlines()[-1].strip("| ").split(" | ")[-1])


def _compile_papers(options, folder: pathlib.Path) -> None:
    table = Table(
        options.output_dir / "paper.csv",
        compiled_tables.PAPER_COLUMNS,
        compiled_tables.PAPER_KEY,
    )
    jaxlib = _jaxlib(options.python)
    for case in tqdm(paper_models.CASES, unit="model"):
        for variant in case.variants:
            key = {**case.key(), "variant": variant, "jaxlib": jaxlib}
            if table.find(key) is not None:
                continue
            place = folder / "paper"
            _write_elsewhere(
                {"folder": str(place), "paper": case.name, "variants": [variant]}
            )
            flags = [f"--shape={shape}" for shape in case.shapes]
            if case.devices > 1:
                flags.append(f"--devices={case.devices}")
            found = _run(options.python, place, "--repeats=0", *flags)
            table.add([{**key, **compiled_tables.paper_row(case.of, found, variant)}])
            shutil.rmtree(place)


def _write_elsewhere(what: dict[str, Any]) -> None:
    """Writes step files in a separate process: TensorFlow keeps compiled programs."""
    command = [sys.executable, "-m", "benchmarks.compiled", "--worker"]
    _output_of([*command, json.dumps(what)])


def _write_here(what: dict[str, Any]) -> None:
    folder = pathlib.Path(what["folder"])
    if "paper" in what:
        (case,) = (c for c in paper_models.CASES if c.name == what["paper"])
        cell, task = case.cell, case.task()
        about: dict[str, Any] = {**cell.fields(), "model": case.name, **case.counts()}
        names, run = what["variants"], False
    else:
        cell, task = Cell(**what["cell"]), None
        about, run = cell.fields(), True
        names = ["plain", *what["variants"]]
    step_files.write(
        folder,
        about,
        {name: lambda name=name: step_files.made(cell, name, task) for name in names},
        run,
    )


def _run(python: str, folder: pathlib.Path, *flags: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        output = pathlib.Path(directory, "found.json")
        command = [python, str(folder / step_files.RUNNER), str(folder), *flags]
        # 1: a result is not TensorFlow's. The tables say so.
        print(_output_of([*command, f"--output={output}"], (0, 1)), end="")
        (found,) = json.loads(output.read_text())
    return found


def _output_of(command: Sequence[str], fine: Sequence[int] = (0,)) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SECONDS,
    )
    if done.returncode not in fine:
        why = "\n".join(done.stderr.strip().splitlines()[-5:]) or "it said nothing"
        what = pathlib.Path(command[1]).name if command[1] != "-m" else command[2]
        raise MeasureError(f"{what} failed: {why}")
    return done.stdout


if __name__ == "__main__":
    main()
