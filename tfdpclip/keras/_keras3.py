"""The private parts of Keras 3, each behind a function that names its purpose.

For the TensorFlow backend. Only `_compat.py` imports this file; `_keras2.py` has the
same names.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, MutableSet, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import saving  # noqa: F401
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.losses.loss import scale_loss_for_distribution
from keras.src.models.functional import Functional
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

from tfdpclip._docs import see
from tfdpclip._variables import path_of, unwrapped
from tfdpclip.keras.held_loss import HeldLoss

if keras.config.backend() != "tensorflow":
    raise ImportError(
        "tfdpclip.keras needs the TensorFlow backend of Keras, and Keras uses "
        f"{keras.config.backend()!r}: set KERAS_BACKEND=tensorflow before Keras is "
        "imported."
    )

# Layers and models.


def layers_of(
    layer: Any, *, include_self: bool = True, recursive: bool = True
) -> Iterator[Any]:
    """A layer and its sublayers, parents first; an op like `x + 3` has no layers."""
    if not isinstance(layer, keras.layers.Layer):
        return iter(())
    return iter(layer._flatten_layers(recursive=recursive, include_self=include_self))


#: The common base class of all kinds of batch normalisation.
BATCH_NORMALIZATION = keras.layers.BatchNormalization


def names_of(variables: Sequence[Any]) -> list[str]:
    """The names of a model's variables, for the groups of clip rules.

    A name comes without its number, and without the model's name, which Keras 3 puts
    before the layer's name.
    """
    names = [path_of(variable) for variable in variables]
    models = {name.partition("/")[0] for name in names}
    if len(models) == 1 and all(name.count("/") > 1 for name in names):
        names = [name.partition("/")[2] for name in names]
    return names


def is_functional(layer: Any) -> bool:
    """Whether a model was made from symbolic tensors (the functional API)."""
    if isinstance(layer, keras.Sequential):
        return layer._functional is not None
    return isinstance(layer, Functional)


def own_trainable(layer: Any) -> list[Any]:
    """A layer's variables, without its sublayers', that are not frozen one by one."""
    return layer._trainable_variables


def own_variables(layer: Any) -> list[Any]:
    """The variables of a layer, without its sublayers'; the trainable ones first."""
    return layer._trainable_variables + layer._non_trainable_variables


def freeze_own_variables(layer: Any) -> None:
    """Freezes a layer's own variables, while its sublayers train.

    The frozen variables go before the earlier frozen variables, to keep their order in
    files.
    """
    for variable in layer._trainable_variables:
        variable.trainable = False
    layer._non_trainable_variables[:0] = layer._trainable_variables
    del layer._trainable_variables[:]


def cloned(model: Any, clone_function: Callable) -> Any:
    """A copy of a functional or Sequential model, with layers that a function gives."""

    def call(layer, *args, **kwargs):
        # Keras 3 notes a mask of None for every layer that could have taken a mask.
        if kwargs.get("mask") is None:
            kwargs.pop("mask", None)
        return layer(*args, **kwargs)

    options = {} if isinstance(model, keras.Sequential) else {"call_function": call}
    return keras.models.clone_model(model, clone_function=clone_function, **options)


def trains_itself(layer: Any) -> bool:
    """A layer's own `trainable`, whatever its sublayers say."""
    return layer._trainable


def set_trains_itself(layer: Any, value: bool) -> None:
    """Sets a layer's own `trainable`, and leaves its sublayers alone."""
    layer._trainable = value


def input_shapes_of(layer: Any) -> list:
    """The shapes that a layer of a functional model was called with."""
    return [
        tuple(tensor.shape)
        for node in layer._inbound_nodes
        for tensor in node.input_tensors
    ]


def producer_of(tensor: Any) -> tuple[Any, int, int]:
    """The layer that made a tensor, the index of its call, and of its output."""
    return tuple(tensor._keras_history)


def inputs_of_call(layer: Any, node_index: int) -> Any:
    """The inputs of a layer in the call of this index."""
    return layer._inbound_nodes[node_index].input_tensors


def forget_compilation(model: Any) -> None:
    """Makes a model compile and trace again before its next run."""
    model.__dict__.update(dict.fromkeys(FUNCTIONS))
    model.compiled = False


def random_states_of(model: Any) -> list[tf.Variable]:
    """The states of the random generators of a model's layers (dropout, for one)."""
    return [
        generator.state
        for layer in layers_of(model)
        for generator in layer._seed_generators
    ]


def seeds_given_to(layer: Any) -> list[Any]:
    """A seed, or None where there is none, for each random generator of a layer."""
    return [generator._initial_seed for generator in layer._seed_generators]


def unseeded_states_of(model: Any) -> list[tf.Variable]:
    """The states of the random generators that have no given seed.

    Keras begins them by one of 10^9 numbers. The generator of calls of `keras.random`
    that name no generator is among them, if it exists.
    """
    found = [g for layer in layers_of(model) for g in layer._seed_generators]
    common = get_global_attribute(GLOBAL_SEED_GENERATOR)
    found += [] if common is None else [common]
    unique = {id(g): unwrapped(g.state) for g in found if g._initial_seed is None}
    return list(unique.values())


#: The least number that no entry of a generator's state reaches: Keras takes entries
#: modulo this number.
RANDOM_STATES = tf.int32.max - 1


def mask_of(tensor: Any) -> Any:
    """The mask that layers attached to a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


def is_adapted(layer: Any) -> bool:
    """Whether a layer has statistics that were not given to its constructor.

    Vocabularies that were set later count as adapted: Keras 3 does not tell them apart.
    """
    layers = keras.layers
    if isinstance(layer, layers.Normalization):
        mean = getattr(layer, "adapt_mean", None)
        if layer.input_mean is not None or mean is None:
            return False
        unit = layer.adapt_variance.numpy()
        return bool(np.any(mean.numpy() != 0) or np.any(unit != 1))
    if isinstance(layer, layers.Discretization):
        return layer.num_bins is not None and bool(layer.bin_boundaries)
    if isinstance(layer, layers.TextVectorization):
        layer = layer._lookup_layer
    if isinstance(layer, (layers.StringLookup, layers.IntegerLookup)):
        known = layer.get_vocabulary(include_special_tokens=False)
        return bool(len(known)) and not layer._has_input_vocabulary
    return False


_RUNNING = ("moving_mean", "moving_variance", "renorm_mean", "renorm_stddev")


def is_running_statistic(variable: tf.Variable) -> bool:
    """Whether a variable is a layer's running average over its batches."""
    # Keras 3 marks the averages of its own layers only by their names.
    name = variable.name.removesuffix(":0").rpartition("/")[2]
    return variable.aggregation == tf.VariableAggregation.MEAN or name in _RUNNING


@contextlib.contextmanager
def batch_statistics(layers: Sequence[Any]) -> Iterator[None]:
    """For a while, makes running averages equal to the statistics of one batch."""
    before = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            layer.momentum = 0.0
        yield
    finally:
        for layer, momentum in zip(layers, before, strict=True):
            layer.momentum = momentum


# Training.


def compiled_loss_of(model: Any) -> Any:
    """The loss that a model was compiled with, or None."""
    # `loss` is a method of every model; the compiled loss is an attribute.
    return getattr(model, "__dict__", {}).get("loss")


def loss_weights_of(model: Any) -> Any:
    """The `loss_weights` that a model was compiled with, or None."""
    return getattr(getattr(model, "_compile_loss", None), "_user_loss_weights", None)


def share_of_replica(loss: Any) -> Any:
    """The share of a replica in a loss, from the mean over the replica's examples."""
    return scale_loss_for_distribution(loss)


#: Whether weights with one axis less than the losses are spread over the last axis.
SPREADS_WEIGHTS = False


def takes_weights_by_name(model: Any) -> bool:
    """Whether weights for several outputs may be a dict by output name."""
    return isinstance(getattr(model, "_outputs_struct", {}), dict)


def is_compiled(model: Any) -> bool:
    """Whether a model has a loss of its own to compute."""
    return bool(getattr(model, "compiled", False))


#: Nothing: Keras adds losses of any shapes.
ADDS_LOSSES = None


def unweighted_metrics(model: Any) -> list[Any]:
    """The `metrics` that a model was compiled with, in a flat list with None."""
    compiled = getattr(model, "_compile_metrics", None)
    return tf.nest.flatten(getattr(compiled, "_user_metrics", None))


#: The methods of a model whose files hold the variables of its metrics: the tree that
#: `OrbaxCheckpoint` saves. Other files of Keras 3 hold none.
SAVES_METRICS = ("get_state_tree",)


def totals_of(model: Any) -> list[Any]:
    """The variables of a model's metrics."""
    return list(model.metrics_variables)


def tunes_steps_per_execution(model: Any) -> bool:
    """Whether Keras changes the number of steps per execution during training."""
    return not isinstance(model.steps_per_execution, int)


#: Whether an execution may go past the `steps_per_epoch` of `fit`: in Keras 3 only the
#: end of the data stops an execution.
OVERRUNS_EPOCHS = True
#: Whether `fit` runs executions of several steps on several replicas.
EXECUTES_ON_REPLICAS = False


def steps_per_execution(model: Any) -> int:
    """The current number of steps per execution."""
    return int(model.steps_per_execution)


#: Functions that run the steps of an execution.
FUNCTIONS = ("train_function", "test_function", "predict_function")


@contextlib.contextmanager
def executing(model: Any, steps: int | None, loops: MutableSet[Any]) -> Iterator[None]:
    """Gives a compiled model another number of steps per execution.

    The number stays, since each function is traced for one number. `train_on_batch`
    and its like read one batch with any.
    """
    del loops
    if steps not in (None, steps_per_execution(model)):
        model.steps_per_execution = steps
        model.__dict__.update(dict.fromkeys(FUNCTIONS))
    yield


def spare_logs(callback: Any) -> None:
    """Does nothing: Keras 3 gives numbers to every callback."""


def compiles_by_xla(model: Any) -> bool:
    """Whether XLA compiles a model's steps."""
    return bool(model.jit_compile)


@contextlib.contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """For a while, makes and traces a model's training functions without XLA."""
    before = model.jit_compile
    model.jit_compile = False
    try:
        yield
    finally:
        model.jit_compile = before


def has_own_function(model: Any) -> bool:
    """Whether a model overrides Keras's training function."""
    made = type(model).make_train_function
    return made is not keras.Model.make_train_function


#: Whether `load_model` reads SavedModel directories, and optimizers in them.
LOADS_SAVED_MODELS = False

#: Whether a training function binds `train_step` when the function is made, and not
#: when it is traced.
KEEPS_STEP = True


def step_function_of(train_function: Any) -> Any:
    """The `tf.function` of a model's `train_function` that runs steps."""
    module = getattr(train_function, "__module__", None) or ""
    if not (inspect.isfunction(train_function) and module.startswith("keras.src.")):
        return train_function
    inner = inspect.getclosurevars(train_function).nonlocals
    if "multi_step_on_iterator" not in inner:
        raise NotImplementedError(
            f"Keras {keras.__version__} runs its training steps in an unknown way, so "
            "PrivacyBudget cannot see their writes. Use a version of Keras that "
            "tfdpclip was tested with."
        )
    return inner["multi_step_on_iterator"]


# Optimizers.

_OWN_SCALING = (
    "would scale gradients before they are clipped. Leave it out; half precision needs "
    "no scale in mixed_bfloat16."
)


class TrainerEntry:
    """Keras's way to call a private optimizer: by `scale_loss`, and then `apply`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if (value := self.loss_scale_factor) is not None:
            raise ValueError(f"loss_scale_factor={value!r} {_OWN_SCALING}")
        self.__dict__["_held_loss"] = HeldLoss()  # not through Keras's tracking

    @tf.autograph.experimental.do_not_convert
    def __setattr__(self, name, value):
        if name == "loss_scale_factor" and "_held_loss" in self.__dict__:
            # LossScaleOptimizer sets the attribute in the optimizer that it wraps.
            raise ValueError(
                f"{name} of a private optimizer cannot be set: it {_OWN_SCALING} "
                "The policy mixed_float16 sets it by a LossScaleOptimizer: use "
                "mixed_bfloat16 or float32. A MultiOptimizer sets it, too: make it "
                "private as a whole, from plain optimizers: "
                "plan.optimizer(keras.optimizers.MultiOptimizer, optimizer_map)."
                + see("float16")
            )
        super().__setattr__(name, value)

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss):
        """Keeps the loss for `apply`; returns a copy that has no gradients."""
        refuse_distribution()
        return self._held_loss.keep(loss)

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars):
        """Makes the private step from the loss that `scale_loss` was given.

        Args:
          grads_and_vars: no gradients (None) and the variables; or private gradients
            from `compute_gradients`. Any other gradients are refused.
        """
        pairs = list(grads_and_vars)
        self.apply([gradient for gradient, _ in pairs], [v for _, v in pairs])
        return self.iterations

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads, trainable_variables=None):
        """Like `apply_gradients`, with gradients and variables in separate lists."""
        grads = list(grads)
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        variables = list(trainable_variables)
        if any(gradient is not None for gradient in grads):
            self._apply_released(list(zip(grads, variables, strict=True)))
        else:
            self.minimize(self._held_loss.take(), variables)

    def _apply_released(self, pairs):
        if not self.built:
            self.build([variable for _, variable in pairs])
        # Constraints belong to Keras's variables, not to TensorFlow's within them.
        self._check_variables_are_known([variable for _, variable in pairs])
        variables = [
            self._trainable_variables[self._get_variable_index(variable)]
            for _, variable in pairs
        ]
        gradients = [gradient for gradient, _ in pairs]
        with self._private_update(gradients):
            super().apply(gradients, variables)

    def build(self, var_list):
        """Makes the optimizer's variables."""
        for variable in var_list:
            if getattr(variable, "overwrite_with_gradient", False):
                raise NotImplementedError(
                    f"{variable.path} takes its gradient as its new value (in float8 "
                    "training), and noise would destroy the value. Train in float32 "
                    "or mixed_bfloat16."
                )
        super().build(list(var_list))

    def _all_reduce_sum_gradients(self, grads_and_vars):
        """Returns the gradients: the gradients of a release are sums over replicas."""
        return list(grads_and_vars)

    def _refuse_unapplied(self):
        self._held_loss.refuse_unapplied()


def refuse_distribution() -> None:
    """Raises NotImplementedError if Keras distributes models or data."""
    if keras.distribution.distribution() is not None:
        raise NotImplementedError(
            "Private optimizers do not support keras.distribution: each device would "
            "clip and add noise on its own. Remove it: "
            "keras.distribution.set_distribution(None)." + see("several-replicas")
        )


def refuse_workers() -> None:
    """Raises NotImplementedError: Keras 3 fails on several workers, in any training."""
    raise NotImplementedError(
        f"Keras {keras.__version__} does not train on several workers: its fit fails "
        "under MultiWorkerMirroredStrategy with any optimizer. Install tf_keras and "
        "set TF_USE_LEGACY_KERAS=1, or train on the devices of one machine, "
        "tf.distribute.MirroredStrategy." + see("several-replicas")
    )


def add_state(optimizer: Any, values: Sequence[Any], name: str) -> list[Any]:
    """Adds saved variables to an optimizer, after the variables that it has."""
    return [
        optimizer.add_variable(
            shape=value.shape,
            initializer=lambda shape, dtype, value=value: value,
            dtype=value.dtype.name,
            name=f"{name}_{i}",
        )
        for i, value in enumerate(map(tf.convert_to_tensor, values))
    ]


def own_rate(optimizer: Any) -> Any:
    """The variable of a learning rate; None or an object if there is no variable."""
    return unwrapped(getattr(optimizer, "_learning_rate", None))


def known_to(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """The variables, of a list, that a built optimizer was built for."""
    known = optimizer._trainable_variables_indices
    return [v for v in variables if optimizer._var_key(v) in known]


def place_of(optimizer: Any, variable: tf.Variable) -> int:
    """The index of a variable's slots in the optimizer."""
    return optimizer._get_variable_index(variable)


def moments_of(optimizer: Any, place: int) -> tuple[tf.Variable, tf.Variable]:
    """Adam's first and second moments of a variable."""
    return optimizer._momentums[place], optimizer._velocities[place]


def averages_of(optimizer: Any) -> list[tuple[Any, Any]]:
    """Pairs of a weight and its moving average, which `SwapEMAWeights` swaps."""
    averages = getattr(optimizer, "_model_variables_moving_average", [])
    return list(zip(optimizer._trainable_variables, averages, strict=False))


def swapped(weight: Any, average: Any) -> tuple[Any, Any]:
    """The result of `SwapEMAWeights` for both, with the rounding of its sums."""
    both = tf.add(weight, average)
    new_average = tf.subtract(both, average)
    return tf.subtract(both, new_average).numpy(), new_average.numpy()


@contextlib.contextmanager
def updated_by(optimizer: Any, function: Callable) -> Iterator[None]:
    """For a while, gives an optimizer's gradients to a function and counts the step."""

    def update(grads, trainable_variables, learning_rate):
        del learning_rate
        function(list(zip(grads, trainable_variables, strict=True)))

    optimizer._backend_update_step = update
    try:
        yield
    finally:
        unwatch_updates(optimizer)


def watch_updates(optimizer: Any, function: Callable) -> None:
    """Shows the gradients of each update to a function, before the update."""

    def update(grads, trainable_variables, learning_rate):
        function(list(zip(grads, trainable_variables, strict=True)))
        type(optimizer)._backend_update_step(
            optimizer, grads, trainable_variables, learning_rate
        )

    optimizer._backend_update_step = update


def unwatch_updates(optimizer: Any) -> None:
    """Undoes `watch_updates`."""
    del optimizer._backend_update_step
