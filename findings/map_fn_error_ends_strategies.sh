#!/usr/bin/env bash
# One error inside tf.map_fn, and no distribution strategy works in the process any more.
#
# Version: tensorflow 2.21.0 (CPU; the same in 2.14.1); Python 3.11 or newer.
#
# Behaviour: `tf.map_fn` (and `tf.scan`, `tf.foldl`, `tf.foldr`) in a `tf.function` sets
# a caching device in the variable scope while the loop is traced, and takes it away in
# its last line. Graphs of functions share one scope per process, so if the mapped
# function raises (a wrong shape, a name misspelt), the caching device stays for good.
# From then on `with strategy.scope()` raises NotImplementedError. The failed `with`
# leaves its strategy on the stack besides: `tf.distribute.has_strategy()` is True
# outside of any scope.
#
# Why one would have guessed otherwise: the error was raised while another function was
# traced, was caught, and its function was thrown away; a strategy has nothing to do
# with it. In a notebook the message about caching devices, which no public call of
# TensorFlow 2 sets, comes cells later.
#
# Output seen:
#     tensorflow 2.21.0
#     before: a scope is entered
#     the mapped function raised KeyError
#     after: NotImplementedError, has_strategy() is True outside of any scope
#     As found: an error inside tf.map_fn ends the use of strategies.
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

print("tensorflow", tf.__version__)
with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
    tf.Variable(1.0)
print("before: a scope is entered")


@tf.function(autograph=False)
def mapped(rows):
    return tf.map_fn(lambda row: {"sum": row}["total"], rows)


try:
    mapped(tf.ones([3, 2]))
    sys.exit("The function was to raise.")
except KeyError:
    print("the mapped function raised KeyError")

try:
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        pass
    sys.exit("The behaviour has changed: the scope is entered.")
except NotImplementedError:
    left = tf.distribute.has_strategy()
print(f"after: NotImplementedError, has_strategy() is {left} outside of any scope")
if not left:
    sys.exit("The behaviour has changed: no strategy is left.")
PYTHON

CUDA_VISIBLE_DEVICES= TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" "$folder/show.py" \
  2>/dev/null
echo "As found: an error inside tf.map_fn ends the use of strategies."
