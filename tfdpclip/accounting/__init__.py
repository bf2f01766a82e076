"""Privacy accounting: epsilon, calibration, the noise split, Gaussian DP, the ledger.

The functions take a sampling scheme of `tfdpclip.sampling` and a noise multiplier,
which always means z, the number the accountant gets. Accountants are those of
`dp_accounting` (privacy loss distributions by default); TensorFlow is not needed.

Names are loaded when they are first used, so that `tfdpclip.mechanism` loads the noise
split alone.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdpclip.accounting.attacks import (
        AttackBounds,
        attack_bounds,
        attack_bounds_of,
    )
    from tfdpclip.accounting.calibration import (
        delta,
        epsilon,
        event_epsilon,
        noise_multiplier,
        steps_for,
    )
    from tfdpclip.accounting.gdp import (
        gdp_compose,
        gdp_delta,
        gdp_epsilon,
        gdp_mu,
        gdp_tradeoff,
        layerwise_gdp_mu,
        noise_multiplier_from_layerwise_sigma,
        subsampled_gdp_log_h,
        subsampled_gdp_mu,
    )
    from tfdpclip.accounting.ledger import Ledger
    from tfdpclip.accounting.matrix_events import correlated_event
    from tfdpclip.accounting.noise_split import (
        count_stddevs,
        effective_noise_multiplier,
        split_noise_multiplier,
    )
    from tfdpclip.accounting.past_runs import PastRun, past_run
    from tfdpclip.accounting.phases import Phase, PrivacyMismatchError
    from tfdpclip.accounting.recipe import CohortPlan, cohort_for
    from tfdpclip.accounting.rounds import BudgetExceededError, RoundBudget
    from tfdpclip.accounting.statement import PrivacyStatement
    from tfdpclip.sampling.events import (
        CappedPoissonSampledDpEvent,
        NeighboringRelation,
        RandomAllocationDpEvent,
        TruncatedPoissonSampledDpEvent,
        sensitivity_factor,
    )

__all__ = [
    "AttackBounds",
    "BudgetExceededError",
    "RoundBudget",
    "CappedPoissonSampledDpEvent",
    "CohortPlan",
    "Ledger",
    "NeighboringRelation",
    "PastRun",
    "Phase",
    "PrivacyMismatchError",
    "PrivacyStatement",
    "RandomAllocationDpEvent",
    "TruncatedPoissonSampledDpEvent",
    "cohort_for",
    "attack_bounds",
    "attack_bounds_of",
    "correlated_event",
    "count_stddevs",
    "delta",
    "effective_noise_multiplier",
    "epsilon",
    "event_epsilon",
    "gdp_compose",
    "gdp_delta",
    "gdp_epsilon",
    "gdp_mu",
    "gdp_tradeoff",
    "layerwise_gdp_mu",
    "noise_multiplier",
    "noise_multiplier_from_layerwise_sigma",
    "past_run",
    "sensitivity_factor",
    "split_noise_multiplier",
    "steps_for",
    "subsampled_gdp_log_h",
    "subsampled_gdp_mu",
]

# The modules of the names of `__all__`, in the order in which a name is looked up:
# modules that load few others first.
_HOMES = (
    *("accounting.noise_split", "accounting.phases", "sampling.events"),
    *("accounting.calibration", "accounting.gdp", "accounting.attacks"),
    *("accounting.matrix_events", "accounting.statement", "accounting.ledger"),
    *("accounting.recipe", "accounting.rounds", "accounting.past_runs"),
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        homes = map(importlib.import_module, (f"tfdpclip.{home}" for home in _HOMES))
        return next(getattr(home, name) for home in homes if hasattr(home, name))
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
