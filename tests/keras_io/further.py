"""Further models of keras.io, with the losses and steps of their pages."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import tfdpclip as dpc
from tests.keras_io.setup import Setup, plain, values, with_loss
from tests.proof_coverage.entry import Of
from tests.proof_coverage.examples import Places, apply

K, L = tf.keras, tf.keras.layers


def _cross_entropy():
    return K.losses.SparseCategoricalCrossentropy(from_logits=True)


def _classes(of: Of, model: K.Model, loss=None) -> Setup:
    data = values(of), values(Of((), "int32"), 3, seed=1)
    return Setup(model, data, with_loss(loss or _cross_entropy()))


def probability(model: K.Model) -> K.Model:
    """The model's score as a probability, as in the recommender of movies."""
    return K.Model(model.input, L.Activation("sigmoid")(model.output))


def with_hidden_states(model: K.Model) -> K.Model:
    """A language model with a second output, which has no loss."""
    hidden = model.layers[-2].output
    return K.Model(model.input, [model.output, hidden])


class Antirectifier(L.Layer):
    """The parts above and below the mean of an example, joined and mixed."""

    def build(self, shape):
        size = shape[-1]
        self.kernel = self.add_weight(
            shape=(2 * size, size), initializer="he_normal", name="kernel"
        )

    def call(self, x):
        x -= tf.reduce_mean(x, axis=-1, keepdims=True)
        both = tf.concat([tf.nn.relu(x), tf.nn.relu(-x)], axis=-1)
        return tf.matmul(both, self.kernel)


def antirectifier() -> Setup:
    layers = [L.Dense(8), Antirectifier(), L.Dense(8), Antirectifier()]
    model = K.Sequential([K.Input((6,)), *layers, L.Dropout(0.5), L.Dense(3)])
    return _classes(Of((6,)), model)


# Images.


def _shifted(images):
    """An image beside its copies that are shifted by half a patch, as padding does."""
    height = width = 8
    copies = [images]
    for top, left in ((0, 0), (0, 2), (2, 0), (2, 2)):
        cut = tf.image.crop_to_bounding_box(images, top, left, height - 2, width - 2)
        copies.append(
            tf.image.pad_to_bounding_box(cut, 2 - top, 2 - left, height, width)
        )
    return tf.concat(copies, axis=-1)


class LocalAttention(L.MultiHeadAttention):
    """Attention with a trained temperature."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.tau = self.add_weight(shape=(), initializer="ones", name="tau")

    def _compute_attention(self, query, *rest, **options):
        return super()._compute_attention(query / self.tau, *rest, **options)


def small_data_vit() -> Setup:
    """Patches of shifted images; a token attends to the others, and not to itself."""
    inputs = K.Input((8, 8, 3))
    x = L.Reshape((4, 240))(apply(_patches_of_shifts, inputs))
    x = Places(4, 8)(L.Dense(8)(L.LayerNormalization()(x)))
    mask = 1 - np.eye(4, dtype=np.int8)[np.newaxis]
    normed = L.LayerNormalization()(x)
    x = x + LocalAttention(2, 4, dropout=0.1)(
        normed, normed, attention_mask=tf.constant(mask)
    )
    x = x + L.Dense(8)(L.Dense(8, "gelu")(L.LayerNormalization()(x)))
    x = L.Flatten()(L.LayerNormalization()(x))
    return _classes(Of((8, 8, 3)), K.Model(inputs, L.Dense(3)(L.Dropout(0.5)(x))))


def _patches_of_shifts(images):
    shifted, size = _shifted(images), [1, 4, 4, 1]
    return tf.image.extract_patches(shifted, size, size, [1, 1, 1, 1], "VALID")


class Latent(L.Layer):
    """The trained array that attends to the image, the same for each image."""

    def build(self, shape):
        self.array = self.add_weight(shape=(4, 8), name="latent")

    def call(self, x):
        return tf.tile(self.array[tf.newaxis], [tf.shape(x)[0], 1, 1])


def perceiver() -> Setup:
    """Cross attention of a latent array to patches, and transformers of the latent."""
    inputs = K.Input((8, 8, 3))
    patches = Places(16, 8)(L.Dense(8)(L.Reshape((16, 12))(inputs)))
    x = Latent()(patches)
    attend, transform = L.MultiHeadAttention(1, 8), L.MultiHeadAttention(2, 4)
    for _ in range(2):  # The modules share their weights.
        x = L.LayerNormalization()(x + attend(x, patches))
        x = L.LayerNormalization()(x + transform(x, x))
    x = L.Dropout(0.2)(L.GlobalAveragePooling1D()(x))
    return _classes(Of((8, 8, 3)), K.Model(inputs, L.Dense(3)(x)))


def resizer(converted: bool) -> Callable[[], Setup]:
    """A network that learns to resize, before a classifier."""

    def build() -> Setup:
        inputs = K.Input((8, 8, 3))
        naive = L.Resizing(6, 6, interpolation="bilinear")(inputs)
        x = L.LeakyReLU()(L.Conv2D(4, 7, padding="same")(inputs))
        x = L.BatchNormalization()(L.LeakyReLU()(L.Conv2D(4, 1, padding="same")(x)))
        bottleneck = L.Resizing(6, 6, interpolation="bilinear")(x)
        x = L.Conv2D(4, 3, padding="same", use_bias=False)(bottleneck)
        x = L.LeakyReLU()(L.BatchNormalization()(x))
        x = L.BatchNormalization()(L.Conv2D(4, 3, padding="same", use_bias=False)(x))
        x = L.Conv2D(3, 7, padding="same")(L.Add()([x, bottleneck]))
        x = L.Flatten()(L.Add()([naive, x]))
        model = K.Model(inputs, L.Dense(3, "softmax")(x))
        if converted:
            model = dpc.keras.convert_batchnorm(model)
        loss = K.losses.CategoricalCrossentropy(label_smoothing=0.1)
        labels = np.eye(3, dtype="float32")[values(Of((), "int32"), 3, seed=1)]
        return Setup(model, (values(Of((8, 8, 3))), labels), with_loss(loss))

    return build


def video() -> Setup:
    """A recurrent network of the features of frames, with a mask as second input."""
    frames, mask = K.Input((6, 8)), K.Input((6,), dtype="bool")
    x = L.GRU(8, return_sequences=True)(frames, mask=mask)
    x = L.Dropout(0.4)(L.GRU(4)(x))
    model = K.Model([frames, mask], L.Dense(3, "softmax")(L.Dense(4, "relu")(x)))
    present = np.arange(6) < np.random.default_rng(0).integers(1, 7, (40, 1))
    x, y = values(Of((6, 8))), values(Of((), "int32"), 3, seed=1)
    return Setup(model, ((x, present), y), with_loss("sparse_categorical_crossentropy"))


def captions(changed: bool) -> Callable[[], Setup]:
    """Image captioning: a step for each caption of an image, or one for all."""

    class Captioner(K.Model):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = L.Dense(8, "relu"), L.Dense(20, "softmax")
            self.words = L.Embedding(20, 8, mask_zero=True)
            self.attention = L.MultiHeadAttention(1, 8)

        def call(self, x):
            images, words = x
            encoded = self.encoder(images)[:, tf.newaxis]
            found = self.words(words)
            return self.decoder(found + self.attention(found, encoded))

        def loss_of(self, images, words):
            found = self((images, words[:, :-1]), training=True)
            losses = K.losses.sparse_categorical_crossentropy(words[:, 1:], found)
            mask = tf.cast(words[:, 1:] != 0, losses.dtype)
            axis = -1 if changed else None
            return tf.reduce_sum(losses * mask, axis) / tf.reduce_sum(mask, axis)

        def train_step(self, data):
            images, captions = data
            total = 0.0
            if changed:
                with tf.GradientTape() as tape:
                    losses = [self.loss_of(images, captions[:, i]) for i in range(3)]
                    total = tf.add_n(losses)
                self.optimizer.minimize(total, self.trainable_variables, tape=tape)
                return {"loss": tf.reduce_mean(total)}
            for i in range(3):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(self.loss_of(images, captions[:, i]))
                self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
                total += loss
            return {"loss": total}

    def build() -> Setup:
        words = np.random.default_rng(0).integers(1, 20, (40, 3, 6), dtype=np.int32)
        words[:, :, 4:] *= np.random.default_rng(1).integers(0, 2, (40, 3, 2))
        return Setup(Captioner(), (values(Of((6,))), words), plain)

    return build


def mixup() -> Setup:
    """Each image is mixed with another of the batch, and so are their labels."""

    class Model(K.Sequential):
        def train_step(self, data):
            x, y = data
            part = tf.random.uniform([tf.shape(x)[0], 1])
            x = part * x + (1 - part) * tf.reverse(x, [0])
            y = part * y + (1 - part) * tf.reverse(y, [0])
            with tf.GradientTape() as tape:
                found = self(x, training=True)
                loss = K.losses.categorical_crossentropy(y, found)
            self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
            return {"loss": tf.reduce_mean(loss)}

    model = Model([K.Input((6,)), L.Dense(8, "relu"), L.Dense(3, "softmax")])
    labels = np.eye(3, dtype="float32")[values(Of((), "int32"), 3, seed=1)]
    return Setup(model, (values(Of((6,))), labels), plain)


# Packages beside Keras.


def hub_resnet(converted: bool) -> Callable[[], Setup]:
    """A task of KerasHub, whose preprocessor resizes and scales the images."""

    def build():
        import keras_hub

        models = keras_hub.models
        backbone = models.ResNetBackbone(
            input_conv_filters=[64],
            input_conv_kernel_sizes=[3],
            stackwise_num_filters=[64, 16],
            stackwise_num_blocks=[1, 1],
            stackwise_num_strides=[1, 2],
            block_type="basic_block",
            image_shape=(16, 16, 3),
        )
        if converted:
            backbone = dpc.keras.convert_batchnorm(backbone)
        images = keras_hub.layers.ResNetImageConverter((16, 16), scale=1 / 255)
        preprocessor = models.ResNetImageClassifierPreprocessor(images)
        return _classes(
            Of((20, 20, 3)),
            models.ResNetImageClassifier(backbone, 3, preprocessor=preprocessor),
        )

    return build


def tuner() -> Setup:
    """A search for the width of a layer, with a plan for each trial."""
    import keras_tuner

    data = values(Of((6,))), values(Of((), "int32"), 3, seed=1)

    def search(fit):
        class Trials(keras_tuner.HyperModel):
            def build(self, hp):
                width = hp.Choice("width", [4, 8])
                return K.Sequential([K.Input((6,)), L.Dense(width, "relu"), L.Dense(3)])

            def fit(self, hp, model, **options):
                histories.append(fit(model, **options))
                return histories[-1]

        histories = []
        with tempfile.TemporaryDirectory() as folder:
            search = keras_tuner.RandomSearch(
                Trials(), "val_loss", max_trials=2, directory=folder
            )
            search.search(validation_data=data)
        assert len(histories) == 2

    return Setup(None, data, with_loss(_cross_entropy()), search=search)


# Two views, and pairs of a batch.


def simsiam(converted: bool) -> Callable[[], Setup]:
    """Two views: the prediction of one is near the projection of the second."""

    class SimSiam(K.Model):
        def __init__(self):
            super().__init__()
            self.encoder = _projector(8, 4)
            self.predictor = _projector(4, 4)
            if converted:
                self.encoder = dpc.keras.convert_batchnorm(self.encoder)
                self.predictor = dpc.keras.convert_batchnorm(self.predictor)

        def call(self, x):
            return self.predictor(self.encoder(x))

        def train_step(self, data):
            one, two = data
            with tf.GradientTape() as tape:
                z1 = self.encoder(one, training=True)
                z2 = self.encoder(two, training=True)
                p1 = self.predictor(z1, training=True)
                p2 = self.predictor(z2, training=True)
                loss = _distance(p1, z2) / 2 + _distance(p2, z1) / 2
            weights = self.encoder.trainable_variables
            weights = weights + self.predictor.trainable_variables
            self.optimizer.minimize(loss, weights, tape=tape)
            return {"loss": loss}

    return lambda: Setup(SimSiam(), (values(Of((6,))), values(Of((6,)), seed=2)), plain)


def _projector(hidden: int, size: int) -> K.Sequential:
    return K.Sequential(
        [
            K.Input((6 if hidden == 8 else 4,)),
            L.Dense(hidden, use_bias=False),
            L.BatchNormalization(),
            L.ReLU(),
            L.Dense(size),
        ]
    )


def _distance(p, z):
    z = tf.math.l2_normalize(tf.stop_gradient(z), axis=1)
    p = tf.math.l2_normalize(p, axis=1)
    return -tf.reduce_mean(tf.reduce_sum(p * z, axis=1))


def supervised_contrast() -> Setup:
    """Images of one class are drawn together, by the products of all pairs."""

    def loss(labels, vectors):
        vectors = tf.math.l2_normalize(vectors, axis=1)
        products = tf.matmul(vectors, vectors, transpose_b=True) / 0.05
        labels = tf.reshape(labels, [-1, 1])
        same = tf.cast(tf.equal(labels, tf.transpose(labels)), tf.float32)
        same /= tf.reduce_sum(same, 1, keepdims=True)
        found = tf.nn.softmax_cross_entropy_with_logits(same, products)
        return tf.reduce_mean(found)

    model = K.Sequential([K.Input((6,)), L.Dense(8, "relu"), L.Dense(4, "relu")])
    return _classes(Of((6,)), model, loss)
