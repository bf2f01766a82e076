"""The private parts of Keras 2, each behind a function that names its purpose.

For Keras 2.14, and for `tf_keras`, its continuation. Only `_compat.py` imports this
file; `_keras3.py` has the same names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableSet, Sequence
from typing import Any

import tensorflow as tf

from tfdpclip._variables import whole_number

#: The Keras module that saves and loads objects.
saving = tf.keras.saving

# Layers and models.

#: The common base class of all kinds of batch normalisation.
BATCH_NORMALIZATION = tf.keras.layers.BatchNormalization.__mro__[1]


def layers_of(
    layer: Any, *, include_self: bool = True, recursive: bool = True
) -> Iterator[Any]:
    """A layer and its sublayers, parents first."""
    return layer._flatten_layers(recursive=recursive, include_self=include_self)


def names_of(variables: Sequence[tf.Variable]) -> list[str]:
    """The names of a model's variables, for the groups of clip rules."""
    return [variable.name for variable in variables]


def is_functional(layer: Any) -> bool:
    """Whether a model was made from symbolic tensors (the functional API)."""
    return bool(getattr(layer, "_is_graph_network", False))


def own_trainable(layer: Any) -> list[tf.Variable]:
    """A layer's variables, without its sublayers', that are not frozen one by one."""
    return layer._trainable_weights


def own_variables(layer: Any) -> list[tf.Variable]:
    """The variables of a layer, without its sublayers'; the trainable ones first."""
    return layer._trainable_weights + layer._non_trainable_weights


def freeze_own_variables(layer: Any) -> None:
    """Freezes a layer's own variables, while its sublayers train.

    The frozen variables go before the earlier frozen variables, to keep their order in
    files.
    """
    layer._non_trainable_weights[:0] = layer._trainable_weights
    del layer._trainable_weights[:]


def cloned(model: Any, clone_function: Callable) -> Any:
    """A copy of a functional or Sequential model, with layers that a function gives."""
    return tf.keras.models.clone_model(model, clone_function=clone_function)


def trains_itself(layer: Any) -> bool:
    """A layer's own `trainable`, whatever its sublayers say."""
    return layer._trainable


def set_trains_itself(layer: Any, value: bool) -> None:
    """Sets a layer's own `trainable`, and leaves its sublayers alone."""
    layer._trainable = value


def input_shapes_of(layer: Any) -> list:
    """The shapes that a layer of a functional model was called with."""
    return [node.input_shapes for node in layer._inbound_nodes]


def producer_of(tensor: Any) -> tuple[Any, int, int]:
    """The layer that made a tensor, the index of its call, and of its output."""
    layer, node_index, tensor_index = tensor._keras_history
    return layer, node_index, tensor_index


def inputs_of_call(layer: Any, node_index: int) -> Any:
    """The inputs of a layer in the call of this index."""
    return layer._inbound_nodes[node_index].keras_inputs


def forget_compilation(model: Any) -> None:
    """Makes a model compile and trace again before its next run."""
    model._reset_compile_cache()
    model._is_compiled = False


def random_states_of(model: Any) -> list[tf.Variable]:
    """The states of the random generators of a model's layers (dropout, for one)."""
    found = []
    for layer in layers_of(model):
        generator = getattr(
            getattr(layer, "_random_generator", None), "_generator", None
        )
        if generator is not None:
            found.append(generator.state)
    return found


def seeds_given_to(layer: Any) -> list[Any]:
    """A seed, or None where there is none, for each random generator of a layer."""
    generator = getattr(layer, "_random_generator", None)
    return [] if generator is None else [getattr(layer, "seed", None)]


def unseeded_states_of(model: Any) -> list[tf.Variable]:
    """The states of the random generators that have no given seed.

    Keras begins them by one of 10^9 numbers. Most layers have no such state: the
    kernels of their ops begin by the entropy of the operating system.
    """
    found = {}
    for layer in layers_of(model):
        if None not in seeds_given_to(layer):
            continue
        own = getattr(layer._random_generator, "_generator", None)
        if own is not None:
            found[id(own)] = own.state
    return list(found.values())


#: The least number that no entry of a generator's state reaches.
RANDOM_STATES = 2**63


def mask_of(tensor: Any) -> Any:
    """The mask that layers attached to a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


def is_adapted(layer: Any) -> bool:
    """Whether `adapt` gave a layer its statistics, in this process."""
    return bool(getattr(layer, "is_adapted", False))


def is_running_statistic(variable: tf.Variable) -> bool:
    """Whether a variable is a layer's running average over its batches."""
    return variable.aggregation == tf.VariableAggregation.MEAN


@contextlib.contextmanager
def batch_statistics(layers: Sequence[Any]) -> Iterator[None]:
    """For a while, makes running averages equal to the statistics of one batch."""
    before = [(layer.momentum, layer.fused) for layer in layers]
    try:
        for layer in layers:
            layer.momentum = 0.0  # The averages forget earlier batches.
            layer.fused = False  # Fused variances differ from the batch's.
        yield
    finally:
        for layer, (momentum, fused) in zip(layers, before, strict=True):
            layer.momentum, layer.fused = momentum, fused


# Training.


def compiled_loss_of(model: Any) -> Any:
    """The loss that a model was compiled with, or None."""
    return getattr(model, "loss", None)


def loss_weights_of(model: Any) -> Any:
    """The `loss_weights` that a model was compiled with, or None."""
    return getattr(getattr(model, "compiled_loss", None), "_user_loss_weights", None)


def share_of_replica(loss: Any) -> Any:
    """The share of a replica in a loss: here the loss, which the trainer scales."""
    return loss


#: Whether weights with one axis less than the losses are spread over the last axis.
SPREADS_WEIGHTS = True


def takes_weights_by_name(model: Any) -> bool:
    """Whether weights for several outputs may be a dict by output name."""
    del model
    return True


def is_compiled(model: Any) -> bool:
    """Whether a model has a loss of its own to compute."""
    return getattr(model, "compiled_loss", None) is not None


#: The line of Keras whose error means that a loss for each example was added.
ADDS_LOSSES = "tf.add_n(total_loss_mean_values)"


def unweighted_metrics(model: Any) -> list[Any]:
    """The `metrics` that a model was compiled with, in a flat list with None."""
    compiled = getattr(model, "compiled_metrics", None)
    return tf.nest.flatten(getattr(compiled, "_user_metrics", None))


#: The methods of a model whose files hold the variables of its metrics.
SAVES_METRICS = ("save", "save_weights")


def totals_of(model: Any) -> list[Any]:
    """The variables of a model's metrics, also of metrics that it does not list."""
    parts = [*model.metrics, *model.submodules]
    metrics = [part for part in parts if isinstance(part, tf.keras.metrics.Metric)]
    found = [variable for metric in metrics for variable in metric.variables]
    return list({id(variable): variable for variable in found}.values())


def tunes_steps_per_execution(model: Any) -> bool:
    """Whether Keras changes the number of steps per execution during training."""
    return getattr(model, "_steps_per_execution_tuner", None) is not None


#: Whether an execution may go past the `steps_per_epoch` of `fit`.
OVERRUNS_EPOCHS = False
#: Whether `fit` runs executions of several steps on several replicas.
EXECUTES_ON_REPLICAS = True


def steps_per_execution(model: Any) -> int:
    """The current number of steps per execution."""
    variable = getattr(model, "_steps_per_execution", None)
    return 1 if variable is None else whole_number(variable)


#: Functions that run a step, or a loop of as many as an execution has when they run.
FUNCTIONS = ("train_function", "test_function", "predict_function")


@contextlib.contextmanager
def executing(model: Any, steps: int | None, loops: MutableSet[Any]) -> Iterator[None]:
    """For a while, gives a compiled model another number of steps per execution.

    Functions made for single steps would run one of the steps. `loops` remembers the
    functions that run any number of steps: the next call traces none of them again.
    """
    before = steps_per_execution(model)
    if steps in (None, before):
        yield
        return
    single = {n: f for n in FUNCTIONS if (f := getattr(model, n)) not in loops}
    model.__dict__.update(dict.fromkeys(single))
    model._steps_per_execution.assign(steps)
    try:
        yield
    finally:
        if before == 1:  # As `train_on_batch` and generators need it.
            model._steps_per_execution.assign(1)
            made = {n: f for n in FUNCTIONS if (f := getattr(model, n))}
            loops.update(made.values())
            model.__dict__.update(single | made)


def spare_logs(callback: Any) -> None:
    """Marks a callback that reads no logs of batches, or accepts tensors in them.

    For unmarked callbacks, Keras converts every metric to a number after every batch.
    """
    callback._supports_tf_logs = True


def compiles_by_xla(model: Any) -> bool:
    """Whether XLA compiles a model's steps."""
    return bool(getattr(model, "_jit_compile", None))


@contextlib.contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """For a while, makes and traces a model's training functions without XLA."""
    before = model._jit_compile
    model._jit_compile = False  # The property's setter would forget all functions.
    try:
        yield
    finally:
        model._jit_compile = before


def has_own_function(model: Any) -> bool:
    """Whether a model overrides Keras's training function."""
    made = type(model).make_train_function
    return made is not tf.keras.Model.make_train_function


#: Whether `load_model` reads SavedModel directories, and optimizers in them.
LOADS_SAVED_MODELS = True

#: Whether a training function binds `train_step` when the function is made, and not
#: when it is traced.
KEEPS_STEP = False


def step_function_of(train_function: Any) -> Any:
    """The `tf.function` of a model's `train_function` that runs steps."""
    return train_function


# Optimizers.


class TrainerEntry:
    """Keras's way to call a private optimizer: its trainer calls `minimize`."""

    def apply_gradients(self, grads_and_vars, name=None, **kwargs):
        """Applies private gradients of this optimizer; refuses any other gradients."""
        grads_and_vars = list(grads_and_vars)
        kwargs.pop("experimental_aggregate_gradients", None)
        kwargs["skip_gradients_aggregation"] = True  # All replicas have the sums.
        with self._private_update([gradient for gradient, _ in grads_and_vars]):
            return super().apply_gradients(grads_and_vars, name=name, **kwargs)

    def _apply_released(self, grads_and_vars):
        self.apply_gradients(grads_and_vars)

    def _refuse_unapplied(self):
        """Does nothing: Keras 2 hands over no loss that could be forgotten."""


def refuse_distribution() -> None:
    """Does nothing: Keras 2 has no distribution except TensorFlow's."""


def refuse_workers() -> None:
    """Does nothing: Keras 2 trains on several workers."""


def add_state(optimizer: Any, values: Sequence[Any], name: str) -> list[tf.Variable]:
    """Adds saved variables to an optimizer, after the variables that it has."""
    made = [
        tf.Variable(value, trainable=False, name=f"{name}_{i}")
        for i, value in enumerate(values)
    ]
    optimizer._variables.extend(made)
    return made


def own_rate(optimizer: Any) -> Any:
    """The variable of a learning rate; None or an object if there is no variable."""
    return getattr(optimizer, "_learning_rate", None)


def known_to(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """The variables, of a list, that a built optimizer was built for."""
    known = optimizer._index_dict
    return [v for v in variables if optimizer._var_key(v) in known]


def place_of(optimizer: Any, variable: tf.Variable) -> int:
    """The index of a variable's slots in the optimizer."""
    return optimizer._index_dict[optimizer._var_key(variable)]


def moments_of(optimizer: Any, place: int) -> tuple[tf.Variable, tf.Variable]:
    """Adam's first and second moments of a variable."""
    return optimizer._momentums[place], optimizer._velocities[place]


def averages_of(optimizer: Any) -> list[tuple[Any, Any]]:
    """An empty list: Keras 2 never swaps weights and averages."""
    del optimizer
    return []


def swapped(weight: Any, average: Any) -> tuple[Any, Any]:
    """A weight and its average, swapped; Keras 2 never calls this."""
    return average, weight


@contextlib.contextmanager
def updated_by(optimizer: Any, function: Callable) -> Iterator[None]:
    """For a while, gives an optimizer's gradients to a function and counts the step."""

    def update(grads_and_vars):
        function(grads_and_vars)
        return optimizer.iterations.assign_add(1)

    optimizer._internal_apply_gradients = update
    try:
        yield
    finally:
        unwatch_updates(optimizer)


def watch_updates(optimizer: Any, function: Callable) -> None:
    """Shows the gradients of each update to a function, before the update."""

    def update(grads_and_vars):
        grads_and_vars = list(grads_and_vars)
        function(grads_and_vars)
        return type(optimizer)._internal_apply_gradients(optimizer, grads_and_vars)

    optimizer._internal_apply_gradients = update


def unwatch_updates(optimizer: Any) -> None:
    """Undoes `watch_updates`."""
    del optimizer._internal_apply_gradients
