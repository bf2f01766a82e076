"""The isolation check as an assertion."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpclip.gradients import ExampleIsolationError
from tfdpclip.keras import check_isolation


def assert_isolated(
    model: tf.keras.Model, x: Any, y: Any = None, **options: Any
) -> None:
    """Checks that no example's loss depends on the other examples of its batch.

    Finds what no gradient shows, too: every example is left out in turn, and the
    others' losses are compared (`tfdpclip.keras.check_isolation`).

    Args:
      model: a compiled Keras model.
      x: a batch of inputs.
      y: the targets, as for `fit`.
      **options: see `tfdpclip.keras.check_isolation`.

    Raises:
      AssertionError: if the loss of one example changes when another is left out.
    """
    try:
        check_isolation(model, x, y, **options)
    except ExampleIsolationError as error:
        raise AssertionError(str(error)) from error
