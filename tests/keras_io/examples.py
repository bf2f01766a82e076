"""The examples of keras.io that docs/keras_examples.md lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

import tfdpclip as dpc
from tests.keras_io import further, steps
from tests.keras_io.setup import (
    Setup,
    of_entry,
    one_hot,
    sigmoid,
    softmax,
    with_batchnorm,
)
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
      needs: the package that the example needs beside TensorFlow, if any.
    """

    trains: Callable[[], Setup] | None
    published: Callable[[], Setup] | None = None
    error: tuple[str, ...] = ()
    change: str = ""
    needs: str = ""


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
    "TensorFlow's CTC takes one example at a time: the loop over time [below](#ctc), "
    "for sequences of one length, trains as a batch"
)
_BATCHNORM = "`model = dpc.keras.convert_batchnorm(model)`: groups for batches"
_PER_TOKEN = "`loss=dpc.keras.PerExampleLoss(loss)`: each example over its own tokens"
_MIXES = "compares the examples of a batch"


def _of_classes(entry, change=softmax, **options):
    """Probabilities, and the loss of labels that are numbers."""
    loss = "sparse_categorical_crossentropy"
    return of_entry(entry, lambda: loss, change=change, **options)


def _of_one_hot(entry, count, smoothing=0.0, change=softmax, **options):
    """Probabilities, and the loss of labels that are vectors."""

    def loss():
        return K.losses.CategoricalCrossentropy(label_smoothing=smoothing)

    labels = one_hot(count)
    return of_entry(entry, loss, change=change, classes=count, labels=labels, **options)


def _of_yes_and_no(entry, change=sigmoid, **options):
    """One probability, and the loss of labels 0 and 1."""
    loss = "binary_crossentropy"
    return of_entry(entry, lambda: loss, change=change, classes=2, **options)


def _normalised(entry, build=of_entry, head=lambda model: model, **options) -> Example:
    """A model with batch normalisation, and its conversion."""

    def published(model):
        return head(with_batchnorm(model))

    def converted(model):
        return dpc.keras.convert_batchnorm(published(model))

    return Example(
        build(entry, change=converted, **options),
        build(entry, change=published, **options),
        ("convert_batchnorm",),
        _BATCHNORM,
    )


VISION = {
    "Simple MNIST convnet": Example(_of_one_hot(IMAGES["MNIST convnet"], 10)),
    "Image classification from scratch": _normalised(
        IMAGES["image classification from scratch"], _of_yes_and_no, sigmoid
    ),
    "Image classification with Vision Transformer": Example(
        of_entry(IMAGES["vision transformer"])
    ),
    "Image classification with Swin Transformers": Example(
        _of_one_hot(IMAGES["Swin transformer"], 3, 0.1)
    ),
    "Image classification with modern MLP models: MLP-Mixer": Example(
        of_entry(IMAGES["MLP-Mixer"])
    ),
    "Image classification with modern MLP models: FNet": Example(
        of_entry(IMAGES["FNet of patches"])
    ),
    "Image classification with modern MLP models: gMLP": Example(
        of_entry(IMAGES["gMLP"])
    ),
    "Image classification with EANet (External Attention Transformer)": Example(
        _of_one_hot(IMAGES["external attention"], 3, 0.1)
    ),
    "Train a Vision Transformer on small datasets": Example(further.small_data_vit),
    "Image classification with Perceiver": Example(further.perceiver),
    "Image classification with ConvMixer": _normalised(
        IMAGES["ConvMixer"], _of_classes, softmax
    ),
    "Compact Convolutional Transformers": Example(
        _of_one_hot(IMAGES["compact convolutional transformer"], 3, 0.1)
    ),
    "Learning to tokenize in Vision Transformers": Example(
        of_entry(IMAGES["token learner"])
    ),
    "Point cloud classification with PointNet": _normalised(
        IMAGES["PointNet"], _of_classes, softmax
    ),
    "Image segmentation with a U-Net-like architecture": _normalised(
        IMAGES["U-Net"], _of_classes, softmax
    ),
    "Multiclass semantic segmentation using DeepLabV3+": _normalised(
        IMAGES["DeepLabV3+"]
    ),
    "Learning to Resize in Computer Vision": Example(
        further.resizer(converted=True),
        further.resizer(converted=False),
        ("convert_batchnorm",),
        _BATCHNORM,
    ),
    "Image Super-Resolution using an Efficient Sub-Pixel CNN": Example(
        of_entry(IMAGES["super-resolution"])
    ),
    "Convolutional autoencoder for image denoising": Example(
        of_entry(IMAGES["denoising autoencoder"], loss=lambda: "binary_crossentropy")
    ),
    "Zero-DCE for low-light image enhancement": Example(steps.zero_dce),
    "OCR model for reading Captchas": Example(
        steps.captcha(steps.tensorflows_ctc), change=_CTC
    ),
    "3D image classification from CT scans": _normalised(
        IMAGES["3D images"], _of_yes_and_no, sigmoid
    ),
    "Next-Frame Video Prediction with Convolutional LSTMs": _normalised(
        IMAGES["next-frame prediction"], loss=lambda: "binary_crossentropy"
    ),
    "Video Classification with Transformers": Example(
        _of_classes(IMAGES["video transformer"])
    ),
    "Video Classification with a CNN-RNN Architecture": Example(further.video),
    "Image Captioning": Example(
        further.captions(changed=True),
        further.captions(changed=False),
        ("axis=-1 in both",),
        "add up the losses of an image's captions, each over its own words "
        "(`axis=-1` in both `reduce_sum`), and call `minimize` once",
    ),
    "MixUp augmentation for image classification": Example(
        None,
        further.mixup,
        ("MixUp",),
        "mixes the images of two records; mix with public images, or with the "
        "record's own views: `PrivacyPlan(..., views=2)`",
    ),
    "Knowledge Distillation": Example(
        steps.distillation,
        change="the teacher was trained on public data, or is a release of its own",
    ),
}

TEXT = {
    "Text classification from scratch": Example(
        _of_yes_and_no(TEXTS["text classification from scratch"]),
        change="the vocabulary is public, or a release of its own",
    ),
    "Text classification with Transformer": Example(
        _of_classes(TEXTS["IMDB transformer"])
    ),
    "Bidirectional LSTM on IMDB": Example(_of_yes_and_no(TEXTS["bidirectional LSTM"])),
    "Character-level recurrent sequence-to-sequence model": Example(
        _of_one_hot(TEXTS["seq2seq of characters"], 5)
    ),
    "Sequence to sequence learning for performing number addition": Example(
        _of_one_hot(TEXTS["addition of numbers"], 6)
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
        of_entry(
            TEXTS["miniature GPT"],
            loss=lambda: [_cross_entropy(), None],
            largest=20,
            classes=20,
            change=further.with_hidden_states,
        )
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
        _of_yes_and_no(TABLES["structured data"])
    ),
    "Imbalanced classification: credit card fraud detection": Example(
        _of_yes_and_no(TABLES["imbalanced classes"], class_weight={0: 0.1, 1: 1.0}),
        change="`class_weight` is public, not counted in the data",
    ),
    "Wide, Deep, and Cross networks: wide and deep": Example(
        _of_yes_and_no(TABLES["wide and deep"])
    ),
    "Wide, Deep, and Cross networks: deep and cross": Example(
        _of_yes_and_no(TABLES["deep and cross"])
    ),
    "Structured data learning with TabTransformer": Example(
        _of_yes_and_no(TABLES["TabTransformer"])
    ),
    "Gated Residual and Variable Selection Networks": Example(
        _of_yes_and_no(TABLES["gated residual networks"])
    ),
    "Neural Decision Forests": Example(of_entry(TABLES["neural decision forest"])),
    "Collaborative Filtering for Movie Recommendations": Example(
        _of_yes_and_no(TABLES["collaborative filtering"], further.probability),
        _of_yes_and_no(
            TABLES["collaborative filtering, tensordot"], further.probability
        ),
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
        _of_classes(SERIES["time series by a transformer"])
    ),
    "Timeseries classification from scratch": _normalised(
        SERIES["time series by a convnet"], _of_classes, softmax
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
        of_entry(SERIES["speech by CTC"], loss=_per_example_ctc, classes=5, smallest=1),
        change=_CTC,
    ),
    "Speaker Recognition": Example(_of_classes(SERIES["speakers by their spectra"])),
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
    "Self-supervised contrastive learning with SimSiam": Example(
        further.simsiam(converted=True),
        further.simsiam(converted=False),
        ("convert_batchnorm",),
        _BATCHNORM,
    ),
    "Supervised Contrastive Learning": Example(
        None,
        further.supervised_contrast,
        ("combines",),
        f"{_MIXES}; pretrain on public images, or compare with candidates that come "
        "with the example",
    ),
    "Semi-supervised image classification using SimCLR": Example(
        steps.views_alone,
        steps.simclr,
        ("combines",),
        f"{_MIXES}; compare the two views of each image alone (SimSiam), or pretrain "
        "on public images",
    ),
}

RECIPES = {
    "Simple custom layer example: Antirectifier": Example(further.antirectifier),
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
    "Image classification with KerasHub: ResNet": Example(
        further.hub_resnet(converted=True),
        further.hub_resnet(converted=False),
        ("convert_batchnorm",),
        "`backbone = dpc.keras.convert_batchnorm(task.backbone)`, and a task of that; "
        "with a preset, [`dpc.keras.film(task)`](transfer.md#batch-normalisation)",
        needs="keras_hub",
    ),
    "Getting started with KerasTuner": Example(
        further.tuner,
        change="a plan for each trial, in `HyperModel.fit`; the search [costs all "
        "trials](search_cost.md#kerastuner), not the best one",
        needs="keras_tuner",
    ),
}

GROUPS = {
    "vision": VISION,
    "text": TEXT,
    "structured data": STRUCTURED,
    "time series and audio": SERIES_AND_SOUND,
    "generative": GENERATIVE,
    "graphs and metric learning": GRAPHS_AND_METRICS,
    "recipes": RECIPES,
    "Keras's guide": GUIDE,
}
