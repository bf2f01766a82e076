"""Copies of ops, with loops and branches rebuilt around copies of the ops inside.

A copied `While` or `If` op keeps the functions of the original. Its gradient with
respect to variables that the functions read is zero, and a custom gradient inside reads
tensors of the original. So this module rebuilds a loop by `tf.while_loop`, and a branch
by `tf.switch_case` or `tf.cond`, around copies of the ops inside, at any depth.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.gradients.flows.dataflow import branch_graphs
from tfdpclip.gradients.flows.inlining import OpCopies
from tfdpclip.gradients.graph import calls, ops


def can_be_written(op: tf.Operation) -> bool:
    """Whether an op that runs functions can be rebuilt, at any depth."""
    if op.type in ops.FUNCTION_CALLS:
        return calls.can_be_opened(op)
    graphs = _graphs(op)
    return graphs is not None and all(
        can_be_written(inner)
        for graph in graphs
        for inner in graph.get_operations()
        if inner.type in ops.FIRST_ARGUMENT
    )


def _graphs(op: tf.Operation) -> Sequence[tf.Graph] | None:
    if op.type in ops.LOOPS:
        return [_tf_private.condition_of_loop(op), _tf_private.body_of_loop(op)]
    return branch_graphs(op)


class ControlCopies(OpCopies):
    """Copies of a graph's ops, with rebuilt loops and branches.

    Args:
      source: the graph with the original ops.
      tensors: the tensors in the place of tensors of `source`, by their references.
      name: a prefix for the names of the new ops.
      compiled: whether XLA compiles the copies.
      around: the copies of the graph around `source`; a custom gradient inside may read
        them.
    """

    def __init__(self, source, tensors, name, compiled, around=None):
        super().__init__(source, tensors, name, compiled)
        self._around = around

    def copy_of(self, tensor: tf.Tensor) -> tf.Tensor:
        """The copy of a tensor of `source`, or of a graph around `source`."""
        if self._around is not None and not _tf_private.is_eager(tensor):
            if tensor.graph is not self.source:
                return self._around.copy_of(tensor)
        return super().copy_of(tensor)

    def _within(self, source, tensors, name, compiled) -> OpCopies:
        return ControlCopies(source, tensors, name, compiled, self)

    def _outputs(self, op: tf.Operation, inputs: list) -> list[tf.Tensor]:
        if op.type not in ops.CONTROL_FLOW:
            return super()._outputs(op, inputs)
        write = self._loop if op.type in ops.LOOPS else self._branch
        with (
            self._target.as_default(),
            tf.control_dependencies(None),
            self._target.name_scope(None),
        ):
            return write(op, inputs)

    def _copied(self, op, graph, tensors, results) -> list[tf.Tensor]:
        """Copies of `results` of a function's graph, in the current graph."""
        name = f"{self._name}_ops/{op.name}"
        inner = self._within(graph, tensors, name, self._compiled)
        return [tf.identity(inner.copy_of(t)) for t in results]

    def _branch(self, op: tf.Operation, inputs: list) -> list[tf.Tensor]:
        choice, *arguments = inputs

        def written(graph):
            names = {t.ref(): g for t, g in zip(graph.inputs, arguments, strict=True)}
            results = graph.outputs[: len(op.outputs)]
            return lambda: self._copied(op, graph, names, results)

        branches = [written(graph) for graph in branch_graphs(op)]
        if op.type in ("If", "StatelessIf"):
            return list(tf.nest.flatten(tf.cond(tf.cast(choice, tf.bool), *branches)))
        # TensorFlow's Case takes the last branch for a number outside the range.
        last = len(branches) - 1
        choice = tf.where((choice < 0) | (choice > last), last, choice)
        return list(tf.nest.flatten(tf.switch_case(choice, branches)))

    def _loop(self, op: tf.Operation, inputs: list) -> list[tf.Tensor]:
        cond, body = _graphs(op)
        same = [o is i for o, i in zip(body.outputs, body.inputs, strict=False)]
        same = [k or t.dtype == tf.resource for k, t in zip(same, inputs, strict=False)]
        moving = [i for i, k in enumerate(same) if not k]

        def tensors_of(graph, values):
            full = list(inputs)
            for place, value in zip(moving, values, strict=True):
                full[place] = value
            pairs = zip(graph.inputs, full, strict=False)
            return {t.ref(): value for t, value in pairs}

        def goes_on(*values):
            return self._copied(op, cond, tensors_of(cond, values), cond.outputs[:1])[0]

        def step(*values):
            results = [body.outputs[i] for i in moving]
            return self._copied(op, body, tensors_of(body, values), results)

        # XLA differentiates a loop only if the number of steps has a known bound.
        bound = tf.get_static_value(inputs[1]) if len(inputs) > 1 else None
        bounded = bound is not None and bound.ndim == 0 and int(bound) > 0
        finals = tf.while_loop(
            goes_on,
            step,
            [inputs[i] for i in moving],
            shape_invariants=[
                body.inputs[i].shape.most_specific_compatible_shape(
                    body.outputs[i].shape
                )
                for i in moving
            ],
            parallel_iterations=op.get_attr("parallel_iterations"),
            maximum_iterations=int(bound) if bounded and self._compiled else None,
        )
        outputs = list(inputs)
        for place, value in zip(moving, finals, strict=True):
            outputs[place] = value
        return outputs[: len(op.outputs)]
