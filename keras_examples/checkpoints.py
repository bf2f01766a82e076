"""Published weights of `transfer_models`, from the published files.

Vision transformers: AugReg's .npz files, and state dicts of timm (`blocks.0.attn.qkv
.weight`), as `model.safetensors` of the Hugging Face hub or as .npz. ResNet: BiT's .npz
files. EfficientNet-Lite0: see `efficientnet_lite`. A file fits as a whole, by names and
shapes, or is refused; no code in a file is ever run.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from driver_kit import npz_files
from driver_kit.settings import UsageError
from keras_examples import efficientnet_lite, safetensor_files
from keras_examples.network_sizes import MODELS, BiT, EfficientNetLite, ViT

#: Arrays of the head, which starts anew.
_HEADS = ("_fc.", "head/", "resnet/head/", "head.")
_TIMM = "patch_embed.proj.weight"  # Only timm's files have this name.
_IMAGENET_1K = 1000  # Classes; ImageNet-21k has 21,843 in these files.


@dataclasses.dataclass(frozen=True)
class Entry:
    """An array of a file.

    Attributes:
      shape: as it is in the file.
      parts: gives for an array the variables, each with its part of the array.
    """

    shape: tuple[int, ...]
    parts: Callable[[np.ndarray], Sequence[tuple[tf.Variable, np.ndarray]]]


def load(
    model: tf.keras.Model,
    name: str,
    path: str,
    fine_tuned: bool = False,
    head: bool = False,
) -> None:
    """Loads all weights, by default without the head's, from a published file.

    Args:
      model: a model that `transfer_models.build` made.
      name: its name in `MODELS`.
      path: the file, .npz or .safetensors, anywhere that `tf.io.gfile` reads.
      fine_tuned: whether to accept a file that was fine-tuned on ImageNet-1k.
      head: whether to load the head as well, of a model with the file's classes;
        EfficientNet-Lite alone has one to load.

    Raises:
      UsageError: if arrays are missing, unknown, of the wrong shape or no numbers.
    """
    config = MODELS[name]
    if head and not isinstance(config, EfficientNetLite):
        raise ValueError(f"head: the files of {name} have none to load.")
    arrays = read(path)
    if not fine_tuned and _is_fine_tuned(config, path, arrays):
        raise UsageError(
            f"flag --checkpoint={path}: this file was fine-tuned on ImageNet-1k, the "
            "experiments start from ImageNet-21k; --fine_tuned accepts it."
        )
    if any(key.startswith("pre_logits") for key in arrays):
        raise UsageError(
            f"flag --checkpoint={path}: it has a layer pre_logits, as the older "
            "ImageNet-21k files do. Use an AugReg file, such as Ti_16-i21k-300ep-..."
        )
    wanted = _entries(model, config, arrays)
    if not head:
        wanted = {k: v for k, v in wanted.items() if not k.startswith(_HEADS)}
    missing = sorted(set(wanted) - set(arrays))
    extra = sorted(k for k in set(arrays) - set(wanted) if not k.startswith(_HEADS))
    if missing or extra:
        raise UsageError(
            f"flag --checkpoint={path}: not a checkpoint of {name}: missing "
            f"{_some(missing)}; unknown {_some(extra)}."
        )
    values: list[tuple[tf.Variable, np.ndarray]] = []
    for key, entry in wanted.items():
        value = np.asarray(arrays[key])
        if key.endswith(("pos_embedding", "pos_embed")) and value.shape != entry.shape:
            value = _resized_positions(value, entry.shape)
        if key.endswith(("/gamma", "/beta")):
            value = value.reshape(-1)
        fits = value.shape == entry.shape and value.dtype.kind in "fiu"
        if not fits or not np.all(np.isfinite(value)):
            raise UsageError(
                f"flag --checkpoint={path}: {key} must be {entry.shape} and finite, "
                f"got {value.shape} of {value.dtype}."
            )
        if key.endswith(".running_var") and np.any(value < 0):
            raise UsageError(f"flag --checkpoint={path}: {key} has a variance below 0.")
        values += entry.parts(value.astype(np.float32))
    # Nothing is assigned before everything fits.
    for variable, value in values:
        variable.assign(value)


def _entries(model, config, arrays: Mapping[str, np.ndarray]) -> dict[str, Entry]:
    if isinstance(config, ViT) and _TIMM in arrays:
        return timm_entries(model, config)
    if isinstance(config, ViT):
        newer = any("/MlpBlock_0/" in key for key in arrays)
        named = vit_keys(model, config, newer)
    elif isinstance(config, BiT):
        named = bit_keys(model, config)
    else:
        named = efficientnet_lite.variables(model, config)
        return {
            key: _moved(variable, efficientnet_lite.axes(key))
            for key, variable in named.items()
        }
    return {key: _moved(variable, None) for key, variable in named.items()}


def _moved(variable: tf.Variable, order: tuple[int, ...] | None) -> Entry:
    """The whole of a variable; `order` gives the file's axes as the variable's."""
    shape = tuple(variable.shape)
    if order is None:
        return Entry(shape, lambda value: [(variable, value)])
    theirs = tuple(shape[order.index(k)] for k in range(len(order)))
    return Entry(theirs, lambda value: [(variable, value.transpose(order))])


def _is_fine_tuned(config, path: str, arrays: Mapping[str, np.ndarray]) -> bool:
    if "--imagenet2012" in pathlib.Path(path).name:
        return True
    # timm's name is that of the model, and a file may have any name.
    heads = (arrays.get("head.bias"), arrays.get("head/bias"))
    return isinstance(config, ViT) and any(
        bias is not None and bias.shape == (_IMAGENET_1K,) for bias in heads
    )


def vit_keys(model: tf.keras.Model, config: ViT, newer: bool = False) -> dict:
    """Checkpoint keys and the variables that they belong to."""
    attention, norm2, mlp = (
        "MultiHeadDotProductAttention_1",
        "LayerNorm_2",
        "MlpBlock_3",
    )
    if newer:
        attention, norm2, mlp = attention[:-1] + "0", "LayerNorm_1", "MlpBlock_0"
    embedding, tokens = model.get_layer("embedding"), model.get_layer("tokens")
    found = {
        "embedding/kernel": embedding.kernel,
        "embedding/bias": embedding.bias,
        "cls": tokens.cls,
        "Transformer/posembed_input/pos_embedding": tokens.positions,
    }

    def add(prefix, layer, first="kernel", second="bias"):
        names = {"scale": "gamma", "bias": "beta" if first == "scale" else "bias"}
        for key in (first, second):
            found[f"{prefix}/{key}"] = getattr(layer, names.get(key, key))

    for k in range(config.depth):
        block = f"Transformer/encoderblock_{k}"
        add(f"{block}/LayerNorm_0", model.get_layer(f"block{k}_norm1"), "scale")
        add(f"{block}/{norm2}", model.get_layer(f"block{k}_norm2"), "scale")
        # Keras 3 names a variable's layers in its path.
        variables = {
            tuple(getattr(v, "path", v.name).split(":")[0].split("/")[-2:]): v
            for v in model.get_layer(f"block{k}_attention").weights
        }
        for part in ("query", "key", "value", "out"):
            place = "attention_output" if part == "out" else part
            for kind in ("kernel", "bias"):
                found[f"{block}/{attention}/{part}/{kind}"] = variables[place, kind]
        for j in (1, 2):
            add(f"{block}/{mlp}/Dense_{j - 1}", model.get_layer(f"block{k}_dense{j}"))
    add("Transformer/encoder_norm", model.get_layer("encoder_norm"), "scale")
    return found


def bit_keys(model: tf.keras.Model, config: BiT) -> dict:
    """Checkpoint keys and the variables that they belong to."""
    conv, norm = "standardized_conv2d/kernel", "group_norm"
    found = {f"resnet/root_block/{conv}": model.get_layer("root").kernel}

    def add(prefix, layer):
        found[f"{prefix}/gamma"], found[f"{prefix}/beta"] = layer.gamma, layer.beta

    for stage, units in enumerate(config.stages):
        for unit in range(units):
            name = f"block{stage + 1}_unit{unit + 1:02d}"
            prefix = f"resnet/block{stage + 1}/unit{unit + 1:02d}"
            for part in "abc":
                layer = model.get_layer(f"{name}_{part}_conv")
                found[f"{prefix}/{part}/{conv}"] = layer.kernel
                add(f"{prefix}/{part}/{norm}", model.get_layer(f"{name}_{part}_norm"))
            if not unit:
                projection = model.get_layer(f"{name}_a_proj")
                found[f"{prefix}/a/proj/{conv}"] = projection.kernel
    add(f"resnet/{norm}", model.get_layer("final_norm"))
    return found


def timm_entries(model: tf.keras.Model, config: ViT) -> dict[str, Entry]:
    """The arrays of a state dict of timm, and the variables that they belong to.

    Dense kernels are `[out, in]`; query, key and value are one array in that order.
    """
    ours = vit_keys(model, config)
    width, size = config.width, config.width // config.heads
    found = {
        _TIMM: _moved(ours["embedding/kernel"], (2, 3, 1, 0)),
        "patch_embed.proj.bias": _moved(ours["embedding/bias"], None),
        "cls_token": _moved(ours["cls"], None),
        "pos_embed": _moved(ours["Transformer/posembed_input/pos_embedding"], None),
    }

    def norm(theirs, prefix):
        found[f"{theirs}.weight"] = _moved(ours[f"{prefix}/scale"], None)
        found[f"{theirs}.bias"] = _moved(ours[f"{prefix}/bias"], None)

    def dense(theirs, prefix):
        found[f"{theirs}.weight"] = _moved(ours[f"{prefix}/kernel"], (1, 0))
        found[f"{theirs}.bias"] = _moved(ours[f"{prefix}/bias"], None)

    def attention(theirs, prefix):
        three = [f"{prefix}/{part}" for part in ("query", "key", "value")]
        kernels = [ours[f"{part}/kernel"] for part in three]
        biases = [ours[f"{part}/bias"] for part in three]
        out = ours[f"{prefix}/out/kernel"]

        def split(value):
            parts = value.reshape(3, config.heads, size, width).transpose(0, 3, 1, 2)
            return list(zip(kernels, parts, strict=True))

        found[f"{theirs}.qkv.weight"] = Entry((3 * width, width), split)
        found[f"{theirs}.qkv.bias"] = Entry(
            (3 * width,),
            lambda value: list(
                zip(biases, value.reshape(3, config.heads, size), strict=True)
            ),
        )
        found[f"{theirs}.proj.weight"] = Entry(
            (width, width),
            lambda value: [(out, value.T.reshape(config.heads, size, width))],
        )
        found[f"{theirs}.proj.bias"] = _moved(ours[f"{prefix}/out/bias"], None)

    for k in range(config.depth):
        block = f"Transformer/encoderblock_{k}"
        norm(f"blocks.{k}.norm1", f"{block}/LayerNorm_0")
        attention(f"blocks.{k}.attn", f"{block}/MultiHeadDotProductAttention_1")
        norm(f"blocks.{k}.norm2", f"{block}/LayerNorm_2")
        dense(f"blocks.{k}.mlp.fc1", f"{block}/MlpBlock_3/Dense_0")
        dense(f"blocks.{k}.mlp.fc2", f"{block}/MlpBlock_3/Dense_1")
    norm("norm", "Transformer/encoder_norm")
    return found


def read(path: str) -> dict[str, np.ndarray]:
    """The arrays of any .npz or .safetensors file.

    Raises:
      UsageError: if it cannot be read.
    """
    strict = path.endswith(".safetensors")
    kind = "safetensors" if strict else ".npz"
    try:
        with tf.io.gfile.GFile(path, "rb") as stream:
            if strict:
                return safetensor_files.parse(stream.read())
            return npz_files.read_npz(stream)
    except (tf.errors.OpError, OSError, ValueError) as error:
        raise UsageError(
            f"flag --checkpoint={path} cannot be read as a {kind} file: {error}"
        ) from error


def _some(keys) -> str:
    shown = ", ".join(keys[:4]) or "none"
    return shown + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")


def _resized_positions(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Position embeddings of another image size, from a bilinearly resized grid."""
    count, side = value.shape[1] - 1, round((shape[1] - 1) ** 0.5)
    old = round(count**0.5)
    if value.ndim != 3 or old * old != count or value.shape[2] != shape[2]:
        return value  # The caller names the shapes.
    grid = value[:, 1:].reshape(1, old, old, -1)
    grid = tf.image.resize(grid, (side, side), "bilinear").numpy()
    return np.concatenate([value[:, :1], grid.reshape(1, side * side, -1)], axis=1)
