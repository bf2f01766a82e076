"""Labels each tensor of a traced training step with the sources that made the tensor.

One pass follows batches, variables and iterators from node to node, through all
functions, branches and loops that the graph calls. The pass notes every use of a
variable, and `step_search` answers all questions about a step from the notes.

A label is a set of sources, one bit of an integer for each source, so the label of a
result is `|` of the labels of the inputs. A source of an unknown kind is `UNKNOWN`.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._object_notes import notes_of_node
from tfdpclip._variables import components, path_of, unwrapped
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.graph.walks import functions_in_attributes

#: The batches of the step.
DATA = 1
#: The number of records in a batch.
SIZE = 2
#: A tensor, other than a variable, that was made before the step.
OUTSIDE = 4
#: State that the pass cannot follow, or a constant as large as a mean of records.
UNKNOWN = 8
#: An argument of the step, such as an iterator over batches.
ARGUMENT = 16
_FIRST = 5  # The bit of the first source with a name.

# The kinds of sources with names.
_KINDS = ("handle", "value", "altered", "turn")
# Ops that leave every number in its place. Iterators give sparse batches serialized.
_UNCHANGED = frozenset(
    "Identity Cast EnsureShape StopGradient DeserializeSparse".split()
)
# Results that tell how many records there are, and hold no values.
_SIZES = frozenset(("TensorListReserve", "EmptyTensorList", "OptionalHasValue"))
_BY_A_CONSTANT = frozenset("Mul AddV2 Add Sub RealDiv".split())
# The beginnings of the types of ops that take an element from an iterator.
_TAKE_ELEMENTS = ("IteratorGetNext", "OptionalGetValue")
_WRITES = ("ResourceApply", "ResourceSparseApply", "ResourceStridedSliceAssign")
# The most entries of a variable that the step reads only, such as a learning rate.
_FEW = 8
# The most entries of a public constant, unless all entries are equal.
_FEW_CONSTANTS = 16


def is_write(kind: str) -> bool:
    """Whether an op of a type changes a variable, and does no more."""
    return kind in ops.WRITES | ops.GENERATORS or kind.startswith(_WRITES)


class Inside(NamedTuple):
    """A place in a step.

    Attributes:
      function: the name of the function, for messages.
      chosen_by: the label of the values that decided that the place is reached.
      updates: whether the place belongs to the private optimizer.
      applies: whether the place belongs to the update, after the gradient is private.
    """

    function: str
    chosen_by: int = 0
    updates: bool = False
    applies: bool = False


class Use(NamedTuple):
    """A use of a variable by an op.

    Attributes:
      variable: the `id` of the variable's handle; None if the variable is unknown.
      kind: the type of the op.
      where: the op and its function, for messages.
      made_of: the label of the op's inputs.
      inside: the place of the op.
    """

    variable: int | None
    kind: str
    where: str
    made_of: int
    inside: Inside

    @property
    def reads_only(self) -> bool:
        """Whether the op is known to only read."""
        return self.kind in ops.READS


class _Node(NamedTuple):
    """What the pass needs of a node, read once."""

    name: str
    kind: str
    inputs: list[tuple[str, int]]
    updates: bool
    applies: bool
    called: list[str]  # The functions that get the node's inputs unchanged.
    others: list[str]  # Functions that may get the inputs in another order.
    constant: Any  # The value of a constant, as a message; None for other nodes.


class _Body(NamedTuple):
    arguments: list[str]
    nodes: list[_Node]
    results: list[tuple[str, int]]
    same_as: dict[str, str]


class StepFunctions:
    """The nodes of a graph and of the functions that the graph calls.

    Args:
      graph: the graph.
      identity: the identity of the private optimizer; None for all private optimizers,
        and for all ops that they make of a loss.
      until: the name of the first op to leave out, with the ops made after it.

    Attributes:
      main: the nodes of the graph itself.
      other_step: the name of an op of another private optimizer's step, or None.
    """

    def __init__(self, graph: tf.Graph, identity: str | None, until: str | None = None):
        definition = graph.as_graph_def()
        self._functions = {f.signature.name: f for f in definition.library.function}
        self._identity = identity
        self._bodies: dict[str, _Body] = {}
        self._private: dict[str, bool] = {}
        self.other_step: str | None = None
        before = itertools.takewhile(lambda node: node.name != until, definition.node)
        self.main = self._read([], list(before), [])

    def body(self, name: str) -> _Body:
        """The function of a name."""
        if name not in self._bodies:
            function = self._functions[name]
            results = [function.ret[of.name] for of in function.signature.output_arg]
            arguments = [argument.name for argument in function.signature.input_arg]
            self._bodies[name] = self._read(arguments, function.node_def, results)
        return self._bodies[name]

    def _read(self, arguments: list[str], nodes: Any, results: list[str]) -> _Body:
        return _Body(
            arguments,
            [self._node(node) for node in nodes],
            [_place_of(name) for name in results],
            _shapes_of_sparse_batches(nodes),
        )

    def _node(self, node: _tf_private.NodeDef) -> _Node:
        notes = notes_of_node(node)
        applies = self._identity in notes.applies
        updates = self._identity in notes.updates
        if self._identity is None:
            updates = notes.made_of_a_loss or bool(notes.updates)
        if notes.applies and not applies:
            self.other_step = self.other_step or node.name
        named = node.op in self._functions
        names = [node.op] if named else functions_in_attributes(node)
        inside = [name for name in names if name in self._functions]
        same_order = named or (node.op in ops.FIRST_ARGUMENT and inside == names)
        return _Node(
            node.name,
            node.op,
            [_place_of(name) for name in node.input if name[0] != "^"],
            updates,
            applies,
            inside if same_order else [],
            [] if same_order else inside,
            node.attr["value"].tensor if node.op == "Const" else None,
        )

    def is_private(self, name: str) -> bool:
        """Whether a function, or a function that it calls, contains the update."""
        if name not in self._private:
            self._private[name] = False  # Ends the recursion of circular calls.
            self._private[name] = any(
                node.updates or any(map(self.is_private, node.called))
                for node in self.body(name).nodes
            )
        return self._private[name]

    def has_several_steps(self, body: _Body | None = None) -> bool:
        """Whether functions with the private step inside are called more than once."""
        nodes = (body or self.main).nodes
        calls = [set(filter(self.is_private, node.called)) for node in nodes]
        return len(list(filter(None, calls))) > 1 or any(
            self.has_several_steps(self.body(name)) for name in set().union(*calls)
        )


def _place_of(name: str) -> tuple[str, int]:
    """The node or argument that a tensor comes from, and the number of its output."""
    node, *rest = name.split(":")
    return node, int(rest[-1]) if rest else 0


def _shapes_of_sparse_batches(nodes: Any) -> dict[str, str]:
    """The shapes of sparse batches with static lengths, each with the op of the batch.

    TensorFlow unpacks the shape, and packs each length, or the static length in its
    place. Every other use of the shape is an op that changes data.
    """
    by_name = {node.name: node for node in nodes}
    shapes = {}
    for pack in nodes:
        if pack.op != "Pack":
            continue
        # An argument of the function is no node; `pack` itself in its place refuses.
        sources = {by_name.get(_place_of(name)[0], pack).name for name in pack.input}
        unpacks = [by_name[s] for s in sources if by_name[s].op != "Const"]
        if [s.op for s in unpacks] != ["Unpack"]:
            continue
        in_place = all(
            place == i
            for i, (source, place) in enumerate(map(_place_of, pack.input))
            if source == unpacks[0].name
        )
        shape = unpacks[0].input[0]
        batch = _place_of(shape)[0]
        is_shape = shape in (f"{batch}:2", f"{batch}:sparse_shape:0")
        if in_place and is_shape and by_name[batch].op == "DeserializeSparse":
            shapes[pack.name] = batch
    return shapes


def _label_of_constant(value: np.ndarray | bytes | None) -> int:
    """The label of a constant: unknown, if it is large enough for a mean of records."""
    if value is None:
        return UNKNOWN
    value = np.asarray(value)  # A string is no array.
    few = value.size <= _FEW_CONSTANTS or bool((value == value.flat[0]).all())
    return 0 if few else UNKNOWN


class StepLabels:
    """The labels of a traced function's tensors, and the notes of the pass.

    Args:
      graph: the graph of the traced function, whose arguments are the data.
      identity: see `StepFunctions`.
      until: see `StepFunctions`.

    Attributes:
      names: the names of the step's variables by the `id` of their handles; None if a
        variable of the step was deleted.
      few: the `id`s of the handles of variables with a few entries.
      uses: all uses of variables.
      private_calls: the labels of the arguments of all functions, branches and loops
        with the private step inside.
      next_turns: the labels of values that a loop hands to the private step of its next
        turn.
      other_data: an op that reads a data set that is no argument of the step, or None.
      python: an op that runs Python code, or None.
      other_step: an op of another private optimizer's step, or None.
    """

    def __init__(
        self, graph: tf.Graph, identity: str | None = None, until: str | None = None
    ):
        self._functions = StepFunctions(graph, identity, until)
        self.uses: list[Use] = []
        self.private_calls = self.next_turns = 0
        self.other_data: str | None = None
        self.python: str | None = None
        self._bits: dict[tuple[str, Any], int] = {}
        self._named: list[tuple[str, Any]] = []
        self._kinds: dict[str, int] = dict.fromkeys(_KINDS, 0)
        self._results: dict[tuple, tuple[int, ...]] = {}
        self._note_variables(graph)
        captured = {inside.op.name: outside for outside, inside in graph.captures}
        # Every further optional element is made in the step, for example by the
        # gradient of a branch from values that the branch saved.
        self._optionals = any(t.dtype == tf.variant for t in captured.values())
        roots = {}
        # Graphs that are still traced do not list their inputs yet.
        inputs = (op for op in graph.get_operations() if op.type == "Placeholder")
        for op in inputs:
            resource = op.outputs[0].dtype == tf.resource
            roots[op.name] = ARGUMENT if resource else ARGUMENT | DATA
            if op.name in captured:
                roots[op.name] = self._captured(captured[op.name])
        self._follow(self._functions.main, roots, Inside("the training step"))
        self.other_step = self._functions.other_step
        # The labels stay as long as the trace: the copy of its graph need not.
        del self._functions, self._results

    def _note_variables(self, graph: tf.Graph) -> None:
        self.names: dict[int, str] | None = {}
        self.few: set[int] = set()
        try:
            variables = graph.variables
        except AssertionError:  # A variable object is gone, and only its value is left.
            self.names = None
            return
        for variable in variables:
            whole = unwrapped(variable)
            handles = {id(part.handle) for part in components(whole)}
            self.names.update(dict.fromkeys(handles, path_of(variable)))
            if (whole.shape.num_elements() or _FEW + 1) <= _FEW:
                self.few |= handles

    def _captured(self, tensor: tf.Tensor) -> int:
        if tensor.dtype == tf.variant:  # No array, as an optional element.
            return OUTSIDE | UNKNOWN
        if tensor.dtype != tf.resource:
            made = 0 if _tf_private.is_eager(tensor) else DATA
            return made | OUTSIDE | _label_of_constant(tf.get_static_value(tensor))
        variable = id(tensor) in (self.names or ())
        return self._source("handle", id(tensor)) | (0 if variable else UNKNOWN)

    # Sources.

    def _source(self, kind: str, what: Any) -> int:
        """The bit of a source."""
        if (kind, what) not in self._bits:
            self._bits[kind, what] = 1 << (_FIRST + len(self._named))
            self._kinds[kind] |= self._bits[kind, what]
            self._named.append((kind, what))
        return self._bits[kind, what]

    def sources(self, label: int, *kinds: str) -> Iterator[tuple[str, Any]]:
        """The named sources in a label, the first to be noted first.

        Kinds are "handle" (the label is of a variable's handle) and "value" (of a
        variable's value), both with the `id` of the handle; "altered" (data that an op
        changed), with the op; and "turn", with a source of the last turn of a loop.
        """
        left = label & self._mask(*kinds)
        while left:
            lowest = left & -left
            yield self._named[lowest.bit_length() - 1 - _FIRST]
            left ^= lowest

    def _mask(self, *kinds: str) -> int:
        return _joined(self._kinds[kind] for kind in kinds)

    # The pass.

    def _follow(self, body: _Body, roots: dict[str, int], inside: Inside) -> dict:
        """The labels of a body's nodes: a number, or one for each result of a call."""
        labels: dict[str, int | tuple[int, ...]] = dict(roots)
        constants = {node.name for node in body.nodes if node.constant is not None}
        for node in body.nodes:
            if node.name in roots:
                continue
            if node.name in body.same_as:
                labels[node.name] = labels[body.same_as[node.name]]
                continue
            inputs = [_label_at(labels, place) for place in node.inputs]
            within = inside._replace(
                updates=inside.updates or node.updates,
                applies=inside.applies or node.applies,
            )
            made = self._called if node.called else self._made
            label = made(node, inputs, within)
            fixed = [name in constants for name, _ in node.inputs]
            labels[node.name] = self._altered(
                node, inputs, fixed, label, inside.function
            )
        return labels

    def _made(self, node: _Node, inputs: list[int], inside: Inside) -> int:
        """The label of an op's results, as if the op left data in place."""
        where = f"{node.kind} {node.name!r} in {inside.function}"
        if node.constant is not None:
            return _label_of_constant(tf.make_ndarray(node.constant))
        if node.kind in ops.PYTHON:
            self.python = self.python or where
        if "Dataset" in node.kind or "Iterator" in node.kind or _takes(node):
            if not self._from_an_argument(node, inputs):
                self.other_data = self.other_data or where
            elif _takes(node):
                return ARGUMENT | DATA
        if _takes(node):
            return DATA
        if node.kind == "Identity" and inputs:
            return inputs[0]
        for name in node.others:
            unknown = (UNKNOWN,) * len(self._functions.body(name).arguments)
            self._within(name, unknown, inside)
        label = _joined(inputs)
        if inside.updates:
            self.next_turns |= label & self._mask("turn")
        return self._used(node, label, where, inside)

    def _used(self, node: _Node, label: int, where: str, inside: Inside) -> int:
        """Notes the variables that an op takes; returns the label of its results."""
        handles = [what for _, what in self.sources(label, "handle")]
        label &= ~(self._mask("handle") | ARGUMENT)
        for variable in handles or ([None] if is_write(node.kind) else []):
            self.uses.append(Use(variable, node.kind, where, label, inside))
        values = _joined(self._source("value", variable) for variable in handles)
        if handles:
            return label | values | (UNKNOWN if inside.updates else 0)
        definition = _tf_private.definition_of(node.kind)
        harmless = node.kind in ops.DRAWS or node.kind == "Assert" or inside.updates
        if definition is None or (definition.is_stateful and not harmless):
            return label | UNKNOWN
        outside = node.kind in ops.FROM_OUTSIDE or node.kind == "Placeholder"
        return label | (UNKNOWN if outside else 0)

    def _from_an_argument(self, node: _Node, inputs: list[int]) -> bool:
        """Whether an op reads a data set that is an argument of the step."""
        brought = UNKNOWN | OUTSIDE | self._mask("handle")
        of_argument = inputs and inputs[0] & ARGUMENT and not inputs[0] & brought
        made_here = node.kind == "OptionalGetValue" and not self._optionals
        return _takes(node) and bool(of_argument or made_here)

    def _altered(
        self,
        node: _Node,
        inputs: list[int],
        fixed: list[bool],
        label: int | tuple[int, ...],
        where: str,
    ) -> int | tuple[int, ...]:
        """The label of results, with a source for an op that changed data."""
        data = DATA | OUTSIDE
        if isinstance(label, tuple) or not label & data or _takes(node):
            return label
        changed = self._mask("altered")
        if node.kind in _SIZES:
            return (label & ~(data | changed)) | (SIZE if label & DATA else 0)
        of_data = [bool(taken & data) for taken in inputs]
        others = all(map(operator.or_, of_data, fixed))
        same = node.kind in _UNCHANGED or (node.kind in _BY_A_CONSTANT and others)
        if label & changed or (same and sum(of_data) == 1):
            return label
        return label | self._source("altered", f"{node.kind} {node.name!r} in {where}")

    def _called(
        self, node: _Node, inputs: list[int], inside: Inside
    ) -> tuple[int, ...]:
        """The labels of the results of the functions that a node calls."""
        first = ops.FIRST_ARGUMENT.get(node.kind, 0)
        arguments = tuple(inputs[first:])
        chosen_by = _joined(inputs[:first]) & ~ARGUMENT
        within = inside._replace(chosen_by=inside.chosen_by | chosen_by)
        private = any(map(self._functions.is_private, node.called))
        if private and not node.updates:
            self.private_calls |= _joined(inputs)
        if node.kind in ops.LOOPS:
            return self._looped(node.called, arguments, private, within)
        results = [self._within(name, arguments, within) for name in node.called]
        joined = [chosen_by | _joined(of) for of in zip(*results, strict=True)]
        if node.kind in node.called:  # Such a node counts each named result from 0.
            joined = [_joined(joined)] * len(joined)
        return tuple(joined)

    def _looped(
        self,
        called: list[str],
        arguments: tuple[int, ...],
        private: bool,
        inside: Inside,
    ) -> tuple[int, ...]:
        """The labels of a loop's results: each turn gets the results of the last."""
        body, test = called  # By the names of the attributes.
        turn = arguments
        while True:
            again = _joined(self._within(test, turn, inside)) & ~ARGUMENT
            inside = inside._replace(chosen_by=inside.chosen_by | again)
            made = self._within(body, turn, inside)
            handed = map(self._handed_on, made) if private else made
            turn, last = tuple(map(operator.or_, turn, handed)), turn
            if turn == last:
                return tuple(again | a | m for a, m in zip(turn, made, strict=True))

    def _handed_on(self, label: int) -> int:
        """The label of a value of the last turn of a loop with the private step."""
        sources = list(self.sources(label, "altered", "value"))
        if not sources:
            return label
        data = SIZE if label & DATA else 0
        label &= ~(self._mask("altered", "value") | DATA | OUTSIDE)
        return label | data | _joined(self._source("turn", of) for of in sources)

    def _within(
        self, name: str, arguments: tuple[int, ...], inside: Inside
    ) -> tuple[int, ...]:
        """The labels of a function's results."""
        inside = inside._replace(function=name)
        key = (arguments, inside)
        if key not in self._results:
            body = self._functions.body(name)
            # Read by a function that calls itself.
            self._results[key] = (UNKNOWN,) * len(body.results)
            roots = dict(zip(body.arguments, arguments, strict=True))
            labels = self._follow(body, roots, inside)
            self._results[key] = tuple(_label_at(labels, of) for of in body.results)
        return self._results[key]


def _takes(node: _Node) -> bool:
    return node.kind.startswith(_TAKE_ELEMENTS)


def _label_at(labels: dict[str, Any], place: tuple[str, int]) -> int:
    label = labels.get(place[0], UNKNOWN)
    return label[place[1]] if isinstance(label, tuple) else label


def _joined(labels: Iterable[int]) -> int:
    return functools.reduce(operator.or_, labels, 0)
