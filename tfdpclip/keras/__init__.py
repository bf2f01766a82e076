"""Keras optimizers, callbacks and checks for differentially private training."""

from tfdpclip.keras.isolation import check_isolation
from tfdpclip.keras.optimizers import (
    DPSGD,
    DPAdagrad,
    DPAdam,
    DPAdamW,
    DPRMSprop,
    privatize,
)
from tfdpclip.keras.privacy_budget import PrivacyBudget

__all__ = [
    "DPSGD",
    "DPAdagrad",
    "DPAdam",
    "DPAdamW",
    "DPRMSprop",
    "PrivacyBudget",
    "check_isolation",
    "privatize",
]
