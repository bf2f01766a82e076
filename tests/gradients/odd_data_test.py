"""No batch is refused for rounding: 100,000 steps of odd data, each compared.

A model whose first step is accepted is never refused afterwards, by default, because
later steps compare nothing. Here every step compares its sums and norms with an
ordinary backward pass, so that one false alarm in 100,000 would be seen.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import Block, squash
from tests.gradients.layers_test import LAYERS, head
from tests.gradients.no_false_alarms_test import RANDOM
from tfdpclip.gradients import PerExampleGradients

pytestmark = [
    pytest.mark.every_check,
    pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning"),
]
L = tf.keras.layers
STEPS, BATCH = 5000, 6
SCALES = (1e-30, 1e-20, 1e-6, 1.0, 30.0, 1e3, 1e8, 1e15, 1e30)

MODELS = {
    **{
        name: LAYERS[name]
        for name in (
            "dense_3d",
            "conv1d",
            "conv2d_same",
            "conv2d_strided",
            "conv2d_transpose",
            "depthwise",
            "separable2d",
            "layer_norm",
            "group_norm",
            "lstm",
            "gru_reset_before",
            "bidirectional",
            "einsum_grouped",
        )
    },
    "attention_of_alike_tokens": (
        (4, 3),
        lambda: [L.Dense(6, "sigmoid"), L.LayerNormalization(epsilon=1e-6), Block()],
    ),
    "deep_relu": ((5,), lambda: [L.Dense(8, "relu") for _ in range(5)]),
    "deep_tanh": ((5,), lambda: [L.Dense(8, "tanh") for _ in range(5)]),
    "softmax_inside": ((5,), lambda: [L.Dense(8, "softmax"), L.Dense(4)]),
    "unit_norm": ((4, 3), RANDOM["unit_norm"]),
    "dropout": ((4, 3), RANDOM["dropout"]),
    "sorted_features": ((4, 3), RANDOM["sorted_features"]),
}


def odd_batch(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A batch of a kind on which rounding shows."""
    x = rng.normal(size=(BATCH, *shape))
    kind = rng.integers(8)
    if kind == 0:  # Equal examples.
        x[:] = x[:1]
    elif kind == 1:  # Pairs of examples that cancel.
        x[1::2] = -x[::2]
    elif kind == 2:  # Terms that cancel within an example.
        x += 1e4 * (-1.0) ** np.arange(shape[-1])
    elif kind == 3:  # Nearly equal entries, or tokens.
        x = np.round(x[:, ..., :1]) + 1e-4 * x
    elif kind == 4:  # Examples of very different sizes.
        x *= 10.0 ** rng.integers(-12, 13, [BATCH] + [1] * len(shape))
    elif kind == 5:  # Whole numbers, with many zeros.
        x = np.round(x)
    x = x * rng.choice(SCALES)
    if rng.random() < 0.2:
        x[rng.integers(BATCH)].flat[0] = rng.choice([np.nan, np.inf, -np.inf])
    with np.errstate(over="ignore"):
        return x[: rng.integers(1, BATCH + 1)].astype(np.float32)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_rounding_refuses_no_step(name):
    shape, layers = MODELS[name]
    tf.keras.utils.set_random_seed(5)
    rng = np.random.default_rng(5)
    model = head(*layers())
    model(np.zeros([2, *shape], np.float32))
    start = model.get_weights()

    @tf.function(input_signature=[tf.TensorSpec([None, *shape])])
    def step(x):
        loss = squash(model(x, training=True))
        gradients = PerExampleGradients(
            loss, model.trainable_variables, check_gradients="always"
        )
        weights = tf.random.uniform(tf.shape(loss))
        return gradients.checks_passed, gradients.weighted_sum(weights)

    for number in range(STEPS):
        if number % 250 == 0:
            size = rng.choice([0.0, 1e-3, 0.3, 1.0, 3.0, 30.0])
            model.set_weights([size * w for w in start])
        x = odd_batch(rng, shape)
        isolated, _ = step(x)
        assert bool(isolated), (number, x)
