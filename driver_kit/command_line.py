"""What all command lines answer alike, whatever parses the rest. Standard library only:
some programs of `benchmarks` run in environments that have little else."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

#: What asks for help. absl's programs know the longer ones, and so people type them.
HELP = ("-h", "-help", "--help", "--helpshort", "--helpfull")


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether one of the arguments asks for help.

    >>> wants_help(["--steps=3", "--helpshort"])
    True
    """
    return not set(HELP).isdisjoint(arguments)


def refusal(program: str, error: object) -> SystemExit:
    """The end of a program that cannot do what it was asked for, in argparse's words.

    Args:
      program: its name or file.
      error: what is wrong, and what to write.

    Returns:
      The exception to raise: its line goes to the standard error, the status is 1.

    >>> str(refusal("digits.py", "flag --steps=0: must be 1 or more."))
    'digits: error: flag --steps=0: must be 1 or more.'
    """
    return SystemExit(f"{pathlib.Path(program).stem}: error: {error}")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors end the program as `refusal` does."""

    def error(self, message: str) -> NoReturn:
        name = self.prog.rpartition(".")[2]
        self.exit(1, f"{name}: error: {message} See --help.\n")


def argument_parser(about: str | None, **options: Any) -> argparse.ArgumentParser:
    """An argparse parser that knows all of `HELP` and keeps the lines of `about`."""
    parser = _Parser(
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        **{"prog": pathlib.Path(sys.argv[0]).stem, **options},
    )
    parser.add_argument(*HELP, action="help", help="Show this.")
    return parser


def words(text: str) -> list[str]:
    """What a comma stands between, for `type=`.

    >>> words("mlp,cnn")
    ['mlp', 'cnn']
    """
    return [part for part in text.split(",") if part]


def named_path(text: str) -> pathlib.Path:
    """A path, for `type=`. An empty path would be the current directory.

    >>> named_path("runs/mine").name
    'mine'
    >>> named_path("")
    Traceback (most recent call last):
        ...
    argparse.ArgumentTypeError: must not be empty, for example runs/mine
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty, for example runs/mine")
    return pathlib.Path(text)
