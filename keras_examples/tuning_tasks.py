"""Tasks on which a rule for the settings of private training is chosen and judged.

Half of the tasks are for the choice (`CHOSEN_ON`), and half are held out
(`HELD_OUT`): who changes the rule looks at the first half only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from driver_kit.lazy import tf
from keras_examples import image_data, made_data, plays, tiny_language
from keras_examples import tuning_models as models

Arrays = tuple[np.ndarray, np.ndarray]
_CLASSES = "sparse_categorical_crossentropy"
_LABELS = "binary_crossentropy"
_SQUARES = "mean_squared_error"
_LOSSES: dict[str, Callable[[], Any]] = {
    _CLASSES: lambda: tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    _LABELS: lambda: tf.keras.losses.BinaryCrossentropy(from_logits=True),
    _SQUARES: lambda: tf.keras.losses.MeanSquaredError(),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """The data of a task, its model, its loss and its score.

    Attributes:
      name: of the task.
      kind: of the data: images, table, text, series or public (a model that begins with
        public weights or features).
      train: private inputs and labels.
      test: inputs and labels for the score; nothing is chosen by them.
      network: makes an untrained model.
      loss_name: of the loss.
      metric: the name of the score.
      score: from labels and outputs of the model to percent.
      plain_rate: the learning rate of training without privacy, by Adam.
    """

    name: str
    kind: str
    train: Arrays
    test: Arrays
    network: models.Build
    loss_name: str = _CLASSES
    metric: str = "accuracy"
    score: models.Score = models.accuracy
    plain_rate: float = 2e-3

    @property
    def examples(self) -> int:
        """The number of training records, n: public."""
        return len(self.train[1])

    @functools.cached_property
    def signature(self) -> str:
        """A text by which a changed task is told from what it was.

        Features that a network computes differ in their last bits from machine to
        machine, so that the text has sizes, labels, and the inputs to three digits.
        """
        x, y = self.train
        weights = sum(math.prod(v.shape) for v in self.build(0).trainable_variables)
        crc = zlib.crc32(np.ascontiguousarray(y).tobytes())
        size = np.abs(x).mean()
        shape = "x".join(map(str, x.shape))
        return f"{shape}, {weights} weights, labels {crc:08x}, inputs {size:.3g}"

    def build(self, seed: int) -> tf.keras.Model:
        """A model with fresh weights of a seed."""
        tf.keras.utils.set_random_seed(seed)
        return self.network()

    def loss(self) -> tf.keras.losses.Loss:
        """A new loss, for `compile`."""
        return _LOSSES[self.loss_name]()

    def scored(self, model: tf.keras.Model) -> float:
        """The score of a model on the test records, in percent."""
        outputs = model.predict(self.test[0], batch_size=2000, verbose=0)
        # A diverged model has no score better than that of a constant.
        return self.score(self.test[1], np.nan_to_num(outputs, posinf=0.0, neginf=0.0))


_AREA: dict[str, Any] = dict(loss_name=_LABELS, metric="AUC", score=models.area)
_R2: dict[str, Any] = dict(loss_name=_SQUARES, metric="R2", score=models.explained)
_RECALL: dict[str, Any] = dict(metric="macro recall", score=models.macro_recall)
_SIX = (0.5, 0.25, 0.12, 0.07, 0.04, 0.02)
_IMAGE = (28, 28, 1)
_LENGTH, _SYMBOLS = 24, 12


_files = functools.lru_cache(maxsize=2)(image_data.of_folder)


def _images(folder: str, count: int, data_dir: str | None) -> tuple[Arrays, Arrays]:
    """The same images in every run, chosen independently of their contents."""
    images = _files(folder, data_dir)
    x, y = images.train
    chosen = np.random.default_rng(0).permutation(len(x))[:count]
    test_x, test_y = images.test
    return (_pixels(x[chosen]), y[chosen]), (_pixels(test_x), test_y)


def _pixels(images: np.ndarray) -> np.ndarray:
    return images.astype(np.float32) / 255


def _flat(*parts: Arrays) -> tuple[Arrays, ...]:
    return tuple((x.reshape(len(x), -1), y) for x, y in parts)


def _digits(name: str, data_dir: str | None) -> Task:
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)[order]
    y, cut = labels[order].astype(np.int32), 1297
    network = models.convolutions((8, 8, 1), (16,), 10, "relu")
    return Task(name, "images", (x[:cut], y[:cut]), (x[cut:], y[cut:]), network)


def _convolved(folder, count, filters, activation):
    def load(name: str, data_dir: str | None) -> Task:
        train, test = _images(folder, count, data_dir)
        network = models.convolutions(_IMAGE, filters, 10, activation)
        return Task(name, "images", train, test, network)

    return load


def _flattened(folder, count, units, activation="relu"):
    def load(name: str, data_dir: str | None) -> Task:
        train, test = _flat(*_images(folder, count, data_dir))
        network = models.dense(28 * 28, units, 10, activation)
        return Task(name, "images", train, test, network)

    return load


def _table(make, units, outputs, activation="relu", **options):
    def load(name: str, data_dir: str | None) -> Task:
        del data_dir
        train, test = make()
        network = models.dense(train[0].shape[1], units, outputs, activation)
        return Task(name, "table", train, test, network, **options)

    return load


def _positives(count, share, units, seed, activation="relu"):
    make = lambda: made_data.two_classes(count, share, 3.0, seed)  # noqa: E731
    return _table(make, units, 1, activation, **_AREA)


def _numbers(count, mean, spread, noise, freedom, seed, **options):
    make = lambda: made_data.amounts(  # noqa: E731
        count, mean, spread, noise, freedom, seed
    )
    return _table(make, (32,), 1, **_R2, **options)


def _speeches(name: str, data_dir: str | None) -> Task:
    train, test = plays.kinds(data_dir, as_bag=name == "plays_bag")
    network = models.dense(plays.BUCKETS, (), 3)
    if name != "plays_bag":
        network = models.pooled_embedding(plays.WORDS, plays.BUCKETS, 16, 3)
    return Task(name, "text", train, test, network)


def _characters(name: str, data_dir: str | None) -> Task:
    train, test = plays.next_characters(data_dir, 12)
    symbols = len(plays.ALPHABET)
    return Task(name, "text", train, test, models.lstm(12, symbols, 16, symbols))


def _series(name: str, data_dir: str | None) -> Task:
    del data_dir
    train, test = made_data.series(6000, 32, 5, 1.0, 21)
    return Task(name, "series", train, test, models.gru((32, 2), 16, 5))


def _wavelets(folder, count):
    def load(name: str, data_dir: str | None) -> Task:
        train, test = (
            (models.wavelets(x), y) for x, y in _images(folder, count, data_dir)
        )
        network = models.dense(train[0].shape[1], (), 10)
        return Task(name, "public", train, test, network)

    return load


def _learned_in_public(model, x, y, epochs) -> dict[str, np.ndarray]:
    """The weights of a model after training on public records, without its head."""
    model.compile(tf.keras.optimizers.Adam(2e-3), _LOSSES[_CLASSES]())
    model.fit(x, y, batch_size=128, epochs=epochs, verbose=0)
    values = tiny_language.weights(model)
    return {k: v for k, v in values.items() if not k.startswith("classifier/")}


def _low_rank_images(name: str, data_dir: str | None) -> Task:
    """Clothes for the upper body, after the other clothes in public."""
    private, units = [0, 2, 3, 4, 6], (128, 64)
    (x, y), (test_x, test_y) = _flat(*_images("fashion_mnist", 20_000, data_dir))
    number = np.cumsum(np.isin(np.arange(10), private)) - 1
    chosen, asked = np.isin(y, private), np.isin(test_y, private)
    train = x[chosen][:5000], number[y[chosen]][:5000].astype(np.int32)
    test = test_x[asked], number[test_y[asked]].astype(np.int32)
    tf.keras.utils.set_random_seed(0)
    public = models.low_rank_layers(28 * 28, units, 10, "full")()
    values = _learned_in_public(public, x[~chosen], y[~chosen], 5)
    network = models.low_rank_layers(28 * 28, units, 5, "lora")
    return Task(name, "public", train, test, models.from_public(network, values))


def _low_rank_decoder(name: str, data_dir: str | None) -> Task:
    """Sequences of four sources, after eight related sources in public."""
    del data_dir
    shape = tiny_language.Shape(_LENGTH, layers=1, width=32, heads=4, classes=8)
    sources = made_data.chains(8, _SYMBOLS, 31)
    (x, y), _ = made_data.walks(sources, 8000, _LENGTH, 32)
    tf.keras.utils.set_random_seed(0)
    values = _learned_in_public(tiny_language.build(shape), x, y, 5)
    others = made_data.chains(4, _SYMBOLS, 33)
    # Common steps make sequences of different classes alike: the best is 91 %.
    common = 0.4 * sources.mean(axis=0)
    mixed = 0.3 * sources[:4] + 0.1 * sources[4:] + 0.2 * others + common
    train, test = made_data.walks(mixed, 4000, _LENGTH, 34)
    shape = dataclasses.replace(shape, classes=4)
    network = functools.partial(tiny_language.build, shape, "lora")
    return Task(name, "public", train, test, models.from_public(network, values))


_Load = Callable[[str, "str | None"], Task]
_CHOSEN_ON: dict[str, _Load] = {
    "digits": _digits,
    "mnist_10000": _convolved("mnist", 10_000, (16, 32), "relu"),
    "fashion_1000": _flattened("fashion_mnist", 1000, (64,)),
    "fashion_60000": _flattened("fashion_mnist", 60_000, (128,), "tanh"),
    "table_balanced": _positives(4000, 0.5, (32,), 11),
    "table_7": _positives(10_000, 0.07, (64, 32), 12),
    "six_classes": _table(
        lambda: made_data.unequal_classes(8000, _SIX, 6.0, 13), (64,), 6, **_RECALL
    ),
    "heavy_tails": _numbers(6000, 0.0, 1.0, 0.35, 3.0, 14),
    "plays_embedding": _speeches,
    "series_gru": _series,
    "images_lora": _low_rank_images,
    "mnist_wavelets": _wavelets("mnist", 10_000),
}
_HELD_OUT: dict[str, _Load] = {
    "mnist_1000": _flattened("mnist", 1000, (64,), "tanh"),
    "fashion_10000": _convolved("fashion_mnist", 10_000, (16, 32), "tanh"),
    "mnist_60000": _convolved("mnist", 60_000, (8, 16), "relu"),
    "table_25": _positives(2500, 0.25, (32,), 15),
    "table_2": _positives(20_000, 0.02, (32, 32), 16),
    "fifteen_labels": _table(
        lambda: made_data.several_labels(
            8000, tuple(np.linspace(0.05, 0.5, 15)), 2.5, 17
        ),
        (64,),
        15,
        **_AREA,
    ),
    "large_numbers": _numbers(6000, 60.0, 15.0, 0.35, 30.0, 18, plain_rate=0.1),
    "heavy_years": _numbers(3000, 9.0, 3.0, 0.35, 3.0, 19, plain_rate=0.02),
    "plays_bag": _speeches,
    "characters_lstm": _characters,
    "decoder_lora": _low_rank_decoder,
    "fashion_wavelets": _wavelets("fashion_mnist", 10_000),
}
#: The tasks by which the rule is chosen, and those by which it is judged, by name.
CHOSEN_ON, HELD_OUT = tuple(_CHOSEN_ON), tuple(_HELD_OUT)
TASKS = CHOSEN_ON + HELD_OUT
#: The tasks that need no files of --data_dir.
WITHOUT_FILES = (
    *("digits", "table_balanced", "table_7", "six_classes", "heavy_tails"),
    *("series_gru", "table_25", "table_2", "fifteen_labels", "large_numbers"),
    *("heavy_years", "decoder_lora"),
)


def half_of(name: str) -> str:
    """Which half of the tasks a task belongs to: "chosen on" or "held out"."""
    return "chosen on" if name in _CHOSEN_ON else "held out"


def load(name: str, data_dir: str | None = None) -> Task:
    """A task by its name.

    Args:
      name: one of `TASKS`.
      data_dir: a directory with mnist, fashion_mnist and shakespeare in it, for the
        tasks that need files.

    Raises:
      UsageError: if files are missing.
    """
    return (_CHOSEN_ON | _HELD_OUT)[name](name, data_dir)
