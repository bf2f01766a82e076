"""The certificate finds planted errors in the first step, and no rounding."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpclip.kernel import certificate
from tfdpclip.kernel.certificate import COARSE, FINE

COUNT, SIZES = 32, (40, 8, 30, 3)
MEMBERS = np.array([[1, 1, 0, 0], [0, 0, 1, 1]], np.float32)


def gradients(rng, spread=1.0):
    """Gradients by variable, `[B, n]`, of norms that differ by up to 10^spread."""
    factors = 10 ** rng.uniform(-spread / 2, spread / 2, [COUNT, 1])
    each = [factors * rng.normal(0.5, 1.0, size=(COUNT, n)) for n in SIZES]
    return [part.astype("float32") for part in each]


def added(weights, each):
    return [tf.linalg.matvec(part, weights, transpose_a=True) for part in each]


def make_check(sums=None, shares=1.0, tolerance=FINE, jit=False):
    """A function of gradients: whether they are accepted, and show something.

    Args:
      sums: the supplier's sums of weights and gradients, of a numbered step; by default
        the right sums.
      shares: the supplier states so much of the norms, `[B]`.
      tolerance: of the certificate.
      jit: whether XLA compiles the check.
    """

    @tf.function(autograph=False, jit_compile=jit)
    def check(each, number=0):
        many, alone = certificate.draw_seeds(COUNT, None, tolerance)
        weights = many + alone
        stated = added(weights, each) if sums is None else sums(weights, each, number)
        squares = tf.stack([tf.reduce_sum(tf.square(part), 1) for part in each])
        squares *= tf.square(tf.cast(shares, tf.float32))
        decisive = tf.sqrt(tf.transpose(tf.matmul(MEMBERS, squares)))
        norms = certificate.Norms(squares, squares, decisive)
        one = added(alone, each)
        total = [a + b for a, b in zip(added(many, each), one, strict=True)]
        of_sums, told = certificate.sum_errors(stated, total, weights, norms, tolerance)
        of_norms, shows = certificate.norm_errors(
            *(one, one, MEMBERS, alone, norms, tolerance)
        )
        accepted = tf.reduce_max(of_sums) <= tolerance.sums
        accepted &= tf.reduce_max(of_norms) <= tolerance.norms
        return accepted, told & shows

    return check


def with_weights(change):
    return lambda weights, each, number: added(change(weights, number), each)


def with_factor(factor, place):
    """The sums of one variable, by the number of the step, times a factor."""

    def sums(weights, each, number):
        places = enumerate(added(weights, each))
        chosen = place(number)
        return [tf.where(tf.equal(i, chosen), factor, 1.0) * part for i, part in places]

    return sums


def one_hot(number):
    return tf.one_hot(number % COUNT, COUNT)


SUMS = {
    "one example twice": with_weights(lambda w, i: w * (1 + one_hot(i))),
    "one left out": with_weights(lambda w, i: w * (1 - one_hot(i))),
    "a forgotten bias": with_factor(0.0, lambda i: 1 + 2 * (i % 2)),
    "a variable times 1.01": with_factor(1.01, lambda i: i % 4),
    "weights of other examples": with_weights(lambda w, i: tf.roll(w, 1, 0)),
    "weights left out": with_weights(lambda w, i: tf.ones_like(w)),
    "weights squared": with_weights(lambda w, i: tf.square(w)),
}


@pytest.mark.parametrize("name", SUMS)
def test_wrong_sums_are_found_in_every_first_step(name):
    rng, check = np.random.default_rng(1), make_check(SUMS[name])
    for number in range(100):
        assert not check(gradients(rng), tf.constant(number))[0], number


@pytest.mark.parametrize("share", [1 / 1.2, 0.98])
def test_norms_that_are_all_too_small_are_found_in_every_first_step(share):
    rng, check = np.random.default_rng(2), make_check(shares=share)
    for _ in range(100):
        assert not check(gradients(rng))[0]


def test_one_wrong_norm_is_found_as_often_as_its_example_is_drawn():
    """Of 1,500 checks one in 32 finds it, within six standard deviations: 1e-8."""
    shares = np.ones([COUNT], np.float32)
    shares[5] = 0.5
    each, check = gradients(np.random.default_rng(3)), make_check(shares=shares)
    each, number = list(map(tf.constant, each)), tf.constant(0)
    hits = sum(not check(each, number)[0] for _ in range(1500))
    expected = 1500 / COUNT
    assert abs(hits - expected) < 6 * np.sqrt(expected)


@pytest.mark.parametrize("tolerance", [FINE, COARSE], ids=["fine", "coarse"])
def test_rounding_is_no_error(tolerance):
    rng, check = np.random.default_rng(4), make_check(tolerance=tolerance)
    for scale in (1e-30, 1e-15, 1.0, 1e15, 1e30, np.inf, np.nan):
        for spread in (0.0, 4.0, 20.0):
            with np.errstate(over="ignore", invalid="ignore"):
                each = [np.float32(scale) * part for part in gradients(rng, spread)]
                each[2][3:] *= 0.0
            assert check(each)[0]


def test_a_batch_that_shows_nothing_is_inconclusive():
    each, check = gradients(np.random.default_rng(5)), make_check()
    assert all(check(each))
    for factor in (0.0, np.nan, np.inf):
        with np.errstate(invalid="ignore"):
            accepted, shows = check([np.float32(factor) * part for part in each])
        assert accepted and not shows


@pytest.mark.slow
def test_xla_decides_alike():
    rng, right = np.random.default_rng(6), make_check(jit=True)
    wrong = make_check(SUMS["one left out"], jit=True)
    for number in range(20):
        each = gradients(rng)
        assert all(right(each)) and not wrong(each, tf.constant(number))[0]


@pytest.mark.parametrize("tolerance", [FINE, COARSE], ids=["fine", "coarse"])
def test_a_row_that_fills_a_batch_up_is_never_the_example(tolerance):
    present = np.arange(COUNT) % 4 == 0
    for _ in range(20):
        many, alone = certificate.draw_seeds(COUNT, present, tolerance)
        assert float(tf.reduce_sum(alone)) == 1.0 and present[np.argmax(alone)]
        assert set(np.unique(many)) <= {0.0, 1.0}
