"""Private training of Keras models, one command line program per experiment."""

import os
import time

#: When the program started, before the slow import of TensorFlow.
STARTED = time.monotonic()

# TensorFlow 2.14 reports as errors that it found no GPU libraries. What goes wrong in a
# computation is raised as an exception all the same. Must be set before the import.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
