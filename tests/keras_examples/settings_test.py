"""Settings from a command line, and what programs say when they are wrong."""

from __future__ import annotations

import csv
import dataclasses
import json

import pytest

from keras_examples import outcome, settings


@dataclasses.dataclass(frozen=True)
class Small:
    """Settings with one field of each kind."""

    rate: float = settings.number(0.5, "A rate.", above=0, below=1)
    sizes: tuple[int, ...] = settings.numbers((1, 2), "Sizes.", integer=True, least=1)
    how: str = settings.choice("a", ("a", "b"), "How.")
    which: tuple[str, ...] = settings.choices(("a",), ("a", "b"), "Which.")
    name: str | None = settings.words(None, "A name.")
    fast: bool = settings.switch(False, "Whether to be fast.")
    output_dir: str = settings.output_dir("small")


def parse(*arguments: str) -> Small | None:
    return settings.parse(Small, ["small", *arguments], "A program.")


def test_defaults_are_those_of_the_dataclass():
    assert parse() == Small()


def test_reads_every_kind():
    assert parse(
        "--rate=0.1", "--sizes=3, 4", "--how=b", "--which=b,a", "--name=x", "--fast"
    ) == Small(0.1, (3, 4), "b", ("b", "a"), "x", True)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--rate=1", "--rate=1.*above 0 and below 1, for example 0.5"),
        ("--rate=nan", "--rate=nan.*for example"),
        ("--sizes=1,0", "--sizes=1,0.*whole number, 1 or more"),
        ("--sizes=", "--sizes"),
        ("--how=c", "--how=c.*a|b"),
        ("--which=a,c", "--which=a,c"),
        ("--unknown=1", "unknown"),
        ("word", "Unknown argument 'word'"),
    ],
)
def test_a_wrong_flag_is_named(argument, message):
    with pytest.raises(settings.UsageError, match=message):
        parse(argument)


def test_help_lists_every_flag(capsys):
    assert parse("--help") is None
    text = capsys.readouterr().out
    assert "A program." in text
    for field in dataclasses.fields(Small):
        assert f"--{field.name}" in text
    assert "(default: 1,2)" in text


def run(used: Small) -> outcome.Outcome:
    if used.how == "b":
        raise settings.UsageError("flag --how=b: not today; use --how=a.")
    return outcome.Outcome(
        title="Title",
        findings=["Found."],
        privacy="(1, 1e-5)-differential privacy.",
        caveats=["A caveat."],
        tables={"rows": [{"a": 1, "b": 0.25}, {"a": 2, "c": float("nan")}]},
        shown=("rows",),
        numbers={"infinite": float("inf")},
    )


def test_launch_writes_everything(tmp_path, capsys):
    directory = tmp_path / "deep" / "inside"
    outcome.launch("A.", Small, run, ["small", f"--output_dir={directory}"])
    report = (directory / "report.txt").read_text()
    assert report in capsys.readouterr().out
    for words in (
        "Title\n=====",
        "Found.",
        "Privacy: (1, 1e-5)",
        "- A caveat.",
        "0.25",
    ):
        assert words in report
    config = json.loads((directory / "config.json").read_text(), parse_constant=int)
    assert config["settings"]["rate"] == 0.5
    assert config["results"] == {"infinite": "inf"}
    assert "tensorflow" in config["versions"]
    with open(directory / "rows.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["a"] for row in rows] == ["1", "2"]
    assert rows[0]["c"] == ""


def test_errors_become_one_sentence(tmp_path):
    with pytest.raises(SystemExit, match="--how=b: not today"):
        outcome.launch(
            "A.", Small, run, ["small", "--how=b", f"--output_dir={tmp_path}"]
        )


def test_an_unusable_output_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="--output_dir="):
        outcome.launch(
            "A.", Small, run, ["small", f"--output_dir={tmp_path / 'file' / 'x'}"]
        )
