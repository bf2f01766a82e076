"""Records that are made from a seed: tables, series and sequences.

Each function returns training records and test records of the same distribution. The
inputs have the scales that users have after an ordinary preparation: numbers of about
unit size, of which some are skewed, and categories as columns of 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Arrays = tuple[np.ndarray, np.ndarray]
#: Test records of every table: enough for scores with few points of error.
TEST = 8_000
_HIDDEN, _NUMBERS, _LEVELS = 6, 14, (4, 7)


def _table(count: int, outputs: int, rng: np.random.Generator) -> Arrays:
    """Rows of numbers and categories, and what they say: signals of unit variance.

    The columns are noisy views of a few hidden numbers, as in tables of people.
    """
    hidden = rng.normal(size=[count, _HIDDEN])
    numbers = hidden @ rng.normal(size=[_HIDDEN, _NUMBERS]) / np.sqrt(_HIDDEN)
    numbers += 0.4 * rng.normal(size=numbers.shape)
    # Amounts are skewed: a third of the columns is lognormal.
    skewed = slice(0, _NUMBERS, 3)
    numbers[:, skewed] = (np.exp(numbers[:, skewed]) - 1.6) / 2
    columns = [numbers]
    for levels in _LEVELS:
        scores = hidden @ rng.normal(size=[_HIDDEN, levels])
        scores += rng.gumbel(size=scores.shape)
        columns.append(np.eye(levels)[scores.argmax(axis=1)])
    bent = np.tanh(hidden @ rng.normal(size=[_HIDDEN, 12]))
    signals = bent @ rng.normal(size=[12, outputs])
    signals = (signals - signals.mean(axis=0)) / signals.std(axis=0)
    return np.concatenate(columns, axis=1).astype(np.float32), signals


def _split(x: np.ndarray, y: np.ndarray, count: int) -> tuple[Arrays, Arrays]:
    return (x[:count], y[:count]), (x[count:], y[count:])


def two_classes(
    count: int, share: float, strength: float, seed: int
) -> tuple[Arrays, Arrays]:
    """A table with labels `[n, 1]`, 0 or 1.

    Args:
      count: training records.
      share: the share of label 1.
      strength: how much the columns say of the label; 3 is much.
      seed: of the table.

    >>> (x, y), (test_x, test_y) = two_classes(1000, 0.07, 3.0, 0)
    >>> x.shape, y.shape, test_x.shape[0], round(float(test_y.mean()), 2)
    ((1000, 25), (1000, 1), 8000, 0.07)
    """
    return several_labels(count, (share,), strength, seed)


def several_labels(
    count: int, shares: Sequence[float], strength: float, seed: int
) -> tuple[Arrays, Arrays]:
    """A table with several labels, 0 or 1, at once: `[n, len(shares)]`."""
    rng = np.random.default_rng(seed)
    x, signals = _table(count + TEST, len(shares), rng)
    signals = strength * signals + rng.logistic(size=signals.shape)
    limits = [np.quantile(s, 1 - p) for s, p in zip(signals.T, shares, strict=True)]
    return _split(x, (signals > limits).astype(np.float32), count)


def unequal_classes(
    count: int, shares: Sequence[float], strength: float, seed: int
) -> tuple[Arrays, Arrays]:
    """A table with classes `[n]`, of which some are rare.

    >>> (_, y), _ = unequal_classes(4000, (0.6, 0.3, 0.1), 3.0, 0)
    >>> rarest, *_, most = sorted(np.bincount(y) / len(y))
    >>> 0.05 < rarest < 0.15 and 0.5 < most < 0.7
    True
    """
    rng = np.random.default_rng(seed)
    x, signals = _table(count + TEST, len(shares), rng)
    signals = strength * signals + rng.gumbel(size=signals.shape)
    offsets = np.zeros(len(shares))
    for _ in range(200):  # The offsets with which each class has its share.
        found = np.bincount((signals + offsets).argmax(1), minlength=len(shares))
        offsets += 0.3 * np.log(np.array(shares) / np.maximum(found / len(x), 1e-4))
    return _split(x, (signals + offsets).argmax(axis=1).astype(np.int32), count)


def amounts(
    count: int, mean: float, spread: float, noise: float, freedom: float, seed: int
) -> tuple[Arrays, Arrays]:
    """A table with a number `[n, 1]` to predict.

    Args:
      count: training records.
      mean: of the numbers.
      spread: the standard deviation of what the columns explain.
      noise: the scale of what they do not explain, as a share of `spread`.
      freedom: of Student's t distribution of the noise; 3 has heavy tails.
      seed: of the table.

    >>> (x, y), _ = amounts(1000, 60.0, 20.0, 0.3, 30.0, 0)
    >>> x.shape, y.shape, 57 < y.mean() < 63
    ((1000, 25), (1000, 1), True)
    """
    rng = np.random.default_rng(seed)
    x, signals = _table(count + TEST, 1, rng)
    signals = signals + noise * rng.standard_t(freedom, size=signals.shape)
    return _split(x, (mean + spread * signals).astype(np.float32), count)


def series(
    count: int, length: int, classes: int, noise: float, seed: int
) -> tuple[Arrays, Arrays]:
    """Series `[n, length, 2]` of two sensors; the class is their rhythm.

    A class has its own period and its own delay of the second sensor; the start and the
    size of a series are random.
    """
    rng = np.random.default_rng(seed)
    every = count + TEST
    y = rng.integers(classes, size=every).astype(np.int32)
    period = np.linspace(6, 16, classes)[y] * rng.uniform(0.9, 1.1, every)
    delay = (np.arange(classes) * 2 % classes / classes)[y] * 2 * np.pi
    start = rng.uniform(0, 2 * np.pi, every)
    angle = 2 * np.pi * np.arange(length) / period[:, None] + start[:, None]
    x = np.stack([np.sin(angle), np.sin(angle + delay[:, None])], axis=-1)
    x *= rng.uniform(0.5, 1.5, [every, 1, 1])
    x += noise * rng.normal(size=x.shape)
    return _split(x.astype(np.float32), y, count)


def chains(classes: int, symbols: int, seed: int) -> np.ndarray:
    """The transition probabilities of Markov chains, `[classes, symbols, symbols]`."""
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(symbols, 0.3), size=[classes, symbols])


def walks(
    transitions: np.ndarray, count: int, length: int, seed: int
) -> tuple[Arrays, Arrays]:
    """Sequences of symbols `[n, length]`, each from the Markov chain of its class.

    >>> (x, y), _ = walks(chains(3, 5, 0), 100, 8, 0)
    >>> x.shape, int(x.max()) < 5, sorted(set(y.tolist()))
    ((100, 8), True, [0, 1, 2])
    """
    rng = np.random.default_rng(seed)
    classes, symbols, _ = transitions.shape
    every = count + TEST
    y = rng.integers(classes, size=every).astype(np.int32)
    steps = transitions.cumsum(axis=-1)
    x = np.zeros([every, length], np.int32)
    x[:, 0] = rng.integers(symbols, size=every)
    for t in range(1, length):
        limits = steps[y, x[:, t - 1]]
        drawn = (rng.random([every, 1]) > limits).sum(axis=1)
        x[:, t] = np.minimum(drawn, symbols - 1)
    return _split(x, y, count)
