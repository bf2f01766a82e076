"""HDF5 archives of federated data, as the public data sets were published first.

An archive, such as fed_emnist.tar.bz2, has a file for each split, in which
``examples/CLIENT/FEATURE`` is a data set with a row for each example.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tff_tasks.client_files import DataFileError, Feature, FederatedFile

#: Archives, and the file of each split, by the SQLite file with the same examples.
FILES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "cifar100.sqlite": (
        ("fed_cifar100",),
        {"train": "fed_cifar100_train.h5", "test": "fed_cifar100_test.h5"},
    ),
    "emnist_all.sqlite": (
        ("fed_emnist", "fed_emnist_digitsonly"),
        {
            "all_train": "fed_emnist_train.h5",
            "all_test": "fed_emnist_test.h5",
            "digits_only_train": "fed_emnist_digitsonly_train.h5",
            "digits_only_test": "fed_emnist_digitsonly_test.h5",
        },
    ),
    "shakespeare.sqlite": (
        ("shakespeare",),
        {"train": "shakespeare_train.h5", "test": "shakespeare_test.h5"},
    ),
    "stackoverflow.sqlite": (
        ("stackoverflow",),
        {
            "train": "stackoverflow_train.h5",
            "test": "stackoverflow_test.h5",
            "heldout": "stackoverflow_held_out.h5",
        },
    ),
}
_GROUP = "examples"
_KINDS = {"int64": "iu", "float32": "f", "string": "OS"}


class Hdf5Files:
    """The HDF5 files of a data set, read as `FederatedFile` is.

    Args:
      path: where the SQLite file with the same examples would be.

    Attributes:
      path: the directory.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path.parent
        self._names = FILES[path.name][1]
        self._open: dict[str, Any] = {}

    def _clients_of(self, split: str) -> Any:
        """The group of a split's clients."""
        if split not in self._open:
            import h5py

            path = self.path / self._names[split]
            if not path.is_file():
                raise DataFileError(
                    f"{path} is missing; its archive has a file for each split."
                )
            with _errors(path):
                self._open[split] = h5py.File(path, "r")[_GROUP]
        return self._open[split]

    def clients(self, split: str) -> dict[str, int]:
        """The clients of a split in sorted order, with their numbers of examples.

        Raises:
          DataFileError: if the split's file is missing, damaged or of another form.
        """
        clients, counts = self._clients_of(split), {}
        path = self.path / self._names[split]
        with _errors(path):
            for client_id in sorted(clients):
                columns = _hard(clients, client_id)
                sizes = {len(_hard(columns, name)) for name in columns}
                if len(sizes) != 1 or 0 in sizes:
                    raise DataFileError(
                        f"{path}: the features of client {client_id!r} have "
                        f"{sorted(sizes)} rows. Get the file again."
                    )
                counts[client_id] = sizes.pop()
        if not counts:
            raise DataFileError(f"{path} has no clients. Get the file again.")
        return counts

    def read(
        self, split: str, client_id: str, features: Mapping[str, Feature]
    ) -> dict[str, np.ndarray]:
        """The examples of a client as arrays, one row each.

        Args:
          split: the split.
          client_id: the client.
          features: the features to read of each example.

        Raises:
          DataFileError: if a feature is missing, or of another type or shape.
        """
        columns = self._clients_of(split)[client_id]
        path, arrays = self.path / self._names[split], {}
        with _errors(path):
            for name, feature in features.items():
                values = _hard(columns, name)[()]
                kind = values.dtype.kind
                if kind not in _KINDS[feature.dtype] or (
                    values.shape[1:] != tuple(feature.shape)
                ):
                    raise DataFileError(
                        f"{path}: {name} of client {client_id!r} is {values.dtype} of "
                        f"shape {list(values.shape[1:])}, but must be {feature.dtype} "
                        f"of shape {list(feature.shape)}."
                    )
                wanted = object if feature.dtype == "string" else feature.dtype
                arrays[name] = values.astype(wanted)
        return arrays


def _hard(group: Any, name: str) -> Any:
    """A member of a group, which must not be a link to elsewhere."""
    import h5py

    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise KeyError(f"{name!r} is missing, or a link to elsewhere")
    return group[name]


@contextlib.contextmanager
def _errors(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except DataFileError:
        raise
    except (OSError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        raise DataFileError(
            f"{path} is no HDF5 file of examples by client, or damaged: {error}. Get "
            "it again."
        ) from error


def open_files(path: pathlib.Path) -> FederatedFile | Hdf5Files:
    """The SQLite file, or else the HDF5 files beside its place.

    Raises:
      DataFileError: if neither is there.
    """
    archives, names = FILES.get(path.name, ((), {}))
    if path.exists() or not names:
        return FederatedFile(path)
    if any((path.parent / name).exists() for name in names.values()):
        return Hdf5Files(path)
    for packed in (path.parent / f"{name}.tar.bz2" for name in archives):
        if packed.exists():
            raise DataFileError(
                f"{path} is missing, but {packed.name} is there. Unpack it: tar xjf "
                f"{packed} -C {path.parent}"
            )
    return FederatedFile(path)
