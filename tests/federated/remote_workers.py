"""Workers that tests start, freeze and kill, and clients that wait for a gate."""

import contextlib
import os
import signal
import socket
import subprocess
import time

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tfdpclip.federated import _tff


def free_port():
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return tried.getsockname()[1]


class RunningWorker:
    """A worker process that can be started again on its port."""

    def __init__(self):
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [_tff.worker_binary(), f"--port={self.port}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def send(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running(count):
    """So many workers, each a process of its own."""
    started = [RunningWorker() for _ in range(count)]
    try:
        yield started
    finally:
        for worker in started:
            with contextlib.suppress(ProcessLookupError):
                worker.send(signal.SIGCONT)
            worker.kill()


def gated_sum(directory):
    """A federated sum whose clients say that they began, and wait for the gate.

    A client is a number: it writes the file `began<number>`.
    """
    began, gate = str(directory / "began"), str(directory / "gate")

    @tff.tensorflow.computation(np.int32)
    def wait(x):
        name = tf.strings.join([began, tf.strings.as_string(x)])
        with tf.control_dependencies([tf.io.write_file(name, "")]):
            looks = tf.while_loop(
                lambda looks: tf.equal(tf.size(tf.io.matching_files(gate)), 0),
                lambda looks: looks + 1,
                [0],
            )[0]
        # The result needs the gate, so the wait is not optimised away.
        return x + tf.minimum(looks, 0)

    @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
    def total(values):
        return tff.federated_sum(tff.federated_map(wait, values))

    return total


def wait_for(path, seconds=60):
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not appear"
        time.sleep(0.02)
