"""Times rounds of federated aggregation in a separate process.

    python -m benchmarks.federated_worker spec.json results.json

`benchmarks.federated_round` starts it; `benchmarks.timing` documents the files. "plain"
is TensorFlow Federated's unweighted mean, `gaussian_adaptive` its own aggregator with
adaptive clipping; floors are in `benchmarks.federated_floors`; the remaining names are
this library's.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Callable

import numpy as np

import tfdpclip as dpc
from benchmarks import federated_floors, timing
from driver_kit import command_line
from driver_kit.lazy import tf, tff

_INPUTS = 784
_CLASSES = 10


def hidden_for(parameters: int) -> int:
    """The width of two hidden layers that makes about so many parameters.

    >>> hidden_for(10_000_000), hidden_for(10_000)
    (2789, 12)
    """
    b = _INPUTS + _CLASSES + 2
    return max(1, round((-b + (b * b + 4 * parameters) ** 0.5) / 2))


def aggregators(clients: int) -> dict[str, Callable]:
    """The timed aggregators, by name."""
    # The default of a twentieth of the clients is too precise for ten of them.
    count_stddev = max(1.0, clients / 20)
    quantile = dpc.QuantileClip(count_stddev=count_stddev)

    def mean(clip=quantile, **settings):
        return dpc.federated.clipped_mean(1.0, clients, clip, **settings)

    return {
        "plain": tff.aggregators.UnweightedMeanFactory,
        "gaussian_adaptive": lambda: (
            tff.aggregators.DifferentiallyPrivateFactory.gaussian_adaptive(
                1.0, clients, clipped_count_stddev=count_stddev
            )
        ),
        "central": mean,
        "central_fixed": lambda: mean(0.1),
        "central_layerwise": lambda: mean(
            dpc.LayerwiseClip(dpc.QuantileClip(count_stddev=3 * count_stddev))
        ),
        "secure": lambda: mean(secure=True),
        "distributed": lambda: mean(
            secure=True,
            noise="distributed",
            minimum_clients=max(1, int(0.8 * clients)),
        ),
        "floor_central": lambda: federated_floors.Product(clients),
        "floor_distributed": lambda: federated_floors.ModularSum(clients),
    }


def shapes(hidden: int) -> list[list[int]]:
    """The tensors of a network with two hidden layers."""
    sizes = [_INPUTS, hidden, hidden, _CLASSES]
    found = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        found += [[inputs, outputs], [outputs]]
    return found


def aggregation_round(factory, hidden: int, clients: int) -> Callable[[], None]:
    """A round of the aggregator alone."""
    value_type = tff.to_type([(np.float32, shape) for shape in shapes(hidden)])
    process = factory().create(value_type)

    @tff.tensorflow.computation(np.float32)
    def update(level):
        return [tf.fill(shape, level) for shape in shapes(hidden)]

    @tff.federated_computation(
        process.initialize.type_signature.result,
        tff.FederatedType(np.float32, tff.CLIENTS),
    )
    def round_of(state, levels):
        output = process.next(state, tff.federated_map(update, levels))
        return output.state, output.result

    levels = [np.float32(1e-4 * (i + 1)) for i in range(clients)]
    state = [process.initialize()]

    def run():
        state[0] = round_of(state[0], levels)[0]

    return run


def updates_round(factory, hidden: int, clients: int) -> Callable[[], None]:
    """A round of the aggregator on arrays."""
    value_type = tff.to_type([(np.float32, shape) for shape in shapes(hidden)])
    process = factory().create(value_type)
    rng = np.random.default_rng(0)
    data = [
        [1e-3 * rng.standard_normal(shape, np.float32) for shape in shapes(hidden)]
        for _ in range(clients)
    ]
    state = [process.initialize()]

    def run():
        state[0] = process.next(state[0], data).state

    return run


def fedavg_round(factory, hidden: int, clients: int) -> Callable[[], None]:
    """A round of federated averaging, one batch of 20 at each client."""

    def model_fn():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.InputLayer(_INPUTS),
                tf.keras.layers.Dense(hidden, "relu"),
                tf.keras.layers.Dense(hidden, "relu"),
                tf.keras.layers.Dense(_CLASSES),
            ]
        )
        spec = collections.OrderedDict(
            x=tf.TensorSpec([None, _INPUTS], tf.float32),
            y=tf.TensorSpec([None], tf.int32),
        )
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return tff.learning.models.from_keras_model(model, loss=loss, input_spec=spec)

    process = tff.learning.algorithms.build_unweighted_fed_avg(
        model_fn,
        tff.learning.optimizers.build_sgdm(0.05),
        tff.learning.optimizers.build_sgdm(1.0),
        model_aggregator=factory(),
    )
    rng = np.random.default_rng(0)
    data = [
        tf.data.Dataset.from_tensors(
            collections.OrderedDict(
                x=rng.normal(size=(20, _INPUTS)).astype(np.float32),
                y=rng.integers(0, _CLASSES, 20).astype(np.int32),
            )
        )
        for _ in range(clients)
    ]
    state = [process.initialize()]

    def run():
        state[0] = process.next(state[0], data).state

    return run


ROUNDS = {
    "aggregation": aggregation_round,
    "updates": updates_round,
    "fedavg": fedavg_round,
}


def makers(spec: timing.Spec) -> tuple[dict[str, Callable], int]:
    """The functions that make a round, by variant, and the number of parameters."""
    if spec.model not in ROUNDS:
        raise ValueError(f"model must be of {', '.join(ROUNDS)}, got {spec.model!r}.")
    clients, hidden = spec.batch_size, hidden_for(spec.options["parameters"])
    known = aggregators(clients)
    unknown = set(spec.variants) - set(known)
    if unknown:
        raise ValueError(
            f"variants must be of {', '.join(known)}, got {', '.join(unknown)}."
        )
    made = {
        name: lambda name=name: ROUNDS[spec.model](known[name], hidden, clients)
        for name in spec.variants
    }
    return made, sum(int(np.prod(shape)) for shape in shapes(hidden))


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        if not command_line.wants_help(sys.argv):
            stack.enter_context(dpc.federated.local_context(simulate_secure_sums=True))
        timing.work(sys.argv[1:], makers, __doc__)
