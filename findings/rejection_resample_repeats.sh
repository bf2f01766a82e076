#!/usr/bin/env bash
# Dataset.rejection_resample gives a record twice in one pass, though it only rejects.
#
# Version: tensorflow 2.21.0; Python 3.11 or newer.
#
# Behaviour: balancing 100 records (10 of class 1) with exact initial proportions
# gives at least one record twice in one pass: the first. The data set that is
# filtered and the data set that is passed on are two passes over the same source, and
# each begins with the first records.
#
# Why one would have guessed otherwise: rejection sampling draws without a copy: each
# input record is accepted once or dropped. A record that is used twice has twice the
# influence that an accountant of one pass assumes.
#
# Output seen:
#     tensorflow 2.21.0
#     seed 0: 19 elements; more than once: {0: 2}
#     seed 1: 32 elements; more than once: {0: 2, 10: 2, 20: 2}
#     seed 2: 29 elements; more than once: {0: 2, 10: 2}
#     seed 3: 22 elements; more than once: {0: 2, 10: 2}
#     seed 4: 20 elements; more than once: {0: 2}
#     As found: one pass has a record twice.
#
# Exit status: 0 while TensorFlow behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    tensorflow==2.21.0 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import collections
import sys

import tensorflow as tf

RECORDS, SEEDS = 100, range(5)


def counts(seed):
    """How often each record comes in one pass of the balanced data set."""
    records = tf.data.Dataset.range(RECORDS).map(
        lambda i: (i, tf.cast(i % 10 == 0, tf.int32))
    )
    balanced = records.rejection_resample(
        lambda i, label: label, [0.5, 0.5], [0.9, 0.1], seed=seed
    )
    return collections.Counter(int(record[0]) for _, record in balanced)


print("tensorflow", tf.__version__)
repeated = []
for seed in SEEDS:
    times = counts(seed)
    twice = {record: n for record, n in times.items() if n > 1}
    repeated.append(bool(twice))
    print(f"seed {seed}: {sum(times.values())} elements; more than once: {twice}")

if not any(repeated):
    sys.exit("The behaviour has changed.")
print("As found: one pass has a record twice.")
PYTHON

TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 "$folder/venv/bin/python" "$folder/show.py"
