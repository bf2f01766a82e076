"""Reads the pickles of CIFAR without executing anything in them.

A pickle is a program: it can call any function that can be imported. The published
files need only dictionaries, lists, numbers, strings, and arrays of bytes; this reader
makes these by its own functions, and refuses the rest.
"""

from __future__ import annotations

import io
import math
import pathlib
import pickle
import pickletools
from typing import Any

import numpy as np

from tfdpclip import files

_MOST_BYTES = 2**30
# The opcodes of the published files, and of files that Python 3 writes with the same
# content. No persistent ids, extension codes, classes with arguments, or out-of-band
# buffers.
_OPCODES = frozenset(
    "PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE "
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "
    "STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 "
    "UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "EMPTY_DICT DICT SETITEM SETITEMS "
    "GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE "
    "GLOBAL STACK_GLOBAL REDUCE BUILD".split()
)
_DTYPES = frozenset({"u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8"})


class PickleError(ValueError):
    """A pickle is damaged, or uses more than plain data need."""


def load(path: pathlib.Path) -> Any:
    """The contents of a pickle of plain values and arrays of integers.

    Args:
      path: the file.

    Raises:
      PickleError: if it is damaged or asks for anything else. Nothing was executed.
      OSError: if it cannot be read.
    """
    try:
        content = files.read_bytes(path, _MOST_BYTES)
        _scan(content)
        return _plain(_Unpickler(io.BytesIO(content), encoding="bytes").load())
    except OSError:
        raise
    except Exception as error:
        # Damaged pickles raise nearly every kind of error there is.
        raise PickleError(str(error) or type(error).__name__) from error


def _scan(content: bytes) -> None:
    """Checks every instruction and every size before any is followed."""
    count = 0
    for opcode, argument, position in pickletools.genops(content):
        count += 1
        if opcode.name not in _OPCODES:
            raise PickleError(f"instruction {opcode.name} at byte {position}")
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument) > count:
            # The memo is an array, whose size the file would choose.
            raise PickleError(f"memo {argument} at byte {position}")


class _Dtype:
    """An integer type, as NumPy pickles it."""

    def __init__(self, name, align=False, copy=True):
        name = name.decode() if isinstance(name, bytes) else name
        if name not in _DTYPES:
            raise PickleError(f"an array of type {name!r}")
        self._name, self._order = name, "="

    def __setstate__(self, state):
        order = state[1].decode() if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "=", "|"):
            raise PickleError(f"byte order {order!r}")
        self._order = order

    def resolved(self) -> np.dtype:
        return np.dtype(self._order + self._name)


class _Array:
    """An array, as NumPy pickles it; `_plain` makes it."""

    def __init__(self):
        self.value: np.ndarray | None = None

    def __setstate__(self, state):
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Dtype) or not isinstance(content, bytes):
            raise PickleError("an array without type or content")
        if not all(type(n) is int and n >= 0 for n in shape):
            raise PickleError(f"an array of shape {shape!r}")
        found = dtype.resolved()
        if math.prod(shape) * found.itemsize != len(content):
            raise PickleError(
                f"an array said to be {tuple(shape)} of {found} that has "
                f"{len(content)} bytes"
            )
        order = "F" if fortran else "C"
        self.value = np.frombuffer(content, found).reshape(shape, order=order)


def _array(kind, shape, letter) -> _Array:
    return _Array()


def _ndarray(*_):
    raise PickleError("it makes an array in an unknown way")


def _bytes_of(text="", encoding="latin1") -> bytes:
    # How Python 3 writes bytes for Python 2.
    if encoding not in ("latin1", b"latin1") or not isinstance(text, str):
        raise PickleError("it encodes a text in an unknown way")
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    """Finds functions of this module only."""

    _KNOWN = {
        ("numpy", "ndarray"): _ndarray,
        ("numpy", "dtype"): _Dtype,
        ("numpy.core.multiarray", "_reconstruct"): _array,
        ("numpy._core.multiarray", "_reconstruct"): _array,
        ("_codecs", "encode"): _bytes_of,
        # How protocol 2 writes bytes of length 0.
        ("__builtin__", "bytes"): _bytes_of,
    }

    def find_class(self, module, name):
        if (module, name) not in self._KNOWN:
            raise PickleError(f"it asks for {module}.{name}")
        return self._KNOWN[module, name]


def _plain(value: Any) -> Any:
    """A dictionary with arrays in place of `_Array` objects."""
    if not isinstance(value, dict):
        raise PickleError("it holds no dictionary")
    return {
        key: part.value if isinstance(part, _Array) else part
        for key, part in value.items()
    }
