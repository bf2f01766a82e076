#!/usr/bin/env bash
# With class_weight and a label for each token, Keras weights a record by a position.
#
# Version: keras 3.15.1 (JAX backend, jax 0.10.2); Python 3.11 or newer.
#
# Behaviour: `fit(..., class_weight=...)` takes integer labels of shape [records, tokens]
# without a word, as the loss does. But Keras reads the last axis as one-hot: the *place*
# of the largest label in the record (the first place, if there are several) is the class
# whose weight the record gets, and the weight is for all tokens of the record. Here the
# classes are 0 and 1, but the weights of classes 2 and 3 are used, which no label has:
#     labels [0 0 1 0]: weight of class 2 for every token
#     labels [0 0 0 1]: weight of class 3
# Labels [1 1 1 1] and [0 0 0 0] both have the weight of class 0. For labels of several
# classes (multi-hot), only the first one counts.
#
# Why one would have guessed otherwise: the documentation says that class_weight maps
# class indices to weights for the loss; so a token of class 1 should have the weight of
# class 1, or the call should be refused.
#
# Output seen:
#     keras 3.15.1, jax 0.10.2
#     class weights {0: 1.0, 1: 10.0, 2: 100.0, 3: 1000.0}, classes 0 and 1 alone
#     labels [0 0 1 0]: loss of the record times 100
#     labels [1 0 0 0]: loss of the record times 1
#     labels [0 0 0 1]: loss of the record times 1000
#     labels [0 1 0 0]: loss of the record times 10
#     labels [1 1 1 1]: loss of the record times 1
#     labels [0 0 0 0]: loss of the record times 1
#     As found: the weight is of the place of the largest label.
#
# Exit status: 0 while Keras behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    keras==3.15.1 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import sys

import jax
import keras
import numpy as np

LABELS = np.array(
    [[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0], [1] * 4, [0] * 4]
)
WEIGHTS = {0: 1.0, 1: 10.0, 2: 100.0, 3: 1000.0}


def loss_of(labels, class_weight):
    """The loss of one record under a model that finds both classes equally likely."""
    model = keras.Sequential(
        [keras.Input((4, 3)), keras.layers.Dense(2, kernel_initializer="zeros")]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.0), loss)
    x = np.ones([1, 4, 3], "float32")
    history = model.fit(x, labels[None], class_weight=class_weight, verbose=0)
    return history.history["loss"][0]


print(f"keras {keras.__version__}, {keras.backend.backend()} {jax.__version__}")
print(f"class weights {WEIGHTS}, classes 0 and 1 alone")
found = [loss_of(labels, WEIGHTS) / loss_of(labels, None) for labels in LABELS]
for labels, factor in zip(LABELS, found):
    print(f"labels {labels}: loss of the record times {factor:.0f}")

if not np.allclose(found, [WEIGHTS[np.argmax(labels)] for labels in LABELS], rtol=1e-3):
    sys.exit("The behaviour has changed.")
print("As found: the weight is of the place of the largest label.")
PYTHON

KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/show.py"
