"""What the names in a plan's arguments stand for."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip.accounting.batch_size import BatchSizeAdvice, batch_size_advice
from tfdpclip.accounting.plan_arguments import MADE_FOR_MOMENTUM
from tfdpclip.sampling.allocation import RandomAllocation
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.schemes import FixedSize, FullBatch, Poisson, ShuffledEpochs
from tfdpclip.sampling.separated import MinSeparation

#: Ways to draw, by name.
SAMPLING = ("poisson", "random_allocation", "fixed_size", "shuffled", "fixed_order")
#: The least number of steps that batch_size="auto" leaves: with 79 the rule of Rehn et
#: al. was within 0.5 points of the best, with their 20 it lost up to 1.3
#: (docs/results/real).
_LEAST_STEPS = 80


def check_sampling(sampling: Any) -> None:
    """Raises ValueError unless a plan can find the sizes of this way to draw."""
    if isinstance(sampling, SamplingScheme):
        raise ValueError(
            f"sampling must be one of {', '.join(SAMPLING)}: a plan finds the sizes of "
            f"those itself, not of a {type(sampling).__name__}. With a scheme of your "
            "own, batches = scheme.batches(...), a noise_multiplier given to the "
            "optimizer, and dpc.keras.PrivacyBudget(epsilon, delta, batches) among the "
            "callbacks do what a plan does."
        )
    _arguments.choice("sampling", sampling, SAMPLING)


def scheme_of(sampling: str, batch_size: int, examples: int) -> SamplingScheme:
    """The scheme that a name stands for, with these sizes."""
    if sampling == "fixed_size":
        return FixedSize(batch_size, examples)
    if sampling == "shuffled":
        return ShuffledEpochs(batch_size, examples)
    if sampling == "fixed_order":
        return MinSeparation(examples, batch_size)
    if sampling == "random_allocation":
        return RandomAllocation(max(1, round(examples / batch_size)))
    return FullBatch() if batch_size == examples else Poisson(batch_size / examples)


def chosen_batch_size(
    name: str, sampling: str, examples: int, epochs: int, epsilon: float, delta: float
) -> BatchSizeAdvice:
    """The batch size that a name stands for, and why.

    Raises:
      ValueError: if there is no rule of that name, or for this way to draw.
    """
    _arguments.choice("batch_size", name, ("auto",))
    if sampling != "poisson":
        raise ValueError(
            'batch_size="auto" is a rule for sampling="poisson"; give a number with '
            f'sampling="{sampling}".'
        )
    return batch_size_advice(examples, epochs, epsilon, delta, _LEAST_STEPS)


def refuse_other_momentum(optimizer: Any, noise: Any, momentum: float) -> None:
    """Raises if a matrix that a plan made is for another momentum than SGD's.

    Nothing private depends on it: more noise than need be would be left.

    Args:
      optimizer: as it was made; of others than SGD, momentum is not asked.
      noise: what the plan was told.
      momentum: what its matrix is made for.

    Raises:
      ValueError: if they differ.
    """
    named = isinstance(noise, str) and noise in MADE_FOR_MOMENTUM
    if not (named and isinstance(optimizer, tf.keras.optimizers.SGD)):
        return
    found = float(optimizer.momentum)
    if found != momentum:
        raise ValueError(
            f"momentum={found:g} of {type(optimizer).__name__}: the noise of the plan "
            f"is made for momentum {momentum:g}, and more of it than need be would be "
            f"left in the weights. Say PrivacyPlan(..., momentum={found:g}), or "
            f"plan = plan.replace(momentum={found:g})."
        )
