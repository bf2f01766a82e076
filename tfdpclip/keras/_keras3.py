"""What is of Keras 3, each behind a function that says what it is for.

With the TensorFlow backend. Used through `_compat.py` alone; `_keras2.py` has the same
names. No other module may use private symbols of Keras 3.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import saving  # noqa: F401
from keras.src.losses.loss import scale_loss_for_distribution
from keras.src.models.functional import Functional

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
    """A layer and the layers in it, parents first; an op like `x + 3` has none."""
    if not isinstance(layer, keras.layers.Layer):
        return iter(())
    return iter(layer._flatten_layers(recursive=recursive, include_self=include_self))


#: What every kind of batch normalisation is a subclass of.
BATCH_NORMALIZATION = keras.layers.BatchNormalization


def names_of(variables: Sequence[Any]) -> list[str]:
    """The names of a model's variables, by which clip rules group them.

    Without the model's own, which Keras 3 puts before those of its layers, and numbers.
    """
    names = [path_of(variable) for variable in variables]
    models = {name.partition("/")[0] for name in names}
    if len(models) == 1 and all(name.count("/") > 1 for name in names):
        names = [name.partition("/")[2] for name in names]
    return names


def is_functional(layer: Any) -> bool:
    """Whether a model was made of the tensors between its inputs and outputs."""
    if isinstance(layer, keras.Sequential):
        return layer._functional is not None
    return isinstance(layer, Functional)


def own_trainable(layer: Any) -> list[Any]:
    """The variables of a layer, not of its parts, that are not frozen one by one."""
    return layer._trainable_variables


def own_variables(layer: Any) -> list[Any]:
    """The variables of a layer, not of its parts; those that can train first."""
    return layer._trainable_variables + layer._non_trainable_variables


def freeze_own_variables(layer: Any) -> None:
    """Freezes a layer's own variables, while parts of it train.

    They go before the others, so that their order in files stays.
    """
    for variable in layer._trainable_variables:
        variable.trainable = False
    layer._non_trainable_variables[:0] = layer._trainable_variables
    del layer._trainable_variables[:]


def cloned(model: Any, clone_function: Callable) -> Any:
    """A functional or Sequential model again, of the layers that a function gives."""

    def call(layer, *args, **kwargs):
        # Which Keras 3 has noted for every layer that could have taken one.
        if kwargs.get("mask") is None:
            kwargs.pop("mask", None)
        return layer(*args, **kwargs)

    options = {} if isinstance(model, keras.Sequential) else {"call_function": call}
    return keras.models.clone_model(model, clone_function=clone_function, **options)


def trains_itself(layer: Any) -> bool:
    """A layer's own `trainable`, whatever its parts'."""
    return layer._trainable


def set_trains_itself(layer: Any, value: bool) -> None:
    """Sets a layer's own `trainable` and leaves its parts alone."""
    layer._trainable = value


def input_shapes_of(layer: Any) -> list:
    """The shapes that a layer of a functional model was called with."""
    return [
        tuple(tensor.shape)
        for node in layer._inbound_nodes
        for tensor in node.input_tensors
    ]


def producer_of(tensor: Any) -> tuple[Any, int, int]:
    """The layer that made a tensor, the number of its call, and of its output."""
    return tuple(tensor._keras_history)


def inputs_of_call(layer: Any, node_index: int) -> Any:
    """What a layer was called with, in the call of this number."""
    return layer._inbound_nodes[node_index].input_tensors


def forget_compilation(model: Any) -> None:
    """Has a model traced, and compiled, again before it next runs."""
    model.train_function = model.test_function = model.predict_function = None
    model.compiled = False


def random_states_of(model: Any) -> list[tf.Variable]:
    """The states of the generators of a model's layers: of dropout, for one."""
    return [
        generator.state
        for layer in layers_of(model)
        for generator in layer._seed_generators
    ]


def mask_of(tensor: Any) -> Any:
    """The mask that layers have tied to a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


def is_adapted(layer: Any) -> bool:
    """Whether a layer has statistics that were not given when it was made.

    Vocabularies that were set later are among them: nothing tells them apart.
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
    """Whether a variable is a layer's average over the batches it has seen."""
    # Keras 3 marks those of its own layers by nothing but their names.
    name = variable.name.removesuffix(":0").rpartition("/")[2]
    return variable.aggregation == tf.VariableAggregation.MEAN or name in _RUNNING


@contextlib.contextmanager
def batch_statistics(layers: Sequence[Any]) -> Iterator[None]:
    """Has the averages of batch normalisations be those of one batch, for a while."""
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
    """What a model was compiled with as its loss, or None."""
    # Without one, a model has a method of that name.
    return getattr(model, "__dict__", {}).get("loss")


def share_of_replica(loss: Any) -> Any:
    """What a loss does with its mean over a replica's part of a batch."""
    return scale_loss_for_distribution(loss)


#: Whether weights of one axis less than losses are spread over the last one.
SPREADS_WEIGHTS = False


def takes_weights_by_name(model: Any) -> bool:
    """Whether weights for several outputs may be a dict of the outputs' names."""
    return isinstance(getattr(model, "_outputs_struct", {}), dict)


def is_compiled(model: Any) -> bool:
    """Whether a model has a loss of its own to compute."""
    return bool(getattr(model, "compiled", False))


def unweighted_metrics(model: Any) -> list[Any]:
    """What a model was compiled with as `metrics`, or None, in a flat list."""
    compiled = getattr(model, "_compile_metrics", None)
    return tf.nest.flatten(getattr(compiled, "_user_metrics", None))


def tunes_steps_per_execution(model: Any) -> bool:
    """Whether how many steps run at a time changes while they run."""
    return not isinstance(model.steps_per_execution, int)


#: Whether an execution goes on past the `steps_per_epoch` of `fit`: only the end of the
#: data stops it.
OVERRUNS_EPOCHS = True


def steps_per_execution(model: Any) -> int:
    """How many steps run at a time, now."""
    return int(model.steps_per_execution)


def spare_logs(callback: Any) -> None:
    """Nothing here: this Keras gives every callback numbers."""


def compiles_by_xla(model: Any) -> bool:
    """Whether a model's steps are compiled by XLA."""
    return bool(model.jit_compile)


def has_own_function(model: Any) -> bool:
    """Whether something other than Keras's training function runs a model's steps."""
    made = type(model).make_train_function
    return made is not keras.Model.make_train_function


#: Whether `load_model` reads SavedModel directories, and optimizers in them.
LOADS_SAVED_MODELS = False

#: Whether a training function has `train_step` in it when it is made, and does not look
#: it up when it is traced.
KEEPS_STEP = True


def step_function_of(train_function: Any) -> Any:
    """The `tf.function` that runs steps, of a model's `train_function`."""
    module = getattr(train_function, "__module__", None) or ""
    if not (inspect.isfunction(train_function) and module.startswith("keras.src.")):
        return train_function
    inner = inspect.getclosurevars(train_function).nonlocals
    if "multi_step_on_iterator" not in inner:
        raise NotImplementedError(
            f"Keras {keras.__version__} runs its training steps in a way that "
            "PrivacyBudget does not know, so it cannot see what they write to. Use a "
            "version of Keras that tfdpclip was tested with."
        )
    return inner["multi_step_on_iterator"]


# Optimizers.

_OWN_SCALING = {
    "gradient_accumulation_steps": (
        "would add up gradients of several steps, each with noise of its own. Use "
        "accumulation_steps, which adds noise once."
    ),
    "loss_scale_factor": (
        "would scale gradients before they are clipped. Leave it out; half precision "
        "needs no scale in mixed_bfloat16."
    ),
}


class TrainerEntry:
    """How Keras reaches a private optimizer: by `scale_loss`, and then `apply`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for name, why in _OWN_SCALING.items():
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name}={value!r} {why}")
        self.__dict__["_held_loss"] = HeldLoss()  # not through Keras's tracking

    @tf.autograph.experimental.do_not_convert
    def __setattr__(self, name, value):
        if name in _OWN_SCALING and "_held_loss" in self.__dict__:
            # LossScaleOptimizer sets it in what it wraps.
            raise ValueError(
                f"{name} of a private optimizer cannot be set: it {_OWN_SCALING[name]} "
                "A LossScaleOptimizer does this, which Keras makes by itself under the "
                "policy mixed_float16: use mixed_bfloat16 or float32. So does a "
                "MultiOptimizer: make it private as a whole, of plain optimizers: "
                "plan.optimizer(keras.optimizers.MultiOptimizer, optimizer_map)."
                + see("float16")
            )
        super().__setattr__(name, value)

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss):
        """Keeps the loss for `apply`; what it returns has no gradients to take."""
        refuse_distribution()
        return self._held_loss.keep(loss)

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars):
        """Makes the private step of the loss that `scale_loss` was given.

        Args:
          grads_and_vars: no gradients (None) and the variables; or private gradients,
            as `compute_gradients` made them. All others are refused.
        """
        pairs = list(grads_and_vars)
        self.apply([gradient for gradient, _ in pairs], [v for _, v in pairs])
        return self.iterations

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads, trainable_variables=None):
        """As `apply_gradients`, of gradients and variables apart."""
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
        # Constraints are known to Keras's variables only, and not to those in them.
        self._check_variables_are_known([variable for _, variable in pairs])
        variables = [
            self._trainable_variables[self._get_variable_index(variable)]
            for _, variable in pairs
        ]
        gradients = [gradient for gradient, _ in pairs]
        with self._private_update(gradients):
            super().apply(gradients, variables)

    def build(self, var_list):
        """Makes the variables of the optimizer."""
        for variable in var_list:
            if getattr(variable, "overwrite_with_gradient", False):
                raise NotImplementedError(
                    f"{variable.path} takes its gradient as its new value (float8 "
                    "training does this), which noise would destroy. Train in float32 "
                    "or mixed_bfloat16."
                )
        super().build(list(var_list))

    def _all_reduce_sum_gradients(self, grads_and_vars):
        """The gradients of a release are sums over all replicas already."""
        return list(grads_and_vars)

    def _refuse_unapplied(self):
        self._held_loss.refuse_unapplied()


def refuse_distribution() -> None:
    """Raises NotImplementedError if Keras is to distribute models or data."""
    if keras.distribution.distribution() is not None:
        raise NotImplementedError(
            "Private optimizers do not support keras.distribution: each part would "
            "clip and add noise on its own. Take it away with "
            "keras.distribution.set_distribution(None)." + see("several-replicas")
        )


def refuse_workers() -> None:
    """Raises NotImplementedError: Keras 3 fails there, whatever it trains."""
    raise NotImplementedError(
        f"Keras {keras.__version__} does not train on several workers: its fit fails "
        "under MultiWorkerMirroredStrategy with any optimizer. Install tf_keras and "
        "set TF_USE_LEGACY_KERAS=1, or train on the devices of one machine, "
        "tf.distribute.MirroredStrategy." + see("several-replicas")
    )


def add_state(optimizer: Any, values: Sequence[Any], name: str) -> list[Any]:
    """Gives an optimizer variables that are saved with it, after its others."""
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
    """The variable of a learning rate; None or something else if it has none."""
    return unwrapped(getattr(optimizer, "_learning_rate", None))


def place_of(optimizer: Any, variable: tf.Variable) -> int:
    """Which of the optimizer's slots belong to a variable."""
    return optimizer._get_variable_index(variable)


def moments_of(optimizer: Any, place: int) -> tuple[tf.Variable, tf.Variable]:
    """Adam's first and second moments of one variable."""
    return optimizer._momentums[place], optimizer._velocities[place]


def averages_of(optimizer: Any) -> list[tuple[Any, Any]]:
    """Pairs of a weight and its moving average, which `SwapEMAWeights` swaps."""
    averages = getattr(optimizer, "_model_variables_moving_average", [])
    return list(zip(optimizer._trainable_variables, averages, strict=False))


def swapped(weight: Any, average: Any) -> tuple[Any, Any]:
    """What `SwapEMAWeights` makes of both, with the rounding of its sums."""
    both = tf.add(weight, average)
    new_average = tf.subtract(both, average)
    return tf.subtract(both, new_average).numpy(), new_average.numpy()


@contextlib.contextmanager
def updated_by(optimizer: Any, function: Callable) -> Iterator[None]:
    """Has an optimizer hand its gradients to a function, and count, for a while."""

    def update(grads, trainable_variables, learning_rate):
        del learning_rate
        function(list(zip(grads, trainable_variables, strict=True)))

    optimizer._backend_update_step = update
    try:
        yield
    finally:
        unwatch_updates(optimizer)


def watch_updates(optimizer: Any, function: Callable) -> None:
    """Has an optimizer show its gradients to a function before each update."""

    def update(grads, trainable_variables, learning_rate):
        function(list(zip(grads, trainable_variables, strict=True)))
        type(optimizer)._backend_update_step(
            optimizer, grads, trainable_variables, learning_rate
        )

    optimizer._backend_update_step = update


def unwatch_updates(optimizer: Any) -> None:
    """Undoes `watch_updates`."""
    del optimizer._backend_update_step
