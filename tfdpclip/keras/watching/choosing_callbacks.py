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

from tfdpclip.keras import _compat
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


class OwnDecisions:
    """Notices a learning rate, or an end of `fit`, that a callback of the user set.

    Such a callback may decide by a metric of `fit`. The callback's reads cannot be
    seen; the result can.

    Args:
      model: the model that `fit` trains.
    """

    def __init__(self, model: tf.keras.Model):
        self._model = model
        own = [c for c in callbacks_of_fit() if _is_of_the_user(c)]
        names = ", ".join(dict.fromkeys(type(c).__name__ for c in own))
        self._names = f"a callback ({names})" if own else ""
        stops = (tf.keras.callbacks.EarlyStopping, tf.keras.callbacks.TerminateOnNaN)
        self._stopper = any(isinstance(c, stops) for c in callbacks_of_fit())
        self._rate = self._read_rate()
        self._reported = False
        #: Whether the budget's end set `stop_training`.
        self.budget_stops = False

    def assumptions(self, ends: bool = False) -> list[str]:
        """The assumptions about changes since the last call.

        Args:
          ends: whether `fit` ends.
        """
        before, self._rate = self._rate, self._read_rate()
        texts = []
        if self._rate != before and not self._reported:
            self._reported = True
            texts.append(_OWN_DECISION.format(f"{self._names} set the learning rate"))
        stopped = ends and self._model.stop_training and not self.budget_stops
        if stopped and (self._names or not self._stopper):
            who = self._names or "code beside the callbacks"
            texts.append(_OWN_DECISION.format(f"{who} ended fit"))
        return texts

    def _read_rate(self) -> float | None:
        """The learning rate; None if no callback of the user can set a rate."""
        # Keras's own callbacks that set a rate follow the epoch, or are named already.
        rate = self._names and _compat.own_rate(self._model.optimizer)
        return float(rate.numpy()) if isinstance(rate, tf.Variable) else None


_OWN_DECISION = (
    "{} between two steps of fit, by released values or public data alone; a metric "
    "of fit, such as the loss, has no noise, and the saved rate or the number of steps "
    "would tell it"
)


def _is_of_the_user(callback: Any) -> bool:
    """Whether a callback runs code that the user wrote."""
    kind = type(callback)
    if isinstance(callback, tf.keras.callbacks.LambdaCallback):
        return True
    return kind.__module__.split(".")[0] not in ("keras", "tf_keras", "tfdpclip")


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
