"""The proof that a traced function computes from a single record only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._docs import see

# Constants of no more elements than this are settings: axes, paddings, a mean color.
_SETTING = 16
# How many entries all settings may have in total, before further settings count as
# large constants: records can be cut into small constants.
_SETTINGS = {"floats": 256, "others": 2048}
# The size of all large constants in total, beyond one record's worth.
_SLACK = 256
_MOST_BYTES = 2**14

# Stateful in TensorFlow's sense, but depending only on the record and new randomness.
_RANDOM = frozenset(
    (
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomCrop",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "StatelessRandomGetAlg",
        "StatelessRandomGetKeyCounter",
        "StatelessRandomGetKeyCounterAlg",
        "TruncatedNormal",
    )
)
# Ops that advance a generator independently of the record.
_GENERATORS = frozenset(("RngReadAndSkip", "RngSkip"))
_CALLS = frozenset(
    (
        "Case",
        "If",
        "PartitionedCall",
        "StatefulPartitionedCall",
        "StatelessCase",
        "StatelessIf",
        "StatelessWhile",
        "While",
    )
)
_HARMLESS = frozenset(("Assert", "Placeholder", "PrintV2", "StringFormat"))
_READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd"))
# Reads of a vocabulary or a list, which is public if nothing writes to it.
_LOOKUPS = frozenset(("LookupTableFindV2", "LookupTableSizeV2"))
_VOCABULARY = (
    "the tables (vocabularies) that {}, given to map, looks up hold no private data, "
    "and nothing writes to them"
)
_PYTHON = frozenset(("EagerPyFunc", "PyFunc", "PyFuncStateless"))
_FILES = frozenset(("MatchingFiles", "ReadFile"))


class RecordProof:
    """Checks the nodes of a trace, nested functions included."""

    def __init__(self, name, graph, record_bytes, population, public):
        self._name = name
        self._graph = graph
        self._population = population
        self._limit = _SLACK + min(record_bytes, _MOST_BYTES)
        self._handles, self._values = _declared(public)
        self._definition = graph.as_graph_def()
        #: Assumptions of a statement, after `run`.
        self.assumptions: list[str] = []

    def run(self) -> None:
        """Raises ValueError if the trace may depend on more than a single record."""
        declared_resources = self._check_captures()
        for function, node in self._nodes():
            self._check_node(function, node, declared_resources)
        self._check_files()
        self._check_constants()
        if any(node.op in _LOOKUPS for _, node in self._nodes()):
            self.assumptions.append(_VOCABULARY.format(self._name))

    def _refuse(self, why: str, fix: str) -> None:
        raise ValueError(
            f"map: {self._name} {why}, so it cannot be shown to be a function of one "
            f"record. {fix}" + see("batches-that-are-transformed")
        )

    def _nodes(self) -> Iterator[tuple[str, Any]]:
        for node in self._definition.node:
            yield "", node
        for function in self._definition.library.function:
            for node in function.node_def:
                yield function.signature.name, node

    def _check_captures(self) -> bool:
        """Returns whether variables were declared public."""
        known = unknown = False
        for outside, inside in self._graph.captures:
            if not _tf_private.is_eager(outside):
                self._refuse(
                    f"uses the tensor {outside.name!r} of the function around it",
                    "Call map() outside of tf.function.",
                )
            if outside.dtype == tf.resource:
                if {op.type for op in inside.consumers()} <= _LOOKUPS:
                    continue
                found = any(outside is handle for handle in self._handles)
                known, unknown = known or found, unknown or not found
            elif outside.dtype == tf.variant:
                self._refuse(
                    "uses a data set",
                    "Put a record's data into the record, before sampling.",
                )
        return known and not unknown

    def _check_node(self, function, node, declared) -> None:
        op = node.op
        definition = _tf_private.definition_of(op)
        if definition is None:
            library = self._definition.library.function
            if any(f.signature.name == op for f in library):
                return
            self._refuse(
                f"runs {op}, an unknown operation", "Write it with TensorFlow's own."
            )
        if op in _PYTHON:
            self._refuse(
                "calls Python in every step (tf.py_function or tf.numpy_function)",
                "Use TensorFlow's operations, or transform the data before sampling; "
                "or use map_batches(), and accept the assumption that the privacy "
                "statement then lists.",
            )
        if "Dataset" in op or "Iterator" in op:
            self._refuse(
                f"reads a second data set ({op})",
                "Put a record's data into the record, before sampling.",
            )
        harmless = _CALLS | _GENERATORS | _LOOKUPS
        if _touches_resource(definition, node) and op not in harmless:
            if not (declared and op in _READS):
                self._refuse(
                    f"reads or writes a variable or a table ({op})",
                    "Use constants; or, if the variable holds no private data and is "
                    "only read, map(..., public=[variable]). (Random layers of Keras 3 "
                    "write to variables: put random layers into the model.)",
                )
            return
        if definition.is_stateful and op not in (
            _RANDOM | _GENERATORS | _CALLS | _HARMLESS | _FILES | _READS | _LOOKUPS
        ):
            self._refuse(
                f"has state or effects outside of the function ({op})",
                "Use TensorFlow's stateless operations; random operations may stay.",
            )

    def _check_files(self) -> None:
        """Refuses reads of files that the record does not name."""
        for function, node in self._nodes():
            if node.op in _FILES and function:
                self._refuse(
                    f"reads a file within {function}",
                    "Call tf.io.read_file in the function itself, not in a branch.",
                )
        for op in self._graph.get_operations():
            if op.type in _FILES and not inputs_before(self._graph, [op.name]):
                self._refuse(
                    f"reads a file that is the same for all records ({op.name})",
                    "Read the file before, and give map(..., public=[content]).",
                )

    def _check_constants(self) -> None:
        held = 0
        left = dict(_SETTINGS)
        for value in self._constants():
            if self._is_public(value):
                continue
            if value.size <= _SETTING:
                kind = "floats" if value.dtype.kind in "fcOSU" else "others"
                left[kind] -= value.size
                if left[kind] >= 0:
                    continue
            held += value.nbytes
            one_each = value.ndim and value.shape[0] == self._population
            if held > self._limit or one_each:
                what = f"{held} bytes or more, above the {self._limit} let pass"
                if one_each:
                    what = f"one row for each of the {self._population} records"
                self._refuse(
                    f"holds constants of {what} (one of shape {list(value.shape)})",
                    "If the constants hold no private data, declare them: "
                    "map(..., public=[array]). Put data that belong to a record into "
                    "the record, before sampling.",
                )

    def _constants(self) -> Iterator[np.ndarray]:
        for _, node in self._nodes():
            if node.op == "Const":
                yield tf.make_ndarray(node.attr["value"].tensor)
        for outside, _ in self._graph.captures:
            if outside.dtype not in (tf.resource, tf.variant):
                yield np.asarray(outside.numpy())

    def _is_public(self, value: np.ndarray) -> bool:
        for declared in self._values:
            if declared.shape == value.shape and _equal(declared, value):
                return True
        return False


def _equal(declared: np.ndarray, value: np.ndarray) -> bool:
    try:
        return bool(np.all(declared.astype(value.dtype) == value))
    except (TypeError, ValueError):
        return False


def _declared(public: Sequence[Any]) -> tuple[list, list[np.ndarray]]:
    if not isinstance(public, (list, tuple)):
        raise ValueError(
            "public must be a list of arrays, tensors, variables or tables."
        )
    handles, values = [], []
    for item in public:
        handle = getattr(item, "handle", None)
        handle = getattr(item, "resource_handle", None) if handle is None else handle
        if handle is not None:
            handles.append(handle)
            continue
        try:
            values.append(np.asarray(item))
        except (TypeError, ValueError) as error:
            raise ValueError(f"public must be a list of arrays: {error}") from error
    return handles, values


def _touches_resource(definition, node) -> bool:
    for argument in definition.input_arg:
        if argument.type == tf.resource.as_datatype_enum:
            return True
        names: tuple[str, str] = (argument.type_attr, argument.type_list_attr)
        for name in filter(None, names):
            attr = node.attr[name]
            if tf.resource.as_datatype_enum in (attr.type, *attr.list.type):
                return True
    return False


def inputs_before(graph: tf.Graph, names: Iterable[str]) -> list[int]:
    """The places of a record's parts, flat, on which some ops of a graph depend.

    Args:
      graph: the graph of a function of one record.
      names: the names of the ops.
    """
    captured = {id(inside) for _, inside in graph.captures}
    parts = [part.op for part in graph.inputs if id(part) not in captured]
    operations = {op.name: op for op in graph.get_operations()}
    pending, seen = [operations[n] for n in names if n in operations], set()
    while pending:
        current = pending.pop()
        if current not in seen:
            seen.add(current)
            pending.extend(tensor.op for tensor in current.inputs)
    return [place for place, part in enumerate(parts) if part in seen]


def draws_from_a_seed(graph: tf.Graph) -> bool:
    """Whether ops of a graph draw in turn from a given seed, or from a generator.

    The numbers of a record then depend on its place among all records.
    """
    nodes = _all_nodes(graph)
    return any(node.op in _GENERATORS for node in nodes) or repeat_numbers(nodes)


def repeats_numbers(graph: tf.Graph) -> bool:
    """Whether ops of a graph draw the same numbers in every iteration of a data set."""
    return repeat_numbers(_all_nodes(graph))


def repeat_numbers(nodes: Iterable[Any]) -> bool:
    """Whether nodes have a seed, with which a new iterator begins again."""
    return any(
        node.op in _RANDOM and any(node.attr[name].i for name in ("seed", "seed2"))
        for node in nodes
    )


def _all_nodes(graph: tf.Graph) -> list[Any]:
    content = graph.as_graph_def()
    return [*content.node, *(n for f in content.library.function for n in f.node_def)]
