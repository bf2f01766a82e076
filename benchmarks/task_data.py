"""Makes up small files in the formats of the federated tasks' real files.

Values mean nothing; sizes are real: vocabularies, images and the lengths of texts, on
which a round's time depends.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import numpy as np

_WORDS = 10_000
_TAGS = 500
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ,.ABCDE\n", np.uint8)
# Of the plays: 137 characters in a speech. Stack Overflow's sentences have 14 words or
# so, and their titles 8.
_CHARACTERS, _SENTENCE, _TITLE = 137, 14, 8


def write(
    task: str, folder: pathlib.Path, clients: int, examples: int, seed: int = 0
) -> list[str]:
    """Writes the files of a task, a tenth more clients for the test included.

    Args:
      task: the benchmark's name; "digits" has its own data.
      folder: the folder of the files.
      clients: how many train.
      examples: of each client.
      seed: of the made-up data.

    Returns:
      The flags that read them.
    """
    if task == "digits":
        return [f"--num_clients={max(200, clients)}"]
    rng = np.random.default_rng(seed)
    test = max(1, clients // 10)
    heldout = 1 if task.startswith("stackoverflow") else 0
    total = clients + test + heldout
    names = [f"client_{i:04d}" for i in range(total) for _ in range(examples)]
    made = _images if task in _IMAGES else _texts
    source = made(task, folder, names, rng)
    flags = [f"--task={task}", f"--input={source}", "--client=client"]
    shares = [f"--test_share={test / total}"]
    if heldout:
        shares.append(f"--heldout_share={heldout / total}")
    arguments = [*flags, *shares, f"--output_dir={folder}", "--overwrite"]
    # A program, which no module imports.
    subprocess.run(
        [sys.executable, "-m", "tff_tasks.convert", *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return [f"--data_dir={folder}"]


_IMAGES = ("emnist_character", "emnist_autoencoder", "cifar100_image")


def _images(task, folder, names, rng):
    count = len(names)
    path = folder / "images.npz"
    if task == "cifar100_image":
        made = {
            "image": rng.integers(256, size=(count, 32, 32, 3), dtype=np.uint8),
            "label": rng.integers(100, size=count),
        }
    else:
        ink = rng.random((count, 28, 28)) < 0.15
        made = {
            "pixels": 1 - ink.astype(np.float32),
            "label": rng.integers(62, size=count),
        }
    np.savez(path, client=np.array(names), **made)
    return path


def _texts(task, folder, names, rng):
    def words(length):
        # About Zipf's law, so that some words are unknown and most are frequent.
        numbers = np.minimum(rng.zipf(1.2, size=length), 2 * _WORDS)
        return " ".join(f"w{number}" for number in numbers)

    def example(name):
        if task == "shakespeare_character":
            length = 1 + int(rng.exponential(_CHARACTERS))
            return {
                "client": name,
                "snippets": bytes(rng.choice(_LETTERS, length)).decode(),
            }
        tags = rng.choice(_TAGS, int(rng.integers(1, 6)), replace=False)
        return {
            "client": name,
            "tokens": words(1 + int(rng.poisson(_SENTENCE))),
            "title": words(_TITLE),
            "tags": "|".join(f"t{tag}" for tag in tags),
        }

    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps(example(name)) + "\n" for name in names))
    if task != "shakespeare_character":
        counts = [f"w{i + 1} {2 * _WORDS - i}\n" for i in range(_WORDS)]
        (folder / "stackoverflow.word_count").write_text("".join(counts))
        known = {f"t{i}": _TAGS - i for i in range(_TAGS)}
        (folder / "stackoverflow.tag_count").write_text(json.dumps(known))
    return path
