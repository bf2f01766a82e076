"""Configurations, files and checkpoints: restored training is as private as before."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD, OPTIMIZERS, DPAdam, DPNadam, flat, some_data
from tests.stack import keras2_only
from tfdpclip.clipping import AutomaticClip, FixedClip, QuantileClip
from tfdpclip.keras import privatize

pytestmark = pytest.mark.unchecked

RULE = QuantileClip(0.3, 0.7, 0.4, count_stddev=2.0, update="linear", normalize=True)
SETTINGS = {
    "clip": RULE,
    "noise_multiplier": 1.5,
    "expected_batch_size": 8.0,
    "accumulation_steps": 2,
    "check_gradients": "always",
    "gradient_memory": 12345678,
    "seed": 7,
}
X, Y = some_data(8)


def model_with(optimizer, seed=1):
    tf.keras.utils.set_random_seed(seed)
    layers = [tf.keras.Input((2,)), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential(layers)
    model.compile(optimizer, "mse")
    return model


def adaptive(kind=DPAdam, noise_multiplier=0.8, **options):
    rule = QuantileClip(0.5, 0.5, 0.7)
    return kind(
        0.1,
        clip=rule,
        noise_multiplier=noise_multiplier,
        expected_batch_size=16,
        **options,
    )


def assert_same_settings(optimizer, expected):
    for name in SETTINGS:
        if name != "gradient_memory":
            known = {"check_gradients": "_check_gradients"}.get(name, name)
            assert getattr(optimizer, known) == getattr(expected, known), name
    assert optimizer.gradient_noise_multiplier == expected.gradient_noise_multiplier
    assert optimizer.count_stddevs == expected.count_stddevs
    assert optimizer.get_config() == expected.get_config()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_configuration_makes_the_same_optimizer(kind):
    optimizer = kind(0.125, **SETTINGS)
    config = json.loads(json.dumps(optimizer.get_config(), default=float))
    again = kind.from_config(config)
    assert type(again) is kind
    assert_same_settings(again, optimizer)
    assert float(again.learning_rate) == 0.125


@pytest.mark.thinned(4)
@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    "clip", [0.5, FixedClip(0.5, normalize=True), AutomaticClip(0.1), RULE], ids=repr
)
def test_serialisation_needs_no_custom_objects(kind, clip):
    optimizer = kind(0.1, **{**SETTINGS, "clip": clip})
    config = json.loads(json.dumps(tf.keras.optimizers.serialize(optimizer)))
    again = tf.keras.optimizers.deserialize(config)
    assert type(again) is kind
    assert_same_settings(again, optimizer)


def test_a_schedule_survives_the_configuration():
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    optimizer = DPSGD(schedule, momentum=0.9, **SETTINGS)
    config = tf.keras.optimizers.serialize(optimizer)
    again = tf.keras.optimizers.deserialize(config)
    assert again.get_config() == optimizer.get_config()
    assert float(again.learning_rate) == pytest.approx(0.1)


def trained(optimizer, steps=4):
    model = model_with(optimizer)
    for _ in range(steps):
        model.train_on_batch(X, Y)
    return model


def assert_state_is_back(found, expected):
    """The clip norm, the step count and the slots; all have moved from their start."""
    assert type(found) is type(expected)
    assert float(expected.clip_norm) != 0.5
    assert float(found.clip_norm) == float(expected.clip_norm)
    assert int(found.iterations) == int(expected.iterations) == 4
    for a, b in zip(found.variables, expected.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), a.name)


def assert_still_private(model):
    """Checks that a further step has noise, and that gradients must pass the clip."""
    optimizer = model.optimizer
    assert optimizer.noise_multiplier > 0
    before = flat(model.trainable_variables)
    model.train_on_batch(0 * X, 0 * Y, sample_weight=np.zeros(8, np.float32))
    assert np.all(flat(model.trainable_variables) != before)
    assert int(optimizer.iterations) == 5
    with pytest.raises(ValueError, match="minimize"):
        gradients = [tf.zeros_like(v) for v in model.trainable_variables]
        pairs = zip(gradients, model.trainable_variables, strict=True)
        optimizer.apply_gradients(pairs)


hdf5 = keras2_only(
    "an optimizer from an HDF5 file cannot train, not Keras's own either"
)
saved_model = keras2_only("it writes no SavedModel that could be loaded again")
FORMATS = [
    pytest.param("model.keras", id="keras"),
    pytest.param("model.h5", id="h5", marks=hdf5),
]
EVERY_FORMAT = [*FORMATS, pytest.param("model", id="tf", marks=saved_model)]


@pytest.mark.parametrize("kind", [DPSGD, DPAdam], ids=["sgd", "adam"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.thinned(3)
def test_a_saved_model_comes_back_private_with_its_clip_and_its_steps(
    tmp_path, name, kind
):
    model = trained(adaptive(kind))
    model.save(str(tmp_path / name))
    loaded = tf.keras.models.load_model(str(tmp_path / name))
    assert_state_is_back(loaded.optimizer, model.optimizer)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert_still_private(loaded)


@pytest.mark.parametrize("name", EVERY_FORMAT)
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.slow
def test_a_model_that_was_saved_before_training_comes_back_private(tmp_path, name):
    model = model_with(adaptive())
    model.save(str(tmp_path / name))
    loaded = tf.keras.models.load_model(str(tmp_path / name))
    assert type(loaded.optimizer) is DPAdam
    assert float(loaded.optimizer.clip_norm) == pytest.approx(0.5)
    for _ in range(4):
        loaded.train_on_batch(X, Y)
    assert_still_private(loaded)


@pytest.mark.slow
@saved_model
@pytest.mark.filterwarnings("ignore:Keras does not read an optimizer's state")
def test_a_saved_model_directory_comes_back_private_from_the_start(tmp_path):
    """Keras restores neither the clip nor the step count from the directory."""
    model = trained(adaptive())
    model.save(str(tmp_path / "model"))
    loaded = tf.keras.models.load_model(str(tmp_path / "model"))
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert int(loaded.optimizer.iterations) == 0
    assert float(loaded.optimizer.clip_norm) == pytest.approx(0.5)
    for _ in range(4):
        loaded.train_on_batch(X, Y)
    assert_still_private(loaded)


@pytest.mark.slow
@saved_model
def test_a_saved_model_directory_warns_that_it_loses_the_step_count(tmp_path):
    model = trained(adaptive())
    with pytest.warns(UserWarning, match="steps"):
        model.save(str(tmp_path / "model"))


@pytest.mark.slow
@keras2_only("save_weights writes .weights.h5 files, see step_history_test.py")
def test_save_weights_in_the_checkpoint_format_keeps_the_clip(tmp_path):
    model = trained(adaptive())
    model.save_weights(str(tmp_path / "weights"))
    other = model_with(adaptive(), seed=2)
    status = other.load_weights(str(tmp_path / "weights"))
    other.optimizer.build(other.trainable_variables)
    status.assert_existing_objects_matched()
    assert_state_is_back(other.optimizer, model.optimizer)
    assert_still_private(other)


@pytest.mark.parametrize("when", ["built", "new"])
@pytest.mark.slow
def test_a_checkpoint_keeps_the_clip_and_the_steps(tmp_path, when):
    model = trained(adaptive())
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = saved.save(str(tmp_path / "c"))
    other = model_with(adaptive(), seed=2)
    if when == "built":
        other.optimizer.build(other.trainable_variables)
    status = tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    if when == "new":
        other.optimizer.build(other.trainable_variables)
    status.assert_existing_objects_matched()
    assert_state_is_back(other.optimizer, model.optimizer)
    assert_still_private(other)


@pytest.mark.slow
def test_a_checkpoint_holds_no_noise_and_no_data(tmp_path):
    """Neither the generator nor half-filled sums of private gradients."""
    model = trained(adaptive(accumulation_steps=3), 4)
    path = tf.train.Checkpoint(optimizer=model.optimizer).save(str(tmp_path / "c"))
    names = " ".join(name for name, _ in tf.train.list_variables(path))
    for word in ("noise", "generator", "sums", "counts", "filled", "unsaved"):
        assert word not in names


def test_another_rules_checkpoint_does_not_match(tmp_path):
    model = trained(adaptive(DPSGD))
    path = tf.train.Checkpoint(optimizer=model.optimizer).save(str(tmp_path / "c"))
    fixed = DPSGD(0.1, clip=0.5, noise_multiplier=0.8, expected_batch_size=16)
    with pytest.raises(AssertionError):
        tf.train.Checkpoint(optimizer=fixed).restore(path).assert_consumed()


class Stop(Exception):
    pass


class StopAfter(tf.keras.callbacks.Callback):
    def __init__(self, epochs):
        super().__init__()
        self.epochs = epochs

    def on_epoch_end(self, epoch, logs=None):
        if epoch + 1 == self.epochs:
            raise Stop


@pytest.mark.slow
def test_backup_and_restore_goes_on_where_it_was_with_new_noise(tmp_path):
    """An interrupted run resumes with its clip and steps, and with new noise."""
    drawn = []
    for _ in range(2):
        model = model_with(adaptive(), seed=3)
        directory = tmp_path / f"run{len(drawn)}"
        backup = tf.keras.callbacks.BackupAndRestore(str(directory))
        stopped = [backup, StopAfter(2)]
        with pytest.raises(Stop):
            model.fit(X, Y, batch_size=4, epochs=4, verbose=0, callbacks=stopped)
        assert int(model.optimizer.iterations) == 4
        state = float(model.optimizer.clip_norm)
        resumed = model_with(adaptive(), seed=9)
        seen = []
        note = tf.keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs, m=resumed, seen=seen: seen.append(
                (float(m.optimizer.clip_norm), int(m.optimizer.iterations))
            )
        )
        backup = tf.keras.callbacks.BackupAndRestore(str(directory))
        resumed.fit(X, Y, batch_size=4, epochs=4, verbose=0, callbacks=[backup, note])
        assert seen[0] == (state, 4)
        assert len(seen) == 2 and int(resumed.optimizer.iterations) == 8
        drawn.append(flat(resumed.trainable_variables))
    assert np.all(drawn[0] != drawn[1])


@pytest.mark.slow
def test_restoring_in_the_same_process_does_not_replay_the_noise(tmp_path):
    model = trained(adaptive())
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = saved.save(str(tmp_path / "c"))
    results = []
    for _ in range(2):
        saved.restore(path)
        model.train_on_batch(X, Y)
        results.append(flat(model.trainable_variables))
    assert np.all(results[0] != results[1])


@pytest.mark.slow
def test_a_restored_optimizer_trains_exactly_as_the_first_would_have(tmp_path):
    """Noise off: nothing but the noise is missing from a checkpoint."""
    results = []
    for interrupted in (False, True):
        model = trained(adaptive(noise_multiplier=0))
        if interrupted:
            model.save(str(tmp_path / "model.keras"))
            model = tf.keras.models.load_model(str(tmp_path / "model.keras"))
        for _ in range(3):
            model.train_on_batch(X, Y)
        results.append(
            [*flat(model.trainable_variables), float(model.optimizer.clip_norm)]
        )
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)


@pytest.mark.slow
def test_an_optimizer_made_by_privatize_is_found_again(tmp_path):
    assert privatize(tf.keras.optimizers.Nadam) is DPNadam
    optimizer = adaptive(privatize(tf.keras.optimizers.Adamax))
    model = trained(optimizer)
    model.save(str(tmp_path / "model.keras"))
    loaded = tf.keras.models.load_model(str(tmp_path / "model.keras"))
    assert_state_is_back(loaded.optimizer, optimizer)


def test_a_users_class_of_the_same_name_does_not_take_the_librarys_place():
    class SGD(tf.keras.optimizers.SGD):
        pass

    privatize(SGD)
    config = tf.keras.optimizers.serialize(adaptive(DPSGD))
    assert type(tf.keras.optimizers.deserialize(config)) is DPSGD


def test_a_file_with_bad_settings_is_refused():
    config = tf.keras.optimizers.serialize(adaptive(DPSGD))
    for name, value in (("noise_multiplier", float("nan")), ("clip", None)):
        broken = json.loads(json.dumps(config))
        if value is None:
            broken["config"][name]["config"]["initial_norm"] = -1.0
        else:
            broken["config"][name] = value
        with pytest.raises(ValueError, match="initial_norm|noise_multiplier"):
            tf.keras.optimizers.deserialize(broken)


def test_settings_cannot_be_changed_behind_the_accountants_back():
    optimizer = adaptive(DPSGD)
    for name in ("noise_multiplier", "expected_batch_size", "clip", "clip_norm"):
        with pytest.raises(AttributeError):
            setattr(optimizer, name, 0.0)
