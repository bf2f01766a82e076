"""Image sets without clients, dealt to simulated clients that prefer some labels."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np

from driver_kit import idx_files, npz_files
from driver_kit.settings import UsageError
from tff_tasks.client_files import DataFileError
from tff_tasks.conversion.targets import Target, ValueProblem
from tff_tasks.digits_task import dirichlet_split
from tff_tasks.streams import stream

_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_LAYOUT = (
    "a folder with IDX files (train-images-idx3-ubyte, train-labels-idx1-ubyte, "
    "t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte, perhaps .gz), or an NPZ file with "
    f"{', '.join(_ARRAYS)}"
)


@dataclasses.dataclass(frozen=True)
class Part:
    """Training or test images.

    Attributes:
      images: one row each.
      labels: as many.
      sources: the files of both.
    """

    images: np.ndarray
    labels: np.ndarray
    sources: tuple[str, str]


def load(path: pathlib.Path) -> dict[str, Part]:
    """The images and labels of an image set, "train" and "test". All are in memory.

    Args:
      path: a folder with IDX files, or an NPZ file.

    Raises:
      DataFileError: if it is neither, or is damaged.
    """
    if path.is_dir():
        return {part: _from_idx(path, part) for part in ("train", "test")}
    if not path.is_file() or path.suffix != ".npz":
        raise DataFileError(f"{path} is no image set. --dealt_to needs {_LAYOUT}.")
    try:
        arrays = npz_files.read_npz(path, _ARRAYS)
    except ValueError as error:
        raise DataFileError(f"{error} --dealt_to needs {_LAYOUT}.") from error
    return {
        part: _part(
            arrays[f"x_{part}"],
            arrays[f"y_{part}"],
            (f"{path}: x_{part}", f"{path}: y_{part}"),
        )
        for part in ("train", "test")
    }


def _from_idx(directory: pathlib.Path, part: str) -> Part:
    try:
        images, labels = idx_files.find(directory, part)
        return _part(
            idx_files.read(images, 3),
            idx_files.read(labels, 1),
            (str(images), str(labels)),
        )
    except UsageError as error:
        raise DataFileError(str(error)) from error


def _part(images: np.ndarray, labels: np.ndarray, sources: tuple[str, str]) -> Part:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or images.ndim < 2:
        raise DataFileError(
            f"{sources[1]} must be whole numbers [n], and images must be in rows; got "
            f"{labels.dtype} {labels.shape} and images {images.shape}."
        )
    if len(images) != len(labels) or not len(labels) or labels.min() < 0:
        raise DataFileError(
            f"{sources[0]} has {len(images)} images, {sources[1]} {len(labels)} "
            "labels. There must be as many, one at least, and labels from 0."
        )
    return Part(images, labels, sources)


def deal(
    parts: dict[str, Part], target: Target, clients: int, dirichlet: float, seed: int
) -> Iterator[tuple[str, bytes, str]]:
    """Client, serialised example and purpose of every image.

    Training images go to the given number of clients. Test images go to separate
    clients of the same size and the same preferences: no image and no client is in
    both. Each client draws its preference for each label from a Dirichlet distribution;
    all clients have the same size, to one image.

    Args:
      parts: of `load`.
      target: the benchmark whose examples they must become.
      clients: the number of training clients.
      dirichlet: the concentration: small numbers make clients differ.
      seed: of the deal.

    Raises:
      UsageError: if there are fewer images than clients.
      DataFileError: if images are not of the target's shape, or labels out of range.
    """
    total = len(parts["train"].labels)
    if clients > total:
        raise UsageError(
            f"flag --dealt_to={clients}: there are only {total} training images; for "
            f"example --dealt_to={max(1, total // 100)}."
        )
    for purpose, part in parts.items():
        share = len(part.labels) / total
        count = clients if purpose == "train" else max(1, round(clients * share))
        rng = stream(seed, "deal", purpose)
        dealt = dirichlet_split(
            part.labels, min(count, len(part.labels)), dirichlet, rng
        )
        width = len(str(count - 1))
        for i, indices in enumerate(dealt):
            for index in indices:
                content = _serialized(part, int(index), target)
                yield f"{purpose}_{i:0{width}d}", content, purpose


def _serialized(part: Part, index: int, target: Target) -> bytes:
    raw = {"label": int(part.labels[index])}
    image = next(name for name in target.features if name != "label")
    raw[image] = part.images[index]
    values = {}
    for name, source in ((image, part.sources[0]), ("label", part.sources[1])):
        try:
            values[name] = target.array(name, raw[name])
        except ValueProblem as problem:
            raise DataFileError(
                f"{source}, image {index + 1}: {name} {problem}."
            ) from (problem)
    return target.serialize(values)
