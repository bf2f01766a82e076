"""Tables (Markdown) and figures (PNG) from the benchmarks' CSV files.

python -m benchmarks.report --output_dir=runs/benchmarks
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from benchmarks import sections
from driver_kit import command_line


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the report of a directory."""
    parser = command_line.argument_parser(__doc__)
    parser.add_argument(
        "--output_dir",
        type=command_line.named_path,
        default=pathlib.Path("runs/benchmarks"),
    )
    folder = parser.parse_args(argv).output_dir
    if not folder.is_dir():
        parser.error(f"--output_dir: there is no directory {folder}")
    for path in sections.write(folder):
        print(path.name)


if __name__ == "__main__":
    main()
