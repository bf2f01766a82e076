"""The meaning of the names in a plan's arguments."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip.accounting.batch_size import BatchSizeAdvice, batch_size_advice
from tfdpclip.accounting.plan_arguments import MADE_FOR_MOMENTUM
from tfdpclip.sampling.allocation import RandomAllocation
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.poisson import FullBatch, Poisson
from tfdpclip.sampling.schemes import FixedSize, ShuffledEpochs
from tfdpclip.sampling.separated import MinSeparation

#: Sampling schemes by name.
SAMPLING = ("poisson", "random_allocation", "fixed_size", "shuffled", "fixed_order")
#: The least number of steps that batch_size="auto" leaves. With 79 steps the rule of
#: Rehn et al. was within 0.5 points of the best; with their 20 steps it lost up to 1.3
#: (docs/results/real).
_LEAST_STEPS = 80
# Batches of an execution: epochs of small models with 4 and with 8 differ by less than
# a tenth (docs/results/speed). An epoch keeps enough executions for a progress bar.
_EXECUTED, _EXECUTIONS = 8, 4


def check_sampling(sampling: Any) -> None:
    """Raises ValueError unless a plan can size a sampling scheme of this name."""
    if isinstance(sampling, SamplingScheme):
        raise ValueError(
            f"sampling must be one of {', '.join(SAMPLING)}, by name: a plan works out "
            f"the sizes, so it takes no {type(sampling).__name__}. To use your own "
            "scheme, write batches = scheme.batches(...), give noise_multiplier to the "
            "optimizer, and add dpc.keras.PrivacyBudget(epsilon, delta, batches) to "
            "the callbacks."
        )
    _arguments.choice("sampling", sampling, SAMPLING)


def scheme_of(sampling: str, batch_size: int, examples: int) -> SamplingScheme:
    """The sampling scheme of a name, with these sizes."""
    if sampling == "fixed_size":
        return FixedSize(batch_size, examples)
    if sampling == "shuffled":
        return ShuffledEpochs(batch_size, examples)
    if sampling == "fixed_order":
        return MinSeparation(examples, batch_size)
    if sampling == "random_allocation":
        return RandomAllocation(max(1, round(examples / batch_size)))
    return FullBatch() if batch_size == examples else Poisson(batch_size / examples)


def chosen_execution(batches: int) -> int:
    """The batches of an execution, in an epoch of `batches`: near 8, whole if possible.

    >>> [chosen_execution(n) for n in (3, 10, 47, 100, 188)]
    [1, 2, 8, 10, 4]
    """
    most = max(1, min(2 * _EXECUTED, batches // _EXECUTIONS))
    whole = [k for k in range(_EXECUTED // 2, most + 1) if batches % k == 0]
    return min(whole, key=lambda k: abs(k - _EXECUTED), default=min(_EXECUTED, most))


def chosen_batch_size(
    name: str, sampling: str, examples: int, epochs: int, epsilon: float, delta: float
) -> BatchSizeAdvice:
    """The batch size that a rule of this name chooses, and the reason.

    Raises:
      ValueError: if there is no rule of this name, or not for this sampling.
    """
    _arguments.choice("batch_size", name, ("auto",))
    if sampling != "poisson":
        raise ValueError(
            'batch_size="auto" is a rule for sampling="poisson"; give a number with '
            f'sampling="{sampling}".'
        )
    return batch_size_advice(examples, epochs, epsilon, delta, _LEAST_STEPS)


def refuse_other_momentum(optimizer: Any, noise: Any, momentum: float) -> None:
    """Raises if a plan's matrix was made for a momentum other than the optimizer's.

    Privacy does not depend on the momentum, but the weights would have more noise than
    necessary.

    Args:
      optimizer: the made optimizer; only the momentum of SGD is checked.
      noise: the plan's argument.
      momentum: the momentum that the plan's matrix is made for.

    Raises:
      ValueError: if the momenta differ.
    """
    named = isinstance(noise, str) and noise in MADE_FOR_MOMENTUM
    if not (named and isinstance(optimizer, tf.keras.optimizers.SGD)):
        return
    found = float(optimizer.momentum)
    if found != momentum:
        raise ValueError(
            f"momentum={found:g} of {type(optimizer).__name__}: the noise of the plan "
            f"is made for momentum {momentum:g}, and would leave more noise than "
            f"necessary in the weights. Write PrivacyPlan(..., momentum={found:g}), or "
            f"plan = plan.replace(momentum={found:g})."
        )
