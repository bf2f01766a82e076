"""Private symbols of other packages are used in few modules only."""

import ast
import functools
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("tfdpclip", "driver_kit", "keras_examples", "tff_tasks")
DOORS = {
    "tfdpclip/_tf_private.py": "TensorFlow's",
    "tfdpclip/keras/_keras2.py": "Keras 2's",
    "tfdpclip/keras/_keras3.py": "Keras 3's",
    "tfdpclip/federated/_tff.py": "TensorFlow Federated's",
    "tfdpclip/tensorflow_privacy.py": "tensorflow-privacy's queries'",
}
_PRIVATE_MODULES = ("tensorflow.python", "tensorflow.core", "keras.src", "keras.engine")
_BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}
# Public, and documented: an underscore keeps them apart from a tuple's fields.
_NAMED_TUPLES = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}


# All files of the packages.
PATHS = [
    str(path.relative_to(ROOT))
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
]


@functools.cache
def tree_of(path):
    return ast.parse((ROOT / path).read_text())


@functools.cache
def own_names():
    """The names that the packages define themselves."""
    names = set()
    for node in (node for path in PATHS for node in ast.walk(tree_of(path))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[-1])
    return names


def is_private(name, own):
    """Whether a name is a private symbol of another package."""
    dunder = name.startswith("__") and name != "__internal__"
    known = name in own or name in _NAMED_TUPLES
    return name.startswith("_") and not dunder and not known


def secrets_in(tree, own):
    """The private symbols that a module uses, with their lines."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr, own):
            found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.startswith(_PRIVATE_MODULES):
                found.append((node.lineno, module))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found += [(node.lineno, n) for n in names if n.startswith(_PRIVATE_MODULES)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in _BY_NAME and len(node.args) > 1:
                name = node.args[1]
                if isinstance(name, ast.Constant) and is_private(str(name.value), own):
                    found.append((node.lineno, ast.unparse(node)))
    return found


@pytest.mark.parametrize("path", PATHS)
def test_private_symbols_stay_behind_their_doors(path):
    if path not in DOORS:
        assert secrets_in(tree_of(path), own_names()) == []


@pytest.mark.parametrize("path", DOORS)
def test_every_door_has_something_behind_it_and_says_what_it_is_for(path):
    tree, own = tree_of(path), own_names()
    assert secrets_in(tree, own - {n for n in own if n.startswith("__")})
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    public = [f for f in functions if not f.name.startswith("_")]
    assert public
    assert [f.name for f in public if not ast.get_docstring(f)] == []


def test_the_rooms_behind_the_door_to_keras_have_the_same_names():
    """The same public functions with the same arguments, and the same constants."""
    found = []
    for room in ("_keras2", "_keras3"):
        tree = tree_of(f"tfdpclip/keras/{room}.py")
        functions = {
            node.name: [argument.arg for argument in node.args.args]
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        }
        others = {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        classes = {n.name for n in tree.body if isinstance(n, ast.ClassDef)}
        found.append((functions, classes, {n for n in others if n.isupper()} - {"_"}))
    own = {name for name in found[1][2] if name.startswith("_")}
    assert (found[0][0], found[0][1]) == (found[1][0], found[1][1])
    assert found[0][2] == found[1][2] - own


@pytest.mark.parametrize(
    "code",
    [
        "graph._get_function(name)",
        "import tensorflow.python.ops.while_v2",
        "from tensorflow.core.framework import types_pb2",
        "tf.__internal__.EagerTensor",
        "getattr(layer, '_inbound_nodes', None)",
        "model._flatten_layers()",
        "from keras.src.engine import data_adapter",
    ],
)
def test_a_private_symbol_is_found_however_it_is_reached(code):
    assert len(secrets_in(ast.parse(code), own_names())) == 1


@pytest.mark.parametrize(
    "code",
    [
        "self._model",
        "value.__float__",
        "tf.nest.map",
    ],
)
def test_what_is_ours_or_public_is_no_finding(code):
    assert secrets_in(ast.parse(code), own_names()) == []
