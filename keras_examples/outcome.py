"""What every experiment program leaves behind: a report, tables, figures, settings."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import platform
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from keras_examples import report, settings
from tfdpclip import files

REPORT, CONFIG = "report.txt", "config.json"

NOTHING_PRIVATE = (
    "nothing here is private data: the records are made up or public, and no epsilon "
    "is claimed."
)


@dataclasses.dataclass
class Outcome:
    """What came of a run.

    Attributes:
      title: One line.
      findings: Paragraphs: what came out, and whether a paper's claim held.
      privacy: The privacy statement (or its text), or why there is none.
      caveats: What the statement does not cover, and what to know besides.
      tables: Rows by file name without ending; each becomes a CSV file.
      figures: Matplotlib figures by file name without ending; each becomes a PNG file.
      shown: Names of the tables that the report shows in full.
      numbers: Results for config.json.
    """

    title: str
    findings: list[str]
    privacy: Any
    caveats: list[str] = dataclasses.field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    shown: tuple[str, ...] = ()
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)


def write(outcome: Outcome, used: Any, directory: pathlib.Path) -> str:
    """Writes all files and returns the report's text."""
    text = in_words(outcome)
    content = {
        "settings": dataclasses.asdict(used),
        "results": outcome.numbers,
        "privacy": str(outcome.privacy).splitlines(),
        "versions": {"python": platform.python_version(), **report.versions()},
    }
    numbers = json.dumps(report.plain(content), indent=2, allow_nan=False) + "\n"
    files.write_atomically(directory / CONFIG, numbers)
    for name, rows in outcome.tables.items():
        files.write_atomically(directory / f"{name}.csv", files.table_text(rows))
    for name, figure in outcome.figures.items():
        files.save_figure(figure, directory / f"{name}.png", dpi=130)
    # Last: where there is a report, there is all that it is about.
    files.write_atomically(directory / REPORT, text)
    return text


def in_words(outcome: Outcome) -> str:
    """The report."""
    lines = [outcome.title, "=" * len(outcome.title), ""]
    for paragraph in outcome.findings:
        lines += [*textwrap.wrap(paragraph, 88), ""]
    for name in outcome.shown:
        lines += [f"{name}:", *table(outcome.tables[name]), ""]
    lines += [f"Privacy: {outcome.privacy}", ""]
    if outcome.caveats:
        lines.append("What to know:")
    for caveat in outcome.caveats:
        lines += textwrap.wrap(caveat, 84, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines).rstrip() + "\n"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows as lines of text, columns aligned."""
    if not rows:
        return ["  (empty)"]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(c, "")) for c in columns] for row in rows)]
    widths = [max(len(line[k]) for line in cells) for k in range(len(columns))]
    return [
        "  " + "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True))
        for line in cells
    ]


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.5g}"
    return str(value)


def launch(
    about: str,
    kind: type,
    run: Callable[[Any], Outcome],
    arguments: Sequence[str] | None = None,
) -> None:
    """Runs a program: settings from the command line, files into --output_dir.

    Args:
      about: the program's description, for --help.
      kind: the dataclass of its settings; one of them is `output_dir`.
      run: what to do with them.
      arguments: the program's name and arguments; those of the process by default.

    Raises:
      SystemExit: with one clear sentence if the settings or the data do not do.
    """
    try:
        used = settings.parse(kind, sys.argv if arguments is None else arguments, about)
        if used is None:
            return
        directory = make_directory(used.output_dir)
        outcome = run(used)
        text = write(outcome, used, directory)
    except (settings.UsageError, OSError) as error:
        raise SystemExit(str(error)) from error
    print(f"\n{text}")
    written = [REPORT, CONFIG, *(f"{n}.csv" for n in outcome.tables)]
    written += [f"{n}.png" for n in outcome.figures]
    print(f"Written to {directory}: {', '.join(written)}")


def make_directory(name: str) -> pathlib.Path:
    """Makes the output directory."""
    try:
        return files.prepare_directory(name)
    except OSError as error:
        raise settings.UsageError(
            f"flag --output_dir={name}: {error.strerror}; for example "
            "--output_dir=runs/mine."
        ) from error
