#!/usr/bin/env bash
# Keras 3's Adam squares the gradient of a token that occurs twice row by row.
#
# Version: keras 3.15.1 with tensorflow 2.21.0; Python 3.11 or newer.
#
# Behaviour: TensorFlow gives the gradient of an embedding table as `tf.IndexedSlices`:
# one row for each token of the batch, and several rows for a token that occurs several
# times. Adam of Keras 3 takes the square of each row, and adds up the squares: its
# second moment of a token that occurs twice is a^2 + b^2, where the gradient is a + b,
# with the square (a + b)^2. So the same model with the same data trains to another
# table if the gradient is handed over as a dense tensor. Tokens that occur once are
# treated alike.
#
# Why one would have guessed otherwise: `tf.IndexedSlices` is another way to write down
# a dense gradient, and the sum over repeated indices is its meaning; Keras 2's
# optimizer (keras 2.14, `_deduplicate_sparse_grad`) sums repeated rows
# before anything is squared.
#
# Output seen:
#     keras 3.15.1, tensorflow 2.21.0
#     tokens [0 1]:   tables differ by 0.00000
#     tokens [0 1 1]: tables differ by 0.02168
#     As found: repeated tokens train to another table.
#
# Exit status: 0 while Keras behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    keras==3.15.1 tensorflow==2.21.0

cat > "$folder/show.py" <<'PYTHON'
import sys

import keras
import numpy as np
import tensorflow as tf

TARGETS = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, -1.0]])


def trained_table(tokens, dense):
    """The table after three steps of Adam towards the targets."""
    layer = keras.layers.Embedding(4, 2, embeddings_initializer="ones")
    layer.build((None,))
    optimizer = keras.optimizers.Adam(0.01)
    for _ in range(3):
        with tf.GradientTape() as tape:
            vectors = layer(tf.constant(tokens))
            loss = tf.reduce_sum((vectors - TARGETS[: len(tokens)]) ** 2)
        (gradient,) = tape.gradient(loss, [layer.embeddings.value])
        assert isinstance(gradient, tf.IndexedSlices)
        if dense:
            gradient = tf.convert_to_tensor(gradient)
        optimizer.apply([gradient], [layer.embeddings])
    return layer.embeddings.numpy()


print(f"keras {keras.__version__}, tensorflow {tf.__version__}")
found = {}
for tokens in ([0, 1], [0, 1, 1]):
    tables = [trained_table(tokens, dense) for dense in (False, True)]
    found[len(tokens)] = np.abs(tables[0] - tables[1]).max()
    name = f"tokens {np.array(tokens)}:"
    print(f"{name:<15} tables differ by {found[len(tokens)]:.5f}")

if not (found[2] < 1e-6 and found[3] > 1e-3):
    sys.exit("The behaviour has changed.")
print("As found: repeated tokens train to another table.")
PYTHON

KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 \
    "$folder/venv/bin/python" "$folder/show.py" 2>"$folder/messages" || {
  status=$?
  tail -5 "$folder/messages" >&2
  exit "$status"
}
