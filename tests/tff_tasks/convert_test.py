"""Conversion of users' own files: the contents of the results."""

from __future__ import annotations

import csv
import gzip
import json

import numpy as np
import pytest

from driver_kit.progress import Progress
from tests.tff_tasks.conversions import (
    COLUMNS,
    IMAGE,
    contents,
    converted,
    posts,
    refused,
    texts,
)
from tff_tasks import client_data, convert
from tff_tasks.client_files import FederatedFile
from tff_tasks.conversion import writer
from tff_tasks.registry import task_class

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
    # To the byte: a file does not depend on the time, the place or the input's format.
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
    # Clients without preference would have 4 or 5 images of a label among their 20.
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


def test_progress_is_shown_for_each_step(tmp_path, monkeypatch):
    shown = []

    class Noted(Progress):
        def __init__(self, title, last, **options):
            shown.append((title, last))
            super().__init__(title, last, **options)

    monkeypatch.setattr(convert, "Progress", Noted)
    converted(tmp_path / "out", posts(tmp_path), *COLUMNS)
    assert shown == [("Reading", 1), ("Writing clients", 6), ("Reading again", 6)]
