"""A minute's look at the speed: private steps and rounds against plain ones.

    python -m benchmarks.smoke

Steps of three models against plain steps, and the aggregation of ten updates of a
million parameters against their mean (where TensorFlow Federated is), and a `fit` by a
plan against plain `fit`. Fails only where a ratio is above twice what it should be: a
shared machine's times scatter; `benchmarks.step_time`, `benchmarks.federated_round` and
`benchmarks.whole_fit` are for the numbers.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence

from benchmarks import cells, fit_time
from benchmarks.timing import Spec
from driver_kit import command_line

BATCH_SIZE = 64
MODES = ("quantile", "batch")
# Targets of time / plain step, by model, and of time / unweighted mean, by aggregator.
# Aggregation was 1.24 and 5.4 when last measured; with distributed noise it had been 14
# to 18 before discrete Gaussians came from a table.
TARGETS = {
    "mnist_cnn": 1.4,
    "transformer": 1.2,
    "mlp": 1.2,
    "central": 1.5,
    "distributed": 6.0,
    "whole_fit": 1.8,
}
MODELS = ("mnist_cnn", "transformer", "mlp")
AGGREGATION = "aggregation"
AGGREGATORS = ("central", "distributed")
WHOLE_FIT = "whole_fit"
CLIENTS, PARAMETERS = 10, 10**6
FACTOR = 2.0
TIMEOUT_SECONDS = 120.0


def limit(name: str, factor: float = FACTOR) -> float:
    """The ratio above which a model's step, or an aggregator, is too slow."""
    return factor * TARGETS[name]


def too_slow(name: str, ratio: float, factor: float = FACTOR) -> bool:
    """Whether a ratio is above the limit; a ratio that is not a number is.

    >>> too_slow("mlp", 1.0), too_slow("mlp", float("nan"))
    (False, True)
    """
    return not (math.isfinite(ratio) and ratio <= limit(name, factor))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the ratios; returns 1 if one is above its limit."""
    parser = command_line.argument_parser(__doc__)
    found = importlib.util.find_spec("tensorflow_federated") is not None
    known = [*MODELS, WHOLE_FIT, *([AGGREGATION] if found else [])]
    parser.add_argument("--models", default=",".join(known))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--factor", type=float, default=FACTOR, help="Of the targets.")
    options = parser.parse_args(argv)
    if not 0 < options.factor < math.inf:
        parser.error("--factor must be positive and finite")
    failed = False
    for model in options.models.split(","):
        if model not in known:
            parser.error(f"--models: no {model} among {', '.join(known)}")
        if model == WHOLE_FIT:
            failed |= _look_at_fit(options.factor)
        else:
            failed |= _look(model, options.repeats, options.factor)
    return int(failed)


def _look_at_fit(factor: float) -> bool:
    """Prints the ratio of an epoch of `fit`; whether it is too slow."""
    plain, plan = fit_time.measure(
        *("mnist_cnn", 256, 12_000), epochs=3, turns=1, variants=("plain", "plan")
    )
    bad = too_slow(WHOLE_FIT, plan["ratio"], factor)
    print(f"fit of mnist_cnn, 12,000 examples: plain {plain['epoch_s']:.2f} s an epoch")
    print(
        f"  plan: {plan['ratio']:.2f} (limit {limit(WHOLE_FIT, factor):.2f})"
        f"{'  TOO SLOW' if bad else ''}",
        flush=True,
    )
    return bad


def _look(model: str, repeats: int, factor: float) -> bool:
    """Prints the ratios of one model, or of aggregation; whether one is too slow."""
    if model == AGGREGATION:
        framework, variants = "federated", ("plain", *AGGREGATORS)
        size, title = CLIENTS, f"{CLIENTS} clients of {PARAMETERS:,} parameters: mean"
        settings = {"options": {"parameters": PARAMETERS}}
    else:
        framework, variants = "tensorflow", ("plain", *MODES)
        size, title = BATCH_SIZE, f"{model}, B={BATCH_SIZE}: plain"
        settings = {}
    spec = Spec(model, size, variants, repeats=repeats, seconds=3.0, **settings)
    found = cells.run(framework, spec, timeout=TIMEOUT_SECONDS)
    failed = False
    for row in cells.time_rows(framework, spec, found):
        variant = row["variant"]
        if variant == "plain":
            print(f"{title} {row['median_ms']:.2f} ms")
            continue
        name = variant if variant in TARGETS else model
        bad = row["status"] != "ok" or too_slow(name, row["ratio"], factor)
        failed |= bad
        print(
            f"  {variant}: {row['ratio']:.2f} (limit {limit(name, factor):.2f})"
            f"{'  TOO SLOW' if bad else ''} {row['note']}".rstrip(),
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
