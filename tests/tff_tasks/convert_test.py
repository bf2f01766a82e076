"""Files of users' own: what comes out, what is refused and with which words."""

from __future__ import annotations

import csv
import gzip
import json
import os
import pathlib
import re
import signal
import sqlite3
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from driver_kit.progress import Progress
from tests.tff_tasks import fixtures
from tff_tasks import client_data, convert
from tff_tasks.client_files import DataFileError, Feature, FederatedFile
from tff_tasks.conversion import checks, rows, writer
from tff_tasks.conversion.targets import Target
from tff_tasks.registry import task_class

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = {"snippets": Feature("bytes")}
IMAGE = {"pixels": Feature("float", (28, 28)), "label": Feature("int")}


def converted(directory, source, *flags, task="shakespeare_character"):
    """Runs the program; returns the path of the file."""
    convert.main(
        [f"--task={task}", f"--input={source}", f"--output_dir={directory}", *flags]
    )
    return directory / task_class(task).file_name


def refused(directory, source, *flags, **options) -> str:
    """What the program says as it refuses; it leaves nothing behind."""
    before = sorted(directory.rglob("*")) if directory.exists() else []
    with pytest.raises(SystemExit) as caught:
        converted(directory, source, *flags, **options)
    after = sorted(directory.rglob("*")) if directory.exists() else []
    assert after in (before, [])
    return str(caught.value.code)


def contents(path, features=TEXT):
    """The examples of all clients, by split and client."""
    file = FederatedFile(path)
    return {
        split: {
            client: {
                name: values.tolist()
                for name, values in file.read(split, client, features).items()
            }
            for client in file.clients(split)
        }
        for split in file.splits()
    }


def texts(path):
    """The texts of each client, whatever its split."""
    splits = contents(path).values()
    return {
        client: values["snippets"]
        for split in splits
        for client, values in split.items()
    }


def posts(directory, clients=6, examples=3):
    """Texts as rows, clients mixed."""
    found = [
        {"user": f"u{c}", "text": f'"{c}", they said\nin {i}', "extra": i}
        for i in range(examples)
        for c in range(clients)
    ]
    path = directory / "posts.csv"
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, list(found[0]))
        table.writeheader()
        table.writerows(found)
    return path


COLUMNS = ("--client=user", "--columns=snippets=text")
WANTED = {
    f"u{c}": [f'"{c}", they said\nin {i}'.encode() for i in range(3)] for c in range(6)
}


def test_csv_becomes_clients_with_their_examples_in_order(tmp_path, capsys):
    path = converted(tmp_path / "out", posts(tmp_path), *COLUMNS)
    assert texts(path) == WANTED
    assert {k: len(v) for k, v in contents(path).items()} == {"train": 5, "test": 1}
    said = capsys.readouterr().out
    assert "train: 5 clients, 15 examples, 285 characters" in said
    assert "Train: python -m tff_tasks.shakespeare_character --data_dir=" in said
    assert [p.name for p in path.parent.iterdir()] == ["shakespeare.sqlite"]


@pytest.mark.parametrize("name", ["posts.jsonl", "posts.ndjson.gz", "posts.npz"])
def test_every_format_becomes_the_same_file(tmp_path, name):
    table = posts(tmp_path)
    with open(table, newline="") as file:
        found = list(csv.DictReader(file))
    path = tmp_path / name
    if name.endswith(".npz"):
        np.savez(path, **{key: [row[key] for row in found] for key in found[0]})
    else:
        lines = "".join(json.dumps(row) + "\n" for row in found).encode()
        path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    one = converted(tmp_path / "one", table, *COLUMNS)
    other = converted(tmp_path / "other", path, *COLUMNS)
    assert contents(one) == contents(other)
    # To the byte: nothing of a file depends on when, where or from what it was made.
    assert one.read_bytes() == other.read_bytes()


def test_each_file_of_a_folder_is_a_client(tmp_path, capsys):
    folder = tmp_path / "people"
    (folder / "b").mkdir(parents=True)
    (folder / "ann.txt").write_text("one\n\ntwo\n")
    (folder / "b" / "ann.txt").write_text("three\r\n")
    (folder / "eve.csv").write_text("text\nfour\n")
    (folder / "nobody.txt").write_text("\n")
    (folder / ".hidden").write_bytes(b"\xff")
    flags = ("--columns=snippets=text", "--test_share=0.3")
    path = converted(tmp_path / "out", folder, *flags)
    assert texts(path) == {
        "ann": [b"one", b"two"],
        "b/ann": [b"three"],
        "eve": [b"four"],
    }
    said = capsys.readouterr().out
    assert "1 of 4 files have no examples" in said and "nobody.txt" in said


@pytest.mark.parametrize(
    "how, wanted",
    [
        ("lines", [b"one", b"two", b"three"]),
        ("paragraphs", [b"one\ntwo", b"three"]),
        ("file", [b"one\ntwo\n\nthree"]),
    ],
)
def test_what_an_example_of_a_text_is_can_be_chosen(tmp_path, how, wanted):
    (tmp_path / "in").mkdir()
    for name in ("ann", "eve"):
        (tmp_path / "in" / f"{name}.txt").write_text("one\ntwo\n\nthree\n")
    path = converted(tmp_path / "out", tmp_path / "in", f"--text_examples={how}")
    assert texts(path) == {"ann": wanted, "eve": wanted}


def test_a_column_tells_clients_across_the_files_of_a_folder(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "1.csv").write_text("user,snippets\na,1\nb,2\n")
    (folder / "2.tsv").write_text("snippets\tuser\n3\ta\n")
    path = converted(tmp_path / "out", folder, "--client=user")
    assert texts(path) == {"a": [b"1", b"3"], "b": [b"2"]}


def test_columns_of_pixels_become_an_image(tmp_path):
    path = tmp_path / "digits.csv"
    names = [f"p{i}" for i in range(784)]
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["who", "digit", *names])
        for i in range(4):
            table.writerow([f"w{i}", i, *[255] * 28, *[0] * 756])
    made = converted(
        tmp_path / "out",
        path,
        "--client=who",
        "--columns=label=digit,pixels=p0:p783",
        "--pixels=ink_255",
        "--only_digits",
        task="emnist_character",
    )
    found = contents(made, IMAGE)
    assert set(found) == {"digits_only_train", "digits_only_test"}
    images = found["digits_only_train"] | found["digits_only_test"]
    assert {n: image["label"] for n, image in images.items()} == {
        f"w{i}": [i] for i in range(4)
    }
    pixels = np.array(images["w2"]["pixels"])
    assert pixels.shape == (1, 28, 28)
    # The first row is ink.
    assert (pixels[0, 0] == 0).all() and (pixels[0, 1:] == 1).all()


def test_the_split_is_by_client_and_depends_on_names_and_seed_alone():
    names = [f"c{i}" for i in range(200)]
    shares = {"test": 0.2, "heldout": 0.1}
    one = writer.split_clients(names, shares, seed=0)
    assert one == writer.split_clients(names[::-1], shares, seed=0)
    counts = {p: list(one.values()).count(p) for p in ("train", "test", "heldout")}
    assert counts == {"train": 140, "test": 40, "heldout": 20}
    # A chance of 1 / C(200, 40) < 1e-40 that two seeds choose the same test.
    assert one != writer.split_clients(names, shares, seed=1)


def test_every_split_has_a_client_or_the_input_is_refused(tmp_path):
    two = writer.split_clients(["a", "b"], {"test": 0.01}, seed=0)
    assert sorted(two.values()) == ["test", "train"]
    path = posts(tmp_path, clients=1)
    assert "There are 1 clients, too few" in refused(tmp_path / "out", path, *COLUMNS)


def test_small_clients_can_be_left_out(tmp_path, capsys):
    path = tmp_path / "posts.csv"
    path.write_text("user,snippets\na,1\na,2\nb,3\nb,4\nc,5\n")
    flags = ("--client=user", "--least_examples=2")
    assert set(texts(converted(tmp_path / "out", path, *flags))) == {"a", "b"}
    assert "1 clients have fewer than 2 examples" in capsys.readouterr().out
    said = refused(tmp_path / "none", path, "--client=user", "--least_examples=3")
    assert "--least_examples=2" in said


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
        (["--check=a", "--input=b"], "leave --input out"),
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
    assert refused(tmp_path / "out", posts(tmp_path), *COLUMNS) == "not right"


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


def test_images_are_dealt_to_clients_that_prefer_labels(tmp_path, capsys):
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(300, 28, 28), dtype=np.uint8)
    labels = rng.integers(10, size=300)
    path = tmp_path / "mnist.npz"
    np.savez(
        path,
        x_train=images[:240],
        y_train=labels[:240],
        x_test=images[240:],
        y_test=labels[240:],
    )
    flags = ("--only_digits", "--pixels=ink_255", "--dirichlet=0.1")
    made = converted(
        tmp_path / "out", path, "--dealt_to=12", *flags, task="emnist_character"
    )
    found = contents(made, IMAGE)
    train, test = found["digits_only_train"], found["digits_only_test"]
    assert list(train) == [f"train_{i:02d}" for i in range(12)]
    assert list(test) == [f"test_{i}" for i in range(3)]
    assert {len(x["label"]) for x in [*train.values(), *test.values()]} == {20}
    # Every image once, with its label, and none in both parts.
    for part, first, last in ((train, 0, 240), (test, 240, 300)):
        pairs = sorted(
            (label, np.array(image).tobytes())
            for client in part.values()
            for label, image in zip(client["label"], client["pixels"], strict=True)
        )
        wanted = sorted(
            (
                int(label),
                np.float32(1 - image / 255).astype(np.float64).tobytes(),
            )
            for label, image in zip(labels[first:last], images[first:last], strict=True)
        )
        assert pairs == wanted
    # Clients without preference would have 4 or 5 of their 20 images of one label.
    most = [np.bincount(client["label"]).max() for client in train.values()]
    assert np.mean(most) > 8
    again = converted(
        tmp_path / "again", path, "--dealt_to=12", *flags, task="emnist_character"
    )
    assert again.read_bytes() == made.read_bytes()


@pytest.mark.parametrize("spelling", ["images-idx3-ubyte", "images.idx3-ubyte.gz"])
def test_idx_files_are_found_under_both_spellings(tmp_path, spelling):
    folder = tmp_path / "mnist"
    folder.mkdir()
    pack = gzip.compress if spelling.endswith(".gz") else bytes
    for part, count in (("train", 20), ("t10k", 10)):
        images = b"\0\0\x08\x03" + np.array([count, 28, 28], ">u4").tobytes()
        labels = b"\0\0\x08\x01" + np.array([count], ">u4").tobytes()
        path = folder / f"{part}-{spelling}"
        path.write_bytes(pack(images + bytes(784 * count)))
        label_name = spelling.replace("images", "labels").replace("idx3", "idx1")
        content = bytes(i % 10 for i in range(count))
        (folder / f"{part}-{label_name}").write_bytes(pack(labels + content))
    said = refused(tmp_path / "out", folder, task="emnist_character")
    assert "--dealt_to=600" in said
    flags = ("--dealt_to=4", "--only_digits")
    made = converted(tmp_path / "out", folder, *flags, task="emnist_character")
    found = contents(made, IMAGE)["digits_only_train"]
    # 0 in MNIST is paper, which is 1 in the file.
    assert np.array(found["train_0"]["pixels"]).min() == 1
    path.write_bytes(path.read_bytes()[:-3])
    said = refused(tmp_path / "cut", folder, *flags, task="emnist_character")
    assert path.name in said and "Get it again" in said


def test_benchmarks_read_what_was_converted(tmp_path):
    path = converted(tmp_path, posts(tmp_path), *COLUMNS)
    task = task_class("shakespeare_character")({})
    source = task.load(str(path.parent))
    data = client_data.EvaluationData(
        task, source["test"], source["test"].client_ids, None
    )
    ((chunks,),) = list(data)
    assert chunks.shape == (3, 81)


def test_words_are_counted_over_training_clients_only(tmp_path, capsys):
    path = tmp_path / "so.csv"
    lines = [f"u{i},how to word{i},a title,x|tag{i}" for i in range(10)]
    path.write_text("user,tokens,title,tags\n" + "\n".join(lines) + "\n")
    out = tmp_path / "out"
    converted(out, path, "--client=user", task="stackoverflow_tag")
    assert "word_count is missing" in capsys.readouterr().out
    flags = ("--client=user", "--count_words", "--overwrite")
    made = converted(out, path, *flags, task="stackoverflow_tag")
    said = capsys.readouterr().out
    assert "not cover them" in said and "--word_vocab_size=11" in said
    file = FederatedFile(made)
    assert file.splits() == ["heldout", "test", "train"]
    trained = file.clients("train")
    assert len(trained) == 7
    words = (out / "stackoverflow.word_count").read_text().splitlines()
    assert words[:4] == ["a 7", "how 7", "title 7", "to 7"]
    assert {word.split()[0] for word in words[4:]} == {
        name.replace("u", "word") for name in trained
    }
    options = {"word_vocab_size": 11, "tag_vocab_size": 8}
    task = task_class("stackoverflow_tag")(options)
    assert task.load(str(out))["train"].num_examples == 7
    # And no vocabulary is replaced unless asked.
    (out / "stackoverflow.sqlite").unlink()
    said = refused(out, path, *flags[:2], task="stackoverflow_tag")
    assert "word_count is there already" in said


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


def test_progress_is_shown_for_each_step(tmp_path, monkeypatch):
    shown = []

    class Noted(Progress):
        def __init__(self, title, last, **options):
            shown.append((title, last))
            super().__init__(title, last, **options)

    monkeypatch.setattr(convert, "Progress", Noted)
    converted(tmp_path / "out", posts(tmp_path), *COLUMNS)
    assert shown == [("Reading", 1), ("Writing clients", 6), ("Reading again", 6)]
