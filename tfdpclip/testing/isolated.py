"""The isolation check as an assertion."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpclip.gradients import ExampleIsolationError
from tfdpclip.keras import check_isolation


def assert_isolated(
    model: tf.keras.Model, x: Any, y: Any = None, **options: Any
) -> None:
    """Checks that neither an example's loss nor its gradient depends on the others.

    Some examples are replaced in turn, and the others' losses and gradients are
    compared (`tfdpclip.keras.check_isolation`).

    Args:
      model: a compiled Keras model.
      x: a batch of inputs.
      y: the targets, as for `fit`.
      **options: see `tfdpclip.keras.check_isolation`.

    Raises:
      AssertionError: if the loss or the gradient of one example changes when another
        is replaced.
    """
    try:
        check_isolation(model, x, y, **options)
    except ExampleIsolationError as error:
        raise AssertionError(str(error)) from error
