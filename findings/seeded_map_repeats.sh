#!/usr/bin/env bash
# Under tf.random.set_seed, a random Dataset.map augments each epoch alike; shuffle does not.
#
# Version: tensorflow 2.21.0; Python 3.11 or newer.
#
# Behaviour: with a global seed, `tf.random.uniform` inside `Dataset.map` gives the
# same numbers in every pass over the data set, as a loop of epochs makes them: an
# image has the same crop in each epoch. `shuffle` of the same pipeline has another
# order in each pass, and `map(...).repeat()` other numbers after each repetition.
# Without a global seed each pass has other numbers.
#
# Why one would have guessed otherwise: a seed makes a run repeatable, not an epoch;
# `tf.random.uniform` outside of a pipeline continues its numbers, and `shuffle`
# beside it reshuffles.
#
# Output seen:
#     tensorflow 2.21.0
#     map, no global seed: 3 different of 3 passes
#     map, global seed: 1 different of 3 passes
#     map, then repeat: 3 different of 3 passes
#     shuffle: 3 different of 3 passes
#     As found: with a global seed, a random map repeats in each pass.
#
# Exit status: 0 while TensorFlow behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    tensorflow==2.21.0 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import sys

import tensorflow as tf

RECORDS, PASSES = 4, 3


def noised():
    """A data set with one random number for each record."""
    return tf.data.Dataset.range(RECORDS).map(lambda _: tf.random.uniform([]))


def passes(dataset):
    """The elements of each of several passes over a data set."""
    return [tuple(round(float(x), 4) for x in dataset) for _ in range(PASSES)]


print("tensorflow", tf.__version__)
seen = {"map, no global seed": passes(noised())}
tf.random.set_seed(7)
seen["map, global seed"] = passes(noised())
repeated = [round(float(x), 4) for x in noised().repeat(PASSES)]
seen["map, then repeat"] = [
    tuple(repeated[i : i + RECORDS]) for i in range(0, len(repeated), RECORDS)
]
seen["shuffle"] = passes(tf.data.Dataset.range(1000).shuffle(1000))
different = {name: len(set(rows)) for name, rows in seen.items()}
for name, number in different.items():
    print(f"{name}: {number} different of {PASSES} passes")

if list(different.values()) != [3, 1, 3, 3]:
    sys.exit("The behaviour has changed.")
print("As found: with a global seed, a random map repeats in each pass.")
PYTHON

TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 "$folder/venv/bin/python" "$folder/show.py"
