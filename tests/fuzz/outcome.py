"""The possible outcomes of a check, and whether an error is the library's."""

from __future__ import annotations

import dataclasses
import json
import re

import tensorflow as tf

# A model may end in any of these ...
EXACT, WARNED, REFUSED, CAUGHT = "exact", "warned", "refused", "mixer refused"
# ... (the library found an error in its own gradients, and said so) ...
MISMATCH = "mismatch"
# ... no statement could be made (TensorFlow cannot run the model without the library
# either, or its numbers are too coarse to compare) ...
IMPOSSIBLE, HARMLESS = "impossible", "mixer without effect"
# ... and these are failures.
WRONG, MISSED, CRASHED, EXCEEDED = "wrong", "mixer missed", "crashed", "bound exceeded"
FAILURES = (WRONG, MISSED, CRASHED, EXCEEDED)

_OURS = re.compile(
    r"ExampleIsolationError|LossStructureError|GradientMismatchError|"
    r"docs/pitfalls\.md|dpc\.|NaN reaches the gradients"
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of checking a model.

    Attributes:
      kind: one of the constants above.
      detail: one line.
    """

    kind: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether this must not happen."""
        return self.kind in FAILURES

    def same(self, other: Outcome) -> bool:
        """Whether two outcomes are the same failure, as far as their details show."""
        return self.kind == other.kind and key(self.detail) == key(other.detail)

    def to_json(self) -> str:
        """The outcome as a line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """The outcome of `to_json`."""
        return cls(**json.loads(text))


def key(detail: str) -> str:
    """A detail without the numbers and names that differ from model to model."""
    detail = re.sub(r"'[^']*'|\"[^\"]*\"|{{[^}]*}}|\S*/\S*", "*", detail)
    return re.sub(r"[-\d.e+]*\d[-\d.e+]*", "#", detail)[:90]


def said(error: BaseException) -> list[str]:
    """The lines of an error's message, without the places where ops were made."""
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    return [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not re.match(r"^\s*File \"|^        |\s*\[\[", line)
    ]


def is_ours(error: BaseException) -> bool:
    """Whether an error is a refusal by the library, rather than a crash."""
    from tfdpclip.gradients import ExampleIsolationError, LossStructureError

    if isinstance(error, (ExampleIsolationError, LossStructureError)):
        return True
    if type(error).__module__.startswith("tfdpclip"):
        return True
    if isinstance(error, (tf.errors.InvalidArgumentError, ValueError)):
        return any(_OURS.search(line) for line in said(error))
    return isinstance(error, NotImplementedError) and "docs/" in str(error)


def line_of(error: BaseException) -> str:
    """An error in a line: its type and the most telling part of its message."""
    lines = said(error)
    telling = [line for line in lines if _OURS.search(line)]
    telling += [line for line in lines if re.match(r"\w*(Error|Exception): ", line)]
    skipped = ("Graph execution error", "Detected at", "in user code", "Stack trace")
    telling += [line for line in lines if not line.startswith(skipped)]
    return f"{type(error).__name__}: {(telling or lines or [''])[0]}"[:300]
