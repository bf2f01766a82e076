#!/usr/bin/env bash
# A converted model's softplus is infinite from 89 on: LiteRT gets log(1 + exp(x)).
#
# Version: TensorFlow 2.21.0 (`tf.lite`), NumPy 2.4.6; Python 3.11 or newer.
#
# Behaviour: LiteRT has no op for softplus and none for log1p. The converter writes
# softplus as LOG(ADD(EXP(x), 1)) in float32, without a warning. By the default kernels
# (XNNPACK) the converted layer gives infinity from x = 89 on, by the built-in kernels
# 88.7 for each larger x; below x = -16.6 it gives 0. Keras gives x and exp(x).
#
# Why one would have guessed otherwise: the converter is expected to keep a layer's values
# up to rounding, or to say that an op is missing. TensorFlow's own softplus treats both
# ends apart, and 89 is no large logit of a regression (a count, a rate, a variance).
#
# Output seen:
#     TensorFlow 2.21.0; ops: ADD, EXP, LOG
#     x:        -30, -10, 0, 50, 100
#     Keras:    9.35762e-14, 4.53989e-05, 0.693147, 50, 100
#     XNNPACK:  0, 4.54177e-05, 0.693147, 50, inf
#     built-in: 0, 4.54177e-05, 0.693147, 50, 88.7228
#     As found: converted, the softplus of 100 is not 100.
#
# Exit status: 0 while the converter does so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    tensorflow==2.21.0 keras==3.15.1 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import contextlib
import io
import sys

import numpy as np
import tensorflow as tf

x = np.array([[-30.0], [-10.0], [0.0], [50.0], [100.0]], np.float32)
model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Activation("softplus")])
with contextlib.redirect_stdout(io.StringIO()):  # what the export prints
    content = tf.lite.TFLiteConverter.from_keras_model(model).convert()


def converted(kernels):
    interpreter = tf.lite.Interpreter(
        model_content=content, experimental_op_resolver_type=kernels
    )
    place = interpreter.get_input_details()[0]["index"]
    interpreter.resize_tensor_input(place, x.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(place, x)
    interpreter.invoke()
    ops = {op["op_name"] for op in interpreter._get_ops_details()} - {"DELEGATE"}
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"]), ops


def line(values):
    return ", ".join(f"{value:g}" for value in np.ravel(values))


kinds = tf.lite.experimental.OpResolverType
default, ops = converted(kinds.AUTO)
built_in, _ = converted(kinds.BUILTIN_REF)
expected = model.predict(x, verbose=0)
print(f"TensorFlow {tf.__version__}; ops: {', '.join(sorted(ops))}")
print(f"x:        {line(x)}\nKeras:    {line(expected)}")
print(f"XNNPACK:  {line(default)}\nbuilt-in: {line(built_in)}")
np.testing.assert_allclose(expected[2:, 0], [np.log(2), 50, 100], rtol=1e-6)
if not (np.isinf(default[-1, 0]) and built_in[-1, 0] < 89 and default[0, 0] == 0):
    sys.exit("The behaviour has changed.")
print("As found: converted, the softplus of 100 is not 100.")
PYTHON

CUDA_VISIBLE_DEVICES="" TF_CPP_MIN_LOG_LEVEL=3 \
    "$folder/venv/bin/python" "$folder/show.py" 2> "$folder/log" \
    || { cat "$folder/log"; exit 1; }
