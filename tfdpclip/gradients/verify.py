"""The step proves itself.

Rules, TensorFlow's own converters and Keras's layers can all be wrong, and a wrong norm
is silent. So the engine compares itself with ordinary backward passes, on the batch
that it is about to clip:

* with random powers of two r_i, its weighted sum must be the gradient of
  sum_i r_i loss_i, variable by variable (in bfloat16, of a few examples);
* for single examples k, its sum must be the gradient of loss_k alone, and the norm that
  decides about the clip must not be below the norm of that gradient: of every variable,
  of every group, and of all together;
* the gradient of the weighted losses must separate by example at every probed tensor
  (`separation.py`);
* with other examples in the place of some, the losses of the rest, and what their
  gradients are made of, must stay the same (`replaced.py`).

The first three are one loop over a few weightings, so that its graph is built once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdpclip._devices import in_xla
from tfdpclip._docs import see
from tfdpclip.gradients import chance, row_tables, separation
from tfdpclip.gradients.backward import gradients_at, own_gradients
from tfdpclip.gradients.comparison import Comparison, beside, fields, flat, worse
from tfdpclip.gradients.errors import ExampleIsolationError
from tfdpclip.gradients.records import LOST_SQUARE
from tfdpclip.gradients.replaced import ReplacedExamples
from tfdpclip.gradients.replaced_sums import Sums

# How far sums may be off, relative to the root of the summed squares of the examples'
# weighted norms, and how far norms may be too small. Float32 sums of a million terms
# are right to 1e-4 of that; where a layer computes in bfloat16, the ordinary gradient
# is what is rounded.
TOLERANCE = 1e-3
COARSE_TOLERANCE = 0.1
# In coarse types, so many examples' gradients are added up for comparison.
_FEW = 8
# What is allowed besides, relative to the norms of all variables that are clipped
# together: a gradient that is zero but for rounding (the bias of attention's keys, for
# one) agrees with nothing.
_ROUNDING, _COARSE_ROUNDING = 1e-5, 1e-2


class SelfCheck:
    """The comparison of an engine with ordinary backward passes.

    Args:
      engine: a `PerExampleGradients`, complete.
      assignment: the group of each variable, where the clip rule has groups.
    """

    def __init__(self, engine: Any, assignment: Sequence[int] | None = None):
        self._engine, self._evidence = engine, engine.evidence
        self._assignment = assignment
        self._columns = list(assignment or [0] * len(engine.variables))
        width = max(self._columns) + 1
        # Which variables are clipped together, `[L, V]`.
        self._members = tf.one_hot(self._columns, width, axis=0)
        self.probes = separation.all_probes(self._evidence.probes(), engine.flows)
        self._separation = separation.Separation(self.probes, engine.flows)

    def prepare(self) -> None:
        """Finds what `run` computes again; to be called after `compared` was built.

        Whoever differentiates a fused layer first makes a copy of it, which others then
        use: in the branch that compares, it runs when that does.

        Raises:
          ExampleIsolationError: if neither gradients nor another run of the loss could
            show that examples mix.
        """
        engine = self._engine
        self.replaced = ReplacedExamples(
            engine.loss,
            engine.flows,
            self._evidence.witnesses(),
            Sums(
                *(engine.loss, engine.variables, engine.handles, engine.flows),
                engine.parts.counted,
            ),
        )
        if not self.probes and self.replaced.obstacle is not None:
            raise ExampleIsolationError(
                "Whether examples stay apart cannot be tested: no floating-point "
                "tensor between the variables "
                f"{', '.join(v.name for v in engine.variables[:3])} and the loss has "
                "the examples on its first axis, and the loss cannot be computed "
                f"again with other examples, as {self.replaced.obstacle}. Keep the "
                "batch on axis 0." + see("mixed-examples")
            )

    # What to compare with.

    def seeds(self, few: tf.Tensor | None = None) -> tf.Tensor:
        """`[wholes + 2, B]`: weightings of many examples, and two of single ones.

        Of many: one for all, whose gradients are what the others' are compared with;
        random powers of two; and, where a layer computes in bfloat16, random powers for
        a few, because the ordinary pass rounds a sum of many examples away there.

        One of the single examples is random, the other is the one with the smallest
        norm: where terms of an example cancel each other, its norm is where the error
        would show.

        Args:
          few: whether one of the two will do, either of them, a boolean scalar.
        """
        norms, count = self._engine.norms, self._engine.parts.batch_size
        finite = tf.math.is_finite(norms)
        some = tf.cast(finite & (norms > 0), tf.float32)
        # Positive where there is a gradient. One more, for a batch of nobody, which XLA
        # would not compile otherwise.
        drawn = some + some * chance.uniform(tf.shape(norms))
        sizes = tf.where(some > 0, norms, tf.constant(float("inf")))
        random = tf.argmax(tf.concat([drawn, [0.0]], 0))
        smallest = tf.argmin(tf.concat([sizes, [float("inf")]], 0))
        powers = tf.where(finite, separation.random_powers(count), 0.0)
        rows = [tf.ones_like(powers), powers]
        if self._evidence.coarse:
            chosen = chance.shuffled(tf.range(count)) < _FEW
            rows.append(tf.where(chosen, powers, 0.0))
        single = tf.one_hot([random, smallest], count)
        if few is not None and not in_xla():  # Which has all sizes when it compiles.
            some = chance.shuffled(single)
            single = tf.where(few, some, single)[: tf.where(few, 1, 2)]
        return tf.concat([tf.stack(rows), single], axis=0)

    def compare(self, seeds: tf.Tensor) -> Comparison:
        """Compares under each of some weightings.

        Args:
          seeds: `[N, B]`, with the weightings of many examples that `seeds` makes
            before those of one each.
        """
        engine = self._engine
        usable = tf.math.is_finite(engine.loss)
        unseen = engine.flows.without_gradient()
        hidden = [LOST_SQUARE * v.shape.num_elements() for v in engine.variables]
        squares = tf.stack(self._evidence.squares_by_variable())
        squares += tf.constant(hidden, tf.float32)[:, tf.newaxis]
        terms = tf.stack(self._evidence.parts_by_variable())
        width = self._members.shape[0]
        decisive = engine.record_norms(self._assignment)
        decisive = tf.reshape(decisive, [-1, width])
        tensors = [p.tensor for p in self.probes]
        weights, count = chance.run_seed(), engine.parts.batch_size

        def body(i, plain, *worst):
            seed = seeds[i]
            with own_gradients(unseen):
                found = gradients_at(
                    engine.loss,
                    [*tensors, *engine.handles],
                    tf.cast(seed, engine.loss.dtype),
                )
            at_probes, truth = found[: len(tensors)], found[len(tensors) :]
            rows = self._separation.rows(at_probes, weights, count)
            # By the very code that computes the others: compiled another way, the same
            # sums are rounded another way.
            plain = row_tables.once(i, plain, rows.joined)
            separate, two = self._separation.separate(
                plain, rows, at_probes, seed, usable
            )
            # Of a single example, nothing is learnt about others.
            several = tf.equal(i, 1)
            off = self._differences(seed, truth, i, squares, terms, decisive)
            new = Comparison(
                off.sums, off.norms, off.groups, off.excess, separate, two, off.compared
            )
            return i + 1, plain, *worse(Comparison(*worst), new, several)

        probes = len(self.probes)
        start = Comparison(
            tf.zeros([len(engine.variables)]),
            tf.zeros([len(engine.variables)]),
            tf.zeros([width]),
            tf.zeros([]),
            tf.fill([probes], True),
            tf.fill([probes], False),
            tf.constant(False),
        )
        number = tf.shape(seeds)[0]
        nothing = self._separation.nothing_yet()
        _, _, *found = tf.while_loop(
            lambda i, *_: i < number,
            body,
            (tf.constant(0), nothing, *fields(start)),
            shape_invariants=(
                tf.TensorShape([]),
                row_tables.any_length(nothing),
                *(t.shape for t in fields(start)),
            ),
            maximum_iterations=number,
            parallel_iterations=1,
        )
        return Comparison(*found)

    @property
    def wholes(self) -> int:
        """How many weightings of many examples `seeds` begins with."""
        return 3 if self._evidence.coarse else 2

    def _differences(self, seed, truth, number, squares, terms, decisive) -> Comparison:
        """How far the engine is off under one weighting.

        Args:
          seed: the weights, `[B]`.
          truth: the gradients of the weighted losses, None for none.
          number: which of the weightings this is.
          squares: `[V, B]`, of the norms.
          terms: `[V, B]`, the summed squares of what may cancel within an example.
          decisive: `[B, L]`, the norms that decide about the clip.
        """
        engine = self._engine
        single = number >= self.wholes
        # The first is for comparing gradients only, and in coarse types the second.
        counts = number >= self.wholes - 1
        own = engine.unperturbed_sums(seed)
        # Weights that are 0 keep out what is not finite.
        shares = tf.where(seed > 0, tf.square(seed) * squares, 0.0)
        bounds = tf.reduce_sum(shares, axis=1)
        # Terms that cancel within an example are rounded before they do.
        terms = tf.where(seed > 0, tf.square(seed) * terms, 0.0)
        terms = tf.sqrt(tf.reduce_sum(terms, axis=1))
        rounding = _COARSE_ROUNDING if self._evidence.coarse else _ROUNDING
        tolerance = COARSE_TOLERANCE if self._evidence.coarse else TOLERANCE
        together = tf.sqrt(tf.linalg.matvec(self._members, bounds))
        together = tf.gather(together, self._columns)
        bounds = tf.sqrt(bounds)
        # So that the allowance for rounding is within the tolerance.
        scales = bounds + (together + terms) * (rounding / tolerance) + 1e-30
        found = tf.stack(
            [
                beside(*flat(a, b), scale)
                for a, b, scale in zip(
                    own, truth, tf.unstack(scales, num=len(own)), strict=True
                )
            ]
        )
        sums, lengths = found[:, 0], found[:, 1]
        sound = tf.math.is_finite(lengths) & tf.math.is_finite(bounds)
        every = tf.reduce_all(sound)
        shortfalls = lengths - bounds / scales
        groups, excess = self._decisive(
            seed, lengths, scales, decisive, terms * rounding
        )
        return Comparison(
            tf.where(sound & counts, sums, 0.0),
            tf.where(sound & single, shortfalls, 0.0),
            tf.where(every & single, groups, 0.0),
            tf.where(every & single, excess, 0.0),
            tf.constant(True),
            tf.constant(True),
            every & counts & (tf.reduce_max(seed) > 0),
        )

    def _decisive(self, seed, lengths, scales, decisive, rounded):
        """The norms that decide about the clip, beside those of one example's sum."""
        engine = self._engine
        theirs = tf.where(seed[:, tf.newaxis] > 0, decisive, 0.0)
        norms = tf.reduce_max(theirs, axis=0) + 1e-30
        if engine.perturbation is not None:
            # The perturbed gradient is what is clipped.
            found = [flat(part, None)[0] for part in engine.weighted_sum(seed)]
            scales = tf.stack([tf.reduce_max(tf.abs(f)) for f in found]) + 1e-30
            pairs = zip(found, tf.unstack(scales, num=len(found)), strict=True)
            lengths = tf.stack([beside(f, f, scale)[1] for f, scale in pairs])
        # Relative to the norms before anything is squared, against overflow.
        parts = lengths * scales / tf.gather(norms, self._columns)
        ratios = tf.sqrt(tf.linalg.matvec(self._members, tf.square(parts)))
        rounded = tf.square(rounded / tf.gather(norms, self._columns))
        rounded = tf.sqrt(tf.linalg.matvec(self._members, rounded))
        # A record that is dropped has an infinite norm.
        shows = tf.math.is_finite(norms)
        groups = tf.where(shows, ratios - 1.0 - rounded, 0.0)
        over = tf.math.divide_no_nan(1.0, ratios) - 1.0
        return groups, tf.reduce_max(tf.where(shows & (ratios > 0), over, 0.0))

    # The check of a step.

    def compared(self, few: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Compares gradients, in the current graph.

        Args:
          few: whether to look at one single example, not two, a boolean scalar.

        Returns:
          `[N + 1]`, boolean: whether each thing is as it should be, and, last, whether
          the batch could show otherwise; and `[B]`, the size of what each example's
          gradient is the sum of. `run` takes both: what is compared here holds all that
          the step's forward pass made, and should be let go before the loss runs again.
        """
        engine = self._engine
        # Before the loop over weightings, which uses the calls that claims make.
        conditions = [separation.counts_agree(engine.flows, engine.parts.batch_size)]
        conditions += [claim() for claim, _ in self._evidence.claims]
        found = self.compare(self.seeds(few))
        limit = COARSE_TOLERANCE if self._evidence.coarse else TOLERANCE
        total = tf.reduce_all(found.groups <= limit)
        telling = tf.reduce_all(found.telling) & found.compared
        parts = [tf.stack(conditions), found.good]
        parts += [found.sums <= limit, found.norms <= limit]
        sizes = tf.sqrt(tf.add_n(self._evidence.parts_by_variable()))
        return tf.concat([*parts, [total], [telling]], axis=0), sizes

    def not_compared(self) -> tuple[tf.Tensor, tf.Tensor]:
        """In the place of `compared` where nothing is to be checked."""
        count = len(self._apart()) + 2 * len(self._engine.variables) + 2
        return tf.fill([count], True), tf.zeros([self._engine.parts.batch_size])

    def _apart(self) -> list[str]:
        """What to say of the first entries of `compared`, that examples mix."""
        return [
            separation.COUNTS,
            *(message for _, message in self._evidence.claims),
            *(separation.mixed_at(probe.label) for probe in self.probes),
        ]

    def run(
        self, compared: tf.Tensor, sizes: tf.Tensor, few: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """Replaces examples, in the current graph, and concludes.

        Args:
          compared: what `compared` found.
          sizes: and what that summed.
          few: whether to replace some of a few, a boolean scalar.

        Returns:
          Two boolean scalars, whether all is well and whether the batch could show
          otherwise, and what to say if it is not; None under XLA, where nothing can be
          said.
        """
        messages = self._apart()
        # Mixed examples before wrong sums: they may be why sums differ, too.
        apart = len(messages)
        parts, conclusive = [compared[:apart]], compared[-1]
        if self.replaced.obstacle is None:
            unmoved, tells = self.replaced.test(
                self._engine.parts.batch_size, sizes, few
            )
            parts.append(unmoved)
            messages += self.replaced.messages
            conclusive &= tells
        every = tf.concat([*parts, compared[apart:-1]], axis=0)
        for message in (_wrong_sum, _wrong_norm):
            messages += [
                message(v.name, self._evidence.where(i))
                for i, v in enumerate(self._engine.variables)
            ]
        messages.append(_WRONG_TOTAL)
        message = None
        if not in_xla():
            # The first that is not met; if all are, it is an old failure that counts.
            first = tf.argmin(tf.cast(tf.concat([every, [False]], 0), tf.int32))
            message = tf.gather([*messages, _AGAIN], first)
        return tf.reduce_all(every), conclusive, message


_REMEDY = (
    "Nothing was released. dpc.testing.assert_exact(model, (x, y)) compares all "
    "examples; build the layer of other ops, and report it, please."
    + see("a-wrong-gradient")
)
_AGAIN = (
    "ExampleIsolationError: an earlier step of this function failed its check, so that "
    "its steps are not to be trusted. Mend the model, and make a new function."
    + see("mixed-examples")
)
_WRONG_TOTAL = (
    "GradientMismatchError: the norm that decides about the clip is smaller than the "
    f"norm of the gradient that is clipped. {_REMEDY}"
)


def _wrong_sum(name: str, where: str) -> str:
    return (
        f"GradientMismatchError: the clipped sum of {name!r} ({where}) is not what an "
        f"ordinary backward pass gives. {_REMEDY}"
    )


def _wrong_norm(name: str, where: str) -> str:
    return (
        f"GradientMismatchError: the norm of an example's gradient of {name!r} "
        f"({where}) is smaller than an ordinary backward pass gives. {_REMEDY}"
    )
