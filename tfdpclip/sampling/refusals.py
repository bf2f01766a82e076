"""The methods of `tf.data.Dataset` that drawn batches refuse, and the reason."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import tensorflow as tf

from tfdpclip._docs import see

REFUSAL = (
    "This would change which records meet in a step, and the accounting would no "
    "longer describe the draws. Transform the data before sampling, or use map() on "
    "single records. For several devices, use batches.distribute(strategy)."
    + see("batches-that-are-transformed")
)
NO_PREFETCH = (
    "prefetch must be 0 with accumulation or shuffled epochs: an element gathered but "
    "not used would shift the steps that follow."
)
# Methods of tf.data.Dataset that do not derive a new data set.
READING = frozenset(
    (
        "as_numpy_iterator",
        "cardinality",
        "element_spec",
        "get_single_element",
        "options",
        "reduce",
        "save",
    )
)


def _refused(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    del self, args, kwargs
    raise ValueError(REFUSAL)


def refuse_the_rest(batches: type[tf.data.Dataset]) -> None:
    """Replaces methods that regroup, select or repeat records, or that are unknown.

    Args:
      batches: the class of batches; methods that it defines are kept.
    """
    for name in dir(tf.data.Dataset):
        kept = name.startswith("_") or name in READING or name in vars(batches)
        attribute = inspect.getattr_static(tf.data.Dataset, name)
        # Static and class methods do not start from the batches.
        if not kept and not isinstance(attribute, (staticmethod, classmethod)):
            setattr(batches, name, _refused)
