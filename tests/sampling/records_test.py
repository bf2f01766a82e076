"""Batches are drawn from records in every supported form, and from nothing else."""

import numpy as np
import pytest
import tensorflow as tf

from tests.sampling.numbered import numbered
from tfdpclip import sampling
from tfdpclip.sampling.sources import open_source


class _Records:
    """Random access, record by record."""

    def __init__(self, shapes=None):
        self._shapes = shapes or [(2,)] * 10

    def __len__(self):
        return len(self._shapes)

    def __getitem__(self, index):
        return {"a": np.full(self._shapes[index], index + 1.0)}, index + 1


def _generated():
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(range(5)), output_signature=tf.TensorSpec((), tf.int64)
    )
    return dataset.apply(tf.data.experimental.assert_cardinality(5))


class TestData:
    def _only(self, data):
        return next(iter(sampling.FullBatch().batches(data)))

    def test_features_alone(self):
        x, y, weights = self._only(np.ones((4, 3)))
        assert x.shape == (4, 3) and y is None and weights.shape == (4,)
        assert x.dtype == tf.float32  # As Keras would convert the features.

    def test_dicts(self):
        x, y, _ = self._only(
            ({"a": np.ones((4, 1)), "b": np.zeros(4, int)}, np.ones(4))
        )
        assert set(x) == {"a", "b"} and x["b"].dtype == tf.int64
        features, labels, _ = self._only({"a": np.ones((4, 1))})
        assert features["a"].shape == (4, 1) and labels is None

    def test_several_inputs_and_outputs(self):
        x, y, _ = self._only(((np.ones(4), np.zeros((4, 2))), {"out": np.ones(4)}))
        assert x[1].shape == (4, 2) and y["out"].shape == (4,)

    def test_tensors_and_lists_inside_tuples(self):
        x, y, _ = self._only((tf.ones((3, 2)), [1, 2, 3]))
        assert x.shape == (3, 2) and list(y.numpy()) == [1, 2, 3]

    def test_data_frames(self):
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
        x, y, _ = self._only((frame, frame["a"]))
        assert x.shape == (2, 2) and y.shape == (2,)

    def test_strings(self):
        batches = sampling.Poisson(1e-9).batches((np.array(["a", "bc"]), np.ones(2)))
        text, _, _ = next(iter(batches))
        assert text.dtype == tf.string and set(text.numpy()) == {b""}
        text, _, _ = self._only((np.array(["a", "bc"]), np.ones(2)))
        assert list(text.numpy()) == [b"a", b"bc"]

    def test_record_sequences(self):
        x, y, weights = self._only(_Records())
        np.testing.assert_array_equal(x["a"][:, 0], np.arange(1, 11))
        np.testing.assert_array_equal(y, np.arange(1, 11))

    def test_random_access_datasets(self):
        dataset = tf.data.Dataset.from_tensor_slices(numbered()).map(
            lambda x, y: (x / 2, y)
        )
        x, y, _ = self._only(dataset)
        np.testing.assert_allclose(x[:, 0], y.numpy() / 2)

    def test_memory_maps_stay_on_disk(self, tmp_path):
        path = tmp_path / "x.npy"
        np.save(path, numbered()[0])
        batches = sampling.Poisson(0.1).batches(np.load(path, mmap_mode="r"))
        assert isinstance(batches._drawer.source._parts[0].base, np.memmap) or (
            isinstance(batches._drawer.source._parts[0], np.memmap)
        )
        next(iter(batches))

    @pytest.mark.parametrize(
        "data, match",
        [
            (np.zeros((0, 2)), "at least one record"),
            ((np.ones(3), np.ones(4)), "as many records"),
            ((np.ones(3),) * 4, "tuple of 4"),
            (np.float32(1), "scalar"),
            (iter([1, 2]), "only be read in order"),
            (np.array([[1], [1, 2]], dtype=object), "rectangular"),
            (tf.data.Dataset.range(5).filter(lambda i: i > 1), "finite number"),
            (_generated(), "no random access"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_refused(self, data, match):
        with pytest.raises(ValueError, match=match):
            list(sampling.FullBatch().batches(data))

    @pytest.mark.parametrize(
        "step",
        [
            lambda data: data.batch(5),
            lambda data: data.batch(5).prefetch(1),
            lambda data: data.batch(5).map(lambda x, y: (2 * x, y)),
            lambda data: data.repeat(3),
            lambda data: data.repeat(),
            lambda data: data.shuffle(10),
            lambda data: data.take(4).concatenate(data.batch(1)),
        ],
        ids=[
            "batch",
            "below prefetch",
            "below map",
            "repeat",
            "for ever",
            "shuffle",
            "a part",
        ],
    )
    def test_pipelines_whose_elements_are_not_records_are_refused(self, step):
        pipeline = step(tf.data.Dataset.from_tensor_slices(numbered()))
        with pytest.raises(
            ValueError, match="may hold several records.*#rows-that-are"
        ):
            sampling.Poisson(0.1).batches(pipeline)

    @pytest.mark.parametrize(
        "step",
        [
            lambda data: data.map(lambda x, y: (x, y), num_parallel_calls=2),
            lambda data: data.take(40).skip(10).shard(2, 0),
            lambda data: data.cache().prefetch(2).with_options(tf.data.Options()),
            lambda data: tf.data.Dataset.zip((data.map(lambda x, y: x), data)).map(
                lambda x, other: (x, other[1])
            ),
        ],
        ids=["map", "parts", "cache", "zip"],
    )
    def test_pipelines_of_records_are_taken(self, step):
        pipeline = step(tf.data.Dataset.from_tensor_slices(numbered()))
        batches = sampling.Poisson(0.5).batches(pipeline)
        assert batches.population == int(pipeline.cardinality())
        x, y, _ = next(iter(batches))
        assert x.shape[1:] == numbered()[0].shape[1:] and y.shape.rank == 1

    def test_records_must_have_one_shape(self):
        with pytest.raises(
            ValueError, match="record 1 is unlike.*x..a.. has the shape"
        ):
            open_source(_Records([(2,), (3,)]))

    def test_keras_sequences_are_refused(self):
        class Sequence(tf.keras.utils.Sequence):
            def __len__(self):
                return 3

            def __getitem__(self, index):
                return np.ones((2, 2)), np.ones(2)

        with pytest.raises(ValueError, match="gives batches"):
            sampling.Poisson(0.1).batches(Sequence())

    def test_population_must_be_the_stated_one(self):
        for scheme in (sampling.FixedSize(5, 61), sampling.ShuffledEpochs(5, 61)):
            with pytest.raises(ValueError, match="population = 61 but there are 60"):
                scheme.batches(numbered())
        with pytest.raises(ValueError, match="population = 10 is less"):
            sampling.Poisson(0.1, 20, 10).batches(numbered())


class OneArray:
    """Writes every record to the same array."""

    def __init__(self):
        self._x = np.zeros(2, "float32")

    def __len__(self):
        return 20

    def __getitem__(self, i):
        self._x[:] = i
        return self._x


class OneArrayOfMany(OneArray):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


@pytest.mark.parametrize("data, workers", [(OneArray(), 2), (OneArrayOfMany(), None)])
def test_records_read_together_in_one_array_are_refused(data, workers):
    with pytest.raises(ValueError, match="every record to the same array"):
        sampling.FullBatch().batches(data, workers=workers)


def test_records_read_one_by_one_may_be_in_one_array():
    (batch,) = sampling.FullBatch().batches(OneArray())
    assert batch[0].numpy()[:, 0].tolist() == list(range(20))
