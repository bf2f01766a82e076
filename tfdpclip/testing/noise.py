"""Tests that a step's noise is Gaussian, fresh, and of the claimed stddev."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from scipy import stats

from tfdpclip import _arguments, _progress
from tfdpclip.noise import GaussianNoise
from tfdpclip.testing.probe import (
    DialledNoise,
    Probe,
    as_batches,
    check_model,
    refuse_correlated,
    unpack,
)

# With so many draws, a tenth less noise than claimed is found.
_ENOUGH_DRAWS, _LEAST_STEPS = 6000, 8
# The largest errors of a scale that count as rounding, by the size of the type.
_ROUNDING, _COARSE_ROUNDING = 1e-3, 2e-2


@dataclasses.dataclass(frozen=True)
class NoiseReport:
    """Measurements of a step's noise.

    Attributes:
      stddevs: measured over claimed, for each variable.
      correlation: the largest correlation found, in standard errors.
      normality: the smallest p-value of the tests of shape.
      draws: numbers drawn.
    """

    stddevs: dict[str, float]
    correlation: float
    normality: float
    draws: int

    def __str__(self) -> str:
        low, high = min(self.stddevs.values()), max(self.stddevs.values())
        return (
            f"stddev {low:.4g} to {high:.4g} of what is claimed, largest correlation "
            f"{self.correlation:.2g} standard errors, least p-value of the shape "
            f"{self.normality:.2g}, in {self.draws} draws"
        )


def assert_noise(
    model: tf.keras.Model,
    batch: Any,
    *,
    steps: int | None = None,
) -> NoiseReport:
    """Checks the noise that arrives at the optimizer's update.

    Runs the model's own training step several times from one state on a batch whose
    records all have weight 0, so that the release is noise alone, and tests

    * the scale of the noise in each coordinate against the claim, to 0.1 %: the noise's
      source is replaced by one that returns the stddev for which it is asked;
    * the stddev of the draws against the claim (chi-squared), of each variable and of
      all together;
    * the shape: Kolmogorov-Smirnov over all draws, and the counts beyond 3 and 4
      stddevs;
    * independence: correlation between steps, between halves of a variable, between
      variables, and with the noise of a copy of the optimizer made from its config, as
      after a restart;
    * that no number is drawn twice (which finds replayed or tied noise).

    Args:
      model: a built model compiled with a private optimizer; not changed.
      batch: (x, y), arrays, of one logical step. Losses that depend on the weights
        alone (regularisers) are measured and taken off.
      steps: how often to draw, 4 or above. By default 8 times, and for a small model
        until there are 6000 numbers, which show a tenth less noise than claimed.

    Returns:
      The measurements.

    Raises:
      AssertionError: if a test fails.
      ValueError: if an argument is out of range, or the model has fewer than 100
        trainable scalars.
    """
    optimizer = check_model(model)
    refuse_correlated(optimizer)
    z_g = float(optimizer.gradient_noise_multiplier)
    if not z_g > 0:
        raise ValueError("noise_multiplier is 0: there is no noise to test.")
    steps = _arguments.optional(_arguments.integer, "steps", steps, 4)
    pieces = optimizer.accumulation_steps
    x, y, _ = unpack(batch)
    rows = len(tf.nest.flatten(x)[0])
    batches = as_batches((x, y, np.zeros(rows, np.float32)), pieces)
    probe = Probe(model)
    claimed = _claimed(optimizer, probe.variables, z_g)
    size = sum(int(np.prod(v.shape)) for v in probe.variables)
    if size < 100:
        raise ValueError("The model has too few trainable scalars to test noise on.")
    _check_scales(model, batches, claimed)
    if steps is None:
        steps = max(_LEAST_STEPS, math.ceil(_ENOUGH_DRAWS / size))
    drawn = [
        probe(batches).gradients
        for _ in _progress.bar(range(steps), title="noise", unit="step")
    ]
    # A copy with a new noise source, as in a new process.
    restarted = Probe(model, GaussianNoise())(batches).gradients
    # Regularisers add the same vector in every step, without noise.
    mean = [np.mean([g[i] for g in drawn], 0) for i in range(len(drawn[0]))]
    constant = [
        m if _is_constant(m, s, steps) else np.zeros_like(m)
        for m, s in zip(mean, claimed, strict=True)
    ]
    scaled = [
        np.concatenate(
            [
                ((g - c) / s).ravel().astype(np.float64)
                for g, c, s in zip(step, constant, claimed, strict=True)
            ]
        )
        for step in (*drawn, restarted)
    ]
    names = [v.name for v in probe.variables]
    sizes = [int(np.prod(v.shape)) for v in probe.variables]
    return judge(names, sizes, scaled)


def _claimed(optimizer, variables, z_g) -> list[float]:
    rule = optimizer.clip
    scales = np.atleast_1d(rule.noise_scales(optimizer.clip_state).numpy())
    assignment = rule.assignment or (0,) * len(variables)
    divisor = optimizer.expected_batch_size
    if not optimizer.clips_records:
        divisor = optimizer.accumulation_steps
    return [z_g * float(scales[group]) / divisor for group in assignment]


def _check_scales(model, batches, claimed) -> None:
    """Compares the stddevs for which the step asks, once they are in the release.

    Draws show the scale of a small variable, such as a bias, to some ten percent only.
    """
    noise = DialledNoise()
    probe = Probe(model, noise)
    levels = []
    for level in (0.0, 1.0):
        noise.level.assign(level)
        levels.append(probe(batches).gradients)
    for variable, plain, noisy, stddev in zip(
        probe.variables, *levels, claimed, strict=True
    ):
        ratios = (noisy.astype(np.float64) - plain) / stddev
        rounding = _ROUNDING if variable.dtype.size >= 4 else _COARSE_ROUNDING
        # A regulariser without noise rounds the sum.
        rounding = rounding * (1 + np.abs(plain) / (100 * stddev))
        wrong = ~(np.abs(ratios - 1) <= rounding)
        if not wrong.any():
            continue
        if not ratios.any():
            raise AssertionError(f"{variable.name} gets no noise at all.")
        raise AssertionError(
            f"The noise on {variable.name} is scaled to {ratios[wrong][0]:.4g} times "
            "the stddev it should have."
        )


def _is_constant(mean, stddev, steps) -> bool:
    """Whether a mean is far more than noise: a term without noise."""
    spread = np.sqrt(np.mean(np.square(mean.astype(np.float64))))
    return spread > 10 * stddev / math.sqrt(steps)


def judge(
    names: Sequence[str],
    sizes: Sequence[int],
    scaled: Sequence[np.ndarray],
    false_alarm: float = 1e-6,
    whole_steps: float = math.inf,
) -> NoiseReport:
    """Tests whether draws are independent standard normals.

    Args:
      names: the names of the variables of a draw.
      sizes: the sizes of the variables.
      scaled: the draws, divided by their stddevs; the last is from a restarted run.
      false_alarm: the probability that sound noise fails, all tests together.
      whole_steps: for discrete noise, its stddev in steps, 10 or more.

    Raises:
      AssertionError: if a test fails.
    """
    steps, restarted = scaled[:-1], scaled[-1]
    everything = np.concatenate(steps)
    bounds = np.cumsum([0, *sizes])
    pairs = _pairs(steps, restarted, bounds)
    tests = len(sizes) + len(pairs) + 5
    level = false_alarm / tests
    ratios = {}
    for i, name in enumerate(names):
        values = np.concatenate([step[bounds[i] : bounds[i + 1]] for step in steps])
        if not np.any(values):
            raise AssertionError(f"{name} gets no noise at all.")
        ratios[f"{i}: {name}"] = _stddev_of(f"The noise on {name}", values, level)
    _stddev_of("The noise", everything, level)
    rounded = everything.astype(np.float32)
    # Values of 32 bits: a few coincidences are expected.
    repeats = rounded.size - np.unique(rounded).size
    # Two draws of discrete noise are equal with probability 1 / (2 sqrt(pi) s); after
    # a rotation, draws are still integers, of equal parity and with a larger stddev.
    expected = rounded.size**2 * (2.0**-25 + 1 / (2 * math.sqrt(math.pi) * whole_steps))
    if repeats > stats.poisson.ppf(1 - level, max(expected, 1e-3)) + 3:
        raise AssertionError(f"{repeats} of {rounded.size} noise values occur twice.")
    worst = 0.0
    for what, first, second in pairs:
        errors = _correlation(first, second)
        worst = max(worst, abs(errors))
        if abs(errors) > stats.norm.isf(level / 2):
            raise AssertionError(
                f"The noise of {what} is correlated ({errors:.3g} standard errors)."
            )
    shape = [stats.kstest(everything, "norm").pvalue]
    for bound in (3.0, 4.0):
        beyond = int(np.sum(np.abs(everything) > bound))
        expected_share = 2 * stats.norm.sf(bound)
        shape.append(stats.binomtest(beyond, everything.size, expected_share).pvalue)
    if min(shape) < level:
        raise AssertionError(
            "The noise is not Gaussian: p-values of the whole and of the tails beyond "
            f"3 and 4 stddevs are {', '.join(f'{p:.2g}' for p in shape)}."
        )
    return NoiseReport(ratios, worst, min(shape), everything.size)


def _stddev_of(what: str, values: np.ndarray, level: float) -> float:
    """The stddev of draws; raises if it is not 1 (chi-squared)."""
    squares = float(np.sum(values**2))
    stddev = math.sqrt(squares / values.size)
    low, high = stats.chi2.ppf([level / 2, 1 - level / 2], values.size)
    if not low <= squares <= high:
        raise AssertionError(
            f"{what} has {stddev:.4g} times the stddev it should have."
        )
    return stddev


def _pairs(steps, restarted, bounds):
    """Pairs that must not be correlated: (words, first, second)."""
    pairs = [
        (f"steps {i} and {i + 1}", a, b)
        for i, (a, b) in enumerate(zip(steps, steps[1:], strict=False))
    ]
    pairs.append(("the first step and a restarted run", steps[0], restarted))
    half = steps[0].size // 2
    joined = [np.concatenate([s[:half] for s in steps])]
    joined.append(np.concatenate([s[half : 2 * half] for s in steps]))
    pairs.append(("the halves of the gradient", *joined))
    spans = list(zip(bounds, bounds[1:], strict=False))
    for (a, b), (c, d) in zip(spans, spans[1:], strict=False):
        width = min(b - a, d - c)
        if width * len(steps) >= 50:
            pairs.append(
                (
                    "neighbouring variables",
                    np.concatenate([s[a : a + width] for s in steps]),
                    np.concatenate([s[c : c + width] for s in steps]),
                )
            )
    return pairs


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    """In standard errors of independent unit normals."""
    return float(np.dot(first, second) / math.sqrt(first.size))
