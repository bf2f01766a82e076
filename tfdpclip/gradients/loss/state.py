"""Variables that a loss reads without training them.

A step may write private data into a variable that the loss of a later step reads. The
gradients of the later step would then contain these data, without clipping and noise.
So every variable of this kind must be public: a constant, a function of public values,
or declared public by name.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._arguments import shown
from tfdpclip._docs import see
from tfdpclip._object_notes import notes_of_op, notes_of_variable
from tfdpclip._variables import all_unwrapped
from tfdpclip.gradients.errors import ExampleIsolationError
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.flows.flow import DATA, PUBLIC
from tfdpclip.gradients.graph import op_copies, ops, origins
from tfdpclip.gradients.graph.walks import ancestors


class PublicVariables:
    """Variables that the user declared to hold public values.

    Args:
      declared: variables, or names: of a variable ("bank", "bank:0"), or of a layer
        or scope of variables ("teacher" for "teacher/dense/kernel:0").

    Raises:
      ValueError: if an entry is neither a variable nor a name.
    """

    def __init__(self, declared: Iterable[tf.Variable | str] = ()):
        if not isinstance(declared, (list, tuple, set, frozenset)):
            raise ValueError(
                "public_variables must be a list of variables or of their names, got "
                f"{shown(declared)}."
            )
        declared = all_unwrapped(declared)
        self._handles: list[Any] = []
        names = []
        for entry in declared:
            if isinstance(entry, str) and entry.strip("/"):
                names.append(_plain(entry))
            elif hasattr(entry, "handle") and hasattr(entry, "name"):
                self._handles.append(entry.handle)
                names.append(_plain(entry.name))
            else:
                raise ValueError(
                    "public_variables must be a list of variables or of their names, "
                    f"got {shown(entry)} in it."
                )
        self.names: tuple[str, ...] = tuple(dict.fromkeys(names))

    def with_variables(self, variables: Iterable[tf.Variable]) -> PublicVariables:
        """These variables and `variables`, all declared public."""
        more = PublicVariables()
        more.names = self.names
        more._handles = [*self._handles, *(v.handle for v in variables)]
        return more

    def __contains__(self, entry: tuple[Any, str | None]) -> bool:
        handle, name = entry
        if any(handle is own for own in self._handles):
            return True
        if name is None:
            return False
        name = _plain(name)
        return any(name == own or name.startswith(f"{own}/") for own in self.names)


def _plain(name: str) -> str:
    return name.strip("/").removesuffix(":0")


@dataclasses.dataclass(frozen=True)
class StateRead:
    """A variable that a loss reads and that is neither trained nor declared public.

    Attributes:
      handle: the variable's handle in the loss's graph.
      identity: the variable's own handle, the same in every graph.
      name: the variable's name.
      variable: the variable, if it is known.
      written: whether the graph assigns public values to the variable.
      before: the value when the step began, if it may differ from the value at the
        step's end; None if it is not known.
      releases: the count of releases of the private optimizer that trains the variable,
        if there is such an optimizer: each release changes the variable.
      copy: the variable's public copy, if there is one: the step sets the variable
        back to the copy, if the loss's graph writes to the variable.
    """

    handle: tf.Tensor
    identity: Any
    name: str
    variable: tf.Variable | None = None
    written: bool = False
    before: tf.Tensor | None = None
    releases: tf.Variable | None = None
    copy: tf.Variable | None = None


def public_handles(
    graph, trained: Sequence[tf.Tensor], public: PublicVariables
) -> list[tf.Tensor]:
    """The handles in `graph` of variables that are declared public."""
    own = {handle.ref() for handle in trained}
    variables = variables_of(graph)
    found = []
    for _, internal in getattr(graph, "captures", ()):
        if internal.dtype != tf.resource or internal.ref() in own:
            continue
        root = origins.captured_from(internal)
        variable = variables.get(id(root))
        name = None if variable is None else variable.name
        copy = notes_of_variable(variable).public_copy
        if (root, name) in public or copy is not None:
            found.append(internal)
    return found


def find_state_reads(
    loss: tf.Tensor, flows: Dataflow, gradients: Sequence[tf.Operation] = ()
) -> list[StateRead]:
    """The variables that `loss` reads, except trained and public variables.

    Args:
      loss: the loss.
      flows: the analysis of the loss.
      gradients: the ops of the loss's gradients: a custom gradient function may read
        variables that the loss does not read.

    Returns:
      The variables. Variables with a public copy are among them.

    Raises:
      ExampleIsolationError: if the graph writes values that depend on a batch to a
        variable that the loss reads.
    """
    graph = loss.graph
    variables = variables_of(graph)
    every = [*flows.ops, *gradients]
    _refuse_moved_generators(flows, every)
    writers = functools.cache(lambda: _writers(graph))
    found: dict[int, StateRead] = {}
    seen: set[tf.Operation] = set()
    trained: set[int] = set()
    pending = every
    while pending:
        op = pending.pop()
        if op in seen:
            continue
        seen.add(op)
        for handle in _handles_for(op, ops.READS):
            handle = origins.handle_in(graph, handle)
            root = origins.captured_from(handle)
            if flows.is_trained(handle) and id(root) not in trained:
                trained.add(id(root))
                for writer in writers()[id(root)][0]:
                    if _writes_data(writer, flows):
                        _refuse(handle.op.name, writer)
            if flows.is_public(handle):
                variable = variables.get(id(root))
                copy = notes_of_variable(variable).public_copy
                if copy is not None:
                    # The variable is set back after the step, so a loss that reads the
                    # variable before the write reads the public copy.
                    wrote, before = writers()[id(root)]
                    for writer in wrote:
                        if _is_before(writer, op) and _writes_data(writer, flows):
                            _refuse(handle.op.name, writer)
                    # Writes behind this step are in no graph that is known yet.
                    name = variable.name
                    found[id(root)] = StateRead(
                        handle, root, name, variable, bool(wrote), before, copy=copy
                    )
                continue
            if id(root) in found:
                continue
            variable = variables.get(id(root))
            name = handle.op.name if variable is None else variable.name
            wrote, before = writers()[id(root)]
            for writer in wrote:
                if _writes_data(writer, flows):
                    _refuse(name, writer)
            releases = notes_of_variable(variable).releases
            for writer in wrote if releases is None else ():
                # The written value may come from further variables.
                if not notes_of_op(writer).released:
                    pending.extend(ancestors(_values(writer), stop=seen))
            found[id(root)] = StateRead(
                handle, root, name, variable, bool(wrote), before, releases
            )
    return list(found.values())


def _refuse_moved_generators(
    flows: Dataflow, operations: Sequence[tf.Operation]
) -> None:
    """Raises if data decide how the graph moves a generator that the loss draws from.

    The state of a generator changes with every draw, so no comparison of states can
    find this.
    """
    drawn = {
        id(origins.captured_from(handle)): handle
        for op in operations
        for handle in _handles_for(op, ops.GENERATORS)
    }
    if not drawn:
        return
    for root, (wrote, _) in _writers(flows.graph).items():
        for writer in wrote:
            if root in drawn and _writes_data(writer, flows):
                _refuse_generator(drawn[root], writer)
    for op in flows.graph.get_operations():
        if op.type in ops.GENERATORS:
            values = _values(op)
            moved = flows.analyse_further(values) if values else flows
            root = id(origins.captured_from(op.inputs[0]))
            if root in drawn and any(moved[v].kind == DATA for v in values):
                _refuse_generator(drawn[root], op)


def _refuse_generator(handle: tf.Tensor, writer: tf.Operation):
    raise ExampleIsolationError(
        f"The loss draws random numbers from the generator {handle.op.name!r}, and "
        f"{writer.name!r} (a {writer.type}) moves the generator by a value that may "
        "depend on the examples of a batch: an example would change the random numbers "
        "and the gradients of the rest. Set a tf.random.Generator by constants only."
        + see("state-that-a-loss-reads")
    )


def refuse_foreign_state(
    operations: Sequence[tf.Operation], of_examples: bool = True
) -> None:
    """Raises if a value may come from files, queues or tables.

    Batches or examples that came before may have written the value, and no analysis,
    nor a run with different examples, can connect a write with the read that follows.
    Variables are the business of `find_state_reads`.

    Args:
      operations: the ops of a loss, or of a gradient of the loss.
      of_examples: whether a value from an example of the same batch is refused, too.

    Raises:
      ExampleIsolationError: naming the op.
    """
    through = [
        (op, op_copies.find_external_state(op, of_examples)) for op in operations
    ]
    writer = _writer_of_table(operations)
    if writer is not None:
        through.append((writer, writer.type))
    for op, kind in through:
        if kind in ops.PYTHON:
            refuse_python(op)
        if kind is not None:
            raise ExampleIsolationError(
                f"The loss depends on {op.name!r} (a {kind}), which may read data of "
                "other batches, or of other examples of this batch: they would reach "
                "an example's gradient without clipping. Use TensorFlow's ops, or run "
                "the code in the data pipeline, before batches are drawn."
                + see("mixed-examples")
            )


def refuse_python(op: tf.Operation) -> None:
    """Raises because Python code is behind a loss.

    Raises:
      ExampleIsolationError: naming the op.
    """
    raise ExampleIsolationError(
        "The loss of the examples passes through Python code, in "
        f"{op.name!r} (a {op.type}), which cannot be analysed: the result may be "
        "of other batches, and whether examples stay apart cannot be tested. Use "
        "TensorFlow's ops, or run the code in the data pipeline, before batches are "
        "drawn." + see("mixed-examples")
    )


def _writer_of_table(operations: Iterable[tf.Operation]) -> tf.Operation | None:
    """The op that writes to a lookup table that `operations` read, if there is any."""
    writers = None
    for op in operations:
        for handle in _handles_for(op, ops.TABLE_READS):
            writers = _writers(op.graph) if writers is None else writers
            table = origins.captured_from(handle)
            for writer in writers[id(table)][0]:
                for index, used in enumerate(writer.inputs):
                    # A call may also get the handles of variables.
                    same = origins.captured_from(used) is table
                    users = origins.handle_users(writer, index) if same else ()
                    if not ops.TABLE_READS.issuperset(users):
                        return writer
    return None


def _handles_for(op: tf.Operation, kind: frozenset[str]) -> Iterable[tf.Tensor]:
    """The op's handles that ops of `kind`, here or in called functions, use."""
    for index, handle in enumerate(op.inputs):
        if handle.dtype != tf.resource:
            continue
        if not kind.isdisjoint(origins.handle_users(op, index)):
            yield handle


def _writers(graph) -> dict[int, tuple[list[tf.Operation], tf.Tensor | None]]:
    """By each variable's own handle: the ops that write to it, and its value before.

    The graph and the graphs around it are searched.
    """
    found: dict[int, tuple[list, Any]] = collections.defaultdict(lambda: ([], None))
    start = graph
    while isinstance(graph, tf.Graph) and hasattr(graph, "get_operations"):
        for op in graph.get_operations():
            for index, handle in enumerate(op.inputs):
                if handle.dtype != tf.resource:
                    continue
                root = id(origins.captured_from(handle))
                users = set(origins.handle_users(op, index))
                if users <= ops.READS | ops.RANDOM | ops.ITERATORS:
                    first = op.type == "ReadVariableOp" and graph is start
                    found.setdefault(root, ([], op.outputs[0] if first else None))
                else:
                    found[root][0].append(op)
        graph = getattr(graph, "outer_graph", None)
    return found


def _values(writer: tf.Operation) -> list[tf.Tensor]:
    return [t for t in writer.inputs if t.dtype != tf.resource]


def _writes_data(writer: tf.Operation, flows: Dataflow) -> bool:
    if notes_of_op(writer).released:
        return False
    if writer.graph is not flows.graph or origins.brings_data(writer):
        return True
    values = _values(writer)
    if not values:
        return False
    # Not `flows`: the loss need not depend on a value that is only written.
    written = flows.analyse_further(values)
    return any(written[value].kind != PUBLIC for value in values)


def _is_before(first: tf.Operation, second: tf.Operation) -> bool:
    """Whether `first` was made before `second`; ops of graphs around always were.

    A call that reads and writes, like a decorated batch normalisation, is a single op.
    """
    if first is second:
        return False
    if first.graph is not second.graph:
        return True
    operations = first.graph.get_operations()
    return next(op for op in operations if op in (first, second)) is first


def _refuse(name: str, writer: tf.Operation):
    raise ExampleIsolationError(
        f"The loss reads the variable {name!r}, and {writer.name!r} (a {writer.type}) "
        "writes to it values that may depend on a batch: they would reach further "
        "gradients without clipping or noise. A metric in a loss, a memory bank and "
        "stateful=True do this. Compute the value from each example alone "
        "(stateful=False), or, if the written values are public, say so: "
        f"dpc.keras.DPSGD(..., public_variables=[{_plain(name)!r}])."
        + see("state-that-a-loss-reads")
    )


def variables_of(graph: Any) -> dict[int, tf.Variable]:
    """The variables that a graph and the graphs around it use, by the handle's `id`."""
    found = {}
    while graph is not None:
        for variable in _tf_private.watched_variables(graph):
            found[id(variable.handle)] = variable
        graph = getattr(graph, "outer_graph", None)
    return found
