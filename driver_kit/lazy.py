"""Modules imported at their first use: --help and wrong flags wait for no TensorFlow.

``__getattr__ = lazy.submodules(__name__)`` in a package of programs makes ``from
package import module`` lazy. A program writes ``from driver_kit.lazy import tf`` where
a script would write ``import tensorflow as tf``, and uses `tf` in functions only; `tff`
is TensorFlow Federated, and `layers` is ``tf.keras.layers``.
"""

from __future__ import annotations

import importlib
import importlib.util
import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any


class _LazyModule(types.ModuleType):
    """A module that is imported when an attribute is first read or set.

    Args:
      name: the module.
      path: where in the module the attributes are, if not in the module itself.
    """

    def __init__(self, name: str, path: str | None = None):
        super().__init__(name)
        object.__setattr__(self, "_path", path)

    def _target(self) -> Any:
        module = importlib.import_module(self.__name__)
        return module if self._path is None else operator.attrgetter(self._path)(module)

    @property
    def __dict__(self) -> dict[str, Any]:
        # pytest's `monkeypatch` deletes an attribute that it did not see here.
        return vars(self._target())

    def __getattr__(self, name: str) -> Any:
        # Tools ask every object for names such as `__wrapped__`.
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return getattr(self._target(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._target(), name)


def submodules(package: str) -> Callable[[str], types.ModuleType]:
    """The `__getattr__` of a package, by which its modules are imported at first use.

    Args:
      package: the name of the package.

    Returns:
      A function from the name of a module to the module, not imported yet.
    """

    def module(name: str) -> types.ModuleType:
        full = f"{package}.{name}"
        if name.startswith("_") or importlib.util.find_spec(full) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return _LazyModule(full)

    return module


if TYPE_CHECKING:
    import tensorflow as tf
    import tensorflow_federated as tff
    from tensorflow.keras import layers
else:
    tf = _LazyModule("tensorflow")
    tff = _LazyModule("tensorflow_federated")
    layers = _LazyModule("tensorflow", "keras.layers")
