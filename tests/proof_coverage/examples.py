"""Models that the example pages of keras.io build, told again and tiny."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

import tfdpclip as dpc
from tests import stack
from tests.proof_coverage.entry import CLASS, Entry, Of, classes, squares

K = tf.keras
L = tf.keras.layers


class Apply(L.Layer):
    """A function of TensorFlow as a layer."""

    def __init__(self, function: Callable, **options):
        super().__init__(**options)
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


def apply(function: Callable, inputs):
    return Apply(function)(inputs)


def chain(*layers, shape: tuple, dtype: str = "float32"):
    """A chain of layers."""
    return K.Sequential([K.Input(shape, dtype=dtype), *layers])


def classifier(
    build: Callable, shape: tuple, dtype: str = "float32", **options
) -> Entry:
    return Entry(build, Of(shape, dtype), CLASS, classes, **options)


def regressor(build: Callable, shape: tuple, labels: tuple, **options) -> Entry:
    return Entry(build, Of(shape), Of(labels), squares, **options)


def binary(labels, logits):
    """The loss of yes and no, as Keras reduces it."""
    return K.losses.BinaryCrossentropy(from_logits=True)(labels, logits)


# Images.


def _mnist():
    return chain(
        L.Conv2D(4, 3, activation="relu"),
        L.MaxPooling2D(2),
        L.Conv2D(8, 3, activation="relu"),
        L.MaxPooling2D(2),
        L.Flatten(),
        L.Dropout(0.5),
        L.Dense(10),
        shape=(14, 14, 1),
    )


def _separable(x, filters):
    x = L.SeparableConv2D(filters, 3, padding="same")(x)
    return L.GroupNormalization(2)(x)


def _xception():
    """Image classification from scratch: residual blocks of separable convolutions."""
    inputs = K.Input((16, 16, 3))
    x = L.Rescaling(1 / 255)(L.RandomRotation(0.1)(L.RandomFlip("horizontal")(inputs)))
    x = L.Activation("relu")(L.GroupNormalization(2)(L.Conv2D(4, 3, strides=2)(x)))
    for size in (6, 8):
        before = x
        x = _separable(L.Activation("relu")(x), size)
        x = L.MaxPooling2D(3, strides=2, padding="same")(_separable(x, size))
        x = L.add([x, L.Conv2D(size, 1, strides=2, padding="same")(before)])
    x = L.Dropout(0.25)(L.GlobalAveragePooling2D()(x))
    return K.Model(inputs, L.Dense(3)(x))


def _patches(images, size, count=-1):
    """Patches in a row, `[B, patches, pixels]`."""
    found = tf.image.extract_patches(
        images, [1, size, size, 1], [1, size, size, 1], [1, 1, 1, 1], "VALID"
    )
    return tf.reshape(found, [tf.shape(images)[0], count, found.shape[-1]])


class Places(L.Layer):
    """Adds a vector for each place."""

    def __init__(self, count: int, size: int, **options):
        super().__init__(**options)
        self.count = count
        self.embedding = L.Embedding(count, size)

    def call(self, x):
        return x + self.embedding(tf.range(self.count))


def _encoder(x, heads=2, size=4, hidden=8):
    """A block of a transformer."""
    before = L.LayerNormalization(epsilon=1e-6)(x)
    x = L.Add()([L.MultiHeadAttention(heads, size, dropout=0.1)(before, before), x])
    inner = L.Dense(hidden, "gelu")(L.LayerNormalization(epsilon=1e-6)(x))
    return L.Add()([L.Dense(x.shape[-1])(L.Dropout(0.1)(inner)), x])


def _vit():
    inputs = K.Input((12, 12, 3))
    x = apply(lambda images: _patches(images, 4), L.RandomFlip()(inputs))
    x = _encoder(Places(9, 8)(L.Dense(8)(x)))
    x = L.Flatten()(L.LayerNormalization()(x))
    return K.Model(inputs, L.Dense(3)(L.Dropout(0.5)(x)))


def _windows(x, size):
    """[B, H, W, C] to [B windows, size, size, C]."""
    _, height, width, channels = x.shape
    x = tf.reshape(x, [-1, height // size, size, width // size, size, channels])
    x = tf.transpose(x, [0, 1, 3, 2, 4, 5])
    return tf.reshape(x, [-1, size, size, channels])


def _joined_windows(x, size, height, width):
    channels = x.shape[-1]
    x = tf.reshape(x, [-1, height // size, width // size, size, size, channels])
    x = tf.transpose(x, [0, 1, 3, 2, 4, 5])
    return tf.reshape(x, [-1, height, width, channels])


class WindowAttention(L.Layer):
    """Attention within windows, with a bias for each relative place."""

    def __init__(self, size: int, heads: int, width: int, **options):
        super().__init__(**options)
        self.heads, self.size = heads, size
        self.qkv, self.out = L.Dense(3 * width), L.Dense(width)
        self.bias = self.add_weight(
            shape=((2 * size - 1) ** 2, heads), initializer="zeros", name="bias"
        )
        places = np.stack(np.meshgrid(*[np.arange(size)] * 2, indexing="ij"))
        flat = places.reshape(2, -1)
        between = (flat[:, :, None] - flat[:, None, :]).transpose(1, 2, 0) + size - 1
        self.between = (between[..., 0] * (2 * size - 1) + between[..., 1]).reshape(-1)

    def call(self, x, mask=None):
        _, count, width = x.shape
        qkv = tf.reshape(self.qkv(x), [-1, count, 3, self.heads, width // self.heads])
        q, k, v = tf.unstack(tf.transpose(qkv, [2, 0, 3, 1, 4]))
        scores = tf.matmul(q * (width // self.heads) ** -0.5, k, transpose_b=True)
        bias = tf.gather(tf.convert_to_tensor(self.bias), self.between)
        bias = tf.transpose(tf.reshape(bias, [count, count, self.heads]), [2, 0, 1])
        scores = scores + bias[tf.newaxis]
        if mask is not None:
            windows = mask.shape[0]
            mask = tf.cast(mask[tf.newaxis, :, tf.newaxis], scores.dtype)
            scores = tf.reshape(scores, [-1, windows, self.heads, count, count]) + mask
            scores = tf.reshape(scores, [-1, self.heads, count, count])
        x = tf.transpose(tf.matmul(tf.nn.softmax(scores), v), [0, 2, 1, 3])
        return self.out(tf.reshape(x, [-1, count, width]))


class Swin(L.Layer):
    """A block of a Swin transformer: windows that are shifted, or not."""

    def __init__(self, side: int, size: int, shift: int, width: int, **options):
        super().__init__(**options)
        self.side, self.size, self.shift, self.width = side, size, shift, width
        self.norm, self.attention = (
            L.LayerNormalization(),
            WindowAttention(size, 2, width),
        )
        self.norm2, self.inner = L.LayerNormalization(), L.Dense(2 * width, "gelu")
        self.outer = L.Dense(width)
        self.mask = None
        if shift:
            windows = np.zeros((1, side, side, 1), np.float32)
            windows[:, :shift] = 1
            found = windows.reshape(1, side // size, size, side // size, size, 1)
            found = found.transpose(0, 1, 3, 2, 4, 5).reshape(-1, size * size)
            apart = found[:, None] - found[:, :, None]
            self.mask = np.where(apart != 0, -100.0, 0.0).astype(np.float32)

    def call(self, x):
        side, size, width = self.side, self.size, self.width
        before = x
        x = tf.reshape(self.norm(x), [-1, side, side, width])
        if self.shift:
            x = tf.roll(x, [-self.shift, -self.shift], [1, 2])
        x = tf.reshape(_windows(x, size), [-1, size * size, width])
        mask = None if self.mask is None else tf.constant(self.mask)
        x = self.attention(x, mask=mask)
        x = tf.reshape(x, [-1, size, size, width])
        x = _joined_windows(x, size, side, side)
        if self.shift:
            x = tf.roll(x, [self.shift, self.shift], [1, 2])
        x = before + tf.reshape(x, [-1, side * side, width])
        return x + self.outer(self.inner(self.norm2(x)))


def _merge_patches(x, side, width):
    x = tf.reshape(x, [-1, side, side, width])
    parts = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
    return tf.reshape(tf.concat(parts, -1), [-1, side * side // 4, 4 * width])


def _swin():
    inputs = K.Input((16, 16, 3))
    x = apply(lambda images: _patches(images, 2), inputs)
    x = Places(64, 8)(L.Dense(8)(x))
    x = Swin(8, 2, 1, 8)(Swin(8, 2, 0, 8)(x))
    x = L.Dense(8, use_bias=False)(apply(lambda x: _merge_patches(x, 8, 8), x))
    return K.Model(inputs, L.Dense(3)(L.GlobalAveragePooling1D()(x)))


def _mixer():
    inputs = K.Input((12, 12, 3))
    x = L.Dense(8)(apply(lambda images: _patches(images, 4, 9), inputs))
    mixed = L.Permute((2, 1))(L.LayerNormalization()(x))
    mixed = L.Dense(9)(L.Dense(6, "gelu")(mixed))
    x = L.Add()([x, L.Permute((2, 1))(mixed)])
    x = L.Add()([x, L.Dense(8)(L.Dense(6, "gelu")(L.LayerNormalization()(x)))])
    return K.Model(inputs, L.Dense(3)(L.GlobalAveragePooling1D()(x)))


def _gmlp():
    inputs = K.Input((12, 12, 3))
    x = L.Dense(8)(apply(lambda images: _patches(images, 4, 9), inputs))
    before = x
    x = L.Dense(16, "gelu")(L.LayerNormalization()(x))
    u, v = apply(lambda x: tf.split(x, 2, axis=-1), x)
    v = L.Permute((2, 1))(L.LayerNormalization()(v))
    v = L.Permute((2, 1))(L.Dense(9, bias_initializer="ones")(v))
    x = L.Add()([before, L.Dense(8)(L.Multiply()([u, v]))])
    return K.Model(inputs, L.Dense(3)(L.GlobalAveragePooling1D()(x)))


def _fnet():
    inputs = K.Input((12, 12, 3))
    x = L.Dense(8)(apply(lambda images: _patches(images, 4), inputs))
    spectrum = apply(
        lambda x: tf.math.real(tf.signal.fft2d(tf.cast(x, tf.complex64))), x
    )
    x = L.LayerNormalization()(L.Add()([x, spectrum]))
    x = L.LayerNormalization()(L.Add()([x, L.Dense(8)(L.Dense(6, "gelu")(x))]))
    return K.Model(inputs, L.Dense(3)(L.GlobalAveragePooling1D()(x)))


def _convmixer():
    inputs = K.Input((12, 12, 3))
    x = L.GroupNormalization(2)(L.Activation("gelu")(L.Conv2D(8, 2, strides=2)(inputs)))
    for _ in range(2):
        inner = L.Activation("gelu")(L.DepthwiseConv2D(3, padding="same")(x))
        x = L.Add()([L.GroupNormalization(2)(inner), x])
        x = L.GroupNormalization(2)(L.Activation("gelu")(L.Conv2D(8, 1)(x)))
    return K.Model(inputs, L.Dense(3)(L.GlobalAveragePooling2D()(x)))


class StochasticDepth(L.Layer):
    """Leaves a branch out, example by example."""

    def call(self, x, training=None):
        if not training:
            return x
        shape = (tf.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        return x / 0.9 * tf.floor(0.9 + tf.random.uniform(shape, 0, 1))


class SequencePooling(L.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.attention = L.Dense(1)

    def call(self, x):
        weights = tf.transpose(tf.nn.softmax(self.attention(x), axis=1), [0, 2, 1])
        return tf.squeeze(tf.matmul(weights, x), -2)


def _cct():
    inputs = K.Input((12, 12, 3))
    x = L.Conv2D(8, 3, padding="same", activation="relu", use_bias=False)(inputs)
    x = L.MaxPooling2D(3, 2, "same")(L.ZeroPadding2D(1)(x))
    x = apply(lambda x: tf.reshape(x, [-1, x.shape[1] * x.shape[2], x.shape[3]]), x)
    x = Places(x.shape[1], 8)(x)
    before = L.LayerNormalization()(x)
    x = L.Add()([StochasticDepth()(L.MultiHeadAttention(2, 4)(before, before)), x])
    inner = L.Dense(8)(L.Dense(8, tf.nn.gelu)(L.LayerNormalization()(x)))
    x = L.Add()([StochasticDepth()(inner), x])
    return K.Model(inputs, L.Dense(3)(SequencePooling()(L.LayerNormalization()(x))))


def _eanet():
    inputs = K.Input((12, 12, 3))
    x = Places(9, 8)(L.Dense(8)(apply(lambda images: _patches(images, 4), inputs)))
    before = x
    x = L.Dense(32)(L.LayerNormalization()(x))
    x = apply(lambda x: tf.transpose(tf.reshape(x, [-1, 9, 8, 4]), [0, 2, 1, 3]), x)
    scores = L.Activation("softmax")(L.Dense(6)(x))
    scores = apply(lambda s: s / (1e-9 + tf.reduce_sum(s, -1, keepdims=True)), scores)
    x = L.Dense(4)(scores)
    x = apply(lambda x: tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [-1, 9, 32]), x)
    x = L.Add()([L.Dropout(0.1)(L.Dense(8)(x)), before])
    return K.Model(inputs, L.Dense(3)(L.GlobalAveragePooling1D()(x)))


def _token_learner():
    inputs = K.Input((16, 16, 3))
    x = L.Conv2D(8, 4, strides=4)(inputs)
    maps = L.LayerNormalization()(x)
    for _ in range(2):
        maps = L.Conv2D(3, 3, activation="gelu", padding="same", use_bias=False)(maps)
    maps = L.Activation("sigmoid")(L.Conv2D(3, 1)(maps))

    def learned(both):
        x, maps = both
        flat = tf.reshape(x, [-1, 1, 16, 8])
        weights = tf.transpose(tf.reshape(maps, [-1, 16, 3]), [0, 2, 1])
        return tf.reduce_mean(weights[..., tf.newaxis] * flat, axis=2)

    x = _encoder(apply(learned, [x, maps]))
    return K.Model(inputs, L.Dense(3)(L.GlobalAveragePooling1D()(x)))


def _involution():
    inputs = K.Input((8, 8, 3))
    kernel = L.Conv2D(9, 1)(L.Activation("relu")(L.Conv2D(2, 1)(inputs)))

    def involved(both):
        x, kernel = both
        kernel = tf.reshape(kernel, [-1, 8, 8, 9, 1, 1])
        patches = tf.image.extract_patches(
            x, [1, 3, 3, 1], [1, 1, 1, 1], [1, 1, 1, 1], "SAME"
        )
        patches = tf.reshape(patches, [-1, 8, 8, 9, 3, 1])
        found = tf.reduce_sum(kernel * patches, axis=3)
        return tf.reshape(found, [-1, 8, 8, 3])

    x = L.ReLU()(apply(involved, [inputs, kernel]))
    return K.Model(inputs, L.Dense(3)(L.Flatten()(x)))


def _regularize_orthogonality(x):
    """The penalty of PointNet's transforms, of each example."""
    product = tf.matmul(x, x, transpose_b=True)
    return 0.001 * tf.reduce_mean(tf.reduce_sum(tf.square(product - tf.eye(3)), [1, 2]))


class Orthogonal(L.Layer):
    """Adds the penalty of PointNet's transforms to the loss."""

    def call(self, x):
        self.add_loss(_regularize_orthogonality(x))
        return x


def _pointnet():
    inputs = K.Input((16, 3))
    x = L.GroupNormalization(2)(L.Conv1D(8, 1, activation="relu")(inputs))
    x = L.Dense(9, bias_initializer="ones")(L.GlobalMaxPooling1D()(x))
    transform = Orthogonal()(L.Reshape((3, 3))(x))
    x = L.Dot(axes=(2, 1))([inputs, transform])
    x = L.GroupNormalization(2)(L.Conv1D(8, 1, activation="relu")(x))
    x = L.Dense(8, "relu")(L.GlobalMaxPooling1D()(x))
    return K.Model(inputs, L.Dense(3)(L.Dropout(0.3)(x)))


def _block(x, **options):
    x = L.Conv2D(4, 3, padding="same", use_bias=False, **options)(x)
    return L.ReLU()(L.GroupNormalization(2)(x))


def _deeplab():
    """Dilated pyramids, with features of the whole image, enlarged again."""
    inputs = K.Input((16, 16, 3))
    low = _block(inputs)
    x = L.Conv2D(4, 3, strides=4, padding="same")(low)
    pooled = _block(L.AveragePooling2D((4, 4))(x))
    pooled = L.UpSampling2D((4, 4), interpolation="bilinear")(pooled)
    parts = [pooled, *(_block(x, dilation_rate=rate) for rate in (1, 2))]
    x = _block(L.Concatenate(axis=-1)(parts))
    x = L.UpSampling2D((4, 4), interpolation="bilinear")(x)
    return K.Model(inputs, L.Conv2D(3, 1)(_block(L.Concatenate()([x, low]))))


def _unet():
    inputs = K.Input((16, 16, 3))
    before = x = _block(inputs, strides=2)
    for size in (6, 8):
        x = L.SeparableConv2D(size, 3, padding="same")(L.Activation("relu")(x))
        x = L.MaxPooling2D(3, strides=2, padding="same")(L.GroupNormalization(2)(x))
        before = L.Conv2D(size, 1, strides=2, padding="same")(before)
        before = x = L.add([x, before])
    for size in (8, 6, 4):
        x = L.Conv2DTranspose(size, 3, padding="same")(L.Activation("relu")(x))
        x = L.UpSampling2D(2)(L.GroupNormalization(2)(x))
        before = L.Conv2D(size, 1, padding="same")(L.UpSampling2D(2)(before))
        before = x = L.add([x, before])
    return K.Model(inputs, L.Conv2D(3, 3, padding="same")(x))


PIXELS = Of((16, 16), "int32")


def _espcn():
    """Super-resolution of images of any size."""
    inputs = K.Input((None, None, 1))
    x = L.Conv2D(8, 5, activation="tanh", padding="same")(inputs)
    x = L.Conv2D(4, 3, padding="same")(x)
    return K.Model(inputs, apply(lambda x: tf.nn.depth_to_space(x, 2), x))


def _zero_dce():
    inputs = K.Input((8, 8, 3))
    one = L.Conv2D(4, 3, activation="relu", padding="same")(inputs)
    two = L.Conv2D(4, 3, activation="relu", padding="same")(one)
    both = L.Concatenate(axis=-1)([one, two])
    return K.Model(inputs, L.Conv2D(6, 3, activation="tanh", padding="same")(both))


def _zero_dce_loss(images, curves):
    """Of colours, exposure and smoothness; no image is a label."""
    x = images
    for curve in tf.split(curves, 2, axis=-1):
        x = x + curve * (tf.square(x) - x)
    red, green, blue = tf.unstack(tf.reduce_mean(x, [1, 2]), axis=1)
    colour = tf.sqrt(
        tf.square(red - green) ** 2 + tf.square(red - blue) ** 2 + 1e-6
    ) + tf.square(green - blue)
    exposed = tf.nn.avg_pool2d(tf.reduce_mean(x, 3, keepdims=True), 4, 4, "VALID")
    exposure = tf.reduce_mean(tf.square(exposed - 0.6))
    height = tf.reduce_sum(tf.square(curves[:, 1:] - curves[:, :-1]))
    smooth = height / tf.cast(tf.shape(curves)[0], tf.float32)
    return tf.reduce_mean(colour) + exposure + 0.1 * smooth


class ReflectionPadding(L.Layer):
    def call(self, x):
        return tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], mode="REFLECT")


def _cyclegan():
    inputs = K.Input((12, 12, 3))
    x = L.ReLU()(L.GroupNormalization(-1)(L.Conv2D(4, 3)(ReflectionPadding()(inputs))))
    x = L.ReLU()(L.GroupNormalization(-1)(L.Conv2D(6, 3, 2, padding="same")(x)))
    inner = L.Conv2D(6, 3, use_bias=False)(ReflectionPadding()(x))
    x = L.add([x, L.GroupNormalization(-1)(inner)])
    x = L.Conv2DTranspose(4, 3, 2, padding="same")(x)
    x = L.ReLU()(L.GroupNormalization(-1)(x))
    x = L.Activation("tanh")(L.Conv2D(3, 3)(ReflectionPadding()(x)))
    return K.Model(inputs, x)


def _discriminator():
    return chain(
        L.Conv2D(4, 4, strides=2, padding="same"),
        L.LeakyReLU(0.2),
        L.Conv2D(8, 4, strides=2, padding="same"),
        L.LeakyReLU(0.2),
        L.Flatten(),
        L.Dropout(0.2),
        L.Dense(1),
        shape=(16, 16, 3),
    )


def _with_generated(labels, logits):
    """Real and generated images are two batches, each with its own loss."""
    real, generated = tf.split(logits, 2, axis=1)
    return binary(tf.ones_like(real), real) + binary(
        tf.zeros_like(generated), generated
    )


def _gan_step():
    """A discriminator that sees real images beside generated ones, as DCGAN does."""
    judge, inputs = _discriminator(), K.Input((16, 16, 3))
    generator = chain(
        L.Dense(4 * 4 * 8),
        L.Reshape((4, 4, 8)),
        L.Conv2DTranspose(4, 4, strides=2, padding="same"),
        L.LeakyReLU(0.2),
        L.Conv2DTranspose(3, 4, strides=2, padding="same", activation="sigmoid"),
        shape=(6,),
    )
    generator.trainable = False
    noise = apply(lambda x: tf.random.normal([tf.shape(x)[0], 6]), inputs)
    found = L.Concatenate()([judge(inputs), judge(generator(noise))])
    return K.Model(inputs, found)


def _stacked_gan_step():
    """DCGAN as in keras.io: both sorts of images in the same batch."""
    judge, inputs = _discriminator(), K.Input((16, 16, 3))

    def both(x):
        noise = tf.random.normal(tf.shape(x))
        return tf.concat([noise, x], axis=0)

    return K.Model(inputs, judge(apply(both, inputs)))


def _stacked_labels(labels, logits):
    ones = tf.ones([tf.shape(logits)[0] // 2, 1])
    return binary(tf.concat([ones, tf.zeros_like(ones)], 0), logits)


class Sampling(L.Layer):
    def call(self, inputs):
        mean, log_variance = inputs
        noise = tf.random.normal(tf.shape(mean))
        self.add_loss(
            tf.reduce_mean(
                tf.reduce_sum(
                    -0.5 * (1 + log_variance - tf.square(mean) - tf.exp(log_variance)),
                    axis=1,
                )
            )
        )
        return mean + tf.exp(0.5 * log_variance) * noise


def _vae():
    inputs = K.Input((12, 12, 1))
    x = L.Conv2D(4, 3, activation="relu", strides=2, padding="same")(inputs)
    x = L.Dense(8, "relu")(L.Flatten()(x))
    latent = Sampling()([L.Dense(2)(x), L.Dense(2)(x)])
    x = L.Reshape((6, 6, 4))(L.Dense(6 * 6 * 4, "relu")(latent))
    x = L.Conv2DTranspose(4, 3, activation="relu", strides=2, padding="same")(x)
    return K.Model(inputs, L.Conv2DTranspose(1, 3, padding="same")(x))


def _vae_loss(images, reconstruction):
    found = K.losses.binary_crossentropy(images, reconstruction, from_logits=True)
    return tf.reduce_mean(tf.reduce_sum(found, axis=(1, 2)))


class VectorQuantizer(L.Layer):
    """The nearest of some learned vectors; gradients skip the replacement."""

    def __init__(self, **options):
        super().__init__(**options)
        self.vectors = self.add_weight(shape=(4, 5), name="vectors")

    def call(self, x):
        vectors = tf.convert_to_tensor(self.vectors)
        flat = tf.reshape(x, [-1, 4])
        distances = (
            tf.reduce_sum(flat**2, axis=1, keepdims=True)
            + tf.reduce_sum(vectors**2, axis=0)
            - 2 * tf.matmul(flat, vectors)
        )
        chosen = tf.one_hot(tf.argmin(distances, axis=1), 5)
        found = tf.matmul(chosen, vectors, transpose_b=True)
        found = tf.reshape(found, tf.shape(x))
        commitment = tf.reduce_mean((tf.stop_gradient(found) - x) ** 2)
        codebook = tf.reduce_mean((found - tf.stop_gradient(x)) ** 2)
        self.add_loss(0.25 * commitment + codebook)
        return x + tf.stop_gradient(found - x)


def _vqvae():
    inputs = K.Input((8, 8, 1))
    x = L.Conv2D(4, 3, strides=2, padding="same", activation="relu")(inputs)
    x = VectorQuantizer()(L.Conv2D(4, 1)(x))
    return K.Model(inputs, L.Conv2DTranspose(1, 3, strides=2, padding="same")(x))


def _denoiser():
    """An autoencoder of images."""
    return chain(
        L.Conv2D(4, 3, activation="relu", padding="same"),
        L.MaxPooling2D(2, padding="same"),
        L.Conv2DTranspose(4, 3, strides=2, activation="relu", padding="same"),
        L.Conv2D(1, 3, activation="sigmoid", padding="same"),
        shape=(12, 12, 1),
    )


class Diffusion(L.Layer):
    """Noise at a time that is drawn for each image, and a network that finds it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.time = K.Sequential([L.Dense(4, "swish"), L.Dense(4)])
        self.first, self.last = (
            L.Conv2D(4, 3, padding="same"),
            L.Conv2D(3, 3, padding="same"),
        )
        self.norm = L.GroupNormalization(2)

    def call(self, images):
        count = tf.shape(images)[0]
        when = tf.random.uniform([count, 1, 1, 1])
        noise = tf.random.normal(tf.shape(images))
        mixed = tf.cos(when) * images + tf.sin(when) * noise
        rates = tf.exp(tf.linspace(tf.math.log(1.0), tf.math.log(100.0), 4))
        embedded = tf.concat([tf.sin(rates * when), tf.cos(rates * when)], axis=3)
        x = tf.nn.silu(self.norm(self.first(mixed) + self.time(embedded)))
        return self.last(x) - noise


def _diffusion():
    inputs = K.Input((8, 8, 3))
    return K.Model(inputs, Diffusion()(inputs))


def _nerf():
    """Colours along rays."""
    inputs = K.Input((6 * 4, 5))
    x = inputs
    for i in range(3):
        x = L.Dense(8, "relu")(x)
        if i == 1:
            x = L.concatenate([x, inputs])
    raw = L.Dense(4)(x)

    def rendered(raw):
        raw = tf.reshape(raw, [-1, 6, 4, 4])
        colours, density = tf.sigmoid(raw[..., :3]), tf.nn.relu(raw[..., 3])
        alpha = 1.0 - tf.exp(-density * 0.1)
        through = tf.math.cumprod(1.0 - alpha + 1e-10, axis=-1, exclusive=True)
        return tf.reduce_sum((alpha * through)[..., None] * colours, axis=-2)

    return K.Model(inputs, apply(rendered, raw))


def _siamese():
    """Distances between the three pictures of an example."""
    network = chain(
        L.Conv2D(4, 3, activation="relu"), L.Flatten(), L.Dense(4), shape=(8, 8, 1)
    )
    inputs = [K.Input((8, 8, 1)) for _ in range(3)]
    anchor, positive, negative = (network(x) for x in inputs)

    def distances(three):
        anchor, positive, negative = three
        near = tf.reduce_sum(tf.square(anchor - positive), -1)
        far = tf.reduce_sum(tf.square(anchor - negative), -1)
        return tf.stack([near, far], axis=1)

    return K.Model(inputs, apply(distances, [anchor, positive, negative]))


def _triplet_loss(labels, distances):
    return tf.reduce_mean(tf.maximum(distances[:, 0] - distances[:, 1] + 0.5, 0.0))


def _siamese_contrastive():
    network = chain(L.Flatten(), L.Dense(4, "tanh"), shape=(8, 8, 1))
    inputs = [K.Input((8, 8, 1)) for _ in range(2)]
    one, two = (network(x) for x in inputs)

    def distance(both):
        squares = tf.reduce_sum(tf.square(both[0] - both[1]), 1, keepdims=True)
        return tf.sqrt(tf.maximum(squares, 1e-7))

    return K.Model(inputs, L.Dense(1)(apply(distance, [one, two])))


def _captcha():
    """Characters in a picture: convolutions, then time, then CTC."""
    inputs = K.Input((16, 8, 1))
    x = L.Conv2D(4, 3, activation="relu", padding="same")(inputs)
    x = L.MaxPooling2D(2)(x)
    x = L.Dropout(0.2)(L.Dense(8, "relu")(L.Reshape((8, 16))(x)))
    x = L.Bidirectional(L.LSTM(4, return_sequences=True, dropout=0.25))(x)
    return K.Model(inputs, L.Dense(6, "softmax")(x))


def _ctc(labels, predictions):
    if stack.KERAS_3:
        return K.losses.CTC()(labels, tf.math.log(predictions + 1e-7))
    ones = tf.ones([tf.shape(predictions)[0], 1], tf.int32)
    return K.backend.ctc_batch_cost(labels, predictions, 8 * ones, 3 * ones)


def _knowledge_distillation():
    teacher = chain(L.Flatten(), L.Dense(3), shape=(8, 8, 1))
    teacher.trainable = False
    student = chain(L.Conv2D(2, 3), L.Flatten(), L.Dense(3), shape=(8, 8, 1))
    inputs = K.Input((8, 8, 1))
    return K.Model(inputs, L.Concatenate()([student(inputs), teacher(inputs)]))


def _distillation(labels, both):
    student, teacher = tf.split(both, 2, axis=1)
    soft = K.losses.KLDivergence()(
        tf.nn.softmax(teacher / 3), tf.nn.softmax(student / 3)
    )
    return 0.1 * classes(labels, student) + 0.9 * soft * 9


def _video():
    """A transformer over the features of frames, with missing frames masked."""
    inputs = K.Input((6, 8))
    x = Places(6, 8)(inputs)
    mask = apply(lambda x: tf.reduce_any(x != 0.0, axis=-1), inputs)
    x = L.MultiHeadAttention(1, 8, dropout=0.3)(
        x, x, attention_mask=apply(lambda m: m[:, tf.newaxis, :], mask)
    )
    x = L.GlobalMaxPooling1D()(L.LayerNormalization()(x))
    return K.Model(inputs, L.Dense(3)(L.Dropout(0.5)(x)))


def _mri():
    return chain(
        L.Conv3D(4, 3, activation="relu"),
        L.MaxPooling3D(2),
        L.GroupNormalization(2),
        L.GlobalAveragePooling3D(),
        L.Dense(1),
        shape=(8, 8, 8, 1),
    )


def _next_frame():
    return chain(
        L.ConvLSTM2D(4, 3, padding="same", return_sequences=True, activation="relu"),
        L.GroupNormalization(2),
        L.ConvLSTM2D(4, 1, padding="same", return_sequences=True, activation="relu"),
        L.Conv3D(1, 3, activation="sigmoid", padding="same"),
        shape=(3, 6, 6, 1),
    )


def _spatial_transformer(both):
    """Samples an image at places that the network chose."""
    x, theta = both
    theta = tf.reshape(theta, [-1, 2, 3])
    across, down = tf.meshgrid(tf.linspace(-1.0, 1.0, 6), tf.linspace(-1.0, 1.0, 6))
    grid = tf.stack([tf.reshape(across, [-1]), tf.reshape(down, [-1]), tf.ones([36])])
    places = (tf.matmul(theta, grid[tf.newaxis]) + 1) * 2.5
    low = tf.floor(places)
    part = places - low
    found = 0.0
    for i in (0, 1):
        for j in (0, 1):
            column = tf.cast(tf.clip_by_value(low[:, 0] + i, 0, 5), tf.int32)
            row = tf.cast(tf.clip_by_value(low[:, 1] + j, 0, 5), tf.int32)
            weight = (part[:, 0] if i else 1 - part[:, 0]) * (
                part[:, 1] if j else 1 - part[:, 1]
            )
            flat = tf.reshape(x, [-1, 36, 1])
            pixels = tf.gather(flat, row * 6 + column, batch_dims=1)
            found = found + weight[..., tf.newaxis] * pixels
    return tf.reshape(found, [-1, 6, 6, 1])


def _transformed():
    inputs = K.Input((6, 6, 1))
    theta = L.Dense(6)(L.Dense(8, "relu")(L.Flatten()(inputs)))
    x = apply(_spatial_transformer, [inputs, theta])
    return K.Model(inputs, L.Dense(3)(L.Flatten()(x)))


def _retina():
    """Heads of a detector on two levels of a pyramid."""
    inputs = K.Input((16, 16, 3))
    fine = L.Conv2D(4, 3, strides=2, padding="same", activation="relu")(inputs)
    coarse = L.Conv2D(4, 3, strides=2, padding="same", activation="relu")(fine)
    fine = L.Add()([L.Conv2D(4, 1)(fine), L.UpSampling2D(2)(L.Conv2D(4, 1)(coarse))])
    head = L.Conv2D(2 * 5, 3, padding="same")
    parts = [L.Reshape((-1, 5))(head(level)) for level in (fine, coarse)]
    return K.Model(inputs, L.Concatenate(axis=1)(parts))


def _retina_loss(labels, found):
    """Of boxes and classes: focal, and divided by how many boxes an image has."""
    positive = tf.cast(labels[..., 4] > 0, tf.float32)
    error = tf.abs(labels[..., :4] - found[..., :4])
    boxes = tf.reduce_sum(tf.where(error < 1, error**2 / 2, error - 0.5), -1)
    entropy = tf.nn.sigmoid_cross_entropy_with_logits(positive, found[..., 4])
    probability = tf.nn.sigmoid(found[..., 4])
    focal = tf.where(positive == 1, 1 - probability, probability) ** 2 * entropy
    count = tf.maximum(tf.reduce_sum(positive, -1), 1.0)
    return (tf.reduce_sum(focal, -1) + tf.reduce_sum(boxes * positive, -1)) / count


IMAGES = {
    "MNIST convnet": classifier(_mnist, (14, 14, 1)),
    "image classification from scratch": classifier(_xception, (16, 16, 3)),
    "vision transformer": classifier(_vit, (12, 12, 3)),
    "Swin transformer": classifier(_swin, (16, 16, 3)),
    "MLP-Mixer": classifier(_mixer, (12, 12, 3)),
    "gMLP": classifier(_gmlp, (12, 12, 3)),
    "FNet of patches": classifier(_fnet, (12, 12, 3)),
    "ConvMixer": classifier(_convmixer, (12, 12, 3)),
    "compact convolutional transformer": classifier(_cct, (12, 12, 3)),
    "external attention": classifier(_eanet, (12, 12, 3)),
    "token learner": classifier(_token_learner, (16, 16, 3)),
    "involution": classifier(_involution, (8, 8, 3)),
    "PointNet": classifier(_pointnet, (16, 3)),
    "DeepLabV3+": Entry(_deeplab, Of((16, 16, 3)), PIXELS, classes),
    "U-Net": Entry(_unet, Of((16, 16, 3)), PIXELS, classes),
    "super-resolution": regressor(_espcn, (8, 8, 1), (16, 16, 1)),
    "super-resolution of any size": regressor(_espcn, (None, None, 1), (None, None, 1)),
    "Zero-DCE": Entry(_zero_dce, Of((8, 8, 3)), Of((8, 8, 3)), _zero_dce_loss),
    "CycleGAN generator": regressor(_cyclegan, (12, 12, 3), (12, 12, 3)),
    "DCGAN discriminator": Entry(_discriminator, Of((16, 16, 3)), Of((1,)), binary),
    "DCGAN step, two calls": Entry(_gan_step, Of((16, 16, 3)), CLASS, _with_generated),
    "DCGAN step, one batch": Entry(
        _stacked_gan_step, Of((16, 16, 3)), CLASS, _stacked_labels
    ),
    "variational autoencoder": Entry(_vae, Of((12, 12, 1)), Of((12, 12, 1)), _vae_loss),
    "vector-quantised autoencoder": regressor(_vqvae, (8, 8, 1), (8, 8, 1)),
    "denoising autoencoder": regressor(_denoiser, (12, 12, 1), (12, 12, 1)),
    "denoising diffusion": regressor(_diffusion, (8, 8, 3), (8, 8, 3)),
    "NeRF": regressor(_nerf, (24, 5), (6, 3)),
    "siamese network, triplets": Entry(
        _siamese, [Of((8, 8, 1))] * 3, CLASS, _triplet_loss
    ),
    "siamese network, pairs": Entry(
        _siamese_contrastive, [Of((8, 8, 1))] * 2, Of((1,)), binary
    ),
    "captcha OCR": Entry(_captcha, Of((16, 8, 1)), Of((3,), "int32"), _ctc),
    "knowledge distillation": Entry(
        _knowledge_distillation, Of((8, 8, 1)), CLASS, _distillation
    ),
    "video transformer": classifier(_video, (6, 8)),
    "3D images": Entry(_mri, Of((8, 8, 8, 1)), Of((1,)), binary),
    "next-frame prediction": Entry(
        _next_frame,
        Of((3, 6, 6, 1)),
        Of((3, 6, 6, 1)),
        lambda y, x: K.losses.BinaryCrossentropy()(y, x),
    ),
    "spatial transformer": classifier(_transformed, (6, 6, 1)),
    "RetinaNet": Entry(_retina, Of((16, 16, 3)), Of((160, 5)), _retina_loss),
}

# Texts and sequences.

IDS = Of((8,), "int32")


def of_tokens(build: Callable, **options) -> Entry:
    return Entry(build, IDS, CLASS, classes, **options)


def _embedded(inputs, size=8):
    length = inputs.shape[1]
    return Places(length, size)(L.Embedding(20, size)(inputs))


def _imdb_transformer():
    inputs = K.Input((8,), dtype="int32")
    x = _embedded(inputs)
    x = L.LayerNormalization()(x + L.Dropout(0.1)(L.MultiHeadAttention(2, 4)(x, x)))
    x = L.LayerNormalization()(x + L.Dense(8)(L.Dense(8, "relu")(x)))
    x = L.Dense(8, "relu")(L.Dropout(0.1)(L.GlobalAveragePooling1D()(x)))
    return K.Model(inputs, L.Dense(3)(x))


def _texts_from_scratch():
    vectorize = L.TextVectorization(max_tokens=20, output_sequence_length=16)
    vectorize.set_vocabulary(["good", "bad", "film"])
    return chain(
        vectorize,
        L.Embedding(20, 4),
        L.Dropout(0.5),
        L.Conv1D(4, 3, strides=3, activation="relu"),
        L.GlobalMaxPooling1D(),
        L.Dense(4, "relu"),
        L.Dense(3),
        shape=(1,),
        dtype="string",
    )


def _bidirectional():
    inputs = K.Input((None,), dtype="int32")
    x = L.Embedding(20, 4)(inputs)
    x = L.Bidirectional(L.LSTM(4, return_sequences=True))(x)
    return K.Model(inputs, L.Dense(3)(L.Bidirectional(L.LSTM(4))(x)))


def _pretrained_embeddings():
    inputs = K.Input((16,), dtype="int32")
    x = L.Embedding(20, 4, trainable=False)(inputs)
    x = L.MaxPooling1D(2)(L.Conv1D(4, 3, activation="relu")(x))
    x = L.GlobalMaxPooling1D()(L.Conv1D(4, 3, activation="relu")(x))
    return K.Model(inputs, L.Dense(3)(L.Dropout(0.5)(x)))


def _seq2seq_lstm():
    """Characters: an encoder whose states begin a decoder."""
    source, target = K.Input((None, 6)), K.Input((None, 5))
    _, *states = L.LSTM(4, return_state=True)(source)
    x, _, _ = L.LSTM(4, return_sequences=True, return_state=True)(
        target, initial_state=states
    )
    return K.Model([source, target], L.Dense(5)(x))


def _addition():
    return chain(
        L.LSTM(4),
        L.RepeatVector(3),
        L.LSTM(4, return_sequences=True),
        L.Dense(6),
        shape=(5, 6),
    )


class Positional(L.Layer):
    """Token and position embeddings, with the mask of padding."""

    def __init__(self, **options):
        super().__init__(**options)
        self.tokens = L.Embedding(20, 8, mask_zero=True)
        self.positions = L.Embedding(8, 8)

    def call(self, inputs):
        length = tf.shape(inputs)[-1]
        return self.tokens(inputs) + self.positions(tf.range(length))

    def compute_mask(self, inputs, mask=None):
        return (K.ops if stack.KERAS_3 else tf).not_equal(inputs, 0)


class Decoder(L.Layer):
    """A block of a decoder: causal, masked, and with attention to the encoder."""

    def __init__(self, **options):
        super().__init__(**options)
        self.own, self.other = L.MultiHeadAttention(2, 4), L.MultiHeadAttention(2, 4)
        self.norms = [L.LayerNormalization() for _ in range(3)]
        self.dense = K.Sequential([L.Dense(8, "relu"), L.Dense(8)])

    def call(self, inputs):
        x, encoded = inputs
        length = tf.shape(x)[1]
        causal = tf.range(length)[:, None] >= tf.range(length)
        causal = tf.tile(tf.cast(causal, tf.int32)[None], [tf.shape(x)[0], 1, 1])
        x = self.norms[0](x + self.own(x, x, attention_mask=causal))
        x = self.norms[1](x + self.other(x, encoded))
        return self.norms[2](x + self.dense(x))


def _translation():
    source, target = (K.Input((8,), dtype="int32") for _ in range(2))
    encoded = _encoder(Positional()(source))
    x = Decoder()([Positional()(target), encoded])
    return K.Model([source, target], L.Dense(20)(L.Dropout(0.5)(x)))


class CausalBlock(L.Layer):
    """The block of keras.io's miniature GPT."""

    def __init__(self, **options):
        super().__init__(**options)
        self.attention = L.MultiHeadAttention(2, 4)
        self.dense = K.Sequential([L.Dense(8, "relu"), L.Dense(8)])
        self.norms = [L.LayerNormalization() for _ in range(2)]
        self.drop = L.Dropout(0.1)

    def call(self, x):
        shape = tf.shape(x)
        batch, length = shape[0], shape[1]
        rows, columns = tf.range(length)[:, None], tf.range(length)
        mask = tf.reshape(tf.cast(rows >= columns, "bool"), [1, length, length])
        times = tf.concat([tf.expand_dims(batch, -1), tf.constant([1, 1])], 0)
        mask = tf.tile(mask, times)
        x = self.norms[0](x + self.drop(self.attention(x, x, attention_mask=mask)))
        return self.norms[1](x + self.dense(x))


def _gpt():
    inputs = K.Input((8,), dtype="int32")
    return K.Model(inputs, L.Dense(20)(CausalBlock()(_embedded(inputs))))


def _masked_language_model():
    inputs = K.Input((8,), dtype="int32")
    return K.Model(inputs, L.Dense(20)(_encoder(_embedded(inputs))))


def _masked_language_loss(labels, logits):
    """Only tokens that were hidden count, and an example has its own number of them."""
    hidden = tf.cast(labels > 0, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_sum(losses * hidden, -1) / (tf.reduce_sum(hidden, -1) + 1e-6)


def _per_token(labels, logits):
    """As Keras computes it, except that the mask counts for each example."""
    return dpc.keras.PerExampleLoss(
        K.losses.SparseCategoricalCrossentropy(from_logits=True)
    )(labels, logits)


def _named_entities():
    inputs = K.Input((None,), dtype="int32")

    class Embedded(L.Layer):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = L.Embedding(20, 8), L.Embedding(30, 8)

        def call(self, ids):
            return self.tokens(ids) + self.positions(tf.range(tf.shape(ids)[-1]))

    return K.Model(inputs, L.Dense(4)(_encoder(Embedded()(inputs))))


def _entity_loss(labels, logits):
    losses = K.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")(
        labels, logits
    )
    mask = tf.cast(labels > 0, tf.float32)
    return tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)


def _experts():
    """A switch transformer without limits of capacity: gates of each token."""
    inputs = K.Input((8,), dtype="int32")
    x = _embedded(inputs)
    gates = L.Dense(3, "softmax")(x)
    experts = [L.Dense(8, "relu")(x) for _ in range(3)]

    def mixed(parts):
        gates, *experts = parts
        return tf.reduce_sum(
            tf.stack(experts, axis=-1) * gates[:, :, tf.newaxis, :], axis=-1
        )

    x = apply(mixed, [gates, *experts])
    return K.Model(inputs, L.Dense(3)(L.GlobalAveragePooling1D()(x)))


def _answers():
    """Where an answer begins and ends."""
    inputs = K.Input((8,), dtype="int32")
    x = _encoder(_embedded(inputs))
    ends = [L.Flatten()(L.Dense(1, use_bias=False)(x)) for _ in range(2)]
    return K.Model(inputs, ends)


def _answer_loss(labels, ends):
    return classes(labels[0], ends[0]) + classes(labels[1], ends[1])


def _similar_sentences():
    inputs = {name: K.Input((8,), dtype="int32") for name in ("ids", "mask", "types")}
    x = L.Embedding(20, 8)(inputs["ids"]) + L.Embedding(2, 8)(inputs["types"])
    attention = apply(lambda m: tf.cast(m, tf.bool)[:, None, :], inputs["mask"])
    x = x + L.MultiHeadAttention(2, 4)(x, x, attention_mask=attention)
    x = L.Bidirectional(L.LSTM(4, return_sequences=True))(x)
    x = L.concatenate([L.GlobalAveragePooling1D()(x), L.GlobalMaxPooling1D()(x)])
    return K.Model(inputs, L.Dense(3)(L.Dropout(0.3)(x)))


class Adapted(L.Layer):
    """A Dense with low-rank factors beside it, as in parameter-efficient tuning."""

    def __init__(self, size: int, **options):
        super().__init__(**options)
        self.frozen = L.Dense(size, trainable=False)
        self.down, self.up = L.Dense(2, use_bias=False), L.Dense(size, use_bias=False)

    def call(self, x):
        return self.frozen(x) + self.up(self.down(x))


def _lora():
    inputs = K.Input((8,), dtype="int32")
    x = L.Embedding(20, 8, trainable=False)(inputs)
    return K.Model(inputs, L.Dense(20)(L.Activation("gelu")(Adapted(8)(x))))


def _attention_pooling():
    """Of many instances, weighted by attention."""
    inputs = [K.Input((4, 4)) for _ in range(3)]
    flat, dense = L.Flatten(), L.Dense(6, "relu")
    found = [dense(flat(x)) for x in inputs]
    v, u = L.Dense(4, "tanh"), L.Dense(4, "sigmoid")
    scores = [L.Dense(1)(L.multiply([v(x), u(x)])) for x in found]
    weights = apply(lambda s: tf.nn.softmax(tf.stack(s), axis=0), scores)
    weighted = [
        L.multiply([apply(lambda w, i=i: w[i], weights), x])
        for i, x in enumerate(found)
    ]
    return K.Model(inputs, L.Dense(3)(L.concatenate(weighted, axis=1)))


TEXTS = {
    "IMDB transformer": of_tokens(_imdb_transformer),
    "text classification from scratch": classifier(_texts_from_scratch, (1,), "string"),
    "bidirectional LSTM": classifier(_bidirectional, (None,), "int32"),
    "pretrained word embeddings": classifier(_pretrained_embeddings, (16,), "int32"),
    "seq2seq of characters": Entry(
        _seq2seq_lstm, [Of((7, 6)), Of((5, 5))], Of((5,), "int32"), classes
    ),
    "seq2seq of any length": Entry(
        _seq2seq_lstm, [Of((None, 6)), Of((None, 5))], Of((None,), "int32"), classes
    ),
    "addition of numbers": Entry(_addition, Of((5, 6)), Of((3,), "int32"), classes),
    "translation by a transformer": Entry(_translation, [IDS, IDS], IDS, _per_token),
    "miniature GPT": Entry(_gpt, IDS, IDS, classes),
    "masked language model": Entry(
        _masked_language_model, IDS, IDS, _masked_language_loss
    ),
    "named entities": Entry(
        _named_entities,
        Of((None,), "int32"),
        Of((None,), "int32"),
        _entity_loss,
        apart=False,
    ),
    "named entities, a mean an example": Entry(
        _named_entities,
        Of((None,), "int32"),
        Of((None,), "int32"),
        _masked_language_loss,
    ),
    "mixture of experts": of_tokens(_experts),
    "answers to questions": Entry(_answers, IDS, (CLASS, CLASS), _answer_loss),
    "similarity of sentences": Entry(
        _similar_sentences,
        {name: IDS for name in ("ids", "mask", "types")},
        CLASS,
        classes,
    ),
    "low-rank adaptation": Entry(_lora, IDS, IDS, classes),
    "multiple instances": Entry(_attention_pooling, [Of((4, 4))] * 3, CLASS, classes),
}

# Time series and sound.


def _series_transformer():
    inputs = K.Input((12, 1))
    x = L.MultiHeadAttention(2, 4, dropout=0.2)(inputs, inputs)
    x = L.LayerNormalization(epsilon=1e-6)(L.Dropout(0.2)(x))
    middle = x + inputs
    x = L.Conv1D(4, 1, activation="relu")(middle)
    x = L.LayerNormalization(epsilon=1e-6)(L.Conv1D(1, 1)(L.Dropout(0.2)(x)))
    x = L.GlobalAveragePooling1D(data_format="channels_last")(x + middle)
    return K.Model(inputs, L.Dense(3)(L.Dense(4, "relu")(x)))


def _series_convnet():
    inputs = x = K.Input((12, 1))
    for _ in range(3):
        x = L.Conv1D(4, 3, padding="same")(x)
        x = L.ReLU()(L.GroupNormalization(2)(x))
    return K.Model(inputs, L.Dense(3)(L.GlobalAveragePooling1D()(x)))


def _weather():
    return chain(L.LSTM(4), L.Dense(1), shape=(12, 3))


def _anomalies():
    return chain(
        L.Conv1D(4, 3, padding="same", strides=2, activation="relu"),
        L.Dropout(0.2),
        L.Conv1DTranspose(4, 3, padding="same", strides=2, activation="relu"),
        L.Conv1DTranspose(1, 3, padding="same"),
        shape=(12, 1),
    )


class GraphConvolution(L.Layer):
    """Neighbours by segment: nodes come first, then the batch, then time."""

    edges = ([0, 0, 1, 2, 3], [1, 2, 3, 3, 0])

    def __init__(self, size: int, **options):
        super().__init__(**options)
        self.weight = self.add_weight(shape=(2, size), name="weight")

    def call(self, features):
        weight = tf.convert_to_tensor(self.weight)
        own = tf.matmul(features, weight)
        neighbours = tf.gather(features, self.edges[1])
        gathered = tf.math.unsorted_segment_mean(
            neighbours, self.edges[0], num_segments=4
        )
        return tf.nn.relu(tf.concat([own, tf.matmul(gathered, weight)], axis=-1))


class Traffic(L.Layer):
    """Graph convolution, then an LSTM that folds nodes into the batch."""

    def __init__(self, **options):
        super().__init__(**options)
        self.graph = GraphConvolution(3)
        self.lstm, self.dense = L.LSTM(4, activation="relu"), L.Dense(2)

    def call(self, inputs):
        nodes_first = tf.transpose(inputs, [2, 0, 1, 3])
        found = self.graph(nodes_first)
        nodes, batch, steps, size = tf.unstack(tf.shape(found))
        found = tf.reshape(found, [batch * nodes, steps, found.shape[-1]])
        found = self.dense(self.lstm(found))
        found = tf.reshape(found, [nodes, batch, 2])
        return tf.transpose(found, [1, 2, 0])


class TrafficByBatch(Traffic):
    """The same with the batch before the nodes, where they are folded."""

    def call(self, inputs):
        found = tf.transpose(
            self.graph(tf.transpose(inputs, [2, 0, 1, 3])), [1, 0, 2, 3]
        )
        found = tf.reshape(found, [-1, found.shape[2], found.shape[3]])
        found = self.dense(self.lstm(found))
        return tf.transpose(tf.reshape(found, [-1, 4, 2]), [0, 2, 1])


def _traffic(layer):
    def build():
        inputs = K.Input((5, 4, 2))
        return K.Model(inputs, layer()(inputs))

    return build


def _speech_transformer():
    sound, target = K.Input((16, 6)), K.Input((8,), dtype="int32")
    x = sound
    for _ in range(2):
        x = L.Conv1D(8, 3, strides=2, padding="same", activation="relu")(x)
    x = Decoder()([_embedded(target), _encoder(x)])
    return K.Model([sound, target], L.Dense(20)(x))


def _deep_speech():
    inputs = K.Input((None, 6))
    x = apply(lambda x: x[..., tf.newaxis], inputs)
    x = L.ReLU()(L.GroupNormalization(2)(L.Conv2D(4, 3, strides=2, padding="same")(x)))
    x = L.Reshape((-1, 3 * 4))(x)
    x = L.Bidirectional(L.GRU(4, return_sequences=True, reset_after=True))(x)
    return K.Model(inputs, L.Dense(6)(L.Dense(4, "relu")(x)))


def _wavenet():
    inputs = x = K.Input((16, 1))
    x = L.Conv1D(4, 2, padding="causal")(x)
    skips = []
    for rate in (1, 2, 4):
        wave = L.Conv1D(4, 2, padding="causal", dilation_rate=rate, activation="tanh")(
            x
        )
        gate = L.Conv1D(
            4, 2, padding="causal", dilation_rate=rate, activation="sigmoid"
        )(x)
        found = L.multiply([wave, gate])
        skips.append(L.Conv1D(4, 1)(found))
        x = L.add([x, L.Conv1D(4, 1)(found)])
    return K.Model(inputs, L.Conv1D(8, 1)(L.Activation("relu")(L.add(skips))))


def _melgan():
    inputs = K.Input((4, 6))
    x = L.LeakyReLU()(L.Conv1D(8, 3, padding="same")(inputs))
    for rate in (2, 2):
        x = L.Conv1DTranspose(4, 2 * rate, strides=rate, padding="same")(x)
        for dilation in (1, 3):
            inner = L.Conv1D(4, 3, dilation_rate=dilation, padding="same")(
                L.LeakyReLU()(x)
            )
            x = L.add([x, inner])
    return K.Model(inputs, L.Conv1D(1, 3, padding="same", activation="tanh")(x))


def _spectrogram():
    """A speaker by the spectrum of a recording."""
    inputs = K.Input((32, 1))

    def spectrum(audio):
        audio = tf.squeeze(audio, axis=-1)
        found = tf.signal.fft(tf.cast(audio, tf.complex64))
        return tf.math.abs(tf.expand_dims(found, -1)[:, :16, :])

    x = apply(spectrum, inputs)
    for size in (4, 6):
        short = L.Conv1D(size, 1, padding="same")(x)
        x = L.Conv1D(size, 3, padding="same", activation="relu")(x)
        x = L.MaxPooling1D(2)(L.Activation("relu")(L.Add()([x, short])))
    return K.Model(inputs, L.Dense(3)(L.Flatten()(L.AveragePooling1D(2)(x))))


def _stft():
    inputs = K.Input((64,))

    def spectrogram(audio):
        found = tf.abs(tf.signal.stft(audio, 16, 8, 16))
        return tf.math.pow(found, 0.5)[..., tf.newaxis]

    x = L.Conv2D(2, 3, activation="relu")(apply(spectrogram, inputs))
    return K.Model(inputs, L.Dense(3)(L.Flatten()(x)))


SERIES = {
    "time series by a transformer": classifier(_series_transformer, (12, 1)),
    "time series by a convnet": classifier(_series_convnet, (12, 1)),
    "weather by an LSTM": regressor(_weather, (12, 3), (1,)),
    "anomalies by an autoencoder": regressor(_anomalies, (12, 1), (12, 1)),
    "traffic by a graph and an LSTM": regressor(_traffic(Traffic), (5, 4, 2), (2, 4)),
    "traffic, the batch before nodes": regressor(
        _traffic(TrafficByBatch), (5, 4, 2), (2, 4)
    ),
    "speech by a transformer": Entry(
        _speech_transformer, [Of((16, 6)), IDS], IDS, classes
    ),
    "speech by CTC": Entry(
        _deep_speech,
        Of((16, 6)),
        Of((3,), "int32"),
        lambda y, x: tf.reduce_mean(
            tf.nn.ctc_loss(
                y,
                x,
                tf.fill([tf.shape(x)[0]], 3),
                tf.fill([tf.shape(x)[0]], tf.shape(x)[1]),
                logits_time_major=False,
                blank_index=-1,
            )
        ),
    ),
    "WaveNet": Entry(_wavenet, Of((16, 1)), Of((16,), "int32"), classes),
    "MelGAN generator": regressor(_melgan, (4, 6), (16, 1)),
    "speakers by their spectra": classifier(_spectrogram, (32, 1)),
    "sounds by their spectrograms": classifier(_stft, (64,)),
}

# Tables, graphs and recommendations.


def _ratings():
    """Collaborative filtering: the product of two embeddings, and biases."""
    inputs = K.Input((2,), dtype="int32")
    users, items = (apply(lambda x, i=i: x[:, i], inputs) for i in (0, 1))
    product = L.Dot(axes=1)([L.Embedding(9, 4)(users), L.Embedding(7, 4)(items)])
    x = L.Add()([product, L.Embedding(9, 1)(users), L.Embedding(7, 1)(items)])
    return K.Model(inputs, x)


def _ratings_keras():
    """As on the page, where all users of a batch meet all items by mistake."""
    inputs = K.Input((2,), dtype="int32")

    def found(x):
        users, items = x
        return tf.tensordot(users, items, 2)

    users, items = (apply(lambda x, i=i: x[:, i], inputs) for i in (0, 1))
    dot = apply(found, [L.Embedding(9, 4)(users), L.Embedding(7, 4)(items)])
    x = apply(
        lambda x: x[0] + x[1], [L.Embedding(9, 1)(users), L.Embedding(7, 1)(items)]
    )
    return K.Model(inputs, apply(lambda x: x[0] + x[1], [dot, x]))


def _columns_of(words: dict, numbers: list):
    inputs = {name: K.Input((1,), dtype="string") for name in words}
    inputs.update({name: K.Input((1,)) for name in numbers})
    return inputs


_WORDS = {"colour": ["red", "blue"], "shape": ["round", "square", "long"]}
_NUMBERS = ["age", "height"]
_TABLE = {
    **{name: Of((1,), "string") for name in _WORDS},
    **{name: Of((1,)) for name in _NUMBERS},
}


def _looked_up(inputs, size=4):
    """An embedding for each column of words, a number for each of numbers."""
    found = []
    for name, words in _WORDS.items():
        ids = L.StringLookup(vocabulary=words)(inputs[name])
        found.append(L.Flatten()(L.Embedding(len(words) + 1, size)(ids)))
    return found, [L.Normalization(mean=1.0, variance=2.0)(inputs[n]) for n in _NUMBERS]


def _structured():
    """As FeatureSpace does it: one-hot words, buckets, and a hashed cross."""
    inputs = _columns_of(_WORDS, _NUMBERS)
    hot = [
        L.StringLookup(vocabulary=words, output_mode="one_hot")(inputs[name])
        for name, words in _WORDS.items()
    ]
    bins = L.Discretization([0.0, 1.0], output_mode="one_hot")(inputs["age"])
    crossed = L.HashedCrossing(8, output_mode="one_hot")(
        [inputs["colour"], inputs["shape"]]
    )
    x = L.Concatenate()([*hot, bins, crossed, L.Rescaling(0.01)(inputs["height"])])
    return K.Model(inputs, L.Dense(1)(L.Dropout(0.5)(L.Dense(8, "relu")(x))))


def _wide_and_deep():
    inputs = _columns_of(_WORDS, _NUMBERS)
    embedded, numbers = _looked_up(inputs)
    wide = [
        L.CategoryEncoding(num_tokens=len(words) + 1, output_mode="one_hot")(
            L.StringLookup(vocabulary=words)(inputs[name])
        )
        for name, words in _WORDS.items()
    ]
    deep = L.Dense(8, "relu")(L.concatenate(embedded + numbers))
    x = L.concatenate([L.GroupNormalization(1)(L.concatenate(wide)), deep])
    return K.Model(inputs, L.Dense(1)(x))


def _deep_and_cross():
    inputs = _columns_of(_WORDS, _NUMBERS)
    embedded, numbers = _looked_up(inputs)
    first = x = L.concatenate(embedded + numbers)
    for _ in range(2):
        x = first * L.Dense(first.shape[-1])(x) + x
    deep = L.Dense(8, "relu")(first)
    return K.Model(inputs, L.Dense(1)(L.concatenate([x, deep])))


def _tab_transformer():
    inputs = _columns_of(_WORDS, _NUMBERS)
    embedded, numbers = _looked_up(inputs)
    x = apply(lambda found: tf.stack(found, axis=1), embedded)
    x = x + L.Embedding(2, 4)(np.arange(2))
    x = L.Add()([L.MultiHeadAttention(2, 4)(x, x), x])
    x = L.Flatten()(L.LayerNormalization()(x))
    x = L.concatenate([x, L.LayerNormalization()(L.concatenate(numbers))])
    return K.Model(inputs, L.Dense(1)(L.Dense(8, "selu")(x)))


class GatedResidual(L.Layer):
    """A gated residual network."""

    def __init__(self, size: int, **options):
        super().__init__(**options)
        self.first, self.second = L.Dense(size, "elu"), L.Dense(size)
        self.linear, self.gate = L.Dense(size), L.Dense(size, "sigmoid")
        self.project, self.norm = L.Dense(size), L.LayerNormalization()

    def call(self, inputs):
        x = self.second(self.first(inputs))
        return self.norm(self.project(inputs) + self.linear(x) * self.gate(x))


def _gated():
    """Gated residual networks that select variables."""
    inputs = _columns_of(_WORDS, _NUMBERS)
    embedded, numbers = _looked_up(inputs)
    parts = [*embedded, *(L.Dense(4)(x) for x in numbers)]
    weights = L.Dense(len(parts), "softmax")(GatedResidual(4)(L.concatenate(parts)))
    found = apply(
        lambda p: tf.stack(p, axis=1), [GatedResidual(4)(part) for part in parts]
    )
    x = apply(
        lambda both: tf.squeeze(tf.matmul(both[0][:, tf.newaxis], both[1]), axis=1),
        [weights, found],
    )
    return K.Model(inputs, L.Dense(1)(x))


class Tree(L.Layer):
    """A neural decision tree: the probability of each leaf."""

    def __init__(self, depth: int, features: list, **options):
        super().__init__(**options)
        self.depth = depth
        self.mask = np.eye(6, dtype=np.float32)[features]
        self.leaves = self.add_weight(shape=(2**depth, 3), name="leaves")
        self.decide = L.Dense(2**depth, "sigmoid")

    def call(self, features):
        count = tf.shape(features)[0]
        features = tf.matmul(features, self.mask, transpose_b=True)
        decisions = tf.expand_dims(self.decide(features), axis=2)
        decisions = L.concatenate([decisions, 1 - decisions], axis=2)
        reached = tf.ones([count, 1, 1])
        begin, end = 1, 2
        for level in range(self.depth):
            reached = tf.reshape(reached, [count, -1, 1])
            reached = tf.tile(reached, (1, 1, 2))
            reached = reached * decisions[:, begin:end, :]
            begin, end = end, end + 2 ** (level + 1)
        reached = tf.reshape(reached, [count, 2**self.depth])
        return tf.matmul(reached, tf.convert_to_tensor(self.leaves))


def _forest():
    inputs = K.Input((6,))
    trees = [Tree(2, [0, 2, 4]), Tree(2, [1, 3, 5])]
    return K.Model(inputs, L.average([tree(inputs) for tree in trees]))


def _behaviour_transformer():
    """The films that a person saw, with their ratings, and the next film."""
    inputs = {
        "films": K.Input((5,), dtype="int32"),
        "ratings": K.Input((5,)),
        "target": K.Input((1,), dtype="int32"),
    }
    films = L.Embedding(20, 8)
    seen = films(inputs["films"]) + L.Embedding(5, 8)(
        apply(
            lambda x: tf.tile(tf.range(5)[None], [tf.shape(x)[0], 1]), inputs["films"]
        )
    )
    seen = L.multiply([seen, apply(lambda r: r[..., tf.newaxis], inputs["ratings"])])
    x = L.concatenate([seen, films(inputs["target"])], axis=1)
    x = L.LayerNormalization()(L.Add()([x, L.MultiHeadAttention(2, 4)(x, x)]))
    return K.Model(inputs, L.Dense(1)(L.LeakyReLU()(L.Flatten()(x))))


class GraphAttention(L.Layer):
    """Attention over the edges of a graph, the same for all examples."""

    edges = np.array([[0, 1], [0, 2], [1, 0], [2, 3], [3, 3]])

    def __init__(self, size: int, **options):
        super().__init__(**options)
        self.kernel = self.add_weight(shape=(3, size), name="kernel")
        self.attention = self.add_weight(shape=(2 * size, 1), name="attention")

    def call(self, nodes):
        nodes = tf.matmul(nodes, tf.convert_to_tensor(self.kernel))
        ends = tf.gather(nodes, self.edges, axis=1)
        ends = tf.reshape(ends, [tf.shape(nodes)[0], len(self.edges), -1])
        scores = tf.nn.leaky_relu(tf.matmul(ends, tf.convert_to_tensor(self.attention)))
        scores = tf.exp(tf.clip_by_value(scores, -2, 2))
        adjacency = np.zeros([4, len(self.edges)], np.float32)
        adjacency[self.edges[:, 0], np.arange(len(self.edges))] = 1
        total = tf.einsum("ne,beo->bno", adjacency, scores)
        of_edges = tf.gather(total, self.edges[:, 0], axis=1)
        values = scores / of_edges * tf.gather(nodes, self.edges[:, 1], axis=1)
        return tf.einsum("ne,bed->bnd", adjacency, values)


def _graph_attention():
    inputs = K.Input((4, 3))
    x = L.Activation("relu")(GraphAttention(5)(inputs))
    return K.Model(inputs, L.Dense(3)(L.GlobalAveragePooling1D()(x)))


class Messages(L.Layer):
    """Messages between the atoms of padded molecules."""

    def __init__(self, size: int, **options):
        super().__init__(**options)
        self.edge, self.update = L.Dense(size * size), L.GRUCell(size)
        self.size = size

    def call(self, inputs):
        atoms, bonds = inputs
        matrices = tf.reshape(self.edge(bonds), [-1, 4, 4, self.size, self.size])
        messages = tf.einsum("bnmij,bmj->bni", matrices, atoms)
        flat = tf.reshape(messages, [-1, self.size])
        state = tf.reshape(atoms, [-1, self.size])
        found, _ = self.update(flat, [state])
        return tf.reshape(found, [-1, 4, self.size])


def _molecules():
    atoms, bonds = K.Input((4, 5)), K.Input((4, 4, 2))
    x = Messages(5)([atoms, bonds])
    x = L.GlobalAveragePooling1D()(_encoder(x))
    return K.Model([atoms, bonds], L.Dense(1)(x))


def _retrieval():
    """Two towers, with the rest of the batch's items as negatives."""
    inputs = [K.Input((), dtype="int32") for _ in range(2)]
    users, items = (L.Embedding(9, 4)(x) for x in inputs)
    return K.Model(
        inputs, apply(lambda x: tf.matmul(x[0], x[1], transpose_b=True), [users, items])
    )


def _retrieval_loss(labels, scores):
    return tf.reduce_mean(
        tf.nn.softmax_cross_entropy_with_logits(tf.eye(tf.shape(scores)[0]), scores)
    )


def _fraud():
    return chain(
        L.Dense(8, "relu"), L.Dropout(0.3), L.Dense(8, "relu"), L.Dense(1), shape=(6,)
    )


def _policy():
    """An actor and a critic, with returns as labels."""
    inputs = K.Input((4,))
    x = L.Dense(8, "relu")(inputs)
    return K.Model(inputs, [L.Dense(2)(x), L.Dense(1)(x)])


def _policy_loss(labels, found):
    actions, returns = labels
    logits, value = found
    log = tf.nn.log_softmax(logits)
    chosen = tf.gather(log, actions, batch_dims=1)
    advantage = returns - value[:, 0]
    return -chosen * tf.stop_gradient(advantage) + tf.square(advantage)


TABLES = {
    "collaborative filtering": Entry(_ratings, Of((2,), "int32"), Of((1,)), binary),
    "collaborative filtering, tensordot": Entry(
        _ratings_keras, Of((2,), "int32"), Of((1,)), binary, apart=False
    ),
    "structured data": Entry(_structured, _TABLE, Of((1,)), binary),
    "wide and deep": Entry(_wide_and_deep, _TABLE, Of((1,)), binary),
    "deep and cross": Entry(_deep_and_cross, _TABLE, Of((1,)), binary),
    "TabTransformer": Entry(_tab_transformer, _TABLE, Of((1,)), binary),
    "gated residual networks": Entry(_gated, _TABLE, Of((1,)), binary),
    "neural decision forest": classifier(_forest, (6,)),
    "behaviour sequence transformer": Entry(
        _behaviour_transformer,
        {"films": Of((5,), "int32"), "ratings": Of((5,)), "target": Of((1,), "int32")},
        Of((1,)),
        binary,
    ),
    "graph attention": classifier(_graph_attention, (4, 3)),
    "messages in molecules": Entry(
        _molecules, [Of((4, 5)), Of((4, 4, 2))], Of((1,)), binary
    ),
    "two-tower retrieval": Entry(
        _retrieval,
        [Of((), "int32"), Of((), "int32")],
        CLASS,
        _retrieval_loss,
        apart=False,
    ),
    "imbalanced classes": Entry(_fraud, Of((6,)), Of((1,)), binary),
    "actor and critic": Entry(_policy, Of((4,)), (CLASS, Of(())), _policy_loss),
}

GROUPS = {
    "keras.io: images": IMAGES,
    "keras.io: texts": TEXTS,
    "keras.io: series": SERIES,
    "keras.io: tables": TABLES,
}
