"""Times a round of every federated task against `fit` on the same batches.

    python -m benchmarks.federated_tasks --output_dir=runs/benchmarks

For each task, in a fresh process and in turn: `fit`, a round of the local engine, a
round of the engine of TensorFlow Federated, a round of TensorFlow Federated's weighted
averaging without clipping or noise, and an evaluation of as many examples as the round
trained on. Ratios are to the `fit` of the same turn. The data are made up, in the
formats and sizes of the real data. Rows go to federated_tasks.csv at once, and rows in
the file are not measured again.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from tqdm import tqdm

from benchmarks import cells, sections
from benchmarks.peers import installed
from benchmarks.timing import Spec
from driver_kit.command_line import argument_parser, named_path, words

#: Clients of a round, and examples of each: enough batches to be like a real client,
#: few enough to be timed often.
SIZES = {
    "digits": (50, 7),
    "emnist_character": (10, 100),
    "emnist_autoencoder": (10, 100),
    "cifar100_image": (4, 100),
    "shakespeare_character": (10, 8),
    "stackoverflow_word": (6, 128),
    "stackoverflow_tag": (10, 300),
}
VARIANTS = ("plain", "local", "tff", "tff_own", "evaluation")
COLUMNS = (
    "task",
    "variant",
    "clients",
    "examples",
    "parameters",
    "status",
    "repeats",
    "median_ms",
    "ratio",
    "ratio_q25",
    "ratio_q75",
    "first_round_s",
    "note",
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argument_parser(__doc__)

    add = parser.add_argument
    add("--tasks", type=words, default=list(SIZES))
    add("--variants", type=words, default=list(VARIANTS[1:]))
    add("--clients", type=int, help="Of a round. Default: depends on the task.")
    add("--examples", type=int, help="Of a client. Default: depends on the task.")
    add("--repeats", type=int, default=15, help="Timed rounds of each at most.")
    add("--seconds", type=float, default=20.0, help="About how long to time each.")
    add("--output_dir", type=named_path, default=pathlib.Path("runs/benchmarks"))
    options = parser.parse_args(argv)
    for flag, given, known in (
        ("tasks", options.tasks, SIZES),
        ("variants", options.variants, VARIANTS[1:]),
    ):
        unknown = set(given) - set(known)
        if unknown:
            parser.error(f"--{flag}: no {', '.join(unknown)} among {', '.join(known)}")
    if not 0 < options.seconds < float("inf"):
        parser.error("--seconds must be positive and finite")
    for flag in ("clients", "examples", "repeats"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            parser.error(f"--{flag} must be at least 1, got {value}")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measures the rows that the table lacks."""
    options = arguments(argv)
    installed.record(options.output_dir, ["tensorflow"])
    path = options.output_dir / "federated_tasks.csv"
    table = cells.Table(path, COLUMNS, COLUMNS[:4])
    for task in tqdm(options.tasks, unit="task"):
        clients, examples = SIZES[task]
        clients, examples = options.clients or clients, options.examples or examples
        key = {"task": task, "clients": clients, "examples": examples}
        missing = [
            name
            for name in options.variants
            if table.find({**key, "variant": name}) is None
        ]
        if not missing:
            continue
        spec = Spec(
            task,
            clients,
            ("plain", *missing),
            options={"examples": examples},
            repeats=options.repeats,
            seconds=options.seconds,
        )
        timeout = cells.block_timeout(spec)
        found = cells.run("federated_tasks", spec, timeout=timeout)
        table.add(
            {**row, **key, "first_round_s": row["first_step_s"]}
            for row in cells.time_rows("federated_tasks", spec, found)
        )
    for written in sections.write(options.output_dir):
        print(written.name)


if __name__ == "__main__":
    main()
