"""Brute force: replaces examples and measures whether the remaining examples move."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

# How far a loss or a gradient may be off for rounding, relative to the largest.
_ROUNDING = 2e-3


@dataclasses.dataclass(frozen=True)
class Batch:
    """Records, `[B, R, ...]`, R rows each, and the places that they came from.

    Attributes:
      arrays: the records.
      kept: for each example of the first batch, its place in this batch; -1 if it is
        absent.
      finite: whether gradients can be summed over it: 0 times NaN is NaN.
    """

    arrays: tuple[np.ndarray, ...]
    kept: tuple[int, ...]
    finite: bool = True

    def __len__(self) -> int:
        return len(self.arrays[0])


def first_batch(rng: np.random.Generator, examples: int, shapes) -> Batch:
    """Random records."""
    arrays = tuple(_records(rng, examples, shape) for shape in shapes)
    return Batch(arrays, tuple(range(examples)))


def _records(rng, examples, shape):
    return np.round(rng.normal(size=(examples, *shape)), 3).astype("float32")


def others(rng: np.random.Generator, batch: Batch, any_size: bool) -> Iterator[Batch]:
    """Batches with some examples replaced, or with examples added or removed."""
    size = len(batch)
    for kind in ("random", "zero", "large", "huge", "copied", "nan", "all but one"):
        if kind == "all but one" and size > 1:
            changed = [i for i in range(size) if i != rng.integers(size)]
        else:
            changed = [int(rng.integers(size))]
        arrays = []
        for array in batch.arrays:
            array, new = array.copy(), _records(rng, size, array.shape[1:])
            new *= {"zero": 0, "large": 30, "huge": 1e12, "nan": np.nan}.get(kind, 1)
            if kind == "copied":
                new[:] = array[(changed[0] + 1) % size]
            array[changed] = new[changed]
            arrays.append(array)
        kept = tuple(-1 if i in changed else i for i in range(size))
        yield Batch(tuple(arrays), kept, kind not in ("huge", "nan"))
    order = rng.permutation(size)
    arrays = tuple(array[order] for array in batch.arrays)
    yield Batch(arrays, tuple(int(i) for i in np.argsort(order)))
    if any_size:
        yield from _of_other_sizes(rng, batch)


def _of_other_sizes(rng, batch):
    size = len(batch)
    gone = int(rng.integers(size))
    for stay in (
        [i for i in range(size) if i != gone],
        [i for i in range(size) if i != 0],
        sorted(rng.choice(size, 2, replace=False).tolist()),
        [gone],
    ):
        arrays = tuple(array[stay] for array in batch.arrays)
        places = {old: new for new, old in enumerate(stay)}
        yield Batch(arrays, tuple(places.get(i, -1) for i in range(size)))
    for more in (1, 2, 7):
        where = int(rng.integers(size + 1))
        arrays = tuple(
            np.concatenate(
                [array[:where], _records(rng, more, array.shape[1:]), array[where:]]
            )
            for array in batch.arrays
        )
        yield Batch(arrays, tuple(i if i < where else i + more for i in range(size)))


@dataclasses.dataclass(frozen=True)
class Found:
    """A batch's results: losses `[B]`, gradients `[B, P]` and the summed gradient."""

    losses: np.ndarray
    gradients: np.ndarray
    together: np.ndarray


def measure(function: Callable, batch: Batch) -> Found:
    """Differentiates each loss alone, and all of them together."""
    size = len(batch)
    arrays = [a.reshape([-1, *a.shape[2:]]) for a in batch.arrays]
    given = [tf.constant(array) for array in arrays]
    losses, together = function(*given, tf.ones([size]))
    if not batch.finite:
        return Found(losses.numpy(), np.zeros([size, 1]), together.numpy())
    alone = [function(*given, tf.one_hot(i, size))[1] for i in range(size)]
    return Found(losses.numpy(), np.stack([g.numpy() for g in alone]), together.numpy())


def _differ(a: np.ndarray, b: np.ndarray, scale: np.ndarray) -> bool:
    if np.array_equal(a, b, equal_nan=True):
        return False
    both = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~both], b[~both], equal_nan=True):
        return True
    room = _ROUNDING * max(np.max(np.abs(scale[np.isfinite(scale)]), initial=0), 1e-3)
    return bool(np.max(np.abs(a[both] - b[both]), initial=0) > room)


def moves(
    function: Callable, batch: Batch, rng: np.random.Generator, any_size: bool
) -> str | None:
    """How an example moves another example; None if no effect was found.

    Args:
      function: gives the losses `[B]`, and the gradient of their sum weighted by the
        last argument.
      batch: the first batch given to the function.
      rng: draws the changed batches.
      any_size: whether there may be more examples, or fewer.

    Raises:
      tf.errors.OpError: if the function fails for the first batch.
    """
    first = measure(function, batch)
    size = len(batch)
    if first.losses.shape != (size,):
        return "number of losses"
    summed = first.gradients.sum(0)
    if np.isfinite(summed).all() and np.isfinite(first.together).all():
        if _differ(summed, first.together, np.abs(first.gradients)):
            return "gradients together"
    for number, other in enumerate(others(rng, batch, any_size)):
        try:
            found = measure(function, other)
        except (tf.errors.OpError, ValueError):
            continue
        if found.losses.shape != (len(other),):
            return f"number of losses, in batch {number}"
        for old, new in enumerate(other.kept):
            if new < 0:
                continue
            pairs = {"loss": (first.losses[old], found.losses[new])}
            # Where a gradient is not finite, 0 times that gradient is not finite
            # either.
            finite = np.isfinite(first.gradients).all()
            if other.finite and finite and np.isfinite(found.gradients).all():
                pairs["gradient"] = (first.gradients[old], found.gradients[new])
            for what, (before, after) in pairs.items():
                if _differ(np.asarray(before), np.asarray(after), np.abs(before)):
                    return f"{what} of example {old}, in batch {number}"
    return None
