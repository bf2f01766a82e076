"""Finding what else writes to the weights that a private optimizer trains."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._variables import components, unwrapped

# The attribute of operations that a private optimizer updates variables with.
UPDATE_MARK = "_tfdpclip_update"
# And of those that the update itself is made of, once the gradient is private.
APPLY_MARK = "_tfdpclip_apply"
# How many inputs of a call are none of its functions' arguments.
SKIPPED = {"If": 1, "StatelessIf": 1, "Case": 1, "StatelessCase": 1}
READS = frozenset(
    (
        "ReadVariableOp",
        "ResourceGather",
        "ResourceGatherNd",
        "VarIsInitializedOp",
        "VariableShape",
    )
)


class _Eager:
    """Counts the updates that ran eagerly, by whichever private optimizer."""

    updates: int = 0


EAGER = _Eager()


@contextlib.contextmanager
def marked_updates(history: Any) -> Iterator[None]:
    """Marks what is built within as updates by the optimizer with this history.

    Args:
      history: its `StepHistory`.
    """
    if tf.executing_eagerly():
        watch = history.watch
        EAGER.updates += 1
        if watch is not None:
            watch.before_update()
        yield
        if watch is not None:
            watch.hold()
        return
    text = history.identity
    with own_writes(history), _tf_private.attribute_of_new_ops(APPLY_MARK, text):
        yield


@contextlib.contextmanager
def own_writes(history: Any) -> Iterator[None]:
    """Marks what is built within, in this graph, as done by the optimizer itself.

    Args:
      history: its `StepHistory`.
    """
    if tf.executing_eagerly():
        yield
        return
    with _tf_private.attribute_of_new_ops(UPDATE_MARK, history.identity):
        yield


class _Values:
    """What variables hold now, in eager code, not copied.

    One op reads all that are on one device: an op for each takes several times as long.

    Args:
      variables: of any number; those of strategies are read on every device.

    Attributes:
      owners: the variable that each value is of.
    """

    def __init__(self, variables: Iterable[tf.Variable]):
        parts = [(v, part) for v in variables for part in components(unwrapped(v))]
        self.owners = [variable for variable, _ in parts]
        self._groups: dict[str, tuple[list, list, list]] = {}
        for place, (_, part) in enumerate(parts):
            group = self._groups.setdefault(part.handle.device, ([], [], []))
            for known, new in zip(
                group, (part.handle, part.dtype.as_datatype_enum, place), strict=True
            ):
                known.append(new)

    def read(self) -> list[tf.Tensor]:
        """The values, one for each of `owners`."""
        found: list = [None] * len(self.owners)
        for handles, types, places in self._groups.values():
            values = _tf_private.values_of(handles, types)
            for place, value in zip(places, values, strict=True):
                found[place] = value
        return found


class WeightWatch:
    """Tells whether variables were written to since they were last looked at.

    A write goes to new memory while something holds the old: so the check costs no
    more than asking where the values are.

    Args:
      variables: the variables.
      counter: a whole number that is read along with them.

    Attributes:
      variables: the variables.
      updates: how many updates announced themselves.
      changed: the first variable that was found changed, if one was.
      count: what the counter said when values were last read.
    """

    def __init__(
        self, variables: Sequence[tf.Variable], counter: tf.Variable | None = None
    ):
        self.variables = list(variables)
        self.updates = 0
        self.changed: tf.Variable | None = None
        self.count = 0
        counters = [] if counter is None else [counter]
        self._values = _Values([*self.variables, *counters])
        self._owners = [v for v in self._values.owners if v is not counter]
        self._held: list[tf.Tensor] | None = None

    def hold(self) -> None:
        """Remembers the values, which must not outlast the next update."""
        self._held = self._read()

    def release(self) -> None:
        """Forgets the values, so that an update need not copy them."""
        self._held = None

    def look(self) -> tf.Variable | None:
        """Returns a variable whose value is not what it was, if there is one."""
        now, held = self._read(), self._held
        if held is not None and self.changed is None:
            pairs = zip(self._owners, held, now, strict=True)
            changed = (owner for owner, *both in pairs if _differ(*both))
            self.changed = next(changed, None)
        return self.changed

    def _read(self) -> list[tf.Tensor]:
        values = self._values.read()
        watched = len(self._owners)
        if len(values) > watched:
            self.count = int(values[watched])
        return values[:watched]

    def before_update(self) -> None:
        """Looks, then lets go."""
        self.updates += 1
        self.look()
        self.release()


def _differ(old: tf.Tensor, new: tf.Tensor) -> bool:
    # Not numpy(), which copies.
    before, after = np.asarray(old), np.asarray(new)
    where = [array.__array_interface__["data"][0] for array in (before, after)]
    # Another place may hold the same: weights that were swapped and put back.
    return where[0] != where[1] and before.tobytes() != after.tobytes()


def other_updates(
    concrete: Any, variables: Sequence[tf.Variable], identity: str
) -> list[tuple[tf.Variable, str]]:
    """Where a traced function writes to variables other than by one optimizer.

    Whatever takes a variable and is not known to only read it counts as writing.

    Args:
      concrete: the traced function.
      variables: the variables.
      identity: of the optimizer.

    Returns:
      Each variable that is written to, and by what.
    """
    by_handle = {
        id(part.handle): variable
        for variable in variables
        for part in components(variable)
    }
    roots = {
        inside.op.name: by_handle[id(outside)]
        for outside, inside in concrete.graph.captures
        if id(outside) in by_handle
    }
    definition = concrete.graph.as_graph_def()
    search = Search(definition.library, identity.encode())
    search.follow(definition.node, roots, "the training step")
    return list(search.found.values())


def other_step(concrete: Any, identity: str) -> str | None:
    """Where a traced function has a step of another private optimizer, if it does.

    Args:
      concrete: the traced function.
      identity: of the optimizer.

    Returns:
      The name of an op of such a step.
    """
    definition = concrete.graph.as_graph_def()
    inner = (function.node_def for function in definition.library.function)
    for node in itertools.chain(definition.node, *inner):
        # Not by [], which would write what it does not find.
        if APPLY_MARK in node.attr and node.attr[APPLY_MARK].s != identity.encode():
            return node.name
    return None


def other_data(concrete: Any) -> str | None:
    """Where a traced training step takes data that it was not given, if it does.

    Args:
      concrete: the traced function, whose arguments are what it is given.

    Returns:
      The name of an op that reads a data set of the step's own.
    """
    graph = concrete.graph
    given = {tensor.op.name for tensor in graph.inputs}
    given -= {inside.op.name for _, inside in graph.captures}
    definition = graph.as_graph_def()
    search = _DataSearch(definition.library, b"")
    search.brought = any(inside.dtype == tf.variant for _, inside in graph.captures)
    search.follow(definition.node, dict.fromkeys(given, True), "the training step")
    return search.other


class Search:
    """Follows handles of variables through a graph and the functions it calls."""

    def __init__(self, library, identity: bytes):
        self._functions = {f.signature.name: f for f in library.function}
        self._identity = identity
        self._seen: set = set()
        self.found: dict[int, tuple[tf.Variable, str]] = {}

    def follow(self, nodes, roots: dict[str, tf.Variable], where: str) -> None:
        """Adds what is found among nodes; `roots` are the variables by tensor name."""
        known = dict(roots)
        for node in nodes:
            inputs = [node_of(name) for name in node.input if name[0] != "^"]
            variables = [known.get(name) for name in inputs]
            if not any(variable is not None for variable in variables):
                continue
            if node.attr[UPDATE_MARK].s == self._identity or node.op in READS:
                continue
            if node.op == "Identity":
                known[node.name] = next(v for v in variables if v is not None)
                continue
            called = self.called_by(node)
            if called is None:
                for variable in filter(lambda v: v is not None, variables):
                    what = f"{node.op} {node.name!r} in {where}"
                    self.found.setdefault(id(variable), (variable, what))
                continue
            skip = SKIPPED.get(node.op, 0)
            for name in called:
                self._enter(name, variables[skip:])

    def called_by(self, node) -> list[str] | None:
        """The functions that get the node's inputs as they are."""
        if node.op in self._functions:
            return [node.op]
        attributes = {
            "Case": ("branches",),
            "If": ("then_branch", "else_branch"),
            "PartitionedCall": ("f",),
            "StatefulPartitionedCall": ("f",),
            "StatelessCase": ("branches",),
            "StatelessIf": ("then_branch", "else_branch"),
            "StatelessWhile": ("cond", "body"),
            "While": ("cond", "body"),
        }.get(node.op)
        if attributes is None:
            return None
        names = []
        for attribute in attributes:
            value = node.attr[attribute]
            names += [value.func.name] if value.func.name else []
            names += [function.name for function in value.list.func]
        return names if all(name in self._functions for name in names) else None

    def _enter(self, name: str, variables) -> None:
        key = (name, tuple(id(variable) for variable in variables))
        if key in self._seen:
            return
        self._seen.add(key)
        function = self._functions[name]
        arguments = [argument.name for argument in function.signature.input_arg]
        roots = {
            argument: variable
            for argument, variable in zip(arguments, variables, strict=True)
            if variable is not None
        }
        self.follow(function.node_def, roots, name)


class _DataSearch(Search):
    """Follows the step's own iterators, and looks for others.

    In the place of a variable stands True, for everything that came from an argument.

    Attributes:
      other: the name of an op that reads a data set of the step's own.
      brought: whether something that could be an optional element came from outside.
        Otherwise the step has made it, as the gradient of a branch does of what the
        branch kept; where it is made by an iterator, that op is found itself.
    """

    other: str | None = None
    brought: bool = True

    def follow(self, nodes, roots: dict[str, Any], where: str) -> None:
        known = dict(roots)
        for node in nodes:
            inputs = [node_of(name) for name in node.input if name[0] != "^"]
            given = [known.get(name) for name in inputs]
            reads = node.op.startswith(("IteratorGetNext", "OptionalGetValue"))
            fed = reads and given and given[0]
            fed = fed or (node.op == "OptionalGetValue" and not self.brought)
            data = "Dataset" in node.op or "Iterator" in node.op or reads
            if data and not fed:
                self.other = self.other or f"{node.op} {node.name!r} in {where}"
            called = self.called_by(node)
            if called is not None:
                skip = SKIPPED.get(node.op, 0)
                for name in called:
                    self._enter(name, given[skip:])
            else:
                # How its functions get the node's inputs is not known.
                for name in _functions_of(node):
                    if name in self._functions and name not in self._seen:
                        self._seen.add(name)
                        self.follow(self._functions[name].node_def, {}, name)
            if node.op in ("Identity", "IteratorGetNextAsOptional") and given[0]:
                known[node.name] = True


def _functions_of(node) -> list[str]:
    found = [value.func.name for value in node.attr.values() if value.func.name]
    return found + [f.name for v in node.attr.values() for f in v.list.func]


def node_of(name: str) -> str:
    """The node or argument a tensor comes from."""
    return name.split(":", 1)[0]
