"""JSON with a checksum, so that damage is found, not believed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any

_CHECKSUM = "checksum"


def to_text(content: dict[str, Any]) -> str:
    """The text of a file, of values that JSON has."""
    return json.dumps({**content, _CHECKSUM: digest(content)}, indent=1) + "\n"


def from_text(text: bytes, formats: Collection[int]) -> dict[str, Any]:
    """What `to_text` was given.

    Args:
      text: What it made.
      formats: What `content["format"]` may be; the last is the current one.

    Raises:
      ValueError: If the text is anything but what `to_text` made, or of another format.
    """
    if not text:
        raise ValueError("it is empty.")
    content = json.loads(text.decode(), parse_constant=_refuse)
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object.")
    found = content.get("format")
    if not isinstance(found, int) or found not in formats:
        # Ledgers of format 1 had no checksum: damage to them cannot be told.
        raise ValueError(f"its format is {found!r}, not {[*formats][-1]}.")
    if content.pop(_CHECKSUM, None) != digest(content):
        raise ValueError("its checksum does not fit its content.")
    return content


def digest(content: Any) -> str:
    """A SHA-256 digest of values that JSON has.

    Raises:
      TypeError: If JSON has no such value.
    """
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON.")
