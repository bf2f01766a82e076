"""Text of any length is padded to a constant length, or refused with that line."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD, L
from tfdpclip.gradients import ExampleIsolationError, LossStructureError

TEXTS = np.array(["a b", "b", "c a b", "a b c a b c"] * 4)
LABELS = np.arange(16.0) % 2


def trained(pool=None, masked=False, **options):
    model = tf.keras.Sequential(
        [
            tf.keras.Input((), dtype="string"),
            L.TextVectorization(vocabulary=list("abc"), **options),
            L.Embedding(6, 3, mask_zero=masked),
            pool or L.GlobalAveragePooling1D(),
            L.Dense(1),
        ]
    )
    optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=0, expected_batch_size=8)
    model.compile(optimizer, "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((TEXTS, LABELS[:, None])).batch(8)
    model.fit(data, epochs=3, verbose=0)
    return int(optimizer.iterations)


ADVICE = (
    r"padded to the longest row.*TextVectorization\(output_sequence_length=100\) or "
    r"rows.to_tensor\(shape=\[None, 100\]\)"
)


def line_of(error):
    """The layer of the message's line, made as the message has it."""
    text = re.sub(r"\s+", " ", str(error.value))
    assert re.search(ADVICE, text)
    return eval(re.search(r"TextVectorization\(.*?\)", text).group(), vars(L))


def assert_refused(**options):
    """Trains in vain, and then with the line of the message."""
    with pytest.raises((ExampleIsolationError, LossStructureError)) as found:
        trained(**options)
    length = line_of(found).get_config()["output_sequence_length"]
    options.pop("ragged", None)
    assert trained(**options, output_sequence_length=length) == 6


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True])
def test_a_mean_over_the_longest_text_is_refused_with_a_line_that_trains(ragged):
    assert_refused(ragged=ragged)


class Ragged(L.Layer):
    """Sums, or pads, the rows of a ragged tensor that is made within the layer."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce, self.table = reduce, L.Embedding(6, 3)
        self.words = L.TextVectorization(vocabulary=list("abc"), ragged=True)

    def call(self, x):
        rows = self.words(x[:, None])
        flat = rows.with_flat_values(self.table(rows.flat_values))
        return self.reduce(flat)


REDUCED = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "max": tf.reduce_max}


def fit_ragged(reduce):
    model = tf.keras.Sequential(
        [tf.keras.Input((), dtype="string"), Ragged(reduce), L.Dense(2)]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=0, expected_batch_size=8)
    model.compile(optimizer, loss, jit_compile=False)
    model.fit(tf.constant(TEXTS), LABELS, batch_size=8, verbose=0)
    assert int(optimizer.iterations) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", REDUCED)
def test_ragged_rows_get_the_same_line(name):
    with pytest.raises(ExampleIsolationError) as found:
        fit_ragged(lambda rows: REDUCED[name](rows, axis=1))
    line_of(found)
    text = re.sub(r"\s+", " ", str(found.value))
    line = re.search(r"rows.to_tensor\(.*?\)", text).group().replace("100", "4")
    line = line.replace("4]", "4, 3]")  # The rows' entries have three numbers here.
    with pytest.warns(UserWarning, match="RaggedTensorToTensor"):
        fit_ragged(lambda rows: tf.reduce_sum(eval(line, {"rows": rows}), 1))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None])
def test_padded_rows_of_numbers_train_one_by_one(shape):
    """Each text alone is padded to no other text."""
    with pytest.warns(UserWarning, match="RaggedTensorToTensor"):
        fit_ragged(lambda rows: tf.reduce_sum(rows.to_tensor(shape=shape), 1))


@pytest.mark.slow
@pytest.mark.parametrize("pool", [lambda: L.LSTM(3), lambda: L.Bidirectional(L.GRU(3))])
@pytest.mark.parametrize("masked", [False, True])
def test_texts_of_no_constant_length_are_refused_also_with_a_mask(pool, masked):
    assert_refused(pool=pool(), masked=masked)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("masked", [False, True])
def test_the_line_for_texts_trains(masked):
    assert trained(masked=masked, output_sequence_length=4) == 6


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["TextVectorization", "StringLookup"])
@pytest.mark.filterwarnings("ignore::tfdpclip.gradients.OneByOneWarning")
def test_a_lookup_in_a_model_of_single_examples_trains(layer):
    """A call that gets a table and variables writes to the table only where it does."""
    lookup = getattr(L, layer)(vocabulary=list("abc"))
    layers = [L.Embedding(6, 3), L.Lambda(tf.math.bessel_i0), L.Flatten(), L.Dense(1)]
    if layer == "TextVectorization":
        lookup = L.TextVectorization(vocabulary=list("abc"), output_sequence_length=2)
    model = tf.keras.Sequential([tf.keras.Input((1,), dtype="string"), lookup, *layers])
    optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=0, expected_batch_size=8)
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(tf.constant(TEXTS[:, None]), LABELS, batch_size=8, verbose=0)
    assert int(optimizer.iterations) == 2
