"""Checks that the processes and replicas of a run have equal settings and values.

Each process runs the same program. With a flag left out in one terminal, or a
checkpoint on one machine only, the processes differ, and the chief's privacy statement
would not be true of the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip._variables import all_unwrapped, components
from tfdpclip.accounting.phases import PrivacyMismatchError
from tfdpclip.keras import _compat, replicas
from tfdpclip.keras.workers import Workers

# Settings that an error names; for any further setting, the error shows all of them.
_NAMED = ("noise_multiplier", "clip", "expected_batch_size", "accumulation_steps")


class Agreement:
    """Compares the settings and values of this process with the chief's.

    *Formal guarantees*: if two processes differ in their settings (of the optimizer,
    the sampling, `fit` or the budget), records, weights or clip norms, the run raises
    before its first step. If the weights of two processes drift apart later, the run
    raises at the end of the epoch. The comparison uses 48 bits of a hash: different
    values pass as equal with probability 4e-15.

    Args:
      workers: the processes.
      model: the model.
    """

    def __init__(self, workers: Workers, model: tf.keras.Model):
        self._workers = workers
        self._model = model

    def check_settings(self, budget: list[Any], draws: Any, fit: Any) -> None:
        """Raises if this process and the chief have different settings.

        Args:
          budget: the budget's arguments.
          draws: the `DrawCheck` of the run.
          fit: the `params` that Keras gives to callbacks.
        """
        if not self._workers.several:
            return
        with self._workers.all_or_none():
            config = self._model.optimizer.get_config()
            config.pop("name", None)
            settings = {
                "the sampling": draws.described(),
                **{name: config.get(name) for name in _NAMED},
                "the optimizer": [type(self._model.optimizer).__name__, config],
                "PrivacyBudget": budget,
                "fit": [
                    {name: fit.get(name) for name in ("steps", "epochs")},
                    _compat.steps_per_execution(self._model),
                ],
            }
            texts = {
                name: json.dumps(value, sort_keys=True, default=_plain)
                for name, value in settings.items()
            }
            own = [hash_number([text.encode()]) for text in texts.values()]
            records = draws.records()
        with self._workers.all_or_none():
            *chiefs, chiefs_records = self._workers.broadcast(*own, records)
            for (name, text), mine, chief in zip(
                texts.items(), own, chiefs, strict=True
            ):
                if mine != chief:
                    raise PrivacyMismatchError(
                        f"The chief and this worker differ in {name}; this worker has "
                        f"{text}. The chief's statement would not be true. Start the "
                        "same program with the same arguments on all machines."
                        + see("several-replicas")
                    )
            if chiefs_records != records:
                raise PrivacyMismatchError(
                    "The chief and this worker have different records, or the same "
                    "records in another order, so that both may draw the same record. "
                    "Give every worker all records, in the same order."
                    + see("several-replicas")
                )

    def check_values(self) -> None:
        """Raises if weights, optimizer state or clip norms differ between processes."""
        if replicas.replica_count_of(self._model) == 1:
            return
        with self._workers.all_or_none():
            number = hash_number(self._values())
        if not self._workers.several:
            return
        with self._workers.all_or_none():
            (chiefs,) = self._workers.broadcast(number)
            if chiefs != number:
                raise PrivacyMismatchError(
                    "The weights, the optimizer's state or the clip norm of this "
                    "worker differ from the chief's. Possible causes: a checkpoint "
                    "that only some workers could read, a callback that acts "
                    "differently on every machine (a random learning rate), or an "
                    "update with random numbers. Restore all workers from the same "
                    "files." + see("several-replicas")
                )

    def _values(self) -> list[bytes]:
        model = self._model
        weights = model.trainable_variables if model.built else []
        found = []
        for variable in all_unwrapped([*weights, *model.optimizer.variables]):
            if variable.synchronization == tf.VariableSynchronization.ON_READ:
                continue
            first, *rest = (np.asarray(part).tobytes() for part in components(variable))
            if any(part != first for part in rest):
                raise PrivacyMismatchError(
                    f"{variable.name} has different values on the replicas. Possible "
                    "causes: an update with random numbers, or with values of one "
                    "replica. Compute the update from values that all replicas share."
                    + see("several-replicas")
                )
            found.append(first)
        return found


def _plain(value: Any) -> Any:
    """A value for JSON, without memory addresses, which differ between processes."""
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


def hash_number(parts: Sequence[bytes]) -> float:
    """48 bits of a hash, which a float64 holds exactly.

    Args:
      parts: the bytes to hash; their lengths enter the hash, too.
    """
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return float(int.from_bytes(digest.digest(), "big"))
