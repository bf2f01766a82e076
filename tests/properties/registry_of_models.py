"""A valid call of every public function and constructor that takes a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from tests.properties.registry import COHORTS, POISSON, case, each_time
from tfdpclip import (
    accounting,
    clipping,
    correlated,
    diagnostics,
    gradients,
    keras,
    sampling,
    testing,
    tuning,
)
from tfdpclip.noise import runs

L = tf.keras.layers
X = np.random.default_rng(0).standard_normal((4, 2)).astype(np.float32)
Y = X[:, :1]
PRIVACY = {
    "clip": 1.0,
    "noise_multiplier": 1.0,
    "expected_batch_size": 64,
    "accumulation_steps": 1,
    "unit": "example",
    "perturbation": 0.0,
    "check_gradients": "first",
    "gradient_memory": 10**6,
    "hardened_noise": False,
    "public_variables": (),
    "seed": None,
}
PLAN = keras.PrivacyPlan(1.0, 1e-5, examples=100, batch_size=100, epochs=2)


@functools.cache
def model(*layers: L.Layer) -> tf.keras.Model:
    """A small private model."""
    made = tf.keras.Sequential([tf.keras.Input((2,)), *layers, L.Dense(1)])
    settings = {"noise_multiplier": 1.0, "expected_batch_size": 4}
    made.compile(keras.DPSGD(0.1, clip=1.0, **settings), "mse")
    return made


@functools.cache
def normalised() -> tf.keras.Model:
    """A small model with batch normalisation."""
    layers = [tf.keras.Input((4, 4, 4)), L.BatchNormalization(), L.Flatten()]
    return tf.keras.Sequential([*layers, L.Dense(2)])


@functools.cache
def tuned() -> tf.keras.Model:
    """A second model, which `film` changes again and again."""
    return tf.keras.models.clone_model(normalised())


def statistics_of(method: str) -> Callable[..., Any]:
    """A method of statistics that have released nothing yet."""

    def call(**arguments: Any) -> Any:
        made = keras.PrivateStatistics(1.0, 1e-5, examples=100, releases=1)
        return getattr(made, method)(**arguments)

    return call


MODEL = each_time(model)


# The last model that `audited` made.
AUDITED: list[tf.keras.Model] = []


def audited() -> tf.keras.Model:
    """A private model with more parameters than canaries."""
    AUDITED[:] = [model(L.Dense(7))]
    return AUDITED[0]


# Keras hands these to the model, which may not like them.
DATA = {"fixed": ("x", "y", "data", "public_data", "batch", "canaries_data")}
SLOW = DATA | {"costly": True}

KERAS: dict[str, Any] = {
    "PrivateStateWarning": None,
    "WorkerLostError": None,
    # Makes collectives, once in a process; its arguments: tests/replicas.
    "multi_worker_strategy": None,
    "PrivateMoments": None,
    "PrivateVocabulary": None,
    "TrainableCounts": None,
    # It takes only Keras's arguments.
    "FrozenBatchNormalization": None,
    "DPSGD": case(keras.DPSGD, **PRIVACY),
    # The same code as DPSGD.
    "DPAdam": case(keras.DPAdam, _={"costly": True}, **PRIVACY),
    "DPAdamW": case(keras.DPAdamW, _={"costly": True}, **PRIVACY),
    "DPAdagrad": case(keras.DPAdagrad, _={"costly": True}, **PRIVACY),
    "DPRMSprop": case(keras.DPRMSprop, _={"costly": True}, **PRIVACY),
    # In the section of `tfdpclip.noise.runs`.
    "CorrelatedNoise": None,
    "PrivacyBudget": case(
        keras.PrivacyBudget,
        _={"unbounded": ("epsilon",), "fixed": ("ledger", "secret")},
        epsilon=1.0,
        delta=1e-5,
        sampling=POISSON,
        accountant="pld",
        ledger=None,
        check_data=True,
        allow_change=False,
        secret=None,
    ),
    "PrivacyPlan": case(
        keras.PrivacyPlan,
        _={"fixed": ("ledger", "secret"), "named": {"epochs": ("steps",)}},
        epsilon=1.0,
        delta=1e-5,
        examples=100,
        # All of them: measured in closed form.
        batch_size=100,
        epochs=2,
        sampling="poisson",
        noise="independent",
        momentum=0.0,
        physical_batch_size=None,
        accountant="pld",
        ledger=None,
        allow_change=False,
        secret=None,
    ),
    "PrivacyPlan.optimizer": case(
        PLAN.optimizer, _={"costly": True}, optimizer=keras.DPSGD
    ),
    "PrivacyPlan.batches": case(PLAN.batches, data=np.zeros((100, 2), np.float32)),
    "PrivateStatistics": case(
        keras.PrivateStatistics,
        _={"fixed": ("ledger",)},
        epsilon=1.0,
        delta=1e-5,
        examples=100,
        releases=2,
        ledger=None,
        accountant="pld",
    ),
    "PrivateStatistics.moments": case(
        statistics_of("moments"), values=np.ones(100), low=0.0, high=2.0
    ),
    "PrivateStatistics.vocabulary": case(
        statistics_of("vocabulary"), values=["a"] * 100, per_record=1, most=3
    ),
    "PerExampleLoss": case(keras.PerExampleLoss, loss="mse", length=5.0, name="own"),
    "PublicBatchStatistics": case(keras.PublicBatchStatistics, data=X, batch_size=2),
    "PublicGradientNorms": case(keras.PublicGradientNorms, data=(X, Y), batch_size=2),
    "check_isolation": case(
        keras.check_isolation,
        _=SLOW,
        model=MODEL,
        x=X,
        y=Y,
        loss=None,
        examples=1,
        tolerance=1e-3,
    ),
    "Scattering": case(keras.Scattering, scales=2, angles=8),
    "convert_batchnorm": case(
        keras.convert_batchnorm, model=each_time(normalised), groups=2
    ),
    "film": case(
        keras.film,
        model=each_time(tuned),
        head=None,
        zero_head=True,
        normalization=None,
    ),
    "privatize": case(keras.privatize, optimizer_class=tf.keras.optimizers.Adamax),
    "public_statistics": case(keras.public_statistics, layer=L.Dense(2)),
    "public_gradient_norms": case(
        keras.public_gradient_norms,
        _=SLOW,
        model=MODEL,
        data=(X, Y),
        batch_size=2,
    ),
}


MADE = object()
VARIABLE = tf.Variable([1.0, 1.0])
ENGINE = {
    "memory": 10**6,
    "check_gradients": "first",
    "nominal_batch_size": 4,
}


def engine(function):
    """`function` on a loss that is made in a graph of its own."""

    def call(loss, **options):
        @tf.autograph.experimental.do_not_convert
        def step(x):
            made = tf.linalg.matvec(x, VARIABLE) if loss is MADE else loss
            function(loss=made, **options)
            return x

        tf.function(step, autograph=False).get_concrete_function(X)

    return call


GRADIENTS: dict[str, Any] = {
    "ExampleIsolationError": None,
    "GradientMismatchError": None,
    "JacobianFallbackWarning": None,
    "OneByOneWarning": None,
    "op_flow": None,
    "LossStructureError": None,
    "OpUse": None,
    "PerExampleGradients": case(
        engine(gradients.PerExampleGradients),
        _={"costly": True},
        loss=MADE,
        variables=[VARIABLE],
        **ENGINE,
    ),
    "clipped_sum": case(
        engine(gradients.clipped_sum),
        _={"fixed": ("state",), "costly": True},
        loss=MADE,
        variables=[VARIABLE],
        rule=clipping.FixedClip(1.0),
        **ENGINE,
    ),
    "op_rule": case(lambda kinds: gradients.op_rule(kinds), kinds="Igamma"),
    "per_example_norms": case(
        engine(gradients.per_example_norms),
        _={"costly": True},
        loss=MADE,
        variables=[VARIABLE],
        **ENGINE,
    ),
}

METER = {"batch_size": 2}

DIAGNOSTICS: dict[str, Any] = {
    "GradientMeter": case(
        diagnostics.GradientMeter,
        model=MODEL,
        variables=None,
        groups=None,
    ),
    "GradientMeter.norms": case(
        lambda **a: diagnostics.GradientMeter(model()).norms(**a),
        _={"costly": True},
        data=(X, Y),
        **METER,
    ),
}
TUNING: dict[str, Any] = {
    "clip_from_public": case(
        tuning.clip_from_public,
        _={"costly": True, "named": {"public_data": ("data",)}},
        model=MODEL,
        public_data=(X, Y),
        **METER,
    ),
}


def _train(included):
    return np.zeros(len(included))


TESTING: dict[str, Any] = {
    "AuditReport": None,
    # These run whole federated rounds; tests/testing has their arguments.
    "assert_aggregator_noise": None,
    "assert_aggregator_sensitivity": None,
    "audit_aggregator": None,
    "NoiseReport": None,
    "SensitivityReport": None,
    "ClipRuleReport": None,
    "ExactnessReport": None,
    "assert_clip_rule": case(
        testing.assert_clip_rule,
        _=SLOW,
        rule=clipping.FixedClip(1.0),
        names=["a/b", "c/d"],
        seed=1,
    ),
    "assert_exact": case(
        testing.assert_exact, _=SLOW, model=MODEL, batch=(X, Y), tolerance=1e-3
    ),
    "assert_isolated": case(testing.assert_isolated, _=SLOW, model=MODEL, x=X, y=Y),
    "assert_noise": case(
        testing.assert_noise,
        _=SLOW,
        model=MODEL,
        batch=(X, Y),
        steps=4,
    ),
    "assert_sensitivity": case(
        testing.assert_sensitivity,
        _=SLOW,
        model=MODEL,
        batch=(X, Y),
        records=[0],
    ),
    "audit": case(
        testing.audit,
        _={"unbounded": ("claimed",), "infinite": True},
        train=_train,
        canaries=20,
        delta=1e-5,
        claimed=1.0,
        confidence=0.95,
        seed=1,
    ),
    "audit_keras": case(
        testing.audit_keras,
        _=SLOW
        | {
            "fixed": ("data", "canaries"),
            "unbounded": ("claimed",),
            "infinite": True,
        },
        model=each_time(audited),
        data=(X, Y),
        canaries=(np.arange(40, dtype=np.float32).reshape(20, 2), np.ones([20, 1])),
        fit=lambda data, watch: AUDITED[0].fit(*data, callbacks=[watch], verbose=0),
        delta=1e-5,
        claimed=None,
        confidence=0.95,
        seed=1,
    ),
    "one_run_lower_bound": case(
        testing.one_run_lower_bound,
        correct=10,
        guesses=12,
        canaries=20,
        delta=1e-5,
        confidence=0.95,
    ),
}


def federated() -> dict[str, Any]:
    """Cases that need TensorFlow Federated, which takes long to import."""
    import tensorflow_federated as tff

    from tfdpclip import federated as library
    from tfdpclip.federated import _workers

    def mean(noise):
        return case(
            noise,
            _={"fixed": ("inner",)},
            noise_multiplier=1.0,
            clients_per_round=10,
            clip=1.0,
            secure=False,
            noise="central",
            minimum_clients=None,
            variable_names=["a"],
            seed=None,
        )

    def entered(**arguments):
        # Its worker starts with the first computation.
        with library.local_context(**arguments):
            pass

    class Idle(tff.framework.AsyncContext):
        """A worker that is asked nothing."""

        def __init__(self, *arguments):
            del arguments

        async def invoke(self, comp, arg):
            raise NotImplementedError

        def try_out(self):
            pass

        close = try_out

    def entered_remote(**arguments):
        with mock.patch.object(_workers, "Worker", Idle):
            with library.remote_context(**arguments):
                pass

    one = library.clipped_mean(1.0, 100)
    budget = accounting.RoundBudget(5.0, 1e-5, COHORTS, one, accountant="rdp")
    plan = library.PrivacyPlan(1.0, 1e-5, 100, clients_per_round=100, rounds=2)
    plan.aggregator(clip=1.0)
    scheme = sampling.AvailableClients(10, separation=4)
    run = runs.CorrelatedNoise(correlated.Tree(), 12, scheme)
    content = {"step": 3, "ticket": [1, 2], "before": [3, 4], "kept": [[0.5]]}
    content["run"] = [5, 6]
    memory = library.NoiseMemory(content)
    without, _ = library.split_noise({"correlated_noise": content})
    return {
        "RoundBudget.with_an_aggregator": case(
            accounting.RoundBudget,
            _={"unbounded": ("epsilon",)},
            epsilon=5.0,
            delta=1e-5,
            cohorts=COHORTS,
            aggregator=one,
            accountant=None,
        ),
        "ClippedMeanFactory": mean(library.ClippedMeanFactory),
        "clipped_mean": mean(library.clipped_mean),
        "clipped_mean.with_a_matrix": case(
            library.clipped_mean, noise_multiplier=1.0, clients_per_round=10, noise=run
        ),
        "clipped_mean.with_weights": case(
            library.clipped_mean,
            noise_multiplier=1.0,
            clients_per_round=10,
            weight_cap=5.0,
            weight_per_round=20.0,
        ),
        "NoiseMemory": case(library.NoiseMemory, content=content),
        "split_noise": case(
            library.split_noise, state={"correlated_noise": {**content}}
        ),
        "join_noise": case(
            library.join_noise,
            state=without,
            memory=memory,
        ),
        "clipped_mean.epsilon": case(one.epsilon, delta=1e-5, rounds=3),
        "clipped_mean.event": case(one.event, rounds=3),
        "clipped_mean.create": case(
            one.create, value_type=tff.TensorType(np.float32, [3])
        ),
        "clipped_mean.create_with_weights": case(
            library.clipped_mean(1.0, 100, weight_cap=5).create,
            value_type=tff.TensorType(np.float32, [3]),
            weight_type=tff.TensorType(np.float32),
        ),
        "CohortDataSource": case(
            library.CohortDataSource,
            budget=budget,
            data_of=lambda client: client,
            federated_type=tff.FederatedType(np.int32, tff.CLIENTS),
            name="bad input",
        ),
        "PrivacyPlan": case(
            library.PrivacyPlan,
            _={"fixed": ("ledger",)},
            epsilon=1.0,
            delta=1e-5,
            population=100,
            clients_per_round=100,
            rounds=2,
            sampling="fixed_size",
            accountant="pld",
            ledger=None,
        ),
        "PrivacyPlan.with_a_matrix": case(
            library.PrivacyPlan,
            epsilon=1.0,
            delta=1e-5,
            population=100,
            clients_per_round=10,
            rounds=8,
            sampling="available",
            noise="toeplitz",
            momentum=0.5,
            separation=3,
            participations=2,
        ),
        "PrivacyPlan.aggregator": case(plan.aggregator, clip=1.0, secure=False),
        "PrivacyPlan.budget": case(plan.budget, client_ids=range(100)),
        "InnerSum": case(
            library.InnerSum, factory=tff.aggregators.SumFactory(), inflation=1.0
        ),
        "SecureSettings": case(library.SecureSettings, bits=24, check_context=False),
        "ZeroConcentratedDpEvent": case(library.ZeroConcentratedDpEvent, rho=1.0),
        "local_context": case(entered, simulate_secure_sums=False, asynchronous=False),
        "remote_context": case(
            entered_remote,
            workers=["127.0.0.1:10000"],
            simulate_secure_sums=False,
            asynchronous=False,
            ready_seconds=1.0,
            round_seconds=1.0,
            subrounds=2,
        ),
        "server_momentum": case(
            library.server_momentum, learning_rate=1.0, momentum=0.9, damped=False
        ),
    }
