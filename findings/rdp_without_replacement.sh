#!/usr/bin/env bash
# 999 of 1000 records cost more epsilon than all 1000 by dp-accounting's RDP.
#
# Version: dp-accounting 0.6.0; Python 3.11 or newer.
#
# Behaviour: the RDP accountant's epsilon of sampling without replacement grows with
# the sample up to 999 of 1000 records (12.25 here), and falls to 8.08 for 1000 of 1000.
# The bound for a true sample costs more than it saves where the sample is most of the
# data; the accountant does not take the smaller of this bound and that without
# sampling, which holds for any sample.
#
# Why one would have guessed otherwise: a sample adds secrecy and takes none away: the
# mechanism on all records is the worst case of a sample, so that its epsilon is an
# upper bound for every smaller sample.
#
# Output seen:
#     dp-accounting 0.6.0
#      500 of 1000 records, 10 steps: epsilon 7.16
#      700 of 1000 records, 10 steps: epsilon 9.42
#      900 of 1000 records, 10 steps: epsilon 11.38
#      999 of 1000 records, 10 steps: epsilon 12.25
#     1000 of 1000 records, 10 steps: epsilon 8.08
#     As found: a sample of 999 costs more than all 1000 records.
#
# Exit status: 0 while dp-accounting behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    dp-accounting==0.6.0

cat > "$folder/show.py" <<'PYTHON'
import importlib.metadata
import sys

import dp_accounting
from dp_accounting.rdp import RdpAccountant

RECORDS, STEPS, NOISE, DELTA = 1000, 10, 2.0, 1e-5


def epsilon(sample):
    """Epsilon of all steps, if each draws `sample` records without replacement."""
    accountant = RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    step = dp_accounting.SampledWithoutReplacementDpEvent(
        RECORDS, sample, dp_accounting.GaussianDpEvent(NOISE)
    )
    return accountant.compose(step, STEPS).get_epsilon(DELTA)


print("dp-accounting", importlib.metadata.version("dp-accounting"))
epsilons = {sample: epsilon(sample) for sample in (500, 700, 900, 999, 1000)}
for sample, value in epsilons.items():
    print(f"{sample:4} of {RECORDS} records, {STEPS} steps: epsilon {value:.2f}")

if not epsilons[500] < epsilons[1000] < 0.7 * epsilons[999]:
    sys.exit("The behaviour has changed.")
print("As found: a sample of 999 costs more than all 1000 records.")
PYTHON

"$folder/venv/bin/python" "$folder/show.py"
