"""The digits of scikit-learn, as they are, made harder, or with rare classes."""

from __future__ import annotations

import numpy as np
from sklearn import datasets, model_selection

from keras_examples.trials import Data

VARIANTS = ("plain", "hard", "imbalanced")
CLASSES = 10


def load_data(variant: str) -> Data:
    """The digits, always split alike: 64 % private, 16 % public, 20 % test."""
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 8 - 1).astype(np.float32)
    if variant == "hard":
        rng = np.random.default_rng(1)
        images = images + rng.normal(0, 0.7, images.shape).astype(np.float32)
    rest, test_x, rest_y, test_y = model_selection.train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    x, public_x, y, public_y = model_selection.train_test_split(
        rest, rest_y, test_size=0.2, stratify=rest_y, random_state=0
    )
    if variant == "imbalanced":
        # Every seventh example of classes 5 to 9 stays. The public data are left.
        place = np.zeros(len(y), int)
        for label in range(CLASSES):
            place[y == label] = np.arange(np.sum(y == label))
        kept = (y < 5) | (place % 7 == 0)
        x, y = x[kept], y[kept]
    return Data((x, y), (public_x, public_y), (test_x, test_y))
