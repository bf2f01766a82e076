#!/usr/bin/env bash
# In a tf.function the gradient of a confident binary cross-entropy is 0; in eager code it is right.
#
# Version: tensorflow 2.21.0 (CPU; the same in 2.14.1); Python 3.11 or newer.
#
# Behaviour: the gradient of `tf.nn.sigmoid_cross_entropy_with_logits` at a logit z with
# label 1 is sigmoid(z) - 1. Eager code gives -4.14e-8 at z = 17 and -1.88e-12 at z = 27,
# correct to six digits. The same code in a `tf.function` gives -5.96e-8 at z = 17, and
# exactly 0 from z = 17.5 on: the graph's arithmetic optimiser reorders a sum of three
# gradients, two of which cancel. With that optimiser off, the graph is right as well.
#
# Why one would have guessed otherwise: the function takes logits in order to be stable,
# and a graph is expected to give the numbers of eager code but for a last digit. Of two
# steps on the same data, the eager step moves a confident example and the graph's does
# not; a test that compares the two with a relative tolerance fails.
#
# Output seen:
#     tensorflow 2.21.0
#     logit                        17           20           27
#     float64             -4.1399e-08  -2.0612e-09  -1.8795e-12
#     eager               -4.1399e-08  -2.0612e-09  -1.8795e-12
#     tf.function         -5.9605e-08   0.0000e+00   0.0000e+00
#     without optimiser   -4.1399e-08  -2.0612e-09  -1.8795e-12
#     As found: the gradient is 0 in a graph alone.
#
# Exit status: 0 while TensorFlow behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tensorflow==2.21.0

cat > "$folder/show.py" <<'PYTHON'
import sys

import numpy as np
import tensorflow as tf

LOGITS = np.array([[17.0], [20.0], [27.0]])


def gradient(logits):
    """The gradient of the loss at the logits, for the label 1."""
    with tf.GradientTape() as tape:
        tape.watch(logits)
        loss = tf.nn.sigmoid_cross_entropy_with_logits(
            labels=tf.ones_like(logits), logits=logits
        )
    return tape.gradient(loss, logits)


def row(name, values):
    print(f"{name:<18}" + "".join(f"{v:13.4e}" for v in np.ravel(values)))


logits = tf.constant(LOGITS, tf.float32)
exact = -1 / (1 + np.exp(LOGITS))
eager, graph = gradient(logits).numpy(), tf.function(gradient)(logits).numpy()
tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
plain = tf.function(gradient)(logits).numpy()
print("tensorflow", tf.__version__)
print(f"{'logit':<18}" + "".join(f"{z:13.0f}" for z in np.ravel(LOGITS)))
for name, values in (
    ("float64", exact),
    ("eager", eager),
    ("tf.function", graph),
    ("without optimiser", plain),
):
    row(name, values)

right = np.allclose(eager, exact, rtol=1e-4, atol=0)
right &= np.allclose(plain, exact, rtol=1e-4, atol=0)
if not (right and (graph[1:] == 0).all()):
    sys.exit("The behaviour has changed.")
print("As found: the gradient is 0 in a graph alone.")
PYTHON

CUDA_VISIBLE_DEVICES= TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" "$folder/show.py" 2>/dev/null
