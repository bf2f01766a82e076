"""Examples of people: drawn with their people, or one by one of few of each."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip.sampling import sources
from tfdpclip.sampling.capacity import MOST_ROWS
from tfdpclip.sampling.sources import Source


class People(Source):
    """People to draw from; whenever one is drawn, so are some of the examples.

    *Formal guarantees*

    * The rows of a person are examples of that person, by the ids, and `per_person` of
      them, whoever the others are: a person more, with all examples, adds these rows
      and changes nobody else's.
    * Which examples they are is drawn uniformly, anew in every step, without
      repetition. Who has fewer has all of them in it; rows that are left over are the
      first of these again, with weight 0.

    Args:
      source: the examples.
      ids: whose each of them is, `[n]`: integers or texts.
      per_person: rows of a person.

    Attributes:
      ids: a copy of them.
      leaves_over: whether anybody has fewer examples than that.

    Raises:
      ValueError: if ids are not integers or texts, one for each example.
    """

    of_people = True

    def __init__(self, source: Source, ids: Any, per_person: int):
        self._examples = source
        self.draws_rows = True
        self.rows_each = _arguments.integer("per_person", per_person, 1, MOST_ROWS)
        self.ids = _checked(ids, source.size)
        names, owners, counts = np.unique(
            self.ids, return_inverse=True, return_counts=True
        )
        self.size = len(names)
        # Everybody's examples, one person's after the other's.
        self._places = np.argsort(np.reshape(owners, -1), kind="stable")
        self._starts, self._counts = np.cumsum(counts) - counts, counts
        self.leaves_over = bool(counts.min() < self.rows_each)
        self.row_spec = source.row_spec
        self.threads = source.threads
        self.assumptions = source.assumptions

    @property
    def row_bytes(self) -> int:
        return super().row_bytes * self.rows_each

    def kept(self) -> Source:
        return People(self._examples.kept(), self.ids, self.rows_each)

    def marks(self) -> str | None:
        return self._examples.marks()

    def digest(self) -> str:
        told = sources._digest(len(self.ids), ((self.ids,),))
        return f"{told} {self._examples.digest()}"

    def rows_of(self, indices: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draws examples of some people.

        Args:
          indices: the people, `[N]`.
          rng: what draws them.

        Returns:
          The numbers of the examples, `[N, per_person]`, for `take`.
        """
        counts, wide = self._counts[indices], self.rows_each
        own = np.arange(wide)
        chosen = np.where(own < counts[:, np.newaxis], own, 0)
        (many,) = np.nonzero(counts > wide)
        # Floyd's algorithm, for all of them at once: each set is as likely.
        for i in range(wide):
            last = counts[many] - wide + i
            drawn = rng.integers(0, last + 1)
            had = (chosen[many, :i] == drawn[:, np.newaxis]).any(axis=1)
            chosen[many, i] = np.where(had, last, drawn)
        return self._places[self._starts[indices][:, np.newaxis] + chosen]

    def take(self, indices, rows):
        return self._examples.take(np.reshape(indices, -1), rows * self.rows_each)

    def weights(self, parts, indices, rows):
        """Weights whose mean with the rows' losses is that of the person's examples."""
        counts = indices != indices[:, :1]
        counts[:, 0] = True
        shares = self.rows_each / counts.sum(axis=1, keepdims=True)
        own = np.zeros([rows, self.rows_each], np.float32)
        own[: len(indices)] = counts * shares
        own = own.reshape(-1) * ~sources.left_out(parts, own.size)
        if len(parts) < 3:
            return own
        return sources._map(
            lambda w: w * own.reshape([-1, *([1] * (np.ndim(w) - 1))]), parts[2]
        )


class FewOfEach(Source):
    """Examples to draw from, of which there are at most so many of any person.

    *Formal guarantees*: which of a person's examples are kept is uniform, and whoever
    the others are, it is as likely: a person more, with all examples, adds at most
    `per_person` and changes nobody else's.

    Args:
      source: all examples.
      ids: whose each of them is, `[n]`: integers or texts.
      per_person: most examples of a person that are kept.
      rng: what chooses them, once.

    Raises:
      ValueError: if ids are not integers or texts, one for each example.
    """

    of_people = True

    def __init__(
        self, source: Source, ids: Any, per_person: int, rng: np.random.Generator
    ):
        self._examples = source
        self._ids = _checked(ids, source.size)
        _, owners, counts = np.unique(
            self._ids, return_inverse=True, return_counts=True
        )
        # In a random order, the first of everybody's.
        mixed = rng.permutation(source.size)
        mixed = mixed[np.argsort(np.reshape(owners, -1)[mixed], kind="stable")]
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        self._kept = np.sort(mixed[np.arange(source.size) - starts < per_person])
        self.size = len(self._kept)
        self.row_spec = source.row_spec
        self.threads = source.threads
        self.assumptions = source.assumptions

    def marks(self) -> str | None:
        return self._examples.marks()

    def digest(self) -> str:
        told = sources._digest(self.size, ((self._ids[self._kept], self._kept),))
        return f"{told} {self._examples.digest()}"

    def take(self, indices, rows):
        return self._examples.take(self._kept[np.asarray(indices, np.int64)], rows)


_UNKNOWN = ("", "nan", "NaN", "None", "<NA>", "NaT", "null")
_MISSING = {*_UNKNOWN, *(name.encode() for name in _UNKNOWN)}


def _checked(ids: Any, size: int) -> np.ndarray:
    """The ids, one for each example, as the caller has them now."""
    # Of a list, NumPy would make texts of all, a name that is missing among them.
    listed = isinstance(ids, (list, tuple))
    found = np.array(ids, dtype=object if listed else None)
    if listed and all(_arguments.whole(name) is not None for name in found.flat):
        try:
            found = found.astype(np.int64)
        except OverflowError:
            raise ValueError(
                "people must be integers below 2**63, if in a list, or texts: "
                "[str(name) for name in ids]." + see("records-of-several-rows")
            ) from None
    if found.shape != (size,):
        name = f"{_arguments.shown(ids)} of " if isinstance(ids, str) else ""
        raise ValueError(
            f"people must have one id for each of the {size} examples, [{size}], got "
            f"{name}shape {list(found.shape)}: scheme.batches((x, y), "
            "people=frame['user'], per_person=8)." + see("records-of-several-rows")
        )
    kinds = {type(name) for name in found.tolist()}
    if kinds in ({str}, {bytes}):
        # As objects: as arrays of texts, those that differ in zeros at the end are one.
        found = found.astype(object)
        missing = _MISSING.intersection(found)
        if missing:
            raise ValueError(
                f"people must be known, and {missing.pop()!r} is what a missing id "
                "becomes as a text: people who have none would be taken for one, and "
                "each be in its gradient without being protected. Drop their examples, "
                "or give each an id of its own." + see("records-of-several-rows")
            )
        return found
    if found.dtype.kind not in "iu":
        raise ValueError(
            "people must be integers or texts: an id that is missing, or not a number, "
            "is nobody's, and equal ids must be equal. Got "
            f"{found.dtype.name if found.dtype.kind != 'O' else 'objects'}; drop "
            "examples of unknown people, or give each an id of its own, and then write "
            "ids.astype(str)." + see("records-of-several-rows")
        )
    if np.any(found == -1):
        raise ValueError(
            "people must be known, and -1 is what a missing id becomes in the codes of "
            "pandas: people who have none would be taken for one. Drop their examples, "
            "or give each an id of its own; where -1 is a person, write "
            "ids.astype(str)." + see("records-of-several-rows")
        )
    return found
