"""Ways of adding up clients' records: encode at the clients, sum, decode at the server.

`_processes.build` makes an aggregation process of any of them.
"""

from __future__ import annotations

import abc
from typing import Any

import tensorflow as tf

from tfdpclip.federated import _tff
from tfdpclip.federated import secure as secure_lib
from tfdpclip.federated._records import RecordClip
from tfdpclip.mechanism import Mechanism, NoiseSource, Release


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
    def encode(self, leaves: list[tf.Tensor], state: Any) -> tuple:
        """A graph at each client: what it sends.

        Args:
          leaves: the tensors of its update.
          state: the server's state, by name.
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

    def encode(self, leaves, state):
        weights, _, bits = self.clip.weigh(leaves, self.clip.state(state["clip"]))
        record = self.clip.scale_leaves(leaves, weights)
        return self.clip.layout.to_pieces(record), bits

    def sum(self, encoded, inner_state):
        return _tff.federated_sum(encoded), inner_state

    def decode(self, summed, state):
        *pieces, counts = summed
        return self.clip.layout.split_pieces(pieces), counts


class SecureSum(Summation):
    """The server sees sums of rounded records.

    Args:
      mechanism: the noise.
      clip: clips one client's update.
      settings: the bits.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        clip: RecordClip,
        settings: secure_lib.SecureSettings,
    ):
        super().__init__(mechanism, clip)
        self._records = secure_lib.SecureEncoding(clip, settings)
        self._bits = secure_lib.CountEncoding(
            len(mechanism.count_stddevs), clip.rule.indicator_levels
        )

    def encode(self, leaves, state):
        rule_state = self.clip.state(state["clip"])
        weights, norms, indicators = self.clip.weigh(leaves, rule_state, exact=True)
        record = self._records.encode(leaves, weights, norms, rule_state)
        return record, self._bits.encode(indicators)

    def sum(self, encoded, inner_state):
        total = _tff.secure_sum_bitwidth(encoded[0], self._records.bits)
        counted = _tff.secure_sum_bitwidth(encoded[1], self._bits.bits)
        return _tff.federated_zip((total, counted)), inner_state

    def decode(self, summed, state):
        total, counted = summed
        counts, clients = self._bits.decode(counted)
        rule_state = self.clip.state(state["clip"])
        total = self._records.decode(total, clients, rule_state)
        return self.clip.layout.split(total), counts


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

    def encode(self, leaves, state):
        weights, _, bits = self.clip.weigh(leaves, self.clip.state(state["clip"]))
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
