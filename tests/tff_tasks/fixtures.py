"""Writes small files in the formats of the public files, with every oddity."""

from __future__ import annotations

import json
import pathlib
import sqlite3

import numpy as np
import tensorflow as tf

WORDS = "how do i sort a list of in python the is what to and".split()
TAGS = {"python": 50, "list": 50, "java": 80, "sorting": 7, "rare": 1}

SENTENCES = (
    " ".join(["python"] * 25),  # Longer than a sequence.
    "how do i sort a list in python",
    "i",
    "",
    "zebra quux unknown words only",
    "  two  spaces ",
)
SNIPPETS = (
    b"abc",
    b"",
    b"x" * 79,
    b"y" * 80,
    b"caf\xc3\xa9 {not} known \x00\xff",
    b"To be, or not to be:\nthat is the question.\r",
)


def example(**features) -> bytes:
    """A serialised example."""
    made = {}
    for name, value in features.items():
        if isinstance(value, bytes):
            made[name] = tf.train.Feature(bytes_list={"value": [value]})
        elif np.asarray(value).dtype.kind == "f":
            flat = np.ravel(value).tolist()
            made[name] = tf.train.Feature(float_list={"value": flat})
        else:
            flat = np.ravel(value).astype(int).tolist()
            made[name] = tf.train.Feature(int64_list={"value": flat})
    return tf.train.Example(features={"feature": made}).SerializeToString()


def write_file(path: pathlib.Path, splits, *, index: bool = True) -> pathlib.Path:
    """A federated file.

    Args:
      path: where.
      splits: serialised examples by split and client.
      index: whether to have an index.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path)
    connection.execute(
        "CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, "
        "serialized_example_proto BLOB NOT NULL)"
    )
    connection.execute(
        "CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT "
        "NULL, num_examples INTEGER NOT NULL)"
    )
    if index:
        connection.execute("CREATE INDEX clients ON examples (split_name, client_id)")
    rows = []
    for split, clients in splits.items():
        for client, examples in clients.items():
            rows += [(split, client, blob) for blob in examples]
            connection.execute(
                "INSERT INTO client_metadata VALUES (?, ?, ?)",
                (client, split, len(examples)),
            )
    # Clients' rows are mixed in the file, each in order.
    order = sorted(range(len(rows)), key=lambda i: (i % 7, i))
    connection.executemany(
        "INSERT INTO examples VALUES (?, ?, ?)", [rows[i] for i in order]
    )
    connection.commit()
    connection.close()
    return path


def _sizes(rng, clients):
    """Some clients have a single example."""
    return [1, *(int(n) for n in rng.integers(2, 9, size=clients - 1))]


def _clients(rng, count, make, first=0):
    names = [f"client'{i:03d}" for i in range(first, first + count)]
    return {
        name: [make(rng) for _ in range(size)]
        for name, size in zip(names, _sizes(rng, count), strict=True)
    }


def write_emnist(directory, clients=8, seed=0):
    """EMNIST; ink is 0, and every character is a block at its own place."""

    def make(classes):
        def one(rng):
            label = int(rng.integers(classes))
            pixels = np.ones((28, 28), np.float32)
            row, column = 3 * (label // 8) + 1, 3 * (label % 8) + 2
            pixels[row : row + 4, column : column + 3] = 0.1
            return example(pixels=pixels, label=label)

        return one

    rng = np.random.default_rng(seed)
    splits = {
        # The same writers are in both.
        "all_train": _clients(rng, clients, make(62)),
        "all_test": _clients(rng, clients, make(62)),
        "digits_only_train": _clients(rng, clients, make(10)),
        "digits_only_test": _clients(rng, clients, make(10)),
    }
    return write_file(pathlib.Path(directory) / "emnist_all.sqlite", splits)


def write_cifar100(directory, seed=0):
    """CIFAR-100; some images have a single colour."""

    def one(rng):
        image = rng.integers(256, size=(32, 32, 3))
        if rng.random() < 0.3:
            image[:] = 77
        label = int(rng.integers(100))
        return example(image=image, label=label, coarse_label=label // 5)

    rng = np.random.default_rng(seed)
    splits = {"train": _clients(rng, 6, one), "test": _clients(rng, 3, one, 100)}
    return write_file(pathlib.Path(directory) / "cifar100.sqlite", splits)


def write_shakespeare(directory, seed=0):
    """Shakespeare; snippets are empty, long, or in unknown bytes."""

    def one(rng):
        return example(snippets=SNIPPETS[int(rng.integers(len(SNIPPETS)))])

    rng = np.random.default_rng(seed)
    splits = {"train": _clients(rng, 6, one), "test": _clients(rng, 6, one)}
    return write_file(pathlib.Path(directory) / "shakespeare.sqlite", splits)


def write_stackoverflow(directory, seed=0):
    """Stack Overflow and its two vocabularies."""
    directory = pathlib.Path(directory)

    def one(rng):
        tags = [*TAGS, "untold"]
        chosen = rng.choice(tags, int(rng.integers(1, 4)), replace=False)
        return example(
            tokens=SENTENCES[int(rng.integers(len(SENTENCES)))].encode(),
            title=SENTENCES[int(rng.integers(len(SENTENCES)))].encode(),
            tags="|".join(chosen).encode(),
            creation_date=b"2015-01-01",
            type=b"question",
            score=int(rng.integers(-3, 9)),
        )

    rng = np.random.default_rng(seed)
    splits = {
        "train": _clients(rng, 6, one),
        "test": _clients(rng, 4, one, 2),
        "heldout": _clients(rng, 3, one, 50),
    }
    write_file(directory / "stackoverflow.sqlite", splits)
    lines = [f"{word} {1000 - i}" for i, word in enumerate(WORDS)]
    (directory / "stackoverflow.word_count").write_text("\n".join(lines) + "\n")
    (directory / "stackoverflow.tag_count").write_text(json.dumps(TAGS))
    return directory


def write_all(directory) -> pathlib.Path:
    """All files of all benchmarks."""
    for write in (write_emnist, write_cifar100, write_shakespeare, write_stackoverflow):
        write(directory)
    return pathlib.Path(directory)


#: Settings that make each benchmark fit the files.
FITTING = {
    "cifar100_image": {},
    "emnist_character": {},
    "emnist_autoencoder": {},
    "shakespeare_character": {},
    "stackoverflow_word": {"vocab_size": len(WORDS)},
    "stackoverflow_tag": {"word_vocab_size": len(WORDS), "tag_vocab_size": 4},
}
