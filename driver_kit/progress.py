"""A progress bar on a terminal; elsewhere some ten lines in all."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import TextIO

import tqdm

_FIRST_SECONDS = 20.0


def duration(seconds: float) -> str:
    """A time for people, in two digits or so.

    >>> duration(0.3), duration(89.6), duration(90), duration(5000), duration(2e5)
    ('0 s', '90 s', '2 min', '83 min', '56 h')
    """
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


class Progress:
    """Shows how far a run is.

    Args:
      title: What is running.
      last: How many there are in all.
      start: How many were done before.
      unit: Of what.
      stream: Where to show it; standard output by default.
    """

    def __init__(
        self,
        title: str,
        last: int,
        start: int = 0,
        unit: str = "step",
        stream: TextIO | None = None,
    ):
        self._stream = stream or sys.stdout
        self._last, self._start, self._unit = last, start, unit
        self._shown, self._started = start, time.monotonic()
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm.tqdm(
                total=last,
                initial=start,
                desc=title,
                file=self._stream,
                unit=unit,
                # Some terminals say that they are 0 wide and high.
                ncols=min(shutil.get_terminal_size().columns, 110),
                nrows=shutil.get_terminal_size().lines,
                # Fits into 80 columns.
                bar_format="{desc} {percentage:3.0f}%|{bar}| {remaining}{postfix}",
            )
        else:
            print(f"{title}:", file=self._stream, flush=True)

    def advance(self, done: int) -> None:
        """Moves the bar, if there is one; the lines wait for `show`."""
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def show(self, done: int, parts: Sequence[str] = ()) -> None:
        """Shows how much is done, and some numbers, if it is time for a line."""
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(parts), refresh=False)
            self.advance(done)
            return
        elapsed = time.monotonic() - self._started
        # The first line comes soon, however long the run.
        soon = self._shown == self._start < done and elapsed >= _FIRST_SECONDS
        due = min(self._shown + max(1, self._last / 10), self._last)
        if done < due and not soon:
            return
        self._shown = done
        seconds = elapsed / max(1, done - self._start)
        width = len(str(self._last))
        head = f"  {self._unit} {done:{width}d} of {self._last}, {seconds:.2g} s each"
        if done < self._last:
            head += f", {duration(seconds * (self._last - done))} left"
        print("   ".join([head, ", ".join(parts)]).rstrip(), file=self._stream)
        self._stream.flush()

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
