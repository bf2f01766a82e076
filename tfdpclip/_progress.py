"""One bar for whatever may take over ten seconds: on a terminal, and in notebooks."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

#: What ends sooner shows nothing.
DELAY = 2.0
#: Nor does what ends sooner print a line where there are no bars.
LINE_DELAY = 5.0


def bar(
    iterable: Any = None, *, title: str, unit: str, total: int | None = None
) -> Any:
    """A bar of tqdm, with the time left where it is known how many there are.

    Nothing is shown in files that output goes to, in notebooks without ipywidgets, nor
    of what ends within `DELAY` seconds. `TQDM_DISABLE=1` in the environment switches
    all bars off.

    Args:
      iterable: what is gone through; None where `update` is called by hand.
      title: what is running.
      unit: of what.
      total: how many there are, where `iterable` cannot tell.

    >>> list(bar(range(3), title="clip norms", unit="norm"))
    [0, 1, 2]
    """
    with warnings.catch_warnings():
        # A notebook without ipywidgets has no bars: no error of who uses this library.
        warnings.filterwarnings("ignore", "IProgress not found")
        import tqdm.auto  # not by who imports the library only

    return tqdm.auto.tqdm(
        iterable,
        desc=title,
        unit=unit,
        total=total,
        leave=False,
        delay=DELAY,
        dynamic_ncols=True,
        # None: unless it is a terminal or a notebook.
        disable=True if _off() else None,
    )


@contextlib.contextmanager
def calls(
    function: Callable[..., Any], *, title: str, unit: str
) -> Iterator[Callable[..., Any]]:
    """A function whose calls a bar counts: of searches, that end when they end.

    Args:
      function: what is called.
      title: what is running.
      unit: what a call is.

    >>> with calls(abs, title="a search", unit="try") as counted:
    ...     print(counted(-3))
    3
    """
    with bar(title=title, unit=unit) as shown:

        def counted(*args: Any) -> Any:
            value = function(*args)
            shown.update()
            return value

        yield counted


@contextlib.contextmanager
def waiting(title: str, line: str | None = None) -> Iterator[None]:
    """Shows what one thing that takes long is, and for how many seconds it has run.

    Args:
      title: what is running.
      line: what is printed, once, where no bar is shown (in a file that output goes to,
        say), of what takes over `LINE_DELAY` seconds; None for nothing.

    >>> with waiting("a step"):
    ...     pass
    """
    with bar(title=title, unit="") as shown:
        done = threading.Event()

        def show():
            shown.bar_format = "{desc} ({elapsed})"
            pause = DELAY
            while not done.wait(pause):
                shown.refresh()
                pause = 1.0

        if shown.disable:
            with _printed_later(line):
                yield
            return
        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _off() -> bool:
    return os.environ.get("TQDM_DISABLE", "") not in ("", "0")


@contextlib.contextmanager
def _printed_later(line: str | None) -> Iterator[None]:
    if line is None or _off():
        yield
        return
    timer = threading.Timer(LINE_DELAY, print, (line,), {"flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
