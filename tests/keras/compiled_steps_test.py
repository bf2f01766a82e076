"""Steps that XLA compiles, in `fit`: the first executions compare, uncompiled."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.stack import KERAS_3
from tfdpclip._devices import traced_with
from tfdpclip.gradients import GradientMismatchError
from tfdpclip.keras import _compat
from tfdpclip.keras.watching import compiled_steps

L = tf.keras.layers
EXAMPLES = 96
ERRORS = (tf.errors.InvalidArgumentError, GradientMismatchError)

pytestmark = pytest.mark.every_check


@pytest.fixture
def twins(monkeypatch):
    """The uncompiled training functions that were made."""
    made = []
    make = compiled_steps._twin_of
    monkeypatch.setattr(
        compiled_steps, "_twin_of", lambda model: made.append(make(model)) or made[-1]
    )
    return made


def arrays(length=3):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((EXAMPLES, length, 2)).astype("float32")
    return x, rng.standard_normal((EXAMPLES, 1)).astype("float32")


def plan_of(**settings):
    settings = {"batch_size": 24, "epochs": 2} | settings
    return dpc.keras.PrivacyPlan(epsilon=8.0, delta=1e-4, examples=EXAMPLES, **settings)


def compiled_model(
    plan, *layers, steps=1, model=tf.keras.Sequential, length=3, **settings
):
    layers = layers or (L.Flatten(), L.Dense(1))
    made = model([tf.keras.Input((length, 2)), *layers])
    made.compile(
        plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0, **settings),
        "mse",
        jit_compile=True,
        steps_per_execution=steps,
    )
    return made


def fit(model, plan, batches, **settings):
    model.fit(batches, verbose=0, callbacks=plan.callbacks, **settings)


def statuses_of(act):
    """Whether the losses compare that were traced outside of an uncompiled twin."""
    found = []
    with traced_with(tell=lambda status, graph: found.append(status.compares)):
        act()
    return set(found)


class Scale(L.Layer):
    """A layer with a Mul of the batch and a weight."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * tf.convert_to_tensor(self.kernel)


@pytest.mark.parametrize("steps", [1, 2])
def test_compiled_executions_hold_no_comparison(twins, steps):
    plan = plan_of()
    model = compiled_model(plan, steps=steps)
    batches = plan.batches(arrays())
    assert statuses_of(lambda: fit(model, plan, batches, epochs=2)) == {False}
    assert len(twins) == 1
    assert plan.ledger.steps == plan.steps == int(model.optimizer.iterations)
    # No rule of the statement changes because a step ran uncompiled.
    assert "compiled" not in str(plan.ledger.statement())


def halve_norms(monkeypatch):
    """Has a rule return half of the norms."""
    from tfdpclip.gradients.forms import base_form

    measured = base_form.Explicit.measured

    def halved(self, budget):
        found = measured(self, budget)
        return dataclasses.replace(found, squared_norms=found.squared_norms / 4.0)

    monkeypatch.setattr(base_form.Explicit, "measured", halved)


def test_a_wrong_rule_stops_fit_at_the_first_step(twins, monkeypatch):
    halve_norms(monkeypatch)
    plan = plan_of()
    model = compiled_model(
        plan, L.Flatten(), Scale(name="scale"), L.Dense(1, use_bias=False)
    )
    before = [w.numpy() for w in model.trainable_variables]
    with pytest.raises(ERRORS, match="the norm of an example.*scale"):
        fit(model, plan, plan.batches(arrays()), epochs=2)
    for weight, old in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), old)


class SetsFrozen(tf.keras.callbacks.Callback):
    """Writes to the first layer after the second batch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            frozen = self.model.layers[0]
            frozen.set_weights([weight + 1 for weight in frozen.get_weights()])


def test_fit_ends_at_the_compiled_step_that_finds_a_changed_weight():
    plan = plan_of()
    model = compiled_model(plan, L.Dense(2, trainable=False), L.Flatten(), L.Dense(1))
    batches = plan.batches(arrays())
    callbacks = [*plan.callbacks, SetsFrozen()]
    with pytest.raises(dpc.ExampleIsolationError, match="changed between the steps"):
        model.fit(batches, epochs=2, verbose=0, callbacks=callbacks)
    # The third step took no example, and no later step spends the budget on noise.
    assert plan.ledger.steps == int(model.optimizer.iterations) == 3


class OwnFunction(tf.keras.Sequential):
    """A model with a training function of its own, which compares compiled."""

    def make_train_function(self, force=False):
        return super().make_train_function(force)


def test_fit_ends_at_the_compiled_step_whose_comparison_fails(monkeypatch):
    halve_norms(monkeypatch)
    plan = plan_of()
    layers = L.Flatten(), Scale(name="scale"), L.Dense(1, use_bias=False)
    model = compiled_model(plan, *layers, model=OwnFunction)
    with pytest.raises(GradientMismatchError, match="compiled by XLA"):
        fit(model, plan, plan.batches(arrays()), epochs=2)
    assert plan.ledger.steps == int(model.optimizer.iterations) == 1


def test_later_calls_of_fit_do_not_run_uncompiled_again(twins):
    plan = plan_of(epochs=4)
    model = compiled_model(plan)
    batches = plan.batches(arrays())
    for _ in range(2):
        fit(model, plan, batches)
    assert len(twins) == 1
    # A second compilation makes a second step.
    model.compile(model.optimizer, "mae", jit_compile=True)
    fit(model, plan, batches)
    assert len(twins) == 2


def test_inconclusive_steps_run_uncompiled(twins):
    x, _ = arrays()
    plan = plan_of(epochs=4)
    zero = L.Dense(1, kernel_initializer="zeros")
    model = compiled_model(plan, L.Flatten(), zero, L.Rescaling(0.0))
    batches = plan.batches((x, np.zeros([EXAMPLES, 1], "float32")))
    assert statuses_of(lambda: fit(model, plan, batches, epochs=2)) == set()
    assert len(twins) == 1
    # The step of the next call is compared, if the losses are not constant.
    assert statuses_of(lambda: fit(model, plan, batches, epochs=1)) == set()
    assert len(twins) == 2


@pytest.mark.parametrize("when", ["never", "always"])
def test_other_comparisons_stay_as_they_are(twins, when):
    plan = plan_of()
    model = compiled_model(plan, check_gradients=when)
    batches = plan.batches(arrays())
    compares = statuses_of(lambda: fit(model, plan, batches))
    assert compares == {when == "always"}
    assert not twins


def test_an_own_training_function_compares_where_it_is_compiled(twins):
    plan = plan_of()
    model = compiled_model(plan, model=OwnFunction)
    batches = plan.batches(arrays())
    assert statuses_of(lambda: fit(model, plan, batches)) == {True}
    assert not twins


class Within(tf.keras.Sequential):
    """A model with a training step that is a function."""

    @tf.function
    def train_step(self, data):
        return super().train_step(data)


class Calls(tf.keras.Sequential):
    """A model with a training step that calls a function in a method of the model."""

    def __init__(self, layers):
        super().__init__(layers)
        self.within = tf.function(super().train_step)

    def train_step(self, data):
        return self.called(*data)

    def called(self, *data):
        return self.within(data)


@tf.function
def mean(losses):
    return tf.reduce_mean(losses)


class CallsGlobal(tf.keras.Sequential):
    def train_step(self, data):
        mean(data[0])
        return super().train_step(data)


@pytest.mark.parametrize("model", [Within, Calls, CallsGlobal])
def test_functions_within_the_step_are_compared_where_they_are_compiled(twins, model):
    plan = plan_of()
    made = compiled_model(plan, model=model)
    batches = plan.batches(arrays())
    assert statuses_of(lambda: fit(made, plan, batches)) == {True}
    assert not twins
    assert int(made.optimizer.iterations) == plan.ledger.steps == 4


class Functions:
    """An object that is no part of a model, with a function."""

    @tf.function
    def step(self, model, data):
        return tf.keras.Sequential.train_step(model, data)


class CallsObject(tf.keras.Sequential):
    """A model with a training step in a function that the code does not name."""

    def __init__(self, layers):
        super().__init__(layers)
        self.functions = [Functions()]

    def train_step(self, data):
        return self.functions[0].step(self, data)


def test_a_function_that_is_found_in_the_trace_alone(twins):
    plan = plan_of(epochs=4)
    made = compiled_model(plan, model=CallsObject)
    batches = plan.batches(arrays())
    assert True in statuses_of(lambda: fit(made, plan, batches))
    assert len(twins) == 1
    # The function has a trace now, and an uncompiled function could use no new trace.
    fit(made, plan, batches)
    assert len(twins) == 1
    assert int(made.optimizer.iterations) == plan.ledger.steps == 8


class Turned(L.Layer):
    """A layer with an op of a fixed type, and of changing constants or functions."""

    turns = True
    looped = False

    def call(self, x):
        if self.looped:
            one = tf.tanh if self.turns else tf.sin
            return tf.while_loop(
                lambda step, _: step < 2,
                lambda step, now: (step + 1, one(now)),
                [tf.constant(0), x],
                maximum_iterations=2,
            )[1]
        return tf.transpose(x, [0, 2, 1] if self.turns else [0, 1, 2])


class AfterABatch(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.layers[0].turns = False


@pytest.mark.parametrize("looped", [False, True])
def test_a_loss_that_changed_after_the_comparison_is_compared(looped):
    plan = plan_of()
    turned = Turned()
    turned.looped = looped
    model = compiled_model(plan, turned, L.Flatten(), L.Dense(1), length=2)
    batches = plan.batches(arrays(length=2))
    callbacks = [*plan.callbacks, AfterABatch()]
    act = lambda: model.fit(batches, verbose=0, callbacks=callbacks)  # noqa: E731
    assert statuses_of(act) == {True}


class Alternates(tf.keras.Sequential):
    """A model that turns its data in every second step."""

    def train_step(self, data):
        train = super().train_step

        def step(turns):
            self.layers[0].turns = turns
            return train(data)["loss"]

        even = tf.equal(self.optimizer.iterations % 2, 0)
        return {"loss": tf.cond(even, lambda: step(True), lambda: step(False))}


def test_a_branch_that_did_not_run_uncompiled_is_compared():
    plan = plan_of()
    layers = Turned(), L.Flatten(), L.Dense(1)
    model = compiled_model(plan, *layers, model=Alternates, length=2)
    batches = plan.batches(arrays(length=2))
    assert statuses_of(lambda: fit(model, plan, batches)) == {False, True}


def test_a_unit_without_comparisons_runs_uncompiled_once(twins):
    settings = {"clip": 1.0, "noise_multiplier": 1.0, "unit": "batch"}
    batches = dpc.sampling.FullBatch().batches(arrays())
    model = tf.keras.Sequential([tf.keras.Input((3, 2)), L.Flatten(), L.Dense(1)])
    model.compile(dpc.keras.DPSGD(0.1, **settings), "mse", jit_compile=True)
    callbacks = [dpc.keras.PrivacyBudget(np.inf, 1e-4, batches)]
    for _ in range(2):
        model.fit(batches, verbose=0, callbacks=callbacks)
    assert len(twins) == 1


def test_tensorboard_shows_the_graph_of_the_step(tmp_path):
    plan = plan_of()
    model = compiled_model(plan)
    batches = plan.batches(arrays())
    callbacks = [*plan.callbacks, tf.keras.callbacks.TensorBoard(tmp_path)]
    model.fit(batches, epochs=2, verbose=0, callbacks=callbacks)
    if not KERAS_3:
        assert model.train_tf_function is model.train_function


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning")
@pytest.mark.parametrize("layer", [L.LSTM, L.GRU, L.SimpleRNN, L.Conv1D])
def test_layers_run_uncompiled_in_the_form_of_xla(twins, layer):
    settings = [4, 2] if layer is L.Conv1D else [4]
    plan = plan_of()
    model = compiled_model(plan, layer(*settings), L.Flatten(), L.Dense(1))
    batches = plan.batches(arrays())
    # Keras 2 makes loops of different ops for XLA, which were not compared.
    other_ops = layer is not L.Conv1D and not KERAS_3
    assert statuses_of(lambda: fit(model, plan, batches, epochs=2)) == {other_ops}
    assert len(twins) == 1


def test_the_uncompiled_function_leaves_the_model_as_it_was():
    plan = plan_of()
    model = compiled_model(plan)
    model.make_train_function()
    before = model.train_function
    twin = compiled_steps._twin_of(model)
    assert twin is not before
    assert model.train_function is before
    assert _compat.compiles_by_xla(model)
