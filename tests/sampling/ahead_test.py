"""Records of pipelines are fetched together and ahead, with unchanged results."""

import collections
import gc
import os
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.source_tree import ROOT
from tfdpclip import sampling
from tfdpclip.sampling import fetching, sources

RECORDS = 60
X = np.arange(1, RECORDS + 1, dtype=np.float32)[:, None] * [1.0, 10.0]
X = X.astype(np.float32)
Y = np.arange(1, RECORDS + 1)
AUTOTUNE = tf.data.AUTOTUNE


def slices():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def files_in(folder):
    """The records as files, and a pipeline that reads them."""
    paths = [str(folder / f"{i}") for i in range(RECORDS)]
    for path, row in zip(paths, X, strict=True):
        tf.io.write_file(path, tf.io.serialize_tensor(row))

    def read(path, label):
        row = tf.io.parse_tensor(tf.io.read_file(path), tf.float32)
        return tf.ensure_shape(row, [2]), label

    return paths, tf.data.Dataset.from_tensor_slices((paths, Y)).map(read, AUTOTUNE)


PIPELINES = {
    "slices": slices,
    "map": lambda: slices().map(lambda x, y: (x / 2, y)),
    "maps": lambda: (
        slices().map(lambda x, y: (x, y), AUTOTUNE).map(lambda x, y: (x[:1], y + 1), 2)
    ),
    "parts": lambda: slices().skip(7).take(40).shard(3, 1).map(lambda x, y: (x, y)),
    "options": lambda: slices().prefetch(2).with_options(tf.data.Options()),
    "zip": lambda: tf.data.Dataset.zip(
        (slices().map(lambda x, y: x), {"a": slices().map(lambda x, y: y)})
    ),
    "range": lambda: tf.data.Dataset.range(3, 60, 4).map(lambda i: tf.cast(i, "int32")),
    "lookup": lambda: tf.data.Dataset.range(60).map(lambda i: (tf.gather(X, i), i)),
    "dict": lambda: slices().map(lambda x, y: ({"b": x, "a": y}, (y, x))),
    "float64": lambda: slices().map(lambda x, y: tf.cast(x, tf.float64)),
    "strings": lambda: slices().map(lambda x, y: (tf.strings.as_string(x), y)),
    "a weight": lambda: slices().map(lambda x, y: (x, y, tf.cast(y, tf.float32))),
    "branches": lambda: slices().map(
        lambda x, y: (tf.cond(y % 2 == 0, lambda: x, lambda: -x), y)
    ),
    "loops": lambda: slices().map(
        lambda x, y: (x, tf.while_loop(lambda i: i < 70, lambda i: [i + y], [y])[0])
    ),
    "unknown shape": lambda: slices().map(lambda x, y: (tf.boolean_mask(x, x > 0), y)),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("more", [0, 3])
def test_records_fetched_together_are_those_fetched_one_by_one(name, more):
    pipeline = PIPELINES[name]()
    source = sources.open_source(pipeline)
    assert type(source) is sources.StackedRecords
    indices = np.random.default_rng(0).permutation(source.size)[:9]
    source._read = None  # Only `take` may read.
    found = source.take(indices, len(indices) + more)
    single = sources.open_source(pipeline)
    wanted = sources.Records.take(single, indices, len(indices) + more)
    tf.nest.assert_same_structure(found, wanted)
    for ours, other in zip(
        tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True
    ):
        assert ours.dtype == other.dtype
        np.testing.assert_array_equal(ours, other)


def random(x, y):
    return x + tf.random.uniform([2]), y


@pytest.mark.parametrize(
    "pipeline, together",
    [
        (lambda: slices().map(random, AUTOTUNE), True),
        (lambda: slices().map(random), False),
        (lambda: slices().cache(), False),
        (lambda: slices().concatenate(slices()), False),
    ],
    ids=["told", "not told", "cache", "concatenate"],
)
def test_what_must_be_read_in_order_is_fetched_one_by_one(pipeline, together):
    source = sources.open_source(pipeline())
    assert (type(source) is sources.StackedRecords) == together
    assert source.threads == (2 if together else 0)
    np.testing.assert_array_equal(source.take(np.array([3, 1]), 2)[1], [4, 2])


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="tf.data.experimental.at needs two"
)
def test_python_that_waits_for_tensorflow_gets_its_thread():
    """If all threads hold a slot and wait for a free slot, they wait for ever."""

    @tf.function
    def inner(x):
        return tf.map_fn(tf.math.square, x)

    def through_python(x, y):
        return tf.ensure_shape(tf.py_function(inner, [x], tf.float32), [2]), y

    batches = sampling.FullBatch().batches(slices().map(through_python, AUTOTUNE))
    for x, _, _ in batches.repeat().take(3):
        np.testing.assert_array_equal(x, X**2)


def schemes():
    return {
        "poisson": sampling.Poisson(0.1),
        "fixed": sampling.FixedSize(7, RECORDS),
        "shuffled": sampling.ShuffledEpochs(7, RECORDS),
        "full": sampling.FullBatch(),
        "separated": sampling.MinSeparation(RECORDS, 6, participations=2),
        "cyclic": sampling.CyclicPoisson(RECORDS, 0.1, 5),
    }


def drawn(batches, looks):
    """The elements of iterators that are dropped after `looks` elements."""
    found = []
    for look in looks:
        for element in batches.take(look):
            found.append([part.numpy() for part in element])
    return found


@pytest.mark.thinned(8)
@pytest.mark.parametrize("name", schemes())
@pytest.mark.parametrize("pieces", [1, 2])
def test_fetching_ahead_changes_no_element_of_any_iterator(name, pieces):
    looks = [2 * pieces, 4 * pieces, pieces, 13 * pieces]
    options = {"seed": 3, "accumulation_steps": pieces, "steps": 20}
    found = []
    for data in ((X, Y), slices()):
        batches = schemes()[name].batches(data, **options)
        found.append(drawn(batches, looks))
        assert batches._drawer.steps_drawn() == 20
        assert batches._drawer.delivered == 20 * pieces
    for ours, other in zip(*found, strict=True):
        for mine, wanted in zip(ours, other, strict=True):
            np.testing.assert_array_equal(mine, wanted)


def test_an_order_has_its_last_step_and_no_more():
    scheme = sampling.MinSeparation(RECORDS, 30, participations=2)
    batches = scheme.batches(slices(), steps=5)
    stream = iter(batches)
    assert len([next(stream) for _ in range(4)]) == 4
    with pytest.raises(Exception, match="would have a record more than"):
        next(stream)


def test_two_elements_are_fetched_ahead_and_counted_when_they_are_taken():
    batches = sampling.ShuffledEpochs(6, RECORDS).batches(
        slices(), accumulation_steps=2
    )
    drawer, read = batches._drawer, []
    take = drawer.source.take
    drawer.source.take = lambda indices, rows: (
        read.append(indices.tolist()) or take(indices, rows)
    )
    stream = iter(batches)
    for taken in (1, 2, 3):
        next(stream)
        deadline = time.time() + 20
        while len(read) < taken + 2 and time.time() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(read) == taken + 2
        assert (drawer.position, drawer.delivered) == (taken, taken)
    assert len(set(sum(read, []))) == 5 * 3


def test_what_is_ahead_has_a_limit_in_bytes(monkeypatch):
    assert sampling.Poisson(0.5).batches(slices())._drawer._fetcher.elements == 2
    monkeypatch.setattr(fetching, "BYTES", 70 * (2 * 4 + 8))
    assert sampling.FullBatch().batches(slices())._drawer._fetcher.elements == 1
    monkeypatch.setattr(fetching, "BYTES", 50 * (2 * 4 + 8))
    batches = sampling.FullBatch().batches(slices())
    assert batches._drawer._fetcher.elements == 0
    np.testing.assert_array_equal(next(iter(batches))[0], X)


def test_a_record_that_cannot_be_read_is_neither_named_nor_skipped(tmp_path):
    paths, pipeline = files_in(tmp_path)
    scheme = sampling.ShuffledEpochs(6, RECORDS)
    batches = scheme.batches(pipeline, seed=1)
    wanted = [row[0] for row in drawn(scheme.batches((X, Y), seed=1), [10])]
    place = next(i for i, rows in enumerate(wanted) if 18 in rows[:, 0])
    tf.io.gfile.rename(paths[17], paths[17] + ".away")
    stream = iter(batches)
    for rows in wanted[:place]:
        np.testing.assert_array_equal(next(stream)[0], rows)
    for _ in range(2):
        with pytest.raises(Exception, match="could not be read .NotFound") as found:
            next(stream)
        assert not re.search(r"record 17|17\.|could not be read: ", str(found.value))
        assert batches._drawer.steps_drawn() == batches._drawer.delivered == place
        stream = iter(batches)
    tf.io.gfile.rename(paths[17] + ".away", paths[17])
    for rows in wanted[place:]:
        np.testing.assert_array_equal(next(stream)[0], rows)


def test_records_of_a_pipeline_must_have_one_shape():
    pipeline = slices().map(lambda x, y: (tf.repeat(x, 1 + y // 45), y))
    with pytest.raises(ValueError, match=r"record \d+ is unlike.*x has the shape .4,."):
        sources.open_source(pipeline)


@pytest.mark.parametrize("indices", [[2, 45], [45, 46]])
def test_a_record_of_another_shape_that_is_drawn_counts_for_nothing(
    indices, monkeypatch
):
    monkeypatch.setattr(sources, "LOOK_SECONDS", 1e-9)
    pipeline = slices().map(lambda x, y: (tf.repeat(x, 1 + y // 45), y))
    source = sources.open_source(pipeline)
    assert type(source) is sources.StackedRecords
    parts = source.take(np.array(indices), 3)
    weights = source.weights(parts, np.array(indices), 3)
    np.testing.assert_array_equal(weights, [indices[0] == 2, False, False])


def test_draws_of_another_order_are_not_what_was_fetched_before():
    scheme = sampling.ShuffledEpochs(6, RECORDS)
    other, batches = (scheme.batches(slices()) for _ in range(2))
    drawn(other, [1])
    (first,) = drawn(scheme.batches((X, Y), seed=0), [1])
    drawn(batches, [1])
    batches._drawer.continue_order(other._drawer.order, 0)
    ours, wanted = drawn(batches, [9]), drawn(other, [9])
    assert not np.array_equal(ours[0][0], first[0])
    for mine, theirs in zip(ours, wanted, strict=True):
        np.testing.assert_array_equal(mine[0], theirs[0])


def test_rows_are_those_that_were_asked_for_last():
    batches = sampling.Poisson(0.1).batches(slices(), seed=0)
    for as_drawn in (False, True, False, True):
        batches.take_as_drawn(as_drawn)
        for _, _, weights in batches.take(3):
            rows = max(1, int(np.sum(weights))) if as_drawn else batches._drawer.rows
            assert len(weights) == rows


class Files:
    """Records that are read singly, and count simultaneous reads."""

    def __init__(self):
        self.under_way, self.most, self.broken = 0, 0, None
        self._lock = threading.Lock()

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        with self._lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        time.sleep(0.002)
        with self._lock:
            self.under_way -= 1
        if index == self.broken:
            raise OSError("gone")
        return X[index], Y[index]


class Several(Files):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __getitems__(self, indices):
        self.calls.append(indices)
        if self.broken in indices:
            raise OSError("which?")
        return [(X[i], Y[i]) for i in indices]


@pytest.mark.parametrize("workers", [None, 1, 4])
def test_objects_are_called_by_one_thread_unless_they_are_said_to_bear_more(workers):
    files, scheme = Files(), sampling.ShuffledEpochs(6, RECORDS)
    found = drawn(scheme.batches(files, seed=1, workers=workers), [10])
    assert (files.most > 1) == (workers == 4)
    wanted = drawn(scheme.batches((X, Y), seed=1), [10])
    for ours, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours[0], other[0])
        np.testing.assert_array_equal(ours[1], other[1])


@pytest.mark.parametrize("kind, workers", [(Files, 4), (Several, 1), (Several, 4)])
def test_a_record_that_one_of_several_threads_cannot_read_is_not_named(kind, workers):
    files = kind()
    batches = sampling.FullBatch().batches(files, workers=workers)
    files.broken = 17
    with pytest.raises(Exception, match="could not be read .OSError") as found:
        next(iter(batches))
    assert not re.search("record 17|gone", str(found.value))
    assert batches._drawer.steps_drawn() == 0
    files.broken = None
    np.testing.assert_array_equal(next(iter(batches))[0], X)


def test_what_fetches_several_records_is_asked_for_all_of_an_element():
    files = Several()
    x, y, _ = next(iter(sampling.FullBatch().batches(files)))
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    assert files.calls[-1] == list(range(RECORDS))
    Several.__getitems__, kept = lambda self, indices: [(X[0], 1)], Several.__getitems__
    try:
        with pytest.raises(Exception, match="gave 1 records for [0-9]+ indices"):
            next(iter(sampling.FullBatch().batches(Several())))
    finally:
        Several.__getitems__ = kept


@pytest.mark.parametrize("data", [(X, Y), slices(), slices().cache()], ids=str)
def test_workers_of_what_needs_none_are_refused(data):
    with pytest.raises(ValueError, match="workers is for objects with __getitem__"):
        sampling.Poisson(0.1).batches(data, workers=2)
    with pytest.raises(ValueError, match="workers"):
        sampling.Poisson(0.1).batches(Files(), workers=0)


@pytest.mark.parametrize("data, more", [(slices, {}), (Files, {"workers": 4})])
@pytest.mark.slow
def test_threads_end_with_the_batches_that_had_them(data, more):
    def look():
        batches = sampling.Poisson(0.1).batches(data(), **more)
        collections.deque(batches.take(2), maxlen=0)
        next(iter(batches))

    def threads():
        gc.collect()
        return [t for t in threading.enumerate() if t.name.startswith("records")]

    before = len(threads())
    for _ in range(20):
        look()
    deadline = time.time() + 20
    while len(threads()) > before and time.time() < deadline:
        time.sleep(0.1)
    assert len(threads()) <= before


@pytest.mark.slow
def test_a_program_that_stops_in_the_middle_ends():
    program = """
import numpy as np, tensorflow as tf
from tfdpclip import sampling
data = tf.data.Dataset.range(100).map(
    lambda i: tf.gather(tf.random.normal([100, 9]), i), tf.data.AUTOTUNE)
streams = [iter(sampling.Poisson(0.5).batches(data).repeat()) for _ in range(3)]
for stream in streams:
    next(stream)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120)
    assert done.returncode == 0
