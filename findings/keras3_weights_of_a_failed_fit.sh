#!/usr/bin/env bash
# Keras 3: an error in the first step of fit leaves a model with weights of size 0.
#
# Versions: keras 3.15.1, tensorflow 2.21.0 (CPU); Python 3.11 or newer.
#
# Behaviour: `fit` of a `Sequential` without `Input`, whose own `train_step` raises in
# its first trace, leaves every weight without a value: `get_weights()` gives arrays of
# shape (0,), while `model.built` is True. After the mend, with or without `compile`,
# `fit` raises an InvalidArgumentError of incompatible shapes. With `Input` the same error
# leaves the weights as they were.
#
# Why one would have guessed otherwise: an error in a training step, which updated
# nothing, has no business with the weights; and `compile` makes the step anew. The
# message speaks of shapes, and the shape that the layer stated is right.
#
# Output seen:
#     keras 3.15.1, tensorflow 2.21.0
#     without Input: built True, weights (0,) (0,) then InvalidArgumentError
#     with Input: built True, weights (3, 1) (1,) then trains
#     As found: an error in a first step takes the values of weights that it made.
#
# Exit status: 0 while the packages behave so, 1 once they do not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  tensorflow==2.21.0 keras==3.15.1

cat > "$folder/show.py" <<'PYTHON'
import sys

import keras
import numpy as np
import tensorflow as tf

print(f"keras {keras.__version__}, tensorflow {tf.__version__}")


class Checked(keras.Sequential):
    """A model that refuses its first step, as a check of the data may."""

    refuses = True

    def train_step(self, data):
        logs = super().train_step(data)
        if self.refuses:
            raise ValueError("refused")
        return logs


def results(first):
    """What a failed and a mended fit leave, of a model with these first layers."""
    model = Checked([*first, keras.layers.Dense(1)])
    x = np.ones([100, 3], "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(20)
    model.compile("sgd", "mse")
    try:
        model.fit(data, verbose=0)
        sys.exit("The first step was to raise.")
    except ValueError:
        pass
    shapes = [w.shape for w in model.get_weights()]
    model.refuses = False
    model.compile("sgd", "mse")
    try:
        model.fit(data, verbose=0)
        then = "trains"
    except tf.errors.InvalidArgumentError as error:
        then = type(error).__name__
    print(
        f"{'with' if first else 'without'} Input: built {model.built}, weights",
        *shapes,
        f"then {then}",
    )
    return shapes, then


without = results([])
given = results([keras.Input((3,))])
if without != ([(0,), (0,)], "InvalidArgumentError"):
    sys.exit("The behaviour has changed: weights keep their values.")
if given != ([(3, 1), (1,)], "trains"):
    sys.exit("The behaviour has changed with an Input.")
PYTHON

CUDA_VISIBLE_DEVICES= TF_CPP_MIN_LOG_LEVEL=3 KERAS_BACKEND=tensorflow \
  "$folder/venv/bin/python" "$folder/show.py" 2>/dev/null
echo "As found: an error in a first step takes the values of weights that it made."
