#!/usr/bin/env bash
# JAX draws rare events far more often than asked: bernoulli(1e-9) comes 119 times too often.
#
# Version: jax 0.10.2 (CPU); Python 3.11 or newer.
#
# Behaviour: `jax.random.bernoulli(key, p)` compares a float32 uniform number with p. The
# uniform number is a multiple of 2^-23, so it is below p whenever it is 0: a p below
# 2^-23 = 1.2e-7 acts as 2^-23, and any p is rounded up to a multiple of 2^-23. Poisson
# sampling of records at a small rate by it draws more records than the rate that an
# accountant is told. `mode="high"` draws as asked.
#
# Why one would have guessed otherwise: p = 1e-9 is an ordinary float32 number, far from
# its smallest (1e-38); NumPy's `random() < p` compares in float64, and is right here.
#
# Output seen:
#     jax 0.10.2
#     268,435,456 draws with p = 1e-09; 0.3 events expected
#     mode low (the default): 29 events
#     mode high:              0 events
#     2^-23 of the draws:     32.0
#     As found: by default a rare event has probability 2^-23.
#
# Exit status: 0 while JAX behaves so, 1 once it does not. Keys are fixed, so that the
# counts are the same in every run of this version.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import sys

import jax

RATE, DRAWS, PARTS = 1e-9, 2**28, 8


def events(mode):
    """The number of events among all draws."""
    return sum(
        int(jax.random.bernoulli(jax.random.key(i), RATE, (DRAWS // PARTS,), mode).sum())
        for i in range(PARTS)
    )


print("jax", jax.__version__)
print(f"{DRAWS:,} draws with p = {RATE}; {RATE * DRAWS:.1f} events expected")
low, high = events("low"), events("high")
print(f"mode low (the default): {low} events")
print(f"mode high:              {high} events")
print(f"2^-23 of the draws:     {DRAWS / 2**23:.1f}")

if not (low > 10 and high <= 4):
    sys.exit("The behaviour has changed.")
print("As found: by default a rare event has probability 2^-23.")
PYTHON

JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/show.py"
