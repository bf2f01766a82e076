"""Times a whole private `fit`, for which a user waits, against plain `fit`.

    python -m benchmarks.whole_fit --output_dir=runs/benchmarks

The same model, as many examples and epochs, in one process and in turn: `fit` on
arrays; the private step alone (the same `fit` with a private optimizer: full batches,
nothing accounted), without its self-check and with it; the same on Poisson batches,
without callbacks; and the whole of a `PrivacyPlan`: its callbacks, epsilon. So each
variant adds a part to the variant before. The last two run several steps in one call,
`steps_per_execution=plan.steps_per_execution`, private and plain. Of all epochs after
the first the shortest counts, because other programs only add time.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from tqdm import tqdm

from benchmarks import cells, fit_time, models, sections
from benchmarks.peers import installed
from driver_kit import command_line

COLUMNS = (
    "model",
    "batch_size",
    "examples",
    "xla",
    "variant",
    "epoch_s",
    "first_epoch_s",
    "ratio",
    "epsilon",
)
_KEY = ("model", "batch_size", "examples", "xla", "variant")
_SEVEN = "mlp,mnist_cnn,convnet,embedding,lstm,gru,transformer"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures the rows that the table lacks, and prints the geometric mean of all."""
    parser = command_line.argument_parser(__doc__)
    add = parser.add_argument
    add("--models", default=_SEVEN)
    add("--batch_sizes", default="64,256")
    add("--examples", default="12000,60000")
    add("--epochs", type=int, default=4, help="Of each call of fit; 2 or more.")
    add("--turns", type=int, default=2)
    add("--xla", action="store_true", help="Compile all steps by XLA.")
    add(
        "--output_dir",
        type=command_line.named_path,
        default=pathlib.Path("runs/benchmarks"),
    )
    options = parser.parse_args(argv)
    if options.epochs < 2 or options.turns < 1:
        parser.error("--epochs must be 2 or more and --turns 1 or more")
    chosen = options.models.split(",")
    unknown = [name for name in chosen if name not in models.NAMES]
    if unknown:
        parser.error(f"--models: no {unknown[0]} among {', '.join(models.NAMES)}")
    sizes = [int(text) for text in options.batch_sizes.split(",")]
    counts = [int(text) for text in options.examples.split(",")]
    installed.record(options.output_dir, ["tensorflow"])
    table = cells.Table(options.output_dir / "whole_fit.csv", COLUMNS, _KEY)
    cases = [(n, b, e, options.xla) for e in counts for n in chosen for b in sizes]
    for case in tqdm(cases, unit="cell"):
        keys = [
            dict(zip(_KEY, (*case, variant), strict=True))
            for variant in fit_time.VARIANTS
        ]
        if not all(table.find(key) for key in keys):
            told = {"epochs": options.epochs, "turns": options.turns}
            table.add(fit_time.measure(*case[:3], xla=options.xla, **told))
    for path in sections.write(options.output_dir):
        print(path.name)


if __name__ == "__main__":
    main()
