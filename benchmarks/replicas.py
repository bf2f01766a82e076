"""Times steps on several replicas and workers, plain beside private.

    python -m benchmarks.replicas --output_dir=runs/replicas

Replicas are parts of this machine's CPU, and workers processes on it, which share it:
the same work on R replicas is no faster than on one, and costs R updates and an
all-reduce more. So the numbers to read are the ratios of private to plain for the same
R. Every R has a separate process (W workers have W), in which plain and private steps
are timed in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from driver_kit import command_line, devices, reports
from tfdpclip import files

REPLICAS = (1, 2, 4)
WORKERS = (1, 2)
BATCH_SIZE = 128
_ROUNDS = 3
_PATIENCE = 120.0


def measured(strategy, batch_size: int, seconds: float) -> dict[str, float]:
    """Milliseconds of a plain and of a private step, in this process.

    Args:
      strategy: of `tf.distribute`.
      batch_size: examples in a step, on all replicas together.
      seconds: about how long to time each, where there is one worker.

    Returns:
      The least time of each, in ms, their ratio, and the bytes that a step reduces.
    """
    import tensorflow as tf

    import tfdpclip as dpc

    replicas = strategy.num_replicas_in_sync
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
            # The same number of steps on every worker: they wait for each other.
            for _ in range(_steps(strategy, run, data, seconds / _ROUNDS)):
                started = time.perf_counter()
                run(*data)
                best[name].append(time.perf_counter() - started)
    times = {name: min(found) * 1e3 for name, found in best.items()}
    middle = {f"{n}_median_ms": statistics.median(t) * 1e3 for n, t in best.items()}
    return {
        "plain_ms": times["plain"],
        "private_ms": times["private"],
        "ratio": times["private"] / times["plain"],
        **middle,
        # The sum of each parameter, and a count.
        "bytes_reduced": 4 * (parameters + 1),
    }


def _steps(strategy, run, data, seconds: float) -> int:
    """About how many steps take so long, the same number for all workers."""
    import tensorflow as tf

    started = time.perf_counter()
    run(*data)
    own = tf.constant(time.perf_counter() - started)

    def longest():
        # Of times in a row, the mean is near enough to the longest.
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.MEAN, own)

    (each, *_) = strategy.experimental_local_results(strategy.run(longest))
    return max(3, int(seconds / float(each)))


def _alone(options: argparse.Namespace) -> dict[str, float]:
    """The work of a single process of a measurement."""
    import tensorflow as tf

    import tfdpclip as dpc

    if "TF_CONFIG" in os.environ:
        strategy = dpc.keras.multi_worker_strategy(timeout_seconds=_PATIENCE)
    else:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * options.alone,
        )
        names = [f"CPU:{i}" for i in range(options.alone)]
        strategy = tf.distribute.MirroredStrategy(names)
    return measured(strategy, options.batch_size, options.seconds_per_cell)


def _row(options: argparse.Namespace, kind: str, count: int) -> dict:
    """A measurement in separate processes."""
    tasks: list[dict[str, str]] = [{}]
    if kind == "workers":
        tasks = devices.local_cluster(count)
    command = [sys.executable, "-m", "benchmarks.replicas", f"--alone={count}"]
    command += [f"--batch_size={options.batch_size}"]
    command += [f"--seconds_per_cell={options.seconds_per_cell}"]
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in tasks]
        processes = [
            subprocess.Popen(
                command, env=os.environ | task, stdout=out, stderr=subprocess.STDOUT
            )
            for task, out in zip(tasks, outputs, strict=True)
        ]
        for process, output in zip(processes, outputs, strict=True):
            failed = process.wait() != 0
            output.seek(0)
            said = output.read()
            if failed:
                raise SystemExit(said[-4000:])
            if process is processes[0]:
                found = json.loads(said.splitlines()[-1])
    return {"kind": kind, "count": count} | found


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main(argv: Sequence[str] | None = None) -> int:
    """Times every number of replicas and of workers, and writes a table."""
    parser = command_line.argument_parser(__doc__)
    parser.add_argument("--replicas", default=",".join(map(str, REPLICAS)))
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)))
    parser.add_argument("--batch_size", type=int, default=BATCH_SIZE)
    parser.add_argument("--seconds_per_cell", type=float, default=10.0)
    parser.add_argument(
        "--output_dir",
        type=command_line.named_path,
        default=pathlib.Path("runs/replicas"),
    )
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.alone:
        print(json.dumps(_alone(options)), flush=True)
        return 0
    cells = [("replicas", count) for count in _counts(options.replicas)]
    cells += [("workers", count) for count in _counts(options.workers)]
    rows = [_row(options, *cell) for cell in cells]
    directory = files.prepare_directory(options.output_dir)
    files.write_atomically(directory / "replicas.csv", reports.table_text(rows))
    shown = [
        {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
        for row in rows
    ]
    print("\n".join(reports.table(shown)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
