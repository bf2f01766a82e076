"""Writes small data sets in the formats of the real data sets."""

from __future__ import annotations

import gzip
import pathlib
import pickle
import struct

import numpy as np


def some_images(shape, count: int, classes: int, seed: int = 0):
    """Random images, every class present."""
    rng = np.random.default_rng(seed)
    labels = (np.arange(count) % classes).astype(np.uint8)
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8), labels


def write_idx(path: pathlib.Path, array: np.ndarray) -> None:
    header = struct.pack(">I", 2048 + array.ndim)
    header += struct.pack(f">{array.ndim}I", *array.shape)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wb") as file:
        file.write(header + array.tobytes())


def mnist_idx(directory: pathlib.Path, count: int = 64, ending: str = "") -> tuple:
    """MNIST's four files."""
    images, labels = some_images((28, 28), count, 10)
    for part in ("train", "t10k"):
        write_idx(directory / f"{part}-images-idx3-ubyte{ending}", images)
        write_idx(directory / f"{part}-labels-idx1-ubyte{ending}", labels)
    return images, labels


def mnist_npz(directory: pathlib.Path, count: int = 64) -> tuple:
    images, labels = some_images((28, 28), count, 10)
    np.savez(
        directory / "mnist.npz",
        x_train=images,
        y_train=labels,
        x_test=images,
        y_test=labels,
    )
    return images, labels


def _planes(images):
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def cifar10_pickles(directory: pathlib.Path, count: int = 20, batches: int = 5):
    """CIFAR-10's python files."""
    folder = directory / "cifar-10-batches-py"
    folder.mkdir()
    images, labels = some_images((32, 32, 3), count, 10)
    for name in [f"data_batch_{i + 1}" for i in range(batches)] + ["test_batch"]:
        content = {
            b"batch_label": name.encode(),
            b"labels": labels.tolist(),
            b"data": _planes(images),
            b"filenames": [b"x.png"] * count,
        }
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return images, labels


def cifar10_binary(directory: pathlib.Path, count: int = 20, batches: int = 5):
    """CIFAR-10's binary files."""
    folder = directory / "cifar-10-batches-bin"
    folder.mkdir()
    images, labels = some_images((32, 32, 3), count, 10)
    rows = np.concatenate([labels[:, None], _planes(images)], axis=1)
    for name in [f"data_batch_{i + 1}" for i in range(batches)] + ["test_batch"]:
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    return images, labels


def cifar100_pickles(directory: pathlib.Path, count: int = 200):
    """CIFAR-100's python files."""
    folder = directory / "cifar-100-python"
    folder.mkdir()
    images, labels = some_images((32, 32, 3), count, 100)
    for name in ("train", "test"):
        content = {
            b"data": _planes(images),
            b"fine_labels": labels.tolist(),
            b"coarse_labels": (labels // 5).tolist(),
            b"filenames": [b"x.png"] * count,
            b"batch_label": b"",
        }
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return images, labels


def cifar100_binary(directory: pathlib.Path, count: int = 200):
    """CIFAR-100's binary files."""
    folder = directory / "cifar-100-binary"
    folder.mkdir()
    images, labels = some_images((32, 32, 3), count, 100)
    columns = [labels[:, None] // 5, labels[:, None], _planes(images)]
    rows = np.concatenate(columns, axis=1).astype(np.uint8)
    for name in ("train", "test"):
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    return images, labels
