"""Aggregation processes: clip at the clients, sum, noise at the server."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdpclip import accounting
from tfdpclip.federated import _entropy, _tff
from tfdpclip.federated import secure as secure_lib
from tfdpclip.federated._records import RecordClip

if TYPE_CHECKING:
    from tfdpclip.federated.aggregators import ClippedMeanFactory


class Release:
    """The server's part that all ways of summing share.

    Args:
      factory: the settings.
      clip: the rule and the layout.
    """

    def __init__(self, factory: ClippedMeanFactory, clip: RecordClip):
        self._factory = factory
        self._clip = clip
        z = factory.noise_multiplier
        m = factory.clients_per_round
        self.count_stddevs = clip.rule.count_stddevs(m, private=z > 0)
        # z_g. Without noise on the sum, counts need none either.
        self.sum_multiplier = (
            accounting.split_noise_multiplier(z, self.count_stddevs) if z else 0.0
        )

    def initial_state(self):
        """A graph that makes the first state: round 0 and the rule's state."""
        return collections.OrderedDict(
            round=tf.constant(0, tf.int32), clip=tuple(self._clip.initial_state())
        )

    def finish(self, state, mean, counts, stddevs, count_stddevs):
        """The next state, the result and the measurements.

        Args:
          state: this round's state.
          mean: the noised sum divided by the public number of clients, a vector.
          counts: the noised sums of the indicators, `[K]`.
          stddevs: the noise stddev on the sum in each group, `[L]`.
          count_stddevs: the noise stddev on each count.
        """
        factory, clip = self._factory, self._clip
        rule_state = clip.state(state["clip"])
        fractions = tf.clip_by_value(
            tf.cast(counts, tf.float32) / factory.clients_per_round + 0.5, 0.0, 1.0
        )
        next_rule_state = clip.rule.next_state(rule_state, fractions)
        new_state = collections.OrderedDict(
            round=state["round"] + 1, clip=tuple(tf.nest.flatten(next_rule_state))
        )
        count_stddevs = tf.constant(count_stddevs, tf.float32)
        if len(self.count_stddevs) == 1:
            fractions, count_stddevs = fractions[0], count_stddevs[0]
        elif not self.count_stddevs:
            # The same names whatever the rule.
            fractions, count_stddevs = tf.constant(np.nan, tf.float32), tf.constant(0.0)
        stddevs = tf.cast(stddevs, tf.float32)
        norms = clip.clip_norms(rule_state), clip.clip_norms(next_rule_state)
        if clip.groups == 1:
            stddevs = stddevs[0]
            norms = norms[0][0], norms[1][0]
        measurements = collections.OrderedDict(
            round=new_state["round"],
            clip_norm=norms[0],
            next_clip_norm=norms[1],
            unclipped_fraction=fractions,
            sum_noise_stddev=stddevs,
            count_noise_stddev=count_stddevs,
            noise_multiplier=tf.constant(factory.noise_multiplier, tf.float32),
            private=tf.constant(factory.private),
        )
        return new_state, clip.layout.to_value(mean), measurements

    def add_noise(self, state, total: tf.Tensor, counts: tf.Tensor, inflation: float):
        """The release from the exact sums, with all noise added here."""
        clip, layout = self._clip, self._clip.layout
        scales = clip.noise_scales(clip.state(state["clip"]))
        stddevs = scales * (self.sum_multiplier * inflation)
        if self._factory.seed is None:
            seed = _entropy.fresh_seed()
        else:
            seed = _entropy.round_seed(self._factory.seed, state["round"])
        drawn = _entropy.standard_normal(layout.size + len(self.count_stddevs), seed)
        noise, count_noise = tf.split(drawn, [layout.size, len(self.count_stddevs)])
        # One number for each coordinate, in the dtype of the sum.
        total = tf.cast(total, layout.dtype)
        scaled = tf.cast(noise, layout.dtype) * tf.cast(
            clip.spread(stddevs), layout.dtype
        )
        counts = counts + count_noise * tf.constant(self.count_stddevs, tf.float32)
        mean = (total + scaled) / self._factory.clients_per_round
        return self.finish(state, mean, counts, stddevs, self.count_stddevs)


def create_plain(factory: ClippedMeanFactory, clip: RecordClip) -> Any:
    """Plain sums; the server adds the noise."""
    release = Release(factory, clip)
    initialize_tf = _tff.tf_computation(release.initial_state)
    state_type = initialize_tf.type_signature.result

    @_tff.tf_computation(clip.layout.value_type, state_type["clip"])
    def prepare(value, clip_state):
        leaves = _tff.flatten(value)
        weights, _, bits = clip.weigh(leaves, clip.state(_tff.flatten(clip_state)))
        return clip.scale(leaves, weights), bits

    sums_type = prepare.type_signature.result

    @_tff.tf_computation(state_type, sums_type)
    def finish(state, sums):
        total, counts = _tff.flatten(sums)
        return release.add_noise(_state(state), total, counts, 1.0)

    @_tff.federated_computation
    def initialize():
        return _tff.federated_eval(initialize_tf, _tff.SERVER)

    @_tff.federated_computation(
        _tff.at_server(state_type), _tff.at_clients(clip.layout.value_type)
    )
    def next_round(state, value):
        clip_state = _tff.federated_broadcast(state["clip"])
        prepared = _tff.federated_map(prepare, (value, clip_state))
        sums = _tff.federated_sum(prepared)
        return _output(_tff.federated_map(finish, (state, sums)))

    return _tff.AggregationProcess(initialize, next_round)


def create_secure(factory: ClippedMeanFactory, clip: RecordClip) -> Any:
    """Secure sums; the server adds the noise."""
    release = Release(factory, clip)
    records = secure_lib.SecureEncoding(clip, factory.secure)
    # One noised count for several groups is the mean of their bits.
    count = len(release.count_stddevs)
    bits = secure_lib.CountEncoding(count, clip.groups if count == 1 else 1)
    initialize_tf = _tff.tf_computation(release.initial_state)
    state_type = initialize_tf.type_signature.result

    @_tff.tf_computation(clip.layout.value_type, state_type["clip"])
    def prepare(value, clip_state):
        leaves = _tff.flatten(value)
        rule_state = clip.state(_tff.flatten(clip_state))
        weights, norms, indicators = clip.weigh(leaves, rule_state, exact=True)
        record = records.encode(leaves, weights, norms, rule_state)
        return record, bits.encode(indicators)

    record_type, bits_type = prepare.type_signature.result

    @_tff.tf_computation(state_type, record_type, bits_type)
    def finish(state, total, counted):
        state = _state(state)
        counts, clients = bits.decode(counted)
        total = records.decode(total, clients, clip.state(state["clip"]))
        return release.add_noise(state, total, counts, 1.0)

    @_tff.federated_computation
    def initialize():
        return _tff.federated_eval(initialize_tf, _tff.SERVER)

    @_tff.federated_computation(
        _tff.at_server(state_type), _tff.at_clients(clip.layout.value_type)
    )
    def next_round(state, value):
        clip_state = _tff.federated_broadcast(state["clip"])
        prepared = _tff.federated_map(prepare, (value, clip_state))
        total = _tff.secure_sum_bitwidth(prepared[0], records.bits)
        counts = _tff.secure_sum_bitwidth(prepared[1], bits.bits)
        return _output(_tff.federated_map(finish, (state, total, counts)))

    return _tff.AggregationProcess(initialize, next_round)


def create_inner(factory: ClippedMeanFactory, clip: RecordClip) -> Any:
    """Records go through another factory; the server adds the noise."""
    release = Release(factory, clip)
    layout = clip.layout
    record_type = _tff.with_dtype(layout.value_type, layout.dtype.as_numpy_dtype)
    inner = factory.inner.factory.create(record_type)
    is_mean = isinstance(factory.inner.factory, _tff.UnweightedMeanFactory)
    first_state = _tff.tf_computation(release.initial_state)
    own_type = first_state.type_signature.result
    inner_type = inner.initialize.type_signature.result.member

    @_tff.tf_computation(layout.value_type, own_type["clip"])
    def prepare(value, clip_state):
        leaves = _tff.flatten(value)
        weights, _, bits = clip.weigh(leaves, clip.state(_tff.flatten(clip_state)))
        record = clip.scale_leaves(leaves, weights)
        return _tff.pack(record, record_type), bits, tf.constant(1.0, layout.dtype)

    _, bits_type, one_type = prepare.type_signature.result

    @_tff.tf_computation(own_type, record_type, bits_type, one_type)
    def finish(state, record, counts, clients):
        total = layout.to_vector(_tff.flatten(record))
        if is_mean:
            # With nobody there, a mean is 0 / 0.
            total = tf.math.multiply_no_nan(total, clients)
        return release.add_noise(_state(state), total, counts, factory.inner.inflation)

    @_tff.federated_computation
    def initialize():
        own = _tff.federated_eval(first_state, _tff.SERVER)
        return _tff.federated_zip(
            collections.OrderedDict(own=own, inner=inner.initialize())
        )

    state_type = collections.OrderedDict(own=own_type, inner=inner_type)

    @_tff.federated_computation(
        _tff.at_server(state_type), _tff.at_clients(layout.value_type)
    )
    def next_round(state, value):
        clip_state = _tff.federated_broadcast(state["own"]["clip"])
        prepared = _tff.federated_map(prepare, (value, clip_state))
        # What the inner process measures may be exact; it goes no further.
        summed = inner.next(state["inner"], prepared[0])
        counts = _tff.federated_sum(prepared[1])
        clients = _tff.federated_sum(prepared[2])
        finished = _tff.federated_map(
            finish, (state["own"], summed.result, counts, clients)
        )
        new_state = _tff.federated_zip(
            collections.OrderedDict(own=finished[0], inner=summed.state)
        )
        return _tff.MeasuredProcessOutput(new_state, finished[1], finished[2])

    return _tff.AggregationProcess(initialize, next_round)


def _state(state):
    """The server's state with its parts under the names that graphs give them."""
    round_num, *clip = _tff.flatten(state)
    return collections.OrderedDict(round=round_num, clip=tuple(clip))


def _output(finished):
    return _tff.MeasuredProcessOutput(finished[0], finished[1], finished[2])
