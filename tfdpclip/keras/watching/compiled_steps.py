"""Compares a step that XLA compiles with ordinary gradients, before it is compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdpclip._devices import form_of_xla
from tfdpclip.gradients.checks import status
from tfdpclip.keras import _compat
from tfdpclip.keras.watching.executions import runs_eagerly
from tfdpclip.keras.watching.given_data import FollowedStep, has_functions_within

# For each model, the last training function that needs no comparison any more (a weak
# reference, because the function keeps the model alive), the types of its data, and the
# keys of the losses that were compared.
_COMPARED: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# The attributes in which Keras keeps a training function.
_KEPT = ("train_function", "train_tf_function")


class CompiledSteps:
    """Chooses the function for each execution of a model that XLA compiles.

    If the compiled step contained its comparison with ordinary gradients, XLA would
    compile the comparison for every size of batches, which takes as long as the step or
    several times as long; and compiled code cannot raise. So the first executions run
    the same `train_step` uncompiled, in the form that XLA compiles, until a comparison
    was conclusive. Compiled executions do not compare.

    *Formal guarantees*

    * A loss is compiled without a comparison only if a loss of the same ops, of the
      same variables, was compared in an uncompiled step; or if so many comparisons were
      inconclusive that no further step compares.
    * All other losses are compared in compiled steps; so are the losses of a
      `train_step` that calls a `tf.function`.

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
        # The keys of the losses that were compared.
        self._compared: frozenset = frozenset()
        #: The function that ran the last execution.
        self.ran: Callable | None = None
        self._statuses: list[status.CheckStatus] = []
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
        self._function, self._twin = function, None
        self._statuses, self._executions = [], 0
        self._compared = _compared_before(self._model, function, iterator)
        if self._compared or not self._can_run_uncompiled(iterator):
            return
        # A trace of a function within `train_step` is of one training function only.
        if not has_functions_within(self._model):
            with step.in_place(None):
                self._twin = _twin_of(self._model)

    def run(self, iterator: Any) -> Any:
        """Runs an execution, and returns Keras's logs.

        Args:
          iterator: the data of the execution.
        """
        if self._twin is not None:
            self.ran = self._twin
            with (
                _compat.uncompiled(self._model),
                form_of_xla(),
                status.statuses_told(self._statuses.append),
            ):
                logs = self._twin(iterator)
            self._note_execution(iterator)
            return logs
        self.ran = self._function
        with status.already_compared(self._compared):
            return self._function(iterator)

    @property
    def function(self) -> Callable:
        """The function that runs executions now."""
        return self._twin or self._function

    def _note_execution(self, iterator: Any) -> None:
        """Ends the executions without XLA after a conclusive comparison."""
        self._executions += 1
        # TensorFlow traces some loops twice and runs one of the traces, so that some
        # statuses stay as they are.
        compared = frozenset(one.key for one in self._statuses if one.settled)
        open_yet = not compared or any(one.undecided for one in self._statuses)
        if not open_yet or not self._statuses or self._executions >= status.ATTEMPTS:
            self._twin, self._compared = None, compared
            reference = weakref.ref(self._function)
            _COMPARED[self._model] = reference, iterator.element_spec, compared

    def _can_run_uncompiled(self, iterator: Any) -> bool:
        return (
            self._compares
            and _compat.compiles_by_xla(self._model)
            and not runs_eagerly(self._model)
            and not _compat.has_own_function(self._model)
            and isinstance(iterator, tf.data.Iterator)
        )


def _compared_before(
    model: tf.keras.Model, function: Callable, iterator: Any
) -> frozenset:
    """The keys of the losses that an earlier call of `fit` compared."""
    known, types, compared = _COMPARED.get(model, (lambda: None, None, frozenset()))
    same = types == getattr(iterator, "element_spec", None)
    return compared if same and known() is function else frozenset()


def _twin_of(model: tf.keras.Model) -> Callable:
    """A training function like the model's own that XLA does not compile."""
    attributes = model.__dict__
    kept = {name: attributes[name] for name in _KEPT if name in attributes}
    with _compat.uncompiled(model):
        model.make_train_function(force=True)
    twin = model.train_function
    attributes.update(kept)
    return twin
