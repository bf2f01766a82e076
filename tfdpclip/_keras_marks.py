"""Names and attributes that Keras writes into graphs, by which they are recognised.

This module needs neither Keras nor a graph.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

#: How the modules of Keras's own classes and functions begin.
MODULES = ("keras.", "tf_keras.")
#: The qualified names of its function that weights records by `class_weight`.
CLASS_WEIGHTS = (
    "_make_class_weight_map_fn.<locals>._class_weights_map_fn",
    "make_class_weight_map_fn.<locals>.class_weights_map_fn",
)
#: In that function, the tensor that has a weight for each class.
CLASS_WEIGHT_TENSOR = "class_weight_tensor"
#: The name scope in which Keras 2 weights and reduces losses.
WEIGHTED_LOSS = "weighted_loss"
#: The name scope in which Keras 3 computes, weights and reduces the compiled losses.
COMPILED_LOSS = "compile_loss"
#: The functions that Keras gives whole elements: that of a step, by its name.
STEP_FUNCTIONS = ("one_step_on_data", "run_step")


def calling(method: str) -> types.FrameType | None:
    """The frame of the running call of Keras's method of a model, or None.

    Args:
      method: the name, such as "fit". A user's function of that name does not count.
    """
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == method and module.startswith(MODULES):
            break
        frame = frame.f_back
    return frame


def variable_of_call(method: str, name: str) -> Any:
    """A local variable of the running call of Keras's method of a model, or None."""
    frame = calling(method)
    return None if frame is None else frame.f_locals.get(name)
