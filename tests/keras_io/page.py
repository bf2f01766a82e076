"""The table of docs/keras_examples.md: read, compared and written."""

from __future__ import annotations

import pathlib

from tests import stack
from tests.keras_io.examples import GROUPS

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "keras_examples.md"
BEGIN = "<!-- python -m tests.keras_io writes this -->"
END = "<!-- until here -->"
NOT_RUN = "not run"
#: The column of this stack.
COLUMN = 1 if stack.KERAS_3 else 0


def rows_of(text: str) -> dict[str, list[str]]:
    """The cells of the table's lines, by example."""
    lines = text.split(BEGIN)[1].split(END)[0].splitlines()
    cells = [
        [cell.strip() for cell in line[2:].removesuffix("|").split(" | ")]
        for line in lines
        if line.startswith("| ") and not line.startswith(("| ---", "| example"))
    ]
    return {name: rest for name, *rest in cells}


def table(rows: dict[str, list[str]]) -> str:
    """A table for each group: every example has a line."""
    parts = []
    for group, examples in GROUPS.items():
        lines = [f"## {group[0].upper()}{group[1:]}\n"]
        lines.append("| example | Keras 2 | Keras 3 | what to write, or to know |")
        lines.append("|" + " --- |" * 4)
        for name, example in examples.items():
            cells = rows.get(name, [NOT_RUN, NOT_RUN])[:2]
            lines.append(f"| {name} | {cells[0]} | {cells[1]} | {example.change} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def update(found: dict[str, str]) -> None:
    """Writes this stack's results into the page."""
    text = PAGE.read_text()
    ahead, behind = text.split(BEGIN)[0], text.split(END)[1]
    rows = rows_of(text)
    for name, cell in found.items():
        cells = rows.setdefault(name, [NOT_RUN, NOT_RUN, ""])
        cells[COLUMN] = cell
    PAGE.write_text(f"{ahead}{BEGIN}\n\n{table(rows)}\n\n{END}{behind}")
