"""A program's settings: a frozen dataclass that is also its command line.

A field made by `number`, `count`, `numbers`, `choice`, `choices`, `words` or `switch`
is a flag. What it must be is said once, in its `Setting`, and checked wherever the
value comes from: `parse` names the flag, and `check`, for `__post_init__`, the field.

Flags live in a `FlagValues` of their own, so that two programs can be imported into one
process, and tests can call a program with settings or with arguments.
"""

from __future__ import annotations

import dataclasses
import math
import numbers as abstract
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from absl import flags, logging

from driver_kit import command_line, plotting

Settings = TypeVar("Settings")


class UsageError(ValueError):
    """Settings or files with which a program cannot run; the text says what would."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a flag says and allows.

    Attributes:
      default: its value where nothing is said; None: it follows from other settings.
      text: for --help.
      kind: int, float, str or bool.
      good: a value that works, for errors; the default if there is one.
      several: whether it is a tuple; on the command line, separated by commas.
      one_of: what a word may be.
      above: a number must be greater than this.
      least: a number must be at least this.
      below: a number must be less than this.
      most: a number must be at most this.
      infinite: whether a number may be infinite.
      form: what a text must be, in words, where `reads` says whether it is.
      reads: raises ValueError for a text of another form.
      instead_of: the flags that nothing reads where this one is given.
      only_with: a flag, and the values of it with which this one does something; no
        values: it does something wherever that flag is given.

    >>> rounds = Setting(None, "How many.", int, good=60, least=1)
    >>> rounds.read("rounds", "12")
    12
    >>> rounds.read("rounds", "0")
    Traceback (most recent call last):
        ...
    ValueError: must be a whole number, 1 or more, for example --rounds=60.
    >>> rounds.check("rounds", 2.5)
    Traceback (most recent call last):
        ...
    ValueError: rounds must be a whole number, 1 or more, got 2.5; for example ...
    """

    default: Any
    text: str
    kind: type
    good: Any = None
    several: bool = False
    one_of: tuple[str, ...] | None = None
    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None
    infinite: bool = False
    form: str | None = None
    reads: Callable[[str], object] | None = None
    instead_of: tuple[str, ...] = ()
    only_with: tuple[str, ...] | None = None

    def __post_init__(self):
        for name in ("default", "good"):
            value = getattr(self, name)
            if value is not None:
                one = self.several and not isinstance(value, (tuple, list))
                self.check(name, (value,) if one else value)

    def requirement(self) -> str:
        """What the value must be, in words."""
        if self.form is not None:
            return self.form
        if self.one_of is not None:
            words = "one of " + ", ".join(self.one_of)
            return f"{words}, separated by commas" if self.several else words
        if self.kind is bool:
            return "true or false"
        words = {int: "a whole number", float: "a number", str: "a text"}[self.kind]
        words += " that is not empty" if self.kind is str and self.default != "" else ""
        bounds = [
            f"{bound:.12g} or more" if name == "least" else f"{name} {bound:.12g}"
            for name, bound in (
                ("above", self.above),
                ("least", self.least),
                ("below", self.below),
                ("at most", self.most),
            )
            if bound is not None
        ]
        if bounds:
            separator = " " if self.least is None else ", "
            words += separator + " and ".join(bounds)
        words += ", or inf" if self.infinite else ""
        return f"{words}; or several, separated by commas" if self.several else words

    def example(self, name: str) -> str:
        """The setting with a value that works: ``rounds=60``, or ``file=FILE``."""
        good = self.good
        if good is None:
            good = self.default
        if good is None or isinstance(good, tuple):
            good = (good or self.one_of or (name.upper(),))[0]
        return f"{name}={good}"

    def read(self, name: str, text: Any) -> Any:
        """The value that an argument of the command line stands for.

        Raises:
          ValueError: if it is out of range. Whoever calls names the flag.
        """
        try:
            return self._checked(text)
        except ValueError as error:
            raise ValueError(
                f"must be {self.requirement()}, for example --{self.example(name)}."
            ) from error

    def check(self, name: str, value: Any) -> Any:
        """A value given in Python, in the right type.

        Raises:
          ValueError: if it is out of range; names the setting.
        """
        if value is None and self.default is None:
            return None
        try:
            if isinstance(value, str) and self.kind is not str:
                raise ValueError
            return self._checked(value)
        except ValueError as error:
            raise ValueError(
                f"{name} must be {self.requirement()}, got {value!r}; for example "
                f"{self.example(name)}."
            ) from error

    def _checked(self, value: Any) -> Any:
        if not self.several:
            return self._one(value)
        parts = value.split(",") if isinstance(value, str) else tuple(value)
        if not parts:
            raise ValueError
        return tuple(
            self._one(part.strip() if isinstance(part, str) else part) for part in parts
        )

    def _one(self, value: Any) -> Any:
        if self.kind is bool:
            good = isinstance(value, bool)
        elif self.kind is str:
            good = isinstance(value, str)
            good = good and (self.one_of is None or value in self.one_of)
            # An empty path would be the current directory.
            good = good and (value.strip() != "" or value == self.default)
        else:
            value = self._number(value)
            good = math.isfinite(value) or (self.infinite and value == math.inf)
            good = good and self._in_range(value)
        if not good:
            raise ValueError
        if self.reads is not None:
            self.reads(value)
        return value

    def _number(self, value: Any) -> int | float:
        if isinstance(value, str):
            whole = self.kind is int and re.fullmatch(r"[+-]?[0-9]+", value)
            value = int(value) if whole else float(value)
        if isinstance(value, bool) or not isinstance(value, abstract.Real):
            raise ValueError
        if self.kind is int and not (math.isfinite(value) and value == int(value)):
            raise ValueError
        return self.kind(value)

    def _in_range(self, value: float) -> bool:
        return (
            (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
        )


def _field(*arguments: Any, **options: Any) -> Any:
    made = Setting(*arguments, **options)
    return dataclasses.field(default=made.default, metadata={"setting": made})


def number(
    default: float | None, text: str, *, integer: bool = False, **requirement: Any
) -> Any:
    """A field for one number; `requirement` is bounds and `good`, as in `Setting`."""
    return _field(default, text, int if integer else float, **requirement)


def count(default: int | None, text: str, least: int = 1, **requirement: Any) -> Any:
    """A field for a whole number, 1 or more unless said otherwise."""
    return _field(default, text, int, least=least, **requirement)


def numbers(
    default: Sequence[float] | None,
    text: str,
    *,
    integer: bool = False,
    **requirement: Any,
) -> Any:
    """A field for several numbers, separated by commas."""
    kind = int if integer else float
    default = None if default is None else tuple(default)
    return _field(default, text, kind, several=True, **requirement)


def choice(default: str | None, values: Sequence[str], text: str, **options) -> Any:
    """A field for one of several words."""
    return _field(default, text, str, one_of=tuple(values), **options)


def choices(default: Sequence[str], values: Sequence[str], text: str) -> Any:
    """A field for some of several words, separated by commas."""
    return _field(tuple(default), text, str, one_of=tuple(values), several=True)


def words(default: str | None, text: str, good: str | None = None, **options) -> Any:
    """A field for text, such as the name of a file: empty only if the default is."""
    return _field(default, text, str, good=good, **options)


def switch(default: bool, text: str, **options) -> Any:
    """A field that is true or false: --name or --noname."""
    return _field(default, text, bool, **options)


def output_dir(name: str) -> Any:
    """The field that every program has."""
    return words(f"runs/{name}", "Where to write report.txt, tables and figures.")


def figure_format() -> Any:
    """The field that every program with figures has."""
    return choices(("png",), plotting.FORMATS, "What to write figures as.")


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


def of(kind: type) -> dict[str, Setting]:
    """The settings of a dataclass, by name, in its order."""
    return {
        field.name: field.metadata["setting"]
        for field in dataclasses.fields(kind)
        if "setting" in field.metadata
    }


def check(config: Any) -> None:
    """Checks the fields of a frozen dataclass, and gives them the right type.

    For `__post_init__`, where a program's settings may be made without a command line.

    Raises:
      ValueError: if one is out of range; the message names it.
    """
    for name, setting in of(type(config)).items():
        object.__setattr__(config, name, setting.check(name, getattr(config, name)))


class _Parser(flags.ArgumentParser):
    def __init__(self, name: str, setting: Setting):
        super().__init__()
        self._name, self._setting = name, setting

    def parse(self, argument):
        return self._setting.read(self._name, argument)

    def flag_type(self):
        return self._setting.requirement()


#: The flags of absl's logging that every program takes.
_LOGGING = ("verbosity", "alsologtostderr", "logtostderr", "stderrthreshold")


def start_logging(used: object) -> None:
    """Makes absl log as the flags say, warnings by default; logs the settings.

    Args:
      used: the settings.
    """
    flags.FLAGS.mark_as_parsed()
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    logging.info("%s", used)


def read(known: Mapping[str, Setting], arguments: Sequence[str]) -> dict[str, Any]:
    """Values by name from a command line.

    Args:
      known: what may be set.
      arguments: the program's name and its arguments.

    Raises:
      UsageError: for an unknown or wrong flag, with its name.
    """
    values = flags.FlagValues()
    for name, setting in known.items():
        if setting.kind is bool:
            flags.DEFINE_bool(name, setting.default, setting.text, flag_values=values)
        else:
            flags.DEFINE(
                _Parser(name, setting),
                name,
                setting.default,
                setting.text,
                flag_values=values,
                serializer=flags.ArgumentSerializer(),
            )
    for name in _LOGGING:
        # A flag of the process: a value of an earlier command line must not stay.
        flags.FLAGS[name].unparse()
        values[name] = flags.FLAGS[name]
    try:
        rest = values(list(arguments))
    except flags.Error as error:
        raise UsageError(f"{error} See --help.") from error
    if rest[1:]:
        raise UsageError(
            f"Unknown argument {rest[1]!r}. Settings are flags, for example "
            "--output_dir=runs/mine."
        )
    said = {name for name in known if values[name].present}
    for name in sorted(said):
        _refuse_contradiction(name, known, said, values)
    return {name: values[name].value for name in known}


def _refuse_contradiction(
    name: str, known: Mapping[str, Setting], said: set[str], values: flags.FlagValues
) -> None:
    """Raises for a flag that takes another's place, or that nothing would read.

    Args:
      name: the flag.
      known: all flags.
      said: the flags that the command line has.
      values: their values.

    Raises:
      UsageError: names both flags.
    """
    replaced = next((other for other in known[name].instead_of if other in said), None)
    if replaced is not None and values[name].value:
        raise UsageError(
            f"flags --{name} and --{replaced} contradict each other: --{name} takes "
            f"the place of --{replaced}. Leave one of them out."
        )
    if known[name].only_with is None:
        return
    other, *good = known[name].only_with
    value = values[other].value
    present = value if isinstance(value, (tuple, list)) else (value,)
    if any(one in good if good else bool(one) for one in present):
        return
    line = f"--{other}={good[0]}" if good else f"--{known[other].example(other)}"
    raise UsageError(
        f"flag --{name} does something with {' or '.join(good) or 'a value'} of "
        f"--{other} only, and --{other} is {value}. Leave --{name} out, or write "
        f"{line}."
    )


def parse(
    kind: type[Settings], arguments: Sequence[str], about: str | None = ""
) -> Settings | None:
    """Settings from a command line.

    Args:
      kind: the dataclass.
      arguments: the program's name and its arguments.
      about: what the program does, for --help.

    Returns:
      The settings; None if help was asked for and given.

    Raises:
      UsageError: for unknown or wrong flags, or such as do not go together.
    """
    if command_line.wants_help(arguments[1:]):
        print(help_text(of(kind), about))
        return None
    values = read(of(kind), arguments)
    try:
        return kind(**values)
    except ValueError as error:
        raise UsageError(str(error)) from error


def help_text(known: Mapping[str, Setting], about: str | None) -> str:
    """What --help shows: `about`, and the flags."""
    lines = [(about or "").strip(), "", "Flags:"]
    for name, setting in known.items():
        default = setting.default
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        text = setting.text
        if setting.instead_of:
            text += f" In the place of --{', --'.join(setting.instead_of)}."
        if setting.only_with:
            other, *good = setting.only_with
            shown = f"{other}={','.join(good)}" if good else other
            text += f" Only with --{shown}."
        if setting.one_of:
            text += f" One of: {', '.join(setting.one_of)}."
        if default is not None and default != "":
            text += f" (default: {default})"
        lines.append(f"  --[no]{name}" if setting.kind is bool else f"  --{name}")
        lines += textwrap.wrap(
            text, 84, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    logging_flags = f"Of absl's logging: --{', --'.join(_LOGGING)}."
    return "\n".join([*lines, "", logging_flags])
