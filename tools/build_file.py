"""Writes the Bazel file BUILD from the Python modules and what they import.

Run `make BUILD`, or `python -m tools.build_file` with `--check` to only compare.

One target per module, named by its path without `.py`; a package's `__init__.py` has
the package's name. Modules with a `__main__` part are binaries, `*_test.py` under
tests/ are tests. Dependencies are the modules of this repository that a module
imports, wherever the import stands, except under `if TYPE_CHECKING`; a test also
depends on the `conftest.py` of its directory and of those above.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping

SOURCE_DIRECTORIES = (
    "benchmarks",
    "keras_examples",
    "tests",
    "tfdpclip",
    "tff_tasks",
    "tools",
)
TEST_MAIN = "tools/pytest_main.py"

HEADER = '''\
"""Bazel targets: one per Python module.

Written by `make BUILD` from the modules and their imports, and checked by
tests/build_test.py. Packages from outside come from the Python that runs Bazel's
targets. Nothing is loaded from elsewhere, so that Bazel can query this file offline;
Bazel 8 and later need the rules_python package for the same rules.
"""

package(default_visibility = ["//visibility:public"])

licenses(["notice"])

exports_files(["LICENSE"])

# What pytest, and the tests about this repository, read.
filegroup(
    name = "project",
    srcs = glob([
        "*.in",
        "*.md",
        "*.overrides",
        "*.toml",
        "*.txt",
        "BUILD",
        "LICENSE",
        "Makefile",
        "setup.py",
    ]),
)
'''


@dataclasses.dataclass(frozen=True)
class Target:
    """One rule of a Bazel file that is about Python code."""

    rule: str
    name: str
    srcs: tuple[str, ...]
    deps: tuple[str, ...] = ()

    def render(self) -> str:
        lines = [f"{self.rule}(", f'    name = "{self.name}",']
        if self.rule != "py_test" and self.name.startswith("tests/"):
            lines += ["    testonly = True,"]
        lines += _render_list("srcs", self.srcs)
        if self.rule == "py_test":
            lines += _render_list("args", (self.srcs[0],))
            lines += _render_list("data", (":project",))
            lines += [f'    main = "{TEST_MAIN}",']
        lines += _render_list("deps", [f":{dep}" for dep in self.deps])
        return "\n".join([*lines, ")"]) + "\n"


def _render_list(attribute: str, values: Iterable[str]) -> list[str]:
    """Formats one attribute as the Bazel formatter does."""
    quoted = [f'"{value}"' for value in values]
    if not quoted:
        return []
    if len(quoted) == 1:
        return [f"    {attribute} = [{quoted[0]}],"]
    items = [f"        {value}," for value in quoted]
    return [f"    {attribute} = [", *items, "    ],"]


def find_modules(root: pathlib.Path) -> dict[str, str]:
    """Returns the path below `root` of every module, by its dotted name."""
    modules = {}
    for directory in SOURCE_DIRECTORIES:
        for path in sorted((root / directory).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if any(part.startswith(".") for part in parts):
                continue
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = path.relative_to(root).as_posix()
    return modules


def target_name(path: str) -> str:
    """Returns the name of the target whose source is at `path`."""
    return path.removesuffix(".py").removesuffix("/__init__")


class _Imports(ast.NodeVisitor):
    """Collects the modules of this repository that one module imports."""

    def __init__(self, module: str, modules: Mapping[str, str]):
        self._package = module
        if not modules[module].endswith("/__init__.py"):
            self._package = module.rpartition(".")[0]
        self._modules = modules
        self.found: set[str] = set()
        self.missing: set[str] = set()

    def _add(self, name: str) -> None:
        if name in self._modules:
            self.found.add(name)
        elif name.split(".")[0] in SOURCE_DIRECTORIES:
            self.missing.add(name)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = node.module or ""
        if node.level:
            parts = self._package.split(".")
            parents = parts[: len(parts) - (node.level - 1)]
            source = ".".join([*parents, source] if source else parents)
        for alias in node.names:
            submodule = f"{source}.{alias.name}"
            self._add(submodule if submodule in self._modules else source)

    def visit_If(self, node: ast.If) -> None:
        # Imports for type checkers alone do not run, and may be circular.
        if ast.unparse(node.test) not in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.generic_visit(node)
        else:
            for statement in node.orelse:
                self.visit(statement)


def _has_main(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.If)
        and ast.unparse(node.test).replace('"', "'") == "__name__ == '__main__'"
        for node in tree.body
    )


def _conftests(path: str, paths: Iterable[str]) -> Iterator[str]:
    for parent in pathlib.PurePosixPath(path).parents:
        if (candidate := str(parent / "conftest.py")) in paths:
            yield candidate


def expected_targets(root: pathlib.Path) -> list[Target]:
    """Returns the target that each module below `root` should have.

    Raises:
      ValueError: If a module imports one of this repository that does not exist.
    """
    modules = find_modules(root)
    paths = set(modules.values())
    targets = []
    for module, path in modules.items():
        tree = ast.parse((root / path).read_text(encoding="utf-8"), filename=path)
        imports = _Imports(module, modules)
        imports.visit(tree)
        if imports.missing:
            raise ValueError(
                f"{path} imports {', '.join(sorted(imports.missing))}, which is in "
                "no file here."
            )
        deps = {target_name(modules[name]) for name in imports.found}
        srcs = [path]
        if path.startswith("tests/") and path.endswith("_test.py"):
            rule = "py_test"
            srcs.append(TEST_MAIN)
            deps |= {target_name(conftest) for conftest in _conftests(path, paths)}
        elif _has_main(tree):
            rule = "py_binary"
        else:
            rule = "py_library"
        name = target_name(path)
        deps.discard(name)
        targets.append(Target(rule, name, tuple(srcs), tuple(sorted(deps))))
    return sorted(targets, key=lambda target: target.name)


def render(targets: Iterable[Target]) -> str:
    """Returns the text of a Bazel file with these targets."""
    return "\n".join([HEADER, *(target.render() for target in targets)])


def parse(text: str) -> list[Target]:
    """Reads the Python targets of a Bazel file, which has the syntax of Python."""
    targets = []
    for node in ast.parse(text).body:
        call = getattr(node, "value", None)
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        if not call.func.id.startswith("py_"):
            continue
        values = {
            keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords
        }
        deps = tuple(label.removeprefix(":") for label in values.get("deps", ()))
        targets.append(
            Target(call.func.id, values["name"], tuple(values["srcs"]), deps)
        )
    return targets


def find_cycle(targets: Iterable[Target]) -> list[str]:
    """Returns names of targets that depend on each other in a ring, if any do."""
    deps = {target.name: target.deps for target in targets}
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for dep in deps.get(name, ()):
            if cycle := search(dep, [*path, name]):
                return cycle
        done.add(name)
        return []

    for name in deps:
        if cycle := search(name, []):
            return cycle
    return []


def problems(root: pathlib.Path) -> list[str]:
    """Returns what is wrong with BUILD in `root`, one sentence each; [] if nothing."""
    path = root / "BUILD"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        expected = {target.name: target for target in expected_targets(root)}
    except ValueError as error:
        return [str(error)]
    actual: dict[str, Target] = {}
    found = []
    for target in parse(text):
        if target.name in actual:
            found.append(f"{target.name} has two targets.")
        actual[target.name] = target
    for name in sorted(expected.keys() - actual.keys()):
        found.append(f"{expected[name].srcs[0]} has no target.")
    for name in sorted(actual.keys() - expected.keys()):
        found.append(f"{name} is a target without a module.")
    for name in sorted(expected.keys() & actual.keys()):
        want, have = expected[name], actual[name]
        if want.rule != have.rule:
            found.append(f"{name} should be a {want.rule}, not a {have.rule}.")
        if want.srcs != have.srcs:
            found.append(f"{name} should have the sources {list(want.srcs)}.")
        for dep in sorted(set(want.deps) - set(have.deps)):
            found.append(f"{name} imports {dep} without depending on it.")
        for dep in sorted(set(have.deps) - set(want.deps)):
            found.append(f"{name} depends on {dep} without importing it.")
    if cycle := find_cycle(expected.values()):
        found.append(f"These import each other in a ring: {' -> '.join(cycle)}.")
    if not found and text != render(expected.values()):
        found.append("The text of BUILD is not what `make BUILD` writes.")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    arguments = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parents[1]
    if arguments.check:
        found = problems(root)
        print(
            "\n".join([*found, "Run `make BUILD`."] if found else ["BUILD is right."])
        )
        return 1 if found else 0
    targets = expected_targets(root)
    (root / "BUILD").write_text(render(targets), encoding="utf-8")
    print(f"Wrote BUILD with {len(targets)} targets.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
