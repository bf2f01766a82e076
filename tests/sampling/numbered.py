"""Records that say which they are."""

import numpy as np

RECORDS = 60


def numbered(count=RECORDS):
    """Records that know their index; 0 is left to padding."""
    x = np.arange(1, count + 1, dtype=np.float32)[:, None] * [1.0, 10.0]
    return x.astype(np.float32), np.arange(1, count + 1)
