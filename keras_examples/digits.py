r"""Trains a convolutional network on handwritten digits with differential privacy.

    python -m keras_examples.digits --epsilon=3 --clip=quantile

The data are the 1797 images of 8 by 8 pixels that come with scikit-learn, split once
and for all into training and test images. The network is an ordinary Keras model; a
private optimizer, batches drawn by Poisson sampling and a `PrivacyBudget` make its
training private. Four files in --output_dir tell what came of it: report.txt,
digits.png, history.csv and config.json.

The defaults suit epsilon 3. Stronger privacy wants fewer and smaller steps, for example
--epsilon=1 --epochs=20 --learning_rate=0.05.

Not everything that a run shows is private; the report says what is. In particular the
default settings were found by trying several on this very data set, which is no privacy
loss here, since the data are public, but would be one with private data.
"""

from __future__ import annotations

import pathlib
import time

import numpy as np
import tensorflow as tf
from absl import app, flags
from sklearn import datasets, model_selection

import keras_examples
import tfdpclip as dpc
from keras_examples import number_flags, report, tracking
from tfdpclip import files

# Learning rates that work with the other defaults.
_OPTIMIZERS = {
    "sgd": (dpc.keras.DPSGD, 0.07),
    "adam": (dpc.keras.DPAdam, 0.01),
    "adamw": (dpc.keras.DPAdamW, 0.01),
    "adagrad": (dpc.keras.DPAdagrad, 0.2),
    "rmsprop": (dpc.keras.DPRMSprop, 0.01),
}
_CLASSES = 10
_TEST_SHARE = 0.2
_BASELINE_BATCH_SIZE = 32
_BASELINE_LEARNING_RATE = 0.003

_number = number_flags.define_number

_EPSILON = _number(
    "epsilon",
    3.0,
    "Privacy budget; noise is calibrated to it. inf: no noise, not private.",
    good=3,
    above=0,
    infinite=True,
)
_DELTA = _number(
    "delta",
    1e-5,
    "Probability with which epsilon may fail; well below 1 / number of images.",
    good=1e-5,
    above=0,
    below=1,
)
_CLIP = flags.DEFINE_enum(
    "clip",
    "quantile",
    ["quantile", "fixed", "automatic"],
    "How gradients are clipped: to a privately followed quantile of their norms, to "
    "a fixed norm, or all scaled to nearly the same norm.",
)
_CLIP_NORM = _number(
    "clip_norm",
    0.1,
    "The clip norm: of the first step for --clip=quantile, of all for --clip=fixed.",
    good=0.1,
    above=0,
)
_TARGET_QUANTILE = _number(
    "target_quantile",
    0.5,
    "The share of gradients that --clip=quantile tries to leave unclipped.",
    good=0.5,
    least=0,
    most=1,
)
_CLIP_LEARNING_RATE = _number(
    "clip_learning_rate",
    0.2,
    "How fast --clip=quantile moves the clip norm.",
    good=0.2,
    above=0,
)
_NORMALIZE = flags.DEFINE_bool(
    "normalize",
    True,
    "Whether to divide clipped gradients by the clip norm, so that the learning rate "
    "need not change with it.",
)
_BATCH_SIZE = _number(
    "batch_size",
    256,
    "Expected number of images per step; the sampling rate is this divided by the "
    "number of training images.",
    good=256,
    integer=True,
    least=1,
)
_ACCUMULATION_STEPS = _number(
    "accumulation_steps",
    1,
    "Into how many pieces to cut each batch, to save memory. Changes nothing else.",
    good=1,
    integer=True,
    least=1,
)
_EPOCHS = _number(
    "epochs",
    60,
    "How often to go through the training images, on average.",
    good=60,
    integer=True,
    least=1,
)
_OPTIMIZER = flags.DEFINE_enum(
    "optimizer", "sgd", list(_OPTIMIZERS), "The optimizer that gets private gradients."
)
_LEARNING_RATE = _number(
    "learning_rate",
    None,
    "Learning rate. By default one that suits the optimizer: "
    + ", ".join(f"{name} {rate:g}" for name, (_, rate) in _OPTIMIZERS.items()),
    good=0.07,
    above=0,
)
_MOMENTUM = _number(
    "momentum", 0.9, "Momentum of --optimizer=sgd.", good=0.9, least=0, below=1
)
_JIT_COMPILE = flags.DEFINE_bool(
    "jit_compile",
    False,
    "Whether to compile steps with XLA. Takes seconds, and pays off in long runs.",
)
_SEED = _number(
    "seed",
    None,
    "Makes a run repeatable but for rounding, for experiments: it is then NOT private.",
    good=1,
    integer=True,
    least=0,
    most=2**31 - 1,
)
_BASELINE_EPOCHS = _number(
    "baseline_epochs",
    20,
    "For how long to train the same network without privacy, to compare; 0: not.",
    good=20,
    integer=True,
    least=0,
)
_SHOW_TRUE_NORMS = flags.DEFINE_bool(
    "show_true_norms",
    True,
    "Whether to measure the training images' gradient norms without noise, for the "
    "plot. This is not private.",
)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/digits", "Where to write report.txt, digits.png and the rest."
)

_FLAGS = (
    _EPSILON,
    _DELTA,
    _CLIP,
    _CLIP_NORM,
    _TARGET_QUANTILE,
    _CLIP_LEARNING_RATE,
    _NORMALIZE,
    _BATCH_SIZE,
    _ACCUMULATION_STEPS,
    _EPOCHS,
    _OPTIMIZER,
    _LEARNING_RATE,
    _MOMENTUM,
    _JIT_COMPILE,
    _SEED,
    _BASELINE_EPOCHS,
    _SHOW_TRUE_NORMS,
    _OUTPUT_DIR,
)


def load_data():
    """Returns (training images, labels) and (test images, labels); always the same.

    Pixels are between -1 and 1.
    """
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 8 - 1).astype(np.float32)
    split = model_selection.train_test_split(
        images, labels, test_size=_TEST_SHARE, stratify=labels, random_state=0
    )
    return (split[0], split[2]), (split[1], split[3])


def build_network() -> tf.keras.Model:
    """Returns a small convolutional network: 2986 parameters, logits for 10 digits.

    Noise grows with the number of parameters, so small networks do better here; and
    tanh, which bounds activations, did better than relu.
    """
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 5, padding="same", activation="tanh"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(_CLASSES),
        ]
    )


def clip_rule() -> dpc.ClipRule:
    """Returns the clip rule that the flags describe."""
    if _CLIP.value == "quantile":
        return dpc.QuantileClip(
            target_quantile=_TARGET_QUANTILE.value,
            initial_norm=_CLIP_NORM.value,
            learning_rate=_CLIP_LEARNING_RATE.value,
            normalize=_NORMALIZE.value,
        )
    if _CLIP.value == "fixed":
        return dpc.FixedClip(_CLIP_NORM.value, normalize=_NORMALIZE.value)
    return dpc.AutomaticClip()


def train() -> report.Run:
    """Trains as the flags say.

    Raises:
      SystemExit: if the flags do not go together.
    """
    if _SEED.value is not None:
        tf.keras.utils.set_random_seed(_SEED.value)
    training, test = load_data()
    size = len(training[0])
    if _BATCH_SIZE.value > size:
        raise SystemExit(
            f"flag --batch_size={_BATCH_SIZE.value}: there are only {size} training "
            "images, for example --batch_size=256."
        )

    # Sampling, and from it the noise: both only look at public numbers.
    batches = dpc.sampling.Poisson(_BATCH_SIZE.value / size).batches(
        training, accumulation_steps=_ACCUMULATION_STEPS.value, seed=_SEED.value
    )
    steps = _EPOCHS.value * batches.steps_per_epoch
    noise_multiplier = dpc.accounting.noise_multiplier(
        _EPSILON.value, _DELTA.value, steps, batches
    )
    optimizer = _private_optimizer(noise_multiplier, batches.expected_batch_size)
    print(
        f"{size} training and {len(test[0])} test images. {steps} steps of "
        f"{batches.expected_batch_size:g} images on average, noise multiplier "
        f"{noise_multiplier:.4g}, for epsilon {_EPSILON.value:g}.",
        flush=True,
    )

    model = build_network()
    model.compile(
        optimizer=optimizer,
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        jit_compile=_JIT_COMPILE.value,
    )
    budget = dpc.keras.PrivacyBudget(_EPSILON.value, _DELTA.value, batches)
    tracker = tracking.Tracker(
        test,
        unprotected=training if _SHOW_TRUE_NORMS.value else None,
        quantile=_TARGET_QUANTILE.value,
    )
    progress = tracking.Progress("training", steps, tracker, _ACCUMULATION_STEPS.value)
    started = time.monotonic()
    model.fit(
        batches,
        epochs=_EPOCHS.value,
        callbacks=[budget, tracker, progress],
        verbose=0,
    )
    private_seconds = time.monotonic() - started

    started = time.monotonic()
    baseline = _train_baseline(training, test) if _BASELINE_EPOCHS.value else None
    baseline_seconds = time.monotonic() - started
    return report.Run(
        flags={flag.name: flag.value for flag in _FLAGS},
        derived={
            "train_size": size,
            "test_size": len(test[0]),
            "sampling_rate": batches.scheme.rate,
            "expected_batch_size": batches.expected_batch_size,
            "physical_batch_size": batches.physical_batch_size,
            "steps": steps,
            "noise_multiplier": noise_multiplier,
            "gradient_noise_multiplier": optimizer.gradient_noise_multiplier,
            "count_stddevs": optimizer.count_stddevs,
            "learning_rate": _learning_rate(),
            "parameters": model.count_params(),
        },
        rows=tracker.rows,
        statement=budget.statement,
        classes=_CLASSES,
        baseline=baseline,
        baseline_text=f"Adam, {_BASELINE_EPOCHS.value} epochs, no clipping, no noise",
        seconds={
            "private training": private_seconds,
            "comparison": baseline_seconds,
            "all": time.monotonic() - keras_examples.STARTED,
        },
    )


def _learning_rate() -> float:
    if _LEARNING_RATE.value is not None:
        return _LEARNING_RATE.value
    return _OPTIMIZERS[_OPTIMIZER.value][1]


def _private_optimizer(noise_multiplier, expected_batch_size):
    options = {"momentum": _MOMENTUM.value} if _OPTIMIZER.value == "sgd" else {}
    rule = clip_rule()
    if noise_multiplier > 0:
        counts = rule.count_stddevs(expected_batch_size)
        try:
            dpc.accounting.split_noise_multiplier(noise_multiplier, counts)
        except ValueError as error:
            raise SystemExit(
                f"flag --batch_size={_BATCH_SIZE.value}: too small for --clip=quantile "
                f"at --epsilon={_EPSILON.value:g}, for example --batch_size=256 (or "
                f"--clip=automatic, which counts nothing). {error}"
            ) from error
    return _OPTIMIZERS[_OPTIMIZER.value][0](
        _learning_rate(),
        clip=rule,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        accumulation_steps=_ACCUMULATION_STEPS.value,
        seed=_SEED.value,
        **options,
    )


def _train_baseline(training, test) -> float:
    """Trains the same network without privacy and returns its test accuracy."""
    model = build_network()
    model.compile(
        optimizer=tf.keras.optimizers.Adam(_BASELINE_LEARNING_RATE),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    epochs = _BASELINE_EPOCHS.value
    steps = epochs * -(-len(training[0]) // _BASELINE_BATCH_SIZE)
    model.fit(
        *training,
        batch_size=_BASELINE_BATCH_SIZE,
        epochs=epochs,
        callbacks=[tracking.Progress("without privacy", steps)],
        verbose=0,
    )
    return float(model.evaluate(*test, batch_size=len(test[0]), verbose=0)[1])


def main(argv: list[str]) -> None:
    """Trains, prints the report and writes the files."""
    if argv[1:]:
        raise SystemExit(
            f"Unknown argument {argv[1]!r}. Settings are flags, for example "
            "--epsilon=3."
        )
    directory = pathlib.Path(_OUTPUT_DIR.value)
    try:
        files.prepare_directory(directory)
    except OSError as error:
        raise SystemExit(
            f"flag --output_dir={directory}: {error.strerror}; for example "
            "--output_dir=runs/digits."
        ) from error
    run = train()
    try:
        text = report.write(run, directory)
    except OSError as error:
        raise SystemExit(str(error)) from error
    print(f"\n{text}")
    written = (report.REPORT, report.PLOT, report.CONFIG, report.HISTORY)
    print(f"Written to {directory}: {', '.join(written)}")


if __name__ == "__main__":
    app.run(main)
