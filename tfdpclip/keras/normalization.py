"""Batch normalisation, with frozen statistics or converted to group normalisation."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip.keras import _compat

_L = tf.keras.layers
# A group with fewer elements has no useful statistics: with one element, every input is
# mapped to the offset; with two elements, to plus or minus the scale.
_LEAST_PER_GROUP = 16
# The methods by which a class of models may train, or predict, in a way of its own.
_METHODS = ("compile", "compute_loss", "fit", "evaluate", "predict", "train_step")
_METHODS += ("test_step", "predict_step")
# The arguments that batch and group normalisation share.
_SHARED = ("name", "epsilon", "center", "scale")
_SHARED += ("beta_initializer", "beta_regularizer", "beta_constraint")
_SHARED += ("gamma_initializer", "gamma_regularizer", "gamma_constraint")


@_compat.saving.register_keras_serializable("tfdpclip")
class FrozenBatchNormalization(tf.keras.layers.BatchNormalization):
    """Batch normalisation by its moving statistics, also while training.

    Scale and offset train. Mean and variance neither adapt nor depend on the batch,
    so that the examples of a batch stay apart. `film` turns every `BatchNormalization`
    of a model into this class, and Keras saves and loads it under this class.

    *Formal guarantees*: the output for an example does not depend on other examples,
    and nothing is written to the moving statistics, for any value of `training`.

    Takes the arguments of `tf.keras.layers.BatchNormalization`.

    >>> layer = FrozenBatchNormalization(epsilon=0.0)
    >>> layer(tf.constant([[5.0], [7.0]]), training=True).numpy().ravel().tolist()
    [5.0, 7.0]
    """

    def call(self, inputs, training=None, mask=None):
        del training, mask  # the mask matters only to statistics of a batch
        return super().call(inputs, training=False)


def check_built(model):
    if not isinstance(model, tf.keras.Model):
        raise ValueError(f"model must be a Keras model, got {type(model).__name__}.")
    if not model.built:
        raise ValueError(
            f"model {model.name!r} has no variables yet: call it on a batch, as by "
            "model(x[:1]), or model.build(input_shape), and load its weights first."
        )


def check_batchnorm(layer):
    """Raises for a kind of batch normalisation that cannot be frozen from outside."""
    known = (_L.BatchNormalization, FrozenBatchNormalization)
    if isinstance(layer, _compat.BATCH_NORMALIZATION) and type(layer) not in known:
        raise ValueError(
            f"model has a layer {layer.name!r} of class {type(layer).__name__}, a "
            "variant of BatchNormalization with statistics that may depend on the "
            "batch, so that examples would not be apart. Build the model with "
            "tf.keras.layers.BatchNormalization or GroupNormalization instead."
        )


def freeze_statistics(layer):
    if type(layer) is _L.BatchNormalization:
        # Saving keeps the class of an object, but not its attributes.
        object.__setattr__(layer, "__class__", FrozenBatchNormalization)


def convert_batchnorm(model: tf.keras.Model, groups: int = 32) -> tf.keras.Model:
    """A copy of `model` with GroupNormalization for every BatchNormalization.

    Batch normalisation combines the examples of a batch, so that clipping each example
    protects no example; group normalisation (Wu and He, 2018) keeps examples apart.
    Scales, offsets and all further weights are copied. The outputs are not the same:
    the moving statistics have no counterpart, and the model needs training. Layers keep
    their names.

    A layer that `get_config()` cannot rebuild (a `Lambda`, or a layer with a custom
    activation or regulariser, for instance) is kept: the same object is in both models,
    with its weights. A warning names these layers; then train only the returned model.

    Args:
      model: a built functional or Sequential model, nested models included.
      groups: the largest number of groups, 1 or above. A layer gets the largest number
        up to `groups` that divides its channels and leaves at least 16 elements
        (channels times positions) in a group.

    Returns:
      A new, uncompiled model; `model` is not changed.

    Raises:
      ValueError: if the model is not built, is subclassed, hides a batch normalisation
        inside a custom layer, or has none at all, if its class has a `train_step`,
        `fit` or `predict` that the copy would not have, or if `groups` is not a
        positive integer.

    >>> model = tf.keras.Sequential([
    ...     tf.keras.Input((8, 8, 3)), tf.keras.layers.Conv2D(48, 3),
    ...     tf.keras.layers.BatchNormalization(name="bn")])
    >>> convert_batchnorm(model).get_layer("bn").groups
    24
    """
    groups = _arguments.integer("groups", groups, 1)
    if isinstance(model, tf.keras.Model) and not _can_convert(model):
        raise ValueError(
            f"model {model.name!r} is a subclass of tf.keras.Model, and only its code "
            "defines its structure: in the code, write "
            "tf.keras.layers.GroupNormalization(8) for BatchNormalization(), with any "
            "number that divides the channels."
        )
    check_built(model)
    if not any(_is_batchnorm(layer) for layer in _compat.layers_of(model)):
        raise ValueError("model has no BatchNormalization: use it without conversion.")
    conversion = _Conversion(groups)
    converted = conversion.of(model)
    lost = [
        n
        for n in _METHODS
        if getattr(type(converted), n) is not getattr(type(model), n)
    ]
    if lost:
        name = type(model).__name__
        raise ValueError(
            f"model is a {name} with its own {', '.join(lost)}, which a copy of its "
            "layers would not have. Convert a part of it, as backbone = "
            "dpc.keras.convert_batchnorm(model.backbone), and build a "
            f"{name} of that, or write tf.keras.layers.GroupNormalization in its code."
        )
    while not conversion.copy_weights():
        converted = conversion.of(model)
    _warn_of_shared([layer for layer in conversion.kept.values() if layer.weights])
    return converted


def _warn_of_shared(layers: Sequence[tf.keras.layers.Layer]) -> None:
    if layers:
        names = [f"{layer.name!r} (a {type(layer).__name__})" for layer in layers[:3]]
        more = f" and {len(layers) - 3} more" * (len(layers) > 3)
        warnings.warn(
            "convert_batchnorm shares weights between both models, in the layers "
            f"{', '.join(names)}{more}: get_config() cannot rebuild these layers, so "
            "they are not copied. Train only the returned model.",
            stacklevel=3,
        )


def _is_batchnorm(layer) -> bool:
    return isinstance(layer, _compat.BATCH_NORMALIZATION)


class _Conversion:
    """The conversion of each layer, in a model and in all models nested in it.

    Args:
      groups: the largest number of groups.

    Attributes:
      kept: layers, by `id`, that are not copied.
    """

    def __init__(self, groups: int):
        self._groups = groups
        self.kept: dict[int, tf.keras.layers.Layer] = {}
        self._pairs: dict[int, tuple] = {}

    def of(self, model):
        """Rebuilds the model from the converted layers."""
        converted = _compat.cloned(model, self._layer)
        if not converted.built and model.built:
            converted.build(model.input_shape)
        _compat.set_trains_itself(converted, _compat.trains_itself(model))
        return converted

    def copy_weights(self) -> bool:
        """Copies all weights; False if the models must be rebuilt.

        The variables of a rebuilt layer exist only after its call. If they differ from
        the original's, the original layer is kept from then on.
        """
        pairs = list(self._pairs.values())
        self._pairs.clear()
        for old, new in pairs:
            if _is_batchnorm(old):
                new.trainable = old.trainable
                for name in ("gamma", "beta"):
                    if getattr(old, name, None) is not None:
                        getattr(new, name).assign(getattr(old, name))
            elif new is old or _can_convert(old):
                continue  # The layers of a nested model are pairs of their own.
            elif not _copy(old, new):
                self.kept[id(old)] = old
                return False
        return True

    def _layer(self, layer):
        """The converted layer: the same object for every call of the layer."""
        if id(layer) not in self._pairs:
            self._pairs[id(layer)] = layer, self._made_of(layer)
        return self._pairs[id(layer)][1]

    def _made_of(self, layer):
        if _is_batchnorm(layer):
            return _group_normalization(layer, self._groups)
        if _can_convert(layer):
            return self.of(layer)
        if any(_is_batchnorm(part) for part in _compat.layers_of(layer)):
            raise ValueError(
                f"model: the layer {layer.name!r} (a {type(layer).__name__}) has a "
                "BatchNormalization inside, which cannot be replaced from outside. "
                "Build that layer with tf.keras.layers.GroupNormalization instead."
            )
        if id(layer) not in self.kept:
            # The user's own code may raise any error there.
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings about missing files
                return type(layer).from_config(layer.get_config())
            self.kept[id(layer)] = layer
        return layer


def _can_convert(layer) -> bool:
    return isinstance(layer, tf.keras.Sequential) or (
        isinstance(layer, tf.keras.Model) and _compat.is_functional(layer)
    )


def _group_normalization(layer, groups):
    axes = [layer.axis] if isinstance(layer.axis, int) else list(layer.axis)
    rank = layer.input_spec.ndim
    sizes = {axis % rank: size for axis, size in layer.input_spec.axes.items()}
    if len(axes) != 1:
        raise ValueError(
            f"model: {layer.name!r} normalises over axes {axes}; only one is supported."
        )
    axis = axes[0] % rank
    channels = int(sizes[axis])
    return _L.GroupNormalization(
        groups=_fitting_groups(channels, groups, _positions(layer, axis)),
        axis=axis,
        **{name: getattr(layer, name) for name in _SHARED},
        dtype=layer.dtype_policy if hasattr(layer, "dtype_policy") else layer.dtype,
    )


def _positions(layer, axis) -> int:
    """The positions of an example in each channel; enough for a group if unknown."""
    rank = layer.input_spec.ndim
    try:
        shapes = _compat.input_shapes_of(layer)
        sizes = [
            [n for i, n in enumerate(shape) if i not in (0, axis)] for shape in shapes
        ]
    except (AttributeError, TypeError):
        sizes = []
    known = [int(np.prod(s)) for s in sizes if len(s) == rank - 2 and None not in s]
    if rank == 2:
        return 1
    return min(known, default=_LEAST_PER_GROUP)


def _fitting_groups(channels: int, groups: int, positions: int) -> int:
    fitting = [
        k
        for k in range(1, min(groups, channels) + 1)
        if channels % k == 0 and channels // k * positions >= _LEAST_PER_GROUP
    ]
    return max(fitting, default=1)


def _copy(old, new) -> bool:
    """Copies weights and `trainable`, part by part: frozen parts change the order.

    Returns:
      Whether the new layer has the same parts and variables as the old layer.
    """
    layers = list(_compat.layers_of(old)), list(_compat.layers_of(new))
    variables = [[_compat.own_variables(part) for part in parts] for parts in layers]
    shapes = [[[v.shape for v in own] for own in parts] for parts in variables]
    if shapes[0] != shapes[1]:
        return False
    for source, target in zip(*layers, strict=True):
        target.trainable = _compat.trains_itself(source)
    for theirs, ours in zip(*variables, strict=True):
        for variable, value in zip(ours, theirs, strict=True):
            variable.assign(value)
    return True
