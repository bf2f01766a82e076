"""The three benchmarks on text: SHAKESPEARE, SO-NWP and SO-LR."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from driver_kit.lazy import tf
from tff_tasks import models, objectives, preprocessing, vocabulary
from tff_tasks.client_files import Feature
from tff_tasks.sources import MemorySource
from tff_tasks.task import CAP, Option, PaperSettings, Task, client_names
from tff_tasks.vocabulary import PAD, SequenceIds

_MASK_LOSS = Option(
    False,
    False,
    "Whether padding is left out of the loss. The published models were, as far as can "
    "be inferred, trained on the mean over all positions: --nomask_loss.",
    ours=True,
)
_PADDING_COUNTS = (
    "--nomask_loss: the loss is a mean over all positions, padding included, as in the "
    "paper's code. Where most of a sequence is padding, clients learn to predict "
    "padding, which nobody measures, and short texts weigh less. Leave the flag out to "
    "train on the text alone."
)
_STACK_OVERFLOW_SPLITS = {"train": "train", "test": "test", "heldout": "heldout"}
_SYNTHETIC_WORDS = (
    "how do i sort a list of strings in python what is the best way to read file from "
    "java use map function and return value error when running this code"
).split()
_SYNTHETIC_TAGS = ("python", "java", "list", "string", "file", "error", "map")


class ShakespeareCharacter(Task):
    """SHAKESPEARE: a recurrent network predicts the next character of a role."""

    name = "shakespeare_character"
    title = "Shakespeare next character, LSTM"
    metric = "accuracy"
    paper = PaperSettings(
        rounds=1200,
        client_batch_size=4,
        client_learning_rate=1.0,
        server_learning_rate=10**-0.5,
        clip_range=(0.25, 3.6),
        fixed_clip=0.95,
        noise_multiplier=0.1,
        private_clients=510,
        shuffle_buffer=50,
    )
    options = {
        "sequence_length": Option(80, 80, "Characters that are predicted at once."),
        "recurrent_units": Option(256, 256, "Width of either recurrent layer."),
        "mask_loss": _MASK_LOSS,
    }
    file_name = "shakespeare.sqlite"
    features = {"snippets": Feature("bytes")}

    def make_synthetic(self, rng):
        lines = [
            b"To be, or not to be: that is the question.",
            b"Now is the winter of our discontent\nMade glorious summer",
            b"Friends, Romans, countrymen, lend me your ears;",
            b"",
            b"All the world's a stage, And all the men and women merely players. " * 2,
        ]

        def client():
            chosen = rng.integers(len(lines), size=int(rng.integers(1, 5)))
            return {"snippets": np.array([lines[i] for i in chosen], object)}

        return _splits(client, ("train", "test"))

    def encode(self, examples, rng=None):
        length = self.settings["sequence_length"]
        return (preprocessing.character_chunks(examples["snippets"], length),)

    def to_model(self, chunks):
        return preprocessing.next_item_pairs(chunks)

    def build_model(self):
        size = SequenceIds(len(vocabulary.CHARACTERS)).size
        return models.character_lstm(
            size, self.settings["sequence_length"], self.settings["recurrent_units"]
        )

    def loss(self):
        return objectives.SequenceCrossEntropy(self.settings["mask_loss"])

    def warnings(self):
        return [] if self.settings["mask_loss"] else [_PADDING_COUNTS]

    def metrics(self):
        return [objectives.AccuracyWithout((PAD,)), objectives.PositionCount()]


class StackOverflowWord(Task):
    """SO-NWP: a recurrent network predicts the next word of a sentence.

    Accuracy is reported over all words, over known words, and over known words without
    the end of a sentence; the paper does not say which of the three it shows.
    """

    name = "stackoverflow_word"
    title = "Stack Overflow next word, LSTM"
    metric = "accuracy"
    paper = PaperSettings(
        rounds=1500,
        client_batch_size=16,
        client_learning_rate=10**-0.75,
        server_learning_rate=10**0.25,
        clip_range=(0.30, 1.60),
        fixed_clip=0.30,
        noise_multiplier=0.01,
        private_clients=13958,
        max_elements=1000,
        shuffle_buffer=1000,
        max_eval_examples=10_000,
        eval_split="validation",
    )
    options = {
        "vocab_size": Option(10_000, 10_000, "How many words are known."),
        "sequence_length": Option(20, 20, "Words that are predicted at once."),
        "mask_loss": _MASK_LOSS,
        "cap": CAP,
    }
    file_name = "stackoverflow.sqlite"
    splits = _STACK_OVERFLOW_SPLITS
    features = {"tokens": Feature("bytes")}
    words: Sequence[str] = ()

    def read(self, data_dir):
        self.words = vocabulary.load_words(data_dir, self.settings["vocab_size"])
        return super().read(data_dir)

    def make_synthetic(self, rng):
        self.words = list(dict.fromkeys(_SYNTHETIC_WORDS))[:25]

        def client():
            return {"tokens": _sentences(rng, int(rng.integers(1, 30)))}

        return _splits(client, _STACK_OVERFLOW_SPLITS)

    @functools.cached_property
    def _numbers(self):
        return preprocessing.word_numbers(self.words)

    @property
    def ids(self) -> SequenceIds:
        """The numbers of the vocabulary, once data are loaded."""
        return SequenceIds(len(self.words))

    def encode(self, examples, rng=None):
        length = self.settings["sequence_length"]
        tokens = examples["tokens"]
        return (preprocessing.sentence_numbers(tokens, self._numbers, length),)

    def to_model(self, rows):
        return preprocessing.next_item_pairs(rows)

    def build_model(self):
        return models.word_lstm(self.ids.size, self.settings["sequence_length"])

    def loss(self):
        return objectives.SequenceCrossEntropy(self.settings["mask_loss"])

    def warnings(self):
        return [] if self.settings["mask_loss"] else [_PADDING_COUNTS]

    def metrics(self):
        unknown, end = self.ids.unknown, self.ids.end
        accuracy = objectives.AccuracyWithout
        return [
            accuracy((PAD,)),
            accuracy((PAD, unknown), "accuracy_without_out_of_vocab"),
            accuracy(
                (PAD, unknown, end), "accuracy_without_out_of_vocab_or_end_of_sentence"
            ),
            objectives.PositionCount(),
        ]


class StackOverflowTag(Task):
    """SO-LR: logistic regression predicts the tags of a question or answer."""

    name = "stackoverflow_tag"
    title = "Stack Overflow tags, logistic regression"
    metric = "recall_at_5"
    paper = PaperSettings(
        rounds=1500,
        client_batch_size=100,
        client_learning_rate=10**2.5,
        server_learning_rate=10**0.25,
        clip_range=(16.0, 135.0),
        fixed_clip=16.0,
        noise_multiplier=0.01,
        private_clients=13958,
        max_elements=1000,
        shuffle_buffer=1000,
        max_eval_examples=10_000,
        eval_split="validation",
    )
    options = {
        "word_vocab_size": Option(10_000, 10_000, "How many words are known."),
        "tag_vocab_size": Option(500, 500, "How many tags are predicted."),
        "bag_divisor": Option(
            "all",
            "in_vocabulary",
            "Whether word counts are divided by the number of all words or of the "
            "known ones.",
            ("all", "in_vocabulary"),
        ),
        "cap": CAP,
    }
    file_name = "stackoverflow.sqlite"
    splits = _STACK_OVERFLOW_SPLITS
    features = {name: Feature("bytes") for name in ("tokens", "title", "tags")}
    words: Sequence[str] = ()
    tags: Sequence[str] = ()
    compact = True

    def read(self, data_dir):
        self.words = vocabulary.load_words(data_dir, self.settings["word_vocab_size"])
        self.tags = vocabulary.load_tags(data_dir, self.settings["tag_vocab_size"])
        return super().read(data_dir)

    def make_synthetic(self, rng):
        self.words = list(dict.fromkeys(_SYNTHETIC_WORDS))[:25]
        self.tags = list(_SYNTHETIC_TAGS[:6])

        def client():
            count = int(rng.integers(1, 30))
            tags = [
                "|".join(rng.choice(_SYNTHETIC_TAGS, rng.integers(1, 4), replace=False))
                for _ in range(count)
            ]
            return {
                "tokens": _sentences(rng, count),
                "title": _sentences(rng, count),
                "tags": np.array([tag.encode() for tag in tags], object),
            }

        return _splits(client, _STACK_OVERFLOW_SPLITS)

    @functools.cached_property
    def _numbers(self):
        words, tags = map(preprocessing.word_numbers, (self.words, self.tags))
        return words, tags

    def encode(self, examples, rng=None):
        words, tags = self._numbers
        pairs = zip(examples["tokens"], examples["title"], strict=True)
        texts = [tokens + b" " + title for tokens, title in pairs]
        bags = preprocessing.bags_of_words(texts, words, self.settings["bag_divisor"])
        return *bags, preprocessing.multi_hot(examples["tags"], tags)

    def to_model(self, coordinates, values, labels):
        return densify_bags(coordinates, values, len(self.words)), labels

    def build_model(self):
        return models.tag_regression(len(self.words), len(self.tags))

    def loss(self):
        return tf.keras.losses.BinaryCrossentropy(
            reduction=tf.keras.losses.Reduction.SUM
        )

    @property
    def summed_loss(self):
        return True

    def metrics(self):
        return [
            objectives.RecallAt(min(5, len(self.tags))),
            tf.keras.metrics.Precision(name="precision"),
        ]


def densify_bags(coordinates, values, width: int) -> tf.Tensor:
    """Bags of words `[n, width]` from the results of `preprocessing.bags_of_words`."""
    coordinates = tf.convert_to_tensor(coordinates)
    count = tf.shape(coordinates)[0]
    known = tf.where(coordinates >= 0)
    rows = tf.cast(known[:, 0], tf.int32)
    places = tf.stack([rows, tf.gather_nd(coordinates, known)], axis=1)
    dense = tf.scatter_nd(places, tf.gather(values, rows), [count, width])
    return tf.ensure_shape(dense, [None, width])


def _sentences(rng, count):
    words = [*_SYNTHETIC_WORDS, "zebra", "quux"]
    sentences = [
        " ".join(rng.choice(words, int(rng.integers(1, 26)))) for _ in range(count)
    ]
    return np.array([sentence.encode() for sentence in sentences], object)


def _splits(client, purposes, count=10):
    return {
        purpose: MemorySource({name: client() for name in client_names(count)})
        for purpose in purposes
    }
