"""The aggregation process: clip at the clients, sum, release at the server.

A `Summation` says how records are added up: encoded at the clients, summed, decoded at
the server. `build` makes an aggregation process of any of them.
"""

from __future__ import annotations

import abc
import collections
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip.accounting.noise_place import NOISE_KEY
from tfdpclip.federated import _entropy, _tff
from tfdpclip.federated._records import RecordClip, Weighting
from tfdpclip.mechanism import Mechanism, NoiseSource, Release
from tfdpclip.noise.carried import CarriedNoise
from tfdpclip.noise.runs import CorrelatedNoise


class Summation(abc.ABC):
    """How the clients' clipped records become the sums that the mechanism releases.

    *Formal guarantees* that a subclass owes: what `decode` makes of the sum of what
    clients encoded is the sum of their records, each within the clip norm of its group
    (times the mechanism's `inflation`), and of their indicators; a client whose update
    is not finite adds zeros to both.

    Args:
      mechanism: the noise, for the rule that `clip` is made of.
      clip: clips one client's update.

    Attributes:
      inner: a process that sums, if there is one, with a state of its own.
    """

    inner: Any = None

    def __init__(self, mechanism: Mechanism, clip: RecordClip):
        self.mechanism = mechanism
        self.clip = clip

    def public_state(self) -> dict[str, tf.Tensor]:
        """A graph: what the first state holds besides the round and the clip state.

        It stays as it is, and is sent to the clients like the rest of the state.
        """
        return {}

    @abc.abstractmethod
    def encode(
        self, leaves: list[tf.Tensor], state: Any, share: tf.Tensor | None = None
    ) -> tuple:
        """A graph at each client: what it sends.

        Args:
          leaves: the tensors of its update.
          state: the server's state, by name.
          share: its weight, see `RecordClip.weigh`; None where clients have none.
        """

    @abc.abstractmethod
    def sum(self, encoded: Any, inner_state: Any) -> tuple[Any, Any]:
        """In a federated computation: the sums, and the inner process's next state.

        Args:
          encoded: at the clients, what `encode` returned.
          inner_state: at the server; None if there is no inner process.
        """

    @abc.abstractmethod
    def decode(
        self, summed: list[tf.Tensor], state: Any
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """A graph at the server: the sums of records, leaf by leaf, and of indicators.

        Args:
          summed: the tensors that `sum` returned, in order.
          state: the server's state, by name.
        """

    def release(
        self, summed: list[tf.Tensor], state: Any, noise: NoiseSource
    ) -> tuple[Release, Any]:
        """A graph at the server: this round's release, and its counts' noise stddevs.

        The sums are exact, so that the server adds all of the noise.

        Args:
          summed: see `decode`.
          state: the server's state, by name.
          noise: draws the server's noise.
        """
        dtype = self.clip.layout.dtype
        sums, counts = self.decode(summed, state)
        release = self.mechanism.release(
            self.clip.state(state["clip"]),
            [tf.cast(part, dtype) for part in sums],
            counts,
            noise,
        )
        return release, self.mechanism.count_stddevs


class PlainSum(Summation):
    """The server sees every client's clipped record."""

    def encode(self, leaves, state, share=None):
        rule_state = self.clip.state(state["clip"])
        weights, _, bits = self.clip.weigh(leaves, rule_state, share=share)
        record = self.clip.scale_leaves(leaves, weights)
        return self.clip.layout.to_pieces(record), bits

    def sum(self, encoded, inner_state):
        return _tff.federated_sum(encoded), inner_state

    def decode(self, summed, state):
        *pieces, counts = summed
        return self.clip.layout.split_pieces(pieces), counts


class InnerSummation(Summation):
    """Records go through another aggregation factory.

    Args:
      mechanism: the noise.
      clip: clips one client's update.
      factory: what sums, up to the mechanism's `inflation`.
    """

    def __init__(self, mechanism: Mechanism, clip: RecordClip, factory: Any):
        super().__init__(mechanism, clip)
        layout = clip.layout
        self._type = _tff.with_dtype(layout.value_type, layout.dtype.as_numpy_dtype)
        self._is_mean = isinstance(factory, _tff.UnweightedMeanFactory)
        self.inner = factory.create(self._type)

    def encode(self, leaves, state, share=None):
        rule_state = self.clip.state(state["clip"])
        weights, _, bits = self.clip.weigh(leaves, rule_state, share=share)
        record = _tff.pack(self.clip.scale_leaves(leaves, weights), self._type)
        return record, bits, tf.constant(1.0, self.clip.layout.dtype)

    def sum(self, encoded, inner_state):
        # What the inner process measures may be exact; it goes no further.
        summed = self.inner.next(inner_state, encoded[0])
        counts, clients = (_tff.federated_sum(encoded[i]) for i in (1, 2))
        return _tff.federated_zip((summed.result, counts, clients)), summed.state

    def decode(self, summed, state):
        *record, counts, clients = summed
        if self._is_mean:
            # With nobody there, a mean is 0 / 0.
            record = [tf.math.multiply_no_nan(leaf, clients) for leaf in record]
        return [tf.reshape(leaf, [-1]) for leaf in record], counts


def build(
    summation: Summation,
    seed: int | None,
    run: CorrelatedNoise | None = None,
    weighting: Weighting | None = None,
) -> Any:
    """The aggregation process of one way of summing.

    Its state holds the round, the clip rule's state and what `summation` adds; all of
    it is public, and sent to the clients. Beside it is the state of an inner process,
    and what correlated noise keeps, which is secret and stays at the server.

    Args:
      summation: clips, encodes, sums and decodes.
      seed: makes the noise reproducible, for experiments only.
      run: correlated noise; None for independent noise.
      weighting: how clients are weighted; None where they send no weights.
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

    if weighting is None:

        @_tff.tf_computation(value_type, own_type)
        def encode(value, state):
            return summation.encode(_tff.flatten(value), _state(state, names))
    else:

        @_tff.tf_computation(value_type, own_type, weighting.weight_type)
        def encode(value, state, weight):
            return summation.encode(
                _tff.flatten(value), _state(state, names), weighting.share(weight)
            )

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

    def next_round(state, value, *weight):
        own, kept, memory = state, None, []
        if inner is not None or run is not None:
            own = state["own"]
        if inner is not None:
            kept = state["inner"]
        if run is not None:
            memory = [state[NOISE_KEY]]
        announced = _tff.federated_broadcast(own)
        encoded = _tff.federated_map(encode, (value, announced, *weight))
        summed, kept = summation.sum(encoded, kept)
        finished = _tff.federated_map(finish, (own, *memory, summed))
        parts = [finished[0]]
        if inner is not None:
            parts.append(kept)
        if run is not None:
            parts.append(finished[3])
        new_state = _joined(parts, inner is not None)
        return _tff.MeasuredProcessOutput(new_state, finished[1], finished[2])

    if weighting is None:

        @_tff.federated_computation(state_type, _tff.at_clients(value_type))
        def next_fn(state, value):
            return next_round(state, value)
    else:

        @_tff.federated_computation(
            state_type,
            _tff.at_clients(value_type),
            _tff.at_clients(weighting.weight_type),
        )
        def next_fn(state, value, weight):
            return next_round(state, value, weight)

    return _tff.AggregationProcess(initialize, next_fn)


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
