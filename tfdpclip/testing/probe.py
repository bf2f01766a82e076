"""Runs the training step of a compiled model and captures its release."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdpclip._arguments import shown
from tfdpclip._variables import all_unwrapped, unwrapped
from tfdpclip.keras import _compat
from tfdpclip.keras.private_optimizer import PrivateOptimizer
from tfdpclip.keras.watching.followed_step import FollowedStep
from tfdpclip.sampling import row_weights


@dataclasses.dataclass(frozen=True)
class Release:
    """The release of one logical step.

    Attributes:
      gradients: the gradients given to the optimizer's update, an array per variable.
      clip_state: the clip rule's state after the step, one flat array.
      iterations: the number of logical steps that were taken.
    """

    gradients: tuple[np.ndarray, ...]
    clip_state: np.ndarray
    iterations: int

    def flat(self) -> np.ndarray:
        """All gradients in one vector, in float64."""
        return np.concatenate([g.ravel().astype(np.float64) for g in self.gradients])


class DialledNoise:
    """Replaces a noise source: returns `level` times the requested stddev.

    At level 0 a step releases its sums without noise; the difference between levels 1
    and 0 is the stddev of the noise in the release, after all later operations.
    """

    def __init__(self):
        with tf.init_scope():
            self.level = tf.Variable(0.0, trainable=False)
        self.seed = None
        self._seed = np.random.default_rng().integers(0, 2**31, 2, np.int32)

    def sample_all(
        self, shapes: Sequence, stddevs: Sequence, dtypes: Sequence | None = None
    ) -> list[tf.Tensor]:
        """As `GaussianNoise.sample_all`: `level * stddev`, in every entry."""
        dtypes = dtypes or [tf.float32] * len(shapes)
        return [
            tf.fill(shape, tf.cast(self.level * tf.cast(stddev, tf.float32), dtype))
            for shape, stddev, dtype in zip(shapes, stddevs, dtypes, strict=True)
        ]

    def seed_pair(self) -> tf.Tensor:
        """The same perturbation in every run, so that neighbours can be compared."""
        return tf.constant(self._seed)


class _MarkedRows(NamedTuple):
    """Batches whose weights mark the drawn rows, and do nothing else."""

    weighted: bool = False


MARKED_ROWS: Any = _MarkedRows()


class Probe:
    """Runs one logical step of a compiled model, repeatedly, from the same state.

    The model's own `train_step` runs on elements of draws, compiled as `fit` would
    compile it. The model does not change: the gradients for the update are captured.

    Args:
      model: a built, compiled model with an optimizer of `dpc.keras`.
      noise: a noise source that replaces the optimizer's; None keeps the optimizer's.

    Raises:
      ValueError: if the model is not compiled with a private optimizer.
    """

    def __init__(self, model: tf.keras.Model, noise: Any = None):
        optimizer = check_model(model)
        self._model = model
        self._optimizer = optimizer
        self.variables = all_unwrapped(model.trainable_variables)
        with tf.init_scope():
            self._caught = [
                tf.Variable(tf.zeros(v.shape, tf.float32), trainable=False)
                for v in self.variables
            ]
        self._places = {id(v): i for i, v in enumerate(self.variables)}
        self._noise = noise
        self._followed = FollowedStep(model)
        self._step = tf.function(
            self._followed, jit_compile=_compat.compiles_by_xla(model) or None
        )

    def _catch(self, grads_and_vars):
        for gradient, variable in grads_and_vars:
            self._caught[self._places[id(unwrapped(variable))]].assign(
                tf.cast(gradient, tf.float32)
            )

    def __call__(self, batches: Sequence[Any]) -> Release:
        """Runs one logical step on its physical batches, from the model's state."""
        optimizer = self._optimizer
        for caught in self._caught:
            caught.assign(tf.zeros_like(caught))
        with (
            restored(self._model, optimizer),
            self._caught_updates(),
            self._followed.in_place(MARKED_ROWS),
        ):
            before = int(optimizer.iterations.numpy())
            for batch in batches:
                self._step(batch)
            steps = int(optimizer.iterations.numpy()) - before
            parts = [
                np.ravel(part.numpy())
                for part in tf.nest.flatten(optimizer.clip_state)
                if part.dtype.is_floating
            ]
            gradients = tuple(caught.numpy() for caught in self._caught)
        state = np.concatenate(parts) if parts else np.zeros(0)
        return Release(gradients, state.astype(np.float64), steps)

    @contextlib.contextmanager
    def _caught_updates(self):
        optimizer = self._optimizer
        own = optimizer._noise
        if self._noise is not None:
            optimizer._noise = self._noise
        try:
            with _compat.updated_by(optimizer, self._catch):
                yield
        finally:
            optimizer._noise = own


def refuse_correlated(optimizer: Any) -> None:
    """Raises for correlated noise, which a single step cannot test."""
    if optimizer.noise is not None:
        raise ValueError(
            "model has correlated noise, and this test is for independent steps. Test "
            "the model with noise=None: clipping, sums, counts and the division are "
            "the same; the library's own tests compare correlated noise with its "
            "matrix."
        )


@contextlib.contextmanager
def restored(model: tf.keras.Model, optimizer: Any) -> Iterator[None]:
    """Restores all variables of a model, its metrics and its optimizer afterwards."""
    kept = [*model.variables, *optimizer.variables]
    kept += [v for metric in model.metrics for v in metric.variables]
    before = [v.numpy() for v in kept]
    try:
        yield
    finally:
        for variable, value in zip(kept, before, strict=True):
            variable.assign(value)


def check_model(model: tf.keras.Model) -> Any:
    """Returns the model's private optimizer.

    Raises:
      ValueError: if the model has none.
    """
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, PrivateOptimizer):
        raise ValueError(
            "model must be compiled with a private optimizer, such as "
            f"dpc.keras.DPSGD(...), got {type(optimizer).__name__}."
        )
    if not model.built:
        raise ValueError(
            "model has no variables yet: call it on a batch first, model(x)."
        )
    optimizer.build(model.trainable_variables)
    return optimizer


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """Returns (x, y, sample_weight) of a batch, None for missing parts.

    Raises:
      ValueError: if `batch` is not a batch.
    """
    if not isinstance(batch, (tuple, list)) or not 1 <= len(batch) <= 3:
        raise ValueError(
            f"batch must be (x, y) or (x, y, sample_weight), got {shown(batch)}."
        )
    for array in tf.nest.flatten(batch[0]) or [None]:
        if not np.ndim(array) or np.asarray(array).dtype == object:
            raise ValueError(
                f"batch must start with x, arrays of examples, got {shown(array)}."
            )
    return tf.keras.utils.unpack_x_y_sample_weight(tuple(batch))


def as_batches(batch: Any, pieces: int) -> list[tuple[Any, Any, np.ndarray]]:
    """Arrays as `pieces` physical batches (x, y, weight).

    Raises:
      ValueError: if the number of examples is not a multiple of `pieces`, or 0.
    """
    x, y, weight = unpack(batch)
    x = tf.nest.map_structure(np.asarray, x)
    y = tf.nest.map_structure(np.asarray, y)
    size = len(tf.nest.flatten(x)[0])
    if size == 0 or size % pieces:
        raise ValueError(
            f"batch has {size} examples, which cannot be cut into {pieces} equal "
            "physical batches (accumulation_steps of the optimizer)."
        )
    weight = np.ones(size, np.float32) if weight is None else np.asarray(weight)
    if y is not None and weight.ndim == 1:
        # The axes that weights of drawn batches have.
        specs = [
            tf.nest.map_structure(lambda a: tf.TensorSpec(a.shape, a.dtype), part)
            for part in (weight, y)
        ]
        fitted = row_weights.fitted(*specs)
        if not tf.nest.is_nested(fitted):
            weight = weight.reshape([-1, *fitted.shape[1:]])
    rows = size // pieces
    cut = [slice(i * rows, (i + 1) * rows) for i in range(pieces)]
    return [
        (
            tf.nest.map_structure(lambda a, s=s: a[s], x),
            tf.nest.map_structure(lambda a, s=s: a[s], y),
            weight[s].astype(np.float32),
        )
        for s in cut
    ]
