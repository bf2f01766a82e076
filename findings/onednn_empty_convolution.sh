#!/usr/bin/env bash
# With oneDNN, the convolution of a batch of no images has the shape of its input.
#
# Version: tensorflow 2.21.0 (CPU; the same in 2.14.1); Python 3.11 or newer; x86-64.
#
# Behaviour: `tf.nn.conv2d` of an empty batch returns the shape of its *input*, whatever
# the strides, the padding, the size of the filters and their number: images [0, 9, 8, 2]
# and filters [3, 3, 2, 4] with strides of 2 give [0, 9, 8, 2]. With
# TF_ENABLE_ONEDNN_OPTS=0, and with any images in the batch, the shape is that of
# the documentation: [0, 5, 4, 4].
#
# Why one would have guessed otherwise: the shape inference of the same graph says
# [None, 5, 4, 4], and TensorFlow switches oneDNN on by itself on processors that have
# certain instructions. So a convolutional model accepts an empty batch on one machine
# and fails at the next layer on another. Poisson sampling draws empty batches.
#
# Output seen:
#     tensorflow 2.21.0
#     oneDNN off  static (None, 5, 4, 4)  0 images: (0, 5, 4, 4)  2 images: (2, 5, 4, 4)
#     oneDNN on   static (None, 5, 4, 4)  0 images: (0, 9, 8, 2)  2 images: (2, 5, 4, 4)
#     As found: with oneDNN an empty batch has the wrong shape.
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


@tf.function(input_signature=[tf.TensorSpec([None, 9, 8, 2])])
def convolved(images):
    return tf.nn.conv2d(images, tf.ones([3, 3, 2, 4]), strides=2, padding="SAME")


name, expected = sys.argv[1], eval(sys.argv[2])
static = tuple(convolved.get_concrete_function().output_shapes)
none, two = (tuple(convolved(tf.zeros([n, 9, 8, 2])).shape) for n in (0, 2))
print(f"oneDNN {name:<4} static {static}  0 images: {none}  2 images: {two}")
if (none, two) != (expected, (2, 5, 4, 4)):
    sys.exit("The behaviour has changed.")
PYTHON

show() {
  CUDA_VISIBLE_DEVICES= TF_CPP_MIN_LOG_LEVEL=3 TF_ENABLE_ONEDNN_OPTS=$1 \
    "$folder/venv/bin/python" "$folder/show.py" "$2" "$3" 2>/dev/null
}

echo "tensorflow 2.21.0"
show 0 off "(0, 5, 4, 4)"
show 1 on "(0, 9, 8, 2)"
echo "As found: with oneDNN an empty batch has the wrong shape."
