"""What the library notes of a graph: one attribute, which lives as long as the graph.

A separate table would keep the graph alive.
"""

from __future__ import annotations

import dataclasses
from typing import Any

_ATTRIBUTE = "_tfdpclip_notes"


@dataclasses.dataclass
class GraphNotes:
    """The notes of one graph.

    Attributes:
      constants: the tensors of `once`, by key.
      aliases: for the id of each replaced tensor, the tensor and its replacement.
      statuses: the `CheckStatus` of each loss, which the graph keeps alive.
      known_rows: conditions of compiled code, each with the error that False means.
      released: the weights of the elements that private steps were made of, each with
        the identity of an optimizer.
      records: for each loop, what it records.
      copies: for each call that was opened, the outputs of the copies of its ops.
    """

    constants: dict = dataclasses.field(default_factory=dict)
    aliases: dict[int, tuple] = dataclasses.field(default_factory=dict)
    statuses: list = dataclasses.field(default_factory=list)
    known_rows: list[tuple] = dataclasses.field(default_factory=list)
    released: set[tuple] = dataclasses.field(default_factory=set)
    records: dict = dataclasses.field(default_factory=dict)
    copies: dict = dataclasses.field(default_factory=dict)


def notes_of(graph: Any) -> GraphNotes:
    """The notes of a graph."""
    notes = getattr(graph, _ATTRIBUTE, None)
    if notes is None:
        notes = GraphNotes()
        setattr(graph, _ATTRIBUTE, notes)
    return notes
