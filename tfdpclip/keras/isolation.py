"""A test, on real data, that a Keras model keeps its examples apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip._variables import all_unwrapped, path_of
from tfdpclip.gradients import ExampleIsolationError
from tfdpclip.gradients.loss.advice import of_layers
from tfdpclip.keras import _compat
from tfdpclip.keras.normalization import FrozenBatchNormalization

# TensorFlow's global seed where none was set.
_NO_SEED = 87654321
# The factor from an example to the outlier that replaces it.
_OUTLIER = 40.0
# The allowed relative distance between the gradient of a batch and the sum of the
# gradients of its halves: rounding, perhaps in bfloat16.
_ADDITIVE = 0.05
# The allowed change in a batch without the first example: kernels round in blocks.
_FEWER = 0.02
# Errors of models that accept only a range of numbers.
_REFUSED = tf.errors.InvalidArgumentError, ValueError


def check_isolation(
    model: tf.keras.Model,
    x: Any,
    y: Any,
    *,
    loss: Callable | None = None,
    examples: int = 3,
    tolerance: float = 1e-4,
) -> None:
    """Raises if changing one example changes another example's loss or its gradient.

    The test replaces an example, then half of the examples: by other examples of the
    batch and, if the inputs are floats, by 40 times their values and by zeros. With the
    model in training mode and the same random numbers (dropout masks and the like), it
    compares the losses of the unchanged examples, and the gradient of a random
    combination of these losses, which shows operations that scale gradients and keep
    losses. The test repeats this on a batch of nearly equal examples, and checks that
    the gradients of two halves of the batch add up to the gradient of the batch.
    Without the first example, the remaining examples have other places in the batch,
    and their losses and gradients must stay as well. The test leaves this part out for
    models that draw random numbers, because random numbers belong to places.
    Non-trainable state is restored afterwards.

    Args:
      model: a built or callable Keras model.
      x: a batch of inputs, two examples at least, batch axis first; or a nest of them.
        With ``rows_per_record`` of the optimizer, an example is that many rows.
      y: the labels.
      loss: ``loss(y, predictions)`` -> one loss per example. By default the compiled
        loss, unreduced.
      examples: how many examples to replace, one at a time.
      tolerance: the largest change of a loss, or of a variable's gradient, relative to
        its size, that counts as rounding; finite.

    Raises:
      ExampleIsolationError: if the loss or gradient of an unchanged example changed,
        or depends on its place or on the number of examples.
      ValueError: if the batch is too small, or the loss is unknown.

    >>> model = tf.keras.Sequential([tf.keras.layers.BatchNormalization()])
    >>> x = np.arange(8.0).reshape(4, 2)
    >>> check_isolation(model, x, x, loss=tf.keras.losses.mse)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    tfdpclip.gradients.errors.ExampleIsolationError: Replacing example 0 changed...
    """
    check_model(model)
    examples = _arguments.integer("examples", examples, 1)
    tolerance = _arguments.non_negative("tolerance", tolerance)
    if loss is not None and not isinstance(loss, (str, tf.keras.losses.Loss)):
        _arguments.function("loss", loss, 2)
    x = tf.nest.map_structure(tf.convert_to_tensor, x)
    y = tf.nest.map_structure(tf.convert_to_tensor, y)
    count = int(tf.nest.flatten(x)[0].shape[0])
    optimizer = getattr(model, "optimizer", None)
    each = getattr(optimizer, "rows_per_record", 1)
    if count % each:
        raise ValueError(
            f"x has {count} rows, but a record has rows_per_record={each} rows: give "
            "whole records." + see("records-of-several-rows")
        )
    if count < 2 * each:
        raise ValueError(
            f"x has {count // each} examples; the test needs at least two."
        )
    per_example = _loss_function(model, loss)
    model(x)  # builds the variables
    with _Runs(model, per_example, count, each) as run:
        single = np.eye(count // each, dtype=bool)[:examples].repeat(each, axis=1)
        even = run.even
        before = run(x, y)
        _compare(run, before, (x, y), [*single, even, ~even], tolerance)
        _check_fewer(run, before, (x, y), max(tolerance, _FEWER))
        batch = _nearly_equal(x, y)
        try:
            before = run(*batch)
        except _REFUSED:
            return
        _compare(run, before, batch, single[:1], tolerance)


class _Run:
    """A forward pass: the losses, and gradients of combinations of the losses."""

    def __init__(self, tape: tf.GradientTape, losses: tf.Tensor, variables: list):
        self._tape = tape
        self._losses = losses
        self._variables = variables
        self.losses = losses.numpy().astype(np.float64)

    def gradients(self, weights: np.ndarray) -> list[np.ndarray]:
        """The gradients of the weighted sum of the losses, for each variable."""
        if not self._variables:
            return []
        seed = tf.constant(weights, self._losses.dtype)
        found = self._tape.gradient(
            self._losses,
            self._variables,
            output_gradients=seed,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        return [tf.convert_to_tensor(part).numpy().astype(np.float64) for part in found]


class _Runs:
    """Runs a model on batches from one state, with the same random numbers."""

    def __init__(
        self, model: tf.keras.Model, per_example: Callable, count: int, each: int
    ):
        self._model = model
        self._per_example = per_example
        self.count, self.each = count, each
        # A mask of the rows of every second record.
        self.even = np.arange(count) // each % 2 == 0
        self.variables = all_unwrapped(model.trainable_variables)
        # The classes of layers that train, or have no variables.
        self.layers = [
            type(layer).__name__
            for layer in _compat.layers_of(model)
            if layer.trainable and not isinstance(layer, FrozenBatchNormalization)
        ]
        rng = np.random.default_rng()
        self._seed = int(rng.integers(2**31))
        # Weights of both signs, away from 0.
        self.weights = rng.uniform(0.5, 1.5, count) * rng.choice([-1, 1], count)

    def __enter__(self) -> _Runs:
        random = _compat.random_states_of(self._model)
        known = {id(v) for v in all_unwrapped(random)}
        kept = all_unwrapped(self._model.non_trainable_variables)
        kept = [v for v in kept if id(v) not in known]
        self._random = [(v, tf.identity(v)) for v in random]
        self._state = [(v, tf.identity(v)) for v in kept]
        given = tf.compat.v1.get_seed(0)[0]
        self._given_seed = None if given == _NO_SEED else given
        return self

    def _restore(self, random: bool = True) -> None:
        for variable, value in self._state + self._random * random:
            variable.assign(value)

    def __exit__(self, *_: object) -> None:
        self._restore()
        tf.random.set_seed(self._given_seed)

    def __call__(self, x: Any, y: Any, other_numbers: bool = False) -> _Run:
        self._restore(random=not other_numbers)
        tf.random.set_seed(self._seed + other_numbers)
        count = len(tf.nest.flatten(x)[0])
        with tf.GradientTape(persistent=True) as tape:
            found = self._per_example(y, self._model(x, training=True))
            losses = tf.convert_to_tensor(found)
            if losses.shape.rank == 0 or losses.shape[0] != count:
                raise ValueError(
                    f"loss must give one loss per example, {count} in all, got "
                    f"shape {losses.shape}."
                )
            losses = tf.reshape(losses, [count, -1])
            if not losses.dtype.is_floating:
                losses = tf.cast(losses, tf.float32)
            losses = tf.reduce_mean(losses, axis=1)
        return _Run(tape, losses, self.variables)


def _compare(
    run: _Runs,
    before: _Run,
    batch: tuple[Any, Any],
    choices: Iterable[np.ndarray],
    tolerance: float,
) -> None:
    """Raises if a replacement changes the losses or gradients of unchanged examples."""
    _check_additive(run, before)
    for replaced in choices:
        weights = np.where(replaced, 0.0, run.weights)
        gradients = before.gradients(weights)
        for made_up, other in _replacements(*batch, replaced, run.each):
            try:
                after = run(*other)
            except _REFUSED:
                if made_up:
                    continue
                raise
            _check_losses(run, before.losses, after.losses, replaced, tolerance)
            moved = after.gradients(weights)
            # An overflowing outlier gives 0 times infinity, which is no finding.
            if not made_up or all(np.isfinite(part).all() for part in moved):
                _check_gradients(run, gradients, moved, replaced, tolerance)


def _check_fewer(
    run: _Runs, before: _Run, batch: tuple[Any, Any], tolerance: float
) -> None:
    """Raises if losses or gradients change where the first example is left out."""
    if not np.array_equal(before.losses, run(*batch, other_numbers=True).losses):
        return  # Random numbers belong to the places in the batch.
    kept = slice(run.each, None)
    try:
        after = run(*tf.nest.map_structure(lambda t: t[kept], batch))
    except _REFUSED:
        return  # The model takes batches of one size.
    old, new = before.losses[kept], after.losses
    size = np.maximum(np.abs(old), np.abs(before.losses).mean())
    moved = ~(np.abs(new - old) <= tolerance * size + 1e-12) & np.isfinite(old)
    what = f"the loss of example {run.each + int(np.argmax(moved))}"
    if not moved.any():
        weights = run.weights * (np.arange(run.count) >= run.each)
        gradients = before.gradients(weights), after.gradients(run.weights[kept])
        worst = _worst(*gradients, tolerance)
        if worst is None:
            return
        name = path_of(run.variables[worst[0]])
        what = f"the gradient of the other examples' losses with respect to {name!r}"
    raise ExampleIsolationError(
        f"Leaving out example 0 changed {what}: it depends on the place of an example "
        "in the batch, or on the number of examples, so one record less moves the "
        "gradients of all, and clipping protects no example. Make it from each "
        "example alone, or from constants." + see("mixed-examples")
    )


def _replacements(
    x: Any, y: Any, replaced: np.ndarray, each: int
) -> Iterator[tuple[bool, tuple[Any, Any]]]:
    """Pairs: whether a replacement is made up, and the batch with replacements."""
    places = np.arange(len(replaced))
    order = np.where(replaced, (places + each) % len(replaced), places)
    pick = lambda t: tf.gather(t, order)  # noqa: E731
    yield False, (tf.nest.map_structure(pick, x), tf.nest.map_structure(pick, y))
    if not any(t.dtype.is_floating for t in tf.nest.flatten(x)):
        return
    for factor in (_OUTLIER, 0.0):
        factors = np.where(replaced, factor, 1.0)
        yield True, (tf.nest.map_structure(lambda t, f=factors: _scaled(t, f), x), y)


def _scaled(t: tf.Tensor, factors: np.ndarray) -> tf.Tensor:
    """Each example times its factor; integer tensors stay unchanged."""
    if not t.dtype.is_floating:
        return t
    shape = [-1] + [1] * (t.shape.rank - 1)
    return t * tf.cast(tf.reshape(tf.constant(factors), shape), t.dtype)


def _nearly_equal(x: Any, y: Any) -> tuple[Any, Any]:
    """A batch of copies of its last example, which differ by a thousandth."""
    count = int(tf.nest.flatten(x)[0].shape[0])
    repeat = lambda t: tf.gather(t, np.full(count, count - 1))  # noqa: E731
    factors = 1 - 1e-3 * np.arange(count) / count
    copies = tf.nest.map_structure(lambda t: _scaled(repeat(t), factors), x)
    return copies, tf.nest.map_structure(repeat, y)


def _named(replaced: np.ndarray) -> str:
    names = [str(i) for i in np.flatnonzero(replaced)]
    if len(names) == 1:
        return f"example {names[0]}"
    return f"examples {', '.join(names[:3])}" + ", ..." * (len(names) > 3)


def _check_losses(run, before, after, replaced: np.ndarray, tolerance: float) -> None:
    rest = ~replaced
    change = np.abs(after - before)[rest]
    size = np.maximum(np.abs(before[rest]), np.abs(before).mean())
    worst = int(np.argmax(change - tolerance * size))
    if not np.all(change <= tolerance * size + 1e-12):
        raise ExampleIsolationError(
            f"Replacing {_named(replaced)} changed the loss of example "
            f"{np.flatnonzero(rest)[worst]} by {change[worst]:.3g}: the model "
            "combines the examples of a batch, so clipping protects no example. "
            + of_layers(run.layers)
            + see("mixed-examples")
        )


def _check_gradients(run, before, after, replaced, tolerance: float) -> None:
    worst = _worst(before, after, tolerance)
    if worst is not None:
        name, change = path_of(run.variables[worst[0]]), worst[1]
        raise ExampleIsolationError(
            f"Replacing {_named(replaced)} changed the gradient of the other examples' "
            f"losses with respect to {name!r}, by {change:.3g} of its norm, and left "
            "the losses as they were: a number made from several examples scales or "
            "masks gradients (behind tf.stop_gradient, in a tf.where or in a custom "
            "gradient), so clipping protects no example. Make it from each "
            "example alone, or from constants." + see("mixed-examples")
        )


def _check_additive(run: _Runs, before: _Run) -> None:
    """Raises if the backward pass combines the gradients of the batch."""
    even = run.even
    halves = [np.where(half, run.weights, 0.0) for half in (even, ~even)]
    first, second, both = map(before.gradients, (*halves, run.weights))
    total = [a + b for a, b in zip(first, second, strict=True)]
    worst = _worst(total, both, _ADDITIVE)
    if worst is not None:
        raise ExampleIsolationError(
            "The gradients of two halves of the batch, with respect to "
            f"{path_of(run.variables[worst[0]])!r}, do not add up to the gradient of "
            f"the batch: they differ by {worst[1]:.3g} of its norm. A custom gradient "
            "combines the gradients of several examples, so clipping protects no "
            "example. Write it for each example alone." + see("mixed-examples")
        )


def _worst(before, after, tolerance: float) -> tuple[int, float] | None:
    """The variable with the largest change of its gradient, and the change; or None."""
    moved = np.array(list(map(_distance, before, after)))
    sizes = np.array([np.linalg.norm(part[np.isfinite(part)]) for part in before])
    if not len(sizes):
        return None
    # Some gradients are 0 except for rounding, as of a bias before a normalisation.
    allowed = tolerance * np.maximum(sizes, 1e-3 * sizes.max()) + 1e-12
    if np.all(moved <= allowed):
        return None
    index = int(np.argmax(moved / allowed))
    return index, float(moved[index] / max(sizes[index], 1e-30))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The norm of the difference, over entries that are finite in either array."""
    known = np.isfinite(a) | np.isfinite(b)
    distance = float(np.linalg.norm((b - a)[known]))
    return np.inf if np.isnan(distance) else distance


def check_model(model: Any) -> tf.keras.Model:
    """Returns `model`, or raises ValueError unless it is a Keras model."""
    if not isinstance(model, tf.keras.Model):
        raise ValueError(f"model must be a Keras model, got {_arguments.shown(model)}.")
    return model


def _loss_function(model, loss) -> Callable:
    given = _compat.compiled_loss_of(model) if loss is None else loss
    if given is None:
        raise ValueError(
            "The model is not compiled, so loss is missing: pass "
            "loss=lambda y, p: ..., giving one loss per example."
        )
    if isinstance(given, (dict, list, tuple)):
        raise ValueError(
            "loss: a model with several losses needs one function of all outputs, "
            "giving one loss per example."
        )
    if isinstance(given, tf.keras.losses.Loss):
        return given.call
    try:
        return tf.keras.losses.get(given)
    except ValueError as error:
        raise ValueError(f"loss is not a loss that Keras knows: {error}") from error
