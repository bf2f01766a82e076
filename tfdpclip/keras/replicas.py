"""A step on several replicas: supported strategies, and joint work of the replicas.

Replicas of one process are traced in turns, each in its own thread. A merged function
runs once for all replicas, while they wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip._object_notes import note_on_new_ops
from tfdpclip.gradients import ExampleIsolationError
from tfdpclip.gradients.graph.origins import is_number
from tfdpclip.keras import _compat
from tfdpclip.sampling.distributed import STRATEGIES


def count() -> int:
    """The number of replicas in each step, in all processes."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def index() -> int:
    """The index of this replica; 0 outside of replicas."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    # A constant in graphs.
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def gathers_ahead(strategy: tf.distribute.Strategy | None) -> bool:
    """Whether the strategy's data cannot continue in the middle of a step."""
    return isinstance(strategy, STRATEGIES)


class Scope:
    """The strategy under which an object was made; a copy takes its own strategy."""

    def __init__(self) -> None:
        self.strategy = tf.distribute.get_strategy()

    def __deepcopy__(self, memo: Any) -> Scope:
        return Scope()


def refuse_others(optimizer: Any, made_in: tf.distribute.Strategy) -> None:
    """Raises where a step could differ from the release of a single device.

    Args:
      optimizer: the private optimizer that takes the step.
      made_in: the strategy under which the optimizer was made.

    Raises:
      NotImplementedError: under a strategy whose all-reduce is not known to be one sum
        over all replicas, or where several replicas are not supported.
      ValueError: if the optimizer was made under another strategy, or the step is not
        taken in a replica.
    """
    strategy = tf.distribute.get_strategy()
    name = type(optimizer).__name__
    if strategy is not made_in:
        raise ValueError(
            f"{name} was made under {_named(made_in)} and takes a step under "
            f"{_named(strategy)}: its state would not belong to the replicas. Make "
            "the model and the optimizer, and compile, within `with "
            "strategy.scope():`." + see("several-replicas")
        )
    if not tf.distribute.has_strategy():
        return
    # The exact class: a subclass may add up in another way.
    if type(strategy) not in STRATEGIES:
        raise NotImplementedError(
            f"{name} does not support {_named(strategy)}: it is not known to add up "
            "its replicas exactly once. Use tf.distribute.MirroredStrategy (devices "
            "of one machine) or MultiWorkerMirroredStrategy (several machines)."
            + see("several-replicas")
        )
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            f"{name}.minimize was called for all replicas at once. Call it in the "
            "function that each replica runs: strategy.run(step, args=(batch,))."
            + see("several-replicas")
        )
    if strategy.num_replicas_in_sync > 1:
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            _compat.refuse_workers()
            if optimizer.noise is not None:
                raise NotImplementedError(
                    "noise: correlated noise is for the devices of one machine. "
                    "Several machines could be at different steps of their noise or "
                    "of the records' order. Use tf.distribute.MirroredStrategy on one "
                    "machine, or independent noise (noise=None) and "
                    "sampling.Poisson(rate)." + see("several-replicas")
                )
        if not optimizer.clips_records:
            raise NotImplementedError(
                'unit="batch" is not supported on several replicas: each replica '
                "would clip its own part of the batch, with statistics of that part. "
                "Use one device." + see("several-replicas")
            )


def refuse_unsupported_graph(loss: tf.Tensor, compiled: bool) -> None:
    """Raises for eager code and for XLA code on several replicas."""
    if count() == 1:
        return
    if not hasattr(loss, "graph") or tf.executing_eagerly():
        raise NotImplementedError(
            "Several replicas need a graph, which proves that their examples are "
            "not mixed: compile without run_eagerly=True, or call strategy.run "
            "within a tf.function." + see("several-replicas")
        )
    if compiled:
        raise NotImplementedError(
            "Several replicas under XLA are not supported: a replica with mixed "
            "examples could not stop the remaining replicas. Compile with "
            "jit_compile=False." + see("several-replicas")
        )


def _named(strategy: tf.distribute.Strategy) -> str:
    default = strategy is tf.distribute.get_strategy() and not (
        tf.distribute.has_strategy()
    )
    name = type(strategy).__name__
    return "no strategy" if default or name.startswith("_Default") else name


class SharedData:
    """Checks that each replica of a process trains on its own batches.

    *Formal guarantees*: a tensor that brings data, of rank 1 or more, is behind the
    loss of a single replica in a graph, or the step is refused. A batch that two
    replicas get, or a statistic of all batches, would be in two gradients, each clipped
    to C. Constants with equal values count as the same tensor: a batch that the step
    closes over becomes a constant in every replica.
    """

    def __init__(self) -> None:
        self._graph: Any = None
        self._owner: dict[Any, int] = {}

    def claim(self, graph: tf.Graph, sources: Sequence[tf.Tensor]) -> None:
        """Claims the data behind the loss of this replica.

        Raises:
          ExampleIsolationError: if a tensor is behind the loss of two replicas.
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
                    "do not combine batches in the model (as synchronised batch "
                    "normalisation does)." + see("several-replicas")
                )


def replica_count_of(model: Any) -> int:
    """The number of a model's replicas, in all processes."""
    strategy = getattr(model, "distribute_strategy", None)
    return 1 if strategy is None else strategy.num_replicas_in_sync


def scope_of(model: Any) -> contextlib.AbstractContextManager:
    """The scope in which a model's and its optimizer's variables are made."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy.scope() if gathers_ahead(strategy) else contextlib.nullcontext()


def in_replicas(model: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A `tf.function` of a batch, which runs on the model's replicas.

    Every replica computes the same from the whole batch. This is no training step, but
    a compiled loss updates the model's metrics, which belong to the replicas.

    Args:
      model: a Keras model.
      function: a function from tensors to tensors.

    Returns:
      The function, with the results of the first replica.
    """
    strategy = getattr(model, "distribute_strategy", None)
    # A mirrored strategy of one device keeps metrics in replicas, too.
    if not gathers_ahead(strategy):
        return tf.function(function, reduce_retracing=True)

    def graph(*tensors):
        found = strategy.run(function, args=tensors)
        return tf.nest.map_structure(
            lambda value: strategy.experimental_local_results(value)[0], found
        )

    return tf.function(graph, reduce_retracing=True)


def summed(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Adds up the replicas' tensors, in one all-reduce."""
    if count() == 1:
        return list(tensors)
    context = tf.distribute.get_replica_context()
    # TensorFlow places the sums on the devices of these copies: this replica's device.
    own = [tf.identity(tensor) for tensor in tensors]
    with _in_replica_function():
        return list(context.all_reduce(tf.distribute.ReduceOp.SUM, own))


@contextlib.contextmanager
def _in_replica_function() -> Iterator[None]:
    """Raises for a meeting of replicas within a `tf.function` of each replica."""
    try:
        yield
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise NotImplementedError(
            "Several replicas meet in minimize, and TensorFlow lets no replica meet "
            "the rest in a tf.function of its own: take @tf.function off train_step "
            "and off the functions in it that call minimize. Keras compiles "
            "train_step; in a loop of your own the tf.function goes around "
            "strategy.run." + see("several-replicas")
        ) from None


def run_once(
    history: Any, function: Callable[[list], Any], tensors: Sequence[Any] = ()
) -> None:
    """Runs a function that writes, once for all replicas.

    Args:
      history: the optimizer's history, for the marks of its writes.
      function: a function of a list of tensors.
      tensors: the list, equal on every replica.
    """
    if count() == 1:
        function(list(tensors))
        return

    def merged(strategy, *values):
        local = [strategy.experimental_local_results(value)[0] for value in values]
        with note_on_new_ops(updates=history.identity, released=True):
            function(local)

    with _in_replica_function():
        tf.distribute.get_replica_context().merge_call(merged, args=tuple(tensors))


def run_when(
    history: Any,
    condition: tf.Tensor,
    function: Callable[..., Any],
    tensors: Sequence[tf.Tensor] = (),
    astray: Callable[[], Any] = lambda: None,
) -> None:
    """Runs a function on every replica if a condition holds on all replicas.

    The branch is around all replicas, because a replica must not take part in an
    all-reduce from a branch of its own.

    Args:
      history: the optimizer's history.
      condition: a boolean scalar.
      function: a function of the tensors.
      tensors: each replica's own tensors.
      astray: runs on every replica if the condition holds only on some replicas.
    """

    def own(*values):
        with note_on_new_ops(updates=history.identity, released=True):
            function(*values)

    def branched(first, run):
        def chosen():
            run()
            return tf.constant(True)

        with note_on_new_ops(updates=history.identity, released=True):
            tf.cond(first, chosen, lambda: tf.constant(False))

    # A mirrored strategy of one device needs a merge call, too.
    if count() == 1 and not gathers_ahead(tf.distribute.get_strategy()):
        branched(condition, lambda: own(*tensors))
        return

    def lost():
        with note_on_new_ops(updates=history.identity, released=True):
            astray()

    def merged(strategy, condition, *values):
        each = tf.stack(strategy.experimental_local_results(condition))
        branched(tf.reduce_all(each), lambda: strategy.run(own, args=values))
        some = tf.reduce_any(each) & ~tf.reduce_all(each)
        branched(some, lambda: strategy.run(lost))

    with _in_replica_function():
        context = tf.distribute.get_replica_context()
        context.merge_call(merged, args=(condition, *tensors))
