"""Groups that are clipped whole are drawn independently, and counted so."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD, L, some_data
from tfdpclip import accounting, sampling
from tfdpclip.accounting import PrivacyMismatchError
from tfdpclip.keras import PrivacyBudget

C = 0.5


def drawn(k=1, count=60, rate=0.2, scheme=None, **options):
    x, y = some_data(count, 3)
    scheme = sampling.Poisson(rate) if scheme is None else scheme
    return scheme.batches((x, y), accumulation_steps=k, **options)


def fit(batches, k=1, epochs=2, **options):
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(1)])
    optimizer = DPSGD(
        0.1, clip=C, noise_multiplier=3.0, unit="batch", accumulation_steps=k
    )
    model.compile(optimizer, "mse", **options)
    budget = PrivacyBudget(math.inf, 1e-5, batches)
    model.fit(batches, epochs=epochs, verbose=0, callbacks=[budget])
    return budget, optimizer


def test_the_ledger_counts_batch_clipping_with_half_the_noise():
    budget, _ = fit(drawn())
    expected = accounting.epsilon(1.5, 10, sampling.Poisson(0.2), 1e-5)
    assert budget.ledger.epsilon() == pytest.approx(expected, rel=1e-3)
    assert "batch" in str(budget.statement())


def test_group_clipping_needs_independent_groups():
    with pytest.raises(PrivacyMismatchError, match="independent_groups=True"):
        fit(drawn(3), 3)
    budget, optimizer = fit(drawn(3, independent_groups=True), 3)
    assert int(optimizer.iterations) == budget.ledger.steps == 10
    expected = accounting.epsilon(1.5, 10, sampling.Poisson(0.2), 1e-5)
    assert budget.ledger.epsilon() == pytest.approx(expected, rel=1e-3)


def test_group_clipping_of_the_full_batch():
    batches = drawn(2, scheme=sampling.FullBatch(), independent_groups=True)
    budget, _ = fit(batches, 2, epochs=3)
    expected = accounting.epsilon(1.5, 3, sampling.FullBatch(), 1e-5)
    assert budget.ledger.epsilon() == pytest.approx(expected, rel=1e-6)


def test_independent_groups_are_for_group_clipping_only():
    batches = drawn(3, independent_groups=True)
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(1)])
    optimizer = DPSGD(
        0.1,
        clip=C,
        noise_multiplier=3.0,
        expected_batch_size=12,
        accumulation_steps=3,
    )
    model.compile(optimizer, "mse")
    with pytest.raises(PrivacyMismatchError, match="independent_groups"):
        model.fit(
            batches, verbose=0, callbacks=[PrivacyBudget(math.inf, 1e-5, batches)]
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme",
    [sampling.FixedSize(12, 60), sampling.ShuffledEpochs(12, 60)],
    ids=["fixed", "shuffled"],
)
def test_replacing_a_record_changes_one_group_anyway(scheme):
    """Neighbours are by replacement there: groups may be filled in order."""
    batches = drawn(3, scheme=scheme)
    assert batches.independent_groups
    budget, _ = fit(batches, 3)
    assert budget.ledger.steps == 10
    with pytest.raises(ValueError, match="independent_groups"):
        drawn(3, scheme=scheme, independent_groups=True)


def test_a_scheme_with_a_capacity_has_no_independent_groups():
    scheme = sampling.Poisson(0.2, capacity=20, population=60)
    with pytest.raises(ValueError, match="independent_groups"):
        drawn(3, scheme=scheme, independent_groups=True)


def groups_of(batches, steps):
    """`[steps, count]`: the group of each record, -1 for records not drawn.

    Records are told apart by their first feature.
    """
    k = batches.accumulation_steps
    elements = iter(batches.repeat())
    found = np.full([steps, batches.population], -1)
    for step in range(steps):
        for group in range(k):
            x, _, weight = next(elements)
            ids = x.numpy()[weight.numpy() > 0, 0].astype(int)
            assert np.all(found[step, ids] == -1)
            found[step, ids] = group
    return found


def numbered(count, rate, k, **options):
    x = np.arange(count, dtype=np.float32)[:, np.newaxis]
    return sampling.Poisson(rate).batches(
        (x, x), accumulation_steps=k, independent_groups=True, **options
    )


@pytest.mark.slow
def test_every_record_goes_to_a_group_of_its_own_choice():
    """Each of (record, group) and of (pair of records, same group) by a binomial.

    Bounds of 6 standard deviations for 2 x 30 x 3 and 435 counts: below 1e-6.
    """
    count, k, steps = 30, 3, 3000
    found = groups_of(numbered(count, 0.5, k), steps)
    drawn_at_all = found >= 0
    n = steps * 0.5
    assert np.all(np.abs(drawn_at_all.sum(0) - n) < 6 * math.sqrt(n / 2))
    for group in range(k):
        hits = (found == group).sum(0)
        p = 0.5 / k
        sd = math.sqrt(steps * p * (1 - p))
        assert np.all(np.abs(hits - steps * p) < 6 * sd)
    together = np.zeros([count, count])
    for group in range(k):
        member = (found == group).astype(float)
        together += member.T @ member
    p = 0.25 / k
    sd = math.sqrt(steps * p * (1 - p))
    off = together[~np.eye(count, dtype=bool)]
    assert np.all(np.abs(off - steps * p) < 6 * sd)


@pytest.mark.slow
def test_group_sizes_are_binomial():
    """If groups were filled in turn, their sizes would be equal except for the last."""
    count, k, steps = 40, 4, 2000
    found = groups_of(numbered(count, 0.5, k), steps)
    sizes = np.stack([(found == group).sum(1) for group in range(k)], axis=1)
    p = 0.5 / k
    mean, variance = count * p, count * p * (1 - p)
    # Six standard errors of the mean and (with kurtosis near 3) of the variance.
    assert abs(sizes.mean() - mean) < 6 * math.sqrt(variance / sizes.size)
    assert abs(sizes.var() / variance - 1) < 6 * math.sqrt(2.1 / sizes.size)
    # The sizes of two groups are nearly uncorrelated under Poisson sampling.
    expected = -p / (1 - p)
    found = np.corrcoef(sizes[:, 0], sizes[:, 1])[0, 1]
    assert abs(found - expected) < 6 / math.sqrt(steps)


@pytest.mark.slow
def test_a_record_more_leaves_the_others_where_they_are():
    """The coupling behind the accounting, by the conditional distribution.

    Given the drawn records, the groups of three records are as likely with a fourth
    record as without it: chi-square over 2 x 8 outcomes, 1e-7 quantile of 7 degrees of
    freedom (46.5).
    """
    batches = numbered(4, 0.999999, 2)
    found = groups_of(batches, 4000)
    outcome = found[:, 0] * 4 + found[:, 1] * 2 + found[:, 2]
    with_first = np.bincount(outcome[found[:, 3] == 0], minlength=8)
    with_second = np.bincount(outcome[found[:, 3] == 1], minlength=8)
    total = with_first + with_second
    expected = np.outer([with_first.sum(), with_second.sum()], total / total.sum())
    table = np.stack([with_first, with_second])
    assert ((table - expected) ** 2 / expected).sum() < 46.5
    assert np.all(total > 300)


def test_independent_groups_never_repeat_a_step():
    batches = numbered(30, 0.5, 3, seed=5)
    again = numbered(30, 0.5, 3, seed=5)
    first = groups_of(batches, 20)
    np.testing.assert_array_equal(first, groups_of(again, 20))
    assert len({row.tobytes() for row in first}) == 20


@pytest.mark.slow
def test_group_sizes_stay_below_the_capacity_of_their_rows():
    batches = numbered(200, 0.3, 4)
    found = groups_of(batches, 300)
    sizes = np.stack([(found == group).sum(1) for group in range(4)])
    assert sizes.max() < batches.physical_batch_size
