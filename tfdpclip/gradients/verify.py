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

All are one loop, so that its graph is built once: of copies of the ops of the step, its
backward pass among them (`rerun.py`). Nothing that the step's own forward pass made is
kept for it.

It is long because what is compared and what is said of it are one list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdpclip._constants import vector
from tfdpclip._devices import in_xla
from tfdpclip._docs import see
from tfdpclip.gradients import chance, loss_checks, rerun, row_tables, separation
from tfdpclip.gradients.backward import gradients_at, own_gradients
from tfdpclip.gradients.comparison import (
    Comparison,
    beside,
    fields,
    flat,
    nothing_compared,
    worse,
)
from tfdpclip.gradients.errors import ExampleIsolationError
from tfdpclip.gradients.records import LOST_SQUARE
from tfdpclip.gradients.replaced import ReplacedExamples, Weightings
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
# Under how many weightings sums are compared.
_SUMS = 3
# And how many times what a nudge of data and weights by a few units in the last place
# makes of a gradient: see `ReplacedExamples.test`.
_NUDGES = 4.0


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
        # Whose sums are made before the check: those made of more than they are.
        self._ahead: list[int] = [] if in_xla() else engine.made_of_more(_SUMS)

    def prepare(self) -> None:
        """Finds what `run` computes again; to be called after `claimed`.

        Raises:
          ExampleIsolationError: if neither gradients nor another run of the loss could
            show that examples mix.
        """
        engine = self._engine
        obstacle = rerun.obstacle(engine.loss, engine.flows)
        if not self.probes and obstacle is not None:
            raise ExampleIsolationError(
                "Whether examples stay apart cannot be tested: no floating-point "
                "tensor between the variables "
                f"{', '.join(v.name for v in engine.variables[:3])} and the loss has "
                "the examples on its first axis, and the loss cannot be computed "
                f"again with other examples, as {obstacle}. Keep the batch on axis 0."
                + see("mixed-examples")
            )
        elif obstacle is not None:
            loss_checks.refuse_unproven(engine.flows, obstacle)
        self.replaced = None
        # Of one example, there are no others.
        if obstacle is None and engine.flows.batch_size != 1:
            sums = Sums(
                *(engine.loss, engine.variables, engine.handles, engine.flows),
                engine.parts.counted,
                [probe.tensor for probe in self.probes],
                self._evidence.found.backward,
                self._columns,
            )
            self.replaced = ReplacedExamples(
                engine.loss, engine.flows, self._evidence.witnesses(), sums
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

    def before(self, few: tf.Tensor) -> list[tf.Tensor]:
        """What a check asks of the step's own gradients: for `run`, and before it.

        What they are made of, some of the forward pass and all that came back, of the
        whole batch, can then be gone before the check makes passes of its own.

        Args:
          few: see `run`.

        Returns:
          The weightings; and, if there are variables `_ahead`, the sums of theirs that
          are compared, one after the other, `[3, n]` for n entries of all of them.
        """
        seeds = self.seeds(few)
        if not self._ahead:
            return [seeds]
        numbers = tf.minimum(self._uncounted + tf.range(_SUMS), tf.shape(seeds)[0] - 1)

        def sums(number):
            found = self._engine.unperturbed_sums(seeds[number], self._ahead)
            flat = [tf.reshape(found[i], vector(-1)) for i in self._ahead]
            return tf.concat([tf.cast(part, tf.float32) for part in flat], axis=0)

        spec = tf.TensorSpec([sum(self._sizes_ahead)], tf.float32)
        found = tf.map_fn(
            sums, numbers, fn_output_signature=spec, parallel_iterations=1
        )
        return [seeds, found]

    @property
    def _sizes_ahead(self) -> list[int]:
        return [self._engine.variables[i].shape.num_elements() for i in self._ahead]

    def nothing(self) -> list[tf.Tensor]:
        """What stands for what `run` takes in a step that is not checked."""
        variables, count = self._engine.variables, self._engine.flows.batch_size or 0
        ahead = [tf.zeros([0, sum(self._sizes_ahead)])] if self._ahead else []
        return [tf.zeros([len(variables), count]), tf.zeros([0, count]), *ahead]

    def terms(self, count: tf.Tensor | None = None) -> tf.Tensor:
        """`[V, B]`, the summed squares of what may cancel within an example.

        Args:
          count: of how many examples; all by default. With 0 for a step that is not
            checked, they can be made as the backward pass goes, outside of any branch,
            which would hold all that they are made of.
        """
        return tf.stack(self._evidence.parts_by_variable(count))

    def compare(self, seeds: tf.Tensor) -> Comparison:
        """Compares under each of some weightings, by backward passes of their own.

        Args:
          seeds: `[N, B]`, with the weightings of many examples that `seeds` makes
            before those of one each.
        """
        return self._compared(self._weightings(seeds, self.terms()))

    def _compared(self, weightings: Weightings) -> Comparison:
        engine, seeds = self._engine, weightings.weights
        unseen = engine.flows.without_gradient()
        tensors, separation = [p.tensor for p in self.probes], self._separation

        def body(i, *state):
            seed = seeds[i]
            with own_gradients(unseen):
                found = gradients_at(
                    engine.loss,
                    [*tensors, *engine.handles],
                    tf.cast(seed, engine.loss.dtype),
                )
            at_probes, truth = found[: len(tensors)], found[len(tensors) :]
            there = [gradient is not None for gradient in at_probes]
            every = range(len(at_probes))
            tables = row_tables.join(
                [
                    part
                    for number in every
                    for part in separation.tables(
                        number, at_probes[number], weightings.drawn
                    )
                ]
            )
            return i + 1, *weightings.take(i, seed, tables, every, there, truth, state)

        number = tf.shape(seeds)[0]
        _, *found = tf.while_loop(
            lambda i, *_: i < number,
            body,
            (tf.constant(0), *weightings.start),
            shape_invariants=(tf.TensorShape([]), *weightings.shapes),
            maximum_iterations=number,
            parallel_iterations=1,
        )
        return _comparison(found)

    def _weightings(
        self, seeds: tf.Tensor, terms: tf.Tensor, ahead: tf.Tensor | None = None
    ) -> Weightings:
        """How the engine is compared with backward passes under some weightings.

        Args:
          seeds: the weights, `[N, B]`.
          terms: what `terms` made.
          ahead: sums that `before` made; without them, all are made on the way.
        """
        engine = self._engine
        usable = tf.math.is_finite(engine.loss)
        hidden = [LOST_SQUARE * v.shape.num_elements() for v in engine.variables]
        squares = tf.stack(self._evidence.squares_by_variable())
        squares += tf.constant(hidden, tf.float32)[:, tf.newaxis]
        width = self._members.shape[0]
        decisive = engine.record_norms(self._assignment)
        decisive = tf.reshape(decisive, [-1, width])
        count = engine.parts.batch_size

        def take(i, seed, tables, order, there, truth, state):
            plain, *worst = state
            rows = self._separation.rows(tables, order, count)
            # By the very code that computes the others: compiled another way, the same
            # sums are rounded another way.
            plain = row_tables.noted(tf.equal(i, 0), plain, rows.joined)
            separate, two = self._separation.separate(
                *(plain, rows, order, there, seed, usable)
            )
            own = self._own_sums(seed, i, ahead)
            off = self._differences(seed, own, truth, i, squares, terms, decisive)
            new = dataclasses.replace(off, good=separate, telling=two)
            # Of a single example, nothing is learnt about others.
            several = tf.equal(i, 1)
            return [plain, *worse(Comparison(*worst), new, several)]

        start = nothing_compared(len(engine.variables), width, len(self.probes))
        nothing = self._separation.nothing_yet()
        shapes = [tensor.shape for tensor in fields(start)]
        limit = self._limit

        def doubted(state):
            off = Comparison(*state[1:])
            worst = tf.concat([off.sums, off.norms, off.groups], axis=0)
            return tf.reduce_max(worst) > limit

        return Weightings(
            seeds,
            [nothing, *fields(start)],
            [row_tables.any_length(nothing), *shapes],
            take,
            doubted,
            lambda seed: self._scales(seed, squares, terms)[0],
            self._separation,
            row_tables.Weights(chance.run_seed()),
        )

    @property
    def _limit(self) -> float:
        return COARSE_TOLERANCE if self._evidence.coarse else TOLERANCE

    @property
    def wholes(self) -> int:
        """How many weightings of many examples `seeds` begins with."""
        return 3 if self._evidence.coarse else 2

    @property
    def _uncounted(self) -> int:
        """How many weightings come before those under which sums are compared.

        The first is for comparing gradients only, and in coarse types the second.
        """
        return self.wholes - 1

    def _own_sums(self, seed, number, ahead: tf.Tensor | None) -> list[tf.Tensor]:
        """The engine's sums under one weighting, of their variables' shapes or flat."""
        if ahead is None:
            return self._engine.unperturbed_sums(seed)
        rest = [i for i in range(len(self._columns)) if i not in self._ahead]
        sums = self._engine.unperturbed_sums(seed, rest)
        found = tf.split(
            ahead[tf.maximum(number - self._uncounted, 0)], self._sizes_ahead
        )
        for i, own in zip(self._ahead, found, strict=True):
            sums[i] = own
        return sums

    def _differences(
        self, seed, own, truth, number, squares, terms, decisive
    ) -> Comparison:
        """How far the engine is off under one weighting.

        Args:
          seed: the weights, `[B]`.
          own: the engine's sums.
          truth: the gradients of the weighted losses, None for none.
          number: which of the weightings this is.
          squares: `[V, B]`, of the norms.
          terms: `[V, B]`, the summed squares of what may cancel within an example.
          decisive: `[B, L]`, the norms that decide about the clip.
        """
        single = number >= self.wholes
        counts = number >= self._uncounted
        scales, bounds, rounded = self._scales(seed, squares, terms)
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
        # Of no entries the length is 0, relative to whatever.
        related = sound & tf.math.is_finite(scales)
        shortfalls = lengths - bounds / scales
        groups, excess = self._decisive(seed, lengths, scales, decisive, rounded)
        return Comparison(
            tf.where(sound & counts, sums, 0.0),
            tf.where(related & single, shortfalls, 0.0),
            tf.where(every & single, groups, 0.0),
            tf.where(every & single, excess, 0.0),
            tf.constant(True),
            tf.constant(True),
            every & counts & (tf.reduce_max(seed) > 0),
        )

    def _scales(self, seed, squares, terms) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """What the gradients under one weighting are looked at relative to, `[V]`.

        Args:
          seed: the weights, `[B]`.
          squares: `[V, B]`, of the norms.
          terms: `[V, B]`, the summed squares of what may cancel within an example.

        Returns:
          That; the root of the summed squares of the weighted norms; and what rounding
          may do where terms cancel.
        """
        # Weights that are 0 keep out what is not finite.
        shares = tf.where(seed > 0, tf.square(seed) * squares, 0.0)
        bounds = tf.reduce_sum(shares, axis=1)
        # Terms that cancel within an example are rounded before they do.
        terms = tf.where(seed > 0, tf.square(seed) * terms, 0.0)
        terms = tf.sqrt(tf.reduce_sum(terms, axis=1))
        rounding = _COARSE_ROUNDING if self._evidence.coarse else _ROUNDING
        together = tf.sqrt(tf.linalg.matvec(self._members, bounds))
        together = tf.gather(together, self._columns)
        bounds = tf.sqrt(bounds)
        # So that the allowance for rounding is within the tolerance.
        scales = bounds + (together + terms) * (rounding / self._limit) + 1e-30
        return scales, bounds, terms * rounding

    def _decisive(self, seed, lengths, scales, decisive, rounded):
        """The norms that decide about the clip, beside those of one example's sum."""
        engine = self._engine
        theirs = tf.where(seed[:, tf.newaxis] > 0, decisive, 0.0)
        norms = tf.reduce_max(theirs, axis=0) + 1e-30
        if engine.perturbation is not None:
            # The perturbed gradient is what is clipped.
            found = [flat(part, None)[0] for part in engine.perturbed_sums(seed)]
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

    def _finite(self) -> tf.Tensor:
        engine = self._engine
        return tf.math.is_finite(engine.loss) & tf.math.is_finite(engine.norms)

    # The check of a step.

    def claimed(self) -> tf.Tensor:
        """`[C]`, whether what rules took for granted is so, in the current graph.

        Whoever differentiates a fused layer first makes a copy of it, which others then
        use: here, and before `prepare`, it runs when a step is checked.
        """
        return tf.stack([claim() for claim, _ in self._evidence.claims])

    def _apart(self) -> list[str]:
        """What to say of the first entries of `compared`, that examples mix."""
        return [
            separation.COUNTS,
            *(message for _, message in self._evidence.claims),
            *(separation.mixed_at(probe.label) for probe in self.probes),
        ]

    def run(
        self,
        claimed: Sequence[tf.Tensor],
        few: tf.Tensor,
        before: Sequence[tf.Tensor],
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """Checks the step, in the current graph.

        Args:
          claimed: what `claimed` found, if there are any claims.
          few: whether one single example is to be looked at, not two, and some are to
            be replaced of a few, a boolean scalar.
          before: what `terms` made, and what `before` did.

        Returns:
          Two boolean scalars, whether all is well and whether the batch could show
          otherwise, and what to say if it is not; None under XLA, where nothing can be
          said.
        """
        engine, messages = self._engine, self._apart()
        count = engine.parts.batch_size
        terms, seeds, *made = before
        ahead = made[0] if made else None
        seeds.set_shape([None, engine.flows.batch_size])
        weightings, unmoved = self._weightings(seeds, terms, ahead), []
        noise = tf.zeros([len(engine.variables)])
        if self.replaced is None:
            found = self._compared(weightings)
            tells = tf.constant(engine.flows.batch_size != 1)
        else:
            sizes = tf.sqrt(tf.reduce_sum(terms, axis=0))
            moved, tells, noise, state = self.replaced.test(
                *(count, sizes, self._finite(), few, weightings)
            )
            found, unmoved = _comparison(state), [moved]
            messages += self.replaced.messages
        # Sums of more rounding than that say little of anything.
        noise = tf.where(tf.math.is_finite(noise), _NUDGES * noise, 0.0)
        tells &= tf.reduce_max(noise) <= COARSE_TOLERANCE
        limit = tf.maximum(noise, self._limit)
        # Mixed examples before wrong sums: they may be why sums differ, too.
        agree = separation.counts_agree(engine.flows, count)
        apart = [agree[tf.newaxis], *claimed, found.good, *unmoved]
        # Of a group, what its own variables are excused; not those of others.
        by_group = tf.reduce_max(self._members * limit, axis=1)
        total = tf.reduce_all(found.groups <= by_group)[tf.newaxis]
        sums, norms = found.sums <= limit, found.norms <= limit
        every = tf.concat([*apart, sums, norms, total], axis=0)
        for message in (_wrong_sum, _wrong_norm):
            messages += [
                message(v.name, self._evidence.where(i))
                for i, v in enumerate(engine.variables)
            ]
        messages.append(_WRONG_TOTAL)
        message = None
        if not in_xla():
            # The first that is not met; if all are, it is an old failure that counts.
            first = tf.argmin(tf.cast(tf.concat([every, [False]], 0), tf.int32))
            message = tf.gather([*messages, _AGAIN], first)
        conclusive = tells & tf.reduce_all(found.telling) & found.compared
        return tf.reduce_all(every), conclusive, message


def _comparison(state: Sequence[tf.Tensor]) -> Comparison:
    return Comparison(*state[1:])


_REMEDY = (
    "Nothing was released. dpc.testing.assert_exact(model, (x, y)) compares all "
    "examples. If a rule of yours covers that op (op_rule), mend the rule; if not, "
    "build the layer of other ops, and report it, please." + see("a-wrong-gradient")
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
