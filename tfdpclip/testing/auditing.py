"""Lower bounds on epsilon from attacks, for comparison with the claimed epsilon."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments, pictures
from tfdpclip._variables import all_unwrapped, unwrapped
from tfdpclip.keras import _compat
from tfdpclip.keras.gradient_meter import GradientMeter
from tfdpclip.keras.watching.step_history import history_of
from tfdpclip.testing.lower_bounds import (
    MOST_CANARIES,
    check_level,
    one_run_lower_bound,
)
from tfdpclip.testing.probe import check_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The largest number of canaries in a message.
_MOST_SUGGESTED = 2**17
# The shares of the canaries to guess about: half of them "in", for the highest scores,
# and half "out". The best is reported, at a confidence divided by their number.
_GUESSES = (0.1, 0.25, 0.5, 1.0)
# Shorter gradients have no direction.
_SHORTEST = 1e-6


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The result of an audit.

    Attributes:
      lower_bound: with the given confidence, epsilon is at least this.
      claimed: the epsilon of the claim; None without a claim.
      delta: the delta of the claim.
      confidence: the probability that a sound claim passes.
      canaries: the number of records that could be in or out.
      correct: the number of right guesses.
      guesses: the number of guesses.
      scores: the canaries' scores; the higher, the likelier the canary was included.
      included: whether each canary was. Texts show neither; both are None if unknown.
    """

    lower_bound: float
    claimed: float | None
    delta: float
    confidence: float
    canaries: int
    correct: int
    guesses: int
    scores: np.ndarray | None = dataclasses.field(
        default=None, repr=False, compare=False
    )
    included: np.ndarray | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    @property
    def refuted(self) -> bool:
        """Whether the claim is wrong, with the given confidence."""
        return self.claimed is not None and self.lower_bound > self.claimed

    def __str__(self) -> str:
        claim = "" if self.claimed is None else f" (claimed: {self.claimed:.4g})"
        return (
            f"epsilon is at least {self.lower_bound:.4g} at delta = {self.delta:g}"
            f"{claim}, with {self.confidence:.6g} confidence: {self.correct} of "
            f"{self.guesses} guesses about {self.canaries} canaries were right"
            f"{self._limit}"
        )

    @property
    def _limit(self) -> str:
        """The reservation about a claim that was not refuted."""
        if self.claimed is None or self.refuted:
            return ""
        return (
            ". The claim is not refuted, as it would not be by an attack that is too "
            "weak: see that the same audit refutes it for a hundredth of the noise"
        )

    def plot(self, path: Any = None) -> Figure:
        """Draws the scores of canaries that were in, and of canaries that were not.

        Needs matplotlib (the extra "plots"), and returns the figure.

        Args:
          path: the file for the picture; None for not saving it.

        Raises:
          ValueError: if the report has no scores.
        """
        if self.scores is None or self.included is None:
            raise ValueError(
                "The report has no scores to draw: use a report of "
                "dpc.testing.audit, audit_keras or audit_aggregator."
            )
        figure, axes = pictures.new(6.0, 3.2, grid="y")
        ax = axes[0, 0]
        scores = np.asarray(self.scores, np.float64)
        finite = np.isfinite(scores)
        edges = np.histogram_bin_edges(scores[finite], bins=20)
        for k, (label, chosen) in enumerate(
            (("not in", ~self.included), ("in", self.included))
        ):
            shown = scores[chosen & finite]
            color = pictures.COLORS[k]
            label = f"{label} the data: {int(chosen.sum())}"
            ax.hist(shown, edges, color=color, alpha=0.45, label=label)
            ax.hist(
                shown, edges, color=color, histtype="step", linestyle="-" if k else "--"
            )
        ax.set(xlabel="score of a canary", ylabel="canaries")
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.legend(fontsize=9)
        claim = "" if self.claimed is None else f", claimed: {self.claimed:.3g}"
        pictures.title(figure, f"epsilon is at least {self.lower_bound:.3g}{claim}")
        return pictures.finish(figure, path)


def audit(
    train: Callable[[np.ndarray], np.ndarray],
    canaries: int,
    *,
    delta: float,
    claimed: float | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
) -> AuditReport:
    """Audits any training procedure, federated or not, in one run.

    Args:
      train: a function of the inclusion of canaries, `[m]` booleans: it trains with
        the included canaries among the data, and returns a score for each canary,
        `[m]`, the higher the likelier the canary was included.
      canaries: m.
      delta: the delta of the claim.
      claimed: the epsilon to compare with; below the bound that m right guesses of m
        prove, since an audit of fewer canaries could refute nothing.
      confidence: 1 minus the probability that a true claim is refuted.
      seed: the seed of the choice of canaries, for tests.

    Returns:
      The report; nothing is raised for a refuted claim, see `AuditReport.refuted`.

    Raises:
      ValueError: if an argument is out of range, the scores are unusable, or there are
        too few canaries to refute the claim.
    """
    _arguments.function("train", train, 1)
    canaries = _arguments.integer("canaries", canaries, 10, MOST_CANARIES)
    delta, confidence = check_level(delta, confidence)
    if claimed is not None and _arguments.real(claimed) != math.inf:
        claimed = _arguments.non_negative("claimed", claimed)
    seed = _arguments.optional(_arguments.integer, "seed", seed)
    level = 1 - (1 - confidence) / len(_GUESSES)
    if claimed is not None and claimed != math.inf:
        _refuse_too_few(canaries, claimed, delta, level)
    included = np.random.default_rng(seed).random(canaries) < 0.5
    scores = _arguments.floats("the result of train", train(included))
    if scores.shape != (canaries,) or np.isnan(scores).any():
        raise ValueError(
            f"train must return one number per canary, [{canaries}], got an array of "
            f"shape {list(scores.shape)} with {int(np.isnan(scores).sum())} NaN."
        )
    order = np.argsort(scores, kind="stable")
    best = None
    for share in _GUESSES:
        half = _half(share, canaries)
        right = int(included[order[-half:]].sum() + (~included[order[:half]]).sum())
        bound = one_run_lower_bound(right, 2 * half, canaries, delta, level)
        if best is None or bound > best[0]:
            best = (bound, right, 2 * half)
    facts = (claimed, delta, confidence, canaries)
    return AuditReport(best[0], *facts, *best[1:], scores=scores, included=included)


def _half(share: float, canaries: int) -> int:
    """The number of guesses "in", and of guesses "out"."""
    return max(1, int(share * canaries / 2))


def _most_refuted(
    canaries: int, delta: float, level: float, uneven: float = 0.0
) -> float:
    """The lower bound of a perfect attack.

    Args:
      canaries: m.
      delta: as for `audit`.
      level: the confidence of the bound for one number of guesses.
      uneven: by how much fewer than m / 2 canaries are included.
    """
    bounds = []
    for half in {_half(share, canaries) for share in _GUESSES}:
        right = half + min(half, int(canaries / 2 - uneven))
        bounds.append(one_run_lower_bound(right, 2 * half, canaries, delta, level))
    return max(bounds)


def _refuse_too_few(canaries: int, claimed: float, delta: float, level: float) -> None:
    """Raises ValueError if no outcome of the audit could refute the claim."""
    most = _most_refuted(canaries, delta, level)
    if most > claimed:
        return
    needed, bound = canaries, 0.0
    while bound <= claimed and needed < _MOST_SUGGESTED:
        needed *= 2
        # Three standard deviations of the number of canaries that are included.
        uneven = 1.5 * math.sqrt(needed)
        bound = _most_refuted(needed, delta, level, uneven)
    advice = "Give many more canaries, or a smaller claim"
    if bound > claimed:
        advice = f"Give {needed} canaries, for example"
    raise ValueError(
        f"canaries: {canaries} canaries cannot refute claimed={claimed:.4g} at "
        f"delta={delta:g}: even if all guesses were right, they would prove, with the "
        f"given confidence, only that epsilon is at least {most:.4g}, so the audit "
        f"would pass without any noise. {advice}; or leave claimed out, for a lower "
        "bound without a claim."
    )


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
    assumes, and scores a canary by the share of its own (normalised) gradient in the
    releases. Canaries work best if their gradients are large and nearly orthogonal, for
    instance random inputs with random labels, and if there are fewer of them than
    parameters. Whether an attack is strong enough shows in an audit of the same model
    with a hundredth of the noise, which must refute the claim.

    Args:
      model: a built model compiled with a private optimizer; it is trained.
      data: (x, y), the ordinary examples; may have no rows.
      canaries: (x, y), m records, each different from the others and from the data: a
        record that is among the data anyway shows nothing.
      fit: a function of two arguments: it trains `model` on the first, (x, y), by
        ``model.fit(..., callbacks=[...])`` with the second as a callback; its result is
        ignored.
      delta: the delta of the claim.
      claimed: the epsilon to compare with; see `audit`.
      confidence: see `audit`.
      seed: the seed of the choice of canaries, for tests.

    Returns:
      The report.

    Raises:
      ValueError: see `audit`; or if a canary is there twice, there are more canaries
        than trainable parameters, or `fit` trains a different model.
    """
    if check_model(model).rows_per_record > 1:
        raise ValueError(
            "The optimizer has rows_per_record above 1, and a canary is one row: audit "
            "a copy of the model with rows_per_record=1 in the optimizer."
        )
    _arguments.function("fit", fit, 2)
    x, y = (np.asarray(part) for part in data)
    canary_x, canary_y = (np.asarray(part) for part in canaries)
    _refuse_repeated((x, y), (canary_x, canary_y))
    size = sum(math.prod(v.shape) for v in model.trainable_variables)
    if len(canary_x) > size:
        raise ValueError(
            f"canaries must be at most the trainable parameters of the model, {size}, "
            f"got {len(canary_x)}: the gradients of more canaries cannot be told apart."
        )

    def train(included):
        watch = _CanaryWatch(canary_x, canary_y, model)
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


def _refuse_repeated(data, canaries) -> None:
    """Raises ValueError if a canary is among the data, or there twice."""
    own = list(zip(*map(_contents, canaries), strict=True))
    if len(set(own)) < len(own):
        raise ValueError(
            f"canaries: {len(own) - len(set(own))} of {len(own)} canaries repeat an "
            "earlier one. A canary that is left out must not be there in a copy: give "
            "different records."
        )
    among = set(own).intersection(zip(*map(_contents, data), strict=False))
    if among:
        raise ValueError(
            f"canaries: {len(among)} of {len(own)} canaries are among the data, so "
            "they are trained on whether they are included or not, and the audit could "
            "refute nothing. Leave them out of data: data=(x[m:], y[m:]), "
            "canaries=(x[:m], y[:m])."
        )


def _contents(array: np.ndarray) -> list[bytes]:
    """The bytes of each row."""
    if array.dtype == object:
        return [repr(row.tolist()).encode() for row in array]
    return [row.tobytes() for row in array]


class _CanaryWatch(tf.keras.callbacks.Callback):
    """Adds up the share of each canary's gradient in the releases."""

    def __init__(self, x: np.ndarray, y: np.ndarray, audited: tf.keras.Model):
        super().__init__()
        self._data = x, y
        self._audited = audited
        self.scores = np.zeros(len(x))
        self.steps = 0

    def on_train_begin(self, logs=None):
        del logs
        if self.model is not self._audited:
            raise ValueError(
                "fit trains a different model than the one that is audited: give "
                "audit_keras the model of fit."
            )
        optimizer = check_model(self.model)
        history_of(optimizer).count_fit()
        variables = all_unwrapped(self.model.trainable_variables)
        optimizer.build(self.model.trainable_variables)
        self._released = [tf.Variable(tf.zeros_like(v)) for v in variables]
        places = {id(v): i for i, v in enumerate(variables)}

        def watched(grads_and_vars):
            for gradient, variable in grads_and_vars:
                self._released[places[id(unwrapped(variable))]].assign_add(gradient)

        _compat.watch_updates(optimizer, watched)
        # A train function that was traced before would bypass the watch.
        self.model.train_function = None
        self.model.make_train_function()
        self._meter = GradientMeter(self.model)

    def on_train_end(self, logs=None):
        del logs
        _compat.unwatch_updates(self.model.optimizer)
        self.model.train_function = None

    def on_train_batch_begin(self, batch, logs=None):
        del batch, logs
        for released in self._released:
            released.assign(tf.zeros_like(released))
        gradients = self._meter.gradients(self._data, batch_size=len(self.scores))
        lengths = np.linalg.norm(gradients, axis=1, keepdims=True)
        self._now = gradients / np.maximum(lengths, _SHORTEST)

    def on_train_batch_end(self, batch, logs=None):
        del batch, logs
        released = np.concatenate([v.numpy().ravel() for v in self._released])
        self.scores += self._now @ released
        self.steps += 1
