"""The grammar's words: blocks by name, with the settings that each can have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Block:
    """A kind of node.

    Attributes:
      run: `run(env, path, x, args, node) -> x`.
      options: for each setting its possible values, the simplest first.
      children: whether it holds further blocks.
      mixes: whether it combines examples.
      random: whether it draws random numbers.
      weight: how often it is chosen.
    """

    run: Callable
    options: dict[str, tuple]
    children: bool = False
    mixes: bool = False
    random: bool = False
    weight: float = 1.0


BLOCKS: dict[str, Block] = {}


def block(
    name: str,
    *,
    children: bool = False,
    mixes: bool = False,
    random: bool = False,
    weight: float = 1.0,
    **options: Any,
) -> Callable:
    """Registers a function as a block."""

    def register(run):
        settings = {key: tuple(values) for key, values in options.items()}
        BLOCKS[name] = Block(run, settings, children, mixes, random, weight)
        return run

    return register


def with_defaults(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """The settings of a node, with the simplest value of each setting not given."""
    return {key: args.get(key, v[0]) for key, v in BLOCKS[name].options.items()}
