"""`Flow`: the facts that the static analysis knows about a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

# How much a tensor's value depends on the data.
PUBLIC, SIZE, DATA = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Entries:
    """The entries of a batch that a tensor lists on axis 0; see `sparse.py`.

    Attributes:
      key: the number of rows of each example, and names of the list of entries and of
        its order. Two tensors with the same key list the same entries in the same
        order.
      role: the property of the entries that the tensor lists, such as `VALUES`.
      source: the op that listed the entries of a dense batch; None in a sparse batch.
    """

    key: tuple
    role: str
    source: tf.Operation | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Flow:
    """The facts that the analysis knows about a tensor.

    Attributes:
      kind: PUBLIC, SIZE (the value depends on the batch size alone) or DATA.
      axes: the axes that count examples; None if unknown.
      rows: the number of rows of an example on the first axis that counts examples;
        None if unknown.
      even: whether every example has the same number of rows, and the rows of an
        example are consecutive, though `rows` is unknown: in `[B T, D]`, with T known
        only when the step runs. The statement is about the only axis that counts
        examples.
      repeats: the number of times that the axis runs through all examples. With
        k = rows / repeats, row r belongs to example (r // k) mod B.
      coupled: the op that combined the examples of a batch, or None.
      trained: whether the value depends on a variable of interest.
      power: the exponent of the batch size in a number of kind SIZE; 0 if the number
        does not depend on the batch size; None if the number is not a power.
      dims: the exponents of the entries of a vector of sizes.
      varying: whether the values of the data determine the tensor's shape.
      entry: the list of a batch's entries that is on axis 0, or None.
      made: whether the tensor is of kind DATA for its shape alone: it was made for the
        batch, and holds no values of the data.
      placed: whether the values depend on the examples' places in the batch.
      obstacle: an assumption about the tensor that is not proven, as the end of the
        sentence "it is not known ...".
    """

    kind: int = PUBLIC
    axes: tuple[int, ...] | None = ()
    rows: int | None = None
    repeats: int = 1
    coupled: tf.Operation | None = None
    trained: bool = False
    power: int | None = 0
    dims: tuple | None = None
    varying: bool = False
    entry: Entries | None = None
    made: bool = False
    placed: bool = False
    obstacle: str = ""
    even: bool = False

    def on(self, axes: tuple[int, ...]) -> Flow:
        """A flow with the same layout of rows, on the given axes."""
        return Flow(DATA, axes, self.rows, self.repeats, even=self.even)

    @property
    def layout(self) -> tuple:
        """`(rows, repeats, even)`: the order of the examples' rows on their axis."""
        return self.rows, self.repeats, self.even

    def laid_out(self, layout: tuple) -> Flow:
        """A flow with the same axes and the given layout of rows."""
        rows, repeats, even = layout
        return Flow(DATA, self.axes, rows, repeats, even=even)

    @property
    def minor(self) -> bool:
        """Whether the rows of an example are not consecutive."""
        return self.repeats > 1

    @property
    def regular(self) -> bool:
        """Whether each example has equally many rows, and they are consecutive."""
        return not self.minor and (bool(self.rows) or self.even)

    @property
    def unknown(self) -> bool:
        """Whether the tensor holds data, and the place of each example is unknown."""
        return self.kind == DATA and self.axes is None and self.entry is None

    @property
    def leads(self) -> bool:
        """Whether axis 0 is the only axis that counts examples."""
        return self.kind == DATA and self.axes == (0,)


_EVEN = (None, 1, True)


def common_layout(flows: Sequence[Flow]) -> tuple | None:
    """The common layout of flows with example axes of equal length.

    A layout with `even` alone agrees with a layout that knows `rows`, because the axes
    are equally long. If an axis of length 1 is broadcast to a longer axis, the batch
    has a single example with a single row.

    Returns:
      The layout; None if the layouts differ.
    """
    layouts = {flow.layout for flow in flows}
    if len(layouts) > 1 and all(flow.regular for flow in flows):
        layouts.discard(_EVEN)
    return layouts.pop() if len(layouts) == 1 else None
