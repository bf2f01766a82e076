"""Every symbol of TensorFlow Federated has a place in 0.87 and on its main branch."""

import ast
import functools
import importlib
import pathlib
import subprocess
import sys

import pytest

from tests import source_tree, tff_head

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLE = "tfdpclip/federated/_tff.py"
#: Written as a user's program: `import tensorflow_federated as tff`, public names only.
PROGRAM = "tff_tasks/engine_tff.py"
#: Programs import the package at its first use; this module uses none of its names.
LAZY = "driver_kit/lazy.py"
PACKAGES = {"tensorflow_federated", "federated_language"}


def table(tree):
    """The places in 0.87 and on the main branch of the symbols that a door names."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("_kept", "_moved"):
                places = [ast.literal_eval(argument) for argument in node.args]
                package = "federated_language"
                if node.func.id == "_kept":
                    package = "tensorflow_federated"
                found[places[0]] = f"{package}.{places[-1]}"
    return found


def names_of_program(tree):
    """The names below `tff` that a program uses, with their modules."""
    chains = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *names = ast.unparse(node).split(".")
            if root == "tff":
                chains.add(".".join(names))
    return chains


def packages_of(tree):
    """The packages that a module imports, by any form of import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call) and node.args:
            if ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
                yield ast.unparse(node.args[0]).strip("'\"").split(".")[0]


PLACES = table(source_tree.read(TABLE))
HEAD = {f"tensorflow_federated.{name}" for name in tff_head.STAYED} | {
    f"federated_language.{name}" for name in tff_head.MOVED
}


def symbol(place):
    package, _, names = place.partition(".")
    return functools.reduce(
        lambda found, name: getattr(found, name),
        names.split("."),
        importlib.import_module(package),
    )


def test_the_table_is_found():
    assert len(PLACES) > 40
    assert PLACES["federated_sum"] == "federated_language.federated_sum"
    assert PLACES["types.contains"] == "federated_language.framework.type_contains"


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_federated") is None,
    reason="without TensorFlow Federated",
)
def test_the_table_gives_the_symbols_of_the_installed_release():
    from tfdpclip.federated import _tff

    if not _tff.tff.__version__.startswith("0.87."):
        pytest.skip(f"TensorFlow Federated {_tff.tff.__version__} is installed")
    for place in PLACES:
        symbol(f"tensorflow_federated.{place}")
    assert _tff.federated_sum is _tff.tff.federated_sum


def test_the_main_branch_has_every_place_of_the_table():
    assert sorted(set(PLACES.values()) - HEAD) == []


def test_the_main_branch_has_every_name_of_the_program():
    used = names_of_program(source_tree.read(PROGRAM))
    assert "learning.models.from_keras_model" in used
    modules = {name.rpartition(".")[0] for name in used}
    members = {f"{name}.DATASET_ITERATOR" for name in ["learning.LoopImplementation"]}
    assert sorted(used - modules - members - tff_head.STAYED) == []


def test_the_list_holds_only_what_is_used():
    used = names_of_program(source_tree.read(PROGRAM))
    used = {f"tensorflow_federated.{name}" for name in used} | set(PLACES.values())
    assert sorted(HEAD - used) == []
    assert set(tff_head.DIFFERENCES) <= tff_head.STAYED | tff_head.MOVED


def test_the_installed_federated_language_has_its_names():
    pytest.importorskip("federated_language")
    found = [symbol(f"federated_language.{name}") for name in tff_head.MOVED]
    assert found and None not in found


def test_one_module_imports_tensorflow_federated():
    importing = {
        path
        for path in source_tree.find_modules().values()
        if path.split("/")[0] in source_tree.INSTALLED
        and PACKAGES & set(packages_of(source_tree.read(path)))
    }
    assert importing == {TABLE, PROGRAM, LAZY}


@pytest.mark.parametrize(
    "code",
    [
        "import tensorflow_federated as tff",
        "from tensorflow_federated import learning",
        "def f():\n    from federated_language.program import materialize_value",
        "importlib.import_module('federated_language')",
    ],
)
def test_an_import_of_it_is_found_in_any_form(code):
    assert PACKAGES & set(packages_of(ast.parse(code)))


# A release without some names: a module in place of TensorFlow Federated.
_BARE = """
import sys, types
bare = types.ModuleType("tensorflow_federated")
bare.__version__ = "9.9"
sys.modules["tensorflow_federated"] = bare
sys.modules["federated_language"] = None
try:
    import tfdpclip.federated
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_release_without_a_name_is_refused_by_the_name():
    pytest.importorskip("grpc")
    done = subprocess.run(
        [sys.executable, "-c", _BARE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("TensorFlow Federated 9.9 lacks ")
    for place, now in PLACES.items():
        assert f"tensorflow_federated.{place}" in done.stdout
        assert now in done.stdout
