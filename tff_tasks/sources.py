"""Where the examples of clients come from."""

from __future__ import annotations

import abc
from collections.abc import Mapping

import numpy as np

from tff_tasks.client_files import DataFileError, Feature, FederatedFile
from tff_tasks.hdf5_files import Hdf5Files

Examples = dict[str, np.ndarray]


class ClientSource(abc.ABC):
    """The clients of a split and their raw examples.

    Attributes:
      counts: the number of examples of each client, in sorted order of the clients.
    """

    counts: Mapping[str, int]

    @property
    def client_ids(self) -> list[str]:
        """The clients, sorted."""
        return list(self.counts)

    @property
    def num_examples(self) -> int:
        """How many examples all clients have."""
        return sum(self.counts.values())

    @abc.abstractmethod
    def examples(self, client_id: str) -> Examples:
        """The features of a client's examples, one row for each."""


class FileSource(ClientSource):
    """A split of a SQLite file, or of HDF5 files.

    Args:
      file: the file or files.
      split: the split's name.
      features: the features to read of each example.
    """

    def __init__(
        self,
        file: FederatedFile | Hdf5Files,
        split: str,
        features: Mapping[str, Feature],
    ):
        self.counts = file.clients(split)
        self._file, self._split, self._features = file, split, features

    def examples(self, client_id: str) -> Examples:
        read = self._file.read(self._split, client_id, self._features)
        found, stated = len(next(iter(read.values()))), self.counts[client_id]
        if found != stated:
            raise DataFileError(
                f"{self._file.path}: client {client_id!r} of split {self._split!r} has "
                f"{found} examples, but the file says {stated}."
            )
        return read


class MemorySource(ClientSource):
    """Clients whose examples are in memory.

    Args:
      clients: the features of each client's examples.
    """

    def __init__(self, clients: Mapping[str, Examples]):
        self._clients = {name: clients[name] for name in sorted(clients)}
        self.counts = {
            name: len(next(iter(features.values())))
            for name, features in self._clients.items()
        }

    def examples(self, client_id: str) -> Examples:
        return self._clients[client_id]
