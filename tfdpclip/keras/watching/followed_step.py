"""Gives a model's `train_step` its element, and notes which rows were drawn."""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdpclip import _keras_marks, _tf_private
from tfdpclip._docs import TracedError, see
from tfdpclip._notes import NOTES
from tfdpclip.accounting.phases import PrivacyMismatchError
from tfdpclip.gradients.loss import drawn_rows
from tfdpclip.keras import _compat, loss_shapes
from tfdpclip.keras.watching.step_labels import StepFunctions
from tfdpclip.sampling.batches import Batches

# The beginning of Python's error if a `train_step` unpacks (x, y) from (x, y, weights).
_TWO_OF_THREE = "too many values to unpack (expected 2"


class FollowedStep:
    """Replaces a model's `train_step` while the model is trained on drawn batches.

    *Formal guarantees*: a private step within `train_step` knows which rows were drawn,
    by the weights of the element, whatever `train_step` does with the element. A
    `train_step` that takes (x, y) or x, without weights, gets (x, y) or x.

    Args:
      model: the model; held by a weak reference.

    Attributes:
      batches: the batches of the elements. While this is None, `train_step` runs
        without changes.
    """

    def __init__(self, model: tf.keras.Model):
        self._model = weakref.ref(model)
        self.batches: Batches | None = None
        #: The graph of the function in which `train_step` was last traced.
        self.graph: Any = None
        #: The training function with this step inside. References to functions are
        #: weak, because a training function keeps its model alive.
        self.function: Callable[[], Any] = lambda: None
        #: Whether `train_step` takes the private step in a function of its own.
        self.calls_private_step = False
        #: The last training function that needs no comparison any more, the types of
        #: its data, and the keys of the losses that were compared.
        self.compared: tuple[Callable[[], Any], Any, frozenset] | None = None
        # A `train_step` that was assigned to the model object, if there is one.
        self._given: Any = None

    # AutoGraph converts this method where Keras has `train_step` converted.
    def __call__(self, data):
        model = self._model()
        step = self._given
        if step is None:
            step = _bound_step(model)
        self.graph = _function_here()
        if self.batches is None or not _is_element(data):
            return step(data)
        with drawn_rows.given_element(data[2]):
            if (step.__module__ or "").startswith(_keras_marks.MODULES):
                fitted = loss_shapes.fitted_weights(model, *data[1:])
                return step((*data[:2], fitted))
            try:
                logs = step(data)
            except (AttributeError, TypeError, ValueError) as error:
                fewer = _as_taken(data, error, self.batches)
            else:
                _refuse_second_call(self.graph, model.optimizer)
                return logs
            return step(fewer)

    @contextlib.contextmanager
    def in_place(self, batches: Batches | None) -> Iterator[None]:
        """Replaces the model's `train_step`, wherever Keras looks it up.

        Args:
          batches: the batches of the elements, if they are known.
        """
        attributes = self._model().__dict__
        self._given = attributes.get("train_step")
        # A plain assignment would go through Keras's attribute tracking.
        attributes["train_step"] = self
        self.batches = batches
        try:
            yield
        finally:
            self.batches = self.graph = None
            del attributes["train_step"]
            if self._given is not None:
                attributes["train_step"], self._given = self._given, None


@tf.autograph.experimental.do_not_convert
def _refuse_second_call(graph: tf.Graph | None, optimizer: Any) -> None:
    """Raises if a `tf.function` with the private step is called again on one element.

    The second call makes no trace, so the step itself cannot know of it. Replicas have
    a call each.
    """
    history = getattr(optimizer, "_step_history", None)
    if graph is None or history is None or tf.distribute.in_cross_replica_context():
        return
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    if replicas == 1 and StepFunctions(graph, history.identity).has_several_steps():
        raise PrivacyMismatchError(drawn_rows.IN_ONE_STEP)


def followed_step(model: tf.keras.Model) -> FollowedStep:
    """The replacement of a model's `train_step`, placed in its training function.

    A training function that already contains `train_step` is made again, once.
    """
    step = NOTES.followed_steps.setdefault(model, FollowedStep(model))
    placed = step.function() is model.train_function is not None
    if _compat.KEEPS_STEP and not (placed or _compat.has_own_function(model)):
        with step.in_place(None):
            model.make_train_function(force=True)
    if model.train_function is not None:
        step.function = weakref.ref(model.train_function)
    return step


def _bound_step(model: tf.keras.Model) -> Any:
    """The method `train_step`; if it is a `tf.function`, without earlier traces.

    A trace of it reads the weights of the element in the trace of the training function
    around it, so that it is of no use in another trace.
    """
    step = type(model).train_step
    if _tf_private.trace_count(step) is not None and not tf.executing_eagerly():
        step = copy.copy(step)
    return step.__get__(model, type(model))


def has_own_step(model: tf.keras.Model) -> bool:
    """Whether `train_step` is not Keras's."""
    step = model.__dict__.get("train_step") or type(model).train_step
    return not (getattr(step, "__module__", "") or "").startswith(_keras_marks.MODULES)


def has_functions_within(model: tf.keras.Model) -> bool:
    """Whether `train_step` is a `tf.function`, or its code names one.

    The methods of the model that the code names are looked at, too.
    """
    kind, attributes = type(model), model.__dict__
    open_yet: list[Any] = [attributes.get("train_step") or kind.train_step]
    seen: list[Any] = []
    while open_yet:
        found = open_yet.pop()
        if _tf_private.trace_count(found) is not None:
            return True
        found = getattr(found, "__func__", found)
        own = (getattr(found, "__module__", "") or "").startswith(_keras_marks.MODULES)
        if own or not inspect.isfunction(found) or found in seen:
            continue
        seen.append(found)
        for name in _names_in(found.__code__):
            open_yet += [attributes.get(name), inspect.getattr_static(kind, name, None)]
        around = inspect.getclosurevars(found)
        open_yet += [*around.globals.values(), *around.nonlocals.values()]
    return False


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names in a function's code, and in the functions that it defines."""
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _names_in(part)


@tf.autograph.experimental.do_not_convert
def _function_here() -> tf.Graph | None:
    """The graph of the function that is being traced; None in eager code."""
    if tf.executing_eagerly():
        return None
    return _tf_private.function_around(tf.compat.v1.get_default_graph())


def _is_element(data: Any) -> bool:
    return isinstance(data, tuple) and len(data) == 3


@tf.autograph.experimental.do_not_convert
def _as_taken(data: tuple, error: Exception, batches: Batches) -> Any:
    """The parts of an element for a `train_step` that failed on the whole element.

    Raises:
      Exception: the given error, if its cause is not the number of parts.
      ValueError: if the weights are more than a mark of the drawn rows.
    """
    labelled = data[1] is not None
    if labelled and _TWO_OF_THREE not in str(error):
        raise error
    if batches.weighted:
        raise TracedError(
            "train_step takes no weights, but the weights of these batches matter "
            "(sample_weight, class_weight, or people with few examples). "
            "Write\n"
            "    x, y, w = tf.keras.utils.unpack_x_y_sample_weight(data)\n"
            "    ...\n"
            "    loss = self.compute_loss(x, y, y_pred, w)\n"
            "as docs/train_step.md has it." + see("rows-that-fill-a-batch-up")
        ) from error
    return data[:2] if labelled else data[0]
