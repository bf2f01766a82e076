#!/usr/bin/env bash
# Keras 3 scores and predicts one batch in eight once steps_per_execution is set to 8.
#
# Version: keras 3.15.1 (TensorFlow backend, tensorflow 2.21.0); Python 3.11 or newer.
#
# Behaviour: `model.steps_per_execution` is a public attribute that can be set. A model
# that `evaluate` or `predict` was called on keeps its compiled functions, which read
# one batch for each call, while the loop over the data advances by the new number. So
# `evaluate` returns the score of the first of every eight batches, and `predict`
# returns the rows of these batches alone. Nothing is raised and nothing is printed.
# A model on which neither was called before has the right score and all rows.
#
# Why one would have guessed otherwise: the number changes how many batches run between
# two looks at the callbacks, not which data are read; `compile` drops the functions,
# and setting an attribute that the functions depend on could do the same.
#
# Output seen:
#     keras 3.15.1, tensorflow 2.21.0
#     right score 0.125 of 32 rows
#     set before the first call: score 0.125, predictions (32, 2)
#     set after a call:          score 1.0, predictions (4, 2)
#     As found: the score and the predictions are of one batch in eight.
#
# Exit status: 0 while Keras behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    keras==3.15.1 tensorflow==2.21.0 numpy==2.4.6

KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 \
    "$folder/venv/bin/python" - 2>/dev/null <<'PY'
import sys

import keras
import numpy as np
import tensorflow as tf

SIZE, STEPS = 4, 8
# The model says 0 for every row; only the labels of the first batch are 0.
x = np.zeros((SIZE * STEPS, 2), "float32")
y = (np.arange(len(x)) >= SIZE).astype("int32")


def scores(called_before):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"])
    model.set_weights([np.zeros((2, 2)), np.array([1.0, 0.0])])
    if called_before:
        model.evaluate(x, y, batch_size=SIZE, verbose=0)
        model.predict(x, batch_size=SIZE, verbose=0)
    model.steps_per_execution = STEPS
    score = model.evaluate(x, y, batch_size=SIZE, verbose=0)[1]
    return score, model.predict(x, batch_size=SIZE, verbose=0).shape


right = float(np.mean(y == 0))
print(f"keras {keras.__version__}, tensorflow {tf.__version__}")
print(f"right score {right} of {len(x)} rows")
fresh, used = scores(False), scores(True)
print(f"set before the first call: score {fresh[0]}, predictions {fresh[1]}")
print(f"set after a call:          score {used[0]}, predictions {used[1]}")
if fresh != (right, (len(x), 2)) or used != (1.0, (SIZE, 2)):
    print("Changed: the score or the predictions are different.")
    sys.exit(1)
print("As found: the score and the predictions are of one batch in eight.")
PY
