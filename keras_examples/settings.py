"""A program's settings: a frozen dataclass that is also its command line.

A field made by `number`, `numbers`, `choice`, `choices`, `words` or `switch` is a flag
of absl. Flags live in a `FlagValues` of their own, so that two programs can be imported
into one process, and tests can call a program with settings or with arguments.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any, TypeVar

from absl import flags

from keras_examples.number_flags import NumberParser

Settings = TypeVar("Settings")


class UsageError(ValueError):
    """Settings or files with which a program cannot run; the text says what would."""


class _ListParser(flags.ArgumentParser):
    """Parses several values, separated by commas."""

    def __init__(self, one: flags.ArgumentParser):
        super().__init__()
        self._one = one
        self.syntactic_help = "separated by commas"

    def parse(self, argument):
        parts = argument.split(",") if isinstance(argument, str) else argument
        parts = [p.strip() if isinstance(p, str) else p for p in parts]
        if not parts or parts == [""]:
            raise ValueError("must not be empty.")
        return tuple(self._one.parse(part) for part in parts)

    def flag_type(self):
        return f"list of {self._one.flag_type()}"


def _field(default, text, parser):
    return dataclasses.field(default=default, metadata={"text": text, "parser": parser})


def number(default: float | None, text: str, **requirement: Any) -> Any:
    """A field for one number; `requirement` is for `NumberParser`."""
    requirement.setdefault("good", default)
    return _field(default, text, NumberParser(**requirement))


def numbers(default: Sequence[float], text: str, **requirement: Any) -> Any:
    """A field for several numbers, separated by commas."""
    requirement.setdefault("good", default[0])
    return _field(tuple(default), text, _ListParser(NumberParser(**requirement)))


def choice(default: str, values: Sequence[str], text: str) -> Any:
    """A field for one of several words."""
    return _field(default, text, flags.EnumParser(list(values)))


def choices(default: Sequence[str], values: Sequence[str], text: str) -> Any:
    """A field for some of several words, separated by commas."""
    return _field(tuple(default), text, _ListParser(flags.EnumParser(list(values))))


def words(default: str | None, text: str) -> Any:
    """A field for text, such as the name of a file."""
    return _field(default, text, flags.ArgumentParser())


def switch(default: bool, text: str) -> Any:
    """A field that is true or false: --name or --noname."""
    return _field(default, text, flags.BooleanParser())


def output_dir(name: str) -> Any:
    """The field that every program has."""
    return words(f"runs/{name}", "Where to write report.txt, tables and figures.")


def delta() -> Any:
    """The field for delta."""
    return number(
        1e-5,
        "Probability with which epsilon may fail; well below 1 / number of records.",
        above=0,
        below=1,
    )


def seed() -> Any:
    """The field for the seed of a private run."""
    return number(
        None,
        "Makes a run repeatable, for experiments: it is then NOT private.",
        good=1,
        integer=True,
        least=0,
        most=2**31 - 1,
    )


def parse(
    kind: type[Settings], arguments: Sequence[str], about: str = ""
) -> Settings | None:
    """Settings from a command line.

    Args:
      kind: the dataclass.
      arguments: the program's name and its arguments.
      about: what the program does, for --help.

    Returns:
      The settings; None after --help.

    Raises:
      UsageError: for an unknown or wrong flag, with its name.
    """
    values = flags.FlagValues()
    for field in dataclasses.fields(kind):
        define = flags.DEFINE
        if isinstance(field.metadata["parser"], flags.BooleanParser):
            flags.DEFINE_bool(
                field.name, field.default, field.metadata["text"], flag_values=values
            )
            continue
        define(
            field.metadata["parser"],
            field.name,
            field.default,
            field.metadata["text"],
            flag_values=values,
            serializer=flags.ArgumentSerializer(),
        )
    flags.DEFINE_bool("help", False, "Show this.", flag_values=values)
    try:
        rest = values(list(arguments))
    except flags.Error as error:
        raise UsageError(f"{error} See --help.") from error
    if values["help"].value:
        print(_help(kind, about))
        return None
    if rest[1:]:
        raise UsageError(
            f"Unknown argument {rest[1]!r}. Settings are flags, for example "
            "--output_dir=runs/mine."
        )
    return kind(**{f.name: values[f.name].value for f in dataclasses.fields(kind)})


def _help(kind, about) -> str:
    lines = [about.strip(), "", "Flags:"]
    for field in dataclasses.fields(kind):
        default = field.default
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        parser = field.metadata["parser"]
        one_of = getattr(parser, "enum_values", None)
        text = field.metadata["text"]
        if one_of:
            text += f" One of: {', '.join(one_of)}."
        text += f" (default: {'none' if default is None else default})"
        lines.append(f"  --{field.name}")
        lines += textwrap.wrap(
            text, 84, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    return "\n".join(lines)
