"""Damaged and hostile data files: an error that names the file, or data; never code."""

from __future__ import annotations

import gzip
import io
import pathlib
import pickle
import sqlite3
import struct
import tempfile
import time
import tracemalloc
import zipfile

import numpy as np
import pytest

from driver_kit import settings
from keras_examples import (
    checkpoints,
    cifar_pickles,
    features,
    image_data,
    optimal_clip,
)
from tests.faults.damage import Trap, damaged
from tests.keras_examples import image_files
from tests.tff_tasks import fixtures
from tfdpclip import sampling
from tfdpclip.accounting import Ledger
from tff_tasks import vocabulary
from tff_tasks.client_files import DataFileError, Feature, FederatedFile


def check_each_damage(path: pathlib.Path, read, error, count=80, named=None):
    """Reads a file with every damage; returns the contents that were not refused."""
    content, accepted, refused = path.read_bytes(), [], 0
    for changed in damaged(content, count):
        path.write_bytes(changed)
        try:
            accepted.append(read())
        except error as caught:
            assert (named or path.name) in str(caught), caught
            refused += 1
    path.write_bytes(content)
    read()
    # The files cut short, at least.
    assert refused >= 5
    path.unlink()
    path.mkdir()
    with pytest.raises(error, match=path.name):
        read()
    return accepted


IMAGES = {
    "idx": (lambda d: image_files.mnist_idx(d), "train-images-idx3-ubyte"),
    "idx_labels": (lambda d: image_files.mnist_idx(d), "t10k-labels-idx1-ubyte"),
    "idx_gz": (lambda d: image_files.mnist_idx(d, 20, ".gz"), "train-labels*.gz"),
    "npz": (lambda d: image_files.mnist_npz(d, 20), "mnist.npz"),
    "cifar10": (lambda d: image_files.cifar10_pickles(d), "*/test_batch"),
    "cifar10_bin": (lambda d: image_files.cifar10_binary(d), "*/test_batch.bin"),
    "cifar100": (lambda d: image_files.cifar100_pickles(d), "*/train"),
    "cifar100_bin": (lambda d: image_files.cifar100_binary(d), "*/train.bin"),
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("kind", IMAGES)
def test_damaged_images_are_refused_or_images(kind, tmp_path):
    write, name = IMAGES[kind]
    write(tmp_path)
    (path,) = tmp_path.glob(name) if "*" in name else [tmp_path / name]
    dataset = "mnist" if kind[0] in "in" else kind.removesuffix("_bin")

    def read():
        try:
            return image_data.load(dataset, str(tmp_path), (1, 1, 1))
        except settings.UsageError as error:
            # Where the contents of several files do not fit, the data set is named.
            text = str(error).lower().replace("-", "")
            assert dataset in text or path.name in text or str(tmp_path) in str(error)
            raise settings.UsageError(f"{path.name}: {error}") from error

    for images in check_each_damage(path, read, settings.UsageError):
        for x, y in (images.train, images.test):
            assert x.dtype == np.uint8 and x.ndim == 4 and len(x) == len(y) > 0
            assert y.dtype == np.int32 and 0 <= y.min() <= y.max() < images.classes


def test_sizes_that_no_file_has_are_not_believed(tmp_path):
    image_files.mnist_idx(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    content = path.read_bytes()
    for shape in ((2**32 - 1,) * 3, (2**31, 28, 28), (64, 2**32 - 1, 2**32 - 1)):
        path.write_bytes(content[:4] + struct.pack(">3I", *shape) + content[16:])
        started = time.monotonic()
        with pytest.raises(settings.UsageError, match="train-images.*header says"):
            image_data.load_mnist(tmp_path)
        assert time.monotonic() - started < 2


def test_a_compressed_file_is_not_unpacked_further_than_its_header_says(tmp_path):
    image_files.mnist_idx(tmp_path, 20, ".gz")
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    header = struct.pack(">2I", 2049, 20)
    path.write_bytes(gzip.compress(header + bytes(200_000_000), 1))
    started = time.process_time()
    with pytest.raises(settings.UsageError, match="train-labels.*cut or damaged"):
        image_data.load_mnist(tmp_path)
    assert time.process_time() - started < 0.2


def _ops(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


_U1 = b"cnumpy\ndtype\n" + _text("u1") + b"K\x00K\x01\x87R"
_MAKE = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"


def hostile(trap) -> dict[str, bytes]:
    """Pickles that run code, or ask for more memory than there is."""
    made = {
        f"protocol {p}": pickle.dumps({b"data": Trap(trap)}, protocol=p)
        for p in range(6)
    }
    command = f"mkdir {trap}"
    return made | {
        "in a list": pickle.dumps({b"data": [[{b"x": (1, Trap(trap))}]]}, 2),
        "as a key": _ops(b"}", b"cos\nmkdir\n", _text(str(trap)), b"\x85RK\x01s"),
        "inst": _ops(b"(", _text(command), b"ios\nsystem\n"),
        "obj": _ops(b"(cos\nsystem\n", _text(command), b"o"),
        "newobj": _ops(b"cos\nsystem\n", _text(command), b"\x85\x81"),
        "builtins": _ops(
            b"c__builtin__\neval\n", _text(f"__import__('os').mkdir({str(trap)!r})"),
            b"\x85R",
        ),
        "stack global": _ops(_text("os"), _text("mkdir"), b"\x93", _text(str(trap)),
                             b"\x85R"),
        "dotted": _ops(_text("numpy"), _text("os.mkdir"), b"\x93", _text(str(trap)),
                       b"\x85R"),
        "through numpy": _ops(b"cnumpy\nload\n", _text(str(trap)), b"\x85R"),
        "encode": _ops(b"c_codecs\nencode\n", _text("x"), _text("rot13"), b"\x86R"),
        "persistent": _ops(b"Ptrap\n"),
        "extension": _ops(b"\x82\x01"),
        "state of a function": _ops(
            b"cnumpy.core.multiarray\n_reconstruct\n}", _text("x"), b"K\x01sb"
        ),
        "memo": _ops(b"Nr" + struct.pack("<I", 2**24)),
        "largest memo": _ops(b"Nr" + struct.pack("<I", 2**31 - 1)),
        "memo as text": _ops(b"Np99999999999\n"),
        "bytes": _ops(b"\x8e" + struct.pack("<Q", 2**62)),
        "string": _ops(b"T" + struct.pack("<i", 2**31 - 1)),
        "negative": _ops(b"T" + struct.pack("<i", -5)),
        "long": _ops(b"\x8b" + struct.pack("<i", 2**31 - 1)),
        "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
        "shape": _ops(
            b"}", _text("data"), _MAKE, b"(K\x01\x8a\x06", bytes([0, 0, 0, 0, 0, 1]),
            b"\x85", _U1, b"\x89C\x04abcdtbs",
        ),
        "objects": pickle.dumps({b"data": np.array([[1], None], object)}, 2),
        "nested": _ops(b"(" * 100_000 + b"t" * 100_000),
        "deep": _ops(b"]" * 100_000 + b"a" * 99_999),
        "no dictionary": pickle.dumps([1, 2], 2),
        "no dictionary but an array": pickle.dumps(np.zeros(3, np.uint8), 2),
    }  # fmt: skip


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", hostile("x"))
def test_hostile_pickles_do_nothing(kind, tmp_path):
    image_files.cifar10_pickles(tmp_path)
    trap = tmp_path / "trap"
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(hostile(trap)[kind])
    started = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(settings.UsageError, match="data_batch_2 is no CIFAR pick"):
            image_data.load_cifar10(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not trap.exists()
    # Small files that ask for much memory do not get it.
    assert peak < 60_000_000
    assert time.monotonic() - started < 30


def test_the_traps_work(tmp_path):
    """They would spring if pickles were read as they usually are."""
    pickle.loads(hostile(tmp_path / "trap")["in a list"])
    assert (tmp_path / "trap").exists()
    pickle.loads(hostile(tmp_path / "other")["stack global"])
    assert (tmp_path / "other").exists()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("dtype", ["u1", "<i8", ">i4"])
def test_pickled_arrays_come_back(protocol, dtype, tmp_path):
    given = {
        b"data": np.arange(12).astype(dtype).reshape(3, 4),
        b"turned": np.asfortranarray(np.arange(6, dtype=dtype).reshape(2, 3)),
        b"labels": [1, 2, 3],
        b"empty": b"",
        b"names": [b"a.png", "b", None, True, -1, 2**40, 0.5],
    }
    path = tmp_path / "x"
    path.write_bytes(pickle.dumps(given, protocol))
    if protocol == 5:
        with pytest.raises(cifar_pickles.PickleError):
            cifar_pickles.load(path)  # Written otherwise; no published file is.
        return
    found = cifar_pickles.load(path)
    assert found.keys() == given.keys() and found[b"labels"] == [1, 2, 3]
    assert found[b"names"] == given[b"names"] and found[b"empty"] == b""
    for name in (b"data", b"turned"):
        np.testing.assert_array_equal(found[name], given[name])


def test_labels_that_are_no_integers_are_refused(tmp_path):
    image_files.cifar10_pickles(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    good = pickle.loads(path.read_bytes())
    for labels in ([0.5] * 20, [None] * 20, [[1]] * 20, 3, b"x" * 20, [2**70] * 20):
        path.write_bytes(pickle.dumps({**good, b"labels": labels}, 2))
        with pytest.raises(settings.UsageError, match="data_batch_1|CIFAR-10"):
            image_data.load_cifar10(tmp_path)
    for data in (np.zeros((20, 3072)), np.zeros((20, 3071), np.uint8), b"x", None):
        path.write_bytes(pickle.dumps({**good, b"data": data}, 2))
        with pytest.raises(settings.UsageError, match="data_batch_1"):
            image_data.load_cifar10(tmp_path)


# NPZ files of features, gradients, pre-trained weights.


def with_history():
    """The arrays of a file of features, with the history of its network."""
    arrays = {
        "features": np.ones((4, 2), np.float32),
        "labels": np.array([0, 1, 0, 1]),
        "split": np.array(["train", "train", "test", "test"]),
    }
    ledger = Ledger(1e-5)
    ledger.begin(noise_multiplier=1.0, sampling=sampling.Poisson(0.5))
    ledger.record(7)
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "f.npz")
        features.write(path, arrays, features.History("net", ledger))
        return dict(np.load(path))


NPZ = {
    "features": (with_history(), features.read),
    "gradients": ({"gradients": np.ones((4, 3))}, optimal_clip.read_gradients),
    "checkpoint": ({"a/b": np.ones(3), "c": np.zeros((2, 2))}, checkpoints.read),
}


@pytest.mark.parametrize("kind", NPZ)
def test_damaged_npz_files_are_refused_or_right(kind, tmp_path):
    arrays, read = NPZ[kind]
    path = tmp_path / "x.npz"
    np.savez(path, **arrays)
    accepted = check_each_damage(
        path, lambda: read(str(path)), settings.UsageError, count=200
    )
    if kind == "features":  # Accepted files keep the history of steps.
        assert all(found.ledger(1e-5).steps == 7 for found in accepted)


@pytest.mark.parametrize("kind", NPZ)
def test_objects_in_npz_files_run_nothing(kind, tmp_path):
    arrays, read = NPZ[kind]
    path, trap = tmp_path / "x.npz", tmp_path / "trap"
    name = next(iter(arrays))
    np.savez(path, **{**arrays, name: np.array([Trap(trap)], object)})
    with pytest.raises(settings.UsageError, match="x.npz.*Python objects"):
        read(str(path))
    assert not trap.exists()


@pytest.mark.parametrize("kind", NPZ)
def test_missing_and_wrong_arrays_are_named(kind, tmp_path):
    arrays, read = NPZ[kind]
    path = tmp_path / "x.npz"
    with pytest.raises(settings.UsageError, match="x.npz"):
        read(str(path))
    if kind == "checkpoint":
        return  # Its caller compares it with the network.
    for name in arrays:
        np.savez(path, **{k: v for k, v in arrays.items() if k != name})
        with pytest.raises(settings.UsageError, match=f"x.npz.*{name}"):
            read(str(path))
        for wrong in (np.array(1.0), np.array(["x"]), np.full((4, 3, 2), np.nan)):
            np.savez(path, **{**arrays, name: wrong})
            with pytest.raises(settings.UsageError, match=f"x.npz.*{name}"):
                read(str(path))


# SQLite files of federated data.

FEATURES = {"pixels": Feature("float", (4,)), "label": Feature("int")}


def sqlite_file(path):
    def one(k):
        return fixtures.example(pixels=np.full(4, k / 8, np.float32), label=k)

    clients = {f"c{i}": [one(k) for k in range(i + 2)] for i in range(4)}
    return fixtures.write_file(path, {"train": clients, "test": clients})


def read_all(path):
    file = FederatedFile(path)
    try:
        return {
            (split, client): file.read(split, client, FEATURES)
            for split in file.splits()
            for client in file.clients(split)
        }
    finally:
        file.close()


@pytest.mark.slow
def test_damaged_sqlite_files_are_refused_or_read(tmp_path):
    path = sqlite_file(tmp_path / "x.sqlite")
    for found in check_each_damage(path, lambda: read_all(path), DataFileError, 300):
        for arrays in found.values():
            assert arrays["pixels"].dtype == np.float32
            assert arrays["pixels"].shape[1:] == (4,)
            assert arrays["label"].dtype == np.int64


@pytest.mark.parametrize(
    "count", ["NULL", "'many'", "-1", "0", "1e300", "9223372036854775807", "x'00'"]
)
def test_counts_that_are_none_are_refused(count, tmp_path):
    path = sqlite_file(tmp_path / "x.sqlite")
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE client_metadata")
    connection.execute(
        "CREATE TABLE client_metadata (client_id, split_name, num_examples)"
    )
    for _ in range(2):
        connection.execute(
            f"INSERT INTO client_metadata VALUES ('c0', 'train', {count})"
        )
    connection.commit()
    connection.close()
    with pytest.raises(DataFileError, match="x.sqlite"):
        FederatedFile(path).clients("train")


def test_views_of_a_file_cannot_call_functions_that_act(tmp_path):
    path = sqlite_file(tmp_path / "x.sqlite")
    connection = sqlite3.connect(path)
    connection.execute("ALTER TABLE client_metadata RENAME TO real")
    connection.execute(
        "CREATE VIEW client_metadata AS SELECT client_id, split_name, "
        "load_extension('trap') AS num_examples FROM real"
    )
    connection.commit()
    connection.close()
    with pytest.raises(DataFileError, match="x.sqlite.*(unsafe|not authorized)"):
        FederatedFile(path).clients("train")


def test_a_file_is_not_written_to(tmp_path):
    path = sqlite_file(tmp_path / "x.sqlite")
    before = path.read_bytes()
    file = FederatedFile(path)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        file._connection.execute("DELETE FROM examples")
    file.close()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.sqlite"]


# Vocabularies.


@pytest.mark.parametrize("name", [vocabulary.WORD_FILE, vocabulary.TAG_FILE])
def test_damaged_vocabularies_are_refused_or_words(name, tmp_path):
    path = tmp_path / name
    if name == vocabulary.WORD_FILE:
        path.write_text("".join(f"word{i} {100 - i}\n" for i in range(30)))
        load = vocabulary.load_words
    else:
        tags = ", ".join(f'"tag{i}": {100 - i}' for i in range(30))
        path.write_text("{" + tags + "}")
        load = vocabulary.load_tags
    for found in check_each_damage(
        path, lambda: load(tmp_path, 20), DataFileError, 200
    ):
        assert len(set(found)) == 20 and all(isinstance(w, str) for w in found)


def test_a_zip_is_no_checkpoint_because_of_its_name(tmp_path):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("../../escaped.npy", b"x")
    path = tmp_path / "x.npz"
    path.write_bytes(content.getvalue())
    with pytest.raises(settings.UsageError, match="x.npz"):
        checkpoints.read(str(path))
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]
