"""Per-example gradients of one parameter use, in forms that avoid building them.

A form knows the gradients g_1 ... g_B (one for each example) of a parameter tensor at
an op, and gives three results: the squared norms, the weighted sum, and, for a few
examples at a time, the gradients themselves. Everything is in float32 at least.

Ghost norms and book-keeping at the level of ops: Li et al. (2022), Bu et al. (2023).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable

import tensorflow as tf

from tfdpclip._constants import once, vector
from tfdpclip._devices import in_xla, on_cpus


class Form(abc.ABC):
    """The gradients of one use, for every example.

    Attributes:
      shape: the static shape of an example's gradient, a list.
      batch_size: B, a scalar int32 tensor.
    """

    shape: list[int]
    batch_size: tf.Tensor
    # How many rows of the saved tensors belong to an example; None if unknown.
    rows: int | None = 1

    @property
    @abc.abstractmethod
    def dtype(self) -> tf.DType:
        """The type of the gradients."""

    def measured(self, budget: Budget) -> Measured:
        """The norms, and the tensors from which the weighted sum is then made.

        Gradients that were built for the norms are kept for the sum, where that saves
        work and the budget has room until the end of the step.
        """
        saved = self.saved()

        def weighted_sum(weights, saved):
            return self.replaced(saved).weighted_sum(weights)

        rows = [self.rows] * len(saved)
        return Measured(self.squared_norms(budget), saved, rows, weighted_sum)

    @abc.abstractmethod
    def squared_norms(self, budget: Budget) -> tf.Tensor:
        """The squared norms, `[B]`; no gradient is kept for the sum."""

    @abc.abstractmethod
    def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
        """sum_i weights_i g_i, of `shape`. Weights are `[B]`."""

    @abc.abstractmethod
    def part(self, start: tf.Tensor | int, size: tf.Tensor) -> Form:
        """The form of examples start ... start + size - 1."""

    @abc.abstractmethod
    def gradients(self) -> tf.Tensor:
        """All gradients, `[B, *shape]`."""

    @property
    def has_several_terms(self) -> bool:
        """Whether an example's gradient is a sum of terms that may cancel."""
        return True

    @abc.abstractmethod
    def part_squares(self) -> tf.Tensor:
        """`[B]`: the summed squares of each term, before any terms cancel."""

    def first_part_squares(self, count: tf.Tensor) -> tf.Tensor:
        """`part_squares` of the first examples, `[count]`."""
        return self.part(0, count).part_squares()

    @abc.abstractmethod
    def saved(self) -> list[tf.Tensor]:
        """Tensors of `weighted_sum`; zeros in an example's rows zero its gradient."""

    @abc.abstractmethod
    def replaced(self, saved: list[tf.Tensor]) -> Form:
        """This form with new values of the tensors of `saved`."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Squared norms of gradients, and the tensors that their weighted sum is made of.

    Attributes:
      squared_norms: `[B]`.
      saved: the tensors of the sum: zeros in an example's rows zero its gradient.
      rows: for each saved tensor, how many rows an example has; None where unknown.
      weighted_sum: `weighted_sum(weights, saved)` is sum_i weights_i g_i, for weights
        `[B]`, made of the saved tensors or of tensors in their place.
    """

    squared_norms: tf.Tensor
    saved: list[tf.Tensor]
    rows: list[int | None]
    weighted_sum: Callable[[tf.Tensor, list[tf.Tensor]], tf.Tensor]


def keep_gradients(values: list[tf.Tensor], finish: Callable) -> Measured:
    """Gradients that were built for the norms and are kept for the weighted sum.

    The sum needs nothing else of the use, so the input of the op and the gradient at
    its output can be freed.

    Args:
      values: tensors `[B, ...]` that hold the gradients' entries.
      finish: turns the weighted sums of `values`, without the leading axis, into the
        gradient.
    """

    def weighted_sum(weights, saved):
        return finish([sum_weighted(weights, value) for value in saved])

    squares = tf.add_n([sum_squares(value) for value in values])
    return Measured(squares, values, [1] * len(values), weighted_sum)


class Budget:
    """How much memory materialised gradients may take at once.

    Args:
      limit: bytes.
      batch_size: the number of examples to plan for.
    """

    def __init__(self, limit: int, batch_size: int):
        self.limit = limit
        self.batch_size = max(1, batch_size)

        self._reserved = 0.0

    def fits(self, bytes_per_example: float) -> bool:
        """Whether the whole batch fits, while a single variable is processed."""
        return bytes_per_example * self.batch_size <= self.limit

    def reserve(self, bytes_per_example: float) -> bool:
        """Reserves room for the whole batch until the end of the step, if it fits."""
        wanted = self._reserved + bytes_per_example * self.batch_size
        if wanted > self.limit:
            return False
        self._reserved = wanted
        return True

    def chunk(self, bytes_per_example: float) -> int:
        """How many examples fit at once; at least 1."""
        return max(1, int(self.limit // max(1.0, bytes_per_example)))


def in_chunks(
    compute, batch_size: tf.Tensor, chunk: int, width: int | None = None
) -> tf.Tensor:
    """`compute(start, size)` -> `[size]` over the batch, `chunk` examples at a time.

    With a `width`, `compute` returns `[size, width]`.

    The last chunk is moved back to end with the batch, so that every chunk has the same
    size, as XLA needs; the entries that are computed twice are equal.
    """
    size = tf.minimum(chunk, tf.maximum(batch_size, 1))
    count = tf.where(batch_size > 0, (batch_size + size - 1) // size, 0)
    offsets = tf.range(size)
    tail = [] if width is None else [width]

    def body(i, out):
        start = tf.minimum(i * size, batch_size - size)
        values = tf.cast(compute(start, size), tf.float32)
        places = (start + offsets)[:, tf.newaxis]
        return i + 1, tf.tensor_scatter_nd_update(out, places, values)

    _, out = tf.while_loop(
        lambda i, out: i < count,
        body,
        (tf.constant(0), tf.zeros([batch_size, *tail], tf.float32)),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, *tail])),
        parallel_iterations=1,
    )
    return out


def sum_squares(tensor: tf.Tensor, axes: int | None = None) -> tf.Tensor:
    """Sums the squares over the last `axes`; by default over all but the first."""
    rank = tensor.shape.rank
    axes = list(range(rank - (rank - 1 if axes is None else axes), rank))
    if not axes:
        return tf.square(tensor)
    if in_xla():  # XLA fuses the two ops, and has no op for the norm.
        return tf.reduce_sum(tf.square(tensor), axis=axes)
    # The norm op passes through memory once, without a copy of the squares.
    return tf.square(tf.math.reduce_euclidean_norm(tensor, axis=vector(*axes)))


def merge_steps(
    tensor: tf.Tensor,
    batch_size: tf.Tensor,
    width: int,
    axes: int = 1,
    rows: int | None = None,
) -> tf.Tensor:
    """`[B * rows, ..., *tail]` as `[B, T, width]`, with a tail of `axes` axes.

    Works for an empty batch, for which a size of -1 would be ambiguous.
    """
    inner = tensor.shape[1 : tensor.shape.rank - axes].as_list()
    if None in inner:
        inner = [tf.reduce_prod(tf.shape(tensor)[1 : tensor.shape.rank - axes])]
    rows = rows or rows_per_example(tensor, batch_size)
    return tf.reshape(tensor, vector(batch_size, rows * math.prod(inner), width))


def rows_per_example(tensor: tf.Tensor, batch_size: tf.Tensor) -> tf.Tensor:
    """How many rows of axis 0 belong to an example; 1 if there are no examples."""
    return tf.maximum(tf.shape(tensor)[0] // tf.maximum(batch_size, 1), 1)


def sum_weighted(weights: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """sum_i weights_i tensor_i, for weights `[B]` and a tensor `[B, ...]`."""
    shape = tensor.shape[1:].as_list()
    if None in shape or 0 in shape:
        return tf.tensordot(weights, tensor, 1)
    rows = once(("row", weights.ref()), lambda: tf.reshape(weights, vector(1, -1)))
    if len(shape) == 1:
        # The result is not reshaped to the static shape: for an empty batch,
        # TensorFlow's own gradients can have a different width in the step, and nothing
        # corrects the width, because the static shape hides it.
        return tf.squeeze(tf.matmul(rows, tensor), axis=0)
    flat = tf.reshape(tensor, vector(-1, math.prod(shape)))
    if in_xla() and on_cpus():
        # For a single row the XLA of TensorFlow 2.14 writes a loop of its own, which
        # takes eight times as long as the matrix product of two rows.
        rows = tf.concat([rows, tf.zeros_like(rows)], axis=0)
        return tf.reshape(tf.matmul(rows, flat)[0], vector(*shape))
    return tf.reshape(tf.matmul(rows, flat), vector(*shape))


def rows_where(kept: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` with zeros in the rows where `kept`, a vector, is False."""
    shape = [-1] + [1] * (tensor.shape.rank - 1)
    mask = once(
        ("mask", kept.ref(), len(shape)), lambda: tf.reshape(kept, vector(*shape))
    )
    zero = once(("zero", tensor.dtype), lambda: tf.zeros([], tensor.dtype))
    return tf.where(mask, tensor, zero)


def cut_rows(tensor: tf.Tensor, start, size) -> tf.Tensor:
    if in_xla():  # XLA slices by a size; an unknown end is no slice.
        others = [0] * (tensor.shape.rank - 1)
        out = tf.slice(tensor, [start, *others], [size, *(-1 for _ in others)])
    else:
        from_first = isinstance(start, int) and start == 0
        out = _slice(tensor, start, size if from_first else start + size)
    out.set_shape([None, *tensor.shape[1:]])
    return out


def first_rows(tensor: tf.Tensor, count: tf.Tensor | None) -> tf.Tensor:
    """The first `count` rows of a tensor, or all."""
    return tensor if count is None else _slice(tensor, 0, count)


def _slice(tensor: tf.Tensor, start: tf.Tensor | int, end: tf.Tensor) -> tf.Tensor:
    return tf.strided_slice(tensor, vector(start), vector(end), vector(1))


class Explicit(Form):
    """Gradients that are cheap enough to build: biases, scales, small parameters.

    Args:
      values: `[B, *shape]`.
      shape: the static shape of a gradient.
      parts: gives the summed squares, `[B]`, of the terms of `values` before they
        cancel; None where there is a single term, or the terms are not known. Called
        only where a step is compared.
    """

    def __init__(
        self,
        values: tf.Tensor,
        shape: list[int],
        parts: Callable[[tf.Tensor | None], tf.Tensor] | None = None,
    ):
        self.values = values
        self.shape = list(shape)
        self._parts = parts

    @property
    def batch_size(self):
        return tf.shape(self.values)[0]

    @property
    def dtype(self):
        return self.values.dtype

    def squared_norms(self, budget):
        return sum_squares(self.values)

    def weighted_sum(self, weights):
        return sum_weighted(weights, self.values)

    def part(self, start, size):
        return Explicit(cut_rows(self.values, start, size), self.shape)

    def gradients(self):
        return self.values

    @property
    def has_several_terms(self):
        return self._parts is not None

    def part_squares(self):
        return sum_squares(self.values) if self._parts is None else self._parts(None)

    def first_part_squares(self, count):
        if self._parts is None:
            return super().first_part_squares(count)
        return self._parts(count)

    def saved(self):
        return [self.values]

    def replaced(self, saved):
        return Explicit(*saved, self.shape)
