"""Several processes that train one model: who keeps the books, and what all are told.

With `MultiWorkerMirroredStrategy` every process runs the same program. One of them, the
chief, keeps the ledger and decides; the others are told what it decided.
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

# How a step ends in one process if another one is gone.
_LOST = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)
# What lines of errors begin with that say where in a graph, and not what.
_PLACES = ("Graph execution error", "Detected at node", "File ", "Node:", "[[", "^")
_UNREADABLE = (
    "TF_CONFIG is not what TensorFlow reads: {}. For example, for the first of two "
    'machines, TF_CONFIG=\'{{"cluster": {{"worker": ["host1:2222", "host2:2222"]}}, '
    '"task": {{"type": "worker", "index": 0}}}}\'.'
)


class WorkerLostError(RuntimeError):
    """Another process of a run on several machines stopped, or does not answer."""


def multi_worker_strategy(
    *, timeout_seconds: float = 60.0, **options: Any
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """A `MultiWorkerMirroredStrategy` whose workers do not wait for ever.

    Without a timeout, a worker whose program raised, but did not end, keeps the others
    waiting in their all-reduce.

    Args:
      timeout_seconds: how long a worker waits for the others in a step, before it
        raises. More than the slowest worker needs for a step and for writing its
        checkpoints. A worker that is killed is noticed at once, a machine that
        vanishes after about 25 seconds, whatever this is.
      **options: further arguments of `MultiWorkerMirroredStrategy`, such as
        `cluster_resolver`; `TF_CONFIG` in the environment says who takes part.

    Raises:
      NotImplementedError: on Keras 3, whose `fit` does not train on several workers.
      ValueError: if an argument is out of range.
    """
    _compat.refuse_workers()
    timeout = _arguments.positive("timeout_seconds", timeout_seconds)
    if "communication_options" in options:
        raise ValueError(
            "communication_options: give timeout_seconds, which is made into them."
        )
    communication = tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=timeout
    )
    return tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=communication, **options
    )


def is_chief(resolver: Any = None) -> bool:
    """Whether this process keeps the books; True if it is the only one.

    Args:
      resolver: a strategy's cluster resolver; by default what `TF_CONFIG` says.

    Raises:
      ValueError: if `TF_CONFIG` cannot be read, or does not say which of several this
        is: nobody might keep the books then.
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
        raise ValueError(
            _UNREADABLE.format("its task is none of those that the cluster has")
        )
    return (kind, place) == ("chief" if tasks.get("chief") else "worker", 0)


class Workers:
    """The processes that train a model together; a single one is the usual case.

    *Formal guarantees*: what `told` returns is the same in every process, and is the
    chief's. An error of one process within `together` is an error of all.

    Args:
      model: the model.
    """

    def __init__(self, model: Any):
        strategy = getattr(model, "distribute_strategy", None)
        several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        resolver = strategy.cluster_resolver if several else None
        self._strategy = strategy
        tasks = resolver.cluster_spec().as_dict() if several else {}
        #: Whether there are others.
        self.several = sum(map(len, tasks.values())) > 1
        self.chief = not self.several or is_chief(resolver)
        if self.chief != is_chief():
            raise ValueError(
                "TF_CONFIG and the model's strategy do not agree on who keeps the "
                "ledger: PrivacyBudget was made as TF_CONFIG says. Train with a "
                "MultiWorkerMirroredStrategy of the same cluster, or unset TF_CONFIG."
                + see("several-replicas")
            )

    def told(self, *numbers: float) -> list[float]:
        """What the chief says, in every process.

        Args:
          *numbers: what it says; from the others, as many.
        """
        if not self.several:
            return list(numbers)
        own = numbers if self.chief else [0.0] * len(numbers)
        return self._added(own, first_only=True)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Lets all processes go on if all of them got through what is within."""
        if not self.several:
            yield
            return
        try:
            yield
        except Exception:
            self._added([1.0], first_only=False)
            raise
        (failed,) = self._added([0.0], first_only=False)
        if failed:
            raise PrivacyMismatchError(
                "Another worker refused to begin, or to go on; what it printed says "
                "why."
            )

    def _added(self, numbers, first_only: bool) -> list[float]:
        def add():
            context = tf.distribute.get_replica_context()
            place = int(tf.get_static_value(context.replica_id_in_sync_group))
            counts = place == 0 or not first_only
            own = tf.constant(numbers if counts else [0.0] * len(numbers), tf.float64)
            return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

        with lost_workers_named(True):
            added = self._strategy.run(add)
        local = self._strategy.experimental_local_results(added)[0]
        return [float(number) for number in local.numpy()]


@contextlib.contextmanager
def lost_workers_named(several: bool) -> Iterator[None]:
    """Says of an error in a step on several machines that another one is the cause.

    Args:
      several: whether there are several.
    """
    if not several:
        yield
        return
    try:
        yield
    except _LOST as error:
        raise WorkerLostError(
            "Another worker of this run stopped, failed, or did not answer in time: "
            f"{_first_line(error)} The step that was under way is in the ledger, "
            "whether it was released or not. See what that worker printed, then start "
            "all of them again: with BackupAndRestore they go on from the last backup, "
            "and nothing that was spent is forgotten." + see("several-replicas")
        ) from error


@contextlib.contextmanager
def cancelled_replicas_named(replicas: int) -> Iterator[None]:
    """Says of a step that TensorFlow only calls cancelled how that comes.

    Args:
      replicas: how many this process has.
    """
    if replicas == 1:
        yield
        return
    try:
        yield
    except tf.errors.CancelledError as error:
        raise RuntimeError(
            f"One of {replicas} replicas failed, and TensorFlow reports only that the "
            f"others were stopped by it: {_first_line(error)} The step is in the "
            "ledger. Examples that are mixed on a replica end a step like this; train "
            "on one device, with the same data, to see the cause."
            + see("several-replicas")
        ) from error


def _first_line(error: tf.errors.OpError) -> str:
    """What TensorFlow says, without the places in graphs before and after it."""
    lines = [line.strip() for line in (error.message or "").splitlines()]
    said = [line for line in lines if line and not line.startswith(_PLACES)]
    text = said[0][:300].rstrip(".") if said else "no more is known"
    return f"{type(error).__name__}: {text}."
