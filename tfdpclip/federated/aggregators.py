"""Aggregation factories for user-level differential privacy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip._notes import NOTES
from tfdpclip.clipping import ClipRule, QuantileClip, as_rule
from tfdpclip.federated import _processes, _tff, _wrappers, distributed
from tfdpclip.federated import secure as secure_lib
from tfdpclip.federated._records import Layout, RecordClip, Weighting
from tfdpclip.federated.costs import RoundCosts
from tfdpclip.federated.secure import SecureSettings
from tfdpclip.mechanism import Mechanism, Unclipped
from tfdpclip.noise.runs import CorrelatedNoise, as_run


@dataclasses.dataclass(frozen=True)
class InnerSum:
    """Declares that an aggregation of clipped records is a sum, up to a factor.

    `clipped_mean` accepts sums and unweighted means directly. For all further factories
    the library cannot know how far one client moves the result: a lossy compression,
    for example, can send a record that is longer than its input.

    Args:
      factory: an unweighted aggregation factory whose result is the sum of the clients'
        records.
      inflation: the largest norm that one client's contribution to the result can have,
        in units of the clip norm of its record; the noise grows by it. 1 for a
        transformation that keeps norms, such as a rotation.

    Raises:
      ValueError: if an argument is out of range.
    """

    factory: Any
    inflation: float = 1.0

    def __post_init__(self):
        wanted = "a tff.aggregators.UnweightedAggregationFactory"
        factories = _tff.UnweightedAggregationFactory
        _arguments.instance("factory", self.factory, factories, wanted)
        _arguments.set_field(self, "inflation", _arguments.positive)


class ClippedMeanFactory(RoundCosts):
    """The mean of clients' updates, clipped and noised: user-level privacy.

        aggregator = dpc.federated.clipped_mean(1.0, clients_per_round=100)
        process = tff.learning.algorithms.build_unweighted_fed_avg(
            model_fn, ..., model_aggregator=aggregator)

    Andrew et al. (2021), Algorithm 1: every client clips its update with the current
    clip norm C and sends it with one bit, whether it was within C. The server adds
    N(0, (z_g C)^2) to the sum of the updates and N(0, sigma_b^2) to the sum of the
    bits, divides both by `clients_per_round`, and moves C. z_g is the result of
    `dpc.accounting.split_noise_multiplier`.

    With `weight_cap`, for builders that give every client a weight, its number of
    examples:

        aggregator = dpc.federated.clipped_mean(
            1.0, clients_per_round=100, weight_cap=50)
        process = tff.learning.algorithms.build_weighted_fed_avg(
            model_fn, ..., model_aggregator=aggregator)

    McMahan et al. (2018), the estimator with a fixed denominator: a client's clipped
    update counts min(weight / weight_cap, 1) times, and the sum is divided by the
    expected sum of these shares, a public number.

    *Formal guarantees*, for adding or removing one client with arbitrary updates:

    * The clipped updates change their sum by at most the rule's sensitivity, and the
      sums of bits by at most 1/2 each. An update with a NaN or an infinity contributes
      zeros to both, and so does a weight that is not finite; a weight below 0 counts as
      0, and a weight above `weight_cap` as `weight_cap`. Weights are summed nowhere.
    * Everything that leaves the aggregator (the result, the next clip norm in the
      state, the measurements) is a function of the noised sums and of public settings.
      One round is a Gaussian mechanism of noise multiplier `noise_multiplier`.
    * Noise comes from fresh entropy of the operating system in every execution, and is
      in no state: a round that is run again, or resumed from a checkpoint, has new
      noise. (A round that is run twice has also released twice: keep a
      `dpc.accounting.RoundBudget`.)
    * `secure`: the server sees only secure sums of the clients' messages, of updates in
      whole steps and of bits. The rounded update is still within the clip norm. The
      server that unmasks the sums is trusted to add the noise.
    * `noise="distributed"`: the secure sum itself is private; see
      `dpc.federated.distributed`.
    * `noise=CorrelatedNoise(...)`: the noise of round t is row t of a matrix, and all
      rounds of a matrix are one Gaussian mechanism of `noise_multiplier`, if clients
      take part as its scheme says, and every round continues from the state of the
      round before. After its steps a new matrix begins. Its memory is in the server's
      state (not at the clients), and is as secret as the data.
      `dpc.federated.split_noise` takes the memory out, for checkpoints. A round that
      is run twice has fresh draws both times, and costs a second matrix:
      `dpc.accounting.RoundBudget` checks the states.
    * `inner`: the guarantee relies on `inner` being a sum in which one client's part
      has at most the norm of its record, times `InnerSum.inflation`. The measurements
      of `inner` are dropped. Its state may hold data that are not private.

    Not covered: floating-point effects on the lowest bits of noise (Mironov 2012), and
    training metrics, which learning processes aggregate without noise.

    Args:
      noise_multiplier: z, as given to the accountant. 0 runs the same code without
        noise, and is not private.
      clients_per_round: the expected number of clients in a round: the divisor (of sums
        without weights, and of counts), for any actual number of clients.
      clip: a clip rule or a clip norm. None for no clipping, as a baseline, with
        `noise_multiplier=0`.
      secure: True or `SecureSettings` to sum by secure aggregation.
      noise: "central", "distributed", or a `dpc.CorrelatedNoise` (or its `to_dict`),
        which is central.
      inner: the summation of clipped records: a `tff.aggregators.SumFactory` or
        `UnweightedMeanFactory`, or an `InnerSum` of any factory.
      minimum_clients: with distributed noise, the number of clients whose shares
        suffice.
      variable_names: names of the tensors of an update, in order, for rules with
        groups, such as ``[v.name for v in model.trainable_variables]``. By default
        their places in the structure.
      seed: makes the noise reproducible, for experiments only. Not private.
      weight_cap: makes a weighted factory: the largest weight that counts in full.
        Public, so it must not come from clients' data.
      weight_per_round: the expected sum of weights in a round, each up to `weight_cap`:
        the divisor, also public. By default ``weight_cap * clients_per_round``, which
        no round exceeds on average; a smaller value only scales results up, with their
        noise.

    The arguments are attributes, which do not change. Every round measures:

    * `round`, counted from 1;
    * `clip_norm`, of this round, and `next_clip_norm`;
    * `unclipped_fraction`, noised: the mean of the indicators plus 1/2, which for
      `QuantileClip` is that fraction (NaN for a rule without counts);
    * `sum_noise_stddev` and `count_noise_stddev`, of the noise on the sums (of updates
      times their shares of `weight_cap`); with distributed noise, of the shares of
      `minimum_clients`; with correlated noise, of the noise drawn in that round, for
      a matrix whose inverse has ones on its diagonal;
    * `noise_multiplier` and `private`.

    Rules with groups give one number per group.

    Raises:
      ValueError: if an argument is out of range, or a combination has no guarantee.

    >>> aggregator = clipped_mean(1.0, clients_per_round=100)
    >>> aggregator
    <clipped_mean(noise_multiplier=1, clients_per_round=100, clip=QuantileClip(),
     secure=False, noise='central')>
    >>> aggregator.event().event.noise_multiplier
    1.0
    >>> clipped_mean(1.0, clients_per_round=100, weight_cap=50)
    <clipped_mean(noise_multiplier=1, clients_per_round=100, clip=QuantileClip(),
     secure=False, noise='central', weight_cap=50, weight_per_round=5000)>
    """

    def __new__(cls, *arguments: Any, **options: Any):
        if cls is ClippedMeanFactory:
            weighted = options.get("weight_cap") is not None
            cls = ClippedMeanWithWeightCap if weighted else ClippedMeanWithoutWeightCap
        return super().__new__(cls)

    def __init__(
        self,
        noise_multiplier: float,
        clients_per_round: float,
        clip: ClipRule | float | None = QuantileClip(),  # noqa: B008 (frozen)
        *,
        secure: bool | SecureSettings = False,
        noise: str | CorrelatedNoise = "central",
        inner: Any = None,
        minimum_clients: int | None = None,
        variable_names: Sequence[str] | None = None,
        seed: int | None = None,
        weight_cap: float | None = None,
        weight_per_round: float | None = None,
    ):
        self.noise_multiplier = _arguments.non_negative(
            "noise_multiplier", noise_multiplier
        )
        self.clients_per_round = _arguments.positive(
            "clients_per_round", clients_per_round
        )
        self.weight_cap = weight_cap
        self.weight_per_round = weight_per_round
        #: The divisor of the sum of updates, each times its share of the cap.
        self.divisor = self.clients_per_round
        if weight_cap is not None or weight_per_round is not None:
            self._take_weights(weight_cap, weight_per_round)
        self.clip = Unclipped() if clip is None else as_rule(clip)
        self.secure = secure_lib.as_settings(secure)
        #: Correlated noise; None for independent noise.
        self.correlated = None if isinstance(noise, str) else _correlated(noise)
        if self.correlated is None:
            _arguments.choice("noise", noise, ("central", "distributed"))
        self.noise = self.correlated or noise
        self.seed = None if seed is None else _arguments.integer("seed", seed)
        if variable_names is not None:
            variable_names = tuple(
                _arguments.text("variable_names", name)
                for name in _arguments.items("variable_names", variable_names)
            )
        self.variable_names = variable_names
        self.minimum_clients = self._check_minimum(minimum_clients)
        self.inner = self._check_inner(inner)
        self._check_combination(clip is None)
        self._settled = True

    def __setattr__(self, name: str, value: Any) -> None:
        # A budget that was made before would count the earlier settings.
        if getattr(self, "_settled", False):
            raise AttributeError(
                f"{name} of an aggregator does not change: a budget and a process may "
                f"have it already. Make a new one: clipped_mean(..., {name}=...)."
            )
        super().__setattr__(name, value)

    def _take_weights(self, cap: Any, expected: Any) -> None:
        if cap is None:
            raise ValueError(
                "weight_per_round needs weight_cap=..., the largest weight of a client "
                "that counts in full; without a cap, all clients count alike."
            )
        self.weight_cap = _arguments.positive("weight_cap", cap)
        most = self.weight_cap * self.clients_per_round
        self.weight_per_round = most
        if expected is not None:
            self.weight_per_round = _arguments.positive("weight_per_round", expected)
        if self.weight_per_round > most:
            raise ValueError(
                f"weight_per_round must be at most weight_cap * clients_per_round = "
                f"{most:g}, the sum if every client reaches the cap; got "
                f"{self.weight_per_round:g}."
            )
        self.divisor = _arguments.positive(
            "weight_per_round / weight_cap", self.weight_per_round / self.weight_cap
        )

    def _check_minimum(self, minimum_clients):
        if self.noise != "distributed":
            if minimum_clients is not None:
                raise ValueError(
                    "minimum_clients is for noise='distributed'. Central noise does "
                    "not depend on how many clients take part."
                )
            return None
        if minimum_clients is None:
            raise ValueError(
                "minimum_clients must be given with noise='distributed': each client's "
                "share of the noise is such that this many suffice, and a round with "
                "fewer fails. For example minimum_clients="
                f"{max(1, int(0.8 * self.clients_per_round))}."
            )
        minimum = _arguments.integer("minimum_clients", minimum_clients, minimum=1)
        if minimum > self.clients_per_round:
            raise ValueError(
                f"minimum_clients must be at most clients_per_round "
                f"({self.clients_per_round:g}), got {minimum}."
            )
        return minimum

    def _check_inner(self, inner):
        if inner is None:
            return None
        if self.secure is not None or self.noise == "distributed":
            raise ValueError(
                "inner cannot be combined with secure or with noise='distributed', "
                "since both replace the summation."
            )
        if _tff.is_plain_sum(inner) or _tff.is_plain_mean(inner):
            return InnerSum(inner)
        if isinstance(inner, InnerSum):
            return inner
        raise ValueError(
            f"inner must be a tff.aggregators.SumFactory or UnweightedMeanFactory, or "
            f"state how far one client can move its result: inner=dpc.federated."
            f"InnerSum(factory, inflation=1.0). Got {inner!r}."
            + see("updates-without-a-bound")
        )

    def _check_combination(self, unclipped):
        if unclipped and self.noise_multiplier:
            raise ValueError(
                "clip must not be None with noise: one client's update would have no "
                "bound. Use clip=dpc.QuantileClip(), or noise_multiplier=0 for a "
                "baseline." + see("updates-without-a-bound")
            )
        if unclipped and (self.secure is not None or self.noise == "distributed"):
            raise ValueError(
                "clip must not be None with secure=True: the clip norm bounds the "
                "numbers in the secure sum."
            )
        if self.noise == "distributed" and self.seed is not None:
            raise ValueError(
                "seed must be None with noise='distributed': clients would all draw "
                "the same share."
            )
        if self.noise == "distributed" and self.secure is None:
            raise ValueError(
                "secure must be True with noise='distributed': the shares of noise "
                "protect the secure sum of all clients, not one client's message."
            )

    def __repr__(self) -> str:
        parts = [
            f"noise_multiplier={self.noise_multiplier:g}",
            f"clients_per_round={self.clients_per_round:g}",
            "clip=None" if isinstance(self.clip, Unclipped) else f"clip={self.clip}",
            f"secure={self.secure or False}",
            f"noise={self._noise_in_words()}",
        ]
        if self.minimum_clients is not None:
            parts.append(f"minimum_clients={self.minimum_clients}")
        if self.seed is not None:
            parts.append(f"seed={self.seed}")
        if self.weight_cap is not None:
            parts.append(f"weight_cap={self.weight_cap:g}")
            parts.append(f"weight_per_round={self.weight_per_round:g}")
        label = "" if self.private else ", not private"
        return f"<clipped_mean({', '.join(parts)}){label}>"

    def _noise_in_words(self) -> str:
        if self.correlated is None:
            return repr(self.noise)
        return f"<{self.correlated.matrix.describe()}>"

    def create(self, value_type: Any, weight_type: Any = None) -> Any:
        """Returns the aggregation process for values of one type.

        Args:
          value_type: the type of one client's value: a structure of floating-point
            tensors of static shapes.
          weight_type: with `weight_cap`, the type of one client's weight: a number.

        Raises:
          ValueError: if a type or the clip rule's groups do not fit, or the process is
            made for a wrapping factory that would void the guarantee.
          RuntimeError: if the current context cannot run secure sums.
        """
        _wrappers.refuse_wrappers(self)
        weighting = Weighting.of(self.weight_cap, weight_type)
        clip = RecordClip(self.clip, Layout(value_type, self.variable_names))
        if self.secure is not None and self.secure.check_context:
            secure_lib.check_context()
        NOTES.round_noises[self.round_noise] = None
        return _processes.ProcessBuilder(
            self._summation(clip), self.seed, self.correlated, weighting
        ).process()

    def _summation(self, clip: RecordClip) -> _processes.Summation:
        inflation = 1.0 if self.inner is None else self.inner.inflation
        mechanism = Mechanism(
            clip.rule,
            self.noise_multiplier,
            self.clients_per_round,
            inflation=inflation,
            divisor=self.divisor,
        )
        if self.noise == "distributed":
            return distributed.DistributedSum(
                mechanism, clip, self.secure.bits, self.minimum_clients
            )
        if self.secure is not None:
            return secure_lib.SecureSum(mechanism, clip, self.secure)
        if self.inner is not None:
            return _processes.InnerSummation(mechanism, clip, self.inner.factory)
        return _processes.PlainSum(mechanism, clip)


class ClippedMeanWithoutWeightCap(
    ClippedMeanFactory, _tff.UnweightedAggregationFactory
):
    """A `ClippedMeanFactory` in which all clients count alike."""


class ClippedMeanWithWeightCap(ClippedMeanFactory, _tff.WeightedAggregationFactory):
    """A `ClippedMeanFactory` with a public cap on each client's weight."""


def _correlated(noise: Any) -> CorrelatedNoise:
    if noise is None or (not isinstance(noise, (CorrelatedNoise, Mapping))):
        raise ValueError(
            'noise must be "central", "distributed" or a dpc.CorrelatedNoise(matrix, '
            f"rounds, scheme), got {_arguments.shown(noise)}."
        )
    return as_run(noise, 1.0)


#: The constructor, in the form that users call.
clipped_mean = ClippedMeanFactory
