"""A plan states the budget once: the run, its accounting and its statement agree."""

import io
import json
import re
import types
import warnings
from contextlib import nullcontext

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.stack import KERAS_3
from tfdpclip import accounting
from tfdpclip.accounting import PrivacyMismatchError

EXAMPLES = 400
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data(examples=EXAMPLES):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(examples, 5)).astype(np.float32)
    return x, rng.integers(3, size=examples)


def plan_of(**changes):
    given = dict(epsilon=3, delta=1e-4, examples=EXAMPLES, batch_size=100, epochs=3)
    return dpc.keras.PrivacyPlan(**{**given, **changes})


def trained(plan, epochs=None, optimizer=dpc.keras.DPSGD, executed=1, **options):
    model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made = plan.optimizer(optimizer, learning_rate=0.1, **options)
    model.compile(made, loss, steps_per_execution=executed)
    batches = plan.batches(data())
    history = model.fit(
        batches,
        epochs=epochs or plan.epochs,
        callbacks=plan.callbacks,
        verbose=0,
    )
    return model, history.history


@pytest.mark.parametrize(
    ("changes", "executed"),
    [
        ({"batch_size": 100}, 1),
        ({"batch_size": 25}, 4),
        ({"batch_size": 23, "epochs": 2}, 4),
        ({"batch_size": 40, "physical_batch_size": 23}, 8),
        ({"batch_size": 10}, 8),
        ({"batch_size": 10, "sampling": "random_allocation"}, 8),
    ],
    ids=str,
)
def test_the_planned_executions_spend_the_budget_and_no_more(changes, executed):
    plan = plan_of(**changes)
    assert plan.steps_per_execution == executed
    model, _ = trained(plan, plan.epochs + 1, executed=plan.steps_per_execution)
    assert int(model.optimizer.iterations) == plan.steps == plan.ledger.steps
    assert plan.statement().epsilon <= 3


@pytest.mark.parametrize(
    ("by", "rows"), [("plan", 40), ("model", None), ("no deal", None)]
)
def test_a_strategy_of_one_device_trains_what_was_planned(by, rows):
    """Its iterators fetch draws ahead: so its draws are dealt out, as to several."""
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    plan = plan_of(physical_batch_size=rows)
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input((5,)), tf.keras.layers.Dense(3)])
        model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1), LOSS)
    if by == "plan":
        plan.fit(model, data(), epochs=1, verbose=0)
    batches = plan.batches(data())
    options = {"callbacks": plan.callbacks, "epochs": 5, "verbose": 0}
    if by == "no deal":
        with pytest.raises(PrivacyMismatchError, match=r"batches.distribute\(strategy"):
            model.fit(batches, **options)
        return
    steps = batches.steps_per_epoch * batches.accumulation_steps
    model.fit(batches.distribute(strategy), steps_per_epoch=steps, **options)
    assert int(model.optimizer.iterations) == plan.statement().steps == 12


def test_batches_cut_within_an_execution_train():
    plan = plan_of(batch_size=40)
    model = tf.keras.Sequential([tf.keras.Input((5,)), tf.keras.layers.Dense(3)])
    model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1), LOSS)
    cut = plan.batches(data()).take(7)
    assert plan.steps_per_execution == 2
    plan.fit(model, cut, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == plan.statement().steps == 14


def test_executions_that_would_run_on_are_refused_before_a_step():
    """Keras 3 runs whole executions until the data end, whatever `steps_per_epoch`."""
    plan = plan_of(batch_size=40)
    model = tf.keras.Sequential([tf.keras.Input((5,)), tf.keras.layers.Dense(3)])
    optimizer = plan.optimizer(dpc.keras.DPSGD, 0.1)
    model.compile(optimizer, LOSS, steps_per_execution=4)
    batches = plan.batches(data())
    options = {"callbacks": plan.callbacks, "epochs": 3, "verbose": 0}
    with pytest.raises(PrivacyMismatchError) if KERAS_3 else nullcontext():
        model.fit(batches.repeat(), steps_per_epoch=10, **options)
    assert int(optimizer.iterations) == (0 if KERAS_3 else 30)
    if KERAS_3:
        model.fit(batches.repeat(), steps_per_epoch=8, **options)
        assert int(optimizer.iterations) == plan.statement().steps == 24


def test_a_spent_budget_names_the_arguments_of_a_plan():
    plan = plan_of()
    model, _ = trained(plan)
    more = r"give the plan the epochs of all .*, or give a larger epsilon"
    with pytest.raises(ValueError, match=more) as raised:
        plan.fit(model, data(), verbose=0)
    assert not re.search("PrivacyBudget|noise_multiplier", str(raised.value))
    # The steps of another plan's optimizer ran without the ledger of this one.
    with pytest.raises(ValueError, match=r"PrivacyPlan\(..., ledger=path\)") as raised:
        plan_of().fit(model, data(), verbose=0)
    assert not re.search("PrivacyBudget|noise_multiplier", str(raised.value))


@pytest.mark.parametrize("by_plan", [True, False])
def test_the_planned_end_of_a_run_that_goes_on_is_not_announced(by_plan, capsys):
    """Keras tells callbacks the last epoch of a call of `fit`, and not the first."""
    plan = plan_of()
    model, _ = trained(plan, epochs=1)
    options = {"initial_epoch": 1, "verbose": 0}
    if by_plan:
        plan.fit(model, data(), **options)
    else:
        batches = plan.batches(data())
        model.fit(batches, epochs=3, callbacks=plan.callbacks, **options)
    assert plan.statement().steps == plan.steps == 12
    assert "stopping" not in capsys.readouterr().out
    # An end that no one asked for is announced.
    plan = plan_of()
    trained(plan, epochs=4)
    assert "stopping after 12 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sampling", "rows", "accountant"),
    [
        ("poisson", None, "pld"),
        ("poisson", 32, "rdp"),
        ("fixed_size", 32, "pld"),
        ("shuffled", None, "rdp"),
    ],
)
@pytest.mark.slow
def test_the_whole_run_fits_the_budget_and_uses_it(sampling, rows, accountant):
    plan = plan_of(sampling=sampling, physical_batch_size=rows, accountant=accountant)
    model, history = trained(plan, epochs=plan.epochs + 2)
    # The budget, not `epochs`, ended the run: at the planned step.
    assert int(model.optimizer.iterations) == plan.steps == plan.ledger.steps == 12
    assert 2.99 < history["epsilon"][-1] <= 3
    stated = plan.statement()
    assert stated.epsilon == plan.planned_epsilon == history["epsilon"][-1]
    assert stated.noise_multipliers == (plan.noise_multiplier,)
    assert not stated.not_private
    if rows:
        assert plan.accumulation_steps > 1 and plan.physical_batch_size <= rows
    # The accountant, which knows nothing of plans, computes the same epsilon.
    assert stated.epsilon == accounting.epsilon(
        plan.noise_multiplier, 12, plan.scheme, 1e-4, accountant
    )


@pytest.mark.parametrize("noise", ["buffered", "toeplitz", "tree"])
@pytest.mark.slow
def test_correlated_noise_is_one_argument(noise):
    plan = plan_of(noise=noise, physical_batch_size=64)
    independent = plan_of(sampling="fixed_order")
    model, history = trained(plan, epochs=9)
    assert model.optimizer.noise is not None and plan.accumulation_steps == 2
    assert plan.ledger.steps == plan.steps == 12
    assert 2.99 < plan.statement().epsilon <= 3
    assert "correlated" in str(plan.statement()) or "tree" in str(plan.statement())
    # Correlated noise has less noise in the sum of the steps, which is the weights.
    steps, scheme = plan.steps, plan.scheme
    ours = (
        plan.noise_multiplier
        * dpc.correlated.noise_error(model.optimizer.noise.matrix, steps, scheme).max
    )
    theirs = independent.noise_multiplier * np.sqrt(steps)
    assert ours < 0.9 * theirs


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["buffered", "toeplitz"])
def test_the_matrix_is_made_for_the_momentum(noise):
    plain, plan = plan_of(noise=noise), plan_of(noise=noise, momentum=0.9)
    # The same privacy, whatever the matrix, and less noise in the weights.
    assert plan.noise_multiplier == pytest.approx(plain.noise_multiplier, rel=1e-6)
    workload = dpc.correlated.Workload(momentum=0.9)
    if noise == "buffered":  # A search fits it; toeplitz suits long runs.
        errors = [
            dpc.correlated.noise_error(p._matrix, p.steps, p.scheme, workload).mean
            for p in (plan, plain)
        ]
        assert errors[0] < 0.98 * errors[1]
    optimizer = plan.optimizer(dpc.keras.DPSGD, learning_rate=0.1, momentum=0.9)
    assert optimizer.noise.matrix == plan._matrix != plain._matrix
    # For optimizers other than SGD the best momentum is unknown.
    plan.optimizer(dpc.keras.DPAdam, learning_rate=0.1)
    for wrong, momentum in ((plan, 0.0), (plan, 0.5), (plain, 0.9)):
        fix = rf"plan.replace\(momentum={momentum:g}\)"
        with pytest.raises(ValueError, match=fix):
            wrong.optimizer(dpc.keras.DPSGD, momentum=momentum)
    assert "momentum 0.9" in str(plan) and "momentum" not in str(plain)
    assert plain.replace(momentum=0.9)._matrix == plan._matrix
    assert {row["momentum"] for row in plan.rows()} == {0.9}
    titles = [p.table().splitlines()[0].split() for p in (plan, plain)]
    assert "momentum" in titles[0] and "momentum" not in titles[1]


def test_a_momentum_that_nothing_is_made_for_is_refused():
    for noise in ("independent", "tree"):
        with pytest.raises(ValueError, match="leave momentum out"):
            plan_of(noise=noise, momentum=0.9)
    with pytest.raises(ValueError, match=r"Workload\(momentum=0.9\)"):
        plan_of(noise=dpc.correlated.SquareRootToeplitz(4), momentum=0.9)
    with pytest.raises(ValueError, match="below 1"):
        plan_of(noise="buffered", momentum=1.0)
    # Independent noise suits every optimizer.
    plan_of().optimizer(dpc.keras.DPSGD, momentum=0.9)
    plan_of(noise="tree").optimizer(dpc.keras.DPSGD, momentum=0.9)


@pytest.mark.slow
def test_a_batch_as_large_as_the_data_is_the_data():
    plan = plan_of(batch_size=EXAMPLES)
    assert plan.scheme == dpc.sampling.FullBatch() and plan.steps == 3
    trained(plan)
    assert plan.statement().epsilon == pytest.approx(3, rel=1e-4)


@pytest.mark.slow
def test_all_calls_of_fit_share_the_budget():
    plan = plan_of()
    trained(plan, epochs=2)
    model, _ = trained(plan, epochs=2)
    assert plan.ledger.steps == plan.steps
    assert int(model.optimizer.iterations) == 4
    with pytest.raises(ValueError, match="leaves room for 0 steps"):
        trained(plan, epochs=1)


@pytest.mark.slow
def test_a_ledger_file_outlives_the_plan(tmp_path):
    path = tmp_path / "ledger.json"
    trained(plan_of(ledger=path), epochs=2)
    again = plan_of(ledger=path)
    assert again.ledger.steps == 8
    trained(again)
    assert again.statement().steps == 12
    assert again.replace(epochs=4).ledger.steps == 0


def counted(plan, steps):
    """The plan's ledger, with steps of the plan in it."""
    plan.ledger.begin(noise_multiplier=plan.noise_multiplier, sampling=plan.scheme)
    plan.ledger.record(steps)
    return plan.ledger


def test_a_second_plan_on_a_used_ledger_is_an_error_of_the_constructor():
    ledger = counted(plan_of(), 4)
    assert plan_of(ledger=ledger).ledger is ledger  # The same plan goes on.
    for change in (dict(epsilon=5), dict(batch_size=50), dict(epochs=6)):
        with pytest.raises(PrivacyMismatchError, match="allow_change=True to the Pr"):
            plan_of(ledger=ledger, **change)
        plan_of(ledger=ledger, allow_change=True, **{"epsilon": 5, **change})


def test_a_plan_says_that_its_run_is_finished(tmp_path):
    path = tmp_path / "ledger.json"
    plan = plan_of(ledger=path, batch_size=20)
    assert not plan.finished
    assert plan.steps_per_execution > 1
    counted(plan, plan.steps - plan.steps_per_execution)
    assert not plan.finished and not plan_of(ledger=path, batch_size=20).finished
    plan.ledger.record(1)  # No execution of steps is left, as after a kill.
    assert plan.finished and plan_of(ledger=path, batch_size=20).finished
    after = plan_of(epsilon=5, batch_size=50, ledger=path, allow_change=True)
    assert not after.finished


@pytest.mark.slow
def test_a_finished_job_that_starts_again_is_told_so(tmp_path):
    path = tmp_path / "ledger.json"
    trained(plan_of(ledger=path))
    again = plan_of(ledger=path)
    match = "the run is finished: load the model .*'if not plan.finished:'"
    with pytest.raises(ValueError, match=match):
        trained(again)
    assert again.finished


@pytest.mark.slow
def test_a_killed_job_that_ends_a_step_early_is_told_so(tmp_path):
    path = tmp_path / "ledger.json"
    plan = plan_of(ledger=path, batch_size=20)
    clip = plan.optimizer(dpc.keras.DPSGD, learning_rate=0.1).clip
    z = plan.noise_multiplier
    plan.ledger.begin(noise_multiplier=z, sampling=plan.scheme, clip=clip)
    plan.ledger.record(plan.steps - 1)
    assert plan.finished
    match = "leaves room for 1 steps.* the run is finished.*lower steps_per_execution"
    with pytest.raises(ValueError, match=match):
        trained(plan_of(ledger=path, batch_size=20), executed=2)


@pytest.mark.slow
def test_a_plan_after_other_phases_is_within_one_budget_with_them(tmp_path):
    """A new epsilon, rate and clip on an old ledger; the same plan after a kill."""
    path = tmp_path / "ledger.json"
    trained(plan_of(epsilon=1.6, ledger=path), clip=1.0)
    with pytest.raises(PrivacyMismatchError) as found:
        trained(plan_of(ledger=path), clip=1.0)
    assert "give allow_change=True to the PrivacyPlan" in str(found.value)
    changed = dict(batch_size=50, ledger=path, allow_change=True)
    plan = plan_of(**changed)
    assert plan.noise_multiplier > plan_of(batch_size=50).noise_multiplier
    assert 2.99 < plan.planned_epsilon <= 3
    assert "by pld, with 12 steps of the ledger" in str(plan)
    assert all(row["epsilon"] > 1.6 for row in plan.rows())  # which are spent
    trained(plan, epochs=1, clip=2.0)
    again = plan_of(**changed)
    assert again.noise_multiplier == plan.noise_multiplier
    _, history = trained(again, epochs=plan.epochs, clip=2.0)
    # All the planned steps ran, and no more.
    assert again.ledger.steps == 12 + plan.steps
    assert 2.99 < history["epsilon"][-1] <= 3
    assert again.statement().epsilon == again.planned_epsilon
    with pytest.raises(ValueError, match="epsilon = 1 is spent: the steps that ran"):
        plan_of(epsilon=1, batch_size=200, ledger=path, allow_change=True)


@pytest.mark.slow
def test_a_replaced_plan_goes_on_with_the_ledger_that_it_is_given():
    first = plan_of(epsilon=1.6, epochs=2)
    trained(first, clip=1.0)
    assert first.replace(batch_size=200).ledger.steps == 0
    second = first.replace(
        epsilon=3, batch_size=200, epochs=3, ledger=first.ledger, allow_change=True
    )
    trained(second, clip=0.5)
    # The epsilon of both phases follows from their events alone.
    parts = [
        plan.scheme.event(plan.noise_multiplier, plan.steps) for plan in (first, second)
    ]
    together = accounting.event_epsilon(dp_accounting.ComposedDpEvent(parts), 1e-4)
    stated = second.statement()
    assert stated.epsilon == pytest.approx(together, rel=1e-9)
    assert 2.99 < together <= 3 and stated.steps == 8 + 6
    assert first.noise_multiplier != second.noise_multiplier
    alone = [accounting.event_epsilon(part, 1e-4) for part in parts]
    assert max(alone) < together < sum(alone)


@pytest.mark.slow
def test_another_clip_of_the_same_plan_is_a_change_that_must_be_meant():
    plan = plan_of(allow_change=True)
    trained(plan, epochs=1, clip=1.0)
    trained(plan, epochs=2, clip=2.0)
    stated = plan.statement()
    assert stated.steps == plan.steps and 2.99 < stated.epsilon <= 3
    assert len(stated.clips) == 2


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("trained_before", [False, True])
def test_fit_without_the_callbacks_is_refused(drawn, trained_before):
    plan = plan_of()
    model = tf.keras.Sequential([tf.keras.Input([5]), tf.keras.layers.Dense(3)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(plan.optimizer(), loss)
    steps = 0
    if trained_before:
        plan.fit(model, data(), epochs=1, verbose=0)
        steps = plan.ledger.steps
    given = (plan.batches(data()),) if drawn else data()
    weights = model.get_weights()
    with pytest.raises(ValueError, match="(?s)without the plan's callbacks.*plan.fit"):
        model.fit(*given, batch_size=None if drawn else 100, verbose=0)
    if trained_before and drawn:  # Steps of a trace that was counted before.
        with pytest.raises(PrivacyMismatchError, match="4 steps of this plan's"):
            plan.statement()
        return
    np.testing.assert_array_equal(model.get_weights()[0], weights[0])
    assert int(model.optimizer.iterations.numpy()) == steps
    plan.fit(model, data(), epochs=2, verbose=0)
    assert plan.statement().steps == steps + 8


class FitWithout(tf.keras.callbacks.Callback):
    """Calls `fit` without a plan's callbacks within `fit`, or interrupts `fit`."""

    def __init__(self, interrupts):
        super().__init__()
        self._interrupts = interrupts

    def on_train_batch_end(self, batch, logs=None):
        if self._interrupts:
            raise KeyboardInterrupt
        self.model.fit(*data(), batch_size=100, verbose=0)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_counted_fit_does_not_cover_another(interrupted):
    plan = plan_of()
    model = tf.keras.Sequential([tf.keras.Input([5]), tf.keras.layers.Dense(3)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(plan.optimizer(), loss)
    refused = pytest.raises(ValueError, match="without the plan's callbacks")
    with pytest.raises(KeyboardInterrupt) if interrupted else refused:
        plan.fit(model, data(), callbacks=[FitWithout(interrupted)], verbose=0)
    with refused:
        model.fit(*data(), batch_size=100, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 1
    plan.fit(model, data(), epochs=2, verbose=0)
    assert plan.statement().steps == 9


@pytest.mark.slow
def test_fit_of_a_loaded_model_without_the_callbacks_is_refused(tmp_path):
    plan = plan_of()
    model, _ = trained(plan, epochs=1)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="without the plan's callbacks"):
        loaded.fit(*data(), verbose=0)
    plan.fit(loaded, data(), epochs=1, verbose=0)
    assert plan.statement().steps == 8


@pytest.mark.slow
def test_steps_without_the_callbacks_are_not_passed_over():
    plan = plan_of()
    model, loss = tf.keras.Sequential([tf.keras.layers.Dense(3)]), "mse"
    model.compile(plan.optimizer(learning_rate=0.1), loss)
    for x, y, w in plan.batches(data()):
        model.train_on_batch(x, tf.one_hot(y, 3), w)
    for ask in (plan.statement, lambda: plan.statement("json")):
        with pytest.raises(
            accounting.PrivacyMismatchError, match="4 steps of this pla"
        ):
            ask()
    # The text says that epsilon is not known, instead of the planned epsilon alone.
    # Printing the plan at the end of a script raises no error.
    assert "So far: not known. 4 steps of this plan's optimizer" in str(plan)
    # The steps stay in the statement if the model is gone, or new steps are counted.
    trained(plan, epochs=1)
    assert "So far: not known. 4 steps of this plan's optimizer" in str(plan)
    assert str(plan).count("differential privacy") == 1  # the planned epsilon
    with pytest.raises(accounting.PrivacyMismatchError, match="4 steps of this pla"):
        plan.statement()


class CtrlC(tf.keras.callbacks.Callback):
    """The key is pressed while batch 1 is at some stage."""

    def __init__(self, stage):
        super().__init__()
        setattr(self, stage, self.press)

    def press(self, batch, logs=None):
        if batch == 1:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_ctrl_c_at_any_stage_leaves_a_true_ledger_and_a_model_to_save(tmp_path):
    path = tmp_path / "ledger.json"
    plan = plan_of(epochs=4, ledger=path)
    model = tf.keras.Sequential([tf.keras.Input((5,)), tf.keras.layers.Dense(3)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1), loss)
    batches, steps = plan.batches(data()), 0
    # After the budget saw the step; before that; and between the reservation of the
    # step and its run.
    for stage, first, ran in (
        ("on_train_batch_end", False, 2),
        ("on_train_batch_end", True, 2),
        ("on_train_batch_begin", False, 1),
    ):
        callbacks = [*plan.callbacks, CtrlC(stage)]
        with pytest.raises(KeyboardInterrupt):
            model.fit(batches, callbacks=callbacks[:: -1 if first else 1], verbose=0)
        steps += ran
        assert int(model.optimizer.iterations) == steps
        # A step that was begun counts as well, here and in the file.
        stated = plan.statement()
        assert steps <= stated.steps <= steps + 1
        assert accounting.Ledger.load(path).epsilon() == stated.epsilon > 0
        assert str(plan).endswith(str(stated))
    model.save(tmp_path / "model.keras")
    again = tf.keras.models.load_model(tmp_path / "model.keras")
    assert int(again.optimizer.iterations) == steps
    for ours, theirs in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    model.fit(batches, epochs=9, callbacks=plan.callbacks, verbose=0)
    # The step that was begun, and did not run, is not given back.
    assert plan.statement().steps == int(model.optimizer.iterations) + 1 == plan.steps


@pytest.mark.slow
def test_steps_that_nobody_watched_do_not_pass_for_interrupted_ones():
    plan = plan_of()
    model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
    model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1), "mse")
    batches = plan.batches((data()[0], np.zeros((EXAMPLES, 3))))
    with pytest.raises(KeyboardInterrupt):
        callbacks = [CtrlC("on_train_batch_end"), *plan.callbacks]
        model.fit(batches, callbacks=callbacks, verbose=0)
    assert plan.statement().steps >= 2
    with pytest.raises(ValueError, match="without the plan's callbacks"):
        model.fit(batches.take(1), verbose=0)
    with pytest.raises(
        accounting.PrivacyMismatchError, match="1 steps of this plan's opt"
    ):
        plan.statement()


@pytest.mark.parametrize("batch_size", [100, EXAMPLES])
def test_metrics_that_count_filled_rows_are_warned_of(batch_size):
    plan = plan_of(batch_size=batch_size, epochs=1)
    for place in ("metrics", "weighted_metrics"):
        model = tf.keras.Sequential([tf.keras.Input((5,)), tf.keras.layers.Dense(1)])
        optimizer = plan.replace(epsilon=9).optimizer(dpc.keras.DPSGD, 0.1)
        # Elsewhere there are no filled rows: see drawn_rows_test.
        model.compile(optimizer, "mse", jit_compile=True, **{place: ["mae"]})
        batches = plan.batches(data())
        budget = dpc.keras.PrivacyBudget(np.inf, 1e-4, batches)
        budget.set_model(model)
        budget.set_params({"epochs": 1, "steps": 1})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            budget.on_train_begin()
        texts = [str(w.message) for w in caught if "weight 0" in str(w.message)]
        # A batch of the whole data set has no such rows.
        if place == "metrics" and batch_size < EXAMPLES:
            assert len(texts) == 1 and "(mae)" in texts[0]
            assert f"of {plan.physical_batch_size} rows, 100 are" in texts[0]
        else:
            assert not texts


def test_inputs_and_labels_are_one_argument():
    x, y = data()
    with pytest.raises(TypeError, match=r"one argument: batches\(\(x, y\)\)"):
        plan_of().batches(x, y)
    plan = plan_of()
    model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
    model.compile(plan.optimizer(), "mse")
    for given in (x, plan.batches((x, y))):
        with pytest.raises(TypeError, match=r"plan\.fit\(model, \(x, y\)\)"):
            plan.fit(model, given, y)


@pytest.mark.slow
def test_data_that_were_mapped_are_stated():
    plan = plan_of()
    model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(plan.optimizer(dpc.keras.DPSGD, learning_rate=0.1), loss)
    batches = plan.batches(data()).map_batches(lambda x, y: (2 * x, y))
    model.fit(batches, epochs=1, callbacks=plan.callbacks, verbose=0)
    assert any("transformed by" in text for text in plan.statement().assumptions)


@pytest.mark.parametrize("other", ["adam", tf.keras.optimizers.SGD, None])
def test_a_model_without_an_optimizer_of_the_plan_is_refused(other):
    # A task of KerasHub compiles itself, so that nothing reminds of `compile`.
    plan = plan_of()
    model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
    if other is not None:
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(other if isinstance(other, str) else other(), loss)
    with pytest.raises(ValueError, match=r"none of this.*\n.*compile\(plan.optimizer"):
        plan.fit(model, data())
    assert plan.ledger.steps == 0


def test_arrays_are_refused_with_the_lines_to_write():
    plan = plan_of()
    model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(plan.optimizer(dpc.keras.DPSGD, learning_rate=0.1), loss)
    with pytest.raises(ValueError, match=r"plan.fit\(model, \(x, y\)\)"):
        model.fit(*data(), callbacks=plan.callbacks)
    plan.batches(data())  # There are batches, but fit gets arrays.
    with pytest.raises(accounting.PrivacyMismatchError):
        model.fit(*data(), batch_size=100, callbacks=plan.callbacks, verbose=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delta": 1 / EXAMPLES}, "delta must be below 1 / examples .0.0025., got"),
        ({"delta": 0}, "delta"),
        ({"epsilon": 0}, "epsilon"),
        ({"epsilon": float("inf")}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"examples": 0}, "examples"),
        ({"batch_size": EXAMPLES + 1}, "batch_size must be at most examples"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": "big"}, "batch_size"),
        ({"batch_size": "auto"}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": 1.5}, "epochs"),
        ({"sampling": "uniform"}, "sampling"),
        ({"sampling": dpc.sampling.Poisson(0.1)}, "takes no Poisson.*PrivacyBudget"),
        ({"noise": "brown"}, "noise"),
        ({"noise": "buffered", "sampling": "poisson"}, "MinSeparation"),
        ({"noise": None}, "noise"),
        ({"accountant": "gdp"}, "accountant"),
        ({"physical_batch_size": 0}, "physical_batch_size"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan_of(**changes)


def test_what_the_plan_says_cannot_be_said_again():
    plan = plan_of()
    for name in ("noise_multiplier", "expected_batch_size", "accumulation_steps"):
        with pytest.raises(ValueError, match=f"{name} follows from the plan"):
            plan.optimizer(dpc.keras.DPSGD, 0.1, **{name: 1})
    with pytest.raises(ValueError, match="unit follows from the plan"):
        plan.optimizer(dpc.keras.DPSGD, 0.1, unit="batch")
    for name in ("physical_batch_size", "accumulation_steps", "independent_groups"):
        with pytest.raises(ValueError, match=f"{name} follows from the plan"):
            plan.batches(data(), **{name: 1})
    with pytest.raises(ValueError, match="data has 300 examples, the plan is for 400"):
        plan.batches(data(300))
    with pytest.raises(ValueError, match="optimizer must be a class"):
        plan.optimizer("adam")
    with pytest.raises(ValueError, match="no argument 'batchsize'"):
        plan.replace(batchsize=3)


def test_counts_that_are_too_precise_are_refused_before_the_model_is_made():
    plan = plan_of(batch_size=6, epsilon=1)
    precise = dpc.QuantileClip(count_stddev=6 / 20)
    with pytest.raises(ValueError, match="too precise"):
        plan.optimizer(dpc.keras.DPSGD, 0.1, clip=precise)
    plan.optimizer(dpc.keras.DPSGD, 0.1)
    plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0)


@pytest.mark.parametrize(
    "changes",
    [
        dict(epsilon=1, batch_size=3, epochs=3, sampling="shuffled"),
        pytest.param(
            dict(epsilon=0.1, delta=1e-3, examples=100, batch_size=5, epochs=3),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dict(epsilon=0.05, batch_size=4, epochs=1, physical_batch_size=2),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_batch_that_is_said_to_be_enough_is_enough(changes):
    """The larger batch has larger noise, which the suggestion takes into account."""
    plan = plan_of(**changes)
    with pytest.raises(ValueError, match=r"batch_size=\d+ is too small") as found:
        plan.optimizer(dpc.keras.DPSGD, 0.1)
    enough = int(re.search(r"batch_size=(\d+) is enough", str(found.value))[1])
    larger = plan_of(**{**changes, "batch_size": enough})
    assert larger.optimizer(dpc.keras.DPSGD, 0.1).expected_batch_size == enough
    with pytest.raises(ValueError, match="too small"):  # Not many more than need be.
        less = max(changes["batch_size"], int(0.9 * enough) - 1)
        plan_of(**{**changes, "batch_size": less}).optimizer(dpc.keras.DPSGD, 0.1)


def test_where_no_batch_is_enough_clips_that_count_nothing_are():
    given = dict(epsilon=0.1, delta=1e-3, examples=100, batch_size=5, epochs=100)
    plan = plan_of(**given)
    with pytest.raises(ValueError, match="Even all 100 examples are too few") as found:
        plan.optimizer(dpc.keras.DPSGD, 0.1)
    assert "clip=dpc.AutomaticClip(), or a clip norm" in str(found.value)
    for clip in (dpc.AutomaticClip(), 1.0):
        plan.optimizer(dpc.keras.DPSGD, 0.1, clip=clip)


@pytest.mark.slow
def test_any_keras_optimizer_is_made_private():
    model, _ = trained(plan_of(), epochs=1, optimizer=tf.keras.optimizers.Nadam)
    assert model.optimizer.noise_multiplier > 0


@pytest.mark.slow
def test_the_table_is_of_plans_that_could_be_made():
    plan = plan_of()
    rows = {row["change"]: row for row in plan.rows()}
    assert len(rows) == 7
    twice = rows["twice the epochs"]
    assert twice["noise_multiplier"] == plan_of(epochs=6).noise_multiplier
    assert twice["steps"] == 24
    assert rows["half the batch size"]["noise_multiplier"] < plan.noise_multiplier
    assert rows["half the epsilon"]["noise_multiplier"] > plan.noise_multiplier
    text = plan.table().splitlines()
    assert len(text) == 8 and len({line.index("3") for line in text[1:2]}) == 1
    # A batch larger than the data is no neighbour.
    assert len(plan_of(batch_size=EXAMPLES).rows()) == 6


@pytest.mark.slow
def test_the_model_card_says_what_the_statement_says():
    plan = plan_of()
    with pytest.raises(ValueError, match="Nothing ran yet"):
        plan.statement()
    trained(plan, epochs=1)
    stated = plan.statement()
    card = plan.statement(format="markdown")
    told = json.loads(plan.statement(format="json"))
    assert told["epsilon"] == stated.epsilon and told["private"] is True
    assert told["steps"] == 4 and told["delta"] == 1e-4
    for text in (
        stated.relation,
        stated.unit,
        *stated.assumptions,
        *told["not_covered"],
    ):
        assert text in card
    assert plan.statement(format="text") == str(stated)
    with pytest.raises(ValueError, match="format"):
        plan.statement(format="html")


@pytest.mark.slow
def test_notebooks_show_the_text():
    plan = plan_of()
    advice = dpc.tuning.batch_size_advice(EXAMPLES, 8, 3.0, 1e-4)
    ledger = accounting.Ledger(1e-5)
    ledger.begin(noise_multiplier=1.0, sampling=dpc.sampling.Poisson(0.1))
    for result in (plan, advice, ledger.statement()):
        shown = io.StringIO()
        result._repr_pretty_(types.SimpleNamespace(text=shown.write), False)
        assert shown.getvalue() == str(result) != repr(result)


@pytest.mark.slow
def test_a_seed_is_not_private_in_any_format():
    plan = plan_of()
    trained(plan, epochs=1, seed=1)
    assert "not private" in plan.statement("markdown").splitlines()[2]
    assert json.loads(plan.statement("json"))["private"] is False
