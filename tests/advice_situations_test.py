"""Users' mistakes: the line of each error is copied out of it and run, and trains on.

A row makes a mistake, copies the line of code from the message, runs it with the names
that the user has, and gives the result to the call that failed.
`tests/advice_run_test.py` runs the lines of the messages without a row.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas
import pytest
import scipy.sparse
import tensorflow as tf

import tfdpclip as dpc
from tests.advice_lines_test import _calls
from tests.advised_names import SETTINGS, Names, make_plan, run

N = 32
X = np.linspace(-1, 1, 2 * N, dtype="float32").reshape(N, 2)
Y = np.arange(N, dtype="int32") % 3
TEXTS = np.array(list("abcd") * 8)
GAPS = np.where(X > 0.9, np.nan, X)
FRAME = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "city": TEXTS})


def draw(data: Any, **options: Any) -> Any:
    return dpc.sampling.Poisson(0.25).batches(data, **options)


def statistics(**options: Any) -> dpc.keras.PrivateStatistics:
    settings = {"epsilon": 8.0, "delta": 1e-3, "examples": N, "releases": 2}
    return dpc.keras.PrivateStatistics(**settings | options)


def moments(values: Any) -> Any:
    return statistics().moments(values, low=-1, high=100)


@dataclasses.dataclass
class Row:
    """A mistake, and the line of its message.

    Args:
      mistake: raises the error, or warns.
      line: the beginning of the call in the message.
      names: what the message's names are, beside those of `Names`.
      rest: what the message leaves to its reader, as `...`.
      then: takes the line's result, and does what the mistake failed to do.
    """

    mistake: Callable[[], Any]
    line: str
    names: dict[str, Any] = dataclasses.field(default_factory=dict)
    then: Callable[[Any], Any] = lambda value: value
    rest: str = ""


RAGGED = tf.ragged.constant([[1.0], [2.0, 3.0]] * 16)
STORED = scipy.sparse.csr_matrix(X)
OBJECTS = [(1,), "a", None] * 10 + ["b", "c"]
MASKED = np.ma.array(X[:, 0], mask=X[:, 0] > 0.8)
DAYS = np.datetime64("2020-01-01") + np.arange(N)
ROWS = [[1], [2, 3]] * 16
BIG = [2**70 + i for i in range(N)]
WIDE = np.asarray(X, np.longdouble)
INFINITE = np.where(Y > 1, np.inf, 1.0)

DATA = {
    "nan": Row(
        lambda: draw((GAPS, Y)),
        "np.nan_to_num(",
        {"x": GAPS},
        lambda x: draw((x, Y)),
    ),
    "ragged": Row(
        lambda: draw((RAGGED, Y)), "x.to_tensor(", {"x": RAGGED}, lambda x: draw((x, Y))
    ),
    "sparse tensor": Row(
        lambda: draw((tf.sparse.from_dense(X), Y)),
        "tf.sparse.to_dense(",
        {"x": tf.sparse.from_dense(X)},
        lambda x: draw((x, Y)),
    ),
    "sparse tensor, sliced": Row(
        lambda: draw((tf.sparse.from_dense(X), Y)),
        "scheme.batches(tf.data.",
        {"x": tf.sparse.from_dense(X), "y": Y},
    ),
    "sparse matrix": Row(
        lambda: draw((STORED, Y)), "x.toarray(", {"x": STORED}, lambda x: draw((x, Y))
    ),
    "list of arrays": Row(lambda: draw([X, Y]), "scheme.batches((x, y))"),
    "list of inputs": Row(lambda: draw([X, X]), "scheme.batches(((x1, x2)"),
    "list of records": Row(
        lambda: draw([*X]), "np.stack(", {"data": [*X]}, lambda x: draw((x, Y))
    ),
    "inputs or records": Row(
        lambda: draw(([*np.ones([N, N])], Y)),
        "np.stack(",
        {"x": [*np.ones([N, N])]},
        lambda x: draw((x, Y)),
    ),
    "objects": Row(
        lambda: draw((X, np.array(OBJECTS, object))),
        "np.unique(",
        {"y": OBJECTS},
        lambda found: draw((X, found[1])),
    ),
    "rows of several lengths": Row(
        lambda: draw((ROWS, Y)),
        "tf.keras.utils.pad_sequences(",
        {"x": ROWS},
        lambda x: draw((x, Y)),
    ),
    "integers of more than 64 bits": Row(
        lambda: draw((X, BIG)),
        "y.astype(",
        {"y": np.array(BIG, object)},
        lambda y: draw((X, y)),
    ),
    "a type that TensorFlow lacks": Row(
        lambda: draw((WIDE, Y)), "x.astype(", {"x": WIDE}, lambda x: draw((x, Y))
    ),
    "masked": Row(
        lambda: draw((MASKED, Y)), "x.filled(", {"x": MASKED}, lambda x: draw((x, Y))
    ),
    "frame with texts": Row(
        lambda: draw((FRAME, Y)),
        "lookup(x['city']",
        {"x": FRAME, "lookup": tf.keras.layers.StringLookup(vocabulary=["a"])},
        lambda numbers: draw((FRAME.assign(city=numbers), Y)),
    ),
    "weights that are texts": Row(
        lambda: draw((X, Y, Y.astype(str))),
        "scheme.batches(",
        {"sample_weight": Y.astype(str)},
    ),
    "weights that are nan": Row(
        lambda: draw((X, Y, GAPS[:, 0])),
        "np.nan_to_num(",
        {"sample_weight": GAPS[:, 0]},
        lambda w: draw((X, Y, np.abs(w))),
    ),
    "weights that are infinite": Row(
        lambda: draw((X, Y, INFINITE)),
        "np.where(",
        {"sample_weight": INFINITE},
        lambda w: draw((X, Y, w)),
    ),
    "triplets": Row(
        lambda: make_plan().batches((X - 2, X, X)),
        "plan.batches(((anchor",
    ),
    "two arguments": Row(
        lambda: dpc.sampling.Poisson(0.25).batches(X, Y),
        "batches((",
        {"batches": dpc.sampling.Poisson(0.25).batches},
    ),
    "people of another number": Row(
        lambda: draw((X, Y), people=np.arange(5), per_person=8),
        "scheme.batches((x, y), people=frame",
    ),
    "people without a number of examples": Row(
        lambda: draw((X, Y), people=np.arange(N)), "scheme.batches((x, y), people="
    ),
    "people that are floats": Row(
        lambda: draw((X, Y), people=np.arange(N) + 0.5, per_person=2),
        "ids.astype(",
        {"ids": np.arange(N)},
        lambda ids: draw((X, Y), people=ids, per_person=2),
    ),
    "people that are missing": Row(
        lambda: draw((X, Y), people=np.arange(N) - 1, per_person=2),
        "ids.astype(",
        {"ids": np.arange(N) - 1},
        lambda ids: draw((X, Y), people=ids, per_person=2),
    ),
    "a record of another shape": Row(
        lambda: draw((X, Y)).map(lambda x, y: (tf.boolean_mask(x, x > 0), y)),
        "tf.ensure_shape(",
        {"x": X[0]},
        lambda x: draw((X, Y)).map(lambda x, y: (tf.ensure_shape(x, [2]), y)),
        rest="2",
    ),
    "a map of one argument": Row(
        lambda: draw((X, Y)).map(lambda x: x), "batches.map(", rest="(x, y)"
    ),
    "a batch's function": Row(
        lambda: draw((X, Y)).map(lambda x, y, w: (x, y)), "batches.map(", rest="(x, y)"
    ),
    "pipeline that augments": Row(
        lambda: draw(
            tf.data.Dataset.from_tensor_slices((X, Y)).map(
                lambda x, y: (x + tf.random.uniform([2], seed=1), y)
            )
        ),
        "plan.batches(data)",
        {"data": (X, Y)},
        lambda batches: batches.map(lambda x, y: (x + tf.random.uniform([2]), y)),
    ),
}

STATISTICS = {
    "both types": Row(
        lambda: statistics().vocabulary(["a", 1] * 16),
        "str(v)",
        {"v": 1},
        lambda text: statistics().vocabulary([text] * N),
    ),
    "masked": Row(
        lambda: moments(MASKED), "values.filled(", {"values": MASKED}, moments
    ),
    "nan": Row(
        lambda: moments(GAPS[:, 0]), "np.nan_to_num(", {"values": GAPS[:, 0]}, moments
    ),
    "gaps of a frame": Row(
        lambda: moments(pandas.Series([1, None] * 16, dtype="Int64", name="age")),
        "",
        {"values": pandas.Series([1, None] * 16, dtype="Int64")},
        moments,
    ),
    "numbers as texts": Row(
        lambda: moments(pandas.Series(["1", "2"] * 16, name="age")),
        "pandas.to_numeric(",
        {"values": pandas.Series(["1", "2"] * 16)},
        moments,
    ),
    "a frame": Row(
        lambda: statistics().vocabulary(FRAME[["city"]]),
        "statistics.vocabulary(",
        {"frame": FRAME, "values": FRAME},
    ),
    "another number": Row(
        lambda: statistics().vocabulary(TEXTS[:5]),
        "PrivateStatistics(",
        {"ids": np.arange(N) % 5},
        rest="8.0, 1e-3, 5, 2",
    ),
    "people of another number": Row(
        lambda: statistics(people=Y), "PrivateStatistics(", rest="8.0, 1e-3, releases=2"
    ),
    "floats for a vocabulary": Row(
        lambda: statistics().vocabulary(X[:, 0]),
        "str(v)",
        {"v": 1},
        lambda text: statistics().vocabulary([text] * N),
    ),
}


def compiled(*layers, loss=None, optimizer=None, inputs=(2,)):
    model = tf.keras.Sequential([tf.keras.Input(inputs), *layers])
    entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    plan = make_plan()
    model.compile(optimizer or plan.optimizer(dpc.keras.DPSGD, 0.1), loss or entropy)
    model.plan = plan
    return model


def fit(data, *layers, inputs=(2,), **options):
    model = compiled(*layers or [tf.keras.layers.Dense(3)], inputs=inputs, **options)
    model.plan.fit(model, data, verbose=0)
    return model


def used_in_a_loop():
    batches = draw((X, Y))
    with dpc.accounting.Ledger(delta=1e-3).step():
        return batches


def drawn_plan():
    plan = make_plan()
    plan.batches((X, Y))
    return plan


def adapted(layer, data):
    layer.adapt(data)
    return layer


WORDS = list("abcd")
L = tf.keras.layers
PLANS = {
    "another number of examples": Row(
        lambda: make_plan().batches((X[:8], Y[:8])), "PrivacyPlan(", rest="8, 1e-3"
    ),
    "people without a number": Row(
        lambda: make_plan().batches((X, Y), people=Y),
        "plan.batches(",
        {
            "ids": Y,
            "plan": dpc.keras.PrivacyPlan(8, 1e-3, 3, batch_size=2, per_person=16),
        },
    ),
    "a setting that does not change": Row(
        lambda: setattr(make_plan(), "epsilon", 3.0), "plan.replace(epsilon="
    ),
    "a multiplier": Row(
        lambda: make_plan().optimizer(dpc.keras.DPSGD, 0.1, noise_multiplier=2.0),
        "plan.replace(epsilon=",
    ),
    "a multiplier of a plan": Row(
        lambda: make_plan(noise_multiplier=1.0), "dpc.keras.DPAdam("
    ),
    "an optimizer's setting": Row(lambda: make_plan(clip=1.0), "plan.optimizer("),
    "nothing ran": Row(lambda: make_plan().statement(), "print("),
    "a scheme": Row(
        lambda: make_plan(sampling=dpc.sampling.Poisson(0.1)),
        "dpc.keras.PrivacyBudget(",
    ),
    "momentum of another number": Row(
        lambda: make_plan(noise="buffered", momentum=0.0).optimizer(
            dpc.keras.DPSGD, 0.1, momentum=0.9
        ),
        "plan.replace(momentum=",
        {"plan": make_plan(noise="buffered", momentum=0.0)},
    ),
    "no noise": Row(lambda: dpc.keras.DPSGD(0.1), "DPSGD("),
    "no optimizer": Row(
        lambda: dpc.keras.privatize(tf.keras.layers.Dense), "privatize("
    ),
    "no begin": Row(used_in_a_loop, "ledger.begin("),
    "a clip of no kind": Row(
        lambda: dpc.keras.DPSGD(0.1, **SETTINGS, clip="1"), "dpc.QuantileClip("
    ),
    "a search that copies": Row(
        lambda: copy.deepcopy(drawn_plan().callbacks),
        "dpc.tuning.search_privacy(",
    ),
}
TABLE = [L.Embedding(4, 2), L.Flatten(), L.Dense(3)]
MODELS = {
    "texts for numbers": Row(
        lambda: fit((TEXTS, Y), L.Dense(3), inputs=(1,)),
        "tf.keras.layers.StringLookup(vocabulary=words)",
        {"words": WORDS},
        lambda lookup: fit((lookup(TEXTS).numpy()[:, None], Y), inputs=(1,)),
    ),
    "labels that are texts": Row(
        lambda: fit((X, TEXTS), L.Dense(4)),
        "np.unique(",
        {"y": TEXTS},
        lambda found: fit((X, found[1]), L.Dense(4)),
    ),
    "labels out of range": Row(
        lambda: fit((X, Y + 5)),
        "np.unique(",
        {"y": Y + 5},
        lambda found: fit((X, found[1])),
    ),
    "no labels": Row(lambda: fit(X), "plan.batches((x, y))"),
    "ids without a row": Row(
        lambda: fit((Y[:, None] + 7, Y), *TABLE, inputs=(1,)),
        "tf.keras.layers.IntegerLookup(",
        {"ids": [7, 8, 9]},
        lambda lookup: fit((Y[:, None] + 7, Y), lookup, *TABLE, inputs=(1,)),
    ),
    "batch normalisation": Row(
        lambda: fit((X, Y), L.BatchNormalization(), L.Dense(3)),
        "dpc.keras.convert_batchnorm(",
        {"model": compiled(L.Dense(4), L.BatchNormalization(), L.Dense(3))},
        lambda model: fit((X, Y), *model.layers),
    ),
    "adapted moments": Row(
        lambda: fit((X, Y), adapted(L.Normalization(), X), L.Dense(3)),
        "Normalization(",
        {"m": Names().m},
        lambda layer: fit((X, Y), layer, L.Dense(3)),
    ),
    "adapted words": Row(
        lambda: fit(
            (TEXTS[:, None], Y),
            adapted(L.StringLookup(), TEXTS),
            L.Embedding(6, 2),
            L.Flatten(),
            L.Dense(3),
            inputs=(1,),
        ),
        "tf.keras.layers.StringLookup(",
        {"values": TEXTS},
    ),
    "scattering": Row(
        lambda: compiled(dpc.keras.Scattering(), inputs=(8, 8)),
        "tf.keras.layers.Reshape(",
        {"height": 8, "width": 8},
        lambda layer: compiled(layer, dpc.keras.Scattering(), inputs=(8, 8)),
    ),
}


def loss_of(change):
    """A loss of the batch: the clipped sum of its gradients."""
    weights = tf.Variable(tf.ones([2, 3]))

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def step(x):
        loss = change(x, tf.matmul(x, weights))
        rule = dpc.FixedClip(1.0)
        return dpc.gradients.clipped_sum(
            loss, [weights], rule, nominal_batch_size=len(X)
        )

    return step(X)


def each(z):
    return tf.reduce_sum(z, axis=-1)


LOSSES = {
    "sum along the batch": Row(
        lambda: loss_of(lambda x, z: each(tf.cumsum(z, axis=0))),
        "tf.cumsum(x, axis=1)",
        {"x": X},
        lambda value: loss_of(lambda x, z: each(tf.cumsum(z, axis=1))),
    ),
    "products of examples": Row(
        lambda: loss_of(
            lambda x, z: each(tf.matmul(z, tf.matmul(z, z, transpose_a=True)))
        ),
        "tf.reduce_sum(a * b",
        {"a": X, "b": X},
        lambda value: loss_of(
            lambda x, z: each(tf.reduce_sum(z * z, axis=-1, keepdims=True))
        ),
    ),
    "mean of the batch": Row(
        lambda: loss_of(lambda x, z: each(z - tf.reduce_mean(z, axis=0))),
        "tf.reduce_mean(x, axis=-1, keepdims",
        {"x": X},
        lambda value: loss_of(
            lambda x, z: each(z - tf.reduce_mean(z, axis=-1, keepdims=True))
        ),
    ),
    "where": Row(
        lambda: loss_of(
            lambda x, z: tf.reduce_mean(tf.boolean_mask(each(z), x[:, 0] > 0))
        ),
        "tf.cast(condition",
        {"condition": X[:, 0] > 0, "loss": tf.ones([N])},
        lambda value: loss_of(lambda x, z: each(z) * tf.cast(x[:, 0] > 0, z.dtype)),
    ),
    "the largest": Row(
        lambda: loss_of(lambda x, z: tf.reduce_sum(tf.math.top_k(each(z), 2)[0])),
        "tf.nn.relu(",
        {"loss": tf.ones([N]), "threshold": 0.5},
        lambda value: loss_of(lambda x, z: tf.nn.relu(each(z) - 0.5)),
    ),
    "reversed": Row(
        lambda: loss_of(lambda x, z: each(z * tf.reverse(z, [0]))),
        "PrivacyPlan(",
        rest="8, 1e-3, 32",
    ),
}
SITUATIONS = {
    f"{kind}: {name}": row
    for kind, rows in {
        "data": DATA,
        "statistics": STATISTICS,
        "plan": PLANS,
        "model": MODELS,
        "loss": LOSSES,
    }.items()
    for name, row in rows.items()
}


def _cases():
    for name in SITUATIONS:
        slow = [pytest.mark.slow] if name.startswith("model") else []
        yield pytest.param(name, marks=slow)


@pytest.mark.parametrize("name", _cases())
def test_the_line_of_a_message_helps(name):
    row = SITUATIONS[name]
    text = ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            row.mistake()
        except (ValueError, TypeError, AttributeError) as error:
            text = str(error)
    text += "".join(str(w.message) for w in said if "docs/" in str(w.message))
    calls = [c for c in _calls(text) if c.startswith(row.line)]
    assert calls, text
    row.then(run(calls[0].replace("...", row.rest), Names(**row.names)))
