"""Noise of models so large that it is drawn in compiled code, in every mode."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tfdpclip.keras.private_optimizer import PrivateOptimizer
from tfdpclip.noise.gaussian import _COMPILED_FROM

pytestmark = pytest.mark.unchecked

INPUTS, OUTPUTS = 300, 230
RATE, Z, CLIP, EXPECTED, STEPS = 0.5, 2.0, 3.0, 8, 4
X = np.zeros((2 * STEPS * EXPECTED, INPUTS), np.float32)

MODES = {
    "plain": {},
    "compiled": {"jit_compile": True},
    "accumulated": {"accumulation_steps": 2},
    "accumulated_and_compiled": {"accumulation_steps": 2, "jit_compile": True},
    "several_steps": {"steps_per_execution": STEPS},
    "hardened": {"hardened_noise": True},
    "layerwise": {"clip": dpc.LayerwiseClip(CLIP)},
    "quantile": {"clip": dpc.QuantileClip(0.5, CLIP, 1e-6, count_stddev=20.0)},
    "batch": {"unit": "batch", "expected_batch_size": None},
    "momentum": {"momentum": 1e-9},
}


class _Record(tf.keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.weights = []

    def on_train_begin(self, logs=None):
        self.on_train_batch_end(None)

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(
            np.concatenate([w.ravel() for w in self.model.get_weights()])
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.thinned(6)
def test_every_step_adds_new_noise_of_the_right_size(mode):
    """Of a loss without gradients, so that nothing else moves the weights."""
    options = {
        "clip": CLIP,
        "noise_multiplier": Z,
        "expected_batch_size": EXPECTED,
        **MODES[mode],
    }
    fit = {
        k: options.pop(k)
        for k in ("jit_compile", "steps_per_execution")
        if k in options
    }
    optimizer = dpc.keras.DPSGD(RATE, **options)
    model = tf.keras.Sequential(
        [tf.keras.Input((INPUTS,)), tf.keras.layers.Dense(OUTPUTS)]
    )
    assert model.count_params() >= _COMPILED_FROM
    model.compile(optimizer, lambda y, out: 0.0 * tf.reduce_sum(out, -1), **fit)
    record = _Record()
    k = options.get("accumulation_steps", 1)
    steps = STEPS * k
    x = X[: steps * EXPECTED // k]
    model.fit(x, x[:, :1], batch_size=EXPECTED // k, callbacks=[record], verbose=0)
    released = np.diff(record.weights, axis=0)
    released = released[np.any(released != 0, axis=1)].astype(np.float64)
    moves = STEPS // fit.get("steps_per_execution", 1)
    assert released.shape == (moves, model.count_params())
    scale = RATE * float(optimizer.gradient_noise_multiplier) * CLIP
    scale /= 1 if mode == "batch" else EXPECTED
    scale *= np.sqrt(STEPS / moves)
    samples = released / scale
    # Each within 6 standard errors: all 60 or so checks of this file fail by chance
    # with probability 1e-7.
    bound = 6 / np.sqrt(samples.size)
    assert abs(samples.mean()) < bound
    assert abs(np.mean(samples**2) - 1) < bound * np.sqrt(2)
    assert abs(np.mean(samples**4) - 3) < bound * np.sqrt(96)
    for earlier, later in zip(samples[:-1], samples[1:], strict=True):
        assert abs(np.mean(earlier * later)) < 6 / np.sqrt(earlier.size)
        assert len(np.intersect1d(earlier, later)) < 0.02 * earlier.size


def test_without_noise_none_is_drawn():
    optimizer = dpc.keras.DPSGD(
        RATE, clip=CLIP, noise_multiplier=0.0, expected_batch_size=8
    )
    variable = tf.Variable(tf.zeros([INPUTS, OUTPUTS]))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = 0.0 * tf.reduce_sum(x @ variable, axis=1)
        optimizer.minimize(loss, [variable], tape=tape)

    step(tf.constant(X[:8]))
    assert np.all(variable.numpy() == 0)
    kinds = {op.type for op in step.get_concrete_function(X[:8]).graph.get_operations()}
    assert "RngReadAndSkip" not in kinds


def _behind(op):
    """All ops that an op waits for."""
    waits, pending = set(), [op]
    while pending:
        current = pending.pop()
        if current not in waits:
            waits.add(current)
            pending += [tensor.op for tensor in current.inputs]
            pending += current.control_inputs
    return waits


@pytest.mark.slow
def test_noise_is_drawn_beside_the_gradients():
    """On a second core: the draw waits for no data, so no data decide about it."""
    graphs = []
    apply = PrivateOptimizer._apply_released

    def noted(self, released):
        graphs.append(tf.compat.v1.get_default_graph())
        return apply(self, released)

    optimizer = dpc.keras.DPSGD(
        0.1, clip=1.0, noise_multiplier=1.0, expected_batch_size=EXPECTED
    )
    model = tf.keras.Sequential(
        [tf.keras.Input([INPUTS]), tf.keras.layers.Dense(OUTPUTS)]
    )
    model.compile(optimizer, "mse")
    with mock.patch.object(PrivateOptimizer, "_apply_released", noted):
        model.fit(X, np.zeros([len(X), OUTPUTS]), batch_size=EXPECTED, verbose=0)
    draws = [op for op in graphs[-1].get_operations() if op.type == "RngReadAndSkip"]
    assert draws
    calls = [
        op
        for op in graphs[-1].get_operations()
        if "PartitionedCall" in op.type and draws[-1] in _behind(op)
    ]
    assert calls
    for op in calls[:1]:
        assert not {"MatMul", "If", "StatelessIf"} & {one.type for one in _behind(op)}
