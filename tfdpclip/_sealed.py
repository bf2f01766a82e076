"""JSON with a checksum, so that damage is detected."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any

_CHECKSUM = "checksum"


def to_text(content: dict[str, Any]) -> str:
    """Returns the text of a file with JSON-ready content."""
    return json.dumps({**content, _CHECKSUM: digest(content)}, indent=1) + "\n"


def from_text(text: bytes, formats: Collection[int]) -> dict[str, Any]:
    """Returns the content that `to_text` was given.

    Args:
      text: The result of `to_text`.
      formats: The allowed values of `content["format"]`; the last is the current one.

    Raises:
      ValueError: If the text was not made by `to_text`, or has an unknown format.
    """
    if not text:
        raise ValueError("it is empty.")
    content = json.loads(text.decode(), parse_constant=_refuse)
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object.")
    found = content.get("format")
    if not isinstance(found, int) or found not in formats:
        # Ledgers of format 1 had no checksum, so that damage would go unnoticed.
        raise ValueError(f"its format is {found!r}, not {[*formats][-1]}.")
    if content.pop(_CHECKSUM, None) != digest(content):
        raise ValueError("its checksum does not fit its content.")
    return content


def digest(content: Any) -> str:
    """A SHA-256 digest of JSON-ready values.

    Raises:
      TypeError: If a value is not JSON-ready.
    """
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON.")
