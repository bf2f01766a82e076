"""Batches of a fixed physical shape, drawn by a sampling scheme."""

from __future__ import annotations

import secrets
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip.accounting import _validate
from tfdpclip.sampling import sources
from tfdpclip.sampling.schemes import (
    DrawKey,
    FullBatch,
    NeighboringRelation,
    Poisson,
    SamplingScheme,
)

# What TensorFlow counts in 32 bits.
_MOST_ROWS = 2**31 - 1

# Every drawer alive, so that a callback can see which of them feeds a training run.
_DRAWERS: weakref.WeakSet[_Drawer] = weakref.WeakSet()


class Batches(tf.data.Dataset):
    """A `tf.data.Dataset` of (x, y, sample_weight), drawn by a sampling scheme.

    Made by the `batches` method of a scheme; goes to `model.fit` as it is.

    *Formal guarantees*

    * Step t's records are drawn by `scheme`, whatever the physical batch size, the
      number of steps asked for, or how often the data set is iterated: every new
      iterator goes on with draws not yet handed out, and never repeats one.
    * Randomness is fresh from the operating system, unless `seed` is given. Then
      draws are a function of the seed and the step, anyone who knows the seed knows
      who was drawn, and amplification by sampling is void: `seed` is for experiments,
      and privacy statements say so.
    * All elements have one static shape. Rows beyond the drawn records are zeros with
      sample weight 0. An empty draw is an element like any other.
    * A logical step is exactly `accumulation_steps` consecutive elements.

    | situation | what happens |
    | --- | --- |
    | nobody drawn | a step of zero-weight rows: pure noise |
    | more drawn than fit | a random subset stays; `scheme` accounts for it |
    | data are x only | elements are (x, None, sample_weight) |
    | `fit(..., steps_per_epoch=n)` | use `batches.repeat()`, as for any `tf.data` |

    Args:
      scheme: The sampling scheme.
      data: The records, see `tfdpclip.sampling.open_source`. float64 becomes float32,
        as in Keras.
      physical_batch_size: Rows per element. By default, enough for the scheme.
      accumulation_steps: Elements per logical step; the optimizer needs the same.
      independent_groups: For clipping per group (``unit="batch"`` with accumulation)
        where records are added or removed: every drawn record goes to a uniformly
        random one of the elements of its step, whoever else was drawn, so that a
        record more changes one group only. By default elements are filled one after
        the other.
      steps: Logical steps per iteration; `scheme.steps_per_epoch` by default.
      initial_step: Number of the first logical step, to go on after a restart.
      seed: Fixes the draws. For experiments only.
      prefetch: Elements to gather ahead. By default 1 where that cannot misalign
        anything, else 0.

    Raises:
      ValueError: If an argument is out of range, the data do not fit the scheme, or
        the physical batches are too small for it.

    Attributes:
      scheme: The scheme that describes these very draws: for `Poisson`, with the
        capacity that the physical shape imposes. Account for this one.
      population: Number of records.
      expected_batch_size: Expected records per logical step: the public divisor.

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
        initial_step: int = 0,
        seed: int | None = None,
        prefetch: int | None = None,
    ):
        if not isinstance(scheme, SamplingScheme):
            raise ValueError(
                "scheme must be a sampling scheme, such as Poisson(0.01), got "
                f"{_validate.shown(scheme)}."
            )
        accumulation_steps = _validate.integer(
            "accumulation_steps", accumulation_steps, 1, _MOST_ROWS
        )
        _validate.boolean("independent_groups", independent_groups)
        initial_step = _validate.integer("initial_step", initial_step)
        if seed is not None:
            seed = _validate.integer("seed", seed)
        source = sources.open_source(data)
        wanted = scheme._capacity(source.size)
        by_group = independent_groups and accumulation_steps > 1
        if by_group:
            wanted = _group_capacity(scheme, source.size, accumulation_steps)
            wanted *= accumulation_steps
        if physical_batch_size is None:
            physical_batch_size = -(-wanted // accumulation_steps)
        else:
            physical_batch_size = _validate.integer(
                "physical_batch_size", physical_batch_size, 1, _MOST_ROWS
            )
        capacity = physical_batch_size * accumulation_steps
        # What a group cannot hold is the group's affair: it is clipped as one.
        drawn = scheme if by_group else scheme._for_data(source.size, capacity)
        _check_capacity(drawn, source.size, capacity, wanted, physical_batch_size)
        if steps is None:
            steps = scheme.steps_per_epoch(source.size)
        steps = _validate.integer("steps", steps, 1, _MOST_ROWS)
        if prefetch is None:
            may_run_ahead = (
                seed is None and accumulation_steps == 1 and drawn.independent_steps
            )
            prefetch = 1 if may_run_ahead else 0
        prefetch = _validate.integer("prefetch", prefetch, 0, _MOST_ROWS)
        if prefetch and (accumulation_steps > 1 or not drawn.independent_steps):
            raise ValueError(
                "prefetch must be 0 with accumulation or shuffled epochs: an element "
                "gathered but not used would shift the steps that follow."
            )

        self._drawer = _Drawer(
            drawn,
            source,
            physical_batch_size,
            accumulation_steps,
            initial_step,
            seed,
            by_group,
        )
        self._steps = steps
        dataset = tf.data.Dataset.from_generator(
            _Passes(self._drawer, steps * accumulation_steps),
            output_signature=self._drawer.signature,
        ).apply(tf.data.experimental.assert_cardinality(steps * accumulation_steps))
        # Otherwise tf.data gathers ahead on its own, and an element gathered but not
        # used shifts what follows.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        dataset = dataset.with_options(options)
        if not self._drawer.has_labels:
            dataset = dataset.map(lambda x, weight: (x, None, weight))
        if prefetch:
            dataset = dataset.prefetch(prefetch)
        self._wrapped = dataset
        super().__init__(dataset._variant_tensor)

    def _inputs(self):
        return [self._wrapped]

    @property
    def element_spec(self):
        return self._wrapped.element_spec

    @property
    def scheme(self) -> SamplingScheme:
        return self._drawer.scheme

    @property
    def population(self) -> int:
        return self._drawer.source.size

    @property
    def expected_batch_size(self) -> float:
        return self.scheme.expected_batch_size(self.population)

    @property
    def physical_batch_size(self) -> int:
        """Rows per element."""
        return self._drawer.rows

    @property
    def accumulation_steps(self) -> int:
        """Elements per logical step."""
        return self._drawer.pieces

    @property
    def independent_groups(self) -> bool:
        """Whether a record more, or another one, changes one element of a step only."""
        return self._drawer.independent_groups

    @property
    def steps_per_epoch(self) -> int:
        """Logical steps per iteration."""
        return self._steps

    @property
    def seed(self) -> int | None:
        """The seed that fixes the draws, or None."""
        return self._drawer.seed

    @property
    def next_step(self) -> int:
        """Number of the next logical step to be handed out."""
        return self._drawer.position // self._drawer.pieces

    def __repr__(self) -> str:
        return (
            f"<Batches {self.scheme.describe()}; {self.population} records, "
            f"{self.accumulation_steps} x {self.physical_batch_size} rows per step>"
        )

    def _refused(self, *args, **kwargs):
        del args, kwargs
        raise ValueError(
            "This would change which records meet in a step, and the accounting would "
            "no longer be about what is drawn. Transform the data before sampling, or "
            "use map() on whole batches."
        )

    # Transformations that regroup, select or repeat records.
    batch = bucket_by_sequence_length = cache = concatenate = filter = _refused
    flat_map = group_by_window = interleave = padded_batch = ragged_batch = _refused
    rebatch = rejection_resample = scan = shard = shuffle = skip = _refused
    snapshot = sparse_batch = unbatch = unique = window = _refused


class _Passes:
    """A callable, since `from_generator` calls it once per iterator.

    It must not keep the drawer alive: TensorFlow never lets go of a generator, and the
    drawer holds the data. The data set, which every iterator keeps, does.
    """

    def __init__(self, drawer: _Drawer, length: int):
        self._drawer = weakref.ref(drawer)
        self._length = length

    def __call__(self) -> Iterator:
        for _ in range(self._length):
            yield self._drawer().next_element()


class _Drawer:
    """Hands out physical batches one after the other, whoever asks."""

    def __init__(
        self, scheme, source, rows, pieces, initial_step, seed, by_group=False
    ):
        self.by_group = by_group
        self.scheme = scheme
        self.source = source
        self.rows = rows
        self.pieces = pieces
        self.seed = seed
        self.position = initial_step * pieces
        self.delivered = 0
        # A shuffle begun by an earlier process cannot be continued, only begun anew.
        self._first_step = initial_step if seed is None else 0
        self._key = DrawKey(secrets.randbits(256) if seed is None else seed)
        self._consumer: weakref.ref | None = None
        self._drawn: tuple[int, np.ndarray] | None = None
        self.has_labels = len(source.row_spec) > 1
        _DRAWERS.add(self)

    @property
    def independent_groups(self) -> bool:
        relation = self.scheme.neighboring_relation
        replaced = relation is not NeighboringRelation.ADD_OR_REMOVE_ONE
        return self.by_group or self.pieces == 1 or replaced

    @property
    def signature(self):
        parts = [
            sources._map(
                lambda spec: tf.TensorSpec((self.rows, *spec[0]), _tf_dtype(spec[1])),
                part,
                is_leaf=sources._is_spec,
            )
            for part in self.source.row_spec
        ]
        weight = tf.TensorSpec((self.rows,), tf.float32)
        return (*parts[:2], weight)

    def begin(self, consumer) -> int:
        """Returns how much of a logical step `consumer` has had already.

        It is 0 unless the last run of the same consumer stopped within a step: then the
        rest of that draw is still to come. For anyone else, the rest is skipped.
        """
        within = self.position % self.pieces
        if within and (self._consumer is None or self._consumer() is not consumer):
            self.position += self.pieces - within
            within = 0
        self._consumer = weakref.ref(consumer)
        return within

    def _divided(self, indices, step) -> list[np.ndarray]:
        """The records of each element of a step."""
        if not self.by_group:
            starts = range(0, self.pieces * self.rows, self.rows)
            return [indices[start : start + self.rows] for start in starts]
        rng = self._key.rng(step - self._first_step, purpose=1)
        indices = rng.permutation(indices)
        group = rng.integers(0, self.pieces, len(indices))
        return [indices[group == piece][: self.rows] for piece in range(self.pieces)]

    def next_element(self):
        step, piece = divmod(self.position, self.pieces)
        if self._drawn is None or self._drawn[0] != step:
            indices = self.scheme._draw(
                self._key, self.source.size, step - self._first_step
            )
            self._drawn = (step, self._divided(indices, step))
        indices = self._drawn[1][piece]
        parts = self.source.take(indices, self.rows)
        weight = np.zeros(self.rows, np.float32)
        weight[: len(indices)] = 1.0
        if len(parts) == 3:
            weight[: len(indices)] = np.reshape(parts[2][: len(indices)], -1)
        self.position += 1
        self.delivered += 1
        return (*parts[:2], weight)


class DrawObserver:
    """Sees which batches were drawn since it was made.

    Keras callbacks do not see the data. The draws do pass through this module, so
    counting them tells whether a run is fed by the scheme it is accounted for.
    """

    def __init__(self):
        self._before = {drawer: drawer.delivered for drawer in _DRAWERS}

    def drawn(self) -> list[tuple[Any, int]]:
        """Returns each drawer that handed out elements, and how many."""
        counts = [(d, d.delivered - self._before.get(d, 0)) for d in _DRAWERS]
        return [(drawer, count) for drawer, count in counts if count > 0]


def _group_capacity(scheme, population: int, groups: int) -> int:
    """Rows that a group exceeds less than once in 10^10 steps."""
    rate = getattr(scheme, "rate", None)
    if getattr(scheme, "capacity", None) is not None or (
        rate is None and not isinstance(scheme, FullBatch)
    ):
        raise ValueError(
            "independent_groups is for Poisson(rate) without a capacity, and for "
            f"FullBatch. In {scheme.describe()}, replacing a record changes one group "
            "anyway."
        )
    return Poisson((1.0 if rate is None else rate) / groups).default_capacity(
        population
    )


def _check_capacity(scheme, population, capacity, wanted, rows):
    expected = scheme.expected_batch_size(population)
    minimum = expected if hasattr(scheme, "rate") else wanted
    if capacity < minimum:
        raise ValueError(
            f"A step expects {expected:.6g} records, but {rows} rows "
            f"times {capacity // rows} accumulation steps hold {capacity}. Use "
            f"accumulation_steps={-(-wanted // rows)} with this physical_batch_size, "
            "there and in the optimizer."
        )
    overflow = getattr(scheme, "capacity", None) and scheme.event(1.0, 1)
    probability = getattr(getattr(overflow, "event", None), "overflow_probability", 0.0)
    if probability > 1e-3:
        warnings.warn(
            f"About one step in {1 / probability:.0f} draws more records than the "
            f"{capacity} it can hold and drops some. This is accounted for, and costs "
            f"epsilon; a capacity of {wanted} makes it negligible.",
            stacklevel=4,
        )


def _tf_dtype(dtype: np.dtype) -> tf.DType:
    return tf.string if dtype.kind == "O" else tf.as_dtype(dtype)
