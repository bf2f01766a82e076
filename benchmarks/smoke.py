"""A minute's look at the speed: private steps of three models against plain ones.

    python -m benchmarks.smoke

Fails only where a ratio is above twice what it should be, because a shared machine's
times scatter; `benchmarks.step_time` is for the numbers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from benchmarks import cells
from benchmarks.timing import Spec
from driver_kit import command_line

BATCH_SIZE = 64
MODES = ("quantile", "batch")
# Targets of time / plain step.
TARGETS = {
    "mnist_cnn": 1.4,
    "transformer": 1.2,
    "mlp": 1.2,
}
FACTOR = 2.0
TIMEOUT_SECONDS = 120.0


def limit(model: str, factor: float = FACTOR) -> float:
    """The ratio above which a model's private step is too slow."""
    return factor * TARGETS[model]


def too_slow(model: str, ratio: float, factor: float = FACTOR) -> bool:
    """Whether a ratio is above the limit; a ratio that is not a number is.

    >>> too_slow("mlp", 1.0), too_slow("mlp", float("nan"))
    (False, True)
    """
    return not (math.isfinite(ratio) and ratio <= limit(model, factor))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the ratios; returns 1 if one is above its limit."""
    parser = command_line.argument_parser(__doc__)
    parser.add_argument("--models", default=",".join(TARGETS))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--factor", type=float, default=FACTOR, help="Of the targets.")
    options = parser.parse_args(argv)
    if not 0 < options.factor < math.inf:
        parser.error("--factor must be positive and finite")
    failed = False
    for model in options.models.split(","):
        if model not in TARGETS:
            parser.error(f"--models: {model} has no target")
        spec = Spec(
            model,
            BATCH_SIZE,
            ("plain", *MODES),
            repeats=options.repeats,
            seconds=3.0,
        )
        found = cells.run("tensorflow", spec, timeout=TIMEOUT_SECONDS)
        for row in cells.time_rows("tensorflow", spec, found):
            if row["variant"] == "plain":
                print(f"{model}, B={BATCH_SIZE}: plain {row['median_ms']:.2f} ms")
                continue
            bad = row["status"] != "ok" or too_slow(model, row["ratio"], options.factor)
            failed |= bad
            print(
                f"  {row['variant']}: {row['ratio']:.2f} (limit "
                f"{limit(model, options.factor):.2f})"
                f"{'  TOO SLOW' if bad else ''} {row['note']}".rstrip(),
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
