#!/usr/bin/env bash
# On gradients with the noise of private training, optax's DoG never leaves its start.
#
# Version: optax 0.2.8, JAX 0.10.2, NumPy 2.4.6; Python 3.11 or newer.
#
# Behaviour: `optax.contrib.dog` needs no learning rate: its rate is the distance
# travelled, from 1e-6 on, over the root of the summed squared gradients. For a bowl in
# 1000 dimensions whose gradient has length 1, with Gaussian noise of standard deviation 1
# on each entry (a small private batch), 10,000 steps make less than a thousandth of the
# way. `dowg`, also without a rate, makes 93 % of the way in 500 steps, and SGD of rate
# 0.1 makes 82 %. DoG arrives without noise, and with a tenth of the noise.
#
# Why one would have guessed otherwise: DoG was proposed for stochastic gradients, and
# its noise averages out like that of any other. But a step is as long as the travelled
# distance, over the root of all noise so far: the distance grows only when the sum of
# the signal outgrows that of the noise, after as many steps as the noise has squared
# lengths of the signal, and from then on by factors, out of 1e-6.
#
# Output seen (share of the way after 500 and 10,000 steps):
#     optax 0.2.8, JAX 0.10.2
#     noise 0: dog 1.000, 1.000; dowg 1.000, 1.000; sgd 0.795, 1.000
#     noise 0.1: dog 0.020, 0.992; dowg 1.008, 0.991; sgd 0.798, 0.992
#     noise 1: dog 0.000, 0.000; dowg 0.933, 0.991; sgd 0.825, 0.925
#     As found: DoG stands still under noise that DoWG and SGD bear.
#
# Exit status: 0 while optax behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    optax==0.2.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import optax

SIZE = 1000
OPTIMIZERS = {
    "dog": optax.contrib.dog(),
    "dowg": optax.contrib.dowg(),
    "sgd": optax.sgd(0.1),
}


def way(optimizer, noise):
    """The share of the way to the minimum, after 500 and 10,000 steps."""

    def step(state, key):
        x, inner = state
        gradient = (x - 1) / SIZE**0.5 + noise * jax.random.normal(key, x.shape)
        change, inner = optimizer.update(gradient, inner, x)
        x = optax.apply_updates(x, change)
        return (x, inner), x.mean()

    start = jnp.zeros(SIZE)
    keys = jax.random.split(jax.random.PRNGKey(1), 10_000)
    _, means = jax.lax.scan(step, (start, optimizer.init(start)), keys)
    return float(means[499]), float(means[-1])


print(f"optax {optax.__version__}, JAX {jax.__version__}")
found = {}
for noise in (0.0, 0.1, 1.0):
    found[noise] = {name: way(made, noise) for name, made in OPTIMIZERS.items()}
    parts = [f"{n} {early:.3f}, {late:.3f}" for n, (early, late) in found[noise].items()]
    print(f"noise {noise:g}: {'; '.join(parts)}")
noised = found[1.0]
arrives = [found[0.0]["dog"], found[0.1]["dog"], noised["dowg"], noised["sgd"]]
if not all(0.9 < late < 1.1 for _, late in arrives) or noised["dog"][1] > 0.1:
    sys.exit("The behaviour has changed.")
print("As found: DoG stands still under noise that DoWG and SGD bear.")
PYTHON

JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/show.py"
