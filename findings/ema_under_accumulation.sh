#!/usr/bin/env bash
# With gradient accumulation, Keras averages the weights over batches, not over updates.
#
# Version: keras 3.15.1 (JAX backend, jax 0.10.2); Python 3.11 or newer.
#
# Behaviour: an optimizer with `gradient_accumulation_steps=k` changes the weights after
# every k-th batch, and `iterations` counts these updates. But `use_ema=True` moves the
# averages at *every* batch, also where the weights did not move. So `ema_momentum=m`
# acts as m^k: with k = 4, an average with momentum 0.99 forgets as one with 0.96.
#
# Why one would have guessed otherwise: accumulation stands for a larger batch, and the
# weights and `iterations` are those of the larger batch. Clipping, weight decay and
# schedules go by updates.
#
# Output seen:
#     keras 3.15.1, jax 0.10.2
#     4 updates of 16 records:      weights [0.56  0.592 0.812 0.792 0.022]
#     4 updates of 4 batches of 4:  weights [0.56  0.592 0.812 0.792 0.022]
#     updates of 16 records:        averages [0.212 0.224 0.385 0.311 0.051]
#     updates of 4 batches of 4:    averages [0.27  0.306 0.485 0.421 0.052]
#     As found: the weights agree, the averages do not.
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

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)


def train(accumulation):
    """Weights and averages after four updates, each of 16 records."""
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    optimizer = keras.optimizers.SGD(
        0.1,
        use_ema=True,
        ema_momentum=0.9,
        gradient_accumulation_steps=accumulation,
    )
    model.compile(optimizer, "mse")
    size = 16 // (accumulation or 1)
    for i in range(0, 64, size):
        model.train_on_batch(x[i : i + size], y[i : i + size])
    averages = optimizer._model_variables_moving_average
    flat = [np.concatenate([np.ravel(v) for v in vs]) for vs in (model.weights, averages)]
    return *flat, int(optimizer.iterations)


print(f"keras {keras.__version__}, {keras.backend.backend()} {jax.__version__}")
plain, plain_average, plain_count = train(None)
parts, parts_average, parts_count = train(4)
print(f"{plain_count} updates of 16 records:      weights", plain.round(3))
print(f"{parts_count} updates of 4 batches of 4:  weights", parts.round(3))
print("updates of 16 records:        averages", plain_average.round(3))
print("updates of 4 batches of 4:    averages", parts_average.round(3))

expected = (
    plain_count == parts_count == 4
    and np.allclose(plain, parts, atol=1e-5)
    and np.abs(plain_average - parts_average).max() > 0.05
)
if not expected:
    sys.exit("The behaviour has changed.")
print("As found: the weights agree, the averages do not.")
PYTHON

KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/show.py"
