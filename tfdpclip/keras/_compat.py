"""The door to Keras, for either version of `tf.keras`.

Everything that depends on a version of Keras is in `_keras2.py` and `_keras3.py`, under
the same names. Only these two files use private parts of Keras; a test checks this. The
names that Keras writes into graphs are in `tfdpclip/_keras_marks.py`, which does not
import Keras.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

# `tf.keras` has no `__version__` in Keras 2.
if not TYPE_CHECKING and getattr(tf.keras, "__version__", "2").startswith("3."):
    from tfdpclip.keras._keras3 import *  # noqa: F403
else:
    from tfdpclip.keras._keras2 import *  # noqa: F403
