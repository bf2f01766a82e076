"""The programs: none imports another program, and each describes its use."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from driver_kit import command_line, settings
from tests import source_tree
from tests.source_tree import ROOT
from tff_tasks import command

PROGRAMS = source_tree.programs()
# The worker is TensorFlow Federated's own, which the package imports.
NEED_TFF = "tfdpclip.federated.worker"
#: Other programs start these, which import TensorFlow Federated first.
FEDERATED_WORKERS = ("benchmarks.federated_tasks_worker", "benchmarks.federated_worker")
ASKED = [*(name for name in PROGRAMS if name != NEED_TFF), NEED_TFF, "tests.fuzz"]

WRONG = "--no_such_flag=1"

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


# Runs programs with a flag each in one process.
ALL_HELP = """
import contextlib, io, json, runpy, sys
SLOW = ("tensorflow", "tensorflow_federated", "keras", "tf_keras")
root, pairs = sys.argv[1:]
sys.path.insert(0, root)
found = {}
for program, flag in json.loads(pairs):
    said, code = io.StringIO(), 0
    sys.argv = [program, flag]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_module(program, run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
            if isinstance(code, str):  # As Python ends with a text.
                print(code, file=said)
                code = 1
        except BaseException as error:
            code = repr(error)
    slow = [name for name in SLOW if name in sys.modules]
    found[f"{program} {flag}"] = code, said.getvalue(), slow
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def help_texts(tmp_path_factory) -> dict[str, tuple[object, str, list[str]]]:
    directory = tmp_path_factory.mktemp("help")
    output, errors = (directory.with_suffix(end) for end in (".json", ".txt"))
    pairs = [(program, flag) for program in ASKED for flag in command_line.HELP]
    pairs += [(program, WRONG) for program in ASKED]
    arguments = [str(ROOT), json.dumps(pairs)]
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
    # Neither help nor a wrong flag begins anything.
    assert not list(directory.iterdir())
    return json.loads(output.read_text())


@pytest.mark.slow
def test_every_program_was_asked(help_texts):
    assert len(PROGRAMS) > 30
    assert len(help_texts) == len(ASKED) * (len(command_line.HELP) + 1)


@pytest.mark.parametrize("program", ASKED)
def test_help_is_given_and_no_error(help_texts, program):
    if program == NEED_TFF:
        pytest.importorskip("tensorflow_federated")
    for flag in command_line.HELP:
        code, said, _ = help_texts[f"{program} {flag}"]
        assert code == 0, (flag, code, said)
        assert len(said.strip().splitlines()) >= 3, (flag, said)
        assert "Traceback" not in said and "Unknown" not in said


@pytest.mark.parametrize("program", ASKED)
def test_a_wrong_flag_ends_every_program_alike(help_texts, program):
    """Status 1, and one line: PROGRAM: error: TEXT."""
    if program == NEED_TFF or program in FEDERATED_WORKERS:
        pytest.importorskip("tensorflow_federated")
    code, said, _ = help_texts[f"{program} {WRONG}"]
    lines = said.strip().splitlines()
    assert code == 1 and len(lines) == 1, (code, said)
    assert re.match(r"[\w.]+: error: .+", lines[0]), said


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p != NEED_TFF])
def test_help_waits_for_no_tensorflow(help_texts, program):
    """Importing TensorFlow takes 4 to 40 seconds; --help without it takes 2 at most."""
    for flag in command_line.HELP:
        assert help_texts[f"{program} {flag}"][2] == [], flag


def _programs_with_settings() -> list[tuple[str, dict[str, settings.Setting]]]:
    """The name of every program with flags, and its settings."""
    found = []
    for name in PROGRAMS:
        if name.split(".")[0] not in ("keras_examples", "tff_tasks"):
            continue
        if name == "tff_tasks.federated_files":
            continue  # Takes names of files, and no flags.
        module = importlib.import_module(name)
        kinds = [
            kind
            for kind in vars(module).values()
            if dataclasses.is_dataclass(kind) and settings.of(kind)
            if kind.__module__ == name
        ]
        found += [(name, settings.of(kind)) for kind in kinds]
        if name.startswith("tff_tasks.") and not kinds:
            found.append((name, command.known_settings(name.split(".")[1])))
    return found


@pytest.fixture(scope="module")
def all_settings():
    return _programs_with_settings()


def _example(flag: str, setting: settings.Setting) -> str:
    """The flag of a message, which works."""
    line = f"--{setting.example(flag)}"
    settings.read({flag: dataclasses.replace(setting, only_with=None)}, ["x", line])
    return line


def _words_of(setting: settings.Setting, value: object) -> str:
    value = setting.good if value is None else value
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value if value is not None else "x").lower()


def test_every_program_has_settings(all_settings):
    named = {name for name, _ in all_settings}
    asked = [p for p in PROGRAMS if p.split(".")[0] in ("keras_examples", "tff_tasks")]
    assert len(named) > 30
    assert set(asked) - named == {"tff_tasks.federated_files"}


def test_a_budget_and_a_noise_multiplier_are_never_both_taken(all_settings):
    """A program that takes both says which replaces the other, and refuses both."""
    pairs = 0
    for name, known in all_settings:
        budgets = {"epsilon", "epsilons", "target_epsilon"} & known.keys()
        noises = {"noise_multiplier", "noise_multipliers", "sigma"} & known.keys()
        for budget, noise in itertools.product(budgets, noises):
            pairs += 1
            assert noise in known[budget].instead_of, (name, budget, noise)
    assert pairs >= 3


def test_contradictory_flags_are_errors_in_every_program(all_settings):
    """Also where a flag repeats the default, which a comparison would not see."""
    tried = 0
    for name, known in all_settings:
        for flag, setting in known.items():
            for other in setting.instead_of:
                assert other in known, (name, flag)
                replaced = known[other]
                one = f"--{flag}" if setting.kind is bool else _example(flag, setting)
                two = f"--{other}={_words_of(replaced, replaced.default)}"
                with pytest.raises(settings.UsageError, match="contradict") as raised:
                    settings.read(known, [name, one, two])
                assert f"--{other}" in str(raised.value)
                tried += 1
    assert tried > 15


def test_flags_that_nothing_reads_are_errors_in_every_program(all_settings):
    tried = 0
    for name, known in all_settings:
        for flag, setting in known.items():
            if setting.only_with is None:
                continue
            other, *good = setting.only_with
            assert set(good) <= set(known[other].one_of or ()), (name, flag)
            bad = set(known[other].one_of or ()) - set(good)
            given = [f"--{other}={sorted(bad)[0]}"] if good else []
            line = f"--{flag}={_words_of(setting, setting.default)}"
            with pytest.raises(settings.UsageError, match=f"flag --{flag} does"):
                settings.read(known, [name, *given, line])
            tried += 1
    assert tried > 25


def test_a_wrong_value_of_a_flag_is_refused_before_anything_runs(all_settings):
    """Numbers, words of a list, and texts of a form, in every program."""
    tried = 0
    for name, known in all_settings:
        for flag, setting in known.items():
            free = setting.kind is str and setting.one_of is None
            if free and setting.reads is None:
                continue
            for bad in ("", "half", "1,half", "nan"):
                with pytest.raises(settings.UsageError, match=flag) as raised:
                    settings.read(known, [name, f"--{flag}={bad}"])
                assert setting.kind is bool or "for example" in str(raised.value)
                tried += 1
    assert tried > 1000


def test_a_text_that_names_another_flag_has_the_relation_declared(all_settings):
    """`Of --clip=quantile` in --help is a promise that --clip=fixed is refused."""
    for name, known in all_settings:
        for flag, setting in known.items():
            named = re.match(r"(?:Of|For|With) --(\w+)", setting.text)
            if named and flag != "minimum_clients":
                assert setting.only_with is not None, (name, flag)
                assert setting.only_with[0] == named[1], (name, flag)


def test_every_path_flag_refuses_an_empty_path(all_settings):
    """An empty path is the current directory, whose files a run would replace."""
    paths = re.compile(
        r"_dir$|^(results|features|checkpoint|ledger|input|check|weights"
        r"|preset|public|private|gradients|sweeps)$"
    )
    tried = 0
    for name, known in all_settings:
        for flag, setting in known.items():
            if setting.kind is str and setting.one_of is None and paths.search(flag):
                for empty in ("", "  "):
                    with pytest.raises(settings.UsageError, match=f"--{flag}="):
                        settings.read(known, [name, f"--{flag}={empty}"])
                tried += 1
    assert tried > 40


def test_no_benchmark_takes_an_empty_path():
    """argparse would make the current directory of an empty path."""
    for name, path in source_tree.find_modules().items():
        if name.startswith("benchmarks."):
            text = (ROOT / path).read_text(encoding="utf-8")
            for line in text.splitlines():
                if re.search(r'"--\w*(dir|folder)"', line):
                    start = text.index(line)
                    assert "named_path" in text[start : start + 120], (path, line)
