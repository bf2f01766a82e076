"""One step on several replicas: which strategies, and what replicas do together.

Replicas of one process take turns in tracing, each in a thread of its own; a function
that is merged runs once, in the place of all of them, while they wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._docs import see
from tfdpclip.gradients import ExampleIsolationError
from tfdpclip.gradients.graph.origins import is_number, public_writes
from tfdpclip.keras import _compat
from tfdpclip.keras.watching import private_state
from tfdpclip.keras.watching.weight_watch import own_writes

_MIRRORED = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)
_KNOWN = (*_MIRRORED, tf.distribute.OneDeviceStrategy)


def count() -> int:
    """How many replicas take each step, in all processes."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def index() -> int:
    """Which of them this is; 0 outside of replicas."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    # A constant in graphs.
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def gathers_ahead(strategy: tf.distribute.Strategy | None) -> bool:
    """Whether its data do not go on where one stopped within a step."""
    return isinstance(strategy, _MIRRORED)


class Scope:
    """The strategy that an object was made under; a copy is made where it is copied."""

    def __init__(self) -> None:
        self.strategy = tf.distribute.get_strategy()

    def __deepcopy__(self, memo: Any) -> Scope:
        return Scope()


def refuse_others(optimizer: Any, made_in: tf.distribute.Strategy) -> None:
    """Raises where a step could not be what one device would release.

    Args:
      optimizer: the private optimizer, which takes a step here.
      made_in: the strategy that it was made under.

    Raises:
      NotImplementedError: under a strategy whose all-reduce is not known to be one sum
        over all replicas, or where several replicas are not supported.
      ValueError: if the optimizer is of another strategy, or no replica takes the step.
    """
    strategy = tf.distribute.get_strategy()
    name = type(optimizer).__name__
    if strategy is not made_in:
        raise ValueError(
            f"{name} was made under {_named(made_in)} and takes a step under "
            f"{_named(strategy)}: its state would not be that of the replicas. Make "
            "the model, the optimizer and compile within `with strategy.scope():`."
            + see("several-replicas")
        )
    if not tf.distribute.has_strategy():
        return
    # Not a subclass, which may add up in another way.
    if type(strategy) not in _KNOWN:
        raise NotImplementedError(
            f"{name} does not support {_named(strategy)}: that its replicas add up to "
            "one step, once, is not known. Use tf.distribute.MirroredStrategy (devices "
            "of one machine) or MultiWorkerMirroredStrategy (several machines)."
            + see("several-replicas")
        )
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            f"{name}.minimize was called for all replicas at once. Call it in the "
            "function that each of them runs: strategy.run(step, args=(batch,))."
            + see("several-replicas")
        )
    if strategy.num_replicas_in_sync > 1:
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            _compat.refuse_workers()
            if optimizer.noise is not None:
                raise NotImplementedError(
                    "noise: correlated noise is for the devices of one machine. On "
                    "several, nothing sees to it that all are at the same step of "
                    "their noise, and of an order that keeps the steps of a record "
                    "apart. Use tf.distribute.MirroredStrategy on one machine, or "
                    "independent noise (noise=None) and sampling.Poisson(rate)."
                    + see("several-replicas")
                )
        if not optimizer.clips_records:
            raise NotImplementedError(
                'unit="batch" is not supported on several replicas: each would clip '
                "its own part of the batch, with statistics of that part. Use one "
                "device." + see("several-replicas")
            )


def refuse_unsupported_graph(loss: tf.Tensor, compiled: bool) -> None:
    """Raises for code on several replicas that is eager, or compiled by XLA."""
    if count() == 1:
        return
    if not hasattr(loss, "graph") or tf.executing_eagerly():
        raise NotImplementedError(
            "Several replicas need a graph, in which it is seen that their examples "
            "are not mixed: compile without run_eagerly=True, or call strategy.run "
            "within a tf.function." + see("several-replicas")
        )
    if compiled:
        raise NotImplementedError(
            "Several replicas under XLA are not supported: a replica that finds "
            "examples mixed could not stop the others there. Compile with "
            "jit_compile=False." + see("several-replicas")
        )


def _named(strategy: tf.distribute.Strategy) -> str:
    default = strategy is tf.distribute.get_strategy() and not (
        tf.distribute.has_strategy()
    )
    name = type(strategy).__name__
    return "no strategy" if default or name.startswith("_Default") else name


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Marks ops as made of a loss, so that nobody takes them for a layer's.

    No other replica, and no other private optimizer that has a step in the same graph.
    """
    if tf.executing_eagerly():
        yield
        return
    with _tf_private.attribute_of_new_ops(private_state.MADE_OF_A_LOSS, "yes"):
        yield


class SharedData:
    """Sees that the replicas of one process train on batches of their own.

    *Formal guarantees*: a tensor that brings data, of rank 1 or more, is behind the
    loss of one replica in a graph, or the step is refused. What reached two of them
    (a batch that was given to both, a statistic of all batches) would be in two
    gradients, each clipped to C. Constants that hold the same are the same: a batch
    that the step closes over becomes one in every replica.
    """

    def __init__(self) -> None:
        self._graph: Any = None
        self._owner: dict[Any, int] = {}

    def claim(self, graph: tf.Graph, sources: Sequence[tf.Tensor]) -> None:
        """Notes what the loss of this replica is of.

        Raises:
          ExampleIsolationError: if that is behind another replica's loss, too.
        """
        if count() == 1:
            return
        if self._graph is not graph:
            self._graph, self._owner = graph, {}
        here = index()
        for tensor in sources:
            if tensor.shape.rank == 0:
                continue
            key: Any = tensor.ref()
            if tensor.op.type == "Const" and not is_number(tensor.op):
                key = tensor.op.get_attr("value").SerializeToString()
            owner = self._owner.setdefault(key, here)
            if owner != here:
                raise ExampleIsolationError(
                    f"{tensor.name!r} is behind the losses of the replicas {owner} and "
                    f"{here}: an example in it would be in the gradients of both. Give "
                    "every replica its own batch, batches.distribute(strategy), and "
                    "combine nothing of them in the model (synchronised batch "
                    "normalisation does)." + see("several-replicas")
                )


def taking_part(model: Any) -> int:
    """How many replicas a model has, in all processes."""
    strategy = getattr(model, "distribute_strategy", None)
    return 1 if strategy is None else strategy.num_replicas_in_sync


def scope_of(model: Any) -> contextlib.AbstractContextManager:
    """Where a model's variables, and its optimizer's, are made."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy.scope() if gathers_ahead(strategy) else contextlib.nullcontext()


def in_replicas(model: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A `tf.function` of one batch, which runs where the model's replicas are.

    On several, each does the same with the whole batch: nothing of it is a step, and
    what a compiled loss adds to the model's metrics belongs there.

    Args:
      model: a Keras model.
      function: of tensors; returns tensors.

    Returns:
      The function, of which the first replica's results are kept.
    """
    strategy = getattr(model, "distribute_strategy", None)
    # A mirrored strategy of one device keeps metrics as the others do.
    if not gathers_ahead(strategy):
        return tf.function(function, reduce_retracing=True)

    def graph(*tensors):
        found = strategy.run(function, args=tensors)
        return tf.nest.map_structure(
            lambda value: strategy.experimental_local_results(value)[0], found
        )

    return tf.function(graph, reduce_retracing=True)


def summed(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Adds up what each replica has, in one all-reduce."""
    if count() == 1:
        return list(tensors)
    context = tf.distribute.get_replica_context()
    # Made here, on this replica's device, by which TensorFlow says where sums go.
    own = [tf.identity(tensor) for tensor in tensors]
    return list(context.all_reduce(tf.distribute.ReduceOp.SUM, own))


def once(
    history: Any, function: Callable[[list], Any], tensors: Sequence[Any] = ()
) -> None:
    """Runs a function that writes once for all replicas.

    Args:
      history: the optimizer's, as whose writes they are marked.
      function: of a list.
      tensors: what it is given, the same on every replica.
    """
    if count() == 1:
        function(list(tensors))
        return

    def merged(strategy, *values):
        local = [strategy.experimental_local_results(value)[0] for value in values]
        with own_writes(history), public_writes():
            function(local)

    tf.distribute.get_replica_context().merge_call(merged, args=tuple(tensors))


def when(
    history: Any,
    condition: tf.Tensor,
    function: Callable[..., Any],
    tensors: Sequence[tf.Tensor] = (),
    astray: Callable[[], Any] = lambda: None,
) -> None:
    """Runs a function on every replica if a condition holds on all of them.

    A replica must not reduce in a branch of its own: the branch is around all of them.

    Args:
      history: the optimizer's.
      condition: a scalar.
      function: of the tensors.
      tensors: each replica's own.
      astray: run on every replica if the condition holds on some of them.
    """

    def own(*values):
        with own_writes(history), public_writes():
            function(*values)

    def branched(first, run):
        def chosen():
            run()
            return tf.constant(True)

        with own_writes(history), public_writes():
            tf.cond(first, chosen, lambda: tf.constant(False))

    # A mirrored strategy of one device merges, too.
    if count() == 1 and not gathers_ahead(tf.distribute.get_strategy()):
        branched(condition, lambda: own(*tensors))
        return

    def lost():
        with own_writes(history), public_writes():
            astray()

    def merged(strategy, condition, *values):
        each = tf.stack(strategy.experimental_local_results(condition))
        branched(tf.reduce_all(each), lambda: strategy.run(own, args=values))
        some = tf.reduce_any(each) & ~tf.reduce_all(each)
        branched(some, lambda: strategy.run(lost))

    tf.distribute.get_replica_context().merge_call(merged, args=(condition, *tensors))
