"""The assertions say what they tried, and refuse inputs that they cannot judge."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.testing.mutations import EXAMPLES, data, model_of
from tfdpclip import clipping, testing
from tfdpclip.gradients import PerExampleGradients
from tfdpclip.mechanism import Mechanism
from tfdpclip.noise import GaussianNoise

pytestmark = pytest.mark.every_check

RULES = {
    "fixed": 0.5,
    "quantile": clipping.QuantileClip(initial_norm=1.5),
    "automatic": clipping.AutomaticClip(),
    "normalised": clipping.FixedClip(0.3, normalize=True),
    "layerwise": clipping.LayerwiseClip(clipping.QuantileClip(initial_norm=1.0)),
    "joint": clipping.LayerwiseClip(0.2, allocation="joint"),
    "public": clipping.PublicNormClip(0.5, norms={"hidden": 0.2, "head": 1.0}),
    "scaled": clipping.ScaledClip({"hidden": 5.0, "head": 1.0}, 0.5),
}


@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.slow
def test_some_record_uses_up_the_whole_sensitivity(rule, accumulation_steps):
    model = model_of(clip=RULES[rule], accumulation_steps=accumulation_steps)
    report = testing.assert_sensitivity(model, data())
    assert report.limit == 2.0
    # A loose bound would mean noise for nothing. AUTO-S stays below 1.
    assert report.distance == pytest.approx(2.0, rel=0.02)
    assert "neighbours tried" in str(report)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.slow
def test_under_adam_and_xla(jit_compile):
    model = model_of()
    optimizer = dpc.keras.DPAdam(
        0.1, clip=0.5, noise_multiplier=2.0, expected_batch_size=EXAMPLES
    )
    model.compile(optimizer, model.loss, jit_compile=jit_compile)
    before = [v.numpy() for v in (*model.variables, *optimizer.variables)]
    assert testing.assert_sensitivity(model, data()).distance <= 0.51
    testing.assert_noise(model, data())
    after = [v.numpy() for v in (*model.variables, *optimizer.variables)]
    for first, second in zip(before, after, strict=False):
        np.testing.assert_array_equal(first, second)
    assert not isinstance(optimizer._noise, testing.sensitivity.DialledNoise), (
        "the model must get its own noise back"
    )
    model.train_on_batch(*data())
    assert int(optimizer.iterations) == 1


@pytest.mark.slow
def test_batches_move_by_up_to_twice_the_clip():
    report = testing.assert_sensitivity(model_of(unit="batch", clip=0.1), data())
    assert report.limit == 4.0 and report.distance > 2.2


_SAMPLE_ALL, _ADD_NOISE = GaussianNoise.sample_all, Mechanism.add_noise
_WEIGHTED_SUM = PerExampleGradients.weighted_sum


def _a_tenth_less(self, *args):
    return [0.9 * part for part in _SAMPLE_ALL(self, *args)]


class _LessOnTheLast:
    """A source that is asked for half of the noise on the last variable."""

    def __init__(self, own):
        self._own = own

    def sample_all(self, shapes, stddevs, dtypes):
        *others, last, counts = stddevs
        return self._own.sample_all(shapes, [*others, 0.5 * last, counts], dtypes)


def _less_on_a_bias(self, state, sums, counts, noise, *rest, **options):
    return _ADD_NOISE(
        self, state, sums, counts, _LessOnTheLast(noise), *rest, **options
    )


def _no_clip(self, weights, assignment=None):
    return _WEIGHTED_SUM(self, tf.where(weights > 0, 1.0, 0.0), assignment)


def test_noise_that_is_a_tenth_too_small_is_found():
    model = model_of()
    assert sum(np.size(w) for w in model.get_weights()) < 250
    with (
        mock.patch.object(GaussianNoise, "sample_all", _a_tenth_less),
        pytest.raises(AssertionError, match="oise.* has 0.[89].* times the stddev"),
    ):
        testing.assert_noise(model, data())


def test_half_the_noise_on_a_small_variable_is_found():
    """A bias of a few numbers, whose draws show little."""
    model = model_of()
    name = model.trainable_variables[-1].name
    with (
        mock.patch.object(Mechanism, "add_noise", _less_on_a_bias),
        pytest.raises(AssertionError, match=f"{name}.* is scaled to 0.5 times"),
    ):
        testing.assert_noise(model, data())


def embedding_model(clip):
    model = tf.keras.Sequential(
        [
            tf.keras.Input((4,), dtype=tf.int32),
            tf.keras.layers.Embedding(10, 16),
            tf.keras.layers.GlobalAveragePooling1D(),
            tf.keras.layers.Dense(2),
        ]
    )
    model.compile(
        dpc.keras.DPSGD(0.1, noise_multiplier=1.0, expected_batch_size=6, clip=clip),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    rng = np.random.default_rng(0)
    return model, (rng.integers(0, 10, (6, 4)), rng.integers(0, 2, 6))


def test_a_forgotten_clip_shows_on_short_records_that_are_integers():
    """Gradients of a new model may all be shorter than the clip norm."""
    model, batch = embedding_model(clip=5.0)
    report = testing.assert_sensitivity(model, batch, records=[1, 4])
    assert "weight times 1000" in report.record and report.tried == 4
    assert report.ratio == pytest.approx(1.0, rel=0.02)
    with (
        mock.patch.object(PerExampleGradients, "weighted_sum", _no_clip),
        pytest.raises(AssertionError, match="does not have the privacy it claims"),
    ):
        testing.assert_sensitivity(embedding_model(clip=5.0)[0], batch, records=[1, 4])


@pytest.mark.slow
def test_integer_inputs_and_chosen_records():
    model, batch = embedding_model(clip=0.1)
    report = testing.assert_sensitivity(model, batch, records=[1, 4])
    assert report.tried == 2
    testing.assert_noise(model, batch, steps=12)


def test_what_cannot_be_judged_is_refused():
    x, y = data()
    with pytest.raises(ValueError, match="private optimizer"):
        model = model_of()
        model.compile("sgd", "mse")
        testing.assert_sensitivity(model, (x, y))
    with pytest.raises(ValueError, match="noise_multiplier is 0"):
        testing.assert_sensitivity(model_of(noise_multiplier=0.0), (x, y))
    with pytest.raises(ValueError, match="noise_multiplier is 0"):
        testing.assert_noise(model_of(noise_multiplier=0.0), (x, y))
    with pytest.raises(ValueError, match="steps"):
        testing.assert_noise(model_of(), (x, y), steps=1)
    with pytest.raises(ValueError, match="accumulation_steps"):
        model = model_of(accumulation_steps=3)
        testing.assert_sensitivity(model, (x[:23], y[:23]))
    with pytest.raises(ValueError, match="no variables"):
        model = tf.keras.Sequential([tf.keras.layers.Dense(2)])
        model.compile(dpc.keras.DPSGD(noise_multiplier=1.0, expected_batch_size=20))
        testing.assert_sensitivity(model, (x, y))


def test_isolated_model_passes():
    testing.assert_isolated(model_of(), *data())


@pytest.mark.slow
@pytest.mark.parametrize("one_hot", [False, True])
def test_labels_of_each_token_get_weights_as_of_drawn_batches(one_hot):
    x = np.random.default_rng(0).normal(size=(9, 6, 4)).astype("float32")
    y = np.arange(54).reshape(9, 6) % 3
    losses = tf.keras.losses
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    if one_hot:
        y, loss = (
            np.eye(3, dtype="float32")[y],
            losses.CategoricalCrossentropy(from_logits=True),
        )
    model = tf.keras.Sequential([tf.keras.Input((6, 4)), tf.keras.layers.Dense(3)])
    optimizer = dpc.keras.DPSGD(
        0.1, clip=0.01, noise_multiplier=0.5, expected_batch_size=9
    )
    model.compile(optimizer, dpc.keras.PerExampleLoss(loss))
    dpc.testing.assert_exact(model, (x, y))
    dpc.testing.assert_sensitivity(model, (x, y))


def distiller(step, teach):
    """keras.io's knowledge distillation, whose losses ignore weights.

    Args:
      step: "compute_loss", as on Keras 3, or "train_step", as on Keras 2.
      teach: whether a teacher's predictions are part of the loss.
    """
    losses, dense = tf.keras.losses, tf.keras.layers.Dense
    hard, soft = (
        losses.SparseCategoricalCrossentropy(from_logits=True),
        losses.KLDivergence(),
    )

    class Distiller(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = dense(3), dense(3, trainable=False)

        def call(self, x):
            return self.student(x)

        def loss_of(self, x, y, y_pred):
            loss = hard(y, y_pred)
            if teach:
                taught = tf.nn.softmax(self.teacher(x) / 3, axis=1)
                soft_loss = soft(taught, tf.nn.softmax(y_pred / 3, axis=1))
                loss = 0.1 * loss + 0.9 * 9 * soft_loss
            return loss

    class OfLoss(Distiller):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
            return self.loss_of(x, y, y_pred)

    class OfStep(Distiller):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.loss_of(x, y, self(x, training=True))
            weights = self.student.trainable_variables
            self.optimizer.minimize(loss, weights, tape=tape)
            return {"loss": loss}

    model = {"compute_loss": OfLoss, "train_step": OfStep}[step]()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 6)).astype("float32"), rng.integers(0, 3, 16)
    model(x), model.teacher(x)
    model.compile(
        dpc.keras.DPSGD(0.1, clip=0.1, noise_multiplier=2.0, expected_batch_size=8)
    )
    return model, (x, y)


@pytest.mark.slow
@pytest.mark.parametrize("teach", [False, True])
@pytest.mark.parametrize("step", ["compute_loss", "train_step"])
def test_losses_that_ignore_weights_are_judged_as_on_drawn_batches(step, teach):
    model, batch = distiller(step, teach)
    report = testing.assert_sensitivity(model, batch, records=[1])
    assert report.ratio == pytest.approx(1.0, rel=0.02)
    assert testing.assert_exact(model, batch).examples == 16
    with (
        mock.patch.object(PerExampleGradients, "weighted_sum", _no_clip),
        pytest.raises(AssertionError, match="does not have the privacy it claims"),
    ):
        wrong, batch = distiller(step, teach)
        testing.assert_sensitivity(wrong, batch, records=[1])
