"""Layers that prepare data or augment images, inside a model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tests.proof_coverage.entry import CLASS, Entry, Of, classes, classified

K = tf.keras
L = tf.keras.layers
WORDS = ["red", "green", "blue", "black"]


def before(layer: Callable, shape: tuple, dtype: str = "float32", **options) -> Entry:
    """The layer on the data, and the classes.

    Args:
      layer: makes the layer.
      shape: of one example.
      dtype: of the data.
      **options: `embedded`, whether the layer's integer outputs are embedded; more of
        the entry.
    """
    embedded = options.pop("embedded", False)

    def build():
        inputs = K.Input(shape, dtype=dtype)
        output = layer()(inputs)
        if embedded:
            output = L.Embedding(30, 4)(output)
        return K.Model(inputs, classified(output))

    return Entry(build, Of(shape, dtype), CLASS, classes, **options)


def _adapted():
    layer = L.Normalization()
    layer.adapt(np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32))
    return layer


def _text(**options):
    def layer():
        found = L.TextVectorization(max_tokens=20, **options)
        if options.get("output_mode") == "tf_idf":
            found.adapt(np.array(["red green", "blue black red"]))
        else:
            found.set_vocabulary(WORDS)
        return found

    return layer


def _hot(name: str, mode: str, *arguments, **options):
    return lambda: getattr(L, name)(*arguments, output_mode=mode, **options)


_LOOKUPS = {
    f"{name} {mode}": before(
        _hot(name, mode, vocabulary=words), (3,), dtype, embedded=mode == "int"
    )
    for name, words, dtype in (
        ("StringLookup", WORDS, "string"),
        ("IntegerLookup", [3, 5, 7, 9], "int64"),
    )
    for mode in ("int", "multi_hot", "count")
}
_ONE_LOOKUPS = {
    f"{name} one_hot": before(_hot(name, "one_hot", vocabulary=words), (1,), dtype)
    for name, words, dtype in (
        ("StringLookup", WORDS, "string"),
        ("IntegerLookup", [3, 5, 7, 9], "int64"),
    )
}
_ENCODED = {
    f"CategoryEncoding {mode}": before(
        _hot("CategoryEncoding", mode, 6), (1,) if mode == "one_hot" else (3,), "int32"
    )
    for mode in ("one_hot", "multi_hot", "count")
}
_BINNED = {
    f"Discretization {mode}": before(
        _hot("Discretization", mode, bin_boundaries=[0.0, 0.5, 1.0]),
        (1,) if mode == "one_hot" else (3,),
        embedded=mode == "int",
    )
    for mode in ("int", "one_hot", "multi_hot", "count")
}


def _crossed():
    inputs = [K.Input((1,), dtype="string"), K.Input((1,), dtype="int64")]
    crossed = L.HashedCrossing(12, output_mode="one_hot")(inputs)
    return K.Model(inputs, classified(crossed))


def _columns():
    from tensorflow import feature_column as columns

    inputs = {"age": K.Input((1,)), "colour": K.Input((1,), dtype="string")}
    colour = columns.categorical_column_with_vocabulary_list("colour", WORDS)
    age = columns.numeric_column("age")
    features = [
        age,
        columns.bucketized_column(age, [0.0, 1.0]),
        columns.indicator_column(colour),
        columns.embedding_column(colour, 3),
    ]
    return K.Model(inputs, classified(L.DenseFeatures(features)(inputs)))


DATA = {
    "Normalization": before(lambda: L.Normalization(mean=1.0, variance=2.0), (4,)),
    "Normalization adapted": before(_adapted, (4,)),
    "Normalization inverted": before(
        lambda: L.Normalization(mean=1.0, variance=2.0, invert=True), (4,)
    ),
    "Rescaling": before(lambda: L.Rescaling(1 / 255), (4, 4, 1)),
    **_BINNED,
    **_ENCODED,
    "Hashing of words": before(lambda: L.Hashing(8), (3,), "string", embedded=True),
    "Hashing of numbers": before(lambda: L.Hashing(8), (3,), "int64", embedded=True),
    "Hashing, salted": before(
        lambda: L.Hashing(8, salt=[133, 137]), (3,), "string", embedded=True
    ),
    "Hashing multi_hot": before(
        lambda: L.Hashing(8, output_mode="multi_hot"), (3,), "string"
    ),
    "HashedCrossing": Entry(
        _crossed, [Of((1,), "string"), Of((1,), "int64")], CLASS, classes
    ),
    **_LOOKUPS,
    **_ONE_LOOKUPS,
    "StringLookup, several unknown": before(
        lambda: L.StringLookup(vocabulary=WORDS, num_oov_indices=3),
        (3,),
        "string",
        embedded=True,
    ),
    "TextVectorization": before(
        _text(output_sequence_length=5), (), "string", embedded=True
    ),
    "TextVectorization of [B, 1]": before(
        _text(output_sequence_length=5), (1,), "string", embedded=True
    ),
    "TextVectorization multi_hot": before(
        _text(output_mode="multi_hot"), (1,), "string"
    ),
    "TextVectorization count": before(_text(output_mode="count"), (1,), "string"),
    "TextVectorization tf_idf": before(_text(output_mode="tf_idf"), (1,), "string"),
    "TextVectorization of pairs": before(
        _text(output_mode="multi_hot", ngrams=2), (1,), "string"
    ),
    "DenseFeatures": Entry(
        _columns,
        {"age": Of((1,)), "colour": Of((1,), "string")},
        CLASS,
        classes,
        keras=2,
    ),
    "Resizing": before(lambda: L.Resizing(6, 6), (8, 8, 3)),
    "Resizing to nearest": before(lambda: L.Resizing(6, 6, "nearest"), (8, 8, 3)),
    "Resizing with cropping": before(
        lambda: L.Resizing(6, 4, crop_to_aspect_ratio=True), (8, 8, 3)
    ),
    "CenterCrop": before(lambda: L.CenterCrop(5, 5), (8, 8, 3)),
    "CenterCrop, enlarged": before(lambda: L.CenterCrop(10, 10), (8, 8, 3)),
    "STFTSpectrogram": before(
        lambda: L.STFTSpectrogram(frame_length=16, frame_step=8, fft_length=16),
        (64, 1),
        keras=3,
    ),
    "MelSpectrogram": before(
        lambda: L.MelSpectrogram(
            num_mel_bins=4, sampling_rate=100, sequence_stride=8, fft_length=16
        ),
        (64,),
        keras=3,
        apart=False,
        advice="It is relative to the loudest recording of a batch: in the pipeline.",
    ),
}


class Within(L.Layer):
    """Calls the given layer.

    Some of Keras 3's layers say that they put out their very input, and a functional
    model leaves them out.
    """

    def __init__(self, layer, **options):
        super().__init__(**options)
        self.layer = layer

    def call(self, x):
        return self.layer(x, training=True)


def _image(name: str, *arguments, **options) -> Entry:
    own = {k: options.pop(k) for k in ("apart", "keras") if k in options}

    def build():
        inputs = K.Input((8, 8, 3))
        found = Within(getattr(L, name)(*arguments, **options))(inputs)
        hidden = L.Conv2D(3, 3, activation="relu")(found)
        return K.Model(inputs, classified(L.GlobalAveragePooling2D()(hidden)))

    return Entry(build, Of((8, 8, 3)), CLASS, classes, **own)


_RANGE = {"value_range": (0, 1)}
AUGMENTATION = {
    "RandomBrightness": _image("RandomBrightness", 0.2, **_RANGE),
    "RandomContrast": _image("RandomContrast", 0.2),
    "RandomCrop": _image("RandomCrop", 6, 6),
    "RandomFlip": _image("RandomFlip"),
    "RandomHeight": _image("RandomHeight", 0.2, keras=2),
    "RandomWidth": _image("RandomWidth", 0.2, keras=2),
    "RandomRotation": _image("RandomRotation", 0.1),
    "RandomTranslation": _image("RandomTranslation", 0.1, 0.1),
    "RandomZoom": _image("RandomZoom", 0.1),
    "RandomZoom of both": _image("RandomZoom", 0.1, 0.2, fill_mode="constant"),
    "AutoContrast": _image("AutoContrast", keras=3, **_RANGE),
    "Equalization": _image("Equalization", keras=3, apart=False, **_RANGE),
    "ContrastLimitedAdaptiveHistogramEqualization": _image(
        "ContrastLimitedAdaptiveHistogramEqualization",
        keras=3,
        tile_grid_size=(2, 2),
        **_RANGE,
    ),
    "RandAugment": _image("RandAugment", keras=3, apart=False, **_RANGE),
    "CutMix": _image("CutMix", keras=3, apart=False),
    "MixUp": _image("MixUp", keras=3, apart=False),
    "RandomColorDegeneration": _image("RandomColorDegeneration", 0.5, keras=3),
    "RandomColorJitter": _image(
        "RandomColorJitter",
        brightness_factor=0.2,
        contrast_factor=0.2,
        saturation_factor=0.2,
        hue_factor=0.2,
        keras=3,
        **_RANGE,
    ),
    "RandomElasticTransform": _image("RandomElasticTransform", keras=3, **_RANGE),
    "RandomErasing": _image("RandomErasing", keras=3, **_RANGE),
    "RandomGaussianBlur": _image("RandomGaussianBlur", keras=3, **_RANGE),
    "RandomGrayscale": _image("RandomGrayscale", 0.5, keras=3),
    "RandomHue": _image("RandomHue", 0.2, keras=3, **_RANGE),
    "RandomInvert": _image("RandomInvert", 0.5, keras=3, **_RANGE),
    "RandomPerspective": _image("RandomPerspective", keras=3),
    "RandomPosterization": _image("RandomPosterization", 4, keras=3, **_RANGE),
    "RandomSaturation": _image("RandomSaturation", 0.2, keras=3, **_RANGE),
    "RandomSharpness": _image("RandomSharpness", 0.2, keras=3, **_RANGE),
    "RandomShear": _image("RandomShear", 0.1, 0.1, keras=3),
    "Solarization": _image("Solarization", keras=3, **_RANGE),
    "Pipeline": Entry(lambda: _pipeline(), Of((8, 8, 3)), CLASS, classes, keras=3),
}


def _pipeline():
    inputs = K.Input((8, 8, 3))
    steps = L.Pipeline([L.RandomFlip(), L.RandomRotation(0.1), L.RandomCrop(6, 6)])
    return K.Model(inputs, classified(L.Conv2D(2, 3)(steps(inputs))))


GROUPS = {"preparation of data": DATA, "augmentation": AUGMENTATION}
