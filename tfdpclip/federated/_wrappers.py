"""Refuses a `clipped_mean` inside a factory that would void its guarantee.

TensorFlow Federated's factories take inner factories. An inner factory gets the type
of its values, but no information on the use of its result: `MeanFactory`, for example,
divides the result by an exact sum of weights. While an inner factory makes its process,
the calling methods are on Python's stack, and the stack is the only information. Code
without such a method (a federated computation that calls `process.next` and divides) is
not seen; docs/federated.md says so.
"""

from __future__ import annotations

from tfdpclip._docs import see
from tfdpclip.federated import _callers

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


def refuse_wrappers() -> None:
    """Raises if the process is made for a wrapper that would void its guarantee.

    Raises:
      ValueError: names the wrapper, and the remedy.
    """
    for maker in _callers.makers():
        found = _verdict(maker)
        if found is not None:
            name, wrong, fix = found
            raise ValueError(
                f"{name} around clipped_mean {wrong}. {fix}"
                + see("a-factory-around-the-mean")
            )


def _verdict(maker: _callers.Maker) -> tuple[str, str, str] | None:
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


def refuse_other_kind(weighted: bool) -> None:
    """Raises if TensorFlow Federated asks a factory for the wrong kind of weighting.

    TensorFlow Federated's own error names two classes. The error here is raised only in
    the first check of a learning process: wrappers check the kind too, and use both
    answers.

    Args:
      weighted: whether the factory takes weights.

    Raises:
      TypeError: shows the line to write.
    """
    asked = _callers.kind_that_is_checked()
    if asked is None or asked[0] is weighted:
        return
    builder = asked[1]
    other = _callers.counterpart(builder, weighted)
    if weighted:
        raise TypeError(
            f"{builder} gives no weights, and this clipped_mean has weight_cap. Use "
            f"{other}(..., model_aggregator=aggregator); or leave weight_cap out."
        )
    raise TypeError(
        f"{builder} weights clients, and this clipped_mean has no weight_cap. Write "
        f"{other}(..., model_aggregator=aggregator), in which all clients count alike; "
        "or clipped_mean(..., "
        "weight_cap=100), in which a client counts by its number of examples, up to "
        "100 (MeanFactory around it would divide by exact weights)."
        + see("a-factory-around-the-mean")
    )
