"""The assertions about aggregators pass sound ones tightly, and refuse unsound ones."""

import collections
import subprocess
import sys

import numpy as np
import pytest

import tfdpclip as dpc
from tfdpclip import clipping, testing

tff = pytest.importorskip("tensorflow_federated")

from tfdpclip import federated  # noqa: E402
from tfdpclip.federated import _discrete_noise, _entropy  # noqa: E402

SMALL = tff.to_type(
    collections.OrderedDict(a=(np.float32, [3, 2]), b=[(np.float32, [2])])
)
WIDE = tff.to_type(
    collections.OrderedDict(a=(np.float32, [600]), b=[(np.float32, [20, 20])])
)
QUANTILE = clipping.QuantileClip(initial_norm=0.8)
RULES = {
    "fixed": clipping.FixedClip(0.7),
    "quantile": QUANTILE,
    "layerwise quantile": clipping.LayerwiseClip(QUANTILE),
    "automatic": clipping.AutomaticClip(),
    "normalised": clipping.QuantileClip(initial_norm=0.8, normalize=True),
    "joint": clipping.LayerwiseClip({"a": 0.5, "b": 3.0}, allocation="joint"),
    "scaled": clipping.ScaledClip({"a": 4.0, "b": 0.5}, 1.5),
    "public": clipping.PublicNormClip(1.5, norms={"a": 1.0, "b": 3.0}),
}
WAYS = {
    "central": {},
    "secure": {"secure": True},
    "secure, 8 bits": {"secure": federated.SecureSettings(bits=8)},
    "distributed": {
        "secure": federated.SecureSettings(bits=28),
        "noise": "distributed",
        "minimum_clients": 6,
    },
    "inner": {"inner": tff.aggregators.UnweightedMeanFactory()},
}
# Every rule and every way at least once; the remaining pairs are slow.
FAST = {
    ("fixed", "central"),
    ("quantile", "secure"),
    ("layerwise quantile", "distributed"),
    ("automatic", "inner"),
    ("normalised", "secure, 8 bits"),
}
PRODUCT = [
    pytest.param(
        rule,
        way,
        marks=() if (rule, way) in FAST else pytest.mark.slow,
        id=f"{rule}, {way}",
    )
    for rule in RULES
    for way in WAYS
]


@pytest.fixture(autouse=True, scope="module")
def _secure_context():
    with federated.local_context(simulate_secure_sums=True):
        yield


def factory_of(rule="quantile", way="central", z=0.5, clients=12, **options):
    return federated.clipped_mean(z, clients, RULES[rule], **{**WAYS[way], **options})


@pytest.mark.parametrize(("rule", "way"), PRODUCT)
@pytest.mark.slow
def test_some_client_uses_up_the_whole_sensitivity(rule, way):
    report = testing.assert_aggregator_sensitivity(factory_of(rule, way), SMALL)
    # A loose bound would mean noise for nothing; 8 bits leave room for rounding.
    low = 0.98 if way == "secure, 8 bits" else 0.999
    assert low <= report.ratio <= 1.002
    assert report.limit == 2.0 and report.tried >= 20
    assert "A client (" in report.record and "neighbours tried" in str(report)


@pytest.mark.parametrize(("rule", "way"), PRODUCT)
@pytest.mark.slow
def test_noise_is_as_claimed(rule, way):
    # False alarm: 1e-6 each.
    report = testing.assert_aggregator_noise(factory_of(rule, way), WIDE)
    tensors = [value for name, value in report.stddevs.items() if "count" not in name]
    assert len(tensors) == 2 and report.draws >= 16_000
    np.testing.assert_allclose(tensors, 1, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("z", [0.02, 0.6, 30.0])
@pytest.mark.parametrize("clients", [1.5, 2, 100, 5e4])
def test_whatever_the_noise_and_the_cohort(z, clients):
    loud = clipping.QuantileClip(initial_norm=1.0, count_stddev=max(1, z) * clients)
    for clip in (loud, 1.0):
        factory = federated.clipped_mean(z, clients, clip)
        report = testing.assert_aggregator_sensitivity(factory, SMALL)
        assert report.ratio == pytest.approx(1, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("minimum", [1, 2, 12])
def test_with_few_shares(minimum):
    options = {**WAYS["distributed"], "minimum_clients": minimum}
    factory = federated.clipped_mean(0.5, 12, QUANTILE, **options)
    report = testing.assert_aggregator_sensitivity(factory, SMALL)
    assert report.ratio == pytest.approx(1, abs=2e-3)


@pytest.mark.slow
def test_examples_and_updates_of_ones_own():
    example = {"b": np.zeros(3), "a": np.float32(1)}
    own = {"b": np.array([0.0, 5.0, 0.0]), "a": np.float32(0)}
    factory = federated.clipped_mean(1.0, 10, 0.5)
    usual = testing.assert_aggregator_sensitivity(factory, example)
    report = testing.assert_aggregator_sensitivity(factory, example, records=[own])
    # Two states, each with the given update besides the usual updates.
    assert report.tried == usual.tried + 2
    assert report.ratio == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_the_librarys_own_noise_comes_back():
    own = _entropy.standard_normal, _entropy.fresh_seed, _discrete_noise.sample
    with pytest.raises(ValueError, match="bits"):
        coarse = {**WAYS["distributed"], "secure": federated.SecureSettings(bits=16)}
        factory = federated.clipped_mean(0.5, 12, QUANTILE, **coarse)
        testing.assert_aggregator_sensitivity(factory, SMALL)
    testing.assert_aggregator_noise(factory_of(way="distributed"), WIDE, rounds=4)
    assert own == (
        _entropy.standard_normal,
        _entropy.fresh_seed,
        _discrete_noise.sample,
    )


def test_an_audit_stays_below_the_claim_and_near_it():
    # False alarm: 1e-6.
    sure = {"delta": 1e-10, "confidence": 1 - 1e-6}
    report = testing.audit_aggregator(federated.clipped_mean(0.4, 500, 0.7), **sure)
    assert 1.5 < report.lower_bound <= report.claimed
    assert report.claimed == federated.clipped_mean(0.4, 500).epsilon(1e-10)
    with pytest.raises(AssertionError, match=r"claim is wrong.*claimed: 0.5"):
        testing.audit_aggregator(
            federated.clipped_mean(0.4, 500, 0.7), claimed=0.5, **sure
        )


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", ["fixed", "layerwise quantile"])
def test_a_longer_audit(rule, way):
    # False alarm: 1e-6.
    options = {"minimum_clients": 2000} if way == "distributed" else {}
    factory = factory_of(rule, way, z=1.5, clients=2000, **options)
    example = collections.OrderedDict(
        a=np.zeros([700, 2], np.float32), b=[np.zeros(600, np.float32)]
    )
    report = testing.audit_aggregator(
        factory, example, canaries=2000, rounds=6, delta=1e-10, confidence=1 - 1e-6
    )
    # Groups share the noise: an update in a single group has 1 / sqrt(2) of the effect.
    least = 1.2 if rule == "fixed" else 0.5
    assert least < report.lower_bound <= report.claimed == factory.epsilon(1e-10, 6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f: testing.assert_aggregator_sensitivity(3, SMALL), "factory must be"),
        (
            lambda f: testing.assert_aggregator_sensitivity(f(z=0.0), SMALL),
            "factory has noise_multiplier 0",
        ),
        (
            lambda f: testing.assert_aggregator_noise(f(seed=1), WIDE),
            "factory has seed 1",
        ),
        (
            lambda f: testing.assert_aggregator_sensitivity(f(), "float"),
            "value_type must be",
        ),
        (
            lambda f: testing.assert_aggregator_sensitivity(f(), np.zeros(256, "f4")),
            "value_type has 256 coordinates",
        ),
        (
            lambda f: testing.assert_aggregator_sensitivity(f(), np.zeros(9, "f2")),
            "value_type holds numbers of half precision",
        ),
        (lambda f: testing.assert_aggregator_noise(f(), SMALL), "value_type has 8"),
        (lambda f: testing.assert_aggregator_noise(f(), WIDE, rounds=3), "rounds"),
        (lambda f: testing.audit_aggregator(f(z=0.0)), "noise_multiplier 0"),
        (lambda f: testing.audit_aggregator(f(), canaries=9), "canaries"),
        (lambda f: testing.audit_aggregator(f(), SMALL, canaries=20), "canaries"),
        (
            lambda f: testing.audit_aggregator(f(way="distributed"), canaries=20),
            "canaries must be from minimum_clients",
        ),
        (lambda f: testing.audit_aggregator(f(), rounds=0), "rounds"),
        (lambda f: testing.audit_aggregator(f(), delta=np.nan), "delta"),
        (lambda f: testing.audit_aggregator(f(), claimed=np.inf), "claimed"),
        (
            lambda f: testing.audit_aggregator(f(), canaries=10, confidence=1.0),
            "confidence",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(factory_of)


QUANTILE_LOUD = clipping.QuantileClip(count_stddev=2.0)

_WITHOUT = """
import sys
sys.modules["tensorflow_federated"] = None
import numpy as np
from tfdpclip import testing
for call in (testing.assert_aggregator_sensitivity, testing.assert_aggregator_noise,
             testing.audit_aggregator):
    try:
        call(None, np.zeros(3))
    except ImportError as error:
        print(error)
"""


@pytest.mark.slow
def test_without_tensorflow_federated_the_error_says_what_to_install():
    # The import of the assertions works without TensorFlow Federated.
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--require-hashes -r requirements.txt") == 3
    assert dpc.testing.audit_aggregator is testing.audit_aggregator
