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
from collections.abc import Iterable, Iterator

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.gradients.flows import gradient_flows, op_flows
from tfdpclip.gradients.flows.dataflow import Dataflow, ancestors
from tfdpclip.gradients.flows.flow import DATA
from tfdpclip.gradients.graph import calls, known, ops
from tfdpclip.gradients.graph.fused import read_call
from tfdpclip.gradients.loss import size_uses


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
    for op, reason in _all_gaps(losses, flows):
        return Proof(Verdict.UNKNOWN, op, reason)
    return Proof(Verdict.PROVEN)


def gaps(losses: tf.Tensor, flows: Dataflow) -> list[tuple[tf.Operation, str]]:
    """All the ops that keep the losses from being proven, for tables and tests."""
    return [] if flows[losses].coupled is not None else list(_all_gaps(losses, flows))


def _all_gaps(losses, flows: Dataflow) -> Iterator[tuple[tf.Operation, str]]:
    yield from _gaps(flows)
    for source in flows.sources:
        if not flows[source].leads or flows.length is None:
            continue
        if source.shape[0] != flows.length:
            yield source.op, "how many examples the batch has"
    flow = flows[losses]
    if not flow.leads or flow.rows != 1 or flow.minor:
        yield losses.op, "which entry is of which example"
    elif flow.placed:
        yield losses.op, _PLACED


def _gaps(
    flows: Dataflow, outputs: list[tf.Tensor] | None = None
) -> Iterator[tuple[tf.Operation, str]]:
    """The ops of which the table does not tell, inputs first, with the reason.

    Args:
      flows: the analysis of a graph.
      outputs: the tensors of the graph that matter; by default all of its outputs.
    """
    used = _used(flows.outputs if outputs is None else outputs)
    for op in flows.ops:
        outputs = [t for t in op.outputs if t.ref() in used]
        found = [flows[t] for t in outputs]
        reason = next((r for t in outputs if (r := _hidden(t, flows))), None)
        if reason is not None:
            yield op, reason
        elif any(flow.kind == DATA and flow.trained for flow in found):
            yield from _gaps_backward(op, flows)
        numbers = {t.value_index for t in outputs}
        for inner in flows.inner.get(op, ()):
            yield from _gaps(inner, _needed(op, inner, numbers))


def _used(outputs: Iterable[tf.Tensor]) -> set:
    """The references of the tensors whose values some outputs depend on."""
    found, stack = set(), list(outputs)
    while stack:
        tensor = stack.pop()
        if tensor.ref() in found:
            continue
        found.add(tensor.ref())
        if known.is_pinned(tensor.op) or tensor.op.type in ops.ITERATORS:
            continue  # Whatever goes in: a constant; or an element, which is the data.
        limit = known.pinned_to(tensor.op)
        stack += tensor.op.inputs if limit is None else [limit]
    return found


def _needed(op: tf.Operation, inner: Dataflow, numbers: set[int]) -> list[tf.Tensor]:
    """The outputs of a function that some outputs of the op that runs it are made of.

    A loop that was differentiated before has outputs besides, which record its steps.

    Args:
      op: a branch, a call or a loop.
      inner: the analysis of the function.
      numbers: the numbers of the outputs that are used.
    """
    graph = inner.graph
    if op.type not in ops.LOOPS:
        return [graph.outputs[i] for i in numbers]
    # Whatever decides when the loop ends.
    numbers = numbers | _condition_inputs(op)
    while True:
        outputs = [graph.outputs[i] for i in numbers]
        used = _used(outputs)
        read = {i for i, t in enumerate(graph.inputs) if t.ref() in used}
        if read <= numbers:
            return outputs
        numbers = numbers | read


_PLACED = "how an example's place in the batch enters into its output"


def _hidden(tensor: tf.Tensor, flows: Dataflow) -> str | None:
    """What is not known of the examples in a tensor; None if all is."""
    flow, op = flows[tensor], tensor.op
    if flow.obstacle:
        return flow.obstacle
    if flow.kind != DATA:
        return None
    if flows.batch_size is None and op not in flows.inner:
        made = flow.made and flow.axes == () and flow.example is None
        if made or size_uses.is_harmful(op, tensor, flows):
            return "how the number of examples enters into its output"
    if flow.placed and not flow.made and not _chooses_rows(tensor, flows):
        return _PLACED
    if flow.made and flow.axes == ():
        return None
    if flow.made and flow.axes and not flow.trained:
        return None  # It is of no example; what it meets is asked in its turn.
    if flow.unknown:
        return "what it does with the examples"
    if flow.axes and flow.rows is None and flow.entries is None and not flow.even:
        return "how many rows of its output belong to an example"
    return None


def _condition_inputs(op: tf.Operation) -> set[int]:
    """The numbers of the loop's variables that its condition reads."""
    cond = _tf_private.condition_of_loop(op)
    read = {t.ref() for o in ancestors(cond.outputs) for t in o.outputs}
    return {i for i, t in enumerate(cond.inputs) if t.ref() in read}


def _chooses_rows(tensor: tf.Tensor, flows: Dataflow) -> bool:
    """Whether places go with what each example takes of its own row."""
    readers = [op for op in tensor.consumers() if op in flows]
    return all(known.chooses_rows(r) and tensor is not r.inputs[0] for r in readers)


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
    apart = op.type in ops.GRADIENTS_APART or op_flows.is_stated(op.type)
    if op in flows.inner or apart:
        if (
            op.type not in ops.FIRST_ARGUMENT
            and calls.gradient_function(op) is not None
        ):
            yield from gradient_flows.gaps_of(op, flows, _gaps)
        return
    if op.type in ops.FUNCTION_CALLS and read_call(op) is not None:
        return
    yield op, "whether its gradient keeps the examples apart"
