"""A check of the covariance of noise."""

import numpy as np


def assert_covariance(rows, expected):
    """The empirical covariance of columns that are independent Gaussians.

    An entry's estimate has variance (e_ii e_jj + e_ij^2) / count. 6.5 standard
    deviations in each of at most 500 entries: a false alarm in 2.5e7 runs.
    """
    count = rows.shape[1]
    found = rows @ rows.T / count
    diagonal = np.diag(expected)
    stddev = np.sqrt((np.outer(diagonal, diagonal) + expected**2) / count)
    assert np.all(np.abs(found - expected) <= 6.5 * stddev)
