"""The drawer of a scheme: hands out physical batches, and counts how many it did."""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
import weakref
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip._keras_marks import calling
from tfdpclip._notes import NOTES
from tfdpclip.sampling import row_weights, sources
from tfdpclip.sampling.base import DrawKey, NeighboringRelation
from tfdpclip.sampling.capacity import few_lengths
from tfdpclip.sampling.fetching import ElementFetcher


class IteratorState:
    """The place of one iterator in the steps of a drawer.

    Attributes:
      step: the step that the iterator reads, if it reads whole steps on its own.
      piece: the next element of that step.
      after: the drawer's position after the iterator's last element; None before the
        first element.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.piece = 0
        self.after: int | None = None


class Drawer:
    """Hands out physical batches one after the other, to any iterator.

    *Formal guarantees*: if an iterator starts at the beginning of a step, its elements
    make up whole steps, even while further iterators run: each iterator gets different
    steps, or one of the iterators raises. No two elements are the same part of a step.
    If a fixed order is gathered ahead, one iterator gets all steps in a row; after
    a second iterator begins, the first one gets no more elements.
    """

    def __init__(
        self,
        scheme,
        source,
        rows,
        pieces,
        seed,
        by_group=False,
        *,
        initial_step=0,
        population=None,
        shard=None,
        views=1,
    ):
        # Copies of each row, so that `map` can augment each copy differently.
        self.views = views
        # The number of all records; `source` may hold a part of them.
        self.population = source.size if population is None else population
        self.successor: Drawer | None = None
        # Whether iterators gather ahead, which hides how far training has come.
        self.runs_ahead = False
        # What was traced of a model that trains on these records, by its function.
        self.traced: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        # For each number of replicas, the specs of the parts that they are dealt.
        self.dealt: dict[int, list[Any]] = {}
        self.by_group = by_group
        self.scheme = scheme
        self.source = source
        self.rows = rows
        self.pieces = pieces
        self.seed = seed
        self.position = initial_step * pieces
        self.delivered = 0
        # A shuffle that another drawer began cannot be continued, only begun anew.
        self._first_step = initial_step if seed is None else 0
        key = DrawKey.fresh() if seed is None else DrawKey(seed)
        self._key = dataclasses.replace(key, shard=shard)
        self._consumer: weakref.ref | None = None
        # Iterators of one data set may gather in threads of their own.
        self._lock = threading.Lock()
        self._own = IteratorState()
        # Of the iterators since a consumer began: the first iterator, and whether
        # a second iterator read the rest of a step.
        self._first: IteratorState | None = None
        self._shared = False
        self._fetcher = ElementFetcher(source, rows, pieces)
        # For a fixed order that is gathered ahead: the iterator that owns the steps.
        self._order_of: IteratorState | None = None
        # Whether a run, with a new noise matrix, began since that iterator started.
        self._began = False
        self.has_labels = len(source.row_spec) > 1
        self._weights = self.signature(())[-1]
        self._shown: weakref.WeakSet[tf.data.Dataset] = weakref.WeakSet()
        self._during: types.FrameType | None = None
        # A hash of a few records, from when ids were given, or when a step began.
        self._marks = source.marks() if source.of_people else None
        self.draws = NOTES.begin_draws(self)

    def hand_over(self, successor: Drawer) -> None:
        """Leaves all further draws to `successor`, which has a part of the records."""
        self.successor = successor
        NOTES.drawers.discard(self)

    @property
    def last(self) -> Drawer:
        """The drawer that draws now: this drawer, or the end of its successors."""
        return self if self.successor is None else self.successor.last

    @property
    def independent_groups(self) -> bool:
        relation = self.scheme.neighboring_relation
        replaced = relation is not NeighboringRelation.ADD_OR_REMOVE_ONE
        return self.by_group or self.pieces == 1 or replaced

    @property
    def varies(self) -> bool:
        """Whether the number of drawn records varies, so that rows are left over."""
        varies = self.pieces == 1 and hasattr(self.scheme, "rate")
        return varies and not self.runs_ahead

    @property
    def rows_per_record(self) -> int:
        """Rows of a record in an element: examples of a person, times views."""
        return self.source.rows_each * self.views

    @property
    def draws_people(self) -> bool:
        return self.source.of_people

    def register(self, batches: tf.data.Dataset) -> None:
        """Registers a data set that shows these draws; see `take_as_drawn`."""
        self._shown.add(batches)

    @property
    def specs(self) -> list[Any]:
        """The element specs of all data sets that show these draws."""
        shown = [batches.element_spec for batches in self._shown]
        return shown + [spec for specs in self.dealt.values() for spec in specs]

    def dealt_to(self, replicas: int) -> list[Any]:
        """The specs of the parts that so many replicas are dealt."""
        return self.dealt.get(replicas, [])

    @property
    def arrays(self) -> tuple | None:
        """The parts x, y, sample_weight of all records, as they are drawn.

        None if the records are not in memory, or may be changed after the draw.
        """
        shown = [batches._arrays for batches in self._shown]
        return self.source.arrays if shown and all(shown) else None

    def take_as_drawn(
        self,
        as_drawn: bool,
        during: types.FrameType | None = None,
        few: bool = False,
    ) -> None:
        """Sets whether later iterators give elements as long as the draw.

        Args:
          as_drawn: whether elements are as long as the draw.
          few: whether such elements have one of a few lengths, see `few_lengths`.
          during: the stack frame of the call of `fit` that this setting is for. An
            iterator that begins elsewhere, after an error ended the call, gets filled
            elements.
        """
        self._during = during if as_drawn else None
        for batches in self._shown:
            batches.take_as_drawn(as_drawn, few)

    def end_of_call(self) -> None:
        """Goes back to filled elements if the call of `take_as_drawn` is over."""
        if self._during is not None and calling("fit") is not self._during:
            self.take_as_drawn(False)

    @functools.cached_property
    def few_lengths(self) -> tuple[int, ...]:
        """The lengths, in records, of elements for which XLA compiles steps."""
        return few_lengths(self.scheme, self.population, self.rows)

    def signature(self, lengths: Sequence[int] | None) -> tuple:
        """The spec of elements: of all rows, or of any number of rows."""
        rows = None if lengths is not None else self.rows * self.source.rows_each
        parts = [
            sources.map_leaves(
                lambda spec: tf.TensorSpec((rows, *spec[0]), _tf_dtype(spec[1])),
                part,
                is_leaf=sources.is_spec,
            )
            for part in self.source.row_spec
        ]
        weight = [*parts[2:], tf.TensorSpec([rows], tf.float32)][0]
        labels = parts[1] if self.has_labels else weight
        return (*parts[:2], row_weights.fitted(weight, labels))

    def begin(self, consumer) -> int:
        """Returns how many elements of the current step `consumer` has had already.

        The number is 0 unless the last run of the same consumer stopped within a step:
        then the consumer gets the rest of that draw. The rest is skipped for a new
        consumer, for batches that are gathered ahead, and after a second iterator read
        from the step.
        """
        if self.scheme.begins_epochs and self.seed is None:
            self.begin_epoch()
        within = self.position % self.pieces
        same = self._consumer is not None and self._consumer() is consumer
        if not same or self.runs_ahead or self._shared:
            self.align()
            within = 0
        self._consumer = weakref.ref(consumer)
        self._first, self._shared = None, False
        self._began = True
        return within

    def end_run(self) -> None:
        """Lets a new iterator begin: its elements are not of the run that ended.

        Keras 3 takes an element on several replicas before `fit` reports its start.
        """
        self._began = True

    def begin_epoch(self) -> None:
        """Skips the rest of the current epoch, in which every record has its place."""
        length = self.scheme.steps_per_epoch(self.source.size) * self.pieces
        self.position += (self._first_step * self.pieces - self.position) % length

    def steps_drawn(self) -> int:
        """The number of steps that were begun, in the order of the drawer."""
        return -(-self.position // self.pieces)

    def place_in_epoch(self, step: int) -> int:
        """The number of steps before a step in its epoch, or pass over the records."""
        length = self.scheme.steps_per_epoch(self.source.size)
        return (step - self._first_step) % length

    def prepare(self) -> None:
        """Makes the records of the next step ready, before the step is counted.

        Raises:
          ValueError: if the records of a stream do not fit.
          OSError: if the copy of a stream does not fit on the disk.
        """
        with self._lock:
            place = self.position // self.pieces - self._first_step
            self.source.prepare(self.scheme, self._key, place)

    @property
    def order(self) -> dict:
        """The position in the order of steps, and the key of the order.

        JSON-ready. A shuffled order continues with its own key. Independent draws
        continue with a new key, which is as good and does not reveal earlier draws.
        """
        shuffled = not (self.scheme.independent_steps or self.scheme.amplified)
        return {
            "place": self.position // self.pieces - self._first_step,
            "key": [self._key.entropy, self._key.words] if shuffled else None,
            "seed": self.seed,
        }

    def continue_order(self, order: dict, steps: int) -> None:
        """Continues the order of an earlier drawer.

        Args:
          order: the value of `order` of a drawer of the same scheme and records.
          steps: how many steps ago `order` was read.

        Raises:
          ValueError: if more steps were drawn since, or the seeds differ.
        """
        if order["seed"] != self.seed:
            raise ValueError("the batches have another seed than before.")
        place = order["place"] + steps
        first = self.position // self.pieces - place
        if first > self._first_step and self._key_of(order) == self._key:
            raise ValueError(
                "the batches drew more steps than were trained on: make separate "
                "batches for every use besides training."
            )
        self._key, self._first_step = self._key_of(order), first
        self._fetcher.forget()

    def _key_of(self, order: dict) -> DrawKey:
        if order["key"] is None:
            return self._key
        entropy, words = order["key"]
        return dataclasses.replace(self._key, entropy=entropy, words=words)

    def align(self) -> None:
        """Skips the rest of a step that was begun."""
        self.position += -self.position % self.pieces

    def _records_of(self, step: int) -> list[np.ndarray]:
        """The records of each element of a step; the same result for every call."""
        place = step - self._first_step
        self.source.prepare(self.scheme, self._key, place)
        indices = self.scheme._drawn(self._key, self.source.size, place)
        if not self.by_group:
            starts = range(0, self.pieces * self.rows, self.rows)
            parts = [indices[start : start + self.rows] for start in starts]
        else:
            rng = self._key.rng(place, purpose=1)
            indices = rng.permutation(indices)
            group = rng.integers(0, self.pieces, len(indices))
            pieces = range(self.pieces)
            parts = [indices[group == piece][: self.rows] for piece in pieces]
        if self.source.draws_rows:
            rng = self._key.rng(place, purpose=2)
            parts = [self.source.rows_of(part, rng) for part in parts]
        return parts

    def _place_for(self, iterator: IteratorState) -> tuple[int, int]:
        """The step, and the part of the step, that an iterator gets next."""
        fresh = iterator.after is None
        if (
            not fresh
            and iterator.after != self.position
            and iterator.after % self.pieces
        ):
            raise ValueError(
                "These batches were iterated elsewhere in the middle of a step, so "
                "the step would mix parts of two draws, with a record in it more than "
                "once. While a step of several batches is under way, evaluate on "
                "separate batches, and look at separate batches."
                + see("batches-drawn-another-way")
            )
        if not fresh and iterator.after != self.position:
            self.align()
        if self._first is None:
            self._first = iterator
        elif iterator is not self._first and self.position % self.pieces and fresh:
            self._shared = True
        step, piece = divmod(self.position, self.pieces)
        self.position += 1
        iterator.after = self.position
        return step, piece

    def _whole_step_for(self, iterator: IteratorState) -> tuple[int, int]:
        """As `_place_for`, for iterators that gather ahead: each has its own steps."""
        if not iterator.piece:
            if iterator.after is not None and iterator.after % self.pieces:
                return self._place_for(iterator)
            self.align()
            iterator.step = self.position // self.pieces
            self.position += self.pieces
        step, piece = cast(int, iterator.step), iterator.piece
        iterator.piece = (piece + 1) % self.pieces
        return step, piece

    def _hold_order(self, iterator: IteratorState) -> None:
        """Gives a fixed order to one iterator, the last that began.

        The iterator gets steps in a row, so training runs on steps in a row; elements
        that were gathered and not used come after the end of training.
        """
        if iterator.step is None and iterator.after is None:
            if self._order_of is not None and not self._began:
                raise ValueError(
                    "A second iterator of batches in a fixed order would leave out "
                    "steps that the first one gathered ahead, and bring the steps of "
                    "a record closer together than the scheme keeps them. Continue "
                    "with the first iterator; evaluate on separate batches; or train "
                    "with PrivacyBudget, which begins a new noise matrix in each run."
                    + see("batches-drawn-another-way")
                )
            self._order_of, self._began = iterator, False
        elif self._order_of is not iterator:
            raise ValueError(
                "A second iterator took steps of these batches, which would bring the "
                "steps of a record closer together than the scheme keeps them. Use "
                "separate batches to evaluate or to look at records, and train with "
                "one call of fit at a time." + see("batches-drawn-another-way")
            )

    def _refuse_moved(self, piece: int) -> None:
        """Raises if the arrays changed while their rows had to stay in place."""
        people = self.source.of_people
        if self.pieces == 1 and not people:
            return
        marks = self.source.marks()
        if piece == 0 and not people:
            self._marks = marks
        if marks != self._marks:
            since = "ids were given for their rows" if people else "the step began"
            raise ValueError(
                f"The arrays of these batches were changed since {since}: a record may "
                "be in two places of a step, or under the id of a wrong person. Do not "
                "shuffle the arrays (batches are drawn at random anyway), or change "
                "them between two steps, or give copies."
                + see("batches-drawn-another-way")
            )

    def _next_records(
        self, iterator: IteratorState, lengths: Sequence[int] | None
    ) -> tuple[np.ndarray, int, tuple]:
        """The iterator's next records: their indices, number of rows, and arrays."""
        if self.runs_ahead and not self.scheme.independent_steps:
            self._hold_order(iterator)
        place_for = self._whole_step_for if self.runs_ahead else self._place_for
        step, piece = place_for(iterator)
        self._refuse_moved(piece)
        place = step * self.pieces + piece
        element = self._fetcher.element(place, lengths, self._records_of)
        self.delivered += 1
        self.draws.drawn += 1
        return element

    def next_element(
        self,
        iterator: IteratorState | None = None,
        lengths: Sequence[int] | None = None,
    ):
        """The next physical batch for an iterator.

        Args:
          iterator: the iterator's place; by default the drawer's own.
          lengths: the lengths that the element may have; empty for the number of drawn
            rows, None for all rows.

        Raises:
          ValueError: if further drawers draw for this one, or the rest of the
            iterator's step is gone.
        """
        if self.successor is not None:
            raise ValueError(
                "These batches were distributed over several machines, and each "
                "machine draws from its part of the records. Iterate the result of "
                "batches.distribute(strategy)."
            )
        iterator = self._own if iterator is None else iterator
        with self._lock:
            before = self.position, vars(iterator).copy()
            try:
                indices, rows, parts = self._next_records(iterator, lengths)
            except BaseException:
                # The next call reads the element that could not be read.
                self.position = before[0]
                vars(iterator).update(before[1])
                raise
        weights = self.source.weights(parts, indices, rows)
        weights = sources.map_leaves(lambda w: np.asarray(w, np.float32), weights)
        return (*parts[:2], row_weights.reshaped(weights, self._weights))


class DrawObserver:
    """Sees which batches were drawn since the observer was made.

    Keras callbacks do not see the data. All draws pass through this module, so
    counting them shows whether a run is fed by the scheme of its accounting.
    """

    def __init__(self):
        self._before = {drawer: drawer.delivered for drawer in NOTES.drawers}

    def drawn(self) -> list[tuple[Drawer, int]]:
        """Returns each drawer that handed out elements, and how many."""
        counts = [(d, d.delivered - self._before.get(d, 0)) for d in NOTES.drawers]
        return [(drawer, count) for drawer, count in counts if count > 0]


def _tf_dtype(dtype: np.dtype) -> tf.DType:
    return tf.string if dtype.kind == "O" else tf.as_dtype(dtype)
