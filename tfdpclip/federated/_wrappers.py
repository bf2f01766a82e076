"""Refuses a `clipped_mean` inside a factory that would void its guarantee.

TensorFlow Federated's factories take inner factories. An inner factory gets the type
of its values, but no information on the use of its result: `MeanFactory`, for example,
divides the result by an exact sum of weights. While an inner factory makes its process,
the calling methods are on Python's stack, and the stack is the only information. Code
without such a method (a federated computation that calls `process.next` and divides) is
not seen; docs/federated.md says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

from tfdpclip._docs import see
from tfdpclip.federated import _tff

# Factories that transform each client's update alone, and the result by public steps.
_HARMLESS = {
    "_UnweightedAsWeightedFactory",
    "HadamardTransformFactory",
    "DiscreteFourierTransformFactory",
    "UnweightedConcatFactory",
    "WeightedConcatFactory",
    "UnweightedWrappedFactory",
    "WeightedWrappedFactory",
}
_ROBUST = (
    "tff.aggregators.zeroing_factory or clipping_factory",
    "releases exact counts of clients, and an adaptive norm that follows clients "
    "without noise",
    "Leave it out: clipped_mean clips, and drops updates that are not finite.",
)
_TWICE = (
    "adds noise a second time, and divides a mean again",
    "Leave it out: clipped_mean clips, adds noise and divides by itself.",
)
# By factory: the name to show, the fault, and the remedy.
_REFUSED = {
    "MeanFactory": (
        "tff.aggregators.MeanFactory",
        "divides its result by the exact sum of the clients' weights, which no noise "
        "protects",
        "Leave it out: model_aggregator=dpc.federated.clipped_mean(..., weight_cap=100)"
        " counts a client's examples up to 100, and divides by a public number.",
    ),
    "UnweightedMeanFactory": (
        "tff.aggregators.UnweightedMeanFactory",
        "divides its result by the exact number of clients, which no noise protects",
        "Leave it out: clipped_mean divides by clients_per_round, a public number.",
    ),
    "UnweightedRobustFactory": _ROBUST,
    "WeightedRobustFactory": _ROBUST,
    "DifferentiallyPrivateFactory": (
        "tff.aggregators.DifferentiallyPrivateFactory",
        *_TWICE,
    ),
    "PrivateQuantileEstimationProcess": (
        "tff.aggregators.PrivateQuantileEstimationProcess",
        *_TWICE,
    ),
}
_MEASURED = (
    "tff.aggregators.add_measurements (or add_debug_measurements)",
    "releases numbers of the clients without noise",
    "Leave client_measurement_fn out; server_measurement_fn may stay. A round's own "
    "measurements are in the aggregator's metrics.",
)
_TWO_RELEASES = (
    "tff.learning's Mime Lite",
    "releases a mean of the clients' full gradients beside the model's update, which "
    "no budget counts",
    "Use build_unweighted_fed_avg or build_weighted_fed_avg.",
)


class _Maker(NamedTuple):
    """A function or method that waits for an aggregation process to be made.

    Attributes:
      name: the name of the factory's class, or of the function.
      module: the module that defines the class, or the function.
      factory: the factory, or a process that takes a factory; None for a function.
      variables: the local variables of the function or method.
    """

    name: str
    module: str
    factory: Any
    variables: dict[str, Any]


def refuse_wrappers(factory: Any) -> None:
    """Raises if a process is made for a wrapper that would void its guarantee.

    Args:
      factory: the `clipped_mean`, whose method calls this function.

    Raises:
      ValueError: names the wrapper, and the remedy.
    """
    for maker in _makers(factory):
        found = _verdict(maker)
        if found is not None:
            name, wrong, fix = found
            raise ValueError(
                f"{name} around clipped_mean {wrong}. {fix}"
                + see("a-factory-around-the-mean")
            )


def _makers(own: Any) -> Iterator[_Maker]:
    """The callers that wait for a factory's process; nearest first.

    Callers are methods of factories, of any package, and the functions of TensorFlow
    Federated.

    Args:
      own: the factory.
    """
    kinds = (
        _tff.UnweightedAggregationFactory,
        _tff.WeightedAggregationFactory,
        _tff.EstimationProcess,
    )
    frame = inspect.currentframe()
    while frame is not None:
        variables = frame.f_locals
        module = frame.f_globals.get("__name__", "")
        factory = variables.get("self")
        kind = type(factory)
        if factory is not own and issubclass(kind, kinds):
            yield _Maker(kind.__name__, kind.__module__, factory, variables)
        elif module.startswith("tensorflow_federated."):
            yield _Maker(frame.f_code.co_name, module, None, variables)
        frame = frame.f_back


def _verdict(maker: _Maker) -> tuple[str, str, str] | None:
    """The name of a wrapper, its fault and the remedy; None if the wrapper is sound."""
    if maker.module.startswith("tfdpclip."):
        return "clipped_mean", *_TWICE
    if not maker.module.startswith("tensorflow_federated."):
        return None  # A factory from outside TensorFlow Federated.
    if maker.factory is None:
        return _TWO_RELEASES if "_mime_lite" in maker.name else None
    if maker.variables.get("client_measurement_fn") is not None:
        return _MEASURED
    if maker.name in _HARMLESS:
        return None
    return _REFUSED.get(
        maker.name,
        (
            f"tff's {maker.name}",
            "is not known to keep its guarantee",
            "Give clipped_mean to the learning process itself. To sum clipped updates "
            "in a different way: inner=dpc.federated.InnerSum(factory).",
        ),
    )
