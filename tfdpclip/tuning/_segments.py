"""The pieces of the mean squared error as a function of the clip norm.

With v_1 < ... < v_m the distinct norms and v_0 = 0, the error on [v_{k-1}, v_k] is the
quadratic A C^2 - 2 B C + D, where A, B, D come from the sums N of unit vectors and G of
gradients over the records with norm v_k and above.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tfdpclip import _arguments

# The number of entries in a block of cumulative sums.
_BLOCK = 2**22
# The largest effect of rounding on a bound, relative to the terms of the bound.
_ROUNDING = 1e-9


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


class _Gradients:
    """Rows that can be read several times, chunk by chunk, in double precision."""

    def __init__(self, read: Callable[[], Iterator], whole: np.ndarray | None):
        self.whole = whole
        self._read = read
        found: list[int] = []
        self.dimension = 0
        for chunk in self._chunks():
            if found and chunk.shape[1] != self.dimension:
                raise ValueError("gradients: the chunks have rows of several lengths.")
            self.dimension = chunk.shape[1]
            found.append(np.sqrt(np.einsum("ij,ij->i", chunk, chunk)))
        self.norms = np.concatenate(found) if found else np.zeros(0)
        if not np.all(np.isfinite(self.norms)):
            raise ValueError(
                f"gradients: {int(np.sum(~np.isfinite(self.norms)))} of "
                f"{self.norms.size} rows are not finite, or too large to square."
            )

    def _chunks(self):
        read = self._read()
        if not hasattr(read, "__iter__"):
            raise ValueError(
                "gradients: the function must return an iterator over chunks, got "
                f"{_arguments.shown(read)}."
            )
        for chunk in read:
            chunk = _arguments.floats("gradients", chunk)
            if chunk.ndim != 2:
                raise ValueError(
                    "gradients must be [B, D], one gradient per row (or chunks of "
                    f"that), got shape {chunk.shape}. Flatten and join the gradients "
                    "of all variables first."
                )
            yield chunk

    def chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Chunks and the norms of their rows."""
        start = 0
        for chunk in self._chunks():
            norms = self.norms[start : start + len(chunk)]
            if len(norms) < len(chunk):
                start = -1
                break
            yield chunk, norms
            start += len(chunk)
        if start != self.norms.size:
            raise ValueError(
                "gradients: the function gave other chunks when it was called again."
            )


class _Gram:
    """Gradients known only by their inner products."""

    whole = None
    dimension = 0

    def __init__(self, matrix: np.ndarray):
        self.matrix = matrix
        self.norms = np.sqrt(np.diagonal(matrix))


def gradient_source(gradients: Any) -> _Gradients:
    """Makes a source of an array, a list of chunks or a function."""
    if callable(gradients):
        return _Gradients(_arguments.function("gradients", gradients, 0), None)
    if hasattr(gradients, "__next__"):
        raise ValueError(
            "gradients is an iterator, which can be read once only. Give a function "
            "that returns a new one: optimal_clip(lambda: chunks(), ...)."
        )
    if (
        isinstance(gradients, (list, tuple))
        and gradients
        and all(_axes(part) == 2 for part in gradients)
    ):
        return _Gradients(lambda: iter(gradients), None)
    whole = _arguments.floats("gradients", gradients)
    return _Gradients(lambda: iter([whole]), whole)


def _axes(part: Any) -> int | None:
    try:
        return np.ndim(part)
    except (TypeError, ValueError):  # Not rectangular.
        return None


def gram_source(matrix: Any) -> _Gram:
    """Makes a source of a Gram matrix."""
    matrix = _arguments.floats("gradients", matrix)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(
            "gradients: with gram=True, a Gram matrix, which is square; got "
            f"{matrix.shape}."
        )
    if not np.all(np.isfinite(matrix)):
        raise ValueError("gradients: the Gram matrix has entries that are not finite.")
    diagonal = np.diagonal(matrix)
    slack = 1e-6 * np.max(np.abs(diagonal), initial=0.0)
    if np.any(diagonal < 0) or not np.allclose(matrix, matrix.T, rtol=0, atol=slack):
        raise ValueError(
            "gradients: a Gram matrix is symmetric with a diagonal of 0 or above."
        )
    return _Gram(matrix)


class Problem:
    """The error as a function of the clip norm.

    Args:
      source: the gradients.
      sigma: noise multiplier.
      d: dimension of the noise.
      sampling: (1 - q) / q for Poisson sampling at rate q, or 0.
    """

    def __init__(self, source: Any, sigma: float, d: int, sampling: float):
        self.source, self.sigma, self.d = source, sigma, d
        self.sampling = sampling
        self.noise = sigma * sigma * d
        self.norms = source.norms
        # Ascending; zeros change nothing. rank[i]: which of the values row i has.
        self.values, ranks, self._counts = np.unique(
            self.norms, return_inverse=True, return_counts=True
        )
        if self.values.size and self.values[0] == 0:
            self.values, self._counts = self.values[1:], self._counts[1:]
            ranks = ranks - 1
        self._ranks = ranks
        squares = self._counts * self.values**2
        self._squares_below = np.concatenate([[0.0], np.cumsum(squares)])

    # Evaluation at given points.

    def errors(self, clip_norms: np.ndarray) -> tuple[np.ndarray, ...]:
        """Noise, clipping error and sampling noise at each clip norm."""
        noise = self.noise * clip_norms**2
        capped = [np.sum(np.minimum(self.norms, c) ** 2) for c in clip_norms]
        sampling = self.sampling * np.array(capped)
        if isinstance(self.source, _Gram):
            factors = self._excess(clip_norms, self.norms)
            clipping = np.einsum("ki,ij,kj->k", factors, self.source.matrix, factors)
            return noise, np.maximum(clipping, 0.0), sampling
        residual = np.zeros([len(clip_norms), self.source.dimension])
        for chunk, norms in self.source.chunks():
            residual += self._excess(clip_norms, norms) @ chunk
        return noise, np.einsum("ij,ij->i", residual, residual), sampling

    @staticmethod
    def _excess(clip_norms, norms):
        scaled = clip_norms[:, None] / np.where(norms > 0, norms, np.inf)[None]
        return np.where(norms[None] > clip_norms[:, None], 1 - scaled, 0.0)

    def clipped_sums(self, clip_norm: float) -> tuple[np.ndarray, np.ndarray]:
        """N and G: the sums over the records with norm above `clip_norm`."""
        units = np.zeros(self.source.dimension)
        sums = np.zeros(self.source.dimension)
        for chunk, norms in self.source.chunks():
            kept = (norms > clip_norm) & (norms > 0)
            units += (1 / norms[kept]) @ chunk[kept]
            sums += chunk[kept].sum(axis=0)
        return units, sums

    # The minimum.

    def search(self, memory: int) -> Best:
        """Finds the least error."""
        best = Best()
        if not self.values.size:
            best.offer([0.0], np.zeros(1), "zero")
        elif isinstance(self.source, _Gram):
            self._examine(self._gram_pieces(), best)
        elif self.source.whole is not None:
            self._examine(self._array_pieces(), best)
        else:
            self._descend(best, memory)
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

    def _array_pieces(self):
        order = np.argsort(-self.norms, kind="stable")
        order = order[self.norms[order] > 0]
        # Pieces end where the next smaller value begins.
        ends = np.cumsum(self._counts[::-1]) - 1
        rows = self.source.whole
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

    def _gram_pieces(self):
        order = np.argsort(-self.norms, kind="stable")
        order = order[self.norms[order] > 0]
        ends = np.cumsum(self._counts[::-1]) - 1
        inner = self.source.matrix[np.ix_(order, order)]
        inverse = 1 / self.norms[order]
        pieces = []
        for left, right in (
            (inverse, inverse),
            (inverse, np.ones_like(inverse)),
            (np.ones_like(inverse), np.ones_like(inverse)),
        ):
            scaled = left[:, None] * inner * right[None]
            # Row k of the lower and column k of the upper triangle join at step k.
            added = np.tril(scaled).sum(axis=1) + np.triu(scaled, 1).sum(axis=0)
            pieces.append(np.cumsum(added)[ends])
        return pieces

    def _descend(self, best: Best, memory: int) -> None:
        """Branch and bound: each pass over the data splits the candidate intervals.

        An interval of norms [v_a, v_b] is described by the sums over the records above
        it. Within it, the residual differs from the residual of the records above by at
        most w = sum over the interval's records of (norm - v_{a-1}).
        """
        size = self.source.dimension
        at_once = int(np.clip(memory // (64 * max(1, size)), 4, 4096))
        zero = np.zeros(size)
        alive = [(0, len(self.values) - 1, zero, zero)]
        while alive:
            per = max(2, at_once // len(alive))
            parts = [
                [
                    (p[0], p[-1])
                    for p in np.array_split(np.arange(a, b + 1), per)
                    if len(p)
                ]
                for a, b, _, _ in alive
            ]
            flat = [part for group in parts for part in group]
            units, sums = self._binned(flat)
            position, children = 0, []
            for (_, _, n, g), group in zip(alive, parts, strict=True):
                for k in reversed(range(len(group))):
                    children.append((*group[k], n, g))
                    n = n + units[position + k]
                    g = g + sums[position + k]
                    if group[k][0] == group[k][1]:
                        self._one_piece(group[k][0], n, g, best)
                    self._lower_end(group[k][0], n, g, best)
                position += len(group)
            alive = [
                (a, b, n, g)
                for a, b, n, g in children
                if a < b and self._bound(a, b, n, g) <= best.mse
            ]

    def _binned(self, parts) -> tuple[np.ndarray, np.ndarray]:
        """N and G of the records of each interval of values."""
        label = np.full(len(self.values) + 1, -1)  # The last entry is for norm 0.
        for k, (a, b) in enumerate(parts):
            label[a : b + 1] = k
        units = np.zeros([len(parts), self.source.dimension])
        sums = np.zeros_like(units)
        start = 0
        for chunk, norms in self.source.chunks():
            labels = label[self._ranks[start : start + len(chunk)]]
            start += len(chunk)
            order = np.argsort(labels, kind="stable")
            order = order[labels[order] >= 0]
            if not len(order):
                continue
            which, first = np.unique(labels[order], return_index=True)
            rows = chunk[order]
            sums[which] += np.add.reduceat(rows, first, axis=0)
            rows = rows / norms[order, None]
            units[which] += np.add.reduceat(rows, first, axis=0)
        return units, sums

    def _quadratic(self, k, n, g):
        """a, b, d for the records with values[k] and above clipped."""
        count = float(self._counts[k:].sum())
        a = self.noise + float(n @ n) + self.sampling * count
        d = float(g @ g) + self.sampling * self._squares_below[k]
        return a, float(n @ g), d

    def _one_piece(self, k, n, g, best):
        a, b, d = (np.array([x]) for x in self._quadratic(k, n, g))
        self._offer(a, b, d, self._low(k), self.values[k : k + 1], best)

    def _low(self, k):
        return self.values[k - 1 : k] if k else np.zeros(1)

    def _lower_end(self, k, n, g, best):
        c = self._low(k)
        a, b, d = self._quadratic(k, n, g)
        best.offer(c, (a * c - 2 * b) * c + d, "kink")

    def _bound(self, a, b, n, g) -> float:
        """A lower bound on the error in [v_{a-1}, v_b]; n, g are sums above v_b."""
        low, high = float(self._low(a)[0]), float(self.values[b])
        inside = slice(a, b + 1)
        spread = float(self._counts[inside] @ (self.values[inside] - low))
        least_inside = float(self._counts[inside].sum()) * low**2
        below = self._squares_below[a] + least_inside
        count = float(self._counts[b + 1 :].sum())
        quadratic = self.noise + float(n @ n) + self.sampling * count
        linear, constant = float(n @ g), float(g @ g)
        at = low
        if quadratic > 0:
            at = min(max(linear / quadratic, low), high)
        least = (quadratic * at - 2 * linear) * at + constant
        farthest = max(np.linalg.norm(g - c * n) for c in (low, high))
        bound = max(self.noise * low**2, least - 2 * spread * farthest)
        slack = _ROUNDING * (quadratic * high**2 + constant)
        return bound + self.sampling * below - slack
