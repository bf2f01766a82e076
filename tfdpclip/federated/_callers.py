"""Finds the callers, on Python's stack, that wait for an aggregation process."""

from __future__ import annotations

import dataclasses
import inspect
from types import FrameType
from typing import Any

from tfdpclip.federated import _tff


@dataclasses.dataclass(frozen=True)
class Maker:
    """A function or method that waits for an aggregation process to be made.

    Attributes:
      name: the name of the factory's class, or of the function.
      module: the module that defines it.
      factory: the factory, or a process that takes a factory; None for a function.
      variables: the local variables of the function or method.
    """

    name: str
    module: str
    factory: Any
    variables: dict[str, Any]


def makers() -> list[Maker]:
    """The callers that wait for the current factory's process; nearest first.

    To be called by a function that the factory's own method calls. Callers are methods
    of factories, of any package, and the functions of TensorFlow Federated.
    """
    kinds = (
        _tff.UnweightedAggregationFactory,
        _tff.WeightedAggregationFactory,
        _tff.EstimationProcess,
    )
    found = []
    # Skips the function that calls `makers`, up to the factory's own method.
    frame, own = _above(3), None
    while frame is not None:
        variables = frame.f_locals
        module = frame.f_globals.get("__name__", "")
        factory = variables.get("self")
        if own is None:
            own = factory
        elif factory is not own and issubclass(type(factory), kinds):
            kind = type(factory)
            found.append(Maker(kind.__name__, kind.__module__, factory, variables))
        elif module.startswith("tensorflow_federated."):
            found.append(Maker(frame.f_code.co_name, module, None, variables))
        frame = frame.f_back
    return found


def kind_that_is_checked() -> tuple[bool, str] | None:
    """The kind of factory that a learning process checks for, if one does now.

    To be called by a factory's `__class__` property.

    Returns:
      Whether the kind is weighted, and the name of the function that checks; None if no
      function of `tff.learning` is checking.
    """
    checks = _above(4)
    while checks is not None and checks.f_globals.get("__name__") == "abc":
        checks = checks.f_back  # Python's abstract classes look up `__class__`.
    asks = None if checks is None else checks.f_back
    if asks is None or checks.f_code.co_name != "check_type":
        return None
    # The check counts only in a function of `tff.learning`.
    if not asks.f_globals.get("__name__", "").startswith(
        "tensorflow_federated.python.learning."
    ):
        return None
    wanted = checks.f_locals.get("type_spec")
    for weighted, kind in (
        (True, _tff.WeightedAggregationFactory),
        (False, _tff.UnweightedAggregationFactory),
    ):
        if wanted is kind:
            return weighted, asks.f_code.co_name
    return None


def _above(levels: int) -> FrameType | None:
    """The frame `levels` calls above this function's."""
    frame = inspect.currentframe()
    for _ in range(levels):
        frame = None if frame is None else frame.f_back
    return frame


def counterpart(builder: str, weighted: bool) -> str:
    """The function of `tff.learning.algorithms` for the opposite kind of factories.

    Args:
      builder: the name of a function.
      weighted: whether to return the function for weighted factories.
    """
    ways = ("_unweighted_", "_weighted_")
    name = builder.replace(ways[not weighted], ways[weighted])
    known = name != builder and hasattr(_tff.algorithms, name)
    return name if known else f"build{ways[weighted]}fed_avg"
