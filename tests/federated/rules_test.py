"""Every clip rule in whole federated rounds: no client moves them too far.

The rules are those of `tests/clipping/contract_test.py`, which has an entry for each.
"""

import numpy as np
import pytest
import tensorflow_federated as tff

import tfdpclip as dpc
from tests.clipping.contract_test import RULES
from tests.clipping.new_rule_test import PowerClip

UPDATE = tff.to_type([(np.float32, [3, 2]), (np.float32, [2])])
# Each once, with the public numbers that a round cannot wait for.
CASES = {name: rules[-1] for name, rules in RULES.items()}
CASES |= {
    "without a bound": PowerClip(0.5, 0.5),
    "a new rule": PowerClip(0.5),
    "in groups": dpc.LayerwiseClip(PowerClip(0.5)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(9)
def test_no_client_moves_a_round_by_more_than_allowed(name):
    aggregator = dpc.federated.clipped_mean(
        noise_multiplier=0.5,
        clients_per_round=12,
        clip=CASES[name],
        variable_names=["one/kernel", "two/kernel"],
    )
    report = dpc.testing.assert_aggregator_sensitivity(aggregator, UPDATE)
    assert 0.98 < report.ratio < 1.01
