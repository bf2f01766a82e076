"""Times a federated round with this library's aggregators against other aggregators.

    python -m benchmarks.federated_round --output_dir=runs/benchmarks

Each aggregator and the unweighted mean are timed in turn, over and over, in a fresh
process; the ratio is to the mean's round of the same turn. Rows go to federated.csv at
once, and rows in the file are not measured again. With --memory, a fresh process for
each aggregator alone gives the peak memory, TensorFlow Federated's worker included.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

from tqdm import tqdm

from benchmarks import cells, sections
from benchmarks.peers import installed
from benchmarks.timing import Spec
from driver_kit.command_line import argument_parser, named_path, words

MODES = ("aggregation", "updates", "fedavg")
AGGREGATORS = ("gaussian_adaptive", "central", "secure", "distributed")
COLUMNS = (
    "mode",
    "aggregator",
    "parameters",
    "clients",
    "status",
    "rounds",
    "median_ms",
    "q25_ms",
    "q75_ms",
    "ratio",
    "ratio_q25",
    "ratio_q75",
    "first_round_s",
    "peak_mib",
    "note",
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argument_parser(__doc__)

    def numbers(text):
        return sorted(int(float(part)) for part in words(text))

    add = parser.add_argument
    add("--parameters", type=numbers, default=[10**4, 10**5, 10**6, 10**7])
    add("--clients", type=numbers, default=[10, 100, 1000])
    add(
        "--aggregators",
        type=words,
        default=list(AGGREGATORS),
        help="Also central_fixed and central_layerwise, and what there is no way "
        "below: floor_central and floor_distributed.",
    )
    add(
        "--modes",
        type=words,
        default=["aggregation"],
        help="aggregation: the clients' updates are made by one cheap operation, to "
        "time nothing but aggregation. updates: they are given as arrays. fedavg: the "
        "round of a learning process, in which each client trains on one batch of 20.",
    )
    add("--repeats", type=int, default=15, help="Timed rounds of each at most.")
    add("--seconds", type=float, default=20.0, help="About how long to time each.")
    add(
        "--work_limit",
        type=float,
        default=2e9,
        help="Parameters times clients; cells beyond are left out.",
    )
    add("--memory", action="store_true", help="Also measure the peak memory.")
    add("--output_dir", type=named_path, default=pathlib.Path("runs/benchmarks"))
    options = parser.parse_args(argv)
    unknown = set(options.modes) - set(MODES)
    if unknown:
        parser.error(f"--modes: no {', '.join(unknown)} among {', '.join(MODES)}")
    if not 0 < options.seconds < float("inf"):
        parser.error("--seconds must be positive and finite")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measures the rows that the table lacks."""
    options = arguments(argv)
    installed.record(options.output_dir, ["tensorflow"])
    table = cells.Table(options.output_dir / "federated.csv", COLUMNS, COLUMNS[:4])
    cases = [
        (mode, parameters, clients, name)
        for mode in options.modes
        for parameters in options.parameters
        for clients in options.clients
        for name in options.aggregators
    ]
    for mode, parameters, clients, name in tqdm(cases, unit="block"):
        if parameters * clients > options.work_limit:
            tqdm.write(
                f"{parameters:,} parameters x {clients} clients left out "
                f"(--work_limit={options.work_limit:g})"
            )
            continue
        spec = Spec(
            mode,
            clients,
            ("plain", name),
            options={"parameters": parameters},
            repeats=options.repeats,
            seconds=options.seconds,
        )
        _measure(table, options, spec)
    for path in sections.write(options.output_dir):
        print(path.name)


def _measure(table: cells.Table, options: argparse.Namespace, spec: Spec) -> None:
    def key(name):
        values = (spec.model, name, spec.options["parameters"], spec.batch_size)
        return dict(zip(COLUMNS[:4], values, strict=True))

    if table.find(key(spec.variants[-1])) is not None:
        return
    found = cells.run("federated", spec, timeout=cells.block_timeout(spec))
    rows = []
    for row in cells.time_rows("federated", spec, found):
        # The number that was asked for, not the nearest that the network can have.
        row.update(key(row["variant"]))
        row["rounds"], row["first_round_s"] = row["repeats"], row["first_step_s"]
        if table.find(row) is not None:
            continue
        if options.memory and row["status"] == "ok":
            alone = dataclasses.replace(spec, variants=(row["aggregator"],), repeats=3)
            timeout = cells.block_timeout(alone)
            (cell,) = cells.run("federated", alone, timeout=timeout).values()
            row["peak_mib"] = cell["watched_mib"] if cell["status"] == "ok" else None
        rows.append(row)
    table.add(rows)


if __name__ == "__main__":
    main()
