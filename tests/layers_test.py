"""Imports point one way; docs/architecture.md says which."""

import ast
import pathlib
import sys

import pytest

from tests import source_tree

ROOT = pathlib.Path(__file__).resolve().parents[1]
# From the bottom up. Layers on the same line do not import each other.
FLOORS = [
    ["kernel"],
    [
        "_version",
        "_docs",
        "_notes",
        "_registered",
        "_outside",
        "_keras_marks",
        "tensorflow_privacy",
    ]
    + ["_tf_private", "_sealed", "_progress", "_notebook"],
    ["_object_notes"],
    ["_variables"],
    ["_arguments", "_constants", "_devices", "files"],
    ["_schedules", "_data", "pictures"],
    ["correlated"],
    ["clipping", "sampling"],
    ["accounting"],
    ["noise"],
    ["mechanism", "gradients"],
    ["keras", "federated"],
    ["diagnostics"],
    ["testing", "tuning"],
    ["tfdpclip"],
    ["driver_kit"],
    ["tff_tasks", "keras_examples", "benchmarks"],
]
# The rooms of `gradients`, from the ground up.
ROOMS = ["errors", "graph", "flows", "loss", "forms", "rules", "proof"]
HEIGHT = {name: floor for floor, names in enumerate(FLOORS) for name in names}
# Timings of the benchmarks' programs are of the programs themselves.
BESIDE = {("benchmarks", "tff_tasks"), ("benchmarks", "keras_examples")}
PACKAGES = ("tfdpclip", "driver_kit", "tff_tasks", "keras_examples", "benchmarks")


def layer_of(module):
    """The layer of a module; None for modules outside these packages."""
    parts = module.split(".")
    if parts[0] not in PACKAGES:
        return None
    if parts[0] != "tfdpclip" or len(parts) == 1:
        return parts[0]
    return parts[1] if parts[1] in HEIGHT else "tfdpclip"


def imports_of(tree):
    """All modules that a file imports, by any form of import, with lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")[-1]
            if name in ("import_module", "__import__") and node.args:
                if isinstance(node.args[0], ast.Constant):
                    yield str(node.args[0].value), node.lineno


def wrong_ways(module, tree):
    """The imports of a module that point up, or to its own floor."""
    own = layer_of(module)
    found = []
    for name, line in imports_of(tree):
        other = layer_of(name)
        if other is None or other == own or (own, other) in BESIDE:
            continue
        if HEIGHT[other] >= HEIGHT[own]:
            found.append(f"{module}:{line} imports {name}")
    return found


def modules():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def test_every_layer_is_on_a_floor():
    found = {path.stem for path in (ROOT / "tfdpclip").glob("*.py")}
    found |= {p.parent.name for p in (ROOT / "tfdpclip").glob("*/__init__.py")}
    named = {name for names in FLOORS for name in names}
    assert found - {"__init__"} <= named
    assert named - set(PACKAGES) <= found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package):
    found = []
    for module, path in modules():
        if module.split(".")[0] == package:
            found += wrong_ways(module, ast.parse(path.read_text()))
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "from tfdpclip.keras import DPSGD",
        "from tfdpclip import federated",
        "def f():\n    import tfdpclip.testing.noise",
        "importlib.import_module('tfdpclip.tuning')",
        "from tff_tasks import program",
    ],
)
def test_an_import_that_points_up_is_found(code):
    assert wrong_ways("tfdpclip.gradients.engine", ast.parse(code))


def test_the_kernel_imports_nothing_else_of_the_library():
    allowed = {*sys.stdlib_module_names, "numpy", "tensorflow", "tfdpclip.kernel"}
    imported = {
        ".".join(name.split(".")[: 2 if name.startswith("tfdpclip") else 1])
        for module, path in modules()
        if module.startswith("tfdpclip.kernel")
        for name, _ in imports_of(ast.parse(path.read_text()))
    }
    assert "tensorflow" in imported and imported <= allowed


def test_the_kernel_can_be_read_in_an_hour():
    """docs/kernel.md gives the size; comments and blank lines are not counted."""
    lines = 0
    for module, path in modules():
        if module.startswith("tfdpclip.kernel"):
            code = ast.unparse(ast.parse(path.read_text()))
            lines += len(code.splitlines())
    assert 300 < lines <= 1600


def within_packages(root=ROOT):
    """The imports of each library module within its own package.

    Lazy imports, imports for type checkers and names in strings count. A name of the
    package itself is its `__init__`.
    """
    known = source_tree.find_modules(root)
    homes = {name: path.rpartition("/")[0] for name, path in known.items()}
    return {
        module: {
            name
            for name in source_tree.imports(path, known, root)
            if name != module and homes.get(name) == homes[module]
        }
        for module, path in known.items()
        if module.split(".")[0] == "tfdpclip"
    }


def circles(edges):
    """The groups of modules that all import each other, directly or indirectly."""
    reached = {}
    for module in edges:
        reached[module], pending = set(), set(edges[module])
        while pending:
            reached[module] |= pending
            pending = {n for m in pending for n in edges[m]} - reached[module]
    groups = {
        tuple(sorted(n for n in reached[module] if module in reached[n]))
        for module in edges
    }
    return sorted(groups - {()})


def test_modules_of_a_package_form_no_circle():
    edges = within_packages()
    assert "tfdpclip.sampling.events" in edges["tfdpclip.sampling.base"]
    assert circles(edges) == []


@pytest.mark.parametrize(
    "code",
    [
        "from tfdpclip.sampling.b import B",
        "from tfdpclip.sampling import b",
        "from . import b",
        "def f():\n    import tfdpclip.sampling.b",
        "importlib.import_module('tfdpclip.sampling.b')",
        "importlib.import_module(f'tfdpclip.sampling.{name}')",
        "from tfdpclip.sampling import B",
        "if TYPE_CHECKING:\n    from tfdpclip.sampling.b import B",
    ],
)
def test_a_circle_is_found_however_it_is_closed(code, tmp_path):
    package = tmp_path / "tfdpclip" / "sampling"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from tfdpclip.sampling.b import B")
    (package / "a.py").write_text(code)
    (package / "b.py").write_text("from tfdpclip.sampling import c")
    (package / "c.py").write_text("from tfdpclip.sampling import a")
    (found,) = circles(within_packages(tmp_path))
    assert {f"tfdpclip.sampling.{name}" for name in "abc"} <= set(found)


def test_the_page_names_every_layer():
    page = (ROOT / "docs" / "architecture.md").read_text()
    missing = [n for n in HEIGHT if not n.startswith("_") and f"`{n}`" not in page]
    assert missing == []
    mentioned = [
        path.name
        for path in (ROOT / "tfdpclip" / "gradients").rglob("*.py")
        if not path.name.startswith("_") and f"`{path.name}`" not in page
    ]
    # Small parts that the files named there use.
    assert set(mentioned) == {
        "backward.py",
        "op_copies.py",
        "errors.py",
        "known.py",
        "origins.py",
        "scale.py",
    }


def room_of(module):
    """The room of `gradients` that a module is in; above all of them if in none."""
    parts = module.split(".")
    if parts[:2] != ["tfdpclip", "gradients"]:
        return None
    return ROOMS.index(parts[2]) if parts[2:3] and parts[2] in ROOMS else len(ROOMS)


def ways_up(module, tree):
    """The imports of a module of `gradients` that lead to a folder above its own."""
    own = room_of(module)
    return [
        f"{module}:{line} imports {name}"
        for name, line in imports_of(tree)
        if own is not None and own < len(ROOMS) and (room_of(name) or 0) > own
    ]


def test_rooms_of_gradients_import_from_rooms_below_alone():
    found = [
        w for m, path in modules() for w in ways_up(m, ast.parse(path.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "from tfdpclip.gradients.proof import fallback",
        "def f():\n    from tfdpclip.gradients.engine import PerExampleGradients",
        "from tfdpclip.gradients import PerExampleGradients",
    ],
)
def test_a_way_up_between_rooms_is_found(code):
    assert len(ways_up("tfdpclip.gradients.rules.uses", ast.parse(code))) == 1


def test_every_room_of_gradients_has_a_head_page():
    rooms = {p.parent.name for p in (ROOT / "tfdpclip/gradients").glob("*/__init__.py")}
    assert rooms == set(ROOMS) - {"errors"}
    for room in rooms:
        text = (ROOT / "tfdpclip/gradients" / room / "__init__.py").read_text()
        for part in ("Comes in:", "Goes out:", "Invariant:", "To add:"):
            assert part in text, (room, part)
