"""Measures steps of jax_privacy against JAX's; runs in an environment with it.

    python -m benchmarks.peers.jax_step spec.json results.json

from the root of the repository; `benchmarks.timing` documents the files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks import timing


def makers(spec: timing.Spec) -> tuple[dict[str, Callable], int]:
    """The makers of steps, by variant, and the number of trained parameters."""
    # Only now: --help needs no environment.
    from benchmarks.peers import jax_variants

    return jax_variants.makers(spec)


if __name__ == "__main__":
    timing.work(sys.argv[1:], makers, __doc__)
