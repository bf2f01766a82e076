"""Which defence of the engine finds what, when it is alone.

Every finding is a way in which one example could reach another's gradient, or a norm
could be wrong. It is run with all defences off, where it must go unnoticed (or it would
prove nothing), with each of them alone, and with all. `python -m
tests.testing.defences` writes docs/results/self_check.md.
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
from tfdpclip.gradients.replaced_rows import Kept

from driver_kit import command_line
from tests.fuzz.channels import CHANNELS, through
from tfdpclip.gradients import (
    _copies,
    comparison,
    inlining,
    loss,
    loss_checks,
    outer,
    per_example_norms,
    separation,
    state,
    verify,
)

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "results" / "self_check.md"
# Half of it is odd: no half is made of whole pairs, so that of one pair one
# stays and the other is replaced.
SIZE = 22


def _nothing(*args, **kwargs):
    return None


def _all_separate(self, *args):
    true = tf.fill([len(self.probes)], True)
    return true, true


def _all_stay(self, before, *args):
    return dataclasses.replace(before, telling=tf.constant(True))


def _all_equal(self, *args):
    zeros = tf.zeros([len(self._columns)])
    one, true = tf.zeros([self._members.shape[0]]), tf.constant(True)
    return comparison.Comparison(zeros, zeros, one, tf.zeros([]), true, true, true)


# What to put in the place of each defence to leave it out.
DEFENCES: dict[str, list[tuple]] = {
    "graph analysis": [
        (loss_checks, "check_uncoupled", _nothing),
        (loss_checks, "check_sizes", _nothing),
        (loss_checks, "check_sizes_in", _nothing),
    ],
    "gradients separate": [(separation.Separation, "separate", _all_separate)],
    "replaced examples": [(Kept, "next", _all_stay)],
    "sums and norms": [(verify.SelfCheck, "_differences", _all_equal)],
    "refused by rule": [
        (loss, "check_public", _nothing),
        (state, "reads", lambda *args: []),
        (state, "refuse_what_others_left", _nothing),
        (loss_checks, "refuse_unproven", _nothing),
    ],
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that must not pass.

    Attributes:
      name: what it is.
      make: makes (per-example loss function, variables, data).
      found: the defences that find it alone.
      guards: what is there against this one alone, as patches that take it away.
      steps: what happens before each step: functions; one step where there is none.
      loud: what TensorFlow itself says of it, on processors where it has other kernels.
    """

    name: str
    make: Callable
    found: frozenset
    guards: tuple = ()
    steps: tuple = (_nothing,)
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

    per_example.open = lambda: opened.assign(1.0)
    per_example.others = [opened]
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
    rows = tf.gather(stopped, tf.cast(stopped[:, 0] > 0, tf.int32))
    share = tf.stop_gradient(1 / (1 + tf.norm(rows, axis=1, keepdims=True)))
    damped = share * hidden + tf.stop_gradient((1 - share) * hidden)
    return damped + 1e-3 * tf.random.gamma([], tf.nn.softplus(stopped) + 0.1)


_outer_norms = outer.Outer.squared_norms


def _too_small(self, budget):
    return 0.96 * _outer_norms(self, budget)


ALL_BUT_RULES = frozenset(DEFENCES) - {"refused by rule"}
FINDINGS = (
    Finding(
        "means of segments by the data's ids",
        of_hidden(segments),
        ALL_BUT_RULES,
    ),
    Finding(
        "sums of pairs, by reshaping",
        of_hidden(in_pairs),
        frozenset({"gradients separate", "replaced examples", "sums and norms"}),
    ),
    Finding(
        "a statistic of the batch behind a stopped gradient, in loops",
        of_hidden(behind_a_stopped_gradient),
        frozenset({"graph analysis", "gradients separate", "replaced examples"}),
    ),
    Finding(
        "ranks within the batch",
        of_hidden(by_rank),
        frozenset({"graph analysis", "replaced examples"}),
    ),
    Finding(
        "integers, examples that meet behind an op without a rule",
        integers,
        frozenset({"graph analysis", "gradients separate", "replaced examples"}),
    ),
    Finding(
        "a gate that opens after three steps",
        gate,
        frozenset({"gradients separate", "replaced examples", "sums and norms"}),
        steps=(_nothing, _nothing, _nothing, lambda f: f.open()),
    ),
    Finding(
        "TensorFlow's converter of grouped convolutions",
        grouped,
        frozenset({"replaced examples", "sums and norms"}),
        guards=((inlining, "inline_calls", lambda loss: loss),),
        loud="filter_size does not have enough elements",  # without oneDNN
    ),
    Finding(
        "another dropout mask in a recomputed backward pass",
        recomputed,
        frozenset({"gradients separate", "replaced examples", "sums and norms"}),
        guards=(
            (inlining, "inline_calls", lambda loss: loss),
            (_copies, "repeatable", lambda op: True),
        ),
    ),
    Finding(
        "a rule whose norms are 2 % too small",
        of_hidden(lambda hidden, x: hidden),
        frozenset({"sums and norms"}),
        guards=((outer.Outer, "squared_norms", _too_small),),
    ),
    Finding(
        "a term of replayed data that is called public",
        replayed,
        frozenset({"refused by rule"}),
    ),
    Finding(
        "a memory bank that the loss writes and reads",
        banked,
        frozenset({"refused by rule"}),
    ),
    Finding(
        "a statistic of the batch that goes through a queue",
        in_a_queue,
        frozenset({"refused by rule"}),
    ),
    Finding(
        "rows that the data point to scale gradients, beside draws that take the data",
        of_hidden(beside_a_draw),
        frozenset({"refused by rule"}),
    ),
)


class LoudError(Exception):
    """TensorFlow's own kernel refused a finding: no defence is needed here."""


def is_refused(finding: Finding, defences: frozenset, guarded: bool = False) -> bool:
    """Whether some defences refuse a finding, or its own guard prevents it."""
    with contextlib.ExitStack() as stack:
        for name, patches in DEFENCES.items():
            if name not in defences:
                for patch in patches:
                    stack.enter_context(mock.patch.object(*patch))
        for patch in () if guarded else finding.guards:
            stack.enter_context(_patched_everywhere(patch))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        per_example, variables, data = finding.make()

        @tf.function(
            input_signature=[tf.TensorSpec([None, *data.shape[1:]], data.dtype)]
        )
        def step(x):
            return per_example_norms(per_example(x), variables, recheck_rate=0.0)

        try:
            for before in finding.steps:
                before(per_example)
                step(data)
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            if finding.loud and finding.loud in str(error):
                raise LoudError(str(error)) from error
            return True
    return False


def _patched_everywhere(patch):
    """Also where the name was imported."""
    from tfdpclip.gradients import engine

    target, name, other = patch
    if hasattr(engine, name):
        return mock.patch.object(engine, name, other)
    return mock.patch.object(target, name, other)


def page() -> str:
    """The page, in Markdown."""
    head = " | ".join(DEFENCES)
    rows = [f"| finding | {head} |", "| --- |" + " --- |" * len(DEFENCES)]
    for finding in FINDINGS:
        marks = ["found" if name in finding.found else "" for name in DEFENCES]
        rows.append(f"| {finding.name} | " + " | ".join(marks) + " |")
    return _HEAD + "\n".join(rows) + "\n"


_HEAD = """# What each defence finds alone

Each row is a way in which an example could reach another one's gradient, or a norm
could be wrong. It was run with one defence of the engine at a time, all others taken
out, and with none, where it goes unnoticed. Where the library has a guard against this
very thing (a rule of its own for grouped convolutions, say), that was taken out as
well: these rows show what would catch the next of its kind. Written by `python -m
tests.testing.defences`, held by `tests/testing/defences_test.py`, cell by cell.

* *graph analysis*: before anything runs, from the ops and their shapes.
* *gradients separate*, *replaced examples*, *sums and norms*: by the step itself, on
  its first batch, on its steps 2, 4, 8, ... and at random
  ([guarantees](../guarantees.md)).
* *refused by rule*: what cannot be tested is not allowed at all: terms that depend on
  anything but trained variables and constants; state that is written from the batch, be
  it a variable, a queue, a table, a file or Python; ops without a rule in a loss that
  cannot be computed again.

"""

if __name__ == "__main__":
    command_line.argument_parser(__doc__).parse_args()
    PAGE.write_text(page())
    print(f"{PAGE.name} is written.")
