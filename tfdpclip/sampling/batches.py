"""Batches that a sampling scheme drew, as a data set."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf

from tfdpclip import _arguments, _tf_private
from tfdpclip._docs import see
from tfdpclip.sampling import (
    class_weights,
    columns,
    distributed,
    handed_out,
    record_map,
    row_weights,
    sources,
)
from tfdpclip.sampling.allocation import RandomAllocation
from tfdpclip.sampling.base import DrawKey, SamplingScheme
from tfdpclip.sampling.capacity import MOST_ROWS, fit_capacity
from tfdpclip.sampling.drawer import Drawer
from tfdpclip.sampling.elements import REFUSED as _REFUSED
from tfdpclip.sampling.elements import drawn_elements
from tfdpclip.sampling.people import CappedExamples, People
from tfdpclip.sampling.poisson import CappedPoisson
from tfdpclip.sampling.refusals import NO_PREFETCH, REFUSAL, refuse_the_rest
from tfdpclip.sampling.streams import Stream, StreamSource

# More Python threads than this only wait for each other.
MOST_WORKERS = 1024

_PEOPLE = (
    "a record is a person, with all examples of the same id; the ids that came with "
    "the data tell people apart; a step has at most {} examples of a person"
)


class Batches(tf.data.Dataset):
    """A `tf.data.Dataset` of (x, y, sample_weight), drawn by a sampling scheme.

    Made by the `batches` method of a scheme; give it to `model.fit` directly.

    *Formal guarantees*

    * Step t's records are drawn by `scheme`, whatever the physical batch size, the
      number of steps asked for, or how often the data set is iterated: every new
      iterator goes on with draws not yet handed out, and never repeats one.
    * Randomness is fresh from the operating system, unless `seed` is given. A seed
      makes draws a function of the seed and the step: anyone who knows the seed knows
      who was drawn, and amplification by sampling is void. `seed` is for experiments,
      and privacy statements say so.
    * All elements have one static shape. Rows beyond the drawn records are zeros with
      sample weight 0. An empty draw is an ordinary element. In a call of `fit`
      that `PrivacyBudget` (or a plan) watches, elements of a scheme with varying draws
      have as many rows as were drawn, or a single row of weight 0 for an empty draw:
      the trainer sees the number of rows, as the trainer sees the time of a step;
      a recipient of the model does not. For XLA, eager steps and custom training
      functions, elements stay filled.
    * A logical step is exactly `accumulation_steps` consecutive elements.
    * Every method returns `Batches` of the same draws, or refuses: `map` works record
      by record, and cannot mix, repeat, keep or replace records. `map_batches` can, and
      says so in `assumptions`.

    | situation | what happens |
    | --- | --- |
    | an empty draw | a step of zero-weight rows: pure noise |
    | more drawn than fit | a random subset stays; `scheme` accounts for it |
    | a record of a deviating shape | an error before the first draw, or weight 0 |
    | data are x only | elements are (x, None, sample_weight) |
    | labels for each token | weights `[B, 1]`, or the given weights, `[B, T]` |
    | `fit(..., steps_per_epoch=n)` | use `batches.repeat()`, as for any `tf.data` |

    Args:
      scheme: The sampling scheme.
      data: The records, see `tfdpclip.sampling.open_source`. float64 becomes float32,
        as in Keras.
      physical_batch_size: Records per element. By default, enough for the scheme.
      accumulation_steps: Elements per logical step; the optimizer needs the same.
      independent_groups: For clipping per group (``unit="batch"`` with accumulation)
        if records are added or removed: every drawn record goes to a uniformly random
        element of its step, independently of the rest of the draw, so that adding a
        record changes one group only. By default elements are filled in turn.
      steps: Logical steps per iteration; `scheme.steps_per_epoch` by default.
      seed: Fixes the draws. For experiments only.
      workers: For data with `__getitem__`: how many threads may call it at a time. 1
        by default, since not every object allows concurrent calls: if two threads
        seek in one file, each may read the wrong record.
      views: Augmented views of each record (De et al. 2022): the row is repeated
        `views` times, and `map` changes each copy with independent randomness. The
        losses of the views are averaged, and the record is clipped once, by an
        optimizer with ``rows_per_record=batches.rows_per_record``; a plan sets this.
      people: An id of the person of each example: then records are people, and the
        scheme draws people. `CappedPoisson` draws examples, after a random choice, made
        once, of at most `scheme.per_person` examples of each person. The optimizer
        needs ``unit="person"`` as well.
      per_person: The number of a person's examples in a step, drawn anew each time, or
        all if the person has fewer. Their losses are averaged. `CappedPoisson` has its
        own `per_person`.

    Raises:
      ValueError: If an argument is out of range, the data do not fit the scheme, the
        weights fit no labels, or the physical batches are too small for the scheme.

    >>> import numpy as np
    >>> from tfdpclip import sampling
    >>> x, y = np.ones((100, 3)), np.arange(100)
    >>> batches = sampling.Poisson(0.1).batches((x, y), seed=1)
    >>> len(batches), batches.expected_batch_size
    (10, 10.0)
    >>> features, labels, weights = next(iter(batches))
    >>> features.shape == (batches.physical_batch_size, 3)
    True
    """

    def __init__(
        self,
        scheme: SamplingScheme,
        data: Any,
        *,
        physical_batch_size: int | None = None,
        accumulation_steps: int = 1,
        independent_groups: bool = False,
        steps: int | None = None,
        seed: int | None = None,
        workers: int | None = None,
        views: int = 1,
        people: Any = None,
        per_person: int | None = None,
    ):
        wanted = "a sampling scheme, such as Poisson(0.01)"
        _arguments.instance("scheme", scheme, SamplingScheme, wanted)
        accumulation_steps = _arguments.integer(
            "accumulation_steps", accumulation_steps, 1, MOST_ROWS
        )
        _arguments.boolean("independent_groups", independent_groups)
        seed = _arguments.optional(_arguments.integer, "seed", seed)
        views = _arguments.integer("views", views, 1, MOST_ROWS)
        source = _open_source(scheme, data, workers, people, per_person, seed)
        by_group = independent_groups and accumulation_steps > 1
        drawn, rows = fit_capacity(
            scheme, source.size, physical_batch_size, accumulation_steps, by_group
        )
        if steps is None:
            steps = scheme.steps_per_epoch(source.size)
        steps = _arguments.integer("steps", steps, 1, MOST_ROWS)
        # An element is gathered ahead where this cannot misalign steps.
        may_run_ahead = accumulation_steps == 1 and drawn.independent_steps
        ahead = int(may_run_ahead and seed is None)
        if not drawn.independent_steps:
            # An index must stand for the same record over the steps: shuffling the
            # arrays in place would bring a record into consecutive steps.
            source = source.kept()
        self._drawer = Drawer(
            drawn,
            source,
            rows,
            accumulation_steps,
            seed,
            by_group,
            views=views,
        )
        self._asked = (scheme, physical_batch_size)
        self._steps = steps
        self._assumptions: tuple[str, ...] = source.assumptions
        if per_person is not None:
            self._assumptions += (_PEOPLE.format(source.rows_each),)
        self._recipe: tuple[Callable, ...] = ()
        # After `take`: whether an iteration may end in the middle of a step.
        self._cut: bool | None = None
        # The number of replicas that contribute to a draw.
        self._replicas = 1
        self._ahead = steps, ahead
        self._drawer.draws.ahead = max(self._drawer.draws.ahead, ahead)
        # Earlier data sets of the same draws, by the lengths of their elements.
        self._others: dict = {}
        self._by_class = False
        self._changes_records = False
        self._lengths: Sequence[int] | None = None
        self._wrap(self._elements(None))
        self._drawer.register(self)

    def _elements(self, lengths: Sequence[int] | None) -> tf.data.Dataset:
        """The data set of the draws, with all transformations so far."""
        steps, ahead = self._ahead
        dataset = drawn_elements(self._drawer, steps, lengths)
        dataset = dataset.prefetch(ahead) if ahead else dataset
        for change in self._recipe:
            dataset = change(dataset)
        return dataset

    def _wrap(self, dataset: tf.data.Dataset) -> None:
        self._wrapped = dataset
        super().__init__(_tf_private.variant_of(dataset))

    def take_as_drawn(self, as_drawn: bool, few: bool = False) -> None:
        """Sets whether later iterators give elements as long as the draw.

        `PrivacyBudget` and the callbacks of a plan set this for each call of `fit`.

        Args:
          as_drawn: if False, elements are filled up to `physical_batch_size`. Draws of
            fixed size, or of several elements, are always filled.
          few: whether elements have one of three lengths, filled up by rows of
            weight 0: XLA compiles a step for each length.
        """
        lengths: Sequence[int] | None = None
        if as_drawn and self._drawer.varies:
            lengths = self._drawer.few_lengths if few else ()
        if lengths != self._lengths:
            self._others[self._lengths] = self._wrapped
            self._lengths = lengths
            self._wrap(self._others.pop(lengths, None) or self._elements(lengths))

    def _derived(
        self, change: Callable, *assumptions: str, steps: int | None = None
    ) -> Batches:
        """The same draws, transformed by `change`, a function of data sets."""
        derived = object.__new__(Batches)
        derived.__dict__.update(vars(self))
        derived._steps = self._steps if steps is None else steps
        derived._assumptions = tuple(dict.fromkeys((*self._assumptions, *assumptions)))
        derived._recipe = (*self._recipe, change)
        derived._others = {}
        derived._wrap(change(self._wrapped))
        derived._drawer.register(derived)
        return derived

    def distribute(self, strategy: tf.distribute.Strategy) -> Any:
        """Divides the draws among the replicas of a strategy, on one or more machines.

            with strategy.scope():
                model.compile(dpc.keras.DPSGD(...), ...)
            steps = batches.steps_per_epoch * batches.accumulation_steps
            model.fit(batches.distribute(strategy), steps_per_epoch=steps, ...)

        The rows of an element are dealt to the replicas of a machine in turn, with
        rows of weight 0 added to make equal parts. The data set has no end: give
        `steps_per_epoch`.

        *Formal guarantees*: on one machine the draws are the draws of these batches,
        in order; a fixed order belongs to the last iterator that began. Each of W
        machines has a part of the records (machine w has records w, w + W, ...) and
        draws from this part independently, at the same rate: together the parts are a
        Poisson sample of all records. Given the draws of all further machines,
        a record is in a step as under the scheme of its own part, which is the scheme
        of the accounting.

        Args:
          strategy: a `MirroredStrategy`, `MultiWorkerMirroredStrategy` or
            `OneDeviceStrategy`.

        Returns:
          Data for `fit` or `iter`. On several machines, these batches draw no more.

        Raises:
          ValueError: for another strategy, or, on several machines, for a scheme whose
            parts are not drawn independently: all but `Poisson` and `FullBatch`.
        """
        return distributed.distribute(self, strategy)

    def _begin_run(self, step: int) -> None:
        """Begins an epoch, if the steps of an epoch depend on each other."""
        del step
        drawer = self._drawer.last
        if drawer.scheme.independent_steps:
            return
        if drawer.seed is None:
            self._begin_epoch(drawer)
        drawer.prepare()

    @property
    def _steps_drawn(self) -> Callable[[], int] | None:
        """Returns how far the draws came; None if the order of the steps is kept.

        A run that leaves steps out comes to a later epoch, with a new order, after
        fewer steps.
        """
        drawer = self._drawer.last
        if drawer.scheme.independent_steps or drawer.runs_ahead:
            return None
        return drawer.steps_drawn

    @property
    def _people(self) -> Any:
        """The person of each row, for the ledger; None if records are no people."""
        return getattr(self._drawer.source, "ids", None)

    @property
    def _order(self) -> weakref.ref:
        """A name of the order of the steps, for the ledger of a loop."""
        return weakref.ref(self._drawer.last)

    def _begin_epoch(self, drawer: Drawer) -> None:
        if drawer.runs_ahead and drawer.delivered:
            raise ValueError(
                "These batches gathered steps ahead, of an epoch that was begun before "
                "this run. Make new batches for the run: scheme.batches(data)."
                + see("several-replicas")
            )
        drawer.begin_epoch()

    def _inputs(self):
        return [self._wrapped]

    def __iter__(self) -> Any:
        if self._lengths is not None:
            self._drawer.end_of_call()
        return handed_out.remember_elements(super().__iter__(), self._drawer)

    @property
    def element_spec(self) -> Any:
        if self._lengths is not None:
            self._drawer.end_of_call()
        return self._wrapped.element_spec

    @property
    def scheme(self) -> SamplingScheme:
        """The scheme of these draws, with the capacity of their physical batches."""
        return self._drawer.last.scheme

    @property
    def population(self) -> int:
        """How many records there are to draw from."""
        return self._drawer.population

    @property
    def expected_batch_size(self) -> float:
        """Records of a logical step on average: the public divisor."""
        return self.scheme.expected_batch_size(self.population)

    @property
    def physical_batch_size(self) -> int:
        """Room for records in an element; a record has `rows_per_record` rows."""
        return self._drawer.rows

    @property
    def rows_per_record(self) -> int:
        """Consecutive rows of one record; the optimizer needs the same number."""
        return self._drawer.rows_per_record

    @property
    def views(self) -> int:
        """How often each row is repeated, for `map` to augment each copy."""
        return self._drawer.views

    @property
    def accumulation_steps(self) -> int:
        """Elements per logical step."""
        return self._drawer.pieces

    @property
    def independent_groups(self) -> bool:
        """Whether adding or replacing a record changes only one element of a step."""
        return self._drawer.independent_groups

    @property
    def steps_per_epoch(self) -> int:
        """Logical steps per iteration."""
        return self._steps

    @property
    def seed(self) -> int | None:
        """The seed that fixes the draws, or None."""
        return self._drawer.seed

    def __repr__(self) -> str:
        return (
            f"<Batches {self.scheme.describe()}; {self.population} records, "
            f"{self.accumulation_steps} x {self.physical_batch_size} rows per step>"
        )

    @property
    def weighted(self) -> bool:
        """Whether weights do more than mark the rows of records."""
        source = self._drawer.last.source
        return self._by_class or source.leaves_over or len(source.row_spec) > 2

    @property
    def _arrays(self) -> tuple | None:
        """The parts x, y, sample_weight of all records, as they are drawn.

        None if the records are not in memory, or are changed after the draw.
        """
        return None if self._changes_records else self._drawer.source.arrays

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Conditions for the guarantee, beyond the assumptions of the scheme."""
        return self._assumptions

    # The methods that draws allow. `refusals` has the rest.

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
        *,
        public: Sequence[Any] = (),
    ) -> Batches:
        """Batches of the same draws, with a function applied to every single record.

        Use this for augmentation. The function gets (x, y) of one record (x, if there
        are no labels) without a batch axis, and returns x or (x, y) of one record, of
        one static shape. Sample weights and padding are hidden from the function:
        padded rows are zeros with weight 0 before and after.

        *Formal guarantees*

        * The result for a record depends on this record, on constants and on new
          randomness, independent for each record and each iteration, also with
          `tf.random.set_seed` (not with a `seed` of these batches). A function that
          reads or writes variables, data sets or a second record, writes to tables, or
          calls Python, is refused. Tables that are only looked up become an assumption.
        * Constants (of more than 16 elements) hold no more than about one record's
          worth together, and not a row for each record, unless listed in `public`. You
          must make sure that constants come from public data.

        Args:
          map_func: A function of x and y, or of x.
          num_parallel_calls: Records at a time. 1 by default, which is the fastest
            for small records.
          deterministic: As for any data set; the order is kept in any case.
          name: Not used.
          public: Large arrays and tensors, and variables, that `map_func` may read, all
            without private data in them.

        Raises:
          ValueError: If the function cannot be shown to map single records, or does
            not return a single record.

        >>> import numpy as np
        >>> from tfdpclip import sampling
        >>> batches = sampling.FullBatch().batches((np.ones((4, 3)), np.arange(4)))
        >>> turned = batches.map(lambda x, y: (tf.reverse(x, [0]), y))
        >>> next(iter(turned))[0].shape
        TensorShape([4, 3])
        """
        del deterministic, name
        _arguments.function("map_func", map_func)
        assumptions: tuple[str, ...] = ()
        by_class = class_weights.is_class_weights(map_func)
        if by_class:
            on_element = class_weights.on_elements(
                map_func, self.element_spec[1], self._arrays
            )
        else:
            with record_map.fresh_numbers(self.seed):
                on_element, assumptions = record_map.on_elements(
                    map_func,
                    self.element_spec,
                    self.population,
                    num_parallel_calls,
                    public,
                    self._arrays,
                )
        derived = self._derived(
            lambda data: record_map.mapped(data, on_element, self.seed), *assumptions
        )
        derived._by_class = self._by_class or by_class
        derived._changes_records = self._changes_records or not by_class
        return derived

    def map_batches(self, function: Callable[..., Any]) -> Batches:
        """Batches of the same draws, with a function applied to whole batches.

        The function may mix records, and no check can show that it keeps them apart.
        Therefore `assumptions` and the privacy statement of a run list this as
        an assumption. `map` needs no assumption; use `map` for augmentation.

        Args:
          function: A function of the batch's (x, y), or of x, with a batch axis,
            returning x, or (x, y), with as many rows; row i must depend on row i
            alone. Weights do not change.

        Raises:
          ValueError: If the number of rows or of parts changes.
        """
        _arguments.function("function", function)
        name, on_element = record_map.name_of(function), record_map.on_batches(function)
        derived = self._derived(
            lambda data: record_map.mapped(data, on_element, self.seed),
            f"batches were transformed by {name}, which is assumed to keep the records "
            "of a batch apart and to hold no record",
        )
        derived._changes_records = True
        return derived

    def repeat(self, count: int | None = None, name: str | None = None) -> Batches:
        """Continues with new draws after the last; never repeats a draw."""
        return self._derived(lambda data: tf.data.Dataset.repeat(data, count, name))

    def take(self, count: int, name: str | None = None) -> Batches:
        """The first `count` elements of each iteration."""
        taken = int(tf.data.Dataset.take(self._wrapped, count).cardinality())
        steps = -(-taken // self.accumulation_steps) if taken >= 0 else None
        derived = self._derived(
            lambda data: tf.data.Dataset.take(data, count, name), steps=steps
        )
        whole = taken < 0 or taken % self.accumulation_steps == 0
        derived._cut = self._cut or not whole  # Not None any more.
        return derived

    def prefetch(self, buffer_size: int, name: str | None = None) -> Batches:
        """Gathers ahead; not with accumulation or shuffled epochs.

        `tf.data.AUTOTUNE`, which Keras 3 asks for beside `class_weight`, gathers
        nothing ahead there.
        """
        if self.accumulation_steps > 1 or not self.scheme.independent_steps:
            if buffer_size == tf.data.AUTOTUNE:
                return self
            raise ValueError(NO_PREFETCH)
        more = math.inf if buffer_size == tf.data.AUTOTUNE else buffer_size
        self._drawer.draws.ahead += more
        return self._derived(
            lambda data: tf.data.Dataset.prefetch(data, buffer_size, name)
        )

    def with_options(
        self, options: tf.data.Options, name: str | None = None
    ) -> Batches:
        """Sets options of `tf.data`, if they keep elements in their order."""
        optimization = options.experimental_optimization
        if (
            optimization.inject_prefetch
            or optimization.map_parallelization
            or (options.deterministic is not None and not options.deterministic)
        ):
            raise ValueError(
                "options: deterministic=False, inject_prefetch=True and "
                "map_parallelization=True reorder elements or run ahead, so that steps "
                "would differ from the draws. Leave these options out."
            )
        sharding = options.experimental_distribute.auto_shard_policy
        if sharding not in (tf.data.experimental.AutoShardPolicy.AUTO, _REFUSED):
            raise ValueError(
                "options: auto_shard_policy would give every machine a part of each "
                "draw, or a different draw. Use batches.distribute(strategy)."
            )
        options = tf.data.Options().merge(options)
        options.experimental_distribute.auto_shard_policy = _REFUSED
        return self._derived(
            lambda data: tf.data.Dataset.with_options(data, options, name)
        )

    def apply(self, transformation_func: Callable[[Batches], Batches]) -> Batches:
        """Applies a function of data sets that uses the methods above only."""
        dataset = transformation_func(self)
        if not isinstance(dataset, Batches) or dataset._drawer is not self._drawer:
            raise ValueError(REFUSAL)
        return dataset


refuse_the_rest(Batches)


def _open_source(
    scheme: SamplingScheme,
    data: Any,
    workers: int | None,
    people: Any,
    per_person: int | None,
    seed: int | None,
) -> sources.Source:
    """The source of the records that `scheme` draws: examples, or people."""
    workers = _arguments.optional(
        _arguments.integer, "workers", workers, 1, MOST_WORKERS
    )
    if isinstance(data, Stream):
        return _open_stream(scheme, data, workers, people)
    parts = data if isinstance(data, tuple) else (data,)
    named = {**row_weights.names_of_parts(parts), "people": people}
    columns.refuse_other_rows(named.items())
    source = sources.open_source(data, workers)
    if isinstance(scheme, CappedPoisson):
        return _cap_examples(source, people, per_person, scheme, seed)
    if (people is None) != (per_person is None):
        raise ValueError(
            "people and per_person go together: scheme.batches((x, y), people=ids, "
            "per_person=8), with an id for each example, and the number of a person's "
            "examples in a step." + see("records-of-several-rows")
        )
    if people is None:
        return source
    return People(source, people, cast(int, per_person))


def _open_stream(
    scheme: SamplingScheme, stream: Stream, workers: int | None, people: Any
) -> StreamSource:
    """The source of a stream, which a scheme must read once an epoch."""
    if not isinstance(scheme, RandomAllocation):
        raise ValueError(
            f"{scheme.describe()}: a stream is read once an epoch, and this scheme "
            "draws records anew for each step, or in a fixed order. Use "
            'RandomAllocation(steps), or sampling="random_allocation" of a plan.'
        )
    if people is not None:
        raise ValueError(
            "people must be left out for a Stream: the examples of a person are taken "
            "together, which needs access by index. Write the records to arrays on the "
            "disk, see docs/data.md." + see("records-of-several-rows")
        )
    if workers is not None:
        raise ValueError(
            "workers must be left out for a Stream, which is read in order. Read in "
            "parallel within the stream: dataset.map(..., "
            "num_parallel_calls=tf.data.AUTOTUNE)."
        )
    return StreamSource(stream)


def _cap_examples(source, people, per_person, scheme, seed) -> CappedExamples:
    """The source that `CappedPoisson` draws from: few examples of each person."""
    if per_person is not None:
        raise ValueError(
            f"per_person must be left out, since {type(scheme).__name__}(rate, "
            f"per_person={scheme.per_person}) sets the number."
        )
    if people is None:
        raise ValueError(
            f"people must be given with {type(scheme).__name__}: without an id for "
            f"each example, per_person={scheme.per_person} cannot be enforced. Write "
            "scheme.batches((x, y), people=ids)." + see("records-of-several-rows")
        )
    key = DrawKey.fresh() if seed is None else DrawKey(seed)
    return CappedExamples(source, people, scheme.per_person, key.rng(0, purpose=3))
