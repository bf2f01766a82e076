"""The stack that the tests run on, for those whose facts differ; see docs/stacks.md."""

from __future__ import annotations

import importlib.util

import pytest
import tensorflow as tf

from tfdpclip.keras import _compat

#: Whether `tf.keras` is Keras 3.
KERAS_3 = hasattr(tf.keras, "ops")
#: Whether TensorFlow is the pinned one.
TF_PINNED = tf.__version__.startswith("2.14.")
#: Whether there is TensorFlow Federated.
FEDERATED = importlib.util.find_spec("tensorflow_federated") is not None
#: What a loss does with a batch unless it is told.
MEAN = "sum_over_batch_size" if KERAS_3 else "auto"
saving = _compat.saving
place_of = _compat.place_of
names_of = _compat.names_of


def keras2_only(reason):
    """Skips a test on Keras 3, where what it is about does not exist."""
    return pytest.mark.skipif(KERAS_3, reason=f"Keras 3: {reason}")


class OwnOptimizer(tf.keras.optimizers.Optimizer):
    """A Keras optimizer with one variable like each that it trains, called seen."""

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
        """The optimizer's own variable that belongs to one of the model's."""
        return self.seen[place_of(self, variable)]


def fit_takes_no_draw_to_build(model, sample):
    """Has `fit` learn the shapes from a sample, where Keras 3 would take a draw.

    Under a strategy it builds the model from the first element of the data, which it
    then does not train on: no loss to users, but other draws than on one device.
    """
    if KERAS_3:
        build = type(model)._maybe_symbolic_build
        model._maybe_symbolic_build = lambda **_: build(model, data_batch=sample)
