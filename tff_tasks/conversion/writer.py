"""Writes a federated file: examples sorted by client, split by client, indexed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pathlib
import sqlite3
from collections.abc import Callable, Iterator, Mapping

from tff_tasks.client_files import INDEX, DataFileError

_TABLES = """
CREATE TABLE examples (
    split_name TEXT NOT NULL,
    client_id TEXT NOT NULL,
    serialized_example_proto BLOB NOT NULL
);
CREATE TABLE client_metadata (
    client_id TEXT NOT NULL,
    split_name TEXT NOT NULL,
    num_examples INTEGER NOT NULL
);
CREATE TABLE staged.examples (client INTEGER NOT NULL, content BLOB NOT NULL);
"""
# The file is written under a temporary name first: its contents after a crash are never
# read, so nothing needs to be undone.
_FAST = """
PRAGMA main.journal_mode = OFF;
PRAGMA main.synchronous = OFF;
PRAGMA staged.journal_mode = OFF;
PRAGMA staged.synchronous = OFF;
"""


def split_clients(
    client_ids: list[str], shares: Mapping[str, float], seed: int
) -> dict[str, str]:
    """Deals clients to "train" and to other purposes, by a hash of their ids.

    The order of the clients does not matter. Shares are rounded to whole clients, and
    every purpose gets at least one.

    Args:
      client_ids: all clients.
      shares: the share of clients for each purpose but "train", such as "test".
      seed: of the split.

    Raises:
      DataFileError: if there are too few clients.

    >>> split_clients(["ann", "ben", "eve"], {"test": 0.3}, seed=0)
    {'ben': 'test', 'ann': 'train', 'eve': 'train'}
    """
    counts = {
        purpose: max(1, round(share * len(client_ids)))
        for purpose, share in shares.items()
    }
    if len(client_ids) <= sum(counts.values()):
        raise DataFileError(
            f"There are {len(client_ids)} clients, too few for {', '.join(shares)} and "
            "train, each of which needs one. Is the client column the right one? "
            "Otherwise make the shares smaller, for example --test_share=0.1."
        )

    def rank(client: str) -> bytes:
        return hashlib.sha256(f"{seed}\x00{client}".encode()).digest()

    ranked = iter(sorted(client_ids, key=rank))
    found = {}
    for purpose, count in counts.items():
        found |= {next(ranked): purpose for _ in range(count)}
    return found | dict.fromkeys(ranked, "train")


@dataclasses.dataclass
class _Client:
    number: int
    examples: int = 0
    purpose: str | None = None


class ClientWriter:
    """Collects examples in any order, then writes them client by client.

    Examples go through a second file in the same directory: memory holds an entry for
    each client, and no example.

    Args:
      path: the file to write, which must not exist.

    Raises:
      DataFileError: if it cannot be written.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._staged = path.with_name(f"{path.stem}-staged{path.suffix}")
        self._clients: dict[str, _Client] = {}
        with self._errors():
            self._connection = sqlite3.connect(path, isolation_level=None)
            self._connection.execute("ATTACH ? AS staged", (str(self._staged),))
            self._connection.executescript(_FAST + _TABLES)
            self._connection.execute("BEGIN")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise DataFileError(
                f"{self._path.parent} cannot be written to: {error}. Free some space "
                "(twice the size of the result is needed, and as much in the "
                "directory for temporary files), or choose another --output_dir."
            ) from error

    @property
    def num_clients(self) -> int:
        """How many clients there are so far."""
        return len(self._clients)

    def add(self, client_id: str, content: bytes, purpose: str | None = None) -> None:
        """Adds an example.

        Args:
          client_id: the example's client.
          content: serialised.
          purpose: the client's purpose, such as "train"; None: to be split.

        Raises:
          DataFileError: if a client has two purposes, or there is no room.
        """
        client = self._clients.get(client_id)
        if client is None:
            client = _Client(len(self._clients), purpose=purpose)
            self._clients[client_id] = client
        if client.purpose != purpose:
            raise DataFileError(
                f"The client {client_id!r} would be for {client.purpose} and for "
                f"{purpose}: nobody may train and test."
            )
        client.examples += 1
        with self._errors():
            self._connection.execute(
                "INSERT INTO staged.examples VALUES (?, ?)", (client.number, content)
            )

    def finish(
        self,
        splits: Mapping[str, str],
        shares: Mapping[str, float],
        seed: int,
        least_examples: int,
        written: Callable[[int], None],
    ) -> list[str]:
        """Splits the clients, and writes and indexes the file.

        Args:
          splits: the name of each split by purpose.
          shares: the share of the clients for each purpose but "train".
          seed: for the split.
          least_examples: clients with fewer are left out.
          written: is called with the number of clients that are written.

        Returns:
          The clients that were left out.

        Raises:
          DataFileError: if there are too few clients, or there is no room.
        """
        kept = {n: c for n, c in self._clients.items() if c.examples >= least_examples}
        if not kept and self._clients:
            most = max(client.examples for client in self._clients.values())
            raise DataFileError(
                f"No client has {least_examples} examples; the most that one has is "
                f"{most}: --least_examples={most}."
            )
        open_ones = [name for name, client in kept.items() if client.purpose is None]
        dealt = split_clients(open_ones, shares, seed) if open_ones or not kept else {}
        names = {
            name: splits[dealt.get(name) or str(client.purpose)]
            for name, client in kept.items()
        }
        execute = self._connection.execute
        with self._errors():
            execute("CREATE INDEX staged.by_client ON examples (client)")
            order = sorted(kept, key=lambda name: (names[name], name))
            for i, name in enumerate(order, 1):
                execute(
                    "INSERT INTO main.examples SELECT ?, ?, content FROM "
                    "staged.examples WHERE client = ? ORDER BY rowid",
                    (names[name], name, kept[name].number),
                )
                execute(
                    "INSERT INTO main.client_metadata VALUES (?, ?, ?)",
                    (name, names[name], kept[name].examples),
                )
                written(i)
            execute(INDEX)
            execute("COMMIT")
        return sorted(self._clients.keys() - kept.keys())

    def close(self) -> None:
        """Closes the file, and deletes the second file."""
        self._connection.close()
        self._staged.unlink(missing_ok=True)
