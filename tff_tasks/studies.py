"""The common part of sweeps and the recipe: runs as rows, and their summaries."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from driver_kit import json_files, reports
from tff_tasks import records
from tff_tasks.config import RunConfig

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
TABLE = "sweep.csv"
#: The settings and choices of a sweep.
SETTINGS = "sweep.json"
#: A loss of utility up to this share of the best is acceptable, in the paper.
ACCEPTABLE_LOSS = 0.05


def numbers(text: str, name: str, allowed: Iterable[float] = ()) -> list[float]:
    """Numbers separated by commas.

    Raises:
      ValueError: if a part is no number, or not among those allowed; names the flag.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    good = values and all(math.isfinite(v) and v >= 0 for v in values)
    if not good or (allowed and not set(values) <= set(allowed)):
        raise ValueError(
            f"{name} must be numbers separated by commas, got {text!r}; for example "
            f"{name}={'3,4' if allowed else '0.1,0.3'}."
        )
    return values


@dataclasses.dataclass(frozen=True)
class Cell:
    """The settings of a run.

    Attributes:
      clipping: "none", "adaptive" or "fixed".
      level: the quantile, or the clip norm; 0 for none.
      noise_multiplier: z.
      rate_factor: the factor on the server learning rate.
      seed: the run's.
    """

    clipping: str
    level: float
    noise_multiplier: float
    rate_factor: float
    seed: int

    @property
    def name(self) -> str:
        """The directory's name."""
        return (
            f"{self.clipping}_{self.level:.4g}_z{self.noise_multiplier:g}"
            f"_rate{self.rate_factor:.4g}_seed{self.seed}"
        )

    def config(self, base: RunConfig, directory: pathlib.Path) -> RunConfig:
        """The settings of the run."""
        changes: dict[str, Any] = {
            "clipping": self.clipping,
            "noise_multiplier": self.noise_multiplier,
            "server_learning_rate": base.server_learning_rate * self.rate_factor,
            "seed": self.seed,
            "output_dir": str(directory / self.name),
            "quiet": True,
            "tensorboard": False,
        }
        if self.clipping == "adaptive":
            changes["target_quantile"] = self.level
        elif self.clipping == "fixed":
            changes["clip"] = self.level
        return dataclasses.replace(base, **changes)


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of a run: a row of the table."""

    clipping: str
    level: float
    noise_multiplier: float
    rate_factor: float
    seed: int
    summary: float
    final: float
    rounds: int
    directory: str

    @property
    def setting(self) -> tuple[str, float, float]:
        """All but learning rate and seed."""
        return self.clipping, self.level, self.noise_multiplier


def read_rows(directory: pathlib.Path) -> list[Row]:
    """The table of a sweep.

    Raises:
      ValueError: if there is none.
    """
    path = directory / TABLE
    if not path.exists():
        raise ValueError(f"{path} is missing; run python -m tff_tasks.sweep first.")
    kinds = {field.name: field.type for field in dataclasses.fields(Row)}
    convert = {"float": float, "int": int, "str": str}
    try:
        return [
            Row(**{name: convert[kinds[name]](text) for name, text in row.items()})
            for row in records.read_rows(path, "clipping")
        ]
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, records.RunFileError):
            raise
        raise records.RunFileError(
            f"{path} is damaged: {error}. Delete it: the sweep makes it anew from the "
            "runs' own files."
        ) from error


def finished(config: RunConfig) -> dict[str, Any] | None:
    """The result of a run that ended; None if it did not."""
    path = pathlib.Path(config.output_dir) / reports.CONFIG
    if not path.exists():
        return None
    try:
        result = dict(json_files.read_json(path)["result"])
    except (ValueError, KeyError, TypeError) as error:
        raise records.RunFileError(
            f"{path} is damaged: {error} Delete {path.parent} to run it again."
        ) from error
    return result if result.get("rounds") == config.rounds else None


def final_clients(eval_split: str) -> str:
    """The clients that evaluated a run's last model, beside the choosing clients.

    >>> final_clients("validation")
    'clients not used before'
    """
    if eval_split == "test":
        return "the clients that settings were chosen by: --eval_split=test"
    return "clients not used before"


def relative_loss(
    reference: float, value: float, higher_is_better: bool = True
) -> float:
    """The share of the reference by which a metric is worse; below 0 if better.

    >>> round(relative_loss(0.8, 0.76), 3), round(relative_loss(1.0, 1.1, False), 3)
    (0.05, 0.1)
    """
    if not reference:
        return math.inf
    loss = (reference - value) / abs(reference)
    return loss if higher_is_better else -loss


def discovered_range(
    rows: list[Row], directory: pathlib.Path, better: Callable
) -> tuple[float, float]:
    """The range of clip norms that adaptive clipping without noise went through.

    Rounds are discarded until the unclipped fraction is first within 0.05 of the
    target. The least is the smallest estimate at the lowest quantile, the largest the
    largest at the highest: Andrew et al. (2021), section 3 (quantiles 0.1 and 0.9).

    Args:
      rows: runs of adaptive clipping without noise.
      directory: the sweep's.
      better: max or min, of the metric.

    Raises:
      ValueError: if an estimate never came near its target.
    """
    ends = []
    for pick in (min, max):
        quantile = pick(row.level for row in rows)
        runs = [row for row in rows if row.level == quantile]
        best = better(runs, key=lambda row: row.summary)
        settled = settled_norms(directory / best.directory, quantile)
        if not settled:
            raise ValueError(
                f"clip_range=discover: the estimate of quantile {quantile:g} never "
                "came near it. Use more rounds, or give the range: --clip_range=0.1,1."
            )
        ends.append(pick(settled))
    return ends[0], ends[1]


def settled_norms(directory: pathlib.Path, quantile: float) -> list[float]:
    """The clip norms of a run from where it first met its target."""
    rows = [r for r in records.Table(directory / records.METRICS).rows if r["round"]]
    near = [
        i
        for i, row in enumerate(rows)
        if abs(row["unclipped_fraction"] - quantile) <= 0.05
    ]
    return [row["clip_norm"] for row in rows[near[0] :]] if near else []


def bootstrap(
    values: Sequence[float], resamples: int = 10_000, level: float = 0.95
) -> dict[str, float]:
    """The mean, and a bootstrapped interval of the mean.

    >>> found = bootstrap([1.0, 2.0, 3.0])
    >>> found["mean"], 1.0 <= found["low"] < 2 < found["high"] <= 3.0
    (2.0, True)
    """
    array = np.asarray(values, float)
    rng = np.random.default_rng(0)
    means = rng.choice(array, (resamples, len(array))).mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return {
        "mean": float(array.mean()),
        "low": float(low),
        "high": float(high),
        "runs": len(array),
    }


def score(value: Any, higher_is_better: bool) -> float:
    """A metric from the files; a run that diverged has the worst possible score."""
    if value is None or value == "inf" or not math.isfinite(value):
        return -math.inf if higher_is_better else math.inf
    return float(value)
