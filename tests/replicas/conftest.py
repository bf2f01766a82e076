"""Leaves out the cases that run in separate processes."""

import os

collect_ignore = [] if "REPLICAS" in os.environ else ["mirrored_cases.py"]
