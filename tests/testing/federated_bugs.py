"""The bugs of `federated_mutations`: federated code with a mistake each."""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import dp_accounting
import tensorflow as tf
import tensorflow_federated as tff

from tfdpclip.clipping import rules
from tfdpclip.federated import (
    _entropy,
    aggregators,
    distributed,
)
from tfdpclip.federated import secure as secure_lib
from tfdpclip.federated._processes import PlainSum, Summation
from tfdpclip.federated._records import RecordClip
from tfdpclip.mechanism import Mechanism

_release = Summation.release
_of_mechanism = Mechanism.release
_stddevs = Mechanism._stddevs
_encode = PlainSum.encode
_weigh = RecordClip.weigh
_plan = distributed.plan
_decode = distributed.decode
_standard_normal = _entropy.standard_normal
_derive = _entropy.derive
_indicators = rules.QuantileClip.indicators
_count_decode = secure_lib.CountEncoding.decode
_private_event = aggregators.ClippedMeanFactory._private_event


def no_room_for_rounding(self, norms, state):
    return tf.minimum(tf.ones_like(norms), 1 / tf.maximum(norms, 1e-300))


def _exact(summation, summed, state):
    """The mean and the fractions before noise."""
    mechanism = summation.mechanism
    sums, counts = summation.decode(summed, state)
    mean = tf.concat([tf.reshape(part, [-1]) for part in sums], 0) / mechanism.records
    return mean, mechanism.fractions(counts)


def exact_fraction_measured(self, summed, state, seed):
    """The clip follows the noised fraction, but the measured fraction is exact."""
    release, stddevs = _release(self, summed, state, seed)
    return release._replace(fractions=_exact(self, summed, state)[1]), stddevs


def exact_mean_measured(self, summed, state, seed):
    """The exact norm passes for a stddev."""
    release, stddevs = _release(self, summed, state, seed)
    exact = tf.norm(_exact(self, summed, state)[0])
    return release._replace(stddevs=tf.reshape(exact, [1])), stddevs


def no_count_noise(self, *args, **options):
    own, self.count_stddevs = self.count_stddevs, (0.0,) * len(self.count_stddevs)
    try:
        return _of_mechanism(self, *args, **options)
    finally:
        self.count_stddevs = own


def exact_adaptation(self, state, sums, counts, *rest, **options):
    """The clip follows the exact count, but the measured count is noised."""
    release = _of_mechanism(self, state, sums, counts, *rest, **options)
    moved = self.rule.next_state(state, self.fractions(counts))
    return release._replace(next_state=moved)


def next_clip_noise(self, state, sums, counts, *rest, **options):
    """The noise is scaled by the clip after its move."""
    release = _of_mechanism(self, state, sums, counts, *rest, **options)
    ratio = self.noise_stddevs(release.next_state) / self.noise_stddevs(state)
    means = []
    for total, mean in zip(sums, release.means, strict=True):
        exact = total / self.records
        means.append(exact + (mean - exact) * tf.cast(ratio[0], mean.dtype))
    return release._replace(means=means)


def first_clip_noise(self, state, step, divisor):
    return _stddevs(self, self.rule.initial_state(), step, divisor)


def noise_divided_twice(self, state, step, divisor):
    return _stddevs(self, state, step, divisor * self.records)


def no_inflation(self, state, step, divisor):
    return _stddevs(self, state, step, divisor) / self.inflation


def missing_root(self, *args, **options):
    own, count = self.count_stddevs, len(self.count_stddevs)
    self.count_stddevs = tuple(s / math.sqrt(count) for s in own)
    try:
        return _of_mechanism(self, *args, **options)
    finally:
        self.count_stddevs = own


class WithClients(PlainSum):
    """A plain sum whose server also counts the clients."""

    def encode(self, leaves, state):
        return *_encode(self, leaves, state), tf.constant(1.0)

    def release(self, summed, state, noise):
        *summed, clients = summed
        return self.with_clients(summed, state, noise, clients)


class MeanOfThosePresent(WithClients):
    def with_clients(self, summed, state, noise, clients):
        release, stddevs = _release(self, summed, state, noise)
        share = self.mechanism.records / clients
        means = [share * part for part in release.means]
        return release._replace(means=means), stddevs


class FractionOfThosePresent(WithClients):
    def with_clients(self, summed, state, noise, clients):
        total, counts = summed
        counts = counts * self.mechanism.records / clients
        return _release(self, [total, counts], state, noise)


class ServerClips(PlainSum):
    """The clients do not clip; the server clips the sum."""

    def encode(self, leaves, state):
        with mock.patch.object(RecordClip, "weigh", unclipped):
            return _encode(self, leaves, state)

    def decode(self, summed, state):
        *pieces, counts = summed
        bound = self.clip.sensitivity(self.clip.state(state["clip"]))
        bound = tf.cast(bound, self.clip.layout.dtype)[0]
        pieces, _ = tf.clip_by_global_norm(pieces, bound)
        return self.clip.layout.split_pieces(pieces), counts


def unclipped(self, leaves, state, exact=False, share=None):
    weights, norms, bits = _weigh(self, leaves, state, exact, share)
    return tf.ones_like(weights), norms, bits


def uncapped(self, leaves, state, exact=False, share=None):
    weights, norms, bits = _weigh(self, leaves, state, exact)
    share = 1.0 if share is None else share
    return weights * share, norms * share, bits


def nan_through(self, leaves, state, exact=False, share=None):
    with mock.patch.object(tf.math, "is_finite", lambda t: tf.ones_like(t, tf.bool)):
        weights, norms, bits = _weigh(self, leaves, state, exact, share)
    return (
        tf.where(tf.math.is_nan(weights), tf.ones_like(weights), weights),
        norms,
        bits,
    )


def nan_counted(self, leaves, state, exact=False, share=None):
    # The norm is 0 here, so the update would count as within the clip norm.
    weights, norms, _ = _weigh(self, leaves, state, exact, share)
    bits = self.rule.indicators(norms, state, tf.constant([True]))
    return weights, norms, tf.cast(tf.squeeze(bits, 0), tf.float32)


def largest_tensor(self, squares):
    return tf.reduce_max(tf.stack([tf.cast(s, tf.float64) for s in squares]), 0)[None]


def full_cohort(**settings):
    own = settings["minimum_clients"]
    settings["minimum_clients"] = int(settings["clients"])
    found = _plan(**settings)
    object.__setattr__(found, "minimum_clients", own)
    return found


def narrow_modulus(**settings):
    found = _plan(**settings)
    object.__setattr__(found, "bits", found.bits - 10)
    return found


def shares_of_the_whole(**settings):
    """Every share has the stddev of the sum divided by n, not by its root."""
    found = _plan(**settings)
    share = found.local_stddev / math.sqrt(found.minimum_clients)
    object.__setattr__(found, "local_stddev", share)
    return found


def not_centred(constants, total, rotation):
    # Negative numbers are 2^bits too large.
    wide = dataclasses.replace(constants, bits=constants.bits + 1)
    return _decode(wide, total, rotation)


def fixed_seed():
    return tf.constant([12, 34], tf.int64)


def folded_to_32_bits(seed, purpose):
    return tf.cast(tf.random.experimental.stateless_fold_in(seed, purpose), tf.int64)


def mixed_to_64_bits(seed, purpose):
    """As XLA does with a seed for Philox."""
    mixed = tf.bitwise.bitwise_xor(seed[0], seed[1])
    return _derive(tf.stack([mixed, tf.zeros_like(mixed)]), purpose)


def same_for_all_tensors(count, seed):
    return tf.tile(_standard_normal(400, seed), [math.ceil(count / 400)])[:count]


def uniform(count, seed):
    return math.sqrt(3) * tf.math.erf(_standard_normal(count, seed) / math.sqrt(2))


def no_shares(count, stddev, seed, dtype):
    return tf.zeros([count], dtype)


def twice_the_bits(self, norms, state, present=None):
    return 2 * _indicators(self, norms, state, present)


def twice_the_counts(self, total):
    counts, clients = _count_decode(self, total)
    return 2 * counts, clients


def bold_event(self):
    return dp_accounting.GaussianDpEvent(20 * self.noise_multiplier)


class Doubling(tff.aggregators.UnweightedAggregationFactory):
    """A sum of records that are sent twice."""

    def create(self, value_type):
        inner = tff.aggregators.SumFactory().create(value_type)
        double = tff.tensorflow.computation(
            lambda x: tf.nest.map_structure(lambda t: 2 * t, x), value_type
        )

        @tff.federated_computation(
            tff.FederatedType(
                inner.initialize.type_signature.result.member, tff.SERVER
            ),
            tff.FederatedType(value_type, tff.CLIENTS),
        )
        def next_fn(state, value):
            return inner.next(state, tff.federated_map(double, value))

        return tff.templates.AggregationProcess(inner.initialize, next_fn)


def seeded_by_round(self, summed, state, noise):
    """The same seed in each round, as if the state held it."""
    return _release(self, summed, state, _entropy.Noise(tf.constant([0, 5], tf.int64)))


def a_tenth_too_small(count, seed):
    return 0.9 * _standard_normal(count, seed)
