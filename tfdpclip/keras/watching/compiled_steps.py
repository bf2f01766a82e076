"""Compares a step that XLA compiles with ordinary gradients, before it is compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._devices import traced_with
from tfdpclip.gradients import status
from tfdpclip.keras import _compat
from tfdpclip.keras.watching.executions import runs_eagerly
from tfdpclip.keras.watching.followed_step import (
    FollowedStep,
    has_functions_within,
    has_own_step,
)

# The attributes in which Keras keeps a training function; Keras 2's TensorBoard reads
# the graph of a run function in the second.
_GRAPH = "train_tf_function"
_KEPT = ("train_function", _GRAPH)


class CompiledSteps:
    """Chooses the function for each execution of a model that XLA compiles.

    If the compiled step contained its comparison with ordinary gradients, XLA would
    compile the comparison for every size of batches, which takes as long as the step or
    several times as long; and compiled code cannot raise. So the first executions run
    the same `train_step` uncompiled, in the form that XLA compiles, until a comparison
    was conclusive. Compiled executions do not compare.

    *Formal guarantees*

    * A loss is compiled without a comparison only if a loss of the same ops, joined in
      the same way, of the same variables, was compared in an uncompiled step; or if so
      many comparisons were inconclusive that no further step compares.
    * All other losses are compared in compiled steps; so are the losses of a
      `train_step` that calls a `tf.function`: its code names the function, or the trace
      of the uncompiled step finds the private step in one.

    Args:
      model: the model.
      compares: whether the optimizer compares the first step of a trace.
    """

    def __init__(self, model: tf.keras.Model, compares: bool):
        self._model = model
        self._compares = compares
        self._function: Callable | None = None
        # The uncompiled function that runs in the place of the model's function.
        self._twin: Callable | None = None
        # The keys of the losses that were compared; None before a comparison.
        self._compared: frozenset | None = None
        # What Keras keeps for TensorBoard.
        self._shown: Any = None
        #: The function that ran the last execution.
        self.ran: Callable | None = None
        self._statuses: list[status.CheckStatus] = []
        self._step: FollowedStep | None = None
        self._executions = 0

    def begin(self, function: Callable, iterator: Any, step: FollowedStep) -> None:
        """Chooses the function that runs the next execution.

        Args:
          function: the model's training function.
          iterator: the data of the execution.
          step: the replacement of the model's `train_step`.
        """
        if function is self._function:
            return
        self._function, self._twin, self._step = function, None, step
        self._statuses, self._executions = [], 0
        self._compared = _compared_before(step, function, iterator)
        if self._compared is not None or not self._can_run_uncompiled(iterator):
            return
        # A trace of a function within `train_step` is of one training function only.
        # A function within that makes weights cannot be traced again.
        known = self._model.built or not has_own_step(self._model)
        within = step.calls_private_step or has_functions_within(self._model)
        if known and not within:
            with step.in_place(None):
                self._twin = _twin_of(self._model)

    def run(self, iterator: Any) -> Any:
        """Runs an execution, and returns Keras's logs.

        Args:
          iterator: the data of the execution.
        """
        if self._twin is not None:
            self.ran = self._twin
            try:
                with (
                    _compat.uncompiled(self._model),
                    traced_with(form_of_xla=True, tell=self._note_status),
                ):
                    logs = self._twin(iterator)
            except Exception:
                if not self._step.calls_private_step:
                    raise
            else:
                self._show(self._twin)
                self._note_execution(iterator)
                return logs
            # Nothing ran: the trace ended before it was complete.
            self._twin = None
        self.end()
        self.ran = self._function
        with traced_with(compared=self._compared or frozenset()):
            return self._function(iterator)

    def end(self) -> None:
        """Ends the executions without XLA."""
        if self._shown is not None:
            self._model.__dict__[_GRAPH], self._shown = self._shown, None

    def _show(self, twin: Callable) -> None:
        """Has TensorBoard show the graph of the function that ran."""
        attributes = self._model.__dict__
        if self._shown is None:
            self._shown = attributes.get(_GRAPH)
        if self._shown is not None:
            attributes[_GRAPH] = twin

    @property
    def function(self) -> Callable:
        """The function that runs executions now."""
        return self._twin or self._function

    def _note_status(self, one: status.CheckStatus, graph: tf.Graph) -> None:
        """Notes a status of the uncompiled function.

        Raises:
          RuntimeError: if the loss is in a `tf.function` within `train_step`, which
            would use its trace, of this element, in the compiled function as well.
        """
        if _tf_private.function_around(graph) is not self._step.graph:
            self._step.calls_private_step = True
            raise RuntimeError("the private step is in a tf.function within train_step")
        self._statuses.append(one)

    def _note_execution(self, iterator: Any) -> None:
        """Ends the executions without XLA after a conclusive comparison."""
        self._executions += 1
        # TensorFlow traces some loops twice and runs one of the traces, so that some
        # statuses stay as they are.
        compared = frozenset(one.key for one in self._statuses if one.settled)
        open_yet = not compared or any(one.undecided for one in self._statuses)
        if not open_yet or not self._statuses or self._executions >= status.ATTEMPTS:
            self._twin, self._compared = None, compared
            function = weakref.ref(self._function)
            self._step.compared = function, iterator.element_spec, compared

    def _can_run_uncompiled(self, iterator: Any) -> bool:
        return (
            self._compares
            and _compat.compiles_by_xla(self._model)
            and not runs_eagerly(self._model)
            and not _compat.has_own_function(self._model)
            and isinstance(iterator, tf.data.Iterator)
        )


def _compared_before(
    step: FollowedStep, function: Callable, iterator: Any
) -> frozenset | None:
    """The keys of the losses that an earlier call of `fit` compared; None before."""
    before, types, compared = step.compared or (lambda: None, None, None)
    same = types == getattr(iterator, "element_spec", None)
    return compared if same and before() is function else None


def _twin_of(model: tf.keras.Model) -> Callable:
    """A training function like the model's own that XLA does not compile."""
    attributes = model.__dict__
    kept = {name: attributes[name] for name in _KEPT if name in attributes}
    with _compat.uncompiled(model):
        model.make_train_function(force=True)
    twin = model.train_function
    attributes.update(kept)
    return twin
