"""Times private steps against plain steps, beside the other libraries.

    python -m benchmarks.step_time --output_dir=runs/benchmarks

A block is one model at one batch size: its plain step and all private steps are timed
in turn, over and over, in a fresh process, so that a change of the machine's speed hits
all of them alike. Every ratio is to the same framework's own plain step of the same
rounds. The peers follow, each in a separate process (Opacus and jax_privacy in separate
environments: `benchmarks.peers.environments`).

Rows go to step_time.csv at once, and rows in the file are not measured again: a run can
be stopped and started. `benchmarks.report` makes the tables and figures, here at the
end.
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

MODELS = (
    "mnist_cnn",
    "convnet",
    "mlp",
    "embedding",
    "lstm",
    "lstm_unrolled",
    "gru",
    "gru_unrolled",
    "transformer",
    "transformer6",
    "resnet18",
    "vit_tiny_film",
    "lora",
    "lora_512",
)
BATCH_SIZES = (16, 64, 256, 1024)
# Draws a gradient's worth of noise for every example: slow, so in a separate process.
_ALONE = ("perturbation",)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argument_parser(__doc__)

    add = parser.add_argument
    add("--models", type=words, default=list(MODELS), help="Which models to time.")
    add("--batch_sizes", type=words, default=[str(size) for size in BATCH_SIZES])
    add(
        "--modes",
        type=words,
        default=list(cells.OURS),
        help="Ours; also joint, buffered_3, toeplitz_16, quantile_unchecked.",
    )
    add(
        "--peers",
        type=words,
        default=list(cells.PEERS),
        help="Other libraries' variants; --peers= for none. A name of TensorFlow "
        "with _xla at its end is compiled.",
    )
    add("--repeats", type=int, default=40, help="Timed steps of each at most.")
    add(
        "--seconds_per_cell",
        type=float,
        default=10.0,
        help="About how long to time one variant of one model at one batch size; "
        "three steps are timed at least. Tracing comes on top.",
    )
    add(
        "--plain_limit",
        type=float,
        default=2.0,
        help="Seconds of a plain step; larger batches of that model are left out.",
    )
    add("--jit", action="store_true", help="Compile TensorFlow's steps with XLA.")
    add("--adam", action="store_true", help="Adam instead of SGD.")
    add(
        "--first_step",
        action="store_true",
        help=(
            "Time only one step after the first: for tracing and compiling. Rows go "
            "to first_step.csv; step_time.csv has first steps as well."
        ),
    )
    add("--output_dir", type=named_path, default=pathlib.Path("runs/benchmarks"))
    options = parser.parse_args(argv)
    unknown = set(options.models) - set(MODELS)
    if unknown:
        parser.error(f"--models: no {', '.join(unknown)} among {', '.join(MODELS)}")
    unknown = {name.removesuffix("_xla") for name in options.peers} - {
        *cells.PEERS,
        "opacus_functorch",
        "jax_microbatch8",
    }
    if unknown:
        parser.error(f"--peers: no {', '.join(unknown)} among {', '.join(cells.PEERS)}")
    options.batch_sizes = sorted({int(size) for size in options.batch_sizes})
    if options.batch_sizes[0] < 1 or options.repeats < 1:
        parser.error("--batch_sizes and --repeats must be 1 or above")
    if not 0 < options.seconds_per_cell < float("inf"):
        parser.error("--seconds_per_cell must be positive and finite")
    return options


def blocks(options: argparse.Namespace) -> list[tuple[str, tuple[str, ...]]]:
    """(framework, variants) of the blocks of one model at one batch size."""
    together = [name for name in options.modes if name not in _ALONE]
    alone = [name for name in options.modes if name in _ALONE] + options.peers
    found = [("tensorflow", ("plain", *together))]
    found += [(cells.framework_of(name), ("plain", name)) for name in alone]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measures the rows that the table lacks."""
    options = arguments(argv)
    plan = blocks(options)
    frameworks = sorted({framework for framework, _ in plan})
    installed.record(options.output_dir, frameworks)
    missing = [name for name in frameworks if installed.python_of(name) is None]
    for name in missing:
        print(installed.how_to_create(name))
    name = "first_step.csv" if options.first_step else "step_time.csv"
    table = cells.Table(options.output_dir / name, cells.TIME_COLUMNS)
    total = len(options.models) * len(options.batch_sizes) * len(plan)
    with tqdm(total=total, unit="block", dynamic_ncols=True) as progress:
        for model in options.models:
            for size in options.batch_sizes:
                large = _too_large(table, options, model, size)
                if large:
                    progress.write(large)
                for framework, variants in plan:
                    progress.set_postfix_str(f"{model} {size} {variants[-1]}")
                    if framework not in missing and not large:
                        _measure(table, options, framework, model, size, variants)
                    progress.update()
    for path in sections.write(options.output_dir):
        print(path.name)


def _spec(options, model: str, size: int, variants: tuple[str, ...]) -> Spec:
    return Spec(
        model,
        size,
        variants,
        repeats=1 if options.first_step else options.repeats,
        seconds=options.seconds_per_cell,
        jit=options.jit,
        adam=options.adam,
    )


def _measure(table, options, framework, model, size, variants) -> None:
    spec = _spec(options, model, size, variants)
    wanted = [
        name
        for name in variants
        if table.find(cells.key_of(framework, spec, name)) is None
    ]
    # A plain step alone is only measured if nothing else was asked for.
    if not wanted or (wanted == ["plain"] and len(variants) > 1):
        return
    spec = _spec(options, model, size, tuple(dict.fromkeys(["plain", *wanted])))
    found = cells.run(framework, spec, timeout=cells.block_timeout(spec))
    stopped = all(not cell.get("times") for cell in found.values())
    if stopped and len(spec.variants) > 2:
        # The process ended, so each variant runs again in a separate process.
        for name in spec.variants[1:]:
            _measure(table, options, framework, model, size, ("plain", name))
        return
    table.add(cells.time_rows(framework, spec, found))


def _too_large(table, options, model: str, size: int) -> str:
    """Why a batch size is left out: a smaller size of the plain step failed."""
    for smaller in options.batch_sizes:
        if smaller >= size:
            break
        spec = _spec(options, model, smaller, ("plain",))
        row = table.find(cells.key_of("tensorflow", spec, "plain"))
        seconds = float(row["median_ms"] or "inf") / 1e3 if row else 0.0
        if seconds * size / smaller > options.plain_limit:
            return (
                f"{model}: B={size} left out; a plain step of {smaller} takes "
                f"{seconds:.2f} s (--plain_limit={options.plain_limit:g})"
            )
    return ""


if __name__ == "__main__":
    main()
