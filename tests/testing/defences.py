"""The outcome of each way in which an example could reach another's gradient.

`python -m tests.testing.defences` writes docs/results/defences.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import warnings
from collections.abc import Callable
from unittest import mock

import numpy as np
import tensorflow as tf

from driver_kit import command_line
from tests.fuzz.channels import CHANNELS, through
from tfdpclip.gradients import (
    ExampleIsolationError,
    LossStructureError,
    PerExampleGradients,
    engine,
)
from tfdpclip.gradients.flows import inlining
from tfdpclip.gradients.forms import outer
from tfdpclip.gradients.graph import op_copies

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "results" / "defences.md"
SIZE = 22
#: The possible outcomes of a finding.
MIXED, RULE = "refused: mixed", "refused by rule"
ALONE, COMPARED = "one example at a time", "found by the comparison"
HARMLESS = "trains, exactly"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A loss that must not pass.

    Attributes:
      name: of the way to mix.
      make: makes (per-example loss function, variables, data).
      outcome: the expected outcome.
      guards: the guards against this finding alone, as patches that remove them.
      loud: TensorFlow's own error, on processors where it has other kernels.
    """

    name: str
    make: Callable
    outcome: str
    guards: tuple = ()
    loud: str = ""


def random(*shape):
    rng = np.random.default_rng(sum(shape))
    return tf.constant(rng.normal(size=shape).astype(np.float32))


def weights(*shape):
    return tf.Variable(random(*shape))


def of_hidden(mix, **options):
    """A dense layer, whose rows go through `mix` before the loss."""

    def make():
        w, u = weights(3, 4), weights(4, 2)

        def per_example(x):
            hidden = tf.tanh(mix(tf.tanh(x @ w), x) @ u)
            return tf.reduce_sum(tf.square(hidden), axis=1)

        return per_example, [w, u], random(SIZE, 3)

    return make


def segments(hidden, x):
    ids = tf.cast(x[:, 0] > 0, tf.int32)
    return hidden - tf.gather(tf.math.unsorted_segment_mean(hidden, ids, 2), ids)


def in_pairs(hidden, x):
    pairs = tf.reduce_sum(tf.reshape(hidden, [-1, 2, 4]), axis=1)
    return hidden + tf.repeat(pairs, 2, axis=0)


def behind_a_stopped_gradient(hidden, x):
    spread = tf.map_fn(tf.reduce_sum, tf.stop_gradient(hidden))
    return hidden * tf.reduce_max(tf.scan(tf.maximum, spread))


def by_rank(hidden, x):
    rank = tf.argsort(tf.argsort(x[:, 0]))
    return hidden * tf.cast(rank, tf.float32)[:, tf.newaxis]


def integers():
    table = weights(10, 4)
    ids = tf.constant(np.random.default_rng(1).integers(0, 10, SIZE))

    def per_example(ids):
        rows = tf.map_fn(lambda i: table[i], ids, fn_output_signature=tf.float32)
        return tf.reduce_sum(tf.square(rows + tf.reverse(rows, [0])), axis=1)

    return per_example, [table], ids


def gate():
    opened, w = tf.Variable(0.0, name="gate"), weights(3, 4)

    def per_example(x):
        hidden = tf.tanh(x @ w)
        hidden += tf.stop_gradient(opened) * (in_pairs(hidden, x) - hidden)
        return tf.reduce_sum(tf.square(hidden), axis=1)

    return per_example, [w, opened], random(SIZE, 3)


def grouped():
    layer = tf.keras.layers.Conv1D(4, 3, groups=2)
    x = random(SIZE, 6, 4)
    layer(x)

    def per_example(x):
        return tf.reduce_sum(tf.square(layer(x)), axis=[1, 2])

    return per_example, layer.trainable_variables, x


def recomputed():
    w, u = weights(3, 4), weights(4, 2)

    def per_example(x):
        block = tf.recompute_grad(lambda h: tf.nn.dropout(tf.tanh(h @ w), 0.5))
        return tf.reduce_sum(tf.square(block(x) @ u), axis=1)

    return per_example, [w, u], random(SIZE, 3)


def replayed():
    w, replay = weights(3, 4), tf.Variable(random(5, 3), trainable=False)

    def per_example(x):
        shared = tf.reduce_sum(tf.square(replay @ w))
        return tf.reduce_sum(tf.square(x @ w)) + shared

    return per_example, [w], random(SIZE, 3)


def banked():
    w, bank = weights(3, 4), tf.Variable(random(4), trainable=False)

    def per_example(x):
        hidden = tf.tanh(x @ w)
        bank.assign(tf.reduce_mean(hidden, axis=0))
        return tf.reduce_sum(tf.square(hidden - bank), axis=1)

    return per_example, [w], random(SIZE, 3)


def in_a_queue():
    queue = CHANNELS["queue"]()

    def damped(hidden, x):
        largest = tf.reduce_max(tf.norm(tf.stop_gradient(hidden), axis=1))
        return hidden / (1 + through(queue, largest))

    return of_hidden(damped)()


def beside_a_draw(hidden, x):
    """Each is damped by the row that its data point to; and cannot be run again."""
    stopped = tf.stop_gradient(hidden)
    rows = tf.gather(stopped, tf.cast(stopped[:, 0] > 1e9, tf.int32))
    share = tf.stop_gradient(1 / (1 + tf.norm(rows, axis=1, keepdims=True)))
    damped = share * hidden + tf.stop_gradient((1 - share) * hidden)
    return damped + 1e-3 * tf.random.gamma([], tf.nn.softplus(stopped) + 0.1)


_outer_norms = outer.Outer.squared_norms


def _too_small(self, budget):
    return 0.25 * _outer_norms(self, budget)


FINDINGS = (
    Finding("means of segments by the data's ids", of_hidden(segments), MIXED),
    Finding("sums of pairs, by reshaping", of_hidden(in_pairs), RULE),
    Finding(
        "a statistic of the batch behind a stopped gradient, in loops",
        of_hidden(behind_a_stopped_gradient),
        COMPARED,
    ),
    Finding("ranks within the batch", of_hidden(by_rank), MIXED),
    Finding(
        "integers, examples that meet behind an op without a rule", integers, COMPARED
    ),
    Finding("a gate that opens later, to sums of pairs", gate, RULE),
    Finding(
        "TensorFlow's converter of grouped convolutions",
        grouped,
        COMPARED,
        guards=((inlining, "inline_calls", lambda loss: loss),),
        loud="filter_size does not have enough elements",  # without oneDNN
    ),
    Finding(
        "another dropout mask in a recomputed backward pass",
        recomputed,
        COMPARED,
        guards=(
            (inlining, "inline_calls", lambda loss: loss),
            (op_copies, "repeatable", lambda op: True),
        ),
    ),
    Finding(
        "a rule whose norms are half of what they are",
        of_hidden(lambda hidden, x: hidden),
        COMPARED,
        guards=((outer.Outer, "squared_norms", _too_small),),
    ),
    Finding("a term of replayed data that is called public", replayed, RULE),
    Finding("a memory bank that the loss writes and reads", banked, RULE),
    Finding("a statistic of the batch that goes through a queue", in_a_queue, RULE),
    Finding(
        "rows that the data point to scale gradients, beside draws that take the data",
        of_hidden(beside_a_draw),
        ALONE,
    ),
)


class LoudError(Exception):
    """TensorFlow's own kernel refused a finding: no defence is needed here."""


def outcome_of(finding: Finding, guarded: bool = False) -> str:
    """The outcome of a finding, without its own guard unless `guarded`."""
    with contextlib.ExitStack() as stack:
        for patch in () if guarded else finding.guards:
            stack.enter_context(_patched_everywhere(patch))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        per_example, variables, data = finding.make()
        proven = []

        @tf.function(
            input_signature=[tf.TensorSpec([None, *data.shape[1:]], data.dtype)]
        )
        def step(x):
            found = PerExampleGradients(per_example(x), variables)
            proven.append(found.proof.proven)
            with tf.control_dependencies([found.checks_passed]):
                return tf.identity(found.norms)

        try:
            step(data)
        except (ExampleIsolationError, LossStructureError) as error:
            combines = "combines the examples" in str(error)
            return MIXED if combines else RULE
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            if finding.loud and finding.loud in str(error):
                raise LoudError(str(error)) from error
            compared = ("GradientMismatchError", "different gradient alone")
            if any(said in str(error) for said in compared):
                return COMPARED
            raise
    return HARMLESS if proven[-1] else ALONE


def _patched_everywhere(patch):
    """Also where the name was imported."""
    target, name, other = patch
    if hasattr(engine, name):
        return mock.patch.object(engine, name, other)
    return mock.patch.object(target, name, other)


def page() -> str:
    """The page, in Markdown."""
    rows = ["| fault | answer |", "| --- | --- |"]
    rows += [f"| {finding.name} | {finding.outcome} |" for finding in FINDINGS]
    return _HEAD + "\n".join(rows) + "\n"


_HEAD = """# What stops each way to mix examples, or to get a norm wrong?

Each row is a way in which one example could reach the gradient of another, or in
which a norm could be wrong, and the library's answer to a loss with it. If the
library has a guard against exactly this way (such as its rule for grouped
convolutions), the guard was removed: the row shows the defence that would catch a
new way of the same kind. Written by `python -m tests.testing.defences`, and checked
by `tests/testing/defences_test.py`.

* *refused: mixed*: an error while the graph is built, which names the op that
  combines the examples.
* *refused by rule*: an error while the graph is built, for a loss that cannot be
  proven and cannot be computed one example at a time; for terms that depend on more
  than trained variables and constants; and for state written from the batch: a
  variable, a queue, a table, a file or Python.
* *one example at a time*: the proof ends at an op, and each example's gradient is
  computed from its own data alone ([guarantees](../guarantees.md)).
* *found by the comparison*: an error of the first step, which compares its
  gradients with ordinary gradients.

"""

if __name__ == "__main__":
    command_line.argument_parser(__doc__).parse_args()
    PAGE.write_text(page())
    print(f"{PAGE.name} is written.")
