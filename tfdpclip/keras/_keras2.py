"""What is of Keras 2, each behind a function that says what it is for.

Keras 2.14, and `tf_keras`, which goes on with it. Used through `_compat.py` alone;
`_keras3.py` has the same names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdpclip._variables import whole_number

#: Where Keras keeps what makes files of objects.
saving = tf.keras.saving

# Layers and models.

#: What every kind of batch normalisation is a subclass of.
BATCH_NORMALIZATION = tf.keras.layers.BatchNormalization.__mro__[1]


def layers_of(
    layer: Any, *, include_self: bool = True, recursive: bool = True
) -> Iterator[Any]:
    """A layer and the layers in it, parents first."""
    return layer._flatten_layers(recursive=recursive, include_self=include_self)


def names_of(variables: Sequence[tf.Variable]) -> list[str]:
    """The names of a model's variables, by which clip rules group them."""
    return [variable.name for variable in variables]


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


def cloned(model: Any, clone_function: Callable) -> Any:
    """A functional or Sequential model again, of the layers that a function gives."""
    return tf.keras.models.clone_model(model, clone_function=clone_function)


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


def is_adapted(layer: Any) -> bool:
    """Whether `adapt` gave a layer its statistics, in this process."""
    return bool(getattr(layer, "is_adapted", False))


def is_running_statistic(variable: tf.Variable) -> bool:
    """Whether a variable is a layer's average over the batches it has seen."""
    return variable.aggregation == tf.VariableAggregation.MEAN


@contextlib.contextmanager
def batch_statistics(layers: Sequence[Any]) -> Iterator[None]:
    """Has the averages of batch normalisations be those of one batch, for a while."""
    before = [(layer.momentum, layer.fused) for layer in layers]
    try:
        for layer in layers:
            layer.momentum = 0.0  # The averages become those of one batch.
            layer.fused = False  # Fused variances are not those of the batch.
        yield
    finally:
        for layer, (momentum, fused) in zip(layers, before, strict=True):
            layer.momentum, layer.fused = momentum, fused


# Training.


def compiled_loss_of(model: Any) -> Any:
    """What a model was compiled with as its loss, or None."""
    return getattr(model, "loss", None)


def share_of_replica(loss: Any) -> Any:
    """What a loss does with its mean over a replica's part: the trainer scales it."""
    return loss


#: Whether weights of one axis less than losses are spread over the last one.
SPREADS_WEIGHTS = True


def takes_weights_by_name(model: Any) -> bool:
    """Whether weights for several outputs may be a dict of the outputs' names."""
    del model
    return True


def is_compiled(model: Any) -> bool:
    """Whether a model has a loss of its own to compute."""
    return getattr(model, "compiled_loss", None) is not None


def unweighted_metrics(model: Any) -> list[Any]:
    """What a model was compiled with as `metrics`, or None, in a flat list."""
    compiled = getattr(model, "compiled_metrics", None)
    return tf.nest.flatten(getattr(compiled, "_user_metrics", None))


def tunes_steps_per_execution(model: Any) -> bool:
    """Whether how many steps run at a time changes while they run."""
    return getattr(model, "_steps_per_execution_tuner", None) is not None


#: Whether an execution goes on past the `steps_per_epoch` of `fit`.
OVERRUNS_EPOCHS = False


def steps_per_execution(model: Any) -> int:
    """How many steps run at a time, now."""
    variable = getattr(model, "_steps_per_execution", None)
    return 1 if variable is None else whole_number(variable)


def spare_logs(callback: Any) -> None:
    """Says that a callback reads no logs of batches, or takes tensors as they are.

    Keras would otherwise turn every metric into a number after every batch.
    """
    callback._supports_tf_logs = True


def compiles_by_xla(model: Any) -> bool:
    """Whether a model's steps are compiled by XLA."""
    return bool(getattr(model, "_jit_compile", None))


def has_own_function(model: Any) -> bool:
    """Whether something other than Keras's training function runs a model's steps."""
    made = type(model).make_train_function
    return made is not tf.keras.Model.make_train_function


#: Whether `load_model` reads SavedModel directories, and optimizers in them.
LOADS_SAVED_MODELS = True

#: Whether a training function has `train_step` in it when it is made, and does not look
#: it up when it is traced.
KEEPS_STEP = False


def step_function_of(train_function: Any) -> Any:
    """The `tf.function` that runs steps, of a model's `train_function`."""
    return train_function


# Optimizers.


class TrainerEntry:
    """How Keras reaches a private optimizer: its trainer calls `minimize`."""

    def apply_gradients(self, grads_and_vars, name=None, **kwargs):
        """Applies gradients that this optimizer made private; refuses all others."""
        grads_and_vars = list(grads_and_vars)
        kwargs.pop("experimental_aggregate_gradients", None)
        kwargs["skip_gradients_aggregation"] = True  # They are what all replicas have.
        with self._private_update([gradient for gradient, _ in grads_and_vars]):
            return super().apply_gradients(grads_and_vars, name=name, **kwargs)

    def _apply_released(self, grads_and_vars):
        self.apply_gradients(grads_and_vars)

    def _refuse_unapplied(self):
        """There is no loss that could have been forgotten."""


def refuse_distribution() -> None:
    """Keras 2 has no distribution but TensorFlow's."""


def refuse_workers() -> None:
    """Several workers are what Keras 2 trains on."""


def add_state(optimizer: Any, values: Sequence[Any], name: str) -> list[tf.Variable]:
    """Gives an optimizer variables that are saved with it, after its others."""
    made = [
        tf.Variable(value, trainable=False, name=f"{name}_{i}")
        for i, value in enumerate(values)
    ]
    optimizer._variables.extend(made)
    return made


def own_rate(optimizer: Any) -> Any:
    """The variable of a learning rate; None or something else if it has none."""
    return getattr(optimizer, "_learning_rate", None)


def place_of(optimizer: Any, variable: tf.Variable) -> int:
    """Which of the optimizer's slots belong to a variable."""
    return optimizer._index_dict[optimizer._var_key(variable)]


def moments_of(optimizer: Any, place: int) -> tuple[tf.Variable, tf.Variable]:
    """Adam's first and second moments of one variable."""
    return optimizer._momentums[place], optimizer._velocities[place]


def averages_of(optimizer: Any) -> list[tuple[Any, Any]]:
    """None: nothing of Keras 2 swaps weights and averages."""
    del optimizer
    return []


def swapped(weight: Any, average: Any) -> tuple[Any, Any]:
    """What nothing asks for here."""
    return average, weight


@contextlib.contextmanager
def updated_by(optimizer: Any, function: Callable) -> Iterator[None]:
    """Has an optimizer hand its gradients to a function, and count, for a while."""

    def update(grads_and_vars):
        function(grads_and_vars)
        return optimizer.iterations.assign_add(1)

    optimizer._internal_apply_gradients = update
    try:
        yield
    finally:
        unwatch_updates(optimizer)


def watch_updates(optimizer: Any, function: Callable) -> None:
    """Has an optimizer show its gradients to a function before each update."""

    def update(grads_and_vars):
        grads_and_vars = list(grads_and_vars)
        function(grads_and_vars)
        return type(optimizer)._internal_apply_gradients(optimizer, grads_and_vars)

    optimizer._internal_apply_gradients = update


def unwatch_updates(optimizer: Any) -> None:
    """Undoes `watch_updates`."""
    del optimizer._internal_apply_gradients
