"""Weights of records and of their entries, in the shapes that losses have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._docs import see

#: The names of the parts of data in messages.
PARTS = ("x", "y", "sample_weight")


def names(node: Any, name: str = "") -> dict[str, Any]:
    """The leaves of dicts and tuples, by their names in messages."""
    if isinstance(node, (dict, tuple)):
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        found = [names(node[key], f"{name}[{key!r}]") for key in keys]
        return {place: leaf for part in found for place, leaf in part.items()}
    return {name: node}


def names_of_parts(parts: Iterable[Any]) -> dict[str, Any]:
    """The leaves of (x,), (x, y) or (x, y, sample_weight), by their names."""
    named = zip(parts, PARTS, strict=False)
    return {k: leaf for part, name in named for k, leaf in names(part, name).items()}


def is_spec(node: Any) -> bool:
    return isinstance(node, tuple) and len(node) == 2 and isinstance(node[1], np.dtype)


def map_leaves(function, node, is_leaf=lambda _: False):
    """Applies a function to the leaves of dicts and tuples."""
    if not is_leaf(node):
        if isinstance(node, dict):
            return {k: map_leaves(function, v, is_leaf) for k, v in node.items()}
        if isinstance(node, tuple):
            return tuple(map_leaves(function, v, is_leaf) for v in node)
    return function(node)


def named_specs(row_spec: Sequence[Any]) -> dict[str, Any]:
    """The specs of a record's arrays by name, in the order of `names`."""
    # `names` would take a spec apart, since a spec is a tuple.
    return names_of_parts(map_leaves(list, part, is_leaf=is_spec) for part in row_spec)


def fitted(weights: Any, labels: Any) -> Any:
    """The spec of weights that Keras can multiply with the losses of labels.

    Keras 3 broadcasts weights over losses from the last axis, and Keras 2 adds at most
    one axis. So weights get as many axes as the labels have, with missing axes of
    length 1. Integer labels with one axis are a class for each entry, with a loss for
    each entry; labels that are floats have a single loss for the last axis.

    Args:
      weights: a spec of weights, or several specs in the structure of the labels.
      labels: specs of the labels.

    Returns:
      A spec, or several specs in the structure of the labels.

    Raises:
      ValueError: if weights do not fit the labels in structure or shape, or are not
        numbers.
    """
    if tf.nest.is_nested(weights):
        given, wanted = names(weights, "sample_weight"), names(labels)
        if list(given) != [f"sample_weight{place}" for place in wanted]:
            several = tf.nest.is_nested(labels)
            raise ValueError(
                f"data: the weights are {', '.join(given)}, and the labels are "
                f"{', '.join('y' + place for place in wanted)}. Give "
                + ("weights for each of the labels, or " if several else "")
                + "one array for all: scheme.batches((x, y, sample_weight))."
            )
        return tf.nest.map_structure(_fitted, weights, labels)
    found = tf.nest.map_structure(lambda spec: _fitted(weights, spec), labels)
    widest = max(tf.nest.flatten(found), key=lambda spec: spec.shape.rank)
    shapes = {tuple(spec.shape) for spec in tf.nest.flatten(found)}
    # A loss for each record takes weights of [rows, 1] as well.
    return widest if len(shapes) == 1 or widest.shape[1:] == [1] else found


def reshaped(weights: Any, specs: Any, reshape: Callable = np.reshape) -> Any:
    """Reshapes weights to the specs that `fitted` returned."""

    def as_spec(weight, spec):
        return reshape(weight, [-1 if d is None else d for d in spec.shape])

    if tf.nest.is_nested(weights):
        return tf.nest.map_structure(as_spec, weights, specs)
    return tf.nest.map_structure(lambda spec: as_spec(weights, spec), specs)


def refitted(weights: Any, labels: Any) -> Any:
    """Fits the weights (tensors) to the labels that a function returned."""
    if labels is None:
        return weights
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, (weights, labels))
    return reshaped(weights, fitted(*specs), tf.reshape)


def present(weights: Any) -> tf.Tensor:
    """Whether each row, `[rows]`, has an entry with nonzero weight."""
    found = [
        tf.reduce_any(tf.reshape(weight, [tf.shape(weight)[0], -1]) != 0, axis=1)
        for weight in tf.nest.flatten(weights)
    ]
    return tf.reduce_any(found, axis=0)


def refuse_third_input(row_spec: Sequence[Any]) -> None:
    """Raises ValueError if the third entry of data is an input, as of triplets.

    Args:
      row_spec: the shape and the type of each array of a record, in the structure
        (x,), (x, y) or (x, y, sample_weight); see `Source.row_spec`.
    """
    if len(row_spec) < 3:
        return
    x, y, third = ([*named_specs((part,)).values()] for part in row_spec)
    if all(any(dtype.kind == "O" for _, dtype in part) for part in (x, third)):
        raise _third_input("holds texts")
    wide = any(size > 1 for shape, _ in third for size in shape)
    if wide and x == y == third and all(dtype.kind == "f" for _, dtype in third):
        raise _third_input(
            "has the shapes and types of x and of y",
            " For weights of the labels' entries, leave out the last axis: "
            "sample_weight[..., 0].",
        )


def _third_input(why: str, more: str = "") -> ValueError:
    return ValueError(
        f"data: the third entry is sample_weight, and {why}, as a third input of the "
        "model would, such as the negatives of triplets. Give inputs together, with "
        "labels: plan.batches(((anchor, positive, negative), np.zeros(len(anchor)))), "
        f"or a dict of the inputs.{more}" + see("rows-that-are-not-records")
    )


def check_values(weights: Any) -> None:
    """Raises ValueError if arrays hold values that no weights have."""
    for place, values in names(weights, "sample_weight").items():
        values = np.asarray(values)
        if values.dtype.kind not in "biuf":
            continue  # `fitted` refuses weights that are not numbers.
        if np.any(values < 0):
            raise _third_input(f"{place} holds {values[values < 0][0]}")
        # A mask of entries has 0 and 1; ids and pixels have more.
        if values.dtype.kind in "iu" and values.ndim > 1 and np.any(values > 1):
            raise _third_input(
                f"{place} holds integers, such as {values[values > 1][0]}, for entries",
                " For weights, write sample_weight.astype('float32').",
            )
        if not np.all(np.isfinite(values)):
            wrong = values[~np.isfinite(values)][0]
            raise ValueError(
                f"data: {place} holds {wrong}: a weight is a finite factor, 0 or more, "
                "of a loss. Give weight 0 to entries that must not count: "
                "np.where(np.isfinite(sample_weight), sample_weight, 0)."
            )


def _fitted(weight: tf.TensorSpec, labels: tf.TensorSpec) -> tf.TensorSpec:
    if not (
        weight.dtype.is_floating or weight.dtype.is_integer or weight.dtype.is_bool
    ):
        raise ValueError(
            f"data: sample_weight holds {weight.dtype.name}, and must be numbers: "
            "scheme.batches((x, y, sample_weight.astype('float32')))."
        )
    given, rank = weight.shape[1:], labels.shape.rank
    kept = given
    while kept.rank and kept[-1] == 1:
        kept = kept[:-1]
    if rank is None:
        return tf.TensorSpec(weight.shape, tf.float32)
    if kept.rank:
        fits = given.rank < rank and kept.is_compatible_with(
            labels.shape[1:][: kept.rank]
        )
        if not fits:
            _refuse(given.as_list(), labels.shape[1:].as_list())
    axes = rank - 1
    if axes == 1 and (labels.shape[1] == 1 or not labels.dtype.is_integer):
        axes = 0
    more = [1] * (axes - kept.rank)
    return tf.TensorSpec([weight.shape[0], *kept, *more], tf.float32)


def _refuse(given: list, labels: list) -> None:
    def shape(row):
        return "[" + ", ".join(["n", *map(str, row)]) + "]"

    works = [
        shape([]),
        shape([1]),
        *(shape(labels[: i + 1]) for i in range(len(labels))),
    ]
    mended = "scheme.batches((x, y, sample_weight))"
    if len(given) > len(labels) and given[: len(labels)] == labels and labels:
        mended = mended.replace("t))", "t[..., 0]))")
    raise ValueError(
        f"data: sample_weight of shape {shape(given)} meets labels y of shape "
        f"{shape(labels)}, and fits {' or '.join(dict.fromkeys(works))}: {mended} with "
        "one weight for each of the n records, or for each of their labels; weight 0 "
        "for entries that must not count." + see("labels-for-each-token")
    )
