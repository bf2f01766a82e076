"""Correlated noise: privacy without sampling, from matrices (DP-FTRL).

Independent noise adds up in the weights; correlated noise cancels there. The noise of
step t is row t of z s(C) C^-1 Z, and a run of n steps is one Gaussian mechanism of
noise multiplier z, for every sequence of clip norms (docs/guarantees.md has the proof).
s(C) depends on how often a record takes part, which a sampling scheme must enforce.
TensorFlow is not needed.
"""

from tfdpclip.correlated.buffered import BufferedToeplitz
from tfdpclip.correlated.errors import NoiseError, noise_error, plot_noise
from tfdpclip.correlated.matrices import (
    Independent,
    InverseSquareRootToeplitz,
    NoiseMatrix,
    SquareRootToeplitz,
    Toeplitz,
    ToeplitzMatrix,
    Tree,
)
from tfdpclip.correlated.optimized import OptimizedToeplitz
from tfdpclip.correlated.participation import (
    CyclicPoisson,
    MinSeparation,
    SingleEpoch,
)
from tfdpclip.correlated.serialization import from_dict
from tfdpclip.correlated.streams import Stream
from tfdpclip.correlated.workload import Workload

__all__ = [
    "BufferedToeplitz",
    "CyclicPoisson",
    "Independent",
    "InverseSquareRootToeplitz",
    "MinSeparation",
    "NoiseError",
    "NoiseMatrix",
    "OptimizedToeplitz",
    "SingleEpoch",
    "SquareRootToeplitz",
    "Stream",
    "Toeplitz",
    "ToeplitzMatrix",
    "Tree",
    "Workload",
    "from_dict",
    "noise_error",
    "plot_noise",
]
