"""The aggregation process: clip at the clients, sum, release at the server.

A `Summation` defines how records are added up: encoded at the clients, summed, decoded
at the server. `build` makes an aggregation process from any summation.
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
    """The way from the clients' clipped records to the sums that are released.

    *Formal guarantees* that a subclass must give: `decode`, applied to the sum of
    encoded records, returns the sum of the clients' records, each within the clip norm
    of its group (times the mechanism's `inflation`), and the sum of their indicators;
    a client with a non-finite update adds zeros to both.

    Args:
      mechanism: the noise, for the rule of `clip`.
      clip: clips one client's update.

    Attributes:
      inner: a process that sums, with a state of its own; None without it.
    """

    inner: Any = None

    def __init__(self, mechanism: Mechanism, clip: RecordClip):
        self.mechanism = mechanism
        self.clip = clip

    def public_state(self) -> dict[str, tf.Tensor]:
        """A graph: further entries of the first state, after round and clip state.

        The entries stay constant, and are sent to the clients with the state.
        """
        return {}

    @abc.abstractmethod
    def encode(
        self, leaves: list[tf.Tensor], state: Any, share: tf.Tensor | None = None
    ) -> tuple:
        """A graph at each client: its message.

        Args:
          leaves: the tensors of the client's update.
          state: the server's state, by name.
          share: the client's weight, see `RecordClip.weigh`; None without weights.
        """

    @abc.abstractmethod
    def sum(self, encoded: Any, inner_state: Any) -> tuple[Any, Any]:
        """In a federated computation: the sums, and the inner process's next state.

        Args:
          encoded: at the clients, the result of `encode`.
          inner_state: at the server; None if there is no inner process.
        """

    @abc.abstractmethod
    def decode(
        self, summed: list[tf.Tensor], state: Any
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """A graph at the server: the sums of records, by leaf, and of indicators.

        Args:
          summed: the tensors that `sum` returned, in order.
          state: the server's state, by name.
        """

    def release(
        self, summed: list[tf.Tensor], state: Any, noise: NoiseSource
    ) -> tuple[Release, Any]:
        """A graph at the server: the round's release, and the noise of its counts.

        The sums are exact, so that the server adds all of the noise.

        Args:
          summed: see `decode`.
          state: the server's state, by name.
          noise: the source of the server's noise.
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
    """Records are summed by an inner aggregation factory.

    Args:
      mechanism: the noise.
      clip: clips one client's update.
      factory: a sum, up to the mechanism's `inflation`.
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
        # The inner process's measurements may be exact, and are dropped.
        summed = self.inner.next(inner_state, encoded[0])
        counts, clients = (_tff.federated_sum(encoded[i]) for i in (1, 2))
        return _tff.federated_zip((summed.result, counts, clients)), summed.state

    def decode(self, summed, state):
        *record, counts, clients = summed
        if self._is_mean:
            # Without clients, a mean is 0 / 0.
            record = [tf.math.multiply_no_nan(leaf, clients) for leaf in record]
        return [tf.reshape(leaf, [-1]) for leaf in record], counts


class ProcessBuilder:
    """The computations of one aggregation process, of a summation.

    Its state holds the round, the clip rule's state and the entries of `summation`, all
    public and sent to the clients. Next to it are the state of an inner process, and
    the memory of correlated noise, which is secret and stays at the server.

    Args:
      summation: clips, encodes, sums and decodes.
      seed: makes the noise reproducible, for experiments only.
      run: correlated noise; None for independent noise.
      weighting: the weighting of clients; None without weights.
    """

    def __init__(
        self,
        summation: Summation,
        seed: int | None,
        run: CorrelatedNoise | None,
        weighting: Weighting | None,
    ):
        self._summation, self._clip = summation, summation.clip
        self._seed, self._run, self._weighting = seed, run, weighting
        self._value_type = summation.clip.layout.value_type
        self._first_state = self._make_first_state()
        self._own_type = self._first_state.type_signature.result
        self._names = [name for name, _ in _tff.elements(self._own_type)]
        self._encode = self._make_encode()
        self._sums_type = self._encode.type_signature.result
        self._first_memory = None if run is None else self._make_first_memory(run)
        self._finish = (
            self._make_finish() if run is None else self._make_correlated_finish(run)
        )

    def process(self) -> Any:
        """Returns the process."""
        initialize = self._make_initialize()
        next_fn = self._make_next(initialize.type_signature.result)
        return _tff.AggregationProcess(initialize, next_fn)

    def _make_first_state(self) -> Any:
        clip, summation = self._clip, self._summation

        @_tff.tf_computation
        def first_state():
            return collections.OrderedDict(
                round=tf.constant(0, tf.int32),
                clip=tuple(clip.initial_state()),
                **summation.public_state(),
            )

        return first_state

    def _make_encode(self) -> Any:
        """The clients' computation, with or without weights."""
        summation, names, weighting = self._summation, self._names, self._weighting
        if weighting is None:

            @_tff.tf_computation(self._value_type, self._own_type)
            def encode(value, state):
                return summation.encode(_tff.flatten(value), _state(state, names))

            return encode

        @_tff.tf_computation(self._value_type, self._own_type, weighting.weight_type)
        def encode_weighted(value, state, weight):
            return summation.encode(
                _tff.flatten(value), _state(state, names), weighting.share(weight)
            )

        return encode_weighted

    def _make_first_memory(self, run: CorrelatedNoise) -> Any:
        """The first memory of correlated noise, with a random name."""
        layout = self._clip.layout
        mechanism = self._summation.mechanism
        size = layout.size + len(mechanism.count_stddevs)
        named = run.name_with(mechanism.noise_multiplier)

        @_tff.tf_computation
        def first_memory():
            zeros = tf.zeros([2], tf.int64)
            first = CarriedNoise.first(run, size, layout.dtype)
            return _memory(0, _entropy.fresh_seed(), zeros, named, first)

        return first_memory

    def _make_finish(self) -> Any:
        """The server's computation, with independent noise."""
        names, seed = self._names, self._seed

        @_tff.tf_computation(self._own_type, self._sums_type)
        def finish(state, summed):
            state = _state(state, names)
            fresh = _entropy.fresh_seed() if seed is None else None
            noise = _entropy.Noise(_seed_of(seed, state, fresh))
            return self._release_round(state, summed, noise)

        return finish

    def _make_correlated_finish(self, run: CorrelatedNoise) -> Any:
        """The server's computation, with correlated noise and its memory."""
        names, seed = self._names, self._seed
        memory_type = self._first_memory.type_signature.result
        named = run.name_with(self._summation.mechanism.noise_multiplier)

        @_tff.tf_computation(self._own_type, memory_type, self._sums_type)
        def finish(state, memory, summed):
            state = _state(state, names)
            step, ticket, _, _, kept = _tff.flatten(memory)
            # One read gives both: TensorFlow must not merge a public read with a
            # secret read.
            fresh, name = _entropy.fresh_seeds(2)
            draws = _entropy.Draws(_seed_of(seed, state, fresh))
            noise = CarriedNoise(run, draws, step, kept)
            released = self._release_round(state, summed, noise)
            step = (step + 1) % run.steps
            return *released, _memory(step, name, ticket, named, noise.kept)

        return finish

    def _release_round(self, state, summed, noise):
        """A graph at the server: the next state, the mean, and the measurements."""
        summation, run = self._summation, self._run
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
            summation.mechanism.noise_multiplier > 0 and self._seed is None
        )
        return new_state, self._clip.layout.to_value(release.means), measured

    def _make_initialize(self) -> Any:
        inner, first_memory = self._summation.inner, self._first_memory

        @_tff.federated_computation
        def initialize():
            parts = [_tff.federated_eval(self._first_state, _tff.SERVER)]
            if inner is not None:
                parts.append(inner.initialize())
            if first_memory is not None:
                parts.append(_tff.federated_eval(first_memory, _tff.SERVER))
            return _joined(parts, inner is not None)

        return initialize

    def _make_next(self, state_type: Any) -> Any:
        values = _tff.at_clients(self._value_type)
        if self._weighting is None:

            @_tff.federated_computation(state_type, values)
            def next_fn(state, value):
                return self._next_round(state, value)

            return next_fn

        weights = _tff.at_clients(self._weighting.weight_type)

        @_tff.federated_computation(state_type, values, weights)
        def next_weighted(state, value, weight):
            return self._next_round(state, value, weight)

        return next_weighted

    def _next_round(self, state, value, *weight):
        """In a federated computation: one round."""
        inner, run = self._summation.inner, self._run
        own, kept, memory = state, None, []
        if inner is not None or run is not None:
            own = state["own"]
        if inner is not None:
            kept = state["inner"]
        if run is not None:
            memory = [state[NOISE_KEY]]
        announced = _tff.federated_broadcast(own)
        encoded = _tff.federated_map(self._encode, (value, announced, *weight))
        summed, kept = self._summation.sum(encoded, kept)
        finished = _tff.federated_map(self._finish, (own, *memory, summed))
        parts = [finished[0]]
        if inner is not None:
            parts.append(kept)
        if run is not None:
            parts.append(finished[3])
        new_state = _joined(parts, inner is not None)
        return _tff.MeasuredProcessOutput(new_state, finished[1], finished[2])


def _measurements(
    summation: Summation, new_state: Any, state: Any, release: Release, count_stddevs
) -> collections.OrderedDict:
    """A round's measurements, with the same names for every rule and summation."""
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
    """Zips the server's own state, the inner process's state and the noise memory."""
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
    run: tuple[int, int],
    kept: tf.Tensor,
) -> Any:
    """The memory of correlated noise for the next round.

    Args:
      step: the next round's step in the matrix.
      ticket: a random name, which tells states apart.
      before: the name of the state before.
      run: the public name of the noise.
      kept: the data that the noise of the next round needs.
    """
    return collections.OrderedDict(
        step=tf.convert_to_tensor(step, tf.int32),
        ticket=ticket,
        before=before,
        run=tf.constant(run, tf.int64),
        kept=kept,
    )


def _state(state: Any, names: list[str]) -> dict[str, Any]:
    """The server's state by name, in the form of graphs: the clip state is a tuple."""
    round_num, *rest = _tff.flatten(state)
    # After the clip state, one tensor for each entry of the summation.
    extra = names[2:]
    clip, public = rest[: len(rest) - len(extra)], rest[len(rest) - len(extra) :]
    return collections.OrderedDict(
        round=round_num, clip=tuple(clip), **dict(zip(extra, public, strict=True))
    )
