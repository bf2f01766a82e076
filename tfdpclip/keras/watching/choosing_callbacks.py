"""Finds callbacks that decide by a metric, which has no noise."""

from __future__ import annotations

import inspect
import types
from typing import Any

import tensorflow as tf

# Beginnings of the names of the logs that are released, or public, already.
_RELEASED = ("epsilon", "clip_norm", "noise_stddev", "unclipped_fraction")


def calling_fit() -> types.FrameType | None:
    """The frame of the running call of `fit`, or None."""
    frame: types.FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "fit":
        frame = frame.f_back
    return frame


def callbacks_of_fit() -> list[Any]:
    """The callbacks of the running call of `fit`."""
    frame = calling_fit()
    given = None if frame is None else frame.f_locals.get("callbacks")
    return list(getattr(given, "callbacks", None) or ())


def assumptions_about(model: Any) -> list[str]:
    """What a statement says of the callbacks of the running call of `fit`.

    Early stopping, an end at the first NaN, the best checkpoint, and a learning rate
    that falls on a plateau read a metric of `fit`, and the weights or the number of
    steps depend on it.
    """
    del model
    texts = []
    for callback in callbacks_of_fit():
        read = getattr(callback, "monitor", None)
        if isinstance(callback, tf.keras.callbacks.TerminateOnNaN):
            read = "loss"
        if not isinstance(read, str) or read.startswith(_RELEASED):
            continue
        if not getattr(callback, "save_best_only", True):
            continue  # A checkpoint that is written in any case.
        name = type(callback).__name__
        if read.startswith("val_"):
            texts.append(
                f"{read!r}, by which {name} decided, is of public data, or of data "
                "outside of the claim"
            )
        else:
            texts.append(
                f"something ran that is not counted: {name} decided by {read!r} of the "
                "private batches, which has no noise"
            )
    return texts
