"""Proves from the graph of a loss that the examples of every batch stay apart.

Comes in: the losses `[B]` and their `Dataflow`. Goes out: a `Proof`.

The theorem. Let every op between the data and the losses keep the examples apart: row i
of an output depends on row i of the inputs and on public tensors alone. Let the
function that TensorFlow registered as the op's gradient keep the examples apart, too.
Then the gradient of `sum_i w_i loss_i` at every tensor in between keeps the examples
apart, and its row i is w_i times the gradient of loss_i: the chain rule multiplies
matrices that are block diagonal in the examples. `tf.stop_gradient` is the identity
forward and zero backward.

The invariant. A proof holds for every batch and for all values of the data. It rests on
the table of ops alone: the forward lemma of an op type is its entry in `op_flows.py`,
`layouts.py`, `contractions.py`, `mixing.py`, `lists.py` or `sparse.py`; the backward
lemma is its name in `ops.GRADIENTS_APART`. tests/gradients/lemmas_test.py tries both
lemmas. Gradient functions of `tf.custom_gradient` have no entry: `gradient_flows.py`
follows the examples through their ops.

To add an op type: an entry forward, its name in `ops.GRADIENTS_APART`, and a case in
tests/gradients/lemma_cases.py.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable, Iterator

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.gradients.flows import gradient_flows, op_flows
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.flows.flow import DATA
from tfdpclip.gradients.graph import calls, known, op_copies, ops
from tfdpclip.gradients.graph.walks import ancestors
from tfdpclip.gradients.loss import size_uses


class Verdict(enum.Enum):
    """The result of a proof that the examples of every batch stay apart."""

    PROVEN = "proven"
    MIXED = "mixed"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Proof:
    """The verdict on a loss for all possible batches, with the op where a proof ends.

    Attributes:
      verdict: `PROVEN`: the loss and the gradient of an example depend on that example
        alone. `MIXED`: an op combines the examples. `UNKNOWN`: the table of ops does
        not decide.
      op: the op that combines the examples, or that the table does not know; None if
        the verdict is `PROVEN`.
      reason: the unknown property of the op, as the end of the sentence "it is not
        known ...".
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
      losses: the loss of each example, `[B]`.
      flows: the analysis of `losses`.
    """
    flow = flows[losses]
    if flow.coupled is not None:
        return Proof(Verdict.MIXED, flow.coupled)
    for op, reason in _all_gaps(losses, flows):
        return Proof(Verdict.UNKNOWN, op, reason)
    return Proof(Verdict.PROVEN)


def gaps(losses: tf.Tensor, flows: Dataflow) -> list[tuple[tf.Operation, str]]:
    """All ops at which the proof fails, with reasons, for tables and tests."""
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
        yield losses.op, "which entry belongs to which example"
    elif flow.placed:
        yield losses.op, _PLACED


def _gaps(
    flows: Dataflow, outputs: list[tf.Tensor] | None = None
) -> Iterator[tuple[tf.Operation, str]]:
    """The ops that the table does not know, inputs first, with the reasons.

    Args:
      flows: the analysis of a graph.
      outputs: the tensors of the graph to be proven; by default all outputs.
    """
    batches = [b for b in flows.sparse_batches if b.is_given()]
    cut = {t.ref() for b in batches for t in (b.indices, b.values, b.shape)}
    used = _used(flows.outputs if outputs is None else outputs, cut)
    for op in flows.ops:
        outputs = [t for t in op.outputs if t.ref() in used]
        reason = next((r for t in outputs if (r := _unknown_property(t, flows))), None)
        if reason is not None:
            yield op, reason
        elif any(flows[t].trained for t in outputs):
            yield from _gaps_backward(op, flows)
        numbers = {t.value_index for t in outputs}
        for inner in flows.inner.get(op, ()):
            yield from _gaps(inner, _needed(op, inner, numbers))


def _used(outputs: Iterable[tf.Tensor], ends: Collection = ()) -> set:
    """The references of all tensors that the values of `outputs` depend on.

    Args:
      outputs: tensors of a graph.
      ends: the references of tensors whose inputs are not followed: the components of
        sparse batches, whose examples are known.
    """
    used, stack = set(), list(outputs)
    while stack:
        tensor = stack.pop()
        if tensor.ref() in used:
            continue
        used.add(tensor.ref())
        if tensor.ref() in ends:
            continue
        if known.is_pinned(tensor.op) or tensor.op.type in ops.ITERATORS:
            continue  # A pinned op is a constant; an iterator's output is the data.
        limit = known.pinned_to(tensor.op)
        stack += tensor.op.inputs if limit is None else [limit]
    return used


def _needed(op: tf.Operation, inner: Dataflow, numbers: set[int]) -> list[tf.Tensor]:
    """The outputs of a function that the used outputs of its op depend on.

    A loop that TensorFlow differentiated before has further outputs that record its
    steps; they need no proof.

    Args:
      op: a branch, a call or a loop.
      inner: the analysis of the function that `op` runs.
      numbers: the numbers of the used outputs of `op`.
    """
    graph = inner.graph
    if op.type not in ops.LOOPS:
        return [graph.outputs[i] for i in numbers]
    # The loop variables that decide when the loop ends are used too.
    numbers = numbers | _condition_inputs(op)
    while True:
        outputs = [graph.outputs[i] for i in numbers]
        used = _used(outputs)
        read = {i for i, t in enumerate(graph.inputs) if t.ref() in used}
        if read <= numbers:
            return outputs
        numbers = numbers | read


_PLACED = "how its output depends on an example's place in the batch"


def _unknown_property(tensor: tf.Tensor, flows: Dataflow) -> str | None:
    """The unknown property of the examples in a tensor; None if all are known."""
    flow, op = flows[tensor], tensor.op
    if flow.obstacle:
        return flow.obstacle
    if flow.kind != DATA:
        return None
    if flows.batch_size is None and op not in flows.inner:
        made = flow.made and flow.axes == ()
        if made or size_uses.is_harmful(op, tensor, flows):
            return "how its output depends on the number of examples"
    if flow.placed and not flow.made and not _chooses_rows(tensor, flows):
        return _PLACED
    if flow.made and flow.axes == ():
        return None
    if flow.made and flow.axes and not flow.trained:
        return None  # The tensor holds no data; ops that read it are examined too.
    if flow.unknown:
        return "whether the op keeps the examples apart"
    if flow.axes and flow.rows is None and not flow.even:
        return "how many rows of its output belong to an example"
    return None


def _condition_inputs(op: tf.Operation) -> set[int]:
    """The numbers of the loop variables that the loop's condition reads."""
    cond = _tf_private.condition_of_loop(op)
    read = {t.ref() for o in ancestors(cond.outputs) for t in o.outputs}
    return {i for i, t in enumerate(cond.inputs) if t.ref() in read}


def _chooses_rows(tensor: tf.Tensor, flows: Dataflow) -> bool:
    """Whether all readers use a tensor as row numbers, to read an example's own row."""
    for reader in (op for op in tensor.consumers() if op in flows):
        if reader.type in ("Identity", "Cast") and tensor.dtype in known.EXACT:
            if _chooses_rows(reader.outputs[0], flows):
                continue
        read = [i for i, t in enumerate(reader.inputs) if t is tensor]
        if (
            reader.type != "GatherV2"
            or read != [1]
            or not known.takes_every_row(reader)
        ):
            return False
    return True


def _ends_gradients(op: tf.Operation) -> bool:
    """Whether no gradient passes through the op: TensorFlow has none, or raises."""
    if op.type in ops.FIRST_ARGUMENT or calls.gradient_function(op) is not None:
        return False
    try:
        return _tf_private.registered_gradient(op) is None
    except LookupError:
        return True


def _gaps_backward(op, flows: Dataflow) -> Iterator[tuple[tf.Operation, str]]:
    """Yields the op, with the reason, if its gradient may combine the examples.

    An op on variables alone has no examples to combine, unless it has its own gradient
    function, which may read any tensor of the graph.
    """
    if not op.inputs or _ends_gradients(op):
        return  # The op is a leaf, or TensorFlow passes no gradient, or raises.
    if all(flows[t].kind != DATA for t in op.outputs) and op not in flows.inner:
        if not op_copies.has_own_gradient(op):
            return
        if op.type in ops.FIRST_ARGUMENT:
            yield op, gradient_flows.UNKNOWN
        else:
            yield from gradient_flows.gaps_of(op, flows, _gaps)
        return
    apart = op.type in ops.GRADIENTS_APART or op_flows.is_stated(op.type)
    if op in flows.inner or apart:
        if (
            op.type not in ops.FIRST_ARGUMENT
            and calls.gradient_function(op) is not None
        ):
            yield from gradient_flows.gaps_of(op, flows, _gaps)
        return
    yield op, "whether its gradient keeps the examples apart"
