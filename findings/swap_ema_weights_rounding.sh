#!/usr/bin/env bash
# Keras's SwapEMAWeights on TensorFlow puts rounded weights back, not the weights.
#
# Version: keras 3.15.1 with tensorflow-cpu 2.21.0; Python 3.11 or newer.
#
# Behaviour: on the TensorFlow backend, `keras.callbacks.SwapEMAWeights` exchanges a
# weight w with its moving average a by additions (w = w + a; a = w - a; w = w - a).
# Floating-point sums round, so that `evaluate` with the callback changes the weights:
# by a unit in the last place here, which in bfloat16 is near 1 % of a weight. (On the
# JAX backend the callback copies, and the weights come back exactly.)
#
# Why one would have guessed otherwise: evaluation is expected to leave the weights
# alone, and a swap to copy bits; the documentation says that the callback "restores
# the previous weights after evaluation".
#
# Output seen:
#     keras 3.15.1, tensorflow 2.21.0
#     float32: evaluate alone changes 0 of 100 weights,
#       with SwapEMAWeights 48 of 100 weights,
#       by up to 1.2e-07 of a weight
#     bfloat16: evaluate alone changes 0 of 100 weights,
#       with SwapEMAWeights 36 of 100 weights,
#       by up to 7.8e-03 of a weight
#     As found: evaluate puts rounded weights back.
#
# Exit status: 0 while Keras behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    keras==3.15.1 tensorflow-cpu==2.21.0 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import sys

import keras
import numpy as np
import tensorflow as tf


def trained_model(dtype):
    """A linear model after ten steps of training."""
    initializer = keras.initializers.Constant(0.5)
    model = keras.Sequential(
        [
            keras.Input((100,)),
            keras.layers.Dense(
                1, use_bias=False, kernel_initializer=initializer, dtype=dtype
            ),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), loss="mse")
    for _ in range(10):
        model.train_on_batch(x, y)
    return model


def evaluate(model, *callbacks):
    """The weights before and after an evaluation."""
    before = model.get_weights()[0].ravel().astype("float32")
    model.evaluate(x, y, verbose=0, callbacks=list(callbacks))
    after = model.get_weights()[0].ravel().astype("float32")
    return before, after


print(f"keras {keras.__version__}, {keras.backend.backend()} {tf.__version__}")

x = np.random.default_rng(0).normal(size=(256, 100)).astype("float32")
y = x.sum(axis=1, keepdims=True)
changed_alone, changed_by_swap = [], []
for dtype in ("float32", "bfloat16"):
    model = trained_model(dtype)
    before, after = evaluate(model)
    changed_alone.append(np.sum(before != after))
    before, after = evaluate(model, keras.callbacks.SwapEMAWeights())
    changed_by_swap.append(np.sum(before != after))
    print(f"{dtype}: evaluate alone changes {changed_alone[-1]} of 100 weights,")
    print(f"  with SwapEMAWeights {changed_by_swap[-1]} of 100 weights,")
    relative = np.abs(after - before) / np.abs(before)
    print(f"  by up to {relative.max():.1e} of a weight")

if any(changed_alone) or not all(changed_by_swap):
    sys.exit("The behaviour has changed.")
print("As found: evaluate puts rounded weights back.")
PYTHON

TF_CPP_MIN_LOG_LEVEL=3 KERAS_BACKEND=tensorflow \
    "$folder/venv/bin/python" "$folder/show.py"
