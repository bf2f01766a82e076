"""What the mechanism asks of a clip rule."""

from __future__ import annotations

import abc
from typing import Any

import tensorflow as tf


class Rule(abc.ABC):
    """A rule that weighs records by their norms and a state that adapts.

    `tfdpclip.clipping.ClipRule` is the class to derive from. The mechanism calls these
    methods alone, and believes none of them: see `tfdpclip.kernel.limits`.
    """

    @property
    def assignment(self) -> tuple[int, ...] | None:
        """The group, 0 to L - 1, of each variable; None for a rule without groups."""
        return None

    @abc.abstractmethod
    def initial_state(self) -> Any:
        """A nest of tensors: the clip norm and all further numbers of the rule.

        The type is float32, except for a count of steps; `()` if there is no state.
        """

    @abc.abstractmethod
    def weights(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        """The factor for each record, `[B]`, from the records' norms, `[B]`.

        The weight is 0 or above, and depends on the record's own norm and the state
        alone. Its type is the norms' type, or float32 if that has less precision.

        For a rule with L groups both are `[B, L]`: norms and factors of each group.
        """

    @abc.abstractmethod
    def sensitivity(self, state: Any) -> tf.Tensor:
        """The largest L2 norm of a weighted record: a float32 scalar.

        For a rule with L groups, the largest norm of the part in each group, `[L]`.
        """

    def noise_scales(self, state: Any) -> tf.Tensor:
        """The noise stddev on the sum at noise multiplier 1: a scalar, or `[L]`."""
        return self.sensitivity(state)

    def indicators(
        self, norms: tf.Tensor, state: Any, present: tf.Tensor | None = None
    ) -> tf.Tensor:
        """The numbers that a step sums for the rule, `[B, K]`, each in [-1/2, 1/2].

        Args:
          norms: `[B]`, the records' norms before clipping.
          state: the rule's state.
          present: `[B]` booleans, False for padding; padding gives 0. None means that
            every record is real.

        Returns:
          A float32 tensor `[B, K]`; K is 0 for a rule that does not adapt.
        """
        del state, present
        return tf.zeros([tf.shape(norms)[0], 0], tf.float32)

    def next_state(self, state: Any, fractions: tf.Tensor) -> Any:
        """The state after seeing the noised fractions, `[K]`.

        Fraction k is the noised sum of indicator k, divided by the public expected
        number of records, plus 1/2. Noise may take a fraction outside of [0, 1]; for a
        rule from outside the library, fractions are clamped to [0, 1].
        """
        del fractions
        return state

    def count_stddevs(
        self, records_per_step: float, private: bool = True
    ) -> tuple[float, ...]:
        """The noise stddev for each of the K sums of indicators.

        Args:
          records_per_step: the public expected number of records in a step, which
            decides the defaults.
          private: False for a run without privacy, where the default is 0: the exact
            fraction.
        """
        del records_per_step, private
        return ()

    @property
    def default_counts(self) -> tuple[bool, ...]:
        """For each of the K counts, whether its noise is a default.

        Default noise is made larger where the sum would have too little left of z:
        `tfdpclip.kernel.noise_split.enlarged_stddevs`.
        """
        return (False,) * len(self.count_stddevs(1.0))
