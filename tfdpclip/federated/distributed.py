"""Distributed noise: every client adds a share, so that the secure sum is private.

Kairouz, Liu and Steinke (2021), "The Distributed Discrete Gaussian Mechanism for
Federated Learning with Secure Aggregation", with the adaptive clip of Andrew et al.
(2021) inside the same mechanism.

*How*: a client clips its update and divides group h by the rule's noise scale, so that
the result has a norm of at most 1 for every current clip norm. It appends its bits,
each times a constant, such that the whole vector has a norm of at most 1 again and
noise of one stddev on all coordinates is the noise that Theorem 1 of Andrew et al.
requires for each part. It rotates the vector at random (by signs and a Hadamard matrix,
both public), multiplies it by a scale, rounds it at random to integers, adds discrete
Gaussian noise to every coordinate, and sends it into a sum modulo 2^bits. The server
undoes the linear steps.

*Formal guarantees*, against the server and everyone who sees the secure sum, for
replacing a client's whole contribution by zeros (the server knows the participants, so
that taking part is not hidden):

* A client's integers have a norm of at most B, checked with nothing lost to rounding:
  if rounding at random exceeded it (probability 1e-6), the vector is rounded towards
  zero instead, which makes nothing longer.
* The sum of at least `minimum_clients` shares makes every round
  1 / (2 z^2)-zero-concentrated private, z being `noise_multiplier`: by
  `discrete.sum_multiplier`, which accounts for the rounding and for sums of discrete
  Gaussians not being discrete Gaussians. Shares of further clients, the modulus, and
  all computations of the server are processing. A round with fewer clients fails.
* Updates, bits and noise are one mechanism: no count is noised by the server.
* The server is trusted to follow the protocol and not to make up clients. Clients who
  might reveal their shares to the server must not be counted in `minimum_clients`.
* Sampling of clients does not amplify privacy against a server that knows the sample.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdpclip.federated import _discrete_noise, _entropy, _tff, discrete
from tfdpclip.federated._processes import Summation
from tfdpclip.federated._records import RecordClip
from tfdpclip.mechanism import Mechanism
from tfdpclip.noise import philox

# The probability that random rounding exceeds its bound, and that a round overflows.
_ROUNDING_FAILURE = 1e-6
_WRAP_FAILURE = 1e-6
# The largest relative error of the float32 arithmetic before rounding.
_ARITHMETIC = 1e-5
# Rounding may make a record, and with it the noise, this much larger.
_MOST_INFLATION = 1.5


@dataclasses.dataclass(frozen=True)
class Plan:
    """Public constants of the mechanism.

    Attributes:
      size: coordinates of an update.
      counts: K, the number of bits.
      dimension: size + counts, rounded up to a power of 2.
      bits: the modulus is 2^bits.
      update_factor: the factor of the update, which has norm 1.
      count_factors: the factor of each indicator.
      scale: the factor of the vector, which has norm 1, before rounding.
      squared_norm: B^2, the bound on a client's integers.
      local_stddev: the stddev of a client's share of noise; 0 without noise.
      minimum_clients: how many shares suffice.
    """

    size: int
    counts: int
    dimension: int
    bits: int
    update_factor: float
    count_factors: tuple[float, ...]
    scale: float
    squared_norm: int
    local_stddev: float
    minimum_clients: int

    @property
    def dtype(self) -> tf.DType:
        """The type of clients' integers, and of their sum.

        Sums of integers wrap around in TensorFlow, at a multiple of any modulus that is
        a smaller power of 2.
        """
        return tf.int32 if self.bits <= 30 else tf.int64

    @property
    def modulus(self) -> np.integer:
        """2^bits."""
        return self.dtype.as_numpy_dtype(2**self.bits)

    @property
    def sum_stddev(self) -> float:
        """The stddev of the guaranteed noise, on the sum of vectors of norm 1."""
        return math.sqrt(self.minimum_clients) * self.local_stddev / self.scale

    @property
    def inflation(self) -> float:
        """How much longer rounding can make a vector."""
        return math.sqrt(self.squared_norm) / self.scale


def plan(
    *,
    noise_multiplier: float,
    sum_multiplier: float,
    count_stddevs: tuple[float, ...],
    size: int,
    bits: int,
    clients: float,
    minimum_clients: int,
) -> Plan:
    """Chooses the constants of the mechanism.

    The scale is the largest with which no coordinate of the sum leaves the modulus,
    except once in 10^6 rounds. After the rotation, a coordinate of a vector v of D
    coordinates is sub-Gaussian with variance |v|^2 / D. The sum of n vectors of norm 1
    has a norm of at most n; noise and rounding errors are added. For n, four standard
    deviations of a Poisson cohort are added.

    Args:
      noise_multiplier: z.
      sum_multiplier: z_g, of the update next to the counts.
      count_stddevs: the noise stddev of each count.
      size: coordinates of an update.
      bits: the bits of the modulus.
      clients: the expected number of clients in a round.
      minimum_clients: the number of clients whose shares must suffice.

    Raises:
      ValueError: if there are too few bits.
    """
    counts = len(count_stddevs)
    if noise_multiplier:
        update_factor = noise_multiplier / sum_multiplier
        count_factors = tuple(noise_multiplier / s for s in count_stddevs)
    elif counts:
        update_factor = math.sqrt(0.5)
        count_factors = (math.sqrt(2 / counts),) * counts
    else:
        update_factor, count_factors = 1.0, ()
    dimension = 2 ** math.ceil(math.log2(max(2, size + counts)))
    most = math.ceil(clients + 4 * math.sqrt(clients))

    def bound(scale):
        norm = scale * (1 + _ARITHMETIC)
        return discrete.rounded_norm(norm, dimension, _ROUNDING_FAILURE)

    def scale_for(bits):
        room = 2 ** (bits - 1) - 1 - most
        deviations = math.sqrt(2 * math.log(2 * dimension / _WRAP_FAILURE))
        noise = noise_multiplier * math.sqrt(most / minimum_clients)
        scale = room / (deviations * math.sqrt(most**2 / dimension + noise**2))
        # The noise grows with the rounding error, and has to fit too.
        return scale**2 / math.sqrt(bound(scale)) if scale > 0 else 0.0

    def share_for(scale):
        if not noise_multiplier:
            return 0.0
        norm = math.sqrt(bound(scale))
        return discrete.local_stddev(noise_multiplier, minimum_clients, norm, dimension)

    def inflation(bits):
        scale = scale_for(bits)
        if not scale:
            return math.inf
        longer = math.sqrt(bound(scale)) / scale
        if not noise_multiplier:
            return longer
        # Coarse integers require larger shares.
        noise = math.sqrt(minimum_clients) * share_for(scale) / scale
        return max(longer, noise / noise_multiplier)

    if inflation(bits) > _MOST_INFLATION:
        needed = next(b for b in range(bits, 63) if inflation(b) <= _MOST_INFLATION)
        raise ValueError(
            f"bits = {bits} is too few for {size} coordinates and {clients:g} clients "
            "with distributed noise: rounding would make updates more than "
            f"{_MOST_INFLATION} times as long, and the noise with them. Use "
            f"SecureSettings(bits={needed}) or more."
        )
    scale = scale_for(bits)
    return Plan(
        size=size,
        counts=counts,
        dimension=dimension,
        bits=bits,
        update_factor=update_factor,
        count_factors=count_factors,
        scale=scale,
        squared_norm=bound(scale),
        local_stddev=share_for(scale),
        minimum_clients=minimum_clients,
    )


def encode(
    constants: Plan,
    parts: Sequence[tf.Tensor],
    indicators: tf.Tensor,
    rotation: tf.Tensor,
    seed: tf.Tensor,
) -> tf.Tensor:
    """One client's integers before noise: `[dimension]`, whole numbers in float32.

    Args:
      constants: the plan.
      parts: an update of `size` coordinates, of norm `update_factor` at most.
      indicators: `[counts]`.
      rotation: the public seed of the signs.
      seed: the client's own.
    """
    vector = tf.concat(
        [
            *(tf.reshape(tf.cast(part, tf.float32), [-1]) for part in parts),
            tf.cast(indicators, tf.float32)
            * tf.constant(constants.count_factors, tf.float32),
            tf.zeros([constants.dimension - constants.size - constants.counts]),
        ],
        0,
    )
    vector *= _discrete_noise.signs(constants.dimension, rotation, constants.scale)
    return round_within(
        _discrete_noise.hadamard(vector),
        _chances(constants.dimension, seed),
        constants.squared_norm,
    )


def _chances(count, seed):
    """Multiples of 2^-16, uniform on [0, 1); a random word gives two."""
    words = philox.full_integers([(count + 1) // 2], seed, tf.int32)
    halves = tf.reshape(tf.bitcast(words, tf.uint16), [-1])[:count]
    return tf.cast(halves, tf.float32) * 2.0**-16


def round_within(vector: tf.Tensor, chance: tf.Tensor, squared_norm: int) -> tf.Tensor:
    """Rounds to integers of a bounded norm.

    Args:
      vector: the vector to round, float32.
      chance: uniform on [0, 1), one for each coordinate: rounds each up with
        probability equal to its fraction, up to the resolution of both numbers.
      squared_norm: the bound. If the integers exceed it, all coordinates are rounded
        towards zero; if these exceed it too, because the vector was too long, the
        result is zeros.

    Returns:
      Whole numbers, float32, of squared norm at most `squared_norm`.
    """
    at_random = tf.floor(vector + chance)

    def within(rounded):
        whole = tf.cast(rounded, tf.int64)
        return tf.reduce_sum(tf.square(whole)) <= squared_norm

    def towards_zero():
        shorter = tf.sign(vector) * tf.floor(tf.abs(vector))
        return tf.where(within(shorter), shorter, tf.zeros_like(shorter))

    def looked_at_closely():
        return tf.cond(within(at_random), lambda: at_random, towards_zero)

    # Integers are slow to square. The upper bound in floats suffices nearly always.
    short = _squares_at_most(at_random) <= float(squared_norm) * (1 - 2.0**-50)
    return tf.cond(short, lambda: at_random, looked_at_closely)


def _squares_at_most(vector):
    """An upper bound on the sum of squares of whole numbers in float32; float64.

    Float32 sums of 16 squares are too small by a relative 2^-20 at most, and the
    float64 sum of these by less than 2^-26 for up to 2^31 coordinates.
    """
    rows = math.gcd(vector.shape[0], 16)
    squares = tf.reduce_sum(tf.square(tf.reshape(vector, [rows, -1])), 0)
    return tf.reduce_sum(tf.cast(squares, tf.float64)) * (1 + 2.0**-19)


def decode(
    constants: Plan, total: tf.Tensor, rotation: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """The sums of updates (of norm 1) and of indicators from the modular sum; float32.

    Args:
      constants: the plan.
      total: `[dimension]`, of the plan's type, in [0, 2^bits).
      rotation: the seed of the signs.
    """
    # The sign of the modular sum is its highest bit.
    unused = tf.constant(8 * total.dtype.size - constants.bits, total.dtype)
    centred = tf.bitwise.right_shift(tf.bitwise.left_shift(total, unused), unused)
    unit = constants.scale * constants.update_factor
    vector = _discrete_noise.hadamard(tf.cast(centred, tf.float32))
    vector *= _discrete_noise.signs(constants.dimension, rotation, 1 / unit)
    counts = vector[constants.size : constants.size + constants.counts]
    factors = np.asarray(constants.count_factors) / constants.update_factor
    return vector[: constants.size], counts / tf.constant(factors, tf.float32)


class DistributedSum(Summation):
    """The server sees a modular sum that includes its noise.

    *Formal guarantees*: see this module.

    Args:
      mechanism: z, its split and the number of clients.
      clip: clips one client's update.
      bits: the modulus is 2^bits.
      minimum_clients: the number of clients whose shares must suffice.

    Raises:
      ValueError: if there are too few bits.
    """

    def __init__(
        self, mechanism: Mechanism, clip: RecordClip, bits: int, minimum_clients: int
    ):
        super().__init__(mechanism, clip)
        self._plan = plan(
            noise_multiplier=mechanism.noise_multiplier,
            sum_multiplier=mechanism.gradient_noise_multiplier(),
            count_stddevs=mechanism.count_stddevs,
            size=clip.layout.size,
            bits=bits,
            clients=mechanism.records,
            minimum_clients=minimum_clients,
        )

    def public_state(self):
        # Public randomness: the guarantee holds for every rotation.
        return {"rotation": _entropy.fresh_seed()}

    def _rotation(self, state):
        return _entropy.derive(state["rotation"], state["round"])

    def encode(self, leaves, state, share=None):
        clip, constants = self.clip, self._plan
        rule_state = clip.state(state["clip"])
        weights, _, indicators = clip.weigh(leaves, rule_state, share=share)
        # Each group has norm 1 at most, for every current clip norm.
        factors = weights / clip.noise_scales(rule_state) * constants.update_factor
        seed = _entropy.fresh_seed()
        whole = encode(
            constants,
            clip.scale_leaves(leaves, factors),
            indicators,
            self._rotation(state),
            _entropy.derive(seed, 0),
        )
        noise = _discrete_noise.sample(
            constants.dimension,
            constants.local_stddev,
            _entropy.derive(seed, 1),
            constants.dtype,
        )
        noised = tf.cast(whole, constants.dtype) + noise
        code = tf.bitwise.bitwise_and(noised, constants.modulus - 1)
        return code, tf.constant(1, tf.int32)

    def sum(self, encoded, inner_state):
        total = _tff.secure_modular_sum(encoded[0], self._plan.modulus)
        clients = _tff.secure_sum_bitwidth(encoded[1], 1)
        return _tff.federated_zip((total, clients)), inner_state

    def decode(self, summed, state):
        total, clients = summed
        least = self._plan.minimum_clients
        enough = tf.debugging.assert_greater_equal(
            clients,
            least,
            f"fewer clients took part than minimum_clients={least}, so the shares of "
            "noise do not suffice",
        )
        with tf.control_dependencies([enough]):
            total = tf.identity(total)
        update, counts = decode(self._plan, total, self._rotation(state))
        scales = self.clip.noise_scales(self.clip.state(state["clip"]))
        spread = tf.cast(self.clip.spread(scales), tf.float32)
        return self.clip.layout.split(update * spread), counts

    def release(self, summed, state, noise):
        del noise  # Each client draws its own share.
        rule_state = self.clip.state(state["clip"])
        release = self.mechanism.finish(rule_state, *self.decode(summed, state))
        # The noise of `minimum_clients`, which is at least the mechanism's noise.
        stddev = self._plan.sum_stddev
        scales = self.clip.noise_scales(rule_state)
        release = release._replace(stddevs=scales * (stddev / self._plan.update_factor))
        return release, [stddev / factor for factor in self._plan.count_factors]
