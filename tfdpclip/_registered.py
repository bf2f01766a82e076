"""What users' modules add to the library, for the life of the process."""

from __future__ import annotations

from collections.abc import Callable


class Registered:
    """The additions.

    Attributes:
      clip_rules: the clip rules that can be loaded, by the name of their class; the
        library's are among them.
      op_rules: the gradients of examples at types of ops, of `op_rule`.
      op_flows: what users state of types of ops, of `op_flow`, and the library trusts.
    """

    def __init__(self) -> None:
        self.clip_rules: dict[str, type] = {}
        self.op_rules: dict[str, Callable] = {}
        self.op_flows: dict[str, str] = {}


REGISTERED = Registered()
