"""Discrete Gaussian noise and random rotations inside TensorFlow graphs.

The integers are cut into cells of equal size, so few that one table has all cells. Most
of a cell's mass is a rectangle: equal for each of its numbers. One table lookup chooses
the rectangle, and random bits choose the number in it: two cheap operations for 99
samples of 100. The rest of the distribution (the part below the table's resolution, and
the part above the rectangles, as the distribution falls within a cell) is drawn by
rejection. (Marsaglia and Tsang's ziggurat is similar, with horizontal rectangles of
equal area.) A rotation is random signs and a Walsh-Hadamard transform.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import tensorflow as tf

from tfdpclip.federated import _entropy
from tfdpclip.noise import philox

# The mass beyond 10 standard deviations is 2e-23.
_REACH = 10.0
# The stddev in cells is at most this, and above half of it if a cell has more than one
# number. With more cells, the table's resolution loses more mass; with fewer cells, the
# fall within cells does.
_CELLS = 128
# 16 random bits choose a slot of the table, which does not pay off for small counts.
_INDEX_BITS = 16
_TABLE_FROM = 2**13
# The log2 size of the transform's matrices. Smaller matrices take more passes over the
# vector, larger matrices more multiplications: 8, 16, 64 and 128 took 1.1 to 1.9 times
# as long for a million coordinates.
_LOG_BLOCK = 5
_BYTE = 8


def sample(
    count: int, stddev: float, seed: tf.Tensor, dtype: tf.DType = tf.int64
) -> tf.Tensor:
    """`[count]` samples of the discrete Gaussian N_Z(0, stddev^2).

    The probability of k is proportional to exp(-k^2 / (2 stddev^2)).

    *Formal guarantees*, assuming uniform random bits instead of the generator's: the
    distribution of a sample is within 2e-17 of N_Z(0, stddev^2) in total variation
    (2e-15 for counts below 2^13), and has all numbers up to 8.6 standard deviations.
    Namely, with p(k) the probabilities, cells of K numbers, and q the smallest p in a
    cell:

    * A slot of the table belongs to a cell with the share n / 2^16 <= K q of all slots,
      an exact integer. Each number of the cell has n / (2^16 K) from there: exactly.
    * The rest of p is drawn by rejection. Its proposals have, for every number, the
      largest p of the cell minus n / (2^16 K). Cells are chosen by 63 bits, which
      moves a cell's chance by 2^-63 at most; numbers are kept by 52 bits and float64
      arithmetic, which moves a chance by 8e-16 at most. For 3000 cells and 1.2% of the
      samples at most, both together are below 2e-17. (Below 2^13 samples there is no
      table: all samples are drawn by rejection.)
    * The probabilities behind these numbers have 64 bits where numpy's `longdouble` is
      wider than a float64, as on x86.
    * Beyond 10 standard deviations p has a mass of 2e-23.

    Args:
      count: the number of samples.
      stddev: the parameter; 0 gives zeros.
      seed: int64 `[2]`.
      dtype: int32 or int64.

    Raises:
      ValueError: if samples do not fit the type.
    """
    if stddev == 0:
        return tf.zeros([count], dtype)
    cells = cells_for(stddev, count >= _TABLE_FROM)
    if cells.furthest > dtype.max:
        raise ValueError(
            f"dtype is {dtype.name}, but noise of stddev {stddev:g} reaches "
            f"{cells.furthest}; use tf.int64."
        )
    if cells.direct:
        return from_table(cells, count, seed, dtype)
    return tf.cast(by_rejection(cells, count, seed), dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Cells:
    """The constants for drawing a discrete Gaussian.

    Attributes:
      stddev: its parameter.
      width: K, the number of integers in a cell; a power of 2. Cell a is
        a K .. a K + K - 1.
      numbers: `[2^16]`, the cell of each slot of the table.
      direct: how many slots belong to a cell; 0 without a table.
      nearest: `[A]`, the number in each cell that is nearest to 0; cells are in the
        order of their chances to be proposed.
      away: `[A]`, 1 or -1: the direction of the cell's further numbers.
      bounds: `[A - 1]`, the cumulated chances of the cells' proposals, times 2^63.
      excess: `[A]`, the largest probability in a cell over its proposed probability.
      accepted: the chance that a proposal is accepted.
    """

    stddev: float
    width: int
    numbers: np.ndarray
    direct: int
    nearest: np.ndarray
    away: np.ndarray
    bounds: np.ndarray
    excess: np.ndarray
    accepted: float

    @property
    def furthest(self) -> int:
        """The largest absolute value of a sample."""
        return int(np.max(np.abs(self.nearest))) + self.width


@functools.lru_cache(maxsize=16)
def cells_for(stddev: float, table: bool) -> Cells:
    """The constants for a parameter.

    Args:
      stddev: above 0.
      table: whether to make a table.
    """
    width = 2 ** max(0, math.ceil(math.log2(stddev / _CELLS)))
    most = math.ceil(_REACH * stddev / width)
    numbers = np.arange(-most, most + 1, dtype=np.int64)
    below = numbers < 0
    nearest = numbers * width + np.where(below, width - 1, 0)
    furthest = numbers * width + np.where(below, 0, width - 1)

    def weights(values):
        return np.exp(
            -((values.astype(np.longdouble) / np.longdouble(stddev)) ** 2) / 2
        )

    if width == 1:
        total = np.sum(weights(nearest))
    else:
        # By Poisson's summation formula, with relative error 2 exp(-2 pi^2 stddev^2).
        total = np.longdouble(stddev) * np.sqrt(8 * np.arctan(np.longdouble(1)))
    # The mass of each cell if all its numbers had the probability of one number.
    largest, smallest = (width * weights(x) / total for x in (nearest, furthest))
    slots = 2**_INDEX_BITS if table else 0
    # Rounding must not make a rectangle higher than the distribution.
    taken = np.floor(slots * smallest * (1 - 2.0**-50)).astype(np.int64)
    direct = int(np.sum(taken))
    proposed = largest - taken / np.longdouble(2**_INDEX_BITS)
    # Small chances first, since small sums keep them apart.
    order = np.argsort(proposed)
    chances = np.cumsum(proposed[order])
    owners = np.zeros(slots, np.int16)
    owners[:direct] = np.repeat(numbers, taken)
    return Cells(
        stddev=stddev,
        width=width,
        numbers=owners,
        direct=direct,
        nearest=nearest[order],
        away=np.where(below, -1, 1)[order],
        bounds=np.floor(chances[:-1] / chances[-1] * 2.0**63).astype(np.int64),
        excess=(largest / proposed)[order].astype(np.float64),
        accepted=float((1 - direct / 2**_INDEX_BITS) / chances[-1]),
    )


def from_table(cells: Cells, count: int, seed: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """`[count]` samples; `cells` has a table."""
    slots, within = _slots(cells, count, _entropy.derive(seed, 0))
    starts = tf.cast(tf.constant(cells.numbers), dtype) * cells.width
    found = tf.gather(starts, slots) + tf.cast(within, dtype)
    # The last slots belong to no cell.
    left = tf.where(slots >= cells.direct)
    others = by_rejection(cells, tf.shape(left)[0], _entropy.derive(seed, 1))
    return tf.tensor_scatter_nd_update(found, left, tf.cast(others, dtype))


def _slots(cells, count, seed):
    """Random slots of the table, int32, and places within the cells."""
    wide = _INDEX_BITS + cells.width.bit_length() - 1 > 32
    signed, word = (tf.int64, tf.uint64) if wide else (tf.int32, tf.uint32)
    bits = philox.full_integers([count], seed, signed)
    unused = tf.constant(word.size * 8 - _INDEX_BITS, word)
    slots = tf.bitwise.right_shift(tf.bitcast(bits, word), unused)
    slots = tf.cast(slots, tf.int32) if wide else tf.bitcast(slots, tf.int32)
    return slots, tf.bitwise.bitwise_and(bits, cells.width - 1)


def by_rejection(cells: Cells, count: int | tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """`[count]` int64 samples of the part of the distribution outside the table.

    A proposal at a distance of d from the number c nearest to 0 in its cell has
    p(c + d) = p(c) exp(-t), with t = d (2 |c| + d) / (2 stddev^2). It is accepted in
    proportion to p(c + d) - n / (2^16 K), which, divided by its largest value, is
    1 + (exp(-t) - 1) times the cell's `excess`.
    """
    if cells.width == 1:
        return tf.gather(cells.nearest, _proposed_cells(cells, count, seed))
    # Twelve standard deviations of the number accepted (too few are accepted once in
    # 10^32 times; the result then has a wrong shape, and the round fails).
    wanted = tf.cast(count, tf.float64)
    proposals = (wanted + 12 * tf.sqrt(wanted)) / cells.accepted
    proposals = tf.cast(tf.math.ceil(proposals), tf.int32) + 64
    found = _proposed_cells(cells, proposals, _entropy.derive(seed, 0))
    places = philox.full_integers([proposals], _entropy.derive(seed, 1), tf.int64)
    places = tf.bitwise.bitwise_and(places, cells.width - 1)
    nearest = tf.gather(cells.nearest, found)
    distance = tf.cast(places, tf.float64)
    fall = distance * (2 * tf.cast(tf.abs(nearest), tf.float64) + distance)
    keep = 1 + tf.math.expm1(fall * (-0.5 / cells.stddev**2)) * tf.gather(
        cells.excess, found
    )
    chance = philox.uniform([proposals], _entropy.derive(seed, 2), tf.float64)
    samples = nearest + tf.gather(cells.away, found) * places
    kept = tf.boolean_mask(samples, chance < keep)
    return tf.reshape(kept[:count], [count])


def _proposed_cells(cells, count, seed):
    bits = philox.full_integers([count], seed, tf.int64)
    bits = tf.bitwise.bitwise_and(bits, 2**63 - 1)
    return tf.searchsorted(tf.constant(cells.bounds), bits, side="right")


def hadamard(vector: tf.Tensor) -> tf.Tensor:
    """The orthonormal Walsh-Hadamard transform of a vector; its own inverse.

    Args:
      vector: `[D]`, D a power of 2.
    """
    dimension = int(vector.shape[0])
    left = dimension.bit_length() - 1
    result = vector
    while left:
        size = 2 ** min(left, _LOG_BLOCK)
        left -= min(left, _LOG_BLOCK)
        result = tf.reshape(result, [size, dimension // size])
        # The first axis is transformed and becomes the last.
        result = tf.matmul(result, _matrix(size, vector.dtype), transpose_a=True)
    return tf.reshape(result, [dimension])


def _matrix(size: int, dtype: tf.DType) -> tf.Tensor:
    matrix = np.ones([1, 1])
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return tf.constant(matrix / math.sqrt(size), dtype)


def signs(dimension: int, seed: tf.Tensor, size: float = 1.0) -> tf.Tensor:
    """`[dimension]` independent signs times `size`, float32.

    A random byte chooses a row of eight signs.
    """
    words = -(-dimension // (4 * _BYTE))
    random = philox.full_integers([words], seed, tf.int32)
    chosen = tf.cast(tf.reshape(tf.bitcast(random, tf.uint8), [-1]), tf.int32)
    bits = np.arange(2**_BYTE)[:, np.newaxis] >> np.arange(_BYTE) & 1
    rows = tf.constant(size * (1 - 2 * bits), tf.float32)
    return tf.reshape(tf.gather(rows, chosen), [-1])[:dimension]
