"""Times steps on several replicas, plain beside private.

    python -m benchmarks.replicas --output_dir=runs/replicas

Replicas are parts of this machine's CPU, which they share: the same work on R of them
is not faster than on one, and costs R updates and an all-reduce more. So the numbers to
read are the ratios of private to plain for the same R. Every R has a process of its
own, in which plain and private steps are timed in turn.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from driver_kit import command_line, reports
from tfdpclip import files

REPLICAS = (1, 2, 4)
BATCH_SIZE = 128
_ROUNDS = 3


def measured(replicas: int, batch_size: int, seconds: float) -> dict[str, float]:
    """Milliseconds of a plain and of a private step, in this process.

    Args:
      replicas: into how many parts the CPU is divided.
      batch_size: examples in a step, on all replicas together.
      seconds: about how long to time each.

    Returns:
      The least time of each, in ms, their ratio, and the bytes that a step reduces.
    """
    import tensorflow as tf

    import tfdpclip as dpc

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * replicas,
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch_size, 784)).astype(np.float32)
    y = rng.integers(0, 10, batch_size)
    vector = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction="none")

    def part(array):
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                array[context.replica_id_in_sync_group :: replicas]
            )
        )

    def step_of(make):
        with strategy.scope():
            model = tf.keras.Sequential(
                [
                    tf.keras.Input((784,)),
                    tf.keras.layers.Dense(512, activation="relu"),
                    tf.keras.layers.Dense(512, activation="relu"),
                    tf.keras.layers.Dense(10),
                ]
            )
            optimizer = make()
            optimizer.build(model.trainable_variables)

        def one(x, y):
            with tf.GradientTape() as tape:
                losses = vector(y, model(x, training=True))
                loss = tf.reduce_sum(losses) / batch_size
            optimizer.minimize(loss, model.trainable_variables, tape=tape)

        run = tf.function(lambda *data: strategy.run(one, args=data))
        return run, model.count_params()

    def private():
        return dpc.keras.DPSGD(
            0.01,
            noise_multiplier=1.0,
            expected_batch_size=batch_size,
            recheck_rate=0.0,
        )

    steps = {}
    steps["plain"], parameters = step_of(lambda: tf.keras.optimizers.SGD(0.01))
    steps["private"], _ = step_of(private)
    data = part(x), part(y)
    best: dict[str, list[float]] = {name: [] for name in steps}
    for run in steps.values():
        for _ in range(17):  # Past the steps that check themselves.
            run(*data)
    for _ in range(_ROUNDS):
        for name, run in steps.items():
            end = time.perf_counter() + seconds / _ROUNDS
            while time.perf_counter() < end:
                started = time.perf_counter()
                run(*data)
                best[name].append(time.perf_counter() - started)
    times = {name: min(found) * 1e3 for name, found in best.items()}
    middle = {f"{n}_median_ms": statistics.median(t) * 1e3 for n, t in best.items()}
    return {
        "replicas": replicas,
        "plain_ms": times["plain"],
        "private_ms": times["private"],
        "ratio": times["private"] / times["plain"],
        **middle,
        # The sum of each parameter, and one count.
        "bytes_reduced": 4 * (parameters + 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Times every number of replicas, and writes a table."""
    parser = command_line.argument_parser(__doc__)
    parser.add_argument("--replicas", default=",".join(map(str, REPLICAS)))
    parser.add_argument("--batch_size", type=int, default=BATCH_SIZE)
    parser.add_argument("--seconds_per_cell", type=float, default=10.0)
    parser.add_argument("--output_dir", default="runs/replicas")
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.alone:
        found = measured(options.alone, options.batch_size, options.seconds_per_cell)
        print(json.dumps(found))
        return 0
    rows = []
    for replicas in map(int, options.replicas.split(",")):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.replicas", f"--alone={replicas}"]
            + [f"--batch_size={options.batch_size}"]
            + [f"--seconds_per_cell={options.seconds_per_cell}"],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    directory = files.prepare_directory(pathlib.Path(options.output_dir))
    files.write_atomically(directory / "replicas.csv", files.table_text(rows))
    shown = [{k: f"{v:.4g}" for k, v in row.items()} for row in rows]
    print("\n".join(reports.table(shown)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
