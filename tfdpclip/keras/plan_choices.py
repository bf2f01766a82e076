"""The meaning of the names in a plan's arguments."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip.accounting.plan_arguments import MADE_FOR_MOMENTUM
from tfdpclip.clipping import FixedClip, as_rule
from tfdpclip.sampling.allocation import RandomAllocation
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.poisson import FullBatch, Poisson
from tfdpclip.sampling.schemes import FixedSize, ShuffledEpochs
from tfdpclip.sampling.separated import MinSeparation

#: Sampling schemes by name.
SAMPLING = ("poisson", "random_allocation", "fixed_size", "shuffled", "fixed_order")
# The length of a run without `batch_size` or `epochs`, and the walk of a weight by
# noise: chosen on twelve tasks at epsilon 1 and 3, docs/results/nothing_to_tune.
_STEPS, _EPOCHS, _LEAST_EPOCHS, _FEW_RECORDS, _LEAST_BATCH = 500, 40, 10, 10_000, 16
_WALK, _FEW_WEIGHTS, _LINEAR, _EMBEDDED = 0.4, 10_000, 1.5, 3.0
# Below this noise on a weight of the mean of all gradients, in clip norms, the walk of
# convolutions is shorter: 0.2 for 60,000 images at epsilon 3, not 0.1 and not 0.4.
_LITTLE_NOISE = 1.5e-4
# What eleven held out tasks learned by this noise: the median and the least share of
# what plain training gains over guessing, in percent (held_out.csv of the results).
_LEARNED = ((2e-4, 96, 78), (1e-3, 94, 51), (4e-3, 87, 72))
# A rate this many times above or below the plan's is worth a warning. Adam's usual
# 0.001 is 12 to 18 times below, and learns slowly.
_FAR = 30.0
#: The clip rule beside a learning rate of the plan. Norms of 1 to 3 differ little; a
#: quantile falls below the norms of rare classes, and its counts cost small batches
#: noise.
PLANNED_CLIP = FixedClip(1.0, normalize=True)
#: The optimizers whose learning rate a plan can choose.
WITH_PLANNED_RATE = tuple(
    getattr(tf.keras.optimizers, name) for name in ("SGD", "Adam", "AdamW", "Nadam")
)
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
    """The batches of an execution, in an epoch of `batches`: 8 to 16 if they are many.

    It divides an epoch if one of these numbers does, and is 8 otherwise.

    >>> [chosen_execution(n) for n in (3, 10, 47, 100, 188)]
    [1, 2, 8, 10, 8]
    """
    most = max(1, min(2 * _EXECUTED, batches // _EXECUTIONS))
    whole = (k for k in range(_EXECUTED, most + 1) if batches % k == 0)
    return next(whole, min(_EXECUTED, most))


def choose_length(
    examples: int, batch_size: int | None, epochs: int | None
) -> tuple[int, int]:
    """The batch size and the epochs of a plan, where the user gives one or neither.

    The noise of a whole run hardly depends on the batch size and the epochs, once z is
    above 1 (docs/results/nothing_to_tune). A run of up to `_FEW_RECORDS` records has
    `_STEPS` steps, and more steps change nothing. More records leave less noise, and
    allow more steps: the steps grow by the power 2/3 of the records, so that the rate
    of a step stays below 1. More epochs cost time, and reduce noise the less the more
    records there are.

    *Formal guarantees*: a function of public numbers.

    Args:
      examples: N, the number of records.
      batch_size: the expected records of a step, or None.
      epochs: the passes through the records, or None.

    >>> choose_length(5000, None, None), choose_length(60_000, None, None)
    ((400, 40), (945, 26))
    >>> choose_length(5000, 100, None), choose_length(5000, None, 10)
    ((100, 10), (100, 10))
    """
    more = max(1.0, examples / _FEW_RECORDS)
    steps = _STEPS * more ** (2 / 3)
    enough = max(_LEAST_EPOCHS, round(_EPOCHS / more**0.25))
    if epochs is None:
        epochs = enough
        if batch_size is not None:
            epochs = min(epochs, max(1, round(steps * batch_size / examples)))
    if batch_size is None:
        # Small batches in few epochs have a small z, and much noise in all.
        steps = max(_STEPS, steps * min(1.0, epochs / enough))
        batch_size = max(min(examples, _LEAST_BATCH), round(examples * epochs / steps))
    return min(batch_size, examples), epochs


def planned_learning_rate(
    optimizer: type, options: dict[str, Any], noise: float, steps: int
) -> Any:
    """The learning rate for a noise on the mean gradient, falling to 0 in a line.

    Noise alone moves each weight in a random walk. The rate gives the walk the same
    length, `_WALK` without the decay, whatever epsilon, batch size and epochs are. The
    step of SGD is proportional to the noise; the division of Adam removes the noise.
    `fit_rate_to_weights` makes the rate smaller for large models.

    *Formal guarantees*: a function of public numbers.

    Args:
      optimizer: a class of `WITH_PLANNED_RATE`.
      options: the arguments of the optimizer: `momentum` and `clip` matter to SGD.
      noise: the stddev of the noise on a coordinate of the mean, in clip norms.
      steps: T, the steps of the plan.

    Returns:
      A Keras schedule; None for SGD, if the size of clipped records is not known before
      the run.
    """
    step = _WALK / steps**0.5
    if issubclass(optimizer, tf.keras.optimizers.SGD):
        size = _clipped_size(options["clip"])
        if size is None:
            return None
        step *= (1 - options["momentum"]) / (noise * size)
    return tf.keras.optimizers.schedules.PolynomialDecay(step, steps, 0.0)


def fit_rate_to_weights(schedule: Any, noise: float, variables: Sequence[Any]) -> None:
    """Makes a planned rate fit the shapes of the trained weights.

    In a wide layer the first weights are small, and so must be the walk of the noise:
    more than `_FEW_WEIGHTS` weights have a smaller rate, the more so in convolutions
    and attention, which use each weight at many positions. Where the noise is small,
    the gradients decide the rate of these, and the walk is shorter. Fewer weights have
    a larger rate in a model of one layer, whose noise passes through no other layer,
    and in one or two layers after an `Embedding`, whose rows begin near 0. The rows do
    not count as weights.

    Args:
      schedule: the planned rate.
      noise: the stddev of the noise on a coordinate of the mean of all gradients of the
        run, in clip norms.
      variables: the trained variables.
    """
    layers = [v for v in variables if "embeddings" not in v.name]
    weights = sum(int(np.prod(v.shape)) for v in layers)
    kernels = sum(len(v.shape) > 1 for v in layers)
    alone = _LINEAR if len(layers) == len(variables) else _EMBEDDED
    convolved = any(len(v.shape) > 2 for v in layers)
    scale = (_FEW_WEIGHTS / max(1, weights)) ** (1 / 3 if convolved else 0.2)
    scale = min(max(1.0, alone / max(1, kernels)), scale)
    if convolved:
        scale *= min(1.0, noise / _LITTLE_NOISE) ** 0.5
    schedule.initial_learning_rate *= scale


def expected_gain(noise: float) -> str:
    """What to expect of a run, in words.

    Args:
      noise: see `fit_rate_to_weights`.

    >>> expected_gain(1e-5)
    "96 % (78 % at least) of plain training's gain over guessing, in tasks we measured"
    """
    for most, median, least in _LEARNED:
        if noise <= most:
            return (
                f"{median} % ({least} % at least) of plain training's gain over "
                "guessing, in tasks we measured"
            )
    return "little: more noise than in any task we measured; take more examples"


def warn_of_other_rate(
    optimizer: Any, planned: Any, noise: float, variables: Sequence[Any]
) -> None:
    """Warns of a learning rate that is far from the plan's.

    Args:
      optimizer: the optimizer, whose rate the user chose.
      planned: the plan's schedule for this optimizer.
      noise: see `fit_rate_to_weights`.
      variables: the trained variables.
    """
    rate = optimizer.get_config()["learning_rate"]
    if isinstance(rate, dict):
        rate = rate["config"].get("initial_learning_rate")
    if rate is None or not float(rate) > 0:
        return
    fit_rate_to_weights(planned, noise, variables)
    usual = planned.initial_learning_rate
    if not 1 / _FAR <= rate / usual <= _FAR:
        result = "nothing is learned" if rate < usual else "noise moves the weights"
        warnings.warn(
            f"learning_rate={rate:.3g} of {type(optimizer).__name__} is far from the "
            f"plan's, {usual:.2g} falling to 0: often {result}. Leave the rate out: "
            "plan.optimizer(), or plan.optimizer(dpc.keras.DPAdam)."
            + see("training-that-is-noise"),
            stacklevel=2,
        )


def _clipped_size(clip: Any) -> float | None:
    """The largest norm of a clipped record; None for a rule whose norm moves."""
    rule = as_rule(clip)
    if getattr(rule, "normalize", False):
        return 1.0
    if rule.has_groups or not isinstance(rule.initial_state(), tuple):
        return None
    return float(rule.sensitivity(rule.initial_state()))


def describe_optimizer(optimizer: Any) -> str:
    """An optimizer's update rule and learning rate, for the text of a plan."""
    config = optimizer.get_config()
    rate, words = config["learning_rate"], type(optimizer).__name__
    if config.get("momentum"):
        words += f", momentum {config['momentum']:g}"
    if not isinstance(rate, dict):
        return f"{words}, learning rate {float(rate):.3g}"
    first = rate["config"].get("initial_learning_rate")
    words += f", learning rate by {rate['class_name']}"
    return words if first is None else f"{words} from {float(first):.3g}"


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
