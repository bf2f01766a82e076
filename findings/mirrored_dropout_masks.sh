#!/usr/bin/env bash
# Under MirroredStrategy, Keras 3's Dropout has one mask for all replicas.
#
# Version: keras 3.15.1, tensorflow 2.21.0 (two logical CPUs); Python 3.11 or newer.
#
# Behaviour: example i of each replica has the same Dropout mask in every step: the
# seed's state is equal on all replicas, and each replica draws from it alone. The
# masks differ between steps and between examples of a replica. `tf.nn.dropout` in the
# same place has a mask for each replica.
#
# Why one would have guessed otherwise: Dropout is independent for each example of a
# batch; the split of the batch over devices should not change that.
#
# Output seen:
#     keras 3.15.1, tensorflow 2.21.0
#     step 0: equal on both replicas: Keras True, tf.nn False
#     step 1: equal on both replicas: Keras True, tf.nn False
#     step 2: equal on both replicas: Keras True, tf.nn False
#     different masks in 3 steps: 3
#     As found: replicas share Dropout's masks.
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

with strategy.scope():
    layer = keras.layers.Dropout(0.5)


@tf.function
def masks():
    """Each replica's masks by Keras and by TensorFlow, for 4 examples of 16 entries."""
    return strategy.run(lambda: (layer(ONES, training=True), tf.nn.dropout(ONES, 0.5)))


ONES = tf.ones([4, 16])
print(f"keras {keras.__version__}, tensorflow {tf.__version__}")
equal, apart, steps = [], [], []
for step in range(3):
    ours, theirs = (
        [mask.numpy() for mask in strategy.experimental_local_results(both)] for both in masks()
    )
    equal.append(np.array_equal(*ours))
    apart.append(not np.array_equal(*theirs))
    steps.append(ours[0].tobytes())
    print(f"step {step}: equal on both replicas: Keras {equal[-1]}, tf.nn {not apart[-1]}")
print(f"different masks in 3 steps: {len(set(steps))}")

if not (all(equal) and all(apart) and len(set(steps)) == 3):
    sys.exit("The behaviour has changed.")
print("As found: replicas share Dropout's masks.")
PYTHON

TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 "$folder/venv/bin/python" "$folder/show.py"
