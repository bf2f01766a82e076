"""Damaged files of runs are found and named: checkpoints, tables, settings."""

from __future__ import annotations

import io
import json
import math
import os
import pathlib
import shutil
import struct
import time
import zipfile

import numpy as np
import pytest
import tensorflow as tf

from driver_kit import npz_files, reports
from tests.faults.damage import Trap, damaged, refused_or, truncations
from tests.faults.disk_test import federated
from tests.stack import KERAS_3
from tfdpclip import files, sampling
from tfdpclip.accounting import Ledger
from tfdpclip.keras import DPSGD, PrivacyBudget
from tfdpclip.tuning import Grid, RandomStopping, TrainingPlan, _table, run_grid
from tff_tasks import program, records, studies

DELTA = 1e-5


# Checkpoints of federated runs.

ARRAYS = [
    np.arange(12, dtype=np.float32).reshape(3, 4),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(0.25, np.float32),
    np.zeros((0, 5), np.int32),
]


def same(found, expected):
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_damaged_checkpoint_is_refused_or_right(tmp_path):
    checkpoints = records.Checkpoints(tmp_path)
    checkpoints.save(2, ARRAYS)
    checkpoints.save(4, ARRAYS)
    assert same(checkpoints.load(4, ARRAYS), ARRAYS)
    path = tmp_path / "round_000004.npz"
    content, refused = path.read_bytes(), 0
    for changed in damaged(content, 400):
        path.write_bytes(changed)
        found = refused_or(
            lambda: checkpoints.load(4, ARRAYS),
            path,
            records.RunFileError,
            needed="Delete it to continue from round 2",
        )
        assert found is None or same(found, ARRAYS)
        refused += found is None
    assert refused > 100


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a[:3], "3 arrays, not the 4"),
        (lambda a: [*a, a[0]], "5 arrays, not the 4"),
        (lambda a: [a[0].T, *a[1:]], r"part_0000 is \(4, 3\)"),
        (lambda a: [a[0].astype(np.float64), *a[1:]], "of float64, not"),
    ],
)
def test_a_checkpoint_of_another_network_is_refused(change, message, tmp_path):
    checkpoints = records.Checkpoints(tmp_path)
    checkpoints.save(2, change(ARRAYS))
    with pytest.raises(records.RunFileError, match=message):
        checkpoints.load(2, ARRAYS)


def npz(path, members, **options):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content, **options)


def npy(shape, descr="'<f4'", data=b"", version=b"\x01\x00"):
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n"
    size = struct.pack("<H", len(header))
    return b"\x93NUMPY" + version + size + header.encode() + data


@pytest.mark.parametrize(
    "content",
    [
        npy("(1000000000000,)", data=b"1234"),
        npy("(4294967296, 4294967296)", data=b""),
        npy("(-1, -1)", data=b"1234"),
        npy("(1.5,)", data=b"1234"),
        npy("(True,)", data=b"1234"),
        npy("(2,)", data=b"1234"),
        npy("(1,)", data=b"12345678"),
        npy("(1,)", "'O'", data=b"12345678"),
        npy("(1,)", "[('a', 'O')]", data=b"12345678"),
        npy("(1,)", "'<f99'", data=b"1234"),
        npy("(1,)", "'f4' if 1 else 2", data=b"1234"),
        npy("__import__('os').getcwd()", data=b"1234"),
        npy("(" * 5000, data=b"1234"),
        npy("(1,)", data=b"1234", version=b"\x09\x00"),
        b"",
        b"\x93NUMPY",
        b"\x80\x04N.",
    ],
    ids=lambda content: f"{len(content)} bytes",
)
def test_sizes_and_types_are_checked_before_anything_is_made(content, tmp_path):
    path = tmp_path / "x.npz"
    npz(path, {"a.npy": content})
    started = time.monotonic()
    with pytest.raises(ValueError, match="x.npz is cut or damaged"):
        npz_files.read_npz(path)
    assert time.monotonic() - started < 2


def test_archives_that_unpack_to_too_much_are_refused(tmp_path):
    path = tmp_path / "x.npz"
    data = npy("(50000000,)", "'u1'", bytes(50_000_000))
    npz(path, {"a.npy": data}, compress_type=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    assert npz_files.read_npz(path)["a"].size == 50_000_000
    with pytest.raises(ValueError, match="x.npz .*50000.* bytes, over 1000000"):
        npz_files.read_npz(path, most=1_000_000)
    # A header that claims more than any compression could have made.
    content = path.read_bytes()
    claimed = struct.pack("<I", len(data))
    path.write_bytes(content.replace(claimed, struct.pack("<I", 2**32 - 2)))
    with pytest.raises(ValueError, match="declares more than it can hold"):
        npz_files.read_npz(path)


def test_arrays_of_objects_run_nothing(tmp_path):
    trap = tmp_path / "trap"
    path = tmp_path / "round_000002.npz"
    np.savez(path, part_0000=np.array([Trap(trap)], object))
    with pytest.raises(records.RunFileError, match="round_000002.npz.*Python objects"):
        records.Checkpoints(tmp_path).load(2, [np.zeros(1)])
    assert not trap.exists()
    np.load(path, allow_pickle=True)["part_0000"]
    assert trap.exists()  # numpy itself runs the code.


def test_two_arrays_of_one_name_and_missing_ones(tmp_path):
    path = tmp_path / "x.npz"
    with pytest.warns(UserWarning, match="Duplicate"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.npy", npy("(1,)", data=b"1234"))
            archive.writestr("a.npy", npy("(1,)", data=b"4321"))
    with pytest.raises(ValueError, match="x.npz.*two arrays of one name"):
        npz_files.read_npz(path)
    np.savez(path, a=np.zeros(2))
    with pytest.raises(ValueError, match="x.npz.*lacks b"):
        npz_files.read_npz(path, ["a", "b"])
    assert list(npz_files.read_npz(path, ["a"])) == ["a"]
    with pytest.raises(FileNotFoundError, match="y.npz"):
        npz_files.read_npz(tmp_path / "y.npz")
    with pytest.raises(ValueError, match="is not a regular file"):
        npz_files.read_npz(tmp_path)


@pytest.mark.slow
def test_a_run_says_which_file_is_damaged_and_goes_on_without_it(tmp_path):
    program.run(federated(tmp_path, rounds=3))
    latest = tmp_path / "checkpoints" / "round_000003.npz"
    content = latest.read_bytes()
    latest.write_bytes(content[: len(content) // 2])
    before = Ledger.load(tmp_path / "privacy.json").steps
    with pytest.raises(
        records.RunFileError, match="Delete it to continue from round 2"
    ):
        program.run(federated(tmp_path))
    assert len(records.Table(tmp_path / records.METRICS).rows) == 4
    latest.unlink()
    result = program.run(federated(tmp_path))
    assert [row["round"] for row in result.rows] == [0, 1, 2, 3, 4]
    # Round 3 ran twice and counts twice.
    assert Ledger.load(tmp_path / "privacy.json").steps == before + 2 == 5


# Tables and settings.


def test_a_damaged_table_of_rounds_is_refused_or_a_table(tmp_path):
    """The table has no checksum: a digit may change, but no row may be lost."""
    path = tmp_path / "metrics.csv"
    table = records.Table(path)
    for number in range(12):
        table.add({"round": number, "loss": number / 7, "epsilon": 0.1 * number})
    content = path.read_bytes()
    for changed in damaged(content, 300):
        path.write_bytes(changed)
        found = refused_or(lambda: records.Table(path), path, records.RunFileError)
        assert found is None or len(found.rows) == 12
    for cut in truncations(content):
        path.write_bytes(cut)
        assert refused_or(lambda: records.Table(path), path) is None


def test_damaged_settings_are_refused_or_right(tmp_path):
    path = tmp_path / reports.CONFIG
    given = {"task": "digits", "rounds": 20, "seed": None, "clip": 0.25}
    path.write_text(reports.to_json({"settings": given, "result": {}}))
    content = path.read_bytes()
    for changed in [*damaged(content, 300), b'{"settings": [1]}', b"[" * 10**5]:
        path.write_bytes(changed)
        try:
            assert records.check_same_run(tmp_path, given, frozenset()) is True
        except records.RunMismatchError as error:
            assert str(tmp_path) in str(error)


def test_damaged_tables_of_searches_are_refused_or_tables(tmp_path):
    path = tmp_path / "grid.csv"
    columns = ["clip_norm", "seed"]
    table = _table.Table(path, columns, "accuracy")
    for seed in range(5):
        table.add({"clip_norm": 0.5, "seed": seed}, {"accuracy": 0.9}, "", 1.0)
    content = path.read_bytes()
    for changed in damaged(content, 300):
        path.write_bytes(changed)
        refused_or(lambda: _table.Table(path, columns, "accuracy"), path)
    # A half line is the rest of a copy that broke off; its run is repeated.
    path.write_bytes(content[:-3])
    table = _table.Table(path, columns, "accuracy")
    assert not table.has({"clip_norm": 0.5, "seed": 4})
    table.add({"clip_norm": 0.5, "seed": 4}, {"accuracy": 0.9}, "", 1.0)
    assert path.read_bytes() == content


def test_damaged_draws_are_refused_not_drawn_again(tmp_path):
    path = tmp_path / "grid.csv"

    def search():
        return run_grid(
            Grid([0.1, 1.0], [64], [0.01, 0.1]),
            lambda point: 0.5,
            path=path,
            plan=lambda _: TrainingPlan(sampling.Poisson(0.01), 2.0, 100),
            delta=DELTA,
            search=RandomStopping(2.0),
        )

    search()
    draws = tmp_path / "grid.csv.draws.json"
    content = draws.read_bytes()
    changes = [b'{"search": 1}', b'{"draws": [0]}', b"[]", b'{"draws": [-1]}']
    right = json.loads(content)
    for wrong in ([99], ["a"], [True], {}, None):
        changes.append(json.dumps({**right, "draws": wrong}).encode())
    for changed in [*truncations(content), *changes]:
        draws.write_bytes(changed)
        assert refused_or(search, draws) is None
        assert draws.read_bytes() == changed


def test_damaged_files_of_sweeps_are_refused(tmp_path):
    row = studies.Row("fixed", 0.1, 0.0, 1.0, 0, 0.5, 0.5, 4, "a")
    path = tmp_path / studies.TABLE
    path.write_text(reports.table_text([studies.dataclasses.asdict(row)]))
    assert studies.read_rows(tmp_path) == [row]
    for changed in damaged(path.read_bytes(), 200):
        path.write_bytes(changed)
        refused_or(lambda: studies.read_rows(tmp_path), path, records.RunFileError)
    config = federated(tmp_path)
    path = tmp_path / reports.CONFIG
    path.write_text(reports.to_json({"result": {"rounds": 4, "summary": 0.5}}))
    assert studies.finished(config)["summary"] == 0.5
    for changed in damaged(path.read_bytes(), 200):
        path.write_bytes(changed)
        refused_or(lambda: studies.finished(config), path, records.RunFileError)


# Checkpoints of Keras: TensorFlow reads them. The ledger must not believe them.


@pytest.mark.slow
def test_damaged_keras_backups_cannot_lower_what_was_spent(tmp_path):
    x = np.ones((64, 2), np.float32)
    batches = sampling.Poisson(0.25).batches((x, x[:, :1]))

    def train(epochs):
        model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
        optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=2.0, expected_batch_size=16)
        model.compile(optimizer, "mse")
        ran = []
        path = tmp_path / "privacy.json"
        callbacks = [
            PrivacyBudget(math.inf, DELTA, batches, "rdp", ledger=path),
            tf.keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: ran.append(batch)
            ),
            tf.keras.callbacks.BackupAndRestore(
                str(tmp_path / "backup"), delete_checkpoint=False
            ),
        ]
        try:
            model.fit(batches, epochs=epochs, verbose=0, callbacks=callbacks)
        except Exception as error:  # Of any of TensorFlow's kinds.
            return len(ran), error
        return len(ran), None

    steps = batches.steps_per_epoch
    assert train(2) == (2 * steps, None)
    spent = Ledger.load(tmp_path / "privacy.json").steps
    assert spent == 2 * steps
    (data,) = (tmp_path / "backup").rglob("*.weights.h5" if KERAS_3 else "*.data-*")
    # The epoch, which Keras 2 keeps with the weights.
    epochs = [tmp_path / "backup" / "training_metadata.json"] if KERAS_3 else []
    shutil.copytree(tmp_path / "backup", tmp_path / "good")
    for path in (data, *epochs):
        content = path.read_bytes()
        for changed in (
            content[: len(content) // 2],
            content[:20],
            b"\x00" * len(content),
        ):
            path.write_bytes(changed)
            ran, error = train(3)
            assert error is not None and ran == 0
            assert Ledger.load(tmp_path / "privacy.json").steps == spent
        path.write_bytes(content)
    shutil.rmtree(tmp_path / "backup")
    shutil.move(tmp_path / "good", tmp_path / "backup")
    assert train(3) == (steps, None)
    assert Ledger.load(tmp_path / "privacy.json").steps == 3 * steps
    # Without its backups the run begins anew, and pays for it.
    shutil.rmtree(tmp_path / "backup")
    assert train(1) == (steps, None)
    assert Ledger.load(tmp_path / "privacy.json").steps == 4 * steps


@pytest.mark.parametrize("name", ["model.keras", "model.h5"])
def test_cut_keras_files_do_not_load(name, tmp_path):
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    # Keras 3 does not find "mse" in an HDF5 file of its own.
    model.compile(
        DPSGD(0.1, clip=1.0, noise_multiplier=2.0, expected_batch_size=4),
        tf.keras.losses.MeanSquaredError(),
    )
    path = tmp_path / name
    model.save(path)
    tf.keras.models.load_model(path)
    for cut in truncations(path.read_bytes()):
        path.write_bytes(cut)
        with pytest.raises((OSError, ValueError, zipfile.BadZipFile, KeyError)):
            tf.keras.models.load_model(path)


def test_a_bytes_stream_is_read_as_a_file_is():
    content = io.BytesIO()
    np.savez(content, a=np.arange(3))
    content.seek(5)
    np.testing.assert_array_equal(npz_files.read_npz(content)["a"], [0, 1, 2])
    cut = io.BytesIO(content.getvalue()[:-30])
    with pytest.raises(ValueError, match="the file is cut or damaged"):
        npz_files.read_npz(cut)


def test_pipes_and_devices_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is not a regular file"):
        files.read_bytes(tmp_path / "pipe")
    with pytest.raises(ValueError, match="null is not a regular file"):
        files.read_bytes(pathlib.Path("/dev/null"))
    (tmp_path / "large").write_bytes(b"12345")
    with pytest.raises(ValueError, match="large has 5 bytes, more than the limit of 4"):
        files.read_bytes(tmp_path / "large", most=4)
