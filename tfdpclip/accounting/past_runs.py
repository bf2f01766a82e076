"""The epsilon of runs that were made with tensorflow-privacy."""

from __future__ import annotations

import dataclasses
import math

from tfdpclip import _arguments, sampling
from tfdpclip.accounting import calibration


@dataclasses.dataclass(frozen=True)
class PastRun:
    """The privacy of a run under two assumptions about its batches.

    Attributes:
      poisson: epsilon for adding or removing an example, if batches were Poisson
        samples.
      shuffled: epsilon for replacing an example, if every epoch went through all
        examples in a shuffled order, as `fit(x, y, batch_size=...)` does.
      delta: the delta of both.
    """

    poisson: float
    shuffled: float
    delta: float

    def __str__(self) -> str:
        return (
            f"epsilon {self.shuffled:.3g} at delta {self.delta:g} for replacing an "
            "example, if fit drew its batches from arrays (shuffled epochs); "
            f"{self.poisson:.3g} for adding or removing an example, only if every step "
            "drew a Poisson sample"
        )


def past_run(
    number_of_examples: int,
    batch_size: int,
    num_epochs: float,
    noise_multiplier: float,
    delta: float,
    used_microbatching: bool = True,
) -> PastRun:
    """Returns what a DP-SGD run cost; arguments of `compute_dp_sgd_privacy_statement`.

    *Formal guarantees*: upper bounds, by privacy loss distributions. A microbatch of
    several examples is moved by twice the clip norm under every relation.

    Args:
      number_of_examples: the examples of the training data.
      batch_size: the examples of a step, in whatever microbatches.
      num_epochs: passes through the data.
      noise_multiplier: the noise of a step's sum over the clip norm.
      delta: in (0, 1).
      used_microbatching: whether microbatches had several examples.

    Raises:
      ValueError: if an argument is out of range.

    >>> print(past_run(60_000, 256, 20, 1.1, 1e-5, used_microbatching=False))
    epsilon 66.9 at delta 1e-05 for replacing an example, if fit drew its batches \
from arrays (shuffled epochs); 1.32 for adding or removing an example, only if every \
step drew a Poisson sample
    """
    examples = _arguments.integer("number_of_examples", number_of_examples, 1)
    size = _arguments.integer("batch_size", batch_size, 1)
    if size > examples:
        raise ValueError(
            f"batch_size must be at most number_of_examples ({examples}), got {size}."
        )
    epochs = _arguments.positive("num_epochs", num_epochs)
    _arguments.boolean("used_microbatching", used_microbatching)
    unit = "batch" if used_microbatching else "example"
    poisson, shuffled = (
        calibration.epsilon(noise_multiplier, steps, scheme, delta, unit=unit)
        for steps, scheme in (
            (math.ceil(epochs * examples / size), sampling.Poisson(size / examples)),
            (
                math.ceil(epochs * math.ceil(examples / size)),
                sampling.ShuffledEpochs(size, examples),
            ),
        )
    )
    return PastRun(poisson, shuffled, delta)
