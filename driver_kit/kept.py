"""What a study has measured, a line of a file for each run, so that it can go on."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from driver_kit.settings import UsageError
from tfdpclip import files

_KEYS = ("place", "settings")


class Kept:
    """What was measured before, under the same settings, by place in the study.

    *Guarantees*: what comes back was measured under these settings, all of it; a line
    that a stopped process left half written is measured again.

    Args:
      path: the file; made when the first result is there.
      settings: all that results depend on besides their place, as `json` can write it.

    Raises:
      UsageError: if the file was measured under other settings, or has lines that
        cannot be read.

    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "kept.jsonl"
    >>> Kept(path, {"epochs": 3}).get(("a", 1), lambda: {"accuracy": 0.5})
    {'accuracy': 0.5}
    >>> Kept(path, {"epochs": 3}).get(("a", 1), lambda: 1 / 0)
    {'accuracy': 0.5}
    >>> Kept(path, {"epochs": 4})
    Traceback (most recent call last):
        ...
    driver_kit.settings.UsageError: flag --output_dir: ... was measured with other ...
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]):
        self._path = pathlib.Path(path)
        self._settings = json.loads(json.dumps(settings))
        self._known: dict[str, dict[str, Any]] = {}
        if not self._path.exists():
            return
        text = files.read_bytes(self._path).decode(errors="replace")
        # Of the last line, a process that was stopped may have written a part.
        *lines, rest = text.split("\n")
        for number, line in enumerate(lines, 1):
            self._take(number, line)
        if rest:
            files.write_atomically(self._path, "".join(f"{line}\n" for line in lines))

    def _take(self, number: int, line: str) -> None:
        try:
            entry = json.loads(line)
            place, given = _key(entry["place"]), dict(entry["settings"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"flag --output_dir: line {number} of {self._path} cannot be read "
                f"({error!r}); use another directory."
            ) from error
        if given != self._settings:
            differ = sorted(
                name
                for name in {*given, *self._settings}
                if given.get(name) != self._settings.get(name)
            )
            raise UsageError(
                f"flag --output_dir: {self._path} was measured with other settings "
                f"({', '.join(differ)}); use another directory."
            )
        self._known[place] = {k: v for k, v in entry.items() if k not in _KEYS}

    def __contains__(self, place: Sequence[Any]) -> bool:
        return _key(place) in self._known

    def get(
        self, place: Sequence[Any], measure: Callable[[], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """What is known of a place, measured and kept if nothing is.

        Args:
          place: where in the study, as `json` can write it.
          measure: gives what to keep, by name; `json` must be able to write it.
        """
        key = _key(place)
        if key not in self._known:
            found = dict(measure())
            entry = {"place": list(place), "settings": self._settings, **found}
            line = json.dumps(entry) + "\n"
            with self._path.open("a") as file:
                file.write(line)
            # As it will be when it is read again.
            self._take(0, line)
        return self._known[key]


def _key(place: Sequence[Any]) -> str:
    return json.dumps(list(place))
