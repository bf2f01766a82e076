"""From the ops where variables meet the batch to the gradients of every example."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from tfdpclip.gradients.forms.base_form import Budget, Form
from tfdpclip.gradients.graph import op_copies
from tfdpclip.gradients.graph.walks import ancestors
from tfdpclip.gradients.proof import fallback
from tfdpclip.gradients.proof.isolation_proof import Proof
from tfdpclip.gradients.proof.single_examples import ExamplesAlone
from tfdpclip.gradients.rules import while_loops
from tfdpclip.gradients.rules.combine import VariableGradient
from tfdpclip.gradients.rules.context import Context
from tfdpclip.gradients.rules.rule_table import build_form, has_rule
from tfdpclip.gradients.rules.uses import Use, find_uses


@dataclasses.dataclass
class FoundGradients:
    """The gradients of all variables: from forms, or from the fallback.

    Variables are numbered in their given order.

    Attributes:
      connected: whether each variable can receive a gradient at all.
      meetings: for each op at which variables meet the batch, the gradient of the
        summed loss at its first output; None where the loss does not depend on it.
      by_form: the gradients that forms give, by the number of the variable.
      slow: the gradients of the connected variables without forms; None if all have
        forms.
      slow_variables: the numbers of the variables of `slow`, in the order of `slow`.
      slow_uses: the uses of the variables of `slow` in the graph.
      alone: makes the gradients where the graph does not prove that examples stay
        apart; None where the graph does.
      backward: the ops of an ordinary backward pass; `alone` runs copies of them.
      seed: the gradient at the losses, with which the backward pass begins.
    """

    connected: list[bool]
    meetings: Mapping[tf.Operation, tf.Tensor | None]
    by_form: dict[int, VariableGradient] = dataclasses.field(default_factory=dict)
    slow: fallback.SlowGradients | None = None
    slow_variables: list[int] = dataclasses.field(default_factory=list)
    slow_uses: list[Use] = dataclasses.field(default_factory=list)
    alone: ExamplesAlone | None = None
    backward: Sequence[tf.Operation] = ()
    seed: tf.Tensor | None = None

    def ancestor_ops(self, loss: tf.Tensor) -> list[tf.Operation]:
        """The ops of the loss, and the ops of its gradients at all meetings."""
        gradients = self.meetings.values()
        known = [tf.convert_to_tensor(g) for g in gradients if g is not None]
        return [*ancestors([loss, *known]), *self.backward]

    @property
    def order(self) -> list[int]:
        """The connected variables: first those with forms, then those of `slow`."""
        return [*self.by_form, *self.slow_variables]


def find_gradients(
    loss: tf.Tensor,
    variables: Sequence[tf.Variable],
    handles: Sequence[tf.Tensor],
    context: Context,
    budget: Budget,
) -> FoundGradients:
    """Finds the per-example gradients of all variables, in one backward pass.

    For example, x is `[B, 3]` and the losses `[B]` are

        h = tf.tanh(x @ w + b)             # w [3, 4], b [4]
        logits = h @ u                     # u [4, 2]
        tf.reduce_sum(logits**2, axis=1) + tf.map_fn(lambda r: f(r, v), x)

    1. Uses: w is input 1 of a MatMul of `[B, 3]`, b of an AddV2 of `[B, 4]`, u of a
       MatMul of `[B, 4]`. v enters a While op. If all ops that v meets in the body have
       a rule and can be recorded, the uses of v are the recorded steps; here let `f`
       sort v, which no rule covers.
    2. Meetings: the two MatMuls and the AddV2, with an output each: `[B, 4]` after w,
       `[B, 4]` after b, `[B, 2]` after u. v has none.
    3. A backward pass of the summed losses gives dz, the gradient at these outputs, of
       the same shapes. Row i of dz is of loss i alone.
    4. Forms: for w, the rule of MatMul makes an `Outer` of the input x, as `[B, 1, 3]`,
       and of dz, as `[B, 1, 4]`; for u, an `Outer` of h and the dz after u. For b, the
       rule of AddV2 makes an `Explicit` of dz, `[B, 4]`.
    5. Each of w, b and u is a `VariableGradient` of its forms. Here each has a single
       form; a kernel that is used twice has two, whose gradients are added up.
    6. v goes to the fallback, and a warning says so: a Jacobian of the losses, `[B]`.

    Args:
      loss: the losses, `[B]`.
      variables: the variables.
      handles: their handles in the graph of the losses.
      context: the analysis of the losses, and B.
      budget: how much memory the gradients may take.
    """
    in_graph = [
        find_uses(handle, v.shape, context.flows)
        for handle, v in zip(handles, variables, strict=True)
    ]
    expanded, stand_ins = while_loops.expand(in_graph, context.flows)
    # A variable with a use without a rule takes the fallback for all of its uses.
    ruled = [all(has_rule(use) for use in uses) for uses in expanded]
    seed = tf.identity(tf.ones_like(loss))
    meetings = _meetings(itertools.compress(expanded, ruled), stand_ins, loss, seed)
    # A use that the loss does not depend on gives no gradient.
    reached = [
        [use for use in uses if meetings[use.op] is not None] if is_ruled else uses
        for uses, is_ruled in zip(expanded, ruled, strict=True)
    ]
    found = FoundGradients([bool(uses) for uses in reached], meetings, seed=seed)
    forms: dict[tuple[tf.Operation, int], Form | None] = {}
    reasons, coarse = [], False
    for i, uses in enumerate(reached):
        if not uses:
            continue
        built = _forms(uses, meetings, forms, context) if ruled[i] else [None]
        whole = [form for form in built if form is not None]
        if len(whole) == len(built):
            gradient = VariableGradient(variables[i], handles[i], uses, whole)
            found.by_form[i] = gradient
            continue
        found.slow_variables.append(i)
        found.slow_uses += in_graph[i]
        reasons.append(_reason(uses, built if ruled[i] else None))
        coarse = coarse or any(map(_is_coarse, uses))
    if found.slow_variables:
        slow = [variables[i] for i in found.slow_variables]
        fallback.warn(slow, reasons)
        linear = not any(map(op_copies.has_own_gradient, context.flows.ops))
        jacobian = fallback.Jacobian(
            *(loss, slow, [handles[i] for i in found.slow_variables]),
            linear=linear and not coarse,
        )
        found.slow = fallback.SlowGradients(jacobian, slow, context.batch_size, budget)
    return found


def one_by_one(
    loss: tf.Tensor,
    variables: Sequence[tf.Variable],
    handles: Sequence[tf.Tensor],
    context: Context,
    budget: Budget,
    proof: Proof,
) -> FoundGradients:
    """The gradients of all variables, each example's made from its own data alone.

    Args:
      loss: the losses, `[B]`.
      variables: the variables.
      handles: their handles in the graph of the losses.
      context: the analysis of the losses, and B.
      budget: how much memory the gradients may take.
      proof: the proof that the examples of the losses stay apart, as far as it goes.
    """
    # This graph is dropped; it shows which variables have a gradient, and by which ops.
    with op_copies.scratch_graph() as graph:
        ordinary = tf.gradients(loss, list(handles))
    connected = [g is not None for g in ordinary]
    found = FoundGradients(connected, {}, backward=graph.get_operations())
    found.slow_variables = [i for i, known in enumerate(connected) if known]
    slow = [variables[i] for i in found.slow_variables]
    alone = ExamplesAlone(
        *(loss, slow, [handles[i] for i in found.slow_variables]),
        *(context.flows, proof),
    )
    found.alone = alone
    found.slow = fallback.SlowGradients(alone, slow, context.batch_size, budget)
    return found


def _meetings(
    uses_by_variable: Iterable[list[Use]],
    stand_ins: Mapping[tf.Operation, tf.Tensor],
    loss: tf.Tensor,
    seed: tf.Tensor,
) -> dict[tf.Operation, tf.Tensor | None]:
    """The gradients at the ops of all uses, from one backward pass.

    Args:
      uses_by_variable: the uses of each variable.
      stand_ins: for ops on all steps of a loop, the tensors in the place of outputs.
      loss: the losses, `[B]`.
      seed: the gradient at the losses.
    """
    uses = itertools.chain.from_iterable(uses_by_variable)
    outputs = {use.op: stand_ins.get(use.op, use.output) for use in uses}
    gradients = tf.gradients(loss, list(outputs.values()), seed) if outputs else []
    return dict(zip(outputs, gradients, strict=True))


def _forms(uses, meetings, known, context) -> list[Form | None]:
    """A form for each use, None where its rule does not apply; notes them in `known`.

    Variables that form an input of an op together, as when they are concatenated first,
    share the form of that input.
    """
    for use in uses:
        key = (use.op, use.index)
        if key not in known:
            known[key] = build_form(use, meetings[use.op], context)
    return [known[use.op, use.index] for use in uses]


def _is_coarse(use: Use) -> bool:
    """Whether the op computes in a type below float32."""
    return any(
        t.dtype.is_floating and t.dtype.size < 4
        for t in (*use.op.inputs, *use.op.outputs)
    )


def _reason(uses: Sequence[Use], forms: Sequence[Form | None] | None) -> str:
    """Why a variable takes the fallback."""
    for i, use in enumerate(uses):
        if not has_rule(use) or (forms is not None and forms[i] is None):
            return f"used by {use.op.name!r}, a {use.op.type}"
    return "used by an op without a rule"
