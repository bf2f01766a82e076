"""Files in the safetensors format, read strictly: names, shapes and raw numbers.

Eight bytes with the length of a JSON header, the header, and the arrays in order. No
code in a file is ever run.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

_MOST_HEADER = 100_000_000  # As in the format's own reader.
_MOST = 2**40  # Bytes, or of a dimension.
# bfloat16 is the upper half of a float32, which NumPy has.
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_TYPES |= {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"}
_TYPES |= {"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}


def parse(content: bytes) -> dict[str, np.ndarray]:
    """The arrays of a file, by name; bfloat16 as float32.

    Args:
      content: all of the file.

    Raises:
      ValueError: if it is not exactly what its header says, or of unknown types.

    >>> header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    >>> parse(len(header).to_bytes(8, "little") + header + b"\\0\\0\\x80?")
    {'a': array([1.], dtype=float32)}
    """
    header, data = _header(content)
    found, places = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape, (begin, end) = _entry(name, entry)
        size = math.prod(shape) * np.dtype(_TYPES[kind]).itemsize
        if not 0 <= begin <= end <= len(data) or end - begin != size:
            raise ValueError(
                f"{name!r} of shape {tuple(shape)} in {kind} takes {size} bytes, not "
                f"{begin} to {end} of {len(data)}"
            )
        places.append((begin, end, name))
        array = np.frombuffer(data[begin:end], _TYPES[kind]).reshape(shape)
        if kind == "BF16":
            array = (array.astype("<u4") << 16).view("<f4")
        found[name] = array
    at = 0
    for begin, end, name in sorted(places):
        if begin != at:
            raise ValueError(f"{name!r} begins at byte {begin}, not at {at}")
        at = end
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes at its end belong to no array")
    return found


def _header(content: bytes) -> tuple[dict[str, Any], memoryview]:
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(len(content) - 8, _MOST_HEADER):
        raise ValueError("it is cut off, or not in the safetensors format")
    try:
        header = json.loads(
            content[8 : 8 + length].decode(), object_pairs_hook=_without_repeats
        )
    except (UnicodeDecodeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header, memoryview(content)[8 + length :]


def _without_repeats(pairs):
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header has a name twice")
    return found


def _entry(name: str, entry: Any) -> tuple[str, list[int], list[int]]:
    good = isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}
    lists = [entry["shape"], entry["data_offsets"]] if good else []
    good = good and all(
        isinstance(values, list)
        and all(type(v) is int and 0 <= v < _MOST for v in values)
        for values in lists
    )
    if not good or len(entry["data_offsets"]) != 2:
        raise ValueError(f"{name!r} lacks a type, a shape or its place")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _TYPES:
        raise ValueError(f"{name!r} is of type {entry['dtype']!r}, which is not known")
    return entry["dtype"], *lists
