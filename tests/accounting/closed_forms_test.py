"""Gaussian differential privacy and the noise split, against 50-digit arithmetic."""

import dataclasses
import math

import numpy as np
import pytest

from tfdpclip import accounting
from tfdpclip.clipping import LayerwiseClip, QuantileClip

mpmath = pytest.importorskip("mpmath")


class TestCentralLimitFactor:
    @pytest.mark.parametrize(
        "sigma",
        [0.01875 / math.sqrt(62), 0.05, 0.3, 0.499, 0.5, 0.501, 1, 2.5, 100, 1e5, 1e12],
    )
    def test_against_many_digits(self, sigma):
        with mpmath.workdps(60 if sigma < 1e6 else 120):
            x = 1 / mpmath.mpf(sigma)
            squared = (
                mpmath.exp(x * x) * mpmath.ncdf(1.5 * x) + 3 * mpmath.ncdf(-x / 2) - 2
            )
            expected = float(mpmath.log(squared) / 2)
        # The accuracy is relative in h, hence absolute in its logarithm.
        assert accounting.subsampled_gdp_log_h(sigma) == pytest.approx(
            expected, rel=1e-13, abs=1e-13
        )

    def test_ends_of_the_range(self):
        assert accounting.subsampled_gdp_log_h(1e150) == pytest.approx(
            -math.log(1e150) - math.log(2) / 2, rel=1e-12
        )
        assert accounting.subsampled_gdp_log_h(1e-150) == pytest.approx(5e299)

    def test_overflow_is_infinite(self):
        assert accounting.subsampled_gdp_mu(0.01, 0.1, 10, "fixed_size") == math.inf
        assert accounting.subsampled_gdp_mu(0.01, 0.1, 10) == math.inf
        assert accounting.subsampled_gdp_mu(1.0, 0.1, 0) == 0.0

    def test_poisson_limits(self):
        assert accounting.subsampled_gdp_mu(1e8, 0.1, 100) == pytest.approx(1e-8)
        expected = 0.1 * math.sqrt(math.e - 1)
        assert accounting.subsampled_gdp_mu(1.0, 0.1, 1) == pytest.approx(expected)


class TestConversion:
    @pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 5.0, 50.0])
    @pytest.mark.parametrize("epsilon", [0.0, 0.01, 1.0, 30.0])
    def test_delta_against_many_digits(self, mu, epsilon):
        with mpmath.workdps(60):
            m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
            exact = mpmath.ncdf(-e / m + m / 2) - mpmath.exp(e) * mpmath.ncdf(
                -e / m - m / 2
            )
        assert accounting.gdp_delta(mu, epsilon) == pytest.approx(
            float(exact), rel=1e-8, abs=1e-300
        )

    @pytest.mark.parametrize("mu", [1e-4, 0.1, 1.0, 20.0, 1e3])
    @pytest.mark.parametrize("delta", [0.3, 1e-5, 1e-12, 1e-100])
    def test_inverses(self, mu, delta):
        epsilon = accounting.gdp_epsilon(mu, delta)
        if epsilon == 0:
            assert accounting.gdp_delta(mu, 0.0) <= delta
        else:
            assert accounting.gdp_mu(epsilon, delta) == pytest.approx(mu, rel=1e-9)

    def test_ends(self):
        assert accounting.gdp_epsilon(0.0, 1e-5) == 0.0
        assert accounting.gdp_epsilon(math.inf, 1e-5) == math.inf
        assert accounting.gdp_delta(0.0, 0.0) == 0.0
        assert accounting.gdp_tradeoff(0.0, 0.3) == pytest.approx(0.7)
        np.testing.assert_array_equal(accounting.gdp_tradeoff(1.0, [0.0, 1.0]), [1, 0])

    def test_mu_without_epsilon(self):
        # At epsilon 0, delta = 2 Phi(mu/2) - 1.
        assert accounting.gdp_mu(0.0, 0.38292492254802624) == pytest.approx(1.0)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, "1"])
    def test_hostile_arguments(self, value):
        for call, name in (
            (lambda: accounting.gdp_delta(value, 1.0), "mu"),
            (lambda: accounting.gdp_delta(1.0, value), "epsilon"),
            (lambda: accounting.gdp_mu(value, 1e-5), "epsilon"),
            (lambda: accounting.gdp_tradeoff(value, 0.5), "mu"),
            (lambda: accounting.gdp_compose([1.0, value]), "mus"),
            (lambda: accounting.layerwise_gdp_mu(value, 3), "sigma"),
            (lambda: accounting.layerwise_gdp_mu(1.0, [1.0, value]), "layers"),
            (lambda: accounting.subsampled_gdp_log_h(value), "sigma"),
            (lambda: accounting.subsampled_gdp_mu(1.0, value, 1), "rate"),
        ):
            with pytest.raises(ValueError, match=name):
                call()
        with pytest.raises(ValueError, match="alpha"):
            accounting.gdp_tradeoff(1.0, 1.1)
        with pytest.raises(ValueError, match="alpha"):
            accounting.gdp_tradeoff(1.0, math.nan)


class TestNoiseSplit:
    def test_values_of_the_paper(self):
        for z, m, expected in ((1.0, 100, 1.005037816), (0.1, 10, 0.100503782)):
            z_g = accounting.split_noise_multiplier(z, [m / 20])
            assert z_g == pytest.approx(expected, abs=1e-9)

    @pytest.mark.parametrize("stddevs", [[], [5.0], [5.0, 3.0, 10.0], [1e6]])
    @pytest.mark.parametrize("z", [1e-6, 0.1, 1.0])
    def test_inverse(self, z, stddevs):
        z_g = accounting.split_noise_multiplier(z, stddevs)
        assert z_g >= z
        assert accounting.effective_noise_multiplier(z_g, stddevs) == pytest.approx(
            z, rel=1e-12
        )
        for groups in (1, 4):
            parts = [z_g * math.sqrt(groups)] * groups
            assert accounting.effective_noise_multiplier(
                parts, stddevs
            ) == pytest.approx(z, rel=1e-12)

    @pytest.mark.parametrize("z", [0.01, 0.5, 1.0, 3.7])
    @pytest.mark.parametrize("groups", [1, 4])
    def test_defaults_take_half_of_small_batches_and_no_more(self, z, groups):
        rule = LayerwiseClip(QuantileClip(), groups="variable")
        rule = rule.bind([f"v{k}" for k in range(groups)])
        for m in np.array([2.1, 5, 9.9, 10.1, 14, 14.2, 20, 100]) * z * groups**0.5:
            stddevs = accounting.count_stddevs(rule, m, z)
            # The usual stddev where the sum keeps half, else the stddev that leaves it
            # half.
            least = z * math.sqrt(groups / 2)
            assert stddevs == pytest.approx((max(m / 20, least),) * groups, rel=1e-12)
            if m / 20 >= least:
                assert stddevs == rule.count_stddevs(m)
            z_g = accounting.split_noise_multiplier(z, stddevs)
            assert z <= z_g <= math.sqrt(2) * z * (1 + 1e-12)
            again = accounting.effective_noise_multiplier(z_g, stddevs)
            assert again == pytest.approx(z, rel=1e-12)

    def test_a_chosen_count_keeps_its_noise_and_defaults_share_what_it_leaves(self):
        chosen = QuantileClip(count_stddev=1.0)
        rule = LayerwiseClip(
            {"a": chosen, "b": QuantileClip(), "c": 0.5}, groups="variable"
        )
        rule = rule.bind(["a", "b", "c"])
        # 1/4 of z^-2 is taken: the second count gets half of 3/4.
        found = accounting.count_stddevs(rule, 8, 1.0)
        assert found == pytest.approx((1.0, 0.5 / math.sqrt(0.375)), rel=1e-12)
        assert accounting.count_stddevs(rule, 100, 1.0) == (1.0, 5.0)
        precise = dataclasses.replace(
            rule, rule=dict.fromkeys("abc", QuantileClip(count_stddev=0.5))
        )
        precise = precise.bind(["a", "b", "c"])
        found = accounting.count_stddevs(precise, 8, 1.0)
        assert found == (0.5,) * 3
        with pytest.raises(ValueError, match="too precise"):
            accounting.split_noise_multiplier(1.0, found)

    def test_no_default_is_more_than_half_of_the_records(self):
        refusal = r"noise_multiplier 2 .* at least 3 records \(records_per_step=3\)"
        with pytest.raises(ValueError, match=refusal):
            accounting.count_stddevs(QuantileClip(), 2, 2.0)
        assert accounting.count_stddevs(QuantileClip(), 3, 2.0) == (math.sqrt(2),)
        assert accounting.count_stddevs(QuantileClip(count_stddev=9.0), 2, 2.0) == (9,)
        assert accounting.count_stddevs(QuantileClip(), 2, 0.0) == (0.0,)
        for z in (1e-300, 1e150, 1e300):
            found = accounting.count_stddevs(QuantileClip(), 1.5 * z, z)
            assert found == pytest.approx((z / math.sqrt(2),), rel=1e-12)

    def test_nothing_counted(self):
        assert accounting.split_noise_multiplier(1.3) == 1.3

    def test_no_noise(self):
        assert accounting.split_noise_multiplier(0.0, [0.001]) == 0.0
        assert accounting.effective_noise_multiplier(0.0, [1.0]) == 0.0
        assert accounting.effective_noise_multiplier(1.0, [0.0]) == 0.0

    def test_infeasible_says_what_would_work(self):
        with pytest.raises(ValueError, match=r"count_stddevs\[0\] = 0.1") as info:
            accounting.split_noise_multiplier(0.3, [0.1])
        message = str(info.value)
        assert "above 0.15" in message
        assert "from 4 records per step" in message
        # The suggested number of records works, and the next smaller number does not.
        assert accounting.split_noise_multiplier(0.3, [4 / 20]) > 0
        with pytest.raises(ValueError):
            accounting.split_noise_multiplier(0.3, [3 / 20])

    def test_infeasible_names_the_most_precise_of_several(self):
        with pytest.raises(ValueError, match=r"count_stddevs\[1\] = 0.3") as info:
            accounting.split_noise_multiplier(1.0, [5.0, 0.3, 4.0])
        needed = float(str(info.value).split("above ")[1].split(",")[0])
        assert accounting.split_noise_multiplier(1.0, [5.0, needed * 1.001, 4.0]) > 0
        with pytest.raises(ValueError, match="all 4 counts"):
            accounting.split_noise_multiplier(1.0, [0.6] * 4)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, "1", None])
    def test_hostile_arguments(self, value):
        with pytest.raises(ValueError, match="noise_multiplier"):
            accounting.split_noise_multiplier(value, [1.0])
        with pytest.raises(ValueError, match=r"count_stddevs\[1\]"):
            accounting.split_noise_multiplier(1.0, [1.0, value])
        with pytest.raises(ValueError, match="count_stddevs"):
            accounting.effective_noise_multiplier(1.0, [value])
        with pytest.raises(ValueError, match="gradient_noise_multiplier"):
            accounting.effective_noise_multiplier([1.0, value])
