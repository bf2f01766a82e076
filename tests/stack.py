"""The stack that the tests run on, for those whose facts differ; see docs/stacks.md."""

import importlib.util

import tensorflow as tf

#: Whether `tf.keras` is Keras 3.
KERAS_3 = hasattr(tf.keras, "ops")
#: Whether there is TensorFlow Federated.
FEDERATED = importlib.util.find_spec("tensorflow_federated") is not None
