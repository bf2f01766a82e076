"""What losses do with the labels of the whole batch, made each label's own.

Sampled classes are in `candidates.py`; here is Keras's check of the labels of hinge
losses. Keras turns labels 0 and 1 into -1 and 1 if no label of the batch is another:
one record with a label of 5 would change everybody's. Here every label is converted by
itself: 0 becomes -1, and all others stay what they are. That is the same for every
batch of labels 0 and 1, and for every batch without a 0.
"""

from __future__ import annotations

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.gradients.candidates import keep_candidates_apart
from tfdpclip.gradients.dataflow import ancestors
from tfdpclip.gradients.origins import definition_of


def convert_each_label(loss: tf.Tensor) -> None:
    """Changes the graph where a loss looks at the labels of the whole batch."""
    keep_candidates_apart(loss)
    for op in ancestors([loss]):
        labels = _converted(op)
        if labels is None:
            continue
        with loss.graph.as_default(), tf.control_dependencies(None):
            own = tf.where(tf.equal(labels, 0), -tf.ones_like(labels), labels)
            own.set_shape(op.outputs[0].shape)
        for consumer in op.outputs[0].consumers():
            for index, tensor in enumerate(consumer.inputs):
                if tensor is op.outputs[0]:
                    _tf_private.replace_input(consumer, index, own)


def _converted(op: tf.Operation) -> tf.Tensor | None:
    """The labels, if `op` is Keras's conversion of them; else None."""
    if op.type not in ("If", "StatelessIf") or len(op.inputs) != 2:
        return None
    predicate, labels = op.inputs
    if len(op.outputs) != 1 or op.outputs[0].dtype != labels.dtype:
        return None
    if predicate.op.type != "All" or predicate.op.inputs[0].op.type != "LogicalOr":
        return None
    either = predicate.op.inputs[0].op.inputs
    if any(not _compares(t.op, labels, value) for value, t in enumerate(either)):
        return None
    then, otherwise = (
        definition_of(op.graph, op.get_attr(branch).name)
        for branch in ("then_branch", "else_branch")
    )
    if then is None or otherwise is None:
        return None
    if [node.op for node in otherwise.node_def] != ["Identity"]:
        return None
    kinds = ["Const", "Mul", "Const", "Sub", "Identity"]
    if [node.op for node in then.node_def] != kinds:
        return None
    numbers = [
        tf.make_ndarray(node.attr["value"].tensor).tolist()
        for node in then.node_def
        if node.op == "Const"
    ]
    return labels if numbers == [2.0, 1.0] else None


def _compares(op: tf.Operation, labels: tf.Tensor, value: int) -> bool:
    if op.type != "Equal" or op.inputs[0] is not labels:
        return False
    found = tf.get_static_value(op.inputs[1])
    return found is not None and found.size == 1 and float(found) == value
