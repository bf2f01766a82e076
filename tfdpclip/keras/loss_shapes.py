"""Checks that the records and weights of batches fit a model and its losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _keras_marks
from tfdpclip._docs import see
from tfdpclip.keras import _compat
from tfdpclip.keras.per_example_loss import PerExampleLoss
from tfdpclip.keras.table_reads import Traced, refuse_missing_rows
from tfdpclip.sampling.row_weights import names


def refuse_misfit(model: Any, specs: Iterable[Any]) -> None:
    """Raises ValueError where the types or shapes of batches do not fit the model.

    * No labels, where a compiled loss needs labels; but a `train_step` or a
      `compute_loss` of the user may make labels of the inputs.
    * Texts, where the model or a loss takes numbers: TensorFlow traces a step that
      makes numbers of texts, and the step fails when it runs.
    * One-hot labels, where a loss takes class numbers: Keras 2 fails in words of ops.
    * Labels of fewer axes than the outputs, which a loss would compare with the outputs
      of all records: the proof that records stay apart fails in words of ops.
    * Weights that Keras could not multiply with losses, in models with a single output
      of known shape. For further models, Keras raises an error of its own.

    Args:
      model: a compiled model.
      specs: the element specs (x, y, weights) that the batches may have.
    """
    for misfit in (_texts, _labels, _weights):
        errors = [misfit(model, *spec) for spec in specs]
        if errors and all(errors):
            raise ValueError(errors[0])


def _labels(model: Any, x: Any, labels: Any, weights: Any) -> str | None:
    del x, weights
    loss, leaves = _compat.compiled_loss_of(model), tf.nest.flatten(labels)
    steps = ("train_step", "compute_loss")
    if not loss or any(
        getattr(type(model), n) is not getattr(tf.keras.Model, n) for n in steps
    ):
        return None
    # The spec of None has no type.
    if leaves and not any(hasattr(leaf, "dtype") for leaf in leaves):
        named = "a loss" if tf.nest.is_nested(loss) else f"loss {_named(loss)}"
        return (
            f"data: there are no labels y, and {named} of the model compares with "
            "labels. Give a tuple of inputs and labels: plan.batches((x, y)), or of a "
            "frame, plan.batches((frame[columns], frame['label']))."
        )
    for loss, output, name, spec in _losses(model, (labels,)):
        if _compares_records(loss, output, spec):
            return (
                f"data: {name} has the shape {_shown(spec)}, and the model's output "
                f"{_shown(output)}: loss {_named(loss)} would compare each output with "
                "the labels of all examples. Give labels of the output's shape, or "
                "the model an output of the labels' shape."
            )
    return None


def _weights(model: Any, x: Any, labels: Any, weights: Any) -> str | None:
    if isinstance(weights, dict) and not _compat.takes_weights_by_name(model):
        y, w = (
            ", ".join(f"{part}[{name!r}]" for name in model.output_names)
            for part in ("y", "sample_weight")
        )
        return (
            "Keras 3 takes a dict of weights only for models with a dict of outputs, "
            "and this model has a list: give tuples, in the order of the outputs, "
            f"plan.batches((x, ({y}), ({w})))." + see("labels-for-each-token")
        )
    losses = _losses_of(model, labels, weights)
    if losses is None or _fits(weights.shape[1:], losses[1:]):
        return None
    if set(weights.shape[1:]) <= {1}:
        return None  # `fitted_weights` gives them the losses' axes.
    loss = _named(_compat.compiled_loss_of(model))
    return (
        f"The weights of the batches, {_shown(weights)}, do not fit the losses that "
        f"{loss} makes from labels y of shape {_shown(labels)} and type "
        f"{labels.dtype.name}: {_shown(losses)}. Give a weight for each loss, or for "
        "each record: plan.batches((x, y, sample_weight)) with sample_weight of shape "
        f"{_shown(losses)} or [n, 1]. Give a class for each token as integers, "
        "y.astype('int32')." + see("labels-for-each-token")
    )


@tf.autograph.experimental.do_not_convert
def fitted_weights(model: Any, labels: Any, weights: Any) -> Any:
    """One weight for each record, with as many axes as the losses of the model.

    Batches give weights the axes of the labels, as a loss for each entry needs. A loss
    for each record (Dice over an image) has fewer.

    Args:
      model: a compiled model.
      labels: the labels of a batch, tensors.
      weights: the weights of the batch, tensors.

    Returns:
      The weights, unchanged unless each record has a single weight.
    """
    if tf.nest.is_nested(weights) or not set(weights.shape[1:]) <= {1}:
        return weights
    losses = _losses_of(model, labels, weights)
    if losses is None or _fits(weights.shape[1:], losses[1:]):
        return weights
    return tf.reshape(weights, [-1] + [1] * (losses.rank - 1))


def _losses_of(model: Any, labels: Any, weights: Any) -> tf.TensorShape | None:
    """The shape of the losses of two records; None if unknown, or for several losses.

    Args:
      model: a compiled model.
      labels: the spec of the labels, or the labels.
      weights: the spec of the weights, or the weights.
    """
    loss, outputs = _compat.compiled_loss_of(model), getattr(model, "outputs", None)
    if not loss or not outputs or len(outputs) > 1 or tf.nest.is_nested(loss):
        return None
    if not all(isinstance(x, (tf.TensorSpec, tf.Tensor)) for x in (labels, weights)):
        return None
    losses = _shape_of(loss, [2, *outputs[0].shape[1:]], labels)
    return losses if losses is not None and losses.rank else None


def _shape_of(loss: Any, outputs: Any, labels: Any, graph: Any = None) -> Any:
    """The shape of the losses of some records; None if the loss raises.

    Args:
      loss: the loss.
      outputs: the shape of the outputs, with the number of records.
      labels: the spec of the labels, of any number of records.
      graph: a graph to trace the loss in, which is never run: only shapes matter.
    """
    try:
        with (graph or tf.Graph()).as_default():
            y = tf.zeros([outputs[0], *labels.shape[1:]], labels.dtype)
            found = _called(loss, y, tf.compat.v1.placeholder(tf.float32, outputs))
            return tf.convert_to_tensor(found).shape
    except Exception:  # Keras reports errors of the user's loss better.
        return None


def refuse_unknown_ids(
    model: Any, arrays: tuple | None, traced: Traced | None = None
) -> None:
    """Raises ValueError for a class or an id on which a step would fail.

    Such a failure ends training when the record is drawn, and so reveals the record.
    The smallest and the largest labels, and all ids, are tried before any draw.

    Args:
      model: a compiled model; None for draws without a model.
      arrays: (x, y) or (x, y, sample_weight) of all records; None if the records are
        not in memory.
      traced: the reads of the tables, from an earlier call; see `refuse_missing_rows`.
    """
    if model is None or arrays is None:
        return
    refuse_missing_rows(model, arrays[0], traced)
    for loss, output, name, labels in _losses(model, arrays[1:2]):
        if output is None or not _is_keras_loss(loss):
            continue
        classes = output.shape[-1] or 1
        row = [1] * (len(output.shape) - 2) + [classes]

        def losses_of(y, loss=loss, row=row):
            return _called(loss, y, tf.zeros([len(y), *row]))

        if bad := _bad_number(losses_of, labels):
            raise ValueError(
                f"data: {name} holds the class {bad}, on which loss {_named(loss)} "
                f"fails: the model has {classes} outputs, for classes 0 to "
                f"{classes - 1}. A draw of this record would end training, and so "
                "reveal the record. Give the model more outputs, or number the "
                f"classes: classes, {name} = np.unique({name}, return_inverse=True)."
                + see("numbers-out-of-range")
            )


def _texts(model: Any, x: Any, labels: Any, weights: Any) -> str | None:
    del weights
    for tensor, name, spec in _inputs(model, x):
        texts = getattr(spec, "dtype", None) == tf.string
        if texts and tensor is not None and tensor.dtype != tf.string:
            return (
                f"data: {name} holds texts, and input {tensor.name!r} of the model "
                "takes numbers. Make numbers of them by a public vocabulary: "
                f"tf.keras.layers.StringLookup(vocabulary=words)({name}); or begin the "
                "model with tf.keras.Input(shape, dtype='string') and this layer."
            )
    for loss, output, name, spec in _losses(model, (labels,)):
        if getattr(spec, "dtype", None) == tf.string and _takes_numbers(
            loss, output, spec
        ):
            number = f"classes, {name} = np.unique({name}, return_inverse=True)"
            return (
                f"data: {name} holds texts, and loss {_named(loss)} takes numbers. "
                f"Give the number of each label's class: {number}; in a pipeline, map("
                "lambda x, y: (x, lookup(y))), with lookup = tf.keras.layers."
                "StringLookup(vocabulary=classes, num_oov_indices=0)."
            )
        numbers = getattr(spec, "shape", tf.TensorShape(None))[1:]
        one_hot = numbers == getattr(output, "shape", ())[1:]
        sparse = _named(loss) == "sparse_categorical_crossentropy"
        if sparse and one_hot and numbers.num_elements() != 1:
            return (
                f"data: {name} has {numbers[-1]} numbers for each label, and loss "
                f"{_named(loss)} takes the number of a class: np.argmax({name}, "
                "axis=-1). For one-hot labels, take loss='categorical_crossentropy'."
            )
    return None


def _compares_records(loss: Any, output: Any, labels: Any) -> bool:
    """Whether a loss takes labels for as many records as an output has entries only."""
    row = getattr(output, "shape", ())[1:]
    sizes = [size for size in row if size]

    def fits(rows):
        return _shape_of(loss, [rows, *row], labels) is not None

    # Keras 2 gives labels [n] an axis, and both leave an axis of one entry out.
    least = 2 if _compat.SPREADS_WEIGHTS else 1
    rank = labels.shape.rank if isinstance(labels, tf.TensorSpec) else None
    if not sizes or row[-1] == 1 or not least <= (rank or 0) <= len(row):
        return False
    # A loss of the user's own may do more than compute, wherever it is traced.
    return _is_keras_loss(loss) and not fits(max(sizes) + 1) and any(map(fits, sizes))


def _takes_numbers(loss: Any, output: Any, labels: tf.TensorSpec) -> bool:
    """Whether a loss traces with numbers, and fails on texts there or when it runs."""
    rest = (*labels.shape[1:], 2) if output is None else output.shape[1:]
    graph, numbers = tf.Graph(), tf.TensorSpec(labels.shape, tf.float32)
    failed = _shape_of(loss, [2, *rest], labels, graph) is None
    casts = [op for op in graph.get_operations() if op.type == "Cast"]
    made = any(op.inputs[0].dtype == tf.string for op in casts)
    return made or (failed and _shape_of(loss, [2, *rest], numbers) is not None)


def _bad_number(function: Callable, numbers: Any) -> str | None:
    """One of the smallest and largest numbers on which a function fails, or None."""
    if not isinstance(numbers, np.ndarray) or numbers.dtype.kind not in "iuf":
        return None
    few = numbers.size <= 2**20
    found = np.unique(numbers if few else [numbers.min(), numbers.max()])
    for number in np.unique([*found[:2], *found[-2:]]).astype(numbers.dtype):
        if _fails(function, number, numbers.ndim):
            # A loss that fails on zeros as well fails for a reason of its own.
            return None if _fails(function, 0 * found[0], numbers.ndim) else str(number)
    return None


def _fails(function: Callable, number: Any, rank: int) -> bool:
    try:
        with tf.device("/cpu:0"):
            function(tf.constant(np.full([1] * rank, number)))
    except Exception as error:  # Keras reports other errors of the user's loss better.
        return isinstance(error, tf.errors.InvalidArgumentError)
    return False


def _inputs(model: Any, x: Any) -> Iterator[tuple[Any, str, Any]]:
    """Each input of a model with the name and the value of its part of x."""
    tensors = getattr(model, "inputs", None) or []
    yield from _paired(tensors, [tensor.name for tensor in tensors], x, "x")


def _losses(model: Any, labels: tuple) -> Iterator[tuple[Any, Any, str, Any]]:
    """Each loss of a model with its output, and the name and the value of its labels.

    The output is None if the model does not tell which one the labels belong to.
    """
    compiled = _compat.compiled_loss_of(model)
    if not compiled or not labels:
        return
    outputs = getattr(model, "outputs", None) or []
    named = list(_paired(outputs, getattr(model, "output_names", ()), labels[0], "y"))
    if not tf.nest.is_nested(compiled):
        found = {name: compiled for name in names(labels[0], "y")}
    else:
        lists = tuple(compiled) if isinstance(compiled, list) else compiled
        found = names(lists, "y")
    for output, name, leaf in named:
        if found.get(name) is not None:
            yield found[name], output, name, leaf


def _paired(
    tensors: Sequence[Any], keys: Sequence[str], data: Any, name: str
) -> Iterator[tuple[Any, str, Any]]:
    """The tensors of a model with the names and values of their parts of the data."""
    if isinstance(data, dict):
        by_key = dict(zip(keys, tensors, strict=False))
        for key, leaf in data.items():
            yield by_key.get(key), f"{name}[{key!r}]", leaf
    elif isinstance(data, tuple):
        known = tensors if len(tensors) == len(data) else [None] * len(data)
        for place, (tensor, leaf) in enumerate(zip(known, data, strict=True)):
            yield tensor, f"{name}[{place}]", leaf
    else:
        yield tensors[0] if len(tensors) == 1 else None, name, data


def _called(loss: Any, labels: Any, predictions: Any) -> Any:
    function = tf.keras.losses.get(loss)
    return getattr(function, "call", function)(labels, predictions)


def _is_keras_loss(loss: Any) -> bool:
    """Whether a loss is Keras's own, which reads and writes no state."""
    found = tf.keras.losses.get(loss)
    if isinstance(found, PerExampleLoss):
        found = found._loss
    return getattr(found, "__module__", "").startswith(_keras_marks.MODULES)


def _named(loss: Any) -> str:
    found = tf.keras.losses.get(loss)
    return getattr(found, "name", getattr(found, "__name__", "the loss"))


def _fits(weights: tf.TensorShape, losses: tf.TensorShape) -> bool:
    if weights.rank == losses.rank + 1 and weights[-1] == 1:
        weights = weights[:-1]
    if _compat.SPREADS_WEIGHTS or losses == [1]:
        weights = weights.concatenate([1] * (losses.rank - weights.rank == 1))
    pairs = zip(weights, losses, strict=False)
    return weights.rank == losses.rank and all(w in (1, None, n) for w, n in pairs)


def _shown(spec: Any) -> str:
    shape = getattr(spec, "shape", spec)
    return "[" + ", ".join(["n", *map(str, shape[1:])]) + "]"
