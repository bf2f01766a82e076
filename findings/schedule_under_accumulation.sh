#!/usr/bin/env bash
# Under gradient accumulation a schedule counts batches, and `iterations` counts updates.
#
# Version: keras 3.15.1 (JAX backend, jax 0.10.2); Python 3.11 or newer.
#
# Behaviour: with `gradient_accumulation_steps=4` a learning rate schedule is called
# with the number of batches: a schedule that ends after 4 steps ends after one
# update. `optimizer.iterations` says 1 at that time. The rate of an update is the
# schedule's at the update's last batch, so that the first update has the rate of step
# 3, not of step 0.
#
# Why one would have guessed otherwise: `iterations` is what the schedule's
# documentation names as its step, and Adam's bias corrections use it.
#
# Output seen:
#     keras 3.15.1, jax 0.10.2
#     after batch 3: iterations 1, rate of the update 4.0
#     after batch 7: iterations 2, rate of the update 8.0
#     after batch 11: iterations 3, rate of the update 12.0
#     after batch 15: iterations 4, rate of the update 16.0
#     As found: the schedule counts batches, iterations counts updates.
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

BATCHES, ACCUMULATED = 16, 4


class Steps(keras.optimizers.schedules.LearningRateSchedule):
    """The rate at step n is n + 1, so that a rate tells the step."""

    def __call__(self, step):
        return keras.ops.cast(step, "float32") + 1.0

    def get_config(self):
        return {}


class Watch(keras.callbacks.Callback):
    """After each batch: `iterations`, and by how much the weight moved."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def weight(self):
        return float(np.asarray(self.model.layers[-1].kernel)[0, 0])

    def on_train_batch_begin(self, batch, logs=None):
        self.model.jax_state_sync()
        self.before = self.weight()

    def on_train_batch_end(self, batch, logs=None):
        self.model.jax_state_sync()
        moved = round(self.before - self.weight(), 3)
        self.rows.append((int(self.model.optimizer.iterations), moved))


print(f"keras {keras.__version__}, jax {jax.__version__}")
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
model.compile(
    keras.optimizers.SGD(Steps(), gradient_accumulation_steps=ACCUMULATED),
    loss=lambda y, prediction: prediction,  # the gradient of the weight is 1
)
watch, ones = Watch(), np.ones([BATCHES, 1], "float32")
model.fit(ones, ones, batch_size=1, verbose=0, callbacks=[watch])
updates = [(batch, *row) for batch, row in enumerate(watch.rows) if row[1]]
for batch, iterations, rate in updates:
    print(f"after batch {batch}: iterations {iterations}, rate of the update {rate}")

rates = [rate for _, _, rate in updates]
if rates != [4.0, 8.0, 12.0, 16.0] or [row[1] for row in updates] != [1, 2, 3, 4]:
    sys.exit("The behaviour has changed.")
print("As found: the schedule counts batches, iterations counts updates.")
PYTHON

KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/show.py"
