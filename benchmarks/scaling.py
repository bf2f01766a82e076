"""How time and memory of a step grow, private against plain.

    python -m benchmarks.scaling --output_dir=runs/benchmarks

For each axis (batch size, parameters, sequence length, image size, layers) the step is
timed, and its memory measured, at sizes that grow by a factor. The slope of the largest
three on a log-log scale is the exponent of growth. What must hold is that nothing grows
faster than the plain step: the difference of the exponents is in the table.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from tqdm import tqdm

from benchmarks import cells, sections
from benchmarks.peers import installed
from benchmarks.timing import Spec
from driver_kit import command_line

COLUMNS = (
    "axis",
    "model",
    "variant",
    "value",
    "batch_size",
    "parameters",
    "status",
    "median_ms",
    "step_mib",
    "note",
)
_KEY = ("axis", "model", "variant", "value")


@dataclasses.dataclass(frozen=True)
class Axis:
    """What grows.

    Attributes:
      name: what it is called.
      model: of `benchmarks.models`.
      option: the model's option that takes the values, or "batch_size".
      values: sizes, ascending.
      batch_size: where it is not what grows.
    """

    name: str
    model: str
    option: str
    values: tuple[int, ...]
    batch_size: int = 16


AXES = (
    Axis("batch size", "mnist_cnn", "batch_size", (16, 64, 256, 1024)),
    Axis("batch size", "mlp", "batch_size", (64, 256, 1024, 4096)),
    Axis("batch size", "transformer", "batch_size", (16, 32, 64, 128)),
    Axis("width", "mlp", "width", (256, 512, 1024, 2048), 64),
    # 10^4 to 10^8 parameters.
    Axis("parameters", "mlp", "width", (12, 87, 670, 2780, 9600), 16),
    Axis("sequence length", "transformer", "length", (32, 64, 128, 256)),
    Axis("sequence length", "lstm", "length", (16, 32, 64, 128)),
    Axis("image size", "convnet", "size", (16, 32, 64, 128)),
    Axis("layers", "mlp", "depth", (2, 4, 8, 16), 64),
    Axis("layers", "transformer", "blocks", (1, 2, 4, 8)),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the table lacks."""
    parser = command_line.argument_parser(__doc__)
    add = parser.add_argument
    add("--axes", help="Only these: names, or model:name, with commas between.")
    add("--modes", default="quantile,layerwise,batch", help="Ours.")
    add("--repeats", type=int, default=20)
    add("--seconds_per_cell", type=float, default=10.0)
    add("--points", type=int, default=None, help="Only so many sizes of each axis.")
    add(
        "--output_dir",
        type=command_line.named_path,
        default=pathlib.Path("runs/benchmarks"),
    )
    options = parser.parse_args(argv)
    chosen = options.axes.split(",") if options.axes else None
    axes = [
        axis
        for axis in AXES
        if chosen is None
        or axis.name in chosen
        or f"{axis.model}:{axis.name}" in chosen
    ]
    if not axes:
        names = ", ".join(f"{axis.model}:{axis.name}" for axis in AXES)
        parser.error(f"--axes: there are {names}")
    installed.record(options.output_dir, ["tensorflow"])
    table = cells.Table(options.output_dir / "scaling.csv", COLUMNS, _KEY)
    variants = ("plain", *options.modes.split(","))
    cases = [(axis, value) for axis in axes for value in axis.values[: options.points]]
    for axis, value in tqdm(cases, unit="size"):
        _measure(table, options, axis, value, variants)
    for path in sections.write(options.output_dir):
        print(path.name)


def _measure(table, options, axis: Axis, value: int, variants) -> None:
    keys = [(axis.name, axis.model, name, value) for name in variants]
    if all(table.find(dict(zip(_KEY, key, strict=True))) for key in keys):
        return
    batch = axis.option == "batch_size"
    spec = Spec(
        axis.model,
        value if batch else axis.batch_size,
        variants,
        options={} if batch else {axis.option: value},
        repeats=options.repeats,
        seconds=options.seconds_per_cell,
    )
    found = cells.run("tensorflow", spec, timeout=cells.block_timeout(spec))
    rows = []
    for row in cells.time_rows("tensorflow", spec, found):
        name = row["variant"]
        alone = dataclasses.replace(spec, variants=(name,), memory=True)
        memory = cells.run("tensorflow", alone, timeout=cells.block_timeout(alone))
        if memory[name]["status"] == "ok":
            row["step_mib"] = memory[name]["peak_mib"] - memory[name]["start_mib"]
        rows.append({**row, "axis": axis.name, "value": value})
    table.add(rows)


if __name__ == "__main__":
    main()
