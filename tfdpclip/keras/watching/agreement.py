"""What must be alike in all processes that train a model, and on all replicas.

Each of them runs the same program. A flag that was left out in one terminal, or a
checkpoint that is on one machine only, makes it another one: what the chief states
would not be what ran.
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

# Settings of an optimizer that an error names; whatever else differs, it shows all.
_NAMED = ("noise_multiplier", "clip", "expected_batch_size", "accumulation_steps")


class Agreement:
    """Compares what this process has with what the chief has.

    *Formal guarantees*: a run whose processes have other settings (of the optimizer,
    the sampling, `fit` or the budget), other records, or other weights and clip norms
    raises before its first step; one whose weights come apart, at the end of the epoch.
    What is compared are 48 bits of a hash: two that differ are taken for one with
    probability 4e-15.

    Args:
      workers: the processes.
      model: the model.
    """

    def __init__(self, workers: Workers, model: tf.keras.Model):
        self._workers = workers
        self._model = model

    def check_settings(self, budget: list[Any], draws: Any, fit: Any) -> None:
        """Raises if the processes were not told the same.

        Args:
          budget: the budget's arguments.
          draws: the `DrawCheck` of the run.
          fit: what Keras tells callbacks of the call.
        """
        if not self._workers.several:
            return
        with self._workers.together():
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
            own = [number_of([text.encode()]) for text in texts.values()]
            records = draws.records()
        with self._workers.together():
            *chiefs, chiefs_records = self._workers.told(*own, records)
            for (name, text), mine, chief in zip(
                texts.items(), own, chiefs, strict=True
            ):
                if mine != chief:
                    raise PrivacyMismatchError(
                        f"The chief has other settings of {name} than this worker, "
                        f"which has {text}: what it states would not be true. Start "
                        "the same program with the same arguments on all machines."
                        + see("several-replicas")
                    )
            if chiefs_records != records:
                raise PrivacyMismatchError(
                    "The chief was given other records than this worker, or in another "
                    "order, so that a record may be in the parts of both. Give every "
                    "worker all records, in the same order." + see("several-replicas")
                )

    def check_values(self) -> None:
        """Raises if weights, optimizer state or clip norms are not the same."""
        if replicas.taking_part(self._model) == 1:
            return
        with self._workers.together():
            number = number_of(self._values())
        if not self._workers.several:
            return
        with self._workers.together():
            (chiefs,) = self._workers.told(number)
            if chiefs != number:
                raise PrivacyMismatchError(
                    "The weights, the optimizer's state or the clip norm of this "
                    "worker are not the chief's: a checkpoint that one of them could "
                    "not read, a callback that does something else on every machine "
                    "(a random learning rate), or an update with random numbers does "
                    "this. Restore all from the same files." + see("several-replicas")
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
                    f"{variable.name} has another value on every replica: an update "
                    "with random numbers, or one that is another on each, does this. "
                    "Write to it by what all replicas have." + see("several-replicas")
                )
            found.append(first)
        return found


def _plain(value: Any) -> Any:
    """For JSON, without what two processes have at other addresses."""
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


def number_of(parts: Sequence[bytes]) -> float:
    """48 bits of a hash, as many as a float64 holds for sure.

    Args:
      parts: what is hashed, with the sizes.
    """
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return float(int.from_bytes(digest.digest(), "big"))
