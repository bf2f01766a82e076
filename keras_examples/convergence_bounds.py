"""Bounds of the papers on clipped descent, as numbers; `paper_bounds` shows them.

Chen, Wu and Hong (2020): with v the mean gradient and v + xi the gradient of a record,
progress is E <v, clip(v + xi, c)>. Koloskova, Hendrikx and Stich (2023), as Rehn, Zhao,
Heikkilä and Honkela (2025) quote them in equations (4) to (7).

Theorem 3, the skewed case of section 2.2 and the numbers (4) to (7) are rebuilt from a
description: the print was not at hand to compare words, constants and numbering with.
What is stated here holds by brute force, in tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def clipped(gradients: np.ndarray, clip_norm: float) -> np.ndarray:
    """Each gradient, `[n, d]`, shortened to the clip norm."""
    norms = np.linalg.norm(gradients, axis=-1, keepdims=True)
    return gradients * clip_norm / np.maximum(norms, clip_norm)


def progress_bound(
    gap: float,
    smoothness: float,
    clip_norm: float,
    learning_rate: float,
    steps: int,
    noise_stddev: float = 0.0,
    dimension: int = 1,
) -> float:
    """The most that progress can be on average over the steps: Theorems 1 and 5.

    The sum of the descent lemma over the steps: gap / (a T) + a G (c^2 + d s^2) / 2, in
    which Theorem 1 has no noise and a = 1 / sqrt(T). What the theorems say about the
    gradient's norm follows: progress is at least the bound of Theorem 2 under a
    symmetric distribution, plus the bias, whose size the Wasserstein distance bounds
    (`keras_examples.gradient_geometry.ClippingBias` has these).

    Args:
      gap: f(x_0) - min f.
      smoothness: G, the Lipschitz constant of the gradient.
      clip_norm: c.
      learning_rate: a.
      steps: T.
      noise_stddev: s, of the noise on the mean gradient, in each coordinate.
      dimension: d.

    >>> progress_bound(8.0, 1.0, 1.0, 0.1, 100)
    0.85
    """
    moves = clip_norm**2 + dimension * noise_stddev**2
    return gap / (learning_rate * steps) + learning_rate * smoothness * moves / 2


def mixture_progress_bound(
    mean: np.ndarray,
    centers: np.ndarray,
    weights: Sequence[float],
    small: Sequence[float],
    clip_norm: float,
) -> float:
    """The least progress under a mixture of spherical distributions: Theorem 3.

    |v| times the sum of w_i min(|v + u_i|, 3c/4) cos(v, v + u_i) P(|xi_i| < c/4), for
    components that are spherical about centers u_i, none of which turns the gradient by
    more than a right angle.

    Args:
      mean: v, `[d]`.
      centers: u_i, `[k, d]`.
      weights: w_i, with sum 1.
      small: for each component, the probability of a distance below c/4 from its
        center.
      clip_norm: c.

    Raises:
      ValueError: if a center turns the gradient by more than a right angle: the theorem
        says nothing there.
    """
    moved = np.asarray(mean) + np.asarray(centers)
    inner, lengths = moved @ mean, np.linalg.norm(moved, axis=1)
    if np.any(inner < 0):
        raise ValueError(
            "centers: <v, v + u> must be 0 or above for every center u; Theorem 3 has "
            "no bound otherwise."
        )
    share = np.minimum(1.0, 0.75 * clip_norm / np.maximum(lengths, 1e-300))
    return float(np.sum(np.asarray(weights) * share * inner * np.asarray(small)))


def skewness_bias(
    mean: np.ndarray, noise: np.ndarray, weights: np.ndarray, clip_norm: float
) -> float:
    """Progress less the progress under the symmetrised noise: the bias of section 2.2.

    Equal to the sum over pairs xi, -xi of (p(xi) - p(-xi)) (phi(xi) - phi(-xi)) / 2,
    where phi(xi) = <v, clip(v + xi, c)> is the greater of the two where <v, xi> > 0.
    So noise that is the more probable of the two wherever <v, xi> > 0 (skewed along the
    gradient) has a bias of 0 or above, and clipping helps; skewed against, it hurts.

    Args:
      mean: v, `[d]`.
      noise: the values of xi, `[n, d]`.
      weights: their probabilities, `[n]`.
      clip_norm: c.

    >>> along = np.array([[3.0], [-1.0]])
    >>> skewness_bias(np.array([0.5]), along, np.array([0.75, 0.25]), 1.0)
    0.125
    """
    both = [clipped(mean + sign * noise, clip_norm) @ mean for sign in (1, -1)]
    return float(weights @ (both[0] - both[1]) / 2)


def koloskova_bound(
    clip_norm: float,
    noise_stddev: float,
    learning_rate: float,
    steps: int,
    *,
    smoothness: float = 1.0,
    gap: float = 1.0,
    gradient_stddev: float = 1.0,
) -> float:
    """Equation (4): the bound on the squared gradient norm, up to constant factors.

    The terms that rise with C (`koloskova_noise_terms`), and those that fall with C:
    min(s^2, s^4 / C^2) and F^2 / (a^2 T^2 C^2), and F / (a T).

    Args:
      clip_norm: C.
      noise_stddev: sigma, of the noise over C.
      learning_rate: a (eta in the paper).
      steps: T.
      smoothness: L.
      gap: F, f(x_0) - min f.
      gradient_stddev: s, of the gradients of records.
    """
    variance, left = gradient_stddev**2, gap / (learning_rate * steps)
    return (
        koloskova_noise_terms(clip_norm, noise_stddev, learning_rate, smoothness)
        + min(variance, variance**2 / clip_norm**2)
        + left
        + (left / clip_norm) ** 2
    )


def koloskova_noise_terms(
    clip_norm: float, noise_stddev: float, learning_rate: float, smoothness: float = 1.0
) -> float:
    """Equation (5): L a C sigma^2 + sqrt(L a C sigma), the terms that rise with C."""
    scale = smoothness * learning_rate * clip_norm
    return scale * noise_stddev**2 + math.sqrt(scale * noise_stddev)


def koloskova_slope(
    clip_norm: float, noise_stddev: float, learning_rate: float, smoothness: float = 1.0
) -> float:
    """Equation (6): the derivative of (5) by C. Set to 0, as printed, it has NO zero.

    Both of its terms are above 0: the least value of (5) is at C = 0, and the other
    terms of (4) alone hold C up.
    """
    scale = smoothness * learning_rate
    root = math.sqrt(scale * noise_stddev / clip_norm)
    return scale * noise_stddev**2 + root / 2


def koloskova_clip_norm(
    noise_stddev: float, learning_rate: float, smoothness: float = 1.0
) -> float:
    """Equation (7): C* = 1 / (4 L a sigma^3), as printed.

    Not a minimum: the value at which the two terms of (6) have the same SIZE, so that
    their difference, and not their sum, is 0.

    >>> koloskova_clip_norm(2.0, 0.25)
    0.125
    """
    return 1 / (4 * smoothness * learning_rate * noise_stddev**3)
