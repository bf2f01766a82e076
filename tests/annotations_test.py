"""Public functions annotate their arguments and results, and the package is typed."""

from __future__ import annotations

import importlib
import inspect
import pathlib

import pytest

import tfdpclip

MODULES = [name for name in tfdpclip.__all__ if name.islower() and name[0] != "_"]
# Keras calls these, and documents their arguments.
_KERAS_HOOKS = ("on_", "call", "build", "compute_output", "from_config")


def public_functions(module):
    """Qualified names and functions, with the public methods of public classes."""
    found = importlib.import_module(f"tfdpclip.{module}")
    for name in found.__all__:
        value = getattr(found, name)
        if inspect.isclass(value):
            for method, function in vars(value).items():
                function = getattr(function, "__func__", function)
                if isinstance(function, property):
                    function = function.fget
                hook = method.startswith(_KERAS_HOOKS)
                if inspect.isfunction(function) and method[0] != "_" and not hook:
                    yield f"{name}.{method}", function
                if method == "__init__" and inspect.isfunction(function):
                    yield f"{name}.{method}", function
        elif inspect.isfunction(value):
            yield name, value


def missing(function):
    """The arguments without annotation, and the result if it has none."""
    function = inspect.unwrap(function)
    given = function.__annotations__
    names = [
        name
        for i, name in enumerate(inspect.signature(function).parameters)
        if not (i == 0 and name in ("self", "cls"))
    ]
    wanted = names if function.__name__ == "__init__" else [*names, "return"]
    return [name for name in wanted if name not in given]


@pytest.mark.parametrize("module", MODULES)
def test_public_functions_are_annotated(module):
    if module == "federated":
        pytest.importorskip("tensorflow_federated")
    bare = {
        name: left_out
        for name, function in public_functions(module)
        if (left_out := missing(function))
    }
    assert not bare


def test_what_is_missing_is_seen():
    class Thing:
        def method(self, x: int, y, *, z=1) -> None:
            del x, y, z

    assert missing(Thing.method) == ["y", "z"]
    assert missing(lambda x: x) == ["x", "return"]


def test_type_checkers_may_believe_the_annotations():
    assert (pathlib.Path(tfdpclip.__file__).parent / "py.typed").exists()
