"""Sources of people's examples: whole people, or a few examples of each person."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip.sampling import sources
from tfdpclip.sampling.capacity import MOST_ROWS
from tfdpclip.sampling.sources import Source


class _ExamplesOfPeople(Source):
    """Examples, with the person of each.

    Args:
      source: the examples.
      ids: the person of each example, `[n]`: integers or texts.
    """

    of_people = True

    def __init__(self, source: Source, ids: Any):
        self._examples = source
        self.ids = checked_ids(ids, source.size)
        self.row_spec = source.row_spec
        self.threads = source.threads
        self.assumptions = source.assumptions

    @property
    def arrays(self):
        return self._examples.arrays

    @property
    def given(self):
        return self._examples.given

    def marks(self) -> str | None:
        return self._examples.marks()


class People(_ExamplesOfPeople):
    """People to draw from; a step has a few examples of each drawn person.

    *Formal guarantees*

    * A drawn person has `per_person` rows, all with examples of that person according
      to the ids. The rows do not depend on the rest of the data: adding a person with
      all examples adds these rows and leaves the rows of all further people unchanged.
    * The examples are drawn uniformly, anew in every step, without repetition. If a
      person has fewer than `per_person` examples, all are used; the rows left over
      repeat the first of these examples, with weight 0.

    Args:
      source: the examples.
      ids: the person of each example, `[n]`: integers or texts.
      per_person: rows of a person.

    Attributes:
      ids: a copy of the ids.
      leaves_over: whether any person has fewer than `per_person` examples.
    Raises:
      ValueError: if ids are not integers or texts, one for each example.
    """

    def __init__(self, source: Source, ids: Any, per_person: int):
        super().__init__(source, ids)
        self.draws_rows = True
        self.rows_each = _arguments.integer("per_person", per_person, 1, MOST_ROWS)
        names, owners, counts = np.unique(
            self.ids, return_inverse=True, return_counts=True
        )
        self.size = len(names)
        # The examples sorted by person, `[n]`.
        self._places = np.argsort(np.reshape(owners, -1), kind="stable")
        self._starts, self._counts = np.cumsum(counts) - counts, counts
        self.leaves_over = bool(counts.min() < self.rows_each)

    @property
    def row_bytes(self) -> int:
        return super().row_bytes * self.rows_each

    def kept(self) -> Source:
        return People(self._examples.kept(), self.ids, self.rows_each)

    def digest(self) -> str:
        told = sources._digest(len(self.ids), ((self.ids,),))
        return f"{told} {self._examples.digest()}"

    def rows_of(self, indices: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draws examples of some people.

        Args:
          indices: the people, `[N]`.
          rng: the generator of the draw.

        Returns:
          The numbers of the examples, `[N, per_person]`, for `take`.
        """
        counts, wide = self._counts[indices], self.rows_each
        own = np.arange(wide)
        chosen = np.where(own < counts[:, np.newaxis], own, 0)
        (many,) = np.nonzero(counts > wide)
        # Floyd's algorithm, for all people at once: each set is equally likely.
        for i in range(wide):
            last = counts[many] - wide + i
            drawn = rng.integers(0, last + 1)
            had = (chosen[many, :i] == drawn[:, np.newaxis]).any(axis=1)
            chosen[many, i] = np.where(had, last, drawn)
        return self._places[self._starts[indices][:, np.newaxis] + chosen]

    def take(self, indices, rows):
        return self._examples.take(np.reshape(indices, -1), rows * self.rows_each)

    def weights(self, parts, indices, rows):
        """Weights that make the mean loss of a person's rows that of the examples."""
        counts = indices != indices[:, :1]
        counts[:, 0] = True
        shares = self.rows_each / counts.sum(axis=1, keepdims=True)
        own = np.zeros([rows, self.rows_each], np.float32)
        own[: len(indices)] = counts * shares
        own = own.reshape(-1) * ~sources.left_out(parts, own.size)
        if len(parts) < 3:
            return own
        return sources.map_leaves(
            lambda w: w * own.reshape([-1, *([1] * (np.ndim(w) - 1))]), parts[2]
        )


class CappedExamples(_ExamplesOfPeople):
    """Examples to draw from, with at most `per_person` examples of any person.

    *Formal guarantees*: the kept examples of a person are a uniform choice that does
    not depend on the rest of the data: adding a person with all examples adds at most
    `per_person` examples, and keeps the examples of all further people.

    Args:
      source: all examples.
      ids: the person of each example, `[n]`: integers or texts.
      per_person: the largest number of examples that a person keeps.
      rng: the generator of the choice, which is made once.

    Raises:
      ValueError: if ids are not integers or texts, one for each example.
    """

    def __init__(
        self, source: Source, ids: Any, per_person: int, rng: np.random.Generator
    ):
        super().__init__(source, ids)
        _, owners, counts = np.unique(self.ids, return_inverse=True, return_counts=True)
        # The first `per_person` examples of each person in a random order.
        mixed = rng.permutation(source.size)
        mixed = mixed[np.argsort(np.reshape(owners, -1)[mixed], kind="stable")]
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        self._kept = np.sort(mixed[np.arange(source.size) - starts < per_person])
        self.size = len(self._kept)

    def digest(self) -> str:
        told = sources._digest(self.size, ((self.ids[self._kept], self._kept),))
        return f"{told} {self._examples.digest()}"

    def take(self, indices, rows):
        return self._examples.take(self._kept[np.asarray(indices, np.int64)], rows)


_NUMPY_TEXTS = (np.str_, np.bytes_)
_UNKNOWN = ("", "nan", "NaN", "None", "<NA>", "NaT", "null")
_MISSING = {*_UNKNOWN, *(name.encode() for name in _UNKNOWN)}


def checked_ids(ids: Any, size: int | None = None) -> np.ndarray:
    """The ids, one for each example, copied from the caller's array.

    Args:
      ids: integers or texts, in a list, an array or a column.
      size: the number of examples, if known.

    Raises:
      ValueError: if ids are not integers or texts, one for each example.
    """
    if np.ma.is_masked(ids):
        raise _unknown("some ids are masked")
    # From a list, NumPy would make texts of all ids, of a missing id as well.
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
    if size is None and found.ndim == 1:
        size = len(found)
    if found.shape != (size,):
        name = f"{_arguments.shown(ids)} of " if isinstance(ids, str) else ""
        raise ValueError(
            f"people must have one id for each of the {size or 'n'} examples, "
            f"[{size or 'n'}], got "
            f"{name}shape {list(found.shape)}: scheme.batches((x, y), "
            "people=frame['user'], per_person=8)." + see("records-of-several-rows")
        )
    if found.dtype.kind == "O":
        # Texts of NumPy, as in a list of the entries of an array.
        plain = [n.item() if isinstance(n, _NUMPY_TEXTS) else n for n in found]
        found = np.array([*plain, None], object)[:-1]
    kinds = {type(name) for name in found.tolist()}
    if kinds in ({str}, {bytes}):
        # As objects: NumPy's text arrays ignore zeros at the end of a text.
        found = found.astype(object)
        missing = _MISSING.intersection(found)
        if missing:
            raise _unknown(f"a missing id becomes {missing.pop()!r} as a text")
        return found
    if found.dtype.kind not in "iu":
        raise ValueError(
            "people must be integers or texts: a missing id, or one that is not a "
            "number, belongs to no person, and equal ids must be equal. Got "
            f"{found.dtype.name if found.dtype.kind != 'O' else 'objects'}; drop the "
            "examples of unknown people, or give each a separate id, and then write "
            "ids.astype(str)." + see("records-of-several-rows")
        )
    if np.any(found == -1):
        codes = "the codes of pandas have -1 for a missing id"
        raise _unknown(codes, "; if -1 is a person's id, write ids.astype(str)")
    return found


def _unknown(why: str, more: str = "") -> ValueError:
    return ValueError(
        f"people must be known, and {why}: all people without an id would count as one "
        "person, and none of them would be protected. Drop their examples, or give "
        f"each person a separate id{more}." + see("records-of-several-rows")
    )
