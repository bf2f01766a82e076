"""The three benchmarks on images: CIFAR-100, EMNIST-CR and EMNIST-AE."""

from __future__ import annotations

import numpy as np

from driver_kit.lazy import tf
from tff_tasks import models, preprocessing
from tff_tasks.client_files import Feature
from tff_tasks.sources import MemorySource
from tff_tasks.task import Option, PaperSettings, Task, client_names

_EMNIST = {"pixels": Feature("float", (28, 28)), "label": Feature("int")}
_ONLY_DIGITS = Option(
    False, False, "Whether to use the ten digits only instead of all 62 characters."
)


class Cifar100Image(Task):
    """CIFAR-100: a residual network tells 100 kinds of images apart.

    Images are cropped to 24 by 24 pixels and standardised, each by itself.
    """

    name = "cifar100_image"
    title = "CIFAR-100, ResNet-18"
    metric = "accuracy"
    paper = PaperSettings(
        rounds=4000,
        client_batch_size=20,
        client_learning_rate=10**-1.0,
        server_learning_rate=10**-0.5,
        clip_range=(0.75, 2.2),
        fixed_clip=0.98,
        noise_multiplier=0.03,
        private_clients=2231,
        shuffle_buffer=500,
    )
    options = {
        "norm": Option(
            "32_groups",
            "2_groups",
            "Groups of the group normalisation; 32 with scale and offset, 2 without.",
            ("32_groups", "2_groups"),
        ),
        "distort_train_images": Option(
            True,
            False,
            "Whether training images are cropped at random and flipped.",
        ),
        "crop_size": Option(24, 24, "Height and width that images are cropped to."),
    }
    file_name = "cifar100.sqlite"
    features = {"image": Feature("int", (32, 32, 3)), "label": Feature("int")}

    def make_synthetic(self, rng):
        def client():
            labels = rng.integers(100, size=int(rng.integers(4, 12)))
            colours = labels[:, None, None, None] * np.array([1, 2, 3]) % 200
            noise = rng.integers(56, size=(len(labels), 32, 32, 3))
            return {"image": colours + noise, "label": labels}

        return _splits(client)

    def encode(self, examples, rng=None):
        images = examples["image"].astype(np.uint8)
        augment = rng if self.settings["distort_train_images"] else None
        images = preprocessing.crop(images, self.settings["crop_size"], augment)
        return preprocessing.standardize(images), examples["label"].astype(np.int32)

    def build_model(self):
        size = self.settings["crop_size"]
        return models.resnet18((size, size, 3), norm=self.settings["norm"])

    def loss(self):
        return tf.keras.losses.SparseCategoricalCrossentropy()

    def metrics(self):
        return [tf.keras.metrics.SparseCategoricalAccuracy("accuracy")]


class _Emnist(Task):
    """The common part of the tasks on handwritten characters. Ink is 0 in the files."""

    file_name = "emnist_all.sqlite"
    features = _EMNIST

    def file_splits(self):
        prefix = "digits_only" if self.settings["only_digits"] else "all"
        return {"train": f"{prefix}_train", "test": f"{prefix}_test"}

    @property
    def classes(self) -> int:
        """How many kinds of characters there are."""
        return 10 if self.settings["only_digits"] else 62

    def make_synthetic(self, rng):
        def client():
            labels = rng.integers(self.classes, size=int(rng.integers(6, 30)))
            pixels = np.ones((len(labels), 28, 28), np.float32)
            for image, label in zip(pixels, labels, strict=True):
                row, column = 3 * (label // 8) + 1, 3 * (label % 8) + 2
                image[row : row + 5, column : column + 3] = rng.random((5, 3)) * 0.3
            return {"pixels": pixels, "label": labels}

        return _splits(client)


class EmnistCharacter(_Emnist):
    """EMNIST-CR: a convolutional network reads handwritten characters."""

    name = "emnist_character"
    title = "EMNIST character recognition"
    metric = "accuracy"
    paper = PaperSettings(
        rounds=1500,
        client_batch_size=20,
        client_learning_rate=10**-1.5,
        server_learning_rate=1.0,
        clip_range=(0.28, 0.85),
        fixed_clip=0.37,
        noise_multiplier=0.1,
        private_clients=513,
        shuffle_buffer=418,
    )
    options = {
        "model_id": Option(
            "cnn_dropout",
            "cnn_dropout",
            "The network: that of the paper, or those of McMahan et al. (2017).",
            ("cnn_dropout", "cnn", "2nn"),
        ),
        "only_digits": _ONLY_DIGITS,
    }

    def encode(self, examples, rng=None):
        pixels = examples["pixels"].astype(np.float32)[..., np.newaxis]
        return pixels, examples["label"].astype(np.int32)

    def build_model(self):
        builders = {
            "cnn_dropout": models.character_cnn,
            "cnn": models.original_cnn,
            "2nn": models.two_layer_network,
        }
        return builders[self.settings["model_id"]](self.classes)

    def loss(self):
        return tf.keras.losses.SparseCategoricalCrossentropy()

    def metrics(self):
        return [tf.keras.metrics.SparseCategoricalAccuracy("accuracy")]


class EmnistAutoencoder(_Emnist):
    """EMNIST-AE: a deep autoencoder of handwritten characters, ink being 1."""

    name = "emnist_autoencoder"
    title = "EMNIST autoencoder"
    metric = "mean_squared_error"
    higher_is_better = False
    paper = PaperSettings(
        rounds=3000,
        client_batch_size=20,
        client_learning_rate=10**0.5,
        server_learning_rate=10**0.25,
        clip_range=(0.22, 0.95),
        fixed_clip=0.32,
        noise_multiplier=0.03,
        private_clients=2197,
        shuffle_buffer=418,
    )
    options = {
        "loss_reduction": Option(
            "sum",
            "mean",
            "How a batch's losses are joined. The client learning rate of Table 1 is "
            "for the sum; for the mean it is multiplied by the batch size, unless "
            "given.",
            ("sum", "mean"),
        ),
        "only_digits": _ONLY_DIGITS,
    }

    def encode(self, examples, rng=None):
        ink = 1 - examples["pixels"].astype(np.float32).reshape(-1, 784)
        return ink, ink

    def build_model(self):
        return models.autoencoder()

    def loss(self):
        reductions = tf.keras.losses.Reduction
        return tf.keras.losses.MeanSquaredError(
            reductions.SUM if self.summed_loss else reductions.SUM_OVER_BATCH_SIZE
        )

    @property
    def summed_loss(self):
        return self.settings["loss_reduction"] == "sum"

    def metrics(self):
        return [
            tf.keras.metrics.MeanSquaredError("mean_squared_error"),
            tf.keras.metrics.MeanAbsoluteError("mean_absolute_error"),
        ]


def _splits(client, train=12, test=5):
    return {
        "train": MemorySource({name: client() for name in client_names(train)}),
        "test": MemorySource({name: client() for name in client_names(test)}),
    }
