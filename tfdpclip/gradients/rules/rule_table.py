"""A rule per TensorFlow op: from (input, gradient at the output) to a `Form`.

A rule is given a use of a parameter, the gradient of the summed loss at the op's
output, and the context (batch size, analysis). It returns a form, or None where it does
not apply; the engine then falls back to a Jacobian for that variable.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._arguments import shown
from tfdpclip._docs import TracedError, see
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.forms.base_form import (
    Explicit,
    Form,
    first_rows,
    merge_steps,
    rows_per_example,
    sum_squares,
)
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.rules.uses import Use


@dataclasses.dataclass
class Context:
    """The analysis, and results that rules share.

    Attributes:
      flows: the analysis of the losses.
      batch_size: B, a scalar int32 tensor.
      claims: assumptions of rules about an op, tested on the first step: functions that
        build a boolean scalar, and the error if it is False.
      shared: results that a rule computes once for several parameters of an op.
    """

    flows: Dataflow
    batch_size: tf.Tensor
    claims: list[tuple[Callable[[], tf.Tensor], str]] = dataclasses.field(
        default_factory=list
    )
    shared: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class CallRule:
    """A rule for calls of a kind of function (a fused layer, say).

    Attributes:
      applies: `applies(use)`, whether the use is a call of this kind.
      outputs: the numbers of the call's outputs at which the rule needs gradients, for
        a use.
      build: `build(use, gradients at the outputs, shape, context)` -> a form or None.
      pull_back: `pull_back(op, gradients at the outputs, context)` -> the gradients at
        the op's inputs, None at its weights; the call is then not differentiated again.
      prepare: `prepare(op)`, before any gradients are taken.
    """

    applies: Callable[[Use], bool]
    outputs: Callable[[Use], list[int]]
    build: Callable
    pull_back: Callable
    prepare: Callable[[tf.Operation], None]


_CALL_RULES: list[CallRule] = []
_RULES: dict[str, Callable] = {}


def rule_for(*kinds: str) -> Callable[[Callable], Callable]:
    """Makes a function the rule for some types of op: a decorator.

    `rule(use, dz, shape, context)` is given the use, the gradient of the summed loss at
    the op's output in float32 at least, the parameter's static shape and the `Context`,
    and returns a `Form`, or None where it does not apply. For ops with no better form
    than a gradient for each row, `op_rule` is shorter.
    """

    def register(rule: Callable) -> Callable:
        for kind in kinds:
            if kind in _RULES:
                raise ValueError(f"{kind} has a rule already.")
            _RULES[kind] = rule
        return rule

    return register


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
            if not batch_first(use.output, context) or not use.output.shape.rank:
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

        rule_for(*kinds)(row_by_row)
        return rule

    return register


def register_call_rule(rule: CallRule) -> None:
    """Adds a rule for function calls; rules that were added earlier are asked first."""
    _CALL_RULES.append(rule)


def _call_rule(use: Use) -> CallRule | None:
    if use.op.type not in ops.FUNCTION_CALLS:
        return None
    return next((rule for rule in _CALL_RULES if rule.applies(use)), None)


def pull_back_of(use: Use) -> Callable | None:
    """The rule's function from gradients at the outputs to gradients at the inputs.

    Returns:
      `pull_back(gradients, context)`; see `CallRule`. None if there is no such rule.
    """
    rule = _call_rule(use)
    return None if rule is None else functools.partial(rule.pull_back, use.op)


def prepare(use: Use) -> None:
    """Readies the use's op for a rule, before gradients are taken."""
    rule = _call_rule(use)
    if rule is not None:
        rule.prepare(use.op)


def has_rule(use: Use) -> bool:
    """Whether some rule may cover the use. No rule takes complex numbers."""
    if any(t.dtype.is_complex for t in (*use.op.inputs, *use.op.outputs)):
        return False
    return use.op.type in _RULES or _call_rule(use) is not None


def has_op_rule(use: Use) -> bool:
    """Whether the rule for a type of op may cover the use."""
    return use.op.type in _RULES


def outputs_of(use: Use) -> list[int]:
    """The numbers of the op's outputs at which the use's rule needs gradients."""
    rule = _call_rule(use)
    return [0] if rule is None else rule.outputs(use)


def build_form(use: Use, dz: list[tf.Tensor | None], context: Context) -> Form | None:
    """The form of a use, or None if no rule covers it.

    Args:
      use: the use of the parameter.
      dz: the gradients of the summed loss at the outputs named by `outputs_of`.
      context: the batch size and the analysis.
    """
    shape = _param_shape(use)
    if shape is None:
        return None
    call_rule = _call_rule(use)
    if call_rule is not None:
        return call_rule.build(use, dz, shape, context)
    rule = _RULES.get(use.op.type)
    if rule is None or dz[0] is None or use.output.shape.rank is None:
        return None
    return rule(use, in_float(dz[0]), shape, context)


def in_float(tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` in float32 at least."""
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype in (tf.float32, tf.float64):
        return tensor
    return tf.cast(tensor, tf.float32)


def _param_shape(use: Use) -> list[int] | None:
    if use.param.dtype == tf.resource:
        return list(use.variable_shape)
    shape = use.param.shape
    if shape.rank is None or None in shape.as_list():
        return None
    return shape.as_list()


def by_example(tensor: tf.Tensor, context: Context, like: tf.Tensor) -> tf.Tensor:
    """`[N, ...]` as `[B, rows, ...]`; the analysis of `like` has the number of rows.

    Args:
      tensor: has the rows of `like` on axis 0.
      context: the analysis and B.
      like: a tensor of the analysed graph.
    """
    flow = context.flows[like]
    rest = tensor.shape[1:].as_list()
    if None in rest:
        dynamic = tf.shape(tensor)
        rest = [dynamic[i + 1] if d is None else d for i, d in enumerate(rest)]
    if flow.leads and flow.minor:
        split = tf.reshape(tensor, [flow.repeats, context.batch_size, -1])
        split = tf.transpose(split, [1, 0, 2])
        return tf.reshape(split, [context.batch_size, flow.rows, *rest])
    if flow.leads and flow.rows == 1:
        return tensor[:, tf.newaxis]
    rows = flow.rows if flow.leads and flow.rows else None
    if rows is None:
        rows = rows_per_example(tensor, context.batch_size)
        with tf.control_dependencies(_whole_examples(tensor, rows, context, like)):
            tensor = tf.identity(tensor)
    return tf.reshape(tensor, [context.batch_size, rows, *rest])


def in_steps(tensor, context: Context, like, width: int, axes: int) -> tf.Tensor:
    """`[N, ..., *tail]` as `[B, T, width]`, with a tail of `axes` axes."""
    flow = context.flows[like]
    if flow.leads and flow.rows and not flow.minor:
        return merge_steps(tensor, context.batch_size, width, axes, flow.rows)
    tensor = by_example(tensor, context, like)
    return merge_steps(tensor, context.batch_size, width, axes, 1)


def _whole_examples(tensor, rows, context, like) -> list[tf.Operation]:
    """An assertion (which XLA drops) that axis 0 divides into examples."""
    assertion = tf.debugging.Assert(
        tf.equal(rows * context.batch_size, tf.shape(tensor)[0]),
        [
            f"ExampleIsolationError: the rows of {like.name!r} cannot be told apart by "
            "example: their number is no multiple of the number of losses. Keep the "
            "batch on axis 0, and give a loss for each example."
            + see("mixed-examples"),
        ],
    )
    return [] if assertion is None else [assertion]


def batch_first(tensor: tf.Tensor, context: Context) -> bool:
    """Whether axis 0 counts examples, if known; the first step's comparison tests.

    The entries of a sparse batch are on no axis of examples: the examples of two
    batches differ in how many of the entries are theirs.
    """
    axes = context.flows[tensor].axes
    if context.flows[tensor].entry is not None:
        return False
    if axes is None and context.flows.batch_size and tensor.shape.rank:
        length = tensor.shape[0]
        return length is None or length % context.flows.batch_size == 0
    return axes is None or axes == (0,)


def rows_of(context: Context, like: tf.Tensor) -> int | None:
    flow = context.flows[like]
    return flow.rows if flow.leads else None
