"""Keras, TensorFlow Federated and the local engine are one mechanism."""

import math
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.fixed_noise import STANDARD, Fixed
from tfdpclip.clipping import FixedClip, LayerwiseClip, QuantileClip
from tfdpclip.noise import GaussianNoise

Z, RECORDS = 0.8, 40
PARITY = {
    "fixed": ({"clipping": "fixed", "clip": 0.5}, FixedClip(0.5)),
    "quantile": ({"clip": 0.5}, QuantileClip(initial_norm=0.5)),
    "layerwise": (
        {"clip": 0.5, "layerwise": True, "count_stddev": 3.0},
        LayerwiseClip(QuantileClip(initial_norm=0.5, count_stddev=3.0)),
    ),
}
UPDATES = np.random.default_rng(5).normal(size=(7, 5)).astype(np.float32)
SHAPES, TENSORS = [[3], [2]], ["a/kernel", "b/kernel"]


def in_parts(vector):
    return [vector[..., :3], vector[..., 3:]]


def kept(means, state):
    parts = [*means, *(s for s in tf.nest.flatten(state))]
    return np.concatenate([np.ravel(part).astype(np.float64) for part in parts])


def by_hand(rule):
    """The definition, in double precision."""
    flat = rule.bind(TENSORS).assignment is None
    groups = [np.arange(5)] if flat else [np.arange(3), np.arange(3, 5)]
    counts = () if isinstance(rule, FixedClip) else (2.0,)
    counts = (3.0, 3.0) if not flat else counts
    z_g = (Z**-2 - sum((2 * s) ** -2 for s in counts)) ** -0.5
    means, clips = np.zeros(5), []
    for h, places in enumerate(groups):
        norms = np.linalg.norm(UPDATES[:, places].astype(np.float64), axis=1)
        total = (UPDATES[:, places] * np.minimum(1, 0.5 / norms)[:, None]).sum(0)
        stddev = z_g * 0.5 * math.sqrt(len(groups))
        means[places] = (total + STANDARD[places] * stddev) / RECORDS
        if counts:
            count = (
                np.where(norms <= 0.5, 0.5, -0.5).sum() + counts[h] * STANDARD[5 + h]
            )
            fraction = np.clip(count / RECORDS + 0.5, 0, 1)
            clips.append(0.5 * math.exp(-0.2 * (fraction - 0.5)))
    return np.concatenate([means, clips])


def by_keras(rule):
    from tfdpclip.keras import DPSGD

    optimizer = DPSGD(1.0, clip=rule, noise_multiplier=Z, expected_batch_size=RECORDS)
    variables = [
        tf.Variable(tf.zeros(shape), name=name)
        for shape, name in zip(SHAPES, TENSORS, strict=True)
    ]

    @tf.function
    def step(x):
        losses = tf.add_n(
            [
                tf.linalg.matvec(part, v)
                for part, v in zip([x[:, :3], x[:, 3:]], variables, strict=True)
            ]
        )
        found = optimizer.compute_gradients(losses, variables)
        return [gradient for gradient, _ in found]

    with mock.patch.object(GaussianNoise, "sample_all", Fixed.sample_all):
        means = step(tf.constant(UPDATES))
    return kept(means, optimizer.clip_state)


def by_federated(rule):
    tff = pytest.importorskip("tensorflow_federated")
    from tfdpclip import federated
    from tfdpclip.federated import _entropy

    factory = federated.clipped_mean(Z, RECORDS, rule, variable_names=TENSORS)
    value_type = tff.to_type([(np.float32, shape) for shape in SHAPES])

    def given(count, seed):
        return tf.constant(STANDARD[:count])

    with mock.patch.object(_entropy, "standard_normal", given):
        process = factory.create(value_type)
    with federated.local_context(simulate_secure_sums=True):
        state = process.initialize()
        output = process.next(state, [in_parts(x) for x in UPDATES])
    return kept(output.result, output.state["clip"])


def by_engine(settings):
    from tff_tasks.config import RunConfig
    from tff_tasks.engine_local import LocalEngine

    class Task:
        def build_model(self):
            return mock.Mock(
                trainable_variables=[
                    tf.Variable(tf.zeros(shape), name=name)
                    for shape, name in zip(SHAPES, TENSORS, strict=True)
                ]
            )

        def loss(self):
            return None

    config = RunConfig(
        "digits",
        noise_multiplier=Z,
        clients_per_round=RECORDS,
        server_learning_rate=1.0,
        server_momentum=0.0,
        engine="local",
        **settings,
    )
    engine = LocalEngine(Task(), config, [np.zeros(s, np.float32) for s in SHAPES])
    for i, x in enumerate(UPDATES):
        lane = engine._lanes[i % len(engine._lanes)]
        lane._add([tf.constant(part) for part in in_parts(x)], engine._clip_state)
    with mock.patch.object(GaussianNoise, "sample_all", Fixed.sample_all):
        engine._finish(1)
    return kept([-w for w in engine.weights], engine._clip_state)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", PARITY)
def test_keras_federated_and_the_local_engine_release_the_same(name):
    """The same records and the same noise give the same, right numbers."""
    settings, rule = PARITY[name]
    wanted = by_hand(rule)
    for found in (by_keras(rule), by_federated(rule), by_engine(settings)):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-7)
