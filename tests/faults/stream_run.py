"""The Keras run, with records that are read once an epoch."""

from __future__ import annotations

import os
import pathlib
import time

import tfdpclip as dpc
from tests.faults import keras_run

#: The directory of the copies of the stream.
FOLDER = "scratch"
#: A file that grows by a byte with so many records read.
READ, EVERY = "read", 50
#: A file that makes reading slow, for kills in the middle.
SLOW = "slow"
_SECONDS = 1e-4  # For a record, so that kills happen while records are read.


def prepare() -> None:
    """Imports the modules that `run` needs."""
    keras_run.prepare()


def run(name: str) -> None:
    """Trains; continues an earlier process's run if that process was killed."""
    directory = pathlib.Path(name)
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory / READ, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    x, y = keras_run.data()

    def read():
        for i, record in enumerate(zip(x, y, strict=True)):
            time.sleep(_SECONDS)
            if i % EVERY == 0:
                os.write(handle, b".")
                time.sleep(0.1 if (directory / SLOW).exists() else 0)
            yield record

    stream = dpc.sampling.Stream(read, len(x), directory / FOLDER)
    scheme = dpc.sampling.RandomAllocation(keras_run.STEPS_PER_EPOCH)
    keras_run.run(name, scheme, stream=stream)
