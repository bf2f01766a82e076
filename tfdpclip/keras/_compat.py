"""What depends on a version of Keras, each behind a function that says what it is for.

The only module that uses what Keras keeps private. A test refuses any other. What Keras
writes into graphs is in `tfdpclip/_keras_marks.py`, which needs no Keras.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

# Layers and models.


def layers_of(
    layer: Any, *, include_self: bool = True, recursive: bool = True
) -> Iterator[Any]:
    """A layer and the layers in it, parents first."""
    return layer._flatten_layers(recursive=recursive, include_self=include_self)


def is_functional(layer: Any) -> bool:
    """Whether a model was made of the tensors between its inputs and outputs."""
    return bool(getattr(layer, "_is_graph_network", False))


def own_trainable(layer: Any) -> list[tf.Variable]:
    """The variables of a layer, not of its parts, that are not frozen one by one."""
    return layer._trainable_weights


def own_variables(layer: Any) -> list[tf.Variable]:
    """The variables of a layer, not of its parts; those that can train first."""
    return layer._trainable_weights + layer._non_trainable_weights


def freeze_own_variables(layer: Any) -> None:
    """Freezes a layer's own variables, while parts of it train.

    They go before the others, so that their order in files stays.
    """
    layer._non_trainable_weights[:0] = layer._trainable_weights
    del layer._trainable_weights[:]


def trains_itself(layer: Any) -> bool:
    """A layer's own `trainable`, whatever its parts'."""
    return layer._trainable


def set_trains_itself(layer: Any, value: bool) -> None:
    """Sets a layer's own `trainable` and leaves its parts alone."""
    layer._trainable = value


def input_shapes_of(layer: Any) -> list:
    """The shapes that a layer of a functional model was called with."""
    return [node.input_shapes for node in layer._inbound_nodes]


def producer_of(tensor: Any) -> tuple[Any, int, int]:
    """The layer that made a tensor, the number of its call, and of its output."""
    layer, node_index, tensor_index = tensor._keras_history
    return layer, node_index, tensor_index


def inputs_of_call(layer: Any, node_index: int) -> Any:
    """What a layer was called with, in the call of this number."""
    return layer._inbound_nodes[node_index].keras_inputs


def forget_compilation(model: Any) -> None:
    """Has a model traced, and compiled, again before it next runs."""
    model._reset_compile_cache()
    model._is_compiled = False


def random_states_of(model: Any) -> list[tf.Variable]:
    """The states of the generators of a model's layers: of dropout, for one."""
    found = []
    for layer in layers_of(model):
        generator = getattr(
            getattr(layer, "_random_generator", None), "_generator", None
        )
        if generator is not None:
            found.append(generator.state)
    return found


def mask_of(tensor: Any) -> Any:
    """The mask that layers have tied to a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


# Training.


def tunes_steps_per_execution(model: Any) -> bool:
    """Whether how many steps run at a time changes while they run."""
    return getattr(model, "_steps_per_execution_tuner", None) is not None


def steps_per_execution(model: Any) -> int:
    """How many steps run at a time, now."""
    variable = getattr(model, "_steps_per_execution", None)
    return 1 if variable is None else int(variable.numpy())


def compiles_by_xla(model: Any) -> bool:
    """Whether a model's steps are compiled by XLA."""
    return bool(getattr(model, "_jit_compile", None))


# Optimizers.


def own_rate(optimizer: Any) -> Any:
    """The variable of a learning rate; None or something else if it has none."""
    return getattr(optimizer, "_learning_rate", None)


def place_of(optimizer: Any, variable: tf.Variable) -> int:
    """Which of the optimizer's slots belong to a variable."""
    return optimizer._index_dict[optimizer._var_key(variable)]


def moments_of(optimizer: Any, place: int) -> tuple[tf.Variable, tf.Variable]:
    """Adam's first and second moments of one variable."""
    return optimizer._momentums[place], optimizer._velocities[place]


def update(optimizer: Any, grads_and_vars: Iterable[tuple]) -> Any:
    """Updates variables as the optimizer's own class does."""
    return type(optimizer)._internal_apply_gradients(optimizer, grads_and_vars)


def update_by(optimizer: Any, function: Callable) -> None:
    """Has an optimizer hand what it would update with to a function instead."""
    optimizer._internal_apply_gradients = function


def update_ordinarily(optimizer: Any) -> None:
    """Undoes `update_by`."""
    del optimizer._internal_apply_gradients


@contextlib.contextmanager
def updated_by(optimizer: Any, function: Callable) -> Iterator[None]:
    """`update_by` for a while."""
    update_by(optimizer, function)
    try:
        yield
    finally:
        update_ordinarily(optimizer)
