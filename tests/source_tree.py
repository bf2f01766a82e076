"""The Python files of this repository, and their imports."""

from __future__ import annotations

import ast
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
#: The packages that `pip install` installs: the library, the drivers and their kit.
INSTALLED = ("tfdpclip", "driver_kit", "tff_tasks", "keras_examples")
PACKAGES = (*INSTALLED, "benchmarks", "tests", "tools")


@functools.cache
def find_modules(root: pathlib.Path = ROOT) -> dict[str, str]:
    """The path below `root` of every module, by its dotted name."""
    modules = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = path.relative_to(root).as_posix()
    return modules


@functools.cache
def read(path: str, root: pathlib.Path = ROOT) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse((root / path).read_text(encoding="utf-8"), filename=path)


def has_command_line(tree: ast.Module) -> bool:
    """Whether the module can be run as a program."""
    return any(
        isinstance(node, ast.If)
        and ast.unparse(node.test).replace('"', "'") == "__name__ == '__main__'"
        for node in tree.body
    )


def programs(root: pathlib.Path = ROOT) -> list[str]:
    """The modules with a command line, except those of tests and tools."""
    return [
        name
        for name, path in find_modules(root).items()
        if not path.startswith(("tests/", "tools/"))
        and has_command_line(read(path, root))
    ]


def imports(
    path: str, known: dict[str, str], root: pathlib.Path = ROOT, strings: bool = True
) -> dict[str, int]:
    """The modules of this repository that a module imports, with the line.

    Imports count anywhere in the file, also those for type checkers alone. A string
    counts too if it is the whole name of a module, or the beginning of a name
    (``f"tfdpclip.{name}"``): `import_module` or ``python -m`` gets it.

    Args:
      path: the module's file, below `root`.
      known: `find_modules()`.
      root: the repository.
      strings: whether strings count.

    Returns:
      Lines by dotted name: a module of `known`, or as much of it as is written.
    """
    tree, found = read(path, root), {}
    parents = path.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                above = parents[: len(parents) - node.level + 1]
                source = ".".join([*above, source] if source else above)
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                found.setdefault(
                    submodule if submodule in known else source, node.lineno
                )
        elif strings and isinstance(node, ast.Constant) and type(node.value) is str:
            name = node.value.rstrip(".")
            if re.fullmatch(r"(\w+\.)+\w*", node.value) and name in known:
                found.setdefault(name, node.lineno)
    return {
        name: line for name, line in found.items() if name.split(".")[0] in PACKAGES
    }


def missing_imports(path: str) -> list[str]:
    """The imported modules and names of this repository that do not exist.

    An installed copy of the package would hide this error from Python.
    """
    known, found = find_modules(), []
    for node in ast.walk(read(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
            if node.module in known:
                bound = _bound(known[node.module])
                names += [
                    f"{node.module}.{alias.name}"
                    for alias in node.names
                    if alias.name not in {"*", *bound}
                ]
        ours = [name for name in names if name.split(".")[0] in PACKAGES]
        found += [f"{path}:{node.lineno} {n}" for n in ours if n not in _packages()]
    return found


@functools.cache
def _packages() -> set[str]:
    """The modules and their packages, which may have no __init__.py."""
    known = find_modules()
    return {name.rpartition(".")[0] for name in known} | set(known)


@functools.cache
def _bound(path: str) -> set[str]:
    """The names that a module binds anywhere; lazy names are strings."""
    names = set()
    for node in ast.walk(read(path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names
