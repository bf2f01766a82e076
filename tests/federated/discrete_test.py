"""The bounds for sums of discrete Gaussians, against exact computations."""

import math

import dp_accounting
import numpy as np
import pytest

from tfdpclip import accounting, federated
from tfdpclip.federated import discrete
from tfdpclip.sampling import FullBatch


def _pmf(stddev, reach):
    support = np.arange(-reach, reach + 1)
    # Extended precision, for tails far below the smallest double.
    weights = np.exp(-(support.astype(np.longdouble) ** 2) / (2 * stddev**2))
    return weights / weights.sum()


def _sum_pmf(stddev, clients):
    reach = math.ceil(12 * stddev) + 55
    single = _pmf(stddev, reach)
    total = single
    for _ in range(clients - 1):
        total = np.convolve(total, single)
    return total


def _center(pmf, reach):
    middle = len(pmf) // 2
    return pmf[middle - reach : middle + reach + 1]


@pytest.mark.parametrize("clients", [2, 5, 20])
@pytest.mark.parametrize("stddev", [0.5, 0.7, 1.0])
def test_tau_bounds_the_log_ratio(stddev, clients):
    total = math.sqrt(clients) * stddev
    reach = math.ceil(6 * total)
    found = _center(_sum_pmf(stddev, clients), reach)
    ideal = _center(_pmf(total, math.ceil(12 * total) + 55), reach)
    assert np.max(np.abs(np.log(found / ideal))) <= discrete.tau(stddev, clients)


@pytest.mark.parametrize("clients", [1, 3, 10])
@pytest.mark.parametrize("stddev", [0.5, 0.8, 2.0])
@pytest.mark.parametrize("shift", [1, 3])
def test_renyi_divergences_are_below_the_bound(clients, stddev, shift):
    z = discrete.sum_multiplier(stddev, clients, shift, 1)
    pmf = _sum_pmf(stddev, clients)
    # The largest order has its mass at `order * shift`.
    reach = min(len(pmf) // 2 - shift - 1, 50 + math.ceil(9 * stddev * clients**0.5))
    p = _center(pmf, reach)
    q = _center(np.roll(pmf, shift), reach)
    for order in (1.1, 2, 5, 16):
        terms = order * np.log(p) + (1 - order) * np.log(q)
        divergence = np.log(np.sum(np.exp(terms))) / (order - 1)
        assert divergence <= order / (2 * z**2) * (1 + 1e-9)


def test_fine_noise_is_accounted_as_a_gaussian():
    # With s = 10, tau is exp(-1000): nothing is lost.
    assert discrete.tau(10.0, 100) < 1e-300
    z = discrete.sum_multiplier(10.0, 100, 50.0, 10**6)
    assert z == pytest.approx(math.sqrt(100) * 10 / 50)


def test_coarse_noise_is_not():
    assert discrete.sum_multiplier(0.5, 100, 1.0, 10**4) < 0.1 * 5


def test_tau_by_hand():
    expected = 10 * (math.exp(-(math.pi**2)) + math.exp(-4 / 3 * math.pi**2))
    assert discrete.tau(1.0, 3) == pytest.approx(expected)
    assert discrete.tau(1.0, 1) == 0
    # Beyond the terms that are added up, never less than all of them.
    exponent = -2 * math.pi**2 * 0.25
    every = 10 * sum(math.exp(exponent * k / (k + 1)) for k in range(1, 5000))
    assert every <= discrete.tau(0.5, 5000) <= every * 1.01


@pytest.mark.parametrize("z", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("clients", [1, 40, 1000])
@pytest.mark.parametrize("dimension", [1, 1000, 2**21])
@pytest.mark.parametrize("sensitivity", [2.0, 1000.0])
def test_local_stddev_is_just_enough(z, clients, dimension, sensitivity):
    args = clients, sensitivity, dimension
    stddev = discrete.local_stddev(z, *args)
    assert discrete.sum_multiplier(stddev, *args) >= z
    if stddev > 0.5001:
        assert discrete.sum_multiplier(stddev * (1 - 1e-8), *args) < z


@pytest.mark.parametrize(
    "arguments,name",
    [
        ((0.0, 1, 1.0, 1), "noise_multiplier"),
        ((math.nan, 1, 1.0, 1), "noise_multiplier"),
        ((1.0, 0, 1.0, 1), "clients"),
        ((1.0, 1, math.inf, 1), "sensitivity"),
        ((1.0, 1, 1.0, 0), "dimension"),
    ],
)
def test_bad_arguments(arguments, name):
    with pytest.raises(ValueError, match=name):
        discrete.local_stddev(*arguments)


def test_zcdp_epsilon():
    # A Gaussian's Renyi divergences are exactly those of its rho.
    for z, rounds in [(1.0, 1), (5.0, 100), (20.0, 3)]:
        gaussian = dp_accounting.SelfComposedDpEvent(
            dp_accounting.GaussianDpEvent(z), rounds
        )
        by_orders = accounting.event_epsilon(gaussian, 1e-6, "rdp")
        found = discrete.zcdp_epsilon(rounds / (2 * z**2), 1e-6)
        # More orders can only help, and no bound beats the exact value.
        exact = accounting.event_epsilon(gaussian, 1e-6)
        assert exact * (1 - 1e-3) <= found <= by_orders * (1 + 1e-9)
    assert discrete.zcdp_epsilon(0.0, 1e-6) == 0
    for rho in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="rho"):
            discrete.zcdp_epsilon(rho, 1e-6)


def test_the_factory_accounts_for_its_mechanism():
    factory = federated.clipped_mean(
        2.0, 100, secure=True, noise="distributed", minimum_clients=80
    )
    event = factory.event(50)
    assert event.event == federated.ZeroConcentratedDpEvent(1 / 8)
    # No accountant mistakes it for a Gaussian.
    for accountant in ("pld", "rdp"):
        with pytest.raises(dp_accounting.UnsupportedEventError):
            accounting.event_epsilon(event, 1e-6, accountant)
    found = factory.epsilon(1e-6, 50)
    assert found == pytest.approx(discrete.zcdp_epsilon(50 / 8, 1e-6))
    # The ledger that the documentation names.
    ledger = accounting.Ledger(1e-6, "rdp")
    ledger.begin(noise_multiplier=2.0, sampling=FullBatch(), unit="client")
    ledger.record(50)
    assert found <= ledger.epsilon() <= found * 1.01
    central = federated.clipped_mean(2.0, 100)
    assert central.epsilon(1e-6, 50) < found


def test_rounding_bound_holds_and_is_reached():
    rng = np.random.default_rng(0)
    for dimension, norm in [(1, 3.0), (64, 5.0), (4096, 1000.0)]:
        bound = discrete.rounded_norm(norm, dimension, 1e-6)
        x = rng.normal(size=dimension)
        x *= norm / np.linalg.norm(x)
        whole = np.floor(x)
        # Exceeded once in a million draws at most; 300 draws.
        squares = [
            np.sum((whole + (rng.random(dimension) < x - whole)) ** 2)
            for _ in range(300)
        ]
        assert max(squares) <= bound
        assert bound <= (norm + math.sqrt(dimension)) ** 2
