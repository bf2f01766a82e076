"""All lines of the table, by group and name."""

from __future__ import annotations

from tests import stack
from tests.proof_coverage import examples, layers, losses, networks, preprocessing
from tests.proof_coverage.entry import Entry

GROUPS: dict[str, dict[str, Entry]] = {
    **layers.GROUPS,
    **losses.GROUPS,
    **preprocessing.GROUPS,
    **examples.GROUPS,
    **networks.GROUPS,
}
KERAS = 3 if stack.KERAS_3 else 2
NEEDS_HUB = "KerasHub"


def here(entry: Entry) -> bool:
    """Whether this Keras can build the entry."""
    return entry.keras in (None, KERAS)
