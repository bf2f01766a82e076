"""Texts, frames, lists of inputs, sparse rows: a plan trains on them as they are."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.keras.helpers import L

RNG = np.random.default_rng(0)
RECORDS = 60
X = RNG.normal(size=(RECORDS, 3)).astype("float32")
Y = (X[:, 0] > 0).astype("float32")


class Texts:
    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        return "a" * (index % 5), Y[index]


class Odd:
    """Data with one longer record, which the check of shapes did not read."""

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        return np.append(X[index], [1.0] * (index == 17)), Y[index]


def two_inputs():
    inputs = [tf.keras.Input((3,)), tf.keras.Input((1,))]
    return tf.keras.Model(inputs, L.Dense(1)(L.Concatenate()(inputs)))


def columns():
    inputs = {name: tf.keras.Input((1,), name=name) for name in ("age", "size")}
    joined = L.Concatenate()([inputs["age"], inputs["size"]])
    return tf.keras.Model(inputs, L.Dense(1)(joined))


def dense(features=3):
    return tf.keras.Sequential([tf.keras.Input((features,)), L.Dense(1)])


def frame():
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"age": X[:, 0], "size": np.arange(RECORDS) % 3 > 1})


def length(text, label):
    return tf.cast(tf.strings.length(text), tf.float32)[tf.newaxis], label


CASES = {
    "texts": (lambda: dense(1), Texts, lambda batches: batches.map(length)),
    "sparse slices": (
        dense,
        lambda: tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(X), Y)),
        None,
    ),
    "a list of inputs": (two_inputs, lambda: ([X, X[:, :1]], Y), None),
    "a frame": (lambda: dense(2), lambda: (frame(), Y.astype(object)), None),
    "columns of a frame": (columns, lambda: (dict(frame()), Y), None),
    "a record of another shape": (dense, Odd, None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_a_plan_trains_on_it(name, monkeypatch):
    make, data, change = CASES[name]
    monkeypatch.setattr(dpc.sampling.sources, "LOOK_SECONDS", 1e-9)
    plan = dpc.keras.PrivacyPlan(
        3, 1e-3, examples=RECORDS, batch_size=RECORDS // 2, epochs=3
    )
    batches = plan.batches(data())
    batches = batches if change is None else change(batches)
    model = make()
    model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), "mse")
    model.fit(batches, epochs=3, callbacks=plan.callbacks, verbose=0)
    assert 2.5 < plan.statement().epsilon <= 3
    unseen = "counts for nothing" in " ".join(plan.statement().assumptions)
    assert unseen == (name in ("texts", "a record of another shape"))
