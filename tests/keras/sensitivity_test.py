"""A whole step, noise off: the effect of adding, removing or replacing a record.

The sum (update times expected batch size) moves by at most the rule's sensitivity if a
record is added or removed, and by twice as much if a record is replaced; the sum of
indicators by 1/2, and by 1.
"""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import (
    DPSGD,
    DPAdam,
    L,
    Opaque,
    flat,
    linear,
    mostly_slow,
    private_gradients,
)
from tests.stack import MEAN
from tfdpclip.clipping import AutomaticClip, FixedClip, QuantileClip

pytestmark = pytest.mark.unchecked

EXPECTED = 32
COUNT = 6
# Rounding: of a sum of a few clipped records in float32.
SLACK = 1 + 1e-4

RULES = {
    "fixed": FixedClip(0.5),
    "fixed_normalize": FixedClip(0.5, normalize=True),
    "quantile": QuantileClip(0.5, 0.5),
    "quantile_linear": QuantileClip(0.5, 0.5, update="linear", normalize=True),
    "automatic": AutomaticClip(0.01),
    "automatic_unit": AutomaticClip(0.0),
}
# The record that comes, goes or changes, as (scale of x, scale of y).
RECORDS = {
    "ordinary": (1.0, 1.0),
    "huge": (1e4, 1e4),
    "overflowing": (1e30, 1e30),
    "tiny": (1e-8, 1e-8),
    "zero": (0.0, 0.0),
    "nan": (math.nan, 1.0),
    "nan_label": (1.0, math.nan),
    "inf": (math.inf, 1.0),
}


class FixedMask(L.Layer):
    """Dropout with the same mask for all examples, and so for all neighbours."""

    def __init__(self, width):
        super().__init__()
        drawn = np.random.default_rng(5).integers(2, size=width)
        self.mask = tf.constant(2.0 * drawn, tf.float32)

    def call(self, x):
        return x * self.mask


class Tied(tf.keras.Model):
    """An embedding that is used again as the output layer's kernel."""

    def __init__(self):
        super().__init__()
        self.table = self.add_weight(name="table", shape=(7, 3), initializer="normal")
        self.dense = L.Dense(3, activation="tanh")

    def call(self, ids):
        hidden = self.dense(tf.gather(self.table, ids))
        logits = tf.einsum("btd,vd->btv", hidden, self.table)
        return tf.reduce_mean(logits, axis=[1, 2])[:, tf.newaxis]


def dense():
    layers = [L.Dense(4, "tanh"), FixedMask(4), L.Dense(1)]
    return tf.keras.Sequential(layers), (5,)


def conv():
    layers = [
        L.Conv2D(4, 3, activation="relu"),
        L.GroupNormalization(2),
        L.Flatten(),
        FixedMask(64),
        L.Dense(1),
    ]
    return tf.keras.Sequential(layers), (6, 6, 2)


def tied():
    return Tied(), (4,)


def lstm():
    return tf.keras.Sequential([L.LSTM(3), L.Dense(1)]), (4, 3)


def rnn():
    """Takes the Jacobian path."""
    return tf.keras.Sequential([Opaque(), L.Dense(1)]), (4, 3)


MODELS = {"dense": dense, "conv": conv, "tied": tied, "lstm": lstm, "rnn": rnn}


def records(model, shape, kind, count=COUNT):
    """`count` ordinary records and, last, a record of the given kind."""
    rng = np.random.default_rng(11)
    y = 3 * rng.standard_normal((count + 1, 1)).astype("float32")
    y[-1] = 3.0
    if model == "tied":
        x = rng.integers(7, size=(count + 1, *shape)).astype("int32")
        # Integers cannot be adversarial; the label can.
        scale = max(RECORDS[kind], key=lambda s: (not math.isfinite(s), s))
        y[-1] *= np.float32(scale)
    else:
        x = rng.standard_normal((count + 1, *shape)).astype("float32")
        x[-1] *= np.float32(RECORDS[kind][0])
        y[-1] *= np.float32(RECORDS[kind][1])
    return x, y


class Step:
    """A logical step from a fresh state: the sum, and the sum of indicators."""

    def __init__(self, name, rule, kind=DPSGD, k=1, jit=False):
        tf.keras.utils.set_random_seed(2)
        self.model, self.shape = MODELS[name]()
        dtype = tf.int32 if name == "tied" else tf.float32
        self.model(tf.zeros([2, *self.shape], dtype))
        self.rule, self.k = rule, k
        self.optimizer = kind(
            1.0,
            clip=rule,
            noise_multiplier=0,
            expected_batch_size=EXPECTED,
            accumulation_steps=k,
        )
        self.variables = self.model.trainable_variables
        self.start = [v.numpy() for v in self.variables]
        signature = [
            tf.TensorSpec([None, *self.shape], dtype),
            tf.TensorSpec([None, 1]),
            tf.TensorSpec([None]),
        ]
        loss = tf.keras.losses.MeanSquaredError()

        def of_batch(x, y, weight):
            return loss(y, self.model(x, training=True), sample_weight=weight)

        if k == 1:
            self._gradients = private_gradients(
                self.optimizer, self.variables, signature, of_batch, jit
            )
            return

        @tf.function(input_signature=signature, jit_compile=jit)
        def minimize(*data):
            self.optimizer.minimize(of_batch(*data), self.variables)

        self._minimize = minimize

    def __call__(self, x, y, weight=None):
        weight = np.ones(len(y), np.float32) if weight is None else weight
        for variable in self.optimizer.variables:
            if "clip_state" in variable.name:
                variable.assign(self.rule.initial_norm)
        if self.k == 1:
            total = self._gradients(x, y, weight) * EXPECTED
        else:
            for variable, value in zip(self.variables, self.start, strict=True):
                variable.assign(value)
            # The last physical batch holds the record that comes or goes, if any.
            for part in np.split(np.arange(len(y)), [COUNT // 2, COUNT - 1]):
                self._minimize(x[part], y[part], weight[part])
            moved = flat(self.variables) - np.concatenate(
                [v.ravel() for v in self.start]
            )
            total = -moved * EXPECTED
        assert np.all(np.isfinite(total))
        return total, self._count()

    def _count(self):
        """The sum of indicators, from how far the clip norm moved."""
        rule = self.rule
        if not isinstance(rule, QuantileClip):
            return 0.0
        state = float(self.optimizer.clip_norm)
        if rule.update == "geometric":
            error = -math.log(state / rule.initial_norm) / rule.learning_rate
        else:
            error = (rule.initial_norm - state) / rule.learning_rate
        return (error + rule.target_quantile - 0.5) * EXPECTED


def check_neighbours(name, rule, kinds=RECORDS, **options):
    step = Step(name, rule, **options)
    sensitivity = float(rule.sensitivity(rule.initial_state()))
    worst = 0.0
    for kind in kinds:
        x, y = records(name, step.shape, kind)
        without, count_without = step(x[:-1], y[:-1])
        with_it, count_with = step(x, y)
        # Replaced: the place of the last ordinary record is taken.
        swapped_x, swapped_y = (np.concatenate([t[:-2], t[-1:]]) for t in (x, y))
        replaced, count_replaced = step(swapped_x, swapped_y)
        added = np.linalg.norm(with_it - without)
        worst = max(worst, added)
        assert added <= sensitivity * SLACK, kind
        assert np.linalg.norm(replaced - without) <= 2 * sensitivity * SLACK, kind
        assert abs(count_with - count_without) <= 0.5 + 1e-3, kind
        assert abs(count_replaced - count_without) <= 1 + 1e-3, kind
        # Padding in the record's place is the same as its absence.
        weight = np.array([1.0] * COUNT + [0.0], np.float32)
        if math.isfinite(sum(RECORDS[kind])) and kind != "overflowing":
            padded, count_padded = step(x, y, weight)
            np.testing.assert_allclose(padded, without, atol=1e-4 * sensitivity)
            assert abs(count_padded - count_without) <= 1e-3, kind
    # The bound is reached: a record's clipped gradient is there at all.
    assert worst > 0.9 * sensitivity


# On the Jacobian path an example that is not finite cannot be kept apart.
FINITE = [kind for kind in RECORDS if kind not in ("nan", "nan_label", "inf")]
QUICK = ["dense", "conv", "tied"]


@pytest.mark.parametrize("rule", mostly_slow(["quantile"], RULES))
@pytest.mark.parametrize("name", QUICK)
@pytest.mark.thinned(2)
def test_a_step_moves_by_at_most_the_sensitivity(name, rule):
    check_neighbours(name, RULES[rule])


@pytest.mark.parametrize("rule", ["automatic", "automatic_unit", "fixed_normalize"])
@pytest.mark.thinned(2)
def test_a_step_moves_by_at_most_the_sensitivity_of_other_rules(rule):
    check_neighbours("dense", RULES[rule])


@pytest.mark.slow
@pytest.mark.parametrize("rule", mostly_slow(["quantile"], ["quantile", "automatic"]))
def test_a_step_through_an_lstm_moves_by_at_most_the_sensitivity(rule):
    check_neighbours("lstm", RULES[rule])


jacobian = pytest.mark.filterwarnings(
    "ignore::tfdpclip.gradients.JacobianFallbackWarning"
)


@jacobian
@pytest.mark.slow
def test_a_step_through_the_fallback_moves_by_at_most_the_sensitivity():
    check_neighbours("rnn", RULES["quantile"], FINITE)


@pytest.mark.slow
@jacobian
@pytest.mark.parametrize("kind", mostly_slow(["nan"], ["nan", "nan_label", "inf"]))
def test_the_fallback_refuses_a_batch_that_is_not_finite(kind):
    """Dropping the batch instead would lose the sum of the sound records."""
    step = Step("rnn", RULES["quantile"])
    step(*records("rnn", step.shape, "ordinary"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        step(*records("rnn", step.shape, kind))


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.slow
def test_an_accumulated_step_moves_by_at_most_the_sensitivity(name):
    check_neighbours(name, RULES["quantile"], k=3)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3])
def test_a_compiled_step_moves_by_at_most_the_sensitivity(k):
    check_neighbours("dense", RULES["quantile"], ["ordinary", "nan"], k=k, jit=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "tied"])
def test_the_gradient_adam_sees_moves_by_at_most_the_sensitivity(name):
    check_neighbours(name, RULES["quantile"], kind=DPAdam)


@pytest.mark.slow
@jacobian
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "rnn"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("jit", [False, True])
def test_every_combination_moves_by_at_most_the_sensitivity(name, rule, k, jit):
    for kind in (DPSGD, DPAdam) if k == 1 else (DPSGD,):
        check_neighbours(name, rule, kind=kind, k=k, jit=jit)


def update(reduction, count, jit=False):
    """The sum for `count` equal records, each with a gradient well within the clip."""
    model = linear(inputs=1)
    model.compile(
        DPSGD(1.0, clip=1.0, noise_multiplier=0, expected_batch_size=1),
        tf.keras.losses.MeanSquaredError(reduction=reduction),
        jit_compile=jit,
    )
    ones = np.ones((count, 1), np.float32)
    model.train_on_batch(ones, 0.05 * ones)
    return float(model.get_weights()[0].squeeze())


@pytest.mark.parametrize("jit", mostly_slow([False], [False, True]))
@pytest.mark.parametrize("reduction", ["none", MEAN, "sum"])
@pytest.mark.thinned(3)
def test_a_records_share_does_not_depend_on_how_many_others_came(reduction, jit):
    sums = [update(reduction, count, jit) for count in (8, 9, 11)]
    assert abs(sums[1] - sums[0]) <= SLACK
    assert abs(sums[2] - sums[1]) <= 2 * SLACK


def test_a_loss_divided_by_a_constant_does_not_depend_on_how_many_came():
    sums = []
    for count in (8, 9):
        w = tf.Variable([0.0])
        optimizer = DPSGD(1.0, clip=1.0, noise_multiplier=0, expected_batch_size=1)

        @tf.function
        def step(x, w=w, optimizer=optimizer):
            optimizer.minimize(tf.reduce_sum(tf.square(x * w - 0.5)) / 10.0, [w])

        step(tf.ones([count]))
        sums.append(float(w[0]))
    assert abs(sums[1] - sums[0]) <= SLACK


@pytest.mark.parametrize(
    "noisy",
    [lambda: L.Dropout(0.5), lambda: L.GaussianNoise(1.0), lambda: L.AlphaDropout(0.5)],
    ids=["dropout", "gaussian", "alpha"],
)
@pytest.mark.thinned(3)
def test_a_record_stays_within_the_clip_under_random_layers(noisy):
    """The norm and the gradient must come from the same draw of the mask."""
    model = tf.keras.Sequential(
        [tf.keras.Input((8,)), noisy(), L.Dense(16, "relu"), noisy(), L.Dense(1)]
    )
    optimizer = DPSGD(1.0, clip=0.5, noise_multiplier=0, expected_batch_size=1)
    step = private_gradients(
        optimizer,
        model.trainable_variables,
        [tf.TensorSpec([None, 8])],
        lambda x: 9 * model(x, training=True)[:, 0] ** 2,
    )
    sizes = [np.linalg.norm(step(np.ones([1, 8], np.float32))) for _ in range(100)]
    assert max(sizes) <= 0.5 * SLACK
    assert max(sizes) > 0.49
