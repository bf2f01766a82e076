"""Text padded to the longest text of a batch moves no other example's gradient."""

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD, L
from tfdpclip.gradients import ExampleIsolationError

TEXTS = np.array(["a b", "b", "c a b", "a b c a b c"] * 4)
LABELS = np.arange(16) % 2


def trained(length=None, masked=False, pool=None):
    model = tf.keras.Sequential(
        [
            tf.keras.Input((), dtype="string"),
            L.TextVectorization(vocabulary=list("abc"), output_sequence_length=length),
            L.Embedding(6, 3, mask_zero=masked),
            pool or L.GlobalAveragePooling1D(),
            L.Dense(2),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=0, expected_batch_size=8)
    model.compile(optimizer, loss, jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((TEXTS, LABELS)).batch(8)
    model.fit(data, epochs=3, verbose=0)


def test_a_mean_over_the_longest_text_is_refused():
    with pytest.raises(
        ExampleIsolationError, match="longest example|RaggedTensorToTensor"
    ):
        trained()


@pytest.mark.slow
def test_steps_over_padding_are_refused():
    with pytest.raises(ExampleIsolationError, match="RaggedTensorToTensor"):
        trained(pool=L.LSTM(3))


def test_a_constant_length_is_sound():
    trained(length=4)


@pytest.mark.slow
def test_a_mask_of_texts_of_no_constant_length_is_refused():
    with pytest.raises(ExampleIsolationError, match="RaggedTensorToTensor"):
        trained(masked=True)
