"""Keeps the totals of metrics out of the files of a model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tfdpclip.keras import _compat


def keep_out_of_files(model: Any) -> None:
    """Makes a model save its metrics as 0, from now on.

    The variables of metrics are exact totals over the private batches, without noise.
    A file may be written at any time: by a callback in the middle of an epoch, or
    after an error or an interrupt ended `fit`. The metrics themselves keep their
    values, so that the logs stay right.

    Args:
      model: the model; its methods that save metrics are replaced.
    """
    for name in _compat.SAVES_METRICS:
        method = getattr(model, name, None)
        if method is not None and not isinstance(method, _WithoutTotals):
            setattr(model, name, _WithoutTotals(model, method))


class _WithoutTotals:
    """A method that saves a model, whose metrics are 0 while the method runs."""

    def __init__(self, model: Any, method: Callable):
        functools.update_wrapper(self, method)
        self._model, self._method = model, method

    def __call__(self, *args, **options):
        with _forgotten(self._model):
            return self._method(*args, **options)


@contextlib.contextmanager
def _forgotten(model: Any) -> Iterator[None]:
    """A context in which the variables of the metrics are 0."""
    variables = _compat.totals_of(model)
    values = [variable.numpy() for variable in variables]
    try:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(np.zeros_like(value))
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
