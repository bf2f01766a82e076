"""Times variants of a step in turn: the common part of all workers.

Standard library only, because the peers' environments have little else.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from driver_kit import command_line

# Private steps check themselves at the steps 1, 2, 4 and 8: a few times a step's cost,
# which the median of a few repeats must not be made of.
WARM_UP_STEPS = 8
LEAST_REPEATS = 3


class UnsupportedError(Exception):
    """The library cannot do this, by its own account."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """The measurement of a worker process.

    Attributes:
      model: name of a benchmark model.
      batch_size: examples in a step.
      variants: names of the timed variants; the first is the plain step.
      options: options of the model.
      repeats: timed steps of each variant at most.
      seconds: about how long to time each variant; at least three steps are timed, or
        one if a step alone takes longer than this.
      jit: whether to compile with XLA, where there is a choice.
      adam: Adam instead of SGD.
      memory: only take a few steps of a single variant, and look at the memory.
    """

    model: str
    batch_size: int
    variants: tuple[str, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    repeats: int = 40
    seconds: float = 30.0
    jit: bool = False
    adam: bool = False
    memory: bool = False


def peak_mebibytes() -> float:
    """The peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _status(error: BaseException) -> dict[str, str]:
    # Errors of traced code end with the important line, other errors begin with it.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    traced = "user code" in "".join(lines[:1])
    text = (lines[::-1] if traced else lines) or [type(error).__name__]
    if isinstance(error, UnsupportedError):
        return {"status": "unsupported", "note": text[0]}
    if isinstance(error, MemoryError):
        return {"status": "memory", "note": text[0]}
    traceback.print_exception(error)
    return {"status": "error", "note": f"{type(error).__name__}: {text[0]}"[:300]}


def interleaved(
    makers: Mapping[str, Callable[[], Callable[[], Any]]],
    repeats: int,
    seconds: float,
) -> dict[str, dict[str, Any]]:
    """Times all variants in turn, over and over, after a warm-up of each.

    Every round takes a step of each variant that has time left, so that a change of the
    machine's speed hits all of them alike. Rounds with the same number are comparable
    between variants; a variant that runs out of time has fewer rounds.

    Args:
      makers: functions that make a step, by name; the first is the plain step, which
        is timed in every round. The step must return when it is really done.
      repeats: rounds at most.
      seconds: about how long to time each variant.

    Returns:
      By name: `status` ("ok", "unsupported", "memory" or "error"), `note`, `first`
      (seconds of the first step, with tracing or compilation) and `times` (seconds).
    """
    results: dict[str, dict[str, Any]] = {}
    steps = {}
    for name, maker in makers.items():
        try:
            step = maker()
            start = time.perf_counter()
            step()
            first = time.perf_counter() - start
            # The first step's time includes tracing, and does not predict the next
            # steps' time.
            for _ in range(WARM_UP_STEPS - 1):
                if time.perf_counter() - start - first > seconds:
                    break
                step()
        except Exception as error:
            results[name] = {"first": None, "times": [], **_status(error)}
        else:
            results[name] = {"status": "ok", "note": "", "first": first, "times": []}
            steps[name] = step
    plain = next(iter(makers))
    spent = dict.fromkeys(steps, 0.0)
    for i in range(repeats):
        limit = seconds if i >= LEAST_REPEATS else LEAST_REPEATS * seconds
        active = [name for name in steps if i == 0 or spent[name] < limit]
        if not active or (active == [plain] and len(steps) > 1):
            break
        # The plain step is in every round, because every variant is compared with it.
        for name in dict.fromkeys([plain, *active] if plain in steps else active):
            start = time.perf_counter()
            try:
                steps[name]()
            except Exception as error:
                results[name].update(_status(error))
                del steps[name]
                continue
            took = time.perf_counter() - start
            spent[name] += took
            results[name]["times"].append(took)
    return results


def memory_of(maker: Callable[[], Callable[[], Any]], steps: int = 4) -> dict[str, Any]:
    """Peak memory before the first step and after `steps` of them, in MiB."""
    try:
        step = maker()
        start = peak_mebibytes()
        for _ in range(steps):
            step()
    except Exception as error:
        return _status(error)
    return {
        "status": "ok",
        "note": "",
        "start_mib": start,
        "peak_mib": peak_mebibytes(),
    }


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile.

    >>> quantiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    if not values:
        return (math.nan,) * 3
    if len(values) == 1:
        return (values[0],) * 3
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, statistics.median(values), high


def work(
    argv: Sequence[str],
    makers_of: Callable[[Spec], tuple[dict, int]],
    about: str | None,
) -> None:
    """The main program of a worker: reads a spec, measures, writes the results.

    Args:
      argv: the file with the spec, and the file for the results (JSON both).
      makers_of: ``makers_of(spec)`` returns functions that make a step, by variant, and
        the number of trainable parameters.
      about: the text of --help.

    Raises:
      SystemExit: if there are not two files, or help was asked for and given.
    """
    if command_line.wants_help(argv):
        print(about)
        raise SystemExit(0)
    if len(argv) != 2:
        raise command_line.refusal(
            sys.argv[0], "Two files are needed, spec.json results.json. See --help."
        )
    fields = json.loads(pathlib.Path(argv[0]).read_text())
    spec = Spec(**{**fields, "variants": tuple(fields["variants"])})
    try:
        makers, parameters = makers_of(spec)
    except Exception as error:
        found = {name: {"times": [], **_status(error)} for name in spec.variants}
        parameters = None
    else:
        if spec.memory:
            (name,) = spec.variants
            found = {name: memory_of(makers[name])}
        else:
            found = interleaved(makers, spec.repeats, spec.seconds)
    pathlib.Path(argv[1]).write_text(
        json.dumps({"parameters": parameters, "variants": found})
    )
