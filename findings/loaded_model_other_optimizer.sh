#!/usr/bin/env bash
# A loaded Keras 3 model trains its variables by other optimizers than it was saved with.
#
# Version: keras 3.15.1 (JAX backend, jax 0.10.2); Python 3.11 or newer.
#
# Behaviour: `MultiOptimizer` with an `OptimizerMap` gives a variable to the optimizer
# whose pattern matches the variable's path, which begins with the name of a Sequential
# model that was built from an Input. `load_model` builds the model without that
# name on its paths. A pattern with the name in it matches before saving and not after
# loading: the variable goes to the default optimizer, and its moments are left out with
# a warning about a number of variables. Here the default optimizer is meant to freeze,
# and the loaded model does not learn any more.
#
# Why one would have guessed otherwise: a saved file is to go on where training was
# stopped; patterns of paths are how the documentation tells parts of a model apart,
# and the path is an attribute of the variable, with the model's name in it.
#
# Output seen:
#     keras 3.15.1, jax 0.10.2
#     saved:  ['tower/dense/kernel', 'tower/dense/bias'], moves by 0.199
#     loaded: ['dense/kernel', 'dense/bias'], moves by 0.000
#     warned:
#       Skipping variable loading for optimizer 'adam'
#       Skipping variable loading for optimizer 'multi_optimizer'
#     As found: the loaded model's variables have another optimizer.
#
# Exit status: 0 while Keras behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    keras==3.15.1 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import pathlib
import sys
import tempfile
import warnings

import jax
import keras
import numpy as np

x, y = np.ones((8, 2), "float32"), np.zeros((8, 1), "float32")


def trained(model):
    """The paths of the variables, and how far two epochs move the kernel."""
    before = model.get_weights()[0]
    model.fit(x, y, epochs=2, verbose=0)
    moved = float(np.abs(model.get_weights()[0] - before).max())
    return [v.path for v in model.trainable_variables], moved


dense = keras.layers.Dense(1, name="dense", kernel_initializer="ones")
model = keras.Sequential([keras.Input((2,)), dense], name="tower")
optimizers = keras.optimizers.OptimizerMap(
    keras.optimizers.SGD(0.0), {"tower/.*": keras.optimizers.Adam(0.1)}
)
model.compile(keras.optimizers.MultiOptimizer(optimizers), loss="mse")

print(f"keras {keras.__version__}, {keras.backend.backend()} {jax.__version__}")
before, moved_before = trained(model)
print(f"saved:  {before}, moves by {moved_before:.3f}")

path = pathlib.Path(tempfile.mkdtemp()) / "model.keras"
model.save(path)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    loaded = keras.models.load_model(path)
after, moved_after = trained(loaded)
print(f"loaded: {after}, moves by {moved_after:.3f}")
said = {str(w.message).split(",")[0] for w in caught if "Skipping" in str(w.message)}
print("warned:", *sorted(said), sep="\n  ")

expected = (
    before == ["tower/dense/kernel", "tower/dense/bias"]
    and after == ["dense/kernel", "dense/bias"]
    and moved_before > 0.1
    and moved_after == 0
)
if not expected:
    sys.exit("The behaviour has changed.")
print("As found: the loaded model's variables have another optimizer.")
PYTHON

KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/show.py"
