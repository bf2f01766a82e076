"""A clip rule that is new to the library needs a single class, and works everywhere."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.diagnostics.models import images, network
from tests.testing.mutations import data, model_of

ROOT = pathlib.Path(__file__).parents[2]
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@dpc.clipping.register_rule
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PowerClip(dpc.ClipRule):
    """Weight (C/n)^p above C: long records are heard less, for p above 1.

    *Formal guarantees*: sensitivity C; a record of norm n > C keeps C (C/n)^(p - 1).
    """

    norm: float
    power: float = 2.0

    elementwise = True

    def initial_state(self):
        return ()

    def weights(self, norms, state):
        norms = tf.cast(norms, tf.float32) if norms.dtype.size < 4 else norms
        weights = tf.pow(self.norm / tf.maximum(norms, self.norm), self.power)
        return tf.where(tf.math.is_finite(norms), weights, tf.zeros_like(weights))

    def sensitivity(self, state):
        return tf.constant(self.norm, tf.float32)


@pytest.mark.slow
def test_it_keeps_the_contract():
    for power in (1.0, 2.0, 3.5):
        assert dpc.testing.assert_clip_rule(PowerClip(0.5, power)).ratio > 0.999


@pytest.mark.slow
def test_without_its_bound_it_is_held_to_it():
    # Below power 1, a long record is longer than C once weighted.
    rule = PowerClip(0.5, 0.5)
    with pytest.raises(AssertionError, match=r"noise_scales\(state\), 0\.5"):
        dpc.testing.assert_clip_rule(rule)
    report = dpc.testing.assert_sensitivity(model_of(clip=rule), data())
    assert report.distance <= 1.02 * report.limit


@pytest.mark.parametrize(
    "rule",
    [
        PowerClip(1.5),
        dpc.LayerwiseClip(PowerClip(1.0)),
        dpc.PublicNormClip(PowerClip(1.0), norms={"hidden": 0.8, "head": 1.0}),
        dpc.ScaledClip({"hidden": 0.8, "head": 1.0}, PowerClip(1.5)),
    ],
    ids=["flat", "layerwise", "public", "scaled"],
)
@pytest.mark.slow
def test_a_step_has_its_sensitivity(rule):
    report = dpc.testing.assert_sensitivity(model_of(clip=rule), data())
    assert 0.5 * report.limit < report.distance <= 1.02 * report.limit


def trained(rule, **options):
    tf.keras.utils.set_random_seed(0)
    model, (x, y) = network(), images(64)
    model.compile(
        dpc.keras.DPSGD(
            0.1, clip=rule, noise_multiplier=1.0, expected_batch_size=16, seed=1
        ),
        LOSS,
    )
    model.fit(x, y, batch_size=16, verbose=0, **options)
    return model


def test_it_trains_and_is_saved_and_loaded(tmp_path):
    model = trained(PowerClip(0.7, 1.5))
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.clip == PowerClip(0.7, 1.5)
    assert int(loaded.optimizer.iterations) == 4
    for one, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    loaded.fit(*images(16), batch_size=16, verbose=0)


@pytest.mark.slow
def test_who_does_not_know_it_is_told_how_to(tmp_path):
    path = tmp_path / "model.keras"
    trained(PowerClip(0.7)).save(path)
    program = (
        "import sys, tensorflow as tf, tfdpclip as dpc, tfdpclip.keras\n"
        "tf.keras.models.load_model(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "unknown rule 'PowerClip'" in done.stderr
    assert "@dpc.clipping.register_rule" in done.stderr
