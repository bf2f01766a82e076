"""The zoo: published models, tiny and with random weights."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tfdpclip as dpc

#: Whether KerasHub can be asked for; it is not imported before a model is built.
HUB = importlib.util.find_spec("keras_hub") is not None
#: How many records there are, how many tokens each has, and how many tokens there are.
RECORDS, TOKENS, VOCABULARY = 16, 8, 32


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model, and its training data.

    Attributes:
      kind: the kind of model, for the table.
      build: gives the model.
      data: gives inputs and labels of `RECORDS` records.
      full: the outcome of training all weights: "works", "works slowly" or "refused".
      lora: the same of LoRA; "none" where the model has no `enable_lora`.
      targets: the layers that get LoRA, if they differ from KerasHub's choice.
      advice: why it is slow or refused, and the remedy.
      tolerance: the allowed relative error of a norm.
    """

    kind: str
    build: Callable[[], tf.keras.Model]
    data: Callable[[], tuple[Any, Any]]
    full: str = "works"
    lora: str = "works"
    targets: tuple[str, ...] | None = None
    advice: str = ""
    tolerance: float = 1e-5


def _hub():
    import keras_hub  # Slow, and not everywhere.

    return keras_hub.models


def _tokens(seed: int, length: int = TOKENS):
    """Tokens and the mask of their padding: records are of several lengths."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, VOCABULARY, [RECORDS, length], dtype=np.int32)
    lengths = rng.integers(length // 2, length + 1, [RECORDS, 1])
    mask = (np.arange(length) < lengths).astype(np.int32)
    return tokens * mask, mask


def _labels(classes: int = 2):
    return np.random.default_rng(5).integers(0, classes, [RECORDS], dtype=np.int32)


def _sentences(segments: bool = False, mask: bool = True):
    tokens, present = _tokens(0)
    x = {"token_ids": tokens}
    if mask:
        x["padding_mask"] = present
    if segments:
        x["segment_ids"] = (np.arange(TOKENS) > 4).astype(np.int32) * present
    return x, _labels()


def _next_tokens():
    tokens, mask = _tokens(0, TOKENS + 1)
    return {"token_ids": tokens[:, :-1], "padding_mask": mask[:, :-1]}, tokens[:, 1:]


def _translations():
    source, mask = _tokens(0)
    target, target_mask = _tokens(1, TOKENS + 1)
    x = {"encoder_token_ids": source, "encoder_padding_mask": mask}
    x["decoder_token_ids"] = target[:, :-1]
    x["decoder_padding_mask"] = target_mask[:, :-1]
    return x, target[:, 1:]


def _images(size: int):
    def data():
        rng = np.random.default_rng(0)
        x = rng.uniform(-1, 1, [RECORDS, size, size, 3]).astype(np.float32)
        return x, _labels()

    return data


_SMALL = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 1,
    "hidden_dim": 16,
    "intermediate_dim": 24,
}
_HEADS = {**_SMALL, "num_heads": 2, "dropout": 0.0}
_GROUPED = {**_SMALL, "num_query_heads": 4, "num_key_value_heads": 2}


def _classifier(family: str, backbone: dict, **options: Any):
    def build():
        hub = _hub()
        return getattr(hub, f"{family}TextClassifier")(
            backbone=getattr(hub, f"{family}Backbone")(**backbone),
            num_classes=2,
            preprocessor=None,
            dropout=0.0,
            **options,
        )

    return build


def _causal(family: str, backbone: dict):
    def build():
        hub = _hub()
        return getattr(hub, f"{family}CausalLM")(
            backbone=getattr(hub, f"{family}Backbone")(**backbone), preprocessor=None
        )

    return build


def _sequences(family: str, backbone: dict):
    def build():
        hub = _hub()
        return getattr(hub, f"{family}Seq2SeqLM")(
            backbone=getattr(hub, f"{family}Backbone")(**backbone), preprocessor=None
        )

    return build


def _pictures(family: str, backbone: dict):
    def build():
        hub = _hub()
        return getattr(hub, f"{family}ImageClassifier")(
            backbone=getattr(hub, f"{family}Backbone")(**backbone),
            num_classes=2,
            preprocessor=None,
        )

    return build


def _texts(build: Callable, data: dict | None = None, **options: Any) -> Entry:
    return Entry("text classifier", build, lambda: _sentences(**data or {}), **options)


def _language(family: str, backbone: dict, **options: Any) -> Entry:
    build = _causal(family, backbone)
    return Entry("causal language model", build, _next_tokens, **options)


_NEOX = """KerasHub finds no layer for LoRA unless it is told:
`enable_lora(4, ["query_key_value"])`."""
_MIXTRAL = """Its experts have the records on their second axis, behind a gradient
function of its own (silu's), and its routers add a loss that balances the whole batch.
There is no way around it yet."""
_T5 = """The bias of relative positions takes the Jacobian. LoRA freezes it; T5's layers
have other names than KerasHub looks for:
`enable_lora(4, ["query_projector", "value_projector"])`."""


_ALBERT = {**_HEADS, "embedding_dim": 8, "num_groups": 1, "num_inner_repetitions": 2}
_VIT = {
    "image_shape": (16, 16, 3),
    "patch_size": 8,
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 16,
}

#: The families of KerasHub that people fine-tune, by name.
FAMILIES = {
    "BERT": _texts(_classifier("Bert", _HEADS), {"segments": True}),
    "RoBERTa": _texts(_classifier("Roberta", _HEADS)),
    "XLM-RoBERTa": _texts(_classifier("XLMRoberta", _HEADS)),
    "DistilBERT": _texts(_classifier("DistilBert", _HEADS)),
    "DeBERTa-v3": _texts(
        _classifier("DebertaV3", {**_HEADS, "bucket_size": 4}),
    ),
    "ALBERT": _texts(_classifier("Albert", _ALBERT), {"segments": True}),
    "RoFormer-v2": _texts(
        _classifier("RoformerV2", {**_HEADS, "head_size": 8}),
        data={"segments": True, "mask": False},
    ),
    "FNet": _texts(
        _classifier("FNet", {**_SMALL, "dropout": 0.0}),
        lora="none",
        advice="There is no attention whose layers could get LoRA.",
        data={"segments": True, "mask": False},
    ),
    "GPT-2": _language("GPT2", _HEADS),
    "OPT": _language("OPT", _HEADS),
    "BLOOM": _language("Bloom", _HEADS),
    "GPT-NeoX": _language(
        "GPTNeoX", _HEADS, targets=("query_key_value",), advice=_NEOX
    ),
    "Falcon": _language("Falcon", {**_SMALL, "num_attention_heads": 2}),
    "Gemma": _language("Gemma", {**_GROUPED, "head_dim": 8}),
    "Gemma 2": _language(
        "Gemma",
        {
            **_GROUPED,
            "head_dim": 8,
            "use_post_ffw_norm": True,
            "use_post_attention_norm": True,
            "attention_logit_soft_cap": 50.0,
            "final_logit_soft_cap": 30.0,
            "use_sliding_window_attention": True,
            "sliding_window_size": 4,
        },
    ),
    "Gemma 3": _language("Gemma3", {**_GROUPED, "head_dim": 8, "image_size": None}),
    "Llama": _language("Llama", _GROUPED),
    "Llama 3": _language("Llama3", _GROUPED),
    "Mistral": _language("Mistral", _GROUPED),
    "Mixtral": _language(
        "Mixtral",
        {**_GROUPED, "num_experts": 4},
        full="refused",
        lora="refused",
        advice=_MIXTRAL,
    ),
    "Qwen 2": _language("Qwen", _GROUPED),
    "Qwen 3": _language("Qwen3", {**_GROUPED, "head_dim": 8}),
    "Phi-3": _language("Phi3", _GROUPED),
    "T5": Entry(
        "sequence to sequence",
        _sequences("T5", _HEADS),
        _translations,
        full="works slowly",
        targets=("query_projector", "value_projector"),
        advice=_T5,
    ),
    "BART": Entry("sequence to sequence", _sequences("Bart", _HEADS), _translations),
    "ViT": Entry(
        "image classifier", _pictures("ViT", {**_VIT, "mlp_dim": 24}), _images(16)
    ),
    "DeiT": Entry(
        "image classifier",
        _pictures("DeiT", {**_VIT, "intermediate_dim": 24}),
        _images(16),
    ),
}


def _convolutions(name: str, size: int = 32, **options: Any) -> Entry:
    def build():
        model = getattr(tf.keras.applications, name)(
            weights=None,
            input_shape=(size, size, 3),
            classes=2,
            classifier_activation=None,
        )
        normalized = tf.keras.layers.BatchNormalization
        if not any(isinstance(layer, normalized) for layer in model.layers):
            return model
        return dpc.keras.convert_batchnorm(model)

    return Entry("convolutional network", build, _images(size), lora="none", **options)


_SINGLE_PIXELS = {
    "tolerance": 1e-4,
    "advice": """Norms to 1e-4, not 1e-5: at 32 pixels group normalisation of single
    pixels magnifies rounding.""",
}
_LAST_DIGITS = {
    "tolerance": 1e-2,
    "advice": """Norms to 3e-3: at 75 pixels the last digit of one pixel moves a norm by
    as much, as group normalisation of single pixels and rectifiers magnify it.""",
}
#: Networks of `keras.applications`, with group in place of batch normalisation.
APPLICATIONS = {
    "MobileNetV2": _convolutions("MobileNetV2"),
    "MobileNetV3Small": _convolutions("MobileNetV3Small"),
    "EfficientNetV2B0": _convolutions("EfficientNetV2B0", **_SINGLE_PIXELS),
    "ResNet50": _convolutions("ResNet50", **_SINGLE_PIXELS),
    "DenseNet121": _convolutions("DenseNet121"),
    "NASNetMobile": _convolutions(
        "NASNetMobile",
        advice="""At 32 pixels rounding refused one run of two, before a copied record
        was allowed four times what nudged data move. If it does, take larger images.
        """,
    ),
    "Xception": _convolutions("Xception", 71),
    "InceptionV3": _convolutions("InceptionV3", 75, **_LAST_DIGITS),
    "ConvNeXtTiny": _convolutions("ConvNeXtTiny"),
    "VGG16": _convolutions("VGG16"),
}

ENTRIES = {**FAMILIES, **APPLICATIONS}
