"""Compares the engine with ordinary gradients, on the first step of a trace.

That the examples of a batch stay apart is proven from the graph (`proof.py`), and no
step tests it. What no such proof shows is whether a rule, an op's converter or a layer
of a new Keras version gives the right gradient. So the first step of a trace takes
ordinary gradients of its own losses, by one backward pass without any rule of this
library, under two weightings of the losses:

* random powers of two r_i: the engine's weighted sum of every variable must be the
  gradient of sum_i r_i loss_i;
* one for one example k, zero for the others: the engine's sum must be the gradient of
  loss_k, and the norm that decides about the clip must not be smaller than its norm.

Rounding refuses no model: a wrong rule is off by more than a hundredth of the norm.
Where a batch shows nothing (an empty draw, a NaN, gradients of 0), the next step
compares again.

Gradients that are made one example at a time (`alone.py`) are compared as well: private
they are whatever the ops do, but where an op combines the examples of a batch, they are
others than the model's author meant.

The ordinary gradients come first and need the forward pass alone; the comparison comes
last and needs what the sums are made of: so neither keeps anything alive for longer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdpclip._constants import vector
from tfdpclip._devices import in_xla
from tfdpclip._docs import see
from tfdpclip.gradients.checks import chance
from tfdpclip.gradients.forms.records import LOST_SQUARE
from tfdpclip.gradients.graph import op_copies
from tfdpclip.gradients.graph.backward import gradients_at, own_gradients

# How far sums and norms may be off, relative to the root of the summed squares of the
# examples' weighted norms; of float32, and where a type below it is computed in.
TOLERANCE, COARSE_TOLERANCE = 1e-2, 0.1
# What rounding may do, relative to the norm of all variables that are clipped together
# and to the terms that an example's gradient is the sum of: a gradient that is zero but
# for rounding (that of the bias of attention's keys) agrees with nothing.
_ROUNDING, _COARSE_ROUNDING = 1e-4, 1e-2
# In types below float32, an ordinary pass rounds the sum of more examples away.
_FEW = 8


@dataclasses.dataclass
class Differences:
    """The engine beside ordinary gradients; the worst over all weightings.

    Attributes:
      sums: how far each variable's weighted sum is off, `[V]`, relative to the root of
        the summed squares of the examples' weighted norms.
      norms: how far the norm of a single example's gradient is above the engine's,
        `[V]`, relative to the engine's.
      groups: the same for the norms that decide about the clip, `[L]`.
      excess: how far the engine's norm is above the gradient's, a scalar.
      compared: whether anything finite, and not 0, was compared.
    """

    sums: tf.Tensor
    norms: tf.Tensor
    groups: tf.Tensor
    excess: tf.Tensor
    compared: tf.Tensor


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
        self._coarse = any(
            t.dtype.is_floating and t.dtype.size < 4
            for op in engine.flows.ops
            for t in op.outputs
        )
        # Functions that are not linear in the gradient take weights of 1 alone.
        self._linear = not any(map(op_copies.has_own_gradient, engine.flows.ops))
        self._sizes = [v.shape.num_elements() for v in engine.variables]

    @property
    def limit(self) -> float:
        """The largest relative difference that is put down to rounding."""
        if not self._engine.proof.proven:
            return COARSE_TOLERANCE
        return COARSE_TOLERANCE if self._coarse else TOLERANCE

    def powers(self) -> tf.Tensor:
        """The weights of the losses of many examples, `[B]`."""
        count = self._engine.parts.batch_size
        powers = random_powers(count) if self._linear else tf.ones([count])
        if self._coarse:
            chosen = chance.shuffled(tf.range(count)) < _FEW
            powers = tf.where(chosen, powers, 0.0)
        return powers

    def ordinary(self, weightings: tf.Tensor | None = None) -> list[tf.Tensor]:
        """Ordinary gradients of the losses under some weightings.

        Args:
          weightings: the weights, `[N, B]`; by default random powers of two, and 1 for
            a random example.

        Returns:
          The weightings, and the gradients of all variables, `[N, n]` for n entries.
        """
        engine = self._engine
        if weightings is None:
            powers = self.powers()
            # One more place, so that XLA compiles an empty batch.
            drawn = tf.concat([chance.uniform(tf.shape(powers)), [-1.0]], axis=0)
            single = tf.one_hot(tf.argmax(drawn), engine.parts.batch_size)
            weightings = tf.stack([powers, single])
        unseen = engine.flows.without_gradient()

        def gradient(weights):
            seed = tf.cast(weights, engine.loss.dtype)
            with own_gradients(unseen):
                found = gradients_at(engine.loss, engine.handles, seed)
            pairs = zip(found, engine.variables, strict=True)
            return tf.concat([_flat(g, v.shape) for g, v in pairs], axis=0)

        spec = tf.TensorSpec([sum(self._sizes)], tf.float32)
        found = tf.map_fn(
            gradient, weightings, fn_output_signature=spec, parallel_iterations=1
        )
        return [weightings, found]

    def nothing(self) -> list[tf.Tensor]:
        """What stands for `ordinary` in a step that compares nothing."""
        if in_xla():  # Where both branches give tensors of the same shapes.
            count = self._engine.parts.batch_size
            return [tf.zeros([2, count]), tf.zeros([2, sum(self._sizes)])]
        count = self._engine.flows.batch_size or 0
        return [tf.zeros([0, count]), tf.zeros([0, sum(self._sizes)])]

    def compare(
        self, found: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """Compares the engine's sums and norms with ordinary gradients.

        Args:
          found: the weightings and gradients that `ordinary` made.

        Returns:
          Whether all agree; whether the batch could have shown otherwise; and the error
          for the first that does not, None under XLA, where nothing can be said.
        """
        engine, limit = self._engine, self.limit
        off = self.differences(found)
        claims = engine.claims
        claimed = [tf.stack([claim() for claim, _ in claims])] if claims else []
        total = tf.reduce_all(off.groups <= limit)[tf.newaxis]
        agree = [*claimed, off.sums <= limit, off.norms <= limit, total]
        every = tf.concat(agree, axis=0)
        message = None
        if not in_xla():
            messages = [said for _, said in claims]
            places = [(v.name, engine.where(i)) for i, v in enumerate(engine.variables)]
            for kind in (_wrong_sum, _wrong_norm):
                messages += [kind(*place) for place in places]
            if not engine.proof.proven:
                messages = [_combined(engine.proof.op)] * len(messages)
            # The first that does not agree; if all do, an earlier step failed.
            first = tf.argmin(tf.cast(tf.concat([every, [False]], 0), tf.int32))
            message = tf.gather([*messages, _WRONG_TOTAL, _AGAIN], first)
        return tf.reduce_all(every), off.compared, message

    def differences(self, found: Sequence[tf.Tensor]) -> Differences:
        """How far the engine is from ordinary gradients.

        Args:
          found: the weightings and gradients that `ordinary` made.
        """
        engine, (weightings, ordinary) = self._engine, found
        weightings = tf.ensure_shape(weightings, [None, engine.flows.batch_size])
        squares = tf.stack(engine.squares_by_variable())
        hidden = [LOST_SQUARE * size for size in self._sizes]
        squares += tf.constant(hidden, tf.float32)[:, tf.newaxis]
        terms = tf.stack(engine.terms_by_variable())
        decisive = engine.record_norms(self._assignment)
        decisive = tf.reshape(decisive, [-1, self._members.shape[0]])

        def compare(pair):
            return self._difference(*pair, squares, terms, decisive)

        width = len(self._sizes)
        signature = [
            tf.TensorSpec([width], tf.float32),
            tf.TensorSpec([width], tf.float32),
            tf.TensorSpec([self._members.shape[0]], tf.float32),
            tf.TensorSpec([], tf.float32),
            tf.TensorSpec([], tf.bool),
        ]
        *worst, compared = tf.map_fn(
            compare,
            (weightings, ordinary),
            fn_output_signature=signature,
            parallel_iterations=1,
        )
        return Differences(
            *(tf.reduce_max(part, axis=0) for part in worst), tf.reduce_all(compared)
        )

    def _difference(self, weights, ordinary, squares, terms, decisive) -> list:
        """The fields of `Differences` under one weighting.

        Args:
          weights: of the losses, `[B]`.
          ordinary: the gradients, `[n]`.
          squares: the squared norms of the examples' gradients, `[V, B]`.
          terms: the summed squares of the terms of an example's gradient, `[V, B]`.
          decisive: the norms that decide about the clip, `[B, L]`.
        """
        engine = self._engine
        sums = engine.unperturbed_sums(weights)
        truth = tf.split(ordinary, self._sizes)
        scales, bounds, rounded = self._scales(weights, squares, terms)
        pairs = [
            (_flat(own, v.shape), gradient, scale)
            for own, v, gradient, scale in zip(
                sums,
                engine.variables,
                truth,
                tf.unstack(scales, num=len(truth)),
                strict=True,
            )
        ]
        # Relative to the norms before anything is squared, against overflow.
        off = tf.stack([tf.norm((a - b) / s) for a, b, s in pairs])
        lengths = tf.stack([tf.norm(b / s) for _, b, s in pairs])
        finite = tf.math.is_finite(lengths) & tf.math.is_finite(off)
        # An infinite norm of one variable leaves nothing to say of those beside it.
        finite &= tf.math.is_finite(bounds) & tf.math.is_finite(scales)
        single = tf.math.count_nonzero(weights) == 1
        shortfalls = tf.where(finite & single, lengths - bounds / scales, 0.0)
        every = tf.reduce_all(finite)
        groups, excess = self._decisive(weights, lengths * scales, decisive, rounded)
        shows = every & (tf.reduce_max(lengths) > 0)
        return [
            tf.where(finite, off, 0.0),
            shortfalls,
            tf.where(every & single, groups, 0.0),
            tf.where(every & single, excess, 0.0),
            shows,
        ]

    def _scales(
        self, weights, squares, terms
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The lengths, `[V]`, relative to which gradients are compared.

        Returns:
          The root of the summed squares of the weighted norms and what rounding may
          add, so that the addition is within the limit; that root; and what rounding
          may do where terms cancel.
        """
        # Weights of 0 keep out norms that are not finite.
        weights = tf.square(weights)
        bounds = tf.where(weights > 0, weights * squares, 0.0)
        bounds = tf.reduce_sum(bounds, axis=1)
        terms = tf.where(weights > 0, weights * terms, 0.0)
        terms = tf.sqrt(tf.reduce_sum(terms, axis=1))
        rounding = _COARSE_ROUNDING if self._coarse else _ROUNDING
        together = tf.sqrt(tf.linalg.matvec(self._members, bounds))
        together, bounds = tf.gather(together, self._columns), tf.sqrt(bounds)
        scales = bounds + (together + terms) * (rounding / self.limit) + 1e-30
        return scales, bounds, terms * rounding

    def _decisive(self, weights, lengths, decisive, rounded):
        """The norms that decide about the clip, beside those of one example's sum."""
        engine = self._engine
        norms = tf.where(weights[:, tf.newaxis] > 0, decisive, 0.0)
        norms = tf.reduce_max(norms, axis=0) + 1e-30
        if engine.perturbation is not None:
            # The perturbed gradient is clipped.
            found = [_flat(g, g.shape) for g in engine.perturbed_sums(weights)]
            sizes = tf.stack([tf.reduce_max(tf.abs(f)) for f in found]) + 1e-30
            pairs = zip(found, tf.unstack(sizes, num=len(found)), strict=True)
            lengths = tf.stack([tf.norm(f / size) for f, size in pairs]) * sizes
        parts = lengths / tf.gather(norms, self._columns)
        ratios = tf.sqrt(tf.linalg.matvec(self._members, tf.square(parts)))
        rounded = tf.square(rounded / tf.gather(norms, self._columns))
        rounded = tf.sqrt(tf.linalg.matvec(self._members, rounded))
        # A record that is dropped has an infinite norm.
        shows = tf.math.is_finite(norms)
        groups = tf.where(shows, ratios - 1.0 - rounded, 0.0)
        over = tf.math.divide_no_nan(1.0, ratios) - 1.0
        return groups, tf.reduce_max(tf.where(shows & (ratios > 0), over, 0.0))


def _combined(op: tf.Operation) -> str:
    return (
        f"ExampleIsolationError: the op `{op.name}` (a {op.type}) combines the "
        "examples of a batch: the gradient of an example by itself is another than in "
        "the batch. Compute it from each example's own rows; or compute the op in the "
        "data pipeline, before batches are drawn." + see("mixed-examples")
    )


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
