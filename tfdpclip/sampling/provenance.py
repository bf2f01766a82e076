"""Which batches, and whose draws, stand behind a data set that somebody iterates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.sampling.batches import Batches
from tfdpclip.sampling.drawer import DRAWERS, Drawer

# What iterators and Keras put around a data set; they change no element.
_WRAPPERS = frozenset(("_OptionsDataset",))


def origin(dataset: Any) -> Batches | None:
    """The batches that a data set is, whatever other data sets it was derived from.

    Returns:
      None if elements may be other than those batches': if anything but their own
      methods stands between them.
    """
    while isinstance(dataset, tf.data.Dataset):
        if type(dataset) is Batches:
            return dataset
        kind = type(dataset)
        ours = kind.__module__.startswith("tensorflow.")
        if not (ours and kind.__name__ in _WRAPPERS):
            return None
        inputs = dataset._inputs()
        if len(inputs) != 1:
            return None
        dataset = inputs[0]
    return None


def rows_per_record_of(sources: Iterable[tf.Tensor]) -> set[int]:
    """How many rows the records have of batches that tensors may be elements of.

    Args:
      sources: what a step was given. Its number of rows is all that tells.
    """
    lengths = {source.shape[0] for source in sources if source.shape.rank} - {None}
    return {
        drawer.rows_per_record
        for drawer in DRAWERS
        if drawer.rows * drawer.rows_per_record in lengths
    }


def drawers_of(dataset: Any) -> list[Drawer]:
    """The drawers behind a data set, through whatever transformations can be seen."""
    found: list[Drawer] = []
    pending = [dataset]
    while pending:
        current = pending.pop()
        if type(current) is Batches and current._drawer not in found:
            found.append(current._drawer)
        elif isinstance(current, tf.data.Dataset):
            pending.extend(_tf_private.inputs_of(current))
    return found
