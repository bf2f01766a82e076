"""What the names in the lines of messages mean, for tests that run these lines."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import os
import tempfile
import types

import numpy as np
import pandas
import scipy.sparse
import tensorflow as tf

import tfdpclip as dpc
from tests.stack import FEDERATED
from tfdpclip.testing.auditing import _CanaryWatch

ROWS = 32
SETTINGS = {"noise_multiplier": 1.1, "expected_batch_size": 8}


def make_plan(**options):
    settings = {"batch_size": 8, "epochs": 1} | options
    return dpc.keras.PrivacyPlan(8, 1e-3, examples=ROWS, **settings)


class Names:
    """The objects that a user has who reads a message; each is made when it is read.

    `value` stands for the array, the column or the number that a message names.
    """

    dpc, tf, np, pandas, dataclasses = dpc, tf, np, pandas, dataclasses
    keras = tf.keras
    layers = tf.keras.layers
    sampling, correlated = dpc.sampling, dpc.correlated
    epsilon, delta, population, batch_size, separation = 8.0, 1e-3, ROWS, 8, 2
    rate, steps, n, z, b, sensitivity, cohort_size = 0.25, 4, 4, 1.1, 2.0, 1.0, 2
    length, nodes, depth, groups, threshold, classes = 3, 5, 3, 2, 0.5, 3
    height = width = 4
    columns = ["a", "b"]
    purpose, seed = 3, tf.constant(5)

    def __init__(self, **names):
        self.__dict__.update(names)

    def __getattribute__(self, name):
        own = object.__getattribute__(self, "__dict__")
        return own[name] if name in own else object.__getattribute__(self, name)

    @functools.cached_property
    def x(self):
        return np.linspace(-1, 1, ROWS * 2, dtype="float32").reshape(ROWS, 2)

    @functools.cached_property
    def y(self):
        return np.arange(ROWS, dtype="int32") % 3

    @functools.cached_property
    def w(self):
        return np.ones(ROWS, "float32")

    sample_weight = property(lambda self: self.w)
    weights = property(lambda self: self.w)
    public_x = property(lambda self: self.x + 1)
    public_y = property(lambda self: self.y)

    @functools.cached_property
    def data(self):
        return self.x, self.y

    @functools.cached_property
    def dataset(self):
        return tf.data.Dataset.from_tensor_slices(self.data)

    first = property(lambda self: self.dataset)
    second = property(lambda self: self.dataset)

    @functools.cached_property
    def ids(self):
        return np.arange(ROWS) // 4

    @functools.cached_property
    def frame(self):
        table = {"a": self.x[:, 0], "b": self.x[:, 1]}
        return pandas.DataFrame(table | {"label": self.y, "user": self.ids})

    @functools.cached_property
    def model(self):
        layers = [tf.keras.Input((2,)), tf.keras.layers.Dense(3)]
        model = tf.keras.Sequential(layers)
        model.compile(self.optimizer, self.loss)
        return model

    @functools.cached_property
    def with_backbone(self):
        return types.SimpleNamespace(backbone=self.normalized)

    @functools.cached_property
    def loss(self):
        return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @functools.cached_property
    def plan(self):
        return make_plan()

    @functools.cached_property
    def optimizer(self):
        return self.plan.optimizer(dpc.keras.DPSGD, 0.1)

    @functools.cached_property
    def scheme(self):
        return dpc.sampling.Poisson(self.rate)

    @functools.cached_property
    def batches(self):
        return self.plan.batches(self.data)

    @functools.cached_property
    def ledger(self):
        return dpc.accounting.Ledger(delta=self.delta)

    @functools.cached_property
    def matrix(self):
        return dpc.correlated.SquareRootToeplitz(4)

    @functools.cached_property
    def statistics(self):
        return dpc.keras.PrivateStatistics(8.0, 1e-3, releases=2, examples=ROWS)

    @functools.cached_property
    def lookup(self):
        return tf.keras.layers.StringLookup(vocabulary=list("abc"))

    @functools.cached_property
    def strategy(self):
        return tf.distribute.get_strategy()

    # Data as they come.
    people = property(
        lambda self: pandas.DataFrame({"city": list("abcd") * 8, "age": range(32)})
    )
    values = property(lambda self: list("abcd") * 8)
    mixed = ["a", 1, None]
    words, tokens = list("abc"), list("abc")
    gaps = np.array([1.0, np.nan])
    values_with_masks = np.ma.array([1.0, 2.0], mask=[True, False])
    column_of_numbers = property(lambda self: self.frame["a"])
    no_axes = ()
    many = np.zeros([1032, 2], "float32")
    series = np.zeros([20, 2], "float32")
    anchor = positive = negative = np.zeros([ROWS, 2], "float32")
    x1 = property(lambda self: self.x)
    x2 = property(lambda self: self.x)
    rows_of_x = property(lambda self: list(self.x))
    sparse = property(lambda self: tf.sparse.from_dense(self.x))
    rows = ragged = tf.ragged.constant([[1], [2, 3]])
    texts = property(
        lambda self: tf.data.Dataset.from_tensor_slices((self.x, self.values))
    )
    images = property(lambda self: np.zeros([ROWS, 28, 28], "float32"))
    read = property(lambda self: lambda: iter(zip(self.x, self.y, strict=True)))
    function = staticmethod(lambda x, y: (x, y))

    # Tensors of a batch.
    losses = condition = property(lambda self: tf.ones([ROWS]))
    a = property(lambda self: tf.ones([ROWS, 2]))
    real = imag = property(lambda self: tf.Variable([1.0]))
    places = senders = receivers = property(lambda self: tf.zeros([ROWS, 2], tf.int32))
    messages = property(lambda self: tf.ones([ROWS, 2, 3]))
    array = content = np.ones(2, "float32")
    variable = property(lambda self: tf.Variable(tf.ones([2])))
    y_pred = property(lambda self: tf.zeros([ROWS, 3]))
    ones = property(lambda self: tf.ones([ROWS, 2, 2, 1]))
    pair = property(lambda self: tf.ones([2, 2]))
    truth = property(lambda self: tf.ones([ROWS, 3]))
    distinct_ids = list(range(8))
    two_classes = property(lambda self: (self.x, self.y % 2))
    ragged_data = property(
        lambda self: tf.data.Dataset.from_tensors((self.rows, self.y))
    )
    image_data = property(
        lambda self: tf.data.Dataset.from_tensor_slices((self.images, self.y))
    )
    element = property(lambda self: next(self.iterator))
    take_element = property(lambda self: lambda element: self.step(*element))
    tensor = property(lambda self: tf.constant(self.y))
    scipy_sparse = scipy.sparse.eye(3)

    participation = dpc.correlated.MinSeparation

    # Files.
    folder = property(lambda self: tempfile.mkdtemp())
    secret = property(lambda self: os.path.join(self.folder, "secret"))

    @functools.cached_property
    def path(self):
        path = os.path.join(self.folder, "privacy.json")
        ledger = dpc.accounting.Ledger(self.delta, path=path)
        ledger.begin(noise_multiplier=1.1, sampling=self.scheme)
        ledger.record(2)
        return path

    # Schemes, plans and what they make.
    of_people = dpc.sampling.CappedPoisson(rate, per_person=2)
    epoch = dpc.sampling.RandomAllocation(4)
    separated = dpc.sampling.MinSeparation(ROWS, 8)
    clients = property(lambda self: dpc.sampling.AvailableClients(2, 2))
    available = staticmethod(lambda number: list(range(8)))
    plan_of_people = property(
        lambda self: dpc.keras.PrivacyPlan(8, 1e-3, 8, batch_size=2, per_person=4)
    )
    buffered_plan = property(lambda self: make_plan(noise="buffered"))
    ledgers = property(lambda self: [self.used_plan.ledger])

    @functools.cached_property
    def used_plan(self):
        plan = make_plan()
        model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(3)])
        model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1), self.loss)
        plan.fit(model, self.data, verbose=0)
        return plan

    # Rounds of clients.
    rounds, value_type = 4, property(lambda self: self.tff.TensorType(np.float32, [2]))
    tff = property(lambda self: importlib.import_module("tensorflow_federated"))
    aggregator = property(lambda self: dpc.federated.clipped_mean(1.1, 8))
    cohorts = property(lambda self: self.scheme.cohorts(list(range(ROWS))))
    noise = property(lambda self: dpc.CorrelatedNoise(self.matrix, 4, self.separated))
    correlated_mean = property(
        lambda self: dpc.federated.clipped_mean(2.0, 8, clip=1.0, noise=self.noise)
    )
    rounds_plan = property(
        lambda self: dpc.federated.PrivacyPlan(8, 1e-3, ROWS, 8, rounds=4)
    )

    # Models and their steps.
    layer = property(lambda self: self.model.layers[-1])
    MyNorm = tf.keras.layers.LayerNormalization
    unbuilt = property(lambda self: tf.keras.Sequential([tf.keras.layers.Dense(3)]))
    features = property(lambda self: self.x)
    all_variables = variables = property(lambda self: self.model.trainable_variables)
    rule = dpc.LayerwiseClip(dpc.FixedClip(1.0))
    kernels = ("kernel", "bias")

    @functools.cached_property
    def taking_public_norms(self):
        optimizer = dpc.keras.DPSGD(0.1, clip=dpc.PublicNormClip(), **SETTINGS)
        optimizer.build(self.model.trainable_variables)
        return optimizer

    norms = property(
        lambda self: dpc.keras.public_gradient_norms(self.model, self.data)
    )
    iterator = property(lambda self: iter(self.batches))

    new_layer = property(lambda self: tf.keras.layers.Layer())
    input_shape = (None, 2)
    two_layers = property(lambda self: [self.layer, tf.keras.layers.Dense(2)])
    watch = property(lambda self: _CanaryWatch(*self.data, self.model))
    column = np.array([1.0, 0.5, 0.25])
    replica = property(lambda self: tf.reduce_sum)
    optimizer_map = property(lambda self: {self.layer: tf.keras.optimizers.SGD(0.1)})

    @functools.cached_property
    def m(self):
        return self.statistics.moments(self.frame["a"], low=-1.0, high=1.0)

    @functools.cached_property
    def mirrored(self):
        return tf.distribute.MirroredStrategy(["/cpu:0"])

    def model_with(self, layer):
        layers = [tf.keras.Input((2,)), layer, tf.keras.layers.Dense(3)]
        model = tf.keras.Sequential(layers)
        model.compile(self.optimizer, self.loss)
        return model

    @functools.cached_property
    def normalized(self):
        return self.model_with(tf.keras.layers.BatchNormalization())

    @functools.cached_property
    def normalized_by_batches(self):
        model = self.normalized
        options = {"unit": "batch", "clip": 1.0}
        model.compile(dpc.keras.DPSGD(0.1, **SETTINGS, **options), self.loss)
        return model

    @functools.cached_property
    def layer_normalized(self):
        return self.model_with(tf.keras.layers.LayerNormalization())

    @functools.cached_property
    def tape(self):
        with tf.GradientTape(persistent=True) as tape:
            losses = self.loss_of_each(self.x, self.y)
        self.__dict__["per_example_loss"] = losses
        return tape

    @functools.cached_property
    def per_example_loss(self):
        assert self.tape
        return self.__dict__["per_example_loss"]

    def loss_of_each(self, x, y):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.model(x))

    @functools.cached_property
    def step(self):
        @tf.function
        def step(x, y, w):
            with tf.GradientTape() as tape:
                loss = w * self.loss_of_each(x, y)
            variables = self.model.trainable_variables
            self.optimizer.minimize(loss, variables, tape=tape)

        return step


def names_in(code: str) -> set[str]:
    """The names that a line of code reads."""
    return {n.id for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Name)}


def run(code: str, names: Names, meant: dict[str, str] | None = None) -> object:
    """Runs a line or a block of a message; returns the value of its last line.

    Public names of the library that a message gives without their module are taken
    from the module of the message's subject.
    """
    space = {}
    for name in names_in(code):
        packages = ["clipping", "sampling", "accounting", "correlated", "keras"]
        packages += ["tuning", *["federated"] * FEDERATED]
        roots = [names, *(getattr(dpc, package) for package in packages)]
        there = (meant or {}).get(name, name)
        for root in (*roots, dpc.tensorflow_privacy, tf.keras.layers, tf.keras.losses):
            if hasattr(root, there):
                space[name] = getattr(root, there)
                break
    *before, last = ast.parse(code).body
    exec(compile(ast.Module(before, []), "message", "exec"), space)
    if isinstance(last, ast.Expr):
        last = compile(ast.Expression(last.value), "message", "eval")
        return eval(last, space)
    exec(compile(ast.Module([last], []), "message", "exec"), space)
    if isinstance(last, ast.Assign):
        return space[ast.unparse(last.targets[0])]
    return None
