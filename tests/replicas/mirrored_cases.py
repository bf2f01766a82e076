"""Training on several replicas of one process. Run by `mirrored_test.py`.

TensorFlow has as many CPUs as replicas here. A second strategy in the same process, or
a different number of replicas, collides with the first, so REPLICAS sets the number
once.
"""

import functools
import gc
import os

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.covariance import assert_covariance
from tests.stack import KERAS_3, fit_takes_no_draw_to_build
from tfdpclip._notes import NOTES
from tfdpclip._variables import all_unwrapped
from tfdpclip.accounting.phases import PrivacyMismatchError
from tfdpclip.keras.watching.step_history import history_of

REPLICAS = int(os.environ["REPLICAS"])
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * REPLICAS,
)
# A mirrored strategy of one device need not refuse these cases, or cannot show them.
several_only = pytest.mark.skipif(REPLICAS == 1, reason="one replica")
L = tf.keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 6)).astype(np.float32)
Y = RNG.integers(0, 3, 90)
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ONE = tf.distribute.get_strategy()


@pytest.fixture(scope="module", params=["mirrored", *["one device"] * (REPLICAS == 1)])
def mirrored(request):
    if request.param == "one device":
        return tf.distribute.OneDeviceStrategy("CPU:0")
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])


def dense(**options):
    return tf.keras.Sequential(
        [
            tf.keras.Input((6,)),
            L.Dense(8, activation="tanh", kernel_regularizer="l2", **options),
            L.Dense(3),
        ]
    )


def private(kind=dpc.keras.DPSGD, *, rate=0.5, z=0.0, size=18.0, **options):
    options = {"clip": 0.3, "check_gradients": "always"} | options
    return kind(rate, noise_multiplier=z, expected_batch_size=size, **options)


def compiled(strategy, make=dense, loss=LOSS, optimizer=private, **options):
    tf.keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make()
        model.compile(optimizer(), loss, **options)
    return model


def fitted(
    strategy, data=(X, Y), accumulation=1, epochs=1, callbacks=(), drawn=None, **options
):
    """A model trained on the same draws, whatever the strategy."""
    model = compiled(strategy, **options)
    batches = dpc.sampling.Poisson(0.2).batches(
        data, seed=3, accumulation_steps=accumulation, **(drawn or {})
    )
    steps = batches.steps_per_epoch * accumulation
    several = strategy is not ONE
    given = batches.distribute(strategy) if several else batches.repeat()
    few = tf.nest.map_structure(lambda column: column[:2], data)
    fit_takes_no_draw_to_build(model, few)
    model.fit(
        given,
        steps_per_epoch=steps,
        epochs=epochs,
        verbose=0,
        callbacks=[make(batches) for make in callbacks],
    )
    return model


def assert_alike(model, other, tolerance=1e-6):
    """The same weights and clip; and every replica has the same to the last bit."""
    assert model.optimizer.iterations.numpy() == other.optimizer.iterations.numpy() > 0
    for got, expected in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)
    assert_same_everywhere([*model.trainable_variables, *model.optimizer.variables])
    for got, expected in zip(
        tf.nest.flatten(model.optimizer.clip_state),
        tf.nest.flatten(other.optimizer.clip_state),
        strict=True,
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def assert_same_everywhere(variables):
    several = 0
    for variable in all_unwrapped(variables):
        first, *rest = (
            part.numpy() for part in getattr(variable, "values", [variable])
        )
        several += bool(rest)
        for part in rest:
            assert part.tobytes() == first.tobytes(), variable.name
    assert several >= 4 or REPLICAS == 1


# The sum equals that of a single device.

CLIPS = {
    "fixed": lambda: 0.3,
    "quantile": lambda: dpc.QuantileClip(initial_norm=0.3),
    "normalized": lambda: dpc.FixedClip(0.3, normalize=True),
    "automatic": lambda: dpc.AutomaticClip(0.3),
    "layers": lambda: dpc.LayerwiseClip(dpc.QuantileClip(initial_norm=0.3)),
}
MODES = {
    "plain": {},
    "accumulation": {"accumulation": 3},
    "executions": {"steps_per_execution": 2, "epochs": 2},
}


# Keras 3 itself fails with several steps in one execution on several replicas.
@pytest.mark.parametrize("mode", list(MODES)[: 2 if KERAS_3 else None])
@pytest.mark.parametrize("clip", CLIPS)
def test_replicas_release_what_one_device_does(mirrored, clip, mode):
    options = dict(MODES[mode])
    count = options.get("accumulation", 1)

    def optimizer():
        return private(
            dpc.keras.DPAdam,
            rate=0.01,
            clip=CLIPS[clip](),
            accumulation_steps=count,
            use_ema=True,
        )

    models = [fitted(s, optimizer=optimizer, **options) for s in (mirrored, ONE)]
    # Adam divides by numbers that may be small.
    assert_alike(*models, tolerance=2e-5)


@pytest.mark.parametrize(
    "drawn, unit, size",
    [
        ({"views": 3}, "example", 18.0),
        ({"people": np.arange(90) % 31, "per_person": 3}, "person", 6.2),
    ],
    ids=["views", "people"],
)
def test_records_of_several_rows_stay_whole(mirrored, drawn, unit, size):
    def optimizer():
        return private(unit=unit, size=size, rows_per_record=3)

    assert_alike(
        *(fitted(s, drawn=drawn, optimizer=optimizer) for s in (mirrored, ONE))
    )


def test_norms_of_public_data_reach_every_replica(mirrored):
    def trained(strategy):
        def optimizer():
            return private(clip=dpc.PublicNormClip(0.3))

        model = compiled(strategy, optimizer=optimizer)
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        fit_takes_no_draw_to_build(model, (X[:2], Y[:2]))
        batches = dpc.sampling.Poisson(0.2).batches((X, Y), seed=3)
        several = strategy is not ONE
        model.fit(
            batches.distribute(strategy) if several else batches.repeat(),
            steps_per_epoch=5,
            verbose=0,
            callbacks=[Public()],
        )
        return model

    assert_alike(trained(mirrored), trained(ONE))


def test_norms_are_measured_as_on_one_device(mirrored):
    """By the callback, by the meter, and by the function."""

    def trained(strategy):
        public = dpc.keras.PublicGradientNorms((X[:20], Y[:20]))
        model = fitted(
            strategy,
            optimizer=lambda: private(clip=dpc.PublicNormClip(0.3)),
            callbacks=[lambda batches: public],
            epochs=2,
            metrics=["accuracy"],
        )
        found = [
            list(public.norms.values()),
            list(dpc.keras.public_gradient_norms(model, (X, Y)).values()),
            dpc.diagnostics.GradientMeter(model).norms((X, Y)).norms,
            dpc.diagnostics.GradientMeter(model).gradients((X, Y)),
        ]
        return model, found

    (model, found), (other, expected) = trained(mirrored), trained(ONE)
    assert_alike(model, other)
    assert min(np.min(part) for part in expected[:3]) > 0
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def tagger():
    layers = [tf.keras.Input((4,), dtype="int32"), L.Embedding(9, 4), L.Dense(5)]
    return tf.keras.Sequential(layers)


@pytest.mark.parametrize(
    "weighted, loss", [(True, LOSS), (False, dpc.keras.PerExampleLoss(LOSS))]
)
def test_labels_for_each_token_reach_every_replica(mirrored, weighted, loss):
    tokens, labels = RNG.integers(0, 9, (90, 4)), RNG.integers(0, 5, (90, 4))
    weights = [(RNG.random((90, 4)) < 0.6).astype(np.float32)] * weighted
    options = {"data": (tokens, labels, *weights), "make": tagger, "loss": loss}
    # So far up that the scale of a gradient shows.
    options["optimizer"] = lambda: private(clip=100.0)
    assert_alike(fitted(mirrored, **options), fitted(ONE, **options))


def masked():
    return tf.keras.Sequential(
        [tf.keras.Input((5,)), L.Embedding(9, 4, mask_zero=True), L.LSTM(3), L.Dense(3)]
    )


def convolutional():
    return tf.keras.Sequential(
        [
            tf.keras.Input((6, 6, 1)),
            L.Conv2D(4, 3, padding="same"),
            L.GroupNormalization(2),
            L.ReLU(),
            L.Flatten(),
            L.Dense(3),
        ]
    )


NETWORKS = {
    "masked": (masked, RNG.integers(0, 9, (90, 5))),
    "convolutional": (
        convolutional,
        RNG.normal(size=(90, 6, 6, 1)).astype(np.float32),
    ),
    "bfloat16": (lambda: dense(dtype="mixed_bfloat16"), X),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_trained_as_on_one_device(mirrored, name):
    make, x = NETWORKS[name]
    models = [fitted(s, (x, Y), make=make) for s in (mirrored, ONE)]
    assert_alike(*models, tolerance=1e-3 if name == "bfloat16" else 1e-6)


def scaled_losses():
    """How loops of one's own scale a loss, over a global batch of 36."""
    vector = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction="none")
    average = tf.nn.compute_average_loss
    return {
        "vector": lambda y, p: vector(y, p),
        "average": lambda y, p: average(vector(y, p), global_batch_size=36),
        "average of what is there": lambda y, p: average(vector(y, p)),
        "mean over R": lambda y, p: tf.reduce_mean(vector(y, p)) / REPLICAS,
        "sum over B": lambda y, p: tf.reduce_sum(vector(y, p)) / 36,
    }


@pytest.mark.parametrize("name", scaled_losses())
def test_a_loop_of_ones_own_is_scaled_as_on_one_device(mirrored, name):
    scaled = scaled_losses()[name]
    # Of which no replica has as many as there are replicas: 1 / R is no mean then.
    x, y = X[:36], Y[:36]

    def trained(strategy, loss, parts):
        model = compiled(strategy, optimizer=lambda: private(size=36.0))

        def step(x, y):
            with tf.GradientTape() as tape:
                found = loss(y, model(x, training=True))
            model.optimizer.minimize(found, model.trainable_variables, tape=tape)

        run = tf.function(lambda *batch: strategy.run(step, args=batch))
        for _ in range(3):
            run(*parts)
        return model

    def part(array):
        return mirrored.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                array[context.replica_id_in_sync_group :: REPLICAS]
            )
        )

    model = trained(mirrored, scaled, (part(x), part(y)))
    vector = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction="none")
    other = trained(ONE, vector, (tf.constant(x), tf.constant(y)))
    assert_alike(model, other)


def step_of_a_loop(strategy, steps=1):
    """A model, and a function of an element for all replicas, with private steps."""
    model = compiled(strategy)
    vector = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction="none")

    def step(x, y, w):
        for _ in range(steps):
            losses = vector(y, model(x, training=True)) * w
            model.optimizer.minimize(losses, model.trainable_variables)

    return model, tf.function(lambda element: strategy.run(step, args=element))


def whole_draws(strategy, batches, taken):
    """Elements with whole draws for each replica, in ways of TensorFlow's guides."""
    if taken == "of a function":
        yield from strategy.distribute_datasets_from_function(lambda _: batches)
        return
    iterator = iter(batches)
    drawn = [next(iterator)] * REPLICAS
    if taken == "one draw each":
        drawn = [next(iterator) for _ in range(REPLICAS)]
    yield tuple(
        strategy.experimental_distribute_values_from_function(
            lambda context, part=part: tf.identity(
                drawn[context.replica_id_in_sync_group][part]
            )
        )
        for part in range(3)
    )


@several_only
@pytest.mark.parametrize("dealt_before", [False, True])
@pytest.mark.parametrize("taken", ["of a function", "one draw each", "one draw"])
def test_replicas_of_a_loop_with_whole_draws_are_refused(mirrored, taken, dealt_before):
    """A record in two of the draws would move the sum by two clip norms."""
    batches = dpc.sampling.Poisson(0.2).batches((X, Y)).repeat()
    element = next(iter(batches.distribute(mirrored)))
    model, step = step_of_a_loop(mirrored)
    if dealt_before:
        step(element)
    else:
        batches = dpc.sampling.Poisson(0.2).batches((X, Y)).repeat()
    before = model.get_weights()
    with pytest.raises(PrivacyMismatchError, match="not the replica's part of a draw"):
        step(next(iter(whole_draws(mirrored, batches, taken))))
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@several_only
def test_an_element_that_replicas_were_dealt_is_used_for_one_step(mirrored):
    gc.collect()  # Frees elements of earlier tests, which could be the step's.
    batches = dpc.sampling.Poisson(0.2).batches((X, Y))
    model, step = step_of_a_loop(mirrored)
    for number, element in enumerate(batches.distribute(mirrored)):
        step(element)
        with pytest.raises(PrivacyMismatchError, match="made of one draw"):
            step(element)
        if number == 2:
            break
    assert history_of(model.optimizer).releases == 3
    everyone = dpc.sampling.FullBatch().batches((X, Y))
    element = next(iter(everyone.distribute(mirrored)))
    for _ in range(2):
        step(element)
    twice = step_of_a_loop(mirrored, steps=2)[1]
    with pytest.raises(PrivacyMismatchError, match="made of one draw"):
        twice(next(iter(batches.distribute(mirrored))))


@pytest.mark.skipif(REPLICAS > 1, reason="one replica")
@pytest.mark.parametrize("dealt", [True, False])
@pytest.mark.parametrize("given", [2, 3])
def test_a_loop_under_a_strategy_of_one_device_is_one_without(mirrored, dealt, given):
    """Rows that fill an element up are no records, whatever the loss reads."""
    gc.collect()
    strategy = mirrored
    model = compiled(
        strategy, lambda: tf.keras.Sequential([tf.keras.Input((6,)), L.Dense(3)])
    )
    vector = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction="none")

    def replica_step(x, y, *_):
        losses = vector(y, model(x, training=True))
        model.optimizer.minimize(losses, model.trainable_variables)

    step = tf.function(lambda *element: strategy.run(replica_step, args=element))
    batches = dpc.sampling.Poisson(0.05).batches((X, Y), physical_batch_size=40, seed=1)
    x, y, w = element = next(iter(batches.distribute(strategy) if dealt else batches))
    local = [strategy.experimental_local_results(part)[0].numpy() for part in element]
    before = model.get_weights()
    step(*element[:given])
    released = [b - a for b, a in zip(before, model.get_weights(), strict=True)]
    alone = compiled(
        ONE, lambda: tf.keras.Sequential([tf.keras.Input((6,)), L.Dense(3)])
    )
    records = local[2] > 0
    assert 0 < records.sum() < len(records)

    @tf.function
    def whole(x, y):
        losses = vector(y, alone(x, training=True))
        variables = [v.value if KERAS_3 else v for v in alone.trainable_variables]
        return dpc.gradients.clipped_sum(losses, variables, dpc.FixedClip(0.3))

    sums, _ = whole(tf.constant(local[0][records]), tf.constant(local[1][records]))
    for found, total in zip(released, sums, strict=True):
        np.testing.assert_allclose(found, 0.5 * total / 18, rtol=1e-4, atol=1e-6)
    with pytest.raises(PrivacyMismatchError, match="made of one draw"):
        step(*element[:given])
    iterator = iter(strategy.distribute_datasets_from_function(lambda _: batches))
    del x, y, w, element
    if given == 3:
        with pytest.raises(PrivacyMismatchError, match="not the replica's part"):
            step(*next(iterator))


@several_only
def test_a_scalar_loss_of_one_example_is_refused(mirrored):
    """The loss's scale would be a guess; a loss for each example gives the scale."""
    model = compiled(mirrored)
    vector = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction="none")

    def step(x, y, mean):
        losses = vector(y, model(x, training=True))
        loss = tf.reduce_mean(losses) / REPLICAS if mean else losses
        model.optimizer.minimize(loss, model.trainable_variables)

    def part(array):
        return mirrored.experimental_distribute_values_from_function(
            lambda context: tf.constant(array[context.replica_id_in_sync_group :][:1])
        )

    parts = part(X), part(Y)
    before = model.get_weights()
    with pytest.raises(dpc.gradients.LossStructureError, match="single example"):
        tf.function(lambda: mirrored.run(step, args=(*parts, True)))()
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    tf.function(lambda: mirrored.run(step, args=(*parts, False)))()
    assert np.abs(model.get_weights()[0] - before[0]).max() > 1e-4


def test_ragged_and_empty_replicas(mirrored):
    """One drawn record, or none, leaves replicas with padding alone."""
    x, y = X[:4], Y[:4]

    def trained(strategy):
        return fitted(strategy, (x, y), optimizer=lambda: private(size=0.8), epochs=4)

    assert_alike(trained(mirrored), trained(ONE))


# The noise.


def wide(units=6000):
    return tf.keras.Sequential([tf.keras.Input((6,)), L.Dense(units), L.Dense(3)])


def wider():
    """As many numbers as are drawn by compiled code."""
    return wide(7000)


class Public(tf.keras.callbacks.Callback):
    """Gives the rule the norms of public data when training begins."""

    def on_train_begin(self, logs=None):
        layout = self.model.optimizer.public_layout
        norms = {name: 1.0 + i for i, name in enumerate(layout.names)}
        self.model.optimizer.set_public_norms(norms)


class NoLoss(tf.keras.losses.Loss):
    def call(self, y_true, y_pred):
        return 1e-30 * tf.reduce_mean(y_pred, axis=-1)


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_noise_of_a_step_has_the_stddev_of_one(mirrored, accumulation, seed):
    def optimizer():
        return private(
            rate=1.0, z=3.0, clip=0.5, seed=seed, accumulation_steps=accumulation
        )

    model = compiled(mirrored, wider if seed else wide, NoLoss(), optimizer)
    before = model.get_weights()
    batches = dpc.sampling.Poisson(0.2).batches((X, Y), accumulation_steps=accumulation)
    model.fit(batches.distribute(mirrored), steps_per_epoch=accumulation, verbose=0)
    moved = [a - b for a, b in zip(model.get_weights(), before, strict=True)]
    noise = np.concatenate([part.ravel() for part in moved]) * 18 / (3.0 * 0.5)
    # 60,000 numbers: their stddev is within 5.2 / sqrt(120,000) but for 2e-7.
    assert noise.size > 60_000
    assert np.std(noise) == pytest.approx(1, abs=0.015)
    halves = np.split(noise[: noise.size // 2 * 2], 2)
    assert abs(np.corrcoef(*halves)[0, 1]) < 5.2 / np.sqrt(halves[0].size)
    assert_same_everywhere(model.trainable_variables)


def test_every_record_is_perturbed_by_itself(mirrored):
    """Without gradients, a record is its perturbation: clipped to C, and independent.

    The squared norm of the sum of n independent vectors of norm C in d dimensions is n
    C^2, give or take n C^2 sqrt(2 / d): 0.6 %. If two replicas had equal vectors, it
    would be twice as much.
    """

    def optimizer():
        return private(rate=1.0, clip=0.5, size=90.0, perturbation=1.0)

    model = compiled(mirrored, wide, NoLoss(), optimizer)
    before = model.get_weights()
    batches = dpc.sampling.FullBatch().batches((X, Y))
    model.fit(batches.distribute(mirrored), steps_per_epoch=1, verbose=0)
    pairs = zip(model.get_weights(), before, strict=True)
    square = sum(float(((a - b) ** 2).sum()) for a, b in pairs)
    # 5.2 deviations: once in 5 million.
    assert square * 90**2 / (90 * 0.5**2) == pytest.approx(1, abs=5.2 * 0.006)
    assert_same_everywhere(model.trainable_variables)


def test_counts_are_noised_once(mirrored):
    steps, rate, stddev = 600, 0.01, 2.0
    norms = []

    class Norms(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            norms.append(float(self.model.optimizer.clip_norm))

    def optimizer():
        return private(
            z=1.0,
            clip=dpc.QuantileClip(0.5, 1.0, learning_rate=rate, count_stddev=stddev),
            check_gradients="never",
        )

    model = compiled(mirrored, dense, NoLoss(), optimizer)
    batches = dpc.sampling.Poisson(0.2).batches((X, Y))
    model.fit(
        batches.distribute(mirrored),
        steps_per_epoch=steps,
        verbose=0,
        callbacks=[Norms()],
    )
    # No record is clipped: the count is the number of records, of variance 90 * .2 * .8
    # / 4 in units of a half. The distance to the quantile is clamped to [-1, 1].
    assert len(norms) == steps
    moves = -np.diff(np.log(norms)) / rate + 0.5
    there = RNG.binomial(90, 0.2, 400_000) / 2 + RNG.normal(size=400_000) * stddev
    simulated = 0.5 + np.clip(there / 18, -1, 1)
    # The mean of 599: within 5.2 of its own deviations but for 2e-7. With the noise of
    # each replica whole, or none, the variance differs by more.
    error = 5.2 * simulated.std() / np.sqrt(moves.size)
    assert abs(moves.mean() - simulated.mean()) < error
    spread = simulated.var() * 5.2 * np.sqrt(3 / moves.size)
    assert abs(moves.var() - simulated.var()) < spread


def test_replicas_have_streams_of_their_own():
    for seed in (None, 4):
        source = dpc.noise.GaussianNoise(seed)
        draws = [source.of_replica(i).sample([500], 1.0).numpy() for i in range(3)]
        draws.append(source.sample([500], 1.0).numpy())
        found = np.abs(np.corrcoef(draws) - np.eye(4))
        assert found.max() < 5.5 / np.sqrt(500)


# Mixing of examples stops all replicas, and nothing moves.


class MixesAbove(L.Layer):
    """Adds the neighbour's gradient where an example is large: on one replica only."""

    def call(self, x):
        @tf.custom_gradient
        def identity(x):
            def back(dy):
                large = tf.reduce_max(tf.abs(x)) > 50
                return dy + tf.where(large, tf.roll(dy, 1, axis=0), 0)

            return tf.identity(x), back

        return identity(x)


def test_a_failure_on_one_replica_stops_all(mirrored):
    """The comparison of the first step fails for the batch of the last replica."""
    x = X.copy()
    x[:, 0] = 0
    x[REPLICAS - 1, 0] = 1e4  # A record of the last replica.
    layers = [tf.keras.Input((6,)), L.Dense(4), MixesAbove(), L.Dense(3)]
    model = compiled(mirrored, lambda: tf.keras.Sequential(layers))
    with mirrored.scope():
        model.optimizer.build(model.trainable_variables)
    # All but the step counter, which may count a step that was not released.
    kept = [v for v in model.optimizer.variables if v.dtype != tf.int64]
    before = [*model.get_weights(), *(v.numpy() for v in kept)]
    batches = dpc.sampling.FullBatch().batches((x, Y))
    # TensorFlow reports the failed op or a cancelled op, whichever comes first.
    seen = (tf.errors.InvalidArgumentError, dpc.gradients.ExampleIsolationError)
    with pytest.raises((*seen, tf.errors.CancelledError)) as caught:
        model.fit(batches.distribute(mirrored), steps_per_epoch=1, verbose=0)
    assert "depend" in str(caught.value) or "cancelled" in str(caught.value)
    after = [*model.get_weights(), *(v.numpy() for v in kept)]
    assert len(after) > len(model.get_weights())
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


class Exchanges(L.Layer):
    def call(self, x):
        context = tf.distribute.get_replica_context()
        if context is None or tf.distribute.get_strategy().num_replicas_in_sync == 1:
            return x
        return x + context.all_reduce(tf.distribute.ReduceOp.SUM, x)


class Merges(L.Layer):
    """As a collective, without an op that says so."""

    def call(self, x):
        def swap(strategy, value):
            parts = strategy.experimental_local_results(value)
            return tf.add_n(parts)

        context = tf.distribute.get_replica_context()
        if context is None or tf.distribute.get_strategy().num_replicas_in_sync == 1:
            return x
        return x + context.merge_call(swap, args=(x,))


@several_only
@pytest.mark.parametrize(
    "layer",
    [Exchanges, Merges, lambda: L.BatchNormalization(synchronized=True)],
    ids=["collective", "merge", "synchronized"],
)
def test_replicas_that_exchange_something_are_refused(mirrored, layer):
    model = compiled(
        mirrored,
        lambda: tf.keras.Sequential([tf.keras.Input((6,)), layer(), L.Dense(3)]),
    )
    batches = dpc.sampling.FullBatch().batches((X, Y))
    before = model.get_weights()
    with pytest.raises(Exception, match="replica|public statistics|batch") as caught:
        model.fit(batches.distribute(mirrored), steps_per_epoch=1, verbose=0)
    assert isinstance(caught.value, (ValueError, dpc.gradients.ExampleIsolationError))
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


class OwnStep(tf.keras.Model):
    """A step as in Keras's guides, whole or in parts within a `tf.function`."""

    def __init__(self, part=None):
        super().__init__()
        self.last = L.Dense(3)
        self.loss_of, self.update = self._loss_of, self._update
        if part is not None:
            setattr(self, part, tf.function(getattr(self, part)))

    def call(self, x, training=False):
        return self.last(x)

    def _loss_of(self, x, y, w):
        return self.compute_loss(x, y, self(x, training=True), w)

    def _update(self, x, y, w):
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y, w)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return loss

    def train_step(self, data):
        return {"loss": self.update(*data)}


@several_only
@pytest.mark.parametrize("part", [None, "loss_of", "update"])
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_eager_steps_and_inner_functions_train_or_are_refused(mirrored, part, eager):
    plan = dpc.keras.PrivacyPlan(8, 1e-3, examples=90, batch_size=18, epochs=1)

    def optimizer():
        return plan.optimizer(dpc.keras.DPSGD, 0.5, clip=0.3)

    make = functools.partial(OwnStep, part)
    model = compiled(mirrored, make, optimizer=optimizer, run_eagerly=eager)
    data = plan.batches((X, Y)).distribute(mirrored)
    refused = None
    if eager:
        refused = "Several replicas need a graph.*compile without run_eagerly"
    if part == "update":
        refused = "take @tf.function off train_step"

    def fit():
        model.fit(data, steps_per_epoch=5, verbose=0, callbacks=plan.callbacks)

    if refused is None:
        fit()
        assert int(model.optimizer.iterations.numpy()) == 5
        return
    with pytest.raises(NotImplementedError, match=refused):
        fit()
    assert int(model.optimizer.iterations.numpy()) == 0


def test_one_batch_for_all_replicas_is_refused(mirrored):
    model = compiled(mirrored)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x))
        model.optimizer.minimize(loss, model.trainable_variables, tape=tape)

    run = tf.function(lambda *batch: mirrored.run(step, args=batch))
    if REPLICAS == 1:
        run(tf.constant(X), tf.constant(Y))
        return
    with pytest.raises(dpc.gradients.ExampleIsolationError, match="its own batch"):
        run(tf.constant(X), tf.constant(Y))


@pytest.mark.parametrize("kept", [np.asarray, tf.constant, lambda x: x.tolist()])
def test_a_batch_that_the_step_closes_over_is_refused(mirrored, kept):
    """Every replica makes a constant of the batch: the same examples, R times."""
    model, x, y = compiled(mirrored), kept(X[:18]), kept(Y[:18])

    def step():
        with tf.GradientTape() as tape:
            loss = LOSS(tf.convert_to_tensor(y), model(tf.convert_to_tensor(x)))
        model.optimizer.minimize(loss, model.trainable_variables, tape=tape)

    run = tf.function(lambda: mirrored.run(step))
    if REPLICAS == 1:
        run()
        return
    with pytest.raises(dpc.gradients.ExampleIsolationError, match="its own batch"):
        run()


class Remembers(L.Layer):
    """Keeps a batch's mean and adds it to the outputs of later batches."""

    def build(self, shape):
        self.kept = self.add_weight(
            name="kept", shape=(shape[-1],), initializer="zeros", trainable=False
        )

    def call(self, x):
        read = x + self.kept
        self.kept.assign(tf.reduce_mean(x, axis=0))
        return read


def test_what_a_layer_of_a_later_replica_writes_is_no_write_of_the_optimizer(mirrored):
    """Replicas take turns in a graph: one's marks must not fall on another's ops."""
    model = compiled(
        mirrored,
        lambda: tf.keras.Sequential([tf.keras.Input((6,)), Remembers(), L.Dense(3)]),
    )
    batches = dpc.sampling.FullBatch().batches((X, Y))
    with pytest.raises(Exception, match="kept"):
        model.fit(batches.distribute(mirrored), steps_per_epoch=1, verbose=0)


# The budget.


def budget(epsilon, **options):
    return lambda batches: dpc.keras.PrivacyBudget(epsilon, 1e-5, batches, **options)


def noisy():
    return private(z=1.0, clip=dpc.QuantileClip(initial_norm=0.3))


def test_the_budget_counts_and_stops_as_on_one_device(mirrored):
    stated = []
    for strategy in (mirrored, ONE):
        made = []

        def keep(batches, made=made):
            made.append(budget(4.0)(batches))
            return made[-1]

        model = fitted(strategy, optimizer=noisy, epochs=9, callbacks=[keep])
        stated.append((made[0].ledger.steps, made[0].statement().epsilon))
        assert model.optimizer.iterations.numpy() == stated[-1][0]
    assert stated[0] == stated[1] and 0 < stated[0][0] < 45


class Twice(tf.keras.Sequential):
    """Writes of the data to a weight, beside the optimizer."""

    def train_step(self, data):
        logs = super().train_step(data)
        weight = self.trainable_variables[0]
        weight.assign_sub(0.01 * tf.reduce_mean(data[0]) * weight)
        return logs


def test_another_write_to_the_weights_is_found(mirrored):
    def make():
        return Twice([tf.keras.Input((6,)), L.Dense(3)])

    with pytest.raises(dpc.accounting.PrivacyMismatchError, match="was updated by"):
        fitted(mirrored, make=make, optimizer=noisy, callbacks=[budget(50.0)])


def test_weight_decay_and_constraints_are_the_optimizers_own(mirrored):
    def make():
        return dense(kernel_constraint=tf.keras.constraints.MaxNorm(0.5))

    def optimizer():
        return private(dpc.keras.DPAdamW, rate=0.01, z=1.0, weight_decay=0.01, seed=2)

    model = fitted(
        mirrored, make=make, optimizer=optimizer, callbacks=[budget(50.0)], epochs=2
    )
    assert model.optimizer.iterations.numpy() == 10
    assert_same_everywhere(model.trainable_variables)


class Langevin(tf.keras.optimizers.SGD):
    """Draws numbers in its update: each replica its own."""

    def update_step(self, gradient, variable, *_):
        variable.assign_sub(0.1 * gradient + 0.01 * tf.random.normal(variable.shape))


def test_replicas_that_come_apart_are_found(mirrored):
    def optimizer():
        kind = dpc.keras.privatize(Langevin)
        return private(kind, z=1.0)

    def trained():
        return fitted(mirrored, optimizer=optimizer, callbacks=[budget(50.0)])

    if REPLICAS == 1:
        trained()
        return
    with pytest.raises(
        dpc.accounting.PrivacyMismatchError, match="values on the replicas"
    ):
        trained()


# Data.


@several_only
def test_draws_are_those_of_one_device(mirrored):
    def draws():
        return dpc.sampling.Poisson(0.2).batches((X, np.arange(90)), seed=8)

    alone, dealt = draws(), iter(draws().distribute(mirrored))
    for _, labels, weights in alone.take(5):
        _, parts, present = next(dealt)
        shares = [
            part.numpy()[weight.numpy() > 0]
            for part, weight in zip(parts.values, present.values, strict=True)
        ]
        expected = labels.numpy()[weights.numpy() > 0]
        assert sorted(np.concatenate(shares)) == sorted(expected)
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert len({part.shape for part in parts.values}) == 1


@several_only
def test_tensorflows_own_ways_to_divide_batches_are_refused(mirrored):
    batches = dpc.sampling.Poisson(0.2).batches((X, Y))
    model = compiled(mirrored, optimizer=noisy)
    with pytest.raises(Exception, match="distribute"):
        model.fit(batches, verbose=0)
    with pytest.raises(Exception, match="distribute"):
        mirrored.experimental_distribute_dataset(batches)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    with pytest.raises(ValueError, match="distribute"):
        batches.with_options(options)


@several_only
def test_a_draw_for_each_replica_is_refused(mirrored):
    """A record could be in the draws of two: twice in the sum, and counted once."""
    batches = dpc.sampling.Poisson(0.2).batches((X, Y))
    model = compiled(mirrored, optimizer=noisy)
    undealt = mirrored.distribute_datasets_from_function(lambda _: batches.repeat())
    with pytest.raises(dpc.accounting.PrivacyMismatchError, match="several draws"):
        model.fit(
            undealt, steps_per_epoch=2, verbose=0, callbacks=[budget(50.0)(batches)]
        )
    assert model.optimizer.iterations.numpy() == 0


@several_only
def test_data_that_cannot_be_traced_are_refused(mirrored, monkeypatch):
    from tfdpclip import _tf_private

    monkeypatch.setattr(_tf_private, "data_sets_of", lambda iterator: [])
    with pytest.raises(dpc.accounting.PrivacyMismatchError, match="cannot be traced"):
        fitted(mirrored, optimizer=noisy, callbacks=[budget(50.0)])


@several_only
def test_a_step_that_was_cut_short_on_one_replica_begins_afresh(mirrored):
    def optimizer():
        return private(z=1.0, accumulation_steps=3)

    model = compiled(mirrored, optimizer=optimizer)
    batches = dpc.sampling.Poisson(0.2).batches((X, Y), accumulation_steps=3)
    data, own = batches.distribute(mirrored), model.optimizer
    callbacks = [budget(50.0)(batches)]
    model.fit(data, steps_per_epoch=3, verbose=0, callbacks=callbacks)
    assert own.pending_batches == 0
    # As if an error had stopped all but the first.
    first = own._unsaved.all[0].sums
    first._begun.assign(1)
    first._filled.assign(1)
    first._sums[0].assign_add(1e6 * tf.ones_like(first._sums[0]))
    assert own.pending_batches == -1
    before = model.get_weights()
    model.fit(data, steps_per_epoch=3, verbose=0, callbacks=callbacks)
    assert own.iterations.numpy() == 2 and own.pending_batches == 0
    for a, b in zip(model.get_weights(), before, strict=True):
        assert np.abs(a - b).max() < 10


class Evaluates(tf.keras.callbacks.Callback):
    """Evaluates the same batches within a step, and records the steps' updates."""

    def __init__(self, data):
        super().__init__()
        self._data, self.weights = data, []

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(self.model.get_weights()[0].ravel())
        self.model.evaluate(self._data, steps=1, verbose=0)


def steep():
    """Every record is a separate coordinate, and moves it by C."""
    return tf.keras.Sequential(
        [tf.keras.Input((6,)), L.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )


class Steep(tf.keras.losses.Loss):
    def call(self, y_true, y_pred):
        return -1000.0 * tf.squeeze(y_pred, -1)


def test_looking_at_the_batches_within_a_step_gives_no_record_twice(mirrored):
    def optimizer():
        return private(rate=1.0, clip=1.0, size=6.0, accumulation_steps=3)

    model = compiled(mirrored, steep, Steep(), optimizer)
    data = np.eye(6, dtype=np.float32), np.zeros(6)
    batches = dpc.sampling.FullBatch().batches(data, accumulation_steps=3)
    looked = Evaluates(batches.distribute(mirrored))
    model.fit(
        batches.distribute(mirrored), steps_per_epoch=12, verbose=0, callbacks=[looked]
    )
    steps = np.diff(np.stack([np.zeros(6), *looked.weights[2::3]]), axis=0)
    np.testing.assert_allclose(steps * 6, np.ones((4, 6)), atol=1e-5)


def test_a_step_that_fit_did_not_end_is_dropped(mirrored):
    """The next call begins a draw; without PrivacyBudget, too."""

    def optimizer():
        return private(rate=1.0, clip=1.0, size=6.0, accumulation_steps=2)

    model = compiled(mirrored, steep, Steep(), optimizer)
    data = np.eye(6, dtype=np.float32), np.zeros(6)
    batches = dpc.sampling.FullBatch().batches(data, accumulation_steps=2)
    distributed = batches.distribute(mirrored)
    for done in (1, 2, 3):
        model.fit(distributed, steps_per_epoch=3, verbose=0)
        moved = model.get_weights()[0].ravel() * 6
        np.testing.assert_allclose(moved, done * np.ones(6), atol=1e-5)
        assert model.optimizer.pending_batches == 0


def test_batches_that_end_within_a_step_are_refused(mirrored):
    """The next iteration begins a draw: a record could be in a step twice."""
    batches = dpc.sampling.Poisson(0.2).batches((X, Y), accumulation_steps=3)
    for taken in (batches.take(2), batches.take(2).repeat(), batches.repeat().take(4)):
        with pytest.raises(ValueError, match="middle of a step"):
            taken.distribute(mirrored)
    batches.take(3).repeat().distribute(mirrored)
    batches.repeat().take(-1).distribute(mirrored)


@pytest.mark.parametrize("strategy", ["x", ONE, None])
def test_other_strategies_are_refused_by_the_data(strategy):
    batches = dpc.sampling.Poisson(0.2).batches((X, Y))
    with pytest.raises(ValueError, match="strategy must be"):
        batches.distribute(strategy)


def test_schemes_whose_elements_must_not_be_lost_are_refused(mirrored):
    batches = dpc.sampling.ShuffledEpochs(10, 90).batches((X, Y))
    with pytest.raises(ValueError, match="gathers elements ahead"):
        batches.distribute(mirrored)


# Correlated noise, and the order of records for which it is made.

ORDER = dpc.sampling.MinSeparation(40, 10)
STEPS = 8
CORRELATED = {
    # Gradients are 0, so the clip norm falls, and the noise with it.
    "moving-clip": (
        dpc.correlated.BufferedToeplitz(2, STEPS, ORDER),
        {"clip": dpc.QuantileClip(0.5, 2.0, learning_rate=0.4, count_stddev=1.5)},
    ),
    "accumulation": (
        dpc.correlated.SquareRootToeplitz(4),
        {"clip": 0.5, "accumulation_steps": 2},
    ),
    "tree": (dpc.correlated.Tree(), {"clip": 0.5}),
    # As many coordinates as are read by compiled code.
    "compiled": (
        dpc.correlated.BufferedToeplitz(2, STEPS, ORDER),
        {"clip": 0.5, "width": 22_000},
    ),
}
if not KERAS_3:  # Keras 3 fails with several steps in an execution.
    CORRELATED["executions"] = (
        dpc.correlated.SquareRootToeplitz(4),
        {"compiling": {"steps_per_execution": 2}},
    )


class Moves(tf.keras.callbacks.Callback):
    """The update of every step, over the noise stddev of independent noise."""

    def __init__(self, pieces):
        super().__init__()
        self._pieces, self.found = pieces, []

    def look(self):
        weights = self.model.get_weights()[0].ravel().astype(float)
        self._last = weights, self.model.optimizer.noise_stddevs["all"]

    def on_train_begin(self, logs=None):
        self.look()

    def on_train_batch_end(self, batch, logs=None):
        if (batch + 1) % self._pieces == 0:
            weights, stddev = self._last
            self.look()
            self.found.append((weights - self._last[0]) / stddev)


def correlated_model(strategy, matrix, width=8000, clip=0.5, compiling=None, **options):
    noise = dpc.CorrelatedNoise(matrix, STEPS, ORDER)

    def make():
        layer = L.Dense(width, use_bias=False)
        return tf.keras.Sequential([tf.keras.Input((3,)), layer])

    def optimizer():
        return private(rate=1.0, z=1.5, size=10.0, clip=clip, noise=noise, **options)

    model = compiled(strategy, make, "mse", optimizer, **(compiling or {}))
    pieces = model.optimizer.accumulation_steps
    data = np.zeros((40, 3), np.float32), np.zeros((40, width), np.float32)
    few = tf.nest.map_structure(lambda column: column[:2], data)
    fit_takes_no_draw_to_build(model, few)
    return model, ORDER.batches(data, accumulation_steps=pieces)


@pytest.mark.parametrize("name", CORRELATED)
def test_shares_of_correlated_noise_add_up_to_that_of_the_matrix(mirrored, name):
    """Prefix sums of two matrices, one for each fit; see `assert_covariance`."""
    matrix, options = CORRELATED[name]
    model, batches = correlated_model(mirrored, matrix, **options)
    budget, seen = dpc.keras.PrivacyBudget(1e6, 1e-5, batches), []
    for _ in range(2):
        seen.append(Moves(batches.accumulation_steps))
        model.fit(
            batches.distribute(mirrored),
            steps_per_epoch=STEPS // 2 * batches.accumulation_steps,
            epochs=2,
            callbacks=[budget, seen[-1]],
            verbose=0,
        )
    noise = model.optimizer.noise
    sums = np.tril(np.ones([STEPS] * 2)) @ matrix.noising(STEPS)
    expected = noise.sensitivity**2 * sums @ sums.T
    seen_at = slice(1, None, 2) if "compiling" in options else slice(None)
    expected = expected[seen_at, seen_at]
    rows = np.concatenate([np.cumsum(one.found, axis=0) for one in seen])
    assert_covariance(rows, np.kron(np.eye(2), expected))
    assert_same_everywhere(model.optimizer.variables + model.trainable_variables * 4)
    assert budget.ledger.phases[-1].runs == [STEPS, STEPS]
    one = dpc.accounting.correlated_event(matrix, 1.5, STEPS, ORDER, horizon=STEPS)
    both = dp_accounting.ComposedDpEvent([one, one])
    assert budget.ledger.epsilon() == pytest.approx(
        dpc.accounting.event_epsilon(both, 1e-5)
    )


@pytest.mark.parametrize("pieces", [1, 2])
def test_one_iterator_has_a_fixed_order_in_a_row(mirrored, pieces):
    def draws():
        return ORDER.batches(
            (np.zeros((40, 1)), np.arange(40)), accumulation_steps=pieces
        )

    def records(parts, present):
        local = mirrored.experimental_local_results
        pairs = zip(local(parts), local(present), strict=True)
        return np.concatenate([p.numpy()[w.numpy() > 0] for p, w in pairs])

    batches = draws()
    expected = iter(draws().repeat())
    distributed = batches.distribute(mirrored)
    first = iter(distributed)
    for _ in range(14):  # Longer than an epoch.
        _, labels, weights = next(expected)
        _, parts, present = next(first)
        wanted = labels.numpy()[weights.numpy() > 0]
        assert sorted(records(parts, present)) == sorted(wanted)
    # A second iterator gets nothing, unless a new run began, with which the noise
    # begins anew; then it gets only the elements gathered for the first iterator.
    with pytest.raises(tf.errors.InvalidArgumentError, match="A second iterator"):
        next(iter(distributed))
    assert len(records(*next(first)[1:])) > 0
    for drawer in list(NOTES.drawers):
        drawer.begin(distributed)
    next(iter(distributed))
    with pytest.raises(tf.errors.InvalidArgumentError, match="A second iterator"):
        for _ in range(20):
            next(first)
    for taken in (batches.take(2), batches.take(2).repeat(), batches.take(-1)):
        with pytest.raises(ValueError, match="steps_per_epoch"):
            taken.distribute(mirrored)


def test_replicas_share_the_steps_of_a_stream(mirrored, tmp_path):
    passes = []

    def read():
        passes.append(None)
        return zip(X, Y, strict=True)

    scheme = dpc.sampling.RandomAllocation(5)
    batches = scheme.batches(dpc.sampling.Stream(read, len(X), tmp_path))
    model = compiled(mirrored, optimizer=lambda: private(z=1.0))
    budget = dpc.keras.PrivacyBudget(1e6, 1e-3, batches)
    model.fit(
        batches.distribute(mirrored),
        steps_per_epoch=5,
        epochs=2,
        callbacks=[budget],
        verbose=0,
    )
    assert budget.ledger.steps == 10
    # The shapes, two epochs, and an epoch that a replica began to gather ahead; Keras 3
    # takes an element to build the model, from an epoch that is then left.
    assert len(passes) <= 5


def ordered_fit(strategy, *callbacks, ledger=None, secret=None):
    matrix = dpc.correlated.SquareRootToeplitz(2)
    model, batches = correlated_model(strategy, matrix, width=1)
    made = dpc.keras.PrivacyBudget(1e6, 1e-5, batches, ledger=ledger, secret=secret)
    distributed = batches.distribute(strategy)
    for callback in callbacks:
        callback.batches, callback.budget = distributed, made
    model.fit(
        distributed,
        steps_per_epoch=4,
        epochs=4,
        callbacks=[made, *callbacks],
        verbose=0,
    )


class EvaluatesThem(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.evaluate(self.batches, steps=1, verbose=0)


class BeginsAnew(tf.keras.callbacks.Callback):
    """As if fit made an iterator for every epoch."""

    def on_epoch_end(self, epoch, logs=None):
        self.budget._watch._iterator = object()


class CutsShort(tf.keras.callbacks.Callback):
    """As if a step had failed on a replica after the noise of the second was drawn."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.matrix_noise.of_replica(0)._position.assign_add(1)


def test_a_fixed_order_that_others_took_from_is_not_trained_on(mirrored):
    with pytest.raises(tf.errors.OpError, match="A second iterator"):
        ordered_fit(mirrored, EvaluatesThem())


def test_an_order_that_fit_begins_anew_is_refused(mirrored):
    with pytest.raises(dpc.accounting.PrivacyMismatchError, match="iterate its batch"):
        ordered_fit(mirrored, BeginsAnew())


@several_only
def test_replicas_at_different_steps_of_their_noise_are_refused(mirrored):
    with pytest.raises(tf.errors.OpError, match="cut short|ancelled"):
        ordered_fit(mirrored, CutsShort())


def test_noise_on_replicas_does_not_go_on_from_a_secret(mirrored, tmp_path):
    files = {"ledger": tmp_path / "ledger.json", "secret": tmp_path / "noise.secret"}
    with pytest.raises(ValueError, match="train on one device without"):
        ordered_fit(mirrored, **files)


# Refusals.


@several_only
@pytest.mark.parametrize(
    "make, compiling, named",
    [
        (lambda: private(unit="batch"), {}, "unit="),
        (private, {"run_eagerly": True}, "run_eagerly"),
        (private, {"jit_compile": True}, "jit_compile"),
    ],
    ids=["unit", "eager", "xla"],
)
def test_what_replicas_cannot_do_is_refused(mirrored, make, compiling, named):
    model = compiled(mirrored, optimizer=make, **compiling)
    batches = dpc.sampling.FullBatch().batches((X, Y))
    # Keras 3 asks for a graph earlier.
    earlier = KERAS_3 and named == "run_eagerly"
    with pytest.raises(ValueError if earlier else NotImplementedError, match=named):
        model.fit(batches.distribute(mirrored), steps_per_epoch=1, verbose=0)


def test_an_optimizer_of_another_scope_is_refused(mirrored):
    outside = private()
    model = compiled(mirrored, optimizer=lambda: outside)
    batches = dpc.sampling.FullBatch().batches((X, Y))
    with pytest.raises(ValueError, match=r"strategy.scope\(\)"):
        model.fit(batches.distribute(mirrored), steps_per_epoch=1, verbose=0)
    model = compiled(mirrored)
    step = tf.function(
        lambda: model.optimizer.minimize(LOSS(Y, model(X)), model.trainable_variables)
    )
    with pytest.raises(ValueError, match=r"strategy.scope\(\)"):
        step()
    with mirrored.scope(), pytest.raises(ValueError, match=r"strategy.run"):
        tf.function(
            lambda: model.optimizer.minimize(
                LOSS(Y, model(X)), model.trainable_variables
            )
        )()


def test_other_strategies_are_refused():
    strategy = tf.distribute.experimental.CentralStorageStrategy()
    model = compiled(strategy)
    with pytest.raises(NotImplementedError, match="MirroredStrategy"):
        model.fit(X, Y, verbose=0)


def test_a_strategy_of_ones_own_is_refused_whatever_it_extends():
    class Own(tf.distribute.MirroredStrategy):
        pass

    strategy = Own([f"CPU:{i}" for i in range(REPLICAS)])
    with pytest.raises(ValueError, match="strategy must be a tf.distribute.Mirrored"):
        dpc.sampling.FullBatch().batches((X, Y)).distribute(strategy)
    model = compiled(strategy)
    with pytest.raises(NotImplementedError, match="MirroredStrategy"):
        model.fit(X, Y, batch_size=30, verbose=0)


# Files.


def test_checkpoints_hold_no_noise_and_move_between_devices(mirrored, tmp_path):
    """From several replicas to one and back, keeping the clip and the step count."""

    def optimizer():
        return private(
            dpc.keras.DPAdam,
            rate=0.01,
            z=1.0,
            clip=dpc.QuantileClip(initial_norm=0.3),
            accumulation_steps=2,
        )

    def saved(model, name):
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(
            str(tmp_path / name)
        )
        for key, shape in tf.train.list_variables(path):
            assert not any(w in key for w in ("noise", "generator", "sums")), key
            del shape
        return path

    def restored(strategy, path):
        model = compiled(strategy, optimizer=optimizer)
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(
            path
        ).assert_existing_objects_matched()
        return model

    first = fitted(mirrored, optimizer=optimizer, accumulation=2)
    path = saved(first, "several")
    second = restored(ONE, path)
    assert_alike(first, second, tolerance=0)
    third = restored(mirrored, saved(second, "one"))
    assert_alike(third, first, tolerance=0)
    known = third.optimizer._step_history.known_steps()
    assert sum(part.steps for part in known.values()) == 5


@pytest.mark.parametrize("rate", [None, 0.1], ids=["the plan's rate", "a rate"])
def test_fit_by_the_plan_alone(mirrored, rate):
    """With the plan's executions where Keras has them, and the log `signal`."""
    plan = dpc.keras.PrivacyPlan(3.0, 1e-5, examples=len(X), batch_size=18, epochs=2)
    model = compiled(
        mirrored,
        optimizer=lambda: (
            plan.optimizer()
            if rate is None
            else plan.optimizer(dpc.keras.DPSGD, learning_rate=rate)
        ),
    )
    history = plan.fit(model, (X, Y), verbose=0).history
    assert len(history["epsilon"]) == 2 and np.isfinite(history["loss"]).all()
    assert plan.statement().steps == 10


def test_fit_by_the_plan_alone_beside_another_strategy(mirrored):
    """As in a notebook whose cell made the strategy twice."""
    another = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])
    with another.scope():
        earlier = dense()
        optimizer = private()
        optimizer.build(earlier.trainable_variables)
    plan = dpc.keras.PrivacyPlan(3.0, 1e-5, len(X), batch_size=18, epochs=2)
    plan.fit(compiled(mirrored, optimizer=plan.optimizer), (X, Y), verbose=0)
    assert plan.statement().steps == 10
    assert int(optimizer.iterations.numpy()) == 0
