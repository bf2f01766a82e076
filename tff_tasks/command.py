"""The command line that all benchmarks share."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence

from driver_kit import command_line, settings
from tfdpclip import accounting
from tff_tasks import records
from tff_tasks.client_files import DataFileError
from tff_tasks.config import RunConfig
from tff_tasks.registry import task_class
from tff_tasks.task import SettingsError

_USER_ERRORS = (
    DataFileError,
    SettingsError,
    accounting.PrivacyMismatchError,
    records.RunMismatchError,
    records.RunFileError,
    # A full disk, or a directory that cannot be written: the error's text names the
    # cause and the remedy.
    OSError,
)


def known_settings(task: str) -> dict[str, settings.Setting]:
    """The settings of a benchmark by name: the common settings, and its own options."""
    options = task_class(task).options.items()
    return settings.of(RunConfig) | {name: one.setting() for name, one in options}


def config_from(task: str, arguments: Sequence[str]) -> RunConfig:
    """The settings that command line arguments describe.

    Args:
      task: the benchmark's name.
      arguments: without the program's name.

    Raises:
      ValueError: if a flag is unknown or out of range; the message names it.
    """
    values = settings.read(known_settings(task), [task, *arguments])
    options = {name: values.pop(name) for name in task_class(task).options}
    given = {name: value for name, value in options.items() if value is not None}
    return RunConfig(task=task, options=given, **values)


_WHOSE = (
    "Rounds, clients, rates and noise default to the paper's. --momentum_damping "
    "defaults to the paper's code and not to its Algorithm 1; --mask_loss, of language "
    "tasks, to neither."
)


def help_text(task: str) -> str:
    """The text of --help."""
    described = inspect.getdoc(task_class(task))
    if task == "digits":
        use, whose = "", "The defaults were found by trying."
    else:
        use, whose = " --data_dir=data", _WHOSE
    about = f"{described}\n\npython -m tff_tasks.{task}{use}\n\n{whose}"
    return settings.help_text(known_settings(task), about)


def main(task: str, arguments: Sequence[str] | None = None) -> None:
    """Parses flags, runs the benchmark, and prints the report.

    Args:
      task: the benchmark's name.
      arguments: without the program's name; by default the process's arguments.

    Raises:
      SystemExit: with one clear sentence if the settings or the data are wrong.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if command_line.wants_help(arguments):
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
        raise command_line.refusal(task, error) from error
    settings.start_logging(config)
    # This import comes late, because it takes seconds.
    from tff_tasks import program

    try:
        result = program.run(config)
    except _USER_ERRORS as error:
        raise command_line.refusal(task, error) from error
    print(f"\n{result.report}")
    print(f"Written to {result.directory}")
