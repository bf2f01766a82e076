"""Times a federated round with our aggregators against other ones, in one run.

Every variant is timed in turn, over and over, so that a change of the machine's speed
hits all of them alike; the table gives medians and the median of the ratios to the
unweighted mean's round of the same turn.

TensorFlow Federated leaves a worker behind that keeps standard output open: send the
output to a file, not through a pipe.
"""

from __future__ import annotations

import collections
import gc
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from absl import app, flags

import tfdpclip as dpc
from tfdpclip import federated

_CLIENTS = flags.DEFINE_integer("clients", 50, "Clients in a round.")
_HIDDEN = flags.DEFINE_integer("hidden", 800, "Width; 800 makes 1.2M parameters.")
_REPEATS = flags.DEFINE_integer("repeats", 15, "Timed rounds of each variant.")
_MODES = flags.DEFINE_list(
    "modes",
    ["aggregation", "updates", "fedavg"],
    "aggregation: the clients' updates are made by one cheap operation, to time "
    "nothing but aggregation. updates: they are given as arrays. fedavg: the round of "
    "a learning process, in which each client trains on one batch of 20.",
)
_VARIANTS = flags.DEFINE_list("variants", None, "Only these, and the mean.")
_INPUTS = 784
_CLASSES = 10


def aggregators(clients: int) -> dict[str, Callable]:
    """What is timed, by name."""
    mean = federated.clipped_mean
    return {
        "unweighted mean": tff.aggregators.UnweightedMeanFactory,
        "gaussian_adaptive": lambda: (
            tff.aggregators.DifferentiallyPrivateFactory.gaussian_adaptive(1.0, clients)
        ),
        "clipped_mean": lambda: mean(1.0, clients),
        "clipped_mean, fixed clip": lambda: mean(1.0, clients, 0.1),
        "clipped_mean, layerwise": lambda: mean(
            1.0, clients, dpc.clipping.LayerwiseClip()
        ),
        "clipped_mean, secure": lambda: mean(1.0, clients, secure=True),
        "clipped_mean, distributed": lambda: mean(
            1.0,
            clients,
            secure=True,
            noise="distributed",
            minimum_clients=max(1, int(0.8 * clients)),
        ),
    }


def shapes(hidden: int) -> list[list[int]]:
    """The tensors of a network with two hidden layers."""
    sizes = [_INPUTS, hidden, hidden, _CLASSES]
    found = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        found += [[inputs, outputs], [outputs]]
    return found


def aggregation_round(factory, hidden: int, clients: int) -> Callable[[], None]:
    """One round of the aggregator alone."""
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
    """One round of the aggregator on arrays."""
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
    """One round of federated averaging, one batch of 20 at each client."""

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


def interleaved(rounds: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Seconds of each round, all timed in turn, after two rounds to warm up."""
    for run in rounds.values():
        run()
        run()
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(repeats):
        for name, run in rounds.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def main(argv):
    """Prints the table, as Markdown."""
    del argv
    tff.backends.test.set_sync_test_cpp_execution_context()
    parameters = sum(int(np.prod(shape)) for shape in shapes(_HIDDEN.value))
    builders = {
        "aggregation": aggregation_round,
        "updates": updates_round,
        "fedavg": fedavg_round,
    }
    print(f"{parameters:,} parameters, {_CLIENTS.value} clients\n")
    print("| mode | aggregator | ms | / unweighted mean |\n| --- | --- | --- | --- |")
    for mode in _MODES.value:
        rounds = {
            name: builders[mode](factory, _HIDDEN.value, _CLIENTS.value)
            for name, factory in aggregators(_CLIENTS.value).items()
            if _VARIANTS.value is None or name in (*_VARIANTS.value, "unweighted mean")
        }
        seconds = interleaved(rounds, _REPEATS.value)
        plain = np.array(seconds["unweighted mean"])
        for name, values in seconds.items():
            ratio = np.median(np.array(values) / plain)
            print(
                f"| {mode} | {name} | {1e3 * np.median(values):.0f} | {ratio:.2f} |",
                flush=True,
            )
    # Without this, the worker outlives the run, with all that it holds in memory.
    tff.framework.set_default_context(tff.test.create_runtime_error_context())
    gc.collect()


if __name__ == "__main__":
    app.run(main)
