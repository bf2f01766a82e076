"""Data sets of the transfer experiments: folders of images, read file by file."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from driver_kit.settings import UsageError
from keras_examples import image_data
from tfdpclip import files

FOLDER_LAYOUT = "{train,validation,test}/<class>/*.{jpg,jpeg,png}"
SUN397_LAYOUT = (
    "SUN397/<letter>/<class>[/<sub>]/*.jpg, SUN397/ClassName.txt, and the split lists "
    "train.txt, validation.txt and test.txt with a /letter/class/file.jpg per line"
)
_ENDINGS = {".jpg", ".jpeg", ".png"}


@dataclasses.dataclass
class ImageFiles:
    """Files and labels; an item is an image, decoded and resized, and its label.

    Attributes:
      paths: the files.
      labels: int32 `[n]`.
      size: images are resized to this many pixels each way, in [0, 255].
    """

    paths: list[pathlib.Path]
    labels: np.ndarray
    size: int

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        try:
            # Some files are of a different kind than their name says.
            image = tf.io.decode_image(
                tf.io.read_file(str(path)), channels=3, expand_animations=False
            )
        except tf.errors.OpError as error:
            raise UsageError(f"{path} is no image that can be read.") from error
        resized = tf.image.resize(
            image, (self.size, self.size), "bicubic", antialias=True
        )
        pixels = tf.cast(tf.clip_by_value(tf.round(resized), 0.0, 255.0), tf.uint8)
        return pixels.numpy(), self.labels[index]

    def images(self, start: int, stop: int) -> np.ndarray:
        """Some images at once."""
        return np.stack([self[i][0] for i in range(start, min(stop, len(self)))])


@dataclasses.dataclass(frozen=True)
class TransferData:
    """Training and test data: arrays `(x, y)`, or `ImageFiles`.

    Attributes:
      train: private data.
      test: test data.
      classes: number of classes.
      name: for reports.
      public: data to pre-train on, of other classes, if there are.
    """

    train: object
    test: object
    classes: int
    name: str
    public: object = None

    @property
    def size(self) -> int:
        """Number of training examples."""
        return len(labels_of(self.train))


def labels_of(data) -> np.ndarray:
    """The labels of arrays or of files."""
    return data.labels if isinstance(data, ImageFiles) else data[1]


def images_of(data, start: int, stop: int) -> np.ndarray:
    """Some images of arrays or of files."""
    if isinstance(data, ImageFiles):
        return data.images(start, stop)
    return data[0][start:stop]


def load(
    name: str,
    data_dir: str | None,
    size: int,
    *,
    subset: float = 1.0,
    split_seed: int = 42,
    merge_validation: bool = True,
) -> TransferData:
    """A data set by name.

    Args:
      name: "cifar100", "mnist" (or Fashion-MNIST; grey as equal red, green and blue),
        "folder" (Cassava, say), "sun397" or "digits".
      data_dir: where the files are.
      size: image files are resized to this.
      subset: stratified share of the training examples to keep.
      split_seed: for that choice.
      merge_validation: whether the validation split trains, too.

    Raises:
      UsageError: if files are missing or wrong.
    """
    if name == "digits":
        data = _digits()
    elif name == "cifar100":
        found = image_data.load("cifar100", data_dir, (32, 32, 3))
        data = TransferData(found.train, found.test, 100, "CIFAR-100")
    elif name == "mnist":
        found = image_data.load("mnist", data_dir, (28, 28, 1))
        train, test = (
            (np.repeat(x, 3, axis=3), y) for x, y in (found.train, found.test)
        )
        data = TransferData(train, test, 10, found.name)
    else:
        layout = FOLDER_LAYOUT if name == "folder" else SUN397_LAYOUT
        if data_dir is None:
            raise UsageError(
                f"flag --data_dir is missing: it must name a directory with {layout}. "
                "--dataset=digits needs no files."
            )
        read = _folder if name == "folder" else _sun397
        data = read(pathlib.Path(data_dir), size, merge_validation)
    if subset < 1:
        kept = image_data.stratified_subset(labels_of(data.train), subset, split_seed)
        if isinstance(data.train, ImageFiles):
            files = data.train
            train: object = ImageFiles(
                [files.paths[i] for i in kept], files.labels[kept], files.size
            )
        else:
            train = (data.train[0][kept], data.train[1][kept])
        data = dataclasses.replace(
            data, train=train, name=f"{data.name}, {subset:.0%} of each class"
        )
    return data


def _folder(root, size, merge_validation):
    classes = sorted(p.name for p in (root / "train").glob("*") if p.is_dir())
    if not classes:
        raise UsageError(
            f"There is no {root / 'train'}/<class>: --data_dir must hold "
            f"{FOLDER_LAYOUT}."
        )
    wanted = ["train", "validation"] if merge_validation else ["train"]
    parts = {}
    for part, folders in (("train", wanted), ("test", ["test"])):
        paths, labels = [], []
        for folder in folders:
            for label, name in enumerate(classes):
                found = sorted(
                    p
                    for p in (root / folder / name).glob("*")
                    if p.suffix.lower() in _ENDINGS
                )
                paths += found
                labels += [label] * len(found)
        if not paths:
            raise UsageError(
                f"There are no images in {root / folders[0]}: --data_dir must hold "
                f"{FOLDER_LAYOUT}."
            )
        parts[part] = ImageFiles(paths, np.array(labels, np.int32), size)
    return TransferData(parts["train"], parts["test"], len(classes), root.name)


def _sun397(root, size, merge_validation):
    base = root / "SUN397"
    if not (base / "ClassName.txt").exists():
        raise UsageError(
            f"There is no {base / 'ClassName.txt'}: --data_dir must hold "
            f"{SUN397_LAYOUT}."
        )
    classes = _lines(base / "ClassName.txt")
    place = {name: k for k, name in enumerate(classes)}
    wanted = ["train", "validation"] if merge_validation else ["train"]

    def listed_files(parts: Sequence[str]):
        paths, labels = [], []
        for part in parts:
            listed = base / f"{part}.txt"
            if not listed.exists():
                raise UsageError(
                    f"There is no {listed}: --data_dir must hold {SUN397_LAYOUT}."
                )
            for line in _lines(listed):
                name = str(pathlib.PurePosixPath(line).parent)
                if name not in place or ".." in pathlib.PurePosixPath(line).parts:
                    raise UsageError(
                        f"{listed}: {line!r} is of no class in ClassName.txt."
                    )
                paths.append(base / line.lstrip("/"))
                labels.append(place[name])
        return ImageFiles(paths, np.array(labels, np.int32), size)

    return TransferData(
        listed_files(wanted), listed_files(["test"]), len(classes), "SUN397"
    )


def _lines(path: pathlib.Path) -> list[str]:
    try:
        text = files.read_bytes(path).decode()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no text in UTF-8: {error}") from error
    return [line for line in map(str.strip, text.split("\n")) if line]


def _digits() -> TransferData:
    """Digits 5 to 9 are private; 0 to 4 are for pre-training."""
    found = image_data.load("digits", None, (8, 8, 3))

    def part(data, low):
        x, y = data
        kept = (y >= low) & (y < low + 5)
        return x[kept], (y[kept] - low).astype(np.int32)

    return TransferData(
        part(found.train, 5),
        part(found.test, 5),
        5,
        "digits 5 to 9",
        public=part(found.train, 0),
    )
