"""Models with a custom `train_step` or loss, as in Keras's guides."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tests import stack
from tests.keras_io.setup import RECORDS, Setup, plain, values, with_loss
from tests.proof_coverage import examples as models
from tests.proof_coverage.entry import Of

K, L = tf.keras, tf.keras.layers
_IMAGES, _NUMBERS = Of((8, 8, 1)), Of((6,))


def _dense(*sizes: int, shape: tuple = (6,)) -> K.Sequential:
    hidden = [L.Dense(size, "relu") for size in sizes[:-1]]
    return K.Sequential([K.Input(shape), *hidden, L.Dense(sizes[-1])])


def _labelled(of: Of = _NUMBERS):
    return values(of), values(Of((), "int32"), 3, seed=1)


def _stepped(step: Callable, data: Callable = _labelled) -> Callable[[], Setup]:
    """A functional model whose class has a `train_step`, as the guide makes one."""

    def build() -> Setup:
        class CustomModel(K.Model):
            train_step = step

        inputs = K.Input((6,))
        model = CustomModel(inputs, L.Dense(3)(L.Dense(8, "relu")(inputs)))
        loss = K.losses.SparseCategoricalCrossentropy(from_logits=True)
        return Setup(model, data(), with_loss(loss))

    return build


# Keras's guide "Customizing what happens in fit".


def _by_hand(self, data):
    x, y = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
    gradients = tape.gradient(loss, self.trainable_variables)
    self.optimizer.apply_gradients(
        zip(gradients, self.trainable_variables, strict=True)
    )
    return {"loss": loss}


def _minimized(self, data):
    x, y = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
    self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
    return {"loss": loss}


def _weighted(self, data):
    x, y, w = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(y=y, y_pred=self(x, training=True), sample_weight=w)
    self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
    return {"loss": loss}


def _low_level(self, data):
    x, y = data
    with tf.GradientTape() as tape:
        found = K.losses.sparse_categorical_crossentropy(
            y, self(x, training=True), from_logits=True
        )
        loss = tf.reduce_mean(found)
    self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
    return {"loss": loss}


guide_by_hand, guide = _stepped(_by_hand), _stepped(_minimized)
guide_weighted, guide_low_level = _stepped(_weighted), _stepped(_low_level)


def distillation() -> Setup:
    """Knowledge distillation: a teacher that is not trained teaches a student."""

    class Distiller(K.Model):
        def __init__(self):
            super().__init__()
            self.teacher, self.student = _dense(8, 3), _dense(4, 3)
            self.teacher.trainable = False

        def call(self, x):
            return self.student(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
            hard = K.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
            soft = K.losses.KLDivergence(reduction="none")(
                tf.nn.softmax(self.teacher(x, training=False) / 3),
                tf.nn.softmax(y_pred / 3),
            )
            return tf.reduce_mean(0.1 * hard + 0.9 * 9 * soft)

    return Setup(Distiller(), _labelled(), plain)


class _Variational(K.Model):
    """An autoencoder that decodes a random draw."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = _dense(8, 4), _dense(8, 6, shape=(2,))

    def call(self, x):
        return self.coded(x)[0]

    def coded(self, x):
        mean, log_variance = tf.split(self.encoder(x), 2, axis=1)
        z = mean + tf.exp(0.5 * log_variance) * tf.random.normal(tf.shape(mean))
        kl = -0.5 * (1 + log_variance - tf.square(mean) - tf.exp(log_variance))
        return self.decoder(z), tf.reduce_sum(kl, axis=1)


def variational() -> Setup:
    """The example's `train_step`: the means of two terms, added up."""

    class Model(_Variational):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                found, kl = self.coded(data)
                rebuilt = tf.reduce_mean(
                    K.losses.binary_crossentropy(data, found, from_logits=True)
                )
                loss = rebuilt + tf.reduce_mean(kl)
            self.optimizer.minimize(loss, self.trainable_weights, tape=tape)
            return {"loss": loss}

    return Setup(Model(), values(_NUMBERS), plain)


def variational_weighted_once() -> Setup:
    """One term has the weights of the batch, and the second term has none."""

    class Model(_Variational):
        def train_step(self, data):
            x, y, w = K.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                found, kl = self.coded(x)
                loss = self.compute_loss(x, y, found, w) + tf.reduce_mean(kl)
            self.optimizer.minimize(loss, self.trainable_weights, tape=tape)
            return {"loss": loss}

    x = values(_NUMBERS)
    return Setup(Model(), (x, x), with_loss("mse"))


def diffusion() -> Setup:
    """Denoising diffusion: a network finds the noise that was added to an image."""

    class Model(K.Model):
        def __init__(self):
            super().__init__()
            self.network = _dense(8, 6, shape=(8,))

        def call(self, x):
            return self.network(tf.concat([x, x[:, :2]], 1))

        def train_step(self, images):
            noise = tf.random.normal(tf.shape(images))
            when = tf.random.uniform([tf.shape(images)[0], 1])
            signal, noisy = tf.cos(when), tf.sin(when)
            with tf.GradientTape() as tape:
                x = tf.concat([signal * images + noisy * noise, signal, noisy], 1)
                found = self.network(x, training=True)
                loss = tf.reduce_mean(tf.abs(noise - found))
            self.optimizer.minimize(loss, self.network.trainable_weights, tape=tape)
            return {"loss": loss}

    return Setup(Model(), values(_NUMBERS), plain)


def triplets() -> Setup:
    """Siamese network: the distances of an anchor, a like and an unlike picture."""

    class Siamese(K.Model):
        def __init__(self):
            super().__init__()
            self.network = models._siamese()

        def call(self, x):
            return self.network(x)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                three = [data[name] for name in "apn"]
                near, far = tf.unstack(self.network(three, training=True), axis=1)
                loss = tf.reduce_mean(tf.maximum(near - far + 0.5, 0.0))
            self.optimizer.minimize(loss, self.network.trainable_weights, tape=tape)
            return {"loss": loss}

    return Setup(
        Siamese(), {k: values(_IMAGES, seed=i) for i, k in enumerate("apn")}, plain
    )


def contrastive(axis: int | None, margin: float = 1.0) -> Callable:
    """Siamese network of pairs: the example's own loss, `loss(margin)`.

    Args:
      axis: the axis of the mean; None for all, as in the example.
      margin: the distance of pairs that differ.
    """
    ops = K.ops if stack.KERAS_3 else tf
    mean = ops.mean if stack.KERAS_3 else tf.reduce_mean

    def contrastive_loss(y_true, y_pred):
        square_pred = ops.square(y_pred)
        margin_square = ops.square(ops.maximum(margin - y_pred, 0))
        return mean((1 - y_true) * square_pred + y_true * margin_square, axis=axis)

    return contrastive_loss


class _Embedder(K.Model):
    """Examples whose embeddings are compared."""

    def __init__(self):
        super().__init__()
        self.network = _dense(8, 4)

    def call(self, x):
        return self.network(x)

    def embedded(self, x):
        return tf.math.l2_normalize(self.network(x, training=True), axis=1)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        self.optimizer.minimize(loss, self.network.trainable_weights, tape=tape)
        return {"loss": loss}


def simclr() -> Setup:
    """Contrastive pretraining: the rest of the batch's images are negatives."""

    class Model(_Embedder):
        def loss_of(self, x):
            one, two = (
                self.embedded(x + 0.1 * tf.random.normal(tf.shape(x))) for _ in "ab"
            )
            similar = tf.matmul(one, two, transpose_b=True) / 0.1
            places = tf.range(tf.shape(x)[0])
            return tf.reduce_mean(
                K.losses.sparse_categorical_crossentropy(
                    places, similar, from_logits=True
                )
            )

    return Setup(Model(), values(_NUMBERS), plain)


def views_alone() -> Setup:
    """Instead: the two views of an image are compared, by a network that predicts."""

    class Model(_Embedder):
        def __init__(self):
            super().__init__()
            self.predictor = _dense(4, shape=(4,))

        def loss_of(self, x):
            one, two = (
                self.embedded(x + 0.1 * tf.random.normal(tf.shape(x))) for _ in "ab"
            )
            found = tf.math.l2_normalize(self.predictor(one), axis=1)
            return -tf.reduce_mean(tf.reduce_sum(found * tf.stop_gradient(two), axis=1))

    return Setup(Model(), values(_NUMBERS), plain)


def metric_learning() -> Setup:
    """Metric learning: each anchor's positive against all positives of the batch."""

    class Model(_Embedder):
        def loss_of(self, data):
            anchors, positives = (self.embedded(data[k]) for k in "ap")
            similar = tf.einsum("ae,pe->ap", anchors, positives) / 0.2
            return tf.reduce_mean(
                K.losses.sparse_categorical_crossentropy(
                    tf.range(tf.shape(similar)[0]), similar, from_logits=True
                )
            )

    data = {"a": values(_NUMBERS), "p": values(_NUMBERS, seed=1)}
    return Setup(Model(), data, plain)


def zero_dce() -> Setup:
    """Low-light images: losses of the image alone, no labels."""

    class Model(K.Model):
        def __init__(self):
            super().__init__()
            self.network = models._zero_dce()

        def call(self, x):
            return self.network(x)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = models._zero_dce_loss(data, self.network(data))
            self.optimizer.minimize(loss, self.network.trainable_weights, tape=tape)
            return {"loss": loss}

    return Setup(Model(), values(Of((8, 8, 3))), plain)


# Losses of tokens of which some do not count.


class _TargetMask(L.Layer):
    """Hands on the mask of the target, as keras.io's decoder does."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True

    def call(self, inputs):
        return inputs[0]

    def compute_mask(self, inputs, *masks):
        return (K.ops if stack.KERAS_3 else tf).not_equal(inputs[1], 0)


def with_target_mask(model: K.Model) -> K.Model:
    """The translator, whose predictions have the mask of its second input."""
    found = _TargetMask()([model.output, model.inputs[1]])
    return K.Model(model.inputs, found)


def masked_tokens(per_example: bool) -> Callable[[], Setup]:
    """A masked language model: the loss of the hidden tokens, divided by how many."""

    def build() -> Setup:
        class Model(K.Model):
            def __init__(self):
                super().__init__()
                self.network = models._masked_language_model()

            def call(self, x):
                return self.network(x)

            def train_step(self, data):
                x, y = data
                axis = -1 if per_example else None
                with tf.GradientTape() as tape:
                    found = tf.nn.sparse_softmax_cross_entropy_with_logits(
                        y, self.network(x, training=True)
                    )
                    hidden = tf.cast(y > 0, tf.float32)
                    loss = tf.reduce_sum(found * hidden, axis) / (
                        tf.reduce_sum(hidden, axis) + 1e-6
                    )
                self.optimizer.minimize(loss, self.network.trainable_weights, tape=tape)
                return {"loss": tf.reduce_mean(loss)}

        ids = values(Of((8,), "int32"), 20)
        labels = np.where(np.random.default_rng(2).random(ids.shape) < 0.3, ids, 0)
        return Setup(Model(), (ids, labels.astype("int32")), plain)

    return build


def ctc(labels, logits, blank: int):
    """CTC of each example, for static lengths, by the loop over time.

    Args:
      labels: `[B, L]`, without blanks.
      logits: `[B, T, C]`.
      blank: the class of no label.
    """
    none, last = tf.fill(tf.shape(labels), blank), labels[:, :1] * 0 + blank
    count = 2 * labels.shape[1]
    path = tf.reshape(tf.stack([none, labels], axis=2), [-1, count])
    path = tf.concat([path, last], axis=1)
    scores = tf.gather(tf.nn.log_softmax(logits), path, axis=2, batch_dims=1)
    before = tf.pad(path[:, :-2], [[0, 0], [2, 0]], constant_values=blank)
    leaps = tf.not_equal(path, blank) & tf.not_equal(path, before)
    far = -1e9
    alpha = tf.where(tf.range(count + 1) < 2, scores[:, 0], far)
    for t in range(1, logits.shape[1]):
        one = tf.pad(alpha[:, :-1], [[0, 0], [1, 0]], constant_values=far)
        two = tf.pad(alpha[:, :-2], [[0, 0], [2, 0]], constant_values=far)
        ways = tf.stack([alpha, one, tf.where(leaps, two, far)], axis=2)
        alpha = tf.reduce_logsumexp(ways, axis=2) + scores[:, t]
    return -tf.reduce_logsumexp(alpha[:, -2:], axis=1)


def captcha(loss: Callable) -> Callable[[], Setup]:
    """OCR: characters in a picture, by CTC."""

    def build() -> Setup:
        x, y = values(Of((16, 8, 1))), values(Of((3,), "int32"), 5, 1, seed=1)
        return Setup(models._captcha(), (x, y), with_loss(loss))

    return build


def tensorflows_ctc(labels, found):
    """The CTC loss of Keras 3, for each example."""
    labels = tf.cast(labels, tf.int32)
    many, time = tf.ones_like(labels[:, 0]), found.shape[1]
    lengths = labels.shape[1] * many, time * many
    return tf.nn.ctc_loss(labels, found, *lengths, False, blank_index=-1)


def ctc_of_probabilities(labels, found):
    """By the loop over time."""
    return ctc(tf.cast(labels, tf.int32), tf.math.log(found + 1e-7), blank=5)


# Two networks: the second learns from the first alone.


class _Adversarial(K.Model):
    """A critic that sees the data, and a generator that sees the critic."""

    def __init__(self):
        super().__init__()
        self.discriminator = _dense(8, 1)
        self.generator = _dense(8, 6, shape=(3,))
        self.discriminator.build((None, 6))
        self.generator.build((None, 3))

    def compile(self, d_optimizer, g_optimizer):
        super().compile(d_optimizer)
        self.g_optimizer = g_optimizer

    def call(self, x):
        return self.discriminator(x)

    def made(self, count):
        return self.generator(tf.random.normal([count, 3]), training=True)

    def train_generator(self, count=8):
        with tf.GradientTape() as tape:
            loss = self.generator_loss(self.discriminator(self.made(count)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        return loss

    @staticmethod
    def generator_loss(scores):
        return models.binary(tf.zeros_like(scores), scores)


def _two_optimizers(model: _Adversarial, optimizer) -> None:
    model.compile(optimizer, K.optimizers.Adam(1e-2))


def gan(count: int | None) -> Callable[[], Setup]:
    """The guide's GAN: real and made images in one batch, with noise on the labels.

    Args:
      count: how many images the generator learns from in a step; None for as many as
        there are records, as in the guide.
    """

    class GAN(_Adversarial):
        def train_step(self, real):
            made = self.made(tf.shape(real)[0])
            both = tf.concat([made, real], axis=0)
            labels = tf.concat(
                [tf.ones_like(made[:, :1]), tf.zeros_like(real[:, :1])], 0
            )
            labels += 0.05 * tf.random.uniform(tf.shape(labels))
            with tf.GradientTape() as tape:
                loss = models.binary(labels, self.discriminator(both))
            weights = self.discriminator.trainable_weights
            self.optimizer.minimize(loss, weights, tape=tape)
            images = count or tf.shape(real)[0]
            return {"d_loss": loss, "g_loss": self.train_generator(images)}

    return lambda: Setup(GAN(), values(_NUMBERS), _two_optimizers)


def wasserstein(critic_steps: int) -> Callable[[], Setup]:
    """WGAN-GP: the critic's gradient at points between real and made has a penalty."""

    def build() -> Setup:
        class WGAN(_Adversarial):
            generator_loss = staticmethod(lambda scores: -tf.reduce_mean(scores))

            def penalty(self, real, made):
                part = tf.random.uniform([tf.shape(real)[0], 1])
                between = real + part * (made - real)
                with tf.GradientTape() as tape:
                    tape.watch(between)
                    scores = self.discriminator(between, training=True)
                slope = tape.gradient(scores, between)
                norm = tf.sqrt(tf.reduce_sum(tf.square(slope), axis=1) + 1e-12)
                return tf.reduce_mean((norm - 1.0) ** 2)

            def train_step(self, real):
                weights = self.discriminator.trainable_weights
                for _ in range(critic_steps):
                    made = self.made(tf.shape(real)[0])
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_mean(self.discriminator(made))
                        loss -= tf.reduce_mean(self.discriminator(real))
                        loss += 10.0 * self.penalty(real, made)
                    self.optimizer.minimize(loss, weights, tape=tape)
                return {"d_loss": loss, "g_loss": self.train_generator()}

        return Setup(WGAN(), values(_NUMBERS), _two_optimizers)

    return build


# A graph whose nodes are all examples.


def nodes_of_one_graph() -> Setup:
    """Node classification: examples are nodes' numbers, and the model has the graph."""
    features = np.random.default_rng(3).normal(size=[RECORDS, 5]).astype("float32")
    edges = np.random.default_rng(4).integers(0, RECORDS, [90, 2])

    class Graph(L.Layer):
        def __init__(self):
            super().__init__()
            self.prepare, self.update = L.Dense(4, "relu"), L.Dense(4, "relu")

        def call(self, nodes):
            x = self.prepare(tf.constant(features))
            messages = tf.gather(x, edges[:, 1])
            found = tf.math.unsorted_segment_mean(messages, edges[:, 0], RECORDS)
            x = self.update(tf.concat([x, found], axis=1))
            return tf.gather(x, nodes)

    inputs = K.Input((), dtype="int32")
    model = K.Model(inputs, L.Dense(3)(Graph()(inputs)))
    nodes = np.arange(RECORDS, dtype="int32")
    loss = K.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Setup(model, (nodes, values(Of((), "int32"), 3, seed=1)), with_loss(loss))
