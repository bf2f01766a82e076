"""Repeats every row of docs/results/speed: hours of a quiet machine.

    make peers
    python -m benchmarks.every_row --output_dir=runs/benchmarks

Each part is a separate program, and skips the rows that its table has, so a stopped run
continues. A part that fails does not stop the remaining parts.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.cells import ROOT
from driver_kit import command_line

_SEVEN = "mlp,mnist_cnn,convnet,embedding,lstm,gru,transformer"
_UNROLLED = "lstm_unrolled,gru_unrolled"
_LARGE = "transformer6,resnet18,vit_tiny_film"
_CHECKED = "quantile,quantile_unchecked"
_AGGREGATORS = "gaussian_adaptive,central,secure,distributed"
#: The programs, with their arguments beside the output directory.
PARTS: tuple[tuple[str, ...], ...] = (
    (
        *("step_time", f"--models={_SEVEN}", "--batch_sizes=64,256"),
        "--modes=quantile,fixed,layerwise,automatic,normalized,batch,quantile_no_noise,"
        "quantile_unchecked",
    ),
    (
        *("step_time", f"--models={_SEVEN},{_LARGE},{_UNROLLED}", "--peers="),
        *("--batch_sizes=16,64,256,1024", "--modes=quantile,fixed,batch"),
        "--plain_limit=1",
    ),
    (
        *("step_time", f"--models={_SEVEN}", "--batch_sizes=64,256", "--adam"),
        *("--peers=", "--modes=quantile"),
    ),
    (
        *("step_time", f"--models={_SEVEN}", "--batch_sizes=64", "--jit"),
        *("--peers=", "--modes=quantile"),
    ),
    (
        *("step_time", f"--models={_SEVEN},{_UNROLLED}", "--batch_sizes=64"),
        *("--first_step", "--peers=", f"--modes={_CHECKED}"),
    ),
    (
        *("step_time", f"--models={_LARGE}", "--batch_sizes=16"),
        *("--first_step", "--peers=", f"--modes={_CHECKED}"),
    ),
    (
        *("step_time", f"--models={_SEVEN}", "--batch_sizes=256", "--peers="),
        "--modes=fixed,views_4,views_16",
    ),
    (
        *("memory", "--models=convnet,transformer,lstm", "--batch_sizes=256"),
        *("--peers=", f"--modes={_CHECKED}"),
    ),
    (
        *("memory", "--models=resnet18,mlp", "--batch_sizes=64"),
        *("--peers=", f"--modes={_CHECKED}"),
    ),
    ("whole_fit",),
    ("records",),
    ("op_times",),
    ("scaling",),
    (
        *("federated_round", "--parameters=1e4,1e5", "--clients=10,100,1000"),
        f"--aggregators={_AGGREGATORS}",
    ),
    (
        *("federated_round", "--parameters=1e6", "--clients=10,100"),
        f"--aggregators={_AGGREGATORS},floor_central,floor_distributed",
    ),
    (
        *("federated_round", "--parameters=1e7", "--clients=10"),
        f"--aggregators={_AGGREGATORS}",
    ),
    ("federated_round", "--parameters=1e6", "--clients=10", "--modes=fedavg"),
    ("federated_tasks",),
    ("accounting_time",),
    ("report",),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the programs in turn."""
    parser = command_line.argument_parser(__doc__)
    parser.add_argument(
        "--output_dir",
        type=command_line.named_path,
        default=pathlib.Path("runs/benchmarks"),
    )
    parser.add_argument("--only", help="Programs to run, by commas: step_time,memory.")
    options = parser.parse_args(argv)
    names = dict.fromkeys(name for name, *_ in PARTS)
    only = options.only.split(",") if options.only else list(names)
    if not set(only) <= set(names):
        parser.error(f"--only: there are {', '.join(names)}")
    output_dir = options.output_dir.resolve()
    failed = []
    for name, *told in PARTS:
        if name not in only:
            continue
        command = [f"benchmarks.{name}", *told, f"--output_dir={output_dir}"]
        print("python -m", *command, flush=True)
        if subprocess.run([sys.executable, "-m", *command], cwd=ROOT).returncode:
            failed.append(" ".join(command))
    if failed:
        sys.exit("These failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
