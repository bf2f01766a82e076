"""The noise multiplier of several noised sums together."""

import math


def effective_noise_multiplier(sums, count_stddevs=()):
    """The inverse of `split_noise_multiplier`: z^-2 = sum z_h^-2 + sum (2 s_k)^-2.

    Args:
      sums: z_g of the gradient sum, or one z_h per group.
      count_stddevs: the noise of each sum of indicators.
    """
    parts = [sums] if isinstance(sums, float) else list(sums)
    parts += [2 * stddev for stddev in count_stddevs]
    smallest = min(parts)
    # Scaling by the smallest keeps the squares in range.
    return smallest / math.sqrt(math.fsum((smallest / z) ** 2 for z in parts))
