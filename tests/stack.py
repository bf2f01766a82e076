"""The installed stack, for tests whose facts depend on it; see docs/stacks.md."""

from __future__ import annotations

import importlib.util

import pytest
import tensorflow as tf

from tfdpclip.keras import _compat

#: Whether `tf.keras` is Keras 3.
KERAS_3 = hasattr(tf.keras, "ops")
#: Whether TensorFlow has the pinned version.
TF_PINNED = tf.__version__.startswith("2.14.")
#: Whether there is TensorFlow Federated.
FEDERATED = importlib.util.find_spec("tensorflow_federated") is not None
#: The default reduction of a loss.
MEAN = "sum_over_batch_size" if KERAS_3 else "auto"
saving = _compat.saving
place_of = _compat.place_of
names_of = _compat.names_of


def keras2_only(reason):
    """Skips a test on Keras 3, which lacks its subject."""
    return pytest.mark.skipif(KERAS_3, reason=f"Keras 3: {reason}")


class OwnOptimizer(tf.keras.optimizers.Optimizer):
    """A Keras optimizer with a variable `seen` for each variable that it trains."""

    def __init__(self, learning_rate=1.0, name="OwnOptimizer", **kwargs):
        if KERAS_3:
            super().__init__(float(learning_rate), name=name, **kwargs)
            return
        super().__init__(name=name, **kwargs)
        self._learning_rate = self._build_learning_rate(learning_rate)

    def build(self, var_list):
        super().build(var_list)
        if not hasattr(self, "seen"):
            name = {"name": "seen"} if KERAS_3 else {"variable_name": "seen"}
            self.seen = [
                self.add_variable_from_reference(variable, **name)
                for variable in var_list
            ]

    def seen_of(self, variable):
        """The optimizer's variable for a variable of the model."""
        return self.seen[place_of(self, variable)]


def fit_takes_no_draw_to_build(model, sample):
    """Has `fit` learn the shapes from a sample, where Keras 3 would take a draw.

    Under a strategy Keras 3 builds the model from the first element of the data,
    without training on it. Users lose nothing, but the draws differ from those on one
    device.
    """
    if KERAS_3:
        build = type(model)._maybe_symbolic_build
        model._maybe_symbolic_build = lambda **_: build(model, data_batch=sample)
