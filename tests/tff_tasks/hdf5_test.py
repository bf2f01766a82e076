"""HDF5 archives give the same clients and examples as the SQLite files, or an error."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from tests.tff_tasks import fixtures
from tff_tasks import hdf5_files, registry
from tff_tasks.client_files import DataFileError, Feature, FederatedFile

#: Types of the published files, where they are not those of the benchmarks' features.
TYPES = {"image": np.uint8, "label": np.int32}
TASKS = [*fixtures.FITTING.items(), ("emnist_character", {"only_digits": True})]


def write_archives(sqlite, directory, features):
    """The files of an archive with the examples of a SQLite file."""
    file = FederatedFile(sqlite)
    for split, name in hdf5_files.FILES[sqlite.name][1].items():
        with h5py.File(directory / name, "w") as made:
            for client in file.clients(split):
                for feature, values in file.read(split, client, features).items():
                    kind = TYPES.get(feature, values.dtype)
                    if values.dtype == object:
                        values, kind = without_zeros(values), h5py.string_dtype()
                    made.create_dataset(
                        f"examples/{client}/{feature}", data=values, dtype=kind
                    )


def without_zeros(texts):
    """Texts up to a zero byte, which ends a text in HDF5."""
    return np.array([text.split(b"\0")[0] for text in texts], object)


@pytest.mark.parametrize(("name", "options"), TASKS)
def test_an_archive_has_the_clients_counts_and_examples(
    data_dir, tmp_path, name, options
):
    task = registry.TASKS[name](options)
    write_archives(data_dir / task.file_name, tmp_path, task.features)
    for path in data_dir.glob("stackoverflow.*_count"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    expected, found = task.load(data_dir), task.load(tmp_path)
    assert set(found) == set(expected)
    for purpose, source in found.items():
        assert source.counts == expected[purpose].counts
        assert source.client_ids == sorted(source.client_ids)
        for client, count in source.counts.items():
            ours, theirs = source.examples(client), expected[purpose].examples(client)
            for feature in task.features:
                assert len(ours[feature]) == count
                assert ours[feature].dtype == theirs[feature].dtype
                same = theirs[feature]
                if same.dtype == object:
                    same = without_zeros(same)
                np.testing.assert_array_equal(ours[feature], same)
            task.encode(ours)


ONE = {"label": Feature("int")}


def small(directory, **clients):
    path = directory / "fed_cifar100_train.h5"
    with h5py.File(path, "w") as made:
        for client, columns in clients.items():
            for name, values in columns.items():
                made[f"examples/{client}/{name}"] = values
    return hdf5_files.open_files(directory / "cifar100.sqlite")


def test_the_sqlite_file_comes_first(tmp_path):
    splits = {"train": {"a": [fixtures.example(label=1)]}}
    fixtures.write_file(tmp_path / "cifar100.sqlite", splits)
    assert isinstance(small(tmp_path, a={"label": [1]}), FederatedFile)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"label": [1, 2], "image": [3]}, "client 'a' have \\[1, 2\\] rows"),
        ({"label": np.zeros(0, int)}, "have \\[0\\] rows"),
    ],
)
def test_a_client_without_as_many_rows_of_all_features_is_refused(
    tmp_path, columns, message
):
    with pytest.raises(DataFileError, match=message):
        small(tmp_path, a=columns).clients("train")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [1]}, "'label' is missing"),
        ({"label": [1.5]}, "label of client 'a' is float64"),
        ({"label": [[1, 2]]}, r"of shape \[2\], but must be int64 of shape \[\]"),
        ({"label": ["one"]}, "label of client 'a' is object"),
    ],
)
def test_a_feature_of_another_form_is_refused(tmp_path, columns, message):
    with pytest.raises(DataFileError, match=message):
        small(tmp_path, a=columns).read("train", "a", ONE)


@pytest.mark.parametrize("link", [h5py.ExternalLink("x.h5", "/"), h5py.SoftLink("/")])
def test_links_to_elsewhere_are_refused(tmp_path, link):
    with h5py.File(tmp_path / "x.h5", "w") as made:
        made["label"] = [1]
    with h5py.File(tmp_path / "fed_cifar100_train.h5", "w") as made:
        made.create_group("examples")["a"] = link
    files = hdf5_files.open_files(tmp_path / "cifar100.sqlite")
    with pytest.raises(DataFileError, match="link to elsewhere"):
        files.clients("train")


@pytest.mark.parametrize("content", [b"", b"\x89HDF\r\n\x1a\n cut", b"nothing" * 99])
def test_a_file_that_is_cut_or_no_archive_is_refused(tmp_path, content):
    (tmp_path / "fed_cifar100_train.h5").write_bytes(content)
    files = hdf5_files.open_files(tmp_path / "cifar100.sqlite")
    with pytest.raises(DataFileError, match="no HDF5 file of examples by client"):
        files.clients("train")


def test_a_file_without_examples_or_split_is_refused(tmp_path):
    with h5py.File(tmp_path / "fed_cifar100_train.h5", "w") as made:
        made.create_group("examples")
    files = hdf5_files.open_files(tmp_path / "cifar100.sqlite")
    with pytest.raises(DataFileError, match="has no clients"):
        files.clients("train")
    with pytest.raises(DataFileError, match="fed_cifar100_test.h5 is missing"):
        files.clients("test")


def test_a_packed_archive_is_named_with_the_command(tmp_path):
    (tmp_path / "fed_emnist.tar.bz2").write_bytes(b"BZh9")
    with pytest.raises(DataFileError, match="tar xjf .*fed_emnist.tar.bz2 -C"):
        hdf5_files.open_files(tmp_path / "emnist_all.sqlite")
