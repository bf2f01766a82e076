"""The number of batches that Keras runs at a time, and the steps that they end."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.accounting.phases import PrivacyMismatchError
from tfdpclip.keras import _compat


def runs_eagerly(model: tf.keras.Model) -> bool:
    """Whether a model's training step runs eagerly, without a graph.

    TensorFlow can be told to run all functions eagerly, regardless of the model.
    """
    return bool(model.run_eagerly) or tf.config.functions_run_eagerly()


class Executions:
    """Counts the executions of one call of `fit`, in physical batches.

    Args:
      model: the model.
      params: the `params` that Keras gives to callbacks.
      pieces: physical batches in one logical step.
      begun: physical batches of the first step that were drawn before.
    """

    def __init__(
        self, model: tf.keras.Model, params: dict[str, Any], pieces: int, begun: int
    ):
        self._model = model
        self._steps: int | None = params.get("steps")
        self._epochs: int = params.get("epochs", 1)
        self._pieces = pieces
        self._begun = begun
        self._longest = 1
        self._batch = 0
        self._executed = begun
        self._look()

    @property
    def planned(self) -> int | None:
        """Logical steps of the whole call; None if Keras does not know."""
        if self._steps is None:
            return None
        return -(-self._steps * self._epochs // self._pieces)

    @property
    def fed(self) -> int:
        """Physical batches that this call of `fit` trained on."""
        return self._executed - self._begun

    @property
    def widest(self) -> int:
        """The most logical steps that an execution may end now."""
        self._look()
        return self._ended(self._longest)

    @property
    def ends_epoch(self) -> bool:
        """Whether the current execution ends an epoch; False if Keras does not know."""
        return self._steps is not None and self._batch + self._longest >= self._steps

    def begin(self, batch: int, left: float) -> int:
        """Notes the execution from `batch` on, and returns the steps that it ends.

        Args:
          batch: the first batch of the execution, counted in the epoch.
          left: the number of steps that the budget has room for.

        Raises:
          PrivacyMismatchError: if the execution has more steps than are left.
        """
        self._batch = batch
        self._look()
        steps = self.steps_from(batch)
        if steps > left:
            raise PrivacyMismatchError(
                "steps_per_execution became larger during training: the next execution "
                f"has {steps} steps, and the privacy budget room for {left:g}."
            )
        return steps

    def end(self) -> None:
        """Counts the current execution."""
        self._executed += self._physical(self._batch)

    def wrong_pending(self, optimizer: Any) -> str | None:
        """An error message if a batch was added to the sums twice, or not at all.

        A batch that is added twice has every record twice, even if the next batch is
        skipped.

        Args:
          optimizer: the optimizer, with the sums of an unfinished step.
        """
        found = getattr(optimizer, "pending_batches", None)
        fed = self._executed % self._pieces
        if self._pieces == 1 or found in (None, fed):
            return None
        return (
            f"After {self.fed} physical batches, {fed} of them belong to an unfinished "
            f"step, but the optimizer has added up {found}: minimize was called more "
            "or less than once for a batch. Call it once in every train_step."
            + see("rows-that-are-not-records")
        )

    def check(self, steps: int) -> None:
        """Raises if the batches so far do not make the steps that the optimizer took.

        Args:
          steps: the optimizer's releases in this call of `fit`.

        Raises:
          PrivacyMismatchError: if the optimizer took more or fewer steps.
        """
        made = self._executed // self._pieces
        if steps != made:
            raise PrivacyMismatchError(
                f"{self._executed} physical batches with accumulation_steps = "
                f"{self._pieces} are {made} steps, but the optimizer took {steps}: it "
                "began in the middle of a step, does not count noise draws, or is used "
                "more than once in every step."
            )

    def steps_from(self, batch: int) -> int:
        """The number of steps that end if the execution from `batch` on runs next.

        The execution is taken to have as many batches as the last execution.
        """
        return self._ended(self._physical(batch))

    def _ended(self, physical: int) -> int:
        return (self._executed % self._pieces + physical) // self._pieces

    def _physical(self, batch: int) -> int:
        if self._steps is None:
            return self._longest
        return min(self._longest, self._steps - batch % self._steps)

    def _look(self) -> None:
        """Reads how many batches run at a time; called once for each execution."""
        value = _compat.steps_per_execution(self._model)
        # Keras lowers the variable for the last, partial execution of an epoch.
        self._longest = max(value, self._longest)


def refuse_overrun(model: tf.keras.Model, params: dict[str, Any], data: Any) -> None:
    """Raises if an execution could run more batches than `fit` was asked for.

    Args:
      model: the model.
      params: the `params` that Keras gives to callbacks.
      data: the data of `fit`, whose end stops an execution.

    Raises:
      PrivacyMismatchError: if so, because the budget could be exceeded.
    """
    steps, size = params.get("steps"), _compat.steps_per_execution(model)
    finite = isinstance(data, tf.data.Dataset) and int(data.cardinality())
    overruns = _compat.OVERRUNS_EPOCHS and steps not in (None, finite)
    if overruns and steps % size:
        whole = steps // size * size or size
        raise PrivacyMismatchError(
            f"steps_per_epoch={steps} is not a multiple of steps_per_execution={size}. "
            "This Keras runs whole executions, so the last execution of an epoch would "
            f"train on too many batches. Give steps_per_epoch={whole}; to plan.fit, "
            f"take {whole} of the batches, or give steps_per_execution=1."
        )
