"""Distributed noise: every client adds a share, so that the secure sum is private.

Kairouz, Liu and Steinke (2021), "The Distributed Discrete Gaussian Mechanism for
Federated Learning with Secure Aggregation", with the adaptive clip of Andrew et al.
(2021) inside the same mechanism.

*How*: a client clips its update and divides group h by the rule's noise scale, so that
what is left has a norm of at most 1 whatever the clip is now. It appends its bits,
each times a constant, such that the whole vector has a norm of at most 1 again and
noise of one stddev on all coordinates is just what Theorem 1 of Andrew et al. asks for
each part. It rotates the vector at random (by signs and a Hadamard matrix, both
public), multiplies it by a scale, rounds it at random to integers, adds discrete
Gaussian noise to every coordinate, and sends it into a sum modulo 2^bits. The server
undoes the linear steps.

*Formal guarantees*, against the server and whoever else sees the secure sum, for
replacing all that one client contributes by zeros (the server knows who takes part, so
that taking part is not what is hidden):

* A client's integers have a norm of at most B, checked in integers: if rounding at
  random exceeded it (probability 1e-6), the vector is rounded towards zero instead,
  which makes nothing longer.
* The sum of at least `minimum_clients` shares makes every round
  1 / (2 z^2)-zero-concentrated private, z being `noise_multiplier`: by
  `discrete.sum_multiplier`, which accounts for the rounding and for sums of discrete
  Gaussians not being discrete Gaussians. Shares of further clients, the modulus, and
  all that the server computes are processing. A round with fewer clients fails.
* Updates, bits and noise are one mechanism: no count is noised by the server.
* The server is trusted to follow the protocol and not to make up clients. Count
  clients who might reveal their shares to it as not surviving.
* Sampling of clients does not amplify privacy against a server that knows the sample.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdpclip import _streams
from tfdpclip.federated import _discrete_noise, _entropy, _processes, _tff, discrete
from tfdpclip.federated._records import RecordClip

if TYPE_CHECKING:
    from tfdpclip.federated.aggregators import ClippedMeanFactory

# How often rounding at random may exceed its bound, and a round any of its modulus.
_ROUNDING_FAILURE = 1e-6
_WRAP_FAILURE = 1e-6
# By how much the float32 arithmetic before rounding may err towards longer vectors.
_ARITHMETIC = 1e-5
# Rounding may make a record this much longer, and the noise with it.
_MOST_INFLATION = 1.5


@dataclasses.dataclass(frozen=True)
class Plan:
    """Public constants of the mechanism.

    Attributes:
      size: coordinates of an update.
      counts: K, the number of bits.
      dimension: size + counts, rounded up to a power of 2.
      bits: the modulus is 2^bits.
      update_factor: what the update, of norm 1, is multiplied by.
      count_factors: what each indicator is multiplied by.
      scale: what the vector, of norm 1, is multiplied by before rounding.
      squared_norm: B^2, of a client's integers.
      local_stddev: of a client's share of noise; 0 without noise.
      minimum_clients: how many shares are enough.
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
    def sum_stddev(self) -> float:
        """Of the noise that is certain, on the sum of vectors of norm 1."""
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
    """Chooses the constants.

    The scale is the largest with which no coordinate of the sum leaves the modulus,
    but once in 10^6 rounds. After the rotation, a coordinate of a vector v of D
    coordinates is sub-Gaussian with variance |v|^2 / D. The sum of n vectors of norm 1
    has a norm of at most n; noise and rounding errors come on top. For n, four standard
    deviations of a Poisson cohort are added.

    Args:
      noise_multiplier: z.
      sum_multiplier: z_g, of the update beside the counts.
      count_stddevs: of each count.
      size: coordinates of an update.
      bits: of the modulus.
      clients: expected in a round.
      minimum_clients: whose shares must be enough.

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
        # The noise grows with what rounding adds, and has to fit too.
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
        # Coarse shares have to be larger still.
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


def hadamard(vector: tf.Tensor) -> tf.Tensor:
    """The orthonormal Walsh-Hadamard transform of a vector; its own inverse.

    Args:
      vector: `[D]`, D a power of 2.
    """
    dimension = int(vector.shape[0])
    left = dimension.bit_length() - 1
    result = vector
    while left:
        # Blocks that the matrix product is fast for.
        size = 2 ** min(left, 7)
        left -= min(left, 7)
        result = tf.reshape(result, [size, dimension // size])
        # The first axis is transformed and becomes the last.
        result = tf.matmul(result, _matrix(size, vector.dtype), transpose_a=True)
    return tf.reshape(result, [dimension])


def _matrix(size: int, dtype: tf.DType) -> tf.Tensor:
    matrix = np.ones([1, 1])
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return tf.constant(matrix / math.sqrt(size), dtype)


def signs(dimension: int, seed: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """`[dimension]` independent signs."""
    bits = _streams.full_integers([dimension], seed, tf.int32)
    return tf.where(bits < 0, -tf.ones([], dtype), tf.ones([], dtype))


def encode(
    constants: Plan,
    update: tf.Tensor,
    indicators: tf.Tensor,
    rotation: tf.Tensor,
    seed: tf.Tensor,
) -> tf.Tensor:
    """One client's integers, `[dimension]` int64, before noise.

    Args:
      constants: the plan.
      update: `[size]`, of norm at most 1.
      indicators: `[counts]`.
      rotation: the public seed of the signs.
      seed: the client's own.
    """
    vector = tf.concat(
        [
            tf.cast(update, tf.float32) * constants.update_factor,
            tf.cast(indicators, tf.float32)
            * tf.constant(constants.count_factors, tf.float32),
            tf.zeros([constants.dimension - constants.size - constants.counts]),
        ],
        0,
    )
    rotated = hadamard(vector * signs(constants.dimension, rotation, tf.float32))
    scaled = rotated * constants.scale
    chance = _streams.uniform([constants.dimension], seed)
    return round_within(scaled, chance, constants.squared_norm)


def round_within(vector: tf.Tensor, chance: tf.Tensor, squared_norm: int) -> tf.Tensor:
    """Rounds to integers of a bounded norm.

    Args:
      vector: what to round.
      chance: uniform on [0, 1), one for each coordinate: rounds each up with
        probability equal to its fraction.
      squared_norm: the bound. If the integers exceed it, all coordinates are rounded
        towards zero; if these do too, which takes a vector that was too long, they are
        zeros.

    Returns:
      int64 integers, of squared norm at most `squared_norm`.
    """
    whole = tf.floor(vector)
    at_random = whole + tf.cast(chance < vector - whole, vector.dtype)

    def within(rounded):
        return tf.reduce_sum(tf.square(tf.cast(rounded, tf.int64))) <= squared_norm

    def towards_zero():
        shorter = tf.sign(vector) * tf.floor(tf.abs(vector))
        return tf.where(within(shorter), shorter, tf.zeros_like(shorter))

    rounded = tf.cond(within(at_random), lambda: at_random, towards_zero)
    return tf.cast(rounded, tf.int64)


def decode(
    constants: Plan, total: tf.Tensor, rotation: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """The sums of updates (of norm 1) and of indicators from the modular sum.

    Args:
      constants: the plan.
      total: `[dimension]` int64, in [0, 2^bits).
      rotation: the seed of the signs.
    """
    half = 2 ** (constants.bits - 1)
    centred = tf.math.floormod(total + half, 2 * half) - half
    vector = tf.cast(centred, tf.float64) / constants.scale
    vector = hadamard(vector) * signs(constants.dimension, rotation, tf.float64)
    update = vector[: constants.size] / constants.update_factor
    counts = vector[constants.size : constants.size + constants.counts]
    return update, counts / tf.constant(constants.count_factors, tf.float64)


def create(factory: ClippedMeanFactory, clip: RecordClip) -> Any:
    """The aggregation process with distributed noise."""
    release = _processes.Release(factory, clip)
    constants = plan(
        noise_multiplier=factory.noise_multiplier,
        sum_multiplier=release.sum_multiplier,
        count_stddevs=release.count_stddevs,
        size=clip.layout.size,
        bits=factory.secure.bits,
        clients=factory.clients_per_round,
        minimum_clients=factory.minimum_clients,
    )

    @_tff.tf_computation
    def initialize_tf():
        state = release.initial_state()
        # Public randomness: the guarantee holds for every rotation.
        state["rotation"] = _entropy.fresh_seed()
        return state

    state_type = initialize_tf.type_signature.result

    def rotation_of(state):
        return _entropy.derive(state["rotation"], state["round"])

    @_tff.tf_computation(state_type)
    def announce(state):
        state = _state(state)
        return state["clip"], rotation_of(state)

    @_tff.tf_computation(clip.layout.value_type, announce.type_signature.result)
    def prepare(value, announced):
        leaves = _tff.flatten(value)
        *flat_state, rotation = _tff.flatten(announced)
        rule_state = clip.state(flat_state)
        weights, _, indicators = clip.weigh(leaves, rule_state)
        update = clip.scale(leaves, weights / clip.noise_scales(rule_state))
        seed = _entropy.fresh_seed()
        whole = encode(
            constants, update, indicators, rotation, _entropy.derive(seed, 0)
        )
        noised = whole + _discrete_noise.sample(
            constants.dimension, constants.local_stddev, _entropy.derive(seed, 1)
        )
        modulus = tf.constant(2**constants.bits, tf.int64)
        return tf.math.floormod(noised, modulus), tf.constant(1, tf.int32)

    total_type, one_type = prepare.type_signature.result

    @_tff.tf_computation(state_type, total_type, one_type)
    def finish(state, total, clients):
        state = _state(state)
        rule_state = clip.state(state["clip"])
        enough = tf.debugging.assert_greater_equal(
            clients,
            factory.minimum_clients,
            f"fewer clients took part than minimum_clients={factory.minimum_clients}, "
            "for which the shares of noise suffice",
        )
        with tf.control_dependencies([enough]):
            total = tf.identity(total)
        update, counts = decode(constants, total, rotation_of(state))
        scales = clip.noise_scales(rule_state)
        mean = update * clip.spread(scales) / factory.clients_per_round
        stddevs = scales * (constants.sum_stddev / constants.update_factor)
        mean = tf.cast(mean, clip.layout.dtype)
        count_stddevs = [constants.sum_stddev / f for f in constants.count_factors]
        new_state, result, measured = release.finish(
            state, mean, counts, stddevs, count_stddevs
        )
        new_state["rotation"] = state["rotation"]
        return new_state, result, measured

    @_tff.federated_computation
    def initialize():
        return _tff.federated_eval(initialize_tf, _tff.SERVER)

    @_tff.federated_computation(
        _tff.at_server(state_type), _tff.at_clients(clip.layout.value_type)
    )
    def next_round(state, value):
        announced = _tff.federated_broadcast(_tff.federated_map(announce, state))
        prepared = _tff.federated_map(prepare, (value, announced))
        modulus = np.int64(2**constants.bits)
        total = _tff.secure_modular_sum(prepared[0], modulus)
        clients = _tff.secure_sum_bitwidth(prepared[1], 1)
        finished = _tff.federated_map(finish, (state, total, clients))
        return _tff.MeasuredProcessOutput(finished[0], finished[1], finished[2])

    return _tff.AggregationProcess(initialize, next_round)


def _state(state):
    round_num, *clip, rotation = _tff.flatten(state)
    return collections.OrderedDict(round=round_num, clip=tuple(clip), rotation=rotation)
