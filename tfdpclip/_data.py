"""The data of users: arrays, or a data set of batches."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpclip._arguments import real, shown


def check_data(name: str, data: Any, what: str = "arrays") -> Any:
    """Returns `data`, or raises ValueError unless it may be arrays or a data set.

    Args:
      name: the argument's name.
      data: a data set of batches, an array, or a list, tuple or dict of arrays.
      what: the expected type in words, as an alternative to a data set.
    """
    holds = isinstance(data, (tf.data.Dataset, tuple, list, dict))
    axes = getattr(data, "shape", None)
    if not holds and not (hasattr(data, "dtype") and axes is not None and len(axes)):
        raise ValueError(
            f"{name} must be {what} or a tf.data.Dataset of batches, got {shown(data)}."
        )
    return data


def as_batches(name: str, data: Any, batch_size: int) -> tf.data.Dataset:
    """Returns a data set of batches of arrays, or `data` if it is a data set.

    Raises ValueError if `data` are not arrays, or not of one length.
    """
    check_data(name, data)
    if isinstance(data, tf.data.Dataset):
        return data
    if isinstance(data, tuple):
        # Lists of numbers become tensors, rather than nests of scalars.
        data = tuple(_as_tensor(name, part) for part in data)
    elif isinstance(data, list) and data and real(data[0]) is not None:
        data = _as_tensor(name, data)
    try:
        return tf.data.Dataset.from_tensor_slices(data).batch(batch_size)
    except (IndexError, TypeError, ValueError, tf.errors.OpError) as error:
        raise ValueError(
            f"{name} must be arrays with one row per example: {error}"
        ) from error


def _as_tensor(name: str, part: Any) -> Any:
    if not isinstance(part, list):
        return part
    try:
        return tf.convert_to_tensor(part)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be rectangular arrays: {error}") from error
