"""Planting for the lists of planted bugs, and the page of the successful checks."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

from tfdpclip.gradients import ExampleIsolationError
from tfdpclip.kernel import limits

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "results" / "planted_bugs.md"

_HEAD = """# Which check finds each planted bug?

Each bug is planted in the library while the check runs, and the check must fail; its
message is in the last column. `python -m tests.testing.mutations` writes the tables.
`mutations_test.py` beside it and `federated_mutations_test.py` check that every bug is
found, and that sound code passes the same checks.
"""

# The errors of a training step's own checks.
_OF_THE_STEP = re.compile(r"(?:GradientMismatch|ExampleIsolation)Error: [^.]*\.")

# Titles of the tables, and where the bugs are.
_LISTS = (
    ("In Keras steps", "tests.testing.mutations"),
    ("In federated rounds", "tests.testing.federated_mutations"),
)


# Every step limits the weights and indicators of clip rules, which would mend a bug
# that is planted in a rule.
_UNLIMITED = {
    "limit_weights": lambda rule, norms, state, weights: weights,
    "indicators_of": lambda rule, *arguments: rule.indicators(*arguments),
}


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A bug: where it is planted, and the check that must find it."""

    name: str
    target: Any
    attribute: str
    bug: Any
    check: Callable
    options: dict = dataclasses.field(default_factory=dict)
    slow: bool = False

    @contextlib.contextmanager
    def planted(self):
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                mock.patch.object(self.target, self.attribute, self.bug)
            )
            for name, unlimited in _UNLIMITED.items():
                stack.enter_context(mock.patch.object(limits, name, unlimited))
            yield

    def __str__(self):
        return self.name.replace(" ", "_")


def distinct_checks(mutations: Sequence[Mutation]) -> list:
    """Every check with its options, once, as parameters of a test."""
    seen = []
    for mutation in sorted(mutations, key=lambda m: m.slow):
        case = (mutation.check, mutation.options)
        if case not in [(p.values[0], p.values[1]) for p in seen]:
            marks = pytest.mark.slow if mutation.slow else ()
            name = f"{mutation.check.__name__}, as for {mutation}"
            seen.append(pytest.param(*case, marks=marks, id=name))
    return seen


def cases(mutations: Sequence[Mutation]) -> list:
    """The mutations as parameters of a test."""
    return [
        pytest.param(m, marks=pytest.mark.slow if m.slow else (), id=str(m))
        for m in mutations
    ]


def found(mutation: Mutation) -> tuple[str, str] | None:
    """The check that finds a planted bug, and its message; None if no check does.

    The training step itself may find the bug first.
    """
    with mutation.planted():
        try:
            mutation.check(**mutation.options)
        except AssertionError as error:
            return f"`{mutation.check.__name__}`", str(error)
        except (tf.errors.InvalidArgumentError, ExampleIsolationError) as error:
            # Keras 3 also traces the step for the loss, which raises
            # ExampleIsolationError. An error while tracing has its message after the
            # traceback.
            said = _OF_THE_STEP.findall(f"{type(error).__name__}: {error}")
            if not said:
                raise
            return f"the step, in `{mutation.check.__name__}`", said[-1]
    return None


def table(mutations: Sequence[Mutation]) -> str:
    """A Markdown table of the bugs and the checks that found them."""
    rows = ["| planted bug | found by | what it says |", "| --- | --- | --- |"]
    for mutation in mutations:
        by, said = found(mutation) or ("", "**not found**")
        said = " ".join(said.split())
        # The stack of an op in a graph.
        said = re.sub(r" defined at \(most.*?(?=assertion failed)", ": ", said)[:140]
        # These names depend on the layers made before.
        said = re.sub(r"\b(dense|layer)_\d+/", r"\1/", said).replace("|", "\\|")
        rows.append(f"| {mutation.name} | {by} | {said} |")
    return "\n".join(rows)


def write_page() -> None:
    """Writes both tables to docs/results/planted_bugs.md."""
    parts = [_HEAD]
    for title, module in _LISTS:
        listed = importlib.import_module(module)
        with getattr(listed, "context", contextlib.nullcontext)():
            parts.append(f"## {title}\n\n{table(listed.MUTATIONS)}\n")
    PAGE.write_text("\n".join(parts))
    print(f"{PAGE.name} is written.")
