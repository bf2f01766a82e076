"""Compares the engine with ordinary gradients, on the first step of a trace.

The isolation of the examples is proven from the graph (`isolation_proof.py`) and not
tested here. The proof does not show that a rule, an op's converter or a layer of a new
Keras version gives the right gradient. So the first step of a trace takes ordinary
gradients of its own losses, by backward passes without rules of this library, under two
weightings of the losses:

* 1 for most examples, 0 for a random sixty-fourth of the batch: the engine's sum of
  every variable, under twice these weights, must be twice the gradient;
* 1 for a random example k, 0 for all further examples: the norm that decides about the
  clip of example k must not be smaller than the norm of the gradient of loss_k.

No weight but 0 and 1 goes through a backward pass, so that the pass rounds each
example's gradient as the engine's pass does, also where it underflows.

The tolerance is above rounding errors and below the error of a wrong rule, which is
more than a hundredth of the norm. After an inconclusive batch (an empty draw, a NaN,
gradients of 0; without a proof, a single example), the next step compares again.

Gradients made one example at a time (`single_examples.py`) are compared as well. They
are private for all behaviours of the ops; but if an op combines the examples of a
batch, they differ from the gradients that the model's author meant.

The ordinary gradients come first and need the forward pass alone; the comparison comes
last and needs the tensors that the sums are computed from. So neither extends the life
of a tensor in memory.
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
from tfdpclip.gradients.errors import ExampleIsolationError, GradientMismatchError
from tfdpclip.gradients.forms.records import LOST_SQUARE
from tfdpclip.gradients.graph import op_copies
from tfdpclip.gradients.graph.backward import gradients_at, own_gradients
from tfdpclip.gradients.graph.known import BY_ARGUMENT, CONSTANT_BY_PLACE
from tfdpclip.gradients.proof.isolation_proof import Proof

# The allowed differences of sums and norms, relative to the root of the summed squares
# of the examples' weighted norms: in float32, and in float types below float32.
TOLERANCE, COARSE_TOLERANCE = 1e-2, 0.1
# The allowed rounding errors, relative to the norm of all variables that are clipped
# together, and to the terms that an example's gradient is the sum of. A gradient of
# pure rounding errors (of the key bias of attention, for example) has no right value.
_ROUNDING, _COARSE_ROUNDING = 1e-4, 1e-2
# The same for terms that cancel in the gradient of the loss, before the variables: the
# gradient of a saturated cross-entropy, sigmoid(z) - 1, is 0 or 1e-10 by the order of
# the sum. Relative to the largest norm of the batch, whose terms do not cancel.
_CANCELLED, _COARSE_CANCELLED = 1e-5, 1e-2
# In types below float32, an ordinary backward pass loses the sum of more examples.
_FEW = 8
# One of so many examples has the weight 0, and one at least.
_LEFT_OUT = 64
# The engine's weight of each example that has the weight 1 in the backward pass: a rule
# that ignores its weights, or squares them, is off.
_FACTOR = 2.0


@dataclasses.dataclass
class Differences:
    """The differences between the engine and ordinary gradients.

    Attributes:
      sums: the differences of the variables' weighted sums, `[V]`, relative to the root
        of the summed squares of the examples' weighted norms.
      norms: the ordinary norms of a single example's gradient minus the engine's norms,
        `[V]`, relative to the engine's norms.
      groups: the same for the norms that decide about the clip, `[L]`.
      excess: the engine's norm minus the ordinary norm, relative, a scalar.
      compared: whether the compared gradients were finite and not 0.
    """

    sums: tf.Tensor
    norms: tf.Tensor
    groups: tf.Tensor
    excess: tf.Tensor
    compared: tf.Tensor


class RuleCheck:
    """The comparison of an engine with ordinary gradients.

    Args:
      engine: a complete `PerExampleGradients`.
      assignment: the group of each variable, if the clip rule has groups.
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
        # Own gradient functions may be nonlinear in the gradient: all weights are 1.
        self._linear = not any(map(op_copies.has_own_gradient, engine.flows.ops))
        self._sizes = [v.shape.num_elements() for v in engine.variables]

    @property
    def groups(self) -> int:
        """The number of groups of variables that are clipped apart."""
        return len(self._members)

    @property
    def limit(self) -> float:
        """The largest relative difference that counts as rounding."""
        if not self._engine.proof.proven:
            return COARSE_TOLERANCE
        return COARSE_TOLERANCE if self._coarse else TOLERANCE

    def weights(self, order: tf.Tensor) -> tf.Tensor:
        """The weights of the losses of many examples, `[B]`: 0 or 1.

        Args:
          order: the examples' places in a random order, `[B]`.
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
          The weights of the losses of many examples, `[B]`; a mask `[B]` that is true
          at a single random example; the gradients of all variables, `[n]` for n
          entries, under these weights; and the gradients of that example's loss, `[n]`.
        """
        order = self._order()
        weights = self.weights(order)
        # A comparison instead of an index, so that XLA compiles an empty batch.
        alone = tf.equal(order, 0)
        # Traced once. The two passes run in sequence, to save memory. TensorFlow
        # rewrites them like the step: the gradient of a saturated sigmoid is rounding,
        # which depends on the order of a sum.
        gradient = self.gradient
        if not in_xla():
            gradient = op_copies.call_uninlined(gradient, optimised=True)
        many = gradient(weights)
        with tf.control_dependencies([many]):
            one = gradient(tf.cast(alone, tf.float32))
        return [weights, alone, many, one]

    def _order(self) -> tf.Tensor:
        """The places of the examples in a random order, records first, `[B]`."""
        count, present = self._engine.parts.batch_size, self._engine.parts.present
        order = chance.shuffled(tf.range(count))
        if present is None:
            return order
        # A row that fills the batch up has no gradient, and so would show nothing.
        order = tf.where(present, order, order + count)
        return tf.argsort(tf.argsort(order))

    def gradient(self, weights: tf.Tensor) -> tf.Tensor:
        """The ordinary gradient of weighted losses, `[n]`, of all variables."""
        engine = self._engine
        seed = tf.cast(weights, engine.loss.dtype)
        rules = engine.flows.without_gradient()
        pools = (op for op in engine.flows.ops if op.type == "MaxPool3D")
        with own_gradients({**rules, **dict.fromkeys(pools, _gradient_of_pool)}):
            found = gradients_at(engine.loss, engine.handles, seed)
        pairs = zip(found, engine.variables, strict=True)
        return tf.concat([_flat(g, v.shape) for g, v in pairs], axis=0)

    def empty_results(self) -> list[tf.Tensor]:
        """Stand-ins for the results of `ordinary`, in a step without a comparison."""
        count, size = self._engine.flows.batch_size or 0, 0
        if in_xla():  # XLA needs the same shapes from both branches.
            count, size = self._engine.parts.batch_size, sum(self._sizes)
        shapes = [[count], [count], [size], [size]]
        kinds = [tf.float32, tf.bool, tf.float32, tf.float32]
        return list(map(tf.zeros, shapes, kinds))

    def compare(
        self, found: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """Compares the engine's sums and norms with ordinary gradients.

        Args:
          found: the results of `ordinary`.

        Returns:
          Whether all sums and norms agree; whether the comparison was conclusive; and
          the error message for the first disagreement, None under XLA, which cannot
          print messages.
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
            places = [
                (v.name, engine.describe_uses(i))
                for i, v in enumerate(engine.variables)
            ]
            for kind in (_wrong_sum, _wrong_norm):
                messages += [kind(*place) for place in places]
            if not engine.proof.proven:
                combined = f"ExampleIsolationError: {error_of(engine.proof)}"
                messages = [combined + see("mixed-examples")] * len(messages)
            # The first disagreement. If all agree, an earlier step failed.
            first = tf.argmin(tf.cast(tf.concat([every, [False]], 0), tf.int32))
            message = tf.gather([*messages, _WRONG_TOTAL, _AGAIN], first)
        return tf.reduce_all(every), off.compared, message

    def differences(self, found: Sequence[tf.Tensor]) -> Differences:
        """The differences between the engine and two ordinary gradients.

        Args:
          found: the results of `ordinary`.
        """
        rows = self._engine.flows.batch_size
        weights, alone = (tf.ensure_shape(part, [rows]) for part in found[:2])
        many, one = found[2:]
        sums, whole = self.sums(weights, many)
        norms, groups, excess, shows = self.norms(alone, one)
        if not self._engine.proof.proven and rows != 1:
            # A single example cannot show that an op combines examples.
            shows &= self._engine.parts.batch_size > 1
        return Differences(sums, norms, groups, excess, whole & shows)

    def sums(
        self, weights: tf.Tensor, ordinary: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The differences of the engine's sums, `[V]`, and whether all were finite.

        Args:
          weights: the weights of the losses, `[B]`, each 0 or 1.
          ordinary: the ordinary gradient under these weights, `[n]`.
        """
        engine = self._engine
        sums = engine.unperturbed_sums(_FACTOR * weights)
        # A mask, because a weight of 0 does not remove an infinite or NaN norm.
        squares, terms = (
            tf.reduce_sum(tf.where(weights > 0, part, 0.0), axis=1)
            for part in self._squares_and_terms
        )
        scales, _ = self._scales(squares, terms)
        # Divided by the scales before squaring, against overflow.
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
        # If the norm of a variable is infinite, the comparison is inconclusive. A sum
        # that is NaN is wrong if the ordinary gradient is finite.
        shows = tf.math.is_finite(_length(ordinary)) & tf.math.is_finite(scales)
        off = tf.where(tf.math.is_nan(off), math.inf, off)
        return tf.where(shows, off, 0.0), tf.reduce_all(shows)

    def norms(self, alone: tf.Tensor, ordinary: tf.Tensor) -> list[tf.Tensor]:
        """The differences of the norms of a single example's gradient.

        Args:
          alone: the mask of the example, `[B]`.
          ordinary: the ordinary gradient of the example's loss, `[n]`.

        Returns:
          `norms`, `groups` and `excess` of `Differences`, and whether the gradient is
          finite, and so large that rounding is within the limit.
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
        lengths *= scales
        groups, excess = self._decisive(alone, lengths, rounded)
        groups, excess = (tf.where(every, part, 0.0) for part in (groups, excess))
        # Where rounding may exceed the limit, a wrong norm would pass: such an example,
        # beside a far larger gradient, is inconclusive.
        least = tf.gather(self._cancelled, self._columns) / self.limit
        return [short, groups, excess, every & tf.reduce_any(lengths > least)]

    @functools.cached_property
    def _squares_and_terms(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Squared norms by variable, `[V, B]`, and the summed squares of the terms.

        An example's gradient is a sum of terms, over time steps or positions.
        """
        engine = self._engine
        squares = tf.stack(engine.squares_by_variable())
        hidden = [[LOST_SQUARE * size] for size in self._sizes]
        return squares + hidden, tf.stack(engine.terms_by_variable())

    @functools.cached_property
    def _cancelled(self) -> tf.Tensor:
        """The rounding errors of terms that cancel in the gradient of the loss, `[L]`.

        Relative to the largest norm in the batch of all variables that are clipped
        together.
        """
        squares, _ = self._squares_and_terms
        together = tf.matmul(self._members, squares)
        together = tf.where(tf.math.is_finite(together), together, 0.0)
        # The maximum over no examples is minus infinity.
        largest = tf.sqrt(tf.maximum(tf.reduce_max(together, axis=1), 0.0))
        return (_COARSE_CANCELLED if self._coarse else _CANCELLED) * largest

    def _scales(self, squares, terms) -> tuple[tf.Tensor, tf.Tensor]:
        """The lengths, `[V]`, by which differences of gradients are divided.

        Args:
          squares: the summed squares of the examples' weighted norms, `[V]`.
          terms: the summed squares of the terms of the examples' gradients, `[V]`.

        Returns:
          The root of `squares`, plus the rounding error over the limit: so a difference
          by the rounding error is within the limit. And the rounding error of terms
          that cancel.
        """
        terms = tf.sqrt(terms)
        rounding = _COARSE_ROUNDING if self._coarse else _ROUNDING
        together = tf.sqrt(tf.linalg.matvec(self._members, squares))
        together = tf.gather(together, self._columns) + terms
        error = together * rounding + tf.gather(self._cancelled, self._columns)
        scales = tf.sqrt(squares) + error / self.limit + 1e-30
        return scales, terms * rounding

    def _decisive(self, alone, lengths, rounded) -> tuple[tf.Tensor, tf.Tensor]:
        """Compares the norms that decide about the clip, `[B, L]`, for an example.

        Args:
          alone: the mask of the example, `[B]`.
          lengths: the ordinary norms of the example's gradient, `[V]`.
          rounded: the rounding errors of the norms, `[V]`.

        Returns:
          `groups` and `excess` of `Differences`.
        """
        engine = self._engine
        decisive = engine.record_norms(self._assignment)
        decisive = tf.reshape(decisive, [-1, self.groups])
        norms = tf.where(alone[:, tf.newaxis], decisive, 0.0)
        norms = tf.reduce_max(norms, axis=0) + self._cancelled + 1e-30
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
        exact = ratios * norms > self._cancelled
        return groups, tf.reduce_max(tf.where(shows & exact, over, 0.0))


def error_of(proof: Proof) -> Exception:
    """The error that a failed comparison means, by the proof of the step."""
    if proof.proven:
        return GradientMismatchError(
            "A gradient differs from an ordinary backward pass."
        )
    op = proof.op
    if proof.reason == CONSTANT_BY_PLACE:
        return ExampleIsolationError(
            f"the op `{op.name}` (a {op.type}) reads a constant "
            "with a row for each place in the batch, so an example has a different "
            f"gradient alone than in the batch. {BY_ARGUMENT}"
        )
    return ExampleIsolationError(
        f"the op `{op.name}` (a {op.type}) combines the "
        "examples of a batch, or depends on their places or on the number of examples: "
        "an example has a different gradient alone than in the batch. Compute the op "
        "from each example's own rows, or in the data pipeline, before batches are "
        "drawn."
    )


def _gradient_of_pool(op: tf.Operation, at_output: tf.Tensor) -> list[tf.Tensor]:
    """The gradient of a MaxPool3D, whose output is made once more beside it.

    oneDNN gives the gradient to the first of several largest entries where the gradient
    is in the graph of the output, and to all of them where it is not.
    """
    names = ("ksize", "strides", "padding", "data_format")
    settings = {name: op.get_attr(name) for name in names}
    image = tf.identity(op.inputs[0])
    again = tf.raw_ops.MaxPool3D(input=image, **settings)
    return tf.gradients(again, image, at_output)


def _flat(gradient: Any, shape: tf.TensorShape) -> tf.Tensor:
    """A gradient as a vector in float32; zeros for None."""
    if gradient is None:
        return tf.zeros([shape.num_elements()], tf.float32)
    gradient = tf.convert_to_tensor(gradient)
    return tf.cast(tf.reshape(gradient, vector(shape.num_elements())), tf.float32)


def _length(gradient: tf.Tensor) -> tf.Tensor:
    """The norm of a vector."""
    if in_xla():  # XLA does not have EuclideanNorm on every device.
        return tf.norm(gradient)
    return tf.raw_ops.EuclideanNorm(input=gradient, axis=vector(0))


_REMEDY = (
    "Nothing was released. dpc.testing.assert_exact(model, (x, y)) compares all "
    "examples. If you registered a rule for the op (op_rule), correct the rule; if "
    "not, build the layer of other ops, and please report the model."
    + see("a-wrong-gradient")
)
_AGAIN = (
    "GradientMismatchError: an earlier step of this function failed the comparison "
    "with ordinary gradients, so every later step fails too. Correct the model, and "
    "make a new function." + see("a-wrong-gradient")
)
_WRONG_TOTAL = (
    "GradientMismatchError: the norm that decides about the clip is smaller than the "
    f"norm of the gradient that is clipped. {_REMEDY}"
)


def _wrong_sum(name: str, where: str) -> str:
    return (
        f"GradientMismatchError: the clipped sum of {name!r} ({where}) differs from "
        f"the sum of an ordinary backward pass. {_REMEDY}"
    )


def _wrong_norm(name: str, where: str) -> str:
    return (
        f"GradientMismatchError: the norm of an example's gradient of {name!r} "
        f"({where}) is smaller than in an ordinary backward pass. {_REMEDY}"
    )
