"""Private interfaces of TensorFlow, each behind a function that states its purpose.

Only this module may use private interfaces of TensorFlow; `keras/_compat.py` does the
same for Keras, `federated/_tff.py` for TensorFlow Federated. A test refuses every other
use. To port the library to a new version of TensorFlow, read this file.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2, node_def_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context
from tensorflow.python.framework import func_graph, op_def_registry
from tensorflow.python.framework import ops as framework
from tensorflow.python.ops import (
    control_flow_util_v2,
    control_flow_v2_func_graphs,
    handle_data_util,
    while_v2,
)

FunctionDef = function_pb2.FunctionDef
NodeDef = node_def_pb2.NodeDef


# Tensors and tapes.


def is_eager(tensor: Any) -> bool:
    """Whether a tensor has a value, instead of an op in a graph."""
    return isinstance(tensor, tf.__internal__.EagerTensor)


def is_persistent(tape: tf.GradientTape) -> bool:
    """Whether gradients can be taken from a tape more than once."""
    return tape._persistent


def handle_data_of(handle: Any) -> Any:
    """The known data of the variable behind a handle (`is_set`); None if unknown."""
    return getattr(handle, "_handle_data", None)


def copy_handle_data(old: tf.Tensor, new: tf.Tensor) -> None:
    """Copies the handle data of a resource, or list of tensors, to a new tensor."""
    handle_data_util.copy_handle_data(old, new)


def values_of(handles: list[tf.Tensor], types: list[tf.DType]) -> list[tf.Tensor]:
    """Reads the values of variables on one device, by one op and without a copy.

    Args:
      handles: the handles of the variables, at least one.
      types: the type of each variable.
    """
    # A fast path as inside the functions of `tf.raw_ops`, which do not have this op:
    # a third of the time of `execute`, twice in every step.
    return pywrap_tfe.TFE_Py_FastPathExecute(
        context.context(), "_ReadVariablesOp", None, handles, "dtypes", types
    )


def global_seed() -> int | None:
    """The seed of `tf.random.set_seed`; None if there is none."""
    return context.global_seed()


@contextlib.contextmanager
def without_global_seed() -> Iterator[None]:
    """Hides the seed of `tf.random.set_seed` from the ops that are traced inside."""
    state = context.context()
    before, state._seed = state._seed, None
    try:
        yield
    finally:
        state._seed = before


def read_without_a_copy(handle: tf.Tensor) -> None:
    """Lets reads of a variable share its memory, until rows are next looked up."""
    tf.raw_ops.DisableCopyOnRead(resource=handle)


# Graphs.


def is_function_graph(graph: Any) -> bool:
    """Whether the graph belongs to a `tf.function`, a branch or a loop's body."""
    return isinstance(graph, tf.__internal__.FuncGraph)


def new_function_graph(name: str) -> tf.Graph:
    """A graph within the current one."""
    return func_graph.FuncGraph(name)


def compiled_by_xla(graph: tf.Graph) -> bool:
    """Whether new ops of a graph will be compiled by XLA."""
    context = graph._get_control_flow_context()
    while context is not None:
        if context.IsXLAContext():
            return True
        context = context.outer_context
    return False


def watched_variables(graph: Any) -> Sequence[tf.Variable]:
    """The variables that were used in a graph."""
    return getattr(graph, "_watched_variables", ())


def keep_branches(condition: tf.Operation) -> None:
    """Has the op of a `tf.cond` call its branches, which TensorFlow would inline."""
    value = attr_value_pb2.AttrValue(b=False)
    condition._set_attr("_lower_using_switch_merge", value)


@contextlib.contextmanager
def words_of_new_ops(name: str, words: Iterable[str]) -> Iterator[None]:
    """Adds words to a text attribute of every op that is made within, in this graph.

    Replicas of a strategy take turns in one graph, each in its own thread, and merged
    values are made in a separate thread while all replicas wait. So the words go to ops
    of this thread, and to merged values.
    """
    scopes = tf.compat.v1.get_default_graph()._attr_scope_map
    of_threads = scopes.setdefault(name, _Words())
    own = of_threads.lists.setdefault(threading.get_ident(), [])
    own.append(of_threads.now() | set(words))
    try:
        yield
    finally:
        own.pop()
        if not any(of_threads.lists.values()):
            scopes.pop(name, None)


class _Words:
    """The words of an attribute of new ops, by the thread that makes the ops."""

    def __init__(self):
        self.lists: dict[int, list[set[str]]] = {}

    def now(self) -> set[str]:
        own = self.lists.get(threading.get_ident())
        if not own and tf.distribute.in_cross_replica_context():
            own = next(filter(None, self.lists.values()), None)
        return own[-1] if own else set()

    def __call__(self, node_def: Any) -> Any:
        """The value that TensorFlow gives a new op without the attribute."""
        del node_def
        return self.added_to(attr_value_pb2.AttrValue()) if self.now() else None

    def added_to(self, value: Any) -> Any:
        words = self.now().union(value.s.decode().split())
        return attr_value_pb2.AttrValue(s=" ".join(sorted(words)).encode())


def map_elements(
    function: Callable, elements: Any, signature: Any, parallel: int = 1
) -> Any:
    """`tf.map_fn`, which leaves the variable scope as it was if `function` raises.

    TensorFlow 2.14 to 2.21 set a caching device for the loop's time, in a scope that
    all functions of a process share, and an error skips the line that takes it away.
    Later, no distribution strategy's scope can be entered.
    """
    scope = tf.compat.v1.get_variable_scope()
    before = scope.caching_device
    try:
        return tf.map_fn(
            function,
            elements,
            fn_output_signature=signature,
            parallel_iterations=parallel,
        )
    finally:
        if scope.caching_device is not before:
            scope.set_caching_device(before)


def text_attribute(op: tf.Operation, name: str) -> bytes | None:
    """An attribute that was written to an op, or None."""
    try:
        return op.get_attr(name)
    except ValueError:
        return None


# Functions.


def function_named(graph: tf.Graph, name: str | bytes) -> Any:
    """The function of this name that ops of `graph` can call, or None."""
    return graph._get_function(name)


def add_function(graph: tf.Graph, function: Any) -> None:
    """Makes a function, and all functions that it calls, known to a graph."""
    graph._add_function_recursive(function)


def traces_of(function: Any) -> list | None:
    """The concrete functions of a `tf.function`; None for other objects."""
    listed = getattr(function, "_list_all_concrete_functions", None)
    return None if listed is None else list(listed())


def trace_count(function: Any) -> int | None:
    """The number of `traces_of` a function; None for objects without traces."""
    count = getattr(function, "experimental_get_tracing_count", None)
    return None if count is None else int(count())


def converted_by_autograph(function: Callable) -> Callable:
    """The function with its control flow converted as in the surrounding code."""
    return tf.__internal__.autograph.tf_convert(
        function, tf.__internal__.autograph.control_status_ctx()
    )


def function_around(graph: Any) -> Any:
    """The function graph that contains a graph of a branch or a loop's body."""
    while isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph


def is_loop_body(graph: Any) -> bool:
    """Whether a graph is the body of a `while` loop."""
    return isinstance(graph, control_flow_v2_func_graphs.WhileBodyFuncGraph)


def is_function_of_data_set(graph: Any) -> bool:
    """Whether a data set applies this function graph to each of its elements."""
    return is_function_graph(graph) and graph.name.startswith("Dataset_")


def value_at_call(
    graph: Any, function: Callable[[], tf.Tensor], spec: tf.TensorSpec, saved: tf.Tensor
) -> tf.Tensor:
    """A tensor of a function's graph that Python computes for every call from outside.

    Args:
      graph: the graph of the function.
      function: runs before every call.
      spec: the spec of the function's result.
      saved: the value in calls of a saved function.
    """
    return graph.capture_call_time_value(function, spec, default_value=saved)


# Ops.


def definition_of(kind: str) -> Any:
    """The definition (an `OpDef`) of a type of op, or None."""
    return op_def_registry.get(kind)


def is_stateful(op: tf.Operation) -> bool:
    """Whether an op may do more than compute its outputs from its inputs."""
    return op._is_stateful


def make_op(
    graph: tf.Graph,
    kind: str,
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    **options: Any,
) -> tf.Operation:
    """Adds an op by its type.

    Args:
      graph: the graph.
      kind: the type.
      inputs: its inputs.
      dtypes: the types of its outputs.
      **options: `name`, `attrs`, `op_def`.
    """
    attributes = dict(options.pop("attrs", {}))
    for key, words in graph._attr_scope_map.items():
        if isinstance(words, _Words) and key in attributes:
            # A copy, to which TensorFlow would not add the words of its makers.
            attributes[key] = words.added_to(attributes[key])
    return graph._create_op_internal(
        kind, list(inputs), list(dtypes), attrs=attributes, **options
    )


def set_device(op: tf.Operation, device: str) -> None:
    """Places an op that exists already."""
    op._set_device(device)


def replace_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Replaces an input of an op that exists already."""
    op._update_input(index, tensor)


def run_after(op: tf.Operation, others: Sequence[tf.Operation]) -> None:
    """Makes an op that exists already wait for further ops."""
    op._add_control_inputs(others)


# Gradients.


def own_gradient(op: tf.Operation) -> Callable | None:
    """The gradient function of a single op, or None."""
    return op._gradient_function


def set_own_gradient(op: tf.Operation, function: Callable | None) -> None:
    """Gives a single op its own gradient function; None removes the function."""
    op._gradient_function = function


def registered_gradient(op: tf.Operation) -> Callable | None:
    """The gradient function of the op's type; None for a gradient of 0.

    Raises:
      LookupError: if the type has no gradient function.
    """
    return framework.get_gradient_function(op)


def differentiate_call_by(
    op: tf.Operation, differentiate: Callable[[Callable], Callable]
) -> None:
    """Replaces the differentiation of calls of a function that a tape has recorded.

    TensorFlow would rewrite the call, with the gradient's inputs as further outputs.

    Args:
      op: a call.
      differentiate: gets TensorFlow's method, and returns the new method; called once
        for each function.
    """
    owner: Any = getattr(op._gradient_function, "__self__", None)
    plain = getattr(owner, "_rewrite_forward_and_call_backward", None)
    if inspect.ismethod(plain):  # The new method is a function.
        owner._rewrite_forward_and_call_backward = differentiate(plain)


# Loops.


def body_of_loop(op: tf.Operation) -> tf.Graph:
    """The graph of the body of a `While` op, in which changes last."""
    return _graph_of_loop(op, "body", "_body_graph")


def condition_of_loop(op: tf.Operation) -> tf.Graph:
    """The graph of the condition of a `While` op, in which changes last."""
    return _graph_of_loop(op, "cond", "_cond_graph")


def _graph_of_loop(op, attribute, kept_as):
    graph = while_v2._get_graph(op, attribute, kept_as)
    # If TensorFlow made the graph from its definition, changes to it must be kept.
    setattr(op, kept_as, graph)
    graph.outer_graph = op.graph
    return graph


def write_loop_again(
    op: tf.Operation, cond: Any, body: Any, starts: Sequence[tf.Tensor]
) -> None:
    """Lets a loop carry more values, as TensorFlow does for the loop's gradient.

    Args:
      op: the `While` op.
      cond: its condition, with more inputs than the op has.
      body: its body, with the same additional inputs, and as many new outputs.
      starts: the new inputs of the op.
    """
    for name, graph in (("cond", cond), ("body", body)):
        graph.name += "_recorded"
        function = control_flow_util_v2.create_new_tf_function(graph)
        op._set_func_attr(name, function)
    new = body.outputs[len(op.outputs) :]
    op._set_type_list_attr("T", body.output_types)
    op._set_shape_list_attr("output_shapes", body.output_shapes)
    op._add_while_inputs(list(starts))
    op._add_outputs([t.dtype for t in new], [t.shape for t in new])
    while_v2._copy_handle_data(new, op.outputs[-len(new) :])
    # Without this attribute, no gradients reach the new outputs.
    count = attr_value_pb2.AttrValue(i=len(op.outputs))
    op._set_attr("_num_original_outputs", count)


# Data sets.


def data_sets_of(iterator: Any) -> list[tf.data.Dataset]:
    """The data sets of an iterator, or of a strategy's iterator."""
    parts = getattr(iterator, "_iterators", None) or [iterator]
    found = [getattr(part, "_dataset", None) for part in parts]
    known = all(isinstance(dataset, tf.data.Dataset) for dataset in found)
    return found if known else []


def show_elements(iterator: Any, function: Callable[[Any], None]) -> Any:
    """Makes an iterator of a data set show each element to a function.

    Optional elements are not shown, nor elements taken inside a `tf.function`.
    """
    known, following = weakref.ref(iterator), type(iterator)._next_internal

    def shown():
        # A strong reference would keep the iterator until garbage collection.
        element = following(known())
        function(element)
        return element

    iterator._next_internal = shown
    return iterator


def show_dealt_elements(dataset: Any, function: Callable[[Any], None]) -> Any:
    """As `show_elements`, for all iterators of a strategy's data set."""
    kind = type(dataset)

    class Shown(kind):  # type: ignore[misc, valid-type]
        def __iter__(self):
            iterator = super().__iter__()
            known, following = weakref.ref(iterator), type(iterator).get_next

            def shown(name=None):
                element = following(known(), name)
                function(element)
                return element

            iterator.get_next = shown
            return iterator

    # An instance cannot have an `__iter__` of its own.
    Shown.__name__, Shown.__qualname__ = kind.__name__, kind.__qualname__
    dataset.__class__ = Shown
    return dataset


def variant_of(dataset: tf.data.Dataset) -> tf.Tensor:
    """The variant tensor of a data set."""
    return dataset._variant_tensor


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The input data sets of a step of a pipeline."""
    if type(dataset).__name__ == "_ConcatenateDataset":
        # `apply` replaces an input by its own, unlike `_inputs`.
        made: Any = dataset
        return [made._input_dataset, made._dataset_to_concatenate]
    return dataset._inputs()


def ops_of_functions(dataset: tf.data.Dataset) -> list[str]:
    """The kinds of all ops in the functions of a step, and in their own functions."""
    return [n.op for _, nodes in bodies_of_functions(dataset) for n in nodes]


def bodies_of_functions(dataset: tf.data.Dataset) -> list[tuple[list[str], Any]]:
    """The functions of a step, and their own functions.

    Returns:
      For each function, the names of its arguments that are no resources (of a
      function of the step, also of the tensors that it closes over), and its nodes.
    """
    found: list[tuple[list[str], Any]] = []
    resource = tf.resource.as_datatype_enum
    for wrapper in dataset._functions():
        content = wrapper.function.graph.as_graph_def()
        given = [
            n.name
            for n in content.node
            if n.op == "Placeholder" and n.attr["dtype"].type != resource
        ]
        found.append((given, content.node))
        for function in content.library.function:
            arguments = function.signature.input_arg
            given = [a.name for a in arguments if a.type != resource]
            found.append((given, function.node_def))
    return found


def has_records_by_index(dataset: tf.data.Dataset) -> bool:
    """Whether `slices_at` and `record_of` know all steps of a pipeline."""
    kind = type(dataset).__name__
    known = kind in _PLACES or kind in ("_TensorSliceDataset", "_RangeDataset")
    dense = all(
        isinstance(spec, tf.TensorSpec)
        for spec in tf.nest.flatten(dataset.element_spec)
    )
    return known and dense and all(map(has_records_by_index, inputs_of(dataset)))


def slices_at(dataset: Any, indices: tf.Tensor) -> list[tf.Tensor]:
    """The slices at the beginning of a pipeline from which its records are made.

    Args:
      dataset: a pipeline that `has_records_by_index`.
      indices: the indices of the records, each below the pipeline's cardinality.
    """
    kind = type(dataset).__name__
    if kind == "_TensorSliceDataset":
        return [tf.gather(tensor, indices) for tensor in dataset._tensors]
    if kind == "_RangeDataset":
        (spec,) = tf.nest.flatten(dataset.element_spec)
        return [tf.cast(dataset._start + indices * dataset._step, spec.dtype)]
    places = _PLACES[kind](dataset, indices)
    return [t for part in inputs_of(dataset) for t in slices_at(part, places)]


def record_of(dataset: Any, slices: Iterator[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors of a record, by the maps of its pipeline.

    Args:
      dataset: a pipeline that `has_records_by_index`.
      slices: the slices of the record, from `slices_at`.
    """
    if type(dataset).__name__ == "_TensorSliceDataset":
        return [next(slices) for _ in dataset._tensors]
    if type(dataset).__name__ == "_RangeDataset":
        return [next(slices)]
    found = [t for part in inputs_of(dataset) for t in record_of(part, slices)]
    mapped = getattr(dataset, "_map_func", None)
    return found if mapped is None else list(mapped.function(*found))


# For each step of a pipeline: the indices of its records in the step before.
_PLACES: dict[str, Callable] = dict.fromkeys(
    (
        "_MapDataset",
        "_OptionsDataset",
        "_ParallelMapDataset",
        "_PrefetchDataset",
        "_TakeDataset",
        "_ZipDataset",
    ),
    lambda dataset, indices: indices,
) | {
    "_ShardDataset": lambda dataset, indices: (
        dataset._index + indices * dataset._num_shards
    ),
    "_SkipDataset": lambda dataset, indices: dataset._count + indices,
}


def rows_behind(
    dataset: Any, places: np.ndarray, records: np.ndarray | None = None
) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
    """The rows, at the beginning of a pipeline, from which its records are made.

    Args:
      dataset: a pipeline of slices, ranges and steps that keep records apart.
      places: the indices of some elements.
      records: the indices of the records that contain these elements, if the data set
        is a part of a larger pipeline.

    Yields:
      A data set at the beginning of the pipeline, indices of records, and the row of
      that data set in each of the records; once for each path between the two.
    """
    records = places if records is None else records
    kind, inputs = type(dataset).__name__, inputs_of(dataset)
    if not inputs:
        yield dataset, records, places
        return
    if kind == "_ConcatenateDataset":
        size = int(inputs[0].cardinality())
        first = places < size
        yield from rows_behind(inputs[0], places[first], records[first])
        yield from rows_behind(inputs[1], places[~first] - size, records[~first])
        return
    step = _PLACES.get(kind)
    if step is not None:
        places = np.asarray(step(dataset, places))
    for part in inputs:
        yield from rows_behind(part, places, records)


# Ops that are stateful only if the functions that they call are.
_CALLS = frozenset(("Assert", "Case", "If", "StatefulPartitionedCall", "While"))


def may_overlap(dataset: Any) -> bool:
    """Whether the maps of a pipeline can run on many records at once.

    False if a function calls Python, or iterates a data set: it holds a thread, and
    waits for functions on the same threads. False if a function has other state, and
    the map was given no `num_parallel_calls`.
    """
    kinds = set(ops_of_functions(dataset))
    if any("PyFunc" in k or "Dataset" in k or "Iterator" in k for k in kinds):
        return False
    ops = [definition_of(kind) for kind in kinds - _CALLS]
    stateful = any(op is None or op.is_stateful for op in ops)
    if stateful and type(dataset).__name__ != "_ParallelMapDataset":
        return False
    return all(map(may_overlap, inputs_of(dataset)))
