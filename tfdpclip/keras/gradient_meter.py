"""Per-example gradient norms and gradients of a Keras model over a data set."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments, _progress
from tfdpclip._data import as_batches, check_data
from tfdpclip._object_notes import note_on_new_ops
from tfdpclip._variables import all_unwrapped
from tfdpclip.clipping.groups import Groups, make_groups, normalize_groups
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
    """

    norms: np.ndarray
    by_group: np.ndarray
    groups: tuple[str, ...]

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
      model: a compiled Keras model.
      variables: which variables; all trainable ones by default. A layer's
        `trainable_variables`, say, for the head alone.
      groups: how to group variables for norms by group, as in `LayerwiseClip`, or the
        groups; one group for each layer by default.

    Raises:
      ValueError: if the model is not compiled.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        *,
        variables: Sequence[tf.Variable] | None = None,
        groups: Any = None,
    ):
        if not _compat.is_compiled(model):
            raise ValueError(
                "The model has no loss yet: call model.compile first, for example "
                'model.compile(loss="sparse_categorical_crossentropy").'
            )
        if variables is not None:
            variables = _arguments.items("variables", variables)
            variables = all_unwrapped(variables)
            if not all(isinstance(v, tf.Variable) for v in variables):
                raise ValueError(
                    "variables must be tf.Variables of the model, got "
                    f"{_arguments.shown(variables)}."
                )
        self._model = model
        self._given, self._spec = variables, groups
        if not isinstance(groups, Groups):
            self._spec = normalize_groups(groups)
        self._norm_graph = replicas.in_replicas(model, self._norms)
        self._gradient_graph = replicas.in_replicas(model, self._gradients)

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables whose gradients are measured."""
        given = self._given
        return all_unwrapped(
            self._model.trainable_variables if given is None else given
        )

    def norms(self, data: Any, *, batch_size: int = 64) -> GradientNorms:
        """Measures the norms of all examples.

        Args:
          data: (x, y), (x, y, sample_weight), or a `tf.data.Dataset` of batches of
            that. Examples of sample weight 0 are left out.
          batch_size: for arrays.

        Returns:
          The norms, by example.

        Raises:
          ValueError: if there are no examples.
        """
        found: list[tuple[np.ndarray, ...]] = []
        with _untouched_metrics(self._model):
            for x, y, weight in self._batches(data, batch_size):
                parts = [part.numpy() for part in _run(self._norm_graph, x, y, weight)]
                kept = np.ones(len(parts[0]), bool)
                if weight is not None:
                    kept = np.reshape(np.asarray(weight), [len(kept), -1]).any(axis=1)
                found.append(tuple(part[kept] for part in parts))
        if not found:
            raise ValueError("data has no examples to measure gradient norms on.")
        norms, by_group = map(np.concatenate, zip(*found, strict=True))
        return GradientNorms(norms, by_group, self._groups().names)

    def chunks(
        self, data: Any, *, batch_size: int = 64
    ) -> Callable[[], Iterator[np.ndarray]]:
        """The gradients themselves, flattened and joined, chunk by chunk.

        Args:
          data: as for `norms`; a data set must give the same examples every time.
          batch_size: rows of a chunk.

        Returns:
          A function that returns a new iterator over float32 arrays `[b, D]`.
        """

        def read():
            with _untouched_metrics(self._model):
                for x, y, weight in self._batches(data, batch_size):
                    yield _run(self._gradient_graph, x, y, weight).numpy()

        return read

    def gradients(self, data: Any, *, batch_size: int = 64) -> np.ndarray:
        """All gradients as one array `[n, D]`; see `chunks`."""
        return np.concatenate(list(self.chunks(data, batch_size=batch_size)()))

    def _groups(self) -> Groups:
        if isinstance(self._spec, Groups):
            return self._spec
        return make_groups(self._spec, _compat.names_of(self.variables))

    def _batches(self, data, batch_size):
        """(x, y, sample_weight) for each batch."""
        check_data("data", data, "arrays, (x, y)")
        size = _arguments.integer("batch_size", batch_size, 1)
        if isinstance(data, list):
            data = tuple(data)
        elements = as_batches("data", data, size)
        total = int(elements.cardinality())
        total = None if total < 0 else total
        for element in _progress.bar(elements, title="pass", unit="batch", total=total):
            x, y, weight = tf.keras.utils.unpack_x_y_sample_weight(element)
            if y is None and _compat.compiled_loss_of(self._model) is not None:
                raise ValueError("data has no targets: give (x, y).")
            if len(tf.nest.flatten(x)[0]):
                yield x, y, weight

    def _engine(self, x, y, weight):
        predicted = self._model(x, training=False)
        loss = self._model.compute_loss(x, y, predicted, weight)
        with note_on_new_ops(made_of_a_loss=True), drawn_rows.given_element(None):
            return PerExampleGradients(loss, self.variables, replicas=replicas.count())

    def _norms(self, x, y, weight):
        engine = self._engine(x, y, weight)
        return engine.norms, engine.record_norms(self._groups().assignment)

    def _gradients(self, x, y, weight):
        parts = self._engine(x, y, weight).materialized()
        count = tf.shape(parts[0])[0]
        return tf.concat(
            [tf.reshape(tf.cast(p, tf.float32), [count, -1]) for p in parts], axis=1
        )


def _run(graph, x, y, weight):
    """Calls a graph that is traced once for all sizes of batches."""

    def any_size(value):
        if value is None:
            return None
        return tf.TensorSpec([None, *value.shape[1:]], value.dtype)

    graph.get_concrete_function(*tf.nest.map_structure(any_size, (x, y, weight)))
    return graph(x, y, weight)


@contextlib.contextmanager
def _untouched_metrics(model: tf.keras.Model) -> Iterator[None]:
    """Computing the compiled loss adds to the model's metrics: puts them back."""
    before = {id(v): v.numpy() for m in model.metrics for v in m.variables}
    try:
        yield
    finally:
        for variable in (v for m in model.metrics for v in m.variables):
            variable.assign(before.get(id(variable), tf.zeros_like(variable)))
