"""Clipping as re-weighting: the examples and classes that clipping favours."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class RetainedWeight:
    """How much of each class's gradients several clip norms retain.

    Attributes:
      clip_norms: `[K]`.
      classes: `[S]`, the classes, ascending.
      counts: `[S]`, examples in each.
      weight: `[K, S]`, the mean over a class of min(1, C / |g|).
      relative: `[K, S]`, `weight` divided by the largest class weight at the baseline
        clip norm. It exceeds 1 for clip norms above the baseline.
      share: `[K, S]`, each class's share of the sum of the clipped norms; 0 if all
        are 0.
      fraction_clipped: `[K, S]`, the fraction of a class that is clipped.
    """

    clip_norms: np.ndarray
    classes: np.ndarray
    counts: np.ndarray
    weight: np.ndarray
    relative: np.ndarray
    share: np.ndarray
    fraction_clipped: np.ndarray

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary for each clip norm and class, for CSV files or pandas."""
        return [
            {
                "clip_norm": float(c),
                "class": label.item(),
                "count": int(self.counts[k]),
                "weight": float(self.weight[i, k]),
                "relative": float(self.relative[i, k]),
                "share": float(self.share[i, k]),
                "fraction_clipped": float(self.fraction_clipped[i, k]),
            }
            for i, c in enumerate(self.clip_norms)
            for k, label in enumerate(self.classes)
        ]


def retained_weight(norms: Any, clip_norm: float) -> np.ndarray:
    """The factor by which clipping scales each example: min(1, C / |g|).

    Rehn et al. (2025), Appendix C.4.

    Args:
      norms: `[n]` gradient norms. The paper uses the norms of the head alone:
        ``GradientMeter(model, variables=head.trainable_variables)``.
      clip_norm: the clip norm C.

    Returns:
      `[n]`: 1 for a gradient of zero, 0 for a gradient that is not finite, which
      training drops.

    >>> retained_weight([0.0, 0.5, 4.0], 1.0).tolist()
    [1.0, 1.0, 0.25]
    """
    norms = np.asarray(norms, np.float64)
    weights = clip_norm / np.maximum(norms, clip_norm)
    return np.where(np.isfinite(norms), weights, 0.0)


def class_weights(
    norms: Any,
    labels: Any,
    clip_norms: Sequence[float],
    *,
    baseline: float = 1.0,
    baseline_norms: Any = None,
    baseline_labels: Any = None,
) -> RetainedWeight:
    """The weight of each class that several clip norms retain.

    Rehn et al. (2025), Appendix C.4 and Figure 4: values are divided by the value of
    the class that keeps most at the baseline clip norm.

    *Formal guarantees*: none of privacy: computed from gradients without noise.

    Args:
      norms: `[n]` gradient norms.
      labels: `[n]` classes.
      clip_norms: `[K]`, each above 0.
      baseline: the clip norm of the baseline.
      baseline_norms: the norms for the baseline, if a different model made them (the
        paper trains one model for each clip norm); `norms` by default.
      baseline_labels: the classes of `baseline_norms`; `labels` by default.

    Returns:
      The weights, by clip norm and class.

    >>> found = class_weights([0.5, 1.0, 4.0], [0, 0, 1], [0.1, 1.0])
    >>> found.relative.round(3).tolist()
    [[0.15, 0.025], [1.0, 0.25]]
    """
    norms, labels = np.asarray(norms, np.float64), np.asarray(labels)
    clip_norms = np.asarray(clip_norms, np.float64)
    other = norms if baseline_norms is None else np.asarray(baseline_norms, np.float64)
    names = labels if baseline_labels is None else np.asarray(baseline_labels)
    best = _class_means(retained_weight(other, baseline), names)[1].max()
    classes, counts = np.unique(labels, return_counts=True)
    kept = [retained_weight(norms, c) for c in clip_norms]
    weight = np.stack([_class_means(w, labels)[1] for w in kept])
    finite = np.where(np.isfinite(norms), norms, 0.0)
    sums = np.stack([_class_means(w * finite, labels)[1] * counts for w in kept])
    clipped = np.stack([_class_means(norms > c, labels)[1] for c in clip_norms])
    total = sums.sum(axis=1, keepdims=True)
    share = sums / np.where(total > 0, total, 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = weight / best
    return RetainedWeight(clip_norms, classes, counts, weight, relative, share, clipped)


@dataclasses.dataclass(frozen=True)
class ClassAccuracy:
    """Accuracy by class.

    Attributes:
      classes: `[S]`, the classes that occur, ascending.
      counts: `[S]`, examples in each.
      accuracy: `[S]`.
    """

    classes: np.ndarray
    counts: np.ndarray
    accuracy: np.ndarray

    @property
    def macro(self) -> float:
        """The mean over classes; classes without examples are left out."""
        return float(self.accuracy.mean())

    @property
    def micro(self) -> float:
        """The mean over examples."""
        return float(np.average(self.accuracy, weights=self.counts))

    @property
    def order(self) -> np.ndarray:
        """The classes from the easiest to the hardest; ties by label."""
        return self.classes[np.argsort(-self.accuracy, kind="stable")]


def class_accuracy(labels: Any, correct: Any) -> ClassAccuracy:
    """Accuracy by class.

    Args:
      labels: `[n]` true classes.
      correct: `[n]`, whether each prediction is right.

    Returns:
      The accuracies.

    >>> found = class_accuracy([0, 0, 0, 1], [True, True, False, False])
    >>> round(found.macro, 3), found.micro
    (0.333, 0.5)
    """
    classes, means = _class_means(correct, labels)
    return ClassAccuracy(classes, np.unique(labels, return_counts=True)[1], means)


def _class_means(values, labels) -> tuple[np.ndarray, np.ndarray]:
    classes, index = np.unique(labels, return_inverse=True)
    sums = np.bincount(index, weights=np.asarray(values, np.float64))
    return classes, sums / np.bincount(index)
