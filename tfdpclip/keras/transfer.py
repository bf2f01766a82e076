"""Private transfer learning: which variables train, and which are frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip._arguments import shown
from tfdpclip._variables import unwrapped
from tfdpclip.keras import _compat
from tfdpclip.keras.normalization import (
    check_batchnorm,
    check_built,
    freeze_statistics,
)

_L = tf.keras.layers
_NORMALIZATIONS = (
    _L.BatchNormalization,
    _L.LayerNormalization,
    _L.GroupNormalization,
)
# The attributes and names of the head in a subclassed model.
_HEAD_NAMES = ("head", "classifier", "logits", "predictions")


@dataclasses.dataclass(frozen=True)
class TrainableCounts:
    """The number of variables that `film` left trainable.

    Attributes:
      trainable: number of trainable scalars: d, the dimension of the noise.
      total: number of scalars in the model, moving statistics included.
      normalization: trainable scalars in normalisation layers.
      head: trainable scalars in the head.
      layers: names of the normalisation layers that train.
      heads: names of the layers that make up the head.
    """

    trainable: int
    total: int
    normalization: int
    head: int
    layers: tuple[str, ...]
    heads: tuple[str, ...]

    @property
    def percent(self) -> float:
        """Trainable scalars as a percentage of all scalars."""
        return 100.0 * self.trainable / self.total

    def __str__(self) -> str:
        return (
            f"{self.trainable:,} of {self.total:,} parameters train "
            f"({self.percent:.3f} %): {self.normalization:,} scales and offsets in "
            f"{len(self.layers)} normalisation layers, {self.head:,} in the head "
            f"({', '.join(self.heads)})"
        )


def film(
    model: tf.keras.Model,
    *,
    head: Any = None,
    zero_head: bool = True,
    normalization: Callable[[tf.keras.layers.Layer], bool] | None = None,
) -> TrainableCounts:
    """Freezes all but the scales and offsets of normalisation layers, and the head.

    The parametrisation of DP-FiLM: Tobaben et al. (2023); Rehn et al. (2025), section
    4. No layers are added. Call it on a built model, before `compile`; compile a
    compiled model again. Works on functional, Sequential, subclassed and nested models.

    Every `BatchNormalization` becomes a `FrozenBatchNormalization`: scale and offset
    train, and the moving statistics of the pre-training stay.

    With a zero head the first step's gradients are exactly zero in every normalisation
    layer, because no gradient passes through the head. An optimizer that scales its
    steps (Adam) then moves these layers by noise alone.

    *Formal guarantees*

    * The trainable variables are exactly the variables counted in the result: if a
      variable cannot be frozen, an error says so.
    * No normalisation layer of the model combines the examples of a batch afterwards.

    Args:
      model: a built Keras model; changed in place.
      head: the head: a layer of the model, the name of a layer, or a list of these (one
        for each output). None finds the layer with weights that the output comes from;
        in a subclassed model, the layer called "head", "classifier", "logits" or
        "predictions". If the head is a model (or a list of layers), it trains as a
        whole, and its last layer with weights is set to zero.
      zero_head: whether to set the head's kernel and bias to zero.
      normalization: ``normalization(layer) -> bool`` says whether a layer's variables
        train, to choose some of the layers or custom classes. None means every
        BatchNormalization, LayerNormalization and GroupNormalization.
    Returns:
      The counts; `str()` of them is a sentence. Keras does not save `trainable` of the
      parts of custom layers: call ``film(model, zero_head=False)`` after loading.

    Raises:
      ValueError: if the model is not built, has no normalisation layer with a scale or
        an offset, has no clear head, or has variables that cannot be frozen.

    >>> model = tf.keras.Sequential([
    ...     tf.keras.Input((4,)), tf.keras.layers.Dense(8),
    ...     tf.keras.layers.LayerNormalization(), tf.keras.layers.Dense(3, name="out")])
    >>> print(film(model))  # doctest: +NORMALIZE_WHITESPACE
    43 of 83 parameters train (51.807 %): 16 scales and offsets in 1 normalisation
    layers, 27 in the head (out)
    """
    check_built(model)
    layers = list(_compat.layers_of(model))
    heads = _find_heads(model, layers, head)
    head_layers = _unique(part for top in heads for part in _compat.layers_of(top))
    in_head = {id(layer) for layer in head_layers}
    _arguments.boolean("zero_head", zero_head)
    _arguments.optional(_arguments.function, "normalization", normalization, 1)
    chosen = normalization or (lambda layer: isinstance(layer, _NORMALIZATIONS))
    norms = [
        layer
        for layer in layers
        if id(layer) not in in_head and chosen(layer) and _compat.own_trainable(layer)
    ]
    if not norms:
        raise ValueError(
            "model has no normalisation layer with a scale or an offset, so FiLM has "
            "nothing to train. Use a network with LayerNormalization or "
            "GroupNormalization (dpc.keras.convert_batchnorm makes one), choose your "
            "own with normalization=lambda layer: isinstance(layer, MyNorm), or train "
            "the head alone: model.trainable = False; head.trainable = True."
        )
    for layer in layers:
        check_batchnorm(layer)
    last = [_last_weighted(top) for top in heads] if zero_head else []
    for layer in last:
        _check_can_be_zero(layer, layers)

    for layer in layers:
        freeze_statistics(layer)
    kept = {id(layer) for layer in (*norms, *head_layers)}
    model.trainable = True
    for layer in layers:
        _freeze(layer, kept)
    wanted = [
        v for layer in (*norms, *head_layers) for v in _compat.own_trainable(layer)
    ]
    _check_trainable(model, wanted)
    for layer in last:
        for variable in (layer.kernel, getattr(layer, "bias", None)):
            if variable is not None:
                variable.assign(tf.zeros_like(variable))
    # Compiled functions would continue to train the variables of their trace.
    for layer in layers:
        if isinstance(layer, tf.keras.Model):
            _compat.forget_compilation(layer)
    return TrainableCounts(
        trainable=_count(model.trainable_variables),
        total=_count(model.variables),
        normalization=_count(
            v for layer in norms for v in _compat.own_trainable(layer)
        ),
        head=_count(v for layer in head_layers for v in _compat.own_trainable(layer)),
        layers=tuple(layer.name for layer in norms),
        heads=tuple(layer.name for layer in heads),
    )


def _count(variables) -> int:
    return sum(int(np.prod(v.shape)) for v in _unique(variables))


def _unique(items) -> list:
    return list({id(item): item for item in items}.values())


# Freezing.


def _freeze(layer, kept: set[int]):
    if any(id(part) in kept for part in _compat.layers_of(layer)):
        if id(layer) not in kept and _compat.own_trainable(layer):
            _compat.freeze_own_variables(layer)
    else:
        layer.trainable = False


def _check_trainable(model, wanted):
    found = {id(v): v for v in model.trainable_variables}
    expected = {id(v): v for v in wanted}
    extra = [unwrapped(v).name for key, v in found.items() if key not in expected]
    if extra:
        raise ValueError(
            f"model keeps variables where Keras cannot freeze them ({extra[0]!r} and "
            f"{len(extra) - 1} more): in a list that is not a list of layers, in a "
            "tf.Module, or shared with a layer that trains. Make them with "
            "layer.add_weight(..., trainable=False)."
        )
    if len(found) < len(expected):
        raise ValueError(
            "model.trainable_variables lacks variables of a normalisation layer or of "
            "the head: is a `trainable` attribute overridden?"
        )


# The head.


def _find_heads(model, layers, head) -> list:
    if head is None:
        found = _unique(_search(model))
    elif isinstance(head, (list, tuple)):
        found = [_named(model, layers, part) for part in head]
    else:
        found = [_named(model, layers, head)]
    if not found or not all(
        layer.trainable_variables or layer.weights for layer in found
    ):
        raise ValueError(
            f"head: {shown(head)} has no weights."
            if found
            else "head must not be empty."
        )
    if any(layer is model for layer in found):
        raise ValueError("head must be a part of the model, got the model itself.")
    return found


def _named(model, layers, head):
    if isinstance(head, str):
        found = [layer for layer in layers if layer.name == head]
        if len(found) == 1:
            return found[0]
        problem = f"{len(found)} layers of the model are called {shown(head)}"
    else:
        if any(layer is head for layer in layers):
            return head
        problem = f"{shown(head)} is not a layer of the model"
    raise ValueError(f"head: {problem}. {_advice(model)}")


def _advice(model) -> str:
    names = [
        layer.name
        for layer in _compat.layers_of(model, include_self=False)
        if hasattr(layer, "kernel")
    ]
    shown = ", ".join(repr(name) for name in names[-4:]) or "none"
    return (
        "Pass head= with the layer or its name, for example head=model.layers[-1] "
        f"(the model's last layers with a kernel: {shown})."
    )


def _search(model) -> list:
    """The layers with weights that produce the model's outputs."""
    if _compat.is_functional(model):
        return [_behind(tensor, model) for tensor in tf.nest.flatten(model.outputs)]
    if isinstance(model, tf.keras.Sequential):
        for layer in reversed(model.layers):
            if layer.weights:
                return _enter(layer, model)
    candidates = _unique(
        layer
        for layer in _compat.layers_of(model, include_self=False, recursive=False)
        if layer.name in _HEAD_NAMES
        or any(getattr(model, name, None) is layer for name in _HEAD_NAMES)
    )
    if len(candidates) == 1:
        return candidates
    raise ValueError(f"head: {model.name!r} has no clear head. {_advice(model)}")


def _behind(tensor, model):
    layer, node_index, tensor_index = _compat.producer_of(tensor)
    if layer.weights:
        if _compat.is_functional(layer):
            return _behind(tf.nest.flatten(layer.outputs)[tensor_index], model)
        return _enter(layer, model)[0]
    inputs = _unique(tf.nest.flatten(_compat.inputs_of_call(layer, node_index)))
    if len(inputs) != 1:
        raise ValueError(
            f"head: the output {tensor.name!r} of {model.name!r} does not come from "
            f"one layer with weights. {_advice(model)}"
        )
    return _behind(inputs[0], model)


def _enter(layer, model) -> list:
    if isinstance(layer, tf.keras.Model):
        return _search(layer)
    if not hasattr(layer, "kernel"):
        raise ValueError(
            f"head: the last layer with weights, {layer.name!r} (a "
            f"{type(layer).__name__}), has no kernel, so it is no classifier. Add a "
            "classifier, for example outputs = tf.keras.layers.Dense(classes)(features)"
            f". {_advice(model)}"
        )
    return [layer]


def _last_weighted(head):
    """The head's layer to set to zero: earlier zeros would stop the gradients."""
    if isinstance(head, tf.keras.Model):
        found = _search(head)
        if len(found) == 1:
            return found[0]
    return head


def _check_can_be_zero(layer, layers):
    if not isinstance(unwrapped(getattr(layer, "kernel", None)), tf.Variable):
        raise ValueError(
            f"head: {layer.name!r} (a {type(layer).__name__}) has no variable "
            "`kernel` to set to zero. Pass zero_head=False, and zero its weights "
            "yourself."
        )
    own = {id(v) for v in _compat.own_trainable(layer)}
    for other in layers:
        shared = own & {id(v) for v in _compat.own_trainable(other)}
        if other is not layer and shared:
            raise ValueError(
                f"head: {layer.name!r} shares a variable with {other.name!r}; setting "
                "it to zero would destroy that layer. Give the head a kernel of its "
                "own, or pass zero_head=False."
            )
