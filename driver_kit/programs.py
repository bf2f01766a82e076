"""How programs run: settings from the command line, files into --output_dir."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from driver_kit import command_line, plotting, reports, settings
from driver_kit.settings import UsageError
from tfdpclip import files


class Result(Protocol):
    """What came of a run.

    Attributes:
      tables: Rows by file name without ending; each becomes a CSV file.
      figures: Matplotlib figures by file name without ending; each becomes a file in
        each of `--figure_format`.
    """

    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    figures: Mapping[str, Any]

    def report(self) -> str:
        """The text of report.txt, which is also printed."""

    def config(self, used: Any) -> Mapping[str, Any]:
        """The content of config.json, given the settings."""


@dataclasses.dataclass
class Outcome:
    """A result whose report is findings, tables and a privacy statement.

    Attributes:
      title: One line.
      findings: Paragraphs: what came out, and whether a paper's claim held.
      privacy: The privacy statement (or its text), or why there is none.
      caveats: What the statement does not cover, and what to know besides.
      tables: Rows by file name without ending; each becomes a CSV file.
      figures: Matplotlib figures by file name without ending; each becomes a file in
        each of `--figure_format`.
      texts: Further files by name.
      shown: Names of the tables that the report shows in full.
      numbers: Results for config.json.
      written: Is called when all files are written.
    """

    title: str
    findings: list[str]
    privacy: Any
    caveats: list[str] = dataclasses.field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    shown: tuple[str, ...] = ()
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    written: Callable[[], None] = lambda: None

    def report(self) -> str:
        """The text of report.txt."""
        lines = reports.heading(self.title)
        for paragraph in self.findings:
            lines += [*reports.paragraph(paragraph), ""]
        for name in self.shown:
            lines += [f"{name}:", *reports.table(self.tables[name]), ""]
        lines += [f"Privacy: {self.privacy}", ""]
        if self.caveats:
            lines += ["What to know:", *reports.bullets(self.caveats)]
        return "\n".join(lines).rstrip() + "\n"

    def config(self, used: Any) -> dict[str, Any]:
        """The content of config.json, given the settings."""
        return {
            "settings": dataclasses.asdict(used),
            "results": self.numbers,
            "privacy": str(self.privacy).splitlines(),
            "versions": reports.versions(),
        }


def write(result: Result, used: Any, directory: pathlib.Path) -> list[str]:
    """Writes all files of a result; returns their names."""
    text = result.report()
    names = [reports.REPORT, reports.CONFIG]
    config = reports.to_json(result.config(used))
    files.write_atomically(directory / reports.CONFIG, config)
    for name, rows in result.tables.items():
        names.append(f"{name}.csv")
        files.write_atomically(directory / names[-1], reports.table_text(rows))
    for name, content in getattr(result, "texts", {}).items():
        names.append(name)
        files.write_atomically(directory / name, content)
    for name, figure in result.figures.items():
        kinds = getattr(used, "figure_format", ("png",))
        paths = plotting.save_as(figure, directory / name, kinds)
        names += [path.name for path in paths]
    # Last: where there is a report, there is all that it is about.
    files.write_atomically(directory / reports.REPORT, text)
    return names


def run_program(
    about: str | None,
    kind: type,
    run: Callable[[Any], str],
    arguments: Sequence[str] | None = None,
    errors: tuple[type[Exception], ...] = (),
) -> None:
    """Runs a program and prints what it returns.

    Args:
      about: the program's description, for --help.
      kind: the dataclass of its settings.
      run: what to do with them.
      arguments: the program's name and arguments; those of the process by default.
      errors: what else is the user's to put right, beside `UsageError` and `OSError`.

    Raises:
      SystemExit: with one clear sentence if the settings or the data do not do.
    """
    arguments = sys.argv if arguments is None else arguments
    try:
        used = settings.parse(kind, arguments, about)
        if used is None:
            return
        settings.start_logging(used)
        text = run(used)
    except (UsageError, OSError, *errors) as error:
        raise command_line.refusal(arguments[0], error) from error
    print(text)


def launch(
    about: str | None,
    kind: type,
    run: Callable[[Any], Result],
    arguments: Sequence[str] | None = None,
    errors: tuple[type[Exception], ...] = (),
) -> None:
    """Runs a program whose result goes into the directory that its settings name.

    Args:
      about: the program's description, for --help.
      kind: the dataclass of its settings; one of them is `output_dir`.
      run: what to do with them.
      arguments: the program's name and arguments; those of the process by default.
      errors: as in `run_program`.

    Raises:
      SystemExit: with one clear sentence if the settings or the data do not do.
    """

    def body(used: Any) -> str:
        # First: hours of work would end in a directory that cannot be written to.
        directory = make_directory(used.output_dir)
        result = run(used)
        names = write(result, used, directory)
        getattr(result, "written", lambda: None)()
        return f"\n{result.report()}\nWritten to {directory}: {', '.join(names)}"

    run_program(about, kind, body, arguments, errors)


def make_directory(name: str) -> pathlib.Path:
    """Makes the output directory."""
    try:
        return files.prepare_directory(name)
    except OSError as error:
        raise UsageError(
            f"flag --output_dir={name}: {error.strerror}; for example "
            "--output_dir=runs/mine."
        ) from error
