#!/usr/bin/env bash
# XLA on a CPU computes a long chain of operations again for each part that is read.
#
# Version: jax 0.10.2 (CPU; the same with tensorflow 2.21.0, jit_compile=True); Python
# 3.11 or newer.
#
# Behaviour: a table of words is made by 400 operations for each word, and each of 16
# weights adds a sixteenth of the table's halves of 16 bits. The compiled program has 16
# loops with all 400 operations each. With a row of zeros appended to the table, which
# nothing reads, the chain is compiled once, and 16 short loops read its result. XLA
# takes an operation such as xor for cheap, however long a chain of such operations is;
# a concatenation ends a loop, unless it can be simplified away (without the halves, it
# is). Noise of a counter-based generator, added to many variables, took 1.7 times as
# long for that reason, and a training step took twice as long to compile.
#
# Why one would have guessed otherwise: the program names the vector once, and a
# compiler that eliminates common subexpressions seems to keep it so; an appended row
# looks like more work.
#
# Output seen:
#     jax 0.10.2
#     as written: 16 loops with the chain, 6400 xor in all
#     with a row appended: 1 loops with the chain, 400 xor in all
#     equal results: True
#     As found: XLA repeats a long chain for each reader, and not behind a concatenation.
#
# Exit status: 0 while XLA behaves so, 1 once it does not. Nothing is timed.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np

COUNT, ROW, PARTS, LINKS = 2**14, 256, 16, 400


def chain(first):
    word = jnp.arange(COUNT, dtype=jnp.uint32) + first
    for link in range(LINKS):
        word = (word + jnp.uint32(2 * link + 1)) ^ (word << 13)
    return word.reshape(-1, ROW)


def add(append):
    def added(first, weights):
        made = chain(first)
        if append:
            made = jnp.concatenate([made, jnp.zeros([1, ROW], made.dtype)])
        halves = jax.lax.bitcast_convert_type(made, jnp.uint16).reshape(-1)
        parts = jnp.split(halves[: 2 * COUNT].astype(jnp.float32), PARTS)
        return [weight + part for weight, part in zip(weights, parts)]

    return jax.jit(added)


def show(name, function):
    """Prints how many loops hold the chain, and returns the counts and the results."""
    arguments = jnp.uint32(7), [jnp.zeros(2 * COUNT // PARTS)] * PARTS
    compiled = function.lower(*arguments).compile()
    bodies = re.findall(r"^%[^\n]*\{\n(.*?)^\}", compiled.as_text(), re.S | re.M)
    counts = [n for n in (body.count(" xor(") for body in bodies) if n]
    print(f"{name}: {len(counts)} loops with the chain, {sum(counts)} xor in all")
    return len(counts), sum(counts), np.concatenate(compiled(*arguments))


print("jax", jax.__version__)
loops, words, plain = show("as written", add(False))
once, few, appended = show("with a row appended", add(True))
same = bool(np.array_equal(plain, appended))
print("equal results:", same)

if not (same and loops == PARTS and words == PARTS * LINKS and once == 1 and few == LINKS):
    sys.exit("The behaviour has changed.")
print("As found: XLA repeats a long chain for each reader, and not behind a concatenation.")
PYTHON

JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/show.py"
