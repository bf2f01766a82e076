#!/usr/bin/env bash
# Keras 3 refuses text columns in evaluate and predict that the model itself takes.
#
# Version: keras 3.15.1 (TensorFlow backend, tensorflow 2.21.0); Python 3.11 or newer.
#
# Behaviour: a model with an input of dtype "string" and a StringLookup takes a dict of
# NumPy strings, NumPy objects or a text column of pandas when it is called. `fit`,
# `evaluate` and `predict` raise "Invalid dtype" for the same dict, because the array
# adapter looks the array's dtype up among Keras's own, whose one text is "string".
# As `validation_data` of a `fit` over a tf.data pipeline, the dict raises only after
# the whole first epoch has been trained. Through
# `tf.data.Dataset.from_tensor_slices` the same dict works everywhere, and so does a
# `tf.constant` of the same words in the dict.
#
# Why one would have guessed otherwise: text columns are what StringLookup is for, the
# model takes the dict, and Keras 2.14 takes NumPy objects in all three methods. An
# input that `fit` cannot use should be found before an epoch is trained.
#
# Output seen:
#     keras 3.15.1, tensorflow 2.21.0
#     NumPy strings: called (4, 1); evaluate: Invalid dtype: str160
#       predict: Invalid dtype: str160
#       fit with it as validation_data, after 2 of 2 batches: Invalid dtype: str160
#       through tf.data: evaluate and predict work, fit trains 6 batches
#     NumPy objects: called (4, 1); evaluate: Invalid dtype: object
#       predict: Invalid dtype: object
#       fit with it as validation_data, after 2 of 2 batches: Invalid dtype: object
#       through tf.data: evaluate and predict work, fit trains 6 batches
#     pandas column: called (4, 1); evaluate: Invalid dtype: str
#       predict: Invalid dtype: str
#       fit with it as validation_data, after 2 of 2 batches: Invalid dtype: str
#       through tf.data: evaluate and predict work, fit trains 6 batches
#     As found: evaluate and predict refuse text that the model takes.
#
# Exit status: 0 while Keras behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    keras==3.15.1 tensorflow==2.21.0 numpy==2.4.6 pandas==3.1.1

cat > "$folder/show.py" <<'PYTHON'
import sys

import keras
import numpy as np
import pandas as pd
import tensorflow as tf

WORDS = ["red", "blue", "red", "green"]
LABELS = np.array([[0.0], [1.0], [0.0], [1.0]], "float32")
COLUMNS = {
    "NumPy strings": np.array(WORDS)[:, None],
    "NumPy objects": np.array(WORDS, object)[:, None],
    "pandas column": pd.DataFrame({"colour": WORDS})["colour"],
}


class CountBatches(keras.callbacks.Callback):
    trained = 0

    def on_train_batch_end(self, batch, logs=None):
        self.trained += 1


def new_model():
    words = keras.Input((1,), dtype="string", name="colour")
    lookup = keras.layers.StringLookup(
        vocabulary=["red", "blue", "green"], output_mode="one_hot"
    )
    model = keras.Model({"colour": words}, keras.layers.Dense(1)(lookup(words)))
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    return model


def refusal(function, *args, **kwargs):
    """The text of the ValueError that a call raises; None if the call works."""
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error).splitlines()[0]
    return None


print(f"keras {keras.__version__}, tensorflow {tf.__version__}")
as_found = True
for name, column in COLUMNS.items():
    x, model, count = {"colour": column}, new_model(), CountBatches()
    pipeline = tf.data.Dataset.from_tensor_slices((x, LABELS)).batch(2)
    shape = tuple(model(x).shape)
    evaluate = refusal(model.evaluate, x, LABELS, verbose=0)
    predict = refusal(model.predict, x, verbose=0)
    print(f"{name}: called {shape}; evaluate: {evaluate}")
    print(f"  predict: {predict}")
    settings = {"epochs": 3, "shuffle": False, "verbose": 0, "callbacks": [count]}
    late = refusal(model.fit, pipeline, validation_data=(x, LABELS), **settings)
    after = count.trained
    print(f"  fit with it as validation_data, after {after} of 2 batches: {late}")
    count.trained = 0
    works = [
        refusal(model.evaluate, pipeline, verbose=0),
        refusal(model.predict, pipeline, verbose=0),
        refusal(model.fit, pipeline, validation_data=pipeline, **settings),
    ]
    if works == [None] * 3:
        trained = f"fit trains {count.trained} batches"
        print(f"  through tf.data: evaluate and predict work, {trained}")
    refused = [str(text).startswith("Invalid dtype") for text in (evaluate, predict, late)]
    as_found &= shape == (4, 1) and all(refused) and after == 2
    as_found &= works == [None] * 3 and count.trained == 6

if not as_found:
    sys.exit("The behaviour has changed.")
print("As found: evaluate and predict refuse text that the model takes.")
PYTHON

KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 \
    "$folder/venv/bin/python" "$folder/show.py"
