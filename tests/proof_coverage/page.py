"""The table of docs/results/proof.md: read, compared and written."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterable

from tests.proof_coverage import check
from tests.proof_coverage.entries import GROUPS, KERAS, here
from tests.proof_coverage.entry import Entry

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "results" / "proof.md"
BEGIN = "<!-- python -m tests.proof_coverage writes this -->"
END = "<!-- until here -->"
NOT_RUN, NOT_THERE = "not run", "-"
#: The cells of the two stacks, and the ops that hinder the proof.
Row = list[str]


def rows_of(text: str) -> dict[tuple[str, str], Row]:
    """The cells of the table's lines, by group and name."""
    lines = text.split(BEGIN)[1].split(END)[0].strip().splitlines()
    found, group = {}, ""
    for line in lines:
        if line.startswith("## "):
            group = line[3:]
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] not in ("model", "---", "group"):
            if group in GROUPS:
                found[group, cells[0]] = cells[1:]
    return found


def cell(found: Iterable[check.Found]) -> str:
    """The verdicts for batches of any size and of a static size."""
    anysize, static = found
    if anysize.verdict == static.verdict:
        return anysize.verdict
    return f"{anysize.verdict}; {static.verdict} if static"


def badness(verdict: str, apart: bool) -> int:
    """How far a verdict is from the right verdict."""
    if apart:
        return {check.PROVEN: 0, check.UNKNOWN: 1}.get(verdict, 2)
    return {check.MIXED: 0, check.REFUSED: 0, check.UNKNOWN: 1}.get(verdict, 2)


def verdicts_of(cells: str) -> tuple[str, str]:
    """The verdicts for batches of any size and of a static size."""
    first, _, rest = cells.partition("; ")
    return first, rest.removesuffix(" if static") or first


def is_worse(found: str, recorded: str, apart: bool) -> bool:
    """Whether a cell is worse than the page's cell."""
    pairs = zip(verdicts_of(found), verdicts_of(recorded), strict=True)
    return any(badness(a, apart) > badness(b, apart) for a, b in pairs)


def line(entry: Entry, row: Row | None, cells: str, said: Iterable[str]) -> Row:
    """The cells of a line after an entry was examined on this stack."""
    row = list(row or [NOT_RUN, NOT_RUN, ""])
    row[KERAS - 2] = cells
    stacks = (2, 3) if entry.keras is None else (entry.keras,)
    for stack in (2, 3):
        if stack not in stacks:
            row[stack - 2] = NOT_THERE
    done = all(set(verdicts_of(c)) <= {check.PROVEN, NOT_THERE} for c in row[:2])
    row[2] = "" if done else entry.advice or ", ".join(said) or row[2]
    return row


def table(rows: dict[tuple[str, str], Row]) -> str:
    """The counts, and a table for each group: every entry has a line."""
    full = {}
    for group, entries in GROUPS.items():
        for name, entry in entries.items():
            row = rows.get((group, name)) or line(entry, None, NOT_RUN, ())
            full[group, name] = row
    parts = [_counts(full)]
    for group, entries in GROUPS.items():
        lines = [
            f"## {group}\n",
            "| model | Keras 2 | Keras 3 | where, or what to do |",
        ]
        lines.append("|" + " --- |" * 4)
        lines += [f"| {name} | {' | '.join(full[group, name])} |" for name in entries]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def counts(rows: dict[tuple[str, str], Row], stack: int) -> collections.Counter:
    """How many lines there are by group, whether examples stay apart, and verdict."""
    found: collections.Counter = collections.Counter()
    for (group, name), row in rows.items():
        verdict = verdicts_of(row[stack - 2])[0]
        if verdict not in (NOT_RUN, NOT_THERE):
            found[group, GROUPS[group][name].apart, verdict] += 1
    return found


def _counts(rows: dict[tuple[str, str], Row]) -> str:
    """For each group and stack, the numbers of sound models and of mixing models."""
    kinds = [
        (True, (check.PROVEN,)),
        (True, (check.UNKNOWN,)),
        (True, (check.MIXED, check.REFUSED)),
        (False, (check.MIXED, check.REFUSED)),
        (False, (check.UNKNOWN,)),
    ]
    heads = ["proven", "unknown", "refused though apart", "mixing, refused", "unknown"]
    lines = ["| group | stack | " + " | ".join(heads) + " |", "|" + " --- |" * 7]
    found = {stack: counts(rows, stack) for stack in (2, 3)}
    for group in (*GROUPS, "all"):
        for stack in (2, 3):
            numbers = [
                sum(
                    count
                    for (of, apart, verdict), count in found[stack].items()
                    if group in ("all", of) and apart == kind and verdict in verdicts
                )
                for kind, verdicts in kinds
            ]
            cells = " | ".join(map(str, numbers))
            lines.append(f"| {group} | Keras {stack} | {cells} |")
    return "\n".join(lines)


def update(found: dict[tuple[str, str], Row]) -> None:
    """Writes the new rows into the page."""
    text = PAGE.read_text()
    ahead, behind = text.split(BEGIN)[0], text.split(END)[1]
    new = table({**rows_of(text), **found})
    PAGE.write_text(f"{ahead}{BEGIN}\n\n{new}\n\n{END}{behind}")


def examined(entry: Entry) -> tuple[str, list[str]]:
    """The cell of an entry on this stack, and the ops that hinder the proof."""
    if not here(entry):
        return NOT_THERE, []
    found = check.examine(entry, check.SIZES)
    return cell(found), list(dict.fromkeys(op for f in found for op in f.at))
