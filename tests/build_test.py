"""BUILD files are right: each file has a target, each target depends on its imports."""

from __future__ import annotations

import collections
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests import source_tree, stack
from tests.source_tree import ROOT

MAINS = {"tools/run_module.py", "tools/pytest_main.py"}
#: Packages below the root, with BUILD files of their own.
BELOW = source_tree.PACKAGES


def path_of(label: str, package: str = "") -> str:
    """A label as a path from the root; the library of a package has its name.

    >>> path_of("//tools:run_module.py"), path_of("//tfdpclip"), path_of(":a", "tests")
    ('tools/run_module.py', 'tfdpclip', 'tests/a')
    """
    if label.startswith("//"):
        package, _, name = label[2:].partition(":")
        name = name or package
    else:
        name = label.removeprefix(":")
    return name if not package or name == package else f"{package}/{name}"


def evaluate(root: pathlib.Path = ROOT) -> dict[str, dict[str, Any]]:
    """The targets of all BUILD files, whose syntax and meaning are Python's, by path.

    Labels in them are paths from the root.
    """
    targets: dict[str, dict[str, Any]] = {}
    for package in ("", *source_tree.PACKAGES):
        _evaluate(root / package / "BUILD", package, targets)
    return targets


def _evaluate(file: pathlib.Path, package: str, targets: dict[str, Any]) -> None:
    def rule(kind):
        def make(name, **attributes):
            name = path_of(name, package)
            assert name not in targets, f"two targets of the name {name}"
            for key in ("srcs", "deps", "data"):
                labels = attributes.get(key, [])
                attributes[key] = [path_of(label, package) for label in labels]
            if "main" in attributes:
                attributes["main"] = path_of(attributes["main"], package)
            targets[name] = {"rule": kind, **attributes}

        return make

    def glob(include, exclude=()):
        def files(patterns):
            return {
                path.relative_to(file.parent).as_posix()
                for pattern in patterns
                for path in file.parent.glob(pattern)
                if path.is_file()
            }

        found = sorted(files(include) - files(exclude))
        # Bazel's glob does not enter packages below.
        return [p for p in found if package or p.split("/")[0] not in BELOW]

    kinds = ("filegroup", "py_library", "py_binary", "py_test")
    names: dict[str, Any] = {kind: rule(kind) for kind in kinds}
    names |= {"glob": glob, "__builtins__": {"len": len}}
    for ignored in ("package", "licenses", "exports_files"):
        names[ignored] = lambda *args, **attributes: None
    exec(compile(file.read_text(), str(file), "exec"), names)


TARGETS = evaluate()
LIBRARIES = {n: t for n, t in TARGETS.items() if t["rule"] == "py_library"}


def closure(name: str) -> set[str]:
    """A target and its dependencies, direct and indirect."""
    found, rest = set(), [name]
    while rest:
        if (one := rest.pop()) not in found:
            found.add(one)
            rest += TARGETS[one]["deps"]
    return found


def test_every_package_has_its_own_build_file():
    for package in BELOW:
        assert TARGETS[package]["rule"] == "py_library"
    assert [n for n, t in TARGETS.items() if t["rule"] != "filegroup"] == [
        n for n in TARGETS if n.split("/")[0] in BELOW and not n.endswith("/data")
    ]
    project = TARGETS["project"]["srcs"]
    assert {f"{package}/BUILD" for package in BELOW} <= set(project)


def test_every_python_file_is_in_one_target():
    owners = collections.Counter()
    for target in TARGETS.values():
        if target["rule"] == "py_library":
            owners.update(target["srcs"])
        elif target["rule"] == "py_test":
            owners.update(set(target["srcs"]) - MAINS)
    files = set(source_tree.find_modules().values())
    assert len(files) > 200
    assert set(owners) == files
    assert [path for path, count in owners.items() if count > 1] == []


def test_every_program_is_a_binary_that_runs_it():
    binaries = {n: t for n, t in TARGETS.items() if t["rule"] == "py_binary"}
    programs = source_tree.programs()
    assert len(programs) > 30
    assert sorted(binaries) == sorted(name.replace(".", "/") for name in programs)
    for name, target in binaries.items():
        assert "args" not in target
        assert target["deps"] == [name.split("/")[0]]
        assert target["srcs"] == [target["main"]]
        assert target["main"] in MAINS


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", ["keras_examples/digits", "tfdpclip/accounting/__main__"]
)
def test_a_built_program_runs_by_its_own_path(program, tmp_path):
    """As Bazel's stub starts Python: no arguments but the user's."""
    root = tmp_path / "bin" / f"{program}.runfiles" / "tfdpclip"
    root.mkdir(parents=True)
    for package in ("tools", "driver_kit", "tfdpclip", "keras_examples"):
        (root / package).symlink_to(ROOT / package)
    done = subprocess.run(
        [sys.executable, root / "tools" / "run_module.py", "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "epsilon" in done.stdout, done.stderr
    alone = [sys.executable, ROOT / "tools" / "run_module.py", "--help"]
    done = subprocess.run(alone, capture_output=True, text=True)
    assert "python -m" in done.stderr


def test_tests_run_pytest_on_their_file():
    tests = [t for t in TARGETS.values() if t["rule"] == "py_test"]
    assert len(tests) > 100
    for target in tests:
        (path,) = target["args"]
        assert target["srcs"] == [path, target["main"]]
        assert target["main"] in MAINS


def imported_packages(library: str) -> dict[str, str]:
    """Other packages of the repository that a library imports, and where."""
    known = source_tree.find_modules()
    found: dict[str, str] = {}
    for path in LIBRARIES[library]["srcs"]:
        for name, line in source_tree.imports(path, known).items():
            found.setdefault(name.split(".")[0], f"{path}:{line} ({name})")
    found.pop(library, None)
    return found


@pytest.mark.parametrize("library", LIBRARIES)
def test_dependencies_are_the_imports(library):
    found = imported_packages(library)
    assert set(found) == set(LIBRARIES[library]["deps"]), found


@pytest.mark.slow
def test_tests_depend_on_all_that_they_import():
    known = source_tree.find_modules()
    for target in TARGETS.values():
        if target["rule"] == "py_test":
            names = source_tree.imports(target["args"][0], known)
            missing = {name.split(".")[0] for name in names}
            assert missing <= set(target["deps"]), target["args"]


def test_no_library_depends_on_itself():
    for name in LIBRARIES:
        assert all(name not in closure(dep) for dep in LIBRARIES[name]["deps"]), name


def test_imports_are_found_however_they_are_written(tmp_path):
    (tmp_path / "tff_tasks").mkdir()
    text = """
import tfdpclip.noise as noise
from . import digits
from keras_examples import digits
if TYPE_CHECKING:
    from tests import conftest
else:
    import tools
HOMES = {"f": "tfdpclip.clipping"}
def f(name):
    importlib.import_module(f"tfdpclip.{name}")
    run("-m", "benchmarks.worker")
    raise ValueError("tests.seeds is not for this. tests.")
"""
    (tmp_path / "tff_tasks" / "a.py").write_text(text)
    found = source_tree.imports(
        "tff_tasks/a.py", source_tree.find_modules(), root=tmp_path
    )
    assert set(found) == {
        "tfdpclip.noise",
        "tff_tasks.digits",
        "keras_examples.digits",
        "tests.conftest",
        "tools",
        "tfdpclip.clipping",
        "tfdpclip",
        "benchmarks.worker",
    }


@pytest.mark.slow
@pytest.mark.parametrize("package", source_tree.PACKAGES)
def test_what_is_imported_is_there(package):
    found = []
    for name, path in source_tree.find_modules().items():
        if name.split(".")[0] == package:
            found += source_tree.missing_imports(path)
    assert found == []


# The module for the Keras that is not installed.
OTHER_KERAS = f"tfdpclip.keras._keras{2 if stack.KERAS_3 else 3}"


# Only a library's dependencies are there, and they suffice. `import tfdpclip` loads its
# parts by name, so the program touches them.
PROGRAM = """
import importlib, pathlib, sys
here = pathlib.Path.cwd()
sys.path.insert(0, str(here))
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        getattr(module, public)
for name, module in list(sys.modules.items()):
    if name.split(".")[0] in {packages!r} and getattr(module, "__file__", None):
        assert here in pathlib.Path(module.__file__).parents, (name, module.__file__)
"""


@pytest.mark.parametrize("library", source_tree.INSTALLED)
@pytest.mark.slow
def test_what_a_library_depends_on_suffices(library, tmp_path):
    if library in ("tfdpclip", "tff_tasks") and not stack.FEDERATED:
        pytest.skip("all of it is imported, and TensorFlow Federated is not there")
    for name in closure(library):
        for path in TARGETS[name]["srcs"]:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, tmp_path / path)
    modules = [
        name
        for name, path in source_tree.find_modules().items()
        if path in TARGETS[library]["srcs"] and name != OTHER_KERAS
    ]
    assert len(modules) > 10 or library == "driver_kit"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    program = PROGRAM.format(packages=source_tree.PACKAGES)
    output = tmp_path / "output"
    with output.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-c", program, *modules],
            cwd=tmp_path,
            env={**environment, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            timeout=250,
        )
    assert done.returncode == 0, output.read_text()[-3000:]


@pytest.mark.slow
def test_bazel_reads_build(tmp_path):
    bazel = shutil.which("bazel")
    if bazel is None:
        pytest.skip("bazel is not installed")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        # Without a server, which would outlive the test.
        command = [bazel, "--batch", f"--output_user_root={tmp_path}", *arguments]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=240
        )

    if run("help").returncode:
        pytest.skip("bazel does not start")
    # Not `deps(...)`: it would download the tools on which all rules depend.
    query = "//... union labels(srcs, //...) union labels(deps, //...)"
    result = run("query", "--noshow_progress", query)
    assert result.returncode == 0, result.stderr
    labels = {path_of(label) for label in result.stdout.split()}
    assert set(source_tree.find_modules().values()) | set(TARGETS) <= labels
    # Bazel takes an unknown label for a file, without looking whether there is one.
    unknown = {label for label in labels - set(TARGETS) if not (ROOT / label).is_file()}
    assert not unknown
