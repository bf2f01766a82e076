"""Times a private step against a plain step of the same run.

Every variant is timed in turn, over and over, so that a change of the machine's speed
hits all of them alike; the table gives medians and their ratio to the plain step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from absl import app, flags

import tfdpclip as dpc
from benchmarks.models import TASKS

_MODELS = flags.DEFINE_list("models", list(TASKS), "Which models to time.")
_BATCH_SIZES = flags.DEFINE_list("batch_sizes", ["64", "256"], "Batch sizes.")
_MODES = flags.DEFINE_list(
    "modes",
    ["quantile", "layerwise", "batch"],
    "Of quantile, fixed, automatic, normalized, layerwise, layerwise_quantile, joint, "
    "batch and perturbation.",
)
_REPEATS = flags.DEFINE_integer("repeats", 40, "Timed steps of each variant.")
_PEERS = flags.DEFINE_bool(
    "peers", True, "Whether to time tensorflow-privacy's vectorised optimizer too."
)
_PEER_SECONDS = flags.DEFINE_float(
    "peer_seconds", 10, "About how long to spend on each measurement of a peer."
)
_JIT = flags.DEFINE_bool("jit", False, "Whether to compile the steps with XLA.")
_ADAM = flags.DEFINE_bool("adam", False, "Adam instead of SGD.")

_SETTINGS = {
    "quantile": lambda: {"clip": dpc.QuantileClip()},
    "fixed": lambda: {"clip": 1.0},
    "automatic": lambda: {"clip": dpc.AutomaticClip()},
    "normalized": lambda: {"clip": dpc.FixedClip(1.0, normalize=True)},
    "layerwise": lambda: {"clip": dpc.LayerwiseClip(1.0)},
    # Many groups need counts with more noise than the default.
    "layerwise_quantile": lambda: {
        "clip": dpc.LayerwiseClip(dpc.QuantileClip(count_stddev=100.0))
    },
    "joint": lambda: {"clip": dpc.LayerwiseClip(1.0, allocation="joint")},
    "batch": lambda: {"clip": 1.0, "unit": "batch"},
    "perturbation": lambda: {"clip": 1.0, "perturbation": 0.1},
}


def plain_step(task, batch_size: int, jit: bool, adam: bool) -> Callable:
    """One Keras training step without privacy."""
    optimizer = tf.keras.optimizers.Adam(1e-3) if adam else tf.keras.optimizers.SGD(0.1)
    return _step(task, optimizer, jit)


def private_step(task, batch_size: int, jit: bool, adam: bool, mode: str) -> Callable:
    """One Keras training step with privacy."""
    made = dpc.keras.DPAdam if adam else dpc.keras.DPSGD
    optimizer = made(
        1e-3 if adam else 0.1,
        noise_multiplier=1.0,
        expected_batch_size=batch_size,
        **_SETTINGS[mode](),
    )
    return _step(task, optimizer, jit)


def peer_step(task, batch_size: int, jit: bool, adam: bool) -> Callable:
    """The same with tensorflow-privacy's vectorised optimizer."""
    import tensorflow_privacy

    made = (
        tensorflow_privacy.VectorizedDPKerasAdamOptimizer
        if adam
        else tensorflow_privacy.VectorizedDPKerasSGDOptimizer
    )
    optimizer = made(
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        num_microbatches=None,
        learning_rate=1e-3 if adam else 0.1,
    )
    return _step(task, optimizer, jit, reduction="none")


def _step(task, optimizer, jit: bool, reduction="sum_over_batch_size") -> Callable:
    model = task.build()
    if model.count_params() != task.parameters:
        raise ValueError(
            f"The model has {model.count_params()} parameters, not {task.parameters}."
        )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction=reduction)
    model.compile(optimizer=optimizer, loss=loss)

    @tf.function(jit_compile=jit, reduce_retracing=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            value = model.compiled_loss(y, model(x, training=True))
        optimizer.minimize(value, model.trainable_variables, tape=tape)
        return value

    return step


def interleaved(
    steps: dict[str, Callable], x, y, repeats: int, limits: dict[str, int]
) -> dict[str, float]:
    """Median seconds of each step, all timed in turn; `limits` caps repeats."""
    for step in steps.values():
        for _ in range(2):
            step(x, y)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(repeats):
        for name, step in steps.items():
            if i < limits.get(name, repeats):
                start = time.perf_counter()
                float(tf.reduce_sum(step(x, y)))
                seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def main(argv):
    """Prints the table, as Markdown."""
    del argv
    columns = ["plain ms", *(f"{mode} / plain" for mode in _MODES.value)]
    if _PEERS.value:
        columns.append("tensorflow-privacy / plain")
    print(f"| model | B | {' | '.join(columns)} |")
    print("| --- " * (len(columns) + 2) + "|", flush=True)
    for name in _MODELS.value:
        for size in map(int, _BATCH_SIZES.value):
            print(_row(name, size), flush=True)


def _row(name: str, size: int) -> str:
    task, settings = TASKS[name], (size, _JIT.value, _ADAM.value)
    rng = np.random.default_rng(0)
    x, y = (tf.constant(part) for part in task.batch(rng, size))
    steps = {"plain": plain_step(task, *settings)}
    for mode in _MODES.value:
        steps[mode] = private_step(task, *settings, mode)
    found = interleaved(steps, x, y, _REPEATS.value, {})
    cells = [f"{1e3 * found['plain']:.2f}"]
    cells += [f"{found[mode] / found['plain']:.2f}" for mode in _MODES.value]
    if _PEERS.value:
        peers = {"plain": steps["plain"], "peer": peer_step(task, *settings)}
        peers["peer"](x, y)
        start = time.perf_counter()
        peers["peer"](x, y)
        once = time.perf_counter() - start
        count = max(3, min(_REPEATS.value, int(_PEER_SECONDS.value / once)))
        found = interleaved(peers, x, y, count, {})
        cells.append(f"{found['peer'] / found['plain']:.1f}")
    return f"| {name} | {size} | {' | '.join(cells)} |"


if __name__ == "__main__":
    app.run(main)
