#!/usr/bin/env bash
# Keras 3 rounds class labels to its float type: with bfloat16, class 257 is class 256.
#
# Version: keras 3.15.1 (JAX backend, jax 0.10.2); Python 3.11 or newer.
#
# Behaviour: a loss of Keras 3 converts the labels to its own dtype, which is `floatx`
# unless told, before it does anything else; `SparseCategoricalCrossentropy` makes
# integers of them again. A number of a class that the float type cannot hold becomes
# another one: with `set_floatx("bfloat16")` from 257 on, with "float16" from 2049 on.
# The loss, its gradient and the training are those of another class, and nothing is
# said. (A loss that is a function of the user gets floats for integers, for the same
# reason: with float32, identities from 16,777,217 on are rounded.)#
# Why one would have guessed otherwise: labels are integers when they are handed over,
# "sparse" means that they are indices, and the float type of a computation is not
# expected to change an index.
#
# Output seen:
#     keras 3.15.1, jax 0.10.2
#     labels:           [   3  255  257  515 2049]
#     float32 learns:   [   3  255  257  515 2049]
#     float16 learns:   [   3  255  257  515 2048]
#     bfloat16 learns:  [   3  255  256  516 2048]
#     As found: the labels are rounded to the float type.
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

CLASSES = np.array([3, 255, 257, 515, 2049])


def learned(floatx):
    """The classes that a model predicts once it was trained on one class each."""
    keras.config.set_floatx(floatx)
    model = keras.Sequential(
        [keras.Input((1,), dtype="int32"), keras.layers.Embedding(5, 3000),
         keras.layers.Flatten()]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(50.0), loss)
    x = np.arange(5, dtype="int32")[:, None]
    model.fit(x, CLASSES.astype("int32"), epochs=5, verbose=0)
    return np.argmax(np.float32(model.predict(x, verbose=0)), axis=1)


print(f"keras {keras.__version__}, {keras.backend.backend()} {jax.__version__}")
print(f"labels:           {CLASSES}")
found = {}
for floatx in ("float32", "float16", "bfloat16"):
    found[floatx] = learned(floatx)
    print(f"{floatx + ' learns:':<18}{found[floatx]}")

rounded = [list(CLASSES == found[name]) for name in ("float32", "float16", "bfloat16")]
expected = [[True] * 5, [True] * 4 + [False], [True, True, False, False, False]]
if rounded != expected:
    sys.exit("The behaviour has changed.")
print("As found: the labels are rounded to the float type.")
PYTHON

KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/show.py"
