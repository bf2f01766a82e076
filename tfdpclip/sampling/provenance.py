"""Finds the batches, and the drawers, behind a data set that is iterated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._notes import NOTES
from tfdpclip.sampling.batches import Batches
from tfdpclip.sampling.drawer import Drawer

# Wrappers that iterators and Keras put around a data set; they change no element.
_WRAPPERS = frozenset(("_OptionsDataset",))


def origin(dataset: Any) -> Batches | None:
    """The batches behind a data set, if it shows them unchanged.

    Returns:
      None if elements may differ from those of the batches, because anything but the
      methods of `Batches` stands between.
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
    """The possible numbers of rows per record, for tensors of drawn elements.

    Args:
      sources: the inputs of a step; only their numbers of rows are compared.
    """
    lengths = {source.shape[0] for source in sources if source.shape.rank} - {None}
    return {
        drawer.rows_per_record
        for drawer in NOTES.drawers
        if drawer.rows * drawer.rows_per_record in lengths
    }


def drawers_of(dataset: Any) -> list[Drawer]:
    """The drawers behind a data set, through all transformations that can be seen."""
    found: list[Drawer] = []
    pending = [dataset]
    while pending:
        current = pending.pop()
        if type(current) is Batches and current._drawer not in found:
            found.append(current._drawer)
        elif isinstance(current, tf.data.Dataset):
            pending.extend(_tf_private.inputs_of(current))
    return found
