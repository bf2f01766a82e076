r"""Reruns the experiments on real data that docs/results/real/ reports.

    python -m tools.real --data_dir=DIR
    python -m tools.real --data_dir=DIR --form=long --only=gradient_symmetry

DIR has the published data that README.md in docs/results/real names. The short form
takes some ten minutes on two cores, and tries every program on little data. The time of
the long form stands beside its runs (--dry_run). A run that succeeded is not repeated;
an unfinished run continues where its program can.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

from driver_kit import programs, progress, reports, settings
from tfdpclip import files
from tools import real_runs

_TIMES = "wall_times.csv"
_NEEDED = {
    "mnist": "the four IDX files of MNIST (yann.lecun.com/exdb/mnist and its mirrors)",
    "fashion_mnist": "the four IDX files of Fashion-MNIST (github.com/"
    "zalandoresearch/fashion-mnist)",
    "shakespeare": "the plays as text, one file each (Project Gutenberg's editions)",
    "efficientnet_lite0_imagenet.npz": "EfficientNet-Lite0's ImageNet weights, made "
    "as keras_examples/efficientnet_lite.py says",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The runs to repeat."""

    data_dir: str | None = settings.words(
        None, f"Directory with {', '.join(_NEEDED)}.", good="data"
    )
    form: str = settings.choice("short", ("short", "long"), "How much of it.")
    only: str | None = settings.words(
        None, "Names of runs, separated by commas; all by default."
    )
    dry_run: bool = settings.switch(False, "Only say what would run.")
    output_dir: str = settings.output_dir("real")


def chosen(used: Settings) -> list[real_runs.Run]:
    """The runs that the settings ask for, and the runs whose results they read.

    Raises:
      UsageError: if no run has a given name.
    """
    runs = [run for run in real_runs.RUNS if run.form == used.form]
    if used.only is None:
        return runs
    known = {run.name: run for run in runs}
    wanted = [name.strip() for name in used.only.split(",") if name.strip()]
    # Runs whose results are read are appended on the way.
    for name in wanted:
        if name not in known:
            raise settings.UsageError(
                f"flag --only={used.only}: the {used.form} form has no {name!r}; it "
                f"has {', '.join(sorted(known))}."
            )
        wanted += known[name].after.difference(wanted)
    return [run for run in runs if run.name in wanted]


def check_data(used: Settings, runs: list[real_runs.Run]) -> str:
    """The directory of the data, relative if it was given so.

    Raises:
      UsageError: if data are missing; the message says which, and where they are from.
    """
    if used.data_dir is None:
        raise settings.UsageError(
            "flag --data_dir is missing: it must name a directory with "
            f"{', '.join(_NEEDED)}; for example --data_dir=data. "
            "docs/results/real/README.md says where each is from."
        )
    for name, what in _NEEDED.items():
        path = pathlib.Path(used.data_dir, name)
        if any(name in run.needs for run in runs) and not path.exists():
            raise settings.UsageError(
                f"flag --data_dir={used.data_dir}: there is no {name} in it, which is "
                f"{what}. --only leaves out what needs it."
            )
    return used.data_dir


def rerun(used: Settings) -> str:
    """Runs the unfinished experiments in turn, and returns the outcome in words."""
    runs = chosen(used)
    if used.dry_run:
        place = f"{used.output_dir}/{used.form}"
        lines = [
            f"{run.name} ({progress.duration(60 * run.minutes)}):\n"
            + "\n".join(f"  python -m {line}" for line in run.commands("DIR", place))
            for run in runs
        ]
        total = sum(run.minutes for run in runs)
        return "\n".join([*lines, f"In all: {progress.duration(60 * total)}."])
    data = check_data(used, runs)
    directory = programs.make_directory(used.output_dir)
    times = _read_times(directory / _TIMES)
    bar = progress.Progress("real data", len(runs), unit="run")
    failed = []
    for number, run in enumerate(runs, 1):
        key = f"{used.form}/{run.name}"
        if key not in times:
            seconds, log = _run(run, data, directory / used.form)
            if seconds is None:
                failed.append(f"{run.name}: see {log}")
            else:
                times[key] = seconds
                rows = [{"run": k, "seconds": round(v)} for k, v in times.items()]
                files.write_atomically(directory / _TIMES, reports.table_text(rows))
        bar.show(number, [run.name, "failed" if key not in times else "done"])
    if failed:
        raise settings.UsageError("These failed:\n" + "\n".join(failed))
    return (
        f"{len(runs)} runs ended well; what each wrote is in {directory / used.form}, "
        f"how long they took in {directory / _TIMES}."
    )


def _read_times(path: pathlib.Path) -> dict[str, float]:
    if not path.exists():
        return {}
    try:
        rows = (line.rsplit(",", 1) for line in path.read_text().splitlines()[1:])
        return {name: float(seconds) for name, seconds in rows}
    except ValueError as error:
        raise settings.UsageError(
            f"flag --output_dir: {path} cannot be read ({error}); use another one."
        ) from error


def _run(run, data, directory) -> tuple[float | None, pathlib.Path]:
    """How long a run took, None if a command failed; and where the output is."""
    files.prepare_directory(directory)
    log = directory / f"{run.name}.txt"
    started = time.monotonic()
    with log.open("w") as said:
        for line in run.commands(data, str(directory)):
            print(f"$ python -m {line}", file=said, flush=True)
            # Into a file, and in a session of its own: TensorFlow Federated leaves
            # a process behind that would hold a pipe open.
            process = subprocess.Popen(
                [sys.executable, "-m", *shlex.split(line)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait()
            finally:
                _end(process)
            if code:
                return None, log
    return time.monotonic() - started, log


def _end(process: subprocess.Popen) -> None:
    """Ends a program and its child processes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.run_program(__doc__, Settings, rerun, argv)


if __name__ == "__main__":
    main()
