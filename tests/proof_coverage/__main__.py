"""Proves the losses of all entries, and writes the verdicts to docs/results/proof.md.

    python -m tests.proof_coverage               # all of them, a quarter of an hour
    python -m tests.proof_coverage losses core   # groups whose names begin so

A stack writes its own column, and leaves the second stack's column as it is.
"""

from __future__ import annotations

import sys

from tests.proof_coverage import networks, page
from tests.proof_coverage.entries import GROUPS, NEEDS_HUB, here


def main(names: list[str]) -> None:
    """Examines the groups whose names begin with a given name, or all."""
    for group, entries in GROUPS.items():
        if names and not group.startswith(tuple(names)):
            continue
        if group == NEEDS_HUB and not networks.HUB:
            continue
        found = {}
        for name, entry in entries.items():
            if not here(entry):
                continue
            try:
                cells, ops = page.examined(entry)
            except Exception as error:
                # The remaining entries are examined, and this line stays as it is.
                print(f"{group}, {name}: {type(error).__name__}: {error}", flush=True)
                continue
            if page.is_worse(cells, "proven" if entry.apart else "mixed", entry.apart):
                print(f"{group}, {name}: {cells} {ops}", flush=True)
            found[group, name] = cells, ops
        known = page.rows_of(page.PAGE.read_text())
        page.update(
            {
                key: page.line(GROUPS[key[0]][key[1]], known.get(key), cells, ops)
                for key, (cells, ops) in found.items()
            }
        )


if __name__ == "__main__":
    main(sys.argv[1:])
