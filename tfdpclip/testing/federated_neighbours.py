"""Cohorts that differ in one client, and the equivalent noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdpclip.testing.federated_probe import Rounds

# Relative to the limit of the distance; and for releases, in stddevs of the noise.
TOLERANCE = 2e-3
# Rounding of float32, relative.
_ROUNDING = 2e-6
# The number of rounds before the second state.
_LATER = 4


def starts(rounds: Rounds, clients: int) -> Iterator[Start]:
    """States and cohorts to add a client to."""
    state = rounds.process.initialize()
    yield Start(rounds, state, clients, within=0.5)
    for _ in range(_LATER):
        cohort = _cohort(rounds, state, clients, 0.0)
        state = rounds.run(state, cohort).state
    yield Start(rounds, state, clients, within=0.75)


def _cohort(rounds: Rounds, state: Any, clients: int, within: float) -> list:
    """Clients, of whom a share `within` is within the clip norm, the rest beyond it.

    At least one client is beyond it.
    """
    rng = np.random.default_rng(0)
    norms = _norms(rounds, state)
    few = min(round(within * clients), clients - 1)
    return [
        rounds.value(
            _direction(rounds, rng.normal(size=rounds.layout.size))
            * per_coordinate(rounds, norms * (0.5 if i < few else 3.0))
        )
        for i in range(clients)
    ]


class Start:
    """A state and a cohort, and the effect of the noise on their round's release.

    Attributes:
      number: the number of the round, from 1.
      coarseness: for discrete noise: the precision of the controlled noise, in stddevs;
        0 otherwise.
    """

    def __init__(self, rounds: Rounds, state: Any, clients: int, within: float):
        self.rounds = rounds
        self.state = state
        self.number = int(rounds.clip_round(state)) + 1
        self.cohort = _cohort(rounds, state, clients, within)
        dial = rounds.dial
        # Discrete noise is in whole steps, which limits the precision of the control.
        self.coarseness = 0.0
        if dial.share is not None:
            self.coarseness = 4 * math.sqrt(clients) / max(dial.share, 1e-9)
            if not self.coarseness < 0.02:
                raise ValueError(
                    "factory rounds the shares of noise too coarsely for this test: "
                    f"their stddev is {dial.share:.3g} steps. Use "
                    "SecureSettings(bits=24) or more."
                )
        # Small enough that a clip rule does not limit its step.
        share = max(rounds.count_stddevs, default=0.0)
        share /= rounds.factory.clients_per_round
        step = 0.25 / max(1.0, 4 * share)
        first = rounds.run(state, self.cohort)
        self.labels = rounds.labels(first)
        self.base = rounds.released(first)
        if not np.array_equal(self._release(self.cohort), self.base, equal_nan=True):
            raise AssertionError(
                "Two rounds with the same noise differ: some random numbers do not "
                "come from the aggregator's source of noise."
            )
        columns = [
            (self._release(self.cohort, step * unit) - self.base) / step
            for unit in np.eye(dial.size)
        ]
        matrix = np.nan_to_num(np.stack(columns, 1))
        size = np.nan_to_num(np.abs(self.base))
        stddevs = np.linalg.norm(matrix, axis=1)
        self.noisy = stddevs > 1e-6 * size
        self.stddevs = np.where(self.noisy, stddevs, 1.0)
        scaled = np.where(self.noisy, 1 / self.stddevs, 0.0)[:, np.newaxis] * matrix
        self._inverse = np.linalg.pinv(scaled, rcond=1e-6)
        self._further = np.random.default_rng(1).normal(size=dial.size)

    def _release(self, cohort, noise=0.0) -> np.ndarray:
        rounds = self.rounds
        return rounds.released(rounds.run(self.state, cohort, noise))

    def distance(self, value: Any, name: str, absent: bool, noisy: bool) -> float:
        """The norm of the noise with the same effect as a further client with `value`.

        Args:
          value: the client's update.
          name: the client's name in errors.
          absent: whether the client must change nothing.
          noisy: whether to compare the rounds with further noise as well.

        Raises:
          AssertionError: if no noise has this effect.
        """
        more = [*self.cohort, value]
        target = self._release(more)
        self._check_finite(target, name)
        move = self._difference(target, self.base)
        tolerance = self._tolerance(target)
        bare = ~self.noisy & (np.abs(target - self.base) > _ROUNDING * abs(self.base))
        if bare.any():
            raise AssertionError(
                f"{name} changes {self._label(bare)}, to which no noise is added, from "
                f"{self.base[bare][0]:.6g} to {target[bare][0]:.6g}."
            )
        if absent:
            # No change is allowed, not even a change that is small next to the noise.
            rounding = self._rounding(target)
            self._check(move, rounding, f"{name} is not finite and yet counts")
            noise = np.zeros(self.rounds.dial.size)
        else:
            noise = 0.0
            # The clip's update is not linear in the noise.
            for _ in range(4):
                noise = noise + self._inverse @ move
                move = self._difference(target, self._release(self.cohort, noise))
                if np.all(np.abs(move) <= tolerance / 20):
                    break
            self._check(move, tolerance, f"{name} moves what the noise cannot move")
        if noisy:
            self._compare_noise(more, noise, name)
        return float(np.linalg.norm(noise))

    def _compare_noise(self, more, noise, name) -> None:
        """Checks that with further noise, both rounds agree again."""
        further = self._further
        if self.rounds.dial.share is not None:
            # The round with the client has one more share of noise.
            further = further * len(self.cohort) / len(more)
        with_noise = self._release(more, further)
        self._check_finite(with_noise, name)
        again = self._release(self.cohort, noise + self._further)
        move = self._difference(with_noise, again)
        self._check(move, self._tolerance(again), f"{name} changes the noise")

    def _difference(self, first, second) -> np.ndarray:
        """The difference in stddevs of the noise; 0 for entries without noise."""
        return np.where(self.noisy, np.nan_to_num(first - second) / self.stddevs, 0.0)

    def _tolerance(self, released) -> np.ndarray:
        limit = min(1.0, 1 / self.rounds.factory.noise_multiplier)
        return TOLERANCE * limit + self._rounding(released) + self.coarseness

    def _rounding(self, released) -> np.ndarray:
        size = np.maximum(
            np.abs(np.nan_to_num(released)), abs(np.nan_to_num(self.base))
        )
        return _ROUNDING * size / self.stddevs

    def _check(self, move, tolerance, words) -> None:
        wrong = np.abs(move) > tolerance
        if wrong.any():
            raise AssertionError(
                f"{words}: {self._label(wrong)} differs by "
                f"{np.abs(move[wrong])[0]:.4g} of its standard deviations."
            )

    def _check_finite(self, released, name) -> None:
        lost = np.isfinite(self.base) != np.isfinite(released)
        if lost.any():
            raise AssertionError(f"{name} makes {self._label(lost)} not finite.")

    def _label(self, which: np.ndarray) -> str:
        return self.labels[int(np.argmax(which))]


def _norms(rounds: Rounds, state: Any) -> np.ndarray:
    """The clip norm of each group."""
    clip_state = rounds.clip_state(state)
    return np.asarray(rounds.clip.clip_norms(clip_state), np.float64)


def _groups(rounds: Rounds) -> np.ndarray:
    """The group of each coordinate."""
    return np.repeat(rounds.clip.assignment, rounds.layout.sizes)


def per_coordinate(rounds: Rounds, per_group: np.ndarray) -> np.ndarray:
    """A number for each coordinate, from a number for each group."""
    return per_group[_groups(rounds)]


def _direction(rounds: Rounds, vector: np.ndarray) -> np.ndarray:
    """The vector with norm 1 in every group."""
    groups = _groups(rounds)
    norms = np.sqrt(np.bincount(groups, vector**2))
    return vector / np.maximum(norms, 1e-300)[groups]


def updates(rounds: Rounds, start: Start) -> Iterator[tuple[str, np.ndarray, bool]]:
    """Updates to try: their names, coordinates, and whether they must not count."""
    size = rounds.layout.size
    rng = np.random.default_rng(2)
    clips = per_coordinate(rounds, _norms(rounds, start.state))
    usual = _direction(rounds, rng.normal(size=size))
    yield "within its clip", 0.7 * usual * clips, False
    yield "beyond its clip", 10 * usual * clips, False
    yield "zero", np.zeros(size), False
    nan, inf = math.nan, math.inf
    secure = rounds.factory.secure
    if secure is not None and rounds.factory.noise == "central":
        yield "half a step above steps", _half_steps(rounds, secure.bits) * clips, False
    one = np.eye(size)
    largest = min(float(d.max) for d in rounds.layout.dtypes)
    huge = min(largest, 1e100) / 4
    yield "huge", huge * np.sign(usual), False
    yield "one NaN", np.where(one[size // 2] > 0, nan, usual * clips), True
    if start.number > 1:
        # The remaining updates test properties that do not depend on the clip norm.
        return
    others = np.sum([rounds.vector(value) for value in start.cohort], 0)
    yield "at its clip", usual * clips, False
    yield "just above its clip", 1.00001 * usual * clips, False
    yield "opposite to all others", -10 * _direction(rounds, others) * clips, False
    yield "like all others", 10 * _direction(rounds, others) * clips, False
    yield "one coordinate", 10 * one[0] * clips, False
    yield "huge in one coordinate", -huge * one[-1], False
    yield "tiny", 1e-21 * usual, False
    yield "subnormal", 1e-40 * usual, False
    for group in range(min(4, rounds.clip.groups) if rounds.clip.groups > 1 else 0):
        own = _groups(rounds) == group
        yield f"group {group} alone", 10 * usual * clips * own, False
    for kind, place, what in (
        ("NaN everywhere", np.ones(size), nan),
        ("infinite", one[0], inf),
        ("minus infinite", one[-1], -inf),
        ("NaN beside huge", one[-1], nan),
    ):
        beside = huge * np.sign(usual) if "huge" in kind else usual * clips
        yield kind, np.where(place > 0, what, beside), True


def _half_steps(rounds: Rounds, bits: int) -> np.ndarray:
    """Coordinates just above half of a step, and a norm of nearly 1 in each group.

    Rounding to the nearest step makes all coordinates longer.
    """
    levels = 2 ** (bits - 1) - 1
    groups = _groups(rounds)
    found = np.zeros(len(groups))
    for group in range(rounds.clip.groups):
        where = np.flatnonzero(groups == group)
        low = max(math.floor(levels / math.sqrt(len(where)) - 0.501), 0) + 0.501
        steps = np.full(len(where), low)
        # As many coordinates as fit are moved one step further.
        room = levels**2 - float(np.sum(steps**2))
        steps[: max(0, int(room // (2 * low + 1)))] += 1
        found[where] = steps / levels
    return found
