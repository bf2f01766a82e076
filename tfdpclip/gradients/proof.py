"""Proves from the graph of a loss that the examples of every batch stay apart.

Comes in: the losses `[B]` and their `Dataflow`. Goes out: a `Proof`.

The theorem. Let every op between the data and the losses keep the examples apart: row i
of an output depends on row i of the inputs and on public tensors alone. Let the
function that TensorFlow registered as the op's gradient keep them apart, too. Then the
gradient of `sum_i w_i loss_i` at every tensor in between keeps the examples apart, and
its row i is w_i times the gradient of loss_i: the chain rule multiplies matrices that
are block diagonal in the examples. `tf.stop_gradient` is the identity forward and zero
backward.

The invariant. A proof holds for every batch, whatever the values of the data are, and
takes nothing for granted but the table of ops: the forward lemma of an op type is its
entry in `op_flows.py`, `layouts.py`, `contractions.py`, `mixing.py`, `lists.py` or
`sparse.py`; the backward lemma is its name in `ops.GRADIENTS_APART`. Both are tried by
tests/gradients/lemmas_test.py. Gradient functions of `tf.custom_gradient` have no
entry: `gradient_flows.py` follows the examples through their ops.

To add an op type: an entry forward, its name in `ops.GRADIENTS_APART`, a case in
that test.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.gradients import calls, gradient_flows, ops
from tfdpclip.gradients.dataflow import Dataflow
from tfdpclip.gradients.flow import DATA, Flow
from tfdpclip.gradients.fused import read_call
from tfdpclip.gradients.known import is_pinned, pinned_to


class Verdict(enum.Enum):
    """What a graph shows of the examples of its batches."""

    PROVEN = "proven"
    MIXED = "mixed"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Proof:
    """What the graph of a loss shows of all the batches that could come.

    Attributes:
      verdict: `PROVEN`: each example's loss and gradient are its own. `MIXED`: an op
        combines the examples. `UNKNOWN`: the table of ops does not tell.
      op: the op at which the examples are combined, or of which nothing is known; None
        where the verdict is `PROVEN`.
      reason: what is not known of the op, a part of a sentence.
    """

    verdict: Verdict
    op: tf.Operation | None = None
    reason: str = ""

    @property
    def proven(self) -> bool:
        return self.verdict is Verdict.PROVEN

    def __str__(self) -> str:
        if self.op is None:
            return self.verdict.value
        return f"{self.verdict.value} at {self.op.name!r} (a {self.op.type})" + (
            f": {self.reason}" if self.reason else ""
        )


def prove(losses: tf.Tensor, flows: Dataflow) -> Proof:
    """Proves that the examples' losses `[B]`, and their gradients, stay apart.

    Args:
      losses: one loss for each example, `[B]`.
      flows: the analysis of `losses`.
    """
    flow = flows[losses]
    if flow.coupled is not None:
        return Proof(Verdict.MIXED, flow.coupled)
    for op, reason in _gaps(flows):
        return Proof(Verdict.UNKNOWN, op, reason)
    if not flow.leads or flow.rows != 1 or flow.minor:
        return Proof(Verdict.UNKNOWN, losses.op, "which entry is of which example")
    return Proof(Verdict.PROVEN)


def gaps(losses: tf.Tensor, flows: Dataflow) -> list[tuple[tf.Operation, str]]:
    """All the ops that keep the losses from being proven, for tables and tests."""
    found = list(_gaps(flows))
    flow = flows[losses]
    if flow.coupled is None and (not flow.leads or flow.rows != 1 or flow.minor):
        found.append((losses.op, "which entry is of which example"))
    return found


def _gaps(flows: Dataflow) -> Iterator[tuple[tf.Operation, str]]:
    """The ops of which the table does not tell, inputs first, with the reason."""
    used = _used(flows)
    for op in flows.ops:
        outputs = [t for t in op.outputs if t.ref() in used]
        found = [flows[t] for t in outputs]
        reason = next((r for r in map(_hidden, found) if r), None)
        if reason is not None:
            yield op, reason
        elif any(flow.kind == DATA and flow.trained for flow in found):
            yield from _gaps_backward(op, flows)
        if op in flows.inner:
            for inner in flows.inner[op]:
                yield from _gaps(inner)


def _used(flows: Dataflow) -> set:
    """The references of the tensors whose values the outputs depend on."""
    found, stack = set(), list(flows.outputs)
    while stack:
        tensor = stack.pop()
        if tensor.ref() in found:
            continue
        found.add(tensor.ref())
        if is_pinned(tensor.op):
            continue
        limit = pinned_to(tensor.op)
        stack += tensor.op.inputs if limit is None else [limit]
    return found


def _hidden(flow: Flow) -> str | None:
    """What a flow does not tell of the examples; None if it tells all."""
    if flow.kind != DATA or flow.made and flow.axes == ():
        return None
    if flow.made and flow.axes and not flow.trained:
        return None  # It is of no example; what it meets is asked in its turn.
    if flow.unknown:
        return "what it does with the examples"
    if flow.axes and flow.rows is None and flow.entries is None and not flow.even:
        return "how many rows of its output belong to an example"
    return None


def _ends_gradients(op: tf.Operation) -> bool:
    """Whether TensorFlow passes no gradient through the op: it has none, or raises."""
    if op.type in ops.FIRST_ARGUMENT or calls.gradient_function(op) is not None:
        return False
    try:
        return _tf_private.registered_gradient(op) is None
    except LookupError:
        return True


def _gaps_backward(op, flows: Dataflow) -> Iterator[tuple[tf.Operation, str]]:
    """Whether the gradient of an op is known to keep the examples apart."""
    if not op.inputs or _ends_gradients(op):
        return  # Where a function begins; or TensorFlow hands on nothing, or raises.
    if op in flows.inner or op.type in ops.GRADIENTS_APART:
        if (
            op.type not in ops.FIRST_ARGUMENT
            and calls.gradient_function(op) is not None
        ):
            yield from gradient_flows.gaps_of(op, flows)
        return
    if op.type in ops.FUNCTION_CALLS and read_call(op) is not None:
        return
    yield op, "whether its gradient keeps the examples apart"
