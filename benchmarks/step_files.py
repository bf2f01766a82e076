"""Writes training steps in the form that XLA gets, to run without TensorFlow.

A folder is a cell: one model, batch size, optimizer and policy, and its steps, plain
and private. `NAME.hlo` is a serialised HLO module with static shapes, whose arguments
are the data, the weights, the optimizer's state, and for a private step the states of
the clip and of the noise generator; `steps.json` names the arguments, with hashes;
`arrays.npz` has the arguments and TensorFlow's results. So the noise of a file is no
secret: it is for measuring. `benchmarks.run_steps`, which is copied beside it, runs
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import models, variants
from benchmarks.timing import Spec
from driver_kit.lazy import tf

POLICIES = ("float32", "mixed_bfloat16")
VARIANTS = (*variants.OURS, *(name + variants.UNCHECKED for name in variants.OURS))
# As `benchmarks.run_steps` has them, which imports nothing of ours.
MANIFEST, ARRAYS, VERSION = "steps.json", "arrays.npz", 1
RUNNER = "run_steps.py"
_SIGNATURE = re.compile(r"entry_computation_layout=\{\((.*?)\)->(.*)")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_TYPES = {
    "bool": "pred",
    "bfloat16": "bf16",
    **{f"int{bits}": f"s{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """The common settings of the steps of a folder.

    Attributes:
      model: of `benchmarks.models`.
      batch_size: examples in a step.
      optimizer: "sgd" or "adam".
      policy: of Keras: "float32" or "mixed_bfloat16".
    """

    model: str
    batch_size: int
    optimizer: str = "sgd"
    policy: str = "float32"

    @property
    def folder(self) -> str:
        """A name for its files."""
        return "_".join(map(str, dataclasses.astuple(self)))

    def fields(self) -> dict[str, Any]:
        """The settings, by name."""
        return dataclasses.asdict(self)


class ExportError(ValueError):
    """A step cannot be written as a file."""


@contextlib.contextmanager
def policy(name: str) -> Iterator[None]:
    """Makes layers of a policy of Keras."""
    before = tf.keras.mixed_precision.global_policy()
    tf.keras.mixed_precision.set_global_policy(name)
    try:
        yield
    finally:
        tf.keras.mixed_precision.set_global_policy(before)


class Step:
    """A compiled step of TensorFlow and the XLA program made of it.

    Args:
      function: a `tf.function` with `jit_compile=True`.
      data: its arguments, of static shapes.

    Raises:
      ExportError: if the arguments of XLA's program are not those of the function.
    """

    def __init__(self, function: Callable, data: Sequence[tf.Tensor]):
        self._function, self._data = function, list(data)
        concrete = function.get_concrete_function(*data)
        self._ir = function.experimental_get_compiler_ir(*data)
        self.text = self._ir(stage="hlo")
        names = {id(v.handle): v.name for v in concrete.graph.variables}
        self._places = [(f"data {i}", None, t) for i, t in enumerate(data)]
        for captured in concrete.captured_inputs:
            name = names.get(id(captured), f"captured {len(self._places)}")
            handle = captured if captured.dtype == tf.resource else None
            self._places.append((name, handle, captured))
        self.arguments, self.results = self._signature()

    def serialized(self) -> bytes:
        """The module, before XLA optimised it."""
        return self._ir(stage="hlo_serialized")

    def values(self) -> list[np.ndarray]:
        """The arguments as they are now."""
        return [_value(*self._places[i][1:]) for i in self._order]

    def taken(self) -> list[np.ndarray]:
        """Takes the step; returns the results in the form of XLA's program."""
        returned = [t.numpy() for t in tf.nest.flatten(self._function(*self._data))]
        now = self.values()
        updates = [about["updates"] for about in self.results]
        return [
            now[place] if place is not None else returned[i]
            for i, place in enumerate(updates)
        ]

    def _signature(self) -> tuple[list[dict], list[dict]]:
        match = _SIGNATURE.search(self._header())
        if match is None:
            raise ExportError("the program has no signature that is known.")
        wanted, made = (_types(part) for part in match.groups())
        # Constants and unread inputs are no arguments.
        self._order, rest = [], list(enumerate(self._places))
        arguments = []
        for kind in wanted:
            while rest and _kind(*rest[0][1][1:]) != kind:
                rest.pop(0)
            if not rest:
                raise ExportError(
                    f"the program has an argument {kind} that is unknown."
                )
            i, (name, handle, tensor) = rest.pop(0)
            self._order.append(i)
            dtype, shape = _dtype_and_shape(handle, tensor)
            arguments.append({"name": name, "dtype": dtype, "shape": list(shape)})
        if missing := set(range(len(self._data))) - set(self._order):
            raise ExportError(
                f"XLA took {', '.join(f'data {i}' for i in sorted(missing))} for "
                "constants: the program is of one batch alone, and is compiled anew "
                "for every other. (Keras 2 makes its LSTM and GRU so.)"
            )
        updates = {int(a or 0): int(b) for a, b in _ALIAS.findall(self._header())}
        results = []
        for i, kind in enumerate(made):
            place = updates.get(i)
            if place is not None and wanted[place] != kind:
                raise ExportError(f"result {i}, {kind}, is said to be {wanted[place]}.")
            name = f"returned {i}" if place is None else arguments[place]["name"]
            results.append({"name": name, "updates": place})
        return arguments, results

    def _header(self) -> str:
        return self.text.partition("\n\n")[0]


def _dtype_and_shape(handle, tensor) -> tuple[str, tuple[int, ...]]:
    if handle is None:
        return tensor.dtype.name, tuple(tensor.shape)
    data = handle._handle_data.shape_and_type[0]
    shape = tuple(axis.size for axis in data.shape.dim)
    return tf.as_dtype(data.dtype).name, shape


def _kind(handle, tensor) -> str:
    dtype, shape = _dtype_and_shape(handle, tensor)
    return f"{_TYPES.get(dtype, dtype)}[{','.join(map(str, shape))}]"


def _value(handle, tensor) -> np.ndarray:
    if handle is None:
        return tensor.numpy()
    dtype, _ = _dtype_and_shape(handle, tensor)
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.as_dtype(dtype)).numpy()


def digest(array: np.ndarray) -> str:
    """The key of an array: its type, shape and bytes, hashed."""
    head = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(head + array.tobytes()).hexdigest()[:32]


def _types(signature: str) -> list[str]:
    return re.findall(r"[a-z]+\d*\[[\d,]*\]", signature)


def made(cell: Cell, variant: str, task: models.Task | None = None) -> Step:
    """A step of a cell, from the same weights and data for every variant.

    Args:
      cell: the settings.
      variant: "plain", or one of `benchmarks.variants.OURS`. The plain step is
        `plain_dense` there: with static shapes.
      task: a model in place of the one that `cell` names.

    Raises:
      ExportError: if the program's arguments are not those of the step.
    """
    tf.keras.utils.set_random_seed(1)
    variant = "plain_dense" if variant == "plain" else variant
    spec = Spec(
        cell.model,
        cell.batch_size,
        (variant,),
        jit=True,
        adam=cell.optimizer == "adam",
    )
    with policy(cell.policy):
        function, data = variants.step_and_data(spec, variant, task)
        return Step(function, data)


def write(
    folder: pathlib.Path,
    cell: dict[str, Any],
    makers: dict[str, Callable[[], Step]],
    run: bool = True,
) -> dict[str, Any]:
    """Writes steps into a folder.

    Args:
      folder: the folder; its old contents are replaced.
      cell: the common settings, for readers of the results.
      makers: functions that make a step, by name; the plain step first.
      run: whether to take each once. Without, no arrays are written.

    Returns:
      The manifest.

    Raises:
      ExportError: if a step cannot be written.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    arrays: dict[str, np.ndarray] = {}
    steps = []
    for name, make in makers.items():
        started = time.perf_counter()
        step = make()
        hlo = step.serialized()
        (folder / f"{name}.hlo").write_bytes(hlo)
        arguments = [dict(about) for about in step.arguments]
        results = [dict(about) for about in step.results]
        if run:
            before = step.values()
            for about, value in zip(
                [*arguments, *results], [*before, *step.taken()], strict=True
            ):
                if value.dtype == tf.bfloat16.as_numpy_dtype:
                    # NumPy's files lack bfloat16.
                    value = value.astype(np.float32)
                about["array"] = digest(value)
                arrays[about["array"]] = value
        steps.append(
            {
                "name": name,
                "program": f"{name}.hlo",
                "sha256": hashlib.sha256(hlo).hexdigest(),
                "write_s": time.perf_counter() - started,
                "arguments": arguments,
                "results": results,
            }
        )
    if run:
        np.savez(folder / ARRAYS, **arrays)
    manifest = {
        "version": VERSION,
        "cell": cell,
        "versions": {"tensorflow": tf.__version__},
        "steps": steps,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.copy(pathlib.Path(__file__).with_name(RUNNER), folder / RUNNER)
    return manifest
