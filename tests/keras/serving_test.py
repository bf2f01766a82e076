"""A privately trained model predicts where this library is not installed."""

import contextlib
import io
import json
import math
import subprocess
import sys
import warnings
import zipfile

import h5py
import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPAdam, some_data
from tests.stack import KERAS_3
from tfdpclip import sampling
from tfdpclip.keras import PrivacyBudget, PrivacyPlan

pytestmark = pytest.mark.unchecked

SERVER = """
import sys

sys.modules["tfdpclip"] = None  # As if the library were not installed.
import numpy as np
import tensorflow as tf

folder = sys.argv[1]
x = np.load(f"{folder}/x.npy")
load = tf.keras.models.load_model
try:
    load(f"{folder}/model.keras")
except (TypeError, ImportError):  # It could train on, and without privacy.
    print("refused to compile")
model = load(f"{folder}/model.keras", compile=False)
found = [model.predict(x, verbose=0)]
model.save(f"{folder}/plain.keras")
found.append(load(f"{folder}/plain.keras").predict(x, verbose=0))
exported = tf.saved_model.load(f"{folder}/exported")
found.append(exported.serve(x))
np.save(f"{folder}/found.npy", np.stack(found))
try:
    model.fit(x, x[:, :1], verbose=0)
except (RuntimeError, ValueError):
    print("refused to train")
"""


def trained():
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile(DPAdam(0.1, noise_multiplier=1.0, expected_batch_size=8), "mse")
    x, y = some_data(8)
    for _ in range(2):
        model.train_on_batch(x, y)
    return model, np.asarray(x, np.float32)


def stated(path):
    """What a file of a model says of its privacy, read without any library."""
    config = json.loads(zipfile.ZipFile(path).read("config.json"))
    return config["compile_config"]["optimizer"]["config"].get("privacy")


def planned(optimizer=DPAdam, seed=None, **facts):
    """A model with an optimizer of its plan, and data."""
    plan = PrivacyPlan(8, 1e-4, examples=40, batch_size=8, epochs=2, **facts)
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile(plan.optimizer(optimizer, 0.1, seed=seed), "mse")
    return plan, model, some_data(40)


@pytest.mark.parametrize(
    "optimizer, facts",
    [
        (DPAdam, {}),
        pytest.param(
            *(tf.keras.optimizers.Nadam, {"sampling": "shuffled"}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(tf.keras.optimizers.SGD, {"physical_batch_size": 4}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_file_says_the_epsilon_of_its_own_steps(tmp_path, optimizer, facts):
    plan, model, data = planned(optimizer, **facts)
    path = str(tmp_path / "{epoch}.keras")
    kept = tf.keras.callbacks.ModelCheckpoint(path)
    plan.fit(model, data, callbacks=[kept], verbose=0)
    before, found = (stated(path.format(epoch=epoch)) for epoch in (1, 2))
    assert before["steps"] == plan.steps // 2 and found["steps"] == plan.steps
    assert 0 < before["epsilon"] < found["epsilon"]
    said = plan.statement()
    assert found["epsilon"] == pytest.approx(said.epsilon, rel=1e-6)
    assert found["delta"] == said.delta
    # Loaded and saved, it says the same; after a step that no budget counted, nothing.
    again = str(tmp_path / "again.keras")
    loaded = tf.keras.models.load_model(path.format(epoch=2))
    loaded.save(again)
    assert stated(again) == found
    for trained_on in (loaded, model):
        for _ in range(plan.accumulation_steps):
            trained_on.train_on_batch(*(part[:4] for part in data))
        trained_on.save(again)
        assert stated(again) is None


def test_a_file_of_a_run_with_a_seed_says_that_it_is_not_private(tmp_path):
    plan, model, data = planned(seed=1)
    plan.fit(model, data, verbose=0)
    model.save(str(tmp_path / "model.keras"))
    assert stated(tmp_path / "model.keras")["epsilon"] == math.inf


@pytest.mark.slow
def test_a_model_loads_without_the_library_to_predict_and_not_to_train(tmp_path):
    model, x = trained()
    model.save(str(tmp_path / "model.keras"))
    model.export(str(tmp_path / "exported"))
    np.save(tmp_path / "x.npy", x)
    done = subprocess.run(
        [sys.executable, "-c", SERVER, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-3:] == [
        "refused to compile",
        "refused to train",
        "",
    ], done.stdout
    expected = model.predict(x, verbose=0)
    for found in np.load(tmp_path / "found.npy"):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.skipif(not hasattr(tf.keras.Model, "export"), reason="no export")
def test_an_export_is_no_file_to_train_from_and_is_not_warned_of(tmp_path):
    model, _ = trained()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*optimizer's state.*")
        model.export(str(tmp_path / "exported"))
    found = tf.train.list_variables(str(tmp_path / "exported/variables/variables"))
    assert not any("step_history" in name for name, _ in found)


@pytest.mark.skipif(not KERAS_3, reason="what OrbaxCheckpoint saves is of Keras 3")
def test_a_state_tree_has_no_steps_behind_it_so_that_they_count_as_unknown():
    """The state tree is the one that `OrbaxCheckpoint` saves and loads."""
    model, _ = trained()
    other, _ = trained()
    known = set(other.optimizer._step_history.known_steps())
    other.set_state_tree(model.get_state_tree())
    other.optimizer.iterations.assign(4)
    found = other.optimizer._step_history.known_steps()
    (unknown,) = set(found) - known
    assert unknown.startswith("unknown:") and found[unknown].steps == 2


def totals_in(path):
    """The numbers of metrics in a `.keras` file."""
    with zipfile.ZipFile(path) as archive:
        return totals_of_weights(io.BytesIO(archive.read("model.weights.h5")))


def totals_of_weights(content):
    """The numbers of metrics in a `.weights.h5` file."""
    found = {}

    def note(name, item):
        if "metric" in name and hasattr(item, "shape"):
            found[name] = np.asarray(item).tolist()

    with h5py.File(content) as file:
        file.visititems(note)
    return found


def test_no_file_holds_exact_totals_of_metrics_over_private_batches(tmp_path):
    batches = sampling.Poisson(0.5).batches(some_data(16))
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    optimizer = DPAdam(0.1, noise_multiplier=1.0, expected_batch_size=8)
    model.compile(optimizer, "mse", weighted_metrics=["mae"])
    held = []

    class Look(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            held.extend(v.numpy() for m in model.metrics for v in m.variables)

    callbacks = [
        PrivacyBudget(math.inf, 1e-5, batches),
        Look(),
        tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras")),
    ]
    history = model.fit(batches, epochs=2, verbose=0, callbacks=callbacks).history
    assert min(history["loss"] + history["mae"]) > 0
    model.save(str(tmp_path / "model.keras"))
    for name in ("best.keras", "model.keras"):
        assert not np.any(list(totals_in(tmp_path / name).values()))
    assert not np.any(held)
    assert not any(v.numpy() for m in model.metrics for v in m.variables)


def numbers_in(path):
    """All numbers of the metrics in a file of a model, by their names."""
    if path.suffix == ".keras":
        return totals_in(path)
    if path.suffix == ".h5":
        return totals_of_weights(path)
    folder = str(path / "variables/variables")
    listed = [name for name, _ in tf.train.list_variables(folder)]
    return {
        name: np.asarray(tf.train.load_variable(folder, name)).tolist()
        for name in listed
        if "metrics" in name
    }


class Sums(tf.keras.metrics.Metric):
    """A metric that Keras cannot reset."""

    def __init__(self):
        super().__init__(name="sums")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.cast(y_true, "float32")))

    def result(self):
        return self.total

    def reset_state(self):
        pass


class TestFilesOfAnyMoment:
    """Of the middle of an epoch, of a callback before the budget, after an error."""

    KINDS = ["m.keras", "m.weights.h5", *([] if KERAS_3 else ["m"])]

    def fitted(self, *callbacks, stop=None):
        x, y = some_data(16)
        batches = sampling.Poisson(0.5).batches((x, y + 1))
        model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
        optimizer = DPAdam(0.1, noise_multiplier=1.0, expected_batch_size=8)
        model.compile(optimizer, "mse", weighted_metrics=["mae", Sums()])
        held = []

        class Look(tf.keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                held.append(sum(abs(float(v.numpy())) for v in variables_of(model)))
                if len(held) == stop:
                    raise KeyboardInterrupt

        def variables_of(model):
            return [v for metric in model.metrics for v in metric.variables]

        given = [*callbacks, PrivacyBudget(math.inf, 1e-5, batches), Look()]
        with pytest.raises(KeyboardInterrupt) if stop else contextlib.nullcontext():
            model.fit(batches, epochs=2, verbose=0, callbacks=given)
        assert max(held) > 1, "the metrics count on"
        return model

    @pytest.mark.parametrize("name", KINDS)
    def test_of_a_callback_before_the_budget(self, tmp_path, name):
        path = tmp_path / name
        save = tf.keras.callbacks.ModelCheckpoint(
            str(path), save_freq=1, save_weights_only="weights" in name
        )
        self.fitted(save)
        assert not np.any(list(numbers_in(path).values()))

    @pytest.mark.parametrize("name", KINDS)
    def test_after_an_interrupt(self, tmp_path, name):
        path = tmp_path / name
        model = self.fitted(stop=1)
        save = model.save_weights if "weights" in name else model.save
        save(str(path))
        assert not np.any(list(numbers_in(path).values()))
        assert any(v.numpy() for m in model.metrics for v in m.variables)

    @pytest.mark.skipif(not KERAS_3, reason="state trees are of Keras 3")
    def test_of_a_state_tree(self):
        model = self.fitted(stop=1)
        tree = model.get_state_tree(value_format="numpy_array")
        assert tree["metrics_variables"]
        assert not any(map(np.any, tf.nest.flatten(tree["metrics_variables"])))
