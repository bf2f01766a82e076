"""Images that TensorFlow pads and cuts by numbers that it computes from their sizes."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpclip.gradients import OneByOneWarning, per_example_norms
from tfdpclip.gradients.graph.known import static_value

K = tf.Variable(np.random.default_rng(0).normal(size=(2, 2, 3, 3)).astype("float32"))
CHANGES = {
    "pad_to_bounding_box": lambda h: tf.image.pad_to_bounding_box(h, 1, 2, 8, 9),
    "resize_with_pad": lambda h: tf.image.resize_with_pad(h, 8, 6),
    "resize_with_crop_or_pad": lambda h: tf.image.resize_with_crop_or_pad(h, 8, 3),
    "crop_to_bounding_box": lambda h: tf.image.crop_to_bounding_box(h, 1, 1, 3, 2),
    "central_crop": lambda h: tf.image.central_crop(h, 0.6),
    "pad": lambda h: tf.pad(h, tf.reshape([0, 0, 1, 2, 0, 1, 0, 0], [4, 2])),
}


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.thinned(3)
@pytest.mark.filterwarnings("error::tfdpclip.gradients.OneByOneWarning")
def test_images_behind_a_trained_layer_are_padded_as_a_batch(name, rows):
    def losses(x):
        hidden = CHANGES[name](tf.nn.conv2d(x, K, 1, "SAME"))
        return tf.reduce_sum(tf.square(hidden), [1, 2, 3])

    @tf.function(input_signature=[tf.TensorSpec([rows, 5, 5, 3])], autograph=False)
    def norms(x):
        return per_example_norms(losses(x), [K])

    x = np.random.default_rng(1).normal(size=(3, 5, 5, 3)).astype("float32")
    for row, norm in enumerate(norms(x)):
        with tf.GradientTape() as tape:
            loss = losses(tf.constant(x[row : row + 1]))
        alone = tf.norm(tf.convert_to_tensor(tape.gradient(loss, K)))
        np.testing.assert_allclose(norm, alone, rtol=1e-4)
    assert OneByOneWarning  # The filter names it.


VALUES = {
    "a reshape": (lambda s: tf.reshape(tf.stack([s[1], 2, s[2], s[0]]), [2, 2]), "5 2"),
    "a further axis": (lambda s: tf.expand_dims(tf.stack([s[1], s[0]]), 0), "5"),
    "a number": (lambda s: tf.reshape(s[1:2], []), "5"),
    "a half, cut": (lambda s: tf.cast(s[1] / 2, tf.int32), "2"),
}


@pytest.mark.parametrize("name", VALUES)
def test_known_numbers_have_the_shape_and_the_type_of_their_tensor(name):
    change, first = VALUES[name]
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 5, 6])
        tensor = change(tf.shape(x))
        value = static_value(tensor)
    assert list(np.shape(value)) == tensor.shape.as_list()
    numbers = [n for n in np.ravel(value).tolist() if n is not None]
    assert [str(n) for n in numbers][: len(first.split())] == first.split()
