"""The aggregation process: clip at the clients, sum, release at the server."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip.accounting.noise_place import NOISE_KEY
from tfdpclip.federated import _entropy, _tff
from tfdpclip.federated._summation import Summation
from tfdpclip.mechanism import Release
from tfdpclip.noise.carried import CarriedNoise
from tfdpclip.noise.runs import CorrelatedNoise


def build(
    summation: Summation, seed: int | None, run: CorrelatedNoise | None = None
) -> Any:
    """The aggregation process of one way of summing.

    Its state holds the round, the clip rule's state and what `summation` adds; all of
    it is public, and sent to the clients. Beside it is the state of an inner process,
    and what correlated noise keeps, which is secret and stays at the server.

    Args:
      summation: clips, encodes, sums and decodes.
      seed: makes the noise reproducible, for experiments only.
      run: correlated noise; None for independent noise.
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

    own_type = first_state.type_signature.result
    names = [name for name, _ in _tff.elements(own_type)]

    @_tff.tf_computation(value_type, own_type)
    def encode(value, state):
        return summation.encode(_tff.flatten(value), _state(state, names))

    def release_round(state, summed, noise):
        release, count_stddevs = summation.release(_tff.flatten(summed), state, noise)
        new_state = collections.OrderedDict(
            state,
            round=state["round"] + 1,
            clip=tuple(tf.nest.flatten(release.next_state)),
        )
        larger = 1.0 if run is None else run.sensitivity
        release = release._replace(stddevs=larger * release.stddevs)
        count_stddevs = [larger * stddev for stddev in count_stddevs]
        measured = _measurements(summation, new_state, state, release, count_stddevs)
        measured["private"] = tf.constant(
            summation.mechanism.noise_multiplier > 0 and seed is None
        )
        return new_state, clip.layout.to_value(release.means), measured

    sums_type = encode.type_signature.result
    if run is None:
        first_memory = None

        @_tff.tf_computation(own_type, sums_type)
        def finish(state, summed):
            state = _state(state, names)
            fresh = _entropy.fresh_seed() if seed is None else None
            noise = _entropy.Noise(_seed_of(seed, state, fresh))
            return release_round(state, summed, noise)
    else:
        counts = len(summation.mechanism.count_stddevs)

        @_tff.tf_computation
        def first_memory():
            zeros = tf.zeros([2], tf.int64)
            first = CarriedNoise.first(
                run, clip.layout.size + counts, clip.layout.dtype
            )
            return _memory(0, _entropy.fresh_seed(), zeros, run, first)

        memory_type = first_memory.type_signature.result

        @_tff.tf_computation(own_type, memory_type, sums_type)
        def finish(state, memory, summed):
            state = _state(state, names)
            step, ticket, _, _, kept = _tff.flatten(memory)
            # From one read: what is public must not be merged with what is not.
            fresh, name = _entropy.fresh_seeds(2)
            draws = _entropy.Draws(_seed_of(seed, state, fresh))
            noise = CarriedNoise(run, draws, step, kept)
            released = release_round(state, summed, noise)
            step = (step + 1) % run.steps
            return *released, _memory(step, name, ticket, run, noise.kept)

    @_tff.federated_computation
    def initialize():
        parts = [_tff.federated_eval(first_state, _tff.SERVER)]
        if inner is not None:
            parts.append(inner.initialize())
        if first_memory is not None:
            parts.append(_tff.federated_eval(first_memory, _tff.SERVER))
        return _joined(parts, inner is not None)

    state_type = initialize.type_signature.result

    @_tff.federated_computation(state_type, _tff.at_clients(value_type))
    def next_round(state, value):
        own, kept, memory = state, None, []
        if inner is not None or run is not None:
            own = state["own"]
        if inner is not None:
            kept = state["inner"]
        if run is not None:
            memory = [state[NOISE_KEY]]
        announced = _tff.federated_broadcast(own)
        encoded = _tff.federated_map(encode, (value, announced))
        summed, kept = summation.sum(encoded, kept)
        finished = _tff.federated_map(finish, (own, *memory, summed))
        parts = [finished[0]]
        if inner is not None:
            parts.append(kept)
        if run is not None:
            parts.append(finished[3])
        new_state = _joined(parts, inner is not None)
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


def _joined(parts: list[Any], with_inner: bool) -> Any:
    """The server's state of its own part, the inner process's and the noise's."""
    if len(parts) == 1:
        return parts[0]
    names = ["own", *(["inner"] if with_inner else []), NOISE_KEY]
    named = collections.OrderedDict(zip(names, parts, strict=False))
    return _tff.federated_zip(named)


def _seed_of(seed: int | None, state: Any, fresh: Any) -> tf.Tensor:
    return fresh if seed is None else _entropy.round_seed(seed, state["round"])


def _memory(
    step: Any,
    ticket: tf.Tensor,
    before: tf.Tensor,
    run: CorrelatedNoise,
    kept: tf.Tensor,
) -> Any:
    """What correlated noise leaves to the next round.

    Args:
      step: of the next round.
      ticket: a random name, which tells states apart.
      before: that of the state that it came from.
      run: the noise that it is of; its public digest is kept.
      kept: what the noise of the next round needs.
    """
    return collections.OrderedDict(
        step=tf.convert_to_tensor(step, tf.int32),
        ticket=ticket,
        before=before,
        run=tf.constant(run.digest, tf.int64),
        kept=kept,
    )


def _state(state: Any, names: list[str]) -> dict[str, Any]:
    """The server's state by name, as graphs made it: the clip state is a tuple."""
    round_num, *rest = _tff.flatten(state)
    # Behind the clip state, one tensor for each of what a way of summing adds.
    extra = names[2:]
    clip, public = rest[: len(rest) - len(extra)], rest[len(rest) - len(extra) :]
    return collections.OrderedDict(
        round=round_num, clip=tuple(clip), **dict(zip(extra, public, strict=True))
    )
