"""Image files: every format gives the same images, and damage is named."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from driver_kit import settings
from keras_examples import image_data
from tests.keras_examples import image_files as files


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_reads_mnist_idx(tmp_path, ending):
    images, labels = files.mnist_idx(tmp_path, 30, ending)
    found = image_data.load("mnist", str(tmp_path), (28, 28, 1))
    np.testing.assert_array_equal(found.train[0][..., 0], images)
    np.testing.assert_array_equal(found.test[1], labels)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_reads_mnist_idx_by_its_other_name(tmp_path, ending):
    images, labels = files.mnist_idx(tmp_path, 30, ending)
    for path in sorted(tmp_path.iterdir()):
        other = path.name.replace("-idx", ".idx")
        path.rename(tmp_path / other)
        path.mkdir()  # As some archives have it.
    assert (tmp_path / f"t10k-labels.idx1-ubyte{ending}").is_file()
    found = image_data.load("mnist", str(tmp_path), (28, 28, 1))
    np.testing.assert_array_equal(found.train[0][..., 0], images)
    np.testing.assert_array_equal(found.test[1], labels)


def test_a_missing_idx_file_lists_what_was_looked_for(tmp_path):
    files.mnist_idx(tmp_path, 30)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(settings.UsageError) as info:
        image_data.load("mnist", str(tmp_path), (28, 28, 1))
    for name in ("t10k-labels-idx1-ubyte", "t10k-labels.idx1-ubyte"):
        assert f"{name}, {name}.gz" in str(info.value)
    assert str(tmp_path) in str(info.value)


def test_reads_mnist_npz(tmp_path):
    images, labels = files.mnist_npz(tmp_path, 30)
    found = image_data.load("mnist", str(tmp_path), (28, 28, 1))
    np.testing.assert_array_equal(found.train[0][..., 0], images)
    np.testing.assert_array_equal(found.train[1], labels)


@pytest.mark.parametrize("write", ["cifar10_pickles", "cifar10_binary"])
def test_reads_cifar10(tmp_path, write):
    images, labels = getattr(files, write)(tmp_path)
    found = image_data.load("cifar10", str(tmp_path), (32, 32, 3))
    assert found.train[0].shape == (100, 32, 32, 3)
    np.testing.assert_array_equal(found.train[0][20:40], images)
    np.testing.assert_array_equal(found.test[1], labels)


@pytest.mark.parametrize("write", ["cifar100_pickles", "cifar100_binary"])
def test_reads_fine_labels_of_cifar100(tmp_path, write):
    images, labels = getattr(files, write)(tmp_path)
    found = image_data.load("cifar100", str(tmp_path), (32, 32, 3))
    np.testing.assert_array_equal(found.train[0], images)
    np.testing.assert_array_equal(found.train[1], labels)
    assert found.classes == 100


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100"])
def test_missing_files_are_named_with_their_layout(tmp_path, name):
    with pytest.raises(settings.UsageError, match="--data_dir is missing"):
        image_data.load(name, None, (28, 28, 1))
    with pytest.raises(settings.UsageError, match="There is no .*--data_dir must hold"):
        image_data.load(name, str(tmp_path), (28, 28, 1))


def test_a_damaged_idx_file_is_named(tmp_path):
    files.mnist_idx(tmp_path, 30)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(settings.UsageError, match="train-images.*is cut or damaged"):
        image_data.load("mnist", str(tmp_path), (28, 28, 1))
    path.write_bytes(b"\0\0\0\0" + path.read_bytes()[4:])
    with pytest.raises(settings.UsageError, match="magic number is not 2051"):
        image_data.load("mnist", str(tmp_path), (28, 28, 1))


def test_a_damaged_gz_file_is_named(tmp_path):
    files.mnist_idx(tmp_path, 30, ".gz")
    path = tmp_path / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(settings.UsageError, match="t10k-labels.*cannot be read"):
        image_data.load("mnist", str(tmp_path), (28, 28, 1))


def test_labels_and_images_must_agree(tmp_path):
    files.mnist_idx(tmp_path, 30)
    files.write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(29, np.uint8))
    with pytest.raises(settings.UsageError, match="30 training images but 29 labels"):
        image_data.load("mnist", str(tmp_path), (28, 28, 1))
    files.write_idx(tmp_path / "train-labels-idx1-ubyte", np.full(30, 10, np.uint8))
    with pytest.raises(settings.UsageError, match="labels must be 0 to 9"):
        image_data.load("mnist", str(tmp_path), (28, 28, 1))


def test_a_cut_binary_file_is_named(tmp_path):
    files.cifar10_binary(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(settings.UsageError, match="data_batch_3.bin is cut"):
        image_data.load("cifar10", str(tmp_path), (32, 32, 3))


class _Runs:
    """A pickle of this would make a directory when it is read."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (self._path,)


def test_a_pickle_runs_no_code(tmp_path):
    files.cifar10_pickles(tmp_path)
    trap = tmp_path / "trap"
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": _Runs(str(trap))}))
    with pytest.raises(settings.UsageError, match="data_batch_1 is no CIFAR pickle"):
        image_data.load("cifar10", str(tmp_path), (32, 32, 3))
    assert not trap.exists()


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_stand_ins_have_the_shape_asked_for(name):
    found = image_data.load(name, None, (32, 32, 3))
    assert found.train[0].shape[1:] == (32, 32, 3)
    assert found.public
    assert set(found.train[1]) == set(found.test[1]) == set(range(10))
    assert found.train[0].max() > 200


def test_subset_is_stratified_and_repeatable():
    labels = np.repeat(np.arange(5), [100, 50, 20, 9, 1])
    chosen = image_data.stratified_subset(labels, 0.1, 42)
    assert np.bincount(labels[chosen]).tolist() == [10, 5, 2, 1, 1]
    again = image_data.stratified_subset(labels, 0.1, 42)
    np.testing.assert_array_equal(chosen, again)
