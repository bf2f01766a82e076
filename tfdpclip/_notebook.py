"""How results look as the last line of a notebook's cell."""

from __future__ import annotations

from typing import Any


class ShownAsText:
    """Notebooks show what `print` does, in place of the `repr`.

    >>> class Result(ShownAsText):
    ...     def __str__(self):
    ...         return "two lines\\nof text"
    >>> import types
    >>> Result()._repr_pretty_(types.SimpleNamespace(text=print), False)
    two lines
    of text
    """

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython calls."""
        del cycle
        printer.text(str(self))
