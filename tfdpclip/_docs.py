"""Where in the documentation an error is explained."""

from __future__ import annotations


def see(anchor: str) -> str:
    """The end of an error message: where its pitfall is explained.

    Args:
      anchor: a heading of docs/pitfalls.md, in lower case, with hyphens for spaces.

    >>> see("mixed-examples")
    ' See docs/pitfalls.md#mixed-examples.'
    """
    return f" See docs/pitfalls.md#{anchor}."
