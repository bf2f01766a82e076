"""The interface between gradients of any origin and a clip rule."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdpclip.clipping import ClipRule
from tfdpclip.gradients.forms.perturbation import Perturbation
from tfdpclip.kernel import limits


class RecordGradients(abc.ABC):
    """The gradients of B records with respect to V variables.

    A record is the unit of clipping: an example, or a physical batch as a whole.

    Attributes:
      variables: the variables.
      checks_passed: a scalar boolean, False if a check failed in this step or before:
        the comparison with ordinary gradients, or the check of variables that steps
        must not change. The sums are then 0.
      perturbation: the noise that is added to each record before clipping, or None.
    """

    variables: list[tf.Variable]
    checks_passed: tf.Tensor
    perturbation: Perturbation | None = None

    @property
    @abc.abstractmethod
    def present(self) -> tf.Tensor:
        """Which records are real and not padding, `[B]`."""

    @property
    @abc.abstractmethod
    def connected(self) -> list[bool]:
        """Whether each variable can receive a gradient at all."""

    @abc.abstractmethod
    def weighted_sum(
        self, weights: tf.Tensor, assignment: Sequence[int] | None = None
    ) -> list[tf.Tensor]:
        """sum_i weights_i g_i for each variable.

        Args:
          weights: `[B]`, or `[B, L]` with a column for each group.
          assignment: the column of each variable.
        """

    @abc.abstractmethod
    def _plain_squares(self) -> list[tf.Tensor]:
        """Each variable's squared norms, `[B]`, before any perturbation."""

    @abc.abstractmethod
    def _batch_size(self) -> tf.Tensor:
        """B, a scalar."""

    def shared_gradients(self) -> list[tf.Tensor | None]:
        """The gradients of the terms that depend on no record."""
        return [None] * len(self.variables)

    def mask(self, values: tf.Tensor) -> tf.Tensor:
        """`values`, `[B]` or `[B, L]`, with 0 for all if a check failed."""
        return tf.where(self.checks_passed, values, tf.zeros_like(values))

    def record_norms(self, assignment: Sequence[int] | None = None) -> tf.Tensor:
        """The norms that decide the clip, perturbation included.

        Args:
          assignment: the group, 0 to L - 1, of each variable, for `[B, L]` norms; None
            for `[B]`. A record that is not finite in any group is infinite in all.

        The norms are upper bounds: the squares that underflow are added, so that a rule
        that scales small records up cannot scale up an unseen part.
        """
        squares = self._squares()
        if not squares:
            shape = [self._batch_size()]
            if assignment is not None:
                shape.append(max(assignment) + 1)
            return tf.zeros(shape, tf.float32)
        sizes = [math.prod(v.shape) for v in self.variables]
        total = tf.add_n(squares)
        if assignment is None:
            return tf.sqrt(total + LOST_SQUARE * sum(sizes))
        columns: list[list[tf.Tensor]] = [[] for _ in range(max(assignment) + 1)]
        for column, square in zip(self._columns(assignment), squares, strict=True):
            columns[column].append(square)
        lost = [0.0] * len(columns)
        for column, size in zip(assignment, sizes, strict=True):
            lost[column] += LOST_SQUARE * size
        norms = [
            (tf.add_n(c) if c else tf.zeros_like(total)) + hidden
            for c, hidden in zip(columns, lost, strict=True)
        ]
        norms = tf.sqrt(tf.stack(norms, axis=1))
        infinite = tf.fill(tf.shape(norms), tf.constant(math.inf))
        return tf.where(tf.math.is_finite(total)[:, tf.newaxis], norms, infinite)

    def _columns(self, assignment: Sequence[int]) -> list[int]:
        """The group of each of `_squares`."""
        return list(assignment)

    def _squares(self) -> list[tf.Tensor]:
        return self._plain_squares()

    def clipped_sum(
        self,
        rule: ClipRule,
        state: Any,
        norms: tf.Tensor | None = None,
    ) -> list[tf.Tensor]:
        """The clipped gradients of all records, summed, for each variable.

        Args:
          rule: a clip rule, bound to the variables if it has groups.
          state: the rule's state.
          norms: `record_norms` for this rule, if already computed.
        """
        norms = self.record_norms(rule.assignment) if norms is None else norms
        weights = limits.weights_of(rule, norms, state)
        weights = self.mask(weights)
        return self.weighted_sum(weights, rule.assignment)


# The square of a float32 below 1.1e-19 is lost, so each entry hides up to this much.
LOST_SQUARE = 1.2e-38


def column_of(
    weights: tf.Tensor, assignment: Sequence[int] | None, index: int
) -> tf.Tensor:
    """The weights `[B]` of variable `index`."""
    return weights if assignment is None else weights[:, assignment[index]]
