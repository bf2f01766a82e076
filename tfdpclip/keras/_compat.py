"""The door to Keras, whichever `tf.keras` is: behind it, one room for each.

Everything that depends on a version of Keras is in `_keras2.py` and `_keras3.py`, under
the same names. They alone use what Keras keeps private; a test refuses any other. What
Keras writes into graphs is in `tfdpclip/_keras_marks.py`, which needs no Keras.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

# Keras 2 has no version here.
if not TYPE_CHECKING and getattr(tf.keras, "__version__", "2").startswith("3."):
    from tfdpclip.keras._keras3 import *  # noqa: F403
else:
    from tfdpclip.keras._keras2 import *  # noqa: F403
