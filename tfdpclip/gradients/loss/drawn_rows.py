"""Which rows of a batch are records, as the draw says.

Elements of drawn batches are filled up with rows of weight 0. A loss that ignores the
weights of the draw, or uses other weights, would make a record of each of these rows.
So the engine finds the weights at the origin of the batch, in this order:

1. in the element that a training step was given (`given_element`): `fit`, where a
   function within an eager step asks for the element at each call;
2. among the parts of the element, where a graph takes the element from an iterator or
   is a function of a data set: loops within a `tf.function`;
3. in the elements that eager code took of drawn batches, when the function is called:
   a user's own loop around a `tf.function`, or without a `tf.function`.

Where no drawn batch is known, only the weights in the loss tell padding from records.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdpclip import _keras_marks, _tf_private
from tfdpclip._devices import in_xla
from tfdpclip._docs import see
from tfdpclip._notes import NOTES
from tfdpclip._object_notes import notes_of
from tfdpclip.accounting.phases import TWO_NETWORKS, PrivacyMismatchError
from tfdpclip.gradients.errors import LossStructureError
from tfdpclip.gradients.graph import ops
from tfdpclip.sampling import handed_out
from tfdpclip.sampling.drawer import Drawer
from tfdpclip.sampling.poisson import FullBatch

_LINES = (
    " Give the step all of its element:\n"
    "    @tf.function\n"
    "    def step(x, y, w): ...\n"
    "    for x, y, w in batches: step(x, y, w)\n"
)
_OTHER_ROWS = (
    "The loss and the weights of the drawn batch differ in their number of rows, so "
    "the rows that are records are not known. Compute one loss for each row of the "
    "batch, in the order of the rows." + see("rows-that-fill-a-batch-up")
)
_PARTS = (
    "The step and the drawn element differ in their number of rows, so the step may "
    "leave out records by their places, repeat records, or take the rows that fill "
    "the element up for records." + _LINES + "For smaller batches, draw them: "
    "scheme.batches(data, accumulation_steps=2), with accumulation_steps=2 of the "
    "optimizer. If the step is of data that were not drawn, take no element before."
    + TWO_NETWORKS
    + see("rows-that-fill-a-batch-up")
)
_TWICE = (
    "A second private step would be made of one draw, and costs more than a new draw: "
    "two steps of noise multiplier z on one draw are one step of z / sqrt(2). Take a "
    "new element for every step of every private optimizer: x, y, w = next(iterator)."
    + TWO_NETWORKS
    + see("two-steps-on-one-draw")
)
IN_ONE_STEP = (
    "train_step calls minimize more than once, or in a loop, on one batch: two steps "
    "of noise multiplier z on one draw are one step of z / sqrt(2). Add up the losses, "
    "such as those of an image's captions, and call minimize once:\n"
    "    loss = tf.add_n(losses)\n"
    "    self.optimizer.minimize(loss, self.trainable_variables, tape=tape)"
    + see("two-steps-on-one-draw")
)
_UNDEALT = (
    "This step is taken under a strategy, and the drawn batch of a replica is "
    "not the replica's part of a draw: the step may mix draws, with a record in it "
    "twice, or repeat a draw. Deal out each draw:\n"
    "    for element in batches.distribute(strategy): step(element)\n"
    "    @tf.function\n"
    "    def step(element): strategy.run(replica_step, args=element)"
    + see("several-replicas")
)


class _CurrentStep(threading.local):
    """The element and the kind of the step in this thread; each replica has a thread.

    Attributes:
      weights: the weights of the elements of nested calls of `given_element`.
      releases: whether the step is a private step.
      adds_up: whether gradients of the rows may be added up; False if the computation
        is of norms alone.
    """

    def __init__(self) -> None:
        self.weights: list[Any] = []
        self.releases = False
        self.adds_up = True


_CURRENT = _CurrentStep()


@contextlib.contextmanager
def given_element(weights: Any) -> Iterator[None]:
    """Declares that the computation inside belongs to an element of drawn batches.

    Args:
      weights: the weights of the element, as the drawer made them; None for data of
        no drawn batch.
    """
    _CURRENT.weights.append(weights)
    try:
        yield
    finally:
        _CURRENT.weights.pop()


@contextlib.contextmanager
def released() -> Iterator[None]:
    """Declares that a private step is made of the computation inside."""
    _CURRENT.releases = True
    try:
        yield
    finally:
        _CURRENT.releases = False


@contextlib.contextmanager
def kept_apart() -> Iterator[None]:
    """Declares that the computation inside adds up no gradients of different rows.

    Such a computation may be of some of the rows of an element, or of rows of several
    elements.
    """
    before, _CURRENT.adds_up = _CURRENT.adds_up, False
    try:
        yield
    finally:
        _CURRENT.adds_up = before


class ExpectedRecords(NamedTuple):
    """How many records a batch of a loss should have.

    Attributes:
      records: the number of records, a scalar.
      static: the number of records if it is static, else None.
      rows_each: the number of rows of each record.
    """

    records: tf.Tensor
    static: int | None
    rows_each: int


def present_in_graph(
    graph: tf.Graph, sources: Sequence[tf.Tensor], expected: ExpectedRecords
) -> tf.Tensor | None:
    """Which places of a batch hold records.

    Args:
      graph: the graph of the loss.
      sources: the data behind the loss.
      expected: how many records the loss is of.

    Returns:
      `[records]` booleans; None if no drawn batch is known for the data.

    Raises:
      LossStructureError: if the element and the loss differ in their number of rows.
      PrivacyMismatchError: if a private step was made of the same element before.
    """
    sources = [s for s in sources if s.shape.rank and s.op.type != "Const"]
    if _CURRENT.weights and _CURRENT.weights[-1] is None:
        return None
    if _CURRENT.weights and _tf_private.is_eager(
        tf.nest.flatten(_CURRENT.weights[-1])[0]
    ):
        # A function within an eager training step: each call has its own element.
        return _of_taken(graph, expected)
    if _CURRENT.weights:
        if _are_of_other_iterators(sources, _CURRENT.weights[-1]):
            # The data are not drawn; the callback of the run reports that.
            return None
        return _of_weights(graph, _CURRENT.weights[-1], expected)
    if not sources or not _tf_private.is_function_graph(graph):
        return None
    found = next(filter(None, map(_taken_in_graph, sources)), None)
    if _keras_marks.calling("train_on_batch") is not None:
        # Keras 2 gives its function an iterator over the batch.
        return _of_taken(graph, expected, found and found[0])
    if found is None and all(s.op.type in ops.ITERATORS for s in sources):
        # The data are not drawn, whichever elements the functions around have.
        return None
    found = found or _taken_around(graph)
    if found is not None:
        weights, drawer = found
        if _CURRENT.releases and not isinstance(drawer.scheme, FullBatch):
            _refuse_second(graph, weights)
        return _of_weights(graph, weights, expected)
    if all(map(_fed_by_fit, sources)):
        return None  # No iterator around the step has an element that was drawn.
    return _of_taken(graph, expected)


def present_in_eager(records: int) -> tf.Tensor | None:
    """Which places of a batch hold records, for a loss of eager code, a row each."""
    if _CURRENT.weights and _CURRENT.weights[-1] is None:
        return None
    if _CURRENT.weights:
        found = _by_record(_CURRENT.weights[-1], 1)
        if found.shape[0] != records:
            raise LossStructureError(_OTHER_ROWS)
        return found
    masks = _masks(records, 1, _Use(_CURRENT.releases, adds_up=True), told_apart=False)
    NOTES.note_assumption(
        "eager steps kept the records of a batch apart, which is proven inside a "
        "tf.function only"
    )
    return tf.constant(masks[0]) if masks.shape == (1, records) else None


def function_of_loop(graph: Any) -> Any:
    """The function that a loop calls for its private step in an inner function.

    None where the step's graph is the function itself, and in `fit`.

    Args:
      graph: the graph of the loss.
    """
    if _CURRENT.weights or not _tf_private.is_function_graph(graph):
        return None
    called, outer = None, graph
    while _tf_private.is_function_graph(outer):
        called = _tf_private.function_around(outer)
        if _tf_private.is_function_of_data_set(called):
            return None
        outer = called.outer_graph
    return None if called is graph else called


# Way 2: the element is in the graph.


def _taken_in_graph(tensor: tf.Tensor) -> tuple[list[tf.Tensor], Drawer] | None:
    """The weights and the drawer of the element that a tensor is a part of."""
    graph: Any = tensor.graph
    while _tf_private.is_function_graph(graph):
        outside = {id(inner): outer for outer, inner in graph.captures}.get(id(tensor))
        if outside is None or _tf_private.is_eager(outside):
            break
        tensor, graph = outside, outside.graph
    if tensor.op.type != "Placeholder":
        # The outputs of an iterator, or of a branch that asks an iterator for more.
        return _weights_among(tensor.op.outputs)
    own = _tf_private.is_function_of_data_set(graph)
    own = own or getattr(graph, "name", "") in _keras_marks.STEP_FUNCTIONS
    return _weights_at_end(graph) if own else None


def _fed_by_fit(tensor: tf.Tensor) -> bool:
    """Whether `fit` hands a tensor to its function of a step, from an iterator."""
    graph: Any = tensor.graph
    if getattr(graph, "name", "") not in _keras_marks.STEP_FUNCTIONS:
        return False
    if tensor.op.type != "Placeholder" or _keras_marks.calling("fit") is None:
        return False
    captured = any(tensor is inner for _, inner in graph.captures)
    around = graph.outer_graph
    return not captured and any(
        _tf_private.is_function_graph(around) and op.type in ops.ITERATORS
        for op in around.get_operations()
    )


def _taken_around(graph: Any) -> tuple[list[tf.Tensor], Drawer] | None:
    """The weights and the drawer of the only element that the functions around take."""
    graph = _tf_private.function_around(graph).outer_graph
    while _tf_private.is_function_graph(graph):
        taken = [
            op.outputs for op in graph.get_operations() if op.type in ops.ITERATORS
        ]
        found = list(filter(None, map(_weights_among, taken)))
        if _tf_private.is_function_of_data_set(graph):
            found += filter(None, [_weights_at_end(graph)])
        if len(found) == 1:
            return found[0]
        if found:
            raise LossStructureError(
                "Several elements are taken from iterators around the function that "
                "contains the private step, so the rows that are records cannot be "
                "told from filling. Compute the loss where its element is taken."
                + see("rows-that-fill-a-batch-up")
            )
        graph = graph.outer_graph
    return None


def _weights_at_end(graph: Any) -> tuple[list[tf.Tensor], Drawer] | None:
    """The weights and the drawer, if a function's last arguments are an element."""
    given = _arguments_of(graph)
    for start in range(len(given)):
        if (found := _weights_among(given[start:])) is not None:
            return found
    return None


def _weights_among(
    tensors: Sequence[tf.Tensor],
) -> tuple[list[tf.Tensor], Drawer] | None:
    """The weights among tensors, and the drawer, if the tensors are a drawn element."""
    for drawer in list(NOTES.drawers):
        for spec in drawer.specs:
            flat = tf.nest.flatten(spec, expand_composites=True)
            number = len(tf.nest.flatten(spec[-1]))
            if found := _weights_by(flat, number, tensors):
                return found, drawer
    return None


def _weights_by(
    specs: Sequence[tf.TensorSpec], number: int, tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """The last `number` tensors if all tensors fit the specs; else an empty list."""
    fits = len(specs) == len(tensors) and all(map(_fits, specs, tensors))
    return list(tensors[-number:]) if fits else []


def _fits(spec: tf.TensorSpec, tensor: tf.Tensor) -> bool:
    """Whether a tensor may hold rows of a spec, in any number."""
    if spec.dtype != tensor.dtype or not tensor.shape.rank:
        return False
    return spec.shape[1:].is_compatible_with(tensor.shape[1:])


def _are_of_other_iterators(sources: Sequence[tf.Tensor], weights: Any) -> bool:
    """Whether all data behind a loss come from iterators of different elements."""
    own = tf.nest.flatten(weights)[0].op
    return bool(sources) and all(
        s.op.type in ops.ITERATORS and s.op is not own for s in sources
    )


def refuse_second_in_fit(graph: tf.Graph, optimizer: str) -> None:
    """Raises if a `train_step` makes a second private step of its element.

    Args:
      graph: the graph of the loss.
      optimizer: the identity of the optimizer; another optimizer's step is reported by
        the callback of the run, which may be told to leave it out.
    """
    weights = tf.nest.flatten(_CURRENT.weights[-1:])
    if weights and None not in weights and not any(map(_tf_private.is_eager, weights)):
        _refuse_second(graph, weights, IN_ONE_STEP, optimizer)
        while _tf_private.is_function_graph(graph) and graph is not weights[0].graph:
            if _tf_private.is_loop_body(graph):
                raise PrivacyMismatchError(IN_ONE_STEP)
            graph = graph.outer_graph


def _refuse_second(
    graph: tf.Graph,
    weights: Sequence[tf.Tensor],
    message: str = _TWICE,
    optimizer: str = "",
) -> None:
    before = notes_of(graph).released
    if weights and (weights[0].ref(), optimizer) in before:
        raise PrivacyMismatchError(message)
    before.update((w.ref(), optimizer) for w in weights[:1])


def _of_weights(graph: Any, weights: Any, expected: ExpectedRecords) -> tf.Tensor:
    """The mask of known weights, checked to have a row for each row of the loss."""
    inner = [
        w if w.graph is graph else graph.capture(w) for w in tf.nest.flatten(weights)
    ]
    if _replicas() > 1 and _CURRENT.releases:
        inner = _dealt(inner)
    found = _by_record(inner, expected.rows_each)
    static = expected.static, found.shape[0]
    if None not in static and static[0] != static[1]:
        raise LossStructureError(_OTHER_ROWS)
    if None in static and not in_xla():
        # Without the numbers: how many records were drawn is private.
        agree = tf.equal(tf.shape(found)[0], expected.records)
        same = tf.debugging.Assert(agree, [_OTHER_ROWS])
        with tf.control_dependencies([] if same is None else [same]):
            found = tf.identity(found)
    return found


def _dealt(weights: list[tf.Tensor]) -> list[tf.Tensor]:
    """The weights of a replica's part of a draw; raises for other drawn batches."""
    specs = [
        spec for drawer in list(NOTES.drawers) for spec in drawer.dealt_to(_replicas())
    ]
    rows = {tf.nest.flatten(spec[-1])[0].shape[0] for spec in specs}
    static = weights[0].shape[0]
    if not rows or (static is not None and None not in rows and static not in rows):
        raise PrivacyMismatchError(_UNDEALT)
    if static is not None or None in rows:
        return weights
    fits = tf.reduce_any(tf.equal(tf.shape(weights[0])[0], sorted(rows)))
    with tf.control_dependencies([tf.debugging.Assert(fits, [_UNDEALT])]):
        return [tf.identity(weight) for weight in weights]


def _by_record(weights: Any, rows_each: int) -> tf.Tensor:
    found = [tf.reshape(w, [tf.shape(w)[0], -1]) != 0 for w in tf.nest.flatten(weights)]
    rows = tf.reduce_any([tf.reduce_any(w, axis=1) for w in found], axis=0)
    static = tf.nest.flatten(weights)[0].shape[0]
    rows.set_shape([static])
    if rows_each == 1:
        return rows
    return tf.reduce_any(tf.reshape(rows, [-1, rows_each]), axis=1)


# Way 3: eager code has taken the element.


def _of_taken(
    graph: Any, expected: ExpectedRecords, weights: list[tf.Tensor] | None = None
) -> tf.Tensor | None:
    """The mask of the element that eager code takes before the call of the function.

    Args:
      graph: the graph of the loss.
      expected: how many records the loss is of.
      weights: the weights that the step is given, if not by its arguments.
    """
    around = _tf_private.function_around(graph)
    called = _called_from_outside(around)
    if called is None:
        return None
    on_batch = _keras_marks.calling("train_on_batch") is not None
    own = weights or _weights_given(around)
    if _replicas() > 1:
        if own is None:
            return None
        if _CURRENT.releases and not _replica():
            _release_once(called)
        return _of_weights(graph, own, expected)
    use = _Use(_CURRENT.releases, _CURRENT.adds_up or _CURRENT.releases)
    unseen = use.releases and own is not None and tf.distribute.has_strategy()

    def masks():
        if on_batch and _keras_marks.calling("train_on_batch") is None:
            return tf.zeros([0, 0], tf.bool)  # `fit` calls the same function.
        told = own is not None
        taken = NOTES.candidate_elements()
        if taken and use.adds_up and not _CURRENT.weights:
            handed_out.note_other_arguments(taken)
        found = _masks(expected.static, expected.rows_each, use, told)
        if unseen and not len(found):
            # Its element came from an iterator that the strategy made of the batches.
            raise PrivacyMismatchError(_UNDEALT)
        return tf.constant(found)

    with tf.init_scope():
        saved = tf.zeros([0, 0], tf.bool)
    spec = tf.TensorSpec([None, None], tf.bool)
    given = _tf_private.value_at_call(called, masks, spec, saved)
    given = given if called is graph else graph.capture(given)
    return _fitted(given, own, graph, expected, use.adds_up)


def _called_from_outside(function: Any) -> Any:
    """The function, or a function around it, that can ask Python at each call.

    None within a function that a data set applies to its elements.
    """
    found, within = function, False
    outer = function.outer_graph
    while _tf_private.is_function_graph(outer):
        around = _tf_private.function_around(outer)
        within |= around is not outer
        # A branch or a loop cannot ask Python; a function asks at every call.
        found = around if within else found
        outer = around.outer_graph
        if _tf_private.is_function_of_data_set(around):
            return None
    return None if _tf_private.is_function_of_data_set(function) else found


def _replicas() -> int:
    context = tf.distribute.get_replica_context()
    return 1 if context is None else context.num_replicas_in_sync


def _replica() -> int:
    place = tf.distribute.get_replica_context().replica_id_in_sync_group
    return int(tf.get_static_value(place))


def _arguments_of(graph: Any) -> list[tf.Tensor]:
    """The arguments of a function; of several replicas' arguments, this replica's."""
    inner = {id(t) for _, t in graph.captures}
    given = [t for t in graph.inputs if id(t) not in inner]
    # Keras 3 gives its function the elements of all replicas, part by part.
    return given[_replica() :: _replicas()] if _replicas() > 1 else given


def _release_once(called: Any) -> None:
    """Makes every call raise whose element was used in a private step before."""

    def release():
        if not NOTES.release_dealt():
            raise PrivacyMismatchError(_TWICE)
        return tf.constant(True)

    with tf.init_scope():
        saved = tf.constant(True)
    _tf_private.value_at_call(called, release, tf.TensorSpec([], tf.bool), saved)


def _fitted(masks, own, graph, expected, adds_up) -> tf.Tensor:
    """The step's mask among the possible masks.

    All rows are records if no element is known, or if no mask has the length of the
    step. A sum over rows of another length is refused, unless all of the element's
    records are among the rows.
    """
    number, length = tf.unstack(tf.shape(masks))
    records = expected.records
    wide = tf.concat([masks, tf.ones([number, records], tf.bool)], axis=1)
    fits = tf.equal(length, records) | tf.equal(number, 0)
    wide = tf.where(fits, wide[:, :records], True)
    # `_masks` has raised if there are several masks and no weights.
    rows, told, given = tf.reduce_all(wide, axis=0), tf.constant(True), records
    if own is not None:
        inner = [w if w.graph is graph else graph.capture(w) for w in own]
        mine = _by_record(inner, expected.rows_each)
        same = tf.reduce_any(tf.reduce_all(tf.equal(wide, mine), axis=1))
        several = number > 1
        # Where no element is known, the weights that the step was given tell.
        theirs = several | tf.equal(number, 0)
        rows = tf.where(theirs | ~fits if adds_up else theirs, mine, rows)
        told = ~several | same | ~fits if adds_up else ~several | same
        given = _count(mine)
        told = _or_raise(graph, told, _UNTOLD)
    if not adds_up:
        return rows & told
    drawn = _count(masks, axis=1)
    complete = fits | tf.reduce_any(tf.equal(drawn, given))
    return rows & told & _or_raise(graph, complete, _PARTS)


def _or_raise(graph: Any, condition: tf.Tensor, message: str) -> tf.Tensor:
    """A condition, which raises if it is False; later, where XLA compiles the step."""
    if in_xla():
        notes_of(graph).known_rows.append((condition, message))
        return condition
    wrong = tf.debugging.Assert(condition, [message])
    with tf.control_dependencies([] if wrong is None else [wrong]):
        return tf.identity(condition)


def known_in_compiled_code(graph: tf.Graph) -> list[tuple[tf.Tensor, str]]:
    """Whether the rows of a step are known, where XLA compiles it; taken once.

    Args:
      graph: the graph of the loss.

    Returns:
      Boolean scalars, each with the error that False means. Compiled code cannot raise,
      and takes no row for a record then.
    """
    notes = notes_of(graph)
    known, notes.known_rows = notes.known_rows, []
    return known


def _count(mask: tf.Tensor, axis: int | None = None) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(mask, tf.int32), axis=axis)


def _weights_given(graph: Any) -> list[tf.Tensor] | None:
    """The weights among the arguments of a function that is given whole elements."""
    given = _arguments_of(graph)
    places = range(len(given) + 1)
    taken = handed_out.unused_first(NOTES.candidate_elements())
    # Keras gives its function a batch and nothing else, so the weights are at the end;
    # the weights of one of several outputs alone are not the weights of the records.
    last = len(given) if graph.name in _keras_marks.STEP_FUNCTIONS else 0
    for part in (
        given[start:end] for start in places for end in places[max(start + 2, last) :]
    ):
        if found := _weights_among(part):
            return found[0]
        for element in taken:
            # The object that drew the batches may be gone.
            if weights := _weights_by(element.specs, element.weights, part):
                return weights
    return None


_UNTOLD = (
    "Several elements of drawn batches are at hand, and none of them has the weights "
    "that the step was given, so the rows that are records are not known."
    + _LINES
    + see("rows-that-fill-a-batch-up")
)


class _Use(NamedTuple):
    """The use of a step's gradients.

    Attributes:
      releases: whether the step is a private step.
      adds_up: whether gradients of different rows are added up.
    """

    releases: bool
    adds_up: bool


def _masks(
    records: int | None, rows_each: int, use: _Use, told_apart: bool
) -> np.ndarray:
    """Which rows of the step's element hold records.

    Args:
      records: how many records the step is of; None if the number is not static.
      rows_each: the number of rows of each record.
      use: the use of the step's gradients.
      told_apart: whether the step has weights that tell its element from the rest.

    Returns:
      `[K, rows]`: the masks of K elements, the step's element among them; K is 0
      where no element is known. Where the step has another number of rows, it adds
      up gradients, and may hold all records of an element.
    """
    if _CURRENT.weights and _CURRENT.weights[-1] is not None:
        given = _by_record(_CURRENT.weights[-1], rows_each).numpy()
        if records not in (None, len(given)):
            raise LossStructureError(_OTHER_ROWS)
        return given[np.newaxis]
    taken = NOTES.candidate_elements()
    named = _named_element(taken) if use.releases else None
    _refuse_used(named)
    found = [e for e in handed_out.unused_first(taken) if e.rows_each == rows_each]
    if records is not None:
        _refuse_repeated_rows(found, records)
        found = _of_length(found, records, use.adds_up, told_apart)
    masks = {e.records.tobytes(): e.records for e in found}
    if not masks:
        return np.ones([0, 0], bool)
    lengths = {len(mask) for mask in masks.values()}
    if len(lengths) > 1 or (len(masks) > 1 and not told_apart):
        raise PrivacyMismatchError(
            f"{len(masks)} elements of drawn batches are at hand, and the element of "
            "this step cannot be told from the rest, so neither can the rows that are "
            "records." + _LINES + see("rows-that-fill-a-batch-up")
        )
    if use.releases and all(e.released and e.once for e in found):
        raise PrivacyMismatchError(_TWICE)
    if use.releases:
        _release(found, named)
    return np.stack(list(masks.values()))


def _named_element(taken: Sequence[Any]) -> Any:
    """The element among several whose tensors the step was called with, or None."""
    if len(taken) < 2:
        return None
    given = set(map(id, handed_out.arguments_of_call()))
    named = [e for e in taken if not given.isdisjoint(map(id, e.tensors()))]
    return named[0] if len(named) == 1 else None


def _refuse_used(named: Any) -> None:
    """Raises if a private step used the element, unless that was a guess."""
    if named is None or not (named.released and named.once):
        return
    if not NOTES.mark_other_released(named):
        raise PrivacyMismatchError(_TWICE)


def _release(found: Sequence[Any], named: Any) -> None:
    """Notes the use of the element by a private step, or of one of several."""
    if named is not None or len(found) == 1:
        element = found[0] if named is None else named
        NOTES.mark_released(element, element.use)
    else:
        NOTES.mark_one_released(found)


def _of_length(
    found: Sequence[Any], records: int, adds_up: bool, told_apart: bool
) -> Sequence[Any]:
    """The elements that a step of so many records may be of."""
    fitting = [e for e in found if len(e.records) == records]
    if fitting or not adds_up:
        return fitting
    complete = told_apart or any(e.records.sum() == records for e in found)
    if found and not complete:
        raise PrivacyMismatchError(_PARTS)
    return found


def _refuse_repeated_rows(found: Sequence[Any], records: int) -> None:
    """Raises if the step seems to contain the only element at hand more than once."""
    if len(found) != 1 or found[0].released or not found[0].held:
        return
    rows = len(found[0].records)
    if records > rows and records % rows == 0:
        raise PrivacyMismatchError(
            f"The step is of {records} rows, and the drawn element has {rows}: a "
            "record would be in the step more than once, and clipped as several "
            "records. For augmented views, draw batches with views: "
            f"scheme.batches(data, views={records // rows}), and map."
            + TWO_NETWORKS
            + see("records-of-several-rows")
        )
