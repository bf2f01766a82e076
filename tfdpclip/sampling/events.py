"""Privacy events of steps, as `dp_accounting` events.

An event describes a mechanism independently of any accountant. The sampling schemes
of `tfdpclip.sampling` build events, the functions of `tfdpclip.accounting` measure
events, and `dp_accounting` understands all events but the classes defined here.
"""

from collections.abc import Iterator

import attr
import dp_accounting
from scipy import stats

from tfdpclip import _arguments

NeighboringRelation = dp_accounting.NeighboringRelation

UNITS = ("example", "person", "client", "batch", "group")

RELATION_NAMES = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: "add or remove one record",
    NeighboringRelation.REPLACE_ONE: "replace one record",
    NeighboringRelation.REPLACE_SPECIAL: "replace one record by an all-zero one",
}


@attr.s(frozen=True, slots=True, auto_attribs=True)
class TruncatedPoissonSampledDpEvent(dp_accounting.DpEvent):
    """Poisson sampling whose draws are cut to a fixed capacity.

    Every record of a data set of `source_dataset_size` enters independently with
    probability `sampling_probability`. If more than `capacity` records entered, a
    uniformly random `capacity` of them stay. Then `event` runs, a Gaussian whose
    noise multiplier is relative to the effect of *adding* one record.

    *Formal guarantees*

    * Let `tau = P[Binomial(source_dataset_size, sampling_probability) >= capacity]`.
      For add-or-remove neighbours, one step's privacy profile is at most
      `(1 - tau) * profile(q, z) + tau * profile(q, z / 2)`, where `profile(q, z)`
      belongs to untruncated Poisson sampling with noise multiplier z.
    * Steps compose adaptively, because each draw is independent of all other draws.

    *Why.* Let D' be D with x added, S the Poisson draw from D, and let priorities
    decide which records stay. Use the same S and priorities for both. If x does not
    enter, the two steps are equal. If x enters and |S| < capacity, x is added: the
    sum moves by at most C. If x enters and |S| >= capacity, x either loses, and
    nothing changes, or displaces one record: the sum moves by at most 2 C. Given S
    and the priorities, x changes the step with probability at most q, so the step is
    dominated by the Poisson-sampled Gaussian with multiplier z in the first case and
    z / 2 in the second. S does not depend on x, so averaging over S (the hockey-stick
    divergence is jointly convex) gives the bound, with P[|S| >= capacity] <= tau
    since D is the smaller of the two sets and `source_dataset_size` is at least its
    size. The case split depends on S alone, so it can be taken as published, which
    makes the averaged profile that of a mixture of the two privacy loss
    distributions; both directions (add, remove) follow the same argument.

    Attributes:
      source_dataset_size: Size of the data set (of either neighbour).
      sampling_probability: Probability with which each record enters.
      capacity: Largest number of records a step can hold.
      event: The mechanism that runs on the sampled records.
    """

    source_dataset_size: int
    sampling_probability: float
    capacity: int
    event: dp_accounting.DpEvent

    def __attrs_post_init__(self):
        _arguments.integer("source_dataset_size", self.source_dataset_size)
        _arguments.rate("sampling_probability", self.sampling_probability)
        _arguments.integer("capacity", self.capacity, minimum=1)
        check_event("event", self.event)

    @property
    def overflow_probability(self) -> float:
        """`tau`: the probability that an additional record would not fit."""
        return overflow_probability(
            self.source_dataset_size, self.sampling_probability, self.capacity
        )


@attr.s(frozen=True, slots=True, auto_attribs=True)
class CappedPoissonSampledDpEvent(dp_accounting.DpEvent):
    """Poisson sampling of single examples, for neighbours that differ in a person.

    Every example of the data enters independently with probability
    `sampling_probability`, and no person has more than `per_person` of them. If more
    than `capacity` entered, a uniformly random `capacity` of them stay. Then `event`
    runs, a Gaussian whose noise multiplier is relative to the effect of one example.

    *Formal guarantees*

    * Neighbours: add or remove one person, with all of up to `per_person` = k examples.
    * Without `capacity`, one step's privacy profile is at most `profile(q, k, z)`, of
      the mixture of N(j/z, 1), j with probability Binomial(k, q)[j], against N(0, 1),
      in both directions. The bound is attained if a person has k examples with equal
      clipped gradients.
    * With `capacity`, let `tau = P[Binomial(source_dataset_size, q) > capacity - k]`.
      Then the profile is at most `(1 - tau) * profile(q, k, z) + tau * profile(q, k, z
      / 2)`.
    * Steps compose adaptively, because each draw is independent of all other draws.

    *Why.* Let D' be D with a person added, S the Poisson draw from D, T that of the
    person's examples, and let priorities decide which examples stay. Given S and the
    priorities, the step on D is N(a, z^2) in units of the clip norm, and the step on D'
    the mixture over T of N(a + v_T, z^2). If |S| + k <= capacity, nothing is displaced,
    and |v_T| is at most |T|, the number of examples that entered. Otherwise each of
    the person's examples displaces at most one example: |v_T| is at most 2 |T|.

    That mixture is dominated by the mixture of real shifts c_T = |T|, or 2 |T|. Its
    density against the step on D is L = sum_T P[T] exp(X_T - Var[X_T] / 2), with
    Gaussian X_T = <v_T, Y> / z of standard Y, and the divergences of both directions
    are expectations of convex functions of L. The covariances <v_T, v_T'> are at most
    c_T c_T', the covariances of the real shifts, and so the real shifts give the
    larger expectations: on the way from <v_T, v_T'> to c_T c_T', an expectation only
    grows, by
    1/2 sum P[T] P[T'] (difference of covariances) E[convex''(L) exp(...) exp(...)]
    (Kahane 1986; Ganesh 2024, arXiv 2401.10294, has mixtures of Gaussians). A person
    with fewer than k examples is covered by examples that move nothing. S does not
    depend on the person, so averaging over S gives the bound, as in
    `TruncatedPoissonSampledDpEvent`, which is the case k = 1.

    Attributes:
      per_person: k: most examples of a person in the data.
      sampling_probability: q: probability with which each example enters.
      event: The mechanism that runs on the sampled examples.
      source_dataset_size: Number of examples (of either neighbour); needed with
        `capacity`.
      capacity: Largest number of examples that a step can hold; None for no limit.
    """

    per_person: int
    sampling_probability: float
    event: dp_accounting.DpEvent
    source_dataset_size: int | None = None
    capacity: int | None = None

    def __attrs_post_init__(self):
        _arguments.integer("per_person", self.per_person, minimum=1)
        _arguments.rate("sampling_probability", self.sampling_probability)
        _check_sampled(self)

    @property
    def overflow_probability(self) -> float:
        """`tau`: the probability that an additional person might not fit."""
        if self.capacity is None or self.source_dataset_size is None:
            return 0.0
        return overflow_probability(
            self.source_dataset_size,
            self.sampling_probability,
            self.capacity - self.per_person + 1,
        )


@attr.s(frozen=True, slots=True, auto_attribs=True)
class RandomAllocationDpEvent(dp_accounting.DpEvent):
    """An epoch of random allocation (balls in bins), or the part of it that ran.

    Every record of the data is in one of `steps_per_epoch` steps, chosen uniformly and
    independently of all other records; `steps` steps run. If a step has more than
    `capacity` records, a uniformly random `capacity` of them stay. A step is `event`, a
    Gaussian whose noise multiplier is relative to the effect of *adding* one record.

    *Formal guarantees*

    * Neighbours: add or remove one record; or replace a record by a null record, which
      is allocated to a step as usual and moves nothing.
    * Without `capacity`, the epoch is dominated by the mean over i of N(e_i, z^2 I)
      against N(0, z^2 I), of as many coordinates as there are steps, in both
      directions, with the coordinates of the steps that did not run left out. Steps
      may depend on what earlier ones released (`tfdpclip.accounting._allocation` has
      the proof; Chua et al. 2024, arXiv 2412.16802; Feldman and Shenfeld 2025, arXiv
      2502.08202).
    * With `capacity`, let `tau` be a bound on the probability that some step has
      `capacity` records or more of the smaller data set. Then the epoch's profile
      is at most `(1 - tau) * profile(z) + tau * profile(z / 2)`: if no step is full,
      an additional record displaces no record; else it displaces at most one record, in
      its own step. The places of the remaining records do not depend on the additional
      record, so averaging over them gives the bound, as in
      `TruncatedPoissonSampledDpEvent`.
    * Epochs compose adaptively, because each has an allocation of its own.

    Attributes:
      steps_per_epoch: t: the number of steps that a record is allocated to.
      steps: How many of the steps ran.
      event: The mechanism that runs on the records of a step.
      source_dataset_size: Number of records (of either neighbour); needed with
        `capacity`.
      capacity: Largest number of records that a step can hold; None for no limit.
    """

    steps_per_epoch: int
    steps: int
    event: dp_accounting.DpEvent
    source_dataset_size: int | None = None
    capacity: int | None = None

    def __attrs_post_init__(self):
        _arguments.integer("steps_per_epoch", self.steps_per_epoch, 1)
        _arguments.integer("steps", self.steps, 1)
        if self.steps > self.steps_per_epoch:
            raise ValueError(
                f"steps must be at most steps_per_epoch = {self.steps_per_epoch}, got "
                f"{self.steps}."
            )
        _check_sampled(self)

    @property
    def overflow_probability(self) -> float:
        """`tau`: a bound on the probability that a step cannot take another record."""
        if self.capacity is None or self.source_dataset_size is None:
            return 0.0
        return min(
            1.0,
            self.steps
            * overflow_probability(
                self.source_dataset_size, 1 / self.steps_per_epoch, self.capacity
            ),
        )


@attr.s(frozen=True, slots=True, auto_attribs=True)
class AdditiveDeltaDpEvent(dp_accounting.DpEvent):
    """A release that adds a number to the delta of its composition with any events.

    *Formal guarantees*: holds for releases with a proof of this property, such as
    `tfdpclip.sampling.ThresholdedCounts`, and for (0, delta) mechanisms.

    Attributes:
      delta: The number, in (0, 1).
    """

    delta: float

    def __attrs_post_init__(self):
        _arguments.delta(self.delta)


def _check_sampled(sampled) -> None:
    """Checks the event, the size of the data and the capacity of a sampled event."""
    check_event("event", sampled.event)
    size, capacity = sampled.source_dataset_size, sampled.capacity
    _arguments.optional(_arguments.integer, "source_dataset_size", size)
    _arguments.optional(_arguments.integer, "capacity", capacity, 1)
    if capacity is not None and size is None:
        raise ValueError("source_dataset_size must be given with capacity.")


def overflow_probability(population: int, rate: float, capacity: int) -> float:
    """Returns P[Binomial(population, rate) >= capacity].

    >>> overflow_probability(10, 1.0, 10)
    1.0
    >>> overflow_probability(10, 0.5, 11)
    0.0
    """
    if capacity > population:
        return 0.0
    return float(stats.binom.sf(capacity - 1, population, rate))


def sensitivity_factor(
    relation: dp_accounting.NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    unit: str = "example",
) -> float:
    """Returns how many clip norms one record can move the clipped sum by.

    The noise multiplier of the Gaussian in the accounting is `z / sensitivity_factor`,
    where z is the noise standard deviation divided by the clip norm.

    *Formal guarantees*

    * `unit="example"`, `"person"` or `"client"`: each record is clipped separately.
      Adding or removing a record moves the sum by at most C (factor 1), and so does
      replacing it by a null record; replacing it by an arbitrary record moves the sum
      by at most 2 C (factor 2).
    * `unit="batch"` or `"group"`: the clipped vector is a function of several records,
      and one record moves it from anywhere in the ball to anywhere in the ball:
      factor 2 under every relation. For groups this requires that adding or removing
      a record does not change the groups of the remaining records.

    Args:
      relation: The neighbouring relation.
      unit: The object that is clipped, from `UNITS`.

    Returns:
      1.0 or 2.0.

    Raises:
      ValueError: If `unit` is not in `UNITS`, or `relation` is not a relation.

    >>> sensitivity_factor()
    1.0
    >>> sensitivity_factor(NeighboringRelation.REPLACE_ONE)
    2.0
    >>> sensitivity_factor(unit="batch")
    2.0
    """
    _arguments.choice("unit", unit, UNITS)
    wanted = "a NeighboringRelation, such as NeighboringRelation.REPLACE_ONE"
    _arguments.instance("relation", relation, NeighboringRelation, wanted)
    if unit in ("batch", "group") or relation is NeighboringRelation.REPLACE_ONE:
        return 2.0
    return 1.0


def check_event(name: str, event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """Returns `event`, or raises ValueError unless it is a `DpEvent`."""
    wanted = "a dp_accounting.DpEvent"
    return _arguments.instance(name, event, dp_accounting.DpEvent, wanted)


def repeated(event: dp_accounting.DpEvent, count: int) -> dp_accounting.DpEvent:
    """Returns `event` composed `count` times with itself."""
    if count == 0:
        return dp_accounting.NoOpDpEvent()
    return dp_accounting.SelfComposedDpEvent(event, count)


def leaves(event: dp_accounting.DpEvent) -> dict[dp_accounting.DpEvent, int]:
    """Returns how often each elementary event occurs in `event`."""
    counts: dict[dp_accounting.DpEvent, int] = {}
    for leaf, count in _walk(event, 1):
        counts[leaf] = counts.get(leaf, 0) + count
    return counts


def _walk(
    event: dp_accounting.DpEvent, count: int
) -> Iterator[tuple[dp_accounting.DpEvent, int]]:
    if count == 0 or isinstance(event, dp_accounting.NoOpDpEvent):
        return
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        yield from _walk(event.event, count * event.count)
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            yield from _walk(part, count)
    elif isinstance(event, dp_accounting.PoissonSampledDpEvent) and (
        event.sampling_probability == 1
    ):
        yield from _walk(event.event, count)
    elif isinstance(event, TruncatedPoissonSampledDpEvent) and (
        event.overflow_probability == 0
    ):
        untruncated = dp_accounting.PoissonSampledDpEvent(
            event.sampling_probability, event.event
        )
        yield from _walk(untruncated, count)
    elif isinstance(event, RandomAllocationDpEvent) and (
        event.steps_per_epoch == 1 and event.overflow_probability == 0
    ):
        yield from _walk(event.event, count)
    elif isinstance(event, CappedPoissonSampledDpEvent):
        simpler = _uncapped(event)
        if simpler == event:
            yield event, count
        else:
            yield from _walk(simpler, count)
    else:
        yield event, count


def _uncapped(event: CappedPoissonSampledDpEvent) -> dp_accounting.DpEvent:
    """The same mechanism as a simpler event, if a simpler event exists."""
    q, k, inner = event.sampling_probability, event.per_person, event.event
    size, capacity = event.source_dataset_size, event.capacity
    never_cut = event.overflow_probability == 0
    if k == 1 and never_cut:
        return dp_accounting.PoissonSampledDpEvent(q, inner)
    if k == 1 and size is not None and capacity is not None:
        return TruncatedPoissonSampledDpEvent(size, q, capacity, inner)
    if never_cut and q == 1 and isinstance(inner, dp_accounting.GaussianDpEvent):
        # Every example of the person enters.
        return dp_accounting.GaussianDpEvent(inner.noise_multiplier / k)
    if never_cut:
        return CappedPoissonSampledDpEvent(k, q, inner)
    return event
