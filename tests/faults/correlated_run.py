"""The Keras run, with correlated noise that goes on where it was killed."""

from __future__ import annotations

import tfdpclip as dpc
from tests.faults import keras_run

STEPS = keras_run.EPOCHS * keras_run.STEPS_PER_EPOCH
SECRET = "noise.secret"


def prepare() -> None:
    """Imports the modules that `run` needs."""
    keras_run.prepare()


def run(name: str) -> None:
    """Trains; continues an earlier process's run if that process was killed."""
    scheme = dpc.sampling.MinSeparation(200, 200 // keras_run.STEPS_PER_EPOCH)
    matrix = dpc.correlated.BufferedToeplitz(2, STEPS, scheme)
    noise = dpc.CorrelatedNoise(matrix, STEPS, scheme)
    keras_run.run(name, scheme, noise, secret=SECRET)
