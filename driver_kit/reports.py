"""What reports are made of: headings, lists, tables, JSON, versions."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from tfdpclip._notebook import aligned

REPORT, CONFIG = "report.txt", "config.json"

_WIDTH = 88
_PACKAGES = ("tfdpclip", "tensorflow", "keras", "dp-accounting", "numpy", "scipy")
_PACKAGES += ("scikit-learn", "matplotlib")


def heading(title: str) -> list[str]:
    """A title as lines.

    >>> heading("Two words")
    ['Two words', '=========', '']
    """
    return [title, "=" * len(title), ""]


def paragraph(text: str) -> list[str]:
    """A paragraph as lines."""
    return textwrap.wrap(text, _WIDTH)


def bullets(paragraphs: Iterable[str]) -> list[str]:
    """A list of paragraphs as lines.

    >>> bullets(["One.", "Two."])
    ['- One.', '- Two.']
    """
    return [
        line
        for text in paragraphs
        for line in textwrap.wrap(
            text, _WIDTH - 4, initial_indent="- ", subsequent_indent="  "
        )
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows as lines of text, columns aligned.

    >>> print(*table([{"z": 1.0, "steps": 10}, {"z": 0.25}]), sep="\\n")
         z  steps
         1     10
      0.25
    """
    if not rows:
        return ["  (empty)"]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(c, "")) for c in columns] for row in rows)]
    return textwrap.indent(aligned(cells), "  ").split("\n")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.5g}"
    return str(value)


def to_json(content: Any) -> str:
    """JSON, in which "inf" and null stand for infinity and NaN.

    >>> to_json({"epsilon": float("inf")})
    '{\\n  "epsilon": "inf"\\n}\\n'
    """
    return json.dumps(_plain(content), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return value


def versions(*further: str) -> dict[str, str]:
    """The versions of what results may depend on: Python and installed packages.

    Args:
      *further: packages beside those that all drivers need.
    """
    found = {"python": platform.python_version()}
    for package in (*_PACKAGES, *further):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def table_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows, values by column, as CSV; columns in the order of first appearance.

    >>> table_text([{"round": 1}, {"round": 2, "loss": 0.5}])
    'round,loss\\n1,\\n2,0.5\\n'
    """
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
