"""The noise in the weights under each matrix, at equal privacy."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdpclip import _arguments, pictures
from tfdpclip.correlated.matrices import Independent, NoiseMatrix, count
from tfdpclip.correlated.workload import Workload, check_workload


@dataclasses.dataclass(frozen=True)
class NoiseError:
    """Standard deviations of the noise in one weight, for z = 1.

    In units of the clip norm over the divisor, and of the largest learning rate. For
    a run, multiply by z: without amplification, equal z means equal epsilon for all
    matrices.

    Attributes:
      mean: The root of the mean of the variances over the steps.
      max: The largest standard deviation.
      last: The standard deviation after the last step.
      sensitivity: s(C), which is a factor of all three.
    """

    mean: float
    max: float
    last: float
    sensitivity: float


def noise_error(
    matrix: NoiseMatrix,
    steps: int,
    participation: Any,
    workload: Workload | None = None,
) -> NoiseError:
    """Returns the error of a matrix on a workload.

    B = A C^-1 for the workload A; the noise after step t has standard deviation
    s(C) times the norm of row t of B.

    Args:
      matrix: The matrix.
      steps: n.
      participation: A participation, or a scheme with a participation.
      workload: A; prefix sums by default.

    Raises:
      ValueError: If the matrix does not fit the participation.

    >>> from tfdpclip.correlated import SingleEpoch, SquareRootToeplitz
    >>> noise_error(Independent(), 100, SingleEpoch()).last
    10.0
    >>> noise_error(SquareRootToeplitz(None), 100, SingleEpoch()).last
    2.53
    """
    check_matrix("matrix", matrix)
    found = matrix.sensitivity(count(steps), participation)
    rows = matrix.deviations(steps, workload)
    return NoiseError(
        mean=float(found * np.sqrt(np.mean(rows**2))),
        max=float(found * rows.max()),
        last=float(found * rows[-1]),
        sensitivity=found,
    )


def plot_noise(
    matrices: Mapping[str, NoiseMatrix],
    steps: int,
    participation: Any,
    workload: Workload | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
) -> Any:
    """Draws the noise in the weights after every step, next to independent noise.

    At equal epsilon without amplification: all matrices have the same noise multiplier,
    1, each with its own s(C).

    Args:
      matrices: The matrices, by their names in the figure.
      steps: n.
      participation: A participation, or a scheme with a participation.
      workload: Prefix sums by default.
      path: The file to write, if any.

    Returns:
      The figure.

    Raises:
      ValueError: If a matrix does not fit the participation.
    """
    wanted = "a dictionary of names and matrices"
    _arguments.instance("matrices", matrices, Mapping, wanted)
    workload = check_workload(workload)
    given = {"independent": Independent(), **matrices}
    steps = count(steps)
    figure, axes = pictures.new(10, 4, columns=2)
    at = np.arange(1, steps + 1)
    means: dict[str, float] = {}
    for index, (name, matrix) in enumerate(given.items()):
        check_matrix(f"matrices[{name!r}]", matrix)
        found = matrix.sensitivity(steps, participation)
        rows = found * matrix.deviations(steps, workload)
        means[name] = float(np.sqrt(np.mean(rows**2)))
        look = pictures.style(index, marked=False)
        axes[0, 0].plot(at, rows, label=name, linewidth=1.3, **look)
    axes[0, 0].set(
        xlabel="step",
        ylabel="standard deviation of a weight",
        xlim=(1, max(2, steps)),
    )
    axes[0, 0].set_yscale("log")
    axes[0, 0].yaxis.set_major_formatter("{x:g}")
    axes[0, 0].yaxis.set_minor_formatter("{x:.2g}")
    axes[0, 0].tick_params(which="minor", labelsize=7)
    axes[0, 0].legend(frameon=False, fontsize=8)
    names = list(given)
    relative = [means[name] / means["independent"] for name in names]
    colors = [pictures.style(i)["color"] for i in range(len(names))]
    axes[0, 1].barh(names, relative, color=colors)
    for index, value in enumerate(relative):
        axes[0, 1].annotate(
            f" {value:.3g}", (value, index), va="center", fontsize=8, color="black"
        )
    axes[0, 1].invert_yaxis()
    axes[0, 1].set(
        xlabel="root mean square, relative to independent noise",
        xlim=(0, 1.15 * max(relative)),
    )
    words = workload.describe()
    pictures.title(
        figure, f"Noise in the weights at equal epsilon: {steps} steps, {words}"
    )
    return pictures.finish(figure, path)


def check_matrix(name: str, matrix: Any) -> NoiseMatrix:
    """Returns a matrix, or raises ValueError for all other types."""
    wanted = "a noise matrix, such as BufferedToeplitz(...) or Independent()"
    return _arguments.instance(name, matrix, NoiseMatrix, wanted)
