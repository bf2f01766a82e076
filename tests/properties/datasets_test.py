"""Data of odd sizes, structures and values: drawn, clipped and summed as promised."""

from __future__ import annotations

import collections
import math
import warnings

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tfdpclip.clipping import AutomaticClip, FixedClip, LayerwiseClip, QuantileClip
from tfdpclip.gradients import LossStructureError, clipped_sum
from tfdpclip.keras import DPSGD
from tfdpclip.sampling import FixedSize, FullBatch, Poisson, ShuffledEpochs

QUICK = settings(derandomize=True, deadline=None, max_examples=25)
ENGINE = settings(derandomize=True, deadline=None, max_examples=12)
MANY = settings(deadline=None, max_examples=400)

SIZES = st.one_of(st.integers(1, 12), st.sampled_from([1, 2, 100]))


def columns(size):
    """Every dtype that a column may have; the record's number can be read from each."""
    number = np.arange(size)
    return {
        "float32": number.astype(np.float32),
        "float64": number.astype(np.float64),
        "float16": number.astype(np.float16)[:, None],
        "int64": number,
        "int8": np.tile(number.astype(np.int8)[:, None, None], (1, 2, 3)),
        "uint16": number.astype(np.uint16),
        "bool": number % 2 == 0,
        "text": np.array([f"record {i}" for i in number]),
        "bytes": np.array([b"%d" % i for i in number], object),
        "complex": number.astype(np.complex64),
        "empty": np.zeros((size, 0), np.float32),
    }


@st.composite
def structures(draw):
    """(data, the column that numbers the records)."""
    size = draw(SIZES)
    found = columns(size)
    names = draw(st.lists(st.sampled_from([*found]), min_size=1, max_size=3))
    parts = [found[name] for name in names]
    kind = draw(st.sampled_from(["dict", "nested", "tuple", "pair", "weights"]))
    number = found["int64"]
    if kind == "dict":
        return {"id": number, **dict(zip(names, parts, strict=True))}, size
    if kind == "nested":
        return {"id": number, "inner": {"deep": parts[0]}}, size
    if kind == "tuple":
        return ({"id": number, "parts": tuple(parts)}, parts[0]), size
    if kind == "pair":
        return ({"id": number}, parts[0]), size
    return ({"id": number}, parts[0], np.full(size, 0.5)), size


def scheme_for(kind, size, draw_size):
    if kind == "poisson":
        return Poisson(min(1.0, draw_size / size))
    if kind == "rare":
        return Poisson(1e-6)
    if kind == "full":
        return FullBatch()
    fixed = FixedSize if kind == "fixed" else ShuffledEpochs
    return fixed(min(size, draw_size), size)


KINDS = st.sampled_from(["poisson", "rare", "fixed", "shuffled", "full"])


def check_batches(data, size, kind, draw_size, pieces, seed):
    scheme = scheme_for(kind, size, draw_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = scheme.batches(data, accumulation_steps=pieces, seed=seed, steps=3)
    rows = batches.physical_batch_size
    spec = batches.element_spec
    seen = 0
    drawn: list = []
    for x, y, weight in batches:
        seen += 1
        weight = weight.numpy()
        # Labels of more axes have weights of as many, of length 1.
        assert weight.size == len(weight) == rows and weight.dtype == np.float32
        weight = weight.ravel()
        expected = 0.5 if isinstance(data, tuple) and len(data) == 3 else 1.0
        assert set(weight.tolist()) <= {0.0, expected}
        there = weight > 0
        assert not there[int(there.sum()) :].any(), "padding comes last"
        for tensor, part in zip(
            tf.nest.flatten((x, y)), tf.nest.flatten(tuple(spec[:2])), strict=True
        ):
            if tensor is None:  # There are no labels.
                continue
            assert part.is_compatible_with(tensor)
            padding = tensor.numpy()[~there]
            blank = b"" if tensor.dtype == tf.string else np.zeros((), padding.dtype)
            assert (padding == blank).all()
        ids = x["id"].numpy()[there]
        assert len(set(ids.tolist())) == len(ids)
        assert ((0 <= ids) & (ids < size)).all()
        if "text" in x:
            words = [f"record {i}".encode() for i in ids]
            assert x["text"].numpy()[there].tolist() == words
        drawn.append(ids)
    assert seen == 3 * pieces
    if kind == "full":
        per_step = [
            np.concatenate(drawn[i * pieces : (i + 1) * pieces]) for i in (0, 1)
        ]
        for ids in per_step:
            assert sorted(ids.tolist()) == list(range(size))
    if kind == "fixed":
        for i in range(3):
            ids = np.concatenate(drawn[i * pieces : (i + 1) * pieces])
            assert len(set(ids.tolist())) == len(ids) == min(size, draw_size)


@pytest.mark.slow
@QUICK
@given(
    structures(), KINDS, st.integers(1, 20), st.integers(1, 3), st.integers(0, 2**32)
)
def test_batches_of_any_data(data, kind, draw_size, pieces, seed):
    check_batches(*data, kind, draw_size, pieces, seed)


@pytest.mark.slow
@MANY
@given(
    structures(), KINDS, st.integers(1, 20), st.integers(1, 3), st.integers(0, 2**32)
)
def test_batches_of_much_data(data, kind, draw_size, pieces, seed):
    check_batches(*data, kind, draw_size, pieces, seed)


@pytest.mark.parametrize("name", columns(1))
def test_the_type_of_a_column_is_kept(name):
    column = columns(3)[name]
    x, _, _ = next(iter(FullBatch().batches({"a": column})))
    expected = {"float64": "float32", "text": "string", "bytes": "string"}
    shown = expected.get(name, column.dtype.name)
    assert x["a"].dtype.name == shown
    kept = [i for i in x["a"].numpy().tolist() if i != b""]
    wanted = [v.encode() if isinstance(v, str) else v for v in column.tolist()]
    assert kept == wanted


@pytest.mark.parametrize(
    "data",
    [
        np.zeros((0, 2)),
        {"a": np.zeros(0)},
        (np.zeros((2, 3)), np.zeros(3)),
        [],
        {},
        (),
        {"a": [[1], [1, 2]]},
        np.array([{}, {}], object),
        np.float32(3.0),
        {"a": np.float32(3.0)},
        tf.ragged.constant([[1.0], [1.0, 2.0]]),
        {"a": tf.ragged.constant([[1.0], [1.0, 2.0]])},
        tf.sparse.from_dense([[1.0, 0.0]]),
        iter([1, 2]),
        "text",
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_is_refused_by_name(data):
    with pytest.raises(ValueError, match="data"):
        Poisson(0.5).batches(data)


def check_cohorts(size, kind, draw_size, rounds, seed):
    assume(kind in ("poisson", "rare", "fixed"))
    ids = [(i, f"client {i}") for i in range(size)]
    cohorts = scheme_for(kind, size, draw_size).cohorts(ids, seed=seed)
    for number in rounds:
        found = cohorts(number)
        assert set(found) <= set(ids) and len(set(found)) == len(found)
        assert cohorts(number) == found
        if kind == "fixed":
            assert len(found) == min(size, draw_size)


ROUNDS = st.lists(st.integers(0, 2**62), max_size=3)


@QUICK
@given(SIZES, KINDS, st.integers(1, 20), ROUNDS, st.one_of(st.none(), st.integers(0)))
def test_cohorts_of_any_size(size, kind, draw_size, rounds, seed):
    check_cohorts(size, kind, draw_size, rounds, seed)


def test_an_empty_draw_is_a_batch_of_padding():
    batches = Poisson(1e-9).batches((np.ones((5, 2)), np.ones(5)), steps=4)
    for _, _, weight in batches:
        assert not weight.numpy().any()
    assert Poisson(1e-9).cohorts(range(5))(0) == []


# The engine.

VALUES = st.sampled_from([0.0, 1.0, -1.0, 3.5, 1e-45, 1e-38, 1e-20, 1e10, 1e19, 1e30])
RULES = st.sampled_from(
    [
        FixedClip(1.0),
        FixedClip(1e-6),
        FixedClip(1e6, normalize=True),
        QuantileClip(initial_norm=0.3),
        AutomaticClip(),
        AutomaticClip(0.0),
        LayerwiseClip(0.5),
    ]
)


class Model:
    """Variables of odd shapes: a matrix, a scalar, one of size zero, a lonely one."""

    def __init__(self):
        self.w = tf.Variable(tf.ones([3, 2]), name="a/w")
        self.scalar = tf.Variable(0.5, name="b/scalar")
        self.nothing = tf.Variable(tf.zeros([3, 0]), name="c/nothing")
        self.alone = tf.Variable(tf.ones([2]), name="d/alone")
        self.variables = [self.w, self.scalar, self.nothing, self.alone]
        self._steps: dict = {}

    def loss(self, x, weight):
        h = x @ self.w + self.scalar
        none = tf.reduce_sum(x @ self.nothing, axis=1)
        return weight * (tf.reduce_sum(h, axis=1) + none)

    def sums(self, rule, x, weight):
        """The clipped sums as a vector in double precision, and the norms."""
        if rule not in self._steps:
            bound = rule.bind([v.name for v in self.variables])

            @tf.function(
                input_signature=[
                    tf.TensorSpec([None, 3], tf.float32),
                    tf.TensorSpec([None], tf.float32),
                ]
            )
            def step(x, weight):
                loss = self.loss(x, weight)
                return clipped_sum(loss, self.variables, bound, bound.initial_state())

            self._steps[rule] = bound, step
        bound, step = self._steps[rule]
        sums, norms = step(x, weight)
        parts = [np.ravel(part.numpy()).astype(np.float64) for part in sums]
        scales = np.atleast_1d(bound.noise_scales(bound.initial_state()).numpy())
        groups = bound.assignment or (0,) * len(parts)
        in_noise = [p / scales[g] for p, g in zip(parts, groups, strict=True)]
        return np.concatenate(parts), np.concatenate(in_noise), norms.numpy()


MODEL = Model()
BATCHES = st.lists(
    st.tuples(st.lists(VALUES, min_size=3, max_size=3), st.sampled_from([0.0, 1.0])),
    min_size=1,
    max_size=5,
)


def check_engine(rule, batch, removed):
    x = np.array([row for row, _ in batch], np.float32).reshape(-1, 3)
    weight = np.array([w for _, w in batch], np.float32)
    total, in_noise, norms = MODEL.sums(rule, x, weight)
    assert np.isfinite(total).all() and norms.shape == (len(batch),)
    if not weight.any():
        assert not total.any()
    kept = np.arange(len(batch)) != removed % len(batch)
    if len(batch) == 1:
        assert np.linalg.norm(in_noise) <= 1 + 1e-6
        return
    _, without, _ = MODEL.sums(rule, x[kept], weight[kept])
    # In units of the noise an example moves the sums by 1 at most, and by the rounding
    # of the remaining sums in float32.
    rounding = 1e-6 * (1 + len(batch))
    assert np.linalg.norm(in_noise - without) <= 1 + rounding
    padded, _, _ = MODEL.sums(rule, x, np.where(kept, weight, 0.0))
    alone, _, _ = MODEL.sums(rule, x[kept], weight[kept])
    scale = np.abs(alone).max(initial=1e-30)
    np.testing.assert_allclose(padded, alone, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.slow
@settings(ENGINE, max_examples=40)
@given(
    st.sampled_from([FixedClip(1e-6), AutomaticClip(0.0)]), BATCHES, st.integers(0, 4)
)
def test_one_example_moves_the_clipped_sum_by_the_clip_norm(rule, batch, removed):
    check_engine(rule, batch, removed)


@pytest.mark.slow
@settings(MANY, max_examples=3000)
@given(RULES, BATCHES, st.integers(0, 4))
def test_one_example_of_many_moves_the_sum_by_the_clip_norm(rule, batch, removed):
    check_engine(rule, batch, removed)


@pytest.mark.parametrize("rule", [FixedClip(1.0), AutomaticClip(0.0)], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_example_that_is_no_number_is_left_out(rule, bad):
    x = np.ones((3, 3), np.float32)
    x[1, 2] = bad
    whole, _, norms = MODEL.sums(rule, x, np.ones(3, np.float32))
    rest, _, _ = MODEL.sums(rule, x[[0, 2]], np.ones(2, np.float32))
    np.testing.assert_allclose(whole, rest, rtol=1e-6)
    assert not np.isfinite(norms[1])


@pytest.mark.every_check
def test_a_variable_of_no_entries_is_no_false_alarm_beside_an_infinite_norm():
    x = np.array([[1e30, -1.0, 0.0]], np.float32)
    total, _, norms = Model().sums(LayerwiseClip(0.5), x, np.ones(1, np.float32))
    assert np.isfinite(total).all() and not np.isfinite(norms).all()


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.slow
def test_a_step_on_almost_nothing_moves_by_its_noise_alone(size, zero):
    layers = [tf.keras.Input((2,)), tf.keras.layers.Dense(1, kernel_initializer="ones")]
    model = tf.keras.Sequential(layers)
    optimizer = DPSGD(
        1.0, clip=QuantileClip(), noise_multiplier=1.0, expected_batch_size=64
    )
    model.compile(optimizer, tf.keras.losses.MeanSquaredError(reduction="none"))

    @tf.function
    def step(x, y, weight):
        loss = weight * tf.square(model(x) - y)[:, 0]
        optimizer.minimize(loss, model.trainable_variables)

    x = np.ones((size, 2), np.float32)
    step(x, x[:, :1], np.full(size, 0.0 if zero else 1.0, np.float32))
    for variable in model.trainable_variables:
        assert np.isfinite(variable.numpy()).all()
    assert int(optimizer.iterations) == 1
    assert 0 < float(optimizer.clip_norm) < math.inf


def test_a_model_that_is_frozen_everywhere_is_refused():
    x, frozen = np.ones((2, 3), np.float32), tf.Variable([1.0, 1.0, 1.0])

    @tf.function
    def step(variables):
        loss = tf.linalg.matvec(x, tf.stop_gradient(frozen))
        return clipped_sum(loss, variables, FixedClip(1.0))

    with pytest.raises(ValueError, match="variables is empty"):
        step([])
    with pytest.raises(LossStructureError, match="does not depend"):
        step([frozen])


# Federated records, without running a federated computation.

LEAVES = st.sampled_from([np.float16, np.float32, np.float64, "bfloat16"])
SHAPES = st.sampled_from([(), (1,), (3,), (2, 2), (0,), (2, 0)])


def check_record(leaves, values, rule):
    tff = pytest.importorskip("tensorflow_federated")
    from tfdpclip.federated._records import Layout, RecordClip

    types = [
        (f"layer_{i}/leaf", tff.TensorType(tf.as_dtype(dtype).as_numpy_dtype, shape))
        for i, (dtype, shape) in enumerate(leaves)
    ]
    layout = Layout(tff.to_type(collections.OrderedDict(types)))
    clip = RecordClip(rule, layout)
    record = [
        tf.cast(tf.fill(shape, tf.constant(values[i % len(values)], tf.float64)), dtype)
        for i, (dtype, shape) in enumerate(leaves)
    ]
    state = clip.state(clip.initial_state())
    weights, norms, _ = clip.weigh(record, state)
    vector = layout.to_vector(clip.scale_leaves(record, weights))
    vector = tf.cast(vector, tf.float64).numpy()
    assert np.isfinite(vector).all()
    assert np.isfinite(weights).all() and np.isfinite(norms).all()
    bounds = np.cumsum([0, *layout.sizes])
    scales = clip.noise_scales(state).numpy()
    total = 0.0
    for i, group in enumerate(clip.assignment):
        part = vector[bounds[i] : bounds[i + 1]] / scales[group]
        total += float(np.sum(part**2))
    assert math.sqrt(total) <= 1 + 1e-6


RECORDS = st.lists(st.tuples(LEAVES, SHAPES), min_size=1, max_size=4)
ENTRIES = st.lists(
    st.one_of(
        st.sampled_from([math.nan, math.inf, 1e-45, 1e-40, 1e-300, 1e30, 1e38, 1e300]),
        st.floats(-1e6, 1e6),
    ),
    min_size=1,
    max_size=4,
)


@settings(ENGINE, max_examples=40)
@given(RECORDS, ENTRIES, RULES)
def test_a_client_of_any_structure_is_within_the_clip_norm(leaves, values, rule):
    check_record(leaves, values, rule)


@pytest.mark.slow
@MANY
@given(RECORDS, ENTRIES, RULES)
def test_many_clients_are_within_the_clip_norm(leaves, values, rule):
    check_record(leaves, values, rule)
