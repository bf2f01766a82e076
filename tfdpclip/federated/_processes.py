"""The aggregation process: clip at the clients, sum, release at the server."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip.federated import _tff
from tfdpclip.federated._summation import Summation
from tfdpclip.mechanism import Release


def build(summation: Summation, seed: int | None) -> Any:
    """The aggregation process of one way of summing.

    Its state holds the round, the clip rule's state and what `summation` adds; all of
    it is public. With an inner process, it is beside that one's state.

    Args:
      summation: clips, encodes, sums and decodes.
      seed: makes the noise reproducible, for experiments only.
    """
    clip, inner = summation.clip, summation.inner
    value_type = clip.layout.value_type

    @_tff.tf_computation
    def first_state():
        return collections.OrderedDict(
            round=tf.constant(0, tf.int32),
            clip=tuple(clip.initial_state()),
            **summation.public_state(),
        )

    own_type = state_type = first_state.type_signature.result
    names = [name for name, _ in _tff.elements(own_type)]

    @_tff.tf_computation(value_type, own_type)
    def encode(value, state):
        return summation.encode(_tff.flatten(value), _state(state, names))

    @_tff.tf_computation(own_type, encode.type_signature.result)
    def finish(state, summed):
        state = _state(state, names)
        release, count_stddevs = summation.release(_tff.flatten(summed), state, seed)
        new_state = collections.OrderedDict(
            state,
            round=state["round"] + 1,
            clip=tuple(tf.nest.flatten(release.next_state)),
        )
        measured = _measurements(summation, new_state, state, release, count_stddevs)
        measured["private"] = tf.constant(
            summation.mechanism.noise_multiplier > 0 and seed is None
        )
        return new_state, clip.layout.to_value(release.means), measured

    @_tff.federated_computation
    def initialize():
        own = _tff.federated_eval(first_state, _tff.SERVER)
        return own if inner is None else _joined(own, inner.initialize())

    if inner is not None:
        inner_type = inner.initialize.type_signature.result.member
        state_type = collections.OrderedDict(own=own_type, inner=inner_type)

    @_tff.federated_computation(_tff.at_server(state_type), _tff.at_clients(value_type))
    def next_round(state, value):
        own, kept = (state, None) if inner is None else (state["own"], state["inner"])
        announced = _tff.federated_broadcast(own)
        encoded = _tff.federated_map(encode, (value, announced))
        summed, kept = summation.sum(encoded, kept)
        finished = _tff.federated_map(finish, (own, summed))
        new_state = finished[0] if inner is None else _joined(finished[0], kept)
        return _tff.MeasuredProcessOutput(new_state, finished[1], finished[2])

    return _tff.AggregationProcess(initialize, next_round)


def _measurements(
    summation: Summation, new_state: Any, state: Any, release: Release, count_stddevs
) -> collections.OrderedDict:
    """What a round measures, under the same names whatever the rule and the sum."""
    clip = summation.clip
    norms = clip.clip_norms(clip.state(state["clip"]))
    next_norms = clip.clip_norms(release.next_state)
    fractions, stddevs = release.fractions, tf.cast(release.stddevs, tf.float32)
    count_stddevs = tf.constant(count_stddevs, tf.float32)
    if count_stddevs.shape[0] == 1:
        fractions, count_stddevs = fractions[0], count_stddevs[0]
    elif count_stddevs.shape[0] == 0:
        fractions, count_stddevs = tf.constant(np.nan, tf.float32), tf.constant(0.0)
    if clip.groups == 1:
        norms, next_norms, stddevs = norms[0], next_norms[0], stddevs[0]
    return collections.OrderedDict(
        round=new_state["round"],
        clip_norm=norms,
        next_clip_norm=next_norms,
        unclipped_fraction=fractions,
        sum_noise_stddev=stddevs,
        count_noise_stddev=count_stddevs,
        noise_multiplier=tf.constant(summation.mechanism.noise_multiplier, tf.float32),
    )


def _joined(own: Any, inner: Any) -> Any:
    return _tff.federated_zip(collections.OrderedDict(own=own, inner=inner))


def _state(state: Any, names: list[str]) -> dict[str, Any]:
    """The server's state by name, as graphs made it: the clip state is a tuple."""
    round_num, *rest = _tff.flatten(state)
    # Behind the clip state, one tensor for each of what a way of summing adds.
    extra = names[2:]
    clip, public = rest[: len(rest) - len(extra)], rest[len(rest) - len(extra) :]
    return collections.OrderedDict(
        round=round_num, clip=tuple(clip), **dict(zip(extra, public, strict=True))
    )
