"""Rounds of an aggregator with noise that the test controls."""

from __future__ import annotations

import base64
import contextlib
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import accounting


def modules() -> Any:
    """Returns `tfdpclip.federated`, with its modules.

    Raises:
      ImportError: without TensorFlow Federated, naming the extra to install.
    """
    from tfdpclip import federated

    return federated


def check_factory(factory: Any) -> None:
    """Raises unless `factory` is a private `clipped_mean` with independent rounds.

    Raises:
      ValueError: if it is not.
    """
    if not isinstance(factory, modules().ClippedMeanFactory):
        raise ValueError(
            "factory must be the result of dpc.federated.clipped_mean(...), got "
            f"{type(factory).__name__}."
        )
    if not factory.noise_multiplier > 0:
        raise ValueError(
            "factory has noise_multiplier 0, so there is no guarantee to test. Use the "
            "noise of the real run."
        )
    if factory.seed is not None:
        raise ValueError(
            f"factory has seed {factory.seed}, so that its noise is not secret and "
            "there is no guarantee to test. Leave seed out."
        )
    if factory.correlated is not None:
        raise ValueError(
            "factory has correlated noise, and this test is for independent rounds. "
            'Test it with noise="central": clipping, sums, counts and the '
            "division are the same."
        )


def as_type(value_type: Any) -> Any:
    """Returns the type for a TFF type, a description of a type, or an example value.

    Raises:
      ValueError: if `value_type` is none of these.
    """
    tff = modules()._tff
    with contextlib.suppress(TypeError):
        return tff.to_type(value_type)

    def described(array):
        if not hasattr(array, "dtype"):
            raise TypeError("An example consists of arrays.")
        array = np.asarray(array)
        return tff.TensorType(array.dtype.type, array.shape)

    try:
        return tff.to_type(tf.nest.map_structure(described, value_type))
    except (TypeError, ValueError) as error:
        raise ValueError(
            "value_type must be a TFF type such as tff.to_type([(np.float32, [3, 2]), "
            "(np.float32, [2])]), or a structure of arrays that is an example of an "
            f"update, got {value_type!r}."
        ) from error


class Dial:
    """Replaces the noise by a vector of standard normals that the test chooses.

    Computations of TensorFlow Federated are serialised, so that they cannot contain
    Python objects. They read the vector from a file, whenever they run, on this
    machine.

    Attributes:
      size: how many numbers the graphs that were made under `frozen` read.
      share: the smallest stddev of a client's discrete noise; None without it.
    """

    def __init__(self, folder: str):
        self._path = pathlib.Path(folder) / "noise"
        self.size = 0
        self.share: float | None = None
        # The number of clients whose shares of discrete noise are summed.
        self.clients = 1.0

    def set(self, values: np.ndarray) -> None:
        """Sets the numbers of the next rounds, `[size]`."""
        raw = np.asarray(values, np.float64).tobytes()
        self._path.write_bytes(base64.urlsafe_b64encode(raw) + b"\n")

    def _read(self, count: int) -> tf.Tensor:
        place, self.size = self.size, self.size + count
        # A data set, because an op without state may run only once.
        line = tf.data.TextLineDataset([str(self._path)]).batch(1).get_single_element()
        numbers = tf.io.decode_raw(tf.io.decode_base64(line[0]), tf.float64)
        return tf.reshape(numbers[place : place + count], [count])

    def standard_normal(self, count: int, seed: tf.Tensor) -> tf.Tensor:
        """Replaces `_entropy.standard_normal`."""
        del seed
        return tf.cast(self._read(count), tf.float32)

    def discrete(
        self, count: int, stddev: float, seed: tf.Tensor, dtype: tf.DType
    ) -> tf.Tensor:
        """Replaces `_discrete_noise.sample`: all clients draw the same share.

        Shares of n clients are independent, so that their sum has sqrt(n) times the
        stddev of a share; the same share n times would have n times the stddev.
        """
        del seed
        self.share = stddev if self.share is None else min(self.share, stddev)
        unit = stddev / np.sqrt(self.clients)
        return tf.cast(tf.round(self._read(count) * unit), dtype)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Aggregation processes made in this context read the controlled noise."""
        found = modules()
        seed = np.random.default_rng().integers(0, 2**62, 2)
        stand_ins = [
            (found._entropy, "standard_normal", self.standard_normal),
            (found._entropy, "fresh_seed", lambda: tf.constant(seed, tf.int64)),
            (found._discrete_noise, "sample", self.discrete),
        ]
        own = [getattr(module, name) for module, name, _ in stand_ins]
        for module, name, stand_in in stand_ins:
            setattr(module, name, stand_in)
        try:
            yield
        finally:
            for (module, name, _), function in zip(stand_ins, own, strict=True):
                setattr(module, name, function)


class Rounds:
    """Rounds of a process, with the whole release as one vector.

    Args:
      factory: the aggregation factory.
      value_type: the type of one client's update.
      dial: controls the noise; None for the factory's own noise.
    """

    def __init__(self, factory: Any, value_type: Any, dial: Dial | None = None):
        found = modules()
        self._tff = found._tff
        self.factory = factory
        self.layout = self.layout_of(factory, value_type)
        self.clip = found._records.RecordClip(factory.clip, self.layout)
        self.dial = dial
        # Far beyond the cap, so that a weight without a cap shows.
        self._weight = factory.weight_cap
        given = [value_type]
        if self._weight is not None:
            given.append(self._tff.TensorType(np.float32))
        with dial.frozen() if dial else contextlib.nullcontext():
            self.process = factory.create(*given)
        signature = self.process.next.type_signature.result
        self._types = {
            name: getattr(signature, name).member
            for name in ("result", "measurements", "state")
        }
        self._has_inner = factory.inner is not None
        if self._has_inner:
            # The inner process's own state is not part of the guarantee.
            self._types["state"] = self._types["state"].own
        self.names = [
            name if path == "0" and len(named) == 1 else f"{name}/{path}"
            for name, part in self._types.items()
            for named in [self._named(part)]
            for path, _ in named
        ]

    @property
    def count_stddevs(self) -> tuple[float, ...]:
        """The required noise on the counts, from the settings alone."""
        factory = self.factory
        return accounting.count_stddevs(
            self.clip.rule, factory.clients_per_round, factory.noise_multiplier
        )

    @staticmethod
    def layout_of(factory: Any, value_type: Any) -> Any:
        """The layout of an update in a vector."""
        return modules()._records.Layout(value_type, factory.variable_names)

    def _named(self, part: Any) -> list:
        return self._tff.named_leaves(part)

    def value(self, vector: np.ndarray) -> Any:
        """An update with these coordinates."""
        layout = self.layout
        parts = np.split(np.asarray(vector), np.cumsum(layout.sizes)[:-1])
        with np.errstate(over="ignore", invalid="ignore"):
            leaves = [
                part.astype(dtype.as_numpy_dtype).reshape(shape)
                for part, dtype, shape in zip(
                    parts, layout.dtypes, layout.shapes, strict=True
                )
            ]
        return self._tff.pack(leaves, layout.value_type)

    def vector(self, value: Any) -> np.ndarray:
        """The coordinates of an update, or of a result."""
        return np.concatenate([np.ravel(x) for x in self._leaves(value)] or [[]])

    def _leaves(self, value: Any) -> list[np.ndarray]:
        return [np.asarray(leaf, np.float64) for leaf in self._tff.flatten(value)]

    def run(self, state: Any, cohort: Sequence[Any], noise: Any = 0.0) -> Any:
        """Runs one round; `noise` is the controlled noise."""
        if self.dial:
            self.dial.set(np.broadcast_to(noise, [self.dial.size]))
        cohort = list(cohort)
        if self._weight is None:
            return self.process.next(state, cohort)
        weights = [np.float32(1000 * self._weight)] * len(cohort)
        return self.process.next(state, cohort, weights)

    def released(self, output: Any) -> np.ndarray:
        """The result, the measurements and the next state, float64."""
        state = output.state["own"] if self._has_inner else output.state
        parts = output.result, output.measurements, state
        return np.concatenate([self.vector(part) for part in parts])

    def labels(self, output: Any) -> list[str]:
        """The name of each entry of `released`."""
        state = output.state["own"] if self._has_inner else output.state
        leaves = [
            leaf
            for part in (output.result, output.measurements, state)
            for leaf in self._leaves(part)
        ]
        return [
            name for name, leaf in zip(self.names, leaves, strict=True)
            for _ in range(leaf.size)
        ]  # fmt: skip

    def clip_round(self, state: Any) -> int:
        """The number of rounds before this state."""
        return int((state["own"] if self._has_inner else state)["round"])

    def clip_state(self, state: Any) -> Any:
        """The clip rule's state from the state of the process."""
        own = state["own"] if self._has_inner else state
        flat = [
            tf.constant(leaf, like.dtype)
            for leaf, like in zip(
                self._leaves(own["clip"]), self.clip.initial_state(), strict=True
            )
        ]
        return self.clip.state(flat)


@contextlib.contextmanager
def counted_shares() -> Iterator[list[float]]:
    """Records the stddev of every share of discrete noise in the graphs made inside."""
    module, stddevs = modules()._discrete_noise, []
    own = module.sample

    def sample(count, stddev, seed, dtype):
        stddevs.append(stddev)
        return own(count, stddev, seed, dtype)

    module.sample = sample
    try:
        yield stddevs
    finally:
        module.sample = own


@contextlib.contextmanager
def dialled(factory: Any, value_type: Any, clients: int) -> Iterator[Rounds]:
    """`Rounds` with controlled noise, for cohorts of `clients` clients."""
    with tempfile.TemporaryDirectory() as folder:
        dial = Dial(folder)
        dial.clients = float(clients)
        yield Rounds(factory, value_type, dial)
