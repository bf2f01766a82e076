#!/usr/bin/env bash
# A file of a KerasHub task that was tuned by LoRA comes back without LoRA: all train.
#
# Version: keras-hub 0.32.0, keras 3.15.1 (JAX backend, jax 0.10.2), tensorflow-text
# 2.21.1; Python 3.11 (tensorflow-text decides).
#
# Behaviour: `task.save("file.keras")` and `load_model` of a task after
# `task.backbone.enable_lora(4)` give a task that predicts the same, has no LoRA, trains
# every weight of the backbone, and is compiled with KerasHub's own Adam, whatever
# optimizer was saved. `fit` then runs on. Keras's own models keep both: which weights
# train, and the optimizer.
#
# Why one would have guessed otherwise: the file is said to hold the compiled model, and
# a Keras model with `Dense.enable_lora` comes back with LoRA. Of a frozen backbone
# (`backbone.trainable = False`) the file remembers that it is frozen.
#
# Output seen:
#     keras-hub 0.32.0, keras 3.15.1
#     KerasHub: 386 weights train, SGD; loaded: 2834 weights, Adam
#     Keras:    25 weights train, SGD; loaded: 25 weights, SGD
#     frozen:   34 weights train; loaded: 34 weights
#     As found: the file of a task has forgotten LoRA and the optimizer.
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

models, file = keras_hub.models, f"{sys.argv[1]}/file.keras"
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]


def task():
    tokenizer = models.BertTokenizer(vocabulary=words)
    preprocessor = models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
    backbone = models.BertBackbone(len(words), 1, 2, 16, 32, max_sequence_length=8)
    return models.BertTextClassifier(backbone, 2, preprocessor=preprocessor)


def trained(model):
    """The number of weights that train, and the optimizer's class."""
    count = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    return count, type(model.optimizer).__name__


def before_and_after(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    model.save(file)
    return *trained(model), *trained(keras.models.load_model(file))


print(f"keras-hub {keras_hub.__version__}, keras {keras.__version__}")
tuned = task()
tuned.backbone.enable_lora(4)
hub = before_and_after(tuned)
texts = ["a", "b"]
same = np.allclose(
    keras.models.load_model(file).predict(texts, verbose=0),
    tuned.predict(texts, verbose=0),
)
dense = keras.layers.Dense(3)
plain = keras.Sequential([keras.Input((4,)), dense, keras.layers.Dense(2)])
dense.enable_lora(2)
own = before_and_after(plain)
frozen = task()
frozen.backbone.trainable = False
still = before_and_after(frozen)
line = "{} weights train, {}; loaded: {} weights, {}"
print("KerasHub:", line.format(*hub))
print("Keras:   ", line.format(*own))
print(f"frozen:   {still[0]} weights train; loaded: {still[2]} weights")
if not (same and hub[2] > 5 * hub[0] and hub[1::2] == ("SGD", "Adam")):
    sys.exit("The behaviour has changed.")
if own[:2] != own[2:] or still[0] != still[2]:
    sys.exit("The behaviour of what it is compared with has changed.")
print("As found: the file of a task has forgotten LoRA and the optimizer.")
PYTHON

KERAS_BACKEND=jax JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 \
    "$folder/venv/bin/python" "$folder/show.py" "$folder" 2> "$folder/log" \
    || { cat "$folder/log"; exit 1; }
