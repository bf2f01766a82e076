"""The names of tensorflow-privacy, its queries, and what to write in their place.

The package is not imported: a query of the package is read where one is given.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

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
        'dpc.federated.clipped_mean(1.1, 100, clip=1.0, noise="distributed", '
        "minimum_clients=80, secure=True)"
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


@dataclasses.dataclass(frozen=True)
class QuerySettings:
    """What a query of tensorflow-privacy does, in this library's terms.

    Attributes:
      clip: the clip rule, for every `clip=`; None for no clipping.
      noise_multiplier: z, as given to the accountant. Of a query that adapts its clip
        norm: z of the sum and the count together, which is below the query's number.
      records: the public number of records by which sums are divided, or None.
      noise: "central", "distributed" or "tree".
    """

    clip: dict[str, Any] | None
    noise_multiplier: float
    records: float | None = None
    noise: str = "central"

    @property
    def optimizer(self) -> dict[str, Any]:
        """Arguments for `dpc.keras.DPSGD` and further optimizers.

        Raises:
          ValueError: if the noise is not that of an optimizer on its own.
        """
        if self.noise != "central":
            raise ValueError(
                f"The query's noise is {self.noise}, which has no clip and noise of a "
                f"step on its own. Write {_TREE}."
            )
        return {
            "clip": self.clip,
            "noise_multiplier": self.noise_multiplier,
            "expected_batch_size": self._divisor(),
        }

    @property
    def aggregator(self) -> dict[str, Any]:
        """Arguments for `dpc.federated.clipped_mean`.

        Raises:
          ValueError: if the number of records is not public, or for tree noise.
        """
        if self.noise == "tree":
            raise ValueError(
                "The query's noise is a tree's over the rounds. Write "
                "dpc.federated.clipped_mean(1.1, 100, clip=1.0, "
                "noise=dpc.CorrelatedNoise(...))."
            )
        settings: dict[str, Any] = {"noise": self.noise}
        if self.noise == "distributed":
            settings["secure"] = True
        return settings | {
            "clip": self.clip,
            "noise_multiplier": self.noise_multiplier,
            "clients_per_round": self._divisor(),
        }

    def _divisor(self) -> float:
        if self.records is None:
            raise ValueError(
                "records is not part of this query: the expected number of records in "
                "a step. Write from_query(query, records=100)."
            )
        return self.records


def from_query(query: Any, records: float | None = None) -> QuerySettings:
    """Returns the clip rule and the noise of a query of tensorflow-privacy.

    *Formal guarantees*: z bounds the query's sum and count together:
    z^-2 = z_g^-2 + (2 s)^-2 for a sum of noise multiplier z_g and a count with noise s
    (Andrew et al. 2021, Theorem 1).

    Args:
      query: a `GaussianSumQuery`, `QuantileAdaptiveClipSumQuery`, `NormalizedQuery`,
        `DistributedDiscreteGaussianSumQuery`, `NoPrivacySumQuery`, or a tree or restart
        query. A distributed query counts in integers, and so does its clip norm here.
      records: the public expected number of records in a step, where the query has
        none.

    Raises:
      ValueError: if the query has no counterpart, or is not private by its settings.

    >>> import tfdpclip as dpc
    >>> class GaussianSumQuery:
    ...     _l2_norm_clip, _stddev = 2.0, 2.2
    >>> settings = dpc.tensorflow_privacy.from_query(GaussianSumQuery(), records=100)
    >>> optimizer = dpc.keras.DPSGD(0.1, **settings.optimizer)
    >>> optimizer.clip, settings.noise_multiplier
    (FixedClip(norm=2.0), 1.1)
    """
    name = type(query).__name__
    read = {key.strip("_"): value for key, value in vars(type(query)).items()}
    read |= {key.strip("_"): value for key, value in vars(query).items()}
    if name == "NormalizedQuery":
        divisor = float(read["denominator"])
        settings = from_query(read["numerator"], divisor)
        if settings.records != divisor:
            raise ValueError(
                f"denominator={divisor:g} of the query differs from its "
                f"expected_num_records={settings.records:g}; sums and counts have one "
                "divisor here. Write the same number in both."
            )
        return settings
    if name == "RestartQuery":
        return from_query(read["inner_query"], records)
    if name in _READERS:
        return _READERS[name](read, records)
    raise ValueError(
        f"query={name} has no counterpart.{in_place_of(name) or ' ' + _PAGE}"
    )


def as_clip(value: Any) -> dict[str, Any] | None:
    """The rule of a query of tensorflow-privacy; None of any other value."""
    if not type(value).__module__.startswith("tensorflow_privacy."):
        return None
    return from_query(value, records=1.0).clip


def _fixed(norm: Any) -> dict[str, Any]:
    return {"class_name": "FixedClip", "config": {"norm": float(norm)}}


def _gaussian(read: Mapping[str, Any], records: float | None) -> QuerySettings:
    norm = float(read["l2_norm_clip"])
    return QuerySettings(_fixed(norm), float(read["stddev"]) / norm, records)


def _quantile(read: Mapping[str, Any], records: float | None) -> QuerySettings:
    estimator = vars(read["quantile_estimator_query"])
    count = estimator["_below_estimate_query"]
    z, stddev = float(read["noise_multiplier"]), float(count._numerator._stddev)
    if z > 0 and stddev == 0:
        raise ValueError(
            "clipped_count_stddev=0 releases an exact count: the query is not private. "
            "Write clipped_count_stddev=expected_num_records / 20."
        )
    config = {
        "target_quantile": float(estimator["_target_quantile"]),
        "initial_norm": float(estimator["_initial_estimate"]),
        "learning_rate": float(estimator["_learning_rate"]),
        "count_stddev": stddev,
        "update": "geometric" if estimator["_geometric_update"] else "linear",
    }
    clip = {"class_name": "QuantileClip", "config": config}
    both = 0.0 if z == 0 else 1 / math.hypot(1 / z, 1 / (2 * stddev))
    return QuerySettings(clip, both, float(count._denominator))


def _distributed(read: Mapping[str, Any], records: float | None) -> QuerySettings:
    norm, share = float(read["l2_norm_bound"]), float(read["local_stddev"])
    if records is None:
        raise ValueError(
            "records is missing: the noise of a distributed query grows with its "
            "clients. Write from_query(query, records=100)."
        )
    z = share * math.sqrt(records) / norm
    return QuerySettings(_fixed(norm), z, records, "distributed")


def _tree(read: Mapping[str, Any], records: float | None) -> QuerySettings:
    norm = float(read["clip_value"])
    generator = read["tree_aggregator"].value_generator
    generator = getattr(generator, "value_fn", generator)
    generator = getattr(generator, "__self__", generator)
    stddev = float(generator._noise_std)
    return QuerySettings(_fixed(norm), stddev / norm, records, "tree")


_READERS = {
    "GaussianSumQuery": _gaussian,
    "QuantileAdaptiveClipSumQuery": _quantile,
    "DistributedDiscreteGaussianSumQuery": _distributed,
    "TreeCumulativeSumQuery": _tree,
    "TreeResidualSumQuery": _tree,
    "NoPrivacySumQuery": lambda _, records: QuerySettings(None, 0.0, records),
}


def optimizer_arguments(
    l2_norm_clip: float,
    noise_multiplier: float,
    num_microbatches: int | None = None,
    *,
    batch_size: int,
) -> dict[str, Any]:
    """Returns our optimizers' arguments for those of a `DPKeras...Optimizer`.

    Args:
      l2_norm_clip: the clip norm of a microbatch's mean gradient.
      noise_multiplier: the noise of the sum of clipped gradients over the clip norm.
      num_microbatches: m. None, or `batch_size`, clips every example; fewer
        microbatches are clipped as wholes, and each of our batches is one microbatch,
        of ``batch_size / m`` examples.
      batch_size: the number of examples of a step.

    Raises:
      ValueError: if `num_microbatches` does not divide `batch_size`.

    >>> optimizer_arguments(1.0, 1.1, 2, batch_size=64)
    {'clip': 1.0, 'noise_multiplier': 1.1, 'unit': 'batch', 'accumulation_steps': 2}
    """
    arguments: dict[str, Any] = {"clip": l2_norm_clip}
    arguments["noise_multiplier"] = noise_multiplier
    m = batch_size if num_microbatches is None else num_microbatches
    if m < 1 or batch_size % m:
        raise ValueError(
            f"num_microbatches={m} must divide batch_size={batch_size}. Write "
            "num_microbatches=None to clip every example."
        )
    if m == batch_size:
        return arguments | {"expected_batch_size": batch_size}
    arguments["unit"] = "batch"
    return arguments if m == 1 else arguments | {"accumulation_steps": m}
