"""A benchmark whose data are always at hand: the digits of scikit-learn."""

from __future__ import annotations

import numpy as np

from driver_kit.lazy import tf
from tff_tasks import models
from tff_tasks.sources import MemorySource
from tff_tasks.task import Option, PaperSettings, SettingsError, Task

_TEST_SHARE = 0.2
_CLASSES = 10


def dirichlet_split(
    labels: np.ndarray,
    clients: int,
    concentration: float,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Deals examples out to clients that prefer some labels.

    Each client draws its label distribution from a symmetric Dirichlet distribution
    (Hsu et al. 2019). The clients then take turns to draw an example of a label that is
    not used up. Clients differ by at most one in size.

    Args:
      labels: of all examples.
      clients: how many.
      concentration: of the Dirichlet distribution; small is uneven.
      rng: makes the choices.

    Returns:
      The indices of each client's examples.

    Raises:
      SettingsError: if there are fewer examples than clients.
    """
    if not 1 <= clients <= len(labels):
        raise SettingsError(
            f"num_clients must be at most the number of examples, {len(labels)}, got "
            f"{clients}."
        )
    classes = int(labels.max()) + 1
    piles = [
        list(rng.permutation(np.flatnonzero(labels == label)))
        for label in range(classes)
    ]
    tastes = rng.dirichlet(np.full(classes, concentration), size=clients)
    dealt: list[list[int]] = [[] for _ in range(clients)]
    for turn in range(len(labels)):
        client = turn % clients
        left = np.array([len(pile) for pile in piles])
        # A small weight for every label left, for clients whose own labels are all used
        # up.
        taste = np.where(left > 0, tastes[client] + 1e-9, 0)
        label = int(rng.choice(classes, p=taste / taste.sum()))
        dealt[client].append(int(piles[label].pop()))
    return [np.array(indices) for indices in dealt]


class Digits(Task):
    """The 1797 digits of scikit-learn, dealt out to clients that prefer some labels."""

    name = "digits"
    title = "Digits of scikit-learn, a small network"
    metric = "accuracy"
    # No part of the paper: its defaults were found by trying.
    paper = PaperSettings(
        rounds=150,
        client_batch_size=5,
        client_learning_rate=0.1,
        server_learning_rate=0.32,
        clip_range=(0.05, 1.0),
        fixed_clip=0.3,
        noise_multiplier=0.1,
        clients_per_round=50,
        shuffle_buffer=1797,
        eval_split="validation",
        # 2410 parameters: the noise is as long as the signal only at 1.
        noise_grid=(0.0, 0.1, 0.3, 1.0),
    )
    options = {
        "num_clients": Option(200, 200, "Clients that training images are dealt to."),
        "hidden_units": Option(32, 32, "Width of the network's hidden layer."),
        "concentration_percent": Option(
            50,
            50,
            "Hundred times the concentration of the Dirichlet distribution of a "
            "client's labels: small numbers make clients differ.",
        ),
    }

    def load(self, data_dir):
        from sklearn import datasets, model_selection

        images, labels = datasets.load_digits(return_X_y=True)
        training, test, training_labels, test_labels = model_selection.train_test_split(
            images, labels, test_size=_TEST_SHARE, stratify=labels, random_state=0
        )
        dealt = dirichlet_split(
            training_labels,
            self.settings["num_clients"],
            self.settings["concentration_percent"] / 100,
            np.random.default_rng(0),
        )
        dealt_test = np.array_split(np.arange(len(test)), 20)
        return {
            "train": _source(training, training_labels, dealt),
            "test": _source(test, test_labels, dealt_test),
        }

    def make_synthetic(self, rng):
        return self.load(None)

    def encode(self, examples, rng=None):
        pixels = examples["pixels"].astype(np.float32) / 8 - 1
        return pixels, examples["label"].astype(np.int32)

    def build_model(self):
        return models.digits_network(self.settings["hidden_units"])

    def loss(self):
        return tf.keras.losses.SparseCategoricalCrossentropy()

    def metrics(self):
        return [tf.keras.metrics.SparseCategoricalAccuracy("accuracy")]


def _source(pixels, labels, dealt):
    return MemorySource(
        {
            f"writer_{i:04d}": {"pixels": pixels[indices], "label": labels[indices]}
            for i, indices in enumerate(dealt)
        }
    )
