#!/usr/bin/env bash
# In Keras 3, a mask and weights of 0 for the same places are two different losses.
#
# Version: keras 3.15.1 (JAX backend, jax 0.10.2); Python 3.11 or newer.
#
# Behaviour: entries that a loss shall leave out can be masked (`Masking`,
# `Embedding(mask_zero=True)`), or have `sample_weight` 0. Masked, the sum of the other
# entries' losses is divided by how many these are; with weights, by how many all are,
# those of weight 0 among them. So the same data give another loss, and gradients that
# are as many times larger as there is padding. Both at once divide by the number of
# entries that are not masked.
#
# Why one would have guessed otherwise: Keras turns a mask into sample weights
# (`apply_mask`: "Applies any mask on predictions to sample weights"). A loss with
# `reduction="mean_with_sample_weight"` treats them alike.
#
# Output seen:
#     keras 3.15.1, jax 0.10.2
#     3 of 8 entries count, each with a loss of 1
#     sum_over_batch_size: mask 1.000, weights 0.375, both 1.000
#     mean_with_sample_weight: mask 1.000, weights 1.000, both 1.000
#     As found: a mask divides by what counts, weights by everything.
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

x = np.array([[[1.0], [2.0], [0.0], [0.0]], [[3.0], [0.0], [0.0], [0.0]]], "float32")
y = x + 1
present = (x[..., 0] != 0).astype("float32")


def evaluated(mask, weights, reduction):
    """The loss of a model that predicts what it is given, and is wrong by 1."""
    layers = [keras.layers.Masking()] if mask else []
    model = keras.Sequential([keras.Input((4, 1)), *layers, keras.layers.Identity()])
    model.compile(loss=keras.losses.MeanSquaredError(reduction=reduction))
    weights = present if weights else None
    return float(model.evaluate(x, y, sample_weight=weights, verbose=0))


print(f"keras {keras.__version__}, {keras.backend.backend()} {jax.__version__}")
print(f"{present.sum():.0f} of {present.size} entries count, each with a loss of 1")
found = {}
for reduction in ("sum_over_batch_size", "mean_with_sample_weight"):
    found[reduction] = [
        evaluated(*how, reduction) for how in [(True, False), (False, True), (True, True)]
    ]
    print(f"{reduction}: mask %.3f, weights %.3f, both %.3f" % tuple(found[reduction]))

expected = np.array([[1, 0.375, 1], [1, 1, 1]])
if not np.allclose(list(found.values()), expected):
    sys.exit("The behaviour has changed.")
print("As found: a mask divides by what counts, weights by everything.")
PYTHON

KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/show.py"
