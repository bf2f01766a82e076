"""The parts of a benchmark: data, preprocessing, a network, the paper's settings."""

from __future__ import annotations

import abc
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from driver_kit.lazy import tf
from driver_kit.settings import Setting
from tff_tasks.client_files import Feature
from tff_tasks.hdf5_files import open_files
from tff_tasks.sources import ClientSource, Examples, FileSource


class SettingsError(ValueError):
    """Settings do not fit the data or the installed packages."""


@dataclasses.dataclass(frozen=True)
class PaperSettings:
    """The settings of a benchmark in Andrew et al. (2021).

    Attributes:
      rounds: T.
      client_batch_size: examples in one step of a client.
      client_learning_rate: of Table 1.
      server_learning_rate: of Table 1, for undamped momentum 0.9.
      clip_range: the smallest and the largest fixed clip norm of Figure 6.
      fixed_clip: C*, the best fixed clip norm at the noise below.
      noise_multiplier: z*, the largest at which the loss of utility was acceptable,
        with 100 clients per round.
      private_clients: clients per round of Table 1, for epsilon 5 with a million
        clients; its noise multiplier is z* times private_clients / 100.
      clients_per_round: of the experiments.
      max_elements: examples that one client uses at most.
      shuffle_buffer: the size of the buffer that shuffles a client's examples.
      max_eval_examples: examples of one evaluation; None for all.
      eval_split: where metrics were measured.
      noise_grid: the noise multipliers of Figures 5 and 6.
    """

    rounds: int
    client_batch_size: int
    client_learning_rate: float
    server_learning_rate: float
    clip_range: tuple[float, float]
    fixed_clip: float
    noise_multiplier: float
    private_clients: int | None = None
    clients_per_round: int = 100
    max_elements: int | None = None
    shuffle_buffer: int = 1
    max_eval_examples: int | None = None
    eval_split: str = "test"
    noise_grid: tuple[float, ...] = (0.0, 0.01, 0.03, 0.1)

    def fixed_clips(self, count: int = 5) -> list[float]:
        """A geometric grid over `clip_range`, as in Figure 6."""
        return [float(clip) for clip in np.geomspace(*self.clip_range, count)]


@dataclasses.dataclass(frozen=True)
class Option:
    """A setting of a benchmark.

    Attributes:
      paper: its value in the code of the paper's time.
      later: its value in the later code.
      text: its description, for --help.
      choices: the allowed values; None for a whole number above 0, or a truth value.
      ours: its default here, where it differs from both codes; None: as in the code.
    """

    paper: Any
    later: Any
    text: str
    choices: tuple[str, ...] | None = None
    ours: Any = None

    def default(self, variant: str) -> Any:
        """The default in the "paper" variant or the "later" variant."""
        return getattr(self, variant) if self.ours is None else self.ours

    def setting(self) -> Setting:
        """The option as a flag, whose default follows from --variant."""
        text = f"{self.text} Default: {self.default('paper')}"
        if self.ours is not None:
            text += f" (in the paper's code {self.paper})"
        elif self.later != self.paper:
            text += f"; with --variant=later {self.later}"
        kind = type(self.paper)
        least = 1 if kind is int else None
        return Setting(
            None, f"{text}.", kind, good=self.paper, one_of=self.choices, least=least
        )

    def check(self, name: str, value: Any) -> Any:
        """Returns `value`, or raises a `ValueError` that names the option."""
        # With a default, None is no value.
        setting = dataclasses.replace(self.setting(), default=self.paper)
        return setting.check(name, value)


#: How max_elements is applied; see `tff_tasks.ordering`.
CAP = Option(
    "before",
    "after",
    "Whether --max_elements takes the first examples before shuffling, or any after.",
    ("before", "after"),
)


class Task(abc.ABC):
    """A benchmark with its options settled.

    Args:
      options: values by name; those of the paper where missing.
      synthetic: whether data are made up.

    Raises:
      ValueError: if an option is unknown or out of range.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[PaperSettings]
    #: The metric of the figures, and whether more of it is better.
    metric: ClassVar[str]
    higher_is_better: ClassVar[bool] = True
    options: ClassVar[Mapping[str, Option]] = {}
    #: The file, its splits by purpose, and the features read of an example.
    file_name: ClassVar[str | None] = None
    splits: ClassVar[Mapping[str, str]] = {"train": "train", "test": "test"}
    features: ClassVar[Mapping[str, Feature]] = {}

    def __init__(self, options: Mapping[str, Any] | None = None, *, synthetic=False):
        given = dict(options or {})
        unknown = sorted(set(given) - set(self.options))
        if unknown:
            known = ", ".join(self.options) or "none"
            raise ValueError(
                f"{unknown[0]} is no option of {self.name}; its options: {known}."
            )
        self.settings = {
            name: option.check(name, given.get(name, option.default("paper")))
            for name, option in self.options.items()
        }
        self.synthetic = synthetic

    @classmethod
    def option_defaults(cls, variant: str) -> dict[str, Any]:
        """The options' values in the "paper" variant or the "later" variant."""
        return {name: o.default(variant) for name, o in cls.options.items()}

    def load(self, data_dir: str | None) -> dict[str, ClientSource]:
        """The splits, by purpose: "train", "test" and, where there is one, "heldout".

        Args:
          data_dir: the directory of the files; not used for made-up data.

        Raises:
          DataFileError: if a file is missing or malformed.
        """
        if self.synthetic:
            return self.make_synthetic(np.random.default_rng(0))
        return self.read(pathlib.Path(data_dir or "."))

    def read(self, data_dir: pathlib.Path) -> dict[str, ClientSource]:
        """The splits from files."""
        file = open_files(data_dir / str(self.file_name))
        return {
            purpose: FileSource(file, split, self.features)
            for purpose, split in self.file_splits().items()
        }

    def file_splits(self) -> Mapping[str, str]:
        """The name of each split in the file, by purpose."""
        return self.splits

    @abc.abstractmethod
    def make_synthetic(self, rng: np.random.Generator) -> dict[str, ClientSource]:
        """A few small clients with made-up examples in the form of the files."""

    @abc.abstractmethod
    def encode(
        self, examples: Examples, rng: np.random.Generator | None = None
    ) -> tuple[np.ndarray, ...]:
        """Arrays with a row for each example of the model, made of raw examples.

        Args:
          examples: raw features.
          rng: augments training examples; None for evaluation.
        """

    def to_model(self, *arrays) -> tuple[Any, Any]:
        """Inputs and targets of the model from a batch of `encode`'s results."""
        inputs, targets = arrays
        return inputs, targets

    #: Whether `to_model` does more than tell inputs from targets.
    compact: ClassVar[bool] = False

    def dataset(
        self, arrays: tuple[np.ndarray, ...], batch_size: int
    ) -> tf.data.Dataset:
        """Batches of inputs and targets."""
        if not self.compact:
            arrays = self.to_model(*arrays)
        batches = tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)
        return batches.map(self.to_model) if self.compact else batches

    @abc.abstractmethod
    def build_model(self) -> tf.keras.Model:
        """The network, new, not compiled."""

    @abc.abstractmethod
    def loss(self) -> tf.keras.losses.Loss:
        """The loss that clients minimise, beside the network's own regularisation."""

    @property
    def summed_loss(self) -> bool:
        """Whether `loss` adds the examples of a batch up, instead of a mean."""
        return False

    def warnings(self) -> list[str]:
        """Warnings about settings with surprising effects."""
        return []

    @abc.abstractmethod
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """New metrics; the first is that of the figures."""


def client_names(count: int) -> list[str]:
    """Names of made-up clients."""
    return [f"client_{i:02d}" for i in range(count)]
