"""The loss that Keras 3 hands over before it asks for an update.

Keras's trainer gives the optimizer the loss to scale, takes gradients of the scaled
loss, and asks the optimizer to apply them. A private optimizer keeps the loss, and
returns a copy without gradients. The only gradients are then the private gradients,
which the optimizer makes from the kept loss.
"""

from __future__ import annotations

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._docs import TracedError, see

_INSTEAD = (
    "In a train_step of your own, call self.optimizer.minimize(loss, "
    "self.trainable_variables) in place of tape.gradient and apply_gradients."
) + see("gradients-made-elsewhere")


class HeldLoss:
    """Keeps a loss from `scale_loss` to `apply`.

    *Formal guarantees*: the tensor that `keep` returns has no gradient. A loss is taken
    once, in the graph that computed it, and only if nothing was made of its copy.
    """

    def __init__(self) -> None:
        self._loss: tf.Tensor | None = None
        self._copy: tf.Tensor | None = None

    def keep(self, loss: tf.Tensor) -> tf.Tensor:
        """Keeps the loss, and returns a copy of its value without gradients.

        Raises:
          ValueError: if there is no graph, or a loss is kept already.
        """
        loss = tf.convert_to_tensor(loss)
        if _tf_private.is_eager(loss):
            raise TracedError(
                "A private optimizer reads the graph of the loss, and eager code has "
                "no graph: compile without run_eagerly=True. In an eager loop of your "
                "own, call optimizer.minimize(loss, variables, tape=tape) with one "
                "loss for each example." + see("gradients-made-elsewhere")
            )
        if self._loss is not None and not self._was_abandoned(loss.graph):
            raise TracedError(
                "optimizer.scale_loss was called again before the first loss was "
                "applied: a step has one loss. Add losses up before scale_loss. "
                + _INSTEAD
            )
        self._loss, self._copy = loss, tf.stop_gradient(loss)
        return self._copy

    def take(self) -> tf.Tensor:
        """Returns the kept loss, and forgets it.

        Raises:
          ValueError: if no loss was kept in this graph, or its copy was used.
        """
        loss, copy = self._loss, self._copy
        self.forget()
        if loss is None or copy is None:
            raise TracedError(
                "There is no loss to make private gradients from: apply was called "
                "without optimizer.scale_loss(loss) before it, or twice, or "
                "with gradients that are all None. " + _INSTEAD
            )
        if tf.executing_eagerly() or loss.graph is not tf.compat.v1.get_default_graph():
            raise TracedError(
                "apply was called in another graph than optimizer.scale_loss: call "
                "both in the same tf.function, outside of its branches and loops. "
                + _INSTEAD
            )
        made = [op.name for op in copy.consumers() if op.type not in _SHAPES]
        if made:
            raise TracedError(
                "The result of optimizer.scale_loss was used before apply, by "
                f"{made[0]!r}: the step uses the loss that scale_loss was given, "
                "and ignores later changes (scaling, adding terms). Change the loss "
                "before scale_loss, and give metrics the loss, not the result. "
                + _INSTEAD
            )
        return loss

    def forget(self) -> None:
        """Drops the loss."""
        self._loss = self._copy = None

    def refuse_unapplied(self) -> None:
        """Raises ValueError if a loss was kept and never applied."""
        if self._loss is not None:
            self.forget()
            raise TracedError(
                "optimizer.scale_loss was given a loss that was never applied, so "
                "nothing was trained. Either the model has no trainable variables, or "
                "its train_step does not call apply_gradients. " + _INSTEAD
            )

    def _was_abandoned(self, graph) -> bool:
        """Whether an error ended the trace of the kept loss."""
        own = self._loss.graph
        ended = getattr(own, "structured_outputs", None) is not None
        return own is not graph and not ended


# Ops that a tape makes of a tensor before it finds that the tensor has no gradient.
_SHAPES = ("OnesLike", "Shape", "ZerosLike")
