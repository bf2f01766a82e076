"""Measures steps of Opacus against PyTorch's; runs in an environment with Opacus.

    python -m benchmarks.peers.opacus_step spec.json results.json

from the root of the repository; `benchmarks.timing` documents the files.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable

from benchmarks import timing


def makers(spec: timing.Spec) -> tuple[dict[str, Callable], int]:
    """The makers of steps, by variant, and the number of trained parameters."""
    # Only now: --help needs no environment.
    from benchmarks.peers import opacus_variants

    return opacus_variants.makers(spec)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    timing.work(sys.argv[1:], makers, __doc__)
