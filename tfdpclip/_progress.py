"""Progress bars for long computations, on a terminal and in notebooks."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

#: Shorter computations show no bar.
DELAY = 2.0
#: Shorter computations print no line where bars are off.
LINE_DELAY = 5.0


def bar(
    iterable: Any = None, *, title: str, unit: str, total: int | None = None
) -> Any:
    """A bar of tqdm, with the time left if the total is known.

    No bar is shown if output goes to a file, in notebooks without ipywidgets, and for
    computations that end within `DELAY` seconds. `TQDM_DISABLE=1` in the environment
    switches all bars off.

    Args:
      iterable: the items of the loop; None if `update` is called by hand.
      title: the name of the computation.
      unit: the name of an item.
      total: the number of items, if `iterable` has no length.

    >>> list(bar(range(3), title="clip norms", unit="norm"))
    [0, 1, 2]
    """
    with warnings.catch_warnings():
        # Without ipywidgets a notebook has no bars, which is not the user's error.
        warnings.filterwarnings("ignore", "IProgress not found")
        import tqdm.auto  # Not loaded by merely importing the library.

    return tqdm.auto.tqdm(
        iterable,
        desc=title,
        unit=unit,
        total=total,
        leave=False,
        delay=DELAY,
        dynamic_ncols=True,
        # None: show the bar only on a terminal or in a notebook.
        disable=True if _off() else None,
    )


@contextlib.contextmanager
def calls(
    function: Callable[..., Any], *, title: str, unit: str
) -> Iterator[Callable[..., Any]]:
    """Yields a function whose calls are counted by a bar; for searches of any length.

    Args:
      function: the function.
      title: the name of the search.
      unit: the name of a call.

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
    """Shows the name of a long computation, and for how many seconds it has run.

    Args:
      title: the name of the computation.
      line: a line to print once where no bar is shown (for example if output goes to
        a file), if the computation takes over `LINE_DELAY` seconds; None for no line.

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
