"""A rule per TensorFlow op: from (input, gradient at the output) to a `Form`.

A rule `rule(use, dz, shape, context)` is given a use of a parameter, the gradient of
the summed loss at the op's output in float32 at least, the parameter's static shape and
the `Context`. It returns a form, or None where it does not apply; the engine then falls
back to a Jacobian for that variable. For ops with no better form than a gradient for
each row, `op_rule` is shorter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._arguments import shown
from tfdpclip._docs import TracedError
from tfdpclip._registered import REGISTERED
from tfdpclip.gradients.forms.base_form import Explicit, Form, first_rows, sum_squares
from tfdpclip.gradients.rules import contraction_rules, op_rules
from tfdpclip.gradients.rules.context import (
    Context,
    by_example,
    in_float,
)
from tfdpclip.gradients.rules.uses import Use

#: The rules of the library, by type of op.
RULES: dict[str, Callable] = {**op_rules.RULES, **contraction_rules.RULES}


def _rule_of(kind: str) -> Callable | None:
    """The rule for a type of op, of the library or of a user."""
    return RULES.get(kind) or REGISTERED.op_rules.get(kind)


class _HasRowsOfItsOwn(Exception):
    """A parameter that has a part of its own for each row of the output."""


@dataclasses.dataclass(frozen=True)
class OpUse:
    """The arguments of a rule made with `op_rule`.

    Attributes:
      op: the op at which the variable meets the batch.
      index: the number of the op's input that comes from the variable.
      gradient: the gradient of the summed losses at the op's output, of its shape, in
        float32 at least.
      shape: the shape of the input that comes from the variable.
    """

    op: tf.Operation
    index: int
    gradient: tf.Tensor
    shape: tuple[int, ...]

    def input(self, number: int) -> tf.Tensor:
        """An input of the op, in float32 at least if it is no integer."""
        tensor = self.op.inputs[number]
        return in_float(tensor) if tensor.dtype.is_floating else tensor

    def summed(self, values: tf.Tensor) -> tf.Tensor:
        """`values`, of the output's shape, summed over the broadcast axes.

        Returns:
          `[N, *shape]`. For an input that has a row for each row of the output, the
          rule does not apply, and the variable takes the Jacobian.
        """
        if len(self.shape) >= values.shape.rank and self.shape[0] != 1:
            raise _HasRowsOfItsOwn
        rank, missing = values.shape.rank, values.shape.rank - len(self.shape)
        padded = [1] * missing + list(self.shape)
        axes = [i for i in range(1, rank) if padded[i] == 1]
        if axes:
            values = tf.reduce_sum(values, axis=axes)
        return tf.reshape(values, [-1, *self.shape])


def op_rule(*kinds: str) -> Callable[[Callable], Callable]:
    """Teaches the engine the per-example gradient of an op: a decorator.

    It is for ops without a rule, which take a vectorised Jacobian, with a warning. The
    rule is tested like every rule: the first step of every trace compares the norms and
    sums with ordinary backward passes of the step's own batch, and raises
    `GradientMismatchError` if the rule is wrong. Register the rule when your module is
    imported, before anything is traced.

    Args:
      *kinds: types of TensorFlow's ops, such as ``"Igamma"``: ``tensor.op.type``.

    Returns:
      A decorator of ``rule(use)``, which is given an `OpUse` and returns the gradient
      of the summed losses for each row of the op's output separately, `[N, *shape]`
      with the shape of the input that comes from the variable; or None where the rule
      does not apply.

    Raises:
      ValueError: if a type of op has a rule already, or is unknown to TensorFlow.

    >>> import tensorflow as tf
    >>> @op_rule("Igammac")
    ... def upper_incomplete_gamma(use):
    ...     if use.index != 1:  # TensorFlow has no gradient by the other input
    ...         return None
    ...     a, x = use.input(0), use.input(1)
    ...     density = tf.exp((a - 1) * tf.math.log(x) - x - tf.math.lgamma(a))
    ...     return use.summed(-use.gradient * density)
    """
    unknown = [
        kind
        for kind in kinds
        if not isinstance(kind, str) or _tf_private.definition_of(kind) is None
    ]
    if unknown or not kinds:
        raise ValueError(
            "kinds must be types of TensorFlow's ops, such as 'Igamma' "
            f"(tensor.op.type), got {', '.join(map(shown, unknown)) or 'none'}."
        )

    def register(rule: Callable) -> Callable:
        def row_by_row(use, dz, shape, context):
            if not context.flows[use.output].leads:
                return None
            try:
                rows = rule(OpUse(use.op, use.index, dz, tuple(shape)))
            except _HasRowsOfItsOwn:
                return None
            if rows is None:
                return None
            rows = in_float(rows)
            expected = [use.output.shape[0], *shape]
            if not rows.shape.is_compatible_with(expected):
                raise TracedError(
                    f"The rule {rule.__name__!r} for {use.op.type} must return "
                    f"[rows, *shape], here {expected}, got {rows.shape.as_list()}. "
                    "Sum over the broadcast axes: return use.summed(values)."
                )
            by = by_example(rows, context, use.output)

            def parts(count):
                return sum_squares(first_rows(by, count))

            return Explicit(tf.reduce_sum(by, axis=1), shape, parts)

        for kind in kinds:
            if _rule_of(kind) is not None:
                raise ValueError(f"{kind} has a rule already.")
            REGISTERED.op_rules[kind] = row_by_row
        return rule

    return register


def has_rule(use: Use) -> bool:
    """Whether some rule may cover the use. No rule takes complex numbers."""
    if any(t.dtype.is_complex for t in (*use.op.inputs, *use.op.outputs)):
        return False
    return _rule_of(use.op.type) is not None


def build_form(use: Use, dz: tf.Tensor | None, context: Context) -> Form | None:
    """The form of a use, or None if no rule covers it.

    Args:
      use: the use of the parameter.
      dz: the gradient of the summed loss at the op's first output.
      context: the batch size and the analysis.
    """
    shape = _param_shape(use)
    if shape is None:
        return None
    rule = _rule_of(use.op.type)
    if rule is None or dz is None or use.output.shape.rank is None:
        return None
    return rule(use, in_float(dz), shape, context)


def _param_shape(use: Use) -> list[int] | None:
    if use.param.dtype == tf.resource:
        return list(use.variable_shape)
    shape = use.param.shape
    if shape.rank is None or None in shape.as_list():
        return None
    return shape.as_list()
