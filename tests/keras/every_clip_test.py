"""Every way to clip, in every combination: each step is one Gaussian mechanism.

For each combination of clip, rule, normalisation, optimizer and accumulation, half of
them compiled as well, on whole steps of a real optimizer:

(a) with noise off, the released sum, every group divided by its noise scale, moves by
    at most 1 when a record comes or goes, and each sum of indicators by 1/2;
(b) the noise on group h has stddev z_g times its noise scale;
(c) with these z_g, (a) and the counts' noise add up to the accountant's z.
"""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD, DPAdam, L, flat, mostly_slow
from tests.stack import place_of
from tfdpclip.clipping import (
    AutomaticClip,
    FixedClip,
    LayerwiseClip,
    PublicNormClip,
    QuantileClip,
    ScaledClip,
)
from tfdpclip.keras import privatize

pytestmark = pytest.mark.unchecked

EXPECTED = 32.0
ROWS = 9
Z = 0.8
# Rounding, of a sum of a few clipped records in float32.
SLACK = 1 + 1e-4
WIDE = 60
E = {"one": 3.0, "two": 0.2}
# So precise that z_g is much larger than z; two of them must fit.
COUNT_STDDEV = 0.9


def base_rule(rule, normalize, count_stddev=COUNT_STDDEV):
    if rule == "fixed":
        return FixedClip(0.5, normalize=normalize)
    if rule == "quantile":
        return QuantileClip(
            0.5, 0.5, 2.0, count_stddev=count_stddev, normalize=normalize
        )
    return AutomaticClip(0.01, normalize=normalize)


CLIPS = {
    "flat": lambda base: base,
    "per_layer": lambda base: LayerwiseClip(base),
    "joint": lambda base: LayerwiseClip(base, allocation="joint"),
    "public": lambda base: PublicNormClip(base, norms=E),
    "public_joint": lambda base: PublicNormClip(base, allocation="joint", norms=E),
    "scaled": lambda base: ScaledClip({"one": 0.5, "two": 5.0}, base),
}
RULES = ["fixed", "quantile", "automatic"]


def recording(optimizer_class):
    """The optimizer class, keeping the gradients that it was last given."""

    class Recording(optimizer_class):
        def build(self, var_list):
            super().build(var_list)
            if not hasattr(self, "seen"):
                with tf.init_scope():
                    self.seen = [
                        tf.Variable(tf.zeros(v.shape), trainable=False)
                        for v in var_list
                    ]

        def update_step(self, gradient, variable, *rate):
            self.seen[place_of(self, variable)].assign(gradient)
            return super().update_step(gradient, variable, *rate)

    Recording.__name__ = f"Recording{optimizer_class.__name__}"
    return privatize(Recording)


KINDS = {
    "sgd": recording(tf.keras.optimizers.SGD),
    "adam": recording(tf.keras.optimizers.Adam),
}
PLAIN = {"sgd": DPSGD, "adam": DPAdam}
AXES = [list(CLIPS), RULES, [False, True], list(KINDS), [1, 3], [False, True]]


def covering():
    """Few combinations, in which every pair of settings of two axes occurs."""
    every = list(itertools.product(*AXES))

    def pairs(combination):
        return {
            (i, j, combination[i], combination[j])
            for i, j in itertools.combinations(range(len(AXES)), 2)
        }

    missing = set().union(*map(pairs, every))
    chosen = []
    while missing:
        best = max(every, key=lambda c: len(pairs(c) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


QUICK = covering()


def combinations(both=True):
    """Every combination, or without normalisation except for the quick ones."""
    for combination in itertools.product(*AXES):
        clip, rule, normalize, kind, k, jit = combination
        if normalize and not both and combination not in QUICK:
            continue
        # XLA never frees compiled programs, 100 MB each time: SGD with one batch a
        # step, Adam with three.
        if jit and (kind == "adam") != (k == 3) and combination not in QUICK:
            continue
        name = "-".join(
            [clip, rule, kind, str(k)] + ["normalize"] * normalize + ["jit"] * jit
        )
        marks = [] if combination in QUICK else [pytest.mark.slow]
        yield pytest.param(*combination, marks=marks, id=name)


every_combination = pytest.mark.parametrize(
    "clip, rule, normalize, kind, k, jit", list(combinations())
)


def two_layers(inputs=4, width=5):
    tf.keras.utils.set_random_seed(3)
    return tf.keras.Sequential(
        [
            tf.keras.Input((inputs,)),
            L.Dense(width, "tanh", name="one"),
            L.Dense(1, name="two"),
        ]
    )


class Steps:
    """Logical steps of an optimizer, cut into k physical batches of fixed shape."""

    def __init__(self, rule, kind, k, jit, z, inputs=4, width=5):
        self.model = two_layers(inputs, width)
        self.variables = self.model.trainable_variables
        self.k = k
        self.optimizer = kind(
            1e-3,
            clip=rule,
            noise_multiplier=z,
            expected_batch_size=EXPECTED,
            accumulation_steps=k,
        )
        self.optimizer.build(self.variables)
        self.start = [v.numpy() for v in self.variables]
        self.state = [v.numpy() for v in self.optimizer._clip_state]
        loss = tf.keras.losses.MeanSquaredError()
        rows = ROWS // k if jit else None

        @tf.function(
            input_signature=[
                tf.TensorSpec([rows, inputs]),
                tf.TensorSpec([rows, 1]),
                tf.TensorSpec([rows]),
            ],
            jit_compile=jit,
        )
        def minimize(x, y, weight):
            self.optimizer.minimize(
                loss(y, self.model(x, training=True), sample_weight=weight),
                self.variables,
            )

        self._minimize = minimize

    @property
    def scales(self):
        """The noise scale of each entry of the gradient."""
        rule = self.optimizer.clip
        scales = np.asarray(rule.noise_scales(self.optimizer.clip_state), np.float64)
        groups = rule.assignment or [0] * len(self.variables)
        scales = np.broadcast_to(scales, [max(groups) + 1])
        parts = zip(self.variables, groups, strict=True)
        return np.concatenate(
            [np.full(v.shape.num_elements(), scales[g]) for v, g in parts]
        )

    def reset(self):
        for variable, value in zip(self.variables, self.start, strict=True):
            variable.assign(value)
        for variable, value in zip(self.optimizer._clip_state, self.state, strict=True):
            variable.assign(value)

    def __call__(self, x, y, weight):
        """The released sum, and the sums of indicators (if noise is off)."""
        for part in np.array_split(np.arange(len(y)), self.k):
            self._minimize(x[part], y[part], weight[part])
        return flat(self.optimizer.seen) * EXPECTED

    def counts(self):
        """The sums of indicators, from how far the clip norms moved."""
        clip_norm = np.atleast_1d(_adaptive(self.optimizer))
        if clip_norm.size == 0:
            return np.zeros([0])
        error = -np.log(clip_norm / 0.5) / 2.0
        return (error + 0.5 - 0.5) * EXPECTED


def _adaptive(optimizer):
    """The clip norms that quantiles are tracked by."""
    rule = optimizer.clip
    if not rule.count_stddevs(EXPECTED):
        return np.zeros([0])
    return tf.nest.flatten(optimizer.clip_state)[0].numpy()


# The record that comes or goes: the scales of x and y, and x's value.
RECORDS = {
    "ordinary": (1.0, 1.0),
    "huge": (1.0, 1e6),
    "overflowing": (1.0, 1e30),
    "tiny": (1e-8, 1e-3),
    "zero": (0.0, 0.0),
    "nan": (math.nan, 1.0),
    "nan_label": (1.0, math.nan),
    "inf": (math.inf, 1.0),
}


def records(kind, place):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((ROWS, 4)).astype("float32")
    y = 2 * rng.standard_normal((ROWS, 1)).astype("float32")
    y[place] = 2.0
    x[place] *= np.float32(RECORDS[kind][0])
    y[place] *= np.float32(RECORDS[kind][1])
    return x, y


def without(x, y, place, jit):
    """The batch without a record: gone, or padding where shapes are fixed."""
    weight = np.ones(ROWS, np.float32)
    if not jit:
        rest = np.delete(np.arange(ROWS), place)
        return x[rest], y[rest], weight[rest]
    x, y = x.copy(), y.copy()
    x[place] = y[place] = weight[place] = 0
    return x, y, weight


def check_sensitivity(steps, jit, kinds=RECORDS):
    ones = np.ones(ROWS, np.float32)
    scales = steps.scales
    worst, worst_count = 0.0, 0.0
    for kind, place in itertools.product(kinds, (0, ROWS - 1)):
        x, y = records(kind, place)
        steps.reset()
        with_it = steps(x, y, ones)
        counts_with = steps.counts()
        steps.reset()
        without_it = steps(*without(x, y, place, jit))
        counts = counts_with - steps.counts()
        moved = np.linalg.norm((with_it - without_it) / scales)
        assert np.all(np.isfinite(with_it)), kind
        assert moved <= SLACK, kind
        assert np.all(np.abs(counts) <= 0.5 + 2e-3), kind
        worst = max(worst, moved)
        worst_count = max(worst_count, *np.abs(counts), 0.0)
    # The bounds are reached: the record is there, and no noise is wasted.
    assert worst > 0.9
    if steps.optimizer.count_stddevs:
        assert worst_count > 0.45


def check_noise(steps, draws):
    """Six standard errors for each group: a false alarm in 2e-9.

    The gradients are zero, for all the data are; the clip norms move in between.
    """
    inputs = steps.variables[0].shape[0]
    zeros = np.zeros([ROWS, inputs], np.float32)
    weights = np.zeros(ROWS, np.float32)
    found = []
    for _ in range(draws):
        scales = steps.scales
        found.append(steps(zeros, zeros[:, :1], weights) / scales)
    z_g = steps.optimizer.gradient_noise_multiplier
    sizes = [v.shape.num_elements() for v in steps.variables]
    parts = np.split(np.stack(found), np.cumsum(sizes)[:-1], axis=1)
    for layer in (parts[:2], parts[2:]):
        sample = np.concatenate([part.ravel() for part in layer])
        rel = 6 / math.sqrt(2 * sample.size)
        assert np.std(sample) == pytest.approx(z_g, rel=rel)
        assert abs(np.mean(sample)) < 6 * z_g / math.sqrt(sample.size)
    whole = np.stack(found)
    limit = 6 / math.sqrt(whole.shape[1])
    assert abs(np.corrcoef(whole[0], whole[1])[0, 1]) < limit


def check_accountant(optimizer):
    """The releases, in units of their noise, have sensitivity 1 / z."""
    stddevs = optimizer.count_stddevs
    spent = optimizer.gradient_noise_multiplier**-2
    spent += sum((2 * s) ** -2 for s in stddevs)
    assert optimizer.noise_multiplier == pytest.approx(Z)
    assert spent == pytest.approx(Z**-2)
    rule, state = optimizer.clip, optimizer.clip_state
    ratios = np.asarray(rule.sensitivity(state) / rule.noise_scales(state))
    joint = ratios.max() if isinstance(rule, ScaledClip) else np.linalg.norm(ratios)
    assert joint == pytest.approx(1.0, rel=1e-5)


@pytest.mark.thinned(6)
@every_combination
def test_a_step_is_a_gaussian_mechanism_of_the_accountants_z(
    clip, rule, normalize, kind, k, jit
):
    exact = CLIPS[clip](base_rule(rule, normalize, 0.0))
    kinds = ["huge", "ordinary", "nan"] if jit else RECORDS
    check_sensitivity(Steps(exact, KINDS[kind], k, jit, 0), jit, kinds)
    made = CLIPS[clip](base_rule(rule, normalize))
    steps = Steps(made, KINDS[kind], k, jit, Z, inputs=WIDE, width=WIDE * 2)
    check_accountant(steps.optimizer)
    check_noise(steps, 40)
    check_accountant(steps.optimizer)
    if rule == "quantile":
        # Noise alone moved the clip norms, each group's by a draw of its own.
        norms = np.atleast_1d(_adaptive(steps.optimizer))
        assert (
            len(set(norms.tolist()))
            == len(norms)
            == (2 if "lay" in clip or clip == "joint" else 1)
        )


@pytest.mark.parametrize(
    "clip, rule, normalize, kind, k, jit", list(combinations(both=False))
)
@pytest.mark.slow
def test_a_run_goes_on_from_a_file_as_if_it_had_not_stopped(
    clip, rule, normalize, kind, k, jit, tmp_path
):
    """Noise off, so that two runs can be compared at all."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 6, 4)).astype("float32")
    y = rng.standard_normal((4, 6, 1)).astype("float32")

    def fresh():
        model = two_layers()
        optimizer = PLAIN[kind](
            0.05,
            clip=CLIPS[clip](base_rule(rule, normalize, 0.0)),
            noise_multiplier=0,
            expected_batch_size=6,
            accumulation_steps=k,
        )
        model.compile(optimizer, "mse", jit_compile=jit)
        return model

    def train(model, steps):
        for step in steps:
            for part in np.array_split(np.arange(6), k):
                model.train_on_batch(x[step][part], y[step][part])
        return flat(model.trainable_variables)

    whole = fresh()
    train(whole, range(2))
    path = str(tmp_path / "model.keras")
    whole.save(path)
    checkpoint = tf.train.Checkpoint(model=whole, optimizer=whole.optimizer)
    saved = checkpoint.save(str(tmp_path / "checkpoint"))
    expected = train(whole, range(2, 4))
    loaded = tf.keras.models.load_model(path)
    again = fresh()
    restored = tf.train.Checkpoint(model=again, optimizer=again.optimizer)
    restored.restore(saved)
    for model in (loaded, again):
        np.testing.assert_allclose(train(model, range(2, 4)), expected, atol=1e-6)
        assert model.optimizer.clip_norms == pytest.approx(whole.optimizer.clip_norms)
        assert int(model.optimizer.iterations) == 4
        assert model.optimizer.clip == whole.optimizer.clip


def released(form, rule, unit, jit, x):
    """The clipped gradient of one example, from the optimizer's first step."""
    w = tf.Variable(tf.zeros([x.shape[1]]), name="one/w")
    optimizer = DPSGD(
        1.0, clip=rule, noise_multiplier=0, expected_batch_size=1, unit=unit
    )

    @tf.function(jit_compile=jit)
    def step(x):
        loss = tf.reduce_sum(x * w, 1) if form == "mul" else tf.linalg.matvec(x, w)
        optimizer.minimize(loss, [w])

    step(tf.constant(x))
    return np.linalg.norm(w.numpy().astype(np.float64))


@pytest.mark.parametrize("jit", mostly_slow([False], [False, True]))
@pytest.mark.parametrize("unit", ["example", "batch"])
@pytest.mark.parametrize("form", ["mul", "matvec"])
@pytest.mark.parametrize(
    "rule",
    [
        AutomaticClip(0.0),
        AutomaticClip(1e-22),
        FixedClip(1e-22),
        FixedClip(1e-22, normalize=True),
        LayerwiseClip(AutomaticClip(0.0)),
        PublicNormClip(AutomaticClip(0.0), norms={"one": 1.0}),
        ScaledClip({"one": 1.0}, AutomaticClip(0.0)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_record_too_small_to_measure_is_not_scaled_up(rule, form, unit, jit):
    """Most squared entries underflow: the measured norm is 1% of the true norm."""
    names = ["one/w"]
    bound = rule.bind(names)
    sensitivity = float(tf.reduce_max(bound.sensitivity(bound.initial_state())))
    for small in (2.5e-23, 9e-20, 1e-19):
        for large in (1.15, 2.0):
            x = np.full([1, 10_000], small, np.float32)
            x[0, 0] *= large
            assert released(form, rule, unit, jit, x) <= sensitivity * SLACK
