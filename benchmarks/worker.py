"""Measures TensorFlow variants in a process of its own; see `benchmarks.timing`."""

from __future__ import annotations

import sys

from benchmarks import timing, variants

if __name__ == "__main__":
    timing.work(sys.argv[1:], variants.makers)
