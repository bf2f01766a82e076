"""The fused updates equal Keras's own updates."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tfdpclip.accounting.phases import PrivacyMismatchError
from tfdpclip.keras.updates import fused_update_step
from tfdpclip.keras.watching.executions import Executions

pytestmark = pytest.mark.unchecked

OPTIMIZERS = tf.keras.optimizers
# Keras rounds 1 - beta in double precision, the framework in the variable's own.
CLOSE = 2e-5


def trajectory(optimizer_class, dtype, mode, settings, steps=6):
    rng = np.random.default_rng(0)
    variables = [tf.Variable(rng.normal(size=s), dtype=dtype) for s in ([5, 3], [2])]
    schedule = OPTIMIZERS.schedules.ExponentialDecay(0.1, 2, 0.5)
    optimizer = optimizer_class(schedule, **settings)
    optimizer.build(variables)

    def step(gradients):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "compiled")
    for _ in range(steps):
        step([tf.constant(rng.normal(size=v.shape), dtype) for v in variables])
    return np.concatenate([v.numpy().astype(np.float64).ravel() for v in variables])


@pytest.mark.parametrize("mode", ["eager", "graph", "compiled"])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.bfloat16])
@pytest.mark.parametrize(
    "optimizer_class, settings, tolerance",
    [
        (OPTIMIZERS.SGD, {}, 0),
        (OPTIMIZERS.SGD, {"momentum": 0.9}, 0),
        (OPTIMIZERS.SGD, {"momentum": 0.9, "nesterov": True}, 0),
        (OPTIMIZERS.SGD, {"weight_decay": 0.1, "momentum": 0.5}, 0),
        (OPTIMIZERS.Adam, {}, CLOSE),
        (OPTIMIZERS.Adam, {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 0.1}, CLOSE),
        (OPTIMIZERS.Adam, {"amsgrad": True}, 0),
        (OPTIMIZERS.Adam, {"use_ema": True, "ema_overwrite_frequency": 2}, CLOSE),
        (OPTIMIZERS.AdamW, {"weight_decay": 0.1}, CLOSE),
    ],
)
@pytest.mark.thinned(32)
def test_a_fused_update_is_kerass_own(
    optimizer_class, settings, tolerance, dtype, mode
):
    body = {"update_step": fused_update_step(optimizer_class)}
    fused = type("Fused", (optimizer_class,), body)
    own, ours = (
        trajectory(kind, dtype, mode, settings) for kind in (optimizer_class, fused)
    )
    if mode == "compiled":  # In which operations are joined, and round once.
        tolerance = max(tolerance, 1e-6)
    np.testing.assert_allclose(ours, own, rtol=tolerance, atol=tolerance)


def test_only_keras_classes_themselves_are_fused():
    class Own(OPTIMIZERS.SGD):
        def update_step(self, gradient, variable, *rate):
            variable.assign_add(gradient)

    assert fused_update_step(Own) is None
    variable = tf.Variable([1.0, 2.0])
    optimizer = dpc.keras.privatize(Own)(
        noise_multiplier=0.0, expected_batch_size=1, clip=100.0
    )

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.constant([[3.0, 5.0]]) * variable, axis=1)
        optimizer.minimize(loss, [variable], tape=tape)

    step()
    np.testing.assert_allclose(variable, [4.0, 7.0])


def test_no_operation_of_a_private_step_copies_a_parameter_more_than_it_must():
    """An update is one operation that writes to the variable."""
    variable = tf.Variable(tf.ones([40, 30]))
    optimizer = dpc.keras.DPSGD(0.1, noise_multiplier=1.0, expected_batch_size=64)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((x @ variable) ** 2, axis=1)
        optimizer.minimize(loss, [variable], tape=tape)

    graph = step.get_concrete_function(tf.ones([4, 40])).graph
    kinds = [op.type for op in graph.get_operations()]
    assert kinds.count("ResourceApplyGradientDescent") == 1
    writes = [
        op
        for op in graph.get_operations()
        if op.type in ("AssignVariableOp", "AssignAddVariableOp")
    ]
    assert all(op.inputs[1].shape.rank == 0 for op in writes)


def test_an_execution_that_became_longer_than_the_budget_is_refused():
    """A callback may raise `steps_per_execution` after the last look at the room."""
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    executions = Executions(model, {"steps": 8, "epochs": 1}, pieces=1, begun=0)
    assert executions.begin(0, left=8) == 1
    executions.end()
    model.compile("sgd", "mse", jit_compile=False, steps_per_execution=4)
    with pytest.raises(PrivacyMismatchError, match="has 4 steps, .* room for 3"):
        executions.begin(1, left=3)
    assert executions.begin(1, left=4) == 4
