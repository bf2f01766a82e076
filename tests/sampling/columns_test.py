"""Data in other forms become arrays of numbers or texts, or an error names the fix."""

import datetime
import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tfdpclip import sampling

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.arange(6)


def element(data):
    """All records, in the order of the data."""
    return next(iter(sampling.FullBatch().batches(data)))


class Rows:
    """A class that gives records by number, as people write it."""

    def __init__(self, *records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        return self.records[index]


class Dictionaries(Rows):
    """As the data sets of a hub of them: dictionaries of Python's own values."""

    column_names = ("text", "ids", "label")

    def __getitems__(self, indices):
        return [self.records[index] for index in indices]


WORDS = ["a", "bb", "", "dddd", "e", "ü"]
BYTES = [word.encode() for word in WORDS]


class TestTexts:
    @pytest.mark.parametrize("text", [str, np.str_, str.encode, np.array, tf.constant])
    def test_a_record_may_hold_one_text(self, text):
        x, y, _ = element(Rows(*((text(w), i) for i, w in enumerate(WORDS))))
        assert x.numpy().tolist() == BYTES and y.numpy().tolist() == [*range(6)]

    @pytest.mark.parametrize(
        "data",
        [
            [(word, i) for i, word in enumerate(WORDS)],
            (WORDS, [*range(6)]),
            (np.array(WORDS), Y),
            (np.array(WORDS, object), Y),
        ],
        ids=["list of pairs", "lists", "array", "objects"],
    )
    def test_and_so_may_lists(self, data):
        x, y, _ = element(data)
        assert x.numpy().tolist() == BYTES and y.numpy().tolist() == [*range(6)]

    def test_records_that_are_texts_alone(self):
        for data in (WORDS, Rows(*WORDS)):
            assert element(data)[0].numpy().tolist() == BYTES

    def test_dictionaries_of_texts_lists_and_numbers(self):
        rows = [{"text": w, "ids": [i, 2], "label": i} for i, w in enumerate(WORDS)]
        for data in (Dictionaries(*rows), Rows(*rows), rows):
            x, y, _ = element(data)
            assert x["text"].numpy().tolist() == BYTES and y is None
            assert x["ids"].shape == (6, 2) and x["label"].numpy().tolist() == [*Y]

    def test_what_nobody_drew_is_an_empty_text(self):
        batches = sampling.Poisson(1e-9).batches(Rows(*WORDS))
        assert set(next(iter(batches))[0].numpy()) == {b""}


class TestLists:
    @pytest.mark.parametrize(
        "data, name",
        [
            (([X, X], [Y, Y]), "x"),
            (([X, X],), "x"),
            (({"a": [X, X]}, {"b": [Y, Y]}), "x..a.."),
            (([*np.ones((6, 6))], Y), "x"),
            (([tf.constant(X), tf.constant(X)], [Y, Y]), "x"),
        ],
    )
    def test_arrays_in_a_list_that_may_be_inputs_or_records_are_refused(
        self, data, name
    ):
        with pytest.raises(ValueError, match=rf"data: {name} is a list of .*np.stack"):
            sampling.Poisson(0.5).batches(data)

    @pytest.mark.parametrize(
        "data", [[X, Y], [X, X], [*X], [tf.constant(X), Y], [X, Y, Y]]
    )
    def test_arrays_in_a_list_are_no_records(self, data):
        with pytest.raises(ValueError, match=r"data is a list.*scheme.batches\(\(x, y"):
            sampling.Poisson(0.5).batches(data)

    def test_of_inputs_lengths_tell(self):
        for data in (
            ([X, X[:, :1]], Y),
            ([X, X], {"a": Y, "b": [*Y]}),
            ([X, X[:, :1]], [*X]),
            ([X, X[:, :1]], [Y, X]),
        ):
            x, _, weights = element(data)
            assert isinstance(x, tuple) and weights.shape[0] == 6
            np.testing.assert_array_equal(x[0], X)
            np.testing.assert_array_equal(x[1], data[0][1])

    def test_of_records_lengths_tell(self):
        for data in (([*X], Y), ([*X], [*Y]), ([*X], [*Y[:, None]], np.ones(6))):
            x, y, _ = element(data)
            np.testing.assert_array_equal(x, X)
            np.testing.assert_array_equal(np.ravel(y), Y)

    def test_records_in_a_list_have_one_shape(self):
        rows = [(X[0], 1), (X[1], 2), (X[1, :1], 3)]
        with pytest.raises(ValueError, match="record 2 is unlike record 0: x has the"):
            sampling.Poisson(0.5).batches(rows)

    @pytest.mark.parametrize("count", [2, 60])
    def test_a_plan_says_the_same_of_lists(self, count):
        plan = dpc.keras.PrivacyPlan(3, 1e-3, examples=60, batch_size=20, epochs=1)
        x, y = np.ones((60, 3)), np.ones(60)
        with pytest.raises(
            ValueError, match=r"data is a list .*scheme.batches\(\(x, y"
        ):
            plan.batches([x, y] if count == 2 else [*x])


def frames():
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(
        {
            "age": [1.0, 1.5, 3.0],
            "gap": [1.0, np.nan, 3.0],
            "count": [1, 2, 3],
            "old": [True, False, True],
            "city": ["a", "b", "c"],
            "hole": ["a", None, "c"],
            "kind": pandas.Categorical(["u", "v", "u"]),
            "some": pandas.Categorical(["u", None, "u"]),
            "day": pandas.to_datetime(["2020-01-01"] * 3),
            "there": pandas.to_datetime(["2020-01-01"] * 3, utc=True),
            "long": pandas.to_timedelta([1, 2, 3], unit="D"),
            "whole": pandas.array([1, 2, 3], dtype="Int64"),
            "holes": pandas.array([1, None, 3], dtype="Int64"),
            "maybe": pandas.array([True, None, True], dtype="boolean"),
            "text": pandas.array(["a", None, "c"], dtype="string"),
            "pixels": [np.ones(2)] * 3,
            "several": [[1], [1, 2], [3]],
        }
    )


NUMBERS = ["age", "count", "old", "whole"]


class TestFrames:
    def test_numbers_of_any_type_are_one_array(self):
        x, _, _ = element((frames()[NUMBERS], frames()["whole"]))
        expected = [[1, 1, 1, 1], [1.5, 2, 0, 2], [3, 3, 1, 3]]
        np.testing.assert_array_equal(x, expected)
        assert element(frames()[["old", "count"]])[0].dtype == tf.int64

    def test_texts_and_categories_are_one_array(self):
        x, _, _ = element(frames()[["city", "kind"]])
        assert x.numpy().tolist() == [[b"a", b"u"], [b"b", b"v"], [b"c", b"u"]]

    def test_columns_apart(self):
        kept = frames()[["age", "city", "kind", "whole", "pixels"]]
        x, _, _ = element(({c: kept[c].to_numpy() for c in kept}, frames()["old"]))
        again, _, _ = element((dict(kept), frames()["old"]))
        assert all(np.array_equal(again[name], x[name]) for name in kept)
        assert x["city"].numpy().tolist() == [b"a", b"b", b"c"]
        assert x["pixels"].shape == (3, 2) and x["whole"].dtype == tf.int64

    @pytest.mark.parametrize(
        "columns, match",
        [
            (
                ["age", "city"],
                r"'city' of x holds texts.*{c: x\[c\].to_numpy\(\) for c in x}"
                ".*StringLookup.*PrivateStatistics",
            ),
            (["count", "kind"], "'kind' of x holds texts.*Give {c: x"),
            (["age", "pixels"], "'pixels' of x holds an array.*dict.x"),
            (["city", "hole"], "x..hole.. has gaps.*astype.object..fillna"),
            (["some"], "x..some.. has gaps.*astype.object..fillna"),
            (["text"], "x..text.. has gaps.*fillna"),
            (["age", "holes"], r"x..holes.. has gaps.*fillna\(0"),
            (["gap"], r"x..gap.. has gaps.*fillna\(0.*x..gap...to_numpy\(\)"),
            (["age", "gap", "old"], r"x..gap.. has gaps.*fillna\(0"),
            (["maybe"], r"x..maybe.. has gaps.*fillna\(0"),
            (["age", "day"], "x..day.. holds dates.*timedelta64"),
            (["there"], "x..there.. holds dates"),
            (["long"], "x..long.. holds dates"),
            (["several"], "x..several.. must be rectangular.*pad_sequences"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, list) else "",
    )
    def test_what_is_no_number_is_named_with_the_line(self, columns, match):
        with pytest.raises(ValueError, match=f"data: .*{match}"):
            sampling.Poisson(0.5).batches(frames()[columns])
        if "dict" not in match and "{c" not in match:
            with pytest.raises(ValueError, match=f"data: .*{match}"):
                sampling.Poisson(0.5).batches((dict(frames()[columns]), np.ones(3)))

    def test_the_lines_of_the_errors_work(self):
        x = frames()
        lookup = tf.keras.layers.StringLookup(vocabulary=["a", "b"])
        x["city"] = lookup(x["city"].tolist()).numpy()
        x["day"] = (x["day"] - np.datetime64("2020-01-01")) / np.timedelta64(1, "D")
        x["hole"] = x["hole"].astype(object).fillna("")
        x["some"] = x["some"].astype(object).fillna("")
        x["text"] = x["text"].astype(object).fillna("")
        x["holes"] = x["holes"].fillna(0)
        assert x["city"].tolist() == [1, 2, 0]  # 0 is unknown.
        assert element(x[["city", "day", "holes"]])[0].dtype == tf.float32
        assert element(x[["hole", "some", "text"]])[0].dtype == tf.string


class TestNaN:
    """A record with NaN trains nothing, so whoever gives NaN is told before."""

    @pytest.mark.parametrize("name", ["x", "x['a']", "y"])
    def test_arrays_with_nan_are_named_with_the_line(self, name):
        holes, full = np.array([1.0, np.nan, 3.0]), np.ones(3)
        data = {
            "x": (holes, full),
            "x['a']": ({"a": holes, "b": full}, full),
            "y": (full, holes),
        }[name]
        pattern = f"data: {re.escape(name)} holds NaN.*nan_to_num"
        with pytest.warns(UserWarning, match=pattern) as found:
            sampling.Poisson(0.5).batches(data)
        assert len(found) == 1

    def test_a_column_for_a_model_that_reads_nan_is_taken(self):
        with pytest.warns(UserWarning, match="x holds NaN"):
            x, _, _ = element((frames()["gap"].to_numpy(), np.ones(3)))
        assert np.isnan(x).sum() == 1

    @pytest.mark.parametrize(
        "column", [np.ones(3), np.array([1, 2, 3]), np.array(["nan", "a", "b"])]
    )
    def test_without_nan_nothing_is_said(self, column):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            sampling.Poisson(0.5).batches((column, np.ones(3)))
        assert not told

    def test_an_array_on_disk_is_not_read_for_it(self, tmp_path):
        np.save(tmp_path / "x.npy", np.full(3, np.nan, np.float32))
        x = np.load(tmp_path / "x.npy", mmap_mode="r")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            sampling.Poisson(0.5).batches((x, np.ones(3)))
        assert not told


class TestArrays:
    @pytest.mark.parametrize(
        "labels, wanted",
        [
            (np.array([1, 2, 3], object), tf.int64),
            (np.array([1, 2.5, True], object), tf.float32),
            (np.array([True, False, True], object), tf.bool),
            (np.array([np.int32(1), 2, 3], object), tf.int64),
            (np.array([[1, 2], [3, 4], [5, 6]], object), tf.int64),
        ],
    )
    def test_objects_that_are_numbers_are_numbers(self, labels, wanted):
        _, y, _ = element((X[:3], labels))
        assert y.dtype == wanted
        np.testing.assert_array_equal(y, labels.astype(np.float32))

    @pytest.mark.parametrize(
        "labels, match",
        [
            (np.array(["a", None, "b"], object), "y has gaps"),
            (np.array(["a", np.nan, "b"], object), "y has gaps"),
            (np.array([1, None, 2], object), "y has gaps"),
            (np.ma.masked_array([1.0, 2, 3], [0, 1, 0]), r"y has gaps.*filled\(0"),
            (np.array(["a", 1, 2.5], object), "y holds values of the types float, int"),
            (np.array([datetime.date(2020, 1, 1)] * 3), "y holds dates"),
            (np.array(["2020-01-01"] * 3, "datetime64[D]"), "y holds dates.*timedelta"),
            (np.ones(3, "timedelta64[s]"), "y holds dates"),
            (np.array([object()] * 3), "y holds objects of type object.*np.unique"),
            (np.array([{}, {"a": 1}, {}]), "y holds objects of type dict"),
            (np.array([2**70, 1, 2], object), "y holds integers of more than 64 bits"),
            (
                np.ones(3, np.longdouble),
                "y holds .*TensorFlow has no such type.*astype",
            ),
            (
                np.zeros(3, [("a", "f4"), ("b", "i4")]),
                "y is a structured array.*fields",
            ),
            ([[1], [1, 2], [3]], "y must be rectangular.*pad_sequences"),
            (None, "y is None"),
            (tf.ragged.constant([[1], [2, 3], []]), "y is a RaggedTensor.*to_tensor"),
            (tf.sparse.from_dense(np.eye(3)), "y is a SparseTensor.*to_dense"),
        ],
        ids=lambda value: value if isinstance(value, str) else type(value).__name__,
    )
    def test_what_is_no_array_of_numbers_or_texts_is_named(self, labels, match):
        for data, name in (((X[:3], labels), "y"), ((X[:3], {"b": labels}), "y..b..")):
            with pytest.raises(
                ValueError, match="data: " + match.replace("y", name, 1)
            ):
                sampling.Poisson(0.5).batches(data)

    def test_sparse_matrices_are_named(self):
        sparse = pytest.importorskip("scipy.sparse")
        with pytest.raises(ValueError, match="x..a.. is a sparse csr_matrix.*toarray"):
            sampling.Poisson(0.5).batches(({"a": sparse.csr_matrix(X)}, Y))

    @pytest.mark.parametrize("record", [{"a": None}, {"a": {1, 2}}, ({"a": X}, None)])
    def test_what_is_wrong_with_a_record_is_named(self, record):
        with pytest.raises(ValueError, match="data: (x..a..|y) "):
            sampling.Poisson(0.5).batches(Rows(record, record))


LONE_SURROGATE = b"\xff".decode(errors="surrogateescape")


@pytest.mark.parametrize("kind", [list, np.array, lambda v: np.array(v, object)])
def test_a_text_without_bytes_is_an_error_before_a_draw(kind):
    texts = ["a", "\u00e9", LONE_SURROGATE]
    with pytest.raises(ValueError, match=r"data: x .*UTF-8.*'replace'\) for text in x"):
        sampling.FullBatch().batches((kind(texts), np.arange(3)))
    mended = [text.encode("utf-8", "replace") for text in texts]
    x, *_ = next(iter(sampling.FullBatch().batches((mended, np.arange(3)))))
    np.testing.assert_array_equal(x, mended)


class Unreadable:
    """An object from which NumPy makes no array, for a reason of its own."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("no array")


class TestRecordsOfSeveralShapes:
    """Results must not show which record was drawn."""

    ODD = {
        "shape": (np.ones(3), 1),
        "structure": ({"a": np.ones(2)}, 1),
        "parts": np.ones(2),
        "text": ("text", 1),
        "labels of another type": (np.ones(2), 0.5),
        "a gap": (np.ones(2), None),
        "ragged": ([[1], [1, 2]], 1),
        "keys of two types": ({"a": np.ones(2), 1: np.ones(2)}, 1),
        "no array": (Unreadable(), 1),
    }

    @pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
    def test_they_are_refused_before_any_is_drawn(self, odd):
        rows = [(np.ones(2), i) for i in range(200)]
        rows[137] = odd
        for kind in (Rows, Dictionaries):
            with pytest.raises(ValueError, match="data: record 137 is unlike record 0"):
                sampling.Poisson(0.01).batches(kind(*rows))

    @pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
    def test_one_that_was_not_looked_at_counts_for_nothing(self, odd, monkeypatch):
        monkeypatch.setattr(sampling.sources, "LOOK_SECONDS", 1e-9)
        rows = [(np.full(2, i + 1.0), i) for i in range(20)]
        rows[13] = odd
        batches = sampling.FullBatch().batches(Rows(*rows))
        assert "counts for nothing" in " ".join(batches.assumptions)
        x, y, weights = next(iter(batches))
        assert weights.numpy().tolist() == [float(i != 13) for i in range(20)]
        kept = [i for i in range(20) if i != 13]
        np.testing.assert_array_equal(y.numpy()[kept], kept)
        # The replacing row is valid input for functions of records.
        assert x.numpy()[13].all()
        mapped = next(iter(batches.map(lambda x, y: (1 / x, y))))
        np.testing.assert_array_equal(mapped[0][13], [1.0, 1.0])

    def test_a_text_without_bytes_counts_for_nothing_when_drawn(self, monkeypatch):
        monkeypatch.setattr(sampling.sources, "LOOK_SECONDS", 1e-9)
        rows = [("a", 0), ("b", 1), (LONE_SURROGATE, 2)]
        x, _, weights = next(iter(sampling.FullBatch().batches(Rows(*rows))))
        np.testing.assert_array_equal(weights, [1, 1, 0])
        np.testing.assert_array_equal(x[:2], [b"a", b"b"])

    def test_records_that_getitems_leaves_out_are_read_one_by_one(self, monkeypatch):
        """An error with their number would tell how many were drawn."""

        class Fewer(Rows):
            def __getitems__(self, indices):
                return [self[i] for i in indices if i != 2]

        rows = Fewer((1.0, 1), (2.0, 2), None, (3.0, 3))
        with pytest.raises(ValueError, match="one for each index"):
            sampling.FullBatch().batches(rows)
        monkeypatch.setattr(sampling.sources, "LOOK_SECONDS", 1e-9)
        _, y, weights = next(iter(sampling.FullBatch().batches(rows)))
        np.testing.assert_array_equal(weights, [1, 1, 0, 1])
        np.testing.assert_array_equal(y.numpy()[[0, 1, 3]], [1, 2, 3])

    def test_nor_does_one_of_a_persons(self, monkeypatch):
        monkeypatch.setattr(sampling.sources, "LOOK_SECONDS", 1e-9)
        rows = [(np.full(2, i + 1.0), i, 1.0) for i in range(20)]
        rows[13] = (np.ones(3), 1, 1.0)
        for records in (rows, [row[:2] for row in rows]):
            batches = sampling.FullBatch().batches(
                Rows(*records), people=np.arange(20) // 2, per_person=2
            )
            assert "counts for nothing" in " ".join(batches.assumptions)
            _, y, weights = next(iter(batches))
            found = np.bincount(y, weights)
            np.testing.assert_array_equal(found, np.arange(20) != 13)

    def test_weights_that_are_none_are_found_before(self):
        rows = [(np.ones(2), i, 1.0) for i in range(50)]
        rows[31] = (np.ones(2), 1, -1.0)
        with pytest.raises(ValueError, match="record 31.*sample_weight holds -1"):
            sampling.Poisson(0.1).batches(Rows(*rows))

    def test_all_are_read_once_if_that_is_fast_and_no_more_than_time_allows(
        self, monkeypatch
    ):
        seen = []

        class Counted(Rows):
            def __getitem__(self, index):
                seen.append(index)
                return super().__getitem__(index)

        rows = [(np.ones(2), i) for i in range(300)]
        batches = sampling.Poisson(0.1).batches(Counted(*rows))
        assert set(seen) == set(range(300)) and not batches.assumptions
        seen.clear()
        clock = iter(np.arange(1000.0))
        monkeypatch.setattr(sampling.sources.time, "monotonic", lambda: next(clock))
        sampling.Poisson(0.1).batches(Counted(*rows))
        assert len(set(seen)) < 10


class TestRowsOfFramesGoTogether:
    def frame(self):
        pandas = pytest.importorskip("pandas")
        return pandas.DataFrame({"a": range(9), "id": range(9)})

    def draw(self, x, y=None, people=None):
        scheme = sampling.Poisson(0.5)
        options = {} if people is None else {"people": people, "per_person": 1}
        return scheme.batches(x if y is None else (x, y), **options)

    def test_another_order_is_refused(self):
        frame = self.frame()
        moved = frame[["a"]].sample(frac=1.0, random_state=1)
        with pytest.raises(ValueError, match="rows of people have another order"):
            self.draw(moved, people=frame["id"])
        with pytest.raises(ValueError, match=r"rows of y .* y\.loc\[x\.index\]"):
            self.draw(moved, frame["a"])
        with pytest.raises(ValueError, match=r"rows of x\['b'\] have another"):
            self.draw({"a": frame["a"], "b": moved["a"]})

    def test_other_rows_are_refused(self):
        frame = self.frame().iloc[::-1]
        with pytest.raises(ValueError, match="or are others"):
            self.draw(frame[["a"]][:5], frame["a"][2:7])

    def test_rows_that_go_together_pass(self):
        frame = self.frame()
        moved = frame.sample(frac=1.0, random_state=1)
        some = frame[frame["a"] % 2 == 0]
        for arguments in (
            (moved[["a"]], moved["a"], moved["id"]),
            (moved[["a"]], frame["a"].loc[moved.index]),
            (moved[["a"]], frame["a"].to_numpy()),
            (some[["a"]].reset_index(), some["a"]),
            (frame[["a"]].set_index(frame["a"] + 100), frame["a"]),
        ):
            assert self.draw(*arguments).population == len(arguments[0])

    def test_of_private_statistics_too(self):
        frame = self.frame()
        moved = frame.sample(frac=1.0, random_state=1)
        statistics = dpc.keras.PrivateStatistics(
            1.0, 1e-5, examples=9, releases=3, people=frame["id"]
        )
        for release in (
            lambda: statistics.moments(moved["a"], low=0, high=9),
            lambda: statistics.vocabulary(moved["a"]),
        ):
            with pytest.raises(ValueError, match="rows of values have another order"):
                release()
        assert statistics.left == 3
        statistics.moments(frame["a"], low=0, high=9)


# A third entry that is no weight.


def _entries(low, high, dtype, *row):
    rng = np.random.default_rng(3)
    return tuple(
        (low + (high - low) * rng.random((12, *row))).astype(dtype) for _ in range(3)
    )


TRIPLETS = {
    "images in [0, 1]": _entries(0, 1, "float32", 6, 6, 3),
    "grey images in [0, 1]": _entries(0, 1, "float64", 6, 6, 1),
    "images in [-1, 1]": _entries(-1, 1, "float32", 6, 6),
    "images of bytes": _entries(0, 255, "uint8", 6, 6, 3),
    "embeddings": _entries(0, 1, "float32", 5),
    "tokens": _entries(0, 1000, "int64", 7),
    "texts": (np.array(["a"] * 12), np.array(["b"] * 12), np.array(["c"] * 12)),
    "dicts": tuple({"ids": e, "mask": e > 9} for e in _entries(0, 1000, "int32", 7)),
    "centred ratings": _entries(-1, 1, "float32"),
    "several negatives": (*_entries(-1, 1, "float32", 5)[:2], -np.ones((12, 2, 5))),
}


@pytest.mark.parametrize("kind", TRIPLETS)
def test_a_third_input_is_not_taken_for_weights(kind):
    """Triplets (anchor, positive, negative) would train on products of pixels."""
    triplet = TRIPLETS[kind]
    with pytest.raises(ValueError) as raised:
        sampling.Poisson(0.5).batches(triplet)
    said = str(raised.value)
    line = "plan.batches(((anchor, positive, negative), np.zeros(len(anchor))))"
    assert line in said and ".clip(" not in said
    # The line of the message works.
    batches = sampling.Poisson(0.5).batches((triplet, np.zeros(12)))
    assert len(next(iter(batches))[0]) == 3


class _Rows:
    def __init__(self, parts):
        self.parts = parts

    def __len__(self):
        return 12

    def __getitem__(self, place):
        return tuple(part[place] for part in self.parts)


@pytest.mark.parametrize("kind", ["images in [0, 1]", "embeddings", "texts"])
@pytest.mark.parametrize("source", ["pipeline", "object", "list", "stream"])
def test_no_source_takes_a_third_input_for_weights(kind, source, tmp_path):
    triplet = TRIPLETS[kind]
    scheme = sampling.Poisson(0.5)
    if source == "pipeline":
        data = tf.data.Dataset.from_tensor_slices(triplet)
    elif source == "object":
        data = _Rows(triplet)
    elif source == "list":
        data = list(map(_Rows(triplet).__getitem__, range(12)))
    else:
        rows = map(_Rows(triplet).__getitem__, range(12))
        data = sampling.Stream(rows, 12, folder=tmp_path)
        scheme = sampling.RandomAllocation(2)
    with pytest.raises(ValueError, match="the third entry is sample_weight"):
        scheme.batches(data)


@pytest.mark.parametrize(
    "x, y, weights",
    [
        ([6, 6, 3], "float32 6 6", np.ones((12, 6, 6))),  # Entries of images.
        ([7], "int64 7", np.ones((12, 7))),  # Tokens.
        ([7], "int64 7", np.tile([1, 1, 1, 1, 0, 0, 0], (12, 1))),  # A mask of ones.
        ([7], "int64 7", np.ones((12, 7), bool)),
        ([1], "float32 1", np.ones((12, 1))),
        ([], "float32", np.full(12, 3)),  # Counts of records.
        ([5], "float32 5", np.full(12, 2.5)),
    ],
)
def test_weights_are_taken(x, y, weights):
    dtype, *row = y.split()
    y = np.ones([12, *map(int, row)], dtype)
    batches = sampling.FullBatch().batches((np.ones([12, *x]), y, weights))
    drawn = np.asarray(tf.nest.flatten(next(iter(batches))[2])[0])
    assert drawn.sum() == np.asarray(weights, "float32").sum()


# Rows that share numbers.

SERIES = np.arange(40, dtype="float32")
WINDOWS = np.lib.stride_tricks.sliding_window_view(SERIES, 8)
OVERLAPPING = {
    "windows": WINDOWS,
    "windows of float64": np.lib.stride_tricks.sliding_window_view(
        SERIES.astype("float64"), 8
    ),
    "windows that overlap a little": WINDOWS[::7],
    "windows with gaps": WINDOWS[:, ::3],
    "windows of a table": np.lib.stride_tricks.sliding_window_view(
        SERIES.reshape(20, 2), 4, axis=0
    ),
    "a row many times": np.broadcast_to(SERIES, (12, 40)),
    "by hand": np.lib.stride_tricks.as_strided(SERIES, (12, 5), (4, 4)),
    "in a dict": {"a": np.ones((33, 2), "float32"), "b": WINDOWS},
    "a list of views": ([SERIES[i : i + 8] for i in range(30)], np.arange(30)),
    "a list of copies": ([WINDOWS[0], *WINDOWS[::8], WINDOWS[0]], np.arange(7)),
    "a list of records": [(SERIES[i : i + 8], i) for i in range(30)],
}
APART = {
    "rows": SERIES.reshape(10, 4),
    "windows beside each other": WINDOWS[::8],
    "every second row": np.ones((20, 4), "float32")[::2],
    "columns first": np.asfortranarray(SERIES.reshape(10, 4)),
    "a transposed table": SERIES.reshape(4, 10).T,
    "backwards": SERIES.reshape(10, 4)[::-1],
    "a list of rows": (list(SERIES.reshape(10, 4)), np.arange(10)),
    "copies of windows": WINDOWS.copy(),
    "one channel of images": np.ones((6, 3, 3, 2), "float32")[..., 0],
}


def _shared_numbers(data):
    found = sampling.Poisson(0.5).batches(data).assumptions
    return [text for text in found if "share numbers in memory" in text]


@pytest.mark.parametrize("kind", OVERLAPPING)
def test_rows_that_share_numbers_are_an_assumption(kind):
    """Each row is protected by itself, and a number of the series is in several."""
    assert _shared_numbers(OVERLAPPING[kind])


@pytest.mark.parametrize("kind", APART)
def test_rows_apart_in_memory_need_no_assumption(kind):
    assert not _shared_numbers(APART[kind])


def test_constant_labels_are_no_shared_rows():
    assert not _shared_numbers((APART["rows"], np.broadcast_to(1.0, (10, 2))))


def _window(i):
    return tf.constant(SERIES)[i : i + 8]


def test_records_made_of_numbers_are_an_assumption(tmp_path):
    numbers = tf.data.Dataset.range(30)
    slices = tf.data.Dataset.from_tensor_slices(WINDOWS.copy())
    inner = slices.flat_map(lambda x: tf.data.Dataset.range(3).map(lambda i: x[i:]))

    def stated(data, examples=None):
        scheme = sampling.Poisson(0.5)
        if examples:
            data = sampling.Stream(data, examples, folder=tmp_path)
            scheme = sampling.RandomAllocation(2)
        texts = scheme.batches(data).assumptions
        return [text for text in texts if "numbers of a range" in text]

    assert stated(numbers.map(lambda i: tf.ensure_shape(_window(i), [8])))
    assert stated(numbers.map(lambda i: 2 * i).map(_window, num_parallel_calls=2), 30)
    assert stated(inner.map(lambda x: x[:4]), 99)
    assert not stated(slices) and not stated(slices, 33)
    assert not stated(numbers)
    zipped = tf.data.Dataset.zip((numbers, slices.take(30)))
    assert not stated(zipped.map(lambda i, x: (x, i)))
