"""Per-example gradient norms and gradients of a Keras model over a data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip._variables import all_unwrapped
from tfdpclip.clipping.groups import make_groups, normalize_groups
from tfdpclip.diagnostics._passes import batches, classes, run, untouched_metrics
from tfdpclip.gradients import PerExampleGradients
from tfdpclip.gradients.loss import drawn_rows
from tfdpclip.keras import _compat, replicas

PRIVATE = (
    "Measured without noise: on private data this is private, too, and must not be "
    "released. On public data it may be."
)


@dataclasses.dataclass(frozen=True)
class GradientNorms:
    """Per-example gradient norms. Not to be released if the data are private.

    Attributes:
      norms: `[n]`, the norm of each example's gradient over all variables.
      by_group: `[n, L]`, the norms over each group of variables.
      groups: the L groups' names.
      labels: `[n]`, the class of each example; None if the targets are no classes.
      correct: `[n]`, whether the prediction is right; None without classes.
      indices: `[n]`, the examples' positions in the data.
    """

    norms: np.ndarray
    by_group: np.ndarray
    groups: tuple[str, ...]
    labels: np.ndarray | None
    correct: np.ndarray | None
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.norms)

    def __str__(self) -> str:
        low, middle, high = np.quantile(self.norms, [0.05, 0.5, 0.95])
        return (
            f"{len(self)} gradient norms: median {middle:.4g}, 5 % below {low:.4g}, "
            f"5 % above {high:.4g}. {PRIVATE}"
        )


class GradientMeter:
    """Measures gradients of one model; keep it to measure again while training.

    *Formal guarantees*: none of privacy: everything is measured without noise. The
    model, its metrics and its optimizer are left as they are.

    Args:
      model: a Keras model.
      loss: ``loss(y, predictions)`` -> one loss per example; the compiled loss by
        default.
      variables: which variables; all trainable ones by default. A layer's
        `trainable_variables`, say, for the head alone.
      groups: how to group variables for norms by group, as in `LayerwiseClip`; one
        group for each layer by default.
      training: whether to run the model in training mode (dropout on). Batch
        normalisation must not combine examples.

    Raises:
      ValueError: if the model is not compiled and there is no `loss`.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        *,
        loss: Callable | None = None,
        variables: Sequence[tf.Variable] | None = None,
        groups: Any = None,
        training: bool = False,
    ):
        if loss is None and not _compat.is_compiled(model):
            raise ValueError(
                "loss is missing and the model is not compiled: pass "
                "loss=lambda y, p: ..., giving one loss per example."
            )
        if loss is not None and not isinstance(loss, tf.keras.losses.Loss):
            _arguments.function("loss", loss, 2)
        if variables is not None:
            variables = _arguments.items("variables", variables)
            variables = all_unwrapped(variables)
            if not all(isinstance(v, tf.Variable) for v in variables):
                raise ValueError(
                    "variables must be tf.Variables of the model, got "
                    f"{_arguments.shown(variables)}."
                )
        self._training = _arguments.boolean("training", training)
        self._model, self._loss = model, loss
        self._given, self._spec = variables, normalize_groups(groups)
        self._norm_graph = replicas.in_replicas(model, self._norms)
        self._gradient_graph = replicas.in_replicas(model, self._gradients)

    @property
    def model(self) -> tf.keras.Model:
        """The model."""
        return self._model

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables whose gradients are measured."""
        given = self._given
        return all_unwrapped(
            self._model.trainable_variables if given is None else given
        )

    def norms(
        self, data: Any, *, batch_size: int = 64, max_examples: int | None = None
    ) -> GradientNorms:
        """Measures the norms of all examples.

        Args:
          data: (x, y), (x, y, sample_weight), or a `tf.data.Dataset` of batches of
            that. Examples of sample weight 0 are left out.
          batch_size: for arrays.
          max_examples: measure no more than this many.

        Returns:
          The norms, by example.

        Raises:
          ValueError: if there are no examples.
        """
        found: list[tuple[np.ndarray, ...]] = []
        with untouched_metrics(self._model):
            for x, y, weight, places in batches(data, batch_size, max_examples):
                total, grouped, predicted = run(self._norm_graph, x, y, weight)
                labels, correct = classes(y, predicted)
                kept = np.ones(len(places), bool)
                if weight is not None:
                    kept = np.reshape(np.asarray(weight), [len(places), -1]).any(axis=1)
                row = (total.numpy(), grouped.numpy(), labels, correct, places)
                found.append(
                    tuple(None if part is None else part[kept] for part in row)
                )
        if not found:
            raise ValueError("data has no examples to measure gradient norms on.")
        columns = [
            None if any(p is None for p in parts) else np.concatenate(parts)
            for parts in zip(*found, strict=True)
        ]
        names = make_groups(self._spec, _compat.names_of(self.variables)).names
        norms, by_group, labels, correct, indices = columns
        return GradientNorms(norms, by_group, names, labels, correct, indices)

    def chunks(
        self, data: Any, *, batch_size: int = 64, max_examples: int | None = None
    ) -> Callable[[], Iterator[np.ndarray]]:
        """The gradients themselves, flattened and joined, chunk by chunk.

        Args:
          data: as for `norms`; a data set must give the same examples every time.
          batch_size: rows of a chunk.
          max_examples: no more than this many examples.

        Returns:
          A function that returns a new iterator over float32 arrays `[b, D]`: what
          `gradient_geometry` takes.
        """

        def read():
            with untouched_metrics(self._model):
                for x, y, weight, _ in batches(data, batch_size, max_examples):
                    yield run(self._gradient_graph, x, y, weight).numpy()

        return read

    def gradients(
        self, data: Any, *, batch_size: int = 64, max_examples: int | None = None
    ) -> np.ndarray:
        """All gradients as one array `[n, D]`; see `chunks`."""
        read = self.chunks(data, batch_size=batch_size, max_examples=max_examples)
        return np.concatenate(list(read()))

    def _engine(self, x, y, weight):
        predicted = self._model(x, training=self._training)
        if self._loss is None:
            loss = self._model.compute_loss(x, y, predicted, weight)
        else:
            loss = tf.convert_to_tensor(self._loss(y, predicted))
            if loss.shape.rank == 0:
                raise ValueError(
                    "loss must give one loss per example, got a scalar: use "
                    "reduction='none'."
                )
            loss = tf.reduce_mean(tf.reshape(loss, [tf.shape(loss)[0], -1]), axis=1)
            if weight is not None:
                weight = tf.reshape(tf.cast(weight, loss.dtype), [-1])
                loss = loss * weight
        with replicas.mark_loss_ops(), drawn_rows.given_element(None):
            engine = PerExampleGradients(
                loss, self.variables, replicas=replicas.count()
            )
        return engine, predicted

    def _norms(self, x, y, weight):
        engine, predicted = self._engine(x, y, weight)
        groups = make_groups(self._spec, _compat.names_of(self.variables))
        return engine.norms, engine.record_norms(groups.assignment), predicted

    def _gradients(self, x, y, weight):
        engine, _ = self._engine(x, y, weight)
        parts = engine.materialized()
        count = tf.shape(parts[0])[0]
        return tf.concat(
            [tf.reshape(tf.cast(p, tf.float32), [count, -1]) for p in parts], axis=1
        )
