"""Takes a loss apart into a loss for each example.

Keras hands an optimizer a number. In the graph that number is a sum over the batch,
and this module walks back from it through linear ops to the tensors that still have
an entry (or several) for each example. Terms that depend on no example, like weight
decay, are set aside. A loss that cannot be taken apart with certainty is refused.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import numpy as np
import tensorflow as tf

from tfdpclip._docs import TracedError, see
from tfdpclip.gradients.errors import ExampleIsolationError, LossStructureError
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.flows.flow import DATA, PUBLIC, SIZE
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.graph.known import static_number
from tfdpclip.gradients.graph.walks import ancestors
from tfdpclip.gradients.loss import loss_checks, size_uses
from tfdpclip.gradients.loss.advice import FIX, of_divisor, of_structure
from tfdpclip.gradients.loss.loss_checks import BY_BATCH
from tfdpclip.gradients.loss.misplaced_weights import refuse_weights
from tfdpclip.gradients.loss.padding import any_present, weights_mask
from tfdpclip.gradients.loss.public_terms import check_public
from tfdpclip.gradients.loss.scale import Scale


@dataclasses.dataclass
class LossParts:
    """A loss, taken apart.

    Attributes:
      per_example: `[B]`; the model's loss is the mean of this plus `shared`.
      present: `[B]` booleans, False for padding (weight 0 in every weighted term, or
        no record of a drawn batch); None if nothing is known of either.
      shared: the sum of the terms that depend on no example, a scalar; None if none.
      batch_size: B, a scalar int32 tensor.
      counted: whether `per_example` was multiplied by B, because a term is a sum over
        the batch and no public batch size was given.
    """

    per_example: tf.Tensor
    present: tf.Tensor | None
    shared: tf.Tensor | None
    batch_size: tf.Tensor
    counted: bool = False

    def note_present(self, drawn: tf.Tensor | None) -> None:
        """Notes which records were drawn, `[B]`, if that is known.

        A record is present if the draw and the weights of the loss both say so: a
        regulariser of activities also covers padding, which has no weight.
        """
        if drawn is not None and self.present is not None:
            drawn = tf.logical_and(drawn, self.present)
        self.present = self.present if drawn is None else drawn


def refuse_counted(parts: LossParts) -> None:
    """Refuses to clip losses that were multiplied by the number of examples.

    Raises:
      LossStructureError: if one example more would scale the gradients of all.
    """
    if parts.counted:
        raise LossStructureError(
            "The loss is a sum over the batch, and an example's loss would be its "
            "share times the number of examples: one example more would scale the "
            "gradients of all. Give the examples' own losses, of shape [batch], or "
            "their mean; or nominal_batch_size=, a public number for this factor."
            + see("losses-that-divide-by-the-batch")
        )


def take_apart(
    loss: tf.Tensor,
    flows: Dataflow,
    nominal_batch_size: float | None = None,
    replicas: int = 1,
) -> LossParts:
    """Takes `loss` apart.

    Args:
      loss: a scalar, or a loss for each example: `[B]`, or `[B, ...]`, which is
        averaged over the trailing axes.
      flows: the analysis of `loss`.
      nominal_batch_size: the public number of examples in a physical batch, used to
        scale a loss that was summed, not averaged, over a batch of unknown size.
      replicas: over how many equal parts of a batch losses are added up. A term that is
        a mean over a part counts as 1 / `replicas` of the mean over the batch.

    Raises:
      LossStructureError: if the loss cannot be taken apart with certainty.
      ExampleIsolationError: if a term depends on a statistic of the batch.
    """
    if loss.shape.rank is None:
        raise LossStructureError(
            f"The loss {loss.name!r} has no known rank. " + FIX,
        )
    if loss.shape.rank:
        return _from_vector(loss, flows, replicas)
    if replicas > 1 and flows.batch_size == 1:
        raise LossStructureError(
            "A replica's batch has a single example, so a mean cannot be told from a "
            "sum, and the loss's scale is unknown. Give each replica two examples or "
            "more, padding included (batches.distribute(strategy) does), or give a "
            "loss for each example." + see("several-replicas")
        )
    walker = _Walker(flows)
    walker.visit(loss, Scale())
    if not walker.terms:
        raise LossStructureError(
            "The loss depends on the trained variables, but on no example of a batch: "
            f"no tensor with a batch axis was found behind {loss.name!r}. " + FIX
        )
    batch_size = _batch_size(walker.terms[0][0], flows)
    total, masks, counted = None, [], False
    for tensor, scale in walker.terms:
        entries = _rows_by_example(tensor, flows, batch_size)
        first = batch_size if replicas == 1 else batch_size * replicas
        power = scale.power + _constant_power(tensor, scale, flows, replicas)
        if power not in (0, -1):
            raise LossStructureError(
                f"The term {tensor.name!r} of the loss is scaled with the batch size "
                f"to the power {power}, where a mean over the batch has -1 and a sum "
                "0: its scale would depend on the number of examples in the batch. "
                + FIX
            )
        sum_of_unknown = power == 0 and nominal_batch_size is None
        counted |= sum_of_unknown
        if power == 0 and nominal_batch_size is not None:
            # A sum over the batch. If it were multiplied by the actual number of
            # examples, each example could change the gradients of the rest.
            first = nominal_batch_size
        term = tf.reduce_sum(entries, axis=1)
        with size_uses.scaled_by_count() if sum_of_unknown else nullcontext():
            term *= tf.cast(scale.value(first), term.dtype)
        total = term if total is None else total + tf.cast(term, total.dtype)
        masks.append(weights_mask(tensor, flows, batch_size))
    present = any_present(masks)
    return LossParts(total, present, walker.shared(), batch_size, counted)


def _from_vector(loss: tf.Tensor, flows: Dataflow, replicas: int) -> LossParts:
    shared = []
    while loss.op.type in ("AddV2", "Add") and loss.shape.rank:
        # A regulariser that was added to each example's loss belongs to no example.
        a, b = loss.op.inputs
        if a.shape.rank == 0 and flows[a].kind != DATA:
            a, b = b, a
        if not (b.shape.rank == 0 and flows[b].kind != DATA and flows[b].trained):
            break
        if flows[b].power != 0:
            raise LossStructureError(BY_BATCH.format(name=b.name) + FIX)
        check_public(b, flows)
        shared.append(tf.cast(b, tf.float32))
        loss = a
    _, scale = _Walker(flows)._peel(loss, Scale())
    if scale.power != 0:
        raise LossStructureError(
            f"The loss per example {loss.name!r} is scaled with the batch size; pass "
            "the examples' own losses. The optimizer divides by expected_batch_size."
        )
    flow = flows[loss]
    others = flow.kind == DATA and flow.axes is not None and set(flow.axes) - {0}
    if flow.coupled is not None or others:
        refuse_weights(loss.op, flows)
    loss_checks.check_uncoupled(loss, flow)
    if others:
        raise ExampleIsolationError(
            f"The loss {loss.name!r} counts examples on axes {flow.axes}, not on axis "
            "0 alone: each example is compared with every other, as happens when "
            "labels of shape [batch] meet predictions of shape [batch, 1]. Give them "
            "the same shape." + see("mixed-examples")
        )
    each = flows.rows_per_example
    # A record of several rows has an entry for each row, or one for all of them.
    if flow.leads and (flow.minor or flow.rows not in (each, 1, None)):
        raise LossStructureError(
            f"The loss {loss.name!r} has {flow.rows} entries for each example, so that "
            "an entry is not an example. Reshape it to [batch, entries per example]."
        )
    loss_checks.check_sizes(loss, flows)
    if flow.leads and flow.rows == 1:
        batch_size = _batch_size(loss, flows)
    else:
        loss_checks.check_static_size(loss, flows)
        batch_size = _examples_of(loss, flows)
    entries = tf.reshape(_in_float32(loss), [batch_size, -1])
    single = loss.shape.rank == 1 and each == 1
    per_example = entries[:, 0] if single else tf.reduce_mean(entries, 1)
    mask = weights_mask(loss, flows, batch_size) if flow.leads else None
    once = None
    if shared:
        once = tf.add_n(shared) if replicas == 1 else tf.add_n(shared) / replicas
    return LossParts(per_example, any_present([mask]), once, batch_size)


class _Walker:
    """Collects the terms of a scalar loss."""

    def __init__(self, flows: Dataflow):
        self._flows = flows
        self.terms: list[tuple[tf.Tensor, Scale]] = []
        self._shared: list[tuple[tf.Tensor, Scale]] = []

    def shared(self) -> tf.Tensor | None:
        for tensor, scale in self._shared:
            check_public(tensor, self._flows)
            for factor in (*scale.times, *scale.over):
                if self._flows[factor].kind == PUBLIC:
                    check_public(factor, self._flows)
        parts = [
            tf.cast(tf.reduce_sum(tensor), tf.float32) * scale.value()
            for tensor, scale in self._shared
        ]
        return tf.add_n(parts) if parts else None

    def visit(self, tensor: tf.Tensor, scale: Scale) -> None:
        """Adds scale * (sum of all entries of `tensor`) to the terms."""
        flow, op = self._flows[tensor], tensor.op
        factors = (*scale.times, *scale.over)
        if not flow.trained and not any(self._flows[f].trained for f in factors):
            return
        if flow.kind != DATA:
            self._set_aside(tensor, scale)
        elif flow.leads:
            if flow.coupled is not None:
                refuse_weights(op, self._flows)
            loss_checks.check_uncoupled(tensor, flow)
            rest, scale = self._peel(tensor, scale)
            penalty = self._penalty(rest)
            if penalty is None:
                loss_checks.check_sizes(rest, self._flows)
                self.terms.append((rest, scale))
                return
            # A regulariser inside the mean belongs to no example: set it aside.
            rest_of, shared, sign = penalty
            count = scale.multiply(tf.size(rest), 1)
            self._set_aside(shared, count if sign > 0 else count.negate())
            self.visit(rest_of, scale)
        elif flow.axes is None and _may_lead(tensor, self._flows):
            # An op that the analysis does not know came before: the proof ends there,
            # and each example's loss is made from the data of that example alone.
            loss_checks.check_uncoupled(tensor, flow)
            loss_checks.check_sizes(tensor, self._flows)
            self.terms.append((tensor, scale))
        elif op.type in ("Sum", "Mean"):
            self._reduction(op, scale)
        elif op.type == "Pack" or (tensor.shape.rank == 0 and op.type == "AddN"):
            for part in op.inputs:
                self.visit(part, scale)
        elif tensor.shape.rank == 0 and op.type in ("AddV2", "Add", "Sub"):
            self.visit(op.inputs[0], scale)
            self.visit(op.inputs[1], scale.negate() if op.type == "Sub" else scale)
        elif op.type == "Neg":
            self.visit(op.inputs[0], scale.negate())
        elif op.type == "StopGradient":
            self._stopped(op.inputs[0], scale)
        elif op.type == "L2Loss":
            self.visit(tf.square(op.inputs[0]) / 2, scale)
        elif op.type in ops.SAME_ENTRIES:
            self.visit(op.inputs[0], scale)
        elif tensor.shape.rank == 0 and op.type == "Mul":
            self._product(op, scale)
        elif tensor.shape.rank == 0 and op.type in ops.QUOTIENTS:
            self._quotient(op, scale)
        else:
            loss_checks.check_not_selected(tensor, flow)
            refuse_weights(op, self._flows)
            raise LossStructureError(
                f"The loss is not a sum over the examples of a batch: {op.name!r} (a "
                f"{op.type}) combines them in a way that cannot be taken apart. "
                + of_structure(op, flow.coupled)
            )

    def _stopped(self, tensor, scale):
        """Adds terms with a gradient for the factors in `scale`, not for `tensor`."""
        within = _Walker(self._flows)
        within.visit(tensor, scale)
        for found, into in (
            (within.terms, self.terms),
            (within._shared, self._shared),
        ):
            into += [(tf.stop_gradient(t), s.stopped_after(scale)) for t, s in found]

    def _set_aside(self, tensor, scale):
        power = self._flows[tensor].power
        static = self._flows.batch_size is not None
        if power is None or (power + scale.power != 0 and not static):
            raise LossStructureError(BY_BATCH.format(name=tensor.name) + FIX)
        self._shared.append((tensor, scale))

    def _penalty(self, tensor):
        """(the rest, a scalar of the variables alone, its sign) of their sum."""
        if tensor.op.type not in ("AddV2", "Add", "Sub"):
            return None
        a, b = tensor.op.inputs
        if tensor.op.type != "Sub" and a.shape.rank == 0:
            a, b = b, a
        flow = self._flows[b]
        if b.shape.rank != 0 or flow.kind == DATA or not flow.trained:
            return None
        return a, b, -1 if tensor.op.type == "Sub" else 1

    def _peel(self, tensor, scale):
        """Takes factors that depend on the batch size out of a `[B, ...]` tensor.

        A static batch size may be hidden in any constant.
        """
        while True:
            op = tensor.op
            if op.type not in ("Mul", *ops.QUOTIENTS):
                return tensor, scale
            a, b = op.inputs
            if op.type == "Mul" and a.shape.rank == 0:
                a, b = b, a
            if b.shape.rank != 0 or not self._is_factor(b):
                return tensor, scale
            power = self._power(b, op)
            scale = (
                scale.multiply(b, power) if op.type == "Mul" else scale.divide(b, power)
            )
            tensor = a

    def _is_factor(self, tensor) -> bool:
        flow = self._flows[tensor]
        if flow.kind == PUBLIC and not flow.trained:
            return self._flows.batch_size is not None and static_number(tensor) != 1
        return flow.kind == SIZE

    def _power(self, factor, op) -> int:
        power = self._flows[factor].power
        if power is None:
            raise LossStructureError(
                f"The loss is scaled by {factor.name!r} in {op.name!r}, which depends "
                "on the batch size other than by a power of it: the scale of every "
                "example's gradient would depend on how many there happen to be. " + FIX
            )
        return power

    def _reduction(self, op, scale):
        source = op.inputs[0]
        if op.type == "Mean":
            count = tf.size(source) / tf.maximum(tf.size(op.outputs[0]), 1)
            axes = tf.get_static_value(op.inputs[1])
            flow = self._flows[source]
            rank = source.shape.rank
            reduced = (
                {int(a) % rank for a in axes.reshape(-1)} if axes is not None else ()
            )
            by_batch = flow.axes is None or bool(set(flow.axes) & set(reduced))
            scale = scale.divide(count, int(by_batch), counted=True)
        self.visit(source, scale)

    def _product(self, op, scale):
        a, b = op.inputs
        if self._flows[a].kind != DATA:
            a, b = b, a
        if self._flows[b].kind == DATA:
            self._refuse_scale(op, b)
        self.visit(a, scale.multiply(b, self._power(b, op)))

    def _quotient(self, op, scale):
        top, bottom = op.inputs
        flow = self._flows[bottom]
        if flow.kind == DATA:
            self._refuse_scale(op, bottom)
        self.visit(top, scale.divide(bottom, self._power(bottom, op)))

    def _refuse_scale(self, op, factor):
        raise LossStructureError(
            f"The loss is scaled by {factor.name!r} in {op.name!r}, which depends on "
            "the data of the whole batch (such as a mean over unmasked entries), and "
            "so would each gradient. "
            + of_divisor(ancestors([factor]))
            + see("losses-that-divide-by-the-batch")
        )


def _constant_power(
    tensor: tf.Tensor, scale: Scale, flows: Dataflow, replicas: int
) -> int:
    """The power of B that has become constants, where B is static."""
    if flows.batch_size in (None, 0, 1):
        return 0
    sizes = (flows.batch_size, flows.length, tensor.shape.num_elements() or 0)
    counts = {float(size) for size in sizes}
    counts |= {replicas * size for size in counts}

    def is_count(factor, inverse=False):
        value = static_number(factor) if flows[factor].kind == PUBLIC else None
        if value is None or value == 0:
            return False
        return any(np.isclose(1 / value if inverse else value, c, 1e-6) for c in counts)

    power = 0
    for factor, divides in scale.given:
        # A literal factor is the caller's own number, even if it equals a size; a
        # literal divisor may be a size that was folded.
        if divides:
            power -= is_count(factor)
        elif factor.op.type != "Const":
            power += is_count(factor) - is_count(factor, inverse=True)
    return power


def _may_lead(tensor: tf.Tensor, flows: Dataflow) -> bool:
    return bool(tensor.shape.rank) and tensor.shape[0] in (None, flows.batch_size)


def _in_float32(tensor):
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor


def _batch_size(tensor: tf.Tensor, flows: Dataflow) -> tf.Tensor:
    if flows[tensor].rows != flows.rows_per_example:
        for source in flows.sources:
            if flows[source].leads:
                return _examples_of(source, flows)
    return _examples_of(tensor, flows)


def _examples_of(tensor: tf.Tensor, flows: Dataflow) -> tf.Tensor:
    """How many examples have their rows in a tensor, a scalar.

    Raises:
      ValueError: if rows are left over, and their number is static; if it is not, the
        step raises `tf.errors.InvalidArgumentError`.
    """
    each, rows = flows.rows_per_example, tf.shape(tensor)[0]
    if each == 1:
        return rows
    message = (
        f"rows_per_record={each}, but {tensor.name!r} has a number of rows that is no "
        f"multiple of {each}: a batch must hold whole records, with the rows of a "
        "record next to each other. Draw the batches with as many rows: "
        f"scheme.batches(data, views={each}), or by the scheme that draws people."
        + see("records-of-several-rows")
    )
    static = tensor.shape[0]
    if static is not None:
        if static % each:
            raise TracedError(message)
        return tf.constant(static // each)
    whole = tf.debugging.Assert(tf.equal(rows % each, 0), [message])
    with tf.control_dependencies([] if whole is None else [whole]):
        return tf.identity(rows // each)


def _rows_by_example(tensor, flows, batch_size) -> tf.Tensor:
    """`[B, entries]` in float32 at least."""
    flow, name = flows[tensor], tensor.name
    tensor = _in_float32(tensor)
    if flow.axes is None and tensor.shape[0] is None:
        # The analysis only assumed that axis 0 counts examples.
        with tf.control_dependencies(
            loss_checks.assert_whole_examples(tensor, name, batch_size)
        ):
            tensor = tf.identity(tensor)
    if flow.minor:
        tensor = tf.reshape(tensor, [flow.repeats, batch_size, -1])
        tensor = tf.transpose(tensor, [1, 0, 2])
    return tf.reshape(tensor, [batch_size, -1])
