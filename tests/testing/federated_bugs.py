"""What `federated_mutations` plants: federated code with one mistake each."""

from __future__ import annotations

import math
from unittest import mock

import tensorflow as tf
import tensorflow_federated as tff

from tfdpclip import accounting
from tfdpclip.clipping import rules
from tfdpclip.federated import (
    _entropy,
    _processes,
    _tff,
    aggregators,
    distributed,
)
from tfdpclip.federated import secure as secure_lib
from tfdpclip.federated._processes import Release
from tfdpclip.federated._records import RecordClip

_add_noise = Release.add_noise
_finish = Release.finish
_weigh = RecordClip.weigh
_plan = distributed.plan
_standard_normal = _entropy.standard_normal
_derive = _entropy.derive
_indicators = rules.QuantileClip.indicators
_count_decode = secure_lib.CountEncoding.decode
_private_event = aggregators.ClippedMeanFactory._private_event


def no_room_for_rounding(self, norms, state):
    return tf.minimum(tf.ones_like(norms), 1 / tf.maximum(norms, 1e-300))


def exact_fraction_measured(self, state, total, counts, inflation):
    new_state, result, measured = _add_noise(self, state, total, counts, inflation)
    exact = counts / self._factory.clients_per_round + 0.5
    measured["unclipped_fraction"] = exact[0]
    return new_state, result, measured


def exact_mean_measured(self, state, total, counts, inflation):
    new_state, result, measured = _add_noise(self, state, total, counts, inflation)
    exact = tf.norm(total) / self._factory.clients_per_round
    measured["mean_norm"] = tf.cast(exact, tf.float32)
    return new_state, result, measured


def no_count_noise(self, state, total, counts, inflation):
    own, self.count_stddevs = self.count_stddevs, (0.0,) * len(self.count_stddevs)
    try:
        return _add_noise(self, state, total, counts, inflation)
    finally:
        self.count_stddevs = own


def exact_adaptation(self, state, total, counts, inflation):
    """The clip follows the exact count; the noised one is measured."""
    clean = _finish(self, state, total, counts, [0.0] * self._clip.groups, [0.0])[0]
    _, result, measured = _add_noise(self, state, total, counts, inflation)
    return clean, result, measured


def next_clip_noise(self, state, total, counts, inflation):
    """The clip moves, and then the noise is scaled by it."""
    real = Release.finish

    def with_next(this, state, mean, counts, stddevs, count_stddevs):
        out = real(this, state, mean, counts, stddevs, count_stddevs)
        before = this._clip.noise_scales(this._clip.state(state["clip"]))
        after = this._clip.noise_scales(this._clip.state(out[0]["clip"]))
        exact = total / this._factory.clients_per_round
        ratio = tf.cast(after / before, mean.dtype)
        mean = exact + (mean - exact) * this._clip.spread(ratio)
        return real(this, state, mean, counts, stddevs, count_stddevs)

    with mock.patch.object(Release, "finish", with_next):
        return _add_noise(self, state, total, counts, inflation)


def first_clip_noise(self, state, total, counts, inflation):
    own = self._clip.noise_scales

    def first(rule_state):
        return own(self._clip.state(self._clip.initial_state()))

    with mock.patch.object(self._clip, "noise_scales", first):
        return _add_noise(self, state, total, counts, inflation)


def noise_divided_twice(self, state, total, counts, inflation):
    inflation = inflation / self._factory.clients_per_round
    return _add_noise(self, state, total, counts, inflation)


def no_inflation(self, state, total, counts, inflation):
    return _add_noise(self, state, total, counts, 1.0)


def missing_root(self, state, total, counts, inflation):
    own, count = self.count_stddevs, len(self.count_stddevs)
    self.count_stddevs = tuple(s / math.sqrt(count) for s in own)
    try:
        return _add_noise(self, state, total, counts, inflation)
    finally:
        self.count_stddevs = own


def process(release_of):
    """A plain process whose server is `release_of(release, clip, state, sums, n)`."""

    def create(factory, clip):
        release = Release(factory, clip)
        first = _tff.tf_computation(release.initial_state)
        state_type = first.type_signature.result

        @_tff.tf_computation(clip.layout.value_type, state_type["clip"])
        def prepare(value, clip_state):
            leaves = _tff.flatten(value)
            weights, _, bits = clip.weigh(leaves, clip.state(_tff.flatten(clip_state)))
            return clip.scale(leaves, weights), bits, tf.constant(1.0)

        sums_type = prepare.type_signature.result

        @_tff.tf_computation(state_type, sums_type)
        def finish(state, sums):
            total, counts, clients = _tff.flatten(sums)
            state = _processes._state(state)
            return release_of(release, clip, state, total, counts, clients)

        @_tff.federated_computation
        def initialize():
            return _tff.federated_eval(first, _tff.SERVER)

        @_tff.federated_computation(
            _tff.at_server(state_type), _tff.at_clients(clip.layout.value_type)
        )
        def next_round(state, value):
            announced = _tff.federated_broadcast(state["clip"])
            sums = _tff.federated_sum(_tff.federated_map(prepare, (value, announced)))
            return _processes._output(_tff.federated_map(finish, (state, sums)))

        return _tff.AggregationProcess(initialize, next_round)

    return create


def by_those_present(release, clip, state, total, counts, clients):
    new_state, result, measured = release.add_noise(state, total, counts, 1.0)
    share = release._factory.clients_per_round / clients
    result = [share * leaf for leaf in _tff.flatten(result)]
    return new_state, _tff.pack(result, clip.layout.value_type), measured


def count_by_those_present(release, clip, state, total, counts, clients):
    counts = counts * release._factory.clients_per_round / clients
    return release.add_noise(state, total, counts, 1.0)


def sum_clipped(release, clip, state, total, counts, clients):
    bound = tf.cast(clip.sensitivity(clip.state(state["clip"])), total.dtype)
    return release.add_noise(state, tf.clip_by_norm(total, bound[0]), counts, 1.0)


def unclipped(self, leaves, state, exact=False):
    weights, norms, bits = _weigh(self, leaves, state, exact)
    return tf.ones_like(weights), norms, bits


def server_clips(release, clip, state, total, counts, clients):
    # What `weigh` did at the clients is undone by planting `unclipped` as well.
    return sum_clipped(release, clip, state, total, counts, clients)


def create_server_clips(factory, clip):
    with mock.patch.object(RecordClip, "weigh", unclipped):
        return process(server_clips)(factory, clip)


def nan_through(self, leaves, state, exact=False):
    with mock.patch.object(tf.math, "is_finite", lambda t: tf.ones_like(t, tf.bool)):
        weights, norms, bits = _weigh(self, leaves, state, exact)
    return (
        tf.where(tf.math.is_nan(weights), tf.ones_like(weights), weights),
        norms,
        bits,
    )


def nan_counted(self, leaves, state, exact=False):
    # Its norm is 0 by now, so that it is taken to be within the clip norm.
    weights, norms, _ = _weigh(self, leaves, state, exact)
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
    vector = tf.cast(total, tf.float64) / constants.scale
    vector = distributed.hadamard(vector) * distributed.signs(
        constants.dimension, rotation, tf.float64
    )
    update = vector[: constants.size] / constants.update_factor
    counts = vector[constants.size : constants.size + constants.counts]
    return update, counts / tf.constant(constants.count_factors, tf.float64)


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


def no_shares(count, stddev, seed):
    return tf.zeros([count], tf.int64)


def twice_the_bits(self, norms, state, present=None):
    return 2 * _indicators(self, norms, state, present)


def twice_the_counts(self, total):
    counts, clients = _count_decode(self, total)
    return 2 * counts, clients


def bold_event(self):
    return accounting.events.dp_accounting.GaussianDpEvent(20 * self.noise_multiplier)


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


def seeded_by_round(self, state, *rest):
    """The seed is kept in the state, as it were."""

    def seed():
        return _entropy.round_seed(5, state["round"])

    with mock.patch.object(_entropy, "fresh_seed", seed):
        return _add_noise(self, state, *rest)


def a_tenth_too_small(count, seed):
    return 0.9 * _standard_normal(count, seed)
