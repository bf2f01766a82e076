"""Checks random models against one backward pass for each example.

Then compares the proof's verdicts on random graphs of raw ops with brute force.

`make fuzz`, or `python -m tests.fuzz --models=1000 --seed=7`; to check a single model
again: `python -m tests.fuzz --spec='{"seed": 1, ...}'`.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import os
import sys
import time

# Before TensorFlow is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from driver_kit import command_line
from tests.fuzz.grammar import generate
from tests.fuzz.graphs import __main__ as graphs
from tests.fuzz.outcome import MISMATCH, REFUSED, Outcome, key
from tests.fuzz.shrink import shrink
from tests.fuzz.spec import Spec
from tests.fuzz.workers import Worker, run


def daily_seed() -> int:
    """A new seed for every day, so that today's failure can be repeated tomorrow."""
    return int(datetime.date.today().strftime("%Y%m%d"))


def _arguments(argv) -> argparse.Namespace:
    parser = command_line.argument_parser(__doc__, prog="python -m tests.fuzz")
    parser.add_argument("--models", type=int, default=200, help="how many")
    parser.add_argument(
        "--seed",
        type=int,
        default=daily_seed(),
        help="of the models; today's date by default",
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after this long"
    )
    parser.add_argument("--spec", action="append", help="check this model only")
    parser.add_argument(
        "--graphs", type=int, default=100, help="graphs of raw ops, after the models"
    )
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="a line per model")
    return parser.parse_args(argv)


def report_of(spec: Spec, outcome: Outcome) -> str:
    """A failure in a few lines that can be kept and run again."""
    return (
        f"{outcome.kind}: {outcome.detail}\n"
        f"  python -m tests.fuzz --spec='{spec.to_json()}'\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs; returns how many distinct failures there were, at most 1."""
    args = _arguments(argv)
    start = time.monotonic()
    if args.spec:
        specs = [Spec.from_json(text) for text in args.spec]
    else:
        numbers = range(args.first, args.first + args.models)
        specs = (generate(args.seed, number) for number in numbers)
        print(f"seed {args.seed}: models {numbers.start} to {numbers.stop - 1}")
    counts: collections.Counter = collections.Counter()
    refusals: collections.Counter = collections.Counter()
    failures: dict = {}
    with Worker() as worker:
        for spec, outcome, seconds in run(specs, worker):
            counts[outcome.kind] += 1
            if args.verbose or args.spec or outcome.failed:
                print(f"[{seconds:.1f} s] {report_of(spec, outcome)}", flush=True)
            if outcome.kind in (REFUSED, MISMATCH):
                refusals[key(outcome.detail)] += 1
            if outcome.failed:
                failures.setdefault((outcome.kind, key(outcome.detail)), []).append(
                    (spec, outcome)
                )
            if time.monotonic() - start > args.seconds:
                break
        if failures and not args.no_shrink and not args.spec:
            print("Shrunken:")
            for found in failures.values():
                _shrink(found, worker)
    print(", ".join(f"{kind} {n}" for kind, n in counts.most_common()))
    for reason, n in refusals.most_common(12):
        print(f"  refused without a mixer, {n}: {reason}")
    print(f"{time.monotonic() - start:.0f} s; seed {args.seed}")
    unsound = 0
    if args.graphs and not args.spec:
        unsound = graphs.main([f"--graphs={args.graphs}", f"--seed={args.seed}"])
    return int(bool(failures) or bool(unsound))


def _shrink(found, worker) -> None:
    spec, outcome = min(found, key=lambda pair: len(pair[0].to_json()))
    smallest = shrink(spec, lambda other: worker(other).same(outcome))
    print(f"({len(found)} times) {report_of(smallest, outcome)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
