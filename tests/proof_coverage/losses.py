"""The losses of Keras in turn, and losses that people write."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

import tfdpclip as dpc
from tests.proof_coverage.entry import CLASS, Entry, Of

K = tf.keras
L = tf.keras.layers
VECTOR, TOKENS, PICTURE = (4,), (5, 4), (6, 6, 2)


def of(loss: Callable, shape: tuple, labels: Of | None = None, **options) -> Entry:
    """A loss of a Dense layer's outputs.

    Args:
      loss: makes the function of labels and predictions.
      shape: of one example's predictions.
      labels: of one example; the same as the predictions if None.
      **options: `activation` of the Dense; more of the entry.
    """
    activation = options.pop("activation", None)

    def build():
        inputs = K.Input(shape)
        return K.Model(inputs, L.Dense(shape[-1], activation)(inputs))

    compute = lambda y, x: loss()(y, x)  # noqa: E731
    return Entry(build, Of(shape), labels or Of(shape), compute, **options)


def _named(name: str, shape: tuple = VECTOR, labels: Of | None = None, **options):
    kept = ("activation", "apart", "keras", "advice")
    own = {key: options.pop(key) for key in kept if key in options}
    return of(lambda: getattr(K.losses, name)(**options), shape, labels, **own)


_NUMBERS = """MeanSquaredError MeanAbsoluteError MeanAbsolutePercentageError
MeanSquaredLogarithmicError LogCosh Huber CosineSimilarity CategoricalHinge""".split()
_SIGNS = (
    "Keras asks of the whole batch whether labels are 0 and 1: make them -1 and 1, and "
    "write `tf.reduce_mean(tf.nn.relu(1 - y * p), -1)`."
)
_BY_IMAGE = "`axis=(1, 2, 3)` makes it a loss of each image."
_ROWS = (
    "Its transitions are scattered to the numbers of the rows: one example at a time."
)
_PARTS = "KLDivergence CategoricalCrossentropy BinaryCrossentropy".split()
KERAS = {
    **{name: _named(name) for name in _NUMBERS},
    **{f"{name} of images": _named(name, PICTURE) for name in _NUMBERS},
    **{name: _named(name, activation="softmax") for name in _PARTS},
    **{
        f"{name} of tokens": _named(name, TOKENS, activation="softmax")
        for name in _PARTS
    },
    # Whether the labels are 0 and 1, or -1 and 1, is asked of all the batch.
    "Hinge": _named("Hinge", apart=False, advice=_SIGNS),
    "SquaredHinge": _named("SquaredHinge", apart=False, advice=_SIGNS),
    "CosineSimilarity along axis 1": _named("CosineSimilarity", TOKENS, axis=1),
    "CosineSimilarity along the batch": _named(
        "CosineSimilarity", TOKENS, axis=0, apart=False
    ),
    "Poisson": _named("Poisson", activation="exponential"),
    "BinaryCrossentropy from logits": _named("BinaryCrossentropy", from_logits=True),
    "BinaryCrossentropy smoothed": _named(
        "BinaryCrossentropy", from_logits=True, label_smoothing=0.1
    ),
    "BinaryFocalCrossentropy": _named("BinaryFocalCrossentropy", activation="sigmoid"),
    "BinaryFocalCrossentropy balanced": _named(
        "BinaryFocalCrossentropy", from_logits=True, apply_class_balancing=True
    ),
    "CategoricalCrossentropy from logits": _named(
        "CategoricalCrossentropy", from_logits=True
    ),
    "CategoricalCrossentropy smoothed": _named(
        "CategoricalCrossentropy", from_logits=True, label_smoothing=0.1
    ),
    "CategoricalFocalCrossentropy": _named(
        "CategoricalFocalCrossentropy", activation="softmax"
    ),
    "CategoricalFocalCrossentropy from logits": _named(
        "CategoricalFocalCrossentropy", from_logits=True
    ),
    "CategoricalGeneralizedCrossEntropy": _named(
        "CategoricalGeneralizedCrossEntropy",
        labels=CLASS,
        activation="softmax",
        keras=3,
    ),
    "SparseCategoricalCrossentropy": _named(
        "SparseCategoricalCrossentropy", labels=CLASS, activation="softmax"
    ),
    "SparseCategoricalCrossentropy from logits": _named(
        "SparseCategoricalCrossentropy", labels=CLASS, from_logits=True
    ),
    "SparseCategoricalCrossentropy of tokens": _named(
        "SparseCategoricalCrossentropy", TOKENS, Of((5,), "int32"), from_logits=True
    ),
    "SparseCategoricalCrossentropy of pixels": _named(
        "SparseCategoricalCrossentropy", PICTURE, Of((6, 6), "int32"), from_logits=True
    ),
    "SparseCategoricalCrossentropy with labels [B, 1]": _named(
        "SparseCategoricalCrossentropy", VECTOR, Of((1,), "int32"), from_logits=True
    ),
    "SparseCategoricalCrossentropy without a class": _named(
        "SparseCategoricalCrossentropy",
        TOKENS,
        Of((5,), "int32"),
        from_logits=True,
        ignore_class=0,
        apart=False,
    ),
    "CTC": _named("CTC", TOKENS, Of((3,), "int32"), keras=3, advice=_ROWS),
    "Dice": _named(
        "Dice", PICTURE, activation="sigmoid", apart=False, keras=3, advice=_BY_IMAGE
    ),
    "Dice by image": _named(
        "Dice", PICTURE, activation="sigmoid", axis=(1, 2, 3), keras=3
    ),
    "Tversky": _named(
        "Tversky", PICTURE, activation="sigmoid", apart=False, keras=3, advice=_BY_IMAGE
    ),
    "Tversky by image": _named(
        "Tversky", PICTURE, activation="sigmoid", axis=(1, 2, 3), keras=3
    ),
    "Circle": _named(
        "Circle",
        labels=CLASS,
        apart=False,
        keras=3,
        advice="It compares every example with every other.",
    ),
}


def _reduced(reduction: str, **options) -> Entry:
    return _named(
        "SparseCategoricalCrossentropy",
        labels=CLASS,
        from_logits=True,
        reduction=reduction,
        **options,
    )


def _weighted(labels, logits):
    """Weights of the examples are a part of the labels."""
    loss = K.losses.SparseCategoricalCrossentropy(from_logits=True)
    return loss(labels[0], logits, sample_weight=labels[1])


def _by_weights(labels, logits):
    loss = K.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    return loss(labels[0], logits, sample_weight=labels[1])


def _weighted_tokens(labels, logits):
    weights = tf.cast(labels > 0, tf.float32)
    loss = K.losses.SparseCategoricalCrossentropy(from_logits=True)
    return loss(labels, logits, sample_weight=weights)


def _masked(loss: Callable, apart: bool) -> Entry:
    """Tokens with padding, and a loss of each that sees the mask."""

    def build():
        inputs = K.Input((5,), dtype="int32")
        hidden = L.Embedding(20, 4, mask_zero=True)(inputs)
        return K.Model(inputs, L.Dense(4)(L.LSTM(4, return_sequences=True)(hidden)))

    tokens = Of((5,), "int32")
    return Entry(build, tokens, tokens, lambda y, x: loss()(y, x), apart)


def _tokens_loss():
    return K.losses.SparseCategoricalCrossentropy(from_logits=True)


REDUCED = {
    "one loss an example": _reduced("none"),
    "summed": _reduced("sum"),
    "the mean of everything": of(
        lambda: lambda y, x: tf.reduce_mean(tf.square(y - x)), TOKENS
    ),
    "the sum over B": of(
        lambda: (
            lambda y, x: (
                tf.reduce_sum(tf.square(y - x)) / tf.cast(tf.shape(x)[0], tf.float32)
            )
        ),
        TOKENS,
    ),
    "weighted examples": of(lambda: _weighted, VECTOR, (Of((), "int32"), Of(()))),
    "weighted examples, by the sum of weights": of(
        lambda: _by_weights, VECTOR, (Of((), "int32"), Of(())), apart=False, keras=3
    ),
    "weighted tokens": of(lambda: _weighted_tokens, TOKENS, Of((5,), "int32")),
    "masked tokens": _masked(_tokens_loss, apart=False),
    "masked tokens, PerExampleLoss": _masked(
        lambda: dpc.keras.PerExampleLoss(_tokens_loss()), apart=True
    ),
}


def _masked_mean(labels, logits):
    """A loss that divides by how many tokens the batch has."""
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    mask = tf.cast(labels > 0, loss.dtype)
    return tf.reduce_sum(loss * mask) / tf.reduce_sum(mask)


def _masked_means(labels, logits):
    """A loss that divides by how many tokens the example has."""
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    mask = tf.cast(labels > 0, loss.dtype)
    return tf.reduce_sum(loss * mask, 1) / tf.maximum(tf.reduce_sum(mask, 1), 1.0)


def _contrastive(labels, embedded):
    """Every pair of examples is compared."""
    embedded = tf.math.l2_normalize(embedded, axis=1)
    scores = tf.matmul(embedded, embedded, transpose_b=True)
    return tf.reduce_mean(
        tf.nn.softmax_cross_entropy_with_logits(tf.eye(tf.shape(scores)[0]), scores)
    )


def _cox(labels, risk):
    """The partial likelihood, in the order of the times."""
    risk = tf.gather(risk[:, 0], tf.argsort(labels, direction="DESCENDING"))
    return tf.reduce_mean(tf.math.cumulative_logsumexp(risk) - risk)


def _dice_by_image(y, x):
    axes = [1, 2, 3]
    both = 2 * tf.reduce_sum(y * x, axes) + 1
    return 1 - both / (tf.reduce_sum(y, axes) + tf.reduce_sum(x, axes) + 1)


def _ctc_batch_cost(labels, predictions):
    ones = tf.ones([tf.shape(predictions)[0], 1], tf.int32)
    return K.backend.ctc_batch_cost(labels, predictions, 5 * ones, 3 * ones)


def _ctc(labels, logits):
    lengths = tf.fill([tf.shape(logits)[0]], 5)
    return tf.nn.ctc_loss(
        labels, logits, lengths - 2, lengths, logits_time_major=False, blank_index=-1
    )


def _triplet(labels, x):
    anchor, positive, negative = tf.split(x, 3, axis=1)
    near = tf.reduce_sum(tf.square(anchor - positive), -1)
    far = tf.reduce_sum(tf.square(anchor - negative), -1)
    return tf.maximum(near - far + 0.5, 0.0)


def _hardest(labels, x):
    """The largest half of the losses of a batch."""
    losses = tf.reduce_mean(tf.square(labels - x), 1)
    return tf.reduce_mean(tf.math.top_k(losses, 4).values)


def _pairs(labels, x):
    """Every pair of an example's items is compared."""
    difference = x[:, :, None] - x[:, None, :]
    wanted = tf.sign(labels[:, :, None] - labels[:, None, :])
    return tf.reduce_mean(tf.nn.softplus(-wanted * difference), [1, 2])


def _quantiles(y, x):
    error = y - x
    return tf.reduce_mean(tf.maximum(0.9 * error, -0.1 * error))


def _gaussian(y, x):
    mean, deviation = tf.split(x, 2, axis=-1)
    deviation = tf.nn.softplus(deviation) + 1e-3
    return tf.reduce_mean(
        tf.square((y - mean) / deviation) / 2 + tf.math.log(deviation), -1
    )


def _broadcast(labels, predictions):
    """Labels [B] beside predictions [B, 1]."""
    return tf.reduce_mean(tf.square(labels - predictions))


OWN = {
    "masked mean of the batch": of(
        lambda: _masked_mean, TOKENS, Of((5,), "int32"), apart=False
    ),
    "masked mean of the example": of(lambda: _masked_means, TOKENS, Of((5,), "int32")),
    "contrastive in the batch": of(lambda: _contrastive, VECTOR, CLASS, apart=False),
    "Cox partial likelihood": of(lambda: _cox, VECTOR, Of(()), apart=False),
    "labels [B] with predictions [B, 1]": of(
        lambda: _broadcast, (1,), Of(()), apart=False
    ),
    "the hardest of a batch": of(lambda: _hardest, VECTOR, apart=False),
    "Dice of an image, by hand": of(
        lambda: _dice_by_image, PICTURE, activation="sigmoid"
    ),
    "ctc_batch_cost": of(
        lambda: _ctc_batch_cost,
        TOKENS,
        Of((3,), "int32"),
        activation="softmax",
        keras=2,
    ),
    "tf.nn.ctc_loss": of(lambda: _ctc, TOKENS, Of((3,), "int32"), advice=_ROWS),
    "triplets": of(lambda: _triplet, (6,), CLASS),
    "ranking of pairs": of(lambda: _pairs, VECTOR),
    "quantiles": of(lambda: _quantiles, VECTOR),
    "Gaussian likelihood": of(lambda: _gaussian, (6,), Of((3,))),
    "structural similarity": of(
        lambda: lambda y, x: 1 - tf.image.ssim(y, x, 1.0, filter_size=3),
        PICTURE,
        activation="sigmoid",
    ),
    "total variation": of(lambda: lambda y, x: tf.image.total_variation(x), PICTURE),
    "signal to noise": of(
        lambda: lambda y, x: -tf.image.psnr(y, x, 1.0), PICTURE, activation="sigmoid"
    ),
    "spectra": of(
        lambda: (
            lambda y, x: tf.reduce_mean(
                tf.abs(tf.abs(tf.signal.rfft(y)) - tf.abs(tf.signal.rfft(x)))
            )
        ),
        (2, 8),
    ),
    "gathered by class": of(
        lambda: lambda y, x: -tf.gather(tf.nn.log_softmax(x), y, batch_dims=1),
        VECTOR,
        CLASS,
    ),
    "one-hot classes": of(
        lambda: lambda y, x: -tf.reduce_sum(tf.one_hot(y, 4) * tf.nn.log_softmax(x), 1),
        VECTOR,
        CLASS,
    ),
    "the largest entry": of(
        lambda: lambda y, x: tf.reduce_max(tf.abs(y - x), 1), VECTOR
    ),
    "two losses": of(
        lambda: (
            lambda y, x: (
                K.losses.MeanSquaredError()(y, x)
                + 0.1 * K.losses.MeanAbsoluteError()(y, x)
            )
        ),
        VECTOR,
    ),
}

GROUPS = {"losses of Keras": KERAS, "reductions": REDUCED, "own losses": OWN}
