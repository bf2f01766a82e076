"""Every command of docs/your_clients.md runs, on tiny inputs."""

from __future__ import annotations

import json
import pathlib
import re
import shlex

import numpy as np
import pytest

from tests.keras_examples import image_files
from tests.tff_tasks.convert_plays_test import CAPITALS
from tff_tasks import command, convert
from tff_tasks.registry import TASKS

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "your_clients.md").read_text()
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.S | re.M)
    for line in block.splitlines()
]
# A round of two clients.
TINY = (
    "--rounds=1",
    "--clients_per_round=2",
    "--max_elements=2",
    "--max_eval_examples=2",
    "--max_final_examples=2",
    "--accountant=rdp",
    "--notensorboard",
    "--quiet",
)


def write_inputs(directory: pathlib.Path) -> None:
    """Writes the files that the page assumes."""
    (example,) = re.findall(r"^```csv\n(.*?)^```", PAGE, re.S | re.M)
    more = "".join(f'u{i},"What, {i}?",2024-05-03\n' for i in range(20, 30))
    (directory / "posts.csv").write_text(example + more)
    for folder in ("people", "plays", "mnist"):
        (directory / folder).mkdir()
    for name in ("ann", "ben", "eve"):
        (directory / "people" / f"{name}.txt").write_text(f"I am\n{name}.\n\nSo.\n")
        (directory / "plays" / f"{name}.txt").write_text(CAPITALS)
    rows = [{"user": i % 10, "tokens": "how do i sort"} for i in range(20)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "questions.jsonl").write_text(text)
    rng = np.random.default_rng(0)
    for part, count in (("train", 1200), ("t10k", 200)):
        images = rng.integers(256, size=(count, 28, 28), dtype=np.uint8)
        labels = rng.integers(10, size=count).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            path = directory / "mnist" / f"{part}-{kind}-ubyte"
            image_files.write_idx(path, array)


def module_of(words: list[str]) -> str:
    assert words[:2] == ["python", "-m"], words
    return words[2].removeprefix("tff_tasks.")


@pytest.fixture
def converted(tmp_path, monkeypatch, capsys):
    """The output of the page's conversions, in their order."""
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    said = []
    for words in COMMANDS:
        if module_of(words) == "convert":
            convert.main(words[3:])
            said.append(capsys.readouterr().out)
    return said


def test_the_page_shows_conversions_and_trainings():
    modules = [module_of(words) for words in COMMANDS]
    assert modules.count("convert") == 6
    assert set(modules) - {"convert"} == {"shakespeare_character", "emnist_character"}


@pytest.mark.slow
def test_every_conversion_of_the_page_runs(converted):
    assert all("Train: python -m" in s or "is right for" in s for s in converted)
    assert "vocabularies are exact counts" in converted[2]
    assert "3 to 3 examples" not in converted[0]


@pytest.mark.slow
def test_every_training_of_the_page_runs(converted, capsys):
    for words in COMMANDS:
        name = module_of(words)
        if name in TASKS:
            command.main(name, [*words[3:], *TINY])
            assert "differential privacy" in capsys.readouterr().out.lower()


@pytest.mark.slow
def test_every_command_that_a_conversion_suggests_is_one(converted):
    suggested = [re.search(r"^Train: (.*)", said, re.M) for said in converted]
    found = [shlex.split(match[1]) for match in suggested if match]
    assert len(found) == 5
    for words in found:
        config = command.config_from(module_of(words), words[3:])
        assert pathlib.Path(config.data_dir).is_dir()


def test_the_tutorial_shows_commands_of_the_page():
    tutorial = (ROOT / "docs" / "tutorials" / "federated_plays.md").read_text()
    (block,) = re.findall(r"^```sh\n(.*?)^```", tutorial, re.S | re.M)
    assert len(block.splitlines()) == 2
    assert all(shlex.split(line) in COMMANDS for line in block.splitlines())


def test_the_page_names_the_features_of_every_benchmark():
    for name, task in TASKS.items():
        if task.file_name:
            (row,) = re.findall(rf"^\|[^|\n]*`{name}`.*$", PAGE, re.M)
            assert f"`{task.file_name}`" in row
            assert all(f"`{feature}`" in row for feature in task.features), row
