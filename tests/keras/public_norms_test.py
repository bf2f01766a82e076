"""Gradient norms of public data: their values, and when they are measured."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import (
    DPSGD,
    DPAdam,
    DPRecorder,
    L,
    flat,
    gradients_one_at_a_time,
    mostly_slow,
    some_data,
)
from tests.stack import MEAN, names_of
from tfdpclip.accounting import PrivacyMismatchError
from tfdpclip.clipping import FixedClip, LayerwiseClip, PublicNormClip, ScaledClip
from tfdpclip.keras import (
    PrivacyBudget,
    PublicBatchStatistics,
    PublicGradientNorms,
    public_gradient_norms,
)
from tfdpclip.sampling import Poisson, RandomAllocation, ShuffledEpochs

pytestmark = pytest.mark.unchecked

PUBLIC = some_data(12, 3, seed=8)
PRIVATE = some_data(24, 3, seed=9)
schedules = tf.keras.optimizers.schedules


def dense(optimizer=None, **options):
    tf.keras.utils.set_random_seed(2)
    layers = [tf.keras.Input((3,)), L.Dense(4, "tanh", name="one")]
    model = tf.keras.Sequential([*layers, L.Dense(1, name="two")])
    model.compile(optimizer or "sgd", "mse", **options)
    return model


def private(clip, k=1, z=1.0, rate=0.1, kind=DPSGD):
    return kind(
        rate,
        clip=clip,
        noise_multiplier=z,
        expected_batch_size=4 * k,
        accumulation_steps=k,
    )


def by_hand(model, x, y, training=False):
    """Mean per-example norms of the layers "one" and "two"."""

    def loss_of(i):
        predicted = model(x[i : i + 1], training=training)
        return tf.reduce_mean((predicted - y[i : i + 1]) ** 2)

    found = gradients_one_at_a_time(loss_of, model.trainable_variables, len(x))
    sizes = [v.shape.num_elements() for v in model.trainable_variables]
    parts = np.split(found, np.cumsum(sizes)[:-1], axis=1)
    names = {}
    for variable, part in zip(names_of(model.trainable_variables), parts, strict=True):
        layer = variable.rpartition("/")[0]
        names[layer] = names.get(layer, 0) + np.sum(part**2, axis=1)
    return {name: np.mean(np.sqrt(square)) for name, square in names.items()}


@pytest.mark.parametrize("batch_size", [5, 64])
@pytest.mark.parametrize("reduction", [MEAN, "none", "sum"])
@pytest.mark.slow
def test_the_norms_are_means_of_per_example_norms(reduction, batch_size):
    """Batches of 5, 5 and 2: every example counts once."""
    model = dense()
    model.compile("sgd", tf.keras.losses.MeanSquaredError(reduction=reduction))
    found = public_gradient_norms(model, PUBLIC, batch_size)
    assert list(found) == ["one", "two"]
    expected = by_hand(model, *PUBLIC)
    if reduction == "sum":
        # Example i's loss is B times its share of the loss that is given.
        assert found["one"] / found["two"] == pytest.approx(
            expected["one"] / expected["two"], rel=0.2
        )
    else:
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_data_set_gives_the_same_norms_and_padding_none():
    model = dense()
    expected = public_gradient_norms(model, PUBLIC)
    data = tf.data.Dataset.from_tensor_slices(PUBLIC).batch(5)
    assert public_gradient_norms(model, data) == pytest.approx(expected, rel=1e-5)
    x, y = (np.concatenate([part, part[:4]]) for part in PUBLIC)
    weight = np.array([1.0] * 12 + [0.0] * 4, np.float32)
    padded = public_gradient_norms(model, (x, y, weight))
    assert padded == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_norms_leave_weights_metrics_and_optimizer_alone():
    model = dense(private(1.0), metrics=["mae"])
    model.fit(*PRIVATE, batch_size=4, verbose=0)
    before = [v.numpy() for v in (*model.weights, *model.optimizer.variables)]
    metrics = [v.numpy() for m in model.metrics for v in m.variables]
    assert metrics
    public_gradient_norms(model, PUBLIC)
    after = [v.numpy() for v in (*model.weights, *model.optimizer.variables)]
    tf.nest.map_structure(np.testing.assert_array_equal, before, after)
    found = [v.numpy() for m in model.metrics for v in m.variables]
    tf.nest.map_structure(np.testing.assert_array_equal, metrics, found)


@pytest.mark.slow
def test_norms_are_taken_without_dropout_and_leave_batch_statistics_alone():
    tf.keras.utils.set_random_seed(2)
    layers = [
        tf.keras.Input((3,)),
        L.Dense(4, name="one"),
        L.BatchNormalization(name="bn"),
        L.Dropout(0.9),
        L.Dense(1, name="two"),
    ]
    model = tf.keras.Sequential(layers)
    model.compile("sgd", "mse")
    norm = model.get_layer("bn")
    norm.moving_mean.assign([1.0, 2.0, 3.0, 4.0])
    found = public_gradient_norms(model, PUBLIC)
    assert found == pytest.approx(by_hand(model, *PUBLIC), rel=1e-4)
    np.testing.assert_array_equal(norm.moving_mean, [1, 2, 3, 4])


def test_a_model_that_is_not_compiled_or_diverged_is_refused():
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(1)])
    with pytest.raises(ValueError, match="call model.compile first"):
        public_gradient_norms(model, PUBLIC)
    model.compile("sgd", "mse")
    x, y = PUBLIC
    with pytest.raises(ValueError, match="not finite"):
        public_gradient_norms(model, (np.full_like(x, math.nan), y))
    with pytest.raises(ValueError, match="no examples"):
        public_gradient_norms(model, (x[:0], y[:0]))
    for data in (None, "x", 3):
        with pytest.raises(ValueError, match="data must be arrays"):
            public_gradient_norms(model, data)


class Watch(tf.keras.callbacks.Callback):
    """The clip norms in use at the beginning of every batch."""

    def __init__(self):
        super().__init__()
        self.seen, self.weights = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(dict(self.model.optimizer.clip_norms))
        self.weights.append(self.model.get_weights())


RULES = {
    "public": lambda: PublicNormClip(2.0),
    "public_joint": lambda: PublicNormClip(2.0, allocation="joint"),
    "own": lambda: PublicNormClip(None),
    "scaled": lambda: ScaledClip(norm=2.0),
}


def expected_clips(rule, e):
    largest = max(e.values())
    if rule == "own":
        return e
    return {name: 2.0 * value / largest for name, value in e.items()}


@pytest.mark.parametrize("jit", mostly_slow([False], [False, True]))
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.slow
def test_every_epoch_clips_by_the_norms_at_its_start(rule, k, jit):
    model = dense(private(RULES[rule](), k), jit_compile=jit)
    watch = Watch()
    callback = PublicGradientNorms(PUBLIC)
    model.fit(*PRIVATE, batch_size=4, epochs=3, verbose=0, callbacks=[callback, watch])
    assert len(watch.seen) == 18
    for epoch in range(3):
        model.set_weights(watch.weights[6 * epoch])
        expected = expected_clips(rule, by_hand(model, *PUBLIC))
        for seen in watch.seen[6 * epoch : 6 * epoch + 6]:
            assert seen == pytest.approx(expected, rel=1e-4)
    assert watch.seen[0] != watch.seen[6] != watch.seen[12]
    assert set(callback.norms) == {"one", "two"}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rule", RULES)
def test_training_without_public_norms_is_refused(rule):
    model = dense(private(RULES[rule]()))
    before = flat(model.trainable_variables)
    with pytest.raises(ValueError, match="PublicGradientNorms.*set_public_norms"):
        model.fit(*PRIVATE, verbose=0)
    np.testing.assert_array_equal(before, flat(model.trainable_variables))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.slow
def test_norms_set_by_hand_are_used(rule):
    model = dense(private(RULES[rule]()))
    model.optimizer.build(model.trainable_variables)
    model.optimizer.set_public_norms({"two": 1.0, "one": 4.0})
    expected = expected_clips(rule, {"one": 4.0, "two": 1.0})
    assert model.optimizer.clip_norms == pytest.approx(expected)
    model.optimizer.set_public_norms({"one": 1.0, "two": 4.0})
    expected = expected_clips(rule, {"one": 1.0, "two": 4.0})
    assert model.optimizer.clip_norms == pytest.approx(expected)
    model.fit(*PRIVATE, verbose=0)
    for bad, text in (
        ({"one": 1.0}, "norms says nothing about group 'two'"),
        ([1.0, 4.0], "norms must be one number per group, by name"),
        ({"one": 1.0, "two": math.nan}, r"norms\['two'\]"),
        ({"one": 1.0, "two": math.inf}, r"norms\['two'\]"),
        ({"one": 1.0, "two": -1.0}, r"norms\['two'\]"),
    ):
        with pytest.raises(ValueError, match=text):
            model.optimizer.set_public_norms(bad)
    # The refused norms changed nothing.
    assert model.optimizer.clip_norms == pytest.approx(expected)


def test_the_callback_refuses_optimizers_that_take_no_norms():
    for optimizer, text in (
        ("sgd", "needs an optimizer of dpc.keras"),
        (private(1.0), "takes nothing from public data"),
        (private(LayerwiseClip(1.0)), "takes nothing from public data"),
    ):
        with pytest.raises(ValueError, match=text):
            dense(optimizer).fit(
                *PRIVATE, verbose=0, callbacks=[PublicGradientNorms(PUBLIC)]
            )


GIVEN = {"one": 1.0, "two": 2.0}


@pytest.mark.parametrize(
    "rule",
    [PublicNormClip(norms=GIVEN), ScaledClip(GIVEN)],
    ids=["public", "scaled"],
)
def test_the_callback_does_not_replace_norms_that_were_given(rule):
    model = dense(private(rule))
    callbacks = [PublicGradientNorms(PUBLIC)]
    with pytest.raises(ValueError, match="norms|multipliers"):
        model.fit(*PRIVATE, verbose=0, callbacks=callbacks)


def test_the_callbacks_data_are_checked():
    with pytest.raises(ValueError, match="data must be arrays"):
        PublicGradientNorms(None)


def test_public_norms_that_diverge_stop_the_run():
    model = dense(private(PublicNormClip(1.0)))
    x, y = PUBLIC
    with pytest.raises(ValueError, match="public data are not finite"):
        model.fit(
            *PRIVATE,
            verbose=0,
            callbacks=[PublicGradientNorms((x * math.inf, y))],
        )


@pytest.mark.slow
def test_a_layer_without_public_gradient_is_still_trained():
    """A bias before a normalisation has gradient 0; its clip is floored."""
    tf.keras.utils.set_random_seed(1)
    layers = [
        tf.keras.Input((3,)),
        L.Dense(4, name="one"),
        L.LayerNormalization(name="norm"),
        L.Dense(1, name="two"),
    ]
    model = tf.keras.Sequential(layers)
    optimizer = private(PublicNormClip(1.0, groups="variable"), kind=DPRecorder)
    model.compile(optimizer, "mse")
    norms = PublicGradientNorms(PUBLIC)
    model.fit(*PRIVATE, verbose=0, batch_size=4, callbacks=[norms])
    clips = np.array(list(optimizer.clip_norms.values()))
    assert clips.max() == pytest.approx(1.0) and clips.min() >= 1e-3 * 0.999
    assert all(np.all(seen.numpy() != 0) for seen in optimizer.seen)


@pytest.mark.slow
def test_norms_are_in_the_groups_that_are_clipped():
    model = dense(private(PublicNormClip(1.0, groups=["bias", "kernel"])))
    callback = PublicGradientNorms(PUBLIC)
    model.fit(*PRIVATE, batch_size=24, verbose=0, callbacks=[callback])
    assert set(callback.norms) == {"bias", "kernel"}


@pytest.mark.slow
def test_frozen_layers_have_no_norm():
    model = dense(private(PublicNormClip(1.0)))
    model.layers[0].trainable = False
    model.compile(model.optimizer, "mse")
    callback = PublicGradientNorms(PUBLIC)
    model.fit(*PRIVATE, verbose=0, callbacks=[callback])
    assert set(callback.norms) == {"two"}


@pytest.mark.slow
def test_the_decay_of_the_master_norm_and_the_refreshed_norms_go_together():
    """The paper's C 0.9^epoch, with norms of every epoch."""
    decay = schedules.ExponentialDecay(2.0, 6, 0.9, staircase=True)
    model = dense(private(PublicNormClip(decay)))
    watch = Watch()
    callbacks = [PublicGradientNorms(PUBLIC), watch]
    model.fit(*PRIVATE, batch_size=4, epochs=3, verbose=0, callbacks=callbacks)
    largest = [max(seen.values()) for seen in watch.seen]
    expected = [2.0 * 0.9**epoch for epoch in range(3) for _ in range(6)]
    np.testing.assert_allclose(largest, expected, rtol=1e-5)


@pytest.mark.slow
def test_a_subclassed_model_is_built_from_the_public_data():
    class Model(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.two = L.Dense(4), L.Dense(1)

        def call(self, x):
            return self.two(self.one(x))

    model = Model()
    model.compile(private(ScaledClip(norm=1.0)), "mse")
    callback = PublicGradientNorms(PUBLIC)
    model.fit(*PRIVATE, verbose=0, callbacks=[callback])
    assert len(callback.norms) == 2


@pytest.mark.slow
def test_public_norms_come_back_from_a_file_and_no_callback_is_needed(tmp_path):
    model = dense(private(PublicNormClip(2.0)))
    callbacks = [PublicGradientNorms(PUBLIC)]
    model.fit(*PRIVATE, verbose=0, callbacks=callbacks)
    model.save(str(tmp_path / "m.keras"))
    loaded = tf.keras.models.load_model(str(tmp_path / "m.keras"))
    assert loaded.optimizer.clip_norms == model.optimizer.clip_norms
    loaded.fit(*PRIVATE, verbose=0)


@pytest.mark.slow
def test_batch_clipping_by_public_norms_with_batch_normalisation():
    """The paper's own combination; statistics first, then norms."""
    tf.keras.utils.set_random_seed(1)
    layers = [
        tf.keras.Input((3,)),
        L.Dense(4, name="one"),
        L.BatchNormalization(name="bn"),
        L.Dense(1, name="two"),
    ]
    model = tf.keras.Sequential(layers)
    rule = PublicNormClip(0.5)
    optimizer = DPRecorder(clip=rule, noise_multiplier=0, unit="batch")
    model.compile(optimizer, "mse")
    x, y = PRIVATE
    model.fit(
        x,
        y + 100,
        batch_size=8,
        verbose=0,
        callbacks=[PublicBatchStatistics(PUBLIC[0]), PublicGradientNorms(PUBLIC)],
    )
    clips = optimizer.clip_norms
    parts = [optimizer.seen[:2], optimizer.seen[2:4], optimizer.seen[4:]]
    for name, part in zip(("one", "bn", "two"), parts, strict=True):
        assert np.linalg.norm(flat(part)) <= clips[name] * (1 + 1e-5)


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.data / 16.0).astype("float32"), data.target


@pytest.mark.parametrize(
    "rule",
    [
        LayerwiseClip(FixedClip(0.5)),
        PublicNormClip(0.5),
        ScaledClip(norm=1.0),
        LayerwiseClip(),
    ],
    ids=["layerwise", "public", "scaled", "layerwise_quantile"],
)
@pytest.mark.slow
def test_layerwise_clipping_learns_digits(rule):
    """Chance is 10%; ten seconds at most. Noise: z = 1 for 128 of 1200 examples."""
    x, y = digits()
    tf.keras.utils.set_random_seed(0)
    layers = [tf.keras.Input((64,)), L.Dense(32, "relu"), L.Dense(10)]
    model = tf.keras.Sequential(layers)
    optimizer = DPAdam(0.01, clip=rule, noise_multiplier=1.0, expected_batch_size=128)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    callbacks = []
    if rule.takes_public_norms:
        callbacks = [PublicGradientNorms((x[:300], y[:300]))]
    model.fit(
        x[300:1500],
        y[300:1500],
        batch_size=128,
        epochs=12,
        verbose=0,
        callbacks=callbacks,
    )
    _, accuracy = model.evaluate(x[1500:], y[1500:], verbose=0)
    assert accuracy > 0.6


class TestDataAreClaimedToBePublic:
    """A budget refuses private arrays, and the statement has every claim."""

    def _fit(self, data, public, clip=None, scheme=None, **options):
        optimizer = DPSGD(
            0.1,
            clip=clip or PublicNormClip(0.5),
            noise_multiplier=1.0,
            expected_batch_size=len(data[0]) / 2,
            **options,
        )
        model, batches = dense(optimizer), (scheme or Poisson(0.5)).batches(data)
        budget = PrivacyBudget(math.inf, 1e-5, batches)
        model.fit(batches, verbose=0, callbacks=[budget, *public])
        return str(budget.statement())

    def test_data_of_the_private_batches_are_refused(self):
        x, y = map(np.asarray, PRIVATE)
        for public in ((x, y), (x[:8], y[:8]), (x[::2], y[::2].copy())):
            with pytest.raises(PrivacyMismatchError, match="in the private batches"):
                self._fit((x, y), [PublicGradientNorms(public)])

    @pytest.mark.parametrize("scheme", [RandomAllocation(2), ShuffledEpochs(12, 24)])
    def test_so_are_they_where_the_batches_hold_copies(self, scheme):
        x, y = map(np.asarray, PRIVATE)
        for data in ((x, y), (x[:], y[:])):
            with pytest.raises(PrivacyMismatchError, match="in the private batches"):
                self._fit(data, [PublicGradientNorms((x[:8], y[:8]))], scheme=scheme)

    def test_another_part_of_the_same_arrays_may_be_public(self):
        x, y = map(np.asarray, PRIVATE)
        found = self._fit((x[8:], y[8:]), [PublicGradientNorms((x[:8], y[:8]))])
        assert "the data of PublicGradientNorms are public" in found
        assert "the numbers that PublicNormClip takes for public" in found

    def test_numbers_and_variables_are_named(self):
        clip = ScaledClip(GIVEN, 0.5)
        found = self._fit(PRIVATE, [], clip, public_variables=["teacher"])
        assert "the numbers that ScaledClip takes for public" in found
        assert "the public_variables 'teacher' hold no private data" in found
