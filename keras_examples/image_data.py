"""Image data from files in their published formats, and stand-ins that need no files.

Nothing is downloaded. Shapes come from the files, so that a file of 64 images does.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import pathlib
import zlib
from collections.abc import Sequence

import numpy as np

from driver_kit import idx_files, npz_files
from driver_kit.settings import UsageError
from keras_examples import cifar_pickles
from tfdpclip import files

MNIST_LAYOUT = (
    "mnist.npz (x_train, y_train, x_test, y_test), or the four IDX files "
    "{train,t10k}-images-idx3-ubyte and {train,t10k}-labels-idx1-ubyte (or with a "
    "point, as in train-images.idx3-ubyte), perhaps .gz"
)
CIFAR10_LAYOUT = (
    "cifar-10-batches-py/{data_batch_1..5,test_batch}, or "
    "cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin"
)
CIFAR100_LAYOUT = "cifar-100-python/{train,test}, or cifar-100-binary/{train,test}.bin"
# By a SHA-256 of the test images and labels: the formats are the same.
_KNOWN = {
    "c3f9adf9c66efb572b1f9326c3a511b45910c7173b97be66ceceeeeaef6b802b": "MNIST",
    "9f1ec356a747bfe4ebab3cfb722d3694c9ca737e2570f6f90cf31d7b6fd689d4": "Fashion-MNIST",
}
_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
# Ten times the largest of these files.
_MOST_BYTES = 2**31


@dataclasses.dataclass(frozen=True)
class Images:
    """Training and test images.

    Attributes:
      train: uint8 images `[n, height, width, channels]` and int32 labels `[n]`.
      test: the same.
      classes: number of classes.
      name: of the data, for reports.
      public: whether they are public for sure (stand-ins are).
    """

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    classes: int
    name: str
    public: bool = False

    def __post_init__(self):
        for part, (x, y) in (("training", self.train), ("test", self.test)):
            if len(x) != len(y):
                raise UsageError(
                    f"{self.name}: {len(x)} {part} images but {len(y)} labels."
                )
            if not len(x):
                raise UsageError(f"{self.name}: there are no {part} images.")
            if y.ndim != 1 or y.min() < 0 or y.max() >= self.classes:
                raise UsageError(
                    f"{self.name}: {part} labels must be 0 to {self.classes - 1}, "
                    f"found {int(y.min())} to {int(y.max())}."
                )


def load(name: str, data_dir: str | None, image_shape: Sequence[int]) -> Images:
    """Images by name.

    Args:
      name: "mnist", "fashion_mnist", "cifar10", "cifar100"; or "digits"
        (scikit-learn's, 1797 images of 8 by 8, enlarged) or "synthetic" (512 images
        made up), which need no files.
      data_dir: where the files are.
      image_shape: height, width, channels for digits and synthetic.

    Raises:
      UsageError: if files are missing or not in their format.
    """
    if name == "digits":
        return _digits(image_shape)
    if name == "synthetic":
        return _synthetic(image_shape)
    layouts = {
        "mnist": (load_mnist, MNIST_LAYOUT),
        "fashion_mnist": (load_fashion_mnist, MNIST_LAYOUT),
        "cifar10": (load_cifar10, CIFAR10_LAYOUT),
        "cifar100": (load_cifar100, CIFAR100_LAYOUT),
    }
    loader, layout = layouts[name]
    if data_dir is None:
        raise UsageError(
            f"flag --data_dir is missing: it must name a directory with {layout}. "
            "--dataset=digits and --dataset=synthetic need no files."
        )
    return loader(pathlib.Path(data_dir))


def load_mnist(directory: pathlib.Path) -> Images:
    """MNIST from mnist.npz or from IDX files."""
    path = directory / "mnist.npz"
    if path.exists():
        arrays = _read_npz(path, ("x_train", "y_train", "x_test", "y_test"))
        x, y, test_x, test_y = arrays
    else:
        hint = f"--data_dir must hold {MNIST_LAYOUT}."
        x, y, test_x, test_y = (
            idx_files.read(path, dimensions)
            for part in ("train", "test")
            for path, dimensions in zip(
                idx_files.find(directory, part, hint), (3, 1), strict=True
            )
        )
    for images, labels in ((x, y), (test_x, test_y)):
        if images.ndim != 3 or labels.ndim != 1 or images.dtype != np.uint8:
            raise UsageError(
                f"{directory}: images must be [n, height, width] of uint8 and labels "
                f"[n], got {images.shape} of {images.dtype} and {labels.shape}."
            )
    return Images(
        (x[..., None], y.astype(np.int32)),
        (test_x[..., None], test_y.astype(np.int32)),
        10,
        _name_of(test_x, test_y, directory),
    )


def load_fashion_mnist(directory: pathlib.Path) -> Images:
    """Fashion-MNIST, which is published as files of MNIST's names."""
    images = load_mnist(directory)
    if images.name == "MNIST":
        raise UsageError(
            f"--data_dir={directory} holds MNIST, not Fashion-MNIST; for example "
            "--dataset=mnist, or --data_dir=data/fashion_mnist."
        )
    return images


def of_folder(folder: str, data_dir: str | None) -> Images:
    """Images in MNIST's format from a folder of a directory of several data sets.

    Raises:
      UsageError: if there is no directory, or its files are not in this format.
    """
    if data_dir is None:
        raise UsageError(
            f"flag --data_dir is missing: it must name a directory with {folder} in "
            f"it, which has {MNIST_LAYOUT}. --tasks=digits needs no files."
        )
    return load_mnist(pathlib.Path(data_dir) / folder)


def _name_of(x: np.ndarray, y: np.ndarray, directory: pathlib.Path) -> str:
    """The name of a data set in MNIST's format, recognised by its test data."""
    digest = hashlib.sha256(x.tobytes() + y.astype(np.uint8).tobytes()).hexdigest()
    unknown = f"images in MNIST's format ({directory.resolve().name})"
    return _KNOWN.get(digest, unknown)


def load_cifar10(directory: pathlib.Path) -> Images:
    """CIFAR-10 from its python or its binary files."""
    names = [f"data_batch_{i}" for i in range(1, 6)]
    folder = directory / "cifar-10-batches-bin"
    if folder.is_dir():
        present = [n for n in names if (folder / f"{n}.bin").exists()] or names[:1]
        parts = [
            _read_records(_find(folder, f"{n}.bin", CIFAR10_LAYOUT), 1)
            for n in (*present, "test_batch")
        ]
        parts = [(x, labels[:, 0]) for x, labels in parts]
    else:
        folder = directory / "cifar-10-batches-py"
        present = [n for n in names if (folder / n).exists()] or names[:1]
        parts = [
            _read_pickle(_find(folder, n, CIFAR10_LAYOUT), b"labels")
            for n in (*present, "test_batch")
        ]
    return _joined(parts[:-1], parts[-1], 10, "CIFAR-10")


def load_cifar100(directory: pathlib.Path) -> Images:
    """CIFAR-100, fine labels, from its python or its binary files."""
    folder = directory / "cifar-100-binary"
    if folder.is_dir():
        parts = [
            _read_records(_find(folder, f"{n}.bin", CIFAR100_LAYOUT), 2)
            for n in ("train", "test")
        ]
        parts = [(x, labels[:, 1]) for x, labels in parts]
    else:
        folder = directory / "cifar-100-python"
        parts = [
            _read_pickle(_find(folder, n, CIFAR100_LAYOUT), b"fine_labels")
            for n in ("train", "test")
        ]
    return _joined(parts[:1], parts[1], 100, "CIFAR-100")


def stratified_subset(labels: np.ndarray, share: float, split_seed: int) -> np.ndarray:
    """Indices of a share of each class, at least one of each, in ascending order.

    Args:
      labels: `[n]`.
      share: in (0, 1].
      split_seed: for the choice; not a seed of training.
    """
    rng = np.random.default_rng(split_seed)
    kept = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = max(1, int(share * len(members)))
        kept.append(rng.choice(members, count, replace=False))
    return np.sort(np.concatenate(kept))


def _joined(training, test, classes, name) -> Images:
    x, y = (np.concatenate(part) for part in zip(*training, strict=True))
    return Images(
        (x, y.astype(np.int32)), (test[0], test[1].astype(np.int32)), classes, name
    )


def _find(directory: pathlib.Path, name: str, layout: str) -> pathlib.Path:
    names = [name, f"{name}.gz"]
    for path in (directory / one for one in names):
        # Some archives unpack to a directory of a file's name, beside the file.
        if path.exists() and not path.is_dir():
            return path
    raise UsageError(
        f"There is no {directory / name}. Looked for {', '.join(names)} in "
        f"{directory}. --data_dir must hold {layout}."
    )


def _read_bytes(path: pathlib.Path, most: int = _MOST_BYTES) -> bytes:
    """The file, decompressed; at most `most` bytes of it and a further byte."""
    try:
        if path.suffix != ".gz":
            return files.read_bytes(path)
        if not path.is_file():
            raise UsageError(f"{path} is no regular file.")
        with gzip.open(path, "rb") as file:
            return file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from error
    except ValueError as error:
        raise UsageError(str(error)) from error


def _read_npz(path: pathlib.Path, names: Sequence[str]) -> list[np.ndarray]:
    try:
        found = npz_files.read_npz(path, names)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no .npz file: {error}") from error
    for name, array in found.items():
        if array.dtype.kind not in "iu" or not array.ndim:
            raise UsageError(
                f"{path}: {name} must be an array of integers, got {array.dtype} of "
                f"shape {array.shape}."
            )
    return [found[name] for name in names]


def _read_records(path: pathlib.Path, labels: int):
    content = np.frombuffer(_read_bytes(path), np.uint8)
    if not content.size or content.size % (_PIXELS + labels):
        raise UsageError(
            f"{path} is cut or damaged: {content.size} bytes are no whole number of "
            f"records of {_PIXELS + labels}."
        )
    rows = content.reshape(-1, _PIXELS + labels)
    return _channels_last(rows[:, labels:]), rows[:, :labels]


def _read_pickle(path: pathlib.Path, labels: bytes):
    try:
        content = cifar_pickles.load(path)
        rows = np.asarray(content[b"data"])
        found = np.asarray(content[labels])
    except (OSError, KeyError, ValueError, OverflowError) as error:
        raise UsageError(f"{path} is no CIFAR pickle: {error}.") from error
    if rows.ndim != 2 or rows.shape[1] != _PIXELS or rows.dtype != np.uint8:
        raise UsageError(
            f"{path}: data must be [n, {_PIXELS}] of uint8, got {rows.shape} of "
            f"{rows.dtype}."
        )
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise UsageError(
            f"{path}: {labels.decode()} must be a list of integers, got "
            f"{found.dtype} of shape {found.shape}."
        )
    return _channels_last(rows), found


def _channels_last(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)


def _digits(shape: Sequence[int]) -> Images:
    from sklearn import datasets, model_selection

    images, labels = datasets.load_digits(return_X_y=True)
    height, width, channels = shape
    rows, columns = (np.arange(n) * 8 // n for n in (height, width))
    images = images.reshape(-1, 8, 8)[:, rows][:, :, columns] * (255 / 16)
    images = np.repeat(images.astype(np.uint8)[..., None], channels, axis=3)
    x, test_x, y, test_y = model_selection.train_test_split(
        images, labels.astype(np.int32), test_size=0.2, stratify=labels, random_state=0
    )
    return Images((x, y), (test_x, test_y), 10, "scikit-learn digits", public=True)


def _synthetic(shape: Sequence[int], count: int = 640, classes: int = 10) -> Images:
    """A bright block whose place is the class, in noise."""
    rng = np.random.default_rng(0)
    height, width, _ = shape
    labels = np.arange(count) % classes
    images = rng.integers(0, 96, (count, *shape))
    for i, label in enumerate(labels):
        top, left = divmod(int(label), 4)
        block = np.s_[
            i,
            top * height // 4 : (top + 1) * height // 4,
            left * width // 4 : (left + 1) * width // 4,
        ]
        images[block] += 128
    images, labels = images.astype(np.uint8), labels.astype(np.int32)
    cut = count * 4 // 5
    return Images(
        (images[:cut], labels[:cut]),
        (images[cut:], labels[cut:]),
        classes,
        "made-up images",
        public=True,
    )
