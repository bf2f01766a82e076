"""What the stack at hand cannot run is left out here, and nowhere else.

docs/stacks.md has the stacks. The header of a run says what was left out, and why.
"""

import importlib.util

# Files and directories whose names match, by the package that they need.
NEEDS = {
    "tensorflow_federated": [
        "tests/federated",
        "tests/testing/federated_*.py",
        "tests/tff_tasks",
        "tfdpclip/federated",
    ],
}
MISSING = [name for name in NEEDS if importlib.util.find_spec(name) is None]

collect_ignore_glob = [pattern for name in MISSING for pattern in NEEDS[name]]


def pytest_report_header() -> list[str]:
    return [
        f"without {name}, which is not installed: {', '.join(NEEDS[name])}"
        for name in MISSING
    ]
