"""Federated benchmarks of the adaptive clipping paper, one command line program each.

Andrew, Thakkar, McMahan, Ramaswamy (2021), *Differentially Private Learning with
Adaptive Clipping*, section 4 and its appendix.
"""

import os
import time

#: When the program started, before the slow imports.
STARTED = time.monotonic()

# TensorFlow 2.14 reports as errors that it found no GPU libraries. What goes wrong in a
# computation is raised as an exception all the same. Must be set before the import.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
