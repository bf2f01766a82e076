#!/usr/bin/env bash
# Keras 3's load_weights brings the learning rate of the run that saved the file.
#
# Version: keras 3.15.1 (JAX backend, jax 0.10.2); Python 3.11 or newer.
#
# Behaviour: a `.weights.h5` file of a compiled model holds the optimizer's variables,
# the learning rate among them. `load_weights` into a model that was compiled with
# another rate replaces the rate, and the count of steps, without a word, though
# nothing but weights was asked for; so does a file of a model that was compiled and
# never trained. A file saved before `compile`, and `compile` after `load_weights`,
# leave the rate.
#
# Why one would have guessed otherwise: the rate is an argument of the new `compile`,
# not a weight; a transfer loads weights of a pretrained model in order to train them
# at a smaller rate.
#
# Output seen:
#     keras 3.15.1, jax 0.10.2
#     compiled at 0.01, file of a model at 0.5, trained: rate, steps (0.5, 3)
#     compiled at 0.01, file of a model at 0.5, untrained: rate, steps (0.5, 0)
#     compiled at 0.01, file of a model at 0.5, not compiled: rate, steps (0.01, 0)
#     loaded, then compiled at 0.01: rate, steps (0.01, 0)
#     As found: a file of weights replaces the learning rate.
#
# Exit status: 0 while Keras behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    keras==3.15.1 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import os
import sys
import tempfile

import jax
import keras
import numpy as np

ONES = np.ones([8, 1], "float32")


def new_model(rate):
    """A model, compiled at a rate unless the rate is None."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    if rate is not None:
        model.compile(keras.optimizers.SGD(rate), loss="mse")
    return model


def state(model):
    """The optimizer's rate, rounded, and its count of steps."""
    optimizer = model.optimizer
    return round(float(optimizer.learning_rate), 4), int(optimizer.iterations)


print(f"keras {keras.__version__}, jax {jax.__version__}")
folder = tempfile.mkdtemp()
trained, untrained, plain = (
    os.path.join(folder, f"{name}.weights.h5") for name in ("trained", "untrained", "plain")
)
model = new_model(0.5)
model.save_weights(untrained)
model.fit(ONES, ONES, epochs=3, verbose=0)
model.save_weights(trained)
new_model(None).save_weights(plain)

states = {}
for name, path in {"trained": trained, "untrained": untrained, "not compiled": plain}.items():
    model = new_model(0.01)
    model.load_weights(path)
    states[name] = state(model)
    print(f"compiled at 0.01, file of a model at 0.5, {name}: rate, steps {states[name]}")
model = new_model(None)
model.load_weights(trained)
model.compile(keras.optimizers.SGD(0.01), loss="mse")
states["compiled later"] = state(model)
print(f"loaded, then compiled at 0.01: rate, steps {states['compiled later']}")

if states != {
    "trained": (0.5, 3),
    "untrained": (0.5, 0),
    "not compiled": (0.01, 0),
    "compiled later": (0.01, 0),
}:
    sys.exit("The behaviour has changed.")
print("As found: a file of weights replaces the learning rate.")
PYTHON

KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/show.py"
