"""Data read once an epoch: the draws of random allocation, in bounded memory."""

import errno
import gc
import itertools
import os
import shutil
import stat
import tracemalloc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tests.sampling.numbered import RECORDS, numbered
from tfdpclip import accounting, sampling
from tfdpclip.sampling import distributed, streams
from tfdpclip.sampling.base import DrawKey
from tfdpclip.sampling.grouped_file import GroupedFile

X, Y = numbered()
TEXTS = np.array([f"text {'ü' * (i % 7)}" for i in range(RECORDS)])
# Records of 64 KiB: with the least memory, a group has few of them.
WIDE = np.repeat(X[:, :1], 2**14, axis=1)
LEAST = 2**20
SCHEMES = {
    "whole": sampling.RandomAllocation(6),
    "cut": sampling.RandomAllocation(6, 12, RECORDS),
}


def plain():
    return zip(X, Y, strict=True)


def wide():
    return zip(WIDE, Y, strict=True)


def nested():
    for i in range(RECORDS):
        x = {"b": (X[i], TEXTS[i]), "a": np.uint8(i)}
        yield x, (float(Y[i]), X[i] > 5), np.float32(i % 3)


def pipeline():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def unshaped():
    return tf.data.Dataset.from_generator(plain, output_types=(tf.float32, tf.int64))


NESTED = (
    {"b": (X, TEXTS), "a": np.arange(RECORDS, dtype=np.uint8)},
    (Y.astype(np.float32), X > 5),
    (np.arange(RECORDS) % 3).astype(np.float32),
)
SOURCES = {
    "function": (plain, (X, Y)),
    "generator": (lambda: (pair for pair in plain()), (X, Y)),
    "iterable": (lambda: Again(plain), (X, Y)),
    "pipeline": (pipeline, (X, Y)),
    "pipeline of a function": (lambda: pipeline, (X, Y)),
    "pipeline without shapes": (unshaped, (X, Y)),
    "texts": (nested, NESTED),
    "texts of a function": (lambda: nested, NESTED),
    "wide": (lambda: wide, (WIDE, Y)),
    "wide and read once": (wide, (WIDE, Y)),
    "only x": (lambda: lambda: iter(X), X),
}


class Again:
    """An iterable that counts its passes, and the records that it gave."""

    def __init__(self, read):
        self.read, self.passes, self.given = read, 0, 0

    def __iter__(self):
        self.passes += 1
        for record in self.read():
            self.given += 1
            yield record


def stream_of(data, folder, examples=RECORDS, **options):
    return sampling.Stream(data, examples, folder, **options)


def records_of(batch):
    x, weights = batch[0].numpy(), batch[-1].numpy()
    return [int(row[0]) - 1 for row in x[weights > 0]]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.filterwarnings("ignore:About one")
def test_batches_are_those_of_data_with_an_index(name, scheme, tmp_path):
    make, arrays = SOURCES[name]
    indexed = scheme.batches(arrays, seed=5)
    stream = stream_of(make(), tmp_path, memory=LEAST)
    streamed = scheme.batches(stream, seed=5)
    assert streamed.scheme == indexed.scheme
    assert streamed.element_spec == indexed.element_spec
    for _ in range(3):
        for got, expected in zip(streamed, indexed, strict=True):
            tf.nest.map_structure(np.testing.assert_array_equal, got, expected)


def test_pieces_of_steps_are_those_of_data_with_an_index(tmp_path):
    options = dict(seed=5, accumulation_steps=3, physical_batch_size=8)
    scheme = sampling.RandomAllocation(6)
    indexed = scheme.batches((WIDE, Y), **options)
    streamed = scheme.batches(stream_of(wide, tmp_path, memory=LEAST), **options)
    for got, expected in zip(streamed, indexed, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("once", [False, True])
def test_every_record_comes_once_an_epoch_in_new_steps(once, tmp_path):
    data = iter(Again(plain)) if once else Again(plain)
    batches = sampling.RandomAllocation(6).batches(stream_of(data, tmp_path))
    epochs = [[records_of(batch) for batch in batches] for _ in range(3)]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(RECORDS))
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_stream_is_read_once_an_epoch(tmp_path):
    data = Again(plain)
    batches = sampling.RandomAllocation(6).batches(stream_of(data, tmp_path))
    # The shapes take one record.
    assert (data.passes, data.given) == (1, 1)
    for epoch in (1, 2):
        list(batches)
        assert (data.passes, data.given) == (1 + epoch, 1 + epoch * RECORDS)
    once = Again(plain)
    batches = sampling.RandomAllocation(6).batches(stream_of(iter(once), tmp_path))
    for _ in range(2):
        list(batches)
    assert (once.passes, once.given) == (1, RECORDS)


def test_a_run_of_a_ledger_begins_an_epoch_and_reads_before_a_step_counts(tmp_path):
    data = Again(plain)
    batches = sampling.RandomAllocation(6).batches(stream_of(data, tmp_path))
    ledger = accounting.Ledger(delta=1e-5)
    for run in range(2):
        ledger.begin(noise_multiplier=1.0, sampling=batches)
        assert data.given == 1 + (run + 1) * RECORDS
        assert batches._drawer.steps_drawn() == 6 * run
        for _ in range(4):
            batches._drawer.next_element()
        ledger.record(4)
    short = sampling.RandomAllocation(6).batches(stream_of(plain, tmp_path, 61))
    with pytest.raises(ValueError, match="ended after 60 of 61 records"):
        ledger.begin(noise_multiplier=1.0, sampling=short)
    assert ledger.steps == 8 and not ledger.reserved


WRONG = {
    "fewer": (plain, RECORDS + 1, "ended after 60 of 61"),
    "more": (plain, RECORDS - 1, "goes on after 59"),
    "no end": (lambda: itertools.cycle(plain()), RECORDS, "goes on after 60"),
    "a pipeline that goes on": (
        lambda: pipeline().take(-1).filter(lambda x, y: True),
        RECORDS - 1,
        "goes on after 59",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_number_of_records_stops_before_a_step(name, tmp_path):
    data, examples, match = WRONG[name]
    batches = sampling.RandomAllocation(6).batches(stream_of(data, tmp_path, examples))
    for _ in range(2):
        with pytest.raises(ValueError, match=match):
            batches._drawer.next_element()
    assert batches._drawer.delivered == batches._drawer.steps_drawn() == 0


def test_a_wrong_number_that_shows_at_once_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="ended after 60 of 61"):
        stream_of(pipeline(), tmp_path, 61)
    with pytest.raises(ValueError, match="goes on after 59"):
        stream_of(pipeline(), tmp_path, 59)
    empty = stream_of(lambda: [], tmp_path, 5)
    with pytest.raises(ValueError, match="ended after 0 of 5"):
        sampling.RandomAllocation(6).batches(empty)


def test_a_later_epoch_of_another_size_stops_before_a_step(tmp_path):
    sizes = iter([1, RECORDS, RECORDS - 1])

    def read():
        return itertools.islice(plain(), next(sizes))

    batches = sampling.RandomAllocation(6).batches(stream_of(read, tmp_path))
    for _ in range(6):
        batches._drawer.next_element()
    with pytest.raises(ValueError, match="ended after 59 of 60"):
        batches._drawer.next_element()
    assert batches._drawer.steps_drawn() == 6


def test_an_iterator_is_not_read_twice(tmp_path):
    stream = stream_of(plain(), tmp_path)
    first, second = (sampling.RandomAllocation(6).batches(stream) for _ in range(2))
    list(first)
    with pytest.raises(ValueError, match="read before.*Stream\\(read"):
        second._drawer.next_element()
    list(first)


UNLIKE = {
    "shape": (lambda x, y: (x[:1], y), r"record 7 .*: x has the shape \(1,\), not"),
    "type": (lambda x, y: (x, 0.5), "record 7 .*: y holds float32, not int64"),
    "parts": (lambda x, y: x, "record 7 .*: the record has x, not x, y"),
    "text": (lambda x, y: ("text", y), "record 7 .*: x has the shape"),
    "gap": (lambda x, y: (x, None), "record 7 .*: data: y is None"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_a_record_unlike_the_first_is_named_before_a_step(name, tmp_path):
    change, match = UNLIKE[name]

    def read():
        for i, record in enumerate(plain()):
            yield change(*record) if i == 7 else record

    batches = sampling.RandomAllocation(6).batches(stream_of(read, tmp_path))
    with pytest.raises(ValueError, match=match):
        batches._drawer.next_element()
    assert batches._drawer.delivered == 0


def test_another_kind_of_record_in_a_later_pass_is_refused(tmp_path):
    passes = itertools.count()

    def read():
        return pipeline() if next(passes) < 2 else pipeline().map(lambda x, y: (y, x))

    batches = sampling.RandomAllocation(6).batches(stream_of(read, tmp_path))
    list(batches)
    with pytest.raises(
        ValueError, match=r"record 0 .* unlike the first: x has the shape \(\)"
    ):
        batches._drawer.next_element()


# Pipelines that a stream may have.


def singly(function):
    """A change of a pipeline by `function` of a data set of each single record."""
    return lambda d: d.flat_map(
        lambda x, y: function(tf.data.Dataset.from_tensors((x, y)))
    )


def summed(d):
    return d.scan(tf.zeros(X[0].shape), lambda s, e: (s + e[0], (s + e[0], e[1])))


def even(x, y):
    return y % 2 == 0


REFUSED = {
    "batch": lambda d: d.batch(5),
    "repeat in a function": singly(lambda d: d.repeat(2)),
    "repeat in a function of a function": singly(singly(lambda d: d.repeat(2))),
    "state of earlier records": summed,
    "repeat": lambda d: d.repeat(2).take(60),
    "window": lambda d: d.window(5),
    "repeat before unbatch": lambda d: d.repeat(2).batch(5).unbatch(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_pipeline_whose_elements_may_not_be_records_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="goes through"):
        stream_of(REFUSED[name](pipeline()), tmp_path)


TWICE = {
    "concatenate": lambda d: d.concatenate(d.map(lambda x, y: (-x, y))),
    "concatenate a part": lambda d: d.concatenate(d.filter(even)),
    "zip with the next": lambda d: tf.data.Dataset.zip(
        (d.map(lambda x, y: x), d.skip(1).map(lambda x, y: y))
    ),
    "zip of a shuffle": lambda d: tf.data.Dataset.zip(
        (d.shuffle(9).map(lambda x, y: x), d.map(lambda x, y: y))
    ),
    "sample": lambda d: tf.data.Dataset.sample_from_datasets([d, d.filter(even)]),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_pipeline_that_reads_a_data_set_twice_is_refused(name, tmp_path):
    data = TWICE[name](pipeline())
    size = sum(1 for _ in data)
    with pytest.raises(ValueError, match="reads one data set twice"):
        stream_of(data, tmp_path, size)


def test_batches_within_a_function_are_an_assumption(tmp_path):
    stream = stream_of(singly(lambda d: d.batch(1).unbatch())(pipeline()), tmp_path)
    batches = sampling.RandomAllocation(6).batches(stream)
    assert sorted(sum(map(records_of, batches), [])) == list(range(RECORDS))
    assert "inside of flat_map" in batches.assumptions[1]


def test_a_record_is_copied_before_the_next_is_written_to_its_array(tmp_path):
    def read():
        x, y = np.zeros_like(X[0]), np.zeros((), "int32")
        for i in range(RECORDS):
            x[:], y[...] = X[i], i
            yield {"x": x}, y

    batches = sampling.RandomAllocation(6).batches(stream_of(read, tmp_path))
    for _ in range(2):
        found = [(x["x"].numpy(), w.numpy() > 0) for x, _, w in batches]
        numbers = np.concatenate([x[rows][:, 0] for x, rows in found])
        assert sorted(numbers - 1) == list(range(RECORDS))


def test_a_ragged_pipeline_is_refused_by_name(tmp_path):
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(60), [1] * 59 + [1])
    with pytest.raises(ValueError, match="x of this tf.data.Dataset is ragged"):
        stream_of(tf.data.Dataset.from_tensor_slices((ragged, Y)), tmp_path)
    lengths = tf.data.Dataset.range(60).map(lambda i: (tf.range(i), i))
    batches = sampling.RandomAllocation(6).batches(stream_of(lengths, tmp_path))
    with pytest.raises(ValueError, match=r"record 1 .*: x has the shape \(1,\)"):
        batches._drawer.next_element()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.shuffle(9),
        lambda d: d.filter(lambda x, y: True).prefetch(3),
        lambda d: d.shard(2, 0).concatenate(d.shard(2, 1)),
        lambda d: d.interleave(
            lambda x, y: tf.data.Dataset.from_tensors((x, y)), cycle_length=4
        ),
        lambda d: tf.data.Dataset.sample_from_datasets(
            [d.filter(even), d.filter(lambda x, y: y % 2 == 1)]
        ),
        lambda d: tf.data.Dataset.zip(
            (d.map(lambda x, y: x), d.map(lambda x, y: y).cache())
        ),
    ],
    ids=["shuffle", "filter", "parts", "interleave", "sample", "zip"],
)
def test_pipelines_that_keep_records_single_are_taken(change, tmp_path):
    stream = stream_of(change(pipeline()), tmp_path)
    batches = sampling.RandomAllocation(6).batches(stream)
    assert sorted(sum(map(records_of, batches), [])) == list(range(RECORDS))
    assert batches.assumptions == (streams._ONE_PASS,)


def test_records_of_batches_that_were_taken_apart_are_an_assumption(tmp_path):
    data = pipeline().batch(7).map(lambda x, y: (2 * x - x, y)).unbatch()
    batches = sampling.RandomAllocation(6).batches(stream_of(data, tmp_path))
    assert sorted(sum(map(records_of, batches), [])) == list(range(RECORDS))
    assert "before unbatch() keep the records" in batches.assumptions[1]


def test_batches_that_a_function_took_apart_are_an_assumption_too(tmp_path):
    stream = stream_of(lambda: pipeline().batch(7).unbatch(), tmp_path)
    batches = sampling.RandomAllocation(6).batches(stream)
    assert len(batches.assumptions) == 2


def test_a_later_pass_of_other_types_is_read_as_the_first(tmp_path):
    passes = itertools.count()

    def read():
        wide = tf.float32 if next(passes) < 2 else tf.float16
        return pipeline().map(lambda x, y: (tf.cast(x, wide), y))

    batches = sampling.RandomAllocation(6).batches(stream_of(read, tmp_path))
    for _ in range(2):
        assert sorted(sum(map(records_of, batches), [])) == list(range(RECORDS))


def test_sparse_records_become_dense(tmp_path):
    sparse = tf.sparse.from_dense(X)
    data = tf.data.Dataset.from_tensor_slices((sparse, Y))
    batches = sampling.RandomAllocation(6).batches(stream_of(data, tmp_path))
    for x, y, weights in batches:
        given = weights.numpy() > 0
        np.testing.assert_array_equal(x.numpy()[given], X[y.numpy()[given] - 1])


# Requests that a stream refuses.


@pytest.mark.parametrize(
    "scheme",
    [
        sampling.Poisson(0.1),
        sampling.FixedSize(10, RECORDS),
        sampling.ShuffledEpochs(10, RECORDS),
        sampling.MinSeparation(RECORDS, 10),
        sampling.FullBatch(),
    ],
    ids=lambda scheme: type(scheme).__name__,
)
def test_schemes_that_need_an_index_are_refused(scheme, tmp_path):
    with pytest.raises(ValueError, match="RandomAllocation.*random_allocation"):
        scheme.batches(stream_of(plain, tmp_path))


def test_what_needs_an_index_is_refused(tmp_path):
    scheme, stream = sampling.RandomAllocation(6), stream_of(plain, tmp_path)
    with pytest.raises(ValueError, match="people must be left out for a Stream"):
        scheme.batches(stream, people=np.arange(RECORDS), per_person=1)
    with pytest.raises(ValueError, match="workers must be left out for a Stream"):
        scheme.batches(stream, workers=2)
    with pytest.raises(ValueError, match="read by one machine"):
        distributed._drawer_of_part(scheme.batches(stream), 0, 2)


@pytest.mark.parametrize("data", [(X, Y), {"x": X}, X, [1, 2], "text"])
def test_data_with_an_index_are_no_stream(data, tmp_path):
    with pytest.raises(ValueError, match="access by index"):
        stream_of(data, tmp_path)


def test_bad_settings_are_named(tmp_path):
    with pytest.raises(ValueError, match="must be a function.*got 3"):
        stream_of(3, tmp_path)
    with pytest.raises(ValueError, match="examples must be"):
        stream_of(plain, tmp_path, 0)
    with pytest.raises(ValueError, match="memory must be"):
        stream_of(plain, tmp_path, memory=1000)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="choose another"):
        stream_of(plain, tmp_path / "file")


def test_views_are_copies_of_a_record(tmp_path):
    stream = stream_of(plain, tmp_path)
    batches = sampling.RandomAllocation(6).batches(stream, views=2)
    for x, _, weights in batches:
        pairs = x.numpy()[weights.numpy() > 0].reshape(-1, 2, 2)
        np.testing.assert_array_equal(pairs[:, 0], pairs[:, 1])


# Memory and disk.


def test_records_in_memory_are_few(tmp_path):
    """Of 60 records of 64 KiB, the least memory holds 16."""
    held, most, given = [0], [0], [0]

    class Counted(np.ndarray):
        def __array_finalize__(self, _):
            held[0] += 1
            most[0] = max(most[0], held[0])

        def __del__(self):
            held[0] -= 1

    def read():
        for i in range(RECORDS):
            given[0] += 1
            yield WIDE[i].view(Counted), Y[i]

    stream = stream_of(read, tmp_path, memory=LEAST)
    batches = sampling.RandomAllocation(6).batches(stream)
    list(batches)
    assert given[0] == RECORDS + 1
    # A block has a sixteenth of the memory: one record; a further record is being read.
    assert most[0] <= 3
    source = batches._drawer.source
    assert len(source._file._runs) == 6 and len(source._numbers) < 25


@pytest.mark.parametrize("once", [False, True])
def test_memory_is_bounded(once, tmp_path):
    count, width, memory = 3000, 2**13, 4 * LEAST
    # The first batch of a process imports modules, and modules are no records.
    next(iter(sampling.RandomAllocation(6).batches(stream_of(plain, tmp_path))))
    gc.collect()

    def read():
        rows = np.random.default_rng(0)
        for i in range(count):
            yield rows.random(width // 4, np.float32), i

    data = read() if once else read
    stream = stream_of(data, tmp_path, count, memory=memory)
    drawer = sampling.RandomAllocation(100).batches(stream)._drawer
    rows = drawer.rows
    tracemalloc.start()
    try:
        for _ in range(300):
            drawer.next_element()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count * width > 5 * memory
    # The last batch, and the next, which a busy machine may have twice; the order;
    # small objects, and those of threads that an earlier test left.
    assert peak < memory + 4 * rows * width + 20 * count + 2 * 2**20
    assert drawer.source._together > 1


def test_the_file_has_no_name_and_is_its_owners_alone(tmp_path):
    folder = tmp_path / "scratch"
    batches = sampling.RandomAllocation(6).batches(stream_of(plain, folder))
    seen = [os.listdir(folder) for _ in batches]
    assert seen == [[]] * 6
    handle = batches._drawer.source._file._file.fileno()
    found = os.fstat(handle)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_nlink == 0 and found.st_dev == folder.stat().st_dev
    # Numbers of 8 bytes beside the records.
    assert found.st_size == RECORDS * (8 + 8 + 8)


@pytest.mark.parametrize("once", [False, True])
def test_an_epochs_copy_is_removed_for_the_next(once, tmp_path):
    data = plain() if once else plain
    batches = sampling.RandomAllocation(6).batches(stream_of(data, tmp_path))
    list(batches)
    before = batches._drawer.source._file
    list(batches)
    assert before._file.closed
    assert batches._drawer.source._file is not before


def test_the_copy_goes_with_the_batches(tmp_path):
    batches = sampling.RandomAllocation(6).batches(stream_of(plain, tmp_path))
    list(batches)
    file = weakref.ref(batches._drawer.source._file._file)
    del batches
    gc.collect()
    assert file() is None


def test_a_copy_without_room_is_refused_ahead(tmp_path, monkeypatch):
    read = Again(wide)
    stream = stream_of(read, tmp_path, memory=LEAST)
    batches = sampling.RandomAllocation(6).batches(stream)
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"needs about 0.00366 GiB.*Stream.*folder=") as e:
        batches._drawer.next_element()
    assert e.value.errno == errno.ENOSPC and e.value.filename == str(tmp_path)
    assert read.given < 10
    monkeypatch.undo()
    assert sorted(sum(map(records_of, batches), [])) == list(range(RECORDS))


@pytest.mark.parametrize("once", [False, True])
def test_a_disk_that_fills_stops_before_a_step(once, tmp_path, monkeypatch):
    data = plain() if once else plain
    batches = sampling.RandomAllocation(6).batches(stream_of(data, tmp_path))
    list(batches)

    def write(self, column):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(GroupedFile, "_write_column", write)
    with pytest.raises(OSError, match="no step has read.*free some space") as caught:
        batches._drawer.next_element()
    assert caught.value.filename == str(tmp_path)
    assert batches._drawer.steps_drawn() == 6
    monkeypatch.undo()
    # There is room again; the copy of an iterator was not lost.
    assert sorted(sum(map(records_of, batches), [])) == list(range(RECORDS))


# Records are allocated independently. Seeds are fixed; with fresh seeds each test would
# fail by chance with a probability below 1e-6.


def places_of(scheme, folder, epochs, population=8):
    """The step of each record in each epoch, `[epochs, population]`, by a stream."""

    def read():
        return iter(np.arange(1, population + 1, dtype=np.float32)[:, None])

    stream = stream_of(read, folder, population)
    drawer = scheme.batches(stream, seed=3)._drawer
    found = np.full((epochs, population), -1)
    for epoch, step in itertools.product(range(epochs), range(scheme.steps)):
        x, weights = drawer.next_element()
        records = x[weights > 0, 0].astype(int) - 1
        assert np.all(found[epoch, records] == -1)
        found[epoch, records] = step
    assert np.all(found >= 0)
    return found


def independent(places, steps, alarm=1e-6):
    """Whether steps look uniform, and independent for every two records.

    A right allocation passes with a probability of 1 - `alarm` or more: the alarm is
    divided among all counts, each of which is binomial.
    """
    epochs, population = places.shape
    pairs = list(itertools.combinations(range(population), 2))
    counts = [
        (np.sum((places[:, i] == a) & (places[:, j] == b)), 1 / steps**2)
        for i, j in pairs
        for a, b in itertools.product(range(steps), repeat=2)
    ]
    counts += [
        (np.sum(places[:, i] == a), 1 / steps)
        for i in range(population)
        for a in range(steps)
    ]
    each = alarm / len(counts) / 2
    return all(
        stats.binom.ppf(each, epochs, p)
        <= count
        <= stats.binom.ppf(1 - each, epochs, p)
        for count, p in counts
    )


@pytest.mark.slow
def test_the_step_of_a_record_tells_of_no_other(tmp_path):
    scheme = sampling.RandomAllocation(3)
    assert independent(places_of(scheme, tmp_path, 1000), 3)


class Pairs(sampling.RandomAllocation):
    """A planted bug: two neighbours in the stream are allocated together."""

    def _draw(self, key, population, step):
        pairs = super()._draw(key, population // 2, step)
        return np.concatenate([2 * pairs, 2 * pairs + 1])


class Favourite(sampling.RandomAllocation):
    """A planted bug: record 5 is in the first step twice as often."""

    def _draw(self, key, population, step):
        found = super()._draw(key, population, step)
        epoch, place = divmod(step, self.steps)
        if DrawKey(epoch).rng(0).random() < 1 / 3:
            found = np.append(found[found != 5], [5] * (place == 0)).astype(np.int64)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("planted", [Pairs, Favourite])
def test_records_that_are_not_allocated_alone_are_found(planted, tmp_path):
    assert not independent(places_of(planted(3), tmp_path, 1000), 3)


def test_a_writer_that_puts_two_records_together_is_found(tmp_path, monkeypatch):
    """A planted bug: the file gets record 2 i + 1 where record 2 i belongs."""
    write = GroupedFile.write

    def together(self, groups, numbers, columns):
        groups = groups.copy()
        groups[1::2] = groups[: len(groups) // 2 * 2 : 2]
        write(self, groups, numbers, columns)

    monkeypatch.setattr(GroupedFile, "write", together)
    stream = stream_of(wide, tmp_path, memory=LEAST)
    batches = sampling.RandomAllocation(6).batches(stream, seed=5)
    with pytest.raises(RuntimeError, match="lacks records of this step"):
        for _ in range(6):
            batches._drawer.next_element()
