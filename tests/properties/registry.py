"""A valid call of every public function and constructor that needs no model."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import dp_accounting
import numpy as np

from tests.clipping.contract_test import RULES
from tests.stand_in_aggregator import Aggregator
from tfdpclip import (
    accounting,
    clipping,
    mechanism,
    noise,
    sampling,
    tuning,
)
from tfdpclip.accounting import NeighboringRelation

POISSON = sampling.Poisson(0.1)
# Measured in closed form, so that odd numbers of steps take no time.
FULL = sampling.FullBatch()


@dataclasses.dataclass(frozen=True)
class Case:
    """A public name, and the known facts about its arguments.

    Attributes:
      call: the function or class.
      valid: fresh arguments with which it works.
      free: arguments that take any value (text that is shown, paths, the data of a
        user's function): accepting NaN there is no mistake.
      fixed: arguments that are not replaced: Keras or TensorFlow interpret them.
      unbounded: arguments of which infinity is a documented value.
      infinite: whether infinity is a documented result.
      named: other words by which messages may name an argument.
      may_be_nan: fields of the result that may be NaN.
      costly: whether a call that works takes seconds: then only values that must be
        refused are tried.
    """

    call: Callable[..., Any]
    valid: Callable[[], dict[str, Any]]
    free: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    unbounded: tuple[str, ...] = ()
    infinite: bool = False
    named: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    may_be_nan: tuple[str, ...] = ()
    costly: bool = False


def case(call: Callable[..., Any], /, *, _: dict | None = None, **valid: Any) -> Case:
    """A case with these arguments; `_` holds further fields of `Case`."""
    fresh = {k: v for k, v in valid.items()}

    def make():
        return {k: v() if getattr(v, "fresh", False) else v for k, v in fresh.items()}

    return Case(call, make, **(_ or {}))


def each_time(make: Callable[[], Any]) -> Callable[[], Any]:
    """Marks an argument that is made anew for every call."""
    make.fresh = True
    return make


def _ledger() -> accounting.Ledger:
    ledger = accounting.Ledger(1e-5)
    ledger.begin(noise_multiplier=1.0, sampling=FULL)
    return ledger


def on_ledger(method: str) -> Callable[..., Any]:
    return lambda **arguments: getattr(_ledger(), method)(**arguments)


COHORTS = POISSON.cohorts(list(range(20)), seed=1)
RUN = {"sampling": FULL, "delta": 1e-5, "accountant": "pld", "unit": "example"}
# Noise so small that nothing is left of privacy is infinite epsilon.
LIMITS = {"infinite": True}

ACCOUNTING = {
    "BudgetExceededError": None,
    "CohortPlan": None,
    "NeighboringRelation": None,
    "PrivacyMismatchError": None,
    "PrivacyStatement": None,
    "AttackBounds": None,
    "PastRun": None,
    "RoundBudget": case(
        accounting.RoundBudget,
        _={"unbounded": ("epsilon",), "fixed": ("ledger",)},
        epsilon=5.0,
        delta=1e-5,
        cohorts=COHORTS,
        aggregator=Aggregator(2.0),
        accountant="rdp",
        ledger=None,
        allow_change=False,
    ),
    "Ledger": case(
        accounting.Ledger, _={"fixed": ("path",)}, delta=1e-5, accountant="rdp"
    ),
    "Ledger.begin": case(
        on_ledger("begin"),
        _={"free": ("clip",)},
        noise_multiplier=1.0,
        sampling=POISSON,
        unit="example",
        clip="",
        seed=None,
        observed=True,
        change=True,
    ),
    "Ledger.reserve": case(on_ledger("reserve"), steps=1),
    "Ledger.record": case(on_ledger("record"), steps=1),
    "Ledger.add_unseen": case(on_ledger("add_unseen"), steps=1),
    "Ledger.epsilon": case(on_ledger("epsilon"), _=LIMITS, delta=1e-5, more=1),
    "Ledger.steps_left": case(
        on_ledger("steps_left"), _={"unbounded": ("epsilon",)}, epsilon=2.0
    ),
    "Phase": case(
        accounting.Phase,
        _={"free": ("clip",)},
        sampling=POISSON,
        noise_multiplier=1.0,
        unit="example",
        clip="",
        seeded=False,
        observed=True,
        runs=each_time(lambda: [1]),
    ),
    "TruncatedPoissonSampledDpEvent": case(
        accounting.TruncatedPoissonSampledDpEvent,
        source_dataset_size=100,
        sampling_probability=0.1,
        capacity=20,
        event=dp_accounting.GaussianDpEvent(1.0),
    ),
    "RandomAllocationDpEvent": case(
        accounting.RandomAllocationDpEvent,
        steps_per_epoch=30,
        steps=20,
        event=dp_accounting.GaussianDpEvent(1.0),
        source_dataset_size=100,
        capacity=20,
    ),
    "CappedPoissonSampledDpEvent": case(
        accounting.CappedPoissonSampledDpEvent,
        per_person=3,
        sampling_probability=0.1,
        event=dp_accounting.GaussianDpEvent(1.0),
        source_dataset_size=100,
        capacity=20,
    ),
    "cohort_for": case(
        accounting.cohort_for,
        _={"costly": True},
        epsilon=2.0,
        delta=1e-6,
        population=10**6,
        rounds=100,
        noise_multiplier=0.2,
        clients_per_round=100,
        sampling="poisson",
        accountant="rdp",
        sensitivity=None,
    ),
    "delta": case(
        accounting.delta,
        noise_multiplier=1.0,
        steps=10,
        sampling=FULL,
        epsilon=1.0,
        accountant="pld",
        unit="example",
        sensitivity=1.0,
    ),
    "epsilon": case(accounting.epsilon, _=LIMITS, **RUN, noise_multiplier=1.0, steps=9),
    "event_epsilon": case(
        accounting.event_epsilon,
        _=LIMITS,
        event=dp_accounting.GaussianDpEvent(1.0),
        delta=1e-5,
        accountant="pld",
    ),
    "noise_multiplier": case(
        accounting.noise_multiplier,
        _={"unbounded": ("epsilon",)},
        **RUN,
        epsilon=1.0,
        steps=10,
        sensitivity=None,
        spent=dp_accounting.NoOpDpEvent(),
    ),
    "steps_for": case(
        accounting.steps_for,
        _={"unbounded": ("epsilon",)},
        **RUN,
        epsilon=1.0,
        noise_multiplier=3.0,
        sensitivity=1.0,
        spent=dp_accounting.NoOpDpEvent(),
    ),
    "effective_noise_multiplier": case(
        accounting.effective_noise_multiplier,
        gradient_noise_multiplier=1.0,
        count_stddevs=[2.0],
    ),
    "count_stddevs": case(
        accounting.count_stddevs,
        rule=clipping.QuantileClip(),
        records_per_step=10.0,
        noise_multiplier=1.0,
    ),
    "split_noise_multiplier": case(
        accounting.split_noise_multiplier, noise_multiplier=1.0, count_stddevs=[5.0]
    ),
    "past_run": case(
        accounting.past_run,
        _=LIMITS,
        number_of_examples=100,
        batch_size=10,
        num_epochs=1.0,
        noise_multiplier=1.0,
        delta=1e-5,
        used_microbatching=False,
    ),
    "attack_bounds": case(
        accounting.attack_bounds,
        event=sampling.Poisson(0.1).event(1.0, 3),
        false_positive_rates=(0.001, 0.01),
    ),
    "attack_bounds_of": case(
        accounting.attack_bounds_of,
        _={"unbounded": ("epsilon",)},
        epsilon=1.0,
        delta=1e-5,
        false_positive_rates=(0.001, 0.01),
    ),
    "gdp_compose": case(accounting.gdp_compose, mus=[1.0, 2.0]),
    "gdp_delta": case(accounting.gdp_delta, mu=1.0, epsilon=1.0),
    "gdp_epsilon": case(
        accounting.gdp_epsilon, _=LIMITS | {"unbounded": ("mu",)}, mu=1.0, delta=1e-5
    ),
    "gdp_mu": case(accounting.gdp_mu, epsilon=1.0, delta=1e-5),
    "gdp_tradeoff": case(accounting.gdp_tradeoff, mu=1.0, alpha=0.5),
    "layerwise_gdp_mu": case(
        accounting.layerwise_gdp_mu, _=LIMITS, sigma=1.0, layers=[1.0, 2.0]
    ),
    "noise_multiplier_from_layerwise_sigma": case(
        accounting.noise_multiplier_from_layerwise_sigma, sigma=1.0, layers=2
    ),
    "sensitivity_factor": case(
        accounting.sensitivity_factor,
        relation=NeighboringRelation.REPLACE_ONE,
        unit="example",
    ),
    "subsampled_gdp_log_h": case(accounting.subsampled_gdp_log_h, _=LIMITS, sigma=1.0),
    "subsampled_gdp_mu": case(
        accounting.subsampled_gdp_mu,
        _=LIMITS,
        noise_multiplier=1.0,
        rate=0.1,
        steps=10,
        sampling="poisson",
    ),
}

ROWS = np.ones((10, 2), np.float32), np.arange(10)
EVENT = {"noise_multiplier": 1.0, "steps": 3, "unit": "example", "sensitivity": None}

SAMPLING = {
    "SamplingScheme": None,
    "Poisson": case(sampling.Poisson, rate=0.1, capacity=20, population=100),
    "CappedPoisson": case(
        sampling.CappedPoisson, rate=0.1, per_person=3, capacity=20, population=100
    ),
    "FixedSize": case(
        sampling.FixedSize, batch_size=3, population=10, replacement=False
    ),
    "ShuffledEpochs": case(
        sampling.ShuffledEpochs, batch_size=3, population=10, relation="replace_one"
    ),
    "RandomAllocation": case(
        sampling.RandomAllocation, steps=10, capacity=20, population=100
    ),
    "FullBatch": case(sampling.FullBatch),
    "LaplaceRelease": case(sampling.LaplaceRelease),
    "ThresholdedCounts": case(sampling.ThresholdedCounts, delta=1e-7),
    "Poisson.event": case(POISSON.event, **EVENT),
    "CappedPoisson.event": case(
        sampling.CappedPoisson(0.1, 3).event, **EVENT | {"unit": "person"}
    ),
    "FixedSize.event": case(sampling.FixedSize(3, 10).event, **EVENT),
    "ShuffledEpochs.event": case(sampling.ShuffledEpochs(3, 10).event, **EVENT),
    "RandomAllocation.event": case(sampling.RandomAllocation(10).event, **EVENT),
    "FullBatch.event": case(sampling.FullBatch().event, **EVENT),
    "LaplaceRelease.event": case(sampling.LaplaceRelease().event, **EVENT),
    "ThresholdedCounts.event": case(sampling.ThresholdedCounts(1e-7).event, **EVENT),
    "Poisson.expected_batch_size": case(POISSON.expected_batch_size, population=10),
    "FixedSize.steps_per_epoch": case(
        sampling.FixedSize(3, 10).steps_per_epoch, population=10
    ),
    "Poisson.default_capacity": case(POISSON.default_capacity, population=10),
    "Cohorts": case(
        sampling.Cohorts, scheme=POISSON, client_ids=["a", "b", "c"], seed=1
    ),
    "Cohorts.call": case(COHORTS, round_num=3),
    "from_dict": case(sampling.from_dict, settings={"scheme": "Poisson", "rate": 0.5}),
    "Stream": case(
        sampling.Stream,
        data=lambda: iter([(1.0, 0), (2.0, 1)]),  # Two records, read in order.
        examples=2,
        folder=tempfile.gettempdir(),
        memory=2**20,
    ),
    "Batches": case(
        sampling.Batches,
        scheme=POISSON,
        data=ROWS,
        physical_batch_size=10,
        accumulation_steps=1,
        independent_groups=False,
        steps=3,
        seed=1,
        workers=None,
    ),
}

# Every rule, with the settings of its first entry there.
RULES_AS_THEY_ARE_SET_UP = {
    name: case(
        type(rule), **{s.name: getattr(rule, s.name) for s in dataclasses.fields(rule)}
    )
    for name, (rule, *_) in RULES.items()
}
CLIPPING = RULES_AS_THEY_ARE_SET_UP | {
    "ClipRule": None,
    "GroupedRule": None,
    "Groups": None,
    "QuantileClip.count_stddevs": case(
        clipping.QuantileClip().count_stddevs, records_per_step=10.0, private=True
    ),
    "LayerwiseClip": case(
        clipping.LayerwiseClip,
        rule=1.0,
        groups=None,
        allocation="joint",
    ),
    "PublicNormClip": case(
        clipping.PublicNormClip,
        master_norm=1.0,
        groups=None,
        allocation="joint",
        norms={"a": 1.0},
        floor=0.01,
    ),
    "ScaledClip": case(
        clipping.ScaledClip,
        multipliers={"a": 1.0},
        norm=1.0,
        groups=None,
        floor=0.01,
    ),
    "as_rule": case(
        clipping.as_rule,
        _={"named": {"clip": ("thing",)}, "free": ("name",)},
        clip=1.0,
        name="thing",
    ),
    "bound_rule": case(
        clipping.bound_rule,
        _={"free": ("name",)},
        rule=clipping.LayerwiseClip(1.0),
        names=["a/b", "c/d"],
        name="thing",
    ),
    "make_groups": case(clipping.make_groups, groups="layer", names=["a/b", "c/d"]),
    "register_rule": case(clipping.register_rule, rule_class=clipping.FixedClip),
    "registered_rules": case(clipping.registered_rules),
    "serialize_rule": case(clipping.serialize_rule, rule=clipping.FixedClip(1.0)),
}

NOISE = {
    # Of tensors that a generator made.
    "box_muller": None,
    "GaussianNoise": case(noise.GaussianNoise, seed=1, hardened=False),
}

MECHANISM = {
    "Mechanism": case(
        mechanism.Mechanism,
        rule=clipping.QuantileClip(count_stddev=5.0),
        noise_multiplier=1.0,
        records=100.0,
        inflation=1.0,
    ),
    # Its requests and results, and a class without arguments.
    "NoiseSource": None,
    "Release": None,
    "Unclipped": None,
}

GRID = {"clip_norms": [1.0], "batch_sizes": [4], "learning_rates": [0.1], "seeds": [0]}
PLAN = tuning.TrainingPlan(FULL, 1.0, 10)
BUDGET = {"population": 20, "epsilon": 1.0, "delta": 1e-5, "convention": "ceil"}


def a_run(point):
    return 1.0


TUNING = {
    # Results of functions.
    "BatchSizeAdvice": None,
    "BatchSizeNoise": None,
    "GridPoint": None,
    "GridResult": None,
    "PublicClip": None,
    "Recipe": None,
    "SearchStatement": None,
    "Grid": case(tuning.Grid, **GRID, others={"a": [1]}),
    "RandomStopping": case(tuning.RandomStopping, mean=3.0),
    "RandomStopping.draw": case(tuning.RandomStopping(3.0).draw, rng=None),
    "TrainingPlan": case(
        tuning.TrainingPlan, sampling=POISSON, noise_multiplier=1.0, steps=10
    ),
    "batch_size_advice": case(
        tuning.batch_size_advice,
        **BUDGET,
        epochs=2,
        minimum_steps=2,
        candidates=["full"],
        tolerance=0.1,
    ),
    "batch_size_noise": case(
        tuning.batch_size_noise, **BUDGET, candidates=["full"], epochs=2, steps=None
    ),
    "geometric": case(tuning.geometric, lowest=0.1, highest=1.0, count=3),
    "run_grid": case(
        tuning.run_grid,
        _={"fixed": ("path",), "infinite": True},
        grid=tuning.Grid(**GRID),
        run=a_run,
        metric="score",
        maximize=True,
        plan=lambda point: PLAN,
        delta=1e-5,
        search=None,
        max_runs=1,
        progress=None,
    ),
    "search_privacy": case(
        tuning.search_privacy, plans=[PLAN], delta=1e-5, search=tuning.RandomStopping(3)
    ),
    "three_step_recipe": case(
        tuning.three_step_recipe,
        _={"fixed": ("candidates",)},
        population=300,
        epochs=2,
        epsilon=1.0,
        delta=1e-5,
        learning_rate=0.1,
        at_batch_size=10,
        clip_norms=[1.0],
        seeds=[0],
        candidates=["full"],
    ),
}

DIAGNOSTICS = {"GradientNorms": None}
