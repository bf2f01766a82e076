"""Tries the models of the zoo, and writes the outcomes into docs/stacks.md.

    python -m tests.zoo            # all of them, which takes an hour on two cores
    python -m tests.zoo BERT T5    # these; the remaining lines stay as they are

The table marks models that were never tried.
"""

from __future__ import annotations

import pathlib
import sys

from tests.zoo import check, entries

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "stacks.md"
BEGIN, END = "<!-- python -m tests.zoo writes this -->", "<!-- until here -->"
NOT_RUN = "not run"
RANK = 4


def rows_of(text: str) -> dict[str, list[str]]:
    """The cells of the table's lines, by model."""
    lines = text.split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    cells = [[c.strip() for c in line.strip("|").split(" | ")] for line in lines]
    return {name: rest for name, *rest in cells}


def table(rows: dict[str, list[str]]) -> str:
    """The table: every entry has a line."""
    lines = ["| model | kind | all weights | LoRA | why, and what to do |"]
    lines.append("|" + " --- |" * 5)
    for name, entry in entries.ENTRIES.items():
        full, lora = rows.get(name, [entry.kind, NOT_RUN, NOT_RUN])[1:3]
        advice = " ".join(entry.advice.split())
        lines.append(f"| {name} | {entry.kind} | {full} | {lora} | {advice} |")
    return "\n".join(lines)


def update(found: dict[str, list[str]]) -> None:
    """Writes the new rows into the page."""
    text = PAGE.read_text()
    ahead, behind = text.split(BEGIN)[0], text.split(END)[1]
    new = table({**rows_of(text), **found})
    PAGE.write_text(f"{ahead}{BEGIN}\n\n{new}\n\n{END}{behind}")


def outcome(entry: entries.Entry, lora: int | None) -> str:
    """The outcome of an entry, in words for the table."""
    if lora and entry.lora == "none":
        return "none"
    found = check.examine(entry, lora)
    print(found, flush=True)
    if not found.refused and found.error > entry.tolerance:
        raise ValueError(f"norms are off by {found.error:.1e}: this is a bug.")
    return found.outcome


def main(names: list[str]) -> None:
    """Tries the models of these names, or all."""
    for name in names or entries.ENTRIES:
        print(name, flush=True)
        entry = entries.ENTRIES[name]
        try:
            update({name: [entry.kind, *(outcome(entry, k) for k in (None, RANK))]})
        except Exception as error:
            # The remaining models are tried, and this line stays as it is.
            print(f"{name}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
