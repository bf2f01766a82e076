"""Problems that searches and studies train many times: heads, or whole networks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from driver_kit import settings
from keras_examples import features, network_sizes, pretrained, trainers, transfer_data
from tfdpclip.accounting import Ledger, PrivacyStatement


@dataclasses.dataclass(frozen=True)
class Settings(pretrained.Settings):
    """The flags that choose a problem."""

    trainable: str = settings.choice(
        "head",
        ("head", "film", "all"),
        "What trains in every run: a head on --features or on digits' pixels; or "
        "scales and offsets of --model, and its head; or all of it.",
    )
    features: str | None = settings.words(
        None,
        "A .npz file with features, labels and split, for --trainable=head; digits by "
        "default.",
        good="features.npz",
    )
    variant: str = settings.choice(
        "plain", ("plain", "hard", "imbalanced"), "Of the digits, --trainable=head."
    )
    dataset: str = settings.choice(
        "digits",
        ("digits", "cifar100", "mnist", "sun397", "folder"),
        "Which images, for --trainable=film; mnist: also Fashion-MNIST, as --data_dir "
        "has it.",
    )
    model: str = settings.choice(
        "vit_micro",
        tuple(network_sizes.MODELS),
        "Which network, for --trainable=film.",
    )


class Problem(Protocol):
    """The trained model and its data.

    Attributes:
      name: of the data and, if it trains, the network.
      trained: the trained part, as the end of a sentence.
      size: number of training examples.
      labels: theirs.
      public: whether they are public.
      spent: whether anything was spent on them before.
      digest: by which to know data and network again.
    """

    name: str
    trained: str
    size: int
    labels: np.ndarray
    public: bool
    spent: bool

    @property
    def digest(self) -> str: ...

    def ledger(self, delta: float) -> Ledger:
        """A new ledger with the earlier privacy cost."""

    def statement(self, delta: float, **mechanism: Any) -> PrivacyStatement:
        """The privacy statement of a run, with the earlier cost."""

    def trainer(self, how: trainers.Plan, clip: float | str) -> trainers.Trainer:
        """A trainer with a plan and a clip norm or rule."""

    def caveats(self) -> list[str]:
        """The caveats of a report."""


class Heads:
    """Heads on features; the features' privacy cost counts."""

    trained = "a linear head that starts at zero"

    def __init__(self, found: features.Features):
        self.features = found
        self.name, self.public, self.spent = found.name, found.public, found.spent
        self.labels = found.train[1]
        self.size = len(self.labels)
        self.digest = found.digest
        self.ledger, self.statement = found.ledger, found.statement
        self.caveats = found.caveats

    def trainer(self, how: trainers.Plan, clip: float | str) -> trainers.Trainer:
        return trainers.HeadTrainer(self.features, how, clip)


class Networks:
    """A network that was trained on public data, from which each run starts.

    *Formal guarantees*

    * Runs are independent: all trained variables are reset before each.
    """

    spent = False

    def __init__(self, network: pretrained.Network, used: Settings):
        self.network, self._physical = network, used.physical_batch_size
        words = {"film": "scales, offsets and the head", "all": "all"}
        self.trained = f"{words[used.trainable]} of {network.origin}"
        self.name = f"{network.data.name}, {used.model}"
        if used.image_size is not None:
            self.name += f" at {used.image_size} pixels"
        self.public = used.dataset == "digits"
        self.labels = transfer_data.labels_of(network.data.train)
        self.size = len(self.labels)

    @property
    def digest(self) -> str:
        return self.network.digest

    def ledger(self, delta: float) -> Ledger:
        return Ledger(delta)

    def statement(self, delta: float, **mechanism: Any) -> PrivacyStatement:
        steps = mechanism.pop("steps")
        ledger = self.ledger(delta)
        ledger.begin(**mechanism)
        ledger.record(steps)
        ledger.assume(
            f"the network before its private training ({self.network.origin}) has seen "
            "none of these records"
        )
        return ledger.statement()

    def trainer(self, how: trainers.Plan, clip: float | str) -> trainers.Trainer:
        return trainers.NetworkTrainer(self.network, how, clip, self._physical)

    def caveats(self) -> list[str]:
        return [
            f"{self.network.counts}.",
            "The network's weights before private training must come from public data: "
            "no statement covers them.",
        ]


def make(
    used: Settings,
    check_size: Callable[[int], None],
    kept: str | os.PathLike[str] | None = None,
) -> Problem:
    """The problem that flags choose.

    Args:
      used: the flags.
      check_size: raises for flags that do not go with so many training examples.
      kept: as for `pretrained.prepare`.

    Raises:
      UsageError: if flags do not go together, or files are wrong.
    """
    check(used)
    if used.trainable != "head":
        return Networks(pretrained.prepare(used, check_size, kept), used)
    if used.features is not None:
        heads = Heads(features.read(used.features))
    else:
        heads = Heads(features.digits(used.variant))
    check_size(heads.size)
    return heads


def check(used: Settings) -> None:
    """Raises for flags that would have no effect.

    Raises:
      UsageError: if there is one.
    """
    if used.trainable == "head":
        idle = [f.name for f in dataclasses.fields(pretrained.Settings)]
        idle.remove("trainable")
        fix = (
            "a head trains on --features, which keras_examples.frozen_features writes; "
            "for a network give --trainable=film."
        )
    else:
        idle = ["features", "variant"]
        fix = "it is for heads: leave it out, or give --trainable=head."
    defaults = settings.of(type(used))
    for name in idle:
        value = getattr(used, name)
        if value != defaults[name].default:
            raise settings.UsageError(f"flag --{name}={value} has no effect: {fix}")
