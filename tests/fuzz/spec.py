"""A random model as data, printed as a line of JSON and built again from that line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Node:
    """A block of a model.

    Attributes:
      name: the block's name in `registry.BLOCKS`.
      args: its settings.
      children: the blocks inside it, in order.
    """

    name: str
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    children: tuple[Node, ...] = ()

    def as_data(self) -> list:
        """Lists, strings and numbers."""
        data = [self.name, self.args, [c.as_data() for c in self.children]]
        while len(data) > 1 and not data[-1]:
            data.pop()
        return data

    @classmethod
    def from_data(cls, data: list) -> Node:
        """The node of `as_data`."""
        name, args, children = [*data, {}, []][:3] if len(data) < 3 else data
        return cls(name, dict(args), tuple(cls.from_data(c) for c in children))


@dataclasses.dataclass(frozen=True)
class Spec:
    """A model, its loss, its data and how its step is run.

    Attributes:
      seed: of the data and the weights.
      batch: the number of records.
      input: "vector", "sequence", "image" or "tokens".
      body: the blocks.
      loss: settings of the loss, see `losses`.
      mode: settings of the step, see `modes`.
    """

    seed: int = 0
    batch: int = 4
    input: str = "vector"
    body: tuple[Node, ...] = ()
    loss: dict[str, Any] = dataclasses.field(default_factory=dict)
    mode: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def each(self) -> int:
        """Rows of a record."""
        return self.mode.get("rows", 1)

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.batch * self.each

    def to_json(self) -> str:
        """The spec as a line of JSON, which `from_json` reads."""
        data = {
            "seed": self.seed,
            "batch": self.batch,
            "input": self.input,
            "body": [node.as_data() for node in self.body],
        }
        data |= {k: v for k in ("loss", "mode") if (v := getattr(self, k))}
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """The spec of a line of `to_json`."""
        data = json.loads(text)
        body = tuple(Node.from_data(node) for node in data.pop("body", []))
        return cls(body=body, **data)

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before children."""
        todo = list(reversed(self.body))
        while todo:
            node = todo.pop()
            yield node
            todo.extend(reversed(node.children))

    def edited(self, edit: Callable[[tuple[Node, ...]], tuple[Node, ...]]) -> Spec:
        """A copy with an edited body."""
        return dataclasses.replace(self, body=edit(self.body))
