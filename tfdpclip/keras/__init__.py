"""Keras optimizers, callbacks and checks for differentially private training."""

from tfdpclip.keras.optimizers import (
    DPSGD,
    DPAdagrad,
    DPAdam,
    DPAdamW,
    DPRMSprop,
    privatize,
)

__all__ = [
    "DPSGD",
    "DPAdagrad",
    "DPAdam",
    "DPAdamW",
    "DPRMSprop",
    "privatize",
]
