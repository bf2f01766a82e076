"""Compares an engine's first step with ordinary gradients (`kernel/certificate.py`).

The isolation of the examples is proven from the graph (`isolation_proof.py`) and not
tested here. The proof does not show that a rule, an op's converter or a layer of a new
Keras version gives the right gradient. So the first step of a trace takes two ordinary
gradients of its own losses, and the certificate decides. After an inconclusive batch
(an empty draw, a NaN, gradients of 0; without a proof, a single example), the next step
compares again.

Gradients made one example at a time (`single_examples.py`) are compared as well. They
are private for all behaviours of the ops; but if an op combines the examples of a
batch, they differ from the gradients that the model's author meant.

The ordinary gradients come first and need the forward pass alone; the comparison comes
last and needs the tensors that the sums are computed from. So neither extends the life
of a tensor in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._constants import vector
from tfdpclip._devices import in_xla
from tfdpclip._docs import see
from tfdpclip.gradients.errors import ExampleIsolationError, GradientMismatchError
from tfdpclip.gradients.forms.records import LOST_SQUARE
from tfdpclip.gradients.graph.backward import own_gradients
from tfdpclip.gradients.graph.known import BY_ARGUMENT, CONSTANT_BY_PLACE
from tfdpclip.gradients.proof.isolation_proof import Proof
from tfdpclip.gradients.uninlined import call_uninlined
from tfdpclip.kernel import certificate


class Comparison:
    """The comparison of an engine with ordinary gradients.

    Args:
      engine: a complete `PerExampleGradients`.
      assignment: the group of each variable, if the clip rule has groups.
    """

    def __init__(self, engine: Any, assignment: Sequence[int] | None = None):
        self._engine = engine
        self._assignment = assignment
        columns = list(assignment or [0] * len(engine.variables))
        # The variables that are clipped together, `[L, V]`.
        self._members = np.eye(max(columns) + 1, dtype=np.float32)[columns].T
        coarse = any(
            t.dtype.is_floating and t.dtype.size < 4
            for op in engine.flows.ops
            for t in op.outputs
        )
        exact = certificate.FINE if engine.proof.proven else certificate.ALONE
        self.tolerance = certificate.COARSE if coarse else exact
        self._sizes = [v.shape.num_elements() for v in engine.variables]

    @property
    def groups(self) -> int:
        """The number of groups of variables that are clipped apart."""
        return len(self._members)

    def ordinary(self) -> list[tf.Tensor]:
        """Two ordinary gradients of the step's own losses.

        Returns:
          The seeds of both backward passes, `[B]` each, and the gradients of all
          variables, `[n]` for n entries, from each pass.
        """
        parts = self._engine.parts
        seeds = certificate.draw_seeds(parts.batch_size, parts.present, self.tolerance)
        # Traced once. The two passes run in sequence, to save memory. TensorFlow
        # rewrites them like the step: the gradient of a saturated sigmoid is rounding,
        # which depends on the order of a sum.
        gradient = self.gradient
        if not in_xla():
            gradient = call_uninlined(gradient)
        many = gradient(seeds[0])
        with tf.control_dependencies([many]):
            return [*seeds, many, gradient(seeds[1])]

    def gradient(self, seed: tf.Tensor) -> tf.Tensor:
        """The ordinary gradient of weighted losses, `[n]`, of all variables."""
        engine = self._engine
        rules = engine.flows.without_gradient()
        pools = (op for op in engine.flows.ops if op.type == "MaxPool3D")
        with own_gradients({**rules, **dict.fromkeys(pools, _gradient_of_pool)}):
            gradients = tf.gradients(
                engine.loss, engine.handles, tf.cast(seed, engine.loss.dtype)
            )
        pairs = zip(gradients, self._sizes, strict=True)
        return tf.concat([_flat(*pair) for pair in pairs], axis=0)

    def empty_results(self) -> list[tf.Tensor]:
        """Stand-ins for the results of `ordinary`, in a step without a comparison."""
        count, size = self._engine.flows.batch_size or 0, 0
        if in_xla():  # XLA needs the same shapes from both branches.
            count, size = self._engine.parts.batch_size, sum(self._sizes)
        return [tf.zeros([length]) for length in (count, count, size, size)]

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
        engine = self._engine
        rows = engine.flows.batch_size
        many, alone = (tf.ensure_shape(part, [rows]) for part in found[:2])
        sums, whole = self.sums(many + alone, found[2] + found[3])
        norms, shows = self.norms(alone, found[3])
        if not engine.proof.proven and rows != 1:
            # A single example cannot show that an op combines examples.
            shows &= engine.parts.batch_size > 1
        within = [sums <= self.tolerance.sums, norms <= self.tolerance.norms]
        agree = tf.concat(within, axis=0)
        message = None if in_xla() else self._message(agree)
        return tf.reduce_all(agree), whole & shows, message

    def sums(
        self, weights: tf.Tensor, ordinary: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The errors of the engine's weighted sums; see `certificate.sum_errors`."""
        sums = self._engine.unperturbed_sums(weights)
        return certificate.sum_errors(
            [_flat(*pair) for pair in zip(sums, self._sizes, strict=True)],
            tf.split(ordinary, self._sizes),
            weights,
            self._norms,
            self.tolerance,
        )

    def norms(
        self, alone: tf.Tensor, ordinary: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The errors of the engine's norms; see `certificate.norm_errors`."""
        engine = self._engine
        gradient = clipped = tf.split(ordinary, self._sizes)
        if engine.perturbation is not None:
            # The perturbed gradient is clipped.
            sums = engine.perturbed_sums(alone)
            clipped = [_flat(*pair) for pair in zip(sums, self._sizes, strict=True)]
        return certificate.norm_errors(
            *(gradient, clipped, self._members, alone, self._norms, self.tolerance)
        )

    @functools.cached_property
    def _norms(self) -> certificate.Norms:
        engine = self._engine
        # What underflows in a square is no error of the engine.
        hidden = [[LOST_SQUARE * size] for size in self._sizes]
        decisive = engine.record_norms(self._assignment)
        return certificate.Norms(
            tf.stack(engine.squares_by_variable()) + hidden,
            tf.stack(engine.terms_by_variable()),
            tf.reshape(decisive, [-1, self.groups]),
        )

    def _message(self, agree: tf.Tensor) -> tf.Tensor:
        """The message for the first comparison that failed."""
        engine = self._engine
        uses = [
            f"{v.name!r} ({engine.describe_uses(i)})"
            for i, v in enumerate(engine.variables)
        ]
        messages = [_WRONG_SUM.format(use=use) for use in uses]
        messages += [_WRONG_NORM.format(use=use) for use in uses]
        messages += [_WRONG_TOTAL] * self.groups
        if not engine.proof.proven:
            combined = f"ExampleIsolationError: {error_of(engine.proof)}"
            messages = [combined + see("mixed-examples")] * len(messages)
        # If all agree, an earlier step failed.
        first = tf.argmin(tf.cast(tf.concat([agree, [False]], 0), tf.int32))
        return tf.gather([*messages, _AGAIN], first)


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


def _flat(gradient: Any, size: int) -> tf.Tensor:
    """A gradient as a vector in float32; zeros for None."""
    if gradient is None:
        return tf.zeros([size], tf.float32)
    gradient = tf.convert_to_tensor(gradient)
    return tf.cast(tf.reshape(gradient, vector(size)), tf.float32)


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
_WRONG_SUM = (
    "GradientMismatchError: the clipped sum of {use} differs from the sum of an "
    f"ordinary backward pass. {_REMEDY}"
)
_WRONG_NORM = (
    "GradientMismatchError: the norm of an example's gradient of {use} is smaller than "
    f"in an ordinary backward pass. {_REMEDY}"
)
