"""Finds private data that layers keep in variables, past clipping and noise."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip._object_notes import notes_of_variable
from tfdpclip.gradients.graph import ops, origins
from tfdpclip.gradients.loss.state import variables_of
from tfdpclip.keras import _compat
from tfdpclip.keras.watching.step_labels import DATA, OUTSIDE, SIZE, StepLabels

# Ops that only read a variable or draw random numbers from it.
_NO_WRITES = ops.READS | ops.RANDOM
# The labels of values that may be of a batch.
_OF_DATA = DATA | SIZE | OUTSIDE


class PrivateStateWarning(UserWarning):
    """A layer keeps values computed from the training data."""


@tf.autograph.experimental.do_not_convert
def restore_public_statistics(loss: tf.Tensor) -> None:
    """Puts public statistics back into layers that collect them from training batches.

    Batch normalisation writes averages of its training batches into the model, without
    noise. This function reverts the writes of `loss`, right after they happen.

    Args:
      loss: the loss, in the graph that computed it.

    Raises:
      ValueError: if a layer has no public statistics to go back to.
    """
    statistics, others = _written(loss)
    missing = [v for v in statistics if notes_of_variable(v).public_copy is None]
    if missing:
        raise ValueError(
            f"{_named(missing)} would hold averages of private batches, without noise, "
            "and are saved with the model. Take them from public data: "
            "model.fit(..., callbacks=[dpc.keras.PublicBatchStatistics(public_x)]), "
            "or, in a loop of your own, "
            "dpc.keras.PublicBatchStatistics(public_x).attach(model). Or replace the "
            "layers: model = dpc.keras.convert_batchnorm(model), or, in a subclass of "
            "tf.keras.Model, tf.keras.layers.GroupNormalization(8)."
            + see("batch-statistics")
        )
    for variable in statistics:
        variable.assign(notes_of_variable(variable).public_copy)
    warn_of_private_values(others)


def warn_of_private_values(variables: Sequence[tf.Variable]) -> None:
    """Warns that variables keep values of private batches; once for each variable."""
    new = [v for v in variables if not notes_of_variable(v).named]
    for variable in new:
        notes_of_variable(variable).named = True
    if new:
        warnings.warn(
            f"{_named(new)} is assigned values that depend on the batch. If it is "
            "saved with the model, or used in other steps, it releases private data "
            "without noise." + see("batch-statistics"),
            PrivateStateWarning,
            stacklevel=3,
        )


def _named(variables) -> str:
    return ", ".join(v.name for v in variables[:4]) + (
        f" and {len(variables) - 4} more" if len(variables) > 4 else ""
    )


def _written(loss: tf.Tensor) -> tuple[list[tf.Variable], list[tf.Variable]]:
    """Statistics, and further variables, to which the loss's graph writes data."""
    owners = _owners(loss.graph)
    written: dict[int, tf.Variable] = {}
    for use in StepLabels(loss.graph, until=loss.op.name).uses:
        made_of = use.made_of | use.inside.chosen_by
        if use.inside.updates or use.kind in _NO_WRITES or not made_of & _OF_DATA:
            continue
        variable = owners.get(use.variable)
        if variable is not None and not _is_metric(variable):
            written[id(variable)] = variable
    statistics: list[tf.Variable] = []
    others: list[tf.Variable] = []
    for variable in written.values():
        averaged = _compat.is_running_statistic(variable)
        (statistics if averaged else others).append(variable)
    return statistics, others


def _owners(graph) -> dict[int | None, tf.Variable]:
    """The variable behind each resource that the graph captured and read, by `id`.

    A variable that is only written to looks like a metric's total, and is left out: the
    loss cannot depend on it.
    """
    variables = variables_of(graph)
    roots = {id(outer): origins.captured_from(inner) for outer, inner in graph.captures}
    return {
        handle: variables[id(root)]
        for handle, root in roots.items()
        if id(root) in variables
    }


def _is_metric(variable: tf.Variable) -> bool:
    return (
        variable.synchronization == tf.VariableSynchronization.ON_READ
        and variable.aggregation == tf.VariableAggregation.SUM
    )
