"""The pieces of the mean squared error as a function of the clip norm.

With v_1 < ... < v_m the distinct norms and v_0 = 0, the error on [v_{k-1}, v_k] is the
quadratic A C^2 - 2 B C + D, where A, B, D come from the sums N of unit vectors and G of
gradients over the records with norm v_k and above.
"""

from __future__ import annotations

import dataclasses

import numpy as np

# The number of entries in a block of cumulative sums.
_BLOCK = 2**22


@dataclasses.dataclass
class Best:
    """The least error so far, and the points where the derivative is 0."""

    mse: float = np.inf
    clip_norm: float = np.inf
    kind: str = "kink"
    stationary: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    def offer(self, clip_norms, values, kind: str) -> None:
        """Keeps the best of some candidates; the smallest among equal candidates."""
        if np.size(values) == 0:
            return
        values = np.maximum(values, 0.0)
        least = values.min()
        at = float(np.min(np.asarray(clip_norms)[values == least]))
        if (least, at) < (self.mse, self.clip_norm):
            self.mse, self.clip_norm = float(least), at
            self.kind = "zero" if at == 0 else kind


class Problem:
    """The error as a function of the clip norm.

    Args:
      rows: the gradients, `[B, D]`.
      sigma: noise multiplier.
      d: dimension of the noise.
      sampling: (1 - q) / q for Poisson sampling at rate q, or 0.
    """

    def __init__(self, rows: np.ndarray, sigma: float, d: int, sampling: float):
        self.rows, self.sigma, self.d = rows, sigma, d
        self.sampling = sampling
        self.noise = sigma * sigma * d
        self.norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))
        if not np.all(np.isfinite(self.norms)):
            raise ValueError(
                f"gradients: {int(np.sum(~np.isfinite(self.norms)))} of "
                f"{self.norms.size} rows are not finite, or too large to square."
            )
        # Ascending; zeros change nothing.
        self.values, self._counts = np.unique(
            self.norms[self.norms > 0], return_counts=True
        )
        squares = self._counts * self.values**2
        self._squares_below = np.concatenate([[0.0], np.cumsum(squares)])

    # Evaluation at given points.

    def errors(self, clip_norms: np.ndarray) -> tuple[np.ndarray, ...]:
        """Noise, clipping error and sampling noise at each clip norm."""
        noise = self.noise * clip_norms**2
        capped = [np.sum(np.minimum(self.norms, c) ** 2) for c in clip_norms]
        sampling = self.sampling * np.array(capped)
        residual = self._excess(clip_norms, self.norms) @ self.rows
        return noise, np.einsum("ij,ij->i", residual, residual), sampling

    @staticmethod
    def _excess(clip_norms, norms):
        scaled = clip_norms[:, None] / np.where(norms > 0, norms, np.inf)[None]
        return np.where(norms[None] > clip_norms[:, None], 1 - scaled, 0.0)

    def clipped_sums(self, clip_norm: float) -> tuple[np.ndarray, np.ndarray]:
        """N and G: the sums over the records with norm above `clip_norm`."""
        clipped = (self.norms > clip_norm) & (self.norms > 0)
        rows = self.rows[clipped]
        return (1 / self.norms[clipped]) @ rows, rows.sum(axis=0)

    # The minimum.

    def search(self) -> Best:
        """Finds the least error."""
        best = Best()
        if not self.values.size:
            best.offer([0.0], np.zeros(1), "zero")
        else:
            self._examine(self._pieces(), best)
        if self.noise == 0 and self.sampling == 0 and self.values.size:
            # Without noise the largest norm clips nothing: error 0, up to rounding.
            # A smaller clip norm is better only if the sums cancel.
            largest = float(self.values[-1])
            if best.mse > 1e-24 * float(self.norms.sum()) ** 2 or (
                best.clip_norm > largest * (1 - 1e-12)
            ):
                best.mse, best.clip_norm, best.kind = 0.0, largest, "kink"
            best.stationary = [
                point for point in best.stationary if point[0] < largest * (1 - 1e-12)
            ]
        return best

    def _examine(self, pieces, best: Best) -> None:
        """All pieces at once; `pieces` are N.N, N.G, G.G from the top value down."""
        nn, ng, gg = (part[::-1] for part in pieces)
        above = np.cumsum(self._counts[::-1])[::-1]
        low = np.concatenate([[0.0], self.values[:-1]])
        a = self.noise + nn + self.sampling * above
        d = gg + self.sampling * self._squares_below[:-1]
        self._offer(a, ng, d, low, self.values, best)

    def _offer(self, a, b, d, low, high, best: Best) -> None:
        """Candidates of quadratics a C^2 - 2 b C + d on the intervals [low, high]."""
        with np.errstate(divide="ignore", invalid="ignore"):
            flat = b / a
        inside = (a > 0) & (flat >= low) & (flat <= high)
        at = flat[inside]
        values = np.maximum(d[inside] - b[inside] * at, 0.0)
        best.stationary += [
            (float(c), float(v)) for c, v in zip(at, values, strict=True) if c > 0
        ]
        best.offer(at, values, "stationary")
        for ends in (high, low):
            best.offer(ends, (a * ends - 2 * b) * ends + d, "kink")

    def _pieces(self):
        """N.N, N.G and G.G at each norm, from the largest norm down."""
        order = np.argsort(-self.norms, kind="stable")
        order = order[self.norms[order] > 0]
        # Pieces end where the next smaller value begins.
        ends = np.cumsum(self._counts[::-1]) - 1
        rows = self.rows
        step = max(1, _BLOCK // max(1, rows.shape[1]))
        units, sums = np.zeros(rows.shape[1]), np.zeros(rows.shape[1])
        found: tuple[list, list, list] = [], [], []
        for start in range(0, len(order), step):
            index = order[start : start + step]
            block = rows[index]
            n = np.cumsum(block / self.norms[index, None], axis=0) + units
            g = np.cumsum(block, axis=0) + sums
            units, sums = n[-1], g[-1]
            here = ends[(ends >= start) & (ends < start + step)] - start
            n, g = n[here], g[here]
            for place, (left, right) in zip(
                found, ((n, n), (n, g), (g, g)), strict=True
            ):
                place.append(np.einsum("ij,ij->i", left, right))
        return [np.concatenate(place) for place in found]
