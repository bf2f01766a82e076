"""Where each variable first meets the batch."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.flows.flow import DATA
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.rules.row_lookup import sum_after


@dataclasses.dataclass(frozen=True)
class Path:
    """The way from a variable to a parameter tensor.

    Attributes:
      ops: the types of the ops on the way.
      isometric: whether the tensor holds exactly the variable's entries.
      piece: names a disjoint piece of a split variable by (split op's name, output
        number); None where the tensor is not a piece.
      moved: whether entries may change order (a transposition).
    """

    ops: tuple[str, ...] = ()
    isometric: bool = True
    piece: tuple[str, int] | None = None
    moved: bool = False

    def after(self, op: tf.Operation, output: int) -> Path:
        """The path through `op`, of which the tensor is the only parameter input."""
        passed = (*self.ops, op.type)
        if op.type in ops.ISOMETRIES:
            moved = self.moved or op.type == "Transpose"
            return dataclasses.replace(self, ops=passed, moved=moved)
        if op.type in ops.PIECES and self.isometric and self.piece is None:
            return Path(passed, True, (op.name, output), self.moved)
        return Path(passed, False, None, True)


@dataclasses.dataclass(frozen=True)
class Use:
    """An op at which a variable meets the batch.

    Attributes:
      op: the op.
      index: the number of the op's input that is the parameter.
      param: the parameter: a tensor, or the variable's handle.
      path: the way from the variable to `param`.
      variable_shape: the variable's shape.
    """

    op: tf.Operation
    index: int
    param: tf.Tensor
    path: Path
    variable_shape: tuple[int, ...]

    @property
    def output(self) -> tf.Tensor:
        return self.op.outputs[0]


def find_uses(handle: tf.Tensor, shape, flows: Dataflow) -> list[Use]:
    """The ops at which the variable behind `handle` meets the batch, in graph order."""
    return follow({handle.ref(): Path()}, shape, flows)


def follow(paths: dict, shape, flows: Dataflow) -> list[Use]:
    """The ops at which a variable meets the batch, in graph order.

    Args:
      paths: the path to each tensor that the variable is read through, by reference.
        Paths to tensors that are made of these are added.
      shape: the variable's shape.
      flows: the analysis.
    """
    uses: list[Use] = []
    for op in flows.ops:  # inputs come before outputs
        indices = [i for i, t in enumerate(op.inputs) if t.ref() in paths]
        if not indices or op.type == "StopGradient":
            continue
        if any(flows[t].kind == DATA for t in op.outputs):
            if any(flows[t].trained for t in op.outputs):
                for index in indices:
                    param = op.inputs[index]
                    met = sum_after(op, flows) or op
                    path = paths[param.ref()]
                    uses.append(Use(met, index, param, path, tuple(shape)))
            continue
        path = paths[op.inputs[indices[0]].ref()]
        others = sum(flows[t].trained for t in op.inputs) - 1
        for number, output in enumerate(op.outputs):
            if flows[output].trained:
                after = path.after(op, number)
                paths[output.ref()] = (
                    Path(after.ops, False, None, True) if others else after
                )
    return uses
