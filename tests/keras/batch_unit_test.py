"""unit="batch": the gradient of a physical batch is clipped as a whole.

An example can move the clipped gradient from any point of the ball to any other, so the
sensitivity is twice the rule's.
"""

import json
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import (
    DPSGD,
    DPAdam,
    DPRecorder,
    L,
    Scatter,
    flat,
    mostly_slow,
    some_data,
)
from tests.stack import MEAN, keras2_only
from tfdpclip.clipping import (
    AutomaticClip,
    FixedClip,
    LayerwiseClip,
    PublicNormClip,
    QuantileClip,
    ScaledClip,
)
from tfdpclip.keras import PublicBatchStatistics

SLACK = 1 + 1e-4
C = 0.5

RULES = {
    "fixed": FixedClip(C),
    "normalize": FixedClip(C, normalize=True),
    "quantile": QuantileClip(0.5, C, count_stddev=0.0),
    "automatic": AutomaticClip(),
    "layerwise": LayerwiseClip(C),
    "layerwise_quantile": LayerwiseClip(QuantileClip(0.5, C, count_stddev=0.0)),
    "public": PublicNormClip(C, norms={"one": 3.0, "bn": 1.0, "two": 0.1}),
    "scaled": ScaledClip({"one": 2.0, "bn": 1.0, "two": 9.0}, C),
}


def mixing_model():
    """Batch normalisation, and a layer that adds the neighbour's row."""
    tf.keras.utils.set_random_seed(2)
    return tf.keras.Sequential(
        [
            tf.keras.Input((3,)),
            L.Dense(4, name="one"),
            L.BatchNormalization(name="bn"),
            Scatter(),
            L.Dense(1, name="two"),
        ]
    )


class Steps:
    """Logical steps without noise; gives the released sum over the noise scales."""

    def __init__(self, rule, k=1, jit=False, make=mixing_model, public=None):
        self.model = make()
        self.k = k
        self.optimizer = DPRecorder(
            clip=rule, noise_multiplier=0, unit="batch", accumulation_steps=k
        )
        self.variables = self.model.trainable_variables
        self.optimizer.build(self.variables)
        self.state = [v.numpy() for v in self.optimizer._clip_state]
        if public is None:
            public = some_data(8, 3)[0]
        PublicBatchStatistics(public).attach(self.model)
        loss = tf.keras.losses.MeanSquaredError()

        @tf.function(
            input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])],
            jit_compile=jit,
        )
        def step(x, y):
            value = loss(y, self.model(x, training=True))
            self.optimizer.minimize(value, self.variables)

        self._step = step

    def __call__(self, batches):
        for variable, value in zip(self.optimizer._clip_state, self.state, strict=True):
            variable.assign(value)
        rule, state = self.optimizer.clip, self.optimizer.clip_state
        scales = np.asarray(rule.noise_scales(state))
        groups = rule.assignment or [0] * len(self.variables)
        scales = np.broadcast_to(scales, [max(groups) + 1])
        for x, y in batches:
            self._step(x, y)
        parts = zip(self.optimizer.seen, groups, strict=True)
        return self.k * np.concatenate(
            [p.numpy().ravel() / scales[g] for p, g in parts]
        )


def neighbours(kind):
    """Two batches that differ in their last example, and a batch without it."""
    x, y = some_data(6, 3, seed=4)
    other_x, other_y = x.copy(), y.copy()
    if kind == "opposite":
        y[-1], other_y[-1] = 1e4, -1e4
    elif kind == "nan":
        other_x[-1] = math.nan
    elif kind == "inf":
        other_y[-1] = math.inf
    else:
        other_x[-1], other_y[-1] = 1e3, 1e3
    return (x, y), (other_x, other_y), (x[:-1], y[:-1])


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(
    "rule", mostly_slow(["fixed", "layerwise_quantile", "scaled"], RULES)
)
@pytest.mark.slow
def test_one_example_moves_a_step_by_at_most_twice_the_noise_scale(rule, k):
    steps = Steps(RULES[rule], k)
    rest = [some_data(5, 3, seed=i) for i in range(1, k)]
    worst = 0.0
    for kind in ("opposite", "large", "nan", "inf"):
        released = [steps([batch, *rest]) for batch in neighbours(kind)]
        for a, b in ((0, 1), (0, 2), (1, 2)):
            moved = np.linalg.norm(released[a] - released[b])
            assert np.isfinite(moved) and moved <= 2 * SLACK, kind
            worst = max(worst, moved)
        if k == 1:
            assert np.linalg.norm(released[0]) <= SLACK
    # The factor 2 is needed: adding an example moves the sum by well over 1.
    assert worst > 1.2


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_the_sensitivity_holds_compiled_by_xla(jit):
    steps = Steps(RULES["layerwise"], 1, jit)
    for kind in ("opposite", "nan"):
        first, second, _ = neighbours(kind)
        moved = np.linalg.norm(steps([first]) - steps([second]))
        assert moved <= 2 * SLACK


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rule", ["fixed", "layerwise", "automatic"])
def test_a_batch_with_an_example_that_is_not_a_number_is_dropped(rule):
    steps = Steps(RULES[rule], 1)
    _, bad, _ = neighbours("nan")
    assert np.all(steps([bad]) == 0)
    good, _, _ = neighbours("large")
    assert np.any(steps([good]) != 0)


def plain_gradient(model, x, y, loss):
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True))
    return tape.gradient(value, model.trainable_variables)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("reduction", [MEAN, "none", "sum"])
@pytest.mark.thinned(3)
def test_a_huge_clip_without_noise_is_plain_training(reduction, k):
    """The mean of the plain gradients of the groups, which is also the divisor."""
    tf.keras.utils.set_random_seed(1)
    layers = [tf.keras.Input((3,)), L.Dense(4, "tanh"), L.Dense(2)]
    model = tf.keras.Sequential(layers)
    loss = tf.keras.losses.MeanSquaredError(reduction=reduction)
    batches = [some_data(n, 3, seed=n, outputs=2) for n in (5, 8)[:k]]

    def scalar(y, p):
        return tf.reduce_mean(loss(y, p))

    expected = sum(flat(plain_gradient(model, *b, scalar)) for b in batches) / k
    optimizer = DPRecorder(
        clip=1e9, noise_multiplier=0, unit="batch", accumulation_steps=k
    )
    model.compile(optimizer, loss)
    for batch in batches:
        model.train_on_batch(*batch)
    np.testing.assert_allclose(flat(optimizer.seen), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_fit_is_the_base_optimizers_own_where_nothing_is_clipped():
    results = []
    for optimizer in (
        tf.keras.optimizers.Adam(0.01),
        DPAdam(0.01, clip=1e9, noise_multiplier=0, unit="batch"),
    ):
        tf.keras.utils.set_random_seed(1)
        layers = [tf.keras.Input((3,)), L.Dense(4, "tanh"), L.Dense(2)]
        model = tf.keras.Sequential(layers)
        model.compile(optimizer, "mse")
        model.fit(*some_data(20, 3, outputs=2), batch_size=5, epochs=3, verbose=0)
        results.append(flat(model.trainable_variables))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-6)


def test_batch_and_group_clipping_of_known_gradients():
    """Gradients (3, 4), (-3, 4), (0, 2), C = 1: by hand."""
    gradients = np.array([[3, 4], [-3, 4], [0, 2]], np.float32)
    expected = {
        # The mean is (0, 10/3).
        ((0, 1, 2),): [0, 1],
        # The mean of the first two is (0, 4), and (0, 2) is alone.
        ((0, 1), (2,)): [0, 2],
        ((0,), (1,), (2,)): [0, 2.6],
    }
    for groups, total in expected.items():
        w = tf.Variable([0.0, 0.0])
        optimizer = DPRecorder(
            clip=1.0, noise_multiplier=0, unit="batch", accumulation_steps=len(groups)
        )

        @tf.function(input_signature=[tf.TensorSpec([None, 2])])
        def step(x, w=w, optimizer=optimizer):
            optimizer.minimize(tf.reduce_mean(tf.linalg.matvec(x, w)), [w])

        for group in groups:
            step(gradients[list(group)])
        found = optimizer.seen[0].numpy() * len(groups)
        np.testing.assert_allclose(found, total, atol=1e-6)


@pytest.mark.parametrize("z", [1.3])
def test_the_noise_is_z_times_the_clip_over_the_number_of_groups(z):
    """Six standard errors: a false alarm in 2e-9."""
    w = tf.Variable(tf.zeros([20_000]))
    optimizer = DPRecorder(
        clip=C, noise_multiplier=z, unit="batch", accumulation_steps=4
    )

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(x):
        optimizer.minimize(tf.reduce_sum(x) * w[0], [w])

    for count in (3, 0, 5, 1):
        step(tf.zeros([count]))
    noise = optimizer.seen[0].numpy()
    assert np.std(noise) == pytest.approx(z * C / 4, rel=6 / math.sqrt(40_000))
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize("static", [False, True])
def test_an_empty_batch_is_a_step_of_noise(static):
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(2)])
    optimizer = DPSGD(1.0, clip=C, noise_multiplier=1.0, unit="batch")
    loss = tf.keras.losses.MeanSquaredError()
    size = 0 if static else None

    @tf.function(input_signature=[tf.TensorSpec([size, 3]), tf.TensorSpec([size, 2])])
    def step(x, y):
        optimizer.minimize(loss(y, model(x)), model.trainable_variables)

    before = flat(model.trainable_variables)
    step(tf.zeros([0, 3]), tf.zeros([0, 2]))
    after = flat(model.trainable_variables)
    assert np.all(np.isfinite(after)) and np.all(after != before)


def test_padding_alone_is_a_step_of_noise():
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(2)])
    optimizer = DPRecorder(clip=C, noise_multiplier=0, unit="batch")
    model.compile(optimizer, "mse")
    x, y = some_data(4, 3, outputs=2)
    model.train_on_batch(x, y, sample_weight=np.zeros(4, np.float32))
    assert np.all(flat(optimizer.seen) == 0)


def test_a_quantile_is_of_the_groups_and_needs_a_count_stddev():
    with pytest.raises(ValueError, match="count_stddev"):
        DPSGD(clip=QuantileClip(), noise_multiplier=1.0, unit="batch")
    rule = QuantileClip(0.5, 1.0, 1.0, count_stddev=0.0)
    optimizer = DPRecorder(
        clip=rule, noise_multiplier=0, unit="batch", accumulation_steps=4
    )
    w = tf.Variable([0.0])

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(x):
        optimizer.minimize(tf.reduce_mean(x) * w[0], [w])

    for norm in (0.5, 0.1, 0.2, 3.0):
        step(tf.constant([norm, norm]))
    # Three of four groups are within: the fraction is 3/4, whatever their sizes.
    assert float(optimizer.clip_norm) == pytest.approx(math.exp(-0.25), rel=1e-5)


def test_embeddings_shared_variables_and_float64_are_clipped_whole():
    class Tied(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.table = self.add_weight(
                name="table", shape=(7, 3), initializer="normal"
            )
            self.dense = L.Dense(3, dtype="float64")

        def call(self, ids):
            hidden = tf.cast(self.dense(tf.gather(self.table, ids)), tf.float32)
            logits = tf.einsum("btd,vd->btv", hidden, self.table)
            return tf.reduce_mean(logits, axis=[1, 2])[:, tf.newaxis]

    model = Tied()
    optimizer = DPRecorder(clip=C, noise_multiplier=0, unit="batch")
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).integers(7, size=(6, 4))
    model.train_on_batch(x, np.full([6, 1], 1e4, np.float32))
    assert np.linalg.norm(flat(optimizer.seen)) == pytest.approx(C, rel=1e-5)


@keras2_only("run_eagerly=True is refused, see held_loss_test.py")
def test_eager_steps_are_refused():
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(1)])
    optimizer = DPSGD(0.1, clip=C, noise_multiplier=1.0, unit="batch")
    model.compile(optimizer, "mse", run_eagerly=True)
    with pytest.raises(ValueError, match='unit="batch" needs a graph'):
        model.fit(*some_data(8, 3), verbose=0)


# Settings.


@pytest.mark.parametrize("unit", ["group", "batches", None, 1])
def test_a_unit_that_is_none_is_refused(unit):
    with pytest.raises(ValueError, match="unit must be one of example, person, batch"):
        DPSGD(clip=C, noise_multiplier=1.0, unit=unit)


def test_the_unit_is_known_and_saved():
    optimizer = DPSGD(clip=C, noise_multiplier=1.0, unit="batch")
    assert (optimizer.unit, optimizer.expected_batch_size) == ("batch", None)
    groups = DPSGD(clip=C, noise_multiplier=1.0, unit="batch", accumulation_steps=3)
    assert groups.unit == "group"
    for one in (optimizer, groups):
        again = DPSGD.from_config(
            json.loads(json.dumps(one.get_config(), default=float))
        )
        assert again.unit == one.unit
        assert again.get_config() == one.get_config()


# Learning.


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    x = (data.images / 16.0).astype("float32")[..., np.newaxis]
    return x, data.target


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.slow
def test_batch_clipping_learns_digits_with_batch_normalisation(k):
    """Chance is 10%; the noise on a mean of 64 examples is that of z = 0.2."""
    x, y = digits()
    public, private = (x[:300], y[:300]), (x[300:1500], y[300:1500])
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            L.Conv2D(16, 3, strides=2, use_bias=False),
            L.BatchNormalization(),
            L.ReLU(),
            L.Flatten(),
            L.Dense(10),
        ]
    )
    optimizer = DPAdam(
        0.01, clip=0.3, noise_multiplier=0.2, unit="batch", accumulation_steps=k
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(
        *private,
        batch_size=64,
        epochs=6 * k,
        verbose=0,
        callbacks=[PublicBatchStatistics(public)],
    )
    _, accuracy = model.evaluate(x[1500:], y[1500:], verbose=0)
    assert accuracy > 0.6
