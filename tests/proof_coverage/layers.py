"""Each layer of Keras between two that train."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tests import stack
from tests.proof_coverage.entry import CLASS, Entry, Of, classes, classified

K = tf.keras
L = tf.keras.layers


def through(layer: Callable, *shapes: tuple, **options) -> Entry:
    """A Dense for each input, the layer, and the classes.

    Args:
      layer: makes the layer, or a function of its inputs.
      *shapes: of each input.
      **options: more of the entry.
    """

    def build():
        inputs = [K.Input(shape) for shape in shapes]
        hidden = [
            L.Dense(shape[-1])(x) for shape, x in zip(shapes, inputs, strict=True)
        ]
        output = layer()(hidden[0] if len(hidden) == 1 else hidden)
        output = output[0] if isinstance(output, (list, tuple)) else output
        return K.Model(inputs[0] if len(inputs) == 1 else inputs, classified(output))

    given = [Of(shape) for shape in shapes]
    inputs = given[0] if len(given) == 1 else given
    return Entry(build, inputs, CLASS, classes, **options)


def tokens(network: Callable, length: int = 6, **options) -> Entry:
    """A network of tokens, and the classes."""

    def build():
        inputs = K.Input((length,), dtype="int32")
        return K.Model(inputs, classified(network()(inputs)))

    return Entry(build, Of((length,), "int32"), CLASS, classes, **options)


def _after_embedding(layer: Callable, mask: bool = True) -> Callable:
    return lambda: lambda ids: layer()(L.Embedding(20, 4, mask_zero=mask)(ids))


LINE, IMAGE, ROOM, FILM = (8, 4), (8, 8, 4), (6, 6, 6, 2), (4, 8, 8, 2)


def _of_each_rank(name: str, *arguments, **options) -> dict[str, Entry]:
    shapes = {"1D": LINE, "2D": IMAGE, "3D": ROOM}
    return {
        name + rank: through(
            lambda layer=name + rank: getattr(L, layer)(*arguments, **options), shape
        )
        for rank, shape in shapes.items()
    }


def _variants(name: str, shape: tuple, variants: dict, *arguments) -> dict[str, Entry]:
    return {
        f"{name} {how}": through(
            lambda options=options: getattr(L, name)(*arguments, **options), shape
        )
        for how, options in variants.items()
    }


_CONVOLUTIONS = {
    "strided": {"strides": 2},
    "same": {"padding": "same"},
    "dilated": {"dilation_rate": 2},
    "grouped": {"groups": 2},
}
_DEPTHWISE = {
    "multiplied": {"depth_multiplier": 2},
    "strided": {"strides": 2, "padding": "same"},
    "dilated": {"dilation_rate": 2},
}
_TRANSPOSED = {
    "strided": {"strides": 2},
    "same": {"padding": "same", "strides": 2},
}

CORE = {
    "Dense": through(lambda: L.Dense(4, "relu"), (5,)),
    "Dense of rank 4": through(lambda: L.Dense(4, "relu"), IMAGE),
    "Dense regularised": through(
        lambda: (
            L.Dense(
                4,
                kernel_regularizer="l2",
                bias_regularizer="l1",
                kernel_constraint="nonneg",
            )
            if not stack.KERAS_3
            else L.Dense(
                4,
                kernel_regularizer="l2",
                bias_regularizer="l1",
                kernel_constraint="non_neg",
            )
        ),
        (5,),
    ),
    "EinsumDense": through(
        lambda: L.EinsumDense("abc,cd->abd", (8, 3), bias_axes="d"), LINE
    ),
    "EinsumDense of two axes": through(
        lambda: L.EinsumDense("...xy,xyz->...z", (3,), bias_axes="z"), IMAGE
    ),
    "Activation": through(lambda: L.Activation("tanh"), (5,)),
    "Identity": through(lambda: L.Identity(), (5,)),
    "Lambda": through(lambda: L.Lambda(lambda x: x * 2.0), (5,)),
    "Embedding": tokens(_after_embedding(lambda: L.Flatten(), mask=False)),
    "Masking and LSTM": through(lambda: lambda x: L.LSTM(3)(L.Masking(0.0)(x)), LINE),
    "ReversibleEmbedding": tokens(
        lambda: lambda ids: L.ReversibleEmbedding(20, 4)(ids), keras=3
    ),
    "ActivityRegularization": through(lambda: L.ActivityRegularization(0.1, 0.1), (5,)),
}

SHAPES = {
    "Flatten": through(lambda: L.Flatten(), IMAGE),
    "Reshape": through(lambda: L.Reshape((4, 8)), LINE),
    "Reshape to -1": through(lambda: L.Reshape((-1, 16)), IMAGE),
    "Permute": through(lambda: L.Permute((2, 1)), LINE),
    "Permute of three": through(lambda: L.Permute((3, 1, 2)), IMAGE),
    "RepeatVector": through(lambda: L.RepeatVector(3), (5,)),
    "Cropping1D": through(lambda: L.Cropping1D(1), LINE),
    "Cropping2D": through(lambda: L.Cropping2D(((1, 2), (0, 1))), IMAGE),
    "Cropping3D": through(lambda: L.Cropping3D(1), ROOM),
    "ZeroPadding1D": through(lambda: L.ZeroPadding1D(1), LINE),
    "ZeroPadding2D": through(lambda: L.ZeroPadding2D(((1, 2), (0, 1))), IMAGE),
    "ZeroPadding3D": through(lambda: L.ZeroPadding3D(1), ROOM),
    "UpSampling1D": through(lambda: L.UpSampling1D(2), LINE),
    "UpSampling2D": through(lambda: L.UpSampling2D(2), IMAGE),
    "UpSampling2D bilinear": through(
        lambda: L.UpSampling2D(2, interpolation="bilinear"), IMAGE
    ),
    "UpSampling3D": through(lambda: L.UpSampling3D(2), ROOM),
}

CONVOLUTIONS = {
    **_of_each_rank("Conv", 4, 3),
    **_variants(
        "Conv1D", LINE, {**_CONVOLUTIONS, "causal": {"padding": "causal"}}, 4, 3
    ),
    "Conv1D causal, dilated": through(
        lambda: L.Conv1D(4, 2, padding="causal", dilation_rate=2), LINE
    ),
    **_variants("Conv2D", IMAGE, _CONVOLUTIONS, 4, 3),
    **_variants("Conv3D", ROOM, _CONVOLUTIONS, 4, 3),
    "Conv1DTranspose": through(lambda: L.Conv1DTranspose(4, 3), LINE),
    "Conv2DTranspose": through(lambda: L.Conv2DTranspose(4, 3), IMAGE),
    "Conv3DTranspose": through(lambda: L.Conv3DTranspose(4, 3), ROOM),
    **_variants("Conv1DTranspose", LINE, _TRANSPOSED, 4, 3),
    **_variants("Conv2DTranspose", IMAGE, _TRANSPOSED, 4, 3),
    **_variants("Conv3DTranspose", ROOM, _TRANSPOSED, 4, 3),
    "DepthwiseConv1D": through(lambda: L.DepthwiseConv1D(3), LINE),
    "DepthwiseConv2D": through(lambda: L.DepthwiseConv2D(3), IMAGE),
    **_variants("DepthwiseConv1D", LINE, _DEPTHWISE, 3),
    **_variants("DepthwiseConv2D", IMAGE, _DEPTHWISE, 3),
    "SeparableConv1D": through(lambda: L.SeparableConv1D(4, 3), LINE),
    "SeparableConv2D": through(lambda: L.SeparableConv2D(4, 3), IMAGE),
    **_variants("SeparableConv1D", LINE, _DEPTHWISE, 4, 3),
    **_variants("SeparableConv2D", IMAGE, _DEPTHWISE, 4, 3),
    "LocallyConnected1D": through(lambda: L.LocallyConnected1D(4, 3), LINE, keras=2),
    "LocallyConnected1D dense": through(
        lambda: L.LocallyConnected1D(4, 3, implementation=2), LINE, keras=2
    ),
    "LocallyConnected1D sparse": through(
        lambda: L.LocallyConnected1D(4, 3, implementation=3), LINE, keras=2
    ),
    "LocallyConnected2D": through(lambda: L.LocallyConnected2D(4, 3), IMAGE, keras=2),
    "LocallyConnected2D dense": through(
        lambda: L.LocallyConnected2D(4, 3, implementation=2), IMAGE, keras=2
    ),
}


def _adaptive(kind: str) -> dict[str, Entry]:
    shapes = {"1D": (7, 4), "2D": IMAGE, "3D": ROOM}
    return {
        f"Adaptive{kind}Pooling{rank}": through(
            lambda name=f"Adaptive{kind}Pooling{rank}": getattr(L, name)(3),
            shape,
            keras=3,
        )
        for rank, shape in shapes.items()
    }


POOLING = {
    **_of_each_rank("AveragePooling", 2),
    **_of_each_rank("MaxPooling", 2),
    **_variants(
        "AveragePooling2D",
        IMAGE,
        {"same": {"padding": "same", "strides": 2}},
        3,
    ),
    **_variants("MaxPooling2D", IMAGE, {"same": {"padding": "same", "strides": 2}}, 3),
    **_of_each_rank("GlobalAveragePooling"),
    **_of_each_rank("GlobalMaxPooling"),
    "GlobalAveragePooling2D kept": through(
        lambda: L.GlobalAveragePooling2D(keepdims=True), IMAGE
    ),
    "GlobalAveragePooling1D masked": tokens(
        _after_embedding(lambda: L.GlobalAveragePooling1D())
    ),
    **_adaptive("Average"),
    **_adaptive("Max"),
}

NORMALIZATIONS = {
    "LayerNormalization": through(lambda: L.LayerNormalization(), LINE),
    "LayerNormalization of an image": through(lambda: L.LayerNormalization(), IMAGE),
    "LayerNormalization of two axes": through(
        lambda: L.LayerNormalization(axis=(1, 2)), LINE
    ),
    "LayerNormalization of a vector": through(lambda: L.LayerNormalization(), (5,)),
    "GroupNormalization": through(lambda: L.GroupNormalization(2), IMAGE),
    "GroupNormalization of an instance": through(
        lambda: L.GroupNormalization(-1), IMAGE
    ),
    "GroupNormalization of a vector": through(lambda: L.GroupNormalization(1), (4,)),
    "RMSNormalization": through(lambda: L.RMSNormalization(), LINE, keras=3),
    "UnitNormalization": through(lambda: L.UnitNormalization(), LINE),
    "SpectralNormalization": through(
        lambda: L.SpectralNormalization(L.Conv2D(4, 3)), IMAGE, keras=3
    ),
    "BatchNormalization": through(lambda: L.BatchNormalization(), IMAGE, apart=False),
    "BatchNormalization of a vector": through(
        lambda: L.BatchNormalization(), (5,), apart=False
    ),
    "BatchNormalization frozen": through(
        lambda: L.BatchNormalization(trainable=False), IMAGE
    ),
}

NOISE = {
    "Dropout": through(lambda: L.Dropout(0.3), (5,)),
    "Dropout by step": through(lambda: L.Dropout(0.3, noise_shape=(None, 1, 4)), LINE),
    "SpatialDropout1D": through(lambda: L.SpatialDropout1D(0.3), LINE),
    "SpatialDropout2D": through(lambda: L.SpatialDropout2D(0.3), IMAGE),
    "SpatialDropout3D": through(lambda: L.SpatialDropout3D(0.3), ROOM),
    "AlphaDropout": through(lambda: L.AlphaDropout(0.3), (5,)),
    "GaussianDropout": through(lambda: L.GaussianDropout(0.3), (5,)),
    "GaussianNoise": through(lambda: L.GaussianNoise(0.3), (5,)),
}

_MERGES = "Add Subtract Multiply Average Maximum Minimum Concatenate".split()
MERGING = {
    **{
        name: through(lambda name=name: getattr(L, name)(), (5,), (5,))
        for name in _MERGES
    },
    "Concatenate of images": through(lambda: L.Concatenate(axis=-1), IMAGE, IMAGE),
    "Concatenate of lines": through(lambda: L.Concatenate(axis=1), LINE, LINE),
    "Add with broadcasting": through(lambda: L.Add(), LINE, (1, 4)),
    "Dot": through(lambda: L.Dot(axes=1), (5,), (5,)),
    "Dot normalised": through(lambda: L.Dot(axes=1, normalize=True), (5,), (5,)),
    "Dot of matrices": through(lambda: L.Dot(axes=(2, 2)), LINE, LINE),
}


def _recurrent(name: str) -> dict[str, Entry]:
    layer = getattr(L, name)
    unfused = {} if name == "SimpleRNN" else {"plain": {"recurrent_dropout": 0.2}}
    hows = {
        "": {},
        "of sequences": {"return_sequences": True},
        "of states": {"return_state": True},
        "backwards": {"go_backwards": True},
        "unrolled": {"unroll": True},
        "with dropout": {"dropout": 0.2},
        **unfused,
    }
    found = {
        f"{name} {how}".strip(): through(
            lambda options=options: layer(3, **options), LINE
        )
        for how, options in hows.items()
    }
    found[f"{name} masked"] = tokens(_after_embedding(lambda: layer(3)))
    found[f"{name} masked, of sequences"] = tokens(
        _after_embedding(lambda: layer(3, return_sequences=True))
    )
    found[f"{name} masked, backwards, unrolled"] = tokens(
        _after_embedding(lambda: layer(3, go_backwards=True, unroll=True))
    )
    found[f"Bidirectional {name}"] = through(lambda: L.Bidirectional(layer(3)), LINE)
    found[f"Bidirectional {name} masked, summed"] = tokens(
        _after_embedding(
            lambda: L.Bidirectional(layer(3, return_sequences=True), merge_mode="sum")
        )
    )
    found[f"{name} of two layers"] = through(
        lambda: lambda x: layer(3)(layer(3, return_sequences=True)(x)), LINE
    )
    return found


def _with_state(x):
    """A decoder that begins with an encoder's states."""
    _, *states = L.LSTM(3, return_state=True)(x)
    return L.LSTM(3, return_sequences=True)(x, initial_state=states)


RECURRENT = {
    **_recurrent("SimpleRNN"),
    **_recurrent("LSTM"),
    **_recurrent("GRU"),
    "GRU reset before": through(lambda: L.GRU(3, reset_after=False), LINE),
    "RNN of a SimpleRNNCell": through(lambda: L.RNN(L.SimpleRNNCell(3)), LINE),
    "RNN of a GRUCell": through(lambda: L.RNN(L.GRUCell(3)), LINE),
    "RNN of an LSTMCell": through(lambda: L.RNN(L.LSTMCell(3)), LINE),
    "StackedRNNCells": through(
        lambda: L.RNN(L.StackedRNNCells([L.LSTMCell(3), L.GRUCell(4)])), LINE
    ),
    "LSTM from states": through(lambda: _with_state, LINE),
    "ConvLSTM1D": through(lambda: L.ConvLSTM1D(3, 3), (4, 8, 2)),
    "ConvLSTM2D": through(lambda: L.ConvLSTM2D(3, 3), FILM),
    "ConvLSTM2D of sequences": through(
        lambda: L.ConvLSTM2D(3, 3, padding="same", return_sequences=True), FILM
    ),
    "ConvLSTM3D": through(lambda: L.ConvLSTM3D(3, 3), (3, 5, 5, 5, 2)),
    "TimeDistributed": through(lambda: L.TimeDistributed(L.Dense(3)), LINE),
    "TimeDistributed convolution": through(
        lambda: L.TimeDistributed(L.Conv2D(3, 3)), FILM
    ),
    "TimeDistributed masked": tokens(
        _after_embedding(lambda: L.TimeDistributed(L.Dense(3)))
    ),
    "Wrapper": through(lambda: _Wrapped(L.Dense(3)), (5,)),
}


class _Wrapped(L.Wrapper):
    """A wrapper that only calls its layer."""

    def call(self, inputs):
        return self.layer(inputs)


def _self_attention(x, **options):
    return L.MultiHeadAttention(2, 3, dropout=0.1)(x, x, **options)


def _masked_attention(ids):
    x = L.Embedding(20, 4, mask_zero=True)(ids)
    return L.MultiHeadAttention(2, 3)(x, x)


def _given_mask(inputs):
    x, mask = inputs
    mask = L.Lambda(lambda m: m > 0, output_shape=(8, 8))(mask)
    return L.MultiHeadAttention(2, 3)(x, x, attention_mask=mask)


ATTENTION = {
    "MultiHeadAttention": through(lambda: _self_attention, LINE),
    "MultiHeadAttention causal": through(
        lambda: lambda x: _self_attention(x, use_causal_mask=True), LINE
    ),
    "MultiHeadAttention masked": tokens(lambda: _masked_attention),
    "MultiHeadAttention with a mask": through(lambda: _given_mask, LINE, (8, 8)),
    "MultiHeadAttention across": through(
        lambda: lambda xy: L.MultiHeadAttention(2, 3)(xy[0], xy[1]), LINE, (5, 4)
    ),
    "MultiHeadAttention of an image": through(
        lambda: lambda x: L.MultiHeadAttention(2, 3, attention_axes=(1, 2))(x, x),
        (3, 3, 4),
    ),
    "MultiHeadAttention with scores": through(
        lambda: (
            lambda x: L.MultiHeadAttention(2, 3)(x, x, return_attention_scores=True)[1]
        ),
        LINE,
    ),
    "GroupQueryAttention": through(
        lambda: lambda x: L.GroupQueryAttention(3, 4, 2)(x, x), LINE, keras=3
    ),
    "GroupQueryAttention causal": through(
        lambda: lambda x: L.GroupQueryAttention(3, 4, 2)(x, x, use_causal_mask=True),
        LINE,
        keras=3,
    ),
    "Attention": through(lambda: L.Attention(), LINE, LINE),
    "Attention scaled, causal, dropped": through(
        lambda: (
            lambda xy: L.Attention(use_scale=True, dropout=0.1)(
                xy, use_causal_mask=True
            )
        ),
        LINE,
        LINE,
    ),
    "Attention concatenated": through(
        lambda: L.Attention(score_mode="concat"), LINE, LINE
    ),
    "Attention masked": tokens(
        lambda: (
            lambda ids: (lambda x: L.Attention()([x, x]))(
                L.Embedding(20, 4, mask_zero=True)(ids)
            )
        )
    ),
    "AdditiveAttention": through(lambda: L.AdditiveAttention(), LINE, LINE),
    "AdditiveAttention masked": tokens(
        lambda: (
            lambda ids: (lambda x: L.AdditiveAttention()([x, x]))(
                L.Embedding(20, 4, mask_zero=True)(ids)
            )
        )
    ),
}


def _activation(name: str, keras: int | None = None) -> Entry:
    rank = (4, 6) if name in ("softmax", "glu", "sparsemax") else (6,)
    layer = L.Lambda if name == "glu" else L.Activation  # glu halves the last axis.
    return through(lambda: layer(getattr(K.activations, name)), rank, keras=keras)


_FUNCTIONS = """elu exponential gelu hard_sigmoid linear mish relu selu sigmoid softmax
softplus softsign swish tanh""".split()
_OF_KERAS_3 = """celu glu hard_shrink hard_silu hard_tanh leaky_relu log_sigmoid
log_softmax relu6 silu soft_shrink sparse_plus sparse_sigmoid sparsemax squareplus
tanh_shrink""".split()
ACTIVATIONS = {
    **{f"activation {name}": _activation(name) for name in _FUNCTIONS},
    **{f"activation {name}": _activation(name, 3) for name in _OF_KERAS_3},
    "activation threshold": through(
        lambda: L.Lambda(lambda x: K.activations.threshold(x, 0.5, 0.0)), (5,), keras=3
    ),
    "gelu, tanh": through(
        lambda: L.Lambda(lambda x: tf.nn.gelu(x, approximate=True)), (5,)
    ),
    "ReLU": through(lambda: L.ReLU(6.0, 0.1, 0.2), (5,)),
    "LeakyReLU": through(lambda: L.LeakyReLU(), (5,)),
    "PReLU": through(lambda: L.PReLU(), IMAGE),
    "PReLU shared": through(lambda: L.PReLU(shared_axes=[1, 2]), IMAGE),
    "ELU": through(lambda: L.ELU(), (5,)),
    "Softmax": through(lambda: L.Softmax(), LINE),
    "Softmax of two axes": through(lambda: L.Softmax(axis=(1, 2)), IMAGE),
    "ThresholdedReLU": through(lambda: L.ThresholdedReLU(), (5,), keras=2),
}

GROUPS = {
    "core": CORE,
    "shapes": SHAPES,
    "convolutions": CONVOLUTIONS,
    "pooling": POOLING,
    "normalisation": NORMALIZATIONS,
    "noise": NOISE,
    "merging": MERGING,
    "recurrent": RECURRENT,
    "attention": ATTENTION,
    "activations": ACTIVATIONS,
}
