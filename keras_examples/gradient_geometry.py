"""The shape of the distribution of gradients, and the effect of clipping on progress.

After Chen, Wu and Hong (2020), "Understanding Gradient Clipping in Private SGD: A
Geometric Perspective". With f the mean loss, a gradient is grad f + xi; if the
distribution of xi is symmetric, clipping slows progress but does not mislead it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from scipy import stats

from keras_examples.symmetry import SymmetryScore, symmetry_score


@dataclasses.dataclass(frozen=True)
class ClippingBias:
    """The effect of clipping at one norm on progress along the mean gradient.

    With v the mean gradient and phi(xi) = <v, clip(v + xi)>, progress is E phi(xi).

    Attributes:
      clip_norm: the clip norm c.
      progress: E phi(xi); below 0, clipped descent climbs.
      symmetric_progress: the progress under the symmetrised distribution, of xi or -xi
        with probability 1/2 each.
      bias: progress - symmetric_progress: the part due to asymmetry.
      wasserstein: the bound on |bias| of Theorem 5: the Wasserstein distance between
        the distribution and its symmetrised form, with |phi(a) - phi(b)| for the
        distance of a and b. Exact, since it equals the distance of the values of phi.
      small_residuals: P(|xi| < c/4).
      guaranteed: the bound below symmetric_progress of Theorem 2: |v| min(|v|, 3c/4)
        times small_residuals.
      fraction_clipped: the fraction of gradients above c.
    """

    clip_norm: float
    progress: float
    symmetric_progress: float
    bias: float
    wasserstein: float
    small_residuals: float
    guaranteed: float
    fraction_clipped: float

    def row(self) -> dict[str, float]:
        """The numbers as columns of a table."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class GradientGeometry:
    """The geometry of gradients. As private as the gradients: not to be released.

    Attributes:
      norms: `[n]`, the gradients' norms.
      inner: `[n]`, inner products with the mean gradient.
      mean_norm: the norm of the mean gradient.
      projections: `[k, n, 2]`, the gradients under k random projections to the plane,
        with independent N(0, 1/2) entries: norms stay the same on average.
      means: `[k, 2]`, the mean gradient under the same projections.
    """

    norms: np.ndarray
    inner: np.ndarray
    mean_norm: float
    projections: np.ndarray
    means: np.ndarray

    @property
    def cosines(self) -> np.ndarray:
        """`[n]`, the cosine of each gradient with the mean; 0 if either is 0."""
        scale = self.norms * self.mean_norm
        safe = np.where(scale > 0, scale, 1.0)
        return np.where(scale > 0, np.clip(self.inner / safe, -1, 1), 0.0)

    @property
    def residual_norms(self) -> np.ndarray:
        """`[n]`, |xi|: the distance of each gradient from the mean."""
        squares = self.norms**2 - 2 * self.inner + self.mean_norm**2
        return np.sqrt(np.maximum(squares, 0.0))

    @property
    def residuals(self) -> np.ndarray:
        """`[k, n, 2]`, the projections of the gradients less the mean."""
        return self.projections - self.means[:, None]

    def symmetry(
        self,
        permutations: int = 999,
        *,
        of: str = "residuals",
        most: int = 1000,
        seed: int = 0,
    ) -> list[SymmetryScore]:
        """How symmetric the projected gradients are, for each projection.

        Args:
          permutations: number of random changes of sign for the p-value.
          of: "residuals", the gradients less their mean, whose symmetry the theory
            requires; "directions", the residuals scaled to length 1, so that a few long
            residuals do not decide; or "gradients", about zero instead of their
            mean, as in a picture with zero in the middle.
          most: use no more than this many examples (a random choice of them).
          seed: for the choice and the signs.

        Returns:
          One score for each projection.

        Raises:
          ValueError: if an argument is out of range.
        """
        if of == "gradients":
            points = self.projections
        elif of == "residuals":
            points = self.residuals
        elif of == "directions":
            lengths = np.linalg.norm(self.residuals, axis=2, keepdims=True)
            points = self.residuals / np.where(lengths > 0, lengths, 1.0)
        else:
            raise ValueError(
                f'of must be "residuals", "directions" or "gradients", got {of!r}.'
            )
        return [symmetry_score(p, permutations, most=most, seed=seed) for p in points]

    def clipping_bias(self, clip_norm: float) -> ClippingBias:
        """The effect of clipping at `clip_norm` on progress, in the full space."""
        return _bias(
            self.norms, self.inner, self.mean_norm, self.residual_norms, clip_norm
        )

    def summary(self, clip_norm: float, permutations: int = 999) -> dict[str, float]:
        """One row of a table: cosines, symmetry and bias at a clip norm.

        Args:
          clip_norm: the clip norm.
          permutations: for the p-value, the median over the projections.

        Returns:
          The scores of residuals (`asymmetry`), of their directions and of gradients
          about zero are means over the projections. `bias_share` is the bias over the
          progress of symmetric gradients: the share that asymmetry takes from progress
          (below 0) or adds.
        """
        scores = self.symmetry(permutations)
        others = {
            of: np.mean([s.score for s in self.symmetry(1, of=of)])
            for of in ("directions", "gradients")
        }
        bias = self.clipping_bias(clip_norm)
        symmetric = bias.symmetric_progress
        cosines = self.cosines
        return {
            "count": len(self.norms),
            "mean_gradient_norm": self.mean_norm,
            "cosine_mean": float(cosines.mean()),
            "cosine_negative": float(np.mean(cosines < 0)),
            "asymmetry": float(np.mean([s.score for s in scores])),
            "asymmetry_directions": float(others["directions"]),
            "asymmetry_about_zero": float(others["gradients"]),
            "p_value_median": float(np.median([s.p_value for s in scores])),
            **bias.row(),
            "bias_share": bias.bias / symmetric if symmetric > 0 else math.nan,
        }


def gradient_geometry(
    gradients: Any, *, projections: int = 4, seed: int = 0
) -> GradientGeometry:
    """Measures the geometry of gradients, in two passes over them.

    *Formal guarantees*: none of privacy: computed from gradients without noise.

    Args:
      gradients: an array `[n, D]`, or a function that returns an iterator over chunks
        `[b, D]`, such as `GradientMeter.chunks`.
      projections: number of random projections to the plane.
      seed: for the projections.

    Returns:
      The geometry.

    Raises:
      ValueError: if there are no gradients, or a gradient is not finite.

    >>> rng = np.random.default_rng(0)
    >>> found = gradient_geometry(rng.standard_normal((500, 20)) + 3)
    >>> bool(found.cosines.min() > 0)
    True
    """
    count, read = projections, _reader(gradients)
    total, examples = 0.0, 0
    for chunk in read():
        if not np.all(np.isfinite(chunk)):
            raise ValueError("gradients has entries that are not finite.")
        total = total + np.sum(chunk, axis=0, dtype=np.float64)
        examples += len(chunk)
    if not examples:
        raise ValueError("gradients has no examples.")
    mean = total / examples
    rng = np.random.default_rng(seed)
    matrices = rng.standard_normal((len(mean), 2 * count), np.float32) / np.sqrt(2)
    parts: list[tuple[np.ndarray, ...]] = []
    for chunk in read():
        chunk = np.asarray(chunk, np.float64)
        norms = np.sqrt(np.einsum("ij,ij->i", chunk, chunk))
        parts.append((norms, chunk @ mean, chunk @ matrices))
    norms, inner, flat = (np.concatenate(p) for p in zip(*parts, strict=True))
    if len(norms) != examples:
        raise ValueError("gradients: the function gave different chunks when repeated.")
    projected = flat.reshape(examples, count, 2).transpose(1, 0, 2)
    means = (mean @ matrices).reshape(count, 2)
    return GradientGeometry(norms, inner, float(np.linalg.norm(mean)), projected, means)


def _reader(gradients) -> Callable[[], Iterable[np.ndarray]]:
    if callable(gradients):
        return gradients
    whole = np.asarray(gradients, np.float64)
    if whole.ndim != 2:
        raise ValueError(
            f"gradients must be [n, D], one gradient per row, got {whole.shape}."
        )
    return lambda: iter([whole])


def _bias(norms, inner, mean_norm, residuals, clip_norm) -> ClippingBias:
    c, squared = float(clip_norm), mean_norm**2
    here = inner * c / np.maximum(norms, c)
    # v - xi = 2 v - g is the mirror image of g.
    mirrored = np.sqrt(np.maximum(4 * squared - 4 * inner + norms**2, 0.0))
    there = (2 * squared - inner) * c / np.maximum(mirrored, c)
    both = np.concatenate([here, there])
    progress, symmetric = float(here.mean()), float(both.mean())
    small = float(np.mean(residuals < c / 4))
    return ClippingBias(
        clip_norm=c,
        progress=progress,
        symmetric_progress=symmetric,
        bias=progress - symmetric,
        wasserstein=float(stats.wasserstein_distance(here, both)),
        small_residuals=small,
        guaranteed=mean_norm * min(mean_norm, 0.75 * c) * small,
        fraction_clipped=float(np.mean(norms > c)),
    )
