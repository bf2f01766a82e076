r"""Trains a convolutional network on handwritten digits with differential privacy.

    python -m keras_examples.digits --epsilon=3 --clip=quantile

The data are the 1797 images of 8 by 8 pixels that come with scikit-learn, split once
and for all into training and test images. The network is an ordinary Keras model; a
private optimizer, batches drawn by Poisson sampling and a `PrivacyBudget` make its
training private. Four files in --output_dir have the results: report.txt, digits.png,
history.csv and config.json.

The defaults suit epsilon 3. Stronger privacy needs fewer and smaller steps, for example
--epsilon=1 --epochs=20 --learning_rate=0.05.

With --replicas=2 or --workers=2 the same training runs on two devices, or in two
processes that stand for two machines; docs/devices.md has the rest.

Not everything that a run shows is private; the report names the private parts. In
particular, the default settings were found by trying several on this very data set,
which costs no privacy here, since the data are public, but would with private data.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
from sklearn import datasets, model_selection

import driver_kit
import tfdpclip as dpc
from driver_kit import devices, programs, settings
from driver_kit.lazy import tf
from keras_examples import digits_report, tracking

# Learning rates that suit the remaining defaults.
_OPTIMIZERS = {
    "sgd": ("DPSGD", 0.07),
    "adam": ("DPAdam", 0.01),
    "adamw": ("DPAdamW", 0.01),
    "adagrad": ("DPAdagrad", 0.2),
    "rmsprop": ("DPRMSprop", 0.01),
}
_CLASSES = 10
_TEST_SHARE = 0.2
_BASELINE_BATCH_SIZE = 32
_BASELINE_LEARNING_RATE = 0.003


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    epsilon: float = settings.number(
        3.0,
        "Privacy budget; noise is calibrated to it. inf: no noise, not private.",
        above=0,
        infinite=True,
    )
    delta: float = settings.number(
        1e-5,
        "Probability with which epsilon may fail; well below 1 / number of images.",
        above=0,
        below=1,
    )
    clip: str = settings.choice(
        "quantile",
        ("quantile", "fixed", "automatic"),
        "How gradients are clipped: to a privately followed quantile of their norms, "
        "to a fixed norm, or all scaled to nearly the same norm.",
    )
    clip_norm: float = settings.number(
        0.1,
        "The clip norm: of the first step for --clip=quantile, of all for "
        "--clip=fixed.",
        above=0,
        only_with=("clip", "fixed", "quantile"),
    )
    target_quantile: float = settings.number(
        0.5,
        "The share of gradients that --clip=quantile tries to leave unclipped.",
        least=0,
        most=1,
        only_with=("clip", "quantile"),
    )
    clip_learning_rate: float = settings.number(
        0.2,
        "How fast --clip=quantile moves the clip norm.",
        above=0,
        only_with=("clip", "quantile"),
    )
    normalize: bool = settings.switch(
        True,
        "Whether to divide clipped gradients by the clip norm, so that the learning "
        "rate need not change with it.",
        only_with=("clip", "fixed", "quantile"),
    )
    batch_size: int = settings.count(
        256,
        "Expected number of images per step; the sampling rate is this divided by the "
        "number of training images.",
    )
    accumulation_steps: int = settings.count(
        1,
        "Into how many pieces to cut each batch, to save memory. Changes nothing else.",
    )
    epochs: int = settings.count(
        60, "How often to go through the training images, on average."
    )
    optimizer: str = settings.choice(
        "sgd", tuple(_OPTIMIZERS), "The optimizer that gets private gradients."
    )
    learning_rate: float | None = settings.number(
        None,
        "Learning rate. By default one that suits the optimizer: "
        + ", ".join(f"{name} {rate:g}" for name, (_, rate) in _OPTIMIZERS.items()),
        good=0.07,
        above=0,
    )
    momentum: float = settings.number(
        0.9,
        "Momentum of --optimizer=sgd.",
        least=0,
        below=1,
        only_with=("optimizer", "sgd"),
    )
    jit_compile: bool = settings.switch(
        False,
        "Whether to compile steps with XLA. Takes seconds, and pays off in long runs.",
    )
    replicas: int = settings.count(
        1,
        "On how many devices of this machine to train: GPUs if there are so many, else "
        "parts of the CPU, which are no faster.",
    )
    workers: int = settings.count(
        1,
        "In how many processes of this machine to train, as if each were a machine; "
        "all but this one are started, and write to worker_1.txt and so on.",
    )
    seed: int | None = settings.seed()
    baseline_epochs: int = settings.count(
        20,
        "For how long to train the same network without privacy, to compare; 0: not.",
        least=0,
    )
    show_true_norms: bool = settings.switch(
        True,
        "Whether to measure the training images' gradient norms without noise, for the "
        "plot. This is not private.",
    )
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.words(
        "runs/digits", "Where to write report.txt, digits.png and the rest."
    )

    def rate(self) -> float:
        """The learning rate, as given or by default for the optimizer."""
        if self.learning_rate is not None:
            return self.learning_rate
        return _OPTIMIZERS[self.optimizer][1]

    def clip_rule(self) -> dpc.ClipRule:
        """The clip rule."""
        if self.clip == "quantile":
            return dpc.QuantileClip(
                target_quantile=self.target_quantile,
                initial_norm=self.clip_norm,
                learning_rate=self.clip_learning_rate,
                normalize=self.normalize,
            )
        if self.clip == "fixed":
            return dpc.FixedClip(self.clip_norm, normalize=self.normalize)
        return dpc.AutomaticClip()


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


def train(used: Settings) -> digits_report.Run:
    """Trains as the settings say.

    Raises:
      UsageError: if the settings do not go together.
    """
    if devices.cluster_size() == 1 and used.workers > 1:
        with devices.local_workers(
            used.workers, "keras_examples.digits", used, used.output_dir
        ):
            run = train(dataclasses.replace(used, workers=1))
        return dataclasses.replace(run, flags=dataclasses.asdict(used))
    # First: TensorFlow divides devices before it computes anything.
    strategy = devices.strategy(used.replicas)
    alone = strategy.num_replicas_in_sync == 1
    # All workers begin with the same weights, which strategies see to.
    if used.seed is not None:
        tf.keras.utils.set_random_seed(used.seed)
    training, test = load_data()
    size = len(training[0])
    if used.batch_size > size:
        raise settings.UsageError(
            f"flag --batch_size={used.batch_size}: there are only {size} training "
            "images, for example --batch_size=256."
        )

    # The sampling and the noise depend on public numbers only.
    batches = dpc.sampling.Poisson(used.batch_size / size).batches(
        training, accumulation_steps=used.accumulation_steps, seed=used.seed
    )
    given = batches if alone else batches.distribute(strategy)
    steps = used.epochs * batches.steps_per_epoch
    noise_multiplier = dpc.accounting.noise_multiplier(
        used.epsilon, used.delta, steps, batches
    )
    with strategy.scope():
        optimizer = _private_optimizer(
            used, noise_multiplier, batches.expected_batch_size
        )
    print(
        f"{size} training and {len(test[0])} test images. {steps} steps of "
        f"{batches.expected_batch_size:g} images on average, noise multiplier "
        f"{noise_multiplier:.4g}, for epsilon {used.epsilon:g}.",
        flush=True,
    )

    with strategy.scope():
        model = build_network()
        model.compile(
            optimizer=optimizer,
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
            jit_compile=used.jit_compile,
        )
    budget = dpc.keras.PrivacyBudget(used.epsilon, used.delta, batches)
    tracker = tracking.Tracker(
        test,
        unprotected=training if used.show_true_norms else None,
        quantile=used.target_quantile,
    )
    progress = tracking.Progress("training", steps, tracker, used.accumulation_steps)
    # Under a strategy the data never end.
    per_epoch = None
    if not alone:
        per_epoch = batches.steps_per_epoch * used.accumulation_steps
    started = time.monotonic()
    model.fit(
        given,
        epochs=used.epochs,
        steps_per_epoch=per_epoch,
        callbacks=[budget, tracker, progress],
        shuffle=False,  # Batches are drawn; Keras 3 warns that it will not shuffle.
        verbose=0,
    )
    private_seconds = time.monotonic() - started
    if not devices.is_chief():
        raise SystemExit(0)  # The chief writes the results.

    started = time.monotonic()
    baseline = _train_baseline(used, training, test) if used.baseline_epochs else None
    baseline_seconds = time.monotonic() - started
    return digits_report.Run(
        flags=dataclasses.asdict(used),
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
            "learning_rate": used.rate(),
            "parameters": model.count_params(),
        },
        rows=tracker.rows,
        statement=budget.statement(),
        classes=_CLASSES,
        baseline=baseline,
        baseline_text=f"Adam, {used.baseline_epochs} epochs, no clipping, no noise",
        seconds={
            "private training": private_seconds,
            "comparison": baseline_seconds,
            "all": time.monotonic() - driver_kit.STARTED,
        },
    )


def _private_optimizer(used, noise_multiplier, expected_batch_size):
    options = {"momentum": used.momentum} if used.optimizer == "sgd" else {}
    rule = used.clip_rule()
    if noise_multiplier > 0:
        accounting, z = dpc.accounting, noise_multiplier
        try:
            counts = accounting.count_stddevs(rule, expected_batch_size, z)
            accounting.split_noise_multiplier(z, counts)
        except ValueError as error:
            raise settings.UsageError(
                f"flag --batch_size={used.batch_size}: too small for --clip=quantile "
                f"at --epsilon={used.epsilon:g}, for example --batch_size=256 (or "
                f"--clip=automatic, which counts nothing). {error}"
            ) from error
    return getattr(dpc.keras, _OPTIMIZERS[used.optimizer][0])(
        used.rate(),
        clip=rule,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        accumulation_steps=used.accumulation_steps,
        seed=used.seed,
        **options,
    )


def _train_baseline(used, training, test) -> float:
    """Trains the same network without privacy and returns its test accuracy."""
    model = build_network()
    model.compile(
        optimizer=tf.keras.optimizers.Adam(_BASELINE_LEARNING_RATE),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    epochs = used.baseline_epochs
    steps = epochs * -(-len(training[0]) // _BASELINE_BATCH_SIZE)
    model.fit(
        *training,
        batch_size=_BASELINE_BATCH_SIZE,
        epochs=epochs,
        callbacks=[tracking.Progress("without privacy", steps)],
        verbose=0,
    )
    return float(model.evaluate(*test, batch_size=len(test[0]), verbose=0)[1])


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, train, argv)


if __name__ == "__main__":
    main()
