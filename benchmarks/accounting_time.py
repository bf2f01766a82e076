"""Times the accounting: epsilon of a long run, calibration, and asking again.

    python -m benchmarks.accounting_time --output_dir=runs/benchmarks

Every question is asked in a fresh process, without any cache, and a second time in the
same process.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks import sections
from benchmarks.peers import installed
from driver_kit import command_line

# Name, Python expression, and the allowed seconds.
QUESTIONS = (
    (
        "epsilon, 1,000,000 steps",
        "accounting.epsilon(1.0, 1_000_000, sampling.Poisson(1e-3), 1e-6)",
        1.0,
    ),
    (
        "epsilon, 1,000,000 steps, RDP",
        "accounting.epsilon(1.0, 1_000_000, sampling.Poisson(1e-3), 1e-6, 'rdp')",
        1.0,
    ),
    (
        "noise multiplier, 10,000 steps",
        "accounting.noise_multiplier(3.0, 1e-5, 10_000, sampling.Poisson(1e-2))",
        5.0,
    ),
    (
        "noise multiplier, 1,000,000 steps",
        "accounting.noise_multiplier(8.0, 1e-6, 1_000_000, sampling.Poisson(1e-3))",
        5.0,
    ),
    (
        "steps within epsilon 3",
        "accounting.steps_for(3.0, 1e-5, 1.0, sampling.Poisson(1e-2))",
        5.0,
    ),
)
COLUMNS = ("question", "answer", "seconds", "again_seconds", "limit_seconds", "within")


def ask(expression: str) -> tuple[float, float, float]:
    """The answer, and the seconds of the first and the second time."""
    from tfdpclip import accounting, sampling

    code = compile(expression, "question", "eval")
    names = {"accounting": accounting, "sampling": sampling}
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        answer = eval(code, names)
        seconds.append(time.perf_counter() - start)
    return float(answer), *seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the results and writes accounting.csv."""
    from benchmarks import cells

    parser = command_line.argument_parser(__doc__)
    parser.add_argument(
        "--output_dir",
        type=command_line.named_path,
        default=pathlib.Path("runs/benchmarks"),
    )
    parser.add_argument("--ask", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.ask is not None:
        print(json.dumps(ask(QUESTIONS[options.ask][1])))
        return
    installed.record(options.output_dir, ["tensorflow"])
    path = options.output_dir / "accounting.csv"
    # Seconds in all: nothing worth resuming.
    path.unlink(missing_ok=True)
    table = cells.Table(path, COLUMNS, COLUMNS[:1])
    for i, (name, _, limit) in enumerate(QUESTIONS):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.accounting_time", f"--ask={i}"],
            cwd=cells.ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        answer, first, again = json.loads(done.stdout.splitlines()[-1])
        row = (name, answer, first, again, limit, "yes" if first < limit else "NO")
        table.add([dict(zip(COLUMNS, row, strict=True))])
        print(f"{name}: {answer:.4g} in {first:.2f} s, again {again:.4f} s")
    sections.write(options.output_dir)


if __name__ == "__main__":
    main()
