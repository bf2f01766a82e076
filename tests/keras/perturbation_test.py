"""perturbation=k: Gaussian noise on every example's gradient before it is clipped.

Weights of 0 for all other examples show an example's contribution alone: padding
contributes nothing, but keeps its place in the batch and in the chunks.
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
    Opaque,
    flat,
    linear,
    mostly_slow,
    private_gradients,
    some_data,
)
from tests.stack import KERAS_3, keras2_only
from tfdpclip.clipping import (
    AutomaticClip,
    FixedClip,
    LayerwiseClip,
    PublicNormClip,
    QuantileClip,
    ScaledClip,
)

pytestmark = pytest.mark.unchecked

SLACK = 1 + 1e-4
C = 0.5
COUNT = 7


def dense():
    layers = [tf.keras.Input((5,)), L.Dense(4, "tanh", name="one")]
    return tf.keras.Sequential([*layers, L.Dense(1, name="two")]), "float32"


def conv():
    layers = [
        tf.keras.Input((6, 6, 2)),
        L.Conv2D(3, 3, activation="relu", name="one"),
        L.GroupNormalization(3, name="norm"),
        L.Flatten(),
        L.Dense(1, name="two"),
    ]
    return tf.keras.Sequential(layers), "float32"


def embedding():
    layers = [tf.keras.Input((4,)), L.Embedding(7, 3, name="one"), L.Flatten()]
    return tf.keras.Sequential([*layers, L.Dense(1, name="two")]), "int32"


class Tied(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.table = self.add_weight(
            name="table" if KERAS_3 else "one/table", shape=(7, 3), initializer="normal"
        )
        self.dense = L.Dense(3, activation="tanh", name="two")

    def call(self, ids):
        hidden = self.dense(tf.gather(self.table, ids))
        logits = tf.einsum("btd,vd->btv", hidden, self.table)
        return tf.reduce_mean(logits, axis=[1, 2])[:, tf.newaxis]


def tied():
    model = Tied()
    model(tf.zeros([1, 4], tf.int32))
    return model, "int32"


def rnn():
    """Some of its variables take the fallback."""
    layers = [tf.keras.Input((4, 3)), Opaque(name="one")]
    return tf.keras.Sequential([*layers, L.Dense(1, name="two")]), "float32"


def partly_frozen():
    frozen = L.Dense(4, "tanh", name="one", trainable=False)
    layers = [tf.keras.Input((5,)), frozen, L.Dense(3, name="mid")]
    return tf.keras.Sequential([*layers, L.Dense(1, name="two")]), "float32"


MODELS = {
    "dense": dense,
    "conv": conv,
    "embedding": embedding,
    "tied": tied,
    "rnn": rnn,
    "frozen": partly_frozen,
}
SHAPES = {"conv": (6, 6, 2), "embedding": (4,), "tied": (4,), "rnn": (4, 3)}
jacobian = pytest.mark.filterwarnings(
    "ignore::tfdpclip.gradients.JacobianFallbackWarning"
)


def size_of(model):
    return sum(v.shape.num_elements() for v in model.trainable_variables)


class Step:
    """A step on a batch of fixed shape: the released sum, and the noise scales."""

    def __init__(self, name, rule, k=0.3, chunk=None, jit=False, seed=None, z=0):
        tf.keras.utils.set_random_seed(2)
        self.model, dtype = MODELS[name]()
        self.variables = self.model.trainable_variables
        rng = np.random.default_rng(4)
        shape = (COUNT, *SHAPES.get(name, (5,)))
        if dtype == "int32":
            self.x = rng.integers(7, size=shape).astype("int32")
        else:
            self.x = rng.standard_normal(shape).astype("float32")
        self.y = 3 * rng.standard_normal((COUNT, 1)).astype("float32")
        options = {}
        if chunk is not None:
            options["gradient_memory"] = max(1, chunk * 12 * size_of(self.model))
        self.optimizer = DPRecorder(
            clip=rule,
            noise_multiplier=z,
            expected_batch_size=COUNT,
            perturbation=k,
            seed=seed,
            **options,
        )
        self.optimizer.build(self.variables)
        loss = tf.keras.losses.MeanSquaredError()
        signature = [
            tf.TensorSpec(shape, dtype),
            tf.TensorSpec((COUNT, 1)),
            tf.TensorSpec((COUNT,)),
        ]

        def of_batch(x, y, weight):
            predicted = self.model(x, training=True)
            return loss(y, predicted, sample_weight=weight)

        self._run = private_gradients(
            self.optimizer, self.variables, signature, of_batch, jit
        )

    def __call__(self, weight):
        weight = np.asarray(weight, np.float32)
        return self._run(self.x, self.y, weight) * COUNT

    def alone(self, i):
        weight = np.zeros(COUNT)
        weight[i] = 1
        return self(weight)

    def by_group(self, vector):
        """The norm of each group's part."""
        groups = self.optimizer.clip.assignment or [0] * len(self.variables)
        sizes = [v.shape.num_elements() for v in self.variables]
        parts = np.split(vector, np.cumsum(sizes)[:-1])
        squares = np.zeros(max(groups) + 1)
        for group, part in zip(groups, parts, strict=True):
            squares[group] += np.sum(part**2)
        return np.sqrt(squares)


CHUNKS = [None, 3, 1, 0]


@jacobian
@pytest.mark.parametrize("chunk", mostly_slow([3], CHUNKS))
@pytest.mark.parametrize("name", mostly_slow(["dense", "tied", "rnn"], MODELS))
@pytest.mark.slow
def test_the_norm_is_of_the_very_noise_that_is_added(name, chunk):
    """With a clip far below every norm, each example contributes exactly the clip norm.

    Seven examples in chunks of three: the last chunk overlaps the chunk before it.
    """
    step = Step(name, FixedClip(1e-3), chunk=chunk)
    for i in range(COUNT):
        assert np.linalg.norm(step.alone(i)) == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.slow
def test_the_norm_is_of_the_very_noise_compiled_by_xla(chunk):
    step = Step("dense", FixedClip(1e-3), chunk=chunk, jit=True)
    for i in range(COUNT):
        assert np.linalg.norm(step.alone(i)) == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("chunk", mostly_slow([None, 3], CHUNKS))
@pytest.mark.slow
def test_an_example_that_is_not_clipped_contributes_its_gradient_and_the_noise(chunk):
    """Six standard errors of a mean over 7 x 30 parts: a false alarm in 2e-9."""
    plain = Step("dense", FixedClip(1e6), k=0, chunk=chunk)
    step = Step("dense", FixedClip(1e6), k=2.0, chunk=chunk)
    noise = []
    for i in range(COUNT):
        gradient = plain.alone(i)
        noise += [step.alone(i) - gradient for _ in range(30)]
    noise = np.concatenate(noise)
    assert np.std(noise) == pytest.approx(2.0, rel=6 / math.sqrt(2 * noise.size))
    assert abs(np.mean(noise)) < 6 * 2.0 / math.sqrt(noise.size)


LAYERWISE = {
    "flat": AutomaticClip(0.0),
    "layerwise": LayerwiseClip(AutomaticClip(0.0)),
    "per_variable": LayerwiseClip(FixedClip(1e-3, normalize=True), groups="variable"),
    "public": PublicNormClip(1e-3, norms={"one": 1.0, "two": 0.3}),
    "scaled": ScaledClip({"one": 1.0, "two": 4.0}, 1e-3),
}


@jacobian
@pytest.mark.parametrize("chunk", mostly_slow([3], [None, 3]))
@pytest.mark.parametrize("name", mostly_slow(["dense"], ["dense", "rnn"]))
@pytest.mark.parametrize("rule", LAYERWISE)
@pytest.mark.slow
def test_every_group_is_clipped_by_the_norm_of_its_own_noise(rule, name, chunk):
    if name == "rnn" and rule in ("public", "scaled"):
        names = {"one": 1.0, "two": 0.3}
        made = {
            "public": PublicNormClip(1e-3, norms=names),
            "scaled": ScaledClip(names, 1e-3),
        }[rule]
    else:
        made = LAYERWISE[rule]
    step = Step(name, made, chunk=chunk)
    bound, state = step.optimizer.clip, step.optimizer.clip_state
    sensitivity = np.atleast_1d(bound.sensitivity(state))
    for i in range(COUNT):
        norms = step.by_group(step.alone(i))
        if rule == "scaled":
            joint = np.linalg.norm(norms / sensitivity)
            assert joint == pytest.approx(1, rel=1e-4)
        else:
            np.testing.assert_allclose(norms, sensitivity, rtol=1e-4)


@jacobian
@pytest.mark.parametrize("chunk", mostly_slow([3], [None, 3]))
@pytest.mark.parametrize(
    "name", mostly_slow(["dense"], [m for m in MODELS if m != "frozen"])
)
@pytest.mark.parametrize("rule", ["fixed", "layerwise", "scaled"])
@pytest.mark.slow
def test_an_example_moves_the_sum_by_at_most_the_sensitivity(rule, name, chunk):
    """The same seed gives the same perturbations with the example and without it."""
    made = {
        "fixed": FixedClip(C),
        "layerwise": LayerwiseClip(QuantileClip(0.5, C, count_stddev=0.0)),
        "scaled": ScaledClip(norm=C),
    }[rule]
    worst = 0.0
    for i in (0, 3, COUNT - 1):
        sums = []
        for present in (1.0, 0.0):
            step = Step(name, made, k=0.1, chunk=chunk, seed=3)
            if rule == "scaled":
                names = step.optimizer.public_layout.names
                norms = dict(zip(names, [1.0, 0.2, 3.0], strict=False))
                step.optimizer.set_public_norms(norms)
            scales = np.atleast_1d(
                step.optimizer.clip.noise_scales(step.optimizer.clip_state)
            )
            weight = np.ones(COUNT)
            weight[i] = present
            sums.append(step(weight))
        moved = np.linalg.norm(step.by_group(sums[0] - sums[1]) / scales)
        assert moved <= SLACK
        worst = max(worst, moved)
    assert worst > 0.5


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("rule", ["flat", "layerwise"])
@pytest.mark.thinned(2)
def test_padding_contributes_nothing(rule, chunk):
    step = Step("dense", LAYERWISE[rule], k=5.0, chunk=chunk)
    assert np.all(step(np.zeros(COUNT)) == 0)


@pytest.mark.parametrize("chunk", [None, 3, 1])
@pytest.mark.slow
def test_perturbations_are_fresh_for_every_example_and_step(chunk):
    """Directions of 400 entries; correlations allow 6 / sqrt(400): 2e-9 each."""
    variables = [tf.Variable(tf.zeros([100])), tf.Variable(tf.zeros([30, 10]))]
    options = {} if chunk is None else {"gradient_memory": chunk * 12 * 400}

    def directions(seed):
        optimizer = DPSGD(
            clip=AutomaticClip(0.0),
            noise_multiplier=0,
            expected_batch_size=1,
            perturbation=1.0,
            seed=seed,
            **options,
        )

        def loss(x, weight):
            # No example has a gradient, so only the noise is seen.
            value = x * (variables[0][0] + variables[1][0, 0])
            return weight * (1.0 + value)

        signature = [tf.TensorSpec([COUNT]), tf.TensorSpec([COUNT])]
        run = private_gradients(optimizer, variables, signature, loss)
        return lambda i: run(np.zeros(COUNT, np.float32), np.eye(COUNT)[i].astype("f4"))

    found = []
    for i in range(COUNT):
        # Runs of the same seed make the same draws; each shows a single example's
        # noise.
        run = directions(11)
        found += [run(i), run(i)]
    unseeded = directions(None)
    found += [unseeded(0), unseeded(0), directions(None)(0)]
    correlations = np.corrcoef(found) - np.eye(len(found))
    assert np.abs(correlations).max() < 6 / math.sqrt(400)
    # Two variables of an example do not share noise either.
    first = np.stack(found)[:, :100]
    second = np.stack(found)[:, 100:200]
    pairs = [np.corrcoef(a, b)[0, 1] for a, b in zip(first, second, strict=True)]
    assert np.abs(pairs).max() < 6 / math.sqrt(100)


def test_accumulation_perturbs_every_physical_batch_anew():
    """The same examples in both batches: their noise is not the same."""
    w = tf.Variable(tf.zeros([2000]))
    optimizer = DPRecorder(
        clip=AutomaticClip(0.0),
        noise_multiplier=0,
        expected_batch_size=1,
        accumulation_steps=2,
        perturbation=1.0,
    )

    @tf.function
    def step():
        optimizer.minimize(1.0 + tf.zeros([1]) * w[0], [w])

    step()
    step()
    # Two independent unit vectors; twice the same would have norm 2.
    norm = np.linalg.norm(optimizer.seen[0].numpy())
    assert norm == pytest.approx(math.sqrt(2), abs=6 / math.sqrt(2000))


def test_steps_in_one_execution_are_perturbed_anew():
    model = linear(units=1, inputs=2000)
    optimizer = DPSGD(
        1.0,
        clip=AutomaticClip(0.0),
        noise_multiplier=0,
        expected_batch_size=1,
        perturbation=1.0,
    )
    model.compile(optimizer, lambda y, p: 1.0 + 0.0 * p[:, 0], steps_per_execution=4)
    x = np.zeros([4, 2000], np.float32)
    model.fit(x, x[:, :1], batch_size=1, verbose=0)
    norm = np.linalg.norm(flat(model.trainable_variables))
    assert norm == pytest.approx(2.0, abs=2 * 6 * 2 / math.sqrt(2000))


@pytest.mark.slow
@keras2_only("run_eagerly=True is refused, see held_loss_test.py")
@pytest.mark.parametrize("rule", ["flat", "layerwise"])
def test_eager_steps_are_perturbed_too(rule):
    x, y = some_data(COUNT, 5)
    model, _ = dense()
    optimizer = DPRecorder(
        clip=LAYERWISE[rule],
        noise_multiplier=0,
        expected_batch_size=1,
        perturbation=0.5,
    )
    loss = tf.keras.losses.MeanSquaredError(reduction="none")
    model.compile(optimizer, loss, run_eagerly=True)
    found = []
    for _ in range(2):
        weight = np.zeros(COUNT, np.float32)
        weight[2] = 1
        model.train_on_batch(x, y, sample_weight=weight)
        found.append([v.numpy() for v in optimizer.seen])
        norms = [np.linalg.norm(flat(part)) for part in (found[-1][:2], found[-1][2:])]
        if rule == "layerwise":
            np.testing.assert_allclose(norms, [1.0, 1.0], rtol=1e-4)
        else:
            assert np.linalg.norm(norms) == pytest.approx(1.0, rel=1e-4)
    assert not np.allclose(flat(found[0]), flat(found[1]))
    model.train_on_batch(x, y, sample_weight=np.zeros(COUNT, np.float32))
    assert np.all(flat(optimizer.seen) == 0)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 3])
def test_a_coarse_type_keeps_the_bound(chunk):
    """The norm and the sum come from gradients of the same precision."""
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        step = Step("dense", FixedClip(1e-3), k=1e-3, chunk=chunk)
        for i in range(COUNT):
            assert np.linalg.norm(step.alone(i)) <= 1e-3 * 1.001
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.slow
def test_an_example_that_is_not_finite_spoils_nothing(bad):
    found = []
    for present in (1.0, 0.0):
        step = Step("dense", FixedClip(C), seed=5)
        weight = np.ones(COUNT)
        if present:
            step.x[3] = bad
        else:
            weight[3] = 0
        found.append(step(weight))
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    assert np.any(found[0] != 0)


def test_the_quantile_is_of_the_perturbed_norms():
    """The perturbed norm is about k sqrt(P) = 10, whatever the gradient."""
    w = tf.Variable(tf.zeros([10_000]))
    for start, expected in ((5.0, math.exp(0.5)), (20.0, math.exp(-0.5))):
        optimizer = DPSGD(
            clip=QuantileClip(0.5, start, 1.0),
            noise_multiplier=0,
            expected_batch_size=4,
            perturbation=0.1,
        )

        @tf.function
        def step(optimizer=optimizer):
            optimizer.minimize(tf.ones([4]) * (1.0 + w[0]), [w])

        step()
        assert float(optimizer.clip_norm) == pytest.approx(start * expected, rel=1e-4)


@pytest.mark.slow
def test_noise_for_privacy_is_as_without_perturbation():
    """A batch of padding leaves the noise alone. Six standard errors, 2e-9."""
    step = Step("dense", FixedClip(C), k=3.0, z=1.5)
    found = np.concatenate([step(np.zeros(COUNT)) for _ in range(200)])
    assert np.std(found) == pytest.approx(1.5 * C, rel=6 / math.sqrt(2 * found.size))


def test_a_batch_as_a_whole_can_be_perturbed():
    """Mean gradient 0.3 on one entry, and N(0, 1) on 2000."""
    w = tf.Variable(tf.zeros([2000]))
    optimizer = DPRecorder(
        clip=100.0, noise_multiplier=0, unit="batch", perturbation=1.0
    )

    @tf.function
    def step():
        optimizer.minimize(tf.reduce_mean(0.3 * tf.ones([5]) * w[0]), [w])

    step()
    first = optimizer.seen[0].numpy()
    assert np.std(first) == pytest.approx(1.0, rel=6 / math.sqrt(4000))
    step()
    assert abs(np.corrcoef(first, optimizer.seen[0].numpy())[0, 1]) < 6 / math.sqrt(
        2000
    )


def test_chunking_does_not_change_the_distribution_of_the_sum():
    """Not clipped: B gradients and noise of stddev k sqrt(B); six standard errors."""
    w = tf.Variable(tf.zeros([500]))
    x = np.linspace(-1, 1, 11).astype("float32")
    for memory in (2**20, 4 * 12 * 500):
        optimizer = DPSGD(
            clip=1e6,
            noise_multiplier=0,
            expected_batch_size=1,
            perturbation=0.7,
            gradient_memory=memory,
        )
        run = private_gradients(
            optimizer, [w], [tf.TensorSpec([11])], lambda x: 1.0 + x * w[0]
        )
        found = np.stack([run(x) for _ in range(20)])[:, 1:]
        stddev = 0.7 * math.sqrt(11)
        rel = 6 / math.sqrt(2 * found.size)
        assert np.std(found) == pytest.approx(stddev, rel=rel)


# Settings.


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf, "1", True])
def test_a_perturbation_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match="perturbation must be"):
        DPSGD(clip=1.0, noise_multiplier=1.0, expected_batch_size=8, perturbation=bad)


def test_the_perturbation_is_saved():
    optimizer = DPAdam(
        clip=1.0, noise_multiplier=1.0, expected_batch_size=8, perturbation=2.5
    )
    config = json.loads(json.dumps(optimizer.get_config(), default=float))
    assert DPAdam.from_config(config).perturbation == 2.5


@pytest.mark.slow
def test_it_learns_digits():
    """Chance is 10%."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = (data.data / 16.0).astype("float32")
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.Sequential([tf.keras.Input((64,)), L.Dense(10)])
    optimizer = DPSGD(
        2.0,
        clip=0.5,
        noise_multiplier=1.0,
        expected_batch_size=128,
        perturbation=0.05,
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(x[:1500], data.target[:1500], batch_size=128, epochs=6, verbose=0)
    _, accuracy = model.evaluate(x[1500:], data.target[1500:], verbose=0)
    assert accuracy > 0.6
