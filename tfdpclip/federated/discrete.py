"""Accounting for sums of discrete Gaussian noise from several clients.

Kairouz, Liu and Steinke (2021), "The Distributed Discrete Gaussian Mechanism for
Federated Learning with Secure Aggregation", here "DDG". TensorFlow is not needed.
"""

from __future__ import annotations

import functools
import math

import attr
import dp_accounting
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant as rdp_lib

from tfdpclip import _arguments

# The smallest stddev for which DDG, Proposition 14, holds.
_LEAST_STDDEV = 0.5
# The terms of the sum below converge; later terms are bounded by the last term.
_MOST_TERMS = 1000


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ZeroConcentratedDpEvent(dp_accounting.DpEvent):
    """A mechanism known only by its zero-concentrated privacy.

    The Renyi divergence of every order a >= 1 is at most a * rho (Bun and Steinke
    2016). A Gaussian of noise multiplier z has rho = 1 / (2 z^2); the converse does not
    hold, so that an accountant for Gaussians must not be given this event.

    Attributes:
      rho: the constant.
    """

    rho: float

    def __attrs_post_init__(self):
        _arguments.non_negative("rho", self.rho)


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Returns the epsilon at `delta` of rho-zero-concentrated privacy.

    By the conversion of Renyi divergences that `dp_accounting` uses (Canonne, Kamath
    and Steinke 2020), at its orders.

    Args:
      rho: 0 or above. For composed mechanisms, the rhos add up.
      delta: in (0, 1).

    Raises:
      ValueError: if an argument is out of range.

    >>> round(zcdp_epsilon(0.5, 1e-5), 3)
    4.728
    """
    rho = _arguments.non_negative("rho", rho)
    delta = _arguments.delta(delta)
    if rho == 0:
        return 0.0
    orders = np.asarray(rdp_lib.DEFAULT_RDP_ORDERS)
    # The best order is near 1 + sqrt(log(1 / delta) / rho).
    best = 1 + math.sqrt(math.log(1 / delta) / rho) * np.geomspace(0.5, 2, 101)
    orders = np.unique(np.concatenate([orders, best]))
    return float(rdp_lib.compute_epsilon(orders, rho * orders, delta)[0])


@functools.lru_cache(maxsize=4096)
def tau(local_stddev: float, clients: int) -> float:
    """Returns the distance of a sum of discrete Gaussians from a discrete Gaussian.

    DDG, Theorem 1: the log-ratio of the probabilities of any integer
    under the sum of n independent N_Z(0, s^2) and under N_Z(0, n s^2) is at most tau =
    10 * sum over k = 1 .. n - 1 of exp(-2 pi^2 s^2 k / (k + 1)).

    Args:
      local_stddev: s.
      clients: n.
    """
    exponent = -2 * (math.pi * local_stddev) ** 2
    terms = min(clients - 1, _MOST_TERMS)
    total = math.fsum(math.exp(exponent * k / (k + 1)) for k in range(1, terms + 1))
    # Every further term is smaller than the term before.
    if clients - 1 > terms:
        total += (clients - 1 - terms) * math.exp(exponent * terms / (terms + 1))
    return 10 * total


def sum_multiplier(
    local_stddev: float, clients: int, sensitivity: float, dimension: int
) -> float:
    """Returns z such that a sum of shares is 1 / (2 z^2)-zero-concentrated private.

    *Formal guarantees* (DDG, Theorem 1 and Proposition 14): let integer vectors of
    `dimension` coordinates move by at most `sensitivity` in L2 norm between neighbours,
    and n independent N_Z(0, s^2) be added to every coordinate of their sum. For every
    order a, the Renyi divergence between the results is at most a e^2 / 2, where e is
    the smallest of

    * sqrt(D2^2 / (n s^2) + 2 t d);
    * sqrt(D2^2 / (n s^2) + 2 t D1 / (sqrt(n) s) + t^2 d);
    * D2 / (sqrt(n) s) + t sqrt(d);

    with t of `tau` and D1 <= min(sqrt(d) D2, D2^2), the L1 norm of an integer vector.
    More noise, and a modular reduction, are processing of the result.

    Args:
      local_stddev: s, at least 1/2.
      clients: n, the number of clients whose shares are in the sum.
      sensitivity: D2, above 0.
      dimension: d.

    Returns:
      z = 1 / e.
    """
    t = tau(local_stddev, clients)
    ratio = sensitivity / (math.sqrt(clients) * local_stddev)
    l1 = min(math.sqrt(dimension) * sensitivity, sensitivity**2)
    l1 /= math.sqrt(clients) * local_stddev
    # If t is large, the first bound is the smallest, or no bound is useful.
    squares = (
        ratio**2 + 2 * t * dimension,
        ratio**2 + 2 * t * l1 + t**2 * dimension,
        (ratio + t * math.sqrt(dimension)) ** 2,
    )
    return 1 / math.sqrt(min(squares))


def local_stddev(
    noise_multiplier: float, clients: int, sensitivity: float, dimension: int
) -> float:
    """Returns the stddev of each client's share for a noise multiplier of the sum.

    Args:
      noise_multiplier: z, above 0.
      clients: n, the fewest clients whose shares are in the sum.
      sensitivity: the L2 sensitivity of the integer vectors.
      dimension: their number of coordinates.

    Returns:
      s with ``sum_multiplier(s, ...) >= z``: never too small, and at most a relative
      1e-9 larger than needed.

    Raises:
      ValueError: if an argument is out of range.

    >>> round(local_stddev(1.0, 100, 1000.0, 10_000), 6)
    100.0
    """
    z = _arguments.positive("noise_multiplier", noise_multiplier)
    clients = _arguments.integer("clients", clients, minimum=1)
    sensitivity = _arguments.positive("sensitivity", sensitivity)
    dimension = _arguments.integer("dimension", dimension, minimum=1)

    def enough(stddev):
        return sum_multiplier(stddev, clients, sensitivity, dimension) >= z

    low = max(z * sensitivity / math.sqrt(clients), _LEAST_STDDEV)
    high = low * (1 + 1e-9)
    while not enough(high):
        low, high = high, high * 1.1
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def rounded_norm(norm: float, dimension: int, failure: float) -> int:
    """Returns a bound on the squared norm of a vector rounded at random.

    DDG, on conditional randomised rounding: every coordinate is rounded to one of its
    two neighbouring integers, to itself on average. The squared norm then exceeds
    c^2 + d/4 + sqrt(2 ln(1 / failure)) * (c + sqrt(d) / 2) with probability at most
    `failure`, and never (c + sqrt(d))^2.

    Args:
      norm: c, of the vector before.
      dimension: d.
      failure: the probability, in (0, 1).

    Returns:
      The smaller of the two bounds, as an integer.
    """
    spread = math.sqrt(2 * math.log(1 / failure))
    likely = norm**2 + dimension / 4 + spread * (norm + math.sqrt(dimension) / 2)
    return math.floor(min(likely, (norm + math.sqrt(dimension)) ** 2))
