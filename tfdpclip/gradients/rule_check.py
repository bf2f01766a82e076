"""Compares the engine with ordinary gradients, on the first step of a trace.

That the examples of a batch stay apart is proven from the graph (`proof.py`), and no
step tests it. What no such proof shows is whether a rule, an op's converter or a layer
of a new Keras version gives the right gradient. So the first step of a trace takes
ordinary gradients of its own losses, by one backward pass that TensorFlow differentiates
without any rule of this library, under two weightings of the losses:

* random powers of two r_i: the engine's weighted sum of every variable must be the
  gradient of sum_i r_i loss_i;
* one for one example k, zero for the others: the engine's sum must be the gradient of
  loss_k, and the norm that decides about the clip must not be smaller than its norm.

Rounding refuses no model: a wrong rule is off by more than a hundredth of the norm.
Where a batch shows nothing (an empty draw, a NaN, gradients of 0), the next step
compares again.

The ordinary gradients come first and need the forward pass alone; the comparison comes
last and needs what the sums are made of: so neither keeps anything alive for longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdpclip._constants import vector
from tfdpclip._devices import in_xla
from tfdpclip._docs import see
from tfdpclip.gradients import _copies, chance
from tfdpclip.gradients.backward import gradients_at, own_gradients
from tfdpclip.gradients.records import LOST_SQUARE

# How far sums and norms may be off, relative to the root of the summed squares of the
# examples' weighted norms; of float32, and where a type below it is computed in.
TOLERANCE, COARSE_TOLERANCE = 1e-2, 0.1
# What rounding may do, relative to the norm of all variables that are clipped together
# and to the terms that an example's gradient is the sum of: a gradient that is zero but
# for rounding (that of the bias of attention's keys) agrees with nothing.
_ROUNDING, _COARSE_ROUNDING = 1e-4, 1e-2
# In types below float32, an ordinary pass rounds the sum of more examples away.
_FEW = 8


class RuleCheck:
    """The comparison of an engine with ordinary gradients.

    Args:
      engine: a `PerExampleGradients`, complete.
      assignment: the group of each variable, where the clip rule has groups.
    """

    def __init__(self, engine: Any, assignment: Sequence[int] | None = None):
        self._engine = engine
        self._assignment = assignment
        self._columns = list(assignment or [0] * len(engine.variables))
        width = max(self._columns) + 1
        # The variables that are clipped together, `[L, V]`.
        self._members = tf.one_hot(self._columns, width, axis=0)
        self._coarse = engine.evidence.coarse
        # Functions that are not linear in the gradient take weights of 1 alone.
        self._linear = not any(map(_copies.has_own_gradient, engine.flows.ops))
        self._sizes = [v.shape.num_elements() for v in engine.variables]

    def weightings(self) -> tf.Tensor:
        """The weights of the losses, `[2, B]`: of many examples, and of one."""
        count = self._engine.parts.batch_size
        powers = random_powers(count) if self._linear else tf.ones([count])
        if self._coarse:
            chosen = chance.shuffled(tf.range(count)) < _FEW
            powers = tf.where(chosen, powers, 0.0)
        # One more place, so that XLA compiles an empty batch.
        drawn = tf.concat([chance.uniform(tf.shape(powers)), [-1.0]], axis=0)
        single = tf.one_hot(tf.argmax(drawn), count)
        return tf.stack([powers, single])

    def ordinary(self, weightings: tf.Tensor) -> tf.Tensor:
        """The ordinary gradients of the weighted losses, `[2, n]` for n entries."""
        engine = self._engine
        unseen = engine.flows.without_gradient()

        def gradient(weights):
            seed = tf.cast(weights, engine.loss.dtype)
            with own_gradients(unseen):
                found = gradients_at(engine.loss, engine.handles, seed)
            pairs = zip(found, engine.variables, strict=True)
            return tf.concat([_flat(g, v.shape) for g, v in pairs], axis=0)

        spec = tf.TensorSpec([sum(self._sizes)], tf.float32)
        return tf.map_fn(
            gradient, weightings, fn_output_signature=spec, parallel_iterations=1
        )

    def nothing(self) -> tuple[tf.Tensor, tf.Tensor]:
        """The weightings and gradients of a step that compares nothing."""
        count = self._engine.flows.batch_size or 0
        return tf.zeros([0, count]), tf.zeros([0, sum(self._sizes)])

    def compare(
        self, weightings: tf.Tensor, ordinary: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """Compares the engine's sums and norms with ordinary gradients.

        Args:
          weightings: of the losses, `[2, B]`.
          ordinary: the gradients of the weighted losses, `[2, n]`.

        Returns:
          Whether all agree; whether the batch could have shown otherwise; and the error
          for the first that does not, None under XLA, where nothing can be said.
        """
        engine = self._engine
        engine_sums = [self._flat_sums(weightings[number]) for number in range(2)]
        squares = tf.stack(self._squares_by_variable())
        hidden = [LOST_SQUARE * size for size in self._sizes]
        squares += tf.constant(hidden, tf.float32)[:, tf.newaxis]
        terms = tf.stack(self._terms_by_variable())
        agree, shows = [], []
        for number in range(2):
            weights = weightings[number]
            scales, rounded = self._scales(weights, squares, terms)
            truth = tf.split(ordinary[number], self._sizes)
            lengths = tf.stack([tf.norm(t) for t in truth])
            off = tf.stack(
                [
                    tf.norm((a - b) / s) if n else tf.zeros([])
                    for a, b, s, n in zip(
                        engine_sums[number],
                        truth,
                        tf.unstack(scales, num=len(truth)),
                        self._sizes,
                        strict=True,
                    )
                ]
            )
            finite = tf.math.is_finite(off) & tf.math.is_finite(lengths)
            agree.append((off <= self._limit) | ~finite)
            shows.append(tf.reduce_all(finite) & (tf.reduce_max(lengths) > 0))
        # Of the one example: the norms of each variable, and those that decide.
        own = tf.sqrt(tf.linalg.matvec(squares, tf.square(weights)))
        norms = lengths <= own * (1 + self._limit) + rounded * self._limit
        decisive = tf.reshape(
            engine.record_norms(self._assignment), [-1, self._members.shape[0]]
        )
        decisive = tf.reduce_max(
            tf.where(weights[:, tf.newaxis] > 0, decisive, 0.0), axis=0
        )
        together = self._lengths_together(lengths, weights)
        allowed = tf.sqrt(tf.linalg.matvec(self._members, tf.square(rounded)))
        total = together <= decisive * (1 + self._limit) + allowed * self._limit
        finite = tf.math.is_finite(together) & tf.math.is_finite(decisive)
        total |= ~finite
        norms |= ~tf.math.is_finite(lengths) | ~tf.math.is_finite(own)
        every = tf.concat(
            [*self._claimed(), *agree, norms, tf.reduce_all(total)[tf.newaxis]], axis=0
        )
        return tf.reduce_all(every), tf.reduce_all(shows), self._message(every)

    @property
    def _limit(self) -> float:
        return COARSE_TOLERANCE if self._coarse else TOLERANCE

    def _flat_sums(self, weights: tf.Tensor) -> list[tf.Tensor]:
        found = self._engine.unperturbed_sums(weights)
        return [_flat(g, v.shape) for g, v in zip(found, self._engine.variables)]

    def _lengths_together(self, lengths: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        """The norms, `[L]`, of the one example's gradients that are clipped together."""
        engine = self._engine
        if engine.perturbation is not None:
            # The perturbed gradient is clipped.
            found = engine.perturbed_sums(weights)
            lengths = tf.stack([tf.norm(_flat(g, g.shape)) for g in found])
        # Relative to the largest before anything is squared, against overflow.
        largest = tf.reduce_max(lengths) + 1e-30
        squares = tf.linalg.matvec(self._members, tf.square(lengths / largest))
        return tf.sqrt(squares) * largest

    def _scales(self, weights, squares, terms) -> tuple[tf.Tensor, tf.Tensor]:
        """The lengths, `[V]`, relative to which gradients are compared.

        Args:
          weights: of the examples, `[B]`.
          squares: the squared norms, `[V, B]`.
          terms: the summed squares of the terms that may cancel in an example, `[V, B]`.

        Returns:
          The root of the summed squares of the weighted norms, with what rounding may
          add; and that addition alone.
        """
        weights = tf.square(weights)
        bounds = tf.where(weights > 0, weights * squares, 0.0)
        bounds = tf.sqrt(tf.reduce_sum(bounds, axis=1))
        terms = tf.where(weights > 0, weights * terms, 0.0)
        terms = tf.sqrt(tf.reduce_sum(terms, axis=1))
        rounding = _COARSE_ROUNDING if self._coarse else _ROUNDING
        together = tf.sqrt(tf.linalg.matvec(self._members, tf.square(bounds)))
        together = tf.gather(together, self._columns)
        rounded = (together + terms) * (rounding / self._limit) + 1e-30
        return bounds + rounded, rounded

    def _squares_by_variable(self) -> list[tf.Tensor]:
        return self._engine.evidence.squares_by_variable()

    def _terms_by_variable(self) -> list[tf.Tensor]:
        return self._engine.evidence.parts_by_variable()

    def _claimed(self) -> list[tf.Tensor]:
        claims = self._engine.evidence.claims
        return [tf.stack([claim() for claim, _ in claims])] if claims else []

    def _message(self, every: tf.Tensor) -> tf.Tensor | None:
        """The error for the first that does not agree, chosen when the step runs."""
        if in_xla():
            return None
        engine = self._engine
        messages = [message for _, message in engine.evidence.claims]
        places = [
            (v.name, engine.evidence.where(i)) for i, v in enumerate(engine.variables)
        ]
        for kind in (_wrong_sum, _wrong_sum, _wrong_norm):
            messages += [kind(*place) for place in places]
        messages += [_WRONG_TOTAL, _AGAIN]
        first = tf.argmin(tf.cast(tf.concat([every, [False]], 0), tf.int32))
        return tf.gather(messages, first)


def random_powers(batch_size: tf.Tensor) -> tf.Tensor:
    """A power of two from 1 to 128 for each example, `[B]`: scaling by it is exact."""
    powers = chance.shuffled(tf.range(batch_size)) % 8
    return tf.cast(tf.bitwise.left_shift(tf.ones_like(powers), powers), tf.float32)


def _flat(gradient: Any, shape: tf.TensorShape) -> tf.Tensor:
    """A gradient as a vector in float32; zeros for None."""
    if gradient is None:
        return tf.zeros([shape.num_elements()], tf.float32)
    gradient = tf.reshape(tf.convert_to_tensor(gradient), vector(-1))
    return tf.ensure_shape(tf.cast(gradient, tf.float32), [shape.num_elements()])


_REMEDY = (
    "Nothing was released. dpc.testing.assert_exact(model, (x, y)) compares all "
    "examples. If a rule of yours covers that op (op_rule), mend the rule; if not, "
    "build the layer of other ops, and report it, please." + see("a-wrong-gradient")
)
_AGAIN = (
    "GradientMismatchError: an earlier step of this function failed its comparison "
    "with ordinary gradients, so that its steps are not to be trusted. Mend the model, "
    "and make a new function." + see("a-wrong-gradient")
)
_WRONG_TOTAL = (
    "GradientMismatchError: the norm that decides about the clip is smaller than the "
    f"norm of the gradient that is clipped. {_REMEDY}"
)


def _wrong_sum(name: str, where: str) -> str:
    return (
        f"GradientMismatchError: the clipped sum of {name!r} ({where}) is not what an "
        f"ordinary backward pass gives. {_REMEDY}"
    )


def _wrong_norm(name: str, where: str) -> str:
    return (
        f"GradientMismatchError: the norm of an example's gradient of {name!r} "
        f"({where}) is smaller than an ordinary backward pass gives. {_REMEDY}"
    )
