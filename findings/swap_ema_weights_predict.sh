#!/usr/bin/env bash
# Keras's SwapEMAWeights does not put the weights back after predict.
#
# Version: keras 3.15.1 (JAX backend, jax 0.10.2); Python 3.11 or newer.
#
# Behaviour: `keras.callbacks.SwapEMAWeights` exchanges the weights of a model with
# the optimizer's moving averages of the weights. `evaluate` with the callback puts
# the weights back when it ends. `predict` with the callback does not: the averages
# stay in the model, and the weights lie where the optimizer keeps the averages. So
#   * a second, identical `predict` predicts by the weights, not by the averages;
#   * a callback that predicts at the end of each epoch changes the training: the
#     next epoch goes on from the averages.
#
# Why one would have guessed otherwise: prediction is expected to leave the weights
# alone; the documentation says that the callback "restores the previous weights after
# evaluation"; and `evaluate` and `predict` are treated alike when they begin.
# `on_test_end` swaps back if the averages are in the model; `on_predict_end` swaps
# back if the averages are *not* in the model, which is never so at that moment.
# (Once `fit` has ended, the fault does not show: `fit` ends by writing the averages
# into the model, so that weights and averages are equal.)
#
# Output seen:
#     keras 3.15.1, jax 0.10.2
#     trained weights:  [0.879 0.878 0.997 0.975 0.009]
#     after evaluate:   [0.879 0.878 0.997 0.975 0.009]
#     after predict:    [0.521 0.525 0.657 0.652 0.005]
#     after predict 2:  [0.879 0.878 0.997 0.975 0.009]
#     the two predictions differ by up to 2.395
#     fit alone:                   [0.688 0.7   0.825 0.779 0.027]
#     fit, evaluate at epoch ends: [0.688 0.7   0.825 0.779 0.027]
#     fit, predict at epoch ends:  [0.846 0.866 1.02  0.967 0.031]
#     As found: evaluate puts the weights back, predict does not.
#
# Exit status: 0 while Keras behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    keras==3.15.1 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import sys

import jax
import keras
import numpy as np

SwapEMAWeights = keras.callbacks.SwapEMAWeights

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)


def new_model():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
    model.compile(optimizer, loss="mse")
    return model


def weights(model):
    return np.concatenate([w.ravel() for w in model.get_weights()])


def predict(model):
    return model.predict(x, verbose=0, callbacks=[SwapEMAWeights()])


def evaluate(model):
    return model.evaluate(x, y, verbose=0, callbacks=[SwapEMAWeights()])


def weights_of_fit(at_epoch_end):
    model = new_model()
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: at_epoch_end(model)
    )
    model.fit(
        x, y, epochs=4, batch_size=16, shuffle=False, verbose=0, callbacks=[callback]
    )
    return weights(model)


print(f"keras {keras.__version__}, {keras.backend.backend()} {jax.__version__}")

model = new_model()
for _ in range(10):
    model.train_on_batch(x, y)
trained = weights(model)
print("trained weights: ", trained.round(3))

evaluate(model)
kept_by_evaluate = np.array_equal(weights(model), trained)
print("after evaluate:  ", weights(model).round(3))

first = predict(model)
kept_by_predict = np.array_equal(weights(model), trained)
print("after predict:   ", weights(model).round(3))

second = predict(model)
same_predictions = np.allclose(first, second, atol=0.01)
print("after predict 2: ", weights(model).round(3))
print(f"the two predictions differ by up to {np.abs(first - second).max():.3f}")

plain = weights_of_fit(lambda model: None)
evaluating = weights_of_fit(evaluate)
predicting = weights_of_fit(predict)
print("fit alone:                  ", plain.round(3))
print("fit, evaluate at epoch ends:", evaluating.round(3))
print("fit, predict at epoch ends: ", predicting.round(3))

expected = (
    kept_by_evaluate
    and not kept_by_predict
    and not same_predictions
    and np.allclose(evaluating, plain, atol=1e-5)
    and not np.allclose(predicting, plain, atol=0.01)
)
if not expected:
    sys.exit("The behaviour has changed.")
print("As found: evaluate puts the weights back, predict does not.")
PYTHON

KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/show.py"
