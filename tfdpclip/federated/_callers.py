"""Who waits, on Python's stack, for a factory of TensorFlow Federated."""

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
      name: of the factory's class, or of the function.
      module: where it is defined.
      factory: the factory, or another process that takes one; None for a function.
      variables: the local variables of the function or method.
    """

    name: str
    module: str
    factory: Any
    variables: dict[str, Any]


def makers() -> list[Maker]:
    """For whom the factory's method that calls this makes its process; nearest first.

    Methods of factories, of whatever package, and the functions of TensorFlow
    Federated.
    """
    kinds = (
        _tff.UnweightedAggregationFactory,
        _tff.WeightedAggregationFactory,
        _tff.EstimationProcess,
    )
    found = []
    # The function that asks, and the factory's own method.
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
    """Which of the two kinds of factories a learning process asks for, if one does.

    To be called by what answers for the class of a factory.

    Returns:
      Whether it asks for weighted ones, and the name of the function that asks; None if
      no function of `tff.learning` is asking.
    """
    checks = _above(4)
    while checks is not None and checks.f_globals.get("__name__") == "abc":
        checks = checks.f_back  # How Python asks for the class.
    asks = None if checks is None else checks.f_back
    if asks is None or checks.f_code.co_name != "check_type":
        return None
    # The unweighted functions ask first, of what they are given.
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
    """The frame so many calls above this function's."""
    frame = inspect.currentframe()
    for _ in range(levels):
        frame = None if frame is None else frame.f_back
    return frame


def counterpart(builder: str, weighted: bool) -> str:
    """The function of `tff.learning.algorithms` for the other kind of factories.

    Args:
      builder: the name of a function.
      weighted: whether one for weighted factories is wanted.
    """
    ways = ("_unweighted_", "_weighted_")
    name = builder.replace(ways[not weighted], ways[weighted])
    known = name != builder and hasattr(_tff.algorithms, name)
    return name if known else f"build{ways[weighted]}fed_avg"
