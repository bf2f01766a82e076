"""Seeds of 128 bits: derivation and streams lose none of them, wherever they run."""

import ast
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests.seeds import COLLIDING, assert_random_words, opened, philox_block
from tfdpclip.gradients.forms.base_form import Budget
from tfdpclip.gradients.forms.perturbation import Perturbation
from tfdpclip.noise import GaussianNoise, philox, threefry

PURPOSES = (0, 1, 2**31, 2**32 - 1)


def _parents(count=20):
    rng = np.random.default_rng()
    return [
        *([0, 0], [-1, -1], [1, 0], [0, 1], *COLLIDING[0]),
        *rng.integers(-(2**63), 2**63, [count, 2]),
    ]


def _unsigned(seed):
    return tuple(int(word) % 2**64 for word in seed)


def _block(counter, key):
    """Two 64-bit words of Philox."""
    parts = [part for word in counter for part in (word % 2**32, word >> 32)]
    a, b, c, d = philox_block(parts, (key % 2**32, key >> 32))
    return a | b << 32, c | d << 32


def _flips(bits, width):
    """A random array of integers and copies with each bit flipped."""
    dtype = np.dtype(f"u{width // 8}")
    start = np.frombuffer(np.random.default_rng().bytes(bits // 8), dtype)
    for bit in range(bits):
        other = start.copy()
        other[bit // width] ^= dtype.type(1) << dtype.type(bit % width)
        yield start, other


@pytest.mark.parametrize("jit", [None, False, True], ids=["eager", "graph", "xla"])
def test_the_parent_can_be_computed_from_a_derived_seed(jit):
    """So no two parents share a derived seed. Philox is inverted for each purpose."""
    run = philox.derive
    if jit is not None:
        run = tf.function(run, jit_compile=jit)
    for parent in _parents():
        seed = tf.constant(parent, tf.int64)
        # A tensor's own bits are the purpose: 2^31 and above are negative there.
        for purpose in PURPOSES:
            shown = tf.constant(np.uint32(purpose).view(np.int32))
            derived = run(seed, shown).numpy()
            assert opened(derived, purpose) == _unsigned(parent)
    known = run(seed, 7).numpy()
    assert opened(known, 7) == _unsigned(parent)
    expected = _block(_unsigned(parent), philox._DERIVED << 32 | 7)
    assert _unsigned(known) == expected


@pytest.mark.parametrize("jit", [None, False, True], ids=["eager", "graph", "xla"])
def test_the_seed_can_be_computed_from_key_and_counter(jit):
    run = philox.key_and_counter
    if jit is not None:
        run = tf.function(run, jit_compile=jit)
    for parent in _parents():
        key, counter = (x.numpy() for x in run(tf.constant(parent, tf.int64)))
        assert key.shape == (1,) and counter.shape == (2,)
        # 2^64 blocks before streams could meet.
        assert counter[0] == 0
        found = opened([key[0], counter[1]], 0, philox._STREAM)
        assert found == _unsigned(parent)


def test_compiled_streams_are_the_others():
    """The framework uses its default generator under XLA; here it has no choice.

    (Only the floating-point numbers that it makes of the words differ.)
    """
    seed = tf.constant(_parents()[-1])
    for draw in (
        lambda: philox.full_integers([9], seed, tf.int32),
        lambda: philox.full_integers([9], seed, tf.int64),
    ):
        np.testing.assert_array_equal(draw(), tf.function(draw, jit_compile=True)())
    key, counter = philox.key_and_counter(seed)
    expected = _block([int(word) for word in counter], int(key[0]))
    found = _unsigned(philox.full_integers([2], seed, tf.int64).numpy())
    assert found == expected


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
def test_every_bit_of_a_seed_changes_every_kind_of_draw(jit):
    @tf.function(jit_compile=jit)
    def draw(seed):
        return (
            philox.full_integers([8], seed, tf.int32),
            philox.uniform([8], seed),
            philox.uniform([8], seed, tf.float64),
            philox.normal([8], seed),
        )

    for start, other in _flips(128, 64):
        pairs = zip(draw(start.view("i8")), draw(other.view("i8")), strict=True)
        for first, second in pairs:
            # A pair out of eight agrees by chance with probability 1e-6, two pairs with
            # 1e-12.
            assert np.sum(first.numpy() == second.numpy()) < 2


def test_streams_and_derived_seeds_are_unrelated_to_each_other():
    parents = np.random.default_rng().integers(-(2**63), 2**63, [4096, 2])

    @tf.function
    def run(parents):
        def one(seed):
            stream = philox.full_integers([2], seed, tf.int64)
            child = philox.derive(seed, 0)
            of_child = philox.full_integers([2], child, tf.int64)
            return tf.stack([stream, child, of_child])

        return tf.map_fn(one, parents)

    found = run(parents).numpy()
    for i, j in ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2)):
        assert_random_words(found[:, i] if i == j else found[:, i] ^ found[:, j])


@pytest.mark.parametrize("seed", [[1, 2], np.array([1, 2], np.int32), np.arange(3)])
def test_narrow_seeds_are_refused(seed):
    with pytest.raises(ValueError, match=r"seed must be int64 of shape \[2\]"):
        philox.derive(seed, 0)


@pytest.mark.parametrize("purpose", [-1, 2**32, tf.constant(1, tf.int64), np.zeros(1)])
def test_purposes_that_would_be_cut_off_are_refused(purpose):
    with pytest.raises(ValueError, match="purpose must be"):
        philox.derive(tf.constant([1, 2], tf.int64), purpose)


@pytest.mark.slow
def test_nothing_in_the_library_takes_seeds_the_frameworks_way():
    """Functions that take a seed outside `philox` lose some of its bits."""
    root = pathlib.Path(philox.__file__).parents[1]
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            refused = name.startswith(("stateless_", "StatelessRandom", "from_seed"))
            refused |= name in ("fold_in", "split_seed", "index_shuffle")
            elsewhere = path.name != "philox.py"
            assert not (refused and elsewhere), f"{path}:{node.lineno} uses {name}"


# The noise of an optimizer.


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_every_bit_of_the_noise_source_changes_its_noise(dtype, jit):
    source = GaussianNoise()
    draw = tf.function(lambda: source.sample([16], 1.0, dtype), jit_compile=jit)
    for start, other in _flips(192, 64):
        drawn = []
        for state in (start, other):
            source._generator.state.assign(state.view("i8"))
            drawn.append(draw().numpy())
        assert np.sum(drawn[0] == drawn[1]) < 2


@pytest.mark.slow
def test_every_bit_of_the_noise_source_changes_compiled_noise():
    for start, other in _flips(192, 64):
        drawn = [
            threefry.normals(16, 0, tf.constant(state.view("i8")), tf.constant(1.0))
            for state in (start, other)
        ]
        assert np.sum(drawn[0].numpy() == drawn[1].numpy()) < 2


# Perturbation of records.


def _perturbation(seed, shapes=([20], [4, 5]), budget=None):
    budget = Budget(2**62, 1) if budget is None else budget
    return Perturbation(1.0, tf.convert_to_tensor(seed), shapes, budget)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
def test_every_bit_of_the_steps_seed_changes_every_perturbation(jit):
    @tf.function(jit_compile=jit)
    def draw(seed):
        added = _perturbation(seed).weighted_sum([tf.ones([1])] * 2)
        return tf.concat([tf.reshape(part, [-1]) for part in added], 0)

    for start, other in _flips(64, 32):
        first, second = draw(start.view("i4")), draw(other.view("i4"))
        # Of 40, 4 agree by chance with probability 1e-20.
        assert np.sum(first.numpy() == second.numpy()) < 4
    for start, other in _flips(128, 64):
        first, second = draw(start.view("i8")), draw(other.view("i8"))
        assert np.sum(first.numpy() == second.numpy()) < 4


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
def test_perturbations_of_steps_that_folding_takes_for_one_differ(jit):
    @tf.function(jit_compile=jit)
    def draw(seed):
        return tf.stack(
            [
                _perturbation(seed, [[100]] * 3)._noise(i, tf.constant(start), 1)[0]
                for i in range(3)
                for start in (0, 1, 5)
            ]
        )

    drawn = [draw(tf.constant(seed, tf.int64)) for seed in COLLIDING[0]]
    correlations = np.corrcoef(np.concatenate(drawn)) - np.eye(18)
    # Variables, chunks and steps; 8 standard deviations.
    assert np.abs(correlations).max() < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_norms_and_sums_of_perturbations_are_of_the_same_noise(chunk, jit):
    shapes = [[20], [4, 5]]
    budget = Budget(2**62 if chunk is None else chunk * 12 * 40, 7)

    @tf.function(jit_compile=jit)
    def run(seed):
        noise = _perturbation(seed, shapes, budget)
        squares = noise.squared_norms(
            lambda start, size: [tf.zeros([size, *shape]) for shape in shapes],
            tf.constant(7),
        )
        alone = [noise.weighted_sum([tf.one_hot(i, 7)] * 2) for i in (0, 2, 6)]
        return squares, [[tf.reduce_sum(x**2) for x in sums] for sums in alone]

    squares, alone = run(tf.constant([5, 6]))
    # Of the first chunk, its end, and the last, which is moved back.
    found = squares.numpy()[[0, 2, 6]]
    np.testing.assert_allclose(found, np.array(alone, np.float32), rtol=1e-5)
    # No two records or variables share noise.
    assert len(np.unique(np.round(squares, 5))) == 14
