"""Statistics that preprocessing needs, released with noise and counted in a ledger."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf
from scipy import stats

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip._notebook import ShownAsText
from tfdpclip.accounting.calibration import event_epsilon, noise_multiplier
from tfdpclip.accounting.ledger import Ledger
from tfdpclip.accounting.plan_arguments import check_accountant, check_facts
from tfdpclip.keras.privacy_plan import PrivacyPlan
from tfdpclip.noise import GaussianNoise
from tfdpclip.sampling import FullBatch, SamplingScheme, ThresholdedCounts
from tfdpclip.sampling.columns import GAPS, refuse_other_rows
from tfdpclip.sampling.people import checked_ids

# The part of delta that the thresholds of all vocabularies may use together.
_FOR_THRESHOLDS = 0.1
# The largest number of a record's values that can count.
_MOST_PER_RECORD = 10**6
# With wider bounds, squares overflow.
_WIDEST = 1e150
# The largest number of columns in a message.
_SHOWN = 4
# Rows that are summed at a time.
_ROWS = 4096
# The least variance, relative to the square of half the distance of the bounds.
_LEAST_VARIANCE = 1e-6


class _Released:
    """Results, which have no value before their release."""

    def __getattr__(self, name: str) -> Any:
        if name in {field.name for field in dataclasses.fields(self)}:
            raise AttributeError(
                f"{name} has no value before the end of the block `with "
                "dpc.keras.PrivateStatistics(...) as statistics:`. Read it below."
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")


@dataclasses.dataclass(frozen=True)
class PrivateMoments(_Released):
    """A released mean and variance: arguments of `Normalization`.

    Attributes:
      mean: The mean of each column, within the bounds.
      variance: The variance of each column, above 0.
    """

    mean: np.ndarray
    variance: np.ndarray


@dataclasses.dataclass(frozen=True)
class PrivateVocabulary(_Released):
    """Released values: an argument of `StringLookup` and similar layers.

    Attributes:
      tokens: The values, the most frequent first.
      counts: The noised number of records with each value: for class weights, or to
        choose the most frequent value for missing values.
    """

    tokens: list
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


class PrivateStatistics(ShownAsText):
    """Releases means, variances and vocabularies of private data, out of a budget.

        with dpc.keras.PrivateStatistics(
            epsilon=0.5, delta=1e-5, examples=len(ages)
        ) as statistics:
            age = statistics.moments(ages, low=0, high=100)
            city = statistics.vocabulary(cities)
        normalize = tf.keras.layers.Normalization(mean=age.mean, variance=age.variance)
        lookup = tf.keras.layers.StringLookup(vocabulary=city.tokens)
        plan = statistics.plan(epsilon=3)  # 3 is for both

    The end of the block counts the calls, gives each an equal share of the budget, and
    releases the results. With `releases`, no block is needed: each call releases at
    once, and what is left of `releases` stays unspent.

    Statistics that layers learn by `adapt`, and class weights or a mean for missing
    values computed from the data, are releases without noise, which no epsilon covers.

    *Formal guarantees*

    * Neighbours: add or remove one record. `examples` is public, and is the divisor of
      every mean, for any number of records.
    * All `releases` together, or all calls of a block, stay within (epsilon, delta),
      each with the same noise multiplier z; a further release is refused. Each release
      is in the ledger before its noise is drawn, and composes there with all earlier
      steps. A block that raises releases nothing.
    * `moments`: a record's values are cut to the bounds, and mapped to u in [-1, 1].
      The sums of u and of 1 - u^2 are released. A column of a record adds (u, 1 - u^2)
      to the sums, a vector of squared norm u^4 - u^2 + 1 <= 1; d columns have a norm of
      at most sqrt(d). So all d columns are one Gaussian mechanism of z.
    * `vocabulary`: a record adds 1 to the counts of at most k different values: at most
      sqrt(k) in the Euclidean norm. Values with a noised count below a threshold are
      left out, which `tfdpclip.sampling.ThresholdedCounts` accounts for. Neither the
      number of values nor a rare value is released, except with the probability that
      delta covers.
    * With `people`, a person is a record. `moments` adds the mean of (u, 1 - u^2) over
      the person's rows, which is no longer than its longest row. `vocabulary` counts
      the first k different values of all rows of the person.
    * Noise comes from fresh entropy, in float64 and hardened (`GaussianNoise`). The
      rounding of float64 sums is not accounted for.

    Args:
      epsilon: The budget of these releases.
      delta: In (0, 1 / examples), equal to the delta of the ledger and of a later plan.
        A tenth of delta is reserved for the thresholds of vocabularies.
      examples: Number of records, which is public; not needed with `people`, whose
        number it is then.
      releases: The total number of calls of `moments` and `vocabulary`; not needed in
        a block.
      people: The person of each row, integers or texts: people are the records, for a
        plan with `per_person`.
      ledger: A `Ledger`, or the path of its file; in memory by default.
      accountant: `"pld"` or `"rdp"`; the ledger's.

    Attributes:
      noise_multiplier: z of every release; None while their number is not known.
      left: How many releases are left.

    Raises:
      ValueError: If an argument is out of range.
      PrivacyMismatchError: If the ledger is for another delta or accountant, or counts
        other neighbours.

    >>> statistics = PrivateStatistics(1.0, 1e-5, examples=1000, releases=2)
    >>> found = statistics.moments(np.full(1000, 20.0), low=0, high=40)
    >>> bool(abs(found.mean - 20) < 5), statistics.left
    (True, 1)
    >>> statistics.vocabulary(["Rome"] * 600 + ["Oslo"] * 399 + ["Ys"]).tokens
    ['Rome', 'Oslo']
    >>> with PrivateStatistics(1.0, 1e-5, people=np.arange(3000) // 3) as statistics:
    ...     found = statistics.moments(np.full(3000, 20.0), low=0, high=40)
    >>> print(statistics)
    Private statistics: epsilon 0.9931 of 1 spent at delta 1e-05, 0 of 1 releases left.
      mean and variance of a column
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        examples: int | None = None,
        releases: int | None = None,
        *,
        people: Any = None,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        accountant: str = "pld",
    ):
        self._owners = None
        self._unit, self._record = "example", "record"
        self._people: Any = None
        self._ids: np.ndarray | None = None
        if people is not None:
            examples = self._own(people, examples)
        elif examples is None:
            raise ValueError(
                "examples, the number of records, is missing. Write "
                "PrivateStatistics(..., examples=len(x)), or, where the records are "
                "people, PrivateStatistics(..., people=ids)."
            )
        self._epsilon, self._delta, self._examples = check_facts(
            epsilon, delta, "examples", examples
        )
        check_accountant(accountant)
        self._ledger = Ledger.open(ledger, self._delta, accountant)
        self._ledger.note_people(self._ids)
        self.left, self.noise_multiplier = 0, None
        self._releases: int | None = None
        if releases is not None:
            self._share_among(_arguments.integer("releases", releases, 1))
        self._noise = GaussianNoise(hardened=True)
        self._released: list[tuple[str, dp_accounting.DpEvent]] = []
        # Within a block, the results that its end fills, and their releases.
        self._waiting: list[tuple[Any, Callable[[], dict[str, Any]]]] | None = None

    def _share_among(self, releases: int) -> None:
        """Gives each of some releases an equal share of the budget."""
        self.left = self._releases = releases
        self.noise_multiplier = noise_multiplier(
            self._epsilon,
            self._delta * (1 - _FOR_THRESHOLDS),
            releases,
            FullBatch(),
            self._ledger.accountant,
        )

    def __enter__(self) -> PrivateStatistics:
        if self._releases is None:
            self._waiting = self._waiting or []
        return self

    def __exit__(self, error: Any, *_: Any) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting and error is None:
            self._share_among(len(waiting))
            for result, release in waiting:
                vars(result).update(release())

    @property
    def ledger(self) -> Ledger:
        """The spent budget, of these releases and of everything in the same ledger.

        Raises:
          ValueError: If a block has calls, which are released at its end only.
        """
        if self._waiting:
            raise ValueError(
                "The end of the block `with dpc.keras.PrivateStatistics(...) as "
                "statistics:` releases the statistics. Make the plan below the block."
            )
        return self._ledger

    def plan(self, epsilon: float, **options: Any) -> PrivacyPlan:
        """The plan of a training on the same records, with their delta and ledger.

        *Formal guarantees*: the plan's training and these releases together stay within
        (epsilon, delta).

        Args:
          epsilon: The budget of the statistics and the training together.
          **options: Further arguments of `PrivacyPlan`, such as `batch_size`, `epochs`
            and, for people, `per_person`.

        Raises:
          ValueError: If an argument is out of range, or a block has not ended.
          PrivacyMismatchError: If the statistics are of people and `per_person` is
            missing, or an argument contradicts the ledger.

        >>> statistics = PrivateStatistics(0.5, 1e-5, examples=1000, releases=1)
        >>> found = statistics.moments(np.full(1000, 20.0), low=0, high=40)
        >>> plan = statistics.plan(3, batch_size=100, epochs=5)
        >>> round(plan.planned_epsilon, 2), plan.examples
        (3.0, 1000)
        """
        told = {"delta": self._delta, "examples": self._examples}
        told["accountant"] = self._ledger.accountant
        return PrivacyPlan(epsilon, ledger=self.ledger, **(told | options))

    def _own(self, people: Any, examples: int | None) -> int:
        """Takes the person of each row; returns the number of people."""
        self._unit, self._record = "person", "person"
        self._people = people
        self._ids = checked_ids(people)
        _, owners, counts = np.unique(
            self._ids, return_inverse=True, return_counts=True
        )
        if examples not in (None, len(counts)):
            raise ValueError(
                f"people has {len(counts)} people, and examples counts people: "
                f"PrivateStatistics(..., examples={len(counts)})."
            )
        owners = np.reshape(owners, -1)
        # The person of each row, and the number of rows of that person.
        self._owners, self._rows = owners.tolist(), counts[owners]
        return len(counts)

    @property
    def epsilon(self) -> float:
        """The epsilon of these releases alone, at the ledger's delta."""
        events = [event for _, event in self._released]
        event = dp_accounting.ComposedDpEvent(events)
        return event_epsilon(event, self._delta, self._ledger.accountant)

    def moments(self, values: Any, *, low: Any, high: Any) -> PrivateMoments:
        """The mean and the variance of each column, within bounds.

        Args:
          values: `[examples]`, or `[examples, d]` for d columns in one release, such as
            columns of a frame; a row for each row of `people`, if given.
          low: The least value, public: a number, or a number for each column. Smaller
            data are raised to it.
          high: The largest value.

        Returns:
          Arrays of d means and variances; scalars if `values` has one axis.

        Raises:
          ValueError: If the data are not `examples` numbers (for NaN, fill in a public
            value), the bounds are not in order, or no release is left.
        """
        refuse_other_rows([("people", self._people), ("values", values)])
        columns, names = _numbers(values)
        self._check_count(len(columns))
        shape = columns.shape[1:]
        low = _bound("low", low, shape, names)
        high = _bound("high", high, shape, names)
        if not np.all(low < high):
            raise ValueError(
                f"low must be below high in every column, got {low.tolist()} and "
                f"{high.tolist()}. Give public bounds: low=0, high=100 for ages."
            )
        middle, half = (low + high) / 2, (high - low) / 2
        sums = np.zeros([2, *shape])
        for first in range(0, len(columns), _ROWS):
            rows = slice(first, first + _ROWS)
            scaled = np.clip((columns[rows] - middle) / half, -1.0, 1.0)
            scaled = np.stack([scaled, 1 - scaled**2], axis=1)
            if self._owners is not None:
                scaled /= np.reshape(self._rows[rows], [-1, *([1] * len(sums.shape))])
            sums += scaled.sum(axis=0)
        count = math.prod(shape)
        of = f"{count} columns" if shape else "a column"

        def release() -> dict[str, Any]:
            what = f"mean and variance of {of}"
            noised, stddev = self._draw(what, FullBatch(), sums, count)
            mean, rest = noised / self._examples
            mean = np.clip(mean, -1.0, 1.0)
            least = max(_LEAST_VARIANCE, stddev / self._examples)
            variance = np.clip(1 - rest - mean**2, min(least, 1.0), 1.0)
            return {"mean": middle + half * mean, "variance": half**2 * variance}

        return self._release(PrivateMoments, release)

    def vocabulary(
        self, values: Iterable[Any], *, per_record: int = 1, most: int | None = None
    ) -> PrivateVocabulary:
        """The values that many records have.

        Args:
          values: For each record, or row of `people`, a string or a whole number, or
            several of them (a list of words, for instance). None, NaN and NA stand for
            no value.
          per_record: k: how many different values of a record count, the first ones.
            A larger k needs more noise: sqrt(k) times.
          most: The largest number of values to return, the most frequent first; None
            for all values above the threshold.

        Returns:
          The values with a noised count above the threshold, and the noised counts.

        Raises:
          ValueError: If there are not `examples` records, a value has another type, or
            no release is left.
        """
        k = _arguments.integer("per_record", per_record, 1, _MOST_PER_RECORD)
        most = _arguments.optional(_arguments.integer, "most", most, 1)
        refuse_other_rows([("people", self._people), ("values", values)])
        records = _records(values)
        self._check_count(len(records))
        owners = range(len(records)) if self._owners is None else self._owners
        # The first k different values of each record, over all its rows.
        found: dict[int, dict[Any, None]] = {}
        for owner, record in zip(owners, records, strict=True):
            own = found.setdefault(owner, {})
            for token in _tokens(record):
                if len(own) == k:
                    break
                own[token] = None
        counts = collections.Counter(itertools.chain.from_iterable(found.values()))
        if len({type(token) for token in counts}) > 1:
            raise ValueError(
                "values must be all strings or all whole numbers, got both. For "
                "example, values=[str(v) for v in values]."
            )
        tokens = sorted(counts)
        exact = np.array([counts[token] for token in tokens], np.float64)
        of = "one value" if k == 1 else f"up to {k} values"

        def release() -> dict[str, Any]:
            share = self._delta * _FOR_THRESHOLDS / self._releases
            what = f"vocabulary of {of} of each {self._record}"
            noised, stddev = self._draw(what, ThresholdedCounts(share), exact, k)
            passed = np.flatnonzero(noised > threshold_of(stddev, k, share))
            order = passed[np.argsort(-noised[passed], kind="stable")][:most]
            return {"tokens": [tokens[i] for i in order], "counts": noised[order]}

        return self._release(PrivateVocabulary, release)

    def _release(self, kind: type, release: Callable[[], dict[str, Any]]) -> Any:
        """A result: of a release now, or, within a block, at the end of the block."""
        result = object.__new__(kind)
        if self._waiting is not None:
            self._waiting.append((result, release))
            return result
        if self._releases is None:
            raise ValueError(
                "The number of releases is not known yet. Write the calls in a block, "
                "`with dpc.keras.PrivateStatistics(...) as statistics:`, and read the "
                "results below the block; or PrivateStatistics(..., releases=2)."
            )
        if not self.left:
            raise ValueError(
                f"All {self._releases} releases are spent: a further release would "
                "exceed the epsilon of the statistics. Make all calls in one block, or "
                f"write PrivateStatistics(..., releases={self._releases + 1})."
                + see("a-spent-budget")
            )
        vars(result).update(release())
        return result

    def _draw(
        self, what: str, scheme: SamplingScheme, exact: np.ndarray, square: int
    ) -> tuple[np.ndarray, float]:
        """Noised numbers; the release is in the ledger before its noise is drawn.

        Args:
          what: The release in words.
          scheme: How the release is accounted for.
          exact: The numbers.
          square: The square of the norm of what a record adds, at most.

        Returns:
          The noised numbers, and the stddev of their noise.
        """
        z = self.noise_multiplier
        event = scheme.event(z, 1, unit=self._unit)
        alone = event_epsilon(event, self._delta, self._ledger.accountant)
        self._ledger.begin(
            noise_multiplier=z,
            sampling=scheme,
            release=f"{what} (epsilon {alone:.3g} by itself)",
            unit=self._unit,
            change=True,
        )
        self.left -= 1
        stddev = z * math.sqrt(square)
        with self._ledger.step():
            self._released.append((what, event))
            drawn = self._noise.sample(exact.shape, stddev, tf.float64)
        self._ledger.end()
        return exact + drawn.numpy(), stddev

    def _check_count(self, found: int) -> None:
        if self._owners is not None and found != len(self._owners):
            raise ValueError(
                f"values has {found} rows, but people has {len(self._owners)}: give a "
                "value for each row."
            )
        if self._owners is None and found != self._examples:
            raise ValueError(
                f"values has {found} records, but examples={self._examples}: give one "
                "value, or one list of values, for each example. For several rows of "
                "a person: PrivateStatistics(..., people=ids)."
            )

    def __str__(self) -> str:
        lines = [
            f"Private statistics: epsilon {self.epsilon:.4g} of {self._epsilon:g} "
            f"spent at delta {self._delta:g}, {self.left} of {self._releases or 0} "
            "releases left.",
            *(f"  {what}" for what, _ in self._released),
        ]
        return "\n".join(lines)


def threshold_of(stddev: float, per_record: int, delta: float) -> float:
    """The noised count that the value of a single record exceeds with low probability.

    Args:
      stddev: The stddev of the noise of each count.
      per_record: k: the number of values that a single record can add.
      delta: -k log(1 - p), with p the probability that a single-record value passes.
    >>> bool(threshold_of(1.0, 1, 1e-6) > 1 + stats.norm.isf(1.01e-6))
    True
    """
    return 1 + stddev * float(stats.norm.isf(-math.expm1(-delta / per_record)))


def _numbers(values: Any) -> tuple[np.ndarray, list[str]]:
    """`[n]` or `[n, d]` numbers, and the names of the d columns for messages."""
    if not hasattr(values, "iloc"):
        if np.ma.is_masked(values):
            raise ValueError(
                "values has masked entries. For missing values, fill in a public "
                "value: values.filled(40.0)."
            )
        found = _arguments.floats("values", values)
        if found.ndim not in (1, 2):
            raise ValueError(
                "values must be numbers, one or a row for each example, got shape "
                f"{list(found.shape)}."
            )
        names = [f"values[:, {i}]" for i in range(math.prod(found.shape[1:]))]
        missing = np.flatnonzero(np.isnan(found).any(axis=0))
        if len(missing):
            name = names[missing[0]] if found.ndim > 1 else "values"
            raise ValueError(
                f"{name} holds NaN. For missing values, fill in a public value: "
                f"np.nan_to_num({name}, nan=40.0)."
            )
        return found, names
    if not hasattr(values, "columns"):
        return _numbers_of_series(values, "values"), ["values"]
    names = [f"values[{label!r}]" for label in values.columns]
    columns = [values.iloc[:, place] for place in range(len(names))]
    return np.stack(list(map(_numbers_of_series, columns, names)), axis=1), names


def _numbers_of_series(series: Any, name: str) -> np.ndarray:
    """The numbers of a column of pandas."""
    kind = getattr(series.dtype, "kind", "O")
    if kind in "Mm":
        raise ValueError(
            f"{name} holds dates or times, and moments takes numbers. Give days since "
            f"a public day: ({name} - np.datetime64('2020-01-01')) / "
            "np.timedelta64(1, 'D')."
        )
    if kind in "iufb":
        if series.isna().any():
            raise ValueError(
                f"{name} has gaps. Fill in a public value: {name}.fillna(40.0)."
            )
        found = series.to_numpy(np.float64)
        # The NaN of a division is no gap in a column of pandas' own types.
        if np.isnan(found).any():
            raise ValueError(
                f"{name} holds NaN. For missing values, fill in a public value: "
                f"np.nan_to_num({name}.to_numpy(float), nan=40.0)."
            )
        return found
    raise ValueError(
        f"{name} holds {series.dtype}, and moments takes numbers. Leave {name} out, or "
        f"write pandas.to_numeric({name}); for categories, "
        f"statistics.vocabulary({name})."
    )


def _bound(name: str, value: Any, shape: tuple[int, ...], of: list[str]) -> np.ndarray:
    with contextlib.suppress(ValueError):
        found = _arguments.floats(name, value)
        if (np.abs(found) < _WIDEST).all() and found.shape in ((), shape):
            return np.broadcast_to(found, shape)
    each = ""
    if shape:
        each = f", or a list of {len(of)} numbers ({', '.join(of[:_SHOWN])}"
        each += ", ...)" if len(of) > _SHOWN else ")"
    raise ValueError(
        f"{name} must be a finite number{each}, below {_WIDEST:g}, got "
        f"{_arguments.shown(value)}."
    )


def _records(values: Any) -> list[Any]:
    if hasattr(values, "iloc") and hasattr(values, "columns"):
        column = f"[{values.columns[0]!r}]" if len(values.columns) else ""
        raise ValueError(
            "values must be one column, got a frame. Release each column by itself: "
            f"statistics.vocabulary(frame{column})."
        )
    if isinstance(values, tf.Tensor):
        values = values.numpy()
    with contextlib.suppress(TypeError, ValueError):  # An array may have no axes.
        if not isinstance(values, (str, bytes)):
            return _arguments.ordered("values", values)
    raise ValueError(
        "values must be a list with a value, or a list of values, for each example, "
        f"got {_arguments.shown(values)}."
    )


def _tokens(record: Any) -> Iterator[Any]:
    """The values of a record, as plain strings or integers."""
    if isinstance(record, (np.ndarray, tf.Tensor)):
        record = np.asarray(record).ravel()
    elif isinstance(record, (str, bytes)) or not isinstance(record, Iterable):
        record = (record,)
    for value in record:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, bytes):
            value = value.decode("utf-8")
        # NA of pandas has no truth value.
        if type(value).__name__ in GAPS or value != value:
            continue
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise ValueError(
                "values must be strings or whole numbers (or lists of them), got "
                f"{_arguments.shown(value)}. For example, values=[str(v) for v in "
                "values]; for numbers with a mean, use moments."
            )
        yield value
