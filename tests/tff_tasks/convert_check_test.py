"""The check of a federated file finds the faults that would stop a benchmark."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest

from tests.tff_tasks import fixtures
from tests.tff_tasks.conversions import (
    COLUMNS,
    converted,
    posts,
)
from tff_tasks import convert
from tff_tasks.conversion import checks
from tff_tasks.conversion.targets import Target


def check(path, *flags):
    convert.main([f"--check={path}", *flags])


def test_public_files_pass_the_check(data_dir, capsys):
    check(data_dir / "emnist_all.sqlite")
    said = capsys.readouterr().out
    assert "is right for emnist_character" in said and "all_train: 8 clients" in said
    # TensorFlow Federated's splits share clients.
    assert "8 clients are in train and in another split" in said


def _damage(path, statement):
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()


@pytest.mark.parametrize(
    "statement, message",
    [
        ("DELETE FROM client_metadata WHERE client_id = 'u1'", "does not know it"),
        (
            "UPDATE client_metadata SET num_examples = 4",
            "has 3 examples, but .* says 4",
        ),
        ("UPDATE client_metadata SET num_examples = 0", "has 0 examples"),
        ("UPDATE examples SET serialized_example_proto = 'x'", "malformed example"),
        ("DELETE FROM examples WHERE client_id = 'u2'", "'u2' .* has no examples"),
        ("DROP INDEX examples_by_client", "no index"),
        (
            "UPDATE client_metadata SET split_name = 'train'",
            "no split 'test'|does not know",
        ),
    ],
)
def test_the_check_finds_what_is_wrong(tmp_path, statement, message):
    path = converted(tmp_path, posts(tmp_path), *COLUMNS)
    check(path)
    _damage(path, statement)
    with pytest.raises(SystemExit, match=message):
        check(path)


def test_the_check_finds_values_out_of_range(tmp_path):
    examples = [fixtures.example(pixels=np.ones((28, 28)) * 2, label=3)]
    splits = {"all_train": {"a": examples}, "all_test": {"b": examples}}
    path = fixtures.write_file(tmp_path / "emnist_all.sqlite", splits)
    with pytest.raises(SystemExit, match="'a' .* pixels must be 0 to 1, but is 2 to 2"):
        check(path)


def test_the_check_needs_to_know_the_benchmark(tmp_path):
    path = converted(tmp_path, posts(tmp_path), *COLUMNS)
    other = path.rename(tmp_path / "mine.sqlite")
    with pytest.raises(SystemExit, match="--task="):
        check(other)
    check(other, "--task=shakespeare_character")


def test_a_client_in_both_splits_is_a_notice(tmp_path):
    example = fixtures.example(snippets=b"abc")
    splits = {"train": {"a": [example], "b": [example]}, "test": {"a": [example]}}
    path = fixtures.write_file(tmp_path / "shakespeare.sqlite", splits)
    target = Target("shakespeare_character")
    summary = checks.check_file(path, target, lambda done, total: None)
    assert summary.both == ["a"]
    assert "1 clients are in train and in another split (a)" in summary.notices[0]


def test_inverted_pixels_and_unknown_characters_are_noticed(tmp_path):
    dark = fixtures.example(pixels=np.zeros((28, 28)), label=3)
    splits = {"all_train": {"a": [dark]}, "all_test": {"b": [dark]}}
    path = fixtures.write_file(tmp_path / "emnist_all.sqlite", splits)
    target = Target("emnist_character")
    (notice,) = checks.check_file(path, target, lambda done, total: None).notices
    assert "--pixels=ink_1" in notice
    strange = fixtures.example(snippets="äöü".encode())
    splits = {"train": {"a": [strange]}, "test": {"b": [strange]}}
    path = fixtures.write_file(tmp_path / "shakespeare.sqlite", splits)
    target = Target("shakespeare_character")
    (notice,) = checks.check_file(path, target, lambda done, total: None).notices
    assert "100.0% of the bytes" in notice
