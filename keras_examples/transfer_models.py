"""Pre-trained networks, with loading of their published checkpoints.

ViT as in AugReg (Steiner et al. 2022), ResNet v2 as in BiT-M (Kolesnikov et al. 2020),
and EfficientNet-Lite0, for which see `efficientnet_lite`. All are made of ordinary
Keras layers; weights keep the checkpoints' names.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import numpy as np
import tensorflow as tf

from driver_kit.settings import UsageError
from keras_examples import efficientnet_lite
from keras_examples.efficientnet_lite import EfficientNetLite
from keras_examples.preprocessing import Preprocess
from tfdpclip import files

_L = tf.keras.layers


@dataclasses.dataclass(frozen=True)
class ViT:
    """A vision transformer's sizes."""

    image: int
    patch: int
    width: int
    depth: int
    heads: int
    mlp: int

    @property
    def grid(self) -> int:
        """Patches per side."""
        return self.image // self.patch


@dataclasses.dataclass(frozen=True)
class BiT:
    """A BiT ResNet's sizes."""

    image: int
    stages: tuple[int, ...]
    width: int
    groups: int


MODELS = {
    "vit_tiny": ViT(224, 16, 192, 12, 3, 768),
    "vit_base": ViT(224, 16, 768, 12, 12, 3072),
    "vit_micro": ViT(8, 2, 32, 2, 4, 64),
    "resnet50_bit": BiT(224, (3, 4, 6, 3), 64, 32),
    "efficientnet_lite0": efficientnet_lite.LITE0,
}


class Tokens(_L.Layer):
    """Puts the class token in front and adds the position embedding."""

    def build(self, shape):
        self.cls = self.add_weight(
            name="cls", shape=(1, 1, shape[-1]), initializer="zeros"
        )
        self.positions = self.add_weight(
            name="pos_embedding",
            shape=(1, shape[1] + 1, shape[-1]),
            initializer=tf.keras.initializers.RandomNormal(stddev=0.02),
        )
        super().build(shape)

    def call(self, x):
        cls = tf.tile(self.cls, [tf.shape(x)[0], 1, 1])
        return tf.concat([cls, x], axis=1) + self.positions


class FirstToken(_L.Layer):
    """The class token."""

    def call(self, x):
        return x[:, 0]


class StdConv2D(_L.Conv2D):
    """A convolution with standardised weights: mean 0 and variance 1 per filter."""

    def convolution_op(self, inputs, kernel):
        mean, variance = tf.nn.moments(kernel, [0, 1, 2], keepdims=True)
        return super().convolution_op(
            inputs, (kernel - mean) / tf.sqrt(variance + 1e-10)
        )


def build_vit(config: ViT, classes: int, crop: bool = False) -> tf.keras.Model:
    """A vision transformer with a linear head of zeros on its class token."""
    norm = functools.partial(_L.LayerNormalization, epsilon=1e-6)
    inputs = tf.keras.Input((None, None, 3))
    x = Preprocess(config.image, crop, name="preprocess")(inputs)
    x = _L.Conv2D(config.width, config.patch, config.patch, name="embedding")(x)
    x = _L.Reshape((config.grid**2, config.width))(x)
    x = Tokens(name="tokens")(x)
    for k in range(config.depth):
        y = norm(name=f"block{k}_norm1")(x)
        attention = _L.MultiHeadAttention(
            config.heads, config.width // config.heads, name=f"block{k}_attention"
        )
        x = _L.Add()([x, attention(y, y)])
        y = norm(name=f"block{k}_norm2")(x)
        # The exact function, as in the experiments, not the checkpoints' approximation.
        y = _L.Dense(config.mlp, activation=tf.nn.gelu, name=f"block{k}_dense1")(y)
        y = _L.Dense(config.width, name=f"block{k}_dense2")(y)
        x = _L.Add()([x, y])
    x = FirstToken(name="features")(norm(name="encoder_norm")(x))
    head = _L.Dense(classes, kernel_initializer="zeros", name="head")
    return tf.keras.Model(inputs, head(x))


def build_bit(config: BiT, classes: int, crop: bool = False) -> tf.keras.Model:
    """A BiT ResNet v2 with a linear head of zeros."""

    def conv(x, filters, size, strides, name):
        # Padding is symmetric, which "same" is not at stride 2.
        if size > 1:
            x = _L.ZeroPadding2D(size // 2)(x)
        layer = StdConv2D(filters, size, strides, use_bias=False, name=name)
        return layer(x)

    def relu_norm(x, name):
        norm = _L.GroupNormalization(config.groups, epsilon=1e-5, name=name)
        return _L.ReLU()(norm(x))

    inputs = tf.keras.Input((None, None, 3))
    x = Preprocess(config.image, crop, name="preprocess")(inputs)
    x = conv(x, config.width, 7, 2, "root")
    x = _L.MaxPool2D(3, 2)(_L.ZeroPadding2D(1)(x))
    for stage, units in enumerate(config.stages):
        inner = config.width * 2**stage
        for unit in range(units):
            name = f"block{stage + 1}_unit{unit + 1:02d}"
            strides = 2 if stage and not unit else 1
            y = relu_norm(x, f"{name}_a_norm")
            if not unit:
                x = conv(y, 4 * inner, 1, strides, f"{name}_a_proj")
            y = conv(y, inner, 1, 1, f"{name}_a_conv")
            y = conv(
                relu_norm(y, f"{name}_b_norm"), inner, 3, strides, f"{name}_b_conv"
            )
            y = conv(relu_norm(y, f"{name}_c_norm"), 4 * inner, 1, 1, f"{name}_c_conv")
            x = _L.Add()([x, y])
    x = relu_norm(x, "final_norm")
    x = _L.GlobalAveragePooling2D(name="features")(x)
    head = _L.Dense(classes, kernel_initializer="zeros", name="head")
    return tf.keras.Model(inputs, head(x))


_BUILDERS = {ViT: build_vit, BiT: build_bit, EfficientNetLite: efficientnet_lite.build}


def image_size(name: str, image: int | None) -> int:
    """The size of a model's images: its own, or another.

    Raises:
      UsageError: if a vision transformer has no whole number of patches then.
    """
    config = MODELS[name]
    if image is None:
        return config.image
    if isinstance(config, ViT) and image % config.patch:
        raise UsageError(
            f"flag --image_size={image}: {name} takes multiples of {config.patch}, for "
            f"example --image_size={config.patch * max(1, image // config.patch)}."
        )
    return image


def build(
    name: str, classes: int, crop: bool = False, image: int | None = None
) -> tf.keras.Model:
    """A model of `MODELS`, for images of its own size or of another."""
    config = MODELS[name]
    config = dataclasses.replace(config, image=image_size(name, image))
    return _BUILDERS[type(config)](config, classes, crop)


#: Which normalisation layers of a BiT ResNet FiLM trains, by source.
BIT_FILM = {
    "dp_film": lambda name: name.endswith("_c_norm") or name == "final_norm",
    "framework": lambda name: name != "final_norm",
    "all": lambda name: True,
}


# Checkpoints.


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


def load_checkpoint(
    model: tf.keras.Model,
    name: str,
    path: str,
    fine_tuned: bool = False,
    head: bool = False,
) -> None:
    """Loads all weights, as a rule but the head's, from a published .npz file.

    Args:
      model: a model that `build` made.
      name: its name in `MODELS`.
      path: the file, anywhere that `tf.io.gfile` reads.
      fine_tuned: whether to accept a file that was fine-tuned on ImageNet-1k.
      head: whether to load the head as well, of a model with the file's classes;
        EfficientNet-Lite alone has one to load.

    Raises:
      UsageError: if arrays are missing, unknown, of the wrong shape or no numbers.
    """
    config = MODELS[name]
    if "--imagenet2012" in pathlib.Path(path).name and not fine_tuned:
        raise UsageError(
            f"flag --checkpoint={path}: this file was fine-tuned on ImageNet-1k, the "
            "experiments start from ImageNet-21k; --fine_tuned accepts it."
        )
    arrays = _read(path)
    if any(key.startswith("pre_logits") for key in arrays):
        raise UsageError(
            f"flag --checkpoint={path}: it has a layer pre_logits, as the older "
            "ImageNet-21k files do. Use an AugReg file, such as Ti_16-i21k-300ep-..."
        )
    lite = isinstance(config, EfficientNetLite)
    if head and not lite:
        raise ValueError(f"head: the files of {name} have none to load.")
    if isinstance(config, ViT):
        newer = any("/MlpBlock_0/" in key for key in arrays)
        wanted = vit_keys(model, config, newer)
    elif lite:
        wanted = efficientnet_lite.variables(model, config)
    else:
        wanted = bit_keys(model, config)
    ignored = ("_fc.",) if lite else ("head/", "resnet/head/")
    if not head:
        wanted = {k: v for k, v in wanted.items() if not k.startswith(ignored)}
    missing = sorted(set(wanted) - set(arrays))
    extra = sorted(k for k in set(arrays) - set(wanted) if not k.startswith(ignored))
    if missing or extra:
        raise UsageError(
            f"flag --checkpoint={path}: not a checkpoint of {name}: missing "
            f"{_some(missing)}; unknown {_some(extra)}."
        )
    values = {}
    for key, variable in wanted.items():
        value = np.asarray(arrays[key])
        shape = tuple(variable.shape)
        order = efficientnet_lite.axes(key) if lite else None
        if order is not None:  # The file's shape is checked, then brought in order.
            shape = tuple(shape[order.index(k)] for k in range(len(order)))
        if key.endswith("pos_embedding") and value.shape != shape:
            value = _resized_positions(value, shape)
        if key.endswith(("/gamma", "/beta")):
            value = value.reshape(-1)
        fits = value.shape == shape and value.dtype.kind in "fiu"
        if not fits or not np.all(np.isfinite(value)):
            raise UsageError(
                f"flag --checkpoint={path}: {key} must be {shape} and finite, got "
                f"{value.shape} of {value.dtype}."
            )
        if key.endswith(".running_var") and np.any(value < 0):
            raise UsageError(f"flag --checkpoint={path}: {key} has a variance below 0.")
        value = value if order is None else value.transpose(order)
        values[key] = value.astype(np.float32)
    # Nothing is assigned before everything fits.
    for key, variable in wanted.items():
        variable.assign(values[key])


def _read(path: str) -> dict[str, np.ndarray]:
    try:
        with tf.io.gfile.GFile(path, "rb") as stream:
            return files.read_npz(stream)
    except (tf.errors.OpError, OSError, ValueError) as error:
        raise UsageError(
            f"flag --checkpoint={path} cannot be read as a .npz file: {error}"
        ) from error


def _some(keys) -> str:
    shown = ", ".join(keys[:4]) or "none"
    return shown + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")


def _resized_positions(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Position embeddings of another image size: the grid is resized, bilinearly."""
    count, side = value.shape[1] - 1, round((shape[1] - 1) ** 0.5)
    old = round(count**0.5)
    if value.ndim != 3 or old * old != count or value.shape[2] != shape[2]:
        return value  # The caller names the shapes.
    grid = value[:, 1:].reshape(1, old, old, -1)
    grid = tf.image.resize(grid, (side, side), "bilinear").numpy()
    return np.concatenate([value[:, :1], grid.reshape(1, side * side, -1)], axis=1)
