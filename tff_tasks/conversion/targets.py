"""The required contents of a benchmark's file, and the conversion of an example."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from driver_kit.lazy import tf
from tff_tasks.client_files import DataFileError, Feature
from tff_tasks.registry import TASKS, task_class
from tff_tasks.task import Task

#: The benchmarks that read files.
WITH_FILES = tuple(name for name, task in TASKS.items() if task.file_name)

#: How pixels may be given: as the files hold them, ink being 0 and paper 1, or so that
#: ink is 1, or 255.
PIXELS = ("ink_0", "ink_1", "ink_255")

_KINDS = {
    "int64": "a whole number",
    "float32": "a finite number",
    "string": "a text",
}
_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*")


class ValueProblem(ValueError):
    """A value is wrong; the text continues a place, as in ": is empty"."""

    def __init__(self, text: str, item: int | None = None):
        super().__init__(text)
        # Which of several cells.
        self.item = item


@dataclasses.dataclass(frozen=True)
class Target:
    """The file of a benchmark.

    Args:
      task_name: the benchmark.
      only_digits: for EMNIST, which of the file's two data sets.
      pixels: how pixels are given.
    """

    task_name: str
    only_digits: bool = False
    pixels: str = "ink_0"

    @property
    def task(self) -> Task:
        """The benchmark, with the options that its file depends on."""
        kind = task_class(self.task_name)
        known = "only_digits" in kind.options
        return kind({"only_digits": self.only_digits} if known else {})

    @property
    def file_name(self) -> str:
        """The name that the benchmark looks for."""
        return str(task_class(self.task_name).file_name)

    @property
    def features(self) -> Mapping[str, Feature]:
        """The features of an example."""
        return task_class(self.task_name).features

    @property
    def splits(self) -> Mapping[str, str]:
        """The names of the splits by purpose."""
        return self.task.file_splits()

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The least and the greatest value of features that are numbers."""
        if self.task_name == "cifar100_image":
            return {"image": (0, 255), "label": (0, 99)}
        if "pixels" in self.features:
            return {"pixels": (0, 1), "label": (0, 9 if self.only_digits else 61)}
        return {}

    def text_feature(self) -> str | None:
        """The feature that a plain text can be;

        None if an example needs more than a text.
        """
        if len(self.features) == 1:
            ((name, feature),) = self.features.items()
            return name if feature.dtype == "string" else None
        return None

    def array(self, name: str, raw: Any) -> np.ndarray | bytes:
        """A value in the form of the file.

        Args:
          name: the feature.
          raw: a text, a number, nested lists, an array; or a tuple of texts, the cells
            of several columns.

        Raises:
          ValueProblem: if the value is wrong.
        """
        feature = self.features[name]
        if feature.dtype == "string":
            return _text(raw)
        array = _numbers(raw, feature.dtype == "int64")
        array = _shaped(array, tuple(feature.shape))
        low, high = self.ranges[name]
        scale = 255 if name == "pixels" and self.pixels == "ink_255" else 1
        high *= scale
        if array.min() < low or array.max() > high:
            bad = array.min() if array.min() < low else array.max()
            fix = ""
            if name == "pixels" and scale == 1 and 0 <= array.min() <= bad <= 255:
                fix = "; for 0 to 255, 255 being ink: --pixels=ink_255"
            elif self.only_digits and name == "label" and 0 <= bad <= 61:
                fix = "; for labels 0 to 61 leave --only_digits out"
            raise ValueProblem(f"has {bad:g}, but must be {low} to {high}{fix}")
        if name == "pixels" and self.pixels != "ink_0":
            array = 1 - array / high
        return array

    def serialize(self, values: Mapping[str, np.ndarray | bytes]) -> bytes:
        """The row of an example.

        >>> row = Target("shakespeare_character").serialize({"snippets": b"Ay."})
        >>> tf.train.Example.FromString(row).features.feature["snippets"]
        bytes_list {
          value: "Ay."
        }
        """
        made = {}
        for name, feature in self.features.items():
            value = values[name]
            if feature.dtype == "string":
                made[name] = tf.train.Feature(bytes_list={"value": [value]})
            elif feature.dtype == "int64":
                flat = np.ravel(value).astype(np.int64).tolist()
                made[name] = tf.train.Feature(int64_list={"value": flat})
            else:
                flat = np.ravel(value).astype(np.float32).tolist()
                made[name] = tf.train.Feature(float_list={"value": flat})
        return tf.train.Example(features={"feature": made}).SerializeToString()

    def check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Checks the values of examples that were read again.

        Raises:
          DataFileError: if a value is out of range.
        """
        for name, (low, high) in self.ranges.items():
            found = arrays[name]
            # Not a number compares as false with everything.
            if not (np.all(found >= low) and np.all(found <= high)):
                raise DataFileError(
                    f"{name} must be {low} to {high}, but is {found.min():g} to "
                    f"{found.max():g}."
                )


def _text(raw: Any) -> bytes:
    if not isinstance(raw, (str, bytes)):
        raise ValueProblem(f"is {_shown(raw)}, but must be a text")
    try:
        return raw.encode() if isinstance(raw, str) else bytes(raw)
    except UnicodeEncodeError as error:
        raise ValueProblem("has half a character (a lone surrogate)") from error


def _numbers(raw: Any, whole: bool) -> np.ndarray:
    wanted = _KINDS["int64" if whole else "float32"]
    if isinstance(raw, (str, tuple)):
        cells = (raw,) if isinstance(raw, str) else raw
        values = [_number(cell, whole, i) for i, cell in enumerate(cells)]
        return np.array(values[0] if isinstance(raw, str) else values)
    try:
        array = np.asarray(raw)
    except ValueError as error:
        raise ValueProblem("has lists of different lengths") from error
    if array.dtype.kind not in "iuf" or not np.all(np.isfinite(array)):
        raise ValueProblem(f"is {_shown(raw)}, but must be {wanted}, or lists of them")
    if whole and array.dtype.kind == "f" and not np.all(array == np.round(array)):
        raise ValueProblem(f"is {_shown(raw)}, but must be {wanted}, or lists of them")
    return array


def _number(cell: str, whole: bool, item: int) -> int | float:
    try:
        if "_" in cell or (whole and not _INTEGER.fullmatch(cell)):
            raise ValueError
        value = int(cell) if whole else float(cell)
        if not np.isfinite(value) or abs(value) > 2**62:
            raise ValueError
    except ValueError as error:
        wanted = _KINDS["int64" if whole else "float32"]
        said = "is empty" if not cell.strip() else f"is {_shown(cell)}"
        raise ValueProblem(f"{said}, but must be {wanted}", item) from error
    return value


def _shaped(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape))
    if array.shape == shape:
        return array
    # Flat, or with a last dimension for the only colour.
    if array.size == size and array.shape in ((size,), (*shape, 1)):
        return array.reshape(shape)
    raise ValueProblem(
        f"has shape {list(array.shape)}, but must have {list(shape)}"
        if shape
        else f"has shape {list(array.shape)}, but must be one number"
    )


def _shown(raw: Any) -> str:
    text = repr(raw)
    return text if len(text) <= 60 else f"{text[:57]}..."
