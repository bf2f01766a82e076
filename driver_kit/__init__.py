"""What the drivers share: settings that are a command line, reports, progress.

`keras_examples`, `tff_tasks` and `benchmarks` import this and `tfdpclip`; no program is
imported by another. `tfdpclip` imports nothing of it: how figures look and how files
are written, which the library needs too, is in `tfdpclip.pictures` and `.files`.
"""

import os
import time

#: When the program started, before the slow imports.
STARTED = time.monotonic()

# TensorFlow 2.14 reports as errors that it found no GPU libraries. What goes wrong in a
# computation is raised as an exception all the same. Must be set before the import.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
