"""Keras optimizers, callbacks and checks for differentially private training."""

from typing import NoReturn as _NoReturn

from tfdpclip.keras.isolation import check_isolation
from tfdpclip.keras.normalization import FrozenBatchNormalization, convert_batchnorm
from tfdpclip.keras.optimizers import (
    DPSGD,
    DPAdagrad,
    DPAdam,
    DPAdamW,
    DPRMSprop,
    privatize,
)
from tfdpclip.keras.per_example_loss import PerExampleLoss
from tfdpclip.keras.privacy_budget import PrivacyBudget
from tfdpclip.keras.privacy_plan import PrivacyPlan
from tfdpclip.keras.private_statistics import (
    PrivateMoments,
    PrivateStatistics,
    PrivateVocabulary,
)
from tfdpclip.keras.public_data import (
    PublicBatchStatistics,
    PublicGradientNorms,
    public_gradient_norms,
)
from tfdpclip.keras.scattering import Scattering
from tfdpclip.keras.transfer import TrainableCounts, film
from tfdpclip.keras.watching.adapted_layers import public_statistics
from tfdpclip.keras.watching.private_state import PrivateStateWarning
from tfdpclip.keras.workers import WorkerLostError, multi_worker_strategy
from tfdpclip.noise.runs import CorrelatedNoise
from tfdpclip.tensorflow_privacy import in_place_of as _in_place_of

__all__ = [
    "CorrelatedNoise",
    "DPSGD",
    "DPAdagrad",
    "DPAdam",
    "DPAdamW",
    "DPRMSprop",
    "FrozenBatchNormalization",
    "PerExampleLoss",
    "PrivacyBudget",
    "PrivacyPlan",
    "PrivateMoments",
    "PrivateStateWarning",
    "PrivateStatistics",
    "PrivateVocabulary",
    "PublicBatchStatistics",
    "PublicGradientNorms",
    "Scattering",
    "TrainableCounts",
    "WorkerLostError",
    "check_isolation",
    "convert_batchnorm",
    "film",
    "multi_worker_strategy",
    "privatize",
    "public_gradient_norms",
    "public_statistics",
]


def __getattr__(name: str) -> _NoReturn:
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}." + _in_place_of(name)
    )
