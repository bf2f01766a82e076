"""What a model's `train_step` is given of an element, and what it makes of that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdpclip import _keras_marks
from tfdpclip._docs import see
from tfdpclip.gradients import drawn_rows
from tfdpclip.sampling.batches import Batches

# How Python begins to say that a `train_step` unpacks (x, y), and got weights besides.
_TWO_OF_THREE = "too many values to unpack (expected 2"


@contextlib.contextmanager
def elements_followed(model: tf.keras.Model, batches: Batches | None) -> Iterator[None]:
    """Has a private step know which rows of its element are records.

    Keras looks `train_step` up for every trace, and calls it with the element. The
    weights that come with it say which rows were drawn, whatever `train_step` does with
    them. One that takes (x, y), or x, as before there were weights, is given that.

    Args:
      model: the model, whose data are elements of drawn batches.
      batches: those; None where that is not known, and nothing is done.
    """
    if batches is None:
        yield
        return
    attributes = model.__dict__
    before = attributes.get("train_step")
    step = model.train_step
    own = not type(model).train_step.__module__.startswith(_keras_marks.MODULES)
    own |= before is not None

    # Converted by AutoGraph where Keras has `train_step` converted.
    def train_step(data):
        if not _is_element(data):
            return step(data)
        with drawn_rows.given_element(data[2]):
            if not own:
                return step(data)
            try:
                return step(data)
            except (AttributeError, TypeError, ValueError) as error:
                fewer = _as_taken(data, error, batches)
            return step(fewer)

    # Not through Keras's attribute tracking.
    attributes["train_step"] = train_step
    try:
        yield
    finally:
        del attributes["train_step"]
        if before is not None:
            attributes["train_step"] = before


def _is_element(data: Any) -> bool:
    return isinstance(data, tuple) and len(data) == 3


@tf.autograph.experimental.do_not_convert
def _as_taken(data: tuple, error: Exception, batches: Batches) -> Any:
    """What a `train_step` takes that raised an error of the whole element.

    Raises:
      Exception: the error, if it does not say that fewer parts are taken.
      ValueError: if the weights say more than which rows are records.
    """
    labelled = data[1] is not None
    if labelled and _TWO_OF_THREE not in str(error):
        raise error
    if batches.weighted:
        raise ValueError(
            "train_step takes no weights, and these batches have some that matter "
            "(sample_weight, class_weight, or people with fewer examples than others). "
            "Write\n"
            "    x, y, w = tf.keras.utils.unpack_x_y_sample_weight(data)\n"
            "    ...\n"
            "    loss = self.compute_loss(x, y, y_pred, w)\n"
            "as docs/train_step.md has it." + see("rows-that-fill-a-batch-up")
        ) from error
    return data[:2] if labelled else data[0]
