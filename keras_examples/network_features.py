"""The features that a network of `transfer_models` computes below its head."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from driver_kit import progress
from keras_examples import transfer_data


def body(model: tf.keras.Model) -> tf.keras.Model:
    """All but the head."""
    return tf.keras.Model(model.input, model.get_layer("features").output)


def compute(
    model: tf.keras.Model, data: transfer_data.TransferData, batch_size: int = 64
) -> dict[str, np.ndarray]:
    """Features, labels and split of all images, for `features.write`.

    Args:
      model: a model of `transfer_models`.
      data: the images.
      batch_size: how many at a time.
    """
    network = body(model)
    forward = tf.function(lambda x: network(x, training=False), reduce_retracing=True)
    found, labels, split = [], [], []
    parts = (("train", data.train), ("test", data.test))
    total = sum(len(transfer_data.labels_of(part)) for _, part in parts)
    shown = progress.Progress("features", total, unit="image")
    for name, part in parts:
        count = len(transfer_data.labels_of(part))
        for k in range(0, count, batch_size):
            images = transfer_data.images_of(part, k, k + batch_size)
            found.append(forward(images).numpy())
            shown.show(len(split) + min(k + batch_size, count))
        labels.append(transfer_data.labels_of(part))
        split += [name] * count
    shown.close()
    return {
        "features": np.concatenate(found),
        "labels": np.concatenate(labels),
        "split": np.array(split),
    }
