"""Runs conversions, and reads the resulting files."""

from __future__ import annotations

import csv
import pathlib

import pytest

from tff_tasks import convert
from tff_tasks.client_files import Feature, FederatedFile
from tff_tasks.registry import task_class

ROOT = pathlib.Path(__file__).resolve().parents[2]

TEXT = {"snippets": Feature("bytes")}

IMAGE = {"pixels": Feature("float", (28, 28)), "label": Feature("int")}


def converted(directory, source, *flags, task="shakespeare_character"):
    """Runs the program; returns the path of the file."""
    convert.main(
        [f"--task={task}", f"--input={source}", f"--output_dir={directory}", *flags]
    )
    return directory / task_class(task).file_name


def refused(directory, source, *flags, **options) -> str:
    """The message of a refused conversion, which must leave no file behind."""
    before = sorted(directory.rglob("*")) if directory.exists() else []
    with pytest.raises(SystemExit) as caught:
        converted(directory, source, *flags, **options)
    after = sorted(directory.rglob("*")) if directory.exists() else []
    assert after == before
    return str(caught.value.code)


def contents(path, features=TEXT):
    """The examples of all clients, by split and client."""
    file = FederatedFile(path)
    return {
        split: {
            client: {
                name: values.tolist()
                for name, values in file.read(split, client, features).items()
            }
            for client in file.clients(split)
        }
        for split in file.splits()
    }


def texts(path):
    """The texts of each client of any split."""
    splits = contents(path).values()
    return {
        client: values["snippets"]
        for split in splits
        for client, values in split.items()
    }


def posts(directory, clients=6, examples=3):
    """Texts as rows, clients mixed."""
    found = [
        {"user": f"u{c}", "text": f'"{c}", they said\nin {i}', "extra": i}
        for i in range(examples)
        for c in range(clients)
    ]
    path = directory / "posts.csv"
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, list(found[0]))
        table.writeheader()
        table.writerows(found)
    return path


COLUMNS = ("--client=user", "--columns=snippets=text")
