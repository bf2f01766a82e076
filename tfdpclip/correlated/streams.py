"""The noise of each step, from fresh draws and from memory, step by step.

The NumPy streams here are the reference for every front end with its own tensors. The
memory of a stream is as secret as the data: with the memory and the released numbers,
anyone can remove the noise. It must not be in any saved model.
"""

from __future__ import annotations

import abc
from collections.abc import Callable

import numpy as np

Draw = Callable[[], np.ndarray]


class Stream(abc.ABC):
    """Correlated noise, step by step.

    *Formal guarantees*

    * With draws z_0, z_1, ... the noise of steps 0, 1, ... is N z, where N is the
      matrix's `noising`: N C = I. Later draws are not made before they are needed.
    """

    #: The number of vectors in memory between steps.
    buffers: int

    def draws(self, step: int) -> int:
        """Returns how many fresh draws of mean 0 and variance 1 a step needs."""
        del step
        return 1

    @abc.abstractmethod
    def next(self, draw: Draw) -> np.ndarray:
        """Returns the noise of the next step.

        Args:
          draw: Returns the next fresh draw; called `draws(step)` times.
        """


class Redrawn(Stream):
    """A weighted sum of the last p draws: w_t = sum_k d_k z_(t-k).

    If a draw is a function of a secret and the step, as with a counter-based generator,
    past draws can be drawn again instead of being stored: no memory at all.

    Args:
      weights: d_0, d_1, ..., the first column of the banded C^-1.

    >>> stream = Redrawn(np.array([1.0, -0.5]))
    >>> z = iter([np.ones(1), np.zeros(1)])
    >>> [float(stream.next(lambda: next(z))[0]) for _ in range(2)]
    [1.0, -0.5]
    """

    def __init__(self, weights: np.ndarray):
        self.weights = np.asarray(weights, float)
        self.buffers = len(self.weights) - 1
        self._past: list[np.ndarray] = []

    def next(self, draw: Draw) -> np.ndarray:
        self._past = [draw(), *self._past][: len(self.weights)]
        return sum(d * z for d, z in zip(self.weights, self._past, strict=False))


class Recursive(Stream):
    """w_t = (z_t - sum_k c_k w_(t-k)) / c_0 with the last b-1 noises kept.

    C w = z solved from above: Algorithm 9 of Choquette-Choo et al. 2023 (arXiv
    2306.08153), for a C of b bands.

    Args:
      coefficients: c_0, c_1, ..., c_(b-1).

    >>> stream = Recursive(np.array([1.0, 0.5]))
    >>> z = iter([np.ones(1), np.zeros(1)])
    >>> [float(stream.next(lambda: next(z))[0]) for _ in range(2)]
    [1.0, -0.5]
    """

    def __init__(self, coefficients: np.ndarray):
        self.coefficients = np.asarray(coefficients, float)
        self.buffers = len(self.coefficients) - 1
        self._past: list[np.ndarray] = []

    def next(self, draw: Draw) -> np.ndarray:
        # In the first steps there is less past than there are coefficients.
        pairs = zip(self.coefficients[1:], self._past, strict=False)
        rest = sum((c * w for c, w in pairs), np.zeros(1))
        noise = (draw() - rest) / self.coefficients[0]
        self._past = [noise, *self._past][: self.buffers]
        return noise


class Buffered(Stream):
    """w_t = z_t - sum_i s_i scale_i, and then s_i = s_i decay_i + w_t.

    Algorithm 3 of McMahan et al. 2024 (arXiv 2408.08868): C^-1 for the buffered linear
    Toeplitz matrix C with c_0 = 1, c_k = sum_i scale_i decay_i^(k-1).

    Args:
      decay: The decay of each buffer.
      scale: The scale of each buffer.

    >>> stream = Buffered(np.array([0.0]), np.array([0.5]))
    >>> z = iter([np.ones(1), np.zeros(1)])
    >>> [float(stream.next(lambda: next(z))[0]) for _ in range(2)]
    [1.0, -0.5]
    """

    def __init__(self, decay: np.ndarray, scale: np.ndarray):
        self.decay = np.asarray(decay, float)
        self.scale = np.asarray(scale, float)
        self.buffers = len(self.decay)
        self._kept: list[np.ndarray] = []

    def next(self, draw: Draw) -> np.ndarray:
        fresh = draw()
        if not self._kept:
            self._kept = [np.zeros_like(fresh) for _ in self.decay]
        noise = fresh - sum(w * s for w, s in zip(self.scale, self._kept, strict=True))
        self._kept = [
            d * s + noise for d, s in zip(self.decay, self._kept, strict=True)
        ]
        return noise


class TreeSums(Stream):
    """Differences of successive prefix sums in a binary tree of noise.

    A level of the tree is stored as the estimate of the noise in its last complete
    node, if that node is part of the current prefix. Completing a node of level h+1
    merges the two estimates below with a draw of its own.

    Args:
      share: A function of the level h: the weight of the level's own draw. The sum of
        the two estimates below has weight 1 - share(h).

    >>> stream = TreeSums(lambda level: 1.0)
    >>> [stream.draws(t) for t in range(4)]
    [1, 2, 1, 3]
    """

    def __init__(self, share: Callable[[int], float]):
        self._share = share
        self._levels: dict[int, np.ndarray] = {}
        self._before: np.ndarray | None = None

    @property
    def buffers(self) -> int:  # type: ignore[override]
        """One for each level so far, and the last prefix sum."""
        return max(self._levels, default=-1) + 2

    def draws(self, step: int) -> int:
        # One for the leaf, and one for each node that the leaf completes.
        return 1 + (step & ~(step + 1)).bit_count()

    def next(self, draw: Draw) -> np.ndarray:
        estimate, level = draw(), 0
        while level in self._levels:
            below = self._levels.pop(level) + estimate
            level += 1
            share = self._share(level)
            estimate = share * draw() + (1 - share) * below
        self._levels[level] = estimate
        # From the largest node down: the order decides how the sum rounds.
        now = sum(
            (self._levels[h] for h in sorted(self._levels, reverse=True)),
            np.zeros_like(estimate),
        )
        noise = now if self._before is None else now - self._before
        self._before = now
        return noise


def written_out(stream: Stream, steps: int) -> np.ndarray:
    """The coefficients of a new stream's noise on each draw, `[steps, draws]`."""
    total = sum(map(stream.draws, range(steps)))
    units = (np.eye(1, total, place)[0] for place in range(total))
    return np.array([stream.next(lambda: next(units)) for _ in range(steps)])
