"""Valid calls of the public names for correlated noise."""

from tests.properties.registry import EVENT, case
from tests.stand_in_aggregator import Aggregator
from tfdpclip import accounting, correlated, sampling
from tfdpclip.noise import runs

_ONCE = correlated.SingleEpoch()
_FIXED = sampling.MinSeparation(20, 5)
_CYCLIC = sampling.CyclicPoisson(20, rate=0.1, separation=4)
_AVAILABLE = sampling.AvailableClients(3, separation=2)
_ROOT = correlated.SquareRootToeplitz(4)
_SEARCH = {"steps": 12, "participation": _ONCE, "error": "mean"}

CORRELATED = {
    "NoiseError": None,
    "NoiseMatrix": None,
    "Stream": None,
    "ToeplitzMatrix": None,
    "BufferedToeplitz": case(
        correlated.BufferedToeplitz,
        buffers=1,
        workload=correlated.Workload(),
        decay=(0.75,),
        scale=(0.5,),
        **_SEARCH,
    ),
    "BufferedToeplitz.search": case(
        correlated.BufferedToeplitz,
        _={"costly": True},
        buffers=2,
        workload=correlated.Workload(),
        **_SEARCH,
    ),
    "CyclicPoisson": case(correlated.CyclicPoisson, separation=4, rate=0.1),
    "Independent": case(correlated.Independent),
    "InverseSquareRootToeplitz": case(
        correlated.InverseSquareRootToeplitz, inverse_bands=4, momentum=0.5
    ),
    "MinSeparation": case(correlated.MinSeparation, separation=4, participations=2),
    "MinSeparation.most": case(correlated.MinSeparation(4).most, steps=10),
    "OptimizedToeplitz": case(
        correlated.OptimizedToeplitz,
        bands=3,
        workload=correlated.Workload(0.5),
        column=(1.0, 0.5, 0.25),
        **_SEARCH,
    ),
    "SingleEpoch": case(correlated.SingleEpoch),
    "SquareRootToeplitz": case(correlated.SquareRootToeplitz, bands=4, momentum=0.5),
    "SquareRootToeplitz.coefficients": case(_ROOT.coefficients, steps=10),
    "SquareRootToeplitz.noising": case(_ROOT.noising, steps=10),
    "SquareRootToeplitz.sensitivity": case(
        _ROOT.sensitivity, steps=10, participation=_ONCE
    ),
    "Toeplitz": case(correlated.Toeplitz, column=(1.0, 0.5)),
    "Tree": case(correlated.Tree, honaker=True),
    "Tree.strategy": case(correlated.Tree().strategy, steps=10),
    "Workload": case(correlated.Workload, momentum=0.5, learning_rates=(1.0, 0.5)),
    "from_dict": case(correlated.from_dict, settings={"matrix": "Tree"}),
    "noise_error": case(
        correlated.noise_error,
        matrix=_ROOT,
        steps=10,
        participation=_ONCE,
        workload=correlated.Workload(),
    ),
    "plot_noise": case(
        correlated.plot_noise,
        _={"fixed": ("path",)},
        matrices={"root": _ROOT},
        steps=10,
        participation=_ONCE,
        workload=correlated.Workload(),
        path=None,
    ),
}

_RUN = runs.CorrelatedNoise(_ROOT, 12, _FIXED)

ACCOUNTING = {
    "RoundBudget.with_a_matrix": case(
        accounting.RoundBudget,
        _={"unbounded": ("epsilon",)},
        epsilon=5.0,
        delta=1e-5,
        cohorts=_FIXED.cohorts(range(20)),
        aggregator=Aggregator(2.0, _RUN),
        continued=None,
    ),
    "Ledger.begin_with_a_matrix": case(
        lambda **arguments: accounting.Ledger(1e-5).begin(**arguments),
        noise_multiplier=1.0,
        sampling=_FIXED,
        noise=_ROOT,
        horizon=20,
        continued=None,
    ),
    "Phase.with_a_matrix": case(
        accounting.Phase,
        sampling=_FIXED,
        noise_multiplier=1.0,
        noise=_ROOT,
        horizon=20,
    ),
    "noise_multiplier.with_a_matrix": case(
        accounting.noise_multiplier,
        _={"unbounded": ("epsilon",)},
        epsilon=1.0,
        delta=1e-5,
        steps=10,
        sampling=_FIXED,
        matrix=_ROOT,
    ),
    "correlated_event": case(
        accounting.correlated_event,
        matrix=_ROOT,
        noise_multiplier=1.0,
        steps=10,
        sampling=_FIXED,
        horizon=20,
        unit="example",
    ),
}

SAMPLING = {
    "AvailableClients": case(
        sampling.AvailableClients, cohort_size=3, separation=2, participations=2
    ),
    "AvailableClients.event": case(_AVAILABLE.event, **EVENT),
    "AvailableClients.participation": case(_AVAILABLE.participation, steps=3),
    "AvailableCohorts": case(
        sampling.AvailableCohorts,
        scheme=_AVAILABLE,
        available=lambda round_num: range(9),
        state={"name": "a run", "next": 1, "clients": [["a", 0, 1]]},
    ),
    "CyclicPoisson": case(
        sampling.CyclicPoisson,
        population=20,
        rate=0.1,
        separation=4,
        capacity=5,
        order=0,
    ),
    "CyclicPoisson.event": case(_CYCLIC.event, **EVENT),
    "CyclicPoisson.participation": case(_CYCLIC.participation, steps=3),
    "MinSeparation": case(
        sampling.MinSeparation,
        population=20,
        batch_size=5,
        min_separation=2,
        participations=3,
        relation="zero_out",
        order=0,
    ),
    "MinSeparation.event": case(_FIXED.event, **EVENT),
    "MinSeparation.participation": case(_FIXED.participation, steps=3),
}

MATRIX_NOISE = {
    "CorrelatedNoise": case(
        runs.CorrelatedNoise, matrix=_ROOT, steps=12, sampling=_FIXED
    ),
    "as_run": case(
        runs.as_run,
        # The mechanism looks at the number.
        _={"free": ("noise_multiplier",)},
        noise=_RUN,
        noise_multiplier=1.0,
    ),
}
