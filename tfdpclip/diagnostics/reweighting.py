"""Clipping as re-weighting: the examples and classes that clipping favours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdpclip import _arguments, pictures
from tfdpclip.diagnostics.norms import check_labels, check_norms, label_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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

    Raises:
      ValueError: if an argument is out of range.

    >>> retained_weight([0.0, 0.5, 4.0], 1.0).tolist()
    [1.0, 1.0, 0.25]
    """
    norms = check_norms(norms)
    clip_norm = _arguments.positive("clip_norm", clip_norm)
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

    Raises:
      ValueError: if an argument is out of range.

    >>> found = class_weights([0.5, 1.0, 4.0], [0, 0, 1], [0.1, 1.0])
    >>> found.relative.round(3).tolist()
    [[0.15, 0.025], [1.0, 0.25]]
    """
    norms = check_norms(norms)
    labels = check_labels(labels, len(norms))
    if _arguments.real(clip_norms) is not None:
        clip_norms = [clip_norms]
    clip_norms = _arguments.items("clip_norms", clip_norms)
    clip_norms = np.array([_arguments.positive("clip_norms", c) for c in clip_norms])
    if _arguments.positive("baseline", baseline) < 1e-100:
        raise ValueError(f"baseline is too small: {_arguments.shown(baseline)}.")
    if not norms.size or not clip_norms.size:
        raise ValueError("norms and clip_norms must not be empty.")
    other = norms
    if baseline_norms is not None:
        other = check_norms(baseline_norms, "baseline_norms")
        if not other.size:
            raise ValueError("baseline_norms must not be empty.")
    names = labels
    if baseline_norms is not None:
        given = labels if baseline_labels is None else baseline_labels
        names = check_labels(given, len(other), "baseline_labels", "baseline_norms")
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

    Raises:
      ValueError: if shapes do not fit or there are no examples.

    >>> found = class_accuracy([0, 0, 0, 1], [True, True, False, False])
    >>> round(found.macro, 3), found.micro
    (0.333, 0.5)
    """
    correct = _arguments.floats("correct", correct)
    if correct.ndim != 1 or not correct.size or not np.isin(correct, (0, 1)).all():
        raise ValueError("correct must be [n], True or False, and not empty.")
    labels = check_labels(labels, len(correct), of="correct")
    classes, means = _class_means(correct, labels)
    return ClassAccuracy(classes, np.unique(labels, return_counts=True)[1], means)


def accuracy_difference(
    one: ClassAccuracy, other: ClassAccuracy
) -> tuple[np.ndarray, np.ndarray]:
    """By class, how much more accurate `one` is than `other`.

    Args:
      one: the accuracies with one clip norm, on some examples.
      other: the accuracies with a second clip norm, on the same examples.

    Returns:
      The classes and the differences, both `[S]`.

    Raises:
      ValueError: if the two have different classes.
    """
    for name, value in (("one", one), ("other", other)):
        if not isinstance(value, ClassAccuracy):
            raise ValueError(
                f"{name} must be the result of class_accuracy, got "
                f"{_arguments.shown(value)}."
            )
    same = np.array_equal(one.classes, other.classes) and np.array_equal(
        one.counts, other.counts
    )
    if not same:
        raise ValueError(
            "one and other must be measured on the same examples; their classes or "
            "counts differ."
        )
    return one.classes, one.accuracy - other.accuracy


def plot_class_weights(
    weights: RetainedWeight,
    path: Any = None,
    *,
    order: Sequence[Any] | None = None,
    differences: dict[str, Any] | None = None,
    difference_label: str = "difference in accuracy",
    xlabel: str | None = None,
    title: str = "Retained weight by class",
    public: bool = False,
) -> Figure:
    """Draws relative retained weights by class; below, differences in accuracy.

    As Figure 4 of Rehn et al. (2025).

    Args:
      weights: the result of `class_weights`.
      path: the file for the picture; None for not saving it.
      order: the classes from left to right: `ClassAccuracy.order` for the easiest
        first.
      differences: for each label, `[S]` differences by class in the order of
        `weights.classes`. The label "clip norm 0.1" gets the look of that clip norm.
      difference_label: the quantity of the differences.
      xlabel: text about the order, under the picture.
      title: a title.
      public: whether the data are public.

    Returns:
      The figure. Needs matplotlib (the extra "plots").

    Raises:
      ValueError: if the order or the differences do not fit the classes.
    """
    if not isinstance(weights, RetainedWeight):
        raise ValueError(
            "weights must be the result of class_weights, got "
            f"{_arguments.shown(weights)}."
        )
    _arguments.boolean("public", public)
    if xlabel is None:
        xlabel = "class" if order is None else "class, in the given order"
    order = _check_order(order, weights.classes.tolist())
    differences = _check_differences(differences, len(order))
    figure, axes = pictures.new(
        max(5.5, 1.8 + min(0.35 * len(order), 9)),
        3.1 * (2 if differences else 1) + 0.5,
        2 if differences else 1,
        grid="y",
        sharex=True,
    )
    _draw_weights(axes[0, 0], weights, order)
    pictures.title(figure, title)
    if differences:
        _draw_differences(axes[1, 0], weights, order, differences)
        axes[1, 0].set_ylabel(difference_label)
    step = max(1, math.ceil(len(order) / 25))
    ticks = np.arange(len(order))[::step]
    axes[-1, 0].set_xticks(ticks, [label_text(label) for label in order[::step]])
    axes[-1, 0].set_xlabel(xlabel)
    if not public:
        pictures.note(figure)
    return pictures.finish(figure, path)


def _check_order(order: Sequence[Any] | None, classes: list[Any]) -> list[Any]:
    """The classes from left to right; `classes` if no order is given."""
    if order is None:
        return classes
    found = [_plain(c) for c in _arguments.items("order", order)]
    if len(found) != len(classes) or any(
        sum(1 for c in found if type(c) is type(k) and c == k) != 1 for k in classes
    ):
        raise ValueError(f"order must name every class once: {classes}.")
    return found


def _check_differences(differences: Any, classes: int) -> Mapping[str, Any]:
    """The differences by label, each checked to have one number for each class."""
    differences = {} if differences is None else differences
    if not isinstance(differences, Mapping):
        raise ValueError(
            "differences must be a mapping from labels to differences, got "
            f"{_arguments.shown(differences)}."
        )
    for label, values in differences.items():
        found = _arguments.floats(f"differences[{label!r}]", values)
        if found.shape != (classes,) or not np.isfinite(found).all():
            raise ValueError(
                f"differences[{label!r}] must have one finite entry for each of the "
                f"{classes} classes."
            )
    return differences


def _draw_weights(ax: Any, weights: RetainedWeight, order: list[Any]) -> None:
    """Draws the relative retained weight of each class, one line per clip norm."""
    places = _places(weights, order)
    for k, c in enumerate(weights.clip_norms):
        look = pictures.style(k, marked=len(order) <= 30)
        values = weights.relative[k, places]
        ax.plot(np.arange(len(order)), values, label=f"clip norm {c:g}", **look)
    ax.axhline(1.0, color=pictures.GREY, linewidth=0.8)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("relative retained weight")
    ax.legend(fontsize=8, frameon=False)


def _draw_differences(
    ax: Any,
    weights: RetainedWeight,
    order: list[Any],
    differences: Mapping[str, Any],
) -> None:
    """Draws the differences by class, one line per label.

    A label that names a clip norm gets the look of that clip norm's line above.
    """
    places = _places(weights, order)
    shown = [f"clip norm {c:g}" for c in weights.clip_norms]
    for k, (label, values) in enumerate(differences.items()):
        index = shown.index(label) if label in shown else len(shown) + k
        look = pictures.style(index, marked=len(order) <= 30)
        x = np.arange(len(order))
        ax.plot(x, np.asarray(values)[places], label=label, **look)
    ax.axhline(0.0, color=pictures.GREY, linewidth=0.8)
    ax.legend(fontsize=8, frameon=False)


def _places(weights: RetainedWeight, order: list[Any]) -> list[int]:
    classes = weights.classes.tolist()
    return [classes.index(label) for label in order]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _class_means(values, labels) -> tuple[np.ndarray, np.ndarray]:
    classes, index = np.unique(labels, return_inverse=True)
    sums = np.bincount(index, weights=np.asarray(values, np.float64))
    return classes, sums / np.bincount(index)
