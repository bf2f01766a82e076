"""Finds callbacks that decide by a metric, or show it, which has no noise."""

from __future__ import annotations

import contextlib
import os
import re
import string
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip.keras.watching.fit_arguments import (
    callbacks_of_fit,
    overlap,
    validation_data_of_fit,
)
from tfdpclip.sampling.batches import Batches

# Beginnings of the names of the logs that are released, or public, already.
_RELEASED = ("epsilon", "clip_norm", "noise_stddev", "unclipped_fraction")


def assumptions_about(private: Sequence[np.ndarray]) -> list[str]:
    """What a statement says of the callbacks of the running call of `fit`.

    Early stopping, an end at the first NaN, the best checkpoint, and a learning rate
    that falls on a plateau read a metric of `fit`, and the weights or the number of
    steps depend on it. The name of a checkpoint's file may show a metric.

    Args:
      private: the arrays that were given for the batches, as far as they are known.
    """
    validation = validation_data_of_fit()
    known_private = isinstance(validation, Batches) or overlap(validation, private)
    texts = []
    for callback in callbacks_of_fit():
        name = type(callback).__name__
        for read, did in _uses_of_metrics(callback):
            if read.startswith(_RELEASED):
                continue
            data = "the private batches"
            if read.startswith("val_"):
                data = "validation data that are in the private batches, too"
                if not known_private:
                    texts.append(
                        f"{read!r}, by which {name} {did}, is of public data, or of "
                        "data outside of the claim"
                    )
                    continue
            texts.append(
                f"something ran that is not counted: {name} {did} by {read!r} of "
                f"{data}, which has no noise"
            )
    return texts


def _uses_of_metrics(callback: Any) -> Iterator[tuple[str, str]]:
    """The metrics that a callback reads, and what it did by each, in words."""
    read = getattr(callback, "monitor", None)
    if isinstance(callback, tf.keras.callbacks.TerminateOnNaN):
        read = "loss"
    # A checkpoint that is written in any case decides nothing.
    if isinstance(read, str) and getattr(callback, "save_best_only", True):
        yield read, "decided"
    path = getattr(callback, "filepath", None)
    if isinstance(path, str | os.PathLike):
        with contextlib.suppress(ValueError):  # The path is no template.
            for _, field, _, _ in string.Formatter().parse(os.fspath(path)):
                metric = re.split(r"[.\[]", field or "")[0]
                if metric not in ("", "epoch", "batch"):
                    yield metric, "named files"
