#!/usr/bin/env bash
# dp-accounting's PLD epsilon is infinite for a small delta where RDP's is below 1.
#
# Version: dp-accounting 0.6.0; Python 3.11 or newer.
#
# Behaviour: the default PLD accountant moves the far tail of the privacy loss to
# infinity. Below the moved mass epsilon is infinite: at delta 1e-16 for a single
# Gaussian step of noise 10, where RDP gives 0.83. Above it, the mass is paid for at
# once: for 1000 steps of Poisson sampling PLD's epsilon is below RDP's at delta
# 1e-12, 8.6 against 5.0 at 1e-14, and infinite at 1e-15.
#
# Why one would have guessed otherwise: privacy loss distributions are the tight way,
# and RDP the loose one; the moved mass is in no argument of the accountant. A
# deployment with a delta of 1e-15 is far within float64.
#
# Output seen:
#     dp-accounting 0.6.0
#     one step, delta 1e-12: PLD 0.65, RDP 0.68
#     one step, delta 1e-14: PLD 0.71, RDP 0.75
#     one step, delta 1e-15: PLD 0.75, RDP 0.79
#     one step, delta 1e-16: PLD inf, RDP 0.83
#     1000 sampled steps, delta 1e-12: PLD 3.92, RDP 4.35
#     1000 sampled steps, delta 1e-14: PLD 8.59, RDP 4.98
#     1000 sampled steps, delta 1e-15: PLD inf, RDP 5.28
#     1000 sampled steps, delta 1e-16: PLD inf, RDP 5.59
#     As found: PLD's epsilon is infinite where RDP's is not.
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
import math
import sys

import dp_accounting
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

ONE = dp_accounting.GaussianDpEvent(10.0)
MANY = dp_accounting.SelfComposedDpEvent(
    dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0)), 1000
)
DELTAS = (1e-12, 1e-14, 1e-15, 1e-16)

print("dp-accounting", importlib.metadata.version("dp-accounting"))
epsilons = {}
for name, event in {"one step": ONE, "1000 sampled steps": MANY}.items():
    pld, rdp = PLDAccountant().compose(event), RdpAccountant().compose(event)
    for delta in DELTAS:
        pair = pld.get_epsilon(delta), rdp.get_epsilon(delta)
        epsilons[name, delta] = pair
        print(f"{name}, delta {delta:.0e}: PLD {pair[0]:.2f}, RDP {pair[1]:.2f}")

as_found = math.isinf(epsilons["one step", 1e-16][0])
as_found &= epsilons["one step", 1e-15][0] < epsilons["one step", 1e-16][1] < 1
as_found &= math.isinf(epsilons["1000 sampled steps", 1e-15][0])
tight, loose = epsilons["1000 sampled steps", 1e-14]
as_found &= loose < tight < math.inf
as_found &= epsilons["1000 sampled steps", 1e-12][0] < epsilons["1000 sampled steps", 1e-12][1]
if not as_found:
    sys.exit("The behaviour has changed.")
print("As found: PLD's epsilon is infinite where RDP's is not.")
PYTHON

"$folder/venv/bin/python" "$folder/show.py"
