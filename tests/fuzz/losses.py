"""Losses: their kinds per example, and their reductions to a scalar."""

from __future__ import annotations

import tensorflow as tf

K = tf.keras.losses


def target_of(y: tf.Tensor, out: tf.Tensor) -> tf.Tensor:
    """Targets of the shape of `out`, from `[B, 8]` numbers."""
    size = 1
    for part in out.shape[1:]:
        size *= part
    places = [i % y.shape[1] for i in range(size)]
    return tf.reshape(tf.gather(y, places, axis=1), [-1, *out.shape[1:]])


def _labels(target):
    return tf.argmax(target, axis=-1)


def _signs(target):
    return tf.cast(target > 0, target.dtype)


# name -> (targets made from numbers, a Keras loss). All give `[B, ...]`.
KINDS = {
    "mse": (lambda t: t, lambda **kw: K.MeanSquaredError(**kw)),
    "mae": (lambda t: t, lambda **kw: K.MeanAbsoluteError(**kw)),
    "huber": (lambda t: t, lambda **kw: K.Huber(0.5, **kw)),
    "log_cosh": (lambda t: t, lambda **kw: K.LogCosh(**kw)),
    "hinge": (_signs, lambda **kw: K.Hinge(**kw)),
    "squared_hinge": (_signs, lambda **kw: K.SquaredHinge(**kw)),
    "sparse": (
        _labels,
        lambda **kw: K.SparseCategoricalCrossentropy(from_logits=True, **kw),
    ),
    "categorical": (
        tf.nn.softmax,
        lambda **kw: K.CategoricalCrossentropy(from_logits=True, **kw),
    ),
    "binary": (_signs, lambda **kw: K.BinaryCrossentropy(from_logits=True, **kw)),
    "smoothed": (
        _signs,
        lambda **kw: K.BinaryCrossentropy(from_logits=True, label_smoothing=0.1, **kw),
    ),
    "cosine": (lambda t: t, lambda **kw: K.CosineSimilarity(**kw)),
    "poisson": (tf.nn.softplus, lambda **kw: K.Poisson(**kw)),
    "raw": (lambda t: t, None),
}


def _steps(kind, target, out):
    """`[B]` or `[B, ...]`."""
    targets, make = KINDS[kind]
    if make is None:
        return tf.square(out - target)
    if kind == "poisson":
        out = tf.nn.softplus(out) + 0.1
    return make(reduction="none")(targets(target), out)


def _average(values):
    return (
        values
        if values.shape.rank == 1
        else tf.reduce_mean(
            tf.reshape(values, [-1, values.shape[1:].num_elements()]), axis=1
        )
    )


def per_example(settings, out, y, w, penalties):
    """`[B]`: the loss of each example by definition.

    Where a reduction combines examples, every entry is the whole loss.
    """
    values = _values(settings, out, y, w, penalties)
    reduction = settings.get("reduction", "none")
    if reduction in GATED:
        return GATED[reduction](values)
    total = _mixed_total(reduction, values, y, w)
    return values if total is None else total * tf.ones_like(values)


def _values(settings, out, y, w, penalties):
    out = tf.cast(out, y.dtype)
    values = _average(_steps(settings.get("kind", "mse"), target_of(y, out), out))
    reduction = settings.get("reduction", "none")
    if settings.get("weighted"):
        values = values * w
    if reduction == "two":
        values = values + 0.5 * tf.reduce_mean(
            tf.abs(tf.reshape(out, [-1, out.shape[1:].num_elements()])), axis=1
        )
    if reduction == "masked":
        kept = tf.cast(tf.abs(out) > 0.1, out.dtype)
        kept = tf.reshape(kept, [-1, kept.shape[1:].num_elements()])
        error = tf.square(tf.reshape(out - target_of(y, out), tf.shape(kept)))
        values = tf.math.divide_no_nan(
            tf.reduce_sum(error * kept, axis=1), tf.reduce_sum(kept, axis=1)
        )
    if settings.get("penalties", True):
        for part in penalties:
            values = values + part
    return OWN[reduction](values) if reduction in OWN else values


def _kept_losses(values, kept):
    return tf.where(kept, values, tf.stop_gradient(values))


# Losses whose own size decides how much of their gradients is kept.
OWN = {
    "own_hard": lambda v: _kept_losses(v, v > 0.5),
    "own_easy": lambda v: _kept_losses(v, tf.stop_gradient(v) < 1),
    "own_weights": lambda v: tf.stop_gradient(tf.exp(-tf.abs(v))) * v,
    "own_focus": lambda v: v + tf.stop_gradient(v * tf.abs(v) - v),
}


def _importance(values):
    """Weights with mean 1, as those of a self-normalised estimate."""
    return tf.stop_gradient(values / (tf.reduce_mean(tf.abs(values)) + 0.1))


def _by_size(values):
    """Whether a loss is among the smaller half."""
    ordered = tf.sort(tf.stop_gradient(values))
    return tf.stop_gradient(values) < ordered[tf.shape(ordered)[0] // 2] - 1e-4


# Losses with gradients that depend on the batch. The values depend on their own example
# alone, except for the last two.
GATED = {
    "hard": lambda v: _kept_losses(
        v, tf.stop_gradient(v) >= 0.7 * tf.math.top_k(v, 1).values[0]
    ),
    "trimmed": lambda v: _kept_losses(v, _by_size(v)),
    "above_mean": lambda v: _kept_losses(v, v > 0.9 * tf.reduce_mean(v)),
    "first": lambda v: _kept_losses(v, v <= v[0] + 1e-4),
    "outlier": lambda v: _kept_losses(
        v, tf.abs(v) < 5 * tf.sort(tf.abs(v))[tf.shape(v)[0] // 2]
    ),
    "importance": lambda v: v * _importance(v),
    "softmax": lambda v: v * tf.stop_gradient(tf.nn.softmax(v)),
}


def _mixed_total(reduction, values, y, w):
    """The reduced loss, for a reduction that combines examples."""
    mean = tf.reduce_mean(values)
    total = {
        "weighted_total": lambda: tf.math.divide_no_nan(
            tf.reduce_sum(values * (w + 0.5)), tf.reduce_sum(w + 0.5)
        ),
        "masked_total": lambda: tf.math.divide_no_nan(
            tf.reduce_sum(values * _kept(y)), tf.reduce_sum(_kept(y))
        ),
        "root": lambda: tf.sqrt(mean + 0.01),
        "max": lambda: tf.reduce_max(values),
        "log_sum": lambda: tf.reduce_logsumexp(values),
        "variance": lambda: mean + tf.math.reduce_variance(values),
        "product": lambda: mean * tf.stop_gradient(mean),
        "top": lambda: tf.reduce_mean(tf.math.top_k(values, 2).values),
        "by_max": lambda: mean / (0.1 + tf.stop_gradient(tf.reduce_max(values))),
    }.get(reduction)
    return None if total is None else total()


def _kept(y):
    return tf.cast(y[:, 0] > 0, y.dtype)


MIXED = (
    "weighted_total",
    "masked_total",
    "root",
    "max",
    "log_sum",
    "variance",
    "product",
    "top",
    "by_max",
    *GATED,
)
REDUCTIONS = (
    "none",
    "mean",
    "sum",
    "over_size",
    "keras",
    "keras_sum",
    "entries",
    "entries_mean",
    "weighted_mean",
    "two",
    "masked",
    *OWN,
    "regularised",
    "dot",
    "nn",
)
SUMS = ("sum", "keras_sum", "dot")


def reduced(settings, out, y, w, penalties, variables):
    """The loss in the form that the engine is given."""
    reduction = settings.get("reduction", "none")
    kind = settings.get("kind", "mse")
    plain = not settings.get("weighted") and not penalties
    if reduction.startswith("keras") and kind != "raw":
        given = tf.cast(out, y.dtype)
        if kind == "poisson":
            given = tf.nn.softplus(given) + 0.1
        targets, make = KINDS[kind]
        loss = make(reduction="sum" if reduction == "keras_sum" else "auto")
        # Keras means the steps of an example as well; a sum is over them, too.
        if (given.shape.rank == 2 or reduction == "keras") and not penalties:
            weights = w if settings.get("weighted") else None
            if weights is not None and out.shape.rank > 2:
                weights = w[:, tf.newaxis]
                weights = weights * tf.ones([1, out.shape[1]], w.dtype)
                if out.shape.rank > 3:
                    weights = None
            if weights is not None or not settings.get("weighted"):
                target = targets(target_of(y, given))
                return loss(target, given, sample_weight=weights)
    values = _values(settings, out, y, w, penalties)
    if reduction in GATED:
        return GATED[reduction](values)
    total = _mixed_total(reduction, values, y, w)
    if total is not None:
        return total
    if reduction in ("entries", "entries_mean") and plain:
        out = tf.cast(out, y.dtype)
        entries = _steps(kind, target_of(y, out), out)
        return tf.reduce_mean(entries) if reduction == "entries_mean" else entries
    count = tf.cast(tf.shape(values)[0], values.dtype)
    if reduction in ("sum", "keras_sum"):
        return tf.reduce_sum(values)
    if reduction == "dot":
        return tf.tensordot(values, tf.ones_like(values), 1)
    if reduction in ("over_size", "weighted_mean"):
        return tf.reduce_sum(values) / count
    if reduction == "regularised":
        return tf.reduce_mean(values) + regulariser(variables, values.dtype)
    if reduction == "nn":
        return tf.nn.compute_average_loss(values)
    if reduction == "none" or reduction in OWN:
        return values
    return tf.reduce_mean(values)


def regulariser(variables, dtype):
    """A term that depends on no example."""
    return tf.add_n([0.01 * tf.reduce_sum(tf.cast(v, dtype) ** 2) for v in variables])
