"""Aggregation factories for TensorFlow Federated: user-level privacy.

The only part of the library that needs TensorFlow Federated, and so Python 3.11 with
TensorFlow 2.14: docs/stacks.md.
"""

from tfdpclip.federated.aggregators import (
    ClippedMeanFactory,
    InnerSum,
    clipped_mean,
)
from tfdpclip.federated.contexts import local_context, remote_context
from tfdpclip.federated.discrete import ZeroConcentratedDpEvent
from tfdpclip.federated.privacy_plan import PrivacyPlan
from tfdpclip.federated.programs import CohortDataSource, server_momentum
from tfdpclip.federated.secure import SecureSettings
from tfdpclip.noise.carried import NoiseMemory, join_noise, split_noise

__all__ = [
    "ClippedMeanFactory",
    "CohortDataSource",
    "InnerSum",
    "NoiseMemory",
    "PrivacyPlan",
    "SecureSettings",
    "ZeroConcentratedDpEvent",
    "clipped_mean",
    "join_noise",
    "local_context",
    "remote_context",
    "server_momentum",
    "split_noise",
]
