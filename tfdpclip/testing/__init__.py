"""Tests of privacy for your own models and pipelines: use them in your own suite."""

from tfdpclip.testing.auditing import AuditReport, audit, audit_keras
from tfdpclip.testing.clip_rules import ClipRuleReport, assert_clip_rule
from tfdpclip.testing.exactness import ExactnessReport, assert_exact, assert_isolated
from tfdpclip.testing.federated import (
    assert_aggregator_noise,
    assert_aggregator_sensitivity,
    audit_aggregator,
)
from tfdpclip.testing.lower_bounds import one_run_lower_bound
from tfdpclip.testing.noise import NoiseReport, assert_noise
from tfdpclip.testing.sensitivity import SensitivityReport, assert_sensitivity

__all__ = [
    "AuditReport",
    "ClipRuleReport",
    "ExactnessReport",
    "NoiseReport",
    "SensitivityReport",
    "assert_aggregator_noise",
    "assert_aggregator_sensitivity",
    "assert_clip_rule",
    "assert_exact",
    "assert_isolated",
    "assert_noise",
    "assert_sensitivity",
    "audit",
    "audit_aggregator",
    "audit_keras",
    "one_run_lower_bound",
]
