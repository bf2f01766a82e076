"""Measures TensorFlow variants in a separate process.

    python -m benchmarks.worker spec.json results.json

`benchmarks.timing` documents the files.
"""

from __future__ import annotations

import sys

from benchmarks import timing, variants

if __name__ == "__main__":
    timing.work(sys.argv[1:], lambda spec: variants.makers(spec), __doc__)
