"""Statistics of the batch that neither the graph nor a second batch shows.

They are written to a resource that is not a variable and read again, beside random
draws that depend on the data, so that the loss cannot be run again.
"""

from __future__ import annotations

import tensorflow as tf

from tests.fuzz.channels import CHANNELS, through
from tests.fuzz.env import floats, number_of
from tests.fuzz.gradient_mixers import (
    COTANGENTS,
    damped,
    gate_of,
    like,
    mix_cotangents,
    norms_of,
    under,
)
from tests.fuzz.mixers import vector_of
from tests.fuzz.registry import block


def _largest(x):
    """Of the norms, a scalar that a channel takes."""
    rows = tf.cast(vector_of(tf.stop_gradient(x)), tf.float32)
    return tf.reduce_max(norms_of(rows))


@block(
    "mix_elsewhere",
    how=tuple(CHANNELS),
    form=("forwards", "damped", "backwards"),
    mixes=True,
    weight=1.5,
)
def mix_elsewhere(env, path, x, args, node):
    """A statistic of the batch goes through a resource that is not a variable."""
    x = floats(env, x)
    if path not in env.made:
        with tf.init_scope():
            env.made[path] = CHANNELS[args["how"]]()

    def gate():
        return tf.cast(under(through(env.made[path], _largest(x))), x.dtype)

    @tf.custom_gradient
    def backwards(x):
        return tf.identity(x), lambda dy: dy * gate()

    if args["form"] == "forwards":
        return x * gate()
    return backwards(x) if args["form"] == "backwards" else damped(x, gate())


# Draws that depend on the data, too faint to have an effect; they prevent a second run
# of the loss.
DRAWS = {
    "gamma": lambda x: tf.random.gamma([], tf.nn.softplus(x) + 0.1),
    "poisson": lambda x: tf.random.poisson([], tf.square(tf.stop_gradient(x))),
    "categorical": lambda x: tf.cast(
        tf.random.categorical(vector_of(tf.stop_gradient(x)), 1), x.dtype
    ),
    "in a loop": lambda x: tf.map_fn(lambda row: tf.random.uniform([]) + row, x),
}


@block(
    "mix_drawn",
    draw=tuple(DRAWS),
    how=("row", "argmax", "gather", *COTANGENTS),
    mixes=True,
    weight=1.5,
)
def mix_drawn(env, path, x, args, node):
    """A statistic beside random numbers that take the data."""
    x, how = floats(env, x), args["how"]
    if how in COTANGENTS:
        mixed = mix_cotangents(env, path, x, args, node)
    elif how == "gather":
        mixed = damped(x, _of_a_row(x))
    else:
        mixed = damped(x, gate_of(x, how))
    if args["draw"] == "categorical":
        drawn = like(DRAWS["categorical"](x)[:, 0], x)
    else:
        drawn = tf.cast(DRAWS[args["draw"]](tf.cast(x, tf.float32)), x.dtype)
    return mixed + 1e-7 * drawn


def _of_a_row(x):
    """Each is damped by the norm of the row that its own numbers point to."""
    rows = tf.cast(vector_of(tf.stop_gradient(x)), tf.float32)
    other = tf.minimum(tf.cast(rows[:, 0] > 1, tf.int32), number_of(rows) - 1)
    found = norms_of(tf.gather(rows, other))
    return tf.cast(under(found), x.dtype)
