"""Blocks: the layers of Keras."""

from __future__ import annotations

import functools

import tensorflow as tf

from tests.fuzz.env import floats, image, sequence, vector
from tests.fuzz.registry import block

L = tf.keras.layers
ACTIVATIONS = ("linear", "tanh", "relu", "softplus", "gelu", "swish")


def _make(cls, **options):
    return functools.partial(cls, **options)


def _window(size, args):
    """A kernel that fits, and the padding."""
    kernel = min(args["kernel"], size)
    return {"kernel_size": kernel, "padding": args["padding"]}


@block(
    "dense",
    units=(3, 1, 4, 5),
    activation=ACTIVATIONS,
    bias=(True, False),
    flat=(False, True),
    weight=3,
)
def dense(env, path, x, args, node):
    x = vector(env, x) if args["flat"] else floats(env, x)
    make = _make(
        L.Dense,
        units=args["units"],
        activation=args["activation"],
        use_bias=args["bias"],
    )
    return env.layer(path, make, x)


@block(
    "einsum_dense",
    form=("abc,cd->abd", "abc,bcd->abd", "abc,cde->abde", "abc,bd->adc", "abc,bcd->ad"),
    bias=(False, True),
)
def einsum_dense(env, path, x, args, node):
    x = sequence(env, x)
    sizes = dict(zip("abc", x.shape, strict=True)) | {"d": 3, "e": 2}
    out = args["form"].split("->")[1]
    shape = [sizes[letter] for letter in out[1:]]
    bias = out[-1] if args["bias"] else None
    make = _make(
        L.EinsumDense, equation=args["form"], output_shape=shape, bias_axes=bias
    )
    return env.layer(path, make, x)


@block(
    "conv1d",
    filters=(2, 3, 4),
    kernel=(2, 1, 3),
    padding=("same", "valid", "causal"),
    stride=(1, 2),
    dilation=(1, 2),
    groups=(1, 1, 1, 2),
    bias=(True, False),
    weight=2,
)
def conv1d(env, path, x, args, node):
    x = sequence(env, x)
    dilation = 1 if args["stride"] > 1 else args["dilation"]
    window = _window(x.shape[1], args)
    if (window["kernel_size"] - 1) * dilation >= x.shape[1]:
        dilation = 1
    groups = args["groups"] if x.shape[2] % args["groups"] == 0 else 1
    make = _make(
        L.Conv1D,
        filters=args["filters"] * groups,
        groups=groups,
        strides=args["stride"],
        dilation_rate=dilation,
        use_bias=args["bias"],
        **window,
    )
    return env.layer(path, make, x)


@block(
    "conv2d",
    filters=(2, 3),
    kernel=(2, 1, 3),
    padding=("same", "valid"),
    stride=(1, 2),
    dilation=(1, 2),
    groups=(1, 1, 1, 2),
    bias=(True, False),
    weight=2,
)
def conv2d(env, path, x, args, node):
    x = image(env, x)
    size = min(x.shape[1:3])
    dilation = 1 if args["stride"] > 1 else args["dilation"]
    window = _window(size, args)
    if (window["kernel_size"] - 1) * dilation >= size:
        dilation = 1
    groups = args["groups"] if x.shape[3] % args["groups"] == 0 else 1
    make = _make(
        L.Conv2D,
        filters=args["filters"] * groups,
        groups=groups,
        strides=args["stride"],
        dilation_rate=dilation,
        use_bias=args["bias"],
        **window,
    )
    return env.layer(path, make, x)


@block(
    "conv_transpose",
    rank=(1, 2),
    filters=(2, 3),
    kernel=(2, 3),
    padding=("same", "valid"),
    stride=(1, 2),
)
def conv_transpose(env, path, x, args, node):
    cls, form = {1: (L.Conv1DTranspose, sequence), 2: (L.Conv2DTranspose, image)}[
        args["rank"]
    ]
    make = _make(
        cls,
        filters=args["filters"],
        kernel_size=args["kernel"],
        padding=args["padding"],
        strides=args["stride"],
    )
    return env.layer(path, make, form(env, x))


@block(
    "depthwise",
    kind=("2d", "1d", "separable1d", "separable2d"),
    multiplier=(1, 2),
    kernel=(2, 1),
    padding=("same", "valid"),
    stride=(1, 2),
)
def depthwise(env, path, x, args, node):
    one = args["kind"].endswith("1d")
    x = sequence(env, x) if one else image(env, x)
    window = _window(min(x.shape[1:-1]), args)
    options = {"strides": args["stride"], "depth_multiplier": args["multiplier"]}
    classes = {
        "1d": L.DepthwiseConv1D,
        "2d": L.DepthwiseConv2D,
        "separable1d": L.SeparableConv1D,
        "separable2d": L.SeparableConv2D,
    }
    if args["kind"].startswith("separable"):
        options["filters"] = 3
    return env.layer(path, _make(classes[args["kind"]], **options, **window), x)


@block("locally_connected", filters=(2,))
def locally_connected(env, path, x, args, node):
    x = sequence(env, x)
    make = _make(
        L.LocallyConnected1D, filters=args["filters"], kernel_size=min(2, x.shape[1])
    )
    return env.layer(path, make, x)


def tokens_of(x, size):
    """Integers from 0 to size - 1."""
    if x.dtype.is_floating:
        x = tf.cast(tf.math.floor(tf.math.abs(tf.cast(x, tf.float32)) * 3), tf.int32)
    return x % size


@block("embedding", size=(4, 6), units=(3, 2), mask=(False, True), repeat=(False, True))
def embedding(env, path, x, args, node):
    ids = tokens_of(x if x.shape.rank <= 3 else vector(env, x), args["size"])
    if args["repeat"]:
        ids = tf.concat([ids, ids], axis=1)
    make = _make(
        L.Embedding,
        input_dim=args["size"],
        output_dim=args["units"],
        mask_zero=args["mask"],
    )
    return env.layer(path, make, ids)


@block("norm", kind=("layer", "layer_all", "group", "unit"))
def norm(env, path, x, args, node):
    x = floats(env, x)
    rest = list(range(1, x.shape.rank))
    make = {
        "layer": _make(L.LayerNormalization),
        "layer_all": _make(L.LayerNormalization, axis=rest),
        "group": _make(L.GroupNormalization, groups=1),
        "unit": _make(L.UnitNormalization),
    }[args["kind"]]
    return env.layer(path, make, x)


@block("prelu", shared=(False, True))
def prelu(env, path, x, args, node):
    x = sequence(env, x)
    make = _make(
        L.PReLU,
        shared_axes=[1] if args["shared"] else None,
        alpha_initializer="random_uniform",
    )
    return env.layer(path, make, x)


_RECURRENT = {"lstm": L.LSTM, "gru": L.GRU, "rnn": L.SimpleRNN}
_CELLS = {"lstm": L.LSTMCell, "gru": L.GRUCell, "rnn": L.SimpleRNNCell}


@block(
    "recurrent",
    kind=("lstm", "gru", "rnn"),
    units=(2, 3),
    sequences=(False, True),
    unroll=(False, True),
    back=(False, True),
    mask=(False, True),
    activation=("tanh", "relu"),
    wrapped=("no", "bidirectional", "cell"),
    weight=2.5,
)
def recurrent(env, path, x, args, node):
    x = sequence(env, x)
    options = {"return_sequences": args["sequences"], "unroll": args["unroll"]}
    mask = tf.cast(x[..., 0], tf.float32) > -0.4 if args["mask"] else None

    def make(name, dtype):
        if args["wrapped"] == "cell":
            cell = _CELLS[args["kind"]](args["units"], dtype=dtype)
            return L.RNN(cell, name=name, dtype=dtype, **options)
        layer = _RECURRENT[args["kind"]]
        if args["wrapped"] == "bidirectional":
            inner = layer(
                args["units"], activation=args["activation"], dtype=dtype, **options
            )
            return L.Bidirectional(inner, name=name, dtype=dtype)
        return layer(
            args["units"],
            activation=args["activation"],
            name=name,
            go_backwards=args["back"],
            dtype=dtype,
            **options,
        )

    return env.layer(path, make, x, mask=mask)


@block("time_distributed", layer=("dense", "lstm", "conv", "gru", "norm"), weight=1.5)
def time_distributed(env, path, x, args, node):
    x = image(env, x)

    def make(name, dtype):
        inner = {
            "dense": lambda: L.Dense(3, "tanh", dtype=dtype),
            "lstm": lambda: L.LSTM(2, dtype=dtype),
            "gru": lambda: L.GRU(2, return_sequences=True, dtype=dtype),
            "conv": lambda: L.Conv1D(2, 2, padding="same", dtype=dtype),
            "norm": lambda: L.LayerNormalization(dtype=dtype),
        }[args["layer"]]()
        return L.TimeDistributed(inner, name=name, dtype=dtype)

    return env.layer(path, make, x)


@block("attention", kind=("multihead", "dot", "additive", "causal"), heads=(1, 2))
def attention(env, path, x, args, node):
    x = sequence(env, x)
    if args["kind"] in ("multihead", "causal"):
        make = _make(L.MultiHeadAttention, num_heads=args["heads"], key_dim=2)
        return env.layer(path, make, x, x, use_causal_mask=args["kind"] == "causal")
    if args["kind"] == "dot":
        return env.layer(path, _make(L.Attention, use_scale=True), [x, x])
    return env.layer(path, _make(L.AdditiveAttention), [x, x])


@block(
    "pool", kind=("average", "max", "global", "global_max", "up", "pad"), rank=(1, 2)
)
def pool(env, path, x, args, node):
    one = args["rank"] == 1
    x = sequence(env, x) if one else image(env, x)
    window = min(2, *x.shape[1:-1])
    make = {
        "average": _make(
            L.AveragePooling1D if one else L.AveragePooling2D, pool_size=window
        ),
        "max": _make(L.MaxPool1D if one else L.MaxPool2D, pool_size=window),
        "global": _make(L.GlobalAveragePooling1D if one else L.GlobalAveragePooling2D),
        "global_max": _make(L.GlobalMaxPool1D if one else L.GlobalMaxPool2D),
        "up": _make(L.UpSampling1D if one else L.UpSampling2D, size=2),
        "pad": _make(L.ZeroPadding1D if one else L.ZeroPadding2D, padding=1),
    }[args["kind"]]
    return env.layer(path, make, x)


@block(
    "random",
    kind=("dropout", "gaussian_noise", "gaussian_dropout", "spatial", "alpha", "raw"),
    random=True,
    weight=0.7,
)
def random(env, path, x, args, node):
    x = sequence(env, x)
    if args["kind"] == "raw":
        return x * tf.cast(tf.random.uniform(tf.shape(x)) > 0.4, x.dtype)
    make = {
        "dropout": _make(L.Dropout, rate=0.4),
        "gaussian_noise": _make(L.GaussianNoise, stddev=0.5),
        "gaussian_dropout": _make(L.GaussianDropout, rate=0.4),
        "spatial": _make(L.SpatialDropout1D, rate=0.4),
        "alpha": _make(L.AlphaDropout, rate=0.4),
    }[args["kind"]]
    return env.layer(path, make, x, training=True)
