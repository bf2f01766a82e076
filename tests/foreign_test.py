"""Users' own clip rules, schemes and matrices cannot make a statement untrue."""

import copy
import dataclasses
import pickle
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.stand_in_aggregator import Aggregator
from tfdpclip import _arguments, accounting, correlated, sampling
from tfdpclip.correlated import streams
from tfdpclip.gradients import clipped_sum
from tfdpclip.kernel import limits
from tfdpclip.mechanism import Mechanism

C = 0.1


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Window(dpc.ClipRule):
    """Clips to C, but for norms in a window that nothing tries."""

    elementwise = True

    def initial_state(self):
        return ()

    def weights(self, norms, state):
        usable = tf.math.is_finite(norms)
        held = C / tf.maximum(norms, C)
        held = tf.where((norms > 1.2) & (norms < 1.3), tf.ones_like(held), held)
        return tf.where(usable, held, tf.zeros_like(held))

    def sensitivity(self, state):
        return tf.constant(C, tf.float32)


NORMS = np.array([0.05, 0.5, 1.25, 1.29, 4.0, np.inf, np.nan], np.float32)


def test_the_window_breaks_the_bound():
    assert np.max(Window().weights(NORMS, ()) * np.nan_to_num(NORMS, posinf=0)) > C


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("groups", [None, 3])
def test_a_rule_is_held_to_its_sensitivity(groups, dtype):
    rule, norms = Window(), NORMS.astype(dtype)
    if groups:
        names = [f"{i}/kernel" for i in range(groups)]
        rule = dpc.LayerwiseClip(Window()).bind(names)
        norms = np.stack([norms, np.roll(norms, 1), norms[::-1]], axis=1)
    found = Mechanism(rule, 1.0, 10)
    state = rule.initial_state()
    weights, _ = found.clip(tf.constant(norms), state)
    usable = np.isfinite(norms)
    parts = np.where(usable, weights * np.where(usable, norms, 0), 0)
    parts = parts / np.asarray(rule.noise_scales(state))
    lengths = np.abs(parts) if groups is None else np.linalg.norm(parts, axis=1)
    assert 0.9 < lengths.max() <= 1 + 1e-6
    if groups is None:
        np.testing.assert_allclose(
            weights, [1, 0.2, C / 1.25, C / 1.29, C / 4, 0, 0], rtol=1e-5
        )


@pytest.mark.parametrize("weight", [np.nan, np.inf, -1.0])
def test_a_weight_that_is_none_drops_the_record(weight):
    weights = tf.constant([0.1, weight, 0.1])
    found = limits.limit_weights(Window(), tf.ones([3]), (), weights)
    np.testing.assert_allclose(found, [0.1, 0, 0.1])


@pytest.mark.parametrize(
    "rule",
    [
        dpc.LayerwiseClip(Window()),
        dpc.LayerwiseClip({"a": Window(), "b": 1.0}),
        dpc.ScaledClip({"a": 1.0, "b": 2.0}, Window()),
        dpc.PublicNormClip(Window(), norms={"a": 1.0, "b": 1.0}),
    ],
    ids=["all groups", "by name", "scaled", "public norms"],
)
def test_a_rule_within_another_is_found(rule):
    for found in (rule, rule.bind(["a/kernel", "b/kernel"])):
        others = _arguments.foreign(found, dpc.ClipRule)
        assert [type(rule) for rule in others] == [Window]


@pytest.mark.parametrize("scale", [-1.0, np.nan, 0.0])
def test_a_sensitivity_that_is_none_hides_nobody(scale):
    class Odd(Window):
        def sensitivity(self, state):
            return tf.constant(scale, tf.float32)

    found = limits.limit_weights(Odd(), tf.constant([4.0]), (), tf.constant([2.0]))
    assert found.numpy().tolist() == ([0.25] if scale == -1 else [0.0])


def test_weights_within_the_bound_are_left_alone():
    rule, norms = dpc.FixedClip(0.1), tf.constant([1e-9, 0.05, 0.1, 7.0, 3e38])
    weights = rule.weights(norms, ())
    np.testing.assert_array_equal(limits.weights_of(rule, norms, ()), weights)
    assert limits.scales_of(rule) == rule.noise_scales


def test_a_sum_of_gradients_holds_it_too():
    w = tf.Variable(tf.zeros([1]))

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(x):
        return clipped_sum(x * w, [w], Window())

    (total,), norms = step([1.25, 0.0])
    np.testing.assert_allclose(norms, [1.25, 0.0], rtol=1e-6)
    np.testing.assert_allclose(total, [C], rtol=1e-5)


@pytest.mark.parametrize(
    "bit, left", [(9.0, 0.5), (-9.0, -0.5), (np.nan, 0), (np.inf, 0)]
)
def test_bits_are_cut(bit, left):
    class Loud(dpc.QuantileClip):
        def indicators(self, norms, state, present=None):
            window = (norms > 1.2) & (norms < 1.3)
            bits = super().indicators(norms, state, present)
            return tf.where(window[:, tf.newaxis], bit * tf.ones_like(bits), bits)

    rule = Loud()
    found = Mechanism(rule, 1.0, 10)
    _, bits = found.clip(tf.constant([1.0, 1.25]), rule.initial_state())
    assert np.ravel(bits).tolist() == [-0.5, left]


# How far a rule lets a record get, between a step's first batch and its noise.


@dataclasses.dataclass(eq=False, repr=False)
class Moving(dpc.ClipRule):
    """Clips to a norm that code outside changes."""

    norm: float = 1.0
    elementwise = True

    def initial_state(self):
        return ()

    def weights(self, norms, state):
        usable = tf.math.is_finite(norms)
        held = self.norm / tf.maximum(norms, self.norm)
        return tf.where(usable, held, tf.zeros_like(held))

    def sensitivity(self, state):
        return tf.constant(self.norm, tf.float32)


@pytest.mark.parametrize(
    "read",
    [lambda moved: moved * 1.0, lambda moved: tf.random.uniform([], 1.0, 1.5)],
    ids=["a variable", "chance"],
)
def test_a_sensitivity_reads_the_state_alone(read):
    moved = tf.Variable(1.0, trainable=False, name="moved")

    class Reading(Moving):
        def sensitivity(self, state):
            return read(moved)

    with pytest.raises(ValueError, match="sensitivity.state.*than its state: the "):
        dpc.keras.DPSGD(
            0.1, clip=Reading(), noise_multiplier=1.0, expected_batch_size=20
        )


class Remembering(Moving):
    """Keeps the longest norm of a step, without noise."""

    def initial_state(self):
        return (tf.constant(1.0),)

    def weights(self, norms, state):
        (norm,) = state
        if not tf.executing_eagerly():  # Not in the test of a rule.
            longest = tf.reduce_max(tf.where(tf.math.is_finite(norms), norms, 0.0))
            self.longest.assign(longest)
        norm = tf.cast(norm, norms.dtype)
        held = norm / tf.maximum(norms, norm)
        return tf.where(tf.math.is_finite(norms), held, tf.zeros_like(held))

    def sensitivity(self, state):
        return tf.convert_to_tensor(state[0])


@pytest.mark.parametrize("groups", [False, True])
def test_a_rule_keeps_no_norms_from_one_step_to_the_next(groups):
    rule = Remembering()
    rule.longest = tf.Variable(1.0, trainable=False, name="longest")
    with pytest.raises(
        ValueError, match=r"weights\(norms, state\) uses more.*'longest"
    ):
        if groups:
            rule = dpc.clipping.bound_rule(dpc.LayerwiseClip(rule), ["a", "b"])
        Mechanism(rule, 1.0, 10)

    class Reading(Moving):
        def next_state(self, state, fractions):
            Remembering.longest.assign(2.0)
            return state

    Remembering.longest = tf.Variable(1.0, trainable=False, name="longest")
    with pytest.raises(ValueError, match=r"next_state\(state, .* uses more.*'longest"):
        Mechanism(Reading(), 1.0, 10)


def test_nor_in_an_attribute():
    class Keeping(Moving):
        def weights(self, norms, state):
            self.kept = tf.reduce_max(norms)
            return super().weights(norms, state)

        def next_state(self, state, fractions):
            del fractions
            self.norms = self.kept + 1.0
            return state

    with pytest.raises(ValueError, match=r"next_state\(.* than its arguments: float32"):
        Mechanism(Keeping(), 1.0, 10)


@pytest.mark.parametrize("moved", [100.0, 0.01])
def test_a_rule_that_somebody_changed_is_held_to_what_it_was(moved):
    rule = Moving()
    mechanism = Mechanism(rule, 1.0, 10)
    rule.norm = moved
    weights, _ = mechanism.clip(tf.constant([8.0]), ())
    assert float(weights[0]) * 8 <= 1 + 1e-6
    assert mechanism.noise_stddevs(()).numpy().tolist() == [1.0]


def test_a_sum_without_a_mechanism_is_held_to_the_same():
    rule, w = Moving(), tf.Variable(tf.zeros([1]))
    mechanism = Mechanism(rule, 1.0, 10)
    rule.norm = 100.0

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(x):
        return clipped_sum(x * w, [w], rule)

    (total,), _ = step([1000.0, 0.0])
    np.testing.assert_allclose(total, [1.0], rtol=1e-5)
    assert mechanism.noise_stddevs(()).numpy().tolist() == [1.0]


def test_a_rule_that_was_changed_since_it_was_used_is_not_taken_again():
    """Otherwise all runs of a loop over its norm would use the first norm."""
    rule = Moving()
    for _ in range(2):
        Mechanism(rule, 1.0, 10)
    rule.norm = 5.0
    with pytest.raises(ValueError, match="norm=5.0.*changed since. Make a new one"):
        Mechanism(rule, 1.0, 10)


def test_a_copy_is_traced_when_it_is_taken():
    rule = Moving()
    assert float(limits.scales_of(rule)(())) == 1.0
    copied, pickled = copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))
    mechanism = copy.deepcopy(Mechanism(rule, 1.0, 10))
    rule.norm = copied.norm = 5.0
    found = [limits.scales_of(each) for each in (rule, copied, pickled)]
    assert [float(each(())) for each in found] == [1.0, 5.0, 1.0]
    assert mechanism.noise_stddevs(()).numpy().tolist() == [1.0]


def test_what_only_looks_at_a_number_reads_nothing():
    class Careful(Moving):
        def sensitivity(self, state):
            norm = tf.debugging.check_numerics(tf.constant(self.norm), "norm")
            with tf.control_dependencies([tf.print("norm:", norm, summarize=0)]):
                return tf.identity(norm)

    assert float(limits.scales_of(Careful())(())) == 1.0


def test_a_rule_that_is_no_dataclass_is_told_so():
    class Plain(dpc.ClipRule):
        initial_state, weights = Window.initial_state, Window.weights
        sensitivity = Window.sensitivity

    with pytest.raises(ValueError, match="Plain must be a dataclass.*put @dataclasses"):
        str(Mechanism(Plain(), 1.0, 10).rule)


def test_a_rule_that_tells_of_itself_need_not_be_one():
    class Telling(dpc.ClipRule):
        initial_state, weights = Window.initial_state, Window.weights
        sensitivity = Window.sensitivity

        def __str__(self):
            return "somebody's rule"

    text = trained(sampling.Poisson(0.1), Telling())
    assert "somebody's rule" in text and "Telling, which is no clip rule of" in text


def test_a_rule_may_have_a_table():
    @dataclasses.dataclass(frozen=True, eq=False, repr=False)
    class Tabled(Window):
        table: np.ndarray = dataclasses.field(default_factory=lambda: np.ones(2))

    assert str(Tabled()) == "Tabled()"
    assert str(Tabled(np.zeros(2))) == "Tabled(table=array([0., 0.]))"
    assert Tabled() == Tabled() != Tabled(np.zeros(2))
    assert Mechanism(Tabled(), 1.0, 10).rule == Tabled()


def small(clip=1.0, noise=None, **settings):
    model = tf.keras.Sequential([tf.keras.layers.Dense(2)])
    model.build((None, 4))
    model.compile(
        dpc.keras.DPSGD(
            0.1,
            clip=clip,
            noise_multiplier=1.0,
            expected_batch_size=20,
            noise=noise,
            **settings,
        ),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def arrays(count=200):
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 4)).astype("f"), rng.integers(0, 2, count)


@dataclasses.dataclass(frozen=True)
class Coins(sampling.Poisson):
    """Poisson sampling of somebody's."""

    def _draw(self, key, population, step):
        return np.flatnonzero(key.rng(step).random(population) < self.rate)


def trained(scheme, clip, ledger=None):
    model, batches = small(clip), scheme.batches(arrays())
    budget = dpc.keras.PrivacyBudget(50.0, 1e-5, batches, ledger=ledger)
    model.fit(batches, steps_per_epoch=2, epochs=1, verbose=0, callbacks=[budget])
    return str(budget.statement())


def test_a_statement_names_what_is_not_of_the_library():
    text = trained(Coins(0.1), Window())
    assert "Coins, which is not of this library, does what it says" in text
    assert "Window, which is no clip rule of this library, weighs each" in text
    text = trained(sampling.Poisson(0.1), 1.0)
    assert "of this library" not in text


@pytest.mark.parametrize("clip", [Window(), dpc.FixedClip(1.0), "in words", 1.0])
def test_a_statement_of_rounds_names_a_rule(clip):
    cohorts = sampling.Poisson(0.5).cohorts(list(range(20)))
    aggregator = Aggregator(4.0, clip=clip)
    budget = accounting.RoundBudget(5.0, 1e-5, cohorts, aggregator)
    named = "Window, which is no clip rule of this library" in str(budget.statement())
    assert named is isinstance(clip, Window)


def test_a_ledger_that_could_not_be_read_again_is_not_begun(tmp_path):
    with pytest.raises(ValueError, match="ledger=.*Coins is not of this library"):
        trained(Coins(0.1), 1.0, tmp_path / "ledger.json")


def rated(rate, name="Coins"):
    """A user's class with a given name."""

    class Rated(sampling.Poisson):
        def event(self, noise_multiplier, steps, *, unit="example"):
            real = sampling.Poisson(rate)
            return real.event(noise_multiplier, steps, unit=unit)

    Rated.__name__ = Rated.__qualname__ = name
    return Rated(0.1)


class WithRate(sampling.Poisson):
    """Somebody's class with an attribute that is no field."""

    def event(self, noise_multiplier, steps, *, unit="example"):
        real = sampling.Poisson(self.real)
        return real.event(noise_multiplier, steps, unit=unit)


def with_rate(real):
    scheme = WithRate(0.1)
    object.__setattr__(scheme, "real", real)
    return scheme


LIBRARY = sampling.Poisson(0.1)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (rated(0.01), rated(0.5), "Coins before, .*Coins now .made again, as"),
        (with_rate(0.01), with_rate(0.5), "WithRate before, .*with changed attributes"),
        (LIBRARY, rated(0.5, "Poisson"), "classes of this library before, .*Poisson"),
        (rated(0.5, "Poisson"), LIBRARY, "Poisson before, classes of this library"),
    ],
    ids=["made again", "another attribute", "others' name", "and back"],
)
def test_a_class_of_the_same_name_is_another(before, after, says):
    ledger = accounting.Ledger(delta=1e-5)
    ledger.begin(noise_multiplier=1.0, sampling=before)
    ledger.record(1)
    ledger.begin(noise_multiplier=1.0, sampling=before)
    assert len(ledger.phases) == 1
    with pytest.raises(accounting.PrivacyMismatchError, match=says):
        ledger.begin(noise_multiplier=1.0, sampling=after)
    ledger.begin(noise_multiplier=1.0, sampling=after, change=True)
    ledger.record(100)
    assert [phase.steps for phase in ledger.phases] == [1, 100]
    assert "which is not of this library, does" in str(ledger.statement())
    alone = accounting.Ledger(delta=1e-5)
    alone.begin(noise_multiplier=1.0, sampling=after)
    alone.record(100)
    assert ledger.epsilon() > alone.epsilon()


@pytest.mark.parametrize("change", [False, True])
def test_a_scheme_that_somebody_changes_was_what_it_was(change):
    ledger, scheme = accounting.Ledger(delta=1e-5), with_rate(0.9)
    ledger.begin(noise_multiplier=1.0, sampling=scheme)
    ledger.record(10)
    before = ledger.epsilon()
    object.__setattr__(scheme, "real", 0.001)
    assert ledger.epsilon() == before
    if not change:
        with pytest.raises(accounting.PrivacyMismatchError, match="changed attributes"):
            ledger.begin(noise_multiplier=1.0, sampling=scheme)
    else:
        ledger.begin(noise_multiplier=1.0, sampling=scheme, change=True)
        assert [phase.steps for phase in ledger.phases] == [10, 0]


@pytest.mark.parametrize(
    "what",
    [np.arange(3.0), np.random.default_rng(0), threading.Lock(), {"a": [np.ones(2)]}],
    ids=["array", "generator", "lock", "nest"],
)
def test_a_scheme_may_have_attributes_of_any_kind(what):
    ledger, scheme = accounting.Ledger(delta=1e-5), with_rate(what)
    object.__setattr__(scheme, "event", sampling.Poisson(0.1).event)
    for _ in range(2):
        ledger.begin(noise_multiplier=1.0, sampling=scheme)
        ledger.record(1)
    assert [phase.steps for phase in ledger.phases] == [2]


def test_a_copy_of_a_scheme_is_the_same():
    ledger = accounting.Ledger(delta=1e-5)
    scheme = with_rate(0.1)
    for each in (scheme, scheme, copy.deepcopy(scheme), with_rate(0.1)):
        ledger.begin(noise_multiplier=1.0, sampling=each)
    assert len(ledger.phases) == 1


def test_a_class_from_a_text_is_named():
    names = {"dpc": dpc, "tf": tf, "dataclasses": dataclasses, "Moving": Moving}
    text = "@dataclasses.dataclass(eq=False, repr=False)\nclass Conf(Moving): pass"
    exec(text, names)
    assert names["Conf"].__module__ == "builtins"
    assert "Conf, which is no clip rule" in trained(LIBRARY, names["Conf"]())


@pytest.mark.parametrize("name", ["Coins", "Poisson"])
def test_it_is_not_read_as_one_of_the_library(name, tmp_path):
    ledger = accounting.Ledger(delta=1e-5)
    ledger.begin(noise_multiplier=1.0, sampling=rated(0.5, name))
    with pytest.raises(ValueError, match=f"{name} is not of this library"):
        ledger.save(tmp_path / "ledger.json")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=f"{name} was not of this library"):
        accounting.Ledger.from_dict(ledger.to_dict())


def test_a_ledger_that_is_told_of_a_rule_names_it():
    ledger = accounting.Ledger(delta=1e-5)
    ledger.begin(noise_multiplier=1.0, sampling=LIBRARY, clip=Window())
    ledger.record(1)
    assert "Window, which is no clip rule of this" in str(ledger.statement())


def test_steps_that_nobody_saw_were_clipped_by_some_rule():
    ledger = accounting.Ledger(delta=1e-5)
    ledger.begin(noise_multiplier=1.0, sampling=LIBRARY, clip="FixedClip(1.0)")
    ledger.add_unseen(2)
    assert "with a clip rule that keeps its bound" in str(ledger.statement())


def test_nobody_may_be_drawn():
    @dataclasses.dataclass(frozen=True)
    class Nobody(sampling.Poisson):
        def _draw(self, key, population, step):
            return [i for i in range(population) if i < 0]

    _, _, weights = next(iter(Nobody(0.1).batches(arrays())))
    assert float(tf.reduce_sum(weights)) == 0


def test_a_scheme_of_somebody_draws_cohorts_itself():
    @dataclasses.dataclass(frozen=True)
    class First(sampling.FixedSize):
        def _draw(self, key, population, step):
            return np.arange(self.batch_size)

    cohorts = First(3, 20).cohorts(list("abcdefghijklmnopqrst"), seed=1)
    assert cohorts(0) == ["a", "b", "c"]


DRAWN = {
    "twice": (lambda population: [3, 4, 3], "a record twice.*replacement = True"),
    "below": (lambda population: [-1, 2], "from 0 to 199"),
    "above": (lambda population: [2, population], "from 0 to 199"),
    "no numbers": (lambda population: [0.5], "whole numbers"),
    "a table": (lambda population: [[0, 1]], "whole numbers"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_are_records(name):
    what, says = DRAWN[name]

    @dataclasses.dataclass(frozen=True)
    class Drawing(sampling.Poisson):
        def _draw(self, key, population, step):
            return np.array(what(population))

    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=says):
        next(iter(Drawing(0.1).batches(arrays())))


def test_a_record_may_be_drawn_twice_where_that_is_said():
    @dataclasses.dataclass(frozen=True)
    class Again(sampling.FixedSize):
        def _draw(self, key, population, step):
            return np.array([3, 3])

    assert Again(2, 200, replacement=True)._drawn(None, 200, 0).tolist() == [3, 3]


# Noise matrices.


@dataclasses.dataclass(frozen=True)
class Sound(correlated.ToeplitzMatrix):
    @property
    def bandwidth(self):
        return 3

    def coefficients(self, steps):
        return np.array([1.0, 0.5, 0.25] + [0.0] * steps)[:steps]

    def describe(self):
        return "a matrix of somebody's"


class OtherStream(Sound):
    def stream(self):
        return streams.Recursive(np.array([4.0]))


class LowSensitivity(Sound):
    def sensitivity(self, steps, participation):
        return 0.1


class OtherAtFirst(Sound):
    def coefficients(self, steps):
        return (
            np.array([4.0] + [0.0] * steps)[:steps]
            if steps <= 3
            else (super().coefficients(steps))
        )


class NoInverse(Sound):
    def noising(self, steps):
        return 0.5 * super().noising(steps)


@pytest.mark.parametrize(
    "kind, says",
    [
        (OtherStream, "stream"),
        (LowSensitivity, "sensitivity is 0.1"),
        (OtherAtFirst, "stream|identity"),
        (NoInverse, "identity"),
    ],
)
@pytest.mark.parametrize("steps", [20, 500])
def test_a_matrix_that_contradicts_itself_is_refused(kind, says, steps):
    scheme = sampling.MinSeparation(500, 50)
    with pytest.raises(ValueError, match=f"guarantee of noise matrices.*({says})"):
        dpc.CorrelatedNoise(kind(), steps, scheme)


def test_one_that_is_no_dataclass_is_told_to_be():
    class Plain(correlated.ToeplitzMatrix):
        bandwidth, coefficients, describe = 3, Sound.coefficients, Sound.describe

    with pytest.raises(ValueError, match="matrix.*must be a dataclass.*class Plain"):
        dpc.CorrelatedNoise(Plain(), 20, sampling.MinSeparation(500, 50))


def test_one_of_somebodys_goes_on_from_no_secret(tmp_path):
    scheme = sampling.MinSeparation(80, 20)
    noise = dpc.CorrelatedNoise(Sound(), 4, scheme)
    with pytest.raises(ValueError, match="secret.*Sound.*leave secret out"):
        small(noise=noise).fit(
            scheme.batches(arrays(80)),
            callbacks=dpc.keras.PrivacyBudget(
                10.0, 1e-5, scheme, secret=str(tmp_path / "its.secret")
            ),
        )


@pytest.mark.parametrize("steps", [1, 2, 20, 500])
def test_a_sound_one_is_named(steps):
    scheme = sampling.MinSeparation(500, 50)
    noise = dpc.CorrelatedNoise(Sound(), steps, scheme)
    ledger = accounting.Ledger(delta=1e-5)
    ledger.begin(noise_multiplier=2.0, sampling=scheme, **noise.of_a_phase)
    ledger.record(1)
    assert "Sound, which is not of this library, does" in str(ledger.statement())


@pytest.mark.parametrize("tried", ["assert_sensitivity", "assert_noise"])
def test_what_tests_single_steps_refuses_correlated_noise(tried):
    scheme = sampling.MinSeparation(200, 20)
    noise = dpc.CorrelatedNoise(correlated.SquareRootToeplitz(4), 10, scheme)
    x, y = arrays(20)
    with pytest.raises(ValueError, match="correlated noise.*noise=None"):
        getattr(dpc.testing, tried)(small(noise=noise), (x, y))
