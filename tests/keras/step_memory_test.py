"""A plan finds the rows with which a step stays within the memory that is stated."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from benchmarks import models
from tfdpclip.keras import step_memory
from tfdpclip.keras.watching.step_history import history_of

pytestmark = pytest.mark.unchecked
EXAMPLES = 3000


def _counts():
    try:
        step_memory.growth(lambda: None)
    except NotImplementedError:
        return False
    return True


# On a CPU, oneDNN's allocator does, which is the default on some processors only.
counted = pytest.mark.skipif(not _counts(), reason="TensorFlow counts no bytes here")
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
DATA = np.zeros((EXAMPLES, 256), np.float32), np.zeros(EXAMPLES, int)


def plan_of(**changes):
    given = dict(epsilon=3, delta=1e-5, examples=EXAMPLES, batch_size=2000, epochs=1)
    return dpc.keras.PrivacyPlan(**{**given, **changes})


def training(plan, made=None):
    model = tf.keras.Sequential([tf.keras.layers.Dense(n) for n in (256, 1024, 3)])
    model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), LOSS)
    batches = plan.batches(DATA)
    if made is not None:
        made.append((plan, batches))
    return model, batches


def measure(model, batches, pieces):
    history_of(model.optimizer).planned = False  # zeros, which no budget counts
    return step_memory.measure_step(model, batches, pieces)


@counted
@pytest.mark.slow
def test_steps_stay_within_the_memory_and_use_it():
    plan, memory, made = plan_of(), 2**24, []
    found = plan.within_memory(memory, lambda plan: training(plan, made))
    assert found.physical_batch_size < plan.physical_batch_size
    assert found.accumulation_steps > 1 and found.steps == plan.steps
    model, batches = training(found)
    # The peak memory of a step depends on which of its ops run side by side.
    used = max(measure(model, batches, found.accumulation_steps) for _ in range(3))
    assert memory / 3 < used <= memory
    # The search drew no records and spent nothing: it used separate plans.
    assert made and all(batches._drawer.steps_drawn() == 0 for _, batches in made)
    assert not plan.ledger.phases and not found.ledger.phases
    assert all(trial.ledger is not plan.ledger for trial, _ in made)
    assert not plan._histories and not found._histories[:-1]


@counted
@pytest.mark.slow
def test_where_the_memory_is_enough_a_step_stays_one_batch(tmp_path):
    path = tmp_path / "ledger.json"
    plan = plan_of(batch_size=20, sampling="fixed_order", noise="tree", ledger=path)
    found = plan.within_memory(2**40, training)
    assert (found.physical_batch_size, found.accumulation_steps) == (20, 1)
    model, batches = training(found)
    model.fit(batches.take(1), verbose=0, callbacks=found.callbacks)
    # The spent epsilon is in the first plan's ledger file.
    again = plan_of(batch_size=20, sampling="fixed_order", noise="tree", ledger=path)
    assert again.ledger.steps == 1
    with pytest.raises(ValueError, match="physical_batch_size=20"):
        again.within_memory(2**40, training)


@counted
@pytest.mark.slow
def test_what_cannot_be_is_refused():
    def huge(plan):
        model = tf.keras.Sequential([tf.keras.layers.ZeroPadding1D((0, 4_500_000))])
        model.add(tf.keras.layers.GlobalMaxPool1D())
        model.add(tf.keras.layers.Dense(3))
        model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), LOSS)
        return model, plan.batches((DATA[0][..., None], DATA[1]))

    plan = plan_of()
    with pytest.raises(ValueError, match="A step of one row takes [0-9,]+ bytes"):
        plan.within_memory(2**24, huge)
    with pytest.raises(ValueError, match="memory must be"):
        plan.within_memory(0, training)
    with pytest.raises(ValueError, match="training must be a function"):
        plan.within_memory(2**24, None)
    with pytest.raises(ValueError, match=r"training must return \(model, batches\)"):
        plan.within_memory(2**24, lambda plan: (training(plan)[0], DATA))


@counted
def test_growth_counts_the_bytes_of_tensors():
    def run():
        tf.reduce_sum(tf.ones([1000, 1000]) + 1.0).numpy()

    assert step_memory.growth(run) >= 4_000_000


def _nothing(device):
    return {"current": 0, "peak": 0}


def _no_statistics(device):
    raise ValueError(f"Allocator stats not available for device '{device}'")


@pytest.mark.parametrize("info", [_nothing, _no_statistics])
def test_where_nothing_is_counted_it_says_so(monkeypatch, info):
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", info)
    with pytest.raises(NotImplementedError, match="physical_batch_size.*ONEDNN"):
        step_memory.growth(lambda: None)


@pytest.mark.parametrize("fixed, each", [(0, 7), (100_000, 900), (200_000, 13)])
@pytest.mark.parametrize("memory", [300_000, 10**6, 10**9])
def test_rows_of_a_line(fixed, each, memory):
    def used_by(rows):
        assert fixed + each * rows <= 1.1 * memory
        return fixed + each * rows

    rows = step_memory.find_most_rows(used_by, memory, 10**12)
    assert 0.75 * memory < used_by(rows) <= 0.92 * memory
    assert step_memory.find_most_rows(used_by, memory, 11) == 11
    assert step_memory.find_most_rows(used_by, memory, 1) == 1


def test_all_rows_fit_where_no_byte_is_counted():
    assert step_memory.find_most_rows(lambda rows: 0, 100_000, 54) == 54


def test_a_size_that_is_larger_than_its_line_is_not_taken():
    def used_by(rows):  # small tensors are not counted
        return 10 * rows + 20 * max(0, rows - 3000)

    rows = step_memory.find_most_rows(used_by, 100_000, 10**6)
    assert 60_000 < used_by(rows) <= 92_000


@counted
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist_cnn", "convnet", "lstm"])
@pytest.mark.parametrize("jit", [False, True])
def test_the_estimate_holds_for_models(name, jit):
    task = models.make(name)
    data = task.batch(np.random.default_rng(0), EXAMPLES)

    def training(plan):
        model = task.build()
        model.compile(plan.optimizer(dpc.keras.DPAdam, 1e-3), LOSS, jit_compile=jit)
        return model, plan.batches(data)

    memory = 200 * 2**20
    found = plan_of().within_memory(memory, training)
    assert found.accumulation_steps > 1
    model, batches = training(found)
    used = measure(model, batches, found.accumulation_steps)
    print(name, jit, found.physical_batch_size, used / memory)
    assert memory / 3 < used <= memory
