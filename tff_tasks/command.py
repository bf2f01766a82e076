"""The command line that all benchmarks share."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from absl import app, flags, logging

from tfdpclip import accounting
from tff_tasks import records
from tff_tasks.config import RunConfig
from tff_tasks.federated_files import DataFileError
from tff_tasks.registry import task_class
from tff_tasks.task import Option, SettingsError

#: What asks for help.
HELP = {"--help", "-h", "--helpfull", "--helpshort"}


_USER_ERRORS = (
    DataFileError,
    SettingsError,
    accounting.PrivacyMismatchError,
    records.RunMismatchError,
    records.RunFileError,
    # A full disk, a directory that cannot be written: the text says which, and what
    # to do.
    OSError,
)


class _AnyParser(flags.ArgumentParser):
    """Leaves the checking to `RunConfig`, whose errors say what would work."""

    def __init__(self, kind: type):
        super().__init__()
        self._kind = kind

    def parse(self, argument):
        if not isinstance(argument, str):
            return argument
        if self._kind is int:
            try:
                return int(argument)
            except ValueError:
                pass
        if self._kind in (int, float):
            try:
                return float(argument)
            except ValueError:
                return argument
        return argument


def define_settings(config_class: type) -> flags.FlagValues:
    """Flags for the fields of a dataclass that carry a `Setting`."""
    values = flags.FlagValues()
    for field in dataclasses.fields(config_class):
        setting = field.metadata.get("setting")
        if setting is not None:
            text = setting.text
            if setting.choices:
                text += f" One of {', '.join(setting.choices)}."
            _define(values, field.name, setting.kind, field.default, text)
    return values


def define_flags(task: str) -> flags.FlagValues:
    """The flags of one benchmark, apart from those of others."""
    values = define_settings(RunConfig)
    for name, option in task_class(task).options.items():
        text = f"{option.text} {_option_text(option)}"
        _define(values, name, _option_kind(option), None, text)
    return values


def _define(values, name, kind, default, text):
    if kind is bool:
        flags.DEFINE_bool(name, default, text, flag_values=values)
        return
    flags.DEFINE(
        _AnyParser(kind),
        name,
        default,
        text,
        flag_values=values,
        serializer=flags.ArgumentSerializer(),
    )


def _option_kind(option: Option) -> type:
    return str if option.choices else type(option.paper)


def _option_text(option: Option) -> str:
    text = f"Default: {option.paper}"
    if option.later != option.paper:
        text += f"; with --variant=later {option.later}"
    if option.choices:
        text += f". One of {', '.join(option.choices)}"
    return text + "."


def config_from(task: str, arguments: Sequence[str]) -> RunConfig:
    """The settings that command line arguments describe.

    Args:
      task: the benchmark's name.
      arguments: without the program's name.

    Raises:
      ValueError: if a flag is unknown or out of range; the message names it.
    """
    values = define_flags(task)
    parse(values, task, arguments)
    options = {
        name: values[name].value
        for name in task_class(task).options
        if values[name].value is not None
    }
    settings: dict[str, Any] = {
        field.name: values[field.name].value
        for field in dataclasses.fields(RunConfig)
        if "setting" in field.metadata
    }
    return RunConfig(task=task, options=options, **settings)


def parse(values: flags.FlagValues, name: str, arguments: Sequence[str]) -> None:
    """Sets flags from command line arguments.

    Raises:
      ValueError: if a flag is unknown, or an argument is no flag.
    """
    try:
        rest = values([name, *arguments])
    except flags.Error as error:
        raise ValueError(str(error)) from error
    if rest[1:]:
        raise ValueError(
            f"Unknown argument {rest[1]!r}. Settings are flags: --rounds=10."
        )


def settings_from(config_class: type, name: str, arguments: Sequence[str]) -> Any:
    """A dataclass of settings from command line arguments.

    Args:
      config_class: the dataclass; `RunConfig` has `config_from`.
      name: the program's, for errors.
      arguments: without the program's name.

    Raises:
      ValueError: if a flag is unknown or out of range; the message names it.
    """
    values = define_settings(config_class)
    parse(values, name, arguments)
    return config_class(
        **{
            field.name: values[field.name].value
            for field in dataclasses.fields(config_class)
        }
    )


def run_program(name: str, config_class: type, described: str, run: Any) -> None:
    """A program that is no benchmark: parses its flags, runs it, prints its report.

    Args:
      name: the program's.
      config_class: a dataclass of settings.
      described: what it does, for --help.
      run: takes the settings and returns a text.
    """

    def body(rest):
        arguments = rest[1:]
        if HELP & set(arguments):
            flags_text = define_settings(config_class).get_help()
            print(f"{described}\n\npython -m tff_tasks.{name}\n{flags_text}")
            return
        logging.set_verbosity(logging.WARNING)
        try:
            text = run(settings_from(config_class, name, arguments))
        except (ValueError, OSError) as error:
            raise SystemExit(f"{name}: {error}") from error
        print(text)

    app.run(body, flags_parser=_parse_nothing)


def help_text(task: str) -> str:
    """What --help shows."""
    described = inspect.getdoc(task_class(task))
    if task == "digits":
        use, whose = "", "defaults were found by trying"
    else:
        use, whose = " --data_dir=data", "all defaults are the paper's"
    return (
        f"{described}\n\npython -m tff_tasks.{task}{use}\n\nFlags; {whose}.\n"
        f"{define_flags(task).get_help()}"
    )


def main(task: str) -> None:
    """Parses flags, runs the benchmark, and prints the report."""
    app.run(lambda rest: _main(task, rest[1:]), flags_parser=_parse_nothing)


def _parse_nothing(arguments: list[str]) -> list[str]:
    # The benchmark's flags are not global ones; absl wants its own to be parsed.
    flags.FLAGS(arguments[:1])
    return arguments


def _main(task: str, arguments: Sequence[str]) -> None:
    if HELP & set(arguments):
        print(help_text(task))
        return
    try:
        config = config_from(task, arguments)
        if config.data_dir is None and not config.synthetic and task != "digits":
            raise ValueError(
                "data_dir must be given, for example --data_dir=data; or use "
                "--synthetic for made-up data."
            )
    except ValueError as error:
        raise SystemExit(f"flag error: {error}") from error
    logging.set_verbosity(logging.WARNING)
    # Only now: it takes seconds.
    from tff_tasks import program

    try:
        result = program.run(config)
    except _USER_ERRORS as error:
        raise SystemExit(f"{task}: {error}") from error
    print(f"\n{result.report}")
    print(f"Written to {result.directory}")
