#!/usr/bin/env bash
# JAX draws normal numbers in bfloat16 from 128 values, none above 3.
#
# Version: jax 0.10.2 (CPU); Python 3.11 or newer.
#
# Behaviour: `jax.random.normal` in bfloat16 transforms a uniform number of 7 bits, so
# that a million draws take 128 values, from -2.89 to 2.52, and their mean is -0.012,
# twelve standard errors below 0. Draws in float32 that are cast to bfloat16 have none
# of the three faults. Noise of this distribution hides a difference of neighbours
# nowhere beyond its ends: differential privacy holds for no epsilon.
#
# Why one would have guessed otherwise: the dtype of a draw is taken for the rounding
# of its result: bfloat16 has the range of float32, and more than 2000 of its numbers
# lie between -4 and 4 above a millionth.
#
# Output seen:
#     jax 0.10.2
#     drawn in bfloat16: 128 values, -2.89 to 2.52, mean -0.0121
#     drawn in float32, then cast: 3598 values, -4.66 to 4.53, mean 0.0002
#     As found: normal numbers in bfloat16 have 128 values, and end below 3.
#
# Exit status: 0 while JAX behaves so, 1 once it does not. The key is fixed.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import numpy as np

DRAWS = 10**6


def show(name, draws):
    """Prints the number of values, the ends and the mean of the draws."""
    draws = np.asarray(draws.astype(jnp.float32), "float64")
    values, mean = len(np.unique(draws)), draws.mean()
    print(f"{name}: {values} values, {draws.min():.2f} to {draws.max():.2f}, mean {mean:.4f}")
    return values, draws.min(), draws.max(), mean


print("jax", jax.__version__)
key = jax.random.key(0)
drawn = show("drawn in bfloat16", jax.random.normal(key, (DRAWS,), jnp.bfloat16))
wide = jax.random.normal(key, (DRAWS,), jnp.float32)
cast = show("drawn in float32, then cast", wide.astype(jnp.bfloat16))

short = drawn[0] <= 128 and drawn[1] > -3 and drawn[2] < 3 and drawn[3] < -0.01
if not (short and cast[0] > 1000 and cast[2] > 4 and abs(cast[3]) < 0.005):
    sys.exit("The behaviour has changed.")
print("As found: normal numbers in bfloat16 have 128 values, and end below 3.")
PYTHON

JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/show.py"
