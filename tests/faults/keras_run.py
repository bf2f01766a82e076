"""A private Keras training run, with a ledger and backups, to be killed and resumed."""

from __future__ import annotations

import math
import os
import pathlib

import numpy as np
import tensorflow as tf

import tfdpclip as dpc
from driver_kit import reports
from tests.stack import KERAS_3
from tfdpclip import files

EPOCHS, STEPS_PER_EPOCH, DELTA = 60, 5, 1e-5
#: Steps that `PrivacyBudget` reserves at a time.
AHEAD = EPOCHS * STEPS_PER_EPOCH // 100
# Keras 3 writes its backup in place, and Keras 2 beside the last.
_KEEP_THE_LAST = {"double_checkpoint": True} if KERAS_3 else {}


class Rows(tf.keras.callbacks.Callback):
    """A table of epochs that outlives the process. Goes before the backup."""

    def __init__(self, path: pathlib.Path):
        super().__init__()
        self._path = path
        self._rows = []
        if path.exists():
            header, *lines = path.read_text().splitlines()
            names = header.split(",")
            self._rows = [dict(zip(names, x.split(","), strict=True)) for x in lines]

    def on_epoch_end(self, epoch, logs=None):
        kept = [row for row in self._rows if int(row["epoch"]) < epoch]
        self._rows = [*kept, {"epoch": epoch, "epsilon": logs["epsilon"]}]
        files.write_atomically(self._path, reports.table_text(self._rows))


class Steps(tf.keras.callbacks.Callback):
    """Grows a file by a byte after every step: an independent count of the steps."""

    def __init__(self, path: pathlib.Path):
        super().__init__()
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def on_train_batch_end(self, batch, logs=None):
        os.write(self._handle, b".")


def prepare() -> None:
    """Imports the modules that `run` needs."""
    import tfdpclip.accounting
    import tfdpclip.keras  # noqa: F401


def data() -> tuple[np.ndarray, np.ndarray]:
    """The records."""
    x = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)
    return x, (x[:, :1] > 0).astype(np.float32)


def run(name: str, scheme=None, noise=None, stream=None, **kept: str) -> None:
    """Trains; continues an earlier process's run if that process was killed.

    Args:
      name: of the directory.
      scheme: the sampling scheme; Poisson by default.
      noise: of the optimizer.
      stream: the records, by way of a stream; arrays by default.
      **kept: files that the budget keeps, by the argument's name.
    """
    directory = pathlib.Path(name)
    directory.mkdir(parents=True, exist_ok=True)
    scheme = scheme or dpc.sampling.Poisson(1 / STEPS_PER_EPOCH)
    batches = scheme.batches(stream or data())
    model = tf.keras.Sequential(
        [
            tf.keras.Input((8,)),
            tf.keras.layers.Dense(4, "tanh"),
            tf.keras.layers.Dense(1),
        ]
    )
    model.compile(
        dpc.keras.DPAdam(
            0.01,
            clip=dpc.QuantileClip(),
            noise_multiplier=2.0,
            expected_batch_size=batches.expected_batch_size,
            noise=noise,
        ),
        tf.keras.losses.BinaryCrossentropy(from_logits=True),
    )
    model.fit(
        batches,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[
            dpc.keras.PrivacyBudget(
                math.inf,
                DELTA,
                batches,
                "pld" if stream else "rdp",
                ledger=directory / "privacy.json",
                **{argument: directory / file for argument, file in kept.items()},
            ),
            Steps(directory / "steps"),
            Rows(directory / "history.csv"),
            tf.keras.callbacks.BackupAndRestore(
                str(directory / "backup"), delete_checkpoint=False, **_KEEP_THE_LAST
            ),
        ],
    )
