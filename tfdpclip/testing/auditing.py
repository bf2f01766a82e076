"""Lower bounds on epsilon from attacks, to be compared with what was claimed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from scipy import optimize, stats

from tfdpclip import _arguments
from tfdpclip._variables import all_unwrapped, unwrapped
from tfdpclip.gradients import PerExampleGradients
from tfdpclip.keras import _compat
from tfdpclip.testing.probe import check_model

_MOST = 100.0
_MOST_CANARIES = 10**7


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """What an audit proved.

    Attributes:
      lower_bound: with the confidence stated, epsilon is at least this.
      claimed: the epsilon that was claimed; None if none was.
      delta: at this delta.
      confidence: the probability that a sound claim passes.
      canaries: how many records could be in or out.
      correct: guesses that were right.
      guesses: guesses that were made.
    """

    lower_bound: float
    claimed: float | None
    delta: float
    confidence: float
    canaries: int
    correct: int
    guesses: int

    @property
    def refuted(self) -> bool:
        """Whether the claim is wrong, with the confidence stated."""
        return self.claimed is not None and self.lower_bound > self.claimed

    def __str__(self) -> str:
        claim = "" if self.claimed is None else f" (claimed: {self.claimed:.4g})"
        return (
            f"epsilon is at least {self.lower_bound:.4g} at delta = {self.delta:g}"
            f"{claim}, with {self.confidence:.6g} confidence: {self.correct} of "
            f"{self.guesses} guesses about {self.canaries} canaries were right"
        )


def one_run_lower_bound(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95
) -> float:
    """The epsilon that guesses about one run refute everything below.

    Steinke, Nasr and Jagielski (2023), "Privacy auditing with one (1) training run",
    Theorem 5.2: m canaries were included independently with probability 1/2 each, and
    of r guesses about which, v were right. If the run were (epsilon, delta)-private for
    adding or removing a record, then

        P[v or more right] <= P[X >= v] + 2 m delta max_i P[v - i <= X < v] / i

    with X binomial(r, e^epsilon / (1 + e^epsilon)).

    Args:
      correct: v.
      guesses: r, fixed before looking.
      canaries: m.
      delta: of the claim, in [0, 1).
      confidence: 1 minus the probability that a true claim is refuted.

    Returns:
      The largest epsilon refuted; 0 if none is.

    Raises:
      ValueError: if an argument is out of range.

    >>> round(one_run_lower_bound(95, 100, 1000, 0.0), 3)
    2.172
    >>> one_run_lower_bound(50, 100, 1000, 1e-5)
    0.0
    """
    canaries = _arguments.integer("canaries", canaries, 1, _MOST_CANARIES)
    guesses = _arguments.integer("guesses", guesses)
    correct = _arguments.integer("correct", correct)
    if not correct <= guesses <= canaries:
        raise ValueError(
            f"correct ({correct}) must be at most guesses ({guesses}), and those at "
            f"most canaries ({canaries})."
        )
    delta, confidence = _check_level(delta, confidence)

    def chance(epsilon: float) -> float:
        right = 1 / (1 + math.exp(-epsilon))
        value = stats.binom.sf(correct - 1, guesses, right)
        if delta > 0 and correct:
            below = np.arange(1, correct + 1)
            mass = np.cumsum(stats.binom.pmf(correct - below, guesses, right))
            value += 2 * canaries * delta * np.max(mass / below)
        return float(value)

    return _largest_refuted(chance, 1 - confidence)


def many_runs_lower_bound(
    with_record: Sequence[float],
    without: Sequence[float],
    delta: float,
    confidence: float = 0.95,
) -> float:
    """The epsilon that many runs with and without one record refute.

    Thresholds the scores where a first half of the runs tells the two apart best, and
    bounds the error rates on the second half (Clopper-Pearson): a private mechanism has
    ``1 - fnr <= e^epsilon fpr + delta`` and the same with the two exchanged.

    Args:
      with_record: a score for each run with the record; higher should mean "with".
      without: a score for each run without it.
      delta: of the claim.
      confidence: 1 minus the probability that a true claim is refuted.

    Returns:
      The largest epsilon refuted; 0 if none is.

    Raises:
      ValueError: if there are fewer than 20 runs of a kind.

    >>> rng = np.random.default_rng(0)
    >>> many_runs_lower_bound(rng.normal(size=200), rng.normal(size=200), 1e-5)
    0.0
    """
    inside = _arguments.floats("with_record", with_record).ravel()
    outside = _arguments.floats("without", without).ravel()
    if min(inside.size, outside.size) < 20 or not (
        np.isfinite(inside).all() and np.isfinite(outside).all()
    ):
        raise ValueError(
            "with_record and without need 20 finite scores each, got "
            f"{inside.size} and {outside.size}."
        )
    delta, confidence = _check_level(delta, confidence)
    cut_in, cut_out = inside.size // 2, outside.size // 2
    candidates = np.concatenate([inside[:cut_in], outside[:cut_out]])
    best, threshold, above = -math.inf, 0.0, True
    for value in candidates:
        tpr = (np.sum(inside[:cut_in] >= value) + 0.5) / (cut_in + 1)
        fpr = (np.sum(outside[:cut_out] >= value) + 0.5) / (cut_out + 1)
        for ratio, side in (
            (math.log(tpr / fpr), True),
            (math.log((1 - fpr) / (1 - tpr)), False),
        ):
            if ratio > best:
                best, threshold, above = ratio, value, side
    hits, tries = inside[cut_in:] >= threshold, outside[cut_out:] >= threshold
    if not above:
        hits, tries = ~tries, ~hits
    level = (1 - confidence) / 2
    low = _clopper_pearson(int(hits.sum()), hits.size, level)[0]
    high = _clopper_pearson(int(tries.sum()), tries.size, level)[1]
    if low <= delta or high <= 0:
        return 0.0
    return max(0.0, math.log((low - delta) / high))


def audit(
    train: Callable[[np.ndarray], np.ndarray],
    canaries: int,
    *,
    delta: float,
    claimed: float | None = None,
    guesses: Sequence[float] = (0.1, 0.25, 0.5, 1.0),
    confidence: float = 0.95,
    seed: int | None = None,
) -> AuditReport:
    """Audits any training procedure, federated or not, in one run.

    Args:
      train: a function that is given which canaries to include, `[m]` booleans, trains
        with those among the data, and returns a score for each, `[m]`, the higher the
        surer that it was included.
      canaries: m.
      delta: of the claim.
      claimed: the epsilon to compare with.
      guesses: the shares of the canaries to guess about (half of them "in", for the
        highest scores, and half "out", for the lowest). The best is reported, at a
        confidence divided by their number.
      confidence: 1 minus the probability that a true claim is refuted.
      seed: of the choice of canaries, for tests.

    Returns:
      The report; nothing is raised for a refuted claim, see `AuditReport.refuted`.

    Raises:
      ValueError: if an argument is out of range or the scores are unusable.
    """
    _arguments.function("train", train, 1)
    canaries = _arguments.integer("canaries", canaries, 10, _MOST_CANARIES)
    delta, confidence = _check_level(delta, confidence)
    if claimed is not None and _arguments.real(claimed) != math.inf:
        claimed = _arguments.non_negative("claimed", claimed)
    guesses = [
        _arguments.rate("guesses", g) for g in _arguments.items("guesses", guesses)
    ]
    if not guesses:
        raise ValueError("guesses is empty: name a share of the canaries, such as 0.5.")
    if seed is not None:
        seed = _arguments.integer("seed", seed)
    included = np.random.default_rng(seed).random(canaries) < 0.5
    scores = _arguments.floats("what train returns", train(included))
    if scores.shape != (canaries,) or np.isnan(scores).any():
        raise ValueError(
            f"train must return one number per canary, [{canaries}], got an array of "
            f"shape {list(scores.shape)} with {int(np.isnan(scores).sum())} NaN."
        )
    level = 1 - (1 - confidence) / len(guesses)
    order = np.argsort(scores, kind="stable")
    best = None
    for share in guesses:
        half = max(1, int(share * canaries / 2))
        right = int(included[order[-half:]].sum() + (~included[order[:half]]).sum())
        bound = one_run_lower_bound(right, 2 * half, canaries, delta, level)
        if best is None or bound > best[0]:
            best = (bound, right, 2 * half)
    return AuditReport(best[0], claimed, delta, confidence, canaries, *best[1:])


def audit_keras(
    model: tf.keras.Model,
    data: Any,
    canaries: Any,
    *,
    fit: Callable[[Any], Any],
    delta: float,
    claimed: float | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
) -> AuditReport:
    """Audits a Keras training run with canaries among its examples.

    The auditor sees every gradient that the optimizer releases, as the accountant
    assumes, and scores a canary by how much of its own (normalised) gradient is in
    them. Canaries work best if their gradients are large and nearly orthogonal, for
    instance random inputs with random labels, and if there are fewer of them than
    parameters.

    Args:
      model: a built model compiled with a private optimizer; it is trained.
      data: (x, y), the ordinary examples; may have no rows.
      canaries: (x, y), m records.
      fit: a function that trains `model` on the (x, y) it is given and returns
        anything; it must call ``model.fit(..., callbacks=[...])`` with the callback
        that is its second argument.
      delta: of the claim.
      claimed: the epsilon to compare with.
      confidence: see `audit`.
      seed: of the choice of canaries, for tests.

    Returns:
      The report.
    """
    check_model(model)
    _arguments.function("fit", fit, 2)
    x, y = (np.asarray(part) for part in data)
    canary_x, canary_y = (np.asarray(part) for part in canaries)

    def train(included):
        watch = _CanaryWatch(canary_x, canary_y)
        chosen = (
            np.concatenate([x, canary_x[included]]),
            np.concatenate([y, canary_y[included]]),
        )
        fit(chosen, watch)
        if not watch.steps:
            raise ValueError(
                "fit must pass its second argument to model.fit, as a callback: "
                "fit=lambda data, watch: model.fit(*data, callbacks=[watch])."
            )
        return watch.scores

    return audit(
        train,
        len(canary_x),
        delta=delta,
        claimed=claimed,
        confidence=confidence,
        seed=seed,
    )


class _CanaryWatch(tf.keras.callbacks.Callback):
    """Adds up how much of each canary's gradient the releases contain."""

    def __init__(self, x: np.ndarray, y: np.ndarray):
        super().__init__()
        self._data = x, y
        self.scores = np.zeros(len(x))
        self.steps = 0

    def on_train_begin(self, logs=None):
        del logs
        optimizer = check_model(self.model)
        variables = all_unwrapped(self.model.trainable_variables)
        optimizer.build(self.model.trainable_variables)
        self._released = [tf.Variable(tf.zeros_like(v)) for v in variables]
        places = {id(v): i for i, v in enumerate(variables)}

        def watched(grads_and_vars):
            for gradient, variable in grads_and_vars:
                self._released[places[id(unwrapped(variable))]].assign_add(gradient)

        _compat.watch_updates(optimizer, watched)
        # A train function that was traced before would not be watched.
        self.model.train_function = None
        self.model.make_train_function()
        self._directions = tf.function(self._directions_graph)

    def on_train_end(self, logs=None):
        del logs
        _compat.unwatch_updates(self.model.optimizer)
        self.model.train_function = None

    def _directions_graph(self, x, y):
        predicted = self.model(x, training=False)
        loss = self.model.compute_loss(x, y, predicted)
        variables = self.model.trainable_variables
        gradients = PerExampleGradients(loss, variables, check_isolation="never")
        flat = [
            tf.reshape(part, [len(self.scores), -1])
            for part in gradients.materialized()
        ]
        return tf.math.l2_normalize(tf.concat(flat, axis=1), axis=1)

    def on_train_batch_begin(self, batch, logs=None):
        del batch, logs
        for released in self._released:
            released.assign(tf.zeros_like(released))
        metrics = [v for metric in self.model.metrics for v in metric.variables]
        before = [v.numpy() for v in metrics]
        self._now = self._directions(*self._data).numpy()
        for variable, value in zip(metrics, before, strict=True):
            variable.assign(value)

    def on_train_batch_end(self, batch, logs=None):
        del batch, logs
        released = np.concatenate([v.numpy().ravel() for v in self._released])
        self.scores += self._now @ released
        self.steps += 1


def _check_level(delta: float, confidence: float) -> tuple[float, float]:
    delta = _arguments.finite("delta", delta)
    confidence = _arguments.finite("confidence", confidence)
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be in [0, 1), got {delta!r}.")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence!r}.")
    return delta, confidence


def _largest_refuted(chance: Callable[[float], float], level: float) -> float:
    """The largest epsilon at which what was seen has a chance below `level`."""
    if chance(0.0) > level:
        return 0.0
    if chance(_MOST) <= level:
        return _MOST
    return float(optimize.brentq(lambda e: chance(e) - level, 0.0, _MOST, xtol=1e-9))


def _clopper_pearson(successes: int, trials: int, level: float) -> tuple[float, float]:
    low = stats.beta.ppf(level, successes, trials - successes + 1) if successes else 0.0
    if successes == trials:
        return float(low), 1.0
    return float(low), float(stats.beta.isf(level, successes + 1, trials - successes))
