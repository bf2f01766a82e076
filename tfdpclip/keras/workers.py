"""Several processes that train one model: the chief's ledger, and its decisions.

With `MultiWorkerMirroredStrategy` every process runs the same program. The chief keeps
the ledger and decides; the workers receive its decisions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip.accounting.phases import PrivacyMismatchError
from tfdpclip.keras import _compat

# The errors of a step in one process after another process is gone.
_LOST = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)
# Beginnings of error lines that name a place in a graph, and not the error.
_PLACES = ("Graph execution error", "Detected at node", "File ", "Node:", "[[", "^")
_UNREADABLE = (
    "TensorFlow cannot read TF_CONFIG: {}. For example, for the first of two "
    'machines, TF_CONFIG=\'{{"cluster": {{"worker": ["host1:2222", "host2:2222"]}}, '
    '"task": {{"type": "worker", "index": 0}}}}\'.'
)


class WorkerLostError(RuntimeError):
    """A process of a run on several machines stopped, or does not answer."""


def multi_worker_strategy(
    *, timeout_seconds: float = 60.0, **options: Any
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """A `MultiWorkerMirroredStrategy` with a timeout for lost workers.

    Without a timeout, a worker with a program that raised but did not end keeps the
    remaining workers waiting in their all-reduce.

    Args:
      timeout_seconds: how long a worker waits for the remaining workers in a step
        before it raises. Choose more than the slowest worker needs for a step and its
        checkpoints. A killed worker is noticed at once, and a machine that vanishes
        after about 25 seconds, whatever the timeout.
      **options: further arguments of `MultiWorkerMirroredStrategy`, such as
        `cluster_resolver`; the environment variable `TF_CONFIG` lists the workers.

    Raises:
      NotImplementedError: on Keras 3, whose `fit` does not train on several workers.
      ValueError: if an argument is out of range.
    """
    _compat.refuse_workers()
    timeout = _arguments.positive("timeout_seconds", timeout_seconds)
    if "communication_options" in options:
        raise ValueError(
            "communication_options: give timeout_seconds instead, which sets them."
        )
    communication = tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=timeout
    )
    return tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=communication, **options
    )


def is_chief(resolver: Any = None) -> bool:
    """Whether this process keeps the ledger; True for a single process.

    Args:
      resolver: a strategy's cluster resolver; by default a resolver for `TF_CONFIG`.

    Raises:
      ValueError: if `TF_CONFIG` cannot be read, or does not name this process among
        several: then no process might keep the ledger.
    """
    if resolver is None:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    try:
        spec = resolver.cluster_spec()
        kind, place = resolver.task_type, resolver.task_id or 0
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(_UNREADABLE.format(str(error).rstrip("."))) from error
    tasks = spec.as_dict() if spec else {}
    if sum(len(tasks.get(kind, ())) for kind in ("chief", "worker")) < 2:
        return True
    if not kind or (kind in tasks and not 0 <= place < len(tasks[kind])):
        raise ValueError(_UNREADABLE.format("its task is not a task of the cluster"))
    return (kind, place) == ("chief" if tasks.get("chief") else "worker", 0)


class Workers:
    """The processes that train a model together; usually there is one.

    *Formal guarantees*: `broadcast` returns the chief's numbers in every process. An
    error of a process within `all_or_none` becomes an error of all processes.

    Args:
      model: the model.
    """

    def __init__(self, model: Any):
        strategy = getattr(model, "distribute_strategy", None)
        several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        resolver = strategy.cluster_resolver if several else None
        self._strategy = strategy
        tasks = resolver.cluster_spec().as_dict() if several else {}
        #: Whether there are several processes.
        self.several = sum(map(len, tasks.values())) > 1
        self.chief = not self.several or is_chief(resolver)
        if self.chief != is_chief():
            raise ValueError(
                "TF_CONFIG and the model's strategy name different chiefs, and "
                "PrivacyBudget follows TF_CONFIG. Train with a "
                "MultiWorkerMirroredStrategy of the same cluster, or unset TF_CONFIG."
                + see("several-replicas")
            )

    def broadcast(self, *numbers: float) -> list[float]:
        """Returns the chief's numbers, in every process.

        Args:
          *numbers: the chief's numbers; a worker passes as many placeholders.
        """
        if not self.several:
            return list(numbers)
        own = numbers if self.chief else [0.0] * len(numbers)
        return self._sum_over_workers(own, first_only=True)

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Lets all processes go on only if all of them finish the block."""
        if not self.several:
            yield
            return
        try:
            yield
        except Exception:
            self._sum_over_workers([1.0], first_only=False)
            raise
        (failed,) = self._sum_over_workers([0.0], first_only=False)
        if failed:
            raise PrivacyMismatchError(
                "Another worker refused to begin or to go on; its output names the "
                "reason."
            )

    def _sum_over_workers(self, numbers, first_only: bool) -> list[float]:
        def add():
            context = tf.distribute.get_replica_context()
            place = int(tf.get_static_value(context.replica_id_in_sync_group))
            counts = place == 0 or not first_only
            own = tf.constant(numbers if counts else [0.0] * len(numbers), tf.float64)
            return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

        with explain_lost_workers(True):
            added = self._strategy.run(add)
        local = self._strategy.experimental_local_results(added)[0]
        return [float(number) for number in local.numpy()]


@contextlib.contextmanager
def explain_lost_workers(several: bool) -> Iterator[None]:
    """Turns an error of a step on several machines into a `WorkerLostError`.

    Args:
      several: whether there are several processes.
    """
    if not several:
        yield
        return
    try:
        yield
    except _LOST as error:
        raise WorkerLostError(
            "Another worker of this run stopped, failed, or did not answer in time: "
            f"{_first_line(error)} The ledger counts the current step, whether it was "
            "released or not. Read that worker's output, then start all workers again: "
            "with BackupAndRestore they continue from the last backup, and no spent "
            "budget is forgotten." + see("several-replicas")
        ) from error


@contextlib.contextmanager
def explain_cancelled_replicas(replicas: int) -> Iterator[None]:
    """Explains the error of a step that TensorFlow only calls cancelled.

    Args:
      replicas: the number of replicas of this process.
    """
    if replicas == 1:
        yield
        return
    try:
        yield
    except tf.errors.CancelledError as error:
        raise RuntimeError(
            f"One of {replicas} replicas failed, and TensorFlow reports only the "
            f"replicas that it stopped: {_first_line(error)} The ledger counts the "
            "step. A model that mixes examples on a replica ends a step like this. To "
            "see the cause, train on one device, with the same data."
            + see("several-replicas")
        ) from error


def _first_line(error: tf.errors.OpError) -> str:
    """The line of TensorFlow's message that names the error, without graph places."""
    lines = [line.strip() for line in (error.message or "").splitlines()]
    said = [line for line in lines if line and not line.startswith(_PLACES)]
    text = said[0][:300].rstrip(".") if said else "no more is known"
    return f"{type(error).__name__}: {text}."
