"""Views of an example and people, from the plan to the statement."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.stack import MEAN
from tfdpclip import sampling
from tfdpclip.accounting.phases import PrivacyMismatchError

L = tf.keras.layers
RNG = np.random.default_rng(5)
X = RNG.normal(size=(60, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)
IDS = RNG.permutation(np.repeat(np.arange(20), 3))
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction=MEAN)
PEOPLE = dict(epsilon=3, delta=1e-3, examples=20, batch_size=10, epochs=2)


def noisy(x, y):
    return x + tf.random.normal(x.shape), y


def compiled(optimizer, loss=LOSS, **options):
    model = tf.keras.Sequential([tf.keras.Input([5]), L.Dense(4, "tanh"), L.Dense(2)])
    model.compile(optimizer, loss, **options)
    return model


def trained(plan, batches, optimizer=dpc.keras.DPSGD, **options):
    options.setdefault("clip", 1.0)
    model = compiled(plan.optimizer(optimizer, 0.1, **options))
    model.fit(batches, epochs=plan.epochs, callbacks=plan.callbacks, verbose=0)
    return model


@pytest.mark.slow
def test_a_plan_with_views():
    plan = dpc.keras.PrivacyPlan(3, 1e-3, examples=60, batch_size=20, epochs=2, views=4)
    one = plan.replace(views=1)
    assert plan.noise_multiplier == one.noise_multiplier
    trained(plan, plan.batches((X, Y)).map(noisy))
    told = plan.statement()
    assert told.steps == plan.steps == one.steps and told.epsilon <= 3
    assert told.unit == "one example, clipped on its own"
    assert "examples of 4 views each" in str(plan)


@pytest.mark.slow
def test_a_plan_for_people():
    plan = dpc.keras.PrivacyPlan(**PEOPLE, per_person=2)
    trained(plan, plan.batches((X, Y), people=IDS))
    told = plan.statement()
    assert told.unit == "one person, whose examples are clipped together"
    assert any("tell people apart" in said for said in told.assumptions)
    assert "20 people" in str(plan) and "up to 2 examples each" in str(plan)
    same = dpc.keras.PrivacyPlan(3, 1e-3, examples=20, batch_size=10, epochs=2)
    assert plan.noise_multiplier == same.noise_multiplier


def test_people_stay_the_same():
    plan = dpc.keras.PrivacyPlan(**PEOPLE, per_person=2)
    plan.batches((X, Y), people=IDS)
    plan.batches((X, Y), people=list(IDS))
    with pytest.raises(ValueError, match="people differ from the people of this plan"):
        plan.batches((X, Y), people=IDS[::-1])
    plan.replace().batches((X, Y), people=IDS[::-1])


@pytest.mark.parametrize("ids, found", [(np.arange(60), 60), (IDS % 19, 19)])
def test_ids_of_another_number_of_people_are_refused(ids, found):
    plan = dpc.keras.PrivacyPlan(**PEOPLE, per_person=2)
    with pytest.raises(ValueError, match=f"data has {found} people"):
        plan.batches((X, Y), people=ids)


def test_the_released_sum_is_of_the_means_of_records():
    plan = dpc.keras.PrivacyPlan(**PEOPLE, per_person=3)
    batches = sampling.FullBatch().batches((X, Y), people=IDS, per_person=3)
    optimizer = dpc.keras.DPSGD(
        1.0,
        clip=0.5,
        noise_multiplier=0.0,
        expected_batch_size=20,
        unit="person",
        rows_per_record=3,
    )
    del plan
    model = compiled(optimizer)
    before = [v.numpy() for v in model.trainable_variables]
    expected = [np.zeros_like(v) for v in before]
    for person in range(20):
        with tf.GradientTape() as tape:
            loss = LOSS(Y[IDS == person], model(X[IDS == person]))
        own = [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in own))
        for total, part in zip(expected, own, strict=True):
            total += part * min(1.0, 0.5 / norm) / 20
    model.fit(batches, verbose=0)
    for old, new, total in zip(
        before, model.trainable_variables, expected, strict=True
    ):
        np.testing.assert_allclose(old - new.numpy(), total, atol=1e-5)


def test_who_has_few_examples_weighs_as_much():
    ids = np.where(np.arange(60) < 3, 0, 1)
    batches = sampling.FullBatch().batches((X, Y), people=ids, per_person=6)
    optimizer = dpc.keras.DPSGD(
        1.0,
        clip=1e3,
        noise_multiplier=0.0,
        expected_batch_size=1,
        unit="person",
        rows_per_record=6,
    )
    model = compiled(optimizer)
    x, y, weight = next(iter(batches))
    with tf.GradientTape() as tape:
        few, many = (LOSS(y[i], model(x[i])) for i in (slice(0, 3), slice(6, 12)))
        total = few + many
    assert weight.numpy().tolist() == [2, 2, 2, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    expected = tape.gradient(total, model.trainable_variables)
    before = [v.numpy() for v in model.trainable_variables]
    step = tf.function(lambda x, y, w: model.train_step((x, y, w)), autograph=False)
    step(x, y, weight)
    for old, new, g in zip(before, model.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(old - new.numpy(), g, atol=1e-5)


OPTIONS = {
    "adam": dict(optimizer=dpc.keras.DPAdam),
    "layerwise": dict(clip=dpc.LayerwiseClip(1.0)),
    "automatic": dict(clip=dpc.AutomaticClip()),
    "perturbation": dict(perturbation=0.01),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("of", ["views", "people"])
@pytest.mark.slow
def test_with_every_clip(name, of):
    people = of == "people"
    plan = dpc.keras.PrivacyPlan(
        **{**PEOPLE, "epochs": 1},
        **({"per_person": 2, "views": 2} if people else {"views": 2}),
    )
    data = (X, Y) if people else (X[:20], Y[:20])
    batches = plan.batches(data, people=IDS if people else None)
    trained(plan, batches.map(noisy), **OPTIONS[name])
    assert plan.statement().steps == plan.steps


@pytest.mark.slow
def test_in_parts_and_with_correlated_noise():
    plan = dpc.keras.PrivacyPlan(
        **PEOPLE, per_person=2, noise="buffered", physical_batch_size=5
    )
    assert plan.accumulation_steps == 2
    trained(plan, plan.batches((X, Y), people=IDS))
    assert plan.statement().unit.startswith("one person")


@pytest.mark.every_check
@pytest.mark.slow
def test_compiled_by_xla():
    plan = dpc.keras.PrivacyPlan(**PEOPLE, per_person=2)
    model = compiled(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), jit_compile=True)
    batches = plan.batches((X, Y), people=IDS)
    model.fit(batches, epochs=1, callbacks=plan.callbacks, verbose=0)
    assert plan.statement().steps == 2


def private(**options):
    given = dict(clip=1.0, noise_multiplier=1.0, expected_batch_size=10, **options)
    return dpc.keras.DPSGD(0.1, **given)


@pytest.mark.parametrize(
    "options",
    [{}, {"rows_per_record": 3}, {"unit": "person"}, {"unit": "batch"}],
    ids=["nothing", "rows only", "unit only", "batch"],
)
def test_an_optimizer_of_other_records_is_refused(options):
    batches = sampling.Poisson(0.5).batches((X, Y), people=IDS, per_person=3)
    model = compiled(private(**options))
    budget = dpc.keras.PrivacyBudget(8, 1e-3, batches)
    with pytest.raises(PrivacyMismatchError, match="rows_per_record|unit="):
        model.fit(batches, callbacks=[budget], verbose=0)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_without_a_budget_the_size_of_a_batch_tells(rows):
    # A number of rows of no other test, whose batches may still exist.
    batches = sampling.Poisson(0.5).batches((X, Y), views=4, physical_batch_size=54)
    model = compiled(private(rows_per_record=rows))
    with pytest.raises(Exception, match=r"rows_per_record=batches.rows_per_record"):
        model.fit(batches, verbose=0)


def test_people_and_an_optimizer_for_examples_of_one_row():
    batches = sampling.Poisson(0.5).batches((X, Y))
    budget = dpc.keras.PrivacyBudget(8, 1e-3, batches)
    model = compiled(
        dpc.keras.DPSGD(
            0.1, noise_multiplier=1.0, expected_batch_size=30, unit="person"
        )
    )
    with pytest.raises(PrivacyMismatchError, match="are of examples.*people=ids"):
        model.fit(batches, callbacks=[budget], verbose=0)


def test_data_of_another_number_of_people():
    plan = dpc.keras.PrivacyPlan(**PEOPLE, per_person=2)
    with pytest.raises(ValueError, match="data has 30 people, the plan is for 20"):
        plan.batches((X, Y), people=np.arange(60) % 30)


@pytest.mark.parametrize("plan, people", [({}, IDS), ({"per_person": 2}, None)])
def test_a_plan_says_who_is_counted(plan, people):
    plan = dpc.keras.PrivacyPlan(**PEOPLE, **plan)
    with pytest.raises(ValueError, match="people and per_person go together"):
        plan.batches((X, Y), people=people)


@pytest.mark.parametrize("name", ["views", "per_person", "rows_per_record"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_bad_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1"):
        if name == "rows_per_record":
            private(rows_per_record=value)
        else:
            dpc.keras.PrivacyPlan(**PEOPLE, **{name: value})


@pytest.mark.parametrize("name", ["views", "per_person"])
def test_what_the_plan_says_is_not_said_again(name):
    plan = dpc.keras.PrivacyPlan(**PEOPLE)
    with pytest.raises(ValueError, match=rf"PrivacyPlan\(\.\.\., {name}=\.\.\.\)"):
        plan.batches((X, Y), **{name: 2})


def test_eager_steps_are_refused():
    batches = sampling.Poisson(0.5).batches((X, Y), views=2)
    model = compiled(private(rows_per_record=2), run_eagerly=True)
    with pytest.raises(ValueError, match="needs a graph|has no graph"):
        model.fit(batches, verbose=0)


@pytest.mark.slow
def test_rows_that_are_left_over_and_metrics():
    plan = dpc.keras.PrivacyPlan(**{**PEOPLE, "epochs": 1}, per_person=4)
    model = compiled(
        plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), metrics=["accuracy"]
    )
    batches = plan.batches((X, Y), people=IDS)
    with pytest.warns(UserWarning, match="pad people who have few examples"):
        model.fit(batches, callbacks=plan.callbacks, verbose=0)


def test_settings_are_kept():
    optimizer = private(unit="person", rows_per_record=3)
    again = type(optimizer).from_config(optimizer.get_config())
    assert (again.unit, again.rows_per_record) == ("person", 3)
    assert private().rows_per_record == 1


@pytest.mark.slow
def test_the_comparison_is_by_record():
    model = compiled(private(rows_per_record=4))
    report = dpc.testing.assert_exact(model, (X, Y))
    assert report.examples == 15 and report.worst < 1e-4


@pytest.mark.slow
@pytest.mark.every_check
def test_a_record_moves_a_step_by_what_is_claimed():
    model = compiled(private(rows_per_record=4))
    report = dpc.testing.assert_sensitivity(model, (X, Y))
    assert 0.9 < report.distance <= report.limit * 1.001 and report.tried >= 8
    with pytest.raises(ValueError, match="58 rows.*rows_per_record=4"):
        dpc.testing.assert_sensitivity(model, (X[:58], Y[:58]))


class Mean(L.Layer):
    """Adds the mean of several rows to each of these rows."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def call(self, x):
        groups = tf.reshape(x, [-1, self.rows, x.shape[1]])
        return x + tf.repeat(tf.reduce_mean(groups, axis=1), self.rows, axis=0)


@pytest.mark.parametrize("mixed, fails", [(2, False), (4, False), (8, True)])
@pytest.mark.slow
def test_rows_of_a_record_may_mix_in_a_test_of_isolation(mixed, fails):
    model = tf.keras.Sequential([tf.keras.Input([5]), Mean(mixed), L.Dense(2)])
    model.compile(private(rows_per_record=4), LOSS)
    x, y = X[:16], Y[:16]
    if fails:
        with pytest.raises(dpc.gradients.ExampleIsolationError, match="examples? "):
            dpc.keras.check_isolation(model, x, y)
    else:
        dpc.keras.check_isolation(model, x, y)
    for rows, words in ((15, "15 rows"), (4, "1 examples")):
        with pytest.raises(ValueError, match=words):
            dpc.keras.check_isolation(model, x[:rows], y[:rows])


def test_what_looks_at_single_rows_is_refused():
    model = compiled(private(rows_per_record=4))
    with pytest.raises(ValueError, match="rows_per_record"):
        dpc.testing.audit_keras(
            model, (X, Y), (X[:8], Y[:8]), fit=lambda data, watch: None, delta=1e-5
        )


@pytest.mark.slow
def test_averaged_weights_are_of_private_ones():
    plan = dpc.keras.PrivacyPlan(3, 1e-3, examples=60, batch_size=20, epochs=2, views=2)
    model = trained(
        plan, plan.batches((X, Y)).map(noisy), use_ema=True, ema_momentum=0.9
    )
    assert plan.statement().steps == plan.steps
    assert all(np.isfinite(v).all() for v in model.get_weights())
