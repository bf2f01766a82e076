#!/usr/bin/env bash
# Under MirroredStrategy, Keras 3's BatchNormalization keeps the first replica's statistics.
#
# Version: keras 3.15.1, tensorflow 2.21.0 (two logical CPUs); Python 3.11 or newer.
#
# Behaviour: after `fit` on two replicas the moving mean of the model, as
# `get_weights` and a saved file give it, is that of the first replica's half of each
# batch; the second half counts for nothing. With sorted data (0 on the first replica,
# 10 on the second) the mean is 0 and the variance 0. `synchronized=True` gives 5 and
# 25.
#
# Why one would have guessed otherwise: Keras 2 averages the moving statistics over
# replicas when they are read; Keras 3's gradients of both replicas are added up, and
# every batch counts for the weights.
#
# Output seen:
#     keras 3.15.1, tensorflow 2.21.0
#     one device: moving mean 5.0, moving variance 25.0
#     two replicas: moving mean 0.0, moving variance 0.0
#     two replicas, synchronized=True: moving mean 5.0, moving variance 25.0
#     As found: the statistics are those of the first replica.
#
# Exit status: 0 while Keras behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    tensorflow==2.21.0 keras==3.15.1 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import sys

import keras
import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
X = np.array([[0.0], [0.0], [10.0], [10.0]], "float32")


def statistics(**settings):
    """The moving mean and variance after one step, which replaces the statistics."""
    layer = keras.layers.BatchNormalization(momentum=0.0, center=False, scale=False, **settings)
    model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), loss="mse")
    model.fit(X, X, batch_size=4, shuffle=False, verbose=0)
    return [round(float(np.ravel(values)[0]), 3) for values in layer.get_weights()]


print(f"keras {keras.__version__}, tensorflow {tf.__version__}")
seen = {"one device": statistics()}
with strategy.scope():
    seen["two replicas"] = statistics()
    seen["two replicas, synchronized=True"] = statistics(synchronized=True)
for name, (mean, variance) in seen.items():
    print(f"{name}: moving mean {mean}, moving variance {variance}")

if list(seen.values()) != [[5.0, 25.0], [0.0, 0.0], [5.0, 25.0]]:
    sys.exit("The behaviour has changed.")
print("As found: the statistics are those of the first replica.")
PYTHON

TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 "$folder/venv/bin/python" "$folder/show.py"
