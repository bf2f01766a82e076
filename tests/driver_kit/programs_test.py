"""Settings from a command line, and the messages about wrong settings."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import math
import re

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from driver_kit import command_line, lazy, programs, settings


@dataclasses.dataclass(frozen=True)
class Small:
    """Settings with a field of each kind."""

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
        ("--rate=1", "--rate=1.*above 0 and below 1, for example --rate=0.5"),
        ("--rate=nan", "--rate=nan.*for example"),
        ("--sizes=1,0", "--sizes=1,0.*whole number, 1 or more"),
        ("--sizes=", "--sizes=: must be .*for example --sizes=1"),
        ("--how=c", "--how=c: must be one of a, b, for example --how=a"),
        ("--which=a,c", "--which=a,c: must be one of a, b, separated"),
        ("--unknown=1", "unknown"),
        ("word", "Unknown argument 'word'"),
    ],
)
def test_a_wrong_flag_is_named(argument, message):
    with pytest.raises(settings.UsageError, match=message):
        parse(argument)


@dataclasses.dataclass(frozen=True)
class Related:
    """Settings of which some take the place of others."""

    noise: float = settings.number(1.1, "Noise.", least=0)
    epsilon: float | None = settings.number(
        None, "Finds the noise.", good=3, above=0, instead_of=("noise",)
    )
    clip: str = settings.choice("fixed", ("fixed", "quantile"), "How to clip.")
    quantile: float = settings.number(0.5, "A share.", only_with=("clip", "quantile"))
    workers: str | None = settings.words(None, "Addresses.", good="a:1")
    seconds: float = settings.number(60, "A limit.", only_with=("workers",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon=3", "--noise=1.1"], "--epsilon and --noise contradict"),
        (["--quantile=0.5"], "--quantile .* quantile of --clip.*--clip=quantile"),
        (["--clip=fixed", "--quantile=0.4"], "--clip is fixed"),
        (["--seconds=5"], "--seconds .* a value of --workers.*--workers=a:1"),
    ],
)
def test_a_flag_that_nothing_would_read_is_an_error(arguments, message):
    with pytest.raises(settings.UsageError, match=message):
        settings.parse(Related, ["related", *arguments])


def test_related_flags_that_are_read_pass():
    for arguments in (
        ["--epsilon=3"],
        ["--noise=0"],
        ["--clip=quantile", "--quantile=0.4"],
        ["--seconds=5", "--workers=b:1"],
    ):
        assert settings.parse(Related, ["related", *arguments]) is not None


def test_help_names_the_related_flags(capsys):
    assert settings.parse(Related, ["related", "--help"]) is None
    said = capsys.readouterr().out
    assert "In the place of --noise." in said
    assert "Only with --clip=quantile." in said


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_path_is_refused_and_makes_nothing(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="--output_dir=.*not empty"):
        programs.launch("A.", Small, lambda used: None, ["x", f"--output_dir={text}"])
    assert list(tmp_path.iterdir()) == []


@dataclasses.dataclass(frozen=True)
class Checked:
    """Settings that check themselves, also without a command line."""

    rounds: int | None = settings.count(None, "Rounds.", good=60)
    rate: float = settings.number(0.5, "A rate.", least=0, most=1)
    epsilon: float = settings.number(1.0, "Budget.", above=0, infinite=True)
    how: str = settings.choice("a", ("a", "b"), "How.")
    fast: bool = settings.switch(False, "Whether to be fast.")

    def __post_init__(self):
        settings.check(self)
        if self.fast and self.how == "b":
            raise ValueError("how=b does not go with --fast.")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rounds": None}, None),
        ({"rounds": 3.0}, 3),
        ({"rounds": np.int64(3)}, 3),
        ({"rate": 1}, 1.0),
        ({"epsilon": math.inf}, math.inf),
        ({"fast": True}, True),
    ],
)
def test_values_given_in_python_get_the_right_type(given, expected):
    ((name, _),) = given.items()
    value = getattr(Checked(**given), name)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rounds": 0}, "rounds must be a whole number, 1 or more, got 0; .*rounds=60"),
        ({"rounds": 2.5}, "rounds must be .*got 2.5"),
        ({"rounds": "3"}, "rounds must be .*got '3'"),
        ({"rounds": True}, "rounds must be .*got True"),
        ({"rounds": math.inf}, "rounds must be .*got inf"),
        ({"rate": math.nan}, "rate must be .*got nan; for example rate=0.5"),
        ({"rate": math.inf}, "rate must be .*at most 1"),
        ({"rate": None}, "rate must be .*got None"),
        ({"epsilon": -math.inf}, "epsilon must be a number above 0, or inf"),
        ({"epsilon": math.nan}, "epsilon must be"),
        ({"how": "c"}, "how must be one of a, b, got 'c'"),
        ({"fast": 1}, "fast must be true or false"),
    ],
)
def test_values_given_in_python_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        Checked(**given)


@pytest.mark.parametrize(
    "make",
    [
        lambda: settings.count(0, "Least 1."),
        lambda: settings.number("1,2", "A text."),
        lambda: settings.number(None, "A bad example.", good=2, most=1),
        lambda: settings.numbers((0.5, 2), "One too large.", most=1),
        lambda: settings.choice("c", ("a", "b"), "Unknown."),
    ],
)
def test_defaults_and_examples_must_do_themselves(make):
    with pytest.raises(ValueError, match="^(default|good) must be"):
        make()


def test_settings_that_do_not_go_together_are_an_error_of_usage():
    with pytest.raises(settings.UsageError, match="how=b does not go with --fast"):
        settings.parse(Checked, ["checked", "--how=b", "--fast"])


@pytest.mark.parametrize("text", ["1e3", "1000", "+1000", "1000.0"])
def test_whole_numbers_may_be_written_as_others(text):
    assert settings.parse(Checked, ["checked", f"--rounds={text}"]).rounds == 1000


@pytest.mark.parametrize("flag", command_line.HELP)
def test_help_lists_every_flag(capsys, flag):
    assert parse("--rate=0.1", flag) is None
    text = capsys.readouterr().out
    assert "A program." in text
    for field in dataclasses.fields(Small):
        assert re.search(rf"--(\[no\])?{field.name}\n", text)
    assert "(default: 1,2)" in text


def run(used: Small) -> programs.Outcome:
    if used.how == "b":
        raise settings.UsageError("flag --how=b: not today; use --how=a.")
    return programs.Outcome(
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
    programs.launch("A.", Small, run, ["small", f"--output_dir={directory}"])
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
        programs.launch(
            "A.", Small, run, ["small", "--how=b", f"--output_dir={tmp_path}"]
        )


def test_an_unusable_output_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="--output_dir="):
        programs.launch(
            "A.", Small, run, ["small", f"--output_dir={tmp_path / 'file' / 'x'}"]
        )


def test_errors_of_usage_look_alike(capsys):
    """Of settings and of argparse: program, ``error:``, text, in one line."""
    with pytest.raises(SystemExit) as raised:
        programs.launch("A.", Small, run, ["runs/small.py", "--how=c"])
    line = str(raised.value.code)
    assert line.startswith("small: error: flag --how=c: must be one of a, b")
    assert "\n" not in line
    parser = command_line.argument_parser("A.", prog="small")
    parser.add_argument("--steps", type=int)
    with pytest.raises(SystemExit) as raised:
        parser.parse_args(["--steps=x"])
    assert raised.value.code == 1
    said = capsys.readouterr().err
    expected = "small: error: argument --steps: invalid int value: 'x' See --help.\n"
    assert said == expected


@pytest.mark.parametrize("flag", ["--verbosity=0", "-verbosity=0"])
def test_flags_of_absl_logging_work(tmp_path, flag):
    """Settings are logged at INFO; an earlier program's level does not stay."""
    for given, level in (
        ([flag, "--alsologtostderr"], logging.INFO),
        ([], logging.WARNING),
    ):
        launch = ["small", f"--output_dir={tmp_path}", *given]
        programs.launch("A.", Small, run, launch)
        assert logging.get_verbosity() == level
    with pytest.raises(SystemExit, match="verbosity"):
        programs.launch("A.", Small, run, ["small", "--verbosity=loud"])


def test_a_lazy_module_is_the_module_once_it_is_used(monkeypatch):
    """Reading, setting and deleting act on the module itself."""
    module = lazy.submodules("driver_kit")("intervals")
    real = importlib.import_module("driver_kit.intervals")
    monkeypatch.setattr(module, "mean", 3, raising=False)
    assert real.mean == module.mean == vars(module)["mean"] == 3
    assert lazy.tf.keras is tf.keras and lazy.layers.Dense is tf.keras.layers.Dense
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        lazy.submodules("driver_kit")("missing")


def test_an_import_error_inside_a_lazy_module_is_shown(tmp_path, monkeypatch):
    (tmp_path / "lazy_package").mkdir()
    text = "from driver_kit import lazy\n__getattr__ = lazy.submodules(__name__)\n"
    (tmp_path / "lazy_package" / "__init__.py").write_text(text)
    (tmp_path / "lazy_package" / "broken.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    from lazy_package import broken

    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        broken.anything  # noqa: B018
