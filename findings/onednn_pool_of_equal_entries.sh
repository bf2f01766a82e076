#!/usr/bin/env bash
# With oneDNN, the gradient of max_pool3d at equal entries depends on the graph around it.
#
# Version: tensorflow 2.21.0 (CPU; the same in 2.14.1); Python 3.11 or newer; x86-64.
#
# Behaviour: where several entries of a pool are equally large (voxels of a constant
# background, integers), a tf.function that holds the pool and its gradient gives the
# gradient to one of them, and eager code, or a tape around a tf.function, to each of
# them: eight times as much for a constant pool of 2 x 2 x 2. With
# TF_ENABLE_ONEDNN_OPTS=0, every way gives it to each. max_pool2d does not differ.
#
# Why one would have guessed otherwise: the same op, the same numbers, and no rounding.
# TensorFlow switches oneDNN on by itself on processors that have certain instructions,
# and takes oneDNN's gradient only where its forward pass is in the same graph. So a
# network of volumes has other gradients in `fit` than in a loop, and than elsewhere.
#
# Output seen:
#     tensorflow 2.21.0
#     oneDNN off  2D: 1, 1, 1  3D: 8, 8, 8
#     oneDNN on   2D: 1, 1, 1  3D: 8, 8, 1
#     (the sum of the gradient of one constant pool: eager, tape around a function,
#     tape inside a function)
#     As found: with oneDNN the gradient of a 3D pool depends on the graph.
#
# Exit status: 0 while TensorFlow behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tensorflow==2.21.0

cat > "$folder/show.py" <<'PYTHON'
import sys

import tensorflow as tf


def gradient(pool, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = pool(x)
    return tf.reduce_sum(tape.gradient(y, x))


def ways(pool, x):
    inside = tf.function(lambda x: gradient(pool, x))
    found = gradient(pool, x), gradient(tf.function(pool), x), inside(x)
    return ", ".join(f"{float(number):.0f}" for number in found)


two = ways(lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"), tf.ones([1, 2, 2, 1]))
three = ways(lambda x: tf.nn.max_pool3d(x, 2, 2, "VALID"), tf.ones([1, 2, 2, 2, 1]))
print(f"oneDNN {sys.argv[1]:<4} 2D: {two}  3D: {three}")
if (two, three) != (sys.argv[2], sys.argv[3]):
    sys.exit("The behaviour has changed.")
PYTHON

show() {
  CUDA_VISIBLE_DEVICES= TF_CPP_MIN_LOG_LEVEL=3 TF_ENABLE_ONEDNN_OPTS=$1 \
    "$folder/venv/bin/python" "$folder/show.py" "$2" "$3" "$4" 2>/dev/null
}

echo "tensorflow 2.21.0"
show 0 off "1, 1, 1" "8, 8, 8"
show 1 on "1, 1, 1" "8, 8, 1"
echo "As found: with oneDNN the gradient of a 3D pool depends on the graph."
