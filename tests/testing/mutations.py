"""Bugs planted in the library, each with the check that must find it.

Every mutation is a mistake that was made, or could be made, in a private optimizer.
`python -m tests.testing.mutations` writes to docs/results/planted_bugs.md which check
found it, here and in `federated_mutations`.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf

import tfdpclip as dpc
from driver_kit import command_line
from tests.testing import gated as gates
from tests.testing import planting
from tests.testing.planting import Mutation
from tfdpclip import clipping, testing
from tfdpclip.clipping import rules
from tfdpclip.gradients.engine import PerExampleGradients
from tfdpclip.gradients.forms.perturbation import Perturbation
from tfdpclip.gradients.forms.records import RecordGradients
from tfdpclip.gradients.loss import loss_parts
from tfdpclip.gradients.rules.combine import VariableGradient
from tfdpclip.keras.private_optimizer import PrivateOptimizer
from tfdpclip.kernel import certificate
from tfdpclip.mechanism import Mechanism
from tfdpclip.noise import GaussianNoise

EXAMPLES, FEATURES, CLASSES = 24, 8, 3
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
PRECISE = clipping.QuantileClip(initial_norm=1.5, count_stddev=0.6)


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    return x, rng.integers(0, CLASSES, EXAMPLES)


def model_of(shared=False, norm=False, gated=False, **options):
    tf.keras.utils.set_random_seed(0)
    inputs = tf.keras.Input((FEATURES,))
    hidden = tf.keras.layers.Dense(16, activation="relu", name="hidden")(inputs)
    if shared:
        layer = tf.keras.layers.Dense(16)
        hidden = layer(hidden) + layer(0.9 * hidden)
    if norm:
        hidden = tf.keras.layers.BatchNormalization()(hidden)
    if gated:
        hidden = gates.Gate()(hidden)
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(CLASSES, name="head")(hidden))
    settings = {"clip": 0.5, "noise_multiplier": 0.5, "expected_batch_size": EXAMPLES}
    model.compile(dpc.keras.DPSGD(0.1, **{**settings, **options}), LOSS)
    return model


# Checks: each raises AssertionError, or nothing.


def sensitivity(**options):
    testing.assert_sensitivity(model_of(**options), data())


def small_gradients(**options):
    """`sensitivity`, where norms are below 1."""
    x, y = data()
    testing.assert_sensitivity(model_of(**options), (0.02 * x, y))


def noise(**options):
    testing.assert_noise(model_of(**options), data(), steps=32)


def isolation(**options):
    x, y = data()
    testing.assert_isolated(model_of(norm=True, **options), x, y)


def isolated(**options):
    testing.assert_isolated(model_of(**options), *data())


def isolated_by_keras(**options):
    try:
        dpc.keras.check_isolation(model_of(**options), *data())
    except dpc.ExampleIsolationError as error:
        raise AssertionError(str(error)) from error


def plain_gradient(**options):
    """With a huge clip and no noise, a step is a step of plain SGD."""
    options = {**options, "clip": 1e6, "noise_multiplier": 0.0}
    model = model_of(**options)
    x, y = data()
    with tf.GradientTape() as tape:
        loss = LOSS(y, model(x))
    wanted = [
        v - 0.1 * g
        for v, g in zip(
            model.trainable_variables,
            tape.gradient(loss, model.trainable_variables),
            strict=True,
        )
    ]
    model.train_on_batch(x, y)
    for variable, value in zip(model.trainable_variables, wanted, strict=True):
        np.testing.assert_allclose(variable, value, rtol=1e-4, atol=1e-6)


def accumulated_clip(**options):
    """The clip norm moves by the fraction of all physical batches."""
    rule = clipping.QuantileClip(0.5, initial_norm=1e-6)
    model = model_of(clip=rule, noise_multiplier=0.0, accumulation_steps=3, **options)
    x, y = data()
    for part in range(3):
        rows = slice(8 * part, 8 * part + 8)
        # The first two batches are padding without records.
        weight = np.full(8, float(part == 2), np.float32)
        model.train_on_batch(x[rows], y[rows], sample_weight=weight)
    # 8 of 24 expected records, all above the clip norm: the fraction is 1/2 - 8/48.
    fraction = 0.5 - 8 * 0.5 / EXAMPLES
    wanted = 1e-6 * math.exp(-0.2 * (fraction - 0.5))
    np.testing.assert_allclose(model.optimizer.clip_norm, wanted, rtol=1e-5)


def follows_the_quantile(**options):
    rule = clipping.QuantileClip(0.5, initial_norm=0.1, **options)
    state = rule.initial_state()
    norms = tf.constant(np.linspace(0.5, 1.5, 101), tf.float32)
    for _ in range(60):
        bits = rule.indicators(norms, state)
        state = rule.next_state(state, tf.reduce_mean(bits, 0) + 0.5)
    np.testing.assert_allclose(rule.clip_norm(state), 1.0, atol=0.05)


def assert_clip_restored(**options):
    model, other = (model_of(clip=PRECISE, **options) for _ in range(2))
    model.train_on_batch(*data())
    other.optimizer.build(other.trainable_variables)
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(optimizer=model.optimizer).write(f"{folder}/clip")
        tf.train.Checkpoint(optimizer=other.optimizer).read(path)
    np.testing.assert_array_equal(model.optimizer.clip_norm, other.optimizer.clip_norm)


def accounted(**options):
    """The statement is about the noise multiplier that was given."""
    x, y = data()
    batches = dpc.sampling.Poisson(0.5).batches((x, y))
    model = model_of(clip=PRECISE, expected_batch_size=EXAMPLES / 2, **options)
    budget = dpc.keras.PrivacyBudget(1e6, 1e-5, batches)
    model.fit(batches, verbose=0, callbacks=[budget])
    assert budget.statement().noise_multipliers == (0.5,), budget.statement()


def clip_rule(**options):
    testing.assert_clip_rule(clipping.FixedClip(0.5), **options)


def exact(**options):
    testing.assert_exact(model_of(**options), data())


def proves_itself(**options):
    """A step with wrong norms raises."""
    model = model_of(**options)
    wrong = mock.patch.object(VariableGradient, "measured", _halved_norms)
    with wrong:
        _must_raise(lambda: model.train_on_batch(*data()))


def _must_raise(act):
    try:
        act()
    except tf.errors.InvalidArgumentError as error:
        assert "GradientMismatchError" in str(error), error
        return
    raise AssertionError("a step with wrong norms believes itself")


_init_gradients = PerExampleGradients.__init__
_measured = VariableGradient.measured
_norm_errors = certificate.norm_errors


def _with_norms(self, budget, change):
    found = _measured(self, budget)
    return dataclasses.replace(found, squared_norms=change(found.squared_norms))


def _halved_norms(self, budget):
    return _with_norms(self, budget, lambda squares: 0.25 * squares)


def _one_halved(self, budget):
    """Wrong for a middle example, which the step's check seldom draws."""

    def change(squares):
        middle = tf.argsort(squares)[EXAMPLES // 2]
        return squares * (1.0 - 0.75 * tf.one_hot(middle, tf.shape(squares)[0]))

    return _with_norms(self, budget, change)


def _other_groups(self, assignment=None):
    found = _record_norms(self, assignment)
    return found if assignment is None else tf.reverse(found, [1])


def _nothing_differs(*args):
    errors, shows = _norm_errors(*args)
    return tf.zeros_like(errors), shows


_release = PrivateOptimizer._release
_clipped = PrivateOptimizer._clipped
_add_noise = Mechanism.add_noise
_sample_all = GaussianNoise.sample_all
_init_noise = GaussianNoise.__init__
_record_norms = RecordGradients.record_norms
_plain_squares = PerExampleGradients._plain_squares
_weighted_sum = PerExampleGradients.weighted_sum
_sums = PerExampleGradients._sums
_indicators = rules.QuantileClip.indicators
_next_state = rules.QuantileClip.next_state
_perturbed_norms = Perturbation.squared_norms


class _Silent:
    """A noise source that adds nothing."""

    def sample_all(self, shapes, stddevs, dtypes=None):
        return [
            tf.zeros(s, t or tf.float32) for s, t in zip(shapes, dtypes, strict=True)
        ]

    def sample(self, shape, stddev, dtype=tf.float32):
        return tf.zeros(shape, dtype)


def _no_noise_before_the_update(self, gradients, state, sums, counts, shared):
    own, self._noise = self._noise, _Silent()
    try:
        return _release(self, gradients, state, sums, counts, shared)
    finally:
        self._noise = own


def _actual_batch_size(self, records, state):
    sums, counts, shared = _clipped(self, records, state)
    real = tf.maximum(tf.reduce_sum(tf.cast(records.present, tf.float32)), 1.0)
    return [part * (self._divisor / real) for part in sums], counts, shared


def _divided_twice(self, gradients, state, sums, counts, shared):
    """The noise is divided by the batch size before it is added to the sum."""
    mechanism, own = self._mechanism, self._mechanism.inflation
    mechanism.inflation = own / self._divisor
    try:
        return _release(self, gradients, state, sums, counts, shared)
    finally:
        mechanism.inflation = own


def _adapt_first(self, state, sums, counts, *rest, **options):
    moved = self.rule.next_state(state, self.fractions(counts))
    return _add_noise(self, moved, sums, counts, *rest, **options)


class _CountsLeftOut:
    """A noise source whose last draw, the noise of the counts, is zero."""

    def __init__(self, own):
        self._own = own

    def sample_all(self, shapes, stddevs, dtypes=None):
        *others, last = self._own.sample_all(shapes, stddevs, dtypes)
        return [*others, tf.zeros_like(last)]


def _exact_counts(self, gradients, state, sums, counts, shared):
    own, self._noise = self._noise, _CountsLeftOut(self._noise)
    try:
        return _release(self, gradients, state, sums, counts, shared)
    finally:
        self._noise = own


def _last_batch_counts(self, gradients, state, sums, counts, shared):
    # The counts that the last physical batch alone would have added.
    counts = counts / self._accumulation_steps
    return _release(self, gradients, state, sums, counts, shared)


def _fixed_entropy(self, seed=None, hardened=False, replica=None):
    _init_noise(self, 1234, hardened, replica)
    self.seed = seed


def _same_every_step(self, shapes, stddevs, dtypes=None):
    return [
        tf.cast(
            tf.random.stateless_normal(shape, [1, 2 + i]) * tf.cast(s, tf.float32), t
        )
        for i, (shape, s, t) in enumerate(zip(shapes, stddevs, dtypes, strict=True))
    ]


def _same_for_every_variable(self, shapes, stddevs, dtypes=None):
    seed = self.seed_pair()
    flat = [int(np.prod(shape)) for shape in shapes]
    drawn = tf.random.stateless_normal([max(flat)], seed)
    return [
        tf.cast(tf.reshape(drawn[:n], shape) * tf.cast(s, tf.float32), t)
        for n, shape, s, t in zip(flat, shapes, stddevs, dtypes, strict=True)
    ]


def _uniform(self, shapes, stddevs, dtypes=None):
    found = _sample_all(self, shapes, [1.0] * len(shapes), dtypes)
    return [
        (tf.math.erf(n / math.sqrt(2)) * math.sqrt(3)) * tf.cast(s, n.dtype)
        for n, s in zip(found, stddevs, strict=True)
    ]


def _no_bias_norms(self):
    squares = _plain_squares(self)
    return [
        tf.zeros_like(s) if v.shape.rank == 1 else s
        for s, v in zip(squares, self.variables, strict=True)
    ]


def _largest_variable(self, assignment=None):
    return tf.sqrt(tf.reduce_max(tf.stack(self._squares()), axis=0))


def _uses_apart(self):
    self._orthogonal = True


def _other_dropout_mask(self, assignment=None):
    norms = _record_norms(self, assignment)
    return norms * tf.random.uniform(tf.shape(norms), 0.3, 1.0)


def _let_through(self, weights, assignment=None):
    with mock.patch.object(tf.math, "is_finite", lambda t: tf.ones_like(t, tf.bool)):
        return _weighted_sum(self, tf.ones_like(weights), assignment)


def _padding_counted(self, norms, state, present=None):
    return _indicators(self, norms, state, None)


def _floored(self, norms, state):
    weights = rules._saturating_weights(norms, self.clip_norm(state), False)
    return tf.where(tf.math.is_finite(norms), tf.maximum(weights, 0.1), weights)


def _other_sign(self, state, fractions):
    return _next_state(self, state, 2 * self.target_quantile - fractions)


def _mean(self, weights, assignment=None):
    count = tf.cast(self.parts.batch_size, tf.float32)
    return [total / count for total in _weighted_sum(self, weights, assignment)]


def _other_perturbation(self, gradients, batch_size):
    own = self._seeds
    self._seeds = [seed + 1 for seed in own]
    try:
        return _perturbed_norms(self, gradients, batch_size)
    finally:
        self._seeds = own


def _rows_apart(self, *args, **options):
    _init_gradients(self, *args, **{**options, "rows_per_record": 1})


def _rows_of_neighbours(tensor):
    return tf.roll(tensor, 1, axis=0) if tensor.shape.rank == 1 else tensor


def _sum_of_rows(tensor):
    return 2.0 * tensor


LAYERWISE = {"clip": clipping.LayerwiseClip(0.25)}
QUANTILE = {"clip": clipping.QuantileClip(initial_norm=1.5)}
SCALED = {"clip": clipping.ScaledClip({"hidden": 0.3, "head": 1.0}, 0.3)}
GATED = {"gated": True}
# A record has two rows.
RECORDS = {"rows_per_record": 2, "expected_batch_size": EXAMPLES // 2}
# The checks of the step are off, so the assertion must find the bug.
UNCHECKED = {"gated": True, "check_gradients": "never"}
_HARDEST = gates.hardest(tf.keras.losses.SparseCategoricalCrossentropy.call)
PUBLIC = {"clip": clipping.PublicNormClip(0.3, norms={"hidden": 0.1, "head": 1.0})}

MUTATIONS = [
    Mutation(
        "update before noise",
        PrivateOptimizer,
        "_release",
        _no_noise_before_the_update,
        sensitivity,
    ),
    Mutation(
        "actual batch size as divisor",
        PrivateOptimizer,
        "_clipped",
        _actual_batch_size,
        sensitivity,
    ),
    Mutation(
        "noise divided by the batch size twice",
        PrivateOptimizer,
        "_release",
        _divided_twice,
        sensitivity,
    ),
    Mutation(
        "clip moves before noise is scaled",
        Mechanism,
        "add_noise",
        _adapt_first,
        sensitivity,
        QUANTILE,
    ),
    Mutation(
        "counts without noise",
        PrivateOptimizer,
        "_release",
        _exact_counts,
        sensitivity,
        QUANTILE,
    ),
    Mutation(
        "noise not split between sum and count",
        Mechanism,
        "gradient_noise_multiplier",
        lambda self, step=0: self.noise_multiplier,
        sensitivity,
        {"clip": PRECISE},
    ),
    Mutation(
        "no clipping",
        rules.FixedClip,
        "weights",
        lambda self, norms, state: tf.ones_like(norms),
        sensitivity,
    ),
    Mutation(
        "clip compared with the squared norm",
        rules.FixedClip,
        "weights",
        lambda self, norms, state: rules._saturating_weights(
            norms**2, self.norm, False
        ),
        small_gradients,
        {"clip": 0.05},
    ),
    Mutation(
        "a clip rule without a bound",
        rules.FixedClip,
        "weights",
        _floored,
        clip_rule,
    ),
    Mutation(
        "a clip rule without a bound, in training",
        rules.FixedClip,
        "weights",
        _floored,
        sensitivity,
    ),
    Mutation(
        "bias left out of the norm",
        PerExampleGradients,
        "_plain_squares",
        _no_bias_norms,
        sensitivity,
    ),
    Mutation(
        "largest variable in place of all",
        RecordGradients,
        "record_norms",
        _largest_variable,
        sensitivity,
    ),
    Mutation(
        "norms of a shared variable's uses added",
        VariableGradient,
        "_join",
        _uses_apart,
        sensitivity,
        {"shared": True},
    ),
    Mutation(
        "another dropout mask for norm than for sum",
        RecordGradients,
        "record_norms",
        _other_dropout_mask,
        sensitivity,
    ),
    Mutation(
        "NaN let through",
        PerExampleGradients,
        "weighted_sum",
        _let_through,
        sensitivity,
    ),
    Mutation(
        "padding counted",
        rules.QuantileClip,
        "indicators",
        _padding_counted,
        sensitivity,
        {"clip": clipping.QuantileClip(initial_norm=0.5, count_stddev=0.6)},
    ),
    Mutation(
        "padding perturbed",
        PerExampleGradients,
        "mask",
        lambda self, values: values,
        sensitivity,
        {"perturbation": 5.0},
    ),
    Mutation(
        "another perturbation for norm than for sum",
        Perturbation,
        "squared_norms",
        _other_perturbation,
        sensitivity,
        {"perturbation": 5.0},
    ),
    Mutation(
        "one example's norms too small",
        VariableGradient,
        "measured",
        _one_halved,
        exact,
    ),
    Mutation(
        "norms of groups in another order",
        RecordGradients,
        "record_norms",
        _other_groups,
        exact,
        {"clip": clipping.LayerwiseClip(0.25)},
    ),
    Mutation(
        "sums a hundredth too large",
        PerExampleGradients,
        "_sums",
        lambda self, columns, *rest: _sums(self, [1.01 * c for c in columns], *rest),
        exact,
    ),
    Mutation(
        "rows of a record clipped one by one",
        PerExampleGradients,
        "__init__",
        _rows_apart,
        sensitivity,
        RECORDS,
    ),
    Mutation(
        "rows of neighbours taken for a record's",
        loss_parts,
        "_in_float32",
        _rows_of_neighbours,
        sensitivity,
        RECORDS,
    ),
    Mutation(
        "sum over a record's rows in place of the mean",
        loss_parts,
        "_in_float32",
        _sum_of_rows,
        plain_gradient,
        RECORDS,
    ),
    Mutation(
        "a step that believes itself",
        certificate,
        "norm_errors",
        _nothing_differs,
        proves_itself,
    ),
    Mutation(
        "sqrt(L) missing",
        clipping.LayerwiseClip,
        "noise_scales",
        lambda self, state: self.sensitivity(state),
        sensitivity,
        LAYERWISE,
    ),
    Mutation(
        "joint noise of the largest group only",
        clipping.LayerwiseClip,
        "noise_scales",
        lambda self, state: tf.fill(
            [len(self.layout)], tf.reduce_max(self.sensitivity(state))
        ),
        sensitivity,
        LAYERWISE,
    ),
    Mutation(
        "scaled clip not divided back",
        clipping.ScaledClip,
        "noise_scales",
        lambda self, state: tf.fill(
            [len(self.layout)], self.norm.sensitivity(state[0])
        ),
        sensitivity,
        SCALED,
    ),
    Mutation(
        "public shares in the noise, not in the clip",
        clipping.PublicNormClip,
        "_relative",
        lambda self, norms, state: norms,
        sensitivity,
        PUBLIC,
    ),
    Mutation(
        "batch clipping accounted like examples",
        dpc.accounting,
        "sensitivity_factor",
        lambda *args, **kwargs: 1.0,
        sensitivity,
        {"unit": "batch"},
    ),
    Mutation(
        "no noise at all",
        GaussianNoise,
        "sample_all",
        _Silent.sample_all,
        noise,
    ),
    Mutation(
        "noise a fifth too small",
        GaussianNoise,
        "sample_all",
        lambda self, shapes, stddevs, dtypes=None: _sample_all(
            self, shapes, [0.8 * s for s in stddevs], dtypes
        ),
        noise,
    ),
    Mutation(
        "noise from a fixed state",
        GaussianNoise,
        "__init__",
        _fixed_entropy,
        noise,
    ),
    Mutation(
        "the same noise in every step",
        GaussianNoise,
        "sample_all",
        _same_every_step,
        noise,
    ),
    Mutation(
        "the same noise for every variable",
        GaussianNoise,
        "sample_all",
        _same_for_every_variable,
        noise,
    ),
    Mutation(
        "noise that is not Gaussian", GaussianNoise, "sample_all", _uniform, noise
    ),
    Mutation(
        "enlarged multiplier in the accountant",
        PrivateOptimizer,
        "noise_multiplier",
        PrivateOptimizer.gradient_noise_multiplier,
        accounted,
    ),
    Mutation(
        "sign of the clip's update",
        rules.QuantileClip,
        "next_state",
        _other_sign,
        follows_the_quantile,
    ),
    Mutation(
        "mean in place of the sum",
        PerExampleGradients,
        "weighted_sum",
        _mean,
        plain_gradient,
    ),
    Mutation(
        "count over one physical batch",
        PrivateOptimizer,
        "_release",
        _last_batch_counts,
        accumulated_clip,
    ),
    Mutation(
        "the largest activation scales everybody's gradient",
        gates,
        "gate",
        gates.damped,
        isolated,
        GATED,
    ),
    Mutation(
        "no gradient far above the batch's median",
        gates,
        "gate",
        gates.masked,
        isolated_by_keras,
        GATED,
    ),
    Mutation(
        "an outlier takes everybody's gradient away",
        gates,
        "gate",
        gates.outlying,
        isolated,
        GATED,
    ),
    Mutation(
        "an outlier takes everybody's gradient away, in training",
        gates,
        "gate",
        gates.outlying,
        sensitivity,
        UNCHECKED,
    ),
    Mutation(
        "the first example scales everybody's gradient, in a custom gradient",
        gates,
        "gate",
        gates.scaled_backwards,
        isolated,
        GATED,
    ),
    Mutation(
        "gradients of the hardest examples only",
        tf.keras.losses.SparseCategoricalCrossentropy,
        "call",
        _HARDEST,
        isolated_by_keras,
    ),
    Mutation(
        "gradients of the hardest examples only, in training",
        tf.keras.losses.SparseCategoricalCrossentropy,
        "call",
        _HARDEST,
        sensitivity,
        {"check_gradients": "never"},
    ),
]


if __name__ == "__main__":
    command_line.argument_parser(__doc__).parse_args()
    planting.write_page()
