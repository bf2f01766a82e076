"""A loss's graph proves nothing if examples reach other examples in it.

Each function here was, or could be, proven by a rule that guessed: by the number of
examples, by places in the batch, by shapes that agree for a single size alone. `python
-m tests.fuzz.graphs` draws further functions.
"""

import numpy as np
import pytest
import tensorflow as tf

from tfdpclip.gradients import per_example_norms
from tfdpclip.gradients.errors import ExampleIsolationError, LossStructureError
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.loss.loss_parts import take_apart
from tfdpclip.gradients.proof.isolation_proof import prove

W = tf.Variable(np.random.default_rng(0).standard_normal((4, 4)), dtype=tf.float32)
P = tf.Variable(np.random.default_rng(1).standard_normal(8), dtype=tf.float32)
NONE, FOUR = None, 4


def judged(loss, rows, shape=(4,), each=1):
    """The proof's verdict on `loss(x, hidden)`, or "refused" by an earlier check."""
    found = []

    def trace(x):
        hidden = tf.tanh(tf.tensordot(x, W, 1))
        losses = loss(x, hidden)
        handles = [losses.graph.capture(v.handle) for v in (W, P)]
        try:
            flows = Dataflow([losses], handles, rows_per_example=each)
            parts = take_apart(losses, flows, 8.0)
            flows = Dataflow([parts.per_example], handles, flows.batch_size, (), each)
            found.append(prove(parts.per_example, flows).verdict.value)
        except (ExampleIsolationError, LossStructureError):
            found.append("refused")
        return losses

    spec = tf.TensorSpec([rows, *shape], tf.float32)
    tf.function(trace, [spec], autograph=False).get_concrete_function()
    return found[0]


def ends(h):
    return tf.reduce_sum(tf.square(h), list(range(1, h.shape.rank)))


def count(x):
    return tf.shape(x)[0]


def of_each(x, change, steps=None):
    """A loop over the rows, written out."""
    steps = count(x) if steps is None else steps
    rows = tf.TensorArray(tf.float32, size=count(x), element_shape=x.shape[1:])

    def body(i, rows):
        return i + 1, rows.write(i, change(i, x[i]))

    _, rows = tf.while_loop(lambda i, r: i < steps, body, [0, rows])
    found = rows.stack()
    found.set_shape(x.shape)
    return found


def repeatedly(h, steps):
    return tf.while_loop(lambda i, h: i < steps, lambda i, h: (i + 1, h * 0.9), [0, h])[
        1
    ]


def gathered_in_steps(h, axis):
    """A loop that adds up slices along an axis, each gathered by a list of numbers."""

    def body(i, total):
        return i + 1, tf.tanh(total * P[0] + tf.gather(h, [i], axis=axis))

    _, total = tf.while_loop(lambda i, _: i < 2, body, [0, tf.zeros_like(h)])
    total.set_shape(h.shape)
    return total


def of_dy(change):
    @tf.custom_gradient
    def function(h):
        return tf.identity(h), lambda dy: change(dy, h)

    return function


def by_number(h, function):
    found = tf.map_fn(
        function, tf.range(count(h)), fn_output_signature=tf.TensorSpec([4])
    )
    return tf.ensure_shape(found, h.shape)


def of_copies(h, change):
    """Of three copies of the batch, in turn, the sums for each example."""
    copies = change(tf.tile(h, [3, 1]))
    return tf.reduce_sum(tf.reshape(copies, [3, -1, 4]), 0)


def floating(n):
    return tf.cast(n, tf.float32)


def after(n):
    """A number of the size, by integer arithmetic."""
    return n // 3 % 2


#: name: the loss; for batches of any size.
BY_SIZE = {
    "steps of a loop": lambda x, h: ends(repeatedly(h, count(x) // 3)),
    "a branch": lambda x, h: ends(tf.cond(count(x) > 3, lambda: h, lambda: 2 * h)),
    "a switch": lambda x, h: ends(
        tf.switch_case(count(x) % 2, [lambda: h, lambda: h * 2])
    ),
    "an index": lambda x, h: tf.square(h[:, after(count(x))]),
    "a gathered column": lambda x, h: tf.square(tf.gather(h, after(count(x)), axis=1)),
    "the end of a slice": lambda x, h: ends(h[:, : 1 + after(count(x))]),
    "the end of a range": lambda x, h: ends(
        h * floating(tf.reduce_sum(tf.range(count(x))))
    ),
    "copies that are added up": lambda x, h: ends(
        tf.reduce_sum(tf.tile(h[..., tf.newaxis], [1, 1, count(x)]), -1)
    ),
    "an axis of features": lambda x, h: ends(
        tf.nn.softmax(tf.reshape(h, [count(x), 1 + after(count(x)), -1]), -1)[:, 0]
    ),
    "how many of the largest": lambda x, h: ends(
        tf.math.top_k(h, 1 + after(count(x))).values
    ),
    "a hot entry": lambda x, h: ends(h * tf.one_hot(after(count(x)), 4)),
    "a shift": lambda x, h: ends(tf.roll(h, after(count(x)), 1) * P[:4]),
    "padding": lambda x, h: tf.reduce_mean(
        tf.pad(h, [[0, 0], [0, after(count(x))]]), 1
    ),
    "a filled tensor": lambda x, h: ends(h + tf.fill(tf.shape(h), floating(count(x)))),
    "ones that are counted": lambda x, h: ends(
        h * tf.reduce_sum(tf.ones([1, count(x)]), 1)
    ),
    "ones beside the features": lambda x, h: ends(
        h[:, :1] * tf.ones([count(x), count(x)])
    ),
    "numbers in between": lambda x, h: ends(
        h * tf.linspace(0.0, 1.0, count(x))[:, tf.newaxis]
    ),
    "the last of a range": lambda x, h: ends(h * floating(tf.range(count(x))[-1])),
    "a rounded number": lambda x, h: ends(
        h * floating(count(x)) * floating(tf.cast(1.0 / floating(count(x)), tf.int32))
    ),
    "the larger number": lambda x, h: (
        tf.reduce_sum(ends(h)) / tf.maximum(floating(count(x)) / 3, 1.0)
    ),
    "a list of variables": lambda x, h: ends(
        h
        * tf.reduce_sum(
            tf.map_fn(
                lambda _: P[0],
                tf.zeros([count(x)]),
                fn_output_signature=tf.float32,
            )
        )
    ),
    "rows behind the last": lambda x, h: ends(tf.pad(h, [[0, 1], [0, 0]])),
    "rows before the first": lambda x, h: ends(tf.pad(h, [[1, 0], [0, 0]])),
    "rows by half": lambda x, h: ends(
        h + tf.zeros([count(x) // 2 * 2, 4]) * tf.ones([1, 4])
    ),
    "steps for some examples": lambda x, h: ends(
        of_each(h, lambda i, r: tf.tanh(r), count(x) // 2)
    ),
    "a diagonal": lambda x, h: ends(tf.nn.softmax(tf.linalg.diag(h[:, 0]))),
    "as many constants as rows": lambda x, h: ends(h + tf.ones([3, 4])),
    "a loss of one entry": lambda x, h: tf.reshape(tf.reduce_sum(h), [1]),
    "a size in a gradient": lambda x, h: ends(
        of_dy(lambda dy, _: dy * floating(tf.shape(dy)[0]))(h)
    ),
    "steps of a gradient": lambda x, h: ends(
        of_dy(lambda dy, _: repeatedly(dy, tf.shape(dy)[0] // 2))(h)
    ),
}

#: For batches of any size, and of a static size.
BY_PLACE = {
    "a range": lambda x, h: ends(h * floating(tf.range(count(x)))[:, tf.newaxis]),
    "a range in its order": lambda x, h: ends(
        h * tf.gather(floating(tf.range(count(x))), tf.range(count(x)))[:, tf.newaxis]
    ),
    "a range with a further axis": lambda x, h: ends(
        h * tf.expand_dims(floating(tf.range(count(x))), -1)
    ),
    "a column of the range": lambda x, h: ends(
        h * tf.stack([floating(tf.range(count(x))), tf.ones([count(x)])], 1)[:, :1]
    ),
    "a row of the range": lambda x, h: ends(
        h * tf.transpose(tf.expand_dims(floating(tf.range(count(x))), 0))
    ),
    "a table by the range": lambda x, h: ends(
        h * tf.gather(P, tf.range(count(x)))[:, tf.newaxis]
    ),
    "a column of the range among draws": lambda x, h: ends(
        h
        * tf.concat(
            [
                floating(tf.range(count(x)))[:, tf.newaxis],
                tf.random.uniform([count(x), 3]),
            ],
            1,
        )
    ),
    "draws behind zeros": lambda x, h: ends(
        h * tf.concat([tf.zeros([1, 1]), tf.random.uniform([count(x) - 1, 1])], 0)
    ),
    "a number of a list": lambda x, h: ends(by_number(h, lambda i: h[i] * floating(i))),
    "a variable by a number of a list": lambda x, h: ends(
        h * by_number(h, lambda i: P[:4] * floating(i))
    ),
    "a branch by a number of a list": lambda x, h: ends(
        by_number(h, lambda i: tf.cond(i < 2, lambda: h[i], lambda: 2 * h[i]))
    ),
    "copies of the batch beside copies of the range": lambda x, h: ends(
        tf.reshape(
            tf.tile(h, [2, 1])
            * floating(tf.tile(tf.range(count(x)), [2]))[:, tf.newaxis],
            [2, -1, 4],
        )[0]
    ),
    "rows by a rounded number": lambda x, h: ends(
        by_number(h, lambda i: h[tf.cast(tf.cast(i, tf.uint8), tf.int32)])
    ),
    "rows by a rounded range": lambda x, h: ends(
        tf.gather(h, tf.cast(tf.cast(tf.range(count(x)), tf.uint8), tf.int32))
    ),
    "a counter": lambda x, h: ends(of_each(h, lambda i, r: r * floating(i))),
    "a branch of a counter": lambda x, h: ends(
        of_each(h, lambda i, r: tf.cond(i < 2, lambda: r, lambda: 2 * r))
    ),
}

TABLE = tf.constant(np.arange(16).reshape(4, 4) / 8 - 1, tf.float32)
FOURTH = tf.constant([[0], [1], [2], [3]])


def numbers(x):
    return tf.range(count(x)) % 4


def solved(x):
    """A matrix for each example, of draws."""
    drawn = tf.repeat(tf.random.uniform([count(x), 1]), 4, axis=1)
    return tf.stack([drawn + place for place in range(4)], 1) + 9 * tf.eye(4)


def images(h):
    return tf.reshape(h, [-1, 2, 2, 1])


def entries_at(h, columns):
    return tf.square(tf.gather_nd(h, tf.stack([tf.range(count(h)), columns], 1)))


def pooled_places(h, whole=True):
    """`[B, 1]`, the place of the largest entry, counted in the batch or in the row."""
    options = {"ksize": 2, "strides": 2, "padding": "VALID"}
    _, found = tf.nn.max_pool_with_argmax(
        images(h), include_batch_in_index=whole, **options
    )
    return found[:, 0, 0]


#: By a public tensor that has a row for each place in the batch.
BY_ROWS_OF_CONSTANTS = {
    "a gathered entry": lambda x, h: ends(tf.gather(h, FOURTH, axis=1, batch_dims=1)),
    "a gathered entry of each step": lambda x, h: ends(
        tf.transpose(
            tf.gather(
                tf.tile(tf.transpose(h)[..., tf.newaxis], [1, 1, 2]),
                tf.tile(numbers(x)[tf.newaxis, :, tf.newaxis] % 2, [4, 1, 1])
                * tf.constant([[[1]]] * 3 + [[[0]]]),
                axis=2,
                batch_dims=2,
            )[..., 0]
            * tf.gather(TABLE, numbers(x)[tf.newaxis], axis=1, batch_dims=0)[:, 0]
        )
    ),
    "a gathered entry of a table": lambda x, h: ends(
        h * tf.gather(TABLE, tf.argmax(x, 1)[:, tf.newaxis], axis=1, batch_dims=1)
    ),
    "bits of a constant": lambda x, h: ends(
        h * floating(tf.bitcast(TABLE[:, 0], tf.uint8))
    ),
    "a constant for copies of the batch": lambda x, h: ends(
        of_copies(h, lambda c: tf.tanh(c * tf.tile(TABLE, [3, 1])))
    ),
    "a gathered entry by a range": lambda x, h: ends(
        tf.gather(h, numbers(x)[:, tf.newaxis], axis=1, batch_dims=1)
    ),
    "a gathered entry in a loop": lambda x, h: ends(
        tf.ensure_shape(
            tf.while_loop(
                lambda i, _: i < 2,
                lambda i, t: (
                    i + 1,
                    t + tf.gather(h, (FOURTH + i) % 4, axis=1, batch_dims=1),
                ),
                [0, tf.zeros_like(h)],
            )[1],
            h.shape,
        )
    ),
    "an entry by number": lambda x, h: entries_at(h, numbers(x)),
    "an entry by a constant": lambda x, h: entries_at(h, FOURTH[:, 0]),
    "an entry by a place in the data": lambda x, h: entries_at(
        h, (tf.argmax(h, 1, output_type=tf.int32) + numbers(x)) % 4
    ),
    "hot labels by a range": lambda x, h: tf.nn.softmax_cross_entropy_with_logits(
        tf.one_hot(numbers(x), 4), h
    ),
    "labels": lambda x, h: tf.nn.sparse_softmax_cross_entropy_with_logits(
        numbers(x), h
    ),
    "hot labels": lambda x, h: tf.nn.softmax_cross_entropy_with_logits(tf.eye(4), h),
    "targets": lambda x, h: ends(h) * floating(tf.math.in_top_k(FOURTH[:, 0], h, 2)),
    "a solver": lambda x, h: ends(
        tf.linalg.solve(
            tf.eye(2) + tf.reshape(TABLE, [4, 2, 2]), tf.reshape(h, [-1, 2, 2])
        )[:, 0]
    ),
    "a cross product": lambda x, h: ends(tf.linalg.cross(h[:, :3], TABLE[:, :3])),
    "sorted lists": lambda x, h: ends(h * floating(tf.searchsorted(TABLE, h))),
    "a further column": lambda x, h: tf.reduce_prod(tf.concat([h, TABLE], 1), 1),
    "a stacked column": lambda x, h: tf.reduce_prod(
        tf.stack([h[:, 0], TABLE[:, 1]], 1), 1
    ),
    "a stacked range": lambda x, h: tf.reduce_prod(
        tf.stack([h[:, 0], floating(numbers(x))], 1), 1
    ),
    "a diagonal that is set": lambda x, h: tf.reduce_sum(
        tf.reduce_prod(tf.linalg.set_diag(tf.tile(h[:, :, None], [1, 1, 4]), TABLE), 1),
        1,
    ),
    "moved images": lambda x, h: ends(
        tf.reshape(
            tf.raw_ops.ImageProjectiveTransformV3(
                images=images(h),
                transforms=tf.concat([TABLE, tf.zeros([4, 4])], 1),
                output_shape=[2, 2],
                fill_value=0.0,
                interpolation="BILINEAR",
            ),
            [-1, 4],
        )
    ),
    "solved rows of a constant": lambda x, h: ends(
        h * tf.linalg.solve(tf.eye(4) + TABLE[..., None], TABLE[..., None])[..., 0]
    ),
    "stacked rows of a constant": lambda x, h: ends(
        h * tf.reduce_sum(tf.stack([TABLE, tf.ones([4, 4])], 1), 1)
    ),
    "repeated rows of a constant": lambda x, h: ends(
        h * tf.repeat(TABLE[:, :2], 2, axis=1)
    ),
    "draws of a constant seed": lambda x, h: ends(
        h * tf.random.stateless_uniform(tf.shape(h), [1, 2])
    ),
    "classes by a constant seed": lambda x, h: ends(
        h * floating(tf.random.stateless_categorical(h, 4, [1, 2]))
    ),
    "places of a pooling in the batch": lambda x, h: ends(
        h[:, :1] * tf.gather(P, pooled_places(h) % 7)
    ),
    "examples as channels": lambda x, h: ends(
        tf.transpose(
            tf.compat.v1.nn.fused_batch_norm(
                tf.transpose(h)[:, None, None],
                *(tf.abs(W[i]) for i in range(4)),
                is_training=False,
            )[0][:, 0, 0]
        )
    ),
}


def rows_of(x):
    return tf.range(count(x))


def largest(h):
    return tf.argmax(h, 1, output_type=tf.int32)


def scattered(rows, h, columns=None, like=None):
    """Each example's first entry at `[rows[i], columns[i]]`, the rest zero."""
    columns = largest(h) if columns is None else columns
    shape = tf.shape(h) if like is None else like
    return tf.scatter_nd(tf.stack([rows, columns], 1), h[:, 0], shape)


def pairs_of(rows, columns):
    """`[B, T, 2]`, of rows `[B]` and columns `[B, T]`."""
    times = [1, columns.shape[1]]
    return tf.stack([tf.tile(rows[:, tf.newaxis], times), columns], -1)


def by_segment(h, ids, number=None, sums=tf.math.unsorted_segment_sum):
    """`[B, 1]`: the sums of the entries of all examples by segment numbers `[4 B]`."""
    number = count(h) if number is None else number
    listed = tf.reshape(h, [-1])
    found = sums(listed, ids, number) if "uns" in sums.__name__ else sums(listed, ids)
    return found[:, tf.newaxis]


#: Writes and sums by row numbers that are not the rows' own.
BY_ROWS_OF_OTHERS = {
    "shuffled": lambda x, h: ends(scattered(tf.random.shuffle(rows_of(x)), h)),
    "reversed": lambda x, h: ends(scattered(count(x) - 1 - rows_of(x), h)),
    "reversed by an op": lambda x, h: ends(scattered(tf.reverse(rows_of(x), [0]), h)),
    "the next": lambda x, h: ends(scattered((rows_of(x) + 1) % count(x), h)),
    "the one before": lambda x, h: ends(scattered(tf.maximum(rows_of(x) - 1, 0), h)),
    "the first": lambda x, h: ends(scattered(rows_of(x) * 0, h)),
    "the first, filled": lambda x, h: ends(scattered(tf.fill([count(x)], 0), h)),
    "the first, broadcast": lambda x, h: ends(
        scattered(tf.broadcast_to(tf.range(1), [count(x)]), h)
    ),
    "the first, added": lambda x, h: ends(
        scattered(tf.range(1) + tf.zeros([count(x)], tf.int32), h)
    ),
    "of two": lambda x, h: ends(scattered(rows_of(x) % 2, h)),
    "by the data": lambda x, h: ends(scattered(largest(x) % count(x), h)),
    "from 1": lambda x, h: ends(
        scattered(tf.range(1, count(x) + 1), h, like=[count(x) + 1, 4])[1:]
    ),
    "every other": lambda x, h: ends(
        tf.reshape(
            scattered(tf.range(0, 2 * count(x), 2), h, like=[2 * count(x), 4]), [-1, 8]
        )
    ),
    "rounded": lambda x, h: ends(
        scattered(tf.cast(tf.cast(rows_of(x), tf.bfloat16), tf.int32), h)
    ),
    "half of the batch": lambda x, h: ends(
        scattered(tf.range(count(x) // 2), h[: count(x) // 2], like=tf.shape(h)) + h
    ),
    "more rows than examples": lambda x, h: ends(
        scattered(rows_of(x), h, like=[count(x) + 1, 4])[1:]
    ),
    "twice as many rows": lambda x, h: ends(
        tf.reshape(scattered(rows_of(x), h, like=[2 * count(x), 4]), [-1, 8])
    ),
    "a known number of rows": lambda x, h: ends(
        scattered(rows_of(x), h, like=[8, 4])[4:]
    ),
    "rows of columns": lambda x, h: tf.reduce_sum(
        tf.scatter_nd(tf.stack([largest(h), rows_of(x)], 1), h[:, 0], [4, count(x)])
        * tf.transpose(h),
        0,
    ),
    "columns by number": lambda x, h: ends(
        h * scattered(rows_of(x), h, rows_of(x) % 4)
    ),
    "columns by a constant": lambda x, h: ends(
        h * scattered(rows_of(x), h, FOURTH[:, 0])
    ),
    "updates by number": lambda x, h: ends(
        tf.tensor_scatter_nd_update(
            h, tf.stack([rows_of(x), largest(h)], 1), floating(numbers(x))
        )
    ),
    "updates by a constant": lambda x, h: ends(
        tf.tensor_scatter_nd_add(h, tf.stack([rows_of(x), largest(h)], 1), TABLE[:, 0])
    ),
    "a constant that is changed": lambda x, h: ends(
        h
        * tf.tensor_scatter_nd_add(
            TABLE, tf.stack([rows_of(x), largest(h)], 1), h[:, 0]
        )
    ),
    "numbers that are changed": lambda x, h: ends(
        h
        * tf.tensor_scatter_nd_add(
            tf.tile(floating(rows_of(x))[:, tf.newaxis], [1, 4]),
            tf.stack([rows_of(x), largest(h)], 1),
            h[:, 0],
        )
    ),
    "indices that are cast and read": lambda x, h: entries_at(
        h * floating(tf.stack([rows_of(x), largest(h)], 1))[:, :1], largest(h)
    ),
    "indices that are read": lambda x, h: ends(
        h
        * tf.reduce_sum(
            floating(tf.stack([rows_of(x), largest(h)], 1)), 1, keepdims=True
        )
    ),
    "updates of others": lambda x, h: ends(
        tf.scatter_nd(
            tf.stack([rows_of(x), largest(h)], 1),
            tf.reverse(h[:, 0], [0]),
            tf.shape(h),
        )
    ),
    "columns of others": lambda x, h: ends(
        h * scattered(rows_of(x), h, tf.reverse(largest(h), [0]))
    ),
    "entries of the next": lambda x, h: ends(
        tf.gather_nd(h, pairs_of((rows_of(x) + 1) % count(x), tf.argsort(h)))
    ),
    "entries by number": lambda x, h: ends(
        tf.gather_nd(h, pairs_of(rows_of(x), tf.tile(numbers(x)[:, None], [1, 2])))
    ),
    "segments of two": lambda x, h: ends(by_segment(h, tf.repeat(rows_of(x) // 2, 4))),
    "segments of the data": lambda x, h: ends(by_segment(h, tf.repeat(largest(h), 4))),
    "segments in turn": lambda x, h: ends(by_segment(h, tf.tile(rows_of(x), [4]))),
    "segments from the end": lambda x, h: ends(
        by_segment(h, tf.repeat(count(x) - 1 - rows_of(x), 4))
    ),
    "segments of other lists": lambda x, h: ends(
        by_segment(tf.transpose(h), tf.repeat(rows_of(x), 4), count(x))
    ),
    "segments of halves of a list": lambda x, h: ends(
        by_segment(h, tf.repeat(tf.range(2 * count(x)), 2), 2 * count(x))[: count(x)]
    ),
    "more segments than examples": lambda x, h: ends(
        by_segment(h, tf.repeat(rows_of(x), 4), count(x) + 1)[1:]
    ),
    "fewer segments than examples": lambda x, h: ends(
        tf.repeat(by_segment(h, tf.repeat(rows_of(x), 4), count(x) // 2), 2, axis=0)
    ),
    "one segment": lambda x, h: ends(h * by_segment(h, tf.repeat(rows_of(x) * 0, 4))),
    "segments of unequal lengths": lambda x, h: ends(
        by_segment(
            h,
            tf.repeat(
                rows_of(x),
                tf.concat([4 + 0 * rows_of(x)[1:] + 1, [5 - count(x)]], 0),
            ),
        )
    ),
}

#: For a batch of four.
BY_DIAGONALS = {
    "a diagonal by letters": lambda x, h: tf.square(tf.einsum("bb->b", h)),
    "a diagonal by letters beside others": lambda x, h: ends(
        tf.einsum("bbk->bk", h[:, :, None] * P[:2])
    ),
}


def listed(h, where=None):
    """A mask `[B, 4]`, its places, and what it keeps."""
    mask = h > 0.1 if where is None else where
    return mask, tf.where(mask), tf.boolean_mask(h, mask)


def to_rows(h, places, values, number=None, rows=None):
    """`[B, 1]`: the sums of listed values by row."""
    rows = places[:, 0] if rows is None else rows
    number = count(h) if number is None else number
    return tf.math.unsorted_segment_sum(values, rows, number)[:, tf.newaxis]


def scattered_back(h, values, mask=None, like=None):
    places = tf.where(h > 0.1 if mask is None else mask)
    shape = tf.shape(h, tf.int64) if like is None else tf.cast(like, tf.int64)
    return tf.scatter_nd(places, values, shape)


def of_list(function):
    """A loss of `function(h, mask, places, values)`."""
    return lambda x, h: ends(function(h, *listed(h)))


def token_losses(h, labels, ignored=0):
    """`[B, 2]`, as Keras's SparseCategoricalCrossentropy with a class to ignore."""
    mask = tf.not_equal(labels, ignored)
    found = tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels[mask], tf.reshape(h, [-1, 2, 2])[mask]
    )
    return tf.scatter_nd(tf.where(mask), found, tf.cast(tf.shape(mask), tf.int64))


def rows_by_list(h, rows):
    changed = tf.square(tf.gather(h, rows)) * P[0]
    return tf.tensor_scatter_nd_update(h, rows[:, tf.newaxis], changed)


def rows_of_mask(h, mask):
    found = tf.tanh(tf.boolean_mask(h, mask) @ W)
    return tf.scatter_nd(tf.where(mask), found, tf.shape(h, tf.int64))


#: Lists of the entries that a mask keeps, and uses that combine examples.
BY_LISTS_OF_OTHERS = {
    "a total": of_list(lambda h, m, p, v: scattered_back(h, v / tf.reduce_sum(v), m)),
    "a count": of_list(
        lambda h, m, p, v: scattered_back(h, v / floating(tf.size(v)), m)
    ),
    "a count of places": of_list(lambda h, m, p, v: h * floating(tf.shape(p)[0])),
    "the first entry": of_list(lambda h, m, p, v: scattered_back(h, v * v[0], m)),
    "reversed": of_list(lambda h, m, p, v: scattered_back(h, tf.reverse(v, [0]), m)),
    "rolled": of_list(lambda h, m, p, v: to_rows(h, p, tf.roll(v, 1, 0))),
    "summed up": of_list(lambda h, m, p, v: to_rows(h, p, tf.cumsum(v))),
    "softmax over the list": of_list(
        lambda h, m, p, v: to_rows(h, p, tf.nn.softmax(v))
    ),
    "places in the list": of_list(
        lambda h, m, p, v: to_rows(h, p, v * floating(tf.range(tf.size(v))))
    ),
    "rows for numbers": of_list(
        lambda h, m, p, v: to_rows(h, p, v * floating(p[:, 0]))
    ),
    "reversed rows": of_list(
        lambda h, m, p, v: to_rows(h, p, v, rows=tf.reverse(p[:, 0], [0]))
    ),
    "other rows": of_list(
        lambda h, m, p, v: to_rows(
            h, p, v, rows=(p[:, 0] + 1) % tf.shape(h, tf.int64)[0]
        )
    ),
    "columns before rows": of_list(
        lambda h, m, p, v: tf.scatter_nd(
            tf.stack([p[:, 1], p[:, 0]], 1), v, tf.shape(h, tf.int64)
        )
    ),
    "rows by numbers of entries": lambda x, h: ends(
        rows_by_list(h, tf.where(tf.reshape(h, [-1])[::4] > 0)[:, 0])
    ),
    "rows by places of entries": lambda x, h: ends(
        rows_by_list(h, tf.where(tf.reshape(h, [-1]) > 0)[:, 0] // 4)
    ),
    "columns for rows": of_list(lambda h, m, p, v: to_rows(h, p, v, rows=p[:, 1])),
    "one row": of_list(lambda h, m, p, v: to_rows(h, p, v, rows=p[:, 0] * 0)),
    "more rows": of_list(lambda h, m, p, v: to_rows(h, p, v, count(h) + 1)[1:]),
    "twice as many rows": of_list(
        lambda h, m, p, v: tf.reshape(to_rows(h, p, v, 2 * count(h)), [-1, 2])
    ),
    "sorted sums": of_list(
        lambda h, m, p, v: tf.math.segment_sum(v, p[:, 0])[:, tf.newaxis]
    ),
    "another mask of values": of_list(
        lambda h, m, p, v: scattered_back(h, tf.boolean_mask(h, h > 0.2), m)
    ),
    "another mask of places": of_list(lambda h, m, p, v: scattered_back(h, v, h > 0.2)),
    "the transposed mask": of_list(
        lambda h, m, p, v: scattered_back(
            h, tf.boolean_mask(tf.transpose(h), tf.transpose(m)), m
        )
    ),
    "a mask in time": of_list(
        lambda h, m, p, v: scattered_back(
            h, tf.boolean_mask(h, tf.transpose(tf.transpose(h) > 0.1)), m
        )
    ),
    "the transposed values": lambda x, h: ends(
        tf.scatter_nd(
            tf.where(tf.reshape(h, [-1]) > 0.1),
            tf.boolean_mask(
                tf.reshape(tf.transpose(h), [-1]), tf.reshape(h, [-1]) > 0.1
            ),
            tf.shape(tf.reshape(h, [-1]), tf.int64),
        )[:, tf.newaxis]
    ),
    "values of half of the batch": lambda x, h: ends(
        tf.gather(tf.reshape(h, [-1]), tf.where(h[:, 0] > 0)[:, 0])[:, tf.newaxis]
    ),
    "entries of other rows": of_list(
        lambda h, m, p, v: to_rows(h, p, tf.gather(tf.reverse(h, [0]), p[:, 0])[:, 0])
    ),
    "entries of a constant": of_list(
        lambda h, m, p, v: to_rows(h, p, v * tf.gather_nd(TABLE, p % 4))
    ),
    "a dense shape": of_list(
        lambda h, m, p, v: tf.reshape(
            tf.sparse.to_dense(
                tf.SparseTensor(p, v, tf.cast([2 * count(h), 4], tf.int64))
            ),
            [count(h), 8],
        )
    ),
    "what is kept": lambda x, h: tf.square(tf.boolean_mask(h[:, 0], h[:, 0] > 0.1)),
    "rows that are kept": lambda x, h: ends(tf.boolean_mask(h, h[:, 0] > 0.1)),
    "a mean of what is kept": lambda x, h: tf.reduce_mean(tf.boolean_mask(h, h > 0.1)),
}

BY_SIZE.update(
    {
        "columns of a scatter": lambda x, h: ends(
            h * scattered(rows_of(x), h, tf.fill([count(x)], count(x) % 4))
        ),
        "updates of a scatter": lambda x, h: ends(
            tf.tensor_scatter_nd_add(
                h,
                tf.stack([rows_of(x), largest(h)], 1),
                tf.fill([count(x)], floating(count(x))),
            )
        ),
        "a width of a scatter": lambda x, h: tf.reduce_mean(
            scattered(rows_of(x), h, like=[count(x), count(x) + 4]), 1
        ),
    }
)

#: Losses that depend on other examples of the batch.
BY_OTHERS = {
    "the example before": lambda x, h: ends(
        of_each(h, lambda i, r: r - h[tf.maximum(i - 1, 0)])
    ),
    "a total": lambda x, h: ends(h * tf.reduce_sum(h)),
    "the batch in each step": lambda x, h: ends(
        tf.map_fn(lambda r: r + tf.reduce_mean(h, 0), h)
    ),
    "each in all": lambda x, h: ends(
        tf.foldl(lambda total, r: total + h * r, h, tf.zeros_like(h))
    ),
    "rows by the step of a loop": lambda x, h: ends(gathered_in_steps(h, 0)),
    "rows from the end by the step of a loop": lambda x, h: ends(
        gathered_in_steps(h, -2)
    ),
    "the example before in a list": lambda x, h: ends(
        by_number(h, lambda i: h[i] - h[tf.maximum(i - 1, 0)])
    ),
    "the first example by a list of numbers": lambda x, h: ends(
        by_number(h, lambda i: h[i] + h[0])
    ),
    "examples by a list of numbers from the end": lambda x, h: ends(
        tf.ensure_shape(
            tf.map_fn(
                lambda i: h[i],
                tf.reverse(tf.range(count(x)), [0]),
                fn_output_signature=tf.float32,
            ),
            h.shape,
        )
    ),
    "copies that are read as one example": lambda x, h: ends(
        tf.reshape(tf.tanh(tf.reshape(tf.tile(h, [2, 1]), [-1, 8])), [-1, 4])[
            : count(x)
        ]
    ),
    "copies of the batch for copies of examples": lambda x, h: ends(
        tf.reduce_sum(
            tf.reshape(tf.tile(h, [2, 1]) * tf.repeat(h, 2, axis=0), [2, -1, 4]), 0
        )
    ),
    "steps that are read across the examples": lambda x, h: ends(
        tf.reduce_prod(
            tf.reshape(
                tf.transpose(tf.reshape(h, [-1, 2, 2]), [1, 0, 2]), [count(x), 2, 2]
            ),
            1,
        )
    ),
    "bits of the examples behind": lambda x, h: ends(
        h
        * floating(
            tf.bitcast(tf.bitcast(tf.transpose(h), tf.uint8)[..., 0, :], tf.float32)
        )[0]
    ),
    "the next one": lambda x, h: ends(tf.gather(h, tf.range(count(x)) - 1 % 2)),
    "some of them": lambda x, h: ends(tf.gather(h, tf.maximum(tf.range(count(x)), 1))),
    "a gradient of all": lambda x, h: ends(
        of_dy(lambda dy, _: tf.clip_by_norm(dy, 0.1))(h)
    ),
    "a gradient the other way round": lambda x, h: ends(
        of_dy(lambda dy, _: tf.reverse(dy, [0]))(h)
    ),
    "a gradient by a statistic": lambda x, h: ends(
        of_dy(lambda dy, h: dy / (1 + tf.reduce_max(h)))(h)
    ),
    "bits": lambda x, h: ends(
        h
        * tf.reduce_sum(floating(tf.bitcast(h[:, 0], tf.uint8)), 0, keepdims=True)[
            :, :1
        ]
    ),
}

#: Reads, writes and sums by the rows' own numbers, and of what a mask keeps.
BY_OWN_ROWS = {
    "entries at an own place": lambda x, h: ends(h + scattered(rows_of(x), h)),
    "entries of a mask, scattered": of_list(
        lambda h, m, p, v: h + scattered_back(h, tf.tanh(v) * P[0], m)
    ),
    "entries of a mask, added to others": of_list(
        lambda h, m, p, v: tf.tensor_scatter_nd_add(h, p, v * v)
    ),
    "entries of a mask, summed": of_list(lambda h, m, p, v: to_rows(h, p, tf.exp(v))),
    "entries at the places of a mask, summed": of_list(
        lambda h, m, p, v: to_rows(h, p, tf.gather_nd(h, p) * v)
    ),
    "rows of a list of numbers": lambda x, h: ends(
        rows_by_list(h, tf.where(x[:, 0] > 0)[:, 0])
    ),
    "stacked places of a list": of_list(
        lambda h, m, p, v: tf.scatter_nd(
            tf.stack([p[:, 0], 3 - p[:, 1]], 1), v, tf.shape(h, tf.int64)
        )
    ),
    "softmax of each row's entries": of_list(
        lambda h, m, p, v: scattered_back(
            h,
            tf.exp(v) / tf.gather(to_rows(h, p, tf.exp(v)), p[:, 0])[:, 0],
            m,
        )
    ),
    "losses of the tokens that a mask keeps": lambda x, h: tf.reduce_sum(
        token_losses(h, tf.argmax(tf.reshape(x, [-1, 2, 2]), -1)), 1
    ),
    "a sparse tensor of a mask": of_list(
        lambda h, m, p, v: tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(h), W)
    ),
    "rows of a mask": lambda x, h: ends(rows_of_mask(h, x[:, 0] > 0)),
    "rows at their own places": lambda x, h: ends(
        tf.scatter_nd(rows_of(x)[:, tf.newaxis], h, tf.shape(h))
    ),
    "rows at their own places, in other words": lambda x, h: ends(
        tf.scatter_nd(
            tf.reshape(tf.cast(rows_of(x), tf.int64), [-1, 1]),
            h,
            tf.stack([tf.cast(count(x), tf.int64), 4]),
        )
    ),
    "an own entry is replaced": lambda x, h: ends(
        tf.tensor_scatter_nd_update(
            h, tf.stack([rows_of(x), largest(h)], 1), h[:, 1] * P[0]
        )
    ),
    "an own entry is added to": lambda x, h: ends(
        tf.tensor_scatter_nd_add(
            tf.zeros_like(h), tf.stack([rows_of(x), largest(h)], 1), h[:, 0]
        )
    ),
    "an own entry is bounded": lambda x, h: ends(
        tf.tensor_scatter_nd_max(
            h, tf.stack([rows_of(x), largest(x)], 1), tf.fill([count(x)], P[0])
        )
    ),
    "two own entries are lessened": lambda x, h: ends(
        tf.tensor_scatter_nd_sub(
            h,
            pairs_of(rows_of(x), tf.math.top_k(h, 2).indices),
            tf.math.top_k(x, 2).values,
        )
    ),
    "joined columns": lambda x, h: ends(
        tf.scatter_nd(
            tf.concat([rows_of(x)[:, None], largest(h)[:, None]], 1),
            h[:, :1][:, 0],
            tf.shape(h),
        )
    ),
    "joined columns, cast": lambda x, h: ends(
        tf.tensor_scatter_nd_add(
            h,
            tf.cast(tf.concat([rows_of(x)[:, None], largest(h)[:, None]], 1), tf.int64),
            h[:, 1],
        )
    ),
    "a mesh of places": lambda x, h: ends(
        tf.scatter_nd(
            tf.stack(tf.meshgrid(rows_of(x), tf.range(4), indexing="ij"), -1),
            h,
            tf.shape(h),
        )
    ),
    "numbers that are broadcast": lambda x, h: ends(
        tf.gather_nd(
            h,
            tf.stack(
                [
                    tf.broadcast_to(rows_of(x)[:, tf.newaxis], tf.shape(h)),
                    tf.argsort(x),
                ],
                -1,
            ),
        )
    ),
    "several entries by number": lambda x, h: ends(
        tf.gather_nd(h, pairs_of(rows_of(x), tf.argsort(h)))
    ),
    "a hot entry": lambda x, h: ends(
        h
        * tf.scatter_nd(
            tf.stack([rows_of(x), largest(h)], 1), tf.ones([count(x)]), tf.shape(h)
        )
    ),
    "own sums of a list": lambda x, h: ends(by_segment(h, tf.repeat(rows_of(x), 4))),
    "own sorted sums of a list": lambda x, h: ends(
        by_segment(h, tf.repeat(rows_of(x), 4), sums=tf.math.segment_mean)
    ),
    "own sums of each row": lambda x, h: ends(
        tf.math.unsorted_segment_sum(h, tf.tile(rows_of(x)[:, None], [1, 4]), count(x))[
            :, None
        ]
    ),
}

SOUND = {
    **BY_OWN_ROWS,
    "rows by a list of numbers": lambda x, h: ends(
        by_number(h, lambda i: tf.tanh(h[i] * P[:4]))
    ),
    "rows by a list of numbers, gathered": lambda x, h: ends(
        by_number(h, lambda i: tf.gather(h, i) * P[:4] + tf.reduce_sum(x[i]))
    ),
    "a dense layer where the examples are in the middle": lambda x, h: ends(
        tf.transpose(
            tf.tensordot(
                tf.transpose(tf.reshape(h, [-1, 2, 2]), [1, 0, 2])[:, :, tf.newaxis],
                W[:2],
                1,
            ),
            [1, 0, 2, 3],
        )
    ),
    "a dense layer of time and features": lambda x, h: ends(
        tf.transpose(
            tf.reshape(
                tf.reshape(
                    tf.transpose(tf.reshape(h, [-1, 2, 2, 1]), [1, 0, 2, 3]), [-1, 1]
                )
                @ P[tf.newaxis, :3],
                [2, -1, 2, 3],
            ),
            [1, 0, 2, 3],
        )
    ),
    "time of a length that the shape leaves out": lambda x, h: ends(
        tf.transpose(
            tf.reshape(
                tf.transpose(tf.reshape(h, [-1, 2, 2]), [1, 0, 2]), [-1, count(x), 2]
            ),
            [1, 0, 2],
        )
    ),
    "copies of the batch": lambda x, h: ends(
        of_copies(h, lambda c: tf.tanh(c * P[:4]))
    ),
    "copies of the batch, split": lambda x, h: ends(
        tf.split(tf.tile(h, [2, 1]), 2)[1] * h
    ),
    "bits": lambda x, h: ends(h * tf.reduce_sum(floating(tf.bitcast(h, tf.uint8)), -1)),
    "numbers of bits": lambda x, h: ends(
        h
        * floating(
            tf.bitcast(tf.cast(tf.reshape(h, [-1, 2, 2]), tf.float16), tf.int32)
        )[:, :1]
    ),
    "entries of each step by the data": lambda x, h: ends(
        tf.transpose(
            tf.gather(
                tf.transpose(tf.reshape(h, [-1, 2, 2]), [1, 0, 2]),
                tf.argsort(tf.transpose(tf.reshape(h, [-1, 2, 2]), [1, 0, 2])),
                batch_dims=2,
            ),
            [1, 0, 2],
        )
    ),
    "the same table for each example": lambda x, h: ends(
        tf.gather(
            tf.tile(P[tf.newaxis, :4], [count(x), 1]), tf.argsort(h), batch_dims=1
        )
        * h
    ),
    "sums in a vectorized map": lambda x, h: ends(
        tf.reshape(
            tf.vectorized_map(
                lambda r: r - tf.reduce_sum(r), tf.reshape(h, [-1, 2, 2])
            ),
            [-1, 4],
        )
    ),
    "a gathered entry by the data": lambda x, h: ends(
        tf.gather(h, tf.cast(h > 0, tf.int32), axis=1, batch_dims=1)
    ),
    "entries of the same number": lambda x, h: ends(
        tf.gather(h, tf.fill([count(x), 1], 2), axis=1, batch_dims=1)
    ),
    "labels of the data": lambda x, h: tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.argmax(x, 1), h
    ),
    "the same label": lambda x, h: tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.zeros([count(x)], tf.int32), h
    ),
    "the same hot label": lambda x, h: tf.nn.softmax_cross_entropy_with_logits(
        tf.one_hot(tf.zeros([count(x)], tf.int32), 4), h
    ),
    "one distribution": lambda x, h: tf.nn.softmax_cross_entropy_with_logits(
        tf.tile(tf.nn.softmax(P[tf.newaxis, :4]), [count(x), 1]), h
    ),
    "one sorted list": lambda x, h: ends(
        h
        * floating(tf.reshape(tf.searchsorted(TABLE[0], tf.reshape(h, [-1])), [-1, 4]))
    ),
    "a column of ones": lambda x, h: ends(tf.concat([h, tf.ones([count(x), 1])], 1)),
    "a column of a variable": lambda x, h: ends(
        tf.concat([h, tf.repeat(P[tf.newaxis, :2], count(x), axis=0)], 1)
    ),
    "draws of a seed that changes": lambda x, h: ends(
        h * tf.random.stateless_uniform(tf.shape(h), tf.cast(P[:2], tf.int32))
    ),
    "a network": lambda x, h: ends(h),
    "a mean": lambda x, h: tf.reduce_mean(ends(h)),
    "a sum by the size": lambda x, h: tf.reduce_sum(ends(h)) / floating(count(x)),
    "zeros for the batch": lambda x, h: ends(h + tf.zeros([count(x), 4])),
    "a filled state": lambda x, h: ends(h + tf.fill([count(x), 4], P[0])),
    "a repeated variable": lambda x, h: ends(
        h + tf.tile(P[tf.newaxis, :4], [count(x), 1])
    ),
    "dropout": lambda x, h: ends(tf.nn.dropout(h, 0.5)),
    "a map": lambda x, h: ends(tf.map_fn(lambda r: tf.tanh(r * P[0]), h)),
    "a vectorized map": lambda x, h: ends(
        tf.vectorized_map(lambda r: tf.tanh(r * P[0]), h)
    ),
    "a loop over the rows": lambda x, h: ends(
        of_each(h, lambda i, r: tf.sin(r) * P[1])
    ),
    "columns by the step of a loop": lambda x, h: ends(gathered_in_steps(h, 1)),
    "the last axis by the step of a loop": lambda x, h: ends(gathered_in_steps(h, -1)),
    "a mask that is repeated": lambda x, h: ends(
        tf.where(
            tf.tile(tf.linalg.band_part(tf.ones([1, 2, 2]), -1, 0), [count(x), 1, 1])[
                :, tf.newaxis
            ]
            > 0,
            tf.reshape(h, [-1, 1, 2, 2]),
            0.0,
        )
    ),
    "positions that are looked up": lambda x, h: ends(
        h + tf.gather(P, tf.tile(tf.range(4)[tf.newaxis], [count(x), 1]))
    ),
    "draws with further axes": lambda x, h: ends(
        tf.where(
            tf.random.uniform([count(x)])[:, tf.newaxis, tf.newaxis] < 0.5,
            tf.reshape(h, [-1, 2, 2]),
            0.0,
        )
    ),
    "a column of draws": lambda x, h: ends(
        h
        * tf.concat(
            [tf.random.uniform([count(x), 1]), tf.random.normal([count(x), 1])], 1
        )[..., 1:]
    ),
    "draws side by side": lambda x, h: ends(
        h
        * tf.concat(
            [tf.random.uniform([count(x), 1]), tf.random.normal([count(x), 3])], 1
        )
    ),
    "draws that are stacked, repeated and solved": lambda x, h: ends(
        h * tf.linalg.solve(solved(x), tf.ones([count(x), 4, 1]))[..., 0]
    ),
    "a loop of three steps": lambda x, h: ends(repeatedly(h, 3)),
    "entries by number": lambda x, h: tf.square(
        tf.gather_nd(
            h,
            tf.stack([tf.range(count(x)), tf.argmax(h, 1, output_type=tf.int32)], 1),
        )
    ),
    "a gradient by example": lambda x, h: ends(
        of_dy(lambda dy, h: dy / (1 + tf.norm(dy, axis=-1, keepdims=True)))(h)
    ),
    "two rows of features": lambda x, h: ends(
        tf.reshape(tf.tanh(tf.reshape(h, [-1, 2]) @ W[:2]), [count(x), 8])
    ),
    "time first": lambda x, h: ends(
        tf.transpose(
            tf.tanh(tf.transpose(tf.reshape(h, [-1, 2, 2]), [1, 0, 2])), [1, 0, 2]
        )
    ),
}


@pytest.mark.parametrize("name", BY_SIZE)
def test_the_number_of_examples_is_no_part_of_a_proof(name):
    assert judged(BY_SIZE[name], NONE) != "proven"


BY_MORE_THAN_THE_ROW = {
    f"{kind}: {name}": losses
    for kind, table in {
        "place": BY_PLACE,
        "constant": BY_ROWS_OF_CONSTANTS,
        "examples": BY_OTHERS,
        "list": BY_LISTS_OF_OTHERS,
        "row": BY_ROWS_OF_OTHERS,
    }.items()
    for name, losses in table.items()
}


@pytest.mark.parametrize("rows", [NONE, FOUR])
@pytest.mark.parametrize("name", BY_MORE_THAN_THE_ROW)
def test_nor_is_more_than_the_row_itself(name, rows):
    """Places in the batch, rows of public tensors, further rows and lists of them."""
    assert judged(BY_MORE_THAN_THE_ROW[name], rows) != "proven"


@pytest.mark.parametrize("name", BY_DIAGONALS)
def test_nor_are_diagonals_over_the_examples(name):
    assert judged(BY_DIAGONALS[name], FOUR) != "proven"


#: Lists of entries that the rules of `sparse.py` do not follow, and sums by number.
REFUSED = frozenset(
    [
        "own sums of a list",
        "own sums of each row",
        "entries of a mask, summed",
        "entries at the places of a mask, summed",
        "rows of a list of numbers",
        "softmax of each row's entries",
    ]
)


@pytest.mark.parametrize("name", BY_OWN_ROWS)
def test_gradients_by_own_rows_and_of_lists_are_those_of_each_example(name):
    """In each batch the masks keep other numbers of entries of each example."""

    def losses(x):
        return BY_OWN_ROWS[name](x, tf.tanh(tf.tensordot(x, W, 1)))

    @tf.function(input_signature=[tf.TensorSpec([None, 4])], autograph=False)
    def norms(x):
        return per_example_norms(losses(x), [W])

    for batch in range(3):
        x = np.random.default_rng(batch).normal(size=(4, 4)).astype("float32")
        if name in REFUSED:
            with pytest.raises(ExampleIsolationError, match="combines the examples"):
                norms(x)
            return
        found = norms(x).numpy()
        for i in range(4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(losses(tf.constant(x[i : i + 1])))
            norm = tf.norm(tf.convert_to_tensor(tape.gradient(loss, W)))
            np.testing.assert_allclose(found[i], norm, rtol=1e-4, atol=1e-6)


#: Ops and places that no model has: the table of ops claims nothing of them.
NOT_CLAIMED = frozenset(
    [
        "entries at an own place",
        "entries of a mask, summed",
        "entries at the places of a mask, summed",
        "rows of a list of numbers",
        "softmax of each row's entries",
        "rows at their own places",
        "rows at their own places, in other words",
        "an own entry is replaced",
        "an own entry is added to",
        "an own entry is bounded",
        "two own entries are lessened",
        "joined columns",
        "joined columns, cast",
        "a mesh of places",
        "numbers that are broadcast",
        "several entries by number",
        "a hot entry",
        "own sums of a list",
        "own sorted sums of a list",
        "own sums of each row",
        "rows by a list of numbers",
        "rows by a list of numbers, gathered",
        "bits",
        "numbers of bits",
        "one sorted list",
        "a map",
        "a loop over the rows",
        "entries by number",
    ]
)


@pytest.mark.parametrize("rows", [NONE, FOUR])
@pytest.mark.parametrize("name", SOUND)
def test_what_keeps_examples_apart_is_proven(name, rows):
    assert (judged(SOUND[name], rows) == "proven") == (name not in NOT_CLAIMED)


@pytest.mark.parametrize("rows", [NONE, 8])
def test_rows_of_a_record_may_meet(rows):
    def within(x, h):
        pairs = tf.reshape(h, [-1, 2, 4])
        return ends(
            tf.reshape(pairs - tf.reduce_mean(pairs, 1, keepdims=True), [-1, 4])
        )

    assert judged(within, rows, each=2) == "proven"
    assert judged(within, rows, each=1) != "proven"
