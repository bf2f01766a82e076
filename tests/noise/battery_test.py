"""A statistical battery on the noise that the optimizers add.

False alarms: all checks that depend on chance go through `assert_likely`, which fails
below a p-value of LEVEL and counts its calls. At most MOST calls are made, so that
sound noise fails a check anywhere in this file with a probability of 8e-7 at most.
Tests that numbers never repeat add 1e-7.
"""

import math
import re
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from scipy import optimize, special, stats

from tests.seeds import philox_block
from tfdpclip.noise import GaussianNoise, box_muller, gaussian, threefry

MOST = 1000
LEVEL = 8e-7 / MOST
SIZE = 1_000_001
_made = 0

# "words" draws small noise and noise on devices other than CPUs from the framework's
# generator; "compiled" is a step compiled by XLA as a whole.
KINDS = {
    "float32": (tf.float32, False, False),
    "words": (tf.float32, False, False),
    "hardened": (tf.float32, True, False),
    "compiled": (tf.float32, False, True),
    "float64": (tf.float64, False, False),
    "hardened float64": (tf.float64, True, False),
}


def assert_likely(*p_values):
    """Passes unless a p-value is too small to be put down to chance."""
    global _made
    _made += len(p_values)
    assert _made <= MOST
    assert all(p >= LEVEL for p in p_values), p_values


def draw(kind="float32", size=SIZE, seed=None):
    dtype, hardened, jit = KINDS[kind]
    source = GaussianNoise(seed, hardened)
    sample = tf.function(lambda: source.sample([size], 1.0, dtype), jit_compile=jit)
    with on_cpus(kind != "words"):
        return sample().numpy().astype(np.float64)


def on_cpus(answer):
    return mock.patch.object(gaussian, "on_cpus", lambda: answer)


def two_sided(count, trials, probability):
    law = stats.binom(trials, probability)
    return min(1.0, 2 * min(law.cdf(count), law.sf(count - 1)))


def equiprobable(uniform, bins):
    """The p-value of Pearson's chi-square test of uniformity."""
    cells = np.minimum((uniform * bins).astype(np.int64), bins - 1)
    counts = np.bincount(cells, minlength=bins)
    return stats.chisquare(counts).pvalue


def anderson_darling(uniform):
    """A bound on the p-value against the uniform distribution, all parameters known.

    The statistic is distributed like sum_j X_j^2 / (j (j + 1)), whose moment generating
    function is sqrt(-2 pi t / cos(pi sqrt(1 + 8 t) / 2)); Chernoff's bound follows.
    """
    u = np.sort(uniform)
    n = len(u)
    weights = 2 * np.arange(1, n + 1) - 1
    statistic = -n - np.mean(weights * (np.log(u) + np.log1p(-u[::-1])))

    def log_bound(t):
        generating = -2 * math.pi * t / math.cos(math.pi / 2 * math.sqrt(1 + 8 * t))
        return 0.5 * math.log(generating) - t * statistic

    best = optimize.minimize_scalar(
        log_bound, bounds=(1e-6, 1 - 1e-6), method="bounded"
    )
    return math.exp(min(0.0, best.fun))


def uncorrelated(vectors):
    """P-values of all correlations between unit-variance vectors, `[k, n]`.

    Of their sum of squares, and of the largest, by Bonferroni. The entries are bounded,
    so that the central limit theorem is good for the tails as well. The vectors are
    made equally long: a long one would be in k products, whose sum of squares then
    varies by more than its law says (in a thousand of 200, twice as much).
    """
    k, n = vectors.shape
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    products = (vectors @ vectors.T)[np.triu_indices(k, 1)] * math.sqrt(n)
    largest = min(1.0, 2 * len(products) * stats.norm.sf(np.abs(products).max()))
    return stats.chi2(len(products)).sf(np.sum(products**2)), largest


def unpredictable(a, b, lags):
    """As `uncorrelated`, of a with b moved by 1 to `lags` places, both directions."""
    n = len(a)
    size = 2 ** math.ceil(math.log2(2 * n))
    cross = np.fft.irfft(np.conj(np.fft.rfft(a, size)) * np.fft.rfft(b, size), size)
    found = np.concatenate([cross[1 : lags + 1], cross[-lags:]]) / math.sqrt(n)
    if a is b:
        found = found[:lags]
    largest = min(1.0, 2 * len(found) * stats.norm.sf(np.abs(found).max()))
    return stats.chi2(len(found)).sf(np.sum(found**2)), largest


def value(x):
    """The sample as a bounded number of unit variance, ..."""
    return math.sqrt(12) * (special.ndtr(x) - 0.5)


def size_of(x):
    """... and its absolute value in the same form, which shows dependent variances."""
    return math.sqrt(12) * (2 * np.abs(special.ndtr(x) - 0.5) - 0.5)


# The distribution of single values.


def check_distribution(x, bins):
    uniform = special.ndtr(x)
    assert_likely(equiprobable(uniform, bins), anderson_darling(uniform))
    assert_likely(stats.kstest(uniform, "uniform").pvalue)
    for level in (3, 3.5, 4, 4.5):
        for side in (x, -x):
            assert_likely(two_sided(np.sum(side > level), len(x), stats.norm.sf(level)))
    # Even moments, of values cut at 5: these are bounded, and Bernstein's inequality
    # holds for any number of them. The tails beyond are counted elsewhere.
    for power in (2, 4, 6, 8):
        cut = np.minimum(np.abs(x), 5.0) ** power
        mean, second = (
            2 * stats.norm.expect(lambda v, p=p: v**p, lb=0, ub=5)
            + 2 * stats.norm.sf(5) * 5**p
            for p in (power, 2 * power)
        )
        error = abs(cut.mean() - mean)
        spread = 2 * (second - mean**2 + 5**power * error / 3)
        assert_likely(min(1.0, 2 * math.exp(-len(x) * error**2 / spread)))
    # Symmetry.
    assert_likely(two_sided(np.sum(x > 0), len(x), 0.5))
    assert_likely(stats.ks_2samp(x[x > 0], -x[x < 0], method="asymp").pvalue)
    assert_likely(2 * stats.norm.sf(abs(np.sum(value(x))) / math.sqrt(len(x))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_values_are_normal(kind):
    check_distribution(draw(kind), 1000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_normal_in_a_large_sample(kind):
    check_distribution(draw(kind, 20_000_001), 10_000)


def check_tails(kind, size, blocks, levels=(3, 4, 5, 5.5, 6)):
    dtype, hardened, jit = KINDS[kind]
    source = GaussianNoise(hardened=hardened)

    @tf.function
    def count():
        x = source.sample([size], 1.0, dtype)
        tail = tf.boolean_mask(x, tf.abs(x) > 3)
        above = [tf.math.count_nonzero(tail > level) for level in levels]
        below = [tf.math.count_nonzero(tail < -level) for level in levels]
        return tf.stack([*above, *below]), tf.math.count_nonzero(x)

    found, nonzero = np.zeros(2 * len(levels), np.int64), 0
    for _ in range(blocks):
        counts, kept = count()
        found += counts.numpy()
        nonzero += int(kept)
    trials = size * blocks
    for number, level in zip(found, (*levels, *levels), strict=True):
        assert_likely(two_sided(number, trials, stats.norm.sf(level)))
    return trials - nonzero


@pytest.mark.slow
def test_the_tails_have_their_mass():
    zeros = check_tails("float32", 4_000_000, 80)
    # A value of exactly 0 would release its coordinate without noise.
    assert zeros == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, blocks", [("float32", 1500), ("float64", 120), ("hardened", 100)]
)
def test_the_tails_have_their_mass_to_six_standard_deviations(kind, blocks):
    # In float32, 6 values a side are expected beyond 6, and 36 beyond 5.7, where the
    # framework's samplers end. The next two tests show that float64 does not end there
    # either: counts for float64 would take hours.
    zeros = check_tails(kind, 4_000_000, blocks, (3, 4, 5, 5.5, 5.7, 6))
    # Sums of four round to a grid that includes 0.
    assert zeros == 0 or kind == "hardened"


@tf.function(jit_compile=True)
def compiled_pair(first, second):
    """Compiled draws from two words, laid out as `box_muller` does."""
    words = (tf.bitcast(word, tf.uint32) for word in (first, second))
    return tf.concat(threefry.two_normals(*words, tf.constant(1.0)), 0)


@pytest.mark.parametrize(
    "dtype, transform",
    [(tf.int32, box_muller), (tf.int64, box_muller), (tf.int32, compiled_pair)],
)
def test_the_radius_of_every_word_is_that_of_its_quantile(dtype, transform):
    """Exact where no sample could tell: the tail, word for word."""
    words = np.array(
        [0, 1, 2, 3, 10, 1000, 10**6, 10**9, 2**31 - 2], dtype.as_numpy_dtype
    )
    for low in (0, 1, 100, 255) if dtype == tf.int32 else (0,):
        second = np.full(len(words), low + 256 * 12345, dtype.as_numpy_dtype)
        for first in (words, words | np.iinfo(words.dtype).min):  # the sign is unused
            cosine, sine = np.split(
                transform(tf.constant(first), tf.constant(second)).numpy(), 2
            )
            radius = np.hypot(cosine.astype(np.float64), sine.astype(np.float64))
            if dtype == tf.int32:
                quantile = (words + (low + 0.5) / 256) / 2**31
            else:
                quantile = (words + 0.5) / 2**63
            expected = np.sqrt(-2 * np.log(quantile))
            np.testing.assert_allclose(radius[:-1], expected[:-1], rtol=1e-6)
            assert radius[-1] > 0
    reach = np.hypot(*transform(tf.zeros([1], dtype), tf.zeros([1], dtype)).numpy())
    assert reach == pytest.approx(7.446 if dtype == tf.int32 else 9.419, abs=1e-3)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_samples_are_made_of_the_generators_words(kind):
    """The optimizer's noise is made as in the test above."""
    dtype = KINDS[kind][0]
    words, signed = (
        (tf.uint32, tf.int32) if kind == "float32" else (tf.uint64, tf.int64)
    )
    source = GaussianNoise()
    generator = tf.random.Generator.from_state(
        source._generator.state.numpy(), alg="philox"
    )
    drawn = source.sample([99], 1.0, dtype)
    pair = tf.unstack(tf.bitcast(generator.uniform_full_int([2, 56], words), signed))
    np.testing.assert_array_equal(drawn, box_muller(*pair)[:99])


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_compiled_samples_are_made_of_threefry_blocks(jit):
    """The key differs for every draw and source, and the counter for every block."""
    source = GaussianNoise()
    sample = tf.function(lambda: source.sample([70_000], 2.0), jit_compile=jit)
    state = source._generator.state.numpy().view(np.uint64)
    first, second = sample().numpy(), sample().numpy()
    # The framework chooses by how much it moves its counter, but it moves by more than
    # the two blocks that make a draw's key.
    moved = source._generator.state.numpy().view(np.uint64)[0] - state[0]
    assert moved % 4 == 0 and moved > 0
    for drawn, by in ((first, 0), (second, moved // np.uint64(2))):
        key, number, start, masks = draw_words(state, np.uint64(by))
        index = tf.range(70_000 // 2, dtype=tf.int64)
        counter = [tf.cast(index, tf.uint32) + start, number]
        words = threefry.threefry(counter, key)
        pair = [
            tf.bitcast(tf.bitwise.bitwise_xor(word, mask), tf.int32)
            for word, mask in zip(words, masks, strict=True)
        ]
        cosine, sine = np.split(2 * box_muller(*pair).numpy(), 2)
        # Sines, cosines and logarithms are the compiler's own, or ours: an angle
        # is right to 2.4e-7, and a radius, of 2 * 7.4 at most, as far off.
        np.testing.assert_allclose(drawn[::2], cosine, atol=1e-5)
        np.testing.assert_allclose(drawn[1::2], sine, atol=1e-5)


def draw_words(state, moved):
    """A draw's key, number, start and masks, by two blocks of Philox."""
    low, half = np.uint64(2**32 - 1), np.uint64(32)
    secret = state[2] ^ np.uint64(threefry._DOMAIN)
    words = []
    for block in range(2):
        serial = state[0] + moved + np.uint64(block)
        counter = [serial & low, serial >> half, state[1] & low, state[1] >> half]
        words += philox_block(counter, [secret & low, secret >> half])
    words = [tf.constant(word, tf.uint32) for word in words]
    return words[:2], words[2], words[3], words[4:6]


def test_draws_have_keys_of_their_own():
    """Two consecutive draws have different keys, whatever the counter's last bit."""
    for last in (0, 1, 255):
        seen = set()
        for serial in range(40):
            state = np.array([256 * serial + last, 5, 7], np.int64)
            seen.add(tuple(int(w) for w in threefry.secrets_of(tf.constant(state))))
        assert len(seen) == 40 and all(len(set(words)) == 8 for words in seen)


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ([0] * 2, [0] * 2, [0x6B200159, 0x99BA4EFE]),
        ([0xFFFFFFFF] * 2, [0xFFFFFFFF] * 2, [0x1CB996FC, 0xBB002BE7]),
        ([0x243F6A88, 0x85A308D3], [0x13198A2E, 0x03707344], [0xC4923A9C, 0x483DF7A0]),
    ],
)
def test_threefry_gives_the_published_words(counter, key, words):
    """The known answers that Salmon et al. publish with their generator."""
    counter, key = ([tf.constant(v, tf.uint32) for v in p] for p in (counter, key))
    assert [int(word) for word in threefry.threefry(counter, key)] == words


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    """The known answers that Salmon et al. publish with their generator."""
    assert philox_block(counter, key) == words


def test_philox_is_the_frameworks_generator():
    state = np.array([2**40 + 5, 2**33 + 9, 2**63 - 12345], np.int64)
    generator = tf.random.Generator.from_state(tf.constant(state), alg="philox")
    expected = generator.uniform_full_int([4 * 100], tf.uint32).numpy()
    low, wide = 2**32 - 1, [int(word) for word in state.view(np.uint64)]
    words = []
    for block in range(100):
        serial = wide[0] + block
        counter = [serial & low, serial >> 32, wide[1] & low, wide[1] >> 32]
        words += philox_block(counter, [wide[2] & low, wide[2] >> 32])
    assert words == list(expected)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.slow
def test_sines_and_cosines_are_right_to_the_last_bit_or_so(jit):
    # Angles are odd multiples of 2^-24; ends, quarters and their neighbours included.
    odd = np.arange(-(2**24) + 1, 2**24, 2, dtype=np.int64)
    near = np.abs(odd[:, None] - 2**22 * np.arange(-4, 5)).min(1) < 1000
    half_turns = odd[near | (np.arange(len(odd)) % 97 == 0)] * 2.0**-24
    cosine, sine = tf.function(threefry.cosine_and_sine, jit_compile=jit)(
        tf.constant(half_turns, tf.float32)
    )
    # Float32 rounds numbers below 1 by 6e-8.
    assert np.max(np.abs(cosine - np.cos(np.pi * half_turns))) < 1.5e-7
    assert np.max(np.abs(sine - np.sin(np.pi * half_turns))) < 1.5e-7
    assert np.all(cosine != 0) and np.all(sine != 0)


def test_values_near_zero_are_spread_evenly():
    """Sorted, the gaps between them are those of a Poisson process."""
    x = draw(size=4_000_001)
    near = np.sort(x[np.abs(x) < 0.01])
    assert_likely(stats.kstest(near / 0.02 + 0.5, "uniform").pvalue)
    gaps = np.diff(near)
    assert_likely(stats.kstest(gaps / gaps.mean(), "expon").pvalue)


def test_values_repeat_no_more_often_than_float32_makes_them():
    """The number of equal pairs is that of Gaussian numbers rounded to float32."""
    x = draw()
    n = len(x)
    _, counts = np.unique(x, return_counts=True)
    pairs = np.sum(counts * (counts - 1.0)) / 2
    # Each float's cell has the density times the gap to the next float.
    grid = np.linspace(1e-6, 8, 400_001)
    cell = stats.norm.pdf(grid) * np.spacing(grid.astype(np.float32))
    per_value, step = stats.norm.pdf(grid), 2 * (grid[1] - grid[0])
    twice, thrice = np.sum(per_value * cell) * step, np.sum(per_value * cell**2) * step
    expected = n * (n - 1) / 2 * twice
    spread = math.sqrt(expected + n**3 * (thrice - twice**2))
    # Above 0.5 cells are wide enough that the finer structure of radius and angle shows
    # in a few of them; one part in fifty is allowed on top.
    assert_likely(stats.norm.sf(max(0.0, pairs - 1.02 * expected) / spread))


# Independence within a draw.


def halves(x, kind):
    """The cosines and the sines."""
    if kind in ("words", "float64", "hardened float64"):
        # The source drew up to 15 more numbers.
        half = (-(-len(x) // 16) * 16) // 2
        return x[: len(x) - half], x[half:]
    pairs = len(x) // 2
    return x[: 2 * pairs : 2], x[1 : 2 * pairs : 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(3)
def test_both_halves_are_normal_and_independent(kind):
    cosine, sine = halves(draw(kind), kind)
    for part in (cosine, sine):
        assert_likely(equiprobable(special.ndtr(part), 1000))
    # The joint distribution, in 64 x 64 equiprobable cells; angle and radius.
    cells = (special.ndtr(cosine) * 64).astype(int) + special.ndtr(sine) * 64 // 1 * 64
    assert_likely(equiprobable(cells / 4096, 4096))
    assert_likely(equiprobable(np.arctan2(sine, cosine) / (2 * math.pi) + 0.5, 1000))
    radius = np.exp(-(cosine**2 + sine**2) / 2)
    assert_likely(equiprobable(radius, 1000))
    n = math.sqrt(len(sine))
    for f in (value, size_of):
        for g in (value, size_of):
            assert_likely(2 * stats.norm.sf(abs(np.sum(f(cosine) * g(sine))) / n))
            assert_likely(*unpredictable(f(cosine), g(sine), 1000))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", ["float32", "words", "compiled", "float64"])
def test_values_do_not_depend_on_those_before(kind):
    x = draw(kind)
    for f in (value, size_of):
        assert_likely(*unpredictable(f(x), f(x), 1000))


@pytest.mark.slow
def test_values_do_not_depend_on_those_before_in_a_large_sample():
    x = draw(size=8_000_001)
    for f in (value, size_of):
        assert_likely(*unpredictable(f(x), f(x), 10_000))


# Independence of draws.


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
@pytest.mark.parametrize("hardened", [False, True])
def test_steps_and_variables_are_independent(dtype, hardened):
    source = GaussianNoise(hardened=hardened)
    shapes = [[101, 99], [9999], [3, 3333]]

    @tf.function
    def step():
        parts = source.sample_all(shapes, [1.0] * 3, [dtype] * 3)
        return tf.stack([tf.reshape(part, [-1])[:9999] for part in parts])

    drawn = np.concatenate([step().numpy() for _ in range(40)]).astype(np.float64)
    for f in (value, size_of):
        assert_likely(*uncorrelated(f(drawn)))
    # Every pair of different variables, in a step and in consecutive steps, over all
    # steps at once.
    by_step = value(drawn).reshape(40, 3, 9999)
    for later, earlier in ((by_step, by_step), (by_step[1:], by_step[:-1])):
        for i, j in ((0, 1), (0, 2), (1, 2), (0, 0), (1, 1), (2, 2)):
            if later is earlier and i == j:
                continue
            total = np.sum(later[:, i] * earlier[:, j])
            assert_likely(2 * stats.norm.sf(abs(total) / math.sqrt(later[:, i].size)))
    # Each step against the next, also moved against each other.
    assert_likely(
        *unpredictable(value(drawn[:60].ravel()), value(drawn[60:].ravel()), 1000)
    )


def test_streams_of_neighbouring_seeds_are_unrelated():
    drawn = np.stack([GaussianNoise(seed).sample([20_000], 1.0) for seed in range(60)])
    # Streams that meet share whole runs. Two runs of four values agree by chance with
    # probability 1e-17.
    runs = np.lib.stride_tricks.sliding_window_view(drawn, 4, axis=1).reshape(-1, 4)
    assert len(np.unique(np.ascontiguousarray(runs).view("V16"))) == len(runs)
    drawn = drawn.astype(np.float64)
    for f in (value, size_of):
        assert_likely(*uncorrelated(f(drawn)))


@pytest.mark.slow
def test_streams_of_a_thousand_sources_are_unrelated():
    sources = [GaussianNoise() for _ in range(1000)]
    states = np.stack([source._generator.state.numpy() for source in sources])
    # Key and counter, 64 bits each: two of a thousand agree with probability 3e-14.
    for column in states.T:
        assert len(np.unique(column)) == 1000
    drawn = np.stack([source.sample([200], 1.0).numpy() for source in sources])
    assert_likely(*uncorrelated(value(drawn.astype(np.float64))))


@pytest.mark.parametrize("compiled", [None, False, True])
@pytest.mark.slow
def test_no_two_draws_use_the_same_part_of_the_stream(compiled, monkeypatch):
    """Of odd, large and tiny draws, of both types, hardened and for perturbation."""
    plain, hardened = GaussianNoise(), GaussianNoise(hardened=True)
    hardened._generator = stream = plain._generator  # both draw from this stream
    # XLA takes half a second to compile each.
    sizes = (5, 20_001) if compiled else (1, 2, 3, 5, 255, 256, 257, 1023, 20_001)
    original, used = stream.uniform_full_int, []

    def recorded(*args, **kwargs):
        used.append(original(*args, **kwargs))
        return used[-1]

    monkeypatch.setattr(stream, "uniform_full_int", recorded)

    def run():
        used.clear()
        for source in (plain, hardened):
            for size in sizes:
                source.sample([size], 1.0)
                source.sample([size], 1.0, tf.float64)
                source.seed_pair()
            types = [tf.bfloat16, tf.float64, tf.float32]
            source.sample_all([[7], [3, 3], [11]], [1.0] * 3, types)
        words = [tf.bitcast(u, tf.uint32) for u in used]
        return tf.concat([tf.reshape(w, [-1]) for w in words], 0)

    step = run
    if compiled is not None:
        step = tf.function(run, jit_compile=compiled, autograph=False)
    words = np.concatenate([step().numpy() for _ in range(3)])
    assert len(words) > 800_000
    # Of a million 64-bit pairs, two agree by chance with probability 3e-8, three times
    # in this file. Any overlap would repeat whole blocks of four words.
    pairs = words[:-1].astype(np.uint64) << np.uint64(32) | words[1:]
    assert len(np.unique(pairs)) == len(pairs)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_counter_carries_into_its_upper_half(compiled):
    source = GaussianNoise()
    start = tf.constant([-300, 7, 1], tf.int64)  # 300 below 2^64
    source._generator.state.assign(start)
    step = tf.function(lambda: source.sample([2000], 1.0), jit_compile=compiled)
    first, second = step().numpy(), step().numpy()
    assert source._generator.state.numpy()[1] == 8
    assert not np.intersect1d(first[:200], second[:200]).size


def test_seed_pairs_never_repeat():
    source = GaussianNoise()
    pairs = tf.function(lambda: tf.stack([source.seed_pair() for _ in range(50)]))
    found = np.concatenate([pairs().numpy() for _ in range(200)])
    # 10,000 of 2^64: two agree with probability 3e-12.
    assert len(np.unique(found, axis=0)) == len(found)
    uniform = (found.ravel().astype(np.float64) + 2**31) / 2**32
    assert_likely(equiprobable(uniform, 100))


def test_xla_compiles_the_generator_once_for_all_variables():
    """XLA would make it a part of each variable's loop."""
    source, shapes = GaussianNoise(), [[300, 100], [100], [400, 100], [7]]

    def add(weights):
        noise = source.sample_all(shapes, [tf.constant(2.0)] * len(shapes))
        return [w + n for w, n in zip(weights, noise, strict=True)]

    weights = [tf.zeros(shape) for shape in shapes]
    compiled = tf.function(add, jit_compile=True, autograph=False)
    program = compiled.experimental_get_compiler_ir(weights)(stage="optimized_hlo")
    loops = re.findall(r"^%[^\n]*\{\n(.*?)^\}", program, re.DOTALL | re.MULTILINE)
    # Threefry has 20 rounds.
    assert sum(loop.count(" shift-left(") >= 20 for loop in loops) == 1
    stddevs = [float(tf.math.reduce_std(part)) for part in compiled(weights)[::2]]
    np.testing.assert_allclose(stddevs, 2.0, rtol=0.05)


@pytest.mark.slow
def test_the_noise_of_federated_rounds_passes_as_well():
    pytest.importorskip("tensorflow_federated")
    from tfdpclip.federated import _entropy as entropy

    sample = tf.function(lambda: entropy.standard_normal(SIZE, entropy.fresh_seed()))
    first, second = (sample().numpy().astype(np.float64) for _ in range(2))
    check_distribution(first, 1000)
    for f in (value, size_of):
        assert_likely(*unpredictable(f(first), f(first), 1000))
        assert_likely(*unpredictable(f(first), f(second), 1000))
