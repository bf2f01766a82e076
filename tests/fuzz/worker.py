"""A process of `workers`: reads specs, a line each, and writes their outcomes."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Until the input ends."""
    # Standard output is kept for answers; prints of libraries go to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from tests.fuzz.check import check
    from tests.fuzz.planted import planted
    from tests.fuzz.spec import Spec

    with planted(sys.argv[1] if len(sys.argv) > 1 else ""):
        for line in sys.stdin:
            answers.write(check(Spec.from_json(line)).to_json() + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
