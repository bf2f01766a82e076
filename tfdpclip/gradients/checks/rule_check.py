"""Compares the engine with ordinary gradients, on the first step of a trace.

That the examples of a batch stay apart is proven from the graph
(`isolation_proof.py`), and no step tests it. What no such proof shows is whether a
rule, an op's converter or a layer of a new Keras version gives the right gradient. So
the first step of a trace takes ordinary gradients of its own losses, by backward passes
without any rule of this library, under two weightings of the losses:

* one for most examples, zero for a random sixty-fourth of the batch: the engine's sum
  of every variable, under twice these weights, must be twice the gradient;
* one for a random example k, zero for all other examples: the norm that decides about
  the clip of example k must not be smaller than the norm of the gradient of loss_k.

No weight but 0 and 1 goes through a backward pass, so that the pass rounds each
example's gradient as the engine's pass does, also where it underflows.

Rounding refuses no model: a wrong rule is off by more than a hundredth of the norm.
Where a batch shows nothing (an empty draw, a NaN, gradients of 0), the next step
compares again.

Gradients that are made one example at a time (`single_examples.py`) are compared as
well. They are private whatever the ops do; but where an op combines the examples of a
batch, they differ from the gradients that the model's author meant.

The ordinary gradients come first and need the forward pass alone; the comparison comes
last and needs what the sums are made of: so neither keeps anything alive for longer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
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
# One of so many examples has the weight 0, and one at least.
_LEFT_OUT = 64
# The engine's weight of each example that has the weight 1 in the backward pass: a rule
# that ignores its weights, or squares them, is off.
_FACTOR = 2.0


@dataclasses.dataclass
class Differences:
    """The engine beside ordinary gradients.

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
        self._members = np.eye(width, dtype=np.float32)[self._columns].T
        self._coarse = any(
            t.dtype.is_floating and t.dtype.size < 4
            for op in engine.flows.ops
            for t in op.outputs
        )
        # Functions that are not linear in the gradient take weights of 1 alone.
        self._linear = not any(map(op_copies.has_own_gradient, engine.flows.ops))
        self._sizes = [v.shape.num_elements() for v in engine.variables]

    @property
    def groups(self) -> int:
        """How many groups of variables are clipped apart."""
        return len(self._members)

    @property
    def limit(self) -> float:
        """The largest relative difference that is put down to rounding."""
        if not self._engine.proof.proven:
            return COARSE_TOLERANCE
        return COARSE_TOLERANCE if self._coarse else TOLERANCE

    def weights(self, order: tf.Tensor) -> tf.Tensor:
        """The weights of the losses of many examples, `[B]`: 0 or 1.

        Args:
          order: the examples' numbers in random order, `[B]`.
        """
        count = self._engine.parts.batch_size
        weights = tf.ones([count])
        if self._linear:
            left_out = tf.logical_and(order * _LEFT_OUT < count, count > 1)
            weights = tf.where(left_out, 0.0, weights)
        return tf.where(order <= _FEW, weights, 0.0) if self._coarse else weights

    def ordinary(self) -> list[tf.Tensor]:
        """Two ordinary gradients of the step's own losses.

        Returns:
          The weights of the losses of many examples, `[B]`; which example is looked at
          alone, `[B]`, true at one random place; and the gradients of all variables,
          `[n]` for n entries, under these weights and of that example's loss.
        """
        order = chance.shuffled(tf.range(self._engine.parts.batch_size))
        weights = self.weights(order)
        # Compared, and not an index, so that XLA compiles an empty batch.
        alone = tf.equal(order, 0)
        # Traced once, and kept from running both at once, for their memory.
        gradient = self.gradient if in_xla() else op_copies.called(self.gradient)
        many = gradient(weights)
        with tf.control_dependencies([many]):
            one = gradient(tf.cast(alone, tf.float32))
        return [weights, alone, many, one]

    def gradient(self, weights: tf.Tensor) -> tf.Tensor:
        """The ordinary gradient of weighted losses, `[n]`, of all variables."""
        engine = self._engine
        seed = tf.cast(weights, engine.loss.dtype)
        with own_gradients(engine.flows.without_gradient()):
            found = gradients_at(engine.loss, engine.handles, seed)
        pairs = zip(found, engine.variables, strict=True)
        return tf.concat([_flat(g, v.shape) for g, v in pairs], axis=0)

    def nothing(self) -> list[tf.Tensor]:
        """What stands for `ordinary` in a step that compares nothing."""
        count, size = self._engine.flows.batch_size or 0, 0
        if in_xla():  # Where both branches give tensors of the same shapes.
            count, size = self._engine.parts.batch_size, sum(self._sizes)
        shapes = [[count], [count], [size], [size]]
        kinds = [tf.float32, tf.bool, tf.float32, tf.float32]
        return list(map(tf.zeros, shapes, kinds))

    def compare(
        self, found: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """Compares the engine's sums and norms with ordinary gradients.

        Args:
          found: what `ordinary` made.

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
        """How far the engine is from two ordinary gradients.

        Args:
          found: what `ordinary` made.
        """
        rows = self._engine.flows.batch_size
        weights, alone = (tf.ensure_shape(part, [rows]) for part in found[:2])
        many, one = found[2:]
        sums, whole = self.sums(weights, many)
        norms, groups, excess, shows = self.norms(alone, one)
        return Differences(sums, norms, groups, excess, whole & shows)

    def sums(
        self, weights: tf.Tensor, ordinary: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """How far the engine's sums are off, `[V]`, and whether all were finite.

        Args:
          weights: of the losses, `[B]`, each 0 or 1.
          ordinary: the gradient under these weights, `[n]`.
        """
        engine = self._engine
        sums = engine.unperturbed_sums(_FACTOR * weights)
        # Weights of 0 keep out norms that are not finite.
        squares, terms = (
            tf.reduce_sum(tf.where(weights > 0, part, 0.0), axis=1)
            for part in self._squares_and_terms
        )
        scales, _ = self._scales(squares, terms)
        # Relative to the norms before anything is squared, against overflow.
        off = tf.stack(
            [
                _length((_flat(own, v.shape) / _FACTOR - truth) / scale)
                for own, v, truth, scale in zip(
                    sums,
                    engine.variables,
                    tf.split(ordinary, self._sizes),
                    tf.unstack(scales),
                    strict=True,
                )
            ]
        )
        # An infinite norm of one variable leaves nothing to say of those beside it. A
        # sum that is no number, where the gradient is one, is wrong.
        shows = tf.math.is_finite(_length(ordinary)) & tf.math.is_finite(scales)
        off = tf.where(tf.math.is_nan(off), math.inf, off)
        return tf.where(shows, off, 0.0), tf.reduce_all(shows)

    def norms(self, alone: tf.Tensor, ordinary: tf.Tensor) -> list[tf.Tensor]:
        """How far the norms of an example are below those of its gradient.

        Args:
          alone: which example it is, `[B]`, true at its place.
          ordinary: the gradient of its loss, `[n]`.

        Returns:
          `norms`, `groups` and `excess` of `Differences`, and whether the gradient is
          finite and not 0.
        """
        squares, terms = (
            tf.reduce_sum(tf.where(alone, part, 0.0), axis=1)
            for part in self._squares_and_terms
        )
        scales, rounded = self._scales(squares, terms)
        parts = zip(tf.split(ordinary, self._sizes), tf.unstack(scales), strict=True)
        lengths = tf.stack([_length(truth / scale) for truth, scale in parts])
        finite = tf.math.is_finite(lengths) & tf.math.is_finite(scales)
        short = tf.where(finite, lengths - tf.sqrt(squares) / scales, 0.0)
        every = tf.reduce_all(finite)
        groups, excess = self._decisive(alone, lengths * scales, rounded)
        groups, excess = (tf.where(every, part, 0.0) for part in (groups, excess))
        return [short, groups, excess, every & (tf.reduce_max(lengths) > 0)]

    @functools.cached_property
    def _squares_and_terms(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Squared norms by variable, `[V, B]`, and summed squares of their terms."""
        engine = self._engine
        squares = tf.stack(engine.squares_by_variable())
        hidden = [[LOST_SQUARE * size] for size in self._sizes]
        return squares + hidden, tf.stack(engine.terms_by_variable())

    def _scales(self, squares, terms) -> tuple[tf.Tensor, tf.Tensor]:
        """The lengths, `[V]`, relative to which gradients are compared.

        Args:
          squares: the summed squares of the examples' weighted norms, `[V]`.
          terms: those of the terms of their gradients, `[V]`.

        Returns:
          The root of the first and what rounding may add, so that the addition is
          within the limit; and what rounding may do where terms cancel.
        """
        terms = tf.sqrt(terms)
        rounding = _COARSE_ROUNDING if self._coarse else _ROUNDING
        together = tf.sqrt(tf.linalg.matvec(self._members, squares))
        together = tf.gather(together, self._columns) + terms
        scales = tf.sqrt(squares) + together * (rounding / self.limit) + 1e-30
        return scales, terms * rounding

    def _decisive(self, alone, lengths, rounded) -> tuple[tf.Tensor, tf.Tensor]:
        """The norms that decide about the clip, beside those of one example's sum."""
        engine = self._engine
        decisive = engine.record_norms(self._assignment)
        decisive = tf.reshape(decisive, [-1, self.groups])
        norms = tf.where(alone[:, tf.newaxis], decisive, 0.0)
        norms = tf.reduce_max(norms, axis=0) + 1e-30
        if engine.perturbation is not None:
            # The perturbed gradient is clipped.
            sums = engine.perturbed_sums(tf.cast(alone, tf.float32))
            found = [_flat(g, g.shape) for g in sums]
            sizes = tf.stack([tf.reduce_max(tf.abs(f)) for f in found]) + 1e-30
            pairs = zip(found, tf.unstack(sizes, num=len(found)), strict=True)
            lengths = tf.stack([_length(f / size) for f, size in pairs]) * sizes
        own = tf.gather(norms, self._columns)
        both = tf.square(tf.stack([lengths / own, rounded / own], axis=1))
        both = tf.sqrt(tf.matmul(self._members, both))
        ratios, rounded = tf.unstack(both, num=2, axis=1)
        # A record that is dropped has an infinite norm.
        shows = tf.math.is_finite(norms)
        groups = tf.where(shows, ratios - 1.0 - rounded, 0.0)
        over = tf.math.divide_no_nan(1.0, ratios) - 1.0
        return groups, tf.reduce_max(tf.where(shows & (ratios > 0), over, 0.0))


def _combined(op: tf.Operation) -> str:
    return (
        f"ExampleIsolationError: the op `{op.name}` (a {op.type}) combines the "
        "examples of a batch, or depends on their places or on the number of examples: "
        "the gradient of an example by itself is another than in the batch. Compute it "
        "from each example's own rows; or compute the op in the data pipeline, before "
        "batches are drawn." + see("mixed-examples")
    )


def _flat(gradient: Any, shape: tf.TensorShape) -> tf.Tensor:
    """A gradient as a vector in float32; zeros for None."""
    if gradient is None:
        return tf.zeros([shape.num_elements()], tf.float32)
    gradient = tf.convert_to_tensor(gradient)
    return tf.cast(tf.reshape(gradient, vector(shape.num_elements())), tf.float32)


def _length(gradient: tf.Tensor) -> tf.Tensor:
    """The norm of a vector."""
    if in_xla():  # Which has no such op everywhere.
        return tf.norm(gradient)
    return tf.raw_ops.EuclideanNorm(input=gradient, axis=vector(0))


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
