"""Networks of `keras.applications`, and families of KerasHub."""

from __future__ import annotations

import tensorflow as tf

import tfdpclip as dpc
from tests import stack
from tests.proof_coverage.entry import CLASS, Entry, Of, classes
from tests.zoo import entries as zoo

LORA_RANK = 4


def _network(name: str, size: int = 32, **options) -> Entry:
    def build():
        model = getattr(tf.keras.applications, name)(
            weights=None,
            input_shape=(size, size, 3),
            classes=3,
            classifier_activation=None,
        )
        normalized = tf.keras.layers.BatchNormalization
        if not any(isinstance(layer, normalized) for layer in model.layers):
            return model
        return dpc.keras.convert_batchnorm(model)

    return Entry(build, Of((size, size, 3)), CLASS, classes, **options)


APPLICATIONS = {
    **{
        name: _network(name)
        for name in """ConvNeXtTiny DenseNet121 EfficientNetB0 EfficientNetV2B0
        MobileNet MobileNetV2 MobileNetV3Large MobileNetV3Small NASNetMobile
        ResNet50 ResNet50V2 VGG16""".split()
    },
    "InceptionV3": _network("InceptionV3", 75),
    "InceptionResNetV2": _network("InceptionResNetV2", 75),
    "Xception": _network("Xception", 71),
    **{
        name: _network(name, keras=2)
        for name in ("RegNetX002", "RegNetY002", "ResNetRS50")
    },
}


def _per_token(labels, logits):
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return dpc.keras.PerExampleLoss(loss)(labels, tf.cast(logits, tf.float32))


def _family(entry: zoo.Entry, lora: bool) -> Entry:
    def build():
        model = entry.build()
        if lora:
            model.backbone.enable_lora(LORA_RANK, entry.targets)
        return model

    specs = tf.nest.map_structure(
        lambda array: Of(array.shape[1:], array.dtype.name), entry.data()
    )
    return Entry(build, specs[0], specs[1], _per_token, keras=3)


FAMILIES = {
    f"{name}{', LoRA' if lora else ''}": _family(entry, lora)
    for name, entry in zoo.FAMILIES.items()
    for lora in (False, True)
    if not (lora and entry.lora == "none")
}
#: Whether KerasHub, for `FAMILIES`, is there.
HUB = zoo.HUB and stack.KERAS_3

GROUPS = {"keras.applications": APPLICATIONS, "KerasHub": FAMILIES}
