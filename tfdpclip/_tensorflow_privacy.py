"""The names of tensorflow-privacy, and what to write here in their place."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PAGE = "See docs/from_tensorflow_privacy.md."
#: The arguments of its optimizers.
ARGUMENTS = {
    "l2_norm_clip": "Write clip=1.0, or a clip rule, such as clip=dpc.QuantileClip().",
    "num_microbatches": (
        "Leave num_microbatches out: every example is clipped on its own. In the place "
        "of num_microbatches=1, which clips whole batches, write "
        'unit="batch", clip=1.0.'
    ),
    "gradient_accumulation_steps": (
        "Write accumulation_steps=4, which adds noise once for each step: "
        "gradient_accumulation_steps would add up gradients of several steps, each "
        "with its own noise."
    ),
    "dp_sum_query": (
        "Write a clip rule, clip=dpc.FixedClip(1.0), and noise_multiplier=1.1: the "
        "stddev of the query divided by its clip norm."
    ),
}
_SETTINGS = "clip=1.0, noise_multiplier=1.1, expected_batch_size=256"
_TREE = (
    'dpc.keras.PrivacyPlan(3.0, 1e-5, examples=10000, batch_size=100, epochs=2, noise="'
    'tree")'
)
_CLASSES = {
    r"make_\w*optimizer_class": "dpc.keras.privatize(tf.keras.optimizers.Adamax)",
    r"\w*(Tree|Restart|FTRL)\w*(Query|Optimizer)": _TREE,
    r"\w*DP\w*(SGD|GradientDescent)\w*Optimizer": f"dpc.keras.DPSGD(0.1, {_SETTINGS})",
    r"\w*DP\w*Adam\w*Optimizer": f"dpc.keras.DPAdam(1e-3, {_SETTINGS})",
    r"\w*DP\w*Adagrad\w*Optimizer": f"dpc.keras.DPAdagrad(1e-2, {_SETTINGS})",
    r"\w*DP\w*RMS\w*Optimizer": f"dpc.keras.DPRMSprop(1e-3, {_SETTINGS})",
    r"DP(Sequential|Model)": (
        "tf.keras.Sequential(layers), compiled with "
        f"dpc.keras.DPAdam(1e-3, {_SETTINGS})"
    ),
    r"compute_dp_sgd_privacy\w*": "plan.statement()",
    r"\w*Quantile\w*Query": "clip=dpc.QuantileClip(0.5, initial_norm=0.1)",
    r"Nested\w*Query": "clip=dpc.LayerwiseClip(dpc.FixedClip(1.0))",
    r"Distributed\w*Query": (
        "dpc.federated.clipped_mean(1.1, clients_per_round=100, clip=1.0, "
        'noise="distributed", secure=True)'
    ),
    r"NoPrivacy\w*Query": "clip=dpc.FixedClip(1.0), with noise_multiplier=0.0",
    r"(\w*(Gaussian|Normalized|Sum)\w*|DP)Query": (
        "clip=dpc.FixedClip(1.0), with noise_multiplier=1.1: the stddev of the query "
        "divided by its clip norm"
    ),
}


def refuse_arguments(names: Iterable[str]) -> None:
    """Raises if an argument is one of tensorflow-privacy's optimizers.

    Args:
      names: the names of the arguments.
    """
    for name in names:
        if name in ARGUMENTS:
            raise ValueError(f"{name} is no argument here. {ARGUMENTS[name]} {_PAGE}")


def in_place_of(*names: str) -> str:
    """What to write in the place of the first name that is tensorflow-privacy's.

    Returns:
      A sentence after a space; an empty text if no name is.

    >>> in_place_of("DPModel").split(",")[0]
    " DPModel is tensorflow-privacy's. Write tf.keras.Sequential(layers)"
    """
    for name in names:
        for pattern, line in _CLASSES.items():
            if re.fullmatch(pattern, name):
                return f" {name} is tensorflow-privacy's. Write {line}. {_PAGE}"
    return ""
