"""Tests of aggregators for federated learning: sensitivity, noise, and an audit.

The tests need TensorFlow Federated, which is imported when a test is called, and an
execution context on this machine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from tfdpclip import _arguments, _progress, accounting
from tfdpclip.testing import auditing, federated_probe
from tfdpclip.testing import noise as noise_lib
from tfdpclip.testing.auditing import AuditReport
from tfdpclip.testing.federated_neighbours import (
    TOLERANCE,
    per_coordinate,
    starts,
    updates,
)
from tfdpclip.testing.federated_probe import Rounds
from tfdpclip.testing.noise import NoiseReport
from tfdpclip.testing.sensitivity import SensitivityReport

# The test runs one round for each coordinate.
_MOST_COORDINATES = 256
# The clients for which the noise is compared.
_COMPARED = ("within its clip", "beyond its clip", "one NaN")


def assert_aggregator_sensitivity(
    factory: Any,
    value_type: Any,
    *,
    records: Iterable[Any] = (),
) -> SensitivityReport:
    """Checks whole rounds on neighbouring cohorts, with controlled noise.

    The aggregation process is made with a vector w of standard normals, which the test
    chooses, in the place of its noise. Its rounds then run on a cohort, and on that
    cohort with one more client. For the round with the client, and w = 0, the test
    searches the vector w with which the round without the client has the same release:
    the same result, the same measurements and the same next state. A round is one
    Gaussian mechanism of noise multiplier z if, and only if, there always is such a w,
    of norm at most 1 / z, that does not depend on further noise. This is checked as
    well: with further noise in both rounds, they must agree again.

    The test finds: updates that are not clipped, or longer than the clip norm once
    quantised; noise that is missing, too small, scaled by a wrong clip norm or spread
    wrongly over updates and counts; any exact number among the measurements or in the
    clip norm; division by the actual number of clients; a non-finite update that
    counts; shares of distributed noise that need more than `minimum_clients`; noise
    that does not come from the aggregator's own source.

    The test cannot find: noise that is not random (`assert_aggregator_noise`), clients
    that are drawn differently than accounted for, and the state of an inner factory.

    The test runs from the first state and from a state after the clip norm has moved.
    With distributed noise the cohort has `minimum_clients` (give few); the further
    client is compared without its share of noise, after the server's decoding of the
    modular sum.

    Args:
      factory: the result of `dpc.federated.clipped_mean`, private.
      value_type: the type of one client's update, or an example, float32 or float64. At
        most 256 coordinates and counts: small tensors of the same structure suffice.
      records: updates to try, of that type, besides usual updates and updates that are
        huge, tiny, not finite, at the clip norm, opposite to all others, in one
        coordinate or one group, and at the steps of quantisation.

    Returns:
      The worst client. Its `ratio` is at most 1, up to a tolerance of 0.2%.

    Raises:
      AssertionError: if a client moves the release by more than 1 / z, or moves
        an entry without noise, or changes the noise.
      ImportError: without TensorFlow Federated.
      ValueError: if an argument is out of range or the factory is not private.
    """
    federated_probe.check_factory(factory)
    value_type = federated_probe.as_type(value_type)
    clients = _cohort_size(factory)
    limit = 1 / factory.noise_multiplier
    worst = SensitivityReport(0.0, limit, "no client", 0)
    layout = Rounds.layout_of(factory, value_type)
    if not all(dtype in ("float32", "float64") for dtype in layout.dtypes):
        raise ValueError(
            "value_type holds numbers of half precision, which round results too "
            "coarsely for this test. Make them float32, in which the aggregator "
            "computes in any case."
        )
    with federated_probe.dialled(factory, value_type, clients) as rounds:
        if rounds.dial.size > _MOST_COORDINATES:
            raise ValueError(
                f"value_type has {rounds.layout.size} coordinates, and the noise "
                f"{rounds.dial.size}; this takes at most {_MOST_COORDINATES}. The "
                "aggregator works the same for any number of coordinates: make the "
                "tensors smaller, not fewer."
            )
        given = [rounds.vector(record) for record in records]
        for start in starts(rounds, clients):
            tried = [
                (f"given update {i}", x, not np.isfinite(x).all())
                for i, x in enumerate(given)
            ]
            tried += list(updates(rounds, start))
            for kind, vector, absent in _progress.bar(
                tried, title=f"sensitivity, round {start.number}", unit="update"
            ):
                name = f"A client ({kind}, round {start.number})"
                noisy = kind in _COMPARED or kind.startswith("given")
                value = rounds.value(vector)
                worst = worst.after(start.distance(value, name, absent, noisy), name)
                if not worst.ratio <= 1 + TOLERANCE + start.coarseness:
                    raise AssertionError(
                        f"{worst}. The round does not have the privacy it claims."
                    )
    return worst


def _cohort_size(factory: Any) -> int:
    if factory.noise == "distributed":
        return factory.minimum_clients
    return int(min(8, max(2, factory.clients_per_round // 2)))


def assert_aggregator_noise(
    factory: Any,
    value_type: Any,
    *,
    rounds: int = 16,
) -> NoiseReport:
    """Checks the noise in the releases of rounds.

    The process runs with an empty cohort (with distributed noise: with
    `minimum_clients` whose updates are not finite, so that only their shares of noise
    are summed). Half of the rounds start from the first state, as after restoring it,
    the rest run in sequence, and one runs in a new process. The test checks

    * the stddev of every tensor of the result and of every count against the stddev
      that the clip rule and `noise_multiplier` require, and the measurements of it;
    * the shape, to the tails beyond 4 stddevs;
    * independence between rounds, repeated rounds, processes and tensors;
    * that no number is drawn twice (which finds replayed or tied noise).

    Counts are few, so that their noise is only measured well with many rounds, or in a
    rule with many groups: 16 rounds of one count tell apart a factor of 2.5.

    Args:
      factory: the result of `dpc.federated.clipped_mean`, private.
      value_type: the type of one client's update, or an example: 100 coordinates
        at least, 1000 or more to see a few percent.
      rounds: how many rounds, 4 or more.

    Returns:
      The measurements.

    Raises:
      AssertionError: if a test fails.
      ImportError: without TensorFlow Federated.
      ValueError: if an argument is out of range, or the factory is not private.
    """
    federated_probe.check_factory(factory)
    rounds = _arguments.integer("rounds", rounds, minimum=4)
    value_type = federated_probe.as_type(value_type)
    with federated_probe.counted_shares() as shares:
        first, second = (Rounds(factory, value_type) for _ in range(2))
    if first.layout.size < 100:
        raise ValueError(
            f"value_type has {first.layout.size} coordinates, too few to test noise "
            "on. Make it 100 or more."
        )
    counts = first.count_stddevs
    cohort = []
    if factory.noise == "distributed":
        absent = first.value(np.full(first.layout.size, math.nan))
        cohort = [absent] * factory.minimum_clients
    start = state = first.process.initialize()
    drawn = []
    for i in _progress.bar(range(rounds), title="noise", unit="round"):
        output = first.run(state, cohort)
        drawn.append(_standardised(first, state, output, counts))
        state = start if i < rounds // 2 else output.state
    begin = second.process.initialize()
    drawn.append(_standardised(second, begin, second.run(begin, cohort), counts))
    layout = first.layout
    names = [*layout.names, *(f"count {i}" for i in range(len(counts)))]
    sizes = [*layout.sizes, *(1 for _ in counts)]
    steps = math.inf
    if shares:
        steps = min(shares) * math.sqrt(factory.minimum_clients)
    return noise_lib.judge(names, sizes, drawn, whole_steps=steps)


def _standardised(rounds: Rounds, state, output, counts) -> np.ndarray:
    """The noise of a round in units of the required stddev."""
    factory, clip = rounds.factory, rounds.clip
    z_g = accounting.split_noise_multiplier(factory.noise_multiplier, counts)
    inflation = 1.0 if factory.inner is None else factory.inner.inflation
    scales = np.asarray(clip.noise_scales(rounds.clip_state(state)), np.float64)
    claimed = np.ravel(output.measurements["sum_noise_stddev"])
    wanted = z_g * inflation * scales
    _check_claim("sum_noise_stddev", claimed, wanted, factory.noise)
    vector = rounds.vector(output.result) * factory.divisor
    parts = [vector / per_coordinate(rounds, claimed)]
    if counts:
        claimed = np.ravel(output.measurements["count_noise_stddev"])
        _check_claim("count_noise_stddev", claimed, np.array(counts), factory.noise)
        fractions = np.ravel(output.measurements["unclipped_fraction"])
        parts.append((fractions - 0.5) * factory.clients_per_round / claimed)
    return np.concatenate(parts).astype(np.float64)


def _check_claim(name, claimed, wanted, noise) -> None:
    # Rounding may make distributed noise larger, never smaller.
    most = 1.5 if noise == "distributed" else 1.0
    low, high = wanted * (1 - 1e-5), wanted * most * (1 + 1e-5)
    if not np.all((low <= claimed) & (claimed <= high)):
        raise AssertionError(
            f"The measurement {name} is {claimed}, where the clip rule and "
            f"noise_multiplier require {wanted}."
        )


def audit_aggregator(
    factory: Any,
    value_type: Any = None,
    *,
    canaries: int = 1000,
    rounds: int = 1,
    delta: float = 1e-6,
    claimed: float | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
) -> AuditReport:
    """Audits an aggregator with canary clients; a refuted claim is an error.

    Every canary is a client with a huge update in a coordinate of its own, the worst
    case for every clip rule: its clipped update has the largest possible norm. Each
    canary is in all rounds or in none, with probability 1/2. The attacker
    sees the results and looks at the coordinate of each canary.

    Args:
      factory: the result of `dpc.federated.clipped_mean`, private.
      value_type: the type of one client's update, or an example; by default a vector
        with one coordinate per canary. Give it for rules with groups.
      canaries: the number of canaries; at most the number of coordinates. With
        distributed noise, from `minimum_clients` to `clients_per_round`.
      rounds: the number of rounds.
      delta: the delta of the claim.
      claimed: the epsilon to compare with; by default the factory's epsilon for these
        rounds, without amplification by sampling (canaries are not sampled). To
        check a ledger, give its epsilon for so many rounds with full participation.
      confidence: 1 minus the probability that a true claim is refuted.
      seed: the seed of the choice of canaries, for tests.

    Returns:
      The report.

    Raises:
      AssertionError: if the claim is refuted, or a release is not finite.
      ImportError: without TensorFlow Federated.
      ValueError: if an argument is out of range or the factory is not private.
    """
    federated_probe.check_factory(factory)
    canaries = _arguments.integer("canaries", canaries, minimum=10)
    times = _arguments.integer("rounds", rounds, minimum=1)
    delta = _arguments.delta(delta)
    distributed = factory.noise == "distributed"
    if distributed and not (
        factory.minimum_clients <= canaries <= factory.clients_per_round
    ):
        raise ValueError(
            "canaries must be from minimum_clients to clients_per_round, "
            f"{factory.minimum_clients} to {factory.clients_per_round:g}, with "
            f"distributed noise, got {canaries}."
        )
    given = claimed
    if claimed is None:
        claimed = factory.epsilon(delta, times)
    claimed = _arguments.non_negative("claimed", claimed)
    if value_type is None:
        value_type = np.zeros(canaries, np.float32)
    process = Rounds(factory, federated_probe.as_type(value_type))
    size = process.layout.size
    if canaries > size:
        raise ValueError(
            f"canaries must be at most the coordinates of value_type, {size}, got "
            f"{canaries}."
        )
    places = np.linspace(0, size - 1, canaries).astype(int)
    scale = process.clip.noise_scales
    huge = min(float(d.max) for d in process.layout.dtypes) ** 0.5

    def update(place):
        vector = np.zeros(size)
        vector[place] = huge
        return process.value(vector)

    def train(included):
        absent = process.value(np.full(size, math.nan))
        cohort = [update(p) for p, there in zip(places, included, strict=True) if there]
        if distributed:
            # The participants are known; their contributions are hidden.
            cohort += [absent] * int(np.sum(~included))
        state, scores = process.process.initialize(), np.zeros(canaries)
        for _ in _progress.bar(range(times), title="audit", unit="round"):
            scales = np.asarray(scale(process.clip_state(state)), np.float64)
            output = process.run(state, cohort)
            result = process.vector(output.result) / per_coordinate(process, scales)
            scores += result[places]
            state = output.state
        if not np.isfinite(scores).all():
            raise AssertionError("The release of a round is not finite.")
        return scores

    report = auditing.audit(
        train,
        canaries,
        delta=delta,
        claimed=given,
        confidence=confidence,
        seed=seed,
    )
    # The factory's own claim may be larger than any audit of these canaries can refute.
    report = dataclasses.replace(report, claimed=claimed)
    if report.refuted:
        raise AssertionError(f"The claim is wrong: {report}.")
    return report
