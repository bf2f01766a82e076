"""Adds the index that reading one client's examples needs to SQLite files.

    python -m tff_tasks.federated_files FILE ...

Reads each file once, from beginning to end. `tff_tasks.client_files` documents the
files.
"""

from __future__ import annotations

import sys

from driver_kit import command_line
from tff_tasks.client_files import DataFileError, add_index


def main(arguments: list[str]) -> None:
    """Adds the index to the files given."""
    if command_line.wants_help(arguments):
        print(__doc__)
        return
    if not arguments:
        raise command_line.refusal(
            "federated_files", "Usage: python -m tff_tasks.federated_files FILE ..."
        )
    for argument in arguments:
        try:
            add_index(argument)
        except DataFileError as error:
            raise command_line.refusal("federated_files", error) from error
        print(f"{argument}: indexed")


if __name__ == "__main__":
    main(sys.argv[1:])
