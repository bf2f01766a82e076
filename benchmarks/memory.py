"""Peak memory of a private step against a plain step, a fresh process for each.

    python -m benchmarks.memory --output_dir=runs/benchmarks

`peak` is the whole process, framework and all; `of the step` is its growth from the
first step on. With --largest_batch, also the largest batch that a process can train on
within --memory_budget MiB, found by doubling and bisection; slow.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Sequence

from tqdm import tqdm

from benchmarks import cells, sections
from benchmarks.peers import installed
from benchmarks.timing import Spec
from driver_kit.command_line import argument_parser, named_path, words

COLUMNS = (
    *cells.KEY,
    "status",
    "start_mib",
    "peak_mib",
    "ratio",
    "step_ratio",
    "note",
)
LARGEST_COLUMNS = (
    *(name for name in cells.KEY if name != "batch_size"),
    "budget_mib",
    "status",
    "largest_batch",
    "ratio",
    "note",
)
# Below this, the allocator's own memory hides the step's.
_LEAST_STEP_MIB = 1.0
_PRECISION = 1.1


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argument_parser(__doc__)

    add = parser.add_argument
    add(
        "--models",
        type=words,
        default=["mnist_cnn", "convnet", "mlp", "embedding", "lstm", "transformer"],
    )
    add("--batch_sizes", type=words, default=["64", "256"])
    add("--modes", type=words, default=list(cells.OURS), help="Ours.")
    add("--peers", type=words, default=list(cells.PEERS), help="Other libraries'.")
    add("--adam", action="store_true", help="Adam instead of SGD.")
    add("--largest_batch", action="store_true", help="Also the largest batch.")
    add("--memory_budget", type=float, default=2048.0, help="MiB of the process.")
    add("--largest_limit", type=int, default=65536, help="Batches not to go beyond.")
    add("--seconds_per_cell", type=float, default=180.0, help="Of one process.")
    add("--output_dir", type=named_path, default=pathlib.Path("runs/benchmarks"))
    options = parser.parse_args(argv)
    options.batch_sizes = [int(size) for size in options.batch_sizes]
    if not 0 < options.memory_budget < float("inf"):
        parser.error("--memory_budget must be positive and finite")
    return options


def largest(fits: Callable[[int], bool], limit: int, precision: float = 1.1) -> int:
    """The largest size that fits, to within a factor, by doubling and bisection.

    Args:
      fits: whether a size fits; no larger one does where a smaller one does not.
      limit: the largest size to try.
      precision: a size larger by this factor does not fit, or was not tried.

    Returns:
      The size, 0 if not even 1 fits.

    >>> largest(lambda size: size <= 1000, 65536)
    960
    >>> largest(lambda size: True, 100), largest(lambda size: False, 100)
    (100, 0)
    """
    low, high = 0, 1
    while fits(high):
        low = high
        if high == limit:
            return high
        high = min(2 * high, limit)
    while high > low + 1 and high > low * precision:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def main(argv: Sequence[str] | None = None) -> None:
    """Measures the rows that the tables lack."""
    options = arguments(argv)
    variants = [("tensorflow", name) for name in options.modes]
    variants += [(cells.framework_of(name), name) for name in options.peers]
    # Every framework has its own plain step.
    frameworks = list(dict.fromkeys(["tensorflow", *(pair[0] for pair in variants)]))
    variants = [(framework, "plain") for framework in frameworks] + variants
    installed.record(options.output_dir, frameworks)
    for name in frameworks:
        if installed.python_of(name) is None:
            print(installed.how_to_create(name))
            variants = [pair for pair in variants if pair[0] != name]
    table = cells.Table(options.output_dir / "memory.csv", COLUMNS)
    cases = [
        (model, size, *pair)
        for model in options.models
        for size in options.batch_sizes
        for pair in variants
    ]
    for model, size, framework, variant in tqdm(cases, unit="process"):
        _measure(table, options, model, size, framework, variant)
    if options.largest_batch:
        found = cells.Table(
            options.output_dir / "largest_batch.csv",
            LARGEST_COLUMNS,
            LARGEST_COLUMNS[: len(cells.KEY)],
        )
        cases = [(model, *pair) for model in options.models for pair in variants]
        for model, framework, variant in tqdm(cases, unit="search"):
            _search(found, options, model, framework, variant)
    for path in sections.write(options.output_dir):
        print(path.name)


def _spec(options, model: str, size: int, variant: str) -> Spec:
    return Spec(model, size, (variant,), adam=options.adam, memory=True)


def _measure(table, options, model, size, framework, variant) -> None:
    spec = _spec(options, model, size, variant)
    key = cells.key_of(framework, spec, variant)
    if table.find(key) is not None:
        return
    cell = cells.run(framework, spec, timeout=options.seconds_per_cell)[variant]
    row = {**key, **cell}
    plain = row if variant == "plain" else table.find({**key, "variant": "plain"})
    if cell["status"] == "ok" and plain is not None and plain["status"] == "ok":
        start, peak = float(plain["start_mib"]), float(plain["peak_mib"])
        row["ratio"] = cell["peak_mib"] / peak
        grown = max(cell["peak_mib"] - cell["start_mib"], _LEAST_STEP_MIB)
        row["step_ratio"] = grown / max(peak - start, _LEAST_STEP_MIB)
    table.add([row])


def _search(table, options, model, framework, variant) -> None:
    spec = _spec(options, model, 0, variant)
    key = cells.key_of(framework, spec, variant)
    key["budget_mib"] = options.memory_budget
    if table.find(key) is not None:
        return
    notes = []

    def fits(size):
        cell = cells.run(
            framework,
            _spec(options, model, size, variant),
            timeout=options.seconds_per_cell,
            memory_limit_mib=options.memory_budget,
        )[variant]
        if cell["status"] != "ok":
            notes.append((cell["status"], f"B={size}: {cell['note']}"))
            return False
        # A peak between two looks at the process counts as well.
        return cell["peak_mib"] <= options.memory_budget

    size = largest(fits, options.largest_limit, _PRECISION)
    other = [note for note in notes if note[0] != "memory"]
    # A limit of time, or a library that cannot train it, is not a limit of memory.
    status, note = other[0] if other else ("ok", "")
    plain = size if variant == "plain" else None
    row = table.find({**key, "variant": "plain"})
    if row is not None:
        plain = int(row["largest_batch"])
    ratio = size / plain if plain else None
    found = {"status": status, "largest_batch": size, "ratio": ratio, "note": note}
    table.add([{**key, **found}])


if __name__ == "__main__":
    main()
