"""Federated files: read by client, through an index, and refused with a reason."""

import sqlite3

import numpy as np
import pytest

from tests.tff_tasks import fixtures
from tff_tasks import federated_files, registry, vocabulary
from tff_tasks.client_files import DataFileError, Feature, FederatedFile
from tff_tasks.sources import FileSource

ONE = {"label": Feature("int")}


def labels(*values):
    return [fixtures.example(label=value) for value in values]


def small(path, **options):
    splits = {
        "train": {"b": labels(1, 2, 3), "a": labels(4), "it's": labels(5, 6)},
        "test": {"b": labels(7)},
    }
    return fixtures.write_file(path / "small.sqlite", splits, **options)


def test_clients_are_sorted_and_belong_to_a_split(tmp_path):
    file = FederatedFile(small(tmp_path))
    assert file.splits() == ["test", "train"]
    assert file.clients("train") == {"a": 1, "b": 3, "it's": 2}
    assert file.clients("test") == {"b": 1}


def test_examples_come_in_the_order_of_the_file(tmp_path):
    file = FederatedFile(small(tmp_path))
    assert file.read("train", "b", ONE)["label"].tolist() == [1, 2, 3]
    assert file.read("train", "it's", ONE)["label"].tolist() == [5, 6]
    assert file.read("test", "b", ONE)["label"].tolist() == [7]


def test_no_query_reads_the_table_of_examples_through(tmp_path):
    path = small(tmp_path)
    file = FederatedFile(path)
    asked = []
    file._connection.set_trace_callback(asked.append)
    file.splits()
    source = FileSource(file, "train", ONE)
    for client in source.client_ids:
        source.examples(client)
    connection = sqlite3.connect(path)
    plans = [
        row[-1] for q in asked for row in connection.execute(f"EXPLAIN QUERY PLAN {q}")
    ]
    touching = [plan for plan in plans if " examples" in plan]
    assert len(touching) == 3
    assert all(plan.startswith("SEARCH examples USING INDEX") for plan in touching)


def test_file_without_index_is_refused_until_it_has_one(tmp_path, capsys):
    path = small(tmp_path, index=False)
    with pytest.raises(DataFileError, match="no index") as caught:
        FederatedFile(path)
    assert f"python -m tff_tasks.federated_files {path}" in str(caught.value)
    federated_files.main([str(path)])
    assert "indexed" in capsys.readouterr().out
    assert FederatedFile(path).clients("test") == {"b": 1}


def test_indexing_needs_a_database(tmp_path):
    with pytest.raises(SystemExit, match="Usage"):
        federated_files.main([])
    with pytest.raises(SystemExit, match="missing"):
        federated_files.main([str(tmp_path / "none")])
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(SystemExit, match="not a database"):
        federated_files.main([str(tmp_path / "text")])


def test_missing_file_says_where_to_get_it(tmp_path):
    with pytest.raises(DataFileError, match="tff-datasets-public/x.sqlite.lzma"):
        FederatedFile(tmp_path / "x.sqlite")
    (tmp_path / "x.sqlite.lzma").write_bytes(b"packed")
    with pytest.raises(DataFileError, match="xz --format=lzma --decompress"):
        FederatedFile(tmp_path / "x.sqlite")


@pytest.mark.parametrize("content", [b"", b"\x5d\x00\x00\x80", b"SQLite format 2"])
def test_other_file_is_refused(tmp_path, content):
    path = tmp_path / "x.sqlite"
    path.write_bytes(content)
    with pytest.raises(DataFileError, match="not a SQLite database"):
        FederatedFile(path)


def test_file_that_was_cut_short_is_refused(tmp_path):
    path = small(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataFileError, match="damaged|cannot be read"):
        file = FederatedFile(path)
        for client in file.clients("train"):
            file.examples("train", client)


@pytest.mark.parametrize(
    "sql, message",
    [
        ("DROP TABLE client_metadata", "no table 'client_metadata'"),
        ("DROP TABLE examples", "no table 'examples'"),
        (
            "ALTER TABLE examples RENAME COLUMN split_name TO split",
            "table 'examples' has no column 'split_name'",
        ),
    ],
)
def test_other_schema_is_refused(tmp_path, sql, message):
    path = small(tmp_path)
    connection = sqlite3.connect(path)
    connection.execute(sql)
    connection.commit()
    connection.close()
    with pytest.raises(DataFileError, match=message):
        FederatedFile(path)


def test_unknown_split_and_client_are_named(tmp_path):
    file = FederatedFile(small(tmp_path))
    with pytest.raises(DataFileError, match="no split 'val'.*'test', 'train'"):
        file.clients("val")
    with pytest.raises(DataFileError, match="client 'z' of split 'train'"):
        file.examples("train", "z")


def test_wrong_count_is_noticed(tmp_path):
    path = small(tmp_path)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE client_metadata SET num_examples = 9")
    connection.commit()
    connection.close()
    source = FileSource(FederatedFile(path), "train", ONE)
    with pytest.raises(DataFileError, match="'a' .* has 1 examples, .* says 9"):
        source.examples("a")


@pytest.mark.parametrize(
    "blob", [b"\xff\xff not a message", fixtures.example(other=1), b""]
)
def test_malformed_example_is_named(tmp_path, blob):
    path = fixtures.write_file(tmp_path / "x.sqlite", {"train": {"c": [blob]}})
    with pytest.raises(DataFileError, match="client 'c' of split 'train'.*malformed"):
        FederatedFile(path).read("train", "c", ONE)


@pytest.mark.parametrize("name", fixtures.FITTING)
def test_every_task_reads_its_file(data_dir, name):
    task = registry.TASKS[name](fixtures.FITTING[name])
    sources = task.load(data_dir)
    assert {"train", "test"} <= set(sources)
    assert ("heldout" in sources) == name.startswith("stackoverflow")
    for source in sources.values():
        for client, count in source.counts.items():
            examples = source.examples(client)
            assert set(examples) == set(task.features)
            assert {len(part) for part in examples.values()} == {count}
            arrays = task.encode(examples)
            if name != "shakespeare_character":
                assert {len(array) for array in arrays} == {count}
    assert min(sources["train"].counts.values()) == 1


@pytest.mark.parametrize("name", fixtures.FITTING)
def test_made_up_examples_have_the_form_of_the_files(data_dir, name):
    task = registry.TASKS[name](fixtures.FITTING[name])
    real = task.load(data_dir)["train"]
    made = registry.TASKS[name](synthetic=True).load(None)["train"]
    real, made = (source.examples(source.client_ids[1]) for source in (real, made))
    assert set(real) == set(made)
    for feature in real:
        assert real[feature].shape[1:] == made[feature].shape[1:]
        assert real[feature].dtype.kind == made[feature].dtype.kind


def test_only_digits_reads_the_other_splits(data_dir):
    task = registry.TASKS["emnist_character"]({"only_digits": True})
    source = task.load(data_dir)["train"]
    assert max(source.examples(c)["label"].max() for c in source.client_ids) < 10


def test_words_come_most_frequent_first(tmp_path):
    path = tmp_path / vocabulary.WORD_FILE
    path.write_text("the 30\na 20\nb c 20\n")
    assert vocabulary.load_words(tmp_path, 2) == ["the", "a"]
    assert vocabulary.load_words(tmp_path, 3) == ["the", "a", "b c"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("the\n", "line 1: not a word and a count"),
        ("the 3\na x\n", "line 2: not a word and a count"),
        ("the 3\na 4\n", "line 2: not sorted"),
        ("the 3\n", "has 1 items, but --vocab_size=2.*use --vocab_size=1"),
        ("a 3\na 3\n", "twice"),
    ],
)
def test_malformed_words_are_refused(tmp_path, text, message):
    (tmp_path / vocabulary.WORD_FILE).write_text(text)
    with pytest.raises(DataFileError, match=message):
        vocabulary.load_words(tmp_path, 2)


def test_packed_words_are_refused(tmp_path):
    (tmp_path / vocabulary.WORD_FILE).write_bytes(b"BZh9\xff\xfe\x80\x81")
    with pytest.raises(DataFileError, match="packed"):
        vocabulary.load_words(tmp_path, 2)


def test_tags_are_sorted_by_count_and_ties_keep_their_order(tmp_path):
    (tmp_path / vocabulary.TAG_FILE).write_text('{"b": 5, "a": 5, "c": 9, "d": 1}')
    assert vocabulary.load_tags(tmp_path, 3) == ["c", "b", "a"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("[1]", "not a JSON object"),
        ('{"a": ', "not a JSON object"),
        ('{"a": "many"}', "not a JSON object"),
        ('{"a": 1}', "--tag_vocab_size=1"),
    ],
)
def test_malformed_tags_are_refused(tmp_path, text, message):
    (tmp_path / vocabulary.TAG_FILE).write_text(text)
    with pytest.raises(DataFileError, match=message):
        vocabulary.load_tags(tmp_path, 2)


@pytest.mark.parametrize(
    "name", ["stackoverflow.word_count", "stackoverflow.tag_count"]
)
def test_missing_vocabulary_is_named(tmp_path, name):
    load = vocabulary.load_words if "word" in name else vocabulary.load_tags
    with pytest.raises(DataFileError, match=f"{name} is missing"):
        load(tmp_path, 1)


def test_emnist_pixels_survive(data_dir):
    task = registry.TASKS["emnist_character"]()
    source = task.load(data_dir)["train"]
    examples = source.examples(source.client_ids[0])
    label = int(examples["label"][0])
    dark = np.argwhere(examples["pixels"][0] < 0.5)
    assert dark.min(0).tolist() == [3 * (label // 8) + 1, 3 * (label % 8) + 2]
