"""The stack that the tests run on, for those whose facts differ; see docs/stacks.md."""

import tensorflow as tf

#: Whether `tf.keras` is Keras 3.
KERAS_3 = hasattr(tf.keras, "ops")
