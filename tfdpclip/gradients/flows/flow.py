"""What the static analysis knows of one tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

# How much a tensor's value depends on the data.
PUBLIC, SIZE, DATA = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Entries:
    """What a tensor has for each entry of a sparse batch; see `sparse.py`.

    Attributes:
      key: which entries, in which order: the same for tensors that agree.
      role: what of them.
    """

    key: tuple
    role: str


@dataclasses.dataclass(frozen=True)
class Flow:
    """What is known of one tensor.

    Attributes:
      kind: PUBLIC, SIZE (depends on the batch's size alone) or DATA.
      axes: the axes that count examples; None if unknown.
      rows: rows of one example on axis 0, when axis 0 counts examples; None if unknown.
      even: whether each example has as many rows as every other, one after the other,
        though `rows` does not say how many: in `[B T, D]`, with T only known to the
        step. Of the only axis that counts examples.
      minor: whether axis 0 runs through the examples fastest (row r belongs to example
        r mod B) instead of slowest.
      coupled: the op at which the examples of a batch were combined, or None.
      trained: whether the value depends on a variable of interest.
      power: of a number of kind SIZE, its power of the batch size; None if it depends
        on that size in another way. 0 for what does not depend on it.
      dims: of a vector of sizes, the powers of its entries.
      entries: how many numbers of the tensor belong to one example, where they follow
        each other though axis 0 does not count examples; None if unknown.
      varying: whether the values of the data decide about the tensor's shape.
      entry: what of a sparse batch's entries the tensor lists along axis 0, or None.
      example: the place in the batch of the one example that the tensor is computed
        from, where it was taken out of the batch; see `places.py`.
      made: whether the tensor is of kind DATA for its shape alone: it was made for the
        batch, of no example's values.
      placed: whether the values depend on the examples' places in the batch.
      obstacle: what is believed of the tensor and not proven, a part of a sentence.
    """

    kind: int = PUBLIC
    axes: tuple[int, ...] | None = ()
    rows: int | None = None
    minor: bool = False
    coupled: tf.Operation | None = None
    trained: bool = False
    power: int | None = 0
    dims: tuple | None = None
    entries: int | None = None
    varying: bool = False
    entry: Entries | None = None
    example: int | str | None = None
    made: bool = False
    placed: bool = False
    obstacle: str = ""
    even: bool = False

    def on(self, axes: tuple[int, ...]) -> Flow:
        """The same rows of the same examples, on these axes."""
        return Flow(DATA, axes, self.rows, self.minor, even=self.even)

    @property
    def layout(self) -> tuple:
        """How the rows of the examples follow each other."""
        return self.rows, self.minor, self.even

    def laid_out(self, layout: tuple) -> Flow:
        """The same axes, whose rows follow each other so."""
        rows, minor, even = layout
        return Flow(DATA, self.axes, rows, minor, even=even)

    @property
    def regular(self) -> bool:
        """Whether each example has as many rows as every other, one after the other."""
        return not self.minor and (bool(self.rows) or self.even)

    @property
    def unknown(self) -> bool:
        """Whether it is of the data, and nothing says where whose is."""
        known = (self.entry, self.entries, self.example)
        return self.kind == DATA and self.axes is None and known == (None,) * 3

    @property
    def leads(self) -> bool:
        """Whether axis 0, and no other, counts examples."""
        return self.kind == DATA and self.axes == (0,)


_EVEN = (None, False, True)


def agreed(flows: Sequence[Flow]) -> tuple | None:
    """The layout of all of some flows, whose axes of examples are equally long.

    One that only says that the rows are even has as many rows as another one says. An
    axis of length 1 may meet a longer one: then there is one example, of one row.

    Returns:
      None if they differ.
    """
    found = {flow.layout for flow in flows}
    if len(found) > 1 and all(flow.regular for flow in flows):
        found.discard(_EVEN)
    return found.pop() if len(found) == 1 else None
