"""IDX files, the format of MNIST and of data sets made like it."""

from __future__ import annotations

import gzip
import math
import os
import pathlib
import struct
import zlib

import numpy as np

from driver_kit.settings import UsageError

# Of one file, unpacked: ten times the largest in use.
_MOST_BYTES = 2**31
_PARTS = {"train": "train", "test": "t10k"}


def find(
    directory: pathlib.Path, part: str, hint: str = ""
) -> tuple[pathlib.Path, pathlib.Path]:
    """The files of the images and of the labels of one part.

    Args:
      directory: where they are, as ``train-images-idx3-ubyte`` or
        ``train-images.idx3-ubyte``, perhaps packed (.gz).
      part: "train" or "test".
      hint: what to add to the error.

    Raises:
      UsageError: if one is missing.
    """
    images, labels = (
        _find(directory, f"{_PARTS[part]}-{kind}", ending, hint)
        for kind, ending in (("images", "idx3-ubyte"), ("labels", "idx1-ubyte"))
    )
    return images, labels


def are_in(directory: pathlib.Path) -> bool:
    """Whether a directory has training images in this format."""
    return any(directory.glob("train-images[-.]idx3-ubyte*"))


def read(path: pathlib.Path, dimensions: int) -> np.ndarray:
    """The array of bytes in a file.

    Args:
      path: the file; packed if it ends in .gz.
      dimensions: how many the array must have.

    Raises:
      UsageError: if it is no such file, or damaged; the message names it.
    """
    header = 4 + 4 * dimensions
    try:
        if not path.is_file():
            raise UsageError(f"{path} is no regular file.")
        packed = path.suffix == ".gz"
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            head = file.read(header)
            # Two zero bytes, 8 for uint8, the number of dimensions: 2049 or 2051.
            wanted = 2048 + dimensions
            if len(head) < header or struct.unpack(">I", head[:4])[0] != wanted:
                raise UsageError(
                    f"{path} is no IDX file: its magic number is not {wanted}."
                )
            shape = struct.unpack(f">{dimensions}I", head[4:])
            size = math.prod(shape)
            if size > _MOST_BYTES:
                raise UsageError(f"{path} is damaged: its header says {shape}.")
            content = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}. Get it again.") from error
    if len(content) != size:
        raise UsageError(
            f"{path} is cut or damaged: its header says {shape}, but it has "
            f"{'more' if len(content) > size else len(content)} bytes of data. Get it "
            "again."
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def _find(directory: pathlib.Path, name: str, ending: str, hint: str) -> pathlib.Path:
    # As published, and as some archives unpack.
    spellings = f"{name}-{ending}", f"{name}.{ending}"
    names = [f"{one}{packed}" for one in spellings for packed in ("", ".gz")]
    for path in (directory / one for one in names):
        # Some archives unpack to a directory of a file's name, beside the file.
        if os.path.lexists(path) and not path.is_dir():
            return path
    raise UsageError(
        f"There is no {directory / names[0]}. Looked for {', '.join(names)} in "
        f"{directory}.{hint and ' '}{hint}"
    )
