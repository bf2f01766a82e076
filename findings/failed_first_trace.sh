#!/usr/bin/env bash
# A tf.function whose first trace raised does nothing from then on, and returns None.
#
# Version: tensorflow 2.21.0 (CPU; the same in 2.14.1); Python 3.11 or newer.
#
# Behaviour: if the first trace of a `tf.function` makes a variable and then raises, the
# error is shown once. Every later call, with the cause of the error removed, returns
# None, runs no op, and raises nothing; `experimental_get_tracing_count()` stays 0.
# Without a new variable in the failed trace, later calls trace anew and work.
#
# Why one would have guessed otherwise: an error in Python code leaves a Python function
# as it was, and a trace that failed is no trace. In a notebook, a training step that was
# refused once (a wrong shape, a check) and is called again after the mend seems to train:
# no error comes, and the loss that it returns is None.
#
# Output seen:
#     tensorflow 2.21.0
#     with a new variable: ValueError, None, None; 0 traces
#     without a new variable: ValueError, 2.0, 2.0; 1 traces
#     As found: a failed first trace that made a variable leaves a function that does
#     nothing.
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


class Scale:
    """Makes its weight at the first call, as layers do, and refuses the first call."""

    def __init__(self, weight=None):
        self.weight, self.refuses = weight, True

    def __call__(self, x):
        if self.weight is None:
            self.weight = tf.Variable(2.0)
        if self.refuses:
            raise ValueError("refused")
        return self.weight * tf.reduce_mean(x)


def results(scale):
    """The results of three calls, the last two after the mend."""
    step, found = tf.function(scale.__call__), []
    for _ in range(3):
        try:
            value = step(tf.ones([3]))
            found.append(value if value is None else float(value))
        except ValueError as error:
            found.append(type(error).__name__)
        scale.refuses = False
    return found, step.experimental_get_tracing_count()


new, traces = results(Scale())
print(f"with a new variable: {', '.join(map(str, new))}; {traces} traces")
old, again = results(Scale(tf.Variable(2.0)))
print(f"without a new variable: {', '.join(map(str, old))}; {again} traces")
if (new, traces) != (["ValueError", None, None], 0):
    sys.exit("The behaviour has changed: the function is traced again.")
if old != ["ValueError", 2.0, 2.0]:
    sys.exit("The behaviour has changed without a new variable.")
PYTHON

CUDA_VISIBLE_DEVICES= TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" "$folder/show.py" \
  2>/dev/null
echo "As found: a failed first trace that made a variable leaves a function that does"
echo "nothing."
