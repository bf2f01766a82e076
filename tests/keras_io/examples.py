"""The examples of keras.io that docs/keras_examples.md lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

import tfdpclip as dpc
from tests.keras_io import steps
from tests.keras_io.setup import Setup, of_entry, with_batchnorm
from tests.proof_coverage.examples import IMAGES, SERIES, TABLES, TEXTS

K = tf.keras


@dataclasses.dataclass(frozen=True)
class Example:
    """An example in its published form and in the form that trains.

    Attributes:
      trains: the form that trains; None if there is none.
      published: the form of keras.io, where it is refused.
      error: parts of the error's text, each of which says what to do or why.
      change: the change that makes the published form train, or a remark.
    """

    trains: Callable[[], Setup] | None
    published: Callable[[], Setup] | None = None
    error: tuple[str, ...] = ()
    change: str = ""


def _tokens():
    return dpc.keras.PerExampleLoss(
        K.losses.SparseCategoricalCrossentropy(from_logits=True)
    )


def _cross_entropy():
    return K.losses.SparseCategoricalCrossentropy(from_logits=True)


def _of_integers(loss):
    """A loss of integer labels, which Keras 3 converts to floats."""

    def of_integers(labels, found):
        return loss(tf.cast(labels, tf.int32), found)

    return of_integers


def _per_example_ctc():
    def ctc(labels, logits):
        labels = tf.cast(labels, tf.int32)
        many = tf.ones_like(labels[:, 0])
        lengths = 3 * many, tf.shape(logits)[1] * many
        return tf.nn.ctc_loss(labels, logits, *lengths, False, blank_index=-1)

    return ctc


_CTC = (
    "TensorFlow's CTC takes one example at a time, which fused LSTM and GRU layers do "
    "not allow: the loop over time [below](#ctc), for sequences of one length"
)
_BATCHNORM = "`model = dpc.keras.convert_batchnorm(model)`: groups for batches"
_PER_TOKEN = "`loss=dpc.keras.PerExampleLoss(loss)`: each example over its own tokens"
_MIXES = "compares the examples of a batch"


def _normalised(entry, **options) -> Example:
    """A model with batch normalisation, and its conversion."""
    return Example(
        of_entry(
            entry,
            change=lambda model: dpc.keras.convert_batchnorm(with_batchnorm(model)),
            **options,
        ),
        of_entry(entry, change=with_batchnorm, **options),
        ("convert_batchnorm",),
        _BATCHNORM,
    )


VISION = {
    "Simple MNIST convnet": Example(of_entry(IMAGES["MNIST convnet"])),
    "Image classification from scratch": _normalised(
        IMAGES["image classification from scratch"]
    ),
    "Image classification with Vision Transformer": Example(
        of_entry(IMAGES["vision transformer"])
    ),
    "Image classification with Swin Transformers": Example(
        of_entry(IMAGES["Swin transformer"])
    ),
    "Image classification with modern MLP models": Example(
        of_entry(IMAGES["MLP-Mixer"])
    ),
    "Image classification with ConvMixer": _normalised(IMAGES["ConvMixer"]),
    "Compact Convolutional Transformers": Example(
        of_entry(IMAGES["compact convolutional transformer"])
    ),
    "Learning to tokenize in Vision Transformers": Example(
        of_entry(IMAGES["token learner"])
    ),
    "Point cloud classification with PointNet": _normalised(IMAGES["PointNet"]),
    "Image segmentation with a U-Net-like architecture": _normalised(IMAGES["U-Net"]),
    "Image Super-Resolution using an Efficient Sub-Pixel CNN": Example(
        of_entry(IMAGES["super-resolution"])
    ),
    "Convolutional autoencoder for image denoising": Example(
        of_entry(IMAGES["denoising autoencoder"], loss=lambda: "binary_crossentropy")
    ),
    "Zero-DCE for low-light image enhancement": Example(steps.zero_dce),
    "OCR model for reading Captchas": Example(
        steps.captcha(steps.ctc_of_probabilities),
        steps.captcha(steps.tensorflows_ctc),
        ("ctc_loss",),
        _CTC,
    ),
    "3D image classification from CT scans": _normalised(IMAGES["3D images"]),
    "Next-Frame Video Prediction with Convolutional LSTMs": _normalised(
        IMAGES["next-frame prediction"], loss=lambda: "binary_crossentropy"
    ),
    "Knowledge Distillation": Example(
        steps.distillation,
        change="the teacher was trained on public data, or is a release of its own",
    ),
}

TEXT = {
    "Text classification from scratch": Example(
        of_entry(TEXTS["text classification from scratch"]),
        change="the vocabulary is public, or a release of its own",
    ),
    "Text classification with Transformer": Example(
        of_entry(TEXTS["IMDB transformer"])
    ),
    "Bidirectional LSTM on IMDB": Example(of_entry(TEXTS["bidirectional LSTM"])),
    "Character-level recurrent sequence-to-sequence model": Example(
        of_entry(TEXTS["seq2seq of characters"])
    ),
    "Sequence to sequence learning for performing number addition": Example(
        of_entry(TEXTS["addition of numbers"])
    ),
    "English-to-Spanish translation with a sequence-to-sequence Transformer": Example(
        of_entry(
            TEXTS["translation by a transformer"],
            loss=_tokens,
            largest=20,
            classes=20,
            change=steps.with_target_mask,
        ),
        of_entry(
            TEXTS["translation by a transformer"],
            loss=_cross_entropy,
            largest=20,
            classes=20,
            change=steps.with_target_mask,
        ),
        ("PerExampleLoss",),
        _PER_TOKEN,
    ),
    "Text generation with a miniature GPT": Example(
        of_entry(TEXTS["miniature GPT"], largest=20, classes=20)
    ),
    "End-to-end Masked Language Modeling with BERT": Example(
        steps.masked_tokens(per_example=True),
        steps.masked_tokens(per_example=False),
        ("own",),
        "divide by each example's tokens: `axis=-1` in both `reduce_sum`",
    ),
    "Named Entity Recognition using Transformers": Example(
        of_entry(
            TEXTS["named entities, a mean an example"],
            loss=lambda: _of_integers(TEXTS["named entities, a mean an example"].loss),
            classes=4,
        ),
        of_entry(
            TEXTS["named entities"],
            loss=lambda: _of_integers(TEXTS["named entities"].loss),
            classes=4,
        ),
        ("own",),
        "divide by each example's tokens: `axis=-1` in both `reduce_sum`",
    ),
    "Text Extraction with BERT": Example(
        of_entry(
            TEXTS["answers to questions"],
            loss=lambda: [_cross_entropy(), _cross_entropy()],
        )
    ),
    "Parameter-efficient fine-tuning with LoRA": Example(
        of_entry(TEXTS["low-rank adaptation"], largest=20, classes=20)
    ),
}

STRUCTURED = {
    "Structured data classification from scratch": Example(
        of_entry(TABLES["structured data"], classes=2)
    ),
    "Imbalanced classification: credit card fraud detection": Example(
        of_entry(TABLES["imbalanced classes"], class_weight={0: 0.1, 1: 1.0}),
        change="`class_weight` is public, not counted in the data",
    ),
    "Wide, Deep, and Cross networks: wide and deep": Example(
        of_entry(TABLES["wide and deep"])
    ),
    "Wide, Deep, and Cross networks: deep and cross": Example(
        of_entry(TABLES["deep and cross"])
    ),
    "Structured data learning with TabTransformer": Example(
        of_entry(TABLES["TabTransformer"])
    ),
    "Gated Residual and Variable Selection Networks": Example(
        of_entry(TABLES["gated residual networks"])
    ),
    "Neural Decision Forests": Example(of_entry(TABLES["neural decision forest"])),
    "Collaborative Filtering for Movie Recommendations": Example(
        of_entry(TABLES["collaborative filtering"]),
        of_entry(TABLES["collaborative filtering, tensordot"]),
        ("combines",),
        "`Dot(axes=1)([users, movies])`: `tensordot(..., 2)` adds up all pairs of the "
        "batch. A record is one rating; of a person, give `people=`",
    ),
    "A Transformer-based recommendation system": Example(
        of_entry(TABLES["behaviour sequence transformer"])
    ),
    "Recommending movies: retrieval (two towers)": Example(
        None,
        of_entry(TABLES["two-tower retrieval"], labels=lambda y: y),
        ("combines",),
        f"{_MIXES}; draw negatives for each record in the pipeline, at random",
    ),
}

SERIES_AND_SOUND = {
    "Timeseries classification with a Transformer model": Example(
        of_entry(SERIES["time series by a transformer"])
    ),
    "Timeseries classification from scratch": _normalised(
        SERIES["time series by a convnet"]
    ),
    "Timeseries forecasting for weather prediction": Example(
        of_entry(SERIES["weather by an LSTM"]),
        change="windows overlap: a record is a window, not a person or a day",
    ),
    "Timeseries anomaly detection using an Autoencoder": Example(
        of_entry(SERIES["anomalies by an autoencoder"])
    ),
    "Traffic forecasting using graph neural networks and LSTM": Example(
        of_entry(SERIES["traffic by a graph and an LSTM"])
    ),
    "Automatic Speech Recognition with Transformer": Example(
        of_entry(SERIES["speech by a transformer"], largest=20, classes=20)
    ),
    "Automatic Speech Recognition using CTC": Example(
        None,
        of_entry(SERIES["speech by CTC"], loss=_per_example_ctc, classes=5, smallest=1),
        ("ctc_loss",),
        _CTC,
    ),
    "Speaker Recognition": Example(of_entry(SERIES["speakers by their spectra"])),
    "Audio classification with the STFT in the model": Example(
        of_entry(SERIES["sounds by their spectrograms"])
    ),
    "WaveNet-like vocoding": Example(of_entry(SERIES["WaveNet"])),
}

GENERATIVE = {
    "Variational AutoEncoder": Example(steps.variational),
    "Variational AutoEncoder, one term weighted": Example(
        steps.variational_weighted_once
    ),
    "Vector-Quantized Variational Autoencoders": Example(
        of_entry(IMAGES["vector-quantised autoencoder"])
    ),
    "Denoising Diffusion Implicit Models": Example(steps.diffusion),
    "DCGAN, and the GAN of Keras's guide": Example(
        steps.gan(count=8),
        steps.gan(count=None),
        ("was updated by the training step",),
        "a constant batch size of the generator: the number of records is private",
    ),
    "WGAN-GP": Example(
        steps.wasserstein(1),
        steps.wasserstein(2),
        ("more than once, or in a loop",),
        "one step of the critic for each batch; for several, a generator that trains "
        "in every third step",
    ),
}

GRAPHS_AND_METRICS = {
    "Node Classification with Graph Neural Networks": Example(
        steps.nodes_of_one_graph,
        change="**the graph is not protected**: features and edges are constants of "
        "the model, taken to be public; only labels are records",
    ),
    "Graph attention, a graph for each example": Example(
        of_entry(TABLES["graph attention"])
    ),
    "Message-passing neural network for molecules": Example(
        of_entry(TABLES["messages in molecules"]),
        change="molecules padded to one size, not merged into one large graph",
    ),
    "Image similarity estimation using a Siamese Network": Example(
        steps.triplets, change="a record is a triplet"
    ),
    "Image similarity with a contrastive loss of pairs": Example(
        of_entry(IMAGES["siamese network, pairs"], lambda: steps.contrastive(-1)),
        of_entry(IMAGES["siamese network, pairs"], lambda: steps.contrastive(None)),
        ("axis=-1",),
        "`axis=-1` in the mean of the loss: a loss for each pair. A record is a pair",
    ),
    "Metric learning for image similarity search": Example(
        None,
        steps.metric_learning,
        ("combines",),
        f"{_MIXES}; triplets that are one record, as in the Siamese network",
    ),
    "Semi-supervised image classification using SimCLR": Example(
        steps.views_alone,
        steps.simclr,
        ("combines",),
        f"{_MIXES}; compare the two views of each image alone (SimSiam), or pretrain "
        "on public images",
    ),
}

GUIDE = {
    "Customizing `fit`: `apply_gradients`": Example(
        steps.guide,
        steps.guide_by_hand,
        ("minimize",),
        "`self.optimizer.minimize(loss, self.trainable_variables, tape=tape)`",
    ),
    "Customizing `fit`: `x, y, w = data`": Example(steps.guide_weighted),
    "Customizing `fit`: a loss of your own": Example(steps.guide_low_level),
}

GROUPS = {
    "vision": VISION,
    "text": TEXT,
    "structured data": STRUCTURED,
    "time series and audio": SERIES_AND_SOUND,
    "generative": GENERATIVE,
    "graphs and metric learning": GRAPHS_AND_METRICS,
    "Keras's guide": GUIDE,
}
