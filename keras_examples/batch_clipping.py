r"""Clips individual gradients, those of batches or of groups, layer by layer or not.

    python -m keras_examples.batch_clipping --data_dir=DIR
    python -m keras_examples.batch_clipping --dataset=digits --network=bn_lenet5 \
        --sigma=2.5 --epochs=5 --baseline_epochs=5

The experiments of Nguyen, Nguyen, Nguyen and van Dijk (2023), "Batch Clipping and
Adaptive Layerwise Clipping for Differential Private Stochastic Gradient Descent".
Their sigma is relative to the sensitivity 2 C: the noise on layer h has stddev
2 C_h sigma. Most of their sigmas are far too small for any privacy; the report has
their account in Gaussian differential privacy (f-DP) and this library's, side by side.

The paper counts ResNet-18's layers as its 62 weight tensors (--layers=tensor), those of
BN-LeNet-5 as 8 modules (--layers=module). Its clip norm for ResNet-18 is 0.095 in
places and 0.0095 in others; results agree with the former.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import tensorflow as tf

import tfdpclip as dpc
from driver_kit import programs, settings
from keras_examples import batch_accounts, batch_networks, image_data, training
from tfdpclip.clipping import make_groups

CLIPS = ("full", "layerwise", "adaptive", "adaptive_zhang", "scaled")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    network: str = settings.choice(
        "resnet18", tuple(batch_networks.NETWORKS), "Which network."
    )
    norm: str = settings.choice("batch", ("batch", "none"), "Its normalisation.")
    conv_bias: bool = settings.switch(
        True, "Whether convolutions of convnet and bn_lenet5 have a bias."
    )
    dataset: str = settings.choice(
        "cifar10",
        ("cifar10", "mnist", "digits", "synthetic"),
        "Which images; the last two offline.",
    )
    data_dir: str | None = settings.words(
        None,
        f"Directory with {image_data.CIFAR10_LAYOUT}; for MNIST, "
        f"{image_data.MNIST_LAYOUT}.",
    )
    unit: str = settings.choice(
        "batch",
        ("individual", "batch", "group"),
        "Whose gradient is clipped: each example's, the batch's, or each group's.",
    )
    groups: int = settings.count(8, "Groups per batch for --unit=group.", least=2)
    clip: str = settings.choice(
        "adaptive",
        CLIPS,
        "One clip norm for all (full), for each layer (layerwise), in proportion to "
        "public gradient norms (adaptive; adaptive_zhang without the master clip "
        "norm), or one clip after scaling layers alike (scaled).",
    )
    clip_norm: float = settings.number(0.095, "The (master) clip norm C.", above=0)
    layers: str = settings.choice(
        "module", ("module", "tensor"), "What counts as a layer."
    )
    sigma: float = settings.number(
        0.01875, "The paper's sigma: noise stddev over 2 C_h.", above=0
    )
    equal_privacy: bool = settings.switch(
        False,
        "Whether full and scaled clipping get sigma / sqrt(L), as private as layerwise "
        "clipping with sigma.",
    )
    batch_size: int = settings.count(64, "Images per step, m.")
    physical_batch_size: int = settings.count(
        256, "Most images at a time for --unit=individual."
    )
    sampling: str = settings.choice(
        "fixed", ("fixed", "poisson"), "How batches are drawn."
    )
    learning_rate: float = settings.number(0.025, "The learning rate.", above=0)
    learning_rate_decay: float = settings.number(
        0.9, "Its factor after each epoch.", above=0, most=1
    )
    clip_decay: float = settings.number(
        1.0, "The clip norm's factor after each epoch.", above=0, most=1
    )
    epochs: int = settings.count(50, "Epochs.")
    baseline_epochs: int = settings.count(
        50, "Epochs of SGD without privacy, to compare; 0: none.", least=0
    )
    public_share: float = settings.number(
        0.1, "Share of the training images to take as public.", above=0, below=1
    )
    augment: bool = settings.switch(True, "Whether to crop and mirror at random.")
    delta: float = settings.delta()
    seed: int | None = settings.seed()
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("batch_clipping")


def run(used: Settings) -> programs.Outcome:
    """Trains and reports."""
    _check(used)
    if used.seed is not None:
        tf.keras.utils.set_random_seed(used.seed)
    channels = 1 if used.dataset == "mnist" or used.network == "bn_lenet5" else 3
    images = image_data.load(used.dataset, used.data_dir, (32, 32, channels))
    channels = images.train[0].shape[-1]
    private, public = split_public(images.train, used.public_share)
    training.check_batch_size(used.batch_size, len(private[0]))
    model = build(used, channels)
    batches = draw(used, private)
    layers, sigma = layers_and_sigma(used, model)
    optimizer = private_optimizer(used, layers, sigma, batches)
    model.compile(optimizer, training.LOSS)
    test = (batch_networks.normalized(images.test[0]), images.test[1])
    public = (batch_networks.normalized(public[0]), public[1])
    trained = training.fit(
        model,
        batches,
        used.epochs,
        test,
        delta=used.delta,
        callbacks=callbacks(used, public),
        transform=_transform(used.augment),
        # So little noise is beyond what privacy loss distributions can resolve.
        accountant="pld" if optimizer.noise_multiplier > 0.2 else "rdp",
    )
    accounts = batch_accounts.account(
        sigma,
        len(layers) if _by_layer(used) else 1,
        used.batch_size,
        len(private[0]),
        batches.steps_per_epoch * used.epochs,
        used.delta,
        "example" if used.unit == "individual" else optimizer.unit,
    )
    runs = {f"{used.unit}, {used.clip}": trained.rows}
    if used.baseline_epochs:
        print("SGD without privacy:", flush=True)
        runs["SGD"] = _baseline(used, private, test, channels).rows
    return _outcome(used, images, model, trained, accounts, runs, len(layers), private)


def _check(used):
    if used.unit == "individual" and used.norm == "batch":
        raise settings.UsageError(
            "flag --unit=individual: batch normalisation combines examples, so that no "
            "example has a gradient of its own; use --norm=none, or --unit=batch or "
            "--unit=group."
        )
    if used.unit == "group" and used.batch_size % used.groups:
        raise settings.UsageError(
            f"flag --groups={used.groups} must divide --batch_size={used.batch_size}."
        )


def split_public(train, share: float):
    """Private and public training images, always split alike."""
    x, y = train
    order = np.random.default_rng(0).permutation(len(x))
    cut = max(1, round(share * len(x)))
    if cut == len(x):
        raise settings.UsageError(
            f"flag --public_share={share} leaves no private images, for example 0.1."
        )
    public, private = order[:cut], order[cut:]
    return (x[private], y[private]), (x[public], y[public])


def build(used: Settings, channels: int) -> tf.keras.Model:
    """The network."""
    bias = used.conv_bias and used.network != "resnet18"
    return batch_networks.NETWORKS[used.network](channels, used.norm, bias)


def draw(used: Settings, private) -> dpc.sampling.Batches:
    """Batches of raw images in [0, 1]."""
    data = (training.scaled(private[0]), private[1])
    size, m = len(private[0]), used.batch_size
    scheme = dpc.sampling.Poisson(m / size)
    if used.sampling == "fixed":
        scheme = dpc.sampling.FixedSize(m, size)
    if used.unit == "individual":
        return training.draw(scheme, data, used.physical_batch_size, used.seed)
    pieces = used.groups if used.unit == "group" else 1
    independent = pieces > 1 and used.sampling == "poisson"
    return scheme.batches(
        data,
        accumulation_steps=pieces,
        independent_groups=independent,
        seed=used.seed,
    )


def _by_layer(used) -> bool:
    return used.clip not in ("full", "scaled")


def layers_and_sigma(used: Settings, model: tf.keras.Model):
    """The layers' names, and sigma after --equal_privacy."""
    spec = "variable" if used.layers == "tensor" else "layer"
    # Keras 3 names a variable's layers in its path.
    names = [getattr(v, "path", v.name) for v in model.trainable_variables]
    layers = make_groups(spec, names).names
    sigma = used.sigma
    if used.equal_privacy and not _by_layer(used):
        sigma /= math.sqrt(len(layers))
    return layers, sigma


def private_optimizer(used: Settings, layers, sigma: float, batches):
    """Private SGD as the paper has it."""
    spec = "variable" if used.layers == "tensor" else "layer"
    steps = batches.steps_per_epoch
    norm = _decaying(used.clip_norm, used.clip_decay, steps)
    rule = {
        "full": lambda: dpc.FixedClip(norm),
        "layerwise": lambda: dpc.LayerwiseClip(dpc.FixedClip(norm), groups=spec),
        "adaptive": lambda: dpc.PublicNormClip(norm, groups=spec),
        "adaptive_zhang": lambda: dpc.PublicNormClip(None, groups=spec),
        "scaled": lambda: dpc.ScaledClip(None, norm, groups=spec),
    }[used.clip]()
    z = dpc.accounting.noise_multiplier_from_layerwise_sigma(
        sigma, len(layers) if _by_layer(used) else 1
    )
    return dpc.keras.DPSGD(
        _decaying(used.learning_rate, used.learning_rate_decay, steps),
        clip=rule,
        noise_multiplier=z,
        expected_batch_size=(
            batches.expected_batch_size if used.unit == "individual" else None
        ),
        accumulation_steps=batches.accumulation_steps,
        unit="example" if used.unit == "individual" else "batch",
        seed=used.seed,
    )


def _decaying(value, factor, steps):
    if factor == 1:
        return value
    return tf.keras.optimizers.schedules.ExponentialDecay(
        value, steps, factor, staircase=True
    )


def callbacks(used: Settings, public) -> list[tf.keras.callbacks.Callback]:
    """What takes statistics and norms from public data."""
    found: list[tf.keras.callbacks.Callback] = []
    if used.norm == "batch":
        found.append(dpc.keras.PublicBatchStatistics(public))
    if used.clip in ("adaptive", "adaptive_zhang", "scaled"):
        found.append(dpc.keras.PublicGradientNorms(public))
    return found


def _transform(random: bool):
    def apply(x, y, weight=None):
        if random:
            x = batch_networks.augment(x)
        else:
            x = _centred(x)
        return (x, y) if weight is None else (x, y, weight)

    return apply


def _centred(x):
    missing = batch_networks.SIDE - x.shape[1]
    edges = [missing // 2, missing - missing // 2]
    mean, deviation = batch_networks.PIXELS[x.shape[-1]]
    x = tf.pad(x, [[0, 0], edges, edges, [0, 0]])
    return (x - tf.constant(mean)) / tf.constant(deviation)


def _baseline(used, private, test, channels):
    model = build(used, channels)
    steps = -(-len(private[0]) // used.batch_size)
    model.compile(
        tf.keras.optimizers.SGD(
            _decaying(used.learning_rate, used.learning_rate_decay, steps)
        ),
        training.LOSS,
    )
    data = (
        tf.data.Dataset.from_tensor_slices((training.scaled(private[0]), private[1]))
        .shuffle(len(private[0]))
        .batch(used.batch_size)
    )
    return training.fit(
        model,
        data,
        used.baseline_epochs,
        test,
        delta=None,
        transform=_transform(used.augment),
    )


def _outcome(used, images, model, trained, accounts, runs, layers, private):
    title = f"{used.unit.capitalize()} clipping of {used.network}, {images.name}"
    accuracy = trained.accuracy.micro
    parameters = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    text = (
        f"{used.unit} clipping, {used.clip}, sigma {used.sigma:g}, C "
        f"{used.clip_norm:g}, m {used.batch_size}: test accuracy {accuracy:.2%} after "
        f"{used.epochs} epochs. {parameters:,} parameters in {layers} layers "
        f"(counted by {used.layers})."
    )
    if "SGD" in runs:
        text += f" SGD without privacy: {runs['SGD'][-1]['test_accuracy']:.2%}."
    findings = [
        text,
        "The paper's account and this library's are in accounts.csv and below. The "
        "paper's is a limit, not a bound, and counts an example replaced by another; "
        "state the relation with every epsilon.",
    ]
    if trained.statement.epsilon > 20:
        findings.append(
            f"epsilon is {trained.statement.epsilon:.3g}: this is NO meaningful "
            "privacy. The paper's settings with small sigma are to be read as "
            "optimisation experiments."
        )
    caveats = training.caveats(dataclasses.replace(images, train=private), used) + [
        f"{used.public_share:.0%} of the training images are taken as public: batch "
        "normalisation's statistics and gradient norms by layer come from them.",
        "SGD without privacy is outside every guarantee.",
    ]
    return programs.Outcome(
        title=title,
        findings=findings,
        privacy=trained.statement,
        caveats=caveats,
        tables={
            "history": [
                {"run": name, **row} for name, rows in runs.items() for row in rows
            ],
            "accounts": accounts,
        },
        figures={"history": training.curves(runs, title, 1 / images.classes)},
        shown=("accounts",),
        numbers={
            "parameters": parameters,
            "layers": layers,
            **training.report_accuracy(trained),
        },
    )


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
