"""The private symbols of TensorFlow, each behind a function with a public meaning.

Only this module may use private symbols of TensorFlow; `keras/_compat.py` does the same
for Keras, `federated/_tff.py` for TensorFlow Federated. A test refuses every other use.
To port the library to a new version of TensorFlow, begin here.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
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
    """What is known of the variable behind a handle (`is_set`); None for nothing."""
    return getattr(handle, "_handle_data", None)


def copy_handle_data(old: tf.Tensor, new: tf.Tensor) -> None:
    """Tells of a new resource or list of tensors what is known of another."""
    handle_data_util.copy_handle_data(old, new)


def values_of(handles: list[tf.Tensor], types: list[tf.DType]) -> list[tf.Tensor]:
    """What variables of one device hold now, by one op and not copied.

    Args:
      handles: the variables', at least one.
      types: of each.
    """
    # As the functions behind `tf.raw_ops` do it, of which this op has none: a third of
    # the time of `execute`, twice in every step.
    return pywrap_tfe.TFE_Py_FastPathExecute(
        context.context(), "_ReadVariablesOp", None, handles, "dtypes", types
    )


# Graphs.


def is_function_graph(graph: Any) -> bool:
    """Whether the graph is that of a `tf.function`, a branch or a loop's body."""
    return isinstance(graph, tf.__internal__.FuncGraph)


def new_function_graph(name: str) -> tf.Graph:
    """A graph within the current one."""
    return func_graph.FuncGraph(name)


def compiled_by_xla(graph: tf.Graph) -> bool:
    """Whether what is being added to a graph will be compiled by XLA."""
    context = graph._get_control_flow_context()
    while context is not None:
        if context.IsXLAContext():
            return True
        context = context.outer_context
    return False


def watched_variables(graph: Any) -> Sequence[tf.Variable]:
    """The variables that were used in a graph."""
    return getattr(graph, "_watched_variables", ())


def run_as_it_is(call: tf.Operation) -> None:
    """Has a call's function run without TensorFlow's graph rewriting."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    value = attr_value_pb2.AttrValue(s=config.SerializeToString())
    call._set_attr("config_proto", value)


def call_instead(call: tf.Operation, function: Any) -> None:
    """Has a call run another function, which may put out more.

    As TensorFlow does with a call whose gradient it takes.

    Args:
      call: the call.
      function: a graph of its own: it captures nothing, its inputs are those of the
        call, and its outputs begin with those of the call.
    """
    new = function.outputs[len(call.outputs) :]
    function.name = f"{function.name}_{framework.uid()}"
    call._set_func_attr("f", control_flow_util_v2.create_new_tf_function(function))
    call._set_type_list_attr("Tout", [t.dtype for t in function.outputs])
    call._add_outputs([t.dtype for t in new], [t.shape for t in new])
    for inner, outer in zip(new, call.outputs[-len(new) :], strict=True):
        copy_handle_data(inner, outer)


@contextlib.contextmanager
def attribute_of_new_ops(name: str, text: str) -> Iterator[None]:
    """Writes an attribute to every op that is made within, in this graph.

    Replicas of a strategy take turns in one graph, each in a thread of its own, and
    what they merge is made in another while all of them wait. So, with a strategy, ops
    of this thread are meant, and what is merged.
    """
    value = attr_value_pb2.AttrValue(s=text.encode())
    graph = tf.compat.v1.get_default_graph()
    if not tf.distribute.has_strategy():
        with graph._attr_scope({name: value}):
            yield
        return
    by_thread = graph._attr_scope_map.setdefault(name, _ByThread())
    own = by_thread.values.setdefault(threading.get_ident(), [])
    own.append(value)
    try:
        yield
    finally:
        own.pop()
        if not any(by_thread.values.values()):
            graph._attr_scope_map.pop(name, None)


class _ByThread:
    """The attribute that ops get by the thread that makes them."""

    def __init__(self):
        self.values: dict[int, list] = {}

    def __call__(self, node_def: Any) -> Any:
        del node_def
        own = self.values.get(threading.get_ident())
        if not own and tf.distribute.in_cross_replica_context():
            own = next(filter(None, self.values.values()), None)
        return own[-1] if own else None


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
    """Makes a function, and those that it calls, known to a graph."""
    graph._add_function_recursive(function)


def traces_of(function: Any) -> list | None:
    """The concrete functions of a `tf.function`; None if that is something else."""
    listed = getattr(function, "_list_all_concrete_functions", None)
    return None if listed is None else list(listed())


def trace_count(function: Any) -> int | None:
    """How many `traces_of` there are; None if that is something else."""
    count = getattr(function, "experimental_get_tracing_count", None)
    return None if count is None else int(count())


def converted_by_autograph(function: Callable) -> Callable:
    """The function with its control flow turned into ops, as around it."""
    return tf.__internal__.autograph.tf_convert(
        function, tf.__internal__.autograph.control_status_ctx()
    )


def function_around(graph: Any) -> Any:
    """The graph of the function that a graph is, or is a branch or a loop's body of."""
    while isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph


def is_function_of_data_set(graph: Any) -> bool:
    """Whether a function graph is what a data set does with each of its elements."""
    return is_function_graph(graph) and graph.name.startswith("Dataset_")


def value_at_call(
    graph: Any, function: Callable[[], tf.Tensor], spec: tf.TensorSpec, saved: tf.Tensor
) -> tf.Tensor:
    """A tensor of a function's graph that Python computes for every call from outside.

    Args:
      graph: the function's.
      function: run before every call.
      spec: of what it returns.
      saved: the value where a saved function is called.
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
      dtypes: of its outputs.
      **options: `name`, `attrs`, `op_def`.
    """
    return graph._create_op_internal(kind, list(inputs), list(dtypes), **options)


def set_device(op: tf.Operation, device: str) -> None:
    """Places an op that has been made already."""
    op._set_device(device)


def replace_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Lets an op that has been made already take another input."""
    op._update_input(index, tensor)


def run_after(op: tf.Operation, others: Sequence[tf.Operation]) -> None:
    """Lets an op that has been made already wait for others."""
    op._add_control_inputs(others)


# Gradients.


def own_gradient(op: tf.Operation) -> Callable | None:
    """The gradient function that one op was given, or None."""
    return op._gradient_function


def set_own_gradient(op: tf.Operation, function: Callable | None) -> None:
    """Gives one op a gradient function of its own; None takes it away."""
    op._gradient_function = function


def registered_gradient(op: tf.Operation) -> Callable | None:
    """The gradient function by the op's type; None for a gradient of 0.

    Raises:
      LookupError: if there is none.
    """
    return framework.get_gradient_function(op)


def differentiate_call_by(
    op: tf.Operation, differentiate: Callable[[Callable], Callable]
) -> None:
    """Has calls of a function that a tape has recorded differentiated another way.

    TensorFlow would write the call again, with what its gradient needs as outputs.

    Args:
      op: a call.
      differentiate: is given TensorFlow's way, and returns the new one; once for each
        function.
    """
    owner: Any = getattr(op._gradient_function, "__self__", None)
    if not hasattr(owner, "_rewrite_forward_and_call_backward"):
        return
    if hasattr(owner, "_tfdpclip_plain"):
        return
    owner._tfdpclip_plain = owner._rewrite_forward_and_call_backward
    owner._rewrite_forward_and_call_backward = differentiate(owner._tfdpclip_plain)


# Loops.


def body_of_loop(op: tf.Operation) -> tf.Graph:
    """The graph of the body of a `While` op, in which changes last."""
    return _graph_of_loop(op, "body", "_body_graph")


def condition_of_loop(op: tf.Operation) -> tf.Graph:
    """The graph of the condition of a `While` op, in which changes last."""
    return _graph_of_loop(op, "cond", "_cond_graph")


def _graph_of_loop(op, attribute, kept_as):
    graph = while_v2._get_graph(op, attribute, kept_as)
    # Where TensorFlow had to make it from its definition, changes must last.
    setattr(op, kept_as, graph)
    graph.outer_graph = op.graph
    return graph


def write_loop_again(
    op: tf.Operation, cond: Any, body: Any, starts: Sequence[tf.Tensor]
) -> None:
    """Lets a loop carry more, as TensorFlow does when it takes its gradient.

    Args:
      op: the `While` op.
      cond: its condition, with more inputs than the op has.
      body: its body, with as many more inputs and outputs.
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
    # Or else no gradients arrive at the new ones.
    count = attr_value_pb2.AttrValue(i=len(op.outputs))
    op._set_attr("_num_original_outputs", count)


# Data sets.


def data_sets_of(iterator: Any) -> list[tf.data.Dataset]:
    """The data sets that an iterator, or a strategy's, goes through."""
    parts = getattr(iterator, "_iterators", None) or [iterator]
    found = [getattr(part, "_dataset", None) for part in parts]
    known = all(isinstance(dataset, tf.data.Dataset) for dataset in found)
    return found if known else []


def show_elements(iterator: Any, function: Callable[[Any], None]) -> Any:
    """The iterator of a data set, which shows each element to a function.

    Not what is taken of it as an optional element, nor in a function that was given it.
    """
    known, following = weakref.ref(iterator), type(iterator)._next_internal

    def shown():
        # A reference to the iterator would keep it until garbage is collected.
        element = following(known())
        function(element)
        return element

    iterator._next_internal = shown
    return iterator


def variant_of(dataset: tf.data.Dataset) -> tf.Tensor:
    """The tensor that stands for a data set."""
    return dataset._variant_tensor


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The data sets that a step of a pipeline is made of."""
    if type(dataset).__name__ == "_ConcatenateDataset":
        # `apply` puts its own input in the place of what `_inputs` gives.
        made: Any = dataset
        return [made._input_dataset, made._dataset_to_concatenate]
    return dataset._inputs()


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
    """What records of a pipeline are made of, where it begins.

    Args:
      dataset: a pipeline that `has_records_by_index`.
      indices: of the records, each below the pipeline's cardinality.
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
      slices: what the record is made of, as `slices_at` has it.
    """
    if type(dataset).__name__ == "_TensorSliceDataset":
        return [next(slices) for _ in dataset._tensors]
    if type(dataset).__name__ == "_RangeDataset":
        return [next(slices)]
    found = [t for part in inputs_of(dataset) for t in record_of(part, slices)]
    mapped = getattr(dataset, "_map_func", None)
    return found if mapped is None else list(mapped.function(*found))


# Of the steps of a pipeline: which records of what is before them records are made of.
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
    """Which rows of what a pipeline begins with its records are made of.

    Args:
      dataset: a pipeline of slices, ranges and steps that keep records apart.
      places: the numbers of some of its elements.
      records: the numbers of the records that these elements are in, if the data set is
        a part of another pipeline.

    Yields:
      A data set with which the pipeline begins, numbers of records, and the row of that
      data set that each of them has; once for each way between the two.
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


# They are stateful only where what they call is.
_CALLS = frozenset(("Assert", "Case", "If", "StatefulPartitionedCall", "While"))


def may_overlap(dataset: Any) -> bool:
    """Whether the maps of a pipeline can all be scheduled at once, on many records.

    Not where a function calls Python, or iterates a data set: it holds a thread, and
    waits for others of the same threads. Nor where it has other state, and the map was
    given no `num_parallel_calls`.
    """
    mapped = getattr(dataset, "_map_func", None)
    if mapped is not None:
        definition = mapped.function.graph.as_graph_def()
        kinds = {node.op for node in definition.node}
        for function in definition.library.function:
            kinds.update(node.op for node in function.node_def)
        if any("PyFunc" in k or "Dataset" in k or "Iterator" in k for k in kinds):
            return False
        ops = [definition_of(kind) for kind in kinds - _CALLS]
        stateful = any(op is None or op.is_stateful for op in ops)
        if stateful and type(dataset).__name__ != "_ParallelMapDataset":
            return False
    return all(map(may_overlap, inputs_of(dataset)))
