"""Making variables where no `tf.function` sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import tensorflow as tf


def outside_of_functions(
    build: Callable[[], None], needed: Sequence, *, in_strategy: bool = True
) -> None:
    """Runs `build`, which makes variables, once and outside of any graph.

    If a `tf.function` sees variables being made in its first trace, it traces
    everything a second time, even if they are made in an `init_scope`. A separate
    thread has no trace around it.

    Args:
      build: makes the variables.
      needed: variables that `build` may read. If one of them has no value yet, as in
        the first trace of a model that makes its own variables there, or if
        a distribution strategy is active, `build` runs in an `init_scope` instead.
      in_strategy: whether the variables belong to the active distribution strategy.
    """
    with tf.init_scope():
        apart = (
            tf.executing_eagerly()
            and not (in_strategy and tf.distribute.has_strategy())
            and all(bool(variable.is_initialized()) for variable in needed)
        )
        if not apart:
            build()
            return
    errors: list[BaseException] = []
    device = None if in_strategy else _own_device()

    def run():
        try:
            # A replica's own variables are on the replica's device.
            with tf.device(device):
                build()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="tfdpclip-variables")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _own_device() -> str | None:
    """The device of this replica, if it is one of several."""
    strategy, context = (
        tf.distribute.get_strategy(),
        tf.distribute.get_replica_context(),
    )
    if context is None or strategy.num_replicas_in_sync == 1:
        return None
    local = strategy.extended.worker_devices
    place = tf.get_static_value(context.replica_id_in_sync_group)
    return local[int(place) % len(local)]
