"""The vocabularies of the Stack Overflow benchmarks, counted over training clients."""

from __future__ import annotations

import json
import pathlib
from collections import Counter
from collections.abc import Mapping

from tff_tasks.client_files import DataFileError, FederatedFile
from tff_tasks.conversion.targets import Target
from tff_tasks.sources import FileSource
from tff_tasks.vocabulary import TAG_FILE, WORD_FILE

#: The notice to users of the vocabularies.
NOT_PRIVATE = (
    "The vocabularies are exact counts over training clients, made without noise: the "
    "epsilon of a training does not cover them. Where that matters, put public ones in "
    "their place."
)
#: The flags that say how much of each file is used, by benchmark.
_FLAGS = {
    "stackoverflow_word": {WORD_FILE: "vocab_size"},
    "stackoverflow_tag": {WORD_FILE: "word_vocab_size", TAG_FILE: "tag_vocab_size"},
}


def names(target: Target) -> list[str]:
    """The vocabulary files that a benchmark reads."""
    return list(_FLAGS.get(target.task_name, {}))


def contents(path: pathlib.Path, target: Target) -> dict[str, str]:
    """The content of each vocabulary file.

    Args:
      path: the federated file.
      target: the benchmark.

    Raises:
      DataFileError: if there are no words, or they are not in UTF-8.
    """
    file = FederatedFile(path)
    try:
        source = FileSource(file, target.splits["train"], target.features)
        texts = [name for name in ("tokens", "title") if name in target.features]
        words, tags = Counter[bytes](), Counter[bytes]()
        for client in source.client_ids:
            examples = source.examples(client)
            for name in texts:
                for text in examples[name]:
                    words.update(text.split(b" "))
            for text in examples.get("tags", ()):
                tags.update(text.split(b"|"))
    finally:
        file.close()
    lines = [f"{word} {count}\n" for word, count in _ranked(words, path)]
    made = {WORD_FILE: "".join(lines)}
    if "tags" in target.features:
        made[TAG_FILE] = json.dumps(dict(_ranked(tags, path)))
    return made


def flags(contents: Mapping[str, str], target: Target) -> list[str]:
    """The flags that make a benchmark content with short vocabularies."""
    found = []
    for name, flag in _FLAGS.get(target.task_name, {}).items():
        text = contents.get(name)
        if text is not None:
            size = len(json.loads(text)) if name == TAG_FILE else text.count("\n")
            if size < target.task.settings[flag]:
                found.append(f"--{flag}={size}")
    return found


def _ranked(counts: Counter[bytes], path: pathlib.Path) -> list[tuple[str, int]]:
    try:
        items = [(item.decode(), count) for item, count in counts.items()]
    except UnicodeDecodeError as error:
        raise DataFileError(f"{path}: a word is not in UTF-8: {error}.") from error
    # A word with a space would be read as two words, an empty word as none.
    items = [(item, count) for item, count in items if item.split() == [item]]
    if not items:
        raise DataFileError(
            "There are no words to count. Words must be separated by spaces, and tags "
            "by |: are the columns the right ones?"
        )
    return sorted(items, key=lambda pair: (-pair[1], pair[0]))
