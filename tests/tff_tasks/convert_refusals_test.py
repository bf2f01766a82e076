"""Bad input, existing files, kills: the messages, and the files that stay."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc

import pytest

from tests.tff_tasks.conversions import (
    COLUMNS,
    ROOT,
    converted,
    posts,
    refused,
    texts,
)
from tff_tasks import convert
from tff_tasks.client_files import DataFileError, FederatedFile
from tff_tasks.conversion import checks, rows, writer

HEAD = "user,snippets\na,1\n"


@pytest.mark.parametrize(
    "name, content, flags, message",
    [
        ("a.csv", "", [], r"a.csv is empty. Its first line must name the columns"),
        ("a.csv", HEAD + "b\n", [], r"a.csv, line 3: 1 values, but line 1 names 2"),
        ("a.csv", HEAD + ",2\n", [], r"a.csv, line 3: the client id is empty"),
        ("a.csv", HEAD + "a ,2\n", [], r"line 3: the client id is 'a ', with spaces"),
        ("a.csv", HEAD + "a\u200b,2\n", [], r"line 3: the client id is 'a\\u200b'"),
        ("a.csv", "who,snippets\na,1\n", [], r"line 2: there is no column 'user'"),
        ("a.csv", "user,text\na,1\n", [], r"line 2.*'snippets'.*--columns=snippets="),
        ("a.csv", "user,user\na,1\n", [], r"line 1: two columns are called 'user'"),
        ("a.csv", HEAD + '"b,2\n\n', [], r"a.csv, line 4: .*Is a quote not closed"),
        ("a.csv", b"user,snippets\na,\xe9\n", [], r"line 2: not in UTF-8.*iconv"),
        ("a.csv.gz", b"\x1f\x8b\x08\x00cut", [], r"a.csv.gz is cut or damaged"),
        ("a.jsonl", "[1]\n", [], r"a.jsonl, line 1: .*A list must be taken apart"),
        ("a.jsonl", '{"user": 1\n', [], r"a.jsonl, line 1: no JSON object"),
        (
            "a.jsonl",
            '{"user": 1, "user": 2}\n',
            [],
            r"line 1: no JSON object: it has a key twice",
        ),
        (
            "a.jsonl",
            '{"user": 1.5, "snippets": "a"}\n',
            [],
            r"line 1, column 'user' is 1.5, but a client id must be",
        ),
        (
            "a.jsonl",
            '{"user": 1, "snippets": ["a"]}\n',
            [],
            r"line 1, column 'snippets' is \['a'\], but must be a text",
        ),
        (
            "a.jsonl",
            '{"user": 1, "snippets": "\\ud800"}\n',
            [],
            r"line 1, column 'snippets' has half a character",
        ),
        ("a.npz", b"PK\x03\x04", [], r"a.npz is cut or damaged"),
        ("a.doc", "x", [], r"a.doc ends in none of .csv"),
        ("a.csv", HEAD, ["--columns=text=a"], r"--columns=text=a: .*no FEATURE=COLUMN"),
        ("a.txt", "a", [], r"--client=user: plain texts have no columns"),
    ],
)
def test_bad_input_is_refused_with_its_place(tmp_path, name, content, flags, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = refused(tmp_path / "out", path, "--client=user", *flags)
    assert re.search(message, said, re.S), said


def image_line(**changes):
    values = {"user": 1, "pixels": [[1.0] * 28] * 28, "label": 7, **changes}
    return json.dumps(values) + "\n"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pixels": [[0.0] * 27] * 28}, "shape [28, 27], but must have [28, 28]"),
        ({"pixels": [[200.0] * 28] * 28}, "has 200, but must be 0 to 1; for 0 to 255"),
        ({"pixels": [[1.0], []]}, "has lists of different lengths"),
        ({"pixels": "7"}, "has shape [], but must have [28, 28]"),
        ({"pixels": None}, "is None, but must be a finite number"),
        ({"label": 62}, "has 62, but must be 0 to 61"),
        ({"label": 1.5}, "is 1.5, but must be a whole number"),
        ({"label": True}, "is True, but must be a whole number"),
        ({"label": "1_0"}, "is '1_0', but must be a whole number"),
        ({"label": ""}, "is empty, but must be a whole number"),
        ({"label": 10**30}, "but must be a whole number"),
    ],
)
def test_bad_numbers_are_refused_with_line_and_column(tmp_path, changes, message):
    path = tmp_path / "a.jsonl"
    path.write_text(image_line() + image_line(**changes))
    said = refused(tmp_path / "out", path, "--client=user", task="emnist_character")
    (column,) = changes
    assert f"a.jsonl, line 2, column {column!r}" in said and message in said


def test_a_bad_cell_among_many_is_named(tmp_path):
    path = tmp_path / "a.csv"
    names = [f"p{i}" for i in range(784)]
    cells = ["0"] * 783 + ["nan"]
    path.write_text(f"user,label,{','.join(names)}\na,1,{','.join(cells)}\n")
    said = refused(
        tmp_path / "out",
        path,
        "--client=user",
        "--columns=pixels=p0:p783",
        task="emnist_character",
    )
    assert "line 2, column 'p783' is 'nan', but must be a finite number" in said


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "task must be given, for example --task=shakespeare_character"),
        (["--task=digits"], "must be one of cifar100_image"),
        (["--task=shakespeare_character"], "input must be given"),
        (["--check=a", "--input=b"], "contradict each other"),
        (
            ["--task=shakespeare_character", "--input=a", "--pixels=ink_1"],
            "pixels is for EMNIST",
        ),
        (
            ["--task=shakespeare_character", "--input=a", "--dealt_to=6"],
            "shakespeare_character has no images",
        ),
        (
            ["--task=emnist_character", "--input=a", "--dealt_to=6", "--client=u"],
            "leave --client out",
        ),
        (["--task=cifar100_image", "--input=a", "--count_words"], "Stack Overflow"),
        (["--task=shakespeare_character", "--input=nowhere"], "nowhere is missing"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    tmp_path, monkeypatch, flags, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        convert.main([*flags, f"--output_dir={tmp_path / 'out'}"])


@pytest.mark.parametrize("kind", ["pipe", "link to nothing", "link to a folder"])
def test_nothing_of_a_folder_is_left_out_silently(tmp_path, kind):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("ann.txt", "eve.txt"):
        (folder / name).write_text("1\n")
    other = folder / "strange.txt"
    if kind == "pipe":
        os.mkfifo(other)
    else:
        other.symlink_to(tmp_path if "folder" in kind else tmp_path / "nowhere")
    assert "strange.txt is no regular file" in refused(tmp_path / "out", folder)


def test_two_files_of_one_client_id_are_refused(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("ann.csv", "ann.txt", "eve.txt"):
        (folder / name).write_text("snippets\n1\n")
    said = refused(tmp_path / "out", folder)
    assert "ann.csv" in said and "ann.txt would both be the client 'ann'" in said


def test_nothing_is_replaced_unless_asked(tmp_path):
    path = converted(tmp_path / "out", posts(tmp_path), *COLUMNS)
    before = path.read_bytes()
    source = posts(tmp_path, clients=3)
    assert "--overwrite" in refused(tmp_path / "out", source, *COLUMNS)
    assert path.read_bytes() == before
    converted(tmp_path / "out", source, *COLUMNS, "--overwrite")
    assert set(texts(path)) == {"u0", "u1", "u2"}


def test_a_failed_conversion_leaves_the_old_file(tmp_path):
    path = converted(tmp_path / "out", posts(tmp_path), *COLUMNS)
    before = path.read_bytes()
    bad = tmp_path / "bad.csv"
    bad.write_text("user,text\n" + "a,1\n" * 50 + "b\n")
    assert "line 52" in refused(tmp_path / "out", bad, *COLUMNS, "--overwrite")
    assert path.read_bytes() == before


def test_a_file_that_the_check_refuses_never_takes_its_name(tmp_path, monkeypatch):
    def check_file(path, target, checked):
        assert FederatedFile(path).splits() == ["test", "train"]
        raise DataFileError("not right")

    monkeypatch.setattr(checks, "check_file", check_file)
    assert refused(tmp_path / "out", posts(tmp_path), *COLUMNS).endswith(": not right")


def test_a_file_that_comes_in_the_meantime_is_not_replaced(tmp_path, monkeypatch):
    checked, path = checks.check_file, tmp_path / "out" / "shakespeare.sqlite"

    def check_file(*arguments):
        path.write_text("somebody else's")
        return checked(*arguments)

    monkeypatch.setattr(checks, "check_file", check_file)
    with pytest.raises(SystemExit, match="is there already"):
        converted(tmp_path / "out", posts(tmp_path), *COLUMNS)
    assert path.read_text() == "somebody else's"


@pytest.mark.parametrize(
    "name, start", [("a.csv", "user,snippets\na,"), ("a.jsonl", ""), ("a.csv.gz", "")]
)
def test_a_line_without_end_is_not_held_in_memory(tmp_path, monkeypatch, name, start):
    monkeypatch.setattr(rows, "_MOST_BYTES", 1000)
    path = tmp_path / name
    content = start.encode() + b"x" * 10_000_000
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    tracemalloc.start()
    said = refused(tmp_path / "out", path, "--client=user")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    line = start.count("\n") + 1
    assert f"{name}, line {line} has more than 1000 bytes" in said and most < 2e6


def test_a_quote_without_end_is_not_held_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_MOST_BYTES", 1000)
    path = tmp_path / "a.csv"
    path.write_text('user,snippets\na,"b\n' + "c,d\n" * 1_000_000)
    said = refused(tmp_path / "out", path, "--client=user")
    assert "field larger than field limit (1000)" in said and "quote" in said


@pytest.mark.slow
def test_a_killed_conversion_leaves_the_old_file_and_no_lasting_litter(tmp_path):
    path = converted(tmp_path / "out", posts(tmp_path), *COLUMNS)
    before = path.read_bytes()
    large = tmp_path / "large.csv"
    with open(large, "w") as file:
        file.write("user,text\n")
        file.writelines(f"u{i % 50},{'x' * 500}\n" for i in range(200_000))
    flags = [f"--input={large}", f"--output_dir={path.parent}", "--overwrite"]
    command = ["-m", "tff_tasks.convert", "--task=shakespeare_character"]
    process = subprocess.Popen(
        [sys.executable, *command, *flags, *COLUMNS],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not list(path.parent.glob(".*-staged*")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    left = set(path.parent.iterdir()) - {path}
    assert len(left) == 2
    for one in left:
        os.utime(one, (0, 0))
    converted(path.parent, posts(tmp_path), *COLUMNS, "--overwrite")
    assert list(path.parent.iterdir()) == [path]


def test_memory_does_not_grow_with_the_examples(tmp_path):
    """By 16 MB of text, less than 4 MB."""

    def peak(examples):
        path = tmp_path / f"{examples}.csv"
        with open(path, "w") as file:
            file.write("user,snippets\n")
            for i in range(examples):
                file.write(f"u{i % 7},{'x' * 8000}\n")
        staged = tmp_path / f"{examples}.sqlite"
        tracemalloc.start()
        made = writer.ClientWriter(staged)
        for row in rows.csv_rows(path, rows.Meter()):
            content = row.values["snippets"].encode()
            made.add(row.values["user"], content)
        made.finish(
            {"train": "train", "test": "test"}, {"test": 0.2}, 0, 1, lambda n: None
        )
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        made.close()
        return most

    assert peak(2100) < peak(100) + 4e6
