#!/usr/bin/env bash
# KerasHub ends a text that it cuts: the model learns to stop in the middle.
#
# Version: keras-hub 0.32.0, keras 3.15.1 (JAX backend, jax 0.10.2), tensorflow-text
# 2.21.1; Python 3.11 (tensorflow-text decides).
#
# Behaviour: `CausalLMPreprocessor` cuts a text that has more tokens than
# `sequence_length`, and then still writes the end token behind the last token that is
# kept, with weight 1. So the labels of a long text say that it ends after its first
# `sequence_length - 1` tokens, wherever that is. Fine-tuned on texts that are mostly
# too long, a model learns to stop at about that length.
#
# Why one would have guessed otherwise: "cut" text has no end in it. Whoever cuts a
# document to the context, as without KerasHub, trains each place on the token that
# follows in the document.
#
# Output seen:
#     keras-hub 0.32.0, keras 3.15.1
#     abc: labels a b c <end> <end>, weights [1, 1, 1, 1, 0]
#     abcdefgh: labels a b c d <end>, weights [1, 1, 1, 1, 1]
#     As found: the text that goes on is taught to end.
#
# Exit status: 0 while KerasHub behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    keras-hub==0.32.0 keras==3.15.1 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 \
    tensorflow-text==2.21.1

cat > "$folder/show.py" <<'PYTHON'
import sys

import keras
import keras_hub
import numpy as np

words = ["<|endoftext|>", *"abcdefgh", "hg"]
vocabulary = {word: number for number, word in enumerate(words)}
tokenizer = keras_hub.tokenizers.GPT2Tokenizer(vocabulary, merges=["h g"])
preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=5)

print(f"keras-hub {keras_hub.__version__}, keras {keras.__version__}")
found = {}
for text in ("abc", "abcdefgh"):
    _, labels, weights = preprocessor([text])
    names = ["<end>" if label == 0 else words[label] for label in np.asarray(labels)[0]]
    found[text] = names, np.asarray(weights)[0].astype(int).tolist()
    print(f"{text}: labels {' '.join(names)}, weights {found[text][1]}")

expected = {
    "abc": (["a", "b", "c", "<end>", "<end>"], [1, 1, 1, 1, 0]),
    "abcdefgh": (["a", "b", "c", "d", "<end>"], [1, 1, 1, 1, 1]),
}
if found != expected:
    sys.exit("The behaviour has changed.")
print("As found: the text that goes on is taught to end.")
PYTHON

KERAS_BACKEND=jax JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 \
    "$folder/venv/bin/python" "$folder/show.py"
