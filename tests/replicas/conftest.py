"""Cases that a process of its own runs are none of this one."""

import os

collect_ignore = [] if "REPLICAS" in os.environ else ["mirrored_cases.py"]
