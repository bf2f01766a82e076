"""Programs on several devices, or on several workers of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import tfdpclip as dpc
from driver_kit.lazy import tf
from driver_kit.settings import UsageError

_CLUSTER = "TF_CONFIG"
# How long a worker may take to end after the chief has, in seconds.
_PATIENCE = 60


def cluster_size() -> int:
    """How many workers `TF_CONFIG` names; 1 without it."""
    try:
        cluster = json.loads(os.environ.get(_CLUSTER) or "{}").get("cluster", {})
        return max(1, sum(len(cluster.get(kind, ())) for kind in ("chief", "worker")))
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"TF_CONFIG is not what TensorFlow reads ({error}); for example "
            'TF_CONFIG=\'{"cluster": {"worker": ["host1:2222", "host2:2222"]}, '
            '"task": {"type": "worker", "index": 0}}\'.'
        ) from error


def is_chief() -> bool:
    """Whether this process is the one that writes results."""
    return cluster_size() == 1 or _first()


def _first() -> bool:
    task = json.loads(os.environ[_CLUSTER])
    chief = "chief" if task["cluster"].get("chief") else "worker"
    return (task["task"]["type"], task["task"].get("index", 0)) == (chief, 0)


def strategy(replicas: int, timeout_seconds: float = 60.0) -> tf.distribute.Strategy:
    """What to train under. To be asked before TensorFlow computes anything.

    Args:
      replicas: devices of this machine: GPUs if there are so many, else parts of the
        CPU, which are no faster than one, and do the same.
      timeout_seconds: how long workers wait for each other.

    Returns:
      The default strategy for one device and one worker.

    Raises:
      UsageError: if there are several of both, or Keras trains on no several workers.
    """
    workers = cluster_size()
    if workers > 1 and replicas > 1:
        raise UsageError(
            f"flag --replicas={replicas}: each of several workers uses all GPUs of its "
            "machine; for example --replicas=1."
        )
    if workers > 1:
        try:
            return dpc.keras.multi_worker_strategy(timeout_seconds=timeout_seconds)
        except NotImplementedError as error:
            raise UsageError(f"flag --workers: {error}") from error
    if replicas == 1:
        return tf.distribute.get_strategy()
    graphics = tf.config.list_physical_devices("GPU")
    if len(graphics) >= replicas:
        return tf.distribute.MirroredStrategy([f"GPU:{i}" for i in range(replicas)])
    try:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * replicas,
        )
    except RuntimeError as error:
        if len(tf.config.list_logical_devices("CPU")) < replicas:
            raise UsageError(
                f"flag --replicas={replicas}: TensorFlow has divided its CPU already; "
                "start a process of its own for it, or use --replicas=1."
            ) from error
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


@contextlib.contextmanager
def local_workers(
    count: int, module: str, used: Any, directory: str | os.PathLike[str]
) -> Iterator[None]:
    """Starts the other workers of a program on this machine, and sees that they end.

    Within, this process is worker 0, the chief.

    Args:
      count: how many there are, with this one.
      module: the program.
      used: its settings, with `workers` and `output_dir` among them.
      directory: where the others' output goes.

    Raises:
      UsageError: if `TF_CONFIG` says already who takes part.
    """
    if count == 1:
        yield
        return
    if os.environ.get(_CLUSTER):
        raise UsageError(
            f"flag --workers={count}: TF_CONFIG is set, so that workers are started by "
            "hand; for example --workers=1 in each of them."
        )
    tasks = local_cluster(count)
    started: list[subprocess.Popen] = []
    try:
        for i in range(1, count):
            path = pathlib.Path(directory) / f"worker_{i}.txt"
            own = dataclasses.replace(used, workers=1)
            with path.open("w") as file:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, *as_arguments(own)],
                        env=os.environ | tasks[i],
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        os.environ.update(tasks[0])
        yield
        for process in started:
            process.wait(_PATIENCE)
    finally:
        os.environ.pop(_CLUSTER, None)
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


def local_cluster(count: int) -> list[dict[str, str]]:
    """What to put into the environment of each of several workers of this machine."""
    workers = [f"127.0.0.1:{port}" for port in _free_ports(count)]
    tasks = [{"type": "worker", "index": i} for i in range(count)]
    return [
        {_CLUSTER: json.dumps({"cluster": {"worker": workers}, "task": task})}
        for task in tasks
    ]


def as_arguments(used: Any) -> list[str]:
    """The command line that gives these settings.

    >>> @dataclasses.dataclass
    ... class Settings:
    ...     epochs: int = 3
    ...     quiet: bool = False
    ...     seed: int | None = None
    >>> as_arguments(Settings())
    ['--epochs=3', '--noquiet']
    """
    found = []
    for name, value in dataclasses.asdict(used).items():
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--no{name}")
        elif isinstance(value, (list, tuple)):
            found.append(f"--{name}={','.join(map(str, value))}")
        elif value is not None:
            found.append(f"--{name}={value}")
    return found


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()
