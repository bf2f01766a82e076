"""The sums of the gradients of the examples that stay, when others come.

Rows of what gradients are made of (`replaced.py`) do not say all of it. A statistic of
the batch may choose which entries of a variable a gradient goes to, by a condition or
an index; it may work on the way from the op where a variable meets the batch back to
the variable, as in a gradient function of the variable's own; and it may hide in a row
beside a much larger number, which meets a zero. So what is released is compared, too:
the gradient of each variable, of the losses of those that stay under random weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdpclip._devices import on_cpus
from tfdpclip._docs import see
from tfdpclip.gradients import row_tables
from tfdpclip.gradients.backward import Backward, own_gradients
from tfdpclip.gradients.dataflow import Dataflow
from tfdpclip.gradients.row_tables import Layout, Weights

# How far a variable's sum may be off, relative to its size, and to that of all
# variables together: rounding, where parts of an example cancel.
_TOLERANCE, _ELSEWHERE, _COARSE = 2e-5, 1e-3, 0.1
# In a batch of another size all rows are rounded another way, and a few of them may
# fall on the other side of a threshold.
_OTHER_SIZES = 1e-2
_ROUNDING, _COARSE_ROUNDING = 1e-5, 1e-2


def another_size(label: str) -> str:
    """What to say where something is another in a smaller batch."""
    what = label.replace("'", "`")
    return (
        "ExampleIsolationError: of the first half of the batch alone, "
        f"{what} is another than of the same examples in the whole "
        "batch: an example's loss, or its gradient, is computed with the number of "
        "examples in the batch, so that one more or less would change the gradients of "
        "all others. Use the public expected_batch_size in place of tf.shape(x)[0], or "
        "batches of a static size."
    ) + see("mixed-examples")


class Sums:
    """The gradients of weighted losses by some variables, to be computed again.

    Args:
      loss: the losses, `[B]`.
      variables: the variables.
      handles: their handles in the graph.
      flows: the analysis of the losses.
      counted: whether losses are multiplied by how many there are.
      others: other tensors at which gradients are to be computed again.
      backward: a backward pass that may have been there, to take it from.
      groups: the group of each variable that it is clipped with; None for one of all.

    Attributes:
      counted: as given.
      seed: what stands for the weights, `[B]`.
      tensors: the gradients of the variables that have one.
      labels: how errors name them.
      others: the gradients at the other tensors, None for none.
      variables: how many there are.
    """

    def __init__(
        self,
        loss: tf.Tensor,
        variables: Sequence[tf.Variable],
        handles: Sequence[tf.Tensor],
        flows: Dataflow,
        counted: bool,
        others: Sequence[tf.Tensor] = (),
        backward: Backward | None = None,
        groups: Sequence[int] | None = None,
    ):
        self.counted = counted
        wanted = [*handles, *others]
        if backward is None or not backward.has(wanted):
            with own_gradients(flows.without_gradient()):
                backward = Backward.of(loss, wanted)
        self.seed = backward.seed
        found = [backward.at[t.ref()] for t in others]
        self.others = [None if t is None else tf.convert_to_tensor(t) for t in found]
        self.variables = len(handles)
        self._connected = [backward.at[t.ref()] is not None for t in handles]
        self.tensors, self.labels, self._groups = [], [], []
        groups = [0] * len(handles) if groups is None else groups
        for variable, handle, group in zip(variables, handles, groups, strict=True):
            gradient = backward.at[handle.ref()]
            if gradient is not None:
                gradient = tf.convert_to_tensor(gradient)
                # Of rows of a table that a branch looks up, its length is not known.
                gradient.set_shape(variable.shape)
                self.tensors.append(gradient)
                self._groups.append(group)
                self.labels.append(f"the summed gradient of {variable.name!r}")

    def by_variable(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        """What there is in the place of `tensors`, for each variable."""
        found = iter(tensors)
        return [next(found) if there else None for there in self._connected]

    def tables(self, tensors: Sequence[tf.Tensor], drawn: Weights) -> tf.Tensor:
        """What is kept of gradients, joined: see `row_tables.py`."""
        pairs = [(_rows_of(tensor), Layout()) for tensor in tensors]
        return row_tables.join(row_tables.tables(pairs, drawn)).joined

    def alike(
        self,
        before: tf.Tensor,
        after: tf.Tensor,
        coarse: bool,
        sizes: tf.Tensor,
        resized: tf.Tensor | bool,
    ) -> tf.Tensor:
        """Whether each gradient is what it was, but for rounding.

        What is not finite shows nothing: weights of 0 do not take it out of a sum.

        Args:
          before: joined tables.
          after: the same with other examples.
          coarse: whether something is computed in a type below float32.
          sizes: `[N]`, of what is summed, and weighted.
          resized: whether `after` is of tensors of other sizes: sums are rounded
            another way there, even those that are 0 but for rounding.
        """
        error, size = self._error(before, after), self._root(before[:, -1])
        known = tf.math.is_finite(error) & tf.math.is_finite(size)
        # Of what it is clipped with: another group's rounding is none of its own.
        together = tf.math.unsorted_segment_max(
            tf.where(known, size, 0.0), self._groups, max(self._groups, default=0) + 1
        )
        together = tf.gather(together, tf.constant(self._groups, tf.int32))
        tolerance = _TOLERANCE if on_cpus() else _ELSEWHERE
        tolerance = tf.where(resized, _OTHER_SIZES, tolerance)
        tolerance = tf.cast(tolerance, size.dtype)
        shown = tf.math.is_finite(sizes) & resized
        total = tf.reduce_sum(tf.where(shown, sizes, 0.0))
        together += tf.cast(total, together.dtype)
        limit = (_COARSE if coarse else tolerance) * size
        limit += (_COARSE_ROUNDING if coarse else _ROUNDING) * together
        return (error <= limit) | ~known

    def moved(self, before: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
        """`[V]`, float32: by how much each variable's gradient is another."""
        error = tf.cast(self._error(before, after), tf.float32)
        if all(self._connected):
            return error
        places = np.flatnonzero(self._connected)[:, np.newaxis]
        return tf.scatter_nd(places, error, [len(self._connected)])

    def _error(self, before: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
        return self._root(tf.reduce_max(tf.abs(after - before)[:, :-1], axis=1))

    def _root(self, values: tf.Tensor) -> tf.Tensor:
        """Of the summed squares: in float64, in which no square overflows."""
        return tf.sqrt(self._by_variable(tf.square(tf.cast(values, tf.float64))))

    @property
    def rows(self) -> int:
        """How many rows the joined tables have."""
        return sum(self._lengths)

    @property
    def _lengths(self) -> list[int]:
        return [t.shape[0] if t.shape.rank else 1 for t in self.tensors]

    def _by_variable(self, values: tf.Tensor) -> tf.Tensor:
        """The sums of the rows' values, for each variable."""
        lengths = self._lengths
        owners = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        return tf.math.unsorted_segment_sum(values, owners, len(lengths))


def _rows_of(gradient: tf.Tensor) -> tf.Tensor:
    return gradient if gradient.shape.rank else tf.reshape(gradient, [1])
