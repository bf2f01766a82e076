"""Keras optimizers that train with differential privacy."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdpclip import _keras_marks
from tfdpclip._arguments import shown
from tfdpclip.keras import _compat
from tfdpclip.keras.private_optimizer import PrivateOptimizer
from tfdpclip.keras.updates import fused_update_step
from tfdpclip.tensorflow_privacy import in_place_of

_ARGUMENTS = """
    Privacy arguments, for every optimizer of this module:

    Args:
      clip: the clip norm, a Keras schedule of it, or a clip rule. The default,
        ``QuantileClip(0.65, initial_norm=1.0, normalize=True, minimum_norm=0.1)``,
        follows a quantile of the gradient norms and divides by it. The useful learning
        rate then does not depend on the size of gradients: before noise and momentum, a
        step moves the weights by at most the learning rate.
      noise_multiplier: z, the number for the accountant: the noise's stddev as a
        multiple of the clip norm, 0 or above. The gradient sum gets slightly more noise
        where the clip rule spends some of the budget on counts
        (`gradient_noise_multiplier`). 0 is not private. A Keras schedule gives z for
        every step (`noise_multiplier_at`).
      expected_batch_size: the public expected number of examples in one logical step:
        the divisor of every sum. The actual number of examples in a batch is never
        used. Not needed with ``unit="batch"``.
      accumulation_steps: how many physical batches make one logical step. Noise is
        drawn, and the clip norm moves, once per logical step; `iterations` counts
        logical steps.
      unit: the clipped unit. "example". "person": all examples of a person, with
        batches that draw people (``scheme.batches(data, people=ids, per_person=8)``),
        or each example, with batches that draw few examples of a person
        (`CappedPoisson`). "batch": the gradient of each physical batch as a whole
        (Nguyen et al. 2023), without per-example work. The divisor is then
        `accumulation_steps`, the number of batches (groups) per step, and one example
        moves the sum by up to twice the clip norm; the accountant reads `unit`.
        Batch normalisation is allowed, with `PublicBatchStatistics`.
      rows_per_record: how many consecutive rows of a batch make one record: views of an
        example, or examples of a person. The gradient of the record is the mean of the
        rows' gradients, and is clipped once. Take `batches.rows_per_record`;
        `plan.optimizer` does.
      perturbation: k: k * N(0, I) is added to each record's gradient before the clip,
        which makes clipping less biased (Chen et al. 2020, section 4). The perturbation
        gives no privacy by itself, and costs time: two draws of a whole gradient for
        every example.
      check_gradients: "first" (on the first step of every trace), "always" or "never":
        whether a step compares norms and sums with those of an ordinary backward pass.
      gradient_memory: bytes of materialised per-example gradients to allow at once.
      hardened_noise: whether each noise value is made from four draws, against attacks
        on the lowest bits of floating-point numbers; drawing takes four times as long.
      public_variables: public variables (or their names, or names of layers) that the
        loss reads, that are not trained, and that change from step to step: an average
        of the trained model, a schedule. All further untrained variables that the loss
        reads must stay constant during training. Terms that belong to no example
        (weight decay) may depend on public and on trained variables only.
      noise: a `tfdpclip.CorrelatedNoise`, for noise that cancels over the steps
        (docs/correlated_noise.md), with draws that `PrivacyBudget` sees; independent
        noise by default.
      seed: an integer makes the noise reproducible, for experiments only: the run is
        then not private, and reports say so.

    Raises:
      ValueError: if an argument is missing, not finite or out of range, or if the
        counts of an adaptive clip are too precise for `noise_multiplier`.

    *Formal guarantees*

    * Each step releases the sum of clipped gradients plus N(0, (z_g C)^2) on every
      coordinate, and each count of the clip rule plus its own noise, where
      1/z^2 = 1/z_g^2 + sum_k 1/(2 s_k)^2: one Gaussian mechanism of noise multiplier z
      under adding or removing one example (Andrew et al. 2021, Theorem 1). Where a rule
      clips groups of variables, C is the rule's noise scale of each group.
    * With ``unit="batch"`` one example moves the clipped sum by up to 2 C, and each
      count by up to 1: noise multiplier z / 2 for the accountant, which
      `tfdpclip.accounting` takes from the unit.
    * Noise is scaled by the clip that was applied; the clip moves afterwards.
    * Noise comes from the operating system's entropy and is in no checkpoint.
    * Gradients that were computed any other way are refused by `apply_gradients`.
"""


def privatize(
    optimizer_class: type[tf.keras.optimizers.Optimizer],
) -> type[tf.keras.optimizers.Optimizer]:
    """A differentially private version of a Keras optimizer class.

    Everything after the gradient (momentum, schedules, weight decay, averaging) works
    as in the given class, on gradients that are private already.

    Args:
      optimizer_class: a subclass of `tf.keras.optimizers.Optimizer`.

    Returns:
      A subclass of it, named with DP in front, that takes the arguments of the class
      and `clip`, `noise_multiplier`, `expected_batch_size`, `accumulation_steps`,
      `unit`, `rows_per_record`, `perturbation`, `check_gradients`, `gradient_memory`,
      `hardened_noise`, `public_variables`, `noise` and `seed` by keyword.

    Raises:
      ValueError: if the argument is no optimizer class, or is private already.

    >>> DPAdamax = privatize(tf.keras.optimizers.Adamax)
    >>> DPAdamax(1e-3, noise_multiplier=1.0, expected_batch_size=64).name
    'DPAdamax'
    """
    if not (
        isinstance(optimizer_class, type)
        and issubclass(optimizer_class, tf.keras.optimizers.Optimizer)
        and not issubclass(optimizer_class, PrivateOptimizer)
    ):
        raise ValueError(
            "optimizer_class must be a subclass of tf.keras.optimizers.Optimizer (not "
            "of the legacy optimizers, and not private already), got "
            f"{shown(optimizer_class)}. For example "
            "privatize(tf.keras.optimizers.Adamax)."
            + in_place_of(getattr(optimizer_class, "__name__", ""))
        )
    return _private_class(optimizer_class)


@functools.cache
def _private_class(optimizer_class):
    name = f"DP{optimizer_class.__name__}"

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("name", name)
        PrivateOptimizer.__init__(self, *args, **kwargs)

    doc = (
        f"`tf.keras.optimizers.{optimizer_class.__name__}` with differential privacy.\n"
        f"\n    Takes the arguments of `{optimizer_class.__name__}` and the following "
        f"by keyword.\n{_ARGUMENTS}"
    )
    body = {"__init__": __init__, "__doc__": doc, "__module__": __name__}
    update_step = fused_update_step(optimizer_class)
    if update_step is not None:
        body["update_step"] = update_step
    made = type(name, (PrivateOptimizer, optimizer_class), body)
    # A class of another package must not replace a Keras class of the same name.
    module = optimizer_class.__module__
    package = (
        "tfdpclip" if module.startswith(_keras_marks.MODULES) else f"tfdpclip.{module}"
    )
    return _compat.saving.register_keras_serializable(package)(made)


DPSGD = privatize(tf.keras.optimizers.SGD)
DPAdam = privatize(tf.keras.optimizers.Adam)
DPAdamW = privatize(tf.keras.optimizers.AdamW)
DPAdagrad = privatize(tf.keras.optimizers.Adagrad)
DPRMSprop = privatize(tf.keras.optimizers.RMSprop)
