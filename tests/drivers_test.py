"""The programs: none imports another program, and each describes its use."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from driver_kit import command_line
from tests import source_tree
from tests.source_tree import ROOT

PROGRAMS = source_tree.programs()
ASKED = [*PROGRAMS, "tests.fuzz"]
# They import TensorFlow Federated before they do anything.
NEED_TFF = (
    "benchmarks.federated_tasks_worker",
    "benchmarks.federated_worker",
    "tfdpclip.federated.worker",
)

# The packages that each package may import: the library none, the kit the library,
# drivers both, and benchmarks the packages that they measure.
ALLOWED = {
    "tfdpclip": set(),
    "driver_kit": {"tfdpclip"},
    "keras_examples": {"driver_kit", "tfdpclip"},
    "tff_tasks": {"driver_kit", "tfdpclip"},
    "benchmarks": {"driver_kit", "tfdpclip", "tff_tasks"},
}


def imported_programs(path: str, root: pathlib.Path = ROOT) -> list[str]:
    """The programs that a module imports, with the line."""
    known = source_tree.find_modules()
    found = source_tree.imports(path, known, root, strings=False)
    return [f"{path}:{line} {name}" for name, line in found.items() if name in PROGRAMS]


def test_no_module_imports_a_program():
    """Shared code of two programs is in a module that is no program."""
    found = []
    for name, path in source_tree.find_modules().items():
        if name.split(".")[0] in ALLOWED:
            found += imported_programs(path)
    assert found == []


def test_an_import_of_a_program_is_found(tmp_path):
    (tmp_path / "tff_tasks").mkdir()
    text = "def f():\n    from keras_examples import heads, digits\n"
    (tmp_path / "tff_tasks" / "a.py").write_text(text)
    found = imported_programs("tff_tasks/a.py", tmp_path)
    assert found == ["tff_tasks/a.py:2 keras_examples.digits"]


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_in_one_direction(package):
    known = source_tree.find_modules()
    for name, path in known.items():
        if name.split(".")[0] == package:
            found = {n.split(".")[0] for n in source_tree.imports(path, known)}
            assert found <= ALLOWED[package] | {package}, path


# Runs every program with every flag in one process, which imports TensorFlow once.
ALL_HELP = """
import contextlib, io, json, runpy, sys
root, programs, flags = sys.argv[1:]
sys.path.insert(0, root)
found = {}
for program in json.loads(programs):
    for flag in json.loads(flags):
        said, code = io.StringIO(), 0
        sys.argv = [program, flag]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                runpy.run_module(program, run_name="__main__")
            except SystemExit as end:
                code = end.code or 0
            except BaseException as error:
                code = repr(error)
        found[f"{program} {flag}"] = code, said.getvalue()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def help_texts(tmp_path_factory) -> dict[str, tuple[object, str]]:
    directory = tmp_path_factory.mktemp("help")
    output, errors = (directory.with_suffix(end) for end in (".json", ".txt"))
    arguments = [str(ROOT), json.dumps(ASKED), json.dumps(command_line.HELP)]
    with output.open("w") as file, errors.open("w") as error_file:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", ALL_HELP, *arguments],
            cwd=directory,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=error_file,
            timeout=250,
        )
    assert done.returncode == 0, errors.read_text()[-3000:]
    # Help begins nothing.
    assert not list(directory.iterdir())
    return json.loads(output.read_text())


@pytest.mark.slow
def test_every_program_was_asked(help_texts):
    assert len(PROGRAMS) > 30
    assert len(help_texts) == len(ASKED) * len(command_line.HELP)


@pytest.mark.parametrize("program", ASKED)
def test_help_is_given_and_no_error(help_texts, program):
    if program in NEED_TFF:
        pytest.importorskip("tensorflow_federated")
    for flag in command_line.HELP:
        code, said = help_texts[f"{program} {flag}"]
        assert code == 0, (flag, code, said)
        assert len(said.strip().splitlines()) >= 3, (flag, said)
        assert "Traceback" not in said and "Unknown" not in said
