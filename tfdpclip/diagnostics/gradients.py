"""Per-example gradient norms and gradients of a Keras model over a data set."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip._variables import all_unwrapped
from tfdpclip.clipping import as_rule, bound_rule, make_groups
from tfdpclip.clipping.groups import normalize_groups
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


@dataclasses.dataclass(frozen=True)
class SignalToNoise:
    """Clipped sums against the noise of a step. Not to be released, as the norms.

    Attributes:
      signal: `[steps, L]`, the norm of each batch's clipped sum, by group.
      noise: `[L]`, the root of the noise's expected squared norm in each group.
      groups: the groups' names.
    """

    signal: np.ndarray
    noise: np.ndarray
    groups: tuple[str, ...]

    @property
    def ratio(self) -> np.ndarray:
        """`[steps, L]`: signal over noise; infinite without noise."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.signal / self.noise


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
        self._sum_graph: tuple | None = None
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

    def signal_to_noise(
        self,
        data: Any,
        clip: Any,
        noise_multiplier: float,
        *,
        state: Any = None,
        batch_size: int = 64,
        max_examples: int | None = None,
    ) -> SignalToNoise:
        """Compares each batch's clipped sum with the noise that a step adds to it.

        Args:
          data: as for `norms`. A batch of it stands for a step, so its size should be
            the expected batch size of training.
          clip: a clip norm or a clip rule.
          noise_multiplier: z, or better the optimizer's `gradient_noise_multiplier`.
          state: the rule's state; its initial one by default.
          batch_size: for arrays.
          max_examples: use no more than this many.

        Returns:
          The norms of the sums and of the noise, by step and group.

        Raises:
          ValueError: if an argument is out of range or there are no data.
        """
        z = _arguments.non_negative("noise_multiplier", noise_multiplier)
        names = _compat.names_of(self.variables)
        rule = bound_rule(as_rule(clip), names)
        state = rule.initial_state() if state is None else state
        groups = make_groups(self._spec, names)
        if self._sum_graph is None or self._sum_graph[0] != rule:
            graph = replicas.in_replicas(
                self._model, functools.partial(self._sums, rule=rule)
            )
            self._sum_graph = rule, graph
        scales = np.asarray(rule.noise_scales(state))
        variances = np.zeros(len(groups))
        for i, variable in enumerate(self.variables):
            column = None if rule.assignment is None else rule.assignment[i]
            scale = float(scales if column is None else scales[column])
            variances[groups.assignment[i]] += (z * scale) ** 2 * np.prod(
                variable.shape
            )
        signals = []
        with untouched_metrics(self._model):
            for x, y, weight, _ in batches(data, batch_size, max_examples):
                signals.append(run(self._sum_graph[1], x, y, weight, state).numpy())
        if not signals:
            raise ValueError("data has no examples to measure gradients on.")
        return SignalToNoise(np.stack(signals), np.sqrt(variances), groups.names)

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
          `optimal_clip` and `gradient_geometry` take.
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

    def _sums(self, x, y, weight, state, rule):
        engine, _ = self._engine(x, y, weight)
        groups = make_groups(self._spec, _compat.names_of(self.variables))
        squares: list = [0.0] * len(groups)
        for i, part in enumerate(engine.clipped_sum(rule, state)):
            part = tf.convert_to_tensor(part)
            squares[groups.assignment[i]] += tf.reduce_sum(
                tf.square(tf.cast(part, tf.float32))
            )
        return tf.sqrt(tf.stack(squares))

    def _gradients(self, x, y, weight):
        engine, _ = self._engine(x, y, weight)
        parts = engine.materialized()
        count = tf.shape(parts[0])[0]
        return tf.concat(
            [tf.reshape(tf.cast(p, tf.float32), [count, -1]) for p in parts], axis=1
        )


def gradient_norms(
    model: tf.keras.Model,
    data: Any,
    *,
    batch_size: int = 64,
    max_examples: int | None = None,
    **options: Any,
) -> GradientNorms:
    """The gradient norms of all examples, once.

    *Formal guarantees*: none of privacy: the norms are measured without noise.

    Args:
      model: a Keras model.
      data: (x, y), (x, y, sample_weight), or a `tf.data.Dataset` of batches.
      batch_size: for arrays.
      max_examples: measure no more than this many.
      **options: see `GradientMeter`.

    Returns:
      The norms, by example.

    Raises:
      ValueError: if the model is not compiled and there is no `loss`, or no data.

    >>> model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(
    ...     1, use_bias=False, kernel_initializer="zeros")])
    >>> found = gradient_norms(model, ([[3.0, 4.0]], [[0.5]]),
    ...                        loss=tf.keras.losses.MeanSquaredError("none"))
    >>> found.norms.tolist()
    [5.0]
    """
    meter = GradientMeter(model, **options)
    return meter.norms(data, batch_size=batch_size, max_examples=max_examples)
