"""What a model's `train_step` is given of an element, and what it makes of that."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdpclip import _keras_marks
from tfdpclip._docs import see
from tfdpclip.gradients.loss import drawn_rows
from tfdpclip.keras import _compat
from tfdpclip.sampling.batches import Batches

# How Python begins to say that a `train_step` unpacks (x, y), and got weights besides.
_TWO_OF_THREE = "too many values to unpack (expected 2"
# Of models, the step that their training functions call.
_STEPS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class FollowedStep:
    """Stands for a model's `train_step` while the model is trained on drawn batches.

    *Formal guarantees*: a private step within knows, by the weights of the element that
    `train_step` is given, which rows were drawn, whatever `train_step` does with them.
    One that takes (x, y), or x, as before there were weights, is given that.

    Args:
      model: the model, which this does not keep alive.

    Attributes:
      batches: those that the elements are of; None while that is not known, when
        `train_step` runs as it is.
    """

    def __init__(self, model: tf.keras.Model):
        self._model = weakref.ref(model)
        self.batches: Batches | None = None
        # The `train_step` of the model itself, not of its class, if there is one.
        self._given: Any = None

    # Converted by AutoGraph where Keras has `train_step` converted.
    def __call__(self, data):
        model = self._model()
        step = self._given
        if step is None:
            step = type(model).train_step.__get__(model)
        if self.batches is None or not _is_element(data):
            return step(data)
        with drawn_rows.given_element(data[2]):
            if (step.__module__ or "").startswith(_keras_marks.MODULES):
                return step(data)
            try:
                return step(data)
            except (AttributeError, TypeError, ValueError) as error:
                fewer = _as_taken(data, error, self.batches)
            return step(fewer)

    @contextlib.contextmanager
    def in_place(self, batches: Batches | None) -> Iterator[None]:
        """Has Keras call this for the model's `train_step`, wherever it looks that up.

        Args:
          batches: those that the elements are of, if that is known.
        """
        attributes = self._model().__dict__
        self._given = attributes.get("train_step")
        # Not through Keras's attribute tracking.
        attributes["train_step"] = self
        self.batches = batches
        try:
            yield
        finally:
            self.batches = None
            del attributes["train_step"]
            if self._given is not None:
                attributes["train_step"], self._given = self._given, None


def followed_step(model: tf.keras.Model) -> FollowedStep:
    """What stands for a model's `train_step`, and is in its training function.

    A training function that was made with `train_step` in it is made again, once.
    """
    step, known = _STEPS.get(model, (FollowedStep(model), None))
    function = model.train_function
    if _compat.KEEPS_STEP and not _compat.has_own_function(model):
        if known is None or known() is not function:
            with step.in_place(None):
                model.make_train_function(force=True)
    # Not the function itself, which keeps the model.
    function = model.train_function
    _STEPS[model] = step, None if function is None else weakref.ref(function)
    return step


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
