"""JSON files, read with care."""

from __future__ import annotations

import json
import os
from typing import Any

from tfdpclip import files

# The largest file that is read.
_MOST_BYTES = 2**28


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file. NaN and Infinity are not allowed.

    Raises:
      ValueError: If it is not JSON in UTF-8. Names the file.
      OSError: If it is missing or cannot be read.
    """
    content = files.read_bytes(path, _MOST_BYTES)
    try:
        return json.loads(content.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error) if content else "it is empty"
        raise ValueError(
            f"{path} is cut or damaged, or not a JSON file: {reason}."
        ) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
