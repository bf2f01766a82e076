"""The installed files, and the commands' messages when they cannot install."""

from __future__ import annotations

import ast
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import zipfile

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests import source_tree

ROOT = pathlib.Path(__file__).resolve().parents[1]


def repository_files() -> list[pathlib.Path]:
    """Returns the files that are, or would be, under version control."""
    result = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if result.returncode:
        pytest.skip("not a git checkout")
    names = sorted(set(result.stdout.split("\0")) - {""})
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def copy_repository(target: pathlib.Path) -> None:
    for path in repository_files():
        copy = target / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


@pytest.fixture
def setup_arguments(monkeypatch) -> dict:
    arguments = {}
    monkeypatch.setattr(setuptools, "setup", arguments.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    return arguments


# A file of pins for each environment, and the Python versions it is for.
PINS = {
    "requirements.txt": ["3.11"],
    "requirements-keras3.txt": ["3.10", "3.11", "3.12", "3.13"],
}
each_file_of_pins = pytest.mark.parametrize("name", PINS)
# docs/stacks.md: packages that a single file has.
PINNED_ONLY = {"tensorflow-federated", "tensorflow-privacy"}
KERAS_3_ONLY = {"keras-hub"}


def lines_of_pins(name: str) -> list[str]:
    text = (ROOT / name).read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip()]


def pins_for(name: str, python: str) -> dict[str, str]:
    """The versions that `pip install -r name` installs, by package."""
    here = {"python_version": python, "python_full_version": f"{python}.0"}
    here |= {"sys_platform": "linux", "platform_python_implementation": "CPython"}
    here |= {"platform_machine": "x86_64", "platform_system": "Linux"}
    pins: dict[str, str] = {}
    for line in lines_of_pins(name):
        found = Requirement(line.split(" --hash")[0])
        if found.marker is None or found.marker.evaluate(here):
            (pin,) = found.specifier
            assert canonicalize_name(found.name) not in pins, line
            pins[canonicalize_name(found.name)] = pin.version
    return pins


def requirements_in(name: str) -> list[Requirement]:
    lines = (ROOT / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line and line[0] != "#"]


def assert_pinned(name: str, requirements: list[Requirement]) -> None:
    for python in PINS[name]:
        pins = pins_for(name, python)
        for requirement in requirements:
            marker = requirement.marker
            if marker and not marker.evaluate({"python_version": python}):
                continue
            version = pins.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement} is not in {name}"
            assert requirement.specifier.contains(version), f"{requirement}: {version}"


# The pins.


@each_file_of_pins
def test_every_requirement_is_pinned_and_hashed(name):
    lines = lines_of_pins(name)
    assert len(lines) > 50
    for line in lines:
        requirement, *hashes = re.split(r"\s+(?=--hash)", line.strip())
        marker = r" ; [a-z_]+ [<>=!]+ '[\w.*]+'( and .+)?"
        pin = rf"[A-Za-z0-9._-]+==[A-Za-z0-9._+-]+({marker})?"
        assert re.fullmatch(pin, requirement), line
        assert hashes, requirement
        for value in hashes:
            assert re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", value), line


@each_file_of_pins
def test_pins_are_what_requirements_in_asks_for(name):
    assert_pinned(name, requirements_in(name.replace(".txt", ".in")))


def test_pins_are_what_the_overrides_force():
    assert_pinned("requirements.txt", requirements_in("requirements.overrides"))


@each_file_of_pins
def test_pins_satisfy_setup(setup_arguments, name):
    assert_pinned(name, [Requirement(r) for r in setup_arguments["install_requires"]])
    for extra in setup_arguments["extras_require"].values():
        absent = KERAS_3_ONLY if name == "requirements.txt" else PINNED_ONLY
        requirements = [Requirement(line) for line in extra]
        assert_pinned(name, [r for r in requirements if r.name not in absent])


def test_versions_of_tensorflow_without_a_stack_are_not_claimed(setup_arguments):
    (claimed,) = (
        Requirement(line)
        for line in setup_arguments["install_requires"]
        if line.startswith("tensorflow")
    )
    pinned = {
        pins_for(name, python)["tensorflow"]
        for name, pythons in PINS.items()
        for python in pythons
    }
    minors = {version.rpartition(".")[0] for version in pinned}
    assert len(minors) == 2
    for minor in range(10, 30):
        assert claimed.specifier.contains(f"2.{minor}.1") == (f"2.{minor}" in minors)


# The package.


def test_extras(setup_arguments):
    extras = setup_arguments["extras_require"]
    assert {"tff", "plots", "examples", "benchmarks", "test", "dev", "all"} <= set(
        extras
    )
    for name, requirements in extras.items():
        if name != "tff":
            assert set(requirements) <= set(extras["all"])


# Packages whose import name differs from the name of their distribution.
DISTRIBUTIONS = {
    "absl": "absl-py",
    "attr": "attrs",
    # protobuf and Keras, of the versions that TensorFlow brings.
    "google": "tensorflow",
    "grpc": "grpcio",
    "keras": "tensorflow",
    "sklearn": "scikit-learn",
}


@pytest.mark.slow
def test_every_import_is_declared(setup_arguments):
    extras = setup_arguments["extras_require"].values()
    declared = {
        canonicalize_name(Requirement(line).name)
        for lines in (setup_arguments["install_requires"], *extras)
        for line in lines
    }
    packages = setup_arguments["packages"]
    known = {*sys.stdlib_module_names, *(name.split(".")[0] for name in packages)}
    imported = set()
    for package in packages:
        for path in (ROOT / package.replace(".", "/")).glob("*.py"):
            imported |= imports_of(path)
    missing = {
        name
        for name in imported - known
        if canonicalize_name(DISTRIBUTIONS.get(name, name)) not in declared
    }
    assert imported & declared
    assert not missing


def imports_of(path):
    """The top-level modules that a file imports."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.add((node.module or "").split(".")[0])
    return imported


def test_python_versions(setup_arguments):
    supported = SpecifierSet(setup_arguments["python_requires"])
    pythons = {python for pythons in PINS.values() for python in pythons}
    # Python versions without pins are not claimed.
    for minor in range(7, 20):
        assert supported.contains(f"3.{minor}.0") == (f"3.{minor}" in pythons)
        classifier = f"Programming Language :: Python :: 3.{minor}"
        assert (classifier in setup_arguments["classifiers"]) == (
            f"3.{minor}" in pythons
        )


# Names of the standard library that Python 3.10 lacks. mypy looks for them too, but not
# everywhere.
NEWER_THAN_3_10 = """
    asyncio.Runner asyncio.TaskGroup asyncio.timeout contextlib.chdir copy.replace
    datetime.UTC enum.StrEnum enum.verify hashlib.file_digest inspect.getmembers_static
    itertools.batched math.cbrt math.exp2 math.sumprod operator.call tomllib
    typing.Never typing.LiteralString typing.NotRequired typing.Required typing.Self
    typing.Unpack typing.assert_never typing.assert_type typing.override
    typing.reveal_type warnings.deprecated
""".split()


def newer_than_3_10(text: str) -> list[str]:
    """The names of a module's text that Python 3.10 does not have."""
    try:
        tree = ast.parse(text, feature_version=(3, 10))
    except SyntaxError as error:
        return [str(error)]
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names.append(ast.unparse(node))
    return sorted(set(names) & set(NEWER_THAN_3_10))


@pytest.mark.slow
def test_code_is_that_of_the_oldest_python():
    for path in source_tree.find_modules().values():
        assert not newer_than_3_10((ROOT / path).read_text()), path


@pytest.mark.parametrize(
    "code",
    [
        "from typing import Any, Self",
        "import tomllib",
        "datetime.datetime.now(datetime.UTC)",
        "try:\n    f()\nexcept* ValueError:\n    pass",
    ],
)
def test_code_of_a_newer_python_is_found(code):
    assert newer_than_3_10(code)


def test_every_module_is_in_an_installed_package(setup_arguments):
    for name, path in source_tree.find_modules().items():
        if name.split(".")[0] in source_tree.INSTALLED:
            package = str(pathlib.PurePosixPath(path).parent).replace("/", ".")
            assert package in setup_arguments["packages"], (
                f"{path} would not be installed: its directory, or one above, "
                "has no __init__.py"
            )


@pytest.mark.slow
def test_wheel_has_the_packages_and_nothing_else(tmp_path):
    source, output = tmp_path / "source", tmp_path / "output"
    copy_repository(source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--wheel-dir", str(output)]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (wheel,) = output.iterdir()
    version = runpy.run_path(str(ROOT / "tfdpclip" / "_version.py"))["__version__"]
    assert wheel.name == f"tfdpclip-{version}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    modules = {name for name in names if name.endswith(".py")}
    assert modules == {
        path
        for path in source_tree.find_modules().values()
        if path.split("/")[0] in source_tree.INSTALLED
    }
    assert any(re.search(r"\.dist-info/.*LICENSE$", name) for name in names)
    assert "tfdpclip/py.typed" in names


def test_license_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_import_leaves_optional_packages_alone():
    optional = (
        "matplotlib",
        "pandas",
        "sklearn",
        "tensorflow_federated",
        "tensorflow_privacy",
    )
    program = (
        "import sys, tfdpclip; "
        f"print(*[name for name in {optional} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_only_federated_code_imports_federated():
    for path in source_tree.find_modules().values():
        if path.startswith("tfdpclip/") and "federated" not in path:
            for node in ast.walk(ast.parse((ROOT / path).read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                roots = {name.split(".")[0] for name in names}
                assert "tensorflow_federated" not in roots, path


# The repository.

# In pieces, so that this file does not contain the names.
HOME_DIRECTORIES = "|".join(["home", "root", "work", "opt", "tmp", "Users", "mnt"])
MACHINE_PATH = re.compile(rf"(?<![\w.])/(?:{HOME_DIRECTORIES})/")
REGISTRIES = [
    (r"py" r"pi\.org"),
    (r"python" r"hosted"),
    (r"--(?:extra-)?index" r"-url"),
]
REGISTRY = re.compile("|".join(REGISTRIES))


def forbidden(text: str) -> list[str]:
    return [*MACHINE_PATH.findall(text), *REGISTRY.findall(text)]


def test_no_file_names_a_machine_or_a_registry():
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        assert not forbidden(text), path


def test_machine_paths_and_registries_are_recognised():
    assert forbidden("see " + "/" + "root/notes.txt")
    assert forbidden("'" + "/" + "home/someone'")
    assert forbidden("https://" + "py" + "pi.org/simple")
    assert forbidden("--extra-index" + "-url=x")
    assert not forbidden("docs/work/x.py, ./runs/digits, example.com/home/x, a/b")


# The Makefile.


@pytest.fixture
def checkout(tmp_path) -> pathlib.Path:
    """A directory with the files from which `make` creates .venv."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for name in ("Makefile", *PINS, "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def fake_python(path: pathlib.Path, script: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return path


def run_make(
    checkout: pathlib.Path, *arguments: str, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs make, of which no outer make decides anything."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "STACK")
    }
    if path is not None:
        environment["PATH"] = path
    return subprocess.run(
        [shutil.which("make"), *arguments],
        cwd=checkout,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )


def failing_make(
    checkout: pathlib.Path, *arguments: str, path: str | None = None
) -> str:
    """Runs make, which must fail and leave no environment; returns its output."""
    result = run_make(checkout, *arguments, path=path)
    assert result.returncode != 0, result.stdout
    assert not list(checkout.glob(".venv*"))
    return result.stdout


def python_of(path: pathlib.Path, version: tuple[int, int]) -> pathlib.Path:
    """A fake Python that knows its version, and cannot make an environment."""
    return fake_python(
        path,
        f"""case "$1 $2" in
*ensurepip*) exit 1;;
--version*) echo Python {version[0]}.{version[1]}.1;;
*) exec '{sys.executable}' -c "import sys; sys.version_info = {version}; $2";;
esac
""",
    )


@pytest.mark.parametrize("goal", ["test", "demo", "lint"])
def test_make_says_that_the_given_python_is_missing(checkout, goal):
    output = failing_make(checkout, "PYTHON=no-such-python", goal)
    assert "needs Python 3.11" in output
    assert "no-such-python: not found" in output
    assert f"make PYTHON=/path/to/python {goal}" in output


def test_make_says_where_it_looked(checkout):
    output = failing_make(checkout, "test", path=str(checkout / "bin"))
    for name in ("python3.11", "python3", "python"):
        assert f"    {name}: not found" in output


@pytest.mark.parametrize("stack", ["keras3", "tf_keras"])
def test_make_says_what_another_stack_needs(checkout, stack):
    python_of(checkout / "bin" / "python3", (3, 9))
    path = str(checkout / "bin")
    output = failing_make(checkout, "test", f"STACK={stack}", path=path)
    assert f"The stack {stack} needs Python 3.10, 3.11, 3.12 or 3.13" in output
    assert "    python3: Python 3.9.1" in output
    assert f"make PYTHON=/path/to/python STACK={stack} test" in output


def test_make_refuses_a_stack_that_there_is_not(checkout):
    output = failing_make(checkout, "test", "STACK=keras2")
    assert "STACK is pinned, keras3 or tf_keras, not keras2" in output


def test_make_names_the_version_it_found(checkout):
    python_of(checkout / "bin" / "python3", (3, 12))
    path = str(checkout / "bin")
    output = failing_make(checkout, "STACK=pinned", "test", path=path)
    assert "    python3: Python 3.12.1" in output


# Names of Pythons with their minor versions; the environment; the Python chosen.
CHOICES = [
    ({"python3.11": 11, "python3.13": 13}, ".venv", "python3.11"),
    ({"python3": 11, "python3.12": 12}, ".venv", "python3"),
    ({"python3": 12}, ".venv-keras3", "python3"),
    ({"python3": 9, "python3.13": 13, "python3.10": 10}, ".venv-keras3", "python3.13"),
    ({"python3": 14, "python3.10": 10}, ".venv-keras3", "python3.10"),
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("pythons, environment, name", CHOICES)
@pytest.mark.parametrize("goal", ["demo", "test"])
def test_make_takes_the_stack_of_the_python_that_is_there(
    checkout, pythons, environment, name, goal
):
    for one, minor in pythons.items():
        python_of(checkout / "bin" / one, (3, minor))
    output = failing_make(checkout, goal, path=str(checkout / "bin"))
    assert f"{name} lacks the modules venv and ensurepip" in output
    assert f"{environment}. Install them" in output


def test_a_python_that_is_given_decides(checkout):
    python_of(checkout / "bin" / "python3.11", (3, 11))
    other = python_of(checkout / "other" / "python", (3, 13))
    path = str(checkout / "bin")
    assert ".venv. Install" in failing_make(checkout, "demo", path=path)
    output = failing_make(checkout, "demo", f"PYTHON={other}", path=path)
    assert ".venv-keras3. Install" in output


def test_an_environment_of_another_python_than_is_asked_for_is_made_again(checkout):
    python_of(checkout / ".venv-keras3" / "bin" / "python", (3, 12))
    for name in (".requirements", ".package"):
        (checkout / ".venv-keras3" / name).touch()
    for minor, again in ((12, False), (13, True)):
        asked = python_of(checkout / "bin" / f"python3.{minor}", (3, minor))
        goal = ".venv-keras3/.requirements"
        result = run_make(checkout, "STACK=keras3", f"PYTHON={asked}", goal)
        assert ("lacks the modules venv" in result.stdout) == again, result.stdout


def test_make_says_that_ensurepip_is_missing(checkout):
    script = 'case "$2" in *ensurepip*) exit 1;; esac\n'
    python = fake_python(checkout / "bin" / "python3.11", script)
    output = failing_make(checkout, f"PYTHON={python}", "test")
    assert "lacks the modules venv and ensurepip" in output
    assert "apt-get install" in output
