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


class TracedError(ValueError):
    """An error of code that TensorFlow traces. Its text begins with its sentence.

    AutoGraph raises such an error again, with a message of tens of lines: "in user
    code:", every call that led to the error, and the sentence at the end.
    """

    # AutoGraph re-raises an error from traced code as the same type only if the type
    # is constructed exactly as Exception is; anything else becomes a StagingError.
    __init__ = Exception.__init__

    def __str__(self) -> str:
        text = super().__str__()
        calls, _, sentence = text.partition(f"\n    {type(self).__name__}: ")
        if not (sentence and calls.startswith("in user code:")):
            return text
        return sentence.replace("\n    ", "\n").rstrip() + "\n\n" + text
