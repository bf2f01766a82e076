"""The result of a run of a benchmark."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np

from tff_tasks.config import RunConfig


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
      config: the settings.
      derived: numbers that follow from settings and data.
      rows: the table of rounds; row 0 is before training.
      final: metrics of the last model on the clients kept for the end, or on all of
        them where none were kept.
      summary: the benchmark's metric, averaged over the last rounds, a fifth of all or
        100.
      epsilon: of the run, or of the same run without a seed.
      private: whether there was noise and no seed.
      statement: the privacy statement.
      report: the report.
      weights: the trained weights.
      directory: of the files.
    """

    config: RunConfig
    derived: dict[str, Any]
    rows: list[dict[str, Any]]
    final: dict[str, float]
    summary: float
    epsilon: float
    private: bool
    statement: str
    report: str
    weights: list[np.ndarray]
    directory: pathlib.Path
