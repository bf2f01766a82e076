"""A run that clips batches: its data, optimizer and training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tfdpclip as dpc
from driver_kit import settings
from keras_examples import (
    batch_accounts,
    batch_networks,
    image_data,
    local_updates,
    sparsification,
    training,
)
from keras_examples.batch_settings import (
    Common,
    OneRun,
    by_layer,
    check,
    group_spec,
    local_flag,
    read_layers,
)
from keras_examples.similar_layers import similar_layers
from tfdpclip.clipping import make_groups

Arrays = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Data:
    """Images, of which some are public.

    Attributes:
      images: as they were read; for training, the private ones.
      public: normalised images, 32 by 32, and labels.
      test: the same.
    """

    images: image_data.Images
    public: Arrays
    test: Arrays

    @property
    def private(self) -> Arrays:
        """Images of uint8, and labels."""
        return self.images.train

    @property
    def channels(self) -> int:
        """1 or 3."""
        return self.private[0].shape[-1]


@dataclasses.dataclass(frozen=True)
class Private:
    """A finished private run.

    Attributes:
      trained: the results.
      model: the network.
      layers: L.
      account: arguments of `batch_accounts`: sigma after `equal_privacy`, by how many
        layers it is divided, m, N and T.
      frozen: the share of frozen weights.
    """

    trained: training.Trained
    model: tf.keras.Model
    layers: int
    account: tuple[float, int, int, int, int]
    frozen: float = 0.0


def load(used: Common) -> Data:
    """The images, split always alike."""
    one = used.dataset in ("mnist", "fashion_mnist") or used.network == "bn_lenet5"
    shape = (32, 32, 1 if one else 3)
    images = image_data.load(used.dataset, used.data_dir, shape)
    if used.examples is not None:
        # In an order of their own: files may be sorted by class.
        order = np.random.default_rng(1).permutation(len(images.train[1]))
        x, y = (part[order[: used.examples]] for part in images.train)
        images = dataclasses.replace(images, train=(x, y))
    private, public = split_public(images.train, used.public_share)
    return Data(
        dataclasses.replace(images, train=private),
        (batch_networks.normalized(public[0]), public[1]),
        (batch_networks.normalized(images.test[0]), images.test[1]),
    )


def split_public(train: Arrays, share: float) -> tuple[Arrays, Arrays]:
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


def _begin(used: Common) -> None:
    # Layers get the same names in every run of a process.
    tf.keras.backend.clear_session()
    if used.seed is not None:
        tf.keras.utils.set_random_seed(used.seed)


def build(used: Common, channels: int) -> tf.keras.Model:
    """The network."""
    bias = used.conv_bias and used.network != "resnet18"
    return batch_networks.NETWORKS[used.network](channels, used.norm, bias)


def draw(used: OneRun, private: Arrays) -> dpc.sampling.Batches:
    """Batches of raw images in [0, 1]."""
    data = (training.scaled(private[0]), private[1])
    size, m = len(private[0]), used.batch_size
    scheme: dpc.sampling.SamplingScheme = dpc.sampling.Poisson(m / size)
    if used.sampling != "poisson":
        again = used.sampling == "with_replacement"
        scheme = dpc.sampling.FixedSize(m, size, replacement=again)
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


def layers_and_sigma(
    used: OneRun, model: tf.keras.Model, public: Arrays | None = None
) -> tuple[Mapping[str, list[str]], float]:
    """The names of layers and of their variables, and sigma after --equal_privacy.

    Args:
      used: the settings.
      model: the network.
      public: public images and labels, for --layers=groups:4.
    """
    # Keras 3 names a variable's layers in its path, after the model.
    paths = [getattr(v, "path", v.name) for v in model.trainable_variables]
    names = [path.removeprefix(f"{model.name}/") for path in paths]
    layers = make_groups(group_spec(used), names).as_mapping()
    count = read_layers(used.layers)
    if count is not None:
        model.compile(loss=training.LOSS)
        norms = dpc.keras.public_gradient_norms(model, public)
        layers = similar_layers(names, norms, count)
    sigma = used.sigma
    if used.equal_privacy and not by_layer(used.clip):
        sigma /= math.sqrt(len(layers))
    return layers, sigma


def private_optimizer(
    used: OneRun,
    layers: Mapping[str, list[str]],
    sigma: float,
    batches: dpc.sampling.Batches,
) -> Any:
    """Private SGD with the paper's settings."""
    spec = group_spec(used) if read_layers(used.layers) is None else layers
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
        sigma, len(layers) if by_layer(used.clip) else 1
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


def callbacks(used: OneRun, public: Arrays) -> list[tf.keras.callbacks.Callback]:
    """The callbacks that take statistics and norms from public data."""
    found: list[tf.keras.callbacks.Callback] = []
    if used.norm == "batch":
        found.append(dpc.keras.PublicBatchStatistics(public))
    if used.clip in ("adaptive", "adaptive_zhang", "scaled"):
        found.append(dpc.keras.PublicGradientNorms(public))
    return found


def transform(random: bool) -> Callable:
    """The change to batches: crops and mirror images, or a border."""

    def apply(x, y, weight=None):
        x = batch_networks.augment(x) if random else _centred(x)
        return (x, y) if weight is None else (x, y, weight)

    return apply


def _centred(x):
    missing = batch_networks.SIDE - x.shape[1]
    edges = [missing // 2, missing - missing // 2]
    mean, deviation = batch_networks.PIXELS[x.shape[-1]]
    x = tf.pad(x, [[0, 0], edges, edges, [0, 0]])
    return (x - tf.constant(mean)) / tf.constant(deviation)


def train(
    used: OneRun,
    data: Data,
    further: Sequence[tf.keras.callbacks.Callback] = (),
    **options: Any,
) -> Private:
    """A private run; may go on after a kill (`unfinished`) where nothing is frozen.

    Args:
      used: its settings.
      data: the training data.
      further: callbacks, behind those that the method needs.
      **options: for `training.fit`.

    Raises:
      UsageError: if the settings do not go together.
    """
    check(used)
    training.check_batch_size(used.batch_size, len(data.private[0]))
    _begin(used)
    model = build(used, data.channels)
    further = list(further)
    if used.sparsify is not None:
        divisor = {"individual": used.batch_size, "group": used.groups, "batch": 1}
        model, frozen = sparsification.freezable(model)
        further.append(
            sparsification.Sparsifier(frozen, used.sparsify, divisor[used.unit])
        )
    layers, sigma = layers_and_sigma(used, model, data.public)
    if local_flag(used):
        model = local_updates.LocalUpdates(
            model,
            used.local_steps,
            used.local_rate,
            used.local_method,
            used.random_layer,
        )
    batches = draw(used, data.private)
    optimizer = private_optimizer(used, layers, sigma, batches)
    model.compile(optimizer, training.LOSS)
    trained = training.fit(
        model,
        batches,
        used.epochs,
        data.test,
        delta=used.delta,
        callbacks=[*callbacks(used, data.public), *further],
        transform=transform(used.augment),
        accountant=batch_accounts.accountants(
            optimizer.noise_multiplier, used.sampling
        )[0],
        **options,
    )
    account = (
        sigma,
        len(layers) if by_layer(used.clip) else 1,
        used.batch_size,
        len(data.private[0]),
        batches.steps_per_epoch * used.epochs,
    )
    share = further[-1].share if used.sparsify is not None else 0.0
    return Private(trained, model, len(layers), account, share)


def train_plainly(
    used: Common,
    batch_size: int,
    epochs: int,
    data: Data,
    further: Sequence[tf.keras.callbacks.Callback] = (),
    **options: Any,
) -> training.Trained:
    """SGD without privacy, for comparison; `options` are for `training.fit`."""
    _begin(used)
    model = build(used, data.channels)
    x, y = data.private
    steps = -(-len(x) // batch_size)
    rate = _decaying(used.learning_rate, used.learning_rate_decay, steps)
    model.compile(tf.keras.optimizers.SGD(rate), training.LOSS)
    batches = (
        tf.data.Dataset.from_tensor_slices((training.scaled(x), y))
        .shuffle(len(x))
        .batch(batch_size)
    )
    return training.fit(
        model,
        batches,
        epochs,
        data.test,
        delta=None,
        callbacks=further,
        transform=transform(used.augment),
        **options,
    )
