"""The display of results: as text, and as the last line of a notebook's cell."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


def aligned(lines: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """Lines of cells as text in columns, two spaces apart.

    Args:
      lines: cells, as many in each.
      left: the columns that begin at the left, as words do; numbers end at the right.

    >>> print(aligned([["z", "steps", "note"], ["0.25", "10", "few"]], left=(2,)))
       z  steps  note
    0.25     10  few
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


class ShownAsText:
    """Base of results that notebooks show as `print` does, in place of the `repr`.

    >>> class Result(ShownAsText):
    ...     def __str__(self):
    ...         return "two lines\\nof text"
    >>> import types
    >>> Result()._repr_pretty_(types.SimpleNamespace(text=print), False)
    two lines
    of text
    """

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The method that IPython calls."""
        del cycle
        printer.text(str(self))
