"""Applies functions of single records, or of whole batches, to drawn elements."""

from __future__ import annotations

import collections
import contextlib
import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._docs import see
from tfdpclip.sampling import row_weights
from tfdpclip.sampling.record_proof import (
    RecordProof,
    draws_from_a_seed,
    inputs_before,
    repeats_numbers,
)

# The packages whose tasks preprocess records in `fit`.
_HUBS = ("keras_hub.", "keras_nlp.")
_PREPROCESSOR = (
    "the preprocessor of {} works on each record alone, and its vocabulary holds no "
    "private data"
)
_SEED = "the seed of the random numbers of {}, given to map, is secret"


class RecordFunction:
    """A function of one record, traced on its own.

    *Formal guarantees*

    * The result for a record depends on this record, on constants and on new
      randomness: the trace holds no variable, no state, no Python and no further input.
    * Constants are no more than about one record's worth, unless declared public.
    * The preprocessor of a task of KerasHub is trusted in both, as `assumptions` says.

    Args:
      function: a function of a record's parts: (x, y), or (x,).
      specs: the specs of these parts.
      population: the number of records; constants must not have a row for each.
      public: arrays, tensors, variables and tables that hold no private data.

    Raises:
      ValueError: if the function cannot be shown to map single records.
    """

    def __init__(
        self,
        function: Callable,
        specs: Sequence[Any],
        population: int,
        public: Sequence[Any] = (),
    ):
        self.name = name_of(function)
        self._check_arguments(function, specs)
        # Further arguments keep their defaults, in the trace's calls as well.
        self._traced = tf.function(lambda *record: function(*_new_dicts(record)))
        self._concrete = self._traced.get_concrete_function(*specs)
        size = sum(_bytes_of(spec) for spec in tf.nest.flatten(list(specs)))
        self._preprocesses = _is_preprocessor(function)
        self.assumptions: list[str] = []
        if self._preprocesses:
            task = type(getattr(function, "__self__", None)).__name__
            self.assumptions.append(_PREPROCESSOR.format(task))
        else:
            proof = RecordProof(
                self.name, self._concrete.graph, size, population, public
            )
            proof.run()
            self.assumptions += proof.assumptions
        if draws_from_a_seed(self._concrete.graph):
            self.assumptions.append(_SEED.format(self.name))
        self._parts = self._parts_of(self._concrete.structured_outputs)
        for part in tf.nest.flatten(self._parts):
            self._check_output(part)
        self._given = tuple(specs)

    @property
    def changes_nothing(self) -> bool:
        """Whether the trace shows that every record comes out unchanged."""
        parts = tuple(self._parts[: len(self._given)])
        try:
            tf.nest.assert_same_structure(parts, self._given)
        except (TypeError, ValueError):
            return False
        graph = self._concrete.graph
        return (
            {op.type for op in graph.get_operations()} <= {"Placeholder", "Identity"}
            and not any(part is not None for part in self._parts[len(parts) :])
            and all(map(_is_named_again, tf.nest.flatten(parts), graph.inputs))
        )

    @property
    def repeats_numbers(self) -> bool:
        """Whether the trace has the same random numbers in every iteration."""
        return repeats_numbers(self._concrete.graph)

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """The specs of the result, flat and without missing parts."""
        found = [part for part in tf.nest.flatten(self._parts) if part is not None]
        return [tf.TensorSpec(part.shape, part.dtype) for part in found]

    def __call__(self, *record: Any) -> list[tf.Tensor]:
        """The parts for one record, flat and without missing parts."""
        parts = self._parts_of(self._concrete(*record))
        return [part for part in tf.nest.flatten(parts) if part is not None]

    def refuse_failures(self, records: tuple) -> None:
        """Raises ValueError if an assertion of the function fails on a record.

        Args:
          records: the parts of all records, with the records on axis 0.
        """
        definition = self._concrete.graph.as_graph_def()
        nodes = [definition.node, *(f.node_def for f in definition.library.function)]
        if not any(node.op == "Assert" for part in nodes for node in part):
            return
        data = tf.data.Dataset.from_tensor_slices(records).map(self)
        try:
            collections.deque(data, maxlen=0)
        except tf.errors.InvalidArgumentError as error:
            failed = re.findall(r"{{node (.*?)}}", error.message)
        else:
            return
        columns = list(row_weights.names_of_parts(records))
        used = inputs_before(self._concrete.graph, failed)
        column = " or ".join(columns[i] for i in used) or "a record"
        raise ValueError(
            f"map: {self.name} fails on a value of {column}: a draw of this record "
            "would end training, and so reveal the record. Give values that a "
            "vocabulary lacks an entry: num_oov_indices=1 of the lookup, and one more "
            "row in the layer behind it." + see("numbers-out-of-range")
        )

    def _parts_of(self, result: Any) -> tuple[Any, Any, Any]:
        """(x, y, weight): a preprocessor weighs the entries (tokens) of a record."""
        if self._preprocesses and isinstance(result, tuple) and len(result) == 3:
            return result
        return *as_parts("map", self.name, result), None

    def pack(self, flat: Sequence[tf.Tensor]) -> tuple[Any, Any, Any]:
        """Returns (x, y, weight) from the flat result of a call."""
        rest = iter(flat)
        leaves = tf.nest.flatten(self._parts)
        full = [None if leaf is None else next(rest) for leaf in leaves]
        return tf.nest.pack_sequence_as(self._parts, full)

    def _check_arguments(self, function, specs) -> None:
        try:
            inspect.signature(function).bind(*specs)
        except TypeError as error:
            names = "x, y" if len(specs) == 2 else "x"
            raise ValueError(
                f"map: {self.name} cannot be called with one record, as "
                f"{self.name}({names}): {error}. The function gets a single record, "
                "without a batch axis and without its sample weight: "
                f"batches.map(lambda {names}: ...). A function of whole batches goes "
                "to map_batches()." + see("batches-that-are-transformed")
            ) from None
        except ValueError:
            return  # Python knows no signature; tracing reports a mismatch.

    def _check_output(self, part) -> None:
        if part is None:
            return
        if not isinstance(part, (tf.Tensor, tf.TensorSpec)):
            raise ValueError(
                f"map: {self.name} returns {type(part).__name__}; batches hold dense "
                "tensors. Return x.to_tensor(shape=...), for example."
            )
        if not part.shape.is_fully_defined():
            raise ValueError(
                f"map: {self.name} returns a tensor of shape {part.shape}; batches "
                "need records of one static shape. Return tf.ensure_shape(x, [...]), "
                "or tf.image.resize to a fixed size."
            )


def parts_of(element: tuple) -> tuple:
    """(x, y) of an element (x, y, weight), or (x,) where there are no labels."""
    labels = element[1]
    missing = labels is None or type(labels).__name__ == "NoneTensorSpec"
    return element[:1] if missing else element[:2]


def on_elements(
    map_func: Callable,
    spec: tuple,
    population: int,
    num_parallel_calls: int | None,
    public: Sequence[Any],
    records: tuple | None = None,
) -> tuple[Callable, tuple[str, ...]]:
    """Returns a function of elements that applies `map_func` to each record.

    Also returns the assumptions of a statement about the function.

    Args:
      map_func: a function of one record.
      spec: the spec of the elements.
      population: see `RecordFunction`.
      num_parallel_calls: records at a time.
      public: see `RecordFunction`.
      records: the parts of all records, if they are in memory and unchanged.
    """
    parallel = 1 if num_parallel_calls is None else int(num_parallel_calls)
    parallel = 10 if parallel < 1 else parallel  # tf.data.AUTOTUNE is -1.
    specs = [tf.nest.map_structure(_record_spec, part) for part in parts_of(spec)]
    function = RecordFunction(map_func, specs, population, public)
    if function.changes_nothing:
        return lambda *element: element, ()
    if records is not None:
        function.refuse_failures(records[: len(specs)])

    @tf.autograph.experimental.do_not_convert
    def on_element(*element):
        x, y, w = apply_to_records(function, parts_of(element), element[-1], parallel)
        weight = row_weights.refitted(element[-1], y)
        return x, y, weight if w is None else weight * tf.cast(w, weight.dtype)

    if function.repeats_numbers:
        warnings.warn(
            f"map: {function.name} draws random numbers from a seed, and every "
            "iteration begins them anew: each epoch has the same numbers. Leave seed= "
            "out of the random ops (and of batches)."
            + see("batches-that-are-transformed"),
            stacklevel=3,
        )
    return on_element, tuple(function.assumptions)


def mapped(data: tf.data.Dataset, on_element: Callable, seed: int | None) -> Any:
    """The data set with a function applied to each element.

    Args:
      data: the data set.
      on_element: the function.
      seed: the seed of the draws; without one, the function's random ops ignore the
        seed of `tf.random.set_seed`.
    """
    with fresh_numbers(seed):
        return tf.data.Dataset.map(data, on_element)


def fresh_numbers(seed: int | None) -> contextlib.AbstractContextManager[None]:
    """Lets the random ops that are traced inside draw anew in every iteration.

    A random op of `tf.data` begins anew with each iterator, so that a seed of all ops
    would give each epoch the same augmentation. With a seed of the draws, for
    experiments, the ops follow the seed of all ops.
    """
    if seed is not None:
        return contextlib.nullcontext()
    return _tf_private.without_global_seed()


def apply_to_records(
    function: RecordFunction, parts: tuple, weight: Any, parallel: int
) -> tuple[Any, Any, Any]:
    """Calls `function` with each record of an element; rows of padding stay zero."""
    is_record = row_weights.present(weight)
    static = tf.nest.flatten(weight)[0].shape[0]
    rows = tf.shape(is_record)[0] if static is None else static
    places = tf.range(1, rows + 1)
    present = tf.reduce_max(tf.where(is_record, places, 0))
    # Padding is left out: a decoder of images fails on an empty string.
    records = tf.nest.map_structure(lambda part: part[:present], parts)
    flat = _tf_private.map_elements(
        lambda record: function(*record), records, function.specs, parallel
    )

    def pad(part, spec):
        empty = "" if spec.dtype == tf.string else tf.zeros([], spec.dtype)
        rest = tf.fill(tf.concat([[rows - present], spec.shape], 0), empty)
        return tf.ensure_shape(tf.concat([part, rest], 0), [static, *spec.shape])

    return function.pack(
        [pad(part, spec) for part, spec in zip(flat, function.specs, strict=True)]
    )


def name_of(function: Callable) -> str:
    """The name of a function in messages."""
    name = getattr(function, "__name__", type(function).__name__)
    return "the function" if name == "<lambda>" else name


def as_parts(method: str, name: str, result: Any) -> tuple[Any, Any]:
    """Returns (x, y) from the result of a function.

    Raises:
      ValueError: if the result is neither x nor (x, y).
    """
    if result is None:
        raise ValueError(f"{method}: {name} returns nothing; return x, or (x, y).")
    if not isinstance(result, tuple) or hasattr(result, "_fields"):
        return result, None
    if len(result) == 2:
        return result
    if len(result) == 1:
        return result[0], None
    raise ValueError(
        f"{method}: {name} returns {len(result)} parts; return x, or (x, y). The "
        "sample weight cannot be changed here: give weights with the data, "
        "scheme.batches((x, y, sample_weight))." + see("batches-that-are-transformed")
    )


def on_batches(function: Callable[..., Any]) -> Callable:
    """Returns a function of elements that applies `function` to each batch."""

    def on_element(*element):
        parts, weight = parts_of(element), element[-1]
        x, y = apply_to_batch(function, parts, weight)
        return x, y, row_weights.refitted(weight, y)

    return on_element


def apply_to_batch(
    function: Callable[..., Any], parts: tuple, weight: Any
) -> tuple[Any, Any]:
    """Calls `function` with the batch of an element, and returns (x, y).

    Args:
      function: a function of x and y, or of x.
      parts: x and y, or x.
      weight: the weights, with a row for each row of the parts.

    Raises:
      ValueError: if the number of rows, or of parts, changes.
    """
    name = name_of(function)
    weight = tf.nest.flatten(weight)[0]
    rows = weight.shape[0]
    named = "rows" if rows is None else f"{rows} rows"

    def same_rows(part):
        part = tf.convert_to_tensor(part)
        static = None if part.shape.rank is None else part.shape[:1].as_list()
        if rows and static is not None and static not in ([rows], [None]):
            raise ValueError(
                f"map_batches: {name} returns a tensor of shape {part.shape}; it "
                f"must keep the batch's {named}, one for each record."
            )
        message = f"map_batches: {name} must keep the batch's {named}."
        message += see("rows-that-fill-a-batch-up")
        same = tf.equal(tf.shape(part)[0], tf.shape(weight)[0])
        check = tf.debugging.Assert(same, [message])
        with tf.control_dependencies([check]):
            part = tf.identity(part)
        return tf.ensure_shape(part, [rows, *(part.shape[1:] or [])])

    result = _tf_private.converted_by_autograph(function)(*parts)
    x, y = as_parts("map_batches", name, result)
    y = None if y is None else tf.nest.map_structure(same_rows, y)
    return tf.nest.map_structure(same_rows, x), y


def _is_named_again(part: tf.Tensor, given: tf.Tensor) -> bool:
    while part is not given and part is not None and part.op.type == "Identity":
        part = part.op.inputs[0]
    return part is given


def _is_preprocessor(function: Callable) -> bool:
    """Whether `fit` of a task of KerasHub maps its own preprocessor."""
    module = getattr(function, "__module__", None) or ""
    return name_of(function) == "preprocess_samples" and module.startswith(_HUBS)


def _new_dicts(record: tuple) -> tuple:
    """The record in new containers, which a function may write to."""
    return tf.nest.map_structure(lambda part: part, record)


def _bytes_of(spec: tf.TensorSpec) -> int:
    return int(np.prod(spec.shape.as_list(), dtype=np.int64)) * max(spec.dtype.size, 1)


def _record_spec(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec(spec.shape[1:], spec.dtype)
