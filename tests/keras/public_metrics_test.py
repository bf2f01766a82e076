"""The metrics that PrivacyBudget logs beside epsilon are releases, and right."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc

N = 40


def logged(clip, z=0.0, steps=4):
    """Logs of two epochs on gradients of norm 2, all of them; and the optimizer."""
    x = np.zeros((N, 3), np.float32)
    x[:, 0] = 2.0
    layer = tf.keras.layers.Dense(1, use_bias=False)
    model = tf.keras.Sequential([tf.keras.Input((3,)), layer])
    optimizer = dpc.keras.DPSGD(
        0.01, clip=clip, noise_multiplier=z, expected_batch_size=N
    )
    model.compile(optimizer, lambda y, p: p[:, 0] - 0 * y[:, 0])
    data = (x, np.zeros((N, 1), np.float32))
    batches = dpc.sampling.FullBatch().batches(data, steps=steps)
    budget = dpc.keras.PrivacyBudget(math.inf, 1e-5, batches)
    history = model.fit(batches, epochs=2, callbacks=[budget], verbose=0)
    return history.history, optimizer


@pytest.mark.parametrize("update", ["geometric", "linear"])
@pytest.mark.parametrize(("start", "fraction"), [(0.5, 0.0), (50.0, 1.0)])
@pytest.mark.slow
def test_the_unclipped_fraction_is_that_of_the_epoch(update, start, fraction):
    rule = dpc.QuantileClip(0.4, start, learning_rate=0.1, update=update)
    logs, optimizer = logged(rule)
    assert logs["unclipped_fraction"] == pytest.approx([fraction] * 2, abs=1e-4)
    assert logs["clip_norm"][-1] == float(optimizer.clip_norm)
    assert logs["clip_norm"][0] != logs["clip_norm"][1]
    assert logs["noise_stddev"] == [0, 0]


@pytest.mark.parametrize(
    ("start", "bound"), [(50.0, {"minimum_norm": 37.0}), (0.5, {"maximum_norm": 0.65})]
)
def test_a_clip_norm_at_its_bound_tells_no_fraction_in_no_shorter_log(start, bound):
    """Of an epoch of 4 steps, each moves C by 6 % down, or by 4 % up."""
    logs, _ = logged(dpc.QuantileClip(0.4, start, learning_rate=0.1, **bound))
    assert logs["clip_norm"][-1] == pytest.approx(*bound.values())
    first, last = logs["unclipped_fraction"]
    assert first == pytest.approx(float(start > 2), abs=1e-4) and np.isnan(last)


def test_the_fraction_is_the_noised_one():
    # Noise of a tenth of the records on each count, over 8 steps: within 6 stddevs of
    # 1/2 except for one run in 5e8, and the same number twice once in millions.
    rule = dpc.QuantileClip(0.5, 50.0, learning_rate=1e-3, count_stddev=N / 10)
    logs, _ = logged(rule, z=1.0, steps=8)
    first, second = logs["unclipped_fraction"]
    assert abs(first - 1) < 6 * 0.1 / math.sqrt(8) and first != second != 1


def test_the_noise_is_that_of_the_mean_gradient():
    logs, optimizer = logged(3.0, z=2.0)
    assert logs["clip_norm"] == [3, 3]
    assert logs["noise_stddev"] == pytest.approx([2 * 3 / N] * 2)
    assert optimizer.noise_stddevs == {"all": pytest.approx(2 * 3 / N)}
    assert "unclipped_fraction" not in logs


def test_a_rule_without_a_clip_norm_logs_none():
    logs, _ = logged(dpc.AutomaticClip(), z=2.0)
    assert not [name for name in logs if name.startswith("clip_norm")]
    assert logs["noise_stddev"] == pytest.approx([2 / N] * 2)


@pytest.mark.slow
def test_groups_are_logged_by_name():
    logs, optimizer = logged(dpc.LayerwiseClip(), z=2.0)
    (name,) = optimizer.clip_norms
    assert logs[f"clip_norm/{name}"][-1] == optimizer.clip_norms[name]
    assert logs[f"noise_stddev/{name}"][-1] == optimizer.noise_stddevs[name]
    assert "unclipped_fraction" not in logs


@pytest.mark.slow
def test_callbacks_that_come_after_see_them(tmp_path):
    x = np.ones((N, 2), np.float32)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    plan = dpc.keras.PrivacyPlan(5, 1e-5, examples=N, batch_size=N, epochs=1)
    model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1), "mse")
    batches = plan.batches((x, x[:, 0]))
    board = tf.keras.callbacks.TensorBoard(tmp_path)
    model.fit(batches, epochs=1, callbacks=[*plan.callbacks, board], verbose=0)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*tfevents*"))
    for name in (b"epoch_epsilon", b"epoch_clip_norm", b"epoch_unclipped_fraction"):
        assert name in written
