"""PrivacyBudget reports the epsilon spent, stops in time, and continues its counting.

The optimizers here have the attributes that the callback reads and no privacy: these
tests are about the counting.
"""

import collections
import json
import math
import threading

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.counted import DELTA, RECORDS, Optimizer, model_of, poisson, small_data
from tfdpclip import accounting, sampling
from tfdpclip.accounting import Ledger, PrivacyMismatchError, accountants
from tfdpclip.keras import _compat
from tfdpclip.keras.privacy_budget import PrivacyBudget
from tfdpclip.keras.watching import remaining_steps
from tfdpclip.keras.watching.executions import refuse_overrun

pytestmark = pytest.mark.unchecked


def _epsilon(z, steps, batches):
    return accounting.epsilon(z, steps, batches, DELTA)


def _epsilon_after_unseen(unseen, steps, batches):
    ledger = Ledger(DELTA)
    ledger.begin(noise_multiplier=2.0, sampling=sampling.FullBatch())
    ledger.record(unseen)
    ledger.begin(noise_multiplier=2.0, sampling=batches, change=True)
    ledger.record(steps)
    return ledger.epsilon()


def test_epsilon_is_in_the_history():
    batches, optimizer = poisson(), Optimizer()
    budget = PrivacyBudget(math.inf, DELTA, batches)
    history = model_of(optimizer).fit(batches, epochs=3, verbose=0, callbacks=[budget])
    expected = [_epsilon(2.0, steps, batches) for steps in (10, 20, 30)]
    found = history.history["epsilon"]
    # Between epochs the history has an upper bound; at the end it has epsilon itself.
    np.testing.assert_array_less(np.subtract(expected, 1e-12), found)
    np.testing.assert_allclose(found, expected, rtol=5e-3)
    assert found[-1] == expected[-1] == budget.ledger.epsilon()
    assert budget.statement().steps == 30
    assert "not private" not in str(budget.statement())


def test_epsilon_of_an_epoch_is_computed_beside_its_last_execution(monkeypatch):
    batches, optimizer = poisson(), Optimizer()
    budget = PrivacyBudget(math.inf, DELTA, batches)
    asked, readers = [], set()
    ask, read = accountants.epsilon, budget.ledger.event

    def epsilon(event, *options):
        asked.append((threading.current_thread(), event))
        return ask(event, *options)

    def event(*more):
        readers.add(threading.current_thread())
        return read(*more)

    monkeypatch.setattr(accountants, "epsilon", epsilon)
    monkeypatch.setattr(budget.ledger, "event", event)
    # These executions are short.
    monkeypatch.setattr(remaining_steps, "_SOON", 0.0)
    wait = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (
            budget._remaining._ahead and budget._remaining._ahead.join()
        )
    )
    model_of(optimizer).fit(batches, epochs=3, verbose=0, callbacks=[budget, wait])
    main = threading.main_thread()
    beside = [event for thread, event in asked if thread is not main]
    at_the_end = [event for thread, event in asked if thread is main]
    assert beside == at_the_end[-3:] and len(set(map(str, beside))) == 3
    # Reading the ledger reserves steps, which only one thread may do.
    assert readers == {main}


def test_the_scheme_alone_is_enough():
    # A rate of no other test: batches with a different capacity that a test keeps alive
    # would be refused.
    scheme, optimizer = sampling.Poisson(0.1003), Optimizer()
    batches = scheme.batches(small_data(), steps=10)
    budget = PrivacyBudget(math.inf, DELTA, scheme)
    model_of(optimizer).fit(batches, epochs=1, verbose=0, callbacks=[budget])
    # The ledger has the scheme of the batches, capacity included.
    assert budget.ledger.phases[0].sampling == batches.scheme
    assert budget.ledger.epsilon() == _epsilon(2.0, 10, batches)


def test_a_calibrated_run_is_not_cut_short(capsys):
    z = accounting.noise_multiplier(1.0, DELTA, 20, sampling.Poisson(0.1))
    batches, optimizer = poisson(), Optimizer(z)
    budget = PrivacyBudget(1.0, DELTA, batches)
    model_of(optimizer).fit(batches, epochs=2, verbose=0, callbacks=[budget])
    assert optimizer.iterations.numpy() == 20
    assert 0.999 < budget.ledger.epsilon() <= 1.0
    assert "stopping" not in capsys.readouterr().out


@pytest.mark.parametrize("steps_per_execution", [1, 4, 7])
@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.thinned(4)
def test_stops_before_the_budget_is_exceeded(steps_per_execution, accumulation_steps):
    batches = poisson(accumulation_steps=accumulation_steps)
    optimizer = Optimizer(accumulation_steps=accumulation_steps)
    target = _epsilon(2.0, 25, batches) + 1e-6
    budget = PrivacyBudget(target, DELTA, batches)
    model = model_of(optimizer, steps_per_execution=steps_per_execution)
    model.fit(batches, epochs=9, verbose=0, callbacks=[budget])
    ran = int(optimizer.iterations.numpy())
    assert budget.ledger.steps == ran
    assert ran <= 25
    # The unused rest is shorter than an execution.
    assert ran + math.ceil(steps_per_execution / accumulation_steps) > 25
    assert budget.ledger.epsilon() <= target


def test_partial_executions_at_the_end_of_an_epoch():
    # Executions of 4, 4 and 2 steps; the budget ends with the second epoch.
    batches, optimizer = poisson(), Optimizer()
    budget = PrivacyBudget(_epsilon(2.0, 20, batches) + 1e-6, DELTA, batches)
    model = model_of(optimizer, steps_per_execution=4)
    model.fit(batches, epochs=5, verbose=0, callbacks=[budget])
    assert optimizer.iterations.numpy() == 20


def test_steps_per_epoch():
    batches, optimizer = poisson(), Optimizer()
    budget = PrivacyBudget(math.inf, DELTA, batches)
    model_of(optimizer).fit(
        batches.repeat(), steps_per_epoch=7, epochs=3, verbose=0, callbacks=[budget]
    )
    assert budget.ledger.steps == 21


@pytest.mark.slow
def test_a_run_that_stopped_within_a_step_goes_on_there():
    batches = poisson(accumulation_steps=3)
    optimizer = Optimizer(accumulation_steps=3)
    model = model_of(optimizer)
    budget = PrivacyBudget(math.inf, DELTA, batches)
    for expected in (2, 4, 7):
        # Seven elements are two steps and a third.
        model.fit(batches.repeat(), steps_per_epoch=7, verbose=0, callbacks=[budget])
        assert optimizer.iterations.numpy() == expected
        assert budget.ledger.steps == expected
    # A new optimizer has not had the first pieces, so it gets a whole step.
    other = Optimizer(accumulation_steps=3)
    batches._drawer.next_element()
    budget = PrivacyBudget(math.inf, DELTA, batches)
    model_of(other).fit(batches.take(3), verbose=0, callbacks=[budget])
    assert other.iterations.numpy() == 1
    assert batches._drawer.position % 3 == 0


def test_nothing_runs_when_nothing_fits():
    batches, optimizer = poisson(), Optimizer(z=0.3)
    model = model_of(optimizer)
    budget = PrivacyBudget(0.5, DELTA, batches)
    with pytest.raises(ValueError, match="room for 0 steps.*raise noise_multiplier"):
        model.fit(batches, verbose=0, callbacks=[budget])
    assert optimizer.iterations.numpy() == 0
    assert batches._drawer.steps_drawn() == 0


def test_an_execution_longer_than_the_budget_is_refused():
    batches, optimizer = poisson(), Optimizer()
    budget = PrivacyBudget(_epsilon(2.0, 3, batches) + 1e-6, DELTA, batches)
    model = model_of(optimizer, steps_per_execution=5)
    with pytest.raises(ValueError, match="room for 3 steps.*lower steps_per_execution"):
        model.fit(batches, verbose=0, callbacks=[budget])
    assert optimizer.iterations.numpy() == 0


@pytest.mark.slow
def test_a_second_fit_goes_on_counting():
    batches, optimizer = poisson(), Optimizer()
    model = model_of(optimizer)
    first = PrivacyBudget(math.inf, DELTA, batches)
    model.fit(batches, verbose=0, callbacks=[first])
    model.fit(batches, verbose=0, callbacks=[first])
    assert first.ledger.steps == 20
    # A new callback with the same ledger goes on ...
    second = PrivacyBudget(math.inf, DELTA, batches, ledger=first.ledger)
    history = model.fit(batches, verbose=0, callbacks=[second])
    assert history.history["epsilon"] == [_epsilon(2.0, 30, batches)]
    # ... and a callback with a new ledger knows that steps ran, but not their data.
    third = PrivacyBudget(math.inf, DELTA, batches)
    history = model.fit(batches, verbose=0, callbacks=[third])
    assert history.history["epsilon"] == [_epsilon_after_unseen(30, 10, batches)]
    assert "30 steps ran before they were recorded" in str(third.statement())
    finite = PrivacyBudget(5.0, DELTA, batches)
    with pytest.raises(ValueError, match="40 of them ran without this ledger"):
        model.fit(batches, verbose=0, callbacks=[finite])


def test_a_spent_budget_stays_spent():
    batches, optimizer = poisson(), Optimizer()
    model = model_of(optimizer)
    budget = PrivacyBudget(_epsilon(2.0, 10, batches) + 1e-6, DELTA, batches)
    model.fit(batches, epochs=3, verbose=0, callbacks=[budget])
    with pytest.raises(ValueError, match="room for 0 steps"):
        model.fit(batches, verbose=0, callbacks=[budget])
    assert optimizer.iterations.numpy() == 10


@pytest.mark.slow
def test_resumes_from_backup(tmp_path):
    batches, optimizer = poisson(), Optimizer()
    model = model_of(optimizer)

    class Crash(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("crash")

    def callbacks(budget, *more):
        # The budget comes first: it must notice steps that the backup restores later.
        return [budget, tf.keras.callbacks.BackupAndRestore(tmp_path / "b"), *more]

    budget = PrivacyBudget(math.inf, DELTA, batches)
    with pytest.raises(RuntimeError, match="crash"):
        model.fit(batches, epochs=4, verbose=0, callbacks=callbacks(budget, Crash()))

    optimizer, batches = Optimizer(), poisson()
    model = model_of(optimizer)
    budget = PrivacyBudget(math.inf, DELTA, batches)
    history = model.fit(batches, epochs=4, verbose=0, callbacks=callbacks(budget))
    ran = int(optimizer.iterations.numpy())
    assert ran == 40
    assert budget.ledger.steps == ran
    # Without a ledger of the earlier steps, their sampling is unknown.
    expected = _epsilon_after_unseen(20, 20, batches)
    assert history.history["epsilon"][-1] == expected


def test_ledger_file_is_continued(tmp_path):
    path = tmp_path / "run" / "privacy.json"
    batches, optimizer = poisson(), Optimizer()
    budget = PrivacyBudget(math.inf, DELTA, batches, ledger=path)
    model_of(optimizer).fit(batches, epochs=2, verbose=0, callbacks=[budget])
    assert Ledger.load(path).steps == 20
    # A new process with an older checkpoint still counts all the steps that ran.
    optimizer = Optimizer()
    budget = PrivacyBudget(math.inf, DELTA, batches, ledger=path)
    model_of(optimizer).fit(batches, verbose=0, callbacks=[budget])
    assert Ledger.load(path).steps == 30
    assert Ledger.load(path).epsilon() == _epsilon(2.0, 30, batches)


def test_steps_are_in_the_file_before_they_run(tmp_path):
    path = tmp_path / "privacy.json"
    batches, optimizer = poisson(), Optimizer()
    known = []

    class Watch(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            content = json.loads(path.read_text())
            runs = sum(sum(phase["runs"]) for phase in content["phases"])
            known.append(runs + content["reserved"])

        def on_train_batch_end(self, batch, logs=None):
            if batch == 6:
                raise KeyboardInterrupt

    budget = PrivacyBudget(math.inf, DELTA, batches, ledger=path)
    with pytest.raises(KeyboardInterrupt):
        model_of(optimizer).fit(batches, verbose=0, callbacks=[budget, Watch()])
    assert all(counted >= step + 1 for step, counted in enumerate(known))
    assert Ledger.load(path).steps >= 7
    # The same process knows how many steps really ran.
    assert optimizer.iterations.numpy() == 7
    budget.set_model(model_of(optimizer))
    budget.set_params({"steps": 10, "epochs": 1})
    budget.on_train_begin()
    assert budget.ledger.steps == 7


def test_changed_settings_are_refused_unless_meant(tmp_path):
    path = tmp_path / "privacy.json"
    batches = poisson()
    budget = PrivacyBudget(math.inf, DELTA, batches, ledger=path)
    model_of(Optimizer(2.0)).fit(batches, verbose=0, callbacks=[budget])
    again = PrivacyBudget(math.inf, DELTA, batches, ledger=path)
    with pytest.raises(PrivacyMismatchError, match="noise_multiplier was 2.0, now 3.0"):
        model_of(Optimizer(3.0)).fit(batches, verbose=0, callbacks=[again])
    meant = PrivacyBudget(math.inf, DELTA, batches, ledger=path, allow_change=True)
    model_of(Optimizer(3.0)).fit(batches, verbose=0, callbacks=[meant])
    assert meant.statement().noise_multipliers == (2.0, 3.0)
    with pytest.raises(PrivacyMismatchError, match="kept for delta"):
        PrivacyBudget(1.0, 1e-6, batches, ledger=path)


def test_noise_multiplier_must_not_change_on_the_way():
    batches, optimizer = poisson(), Optimizer()

    class Lower(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.noise_multiplier = 0.1

    budget = PrivacyBudget(math.inf, DELTA, batches)
    with pytest.raises(PrivacyMismatchError, match="changed from 2.0 to 0.1"):
        model_of(optimizer).fit(
            batches, epochs=2, verbose=0, callbacks=[budget, Lower()]
        )


class TestNotPrivate:
    def test_no_noise(self):
        batches, optimizer = poisson(), Optimizer(z=0.0)
        budget = PrivacyBudget(math.inf, DELTA, batches)
        history = model_of(optimizer).fit(batches, verbose=0, callbacks=[budget])
        assert history.history["epsilon"] == [math.inf]
        assert str(budget.statement()).startswith("not private: noise_multiplier is 0")
        finite = PrivacyBudget(100.0, DELTA, batches)
        with pytest.raises(ValueError, match="noise_multiplier is 0.*not private"):
            model_of(Optimizer(z=0.0)).fit(batches, verbose=0, callbacks=[finite])

    def test_seeded_noise(self):
        batches, optimizer = poisson(), Optimizer(seed=0)
        budget = PrivacyBudget(math.inf, DELTA, batches)
        model_of(optimizer).fit(batches, verbose=0, callbacks=[budget])
        assert str(budget.statement()).startswith("not private: a seed was fixed")

    def test_seeded_draws(self):
        # A rate of no other test: a scheme stands for all of its batches that exist.
        batches, optimizer = poisson(0.11, seed=7), Optimizer(expected_batch_size=11)
        budget = PrivacyBudget(math.inf, DELTA, sampling.Poisson(0.11))
        model_of(optimizer).fit(batches, verbose=0, callbacks=[budget])
        assert str(budget.statement()).startswith("not private: a seed was fixed")


class TestShuffledEpochs:
    def _fit(self, batches, budget, **options):
        model_of(Optimizer()).fit(batches, verbose=0, callbacks=[budget], **options)

    def test_epochs_are_releases(self):
        batches = sampling.ShuffledEpochs(10, RECORDS).batches(small_data())
        budget = PrivacyBudget(math.inf, DELTA, batches)
        self._fit(batches, budget, epochs=3)
        expected = accounting.gdp_epsilon(math.sqrt(3) / (2.0 / 2), DELTA)
        assert budget.ledger.epsilon() == pytest.approx(expected)
        text = str(budget.statement())
        assert "no amplification" in text
        assert "replace one record" in text

    def test_interrupted_epochs_are_counted_again(self):
        batches = sampling.ShuffledEpochs(10, RECORDS).batches(small_data())
        budget = PrivacyBudget(math.inf, DELTA, batches)
        for _ in range(3):
            self._fit(batches.repeat(), budget, steps_per_epoch=4, epochs=1)
        # The optimizers are new each time; the ledger counts across them.
        assert budget.ledger.steps == 12
        releases = sum(math.ceil(run / 10) for run in budget.ledger.phases[0].runs)
        assert releases >= 3

    def test_a_refused_fit_counts_nothing(self):
        batches = sampling.ShuffledEpochs(10, RECORDS).batches(small_data())
        collections.deque(batches.take(3), maxlen=0)
        budget = PrivacyBudget(1e-3, DELTA, batches)
        with pytest.raises(ValueError, match="budget|epsilon"):
            self._fit(batches, budget)
        assert (budget.ledger.steps, sum(budget.ledger.phases[0].runs)) == (0, 0)

    def test_draws_for_other_purposes_are_counted(self):
        batches = sampling.ShuffledEpochs(10, RECORDS).batches(small_data())

        class Peek(tf.keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                next(iter(batches))

        budget = PrivacyBudget(math.inf, DELTA, batches)
        model = model_of(Optimizer())
        model.fit(batches, verbose=0, callbacks=[Peek(), budget])
        # Ten steps were trained on, spread over two shuffles.
        releases = sum(math.ceil(run / 10) for run in budget.ledger.phases[0].runs)
        assert releases == 2
        assert budget.ledger.steps == 10


@pytest.mark.parametrize(
    "arguments, match",
    [
        ((0.0, 1e-5), "epsilon"),
        ((-1.0, 1e-5), "epsilon"),
        ((math.nan, 1e-5), "epsilon"),
        ((1.0, 0.0), "delta"),
        ((1.0, 1.0), "delta"),
        ((1.0, math.nan), "delta"),
    ],
)
def test_bad_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        PrivacyBudget(*arguments, sampling.Poisson(0.1))


def test_more_bad_arguments():
    with pytest.raises(ValueError, match="sampling must be a scheme"):
        PrivacyBudget(1.0, 1e-5, 0.1)
    with pytest.raises(ValueError, match="accountant must be one of"):
        PrivacyBudget(1.0, 1e-5, sampling.Poisson(0.1), "prv")
    with pytest.raises(ValueError, match="cannot keep a budget"):
        PrivacyBudget(1.0, 1e-5, sampling.Poisson(0.1), "gdp")


def test_other_optimizers_are_refused():
    batches = poisson()
    model = model_of("sgd")
    with pytest.raises(ValueError, match="needs a private optimizer"):
        model.fit(
            batches, verbose=0, callbacks=[PrivacyBudget(math.inf, DELTA, batches)]
        )


def test_automatic_steps_per_execution_is_refused():
    batches = poisson()
    model = model_of(Optimizer(), steps_per_execution="auto")
    with pytest.raises(ValueError, match="give a number"):
        model.fit(
            batches, verbose=0, callbacks=[PrivacyBudget(math.inf, DELTA, batches)]
        )


@pytest.mark.parametrize(
    ("overruns", "steps", "size", "epochs", "refused"),
    [
        (True, 7, 3, 1, True),
        (True, 6, 3, 1, False),
        (True, 10, 3, 1, False),  # The data end there.
        (True, 10, 3, 2, True),
        (True, 10, 3, None, True),
        (True, 2, 3, 1, True),
        (True, None, 3, None, False),
        (False, 7, 3, 1, False),
    ],
)
@pytest.mark.thinned(3)
def test_executions_that_would_run_on_are_refused(
    overruns, steps, size, epochs, refused, monkeypatch
):
    monkeypatch.setattr(_compat, "OVERRUNS_EPOCHS", overruns)
    monkeypatch.setattr(_compat, "steps_per_execution", lambda model: size)
    data = tf.data.Dataset.range(10).repeat(epochs)
    found = None
    try:
        refuse_overrun(None, {"steps": steps}, data)
    except PrivacyMismatchError as error:
        found = str(error)
    assert (found is not None) == refused
    whole = {7: 6, 10: 9, 2: 3}.get(steps)
    assert not refused or f"steps_per_epoch={whole};" in found
